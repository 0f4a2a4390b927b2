"""The report and the picture of `experiments.hypernet_regression`, from its summary alone."""

import pathlib
from typing import Any

import numpy as np

from experiments import _run
from experiments._hypernet_data import rate_slope, sgd_lower_bound

# Excess risk of the closed form and of w = 0 in an earlier study, which chose every setting on the
# measured data themselves, and had few: the risk of w = 0 has the same mean for every d and zeta.
REFERENCE = {
    (1.0, 0.0, 64): (0.221, 0.72),
    (1.0, 0.0, 256): (0.103, 0.47),
    (1.0, 0.0, 1024): (0.043, 0.33),
    (1.0, 0.25, 64): (0.129, 0.72),
    (1.0, 0.25, 256): (0.056, 0.47),
    (1.0, 0.25, 1024): (0.019, 0.33),
    (1.0, 0.5, 64): (0.076, 0.72),
    (1.0, 0.5, 256): (0.023, 0.47),
    (1.5, 0.5, 64): (0.023, 0.39),
    (1.5, 0.5, 256): (0.0061, 0.30),
}


def zeta_of(row: dict[str, Any]) -> float:
    """Zeta, from N = d^(1 + zeta)."""
    return round(float(np.log(row["n"]) / np.log(row["d"]) - 1), 2)


