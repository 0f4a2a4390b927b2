"""The tables of README.md for `experiments.relu_regression`, from its summaries."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments._relu_report import by_cell

SHUFFLED = "dp-glmtron-shuffled"  # under another adjacency, so not compared
PAIRS = (("dp-gd-glmtron", "dp-gd-true"), ("dp-sgd-surrogate", "dp-sgd"))
PAIRS += (("dp-pgd-surrogate", "dp-pgd-true"),)
Rows = list[dict[str, Any]]


def relu_tables(summary: dict[str, Any]) -> str:
    """The tables of one run, with the command that made it."""
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


def _epsilons(rows: Rows) -> list[float]:
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
        int(key.split("_n")[-1]) for key in summary["stall"] if key.startswith("private_true_n")
    ]
    for n in sizes:
        for gradient in ("true", "surrogate", "switch"):
            what = f"{gradient} gradient, N = {n:,}"
            names[f"private_{gradient}_n{n}"] = f"private risk, {what}: mean"
            names[f"private_{gradient}_median_n{n}"] = f"private risk, {what}: median"
            stuck = f"share of runs above ten times the surrogate's median, {what}"
            names[f"share_of_{gradient}_runs_stuck_n{n}"] = stuck
        names[f"true_over_surrogate_n{n}"] = f"true over surrogate: ratio of means, N = {n:,}"
        names[f"true_over_surrogate_median_n{n}"] = f"ratio of medians, N = {n:,}"
    rows = [
        [text, f"{summary['stall'][key]:.2g}"]
        for key, text in names.items()
        if key in summary["stall"]
    ]
    return _rows(["symmetric Bernoulli data, eigenvalues 1/i, no label noise", ""], rows)


def _risk(summary) -> list[str]:
    rows, epsilons = summary["risk"], _epsilons(summary["risk"])
    cells, lines = by_cell(rows), []
    sizes = sorted({n for _, _, n in cells})
    designs = list(dict.fromkeys(design for design, _, _ in cells))
    for d in sorted({d for _, d, _ in cells}):
        where = f"excess risk: {designs[0]}, d = {d}, N = {sizes[-1]:,}"
        values = [
            [method] + [_value(row.get(e, row.get(None))) for e in epsilons]
            for method, row in cells[designs[0], d, sizes[-1]].items()
        ]
        lines += [*_rows(_head(where, epsilons), values), ""]
    if len(designs) == 1:
        return lines[:-1]
    for n in sizes:
        lines += [*_compared(n, [r for r in rows if r["n"] == n], epsilons), ""]
    best = []
    for (design, d, n), methods in cells.items():
        private = [_private(methods, epsilon) for epsilon in epsilons]
        names = [min(own, key=lambda m, own=own: own[m]["mean"]) for own in private]
        line = [f"{m} {own[m]['mean']:.1e}" for m, own in zip(names, private, strict=True)]
        best.append([f"{design}, d = {d}, N = {n:,}", *line])
    lines += [*_rows(_head("lowest mean excess risk", epsilons), best), ""]
    return lines + _pairs(rows, epsilons)


def _private(methods: dict[str, Any], epsilon: float) -> dict[str, dict[str, Any]]:
    """The private methods that ran at one epsilon of one cell."""
    found = {m: row[epsilon] for m, row in methods.items() if epsilon in row and m != SHUFFLED}
    return {m: row for m, row in found.items() if row["mean"] is not None}


def _all_private(rows: Rows) -> Iterator[tuple[float, dict[str, dict[str, Any]]]]:
    """Every epsilon of every cell."""
    for methods in by_cell(rows).values():
        for epsilon in _epsilons(rows):
            yield epsilon, _private(methods, epsilon)


def _clearly_below(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether the log risk is lower by two standard errors; data sets are the same."""
    change = np.log(one["risks"]) - np.log(two["risks"])
    return change.mean() < -2 * change.std(ddof=1) / len(change) ** 0.5


def _compared(n: int, rows: Rows, epsilons: list[float]) -> list[str]:
    """Each method against the best one of its cell, and against dp-sgd."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    clearly: dict[str, list[int]] = {}
    for epsilon, private in _all_private(rows):
        least = min(row["mean"] for row in private.values())
        for method, row in private.items():
            ratios.setdefault(method, []).append((epsilon, row["mean"] / least))
            below, above = clearly.setdefault(method, [0, 0])
            reference = private["dp-sgd"]
            clearly[method] = [
                below + _clearly_below(row, reference),
                above + _clearly_below(reference, row),
            ]
    mean = lambda own: np.exp(np.mean(np.log(own))) if own else np.nan  # noqa: E731
    lines = []
    for method in sorted(ratios, key=lambda m: mean([ratio for _, ratio in ratios[m]])):
        own = [[r for e, r in ratios[method] if e == epsilon] for epsilon in epsilons]
        everywhere = [ratio for _, ratio in ratios[method]]
        cells = [f"{mean(part):.2f}" if part else "refused" for part in (*own, everywhere)]
        below, above = clearly[method]
        cells += [f"{max(everywhere):.0f}", f"{below} / {above} of {len(everywhere)}"]
        lines.append([method, *cells])
    first = f"N = {n:,}: risk over that of the best private method, geometric mean"
    head = [*_head(first, epsilons), "all", "worst", "clearly below / above dp-sgd"]
    return _rows(head, lines)


def _pairs(rows: Rows, epsilons: list[float]) -> list[str]:
    """How often GLMtron's gradient is ahead of the true one, all else the same."""
    lines = []
    for one, two in PAIRS:
        won: dict[float, list[bool]] = {epsilon: [] for epsilon in epsilons}
        for epsilon, private in _all_private(rows):
            if {one, two} <= private.keys():
                won[epsilon].append(private[one]["mean"] < private[two]["mean"])
        if any(won.values()):
            lines.append([f"{one} below {two}", *(f"{sum(w)} of {len(w)}" for w in won.values())])
    return _rows(_head("GLMtron's gradient against the true one", epsilons), lines)


def _slopes(summary) -> list[str]:
    """Fits to three sizes or more; a line through two is none."""
    rows = [row for row in summary["slopes"] if len(row["sizes"]) > 2]
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for regime in ("privacy", "statistics"):
            found = [r for r in rows if (r["method"], r["regime"]) == (method, regime)]
            found = sorted(found, key=lambda r: (r["d"], r["epsilon"]))
            line.append("; ".join(map(_slope, found)) or "-")
        lines.append(line)
    head = ["slope of log risk against log N ± standard error (d, epsilon, number of sizes)"]
    return _rows([*head, "privacy", "statistics"], lines)


def _slope(row: dict[str, Any]) -> str:
    error = f" ± {row['standard_error']:.2f}" if "standard_error" in row else ""
    return f"{row['slope']:.2f}{error} ({row['d']}, {row['epsilon']:g}, {len(row['sizes'])})"


def _paper(summary) -> list[str]:
    rows, epsilons = summary["paper"], _epsilons(summary["paper"])
    by_method = {
        m: [r for r in rows if r["method"] == m] for m in dict.fromkeys(r["method"] for r in rows)
    }
    lines = [[m, *(_value(row) for row in own)] for m, own in by_method.items()]
    for method, own in by_method.items():
        if "mbglmtron" in method:
            said = (row["private_threshold"] == "accepted" for row in own)
            found = ["accepted" if accepted else "refused" for accepted in said]
            lines.append([f"{method}: a private threshold of 32 rows instead", *found])
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
