"""The report and the picture of `experiments.relu_regression`, from its summary alone."""

import pathlib
from typing import Any

import numpy as np

from experiments import _run
from experiments._relu_data import NOISE

MANY = 20_000  # records, above which half as many data sets are enough to tune on


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"ReLU regression, delta {summary['delta']:g}, zero-out adjacency (replace-one where"]
    lines += ["shuffled). Each number is the cost of ONE run; the study as a whole is not private,"]
    lines += ["and its data are synthetic or public."]
    for part, write in (
        ("stall", _stall),
        ("risk", _risk),
        ("slopes", _slopes),
        ("paper", _paper),
        ("tables", _tables),
    ):
        if part in summary:
            lines += ["", f"== {part} ==", *write(summary)]
    return "\n".join(lines) + "\n"


def _stall(summary) -> list[str]:
    return [f"{k:<42} {v:.4g}" for k, v in summary["stall"].items() if isinstance(v, float)]


def _number(row: dict[str, Any]) -> str:
    if row["mean"] is None:
        return "refused"
    return f"{row['mean']:.1e} ({row['standard_error']:.0e})"


def by_cell(rows: list[dict[str, Any]]) -> dict[Any, dict[str, dict[float | None, Any]]]:
    """(design, d, n) -> method -> epsilon -> row."""
    cells: dict[Any, dict[str, dict[float | None, Any]]] = {}
    for row in rows:
        cell = cells.setdefault((row["design"], row["d"], row["n"]), {})
        cell.setdefault(row["method"], {})[row["epsilon"]] = row
    return cells


def _risk(summary) -> list[str]:
    settings = _settings(summary)
    lines = [
        f"Excess risk: mean (standard error) over {summary['seeds']} data sets. Tuned for every",
        f"number: {settings}, on {summary['tuning_draws']} other data sets",
        f"(half as many above {MANY:,} records). Methods share data and noise. Seconds of one",
        "processor:",
        ", ".join(f"{m} {s:.0f}" for m, s in summary["seconds_of_processor"].items()),
    ]
    for (design, d, n), methods in by_cell(summary["risk"]).items():
        epsilons = sorted({e for row in methods.values() for e in row if e is not None})
        lines += ["", f"{design}, d = {d}, N = {n:,}"]
        lines += [f"{'':<22}" + "".join(f"{f'eps {e:g}':<20}" for e in epsilons)]
        for method, row in methods.items():
            cells = [row[None]] * len(epsilons) if None in row else [row[e] for e in epsilons]
            lines.append(f"{method:<22}" + "".join(f"{_number(c):<20}" for c in cells))
    reasons = {row["refused"] for row in summary["risk"] if row.get("refused")}
    return lines + (["", "Refused: " + min(reasons)] if reasons else [])


def _settings(summary) -> str:
    """How many settings each method was tuned over."""
    counts = summary["settings"]
    most = max(counts.values())
    fewer = ", ".join(f"{count} of {m}" for m, count in counts.items() if count != most)
    return f"{most} settings a method" + (f" ({fewer})" if fewer else "")


def _slopes(summary) -> list[str]:
    return [
        f"{s['design']}, d = {s['d']}, {s['method']}, epsilon {s['epsilon']:g}: where "
        f"{s['regime']} dominate{'s' if s['regime'] == 'privacy' else ''}, risk = "
        f"{np.exp(s['intercept']):.2g} N^{s['slope']:.2f} (standard error {s['standard_error']:.2f}"
        f"; {_sizes(s['sizes'])})"
        for s in summary["slopes"]
    ]


def _sizes(sizes: list[int]) -> str:
    what = f"fit to {len(sizes)} sizes" if len(sizes) > 2 else "through 2 sizes, no fit"
    return f"{what}: N = {', '.join(f'{n:,}' for n in sizes)}"


