"""Print the result tables of README.md from the committed summaries in experiments/results.

python -m experiments.tables
"""

import pathlib
from typing import Any

import numpy as np

from experiments import _speed_tables
from experiments._hypernet_tables import markdown
from experiments._relu_report import by_cell
from experiments._run import read_json

RESULTS = pathlib.Path(__file__).parent / "results"


def table(summary: dict[str, Any]) -> str:
    """One run's table in Markdown, with the command that made it."""
    if "methods" not in summary:
        return _speed_tables.markdown(summary)
    lines = [
        f"`{summary['provenance']['command']}`",
        "",
        "| method | test accuracy | epsilon spent | noise multiplier | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method, row in summary["methods"].items():
        accuracy = f"{100 * row['test_accuracy_mean']:.1f}"
        if len(row["runs"]) > 1:
            accuracy += f" ± {100 * row['test_accuracy_std']:.1f}"
        epsilon, noise = (
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("epsilon_spent", "noise_multiplier")
        )
        lines.append(f"| {method} | {accuracy} | {epsilon} | {noise} | {row['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def relu_tables(summary: dict[str, Any]) -> str:
    """The tables of one run of `experiments.relu_regression`, with the command that made it."""
    lines = [f"`{summary['provenance']['command']}`"]
    for part, write in (
        ("stall", _stall),
        ("risk", _risk),
        ("slopes", _slopes),
        ("paper", _paper),
        ("tables", _real),
    ):
        if summary.get(part):
            lines += ["", *write(summary)]
    return "\n".join(lines) + "\n"


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _value(row: dict[str, Any] | None, spread: str = "standard_error") -> str:
    if row is None or row["mean"] is None:
        return "-" if row is None else "refused"
    return f"{row['mean']:.1e} ± {row[spread]:.0e}"


def _epsilons(rows: list[dict[str, Any]]) -> list[float]:
    return sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})


def _head(first: str, epsilons: list[float]) -> list[str]:
    return [first] + [f"epsilon {epsilon:g}" for epsilon in epsilons]


def _stall(summary) -> list[str]:
    names = {
        "sgd_from_zero_largest_weight": "largest weight that noiseless SGD from w = 0 ever has",
        "glmtron_from_zero_share_of_risk_left": "share of the risk that GLMtron from w = 0 leaves",
        "dp_sgd_first_step_that_moves": "DP-SGD from w = 0: first step that moves",
        "dp_sgd_steps_to_half_the_risk": "DP-SGD from w = 0: steps to half the risk",
    }
    sizes = [
        int(key.split("_n")[1]) for key in summary["stall"] if key.startswith("private_true_n")
    ]
    for n in sizes:
        for gradient in ("true", "surrogate", "switch"):
            names[f"private_{gradient}_n{n}"] = f"private risk, {gradient} gradient, N = {n:,}"
        names[f"true_over_surrogate_n{n}"] = f"true over surrogate, N = {n:,}"
    rows = [[text, f"{summary['stall'][key]:.2g}"] for key, text in names.items()]
    return _rows(["symmetric Bernoulli data, eigenvalues 1/i, no label noise", ""], rows)


def _risk(summary) -> list[str]:
    cells, epsilons = by_cell(summary["risk"]), _epsilons(summary["risk"])
    design, d = next(iter(cells))[:2]
    n = max(cell[2] for cell in cells if cell[:2] == (design, d))
    rows = [
        [method] + [_value(row.get(e, row.get(None))) for e in epsilons]
        for method, row in cells[design, d, n].items()
    ]
    lines = _rows(_head(f"excess risk: {design}, d = {d}, N = {n:,}", epsilons), rows)
    best, means = [], []  # of the private methods; the shuffled one has another adjacency
    for (design, d, n), methods in cells.items():
        own = {m: row for m, row in methods.items() if m != "dp-glmtron-shuffled"}
        each = [
            {m: r[e]["mean"] for m, r in own.items() if r.get(e, {}).get("mean")} for e in epsilons
        ]
        means += list(zip(epsilons, each, strict=True))
        names = [min(private, key=private.__getitem__) for private in each]
        line = [f"{name} {private[name]:.1e}" for name, private in zip(names, each, strict=True)]
        best.append([f"{design}, d = {d}, N = {n:,}", *line])
    lines += ["", *_rows(_head("lowest mean excess risk", epsilons), best)]
    return [*lines, "", *_compared(means), "", *_pairs(means, epsilons)]