def group(rows: list[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Rows by the values of some columns, `zeta` being one."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(zeta_of(row) if name == "zeta" else row[name] for name in names)
        found.setdefault(key, []).append(row)
    return found


def value(row: dict[str, Any] | None) -> str:
    """Mean and standard error."""
    return "-" if row is None else f"{row['mean']:.3g} ± {row['standard_error']:.1g}"


def table(rows: list[dict[str, Any]], column: str) -> list[list[str]]:
    """A table of methods by the values of one column, with a head."""
    values = list(dict.fromkeys(row[column] for row in rows))
    head = ["method"] + [f"{column} {v:g}" for v in values]
    lines = [head]
    for (method,), own in group(rows, "method").items():
        found = {row[column]: row for row in own}
        lines.append([method, *(value(found.get(v)) for v in values)])
    return lines


def references(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The closed form and `learned` against an earlier study: excess risks, then relative ones."""
    methods = ("closed-form", "learned")
    head = ["gamma", "zeta", "d", *(f"{m}: risk" for m in methods), "reference"]
    lines = [[*head, *(f"{m}: over |w|²" for m in methods), "reference"]]
    for (gamma, zeta, d), own in group(rows, "gamma", "zeta", "d").items():
        found = {row["method"]: row for row in own}
        if (gamma, zeta, d) not in REFERENCE or "closed-form" not in found:
            continue
        risk, zero = REFERENCE[gamma, zeta, d]
        risks = [f"{np.mean(found[m]['errors']):.3g}" if m in found else "-" for m in methods]
        line = [f"{gamma:g}", f"{zeta:g}", f"{d}", *risks, f"{risk:.3g}"]
        lines.append([*line, *(value(found.get(m)) for m in methods), f"{risk / zero:.3g}"])
    return lines


def _text(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    tried = (row for part in ("dimension", "epsilon", "size") for row in summary.get(part, []))
    each = max((len(row.get("tuning", [])) for row in tried), default=0)
    lines = [
        f"Private linear regression, delta {summary['delta']:g}, zero-out adjacency. Excess risk",
        "over that of w = 0 (standard error), each for ONE run at the stated epsilon; the study is",
        f"not private as a whole, its data are synthetic. {summary['seeds']} data sets a number;",
        f"{each} settings a method, tuned on {summary['tuning_draws']} others; `learned` has one.",
    ]
    for (gamma, zeta), rows in group(summary.get("dimension", []), "gamma", "zeta").items():
        lines += ["", f"== dimension: gamma {gamma:g}, N = d^{1 + zeta:g}, epsilon 1 =="]
        lines += _text(table(rows, "d"))
    if summary.get("dimension"):
        lines += ["", "== against reference values =="]
        lines += _text(references(summary["dimension"]))
        lines += ["", "== slopes of log error in log d, d >= 64 =="]
        lines += _text(slope_table(summary["slopes"]))
    for part, column in (("epsilon", "epsilon"), ("size", "n")):
        if rows := summary.get(part):
            first = rows[0]
            where = f"gamma {first['gamma']:g}, d = {first['d']}, "
            where += f"N = {first['n']:,}" if part == "epsilon" else "epsilon 1"
            lines += ["", f"== {part}: {where} ==", *_text(table(rows, column))]
    if "coordinates" in summary:
        lines += ["", "== coordinates: how the best k grows with epsilon N =="]
        lines += _text(k_table(summary["coordinates"]["slopes"]))
    return "\n".join(lines) + "\n"


def slope_table(slopes: list[dict[str, Any]]) -> list[list[str]]:
    """Slopes in d."""
    lines = [["gamma", "zeta", "method", "slope", "paper's rate", "DP-SGD lower bound"]]
    for s in slopes:
        own = s["method"] in ("closed-form", "learned")
        line = [f"{s['gamma']:g}", f"{s['zeta']:g}", s["method"], f"{s['slope']:+.2f}"]
        line += [f"{s['paper']:+.2f}" if own else ""]
        bound = s["method"] in ("dp-sgd", "dp-gd")
        lines.append([*line, f"{s['sgd_lower_bound']:+.2f}" if bound else ""])
    return lines


def k_table(slopes: list[dict[str, Any]]) -> list[list[str]]:
    """Slopes of the best k."""
    head = ["gamma", "clip norm C", "slope", "of the rate for this C", "1/(gamma+1)", "cells"]
    lines = [head]
    for s in slopes:
        slope = "-"
        if s["slope"] is not None:
            slope = f"{s['slope']:.2f} ± {s['standard_error']:.2f}"
        line = [f"{s['gamma']:g}", s["rule"], slope, f"{s['predicted']:.2f}", f"{s['paper']:.2f}"]
        lines.append([*line, f"{s['cells']} of {s['of']}"])
    return lines


def draw_picture(folder: pathlib.Path):
    """Draw `regression.png` from the `summary.json` of a run folder."""
    from matplotlib.figure import Figure

    summary = _run.read_json(folder / "summary.json")
    panels: list[Any] = []
    for (gamma, zeta), rows in group(summary.get("dimension", []), "gamma", "zeta").items():
        title = f"gamma {gamma:g}, N = d^{1 + zeta:g}, epsilon 1"
        panels.append(lambda axes, rows=rows, title=title: _errors(axes, rows, "d", title))
    for part, column in (("epsilon", "epsilon"), ("size", "n")):
        if rows := summary.get(part):
            title = f"gamma {rows[0]['gamma']:g}, d = {rows[0]['d']}, "
            title += f"N = {rows[0]['n']:,}" if part == "epsilon" else "epsilon 1"
            panels.append(
                lambda axes, rows=rows, title=title, column=column: _errors(
                    axes, rows, column, title
                )
            )
    if "coordinates" in summary:
        panels += [
            lambda axes: _curves(axes, summary["coordinates"]["cells"]),
            lambda axes: _best_k(axes, summary["coordinates"]),
        ]
    columns = 4 if len(panels) > 6 else min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.1 * columns, 3.5 * lines), layout="constrained")
    grid = np.ravel(figure.subplots(lines, columns, squeeze=False))
    for axes, draw in zip(grid, panels, strict=False):
        draw(axes)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if handles := grid[0].get_legend_handles_labels()[0]:
        labels = grid[0].get_legend_handles_labels()[1]
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(folder / "regression.png", dpi=100)


def _errors(axes, rows, column, title):
    colours = {"learned": "C3", "closed-form": "C0", "bayes-mean": "C9", "dp-gd": "C1"}
    colours |= {"dp-sgd": "C8", "adassp": "C7"}
    for (method,), own in group(rows, "method").items():
        x, y, e = ([row[k] for row in own] for k in (column, "mean", "standard_error"))
        width = 2.2 if method == "learned" else 1.2
        axes.errorbar(x, y, e, color=colours[method], label=method, marker=".", linewidth=width)
    own = [row for row in rows if row["method"] == "closed-form"]
    if own:  # the paper's rate, through the closed form's last point but for epsilon: the middle
        at = own[len(own) // 2]
        base = at["epsilon"] * at["n"]
        rate = [at["mean"] * (r["epsilon"] * r["n"] / base) ** rate_slope(r["gamma"]) for r in own]
        axes.plot([r[column] for r in own], rate, "k:", label="paper's rate for DP-DeepSets")
        bound = [sgd_lower_bound(r["d"], r["n"], r["epsilon"]) for r in own]
        label = "paper's lower bound for DP-SGD (no constants)"
        axes.plot([r[column] for r in own], bound, "--", color="0.5", label=label)
    axes.axhline(1.0, color="0.8", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(row["mean"] for row in rows) / 2, top=2.5)
    ticks = sorted({row[column] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("N" if column == "n" else column)
    axes.set_ylabel("excess risk / |w|²")
    axes.set_title(title, fontsize="medium")


def _curves(axes, cells):
    cell = next(c for c in cells if c["gamma"] == min(c["gamma"] for c in cells))
    for i, epsilon in enumerate(cell["epsilons"]):
        for rule, style in (("k", "-"), ("3 sqrt(k)", ":")):
            label = f"epsilon {epsilon:g}" if style == "-" else None
            axes.plot(cell["k"], cell["errors"][rule][i], style, color=f"C{i}", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=3)
    axes.set_xlabel("k (solid: C = k, dotted: C = 3 sqrt(k))")
    axes.set_title(
        f"gamma {cell['gamma']:g}, d = {cell['d']}, N = {cell['n']:,}", fontsize="medium"
    )
    axes.legend(fontsize="x-small")


def _best_k(axes, part):
    markers = dict(zip(dict.fromkeys(p["gamma"] for p in part["best"]), "os^", strict=False))
    for s in part["slopes"]:
        own = [p for p in part["best"] if (p["gamma"], p["rule"]) == (s["gamma"], s["rule"])]
        colour = "C0" if s["rule"] == "k" else "C1"
        for used in (True, False):
            points = [p for p in own if p["in_fit"] == used]
            style = {"color": colour, "marker": markers[s["gamma"]], "linestyle": "none"}
            style |= {"markersize": 5, "fillstyle": "full" if used else "none"}
            label = f"gamma {s['gamma']:g}, C = {s['rule']}" if used else None
            axes.plot(
                [p["epsilon_n"] for p in points], [p["k"] for p in points], **style, label=label
            )
        if s["slope"] is not None:
            x = np.array(sorted(p["epsilon_n"] for p in own if p["in_fit"]))
            axes.plot(x, s["k_over_rate"] * x ** s["predicted"], color=colour, linewidth=0.9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("epsilon N")
    axes.set_ylabel("best k")
    axes.set_title("best k; lines: the rate; hollow: not in the fit", fontsize="medium")
    axes.legend(fontsize="x-small")