def _paper(summary) -> list[str]:
    lines = [f"risk of w = 0: {summary['paper'][0]['at_zero']:.1e}"]
    for row in summary["paper"]:
        name = f"{row['method']:<37} epsilon {row['epsilon']:<5g}"
        lines.append(f"{name} {_number(row):<20} noise multiplier {row['noise_multiplier']:.3g}")
    for method in dict.fromkeys(row["method"] for row in summary["paper"]):
        own = [row for row in summary["paper"] if row["method"] == method]
        refused = [row for row in own if row["private_threshold"] != "accepted"]
        if "mbglmtron" in method and refused:
            at = ", ".join(f"{row['epsilon']:g}" for row in refused)
            lines.append(f"{method}: a private threshold of 32 rows is refused at epsilon {at}:")
            lines.append("  " + refused[0]["private_threshold"])
    return lines


def _tables(summary) -> list[str]:
    lines = []
    for name in dict.fromkeys(row["table"] for row in summary["tables"]):
        rows = [row for row in summary["tables"] if row["table"] == name]
        first = next(row for row in rows if row["mean"] is not None)
        lines += ["", rows[0]["source"], "test error (root mean square), in label units:"]
        lines += [f"  {'mean of the public labels':<26} {first['public_mean']:.4f}"]
        for row in rows:
            label = row["method"] + (f", eps {row['epsilon']:g}" if row["epsilon"] else "")
            value = "refused"
            if row["mean"] is not None:
                value = f"{row['mean']:.4f} +- {row['standard_deviation']:.4f}"
            lines.append(f"  {label:<26} {value}")
    return lines


def draw_pictures(folder: pathlib.Path):
    """Draw risk against N and epsilon, from the `summary.json` of a run folder: `risk-d10.png`."""
    cells = by_cell(_run.read_json(folder / "summary.json")["risk"])
    for d in dict.fromkeys(d for _, d, _ in cells):
        _draw({key: row for key, row in cells.items() if key[1] == d}, folder / f"risk-d{d}.png")


def _draw(cells: dict[Any, Any], path: pathlib.Path):
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((design, d) for design, d, _ in cells))
    methods = list(dict.fromkeys(m for own in cells.values() for m in own))
    epsilons = sorted(
        {e for own in cells.values() for row in own.values() for e in row if e is not None}
    )
    shown = [epsilons[0], epsilons[-1]] if len(epsilons) > 1 else epsilons
    columns = len(shown) + 1
    figure = Figure(figsize=(3.6 * columns, 2.7 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), columns, squeeze=False, sharey="row")
    for (design, d), line in zip(groups, grid, strict=True):
        sizes = sorted(n for g, e, n in cells if (g, e) == (design, d))
        for axes, epsilon in zip(line, [*shown, None], strict=True):
            for i, method in enumerate(methods):
                points = []
                for n in sizes if epsilon is not None else sizes[-1:]:
                    row = cells[design, d, n].get(method, {})
                    for e in [epsilon] if epsilon is not None else epsilons:
                        found = row.get(e, row.get(None))
                        if found and found["mean"] is not None:
                            at = n if epsilon is not None else e
                            points.append((at, found["mean"], found["standard_error"]))
                if points:
                    x, y, error = zip(*points, strict=True)
                    style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--"}
                    axes.errorbar(x, y, error, label=method, marker=".", linewidth=1, **style)
            if epsilon is not None:
                bound = [NOISE**2 * d**2 / (n * epsilon) ** 2 for n in sizes]
                axes.plot(sizes, bound, "k:", label="0.01 d^2 / (N epsilon)^2")
            else:
                bound = [NOISE**2 * d**2 / (sizes[-1] * e) ** 2 for e in epsilons]
                axes.plot(epsilons, bound, "k:")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylim(bottom=1e-7, top=1)
            axes.set_xlabel("N" if epsilon is not None else "epsilon")
            where = f"epsilon {epsilon:g}" if epsilon is not None else f"N = {sizes[-1]:,}"
            axes.set_title(f"{design}, d = {d}, {where}", fontsize="medium")
            axes.grid(alpha=0.3)
        line[0].set_ylabel("excess risk")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=80)