Means = list[tuple[float, dict[str, float]]]


def _compared(means: Means) -> list[str]:
    """Each method against the best one of its cell, and against dp-sgd."""
    ratios: dict[str, list[float]] = {}
    below: dict[str, int] = {}
    for _, private in means:
        for method, mean in private.items():
            ratios.setdefault(method, []).append(mean / min(private.values()))
            below[method] = below.get(method, 0) + (mean < private["dp-sgd"])
    rows = [
        [
            method,
            f"{np.exp(np.mean(np.log(own))):.2f}",
            f"{max(own):.1f}",
            f"{own.count(1.0)} of {len(own)}",
            f"{below[method]} of {len(own)}",
        ]
        for method, own in sorted(ratios.items(), key=lambda item: np.mean(np.log(item[1])))
    ]
    head = ["excess risk over that of the best method", "geometric mean", "worst cell", "best in"]
    return _rows([*head, "below dp-sgd in"], rows)


PAIRS = (("dp-gd-glmtron", "dp-gd-true"), ("dp-sgd-surrogate", "dp-sgd"))
PAIRS += (("dp-pgd-surrogate", "dp-pgd-true"),)


def _pairs(means: Means, epsilons: list[float]) -> list[str]:
    """How often GLMtron's gradient is ahead of the true one, all else the same."""
    rows = []
    for one, two in PAIRS:
        won = [
            [p[one] < p[two] for e, p in means if e == epsilon and {one, two} <= p.keys()]
            for epsilon in epsilons
        ]
        if any(won):
            rows.append([f"{one} below {two}", *(f"{sum(w)} of {len(w)}" for w in won)])
    return _rows(_head("GLMtron's gradient against the true one", epsilons), rows)


def _slopes(summary) -> list[str]:
    rows = summary["slopes"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = []
    for method in methods:
        line = [method]
        for regime in ("privacy", "statistics"):
            found = sorted(
                r["slope"] for r in rows if (r["method"], r["regime"]) == (method, regime)
            )
            middle = f"{np.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else "-"
            line.append(middle)
        lines.append(line)
    head = ["slope of log risk against log N: median (range) over cells", "privacy", "statistics"]
    return _rows(head, lines)


def _paper(summary) -> list[str]:
    rows, epsilons = summary["paper"], _epsilons(summary["paper"])
    by_method = {
        m: [r for r in rows if r["method"] == m] for m in dict.fromkeys(r["method"] for r in rows)
    }
    lines = [[m, *(_value(row) for row in own)] for m, own in by_method.items()]
    lines.append(["w = 0", *(f"{rows[0]['at_zero']:.1e}" for _ in epsilons)])
    return _rows(_head("published settings, Gaussian, d = 10", epsilons), lines)


def _real(summary) -> list[str]:
    rows, epsilons = summary["tables"], _epsilons(summary["tables"])
    lines = []
    for name in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == name]
        known = next(row for row in own if row["mean"] is not None)
        lines.append([f"{name}: public mean", *(f"{known['public_mean']:.4f}" for _ in epsilons)])
        for method in dict.fromkeys(row["method"] for row in own):
            found = {row["epsilon"]: row for row in own if row["method"] == method}
            chosen = [found.get(e, found.get(None)) for e in epsilons]
            values = [
                f"{r['mean']:.4f} ± {r['standard_deviation']:.4f}" if r and r["mean"] else "refused"
                for r in chosen
            ]
            lines.append([f"{name}: {method}", *values])
    return _rows(_head("test error (root mean square)", epsilons), lines)


def tables() -> dict[str, str]:
    """The table of every committed run, by the name of its folder."""
    summaries = {
        path.parent.name: read_json(path) for path in sorted(RESULTS.glob("*/summary.json"))
    }
    write = {"relu_regression": relu_tables, "hypernet_regression": markdown}
    return {
        name: write.get(summary.get("experiment", ""), table)(summary)
        for name, summary in summaries.items()
    }


if __name__ == "__main__":
    for name, text in tables().items():
        print(f"## {name}\n\n{text}")
