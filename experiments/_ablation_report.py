"""Tables and the picture of `experiments.gep_ablation`, from its summary and nothing else."""

import math
import pathlib
from typing import Any

import numpy as np

from experiments._ablation_cases import TITLES
from experiments._run import read_json

Rows = list[dict[str, Any]]


def _unique(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _grid(rows: Rows, title: str, write) -> list[str]:
    """A table of lines by values."""
    values, lines = _unique(rows, "value"), []
    for line in _unique(rows, "line"):
        own = {row["value"]: row for row in rows if row["line"] == line}
        lines.append([line, *(write(own[v]) if v in own else "-" for v in values)])
    return _table([title, *values], lines)


def _accuracy(row: dict[str, Any]) -> str:
    return f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}"


def _cost(row: dict[str, Any]) -> str:
    return f"{1e3 * row['seconds_per_step']:.0f} ms, {row['temporary_bytes'] / 2**20:.0f} MiB"


def markdown(summary: dict[str, Any]) -> str:
    """All tables, with the command that made them."""
    lines = [f"`{summary['provenance']['command']}`"]
    for part, rows in summary["parts"].items():
        if part in TITLES and rows:
            lines += ["", *_grid(rows, f"accuracy: {TITLES[part]}", _accuracy)]
    costs = [row for part in ("groups", "resnet20") for row in summary["parts"].get(part, [])]
    if costs:
        lines += ["", *_grid(costs, "a step, and its memory: parameter groups", _cost)]
    if summary["error"]:
        lines += ["", *_errors(summary["error"])]
    return "\n".join(lines) + "\n"


def _mean(errors: list[Any], checkpoint: int, table: str, key: str) -> float:
    """Over seeds."""
    return float(np.mean([run[checkpoint][table][key] for run in errors]))


def _errors(errors: list[Any]) -> list[str]:
    steps = [point["step"] for point in errors[0]]
    names = {
        "error_by_rank": ("projection error, rank {}", None),
        "error_by_source": ("projection error: {}", None),
        "error_by_iterations": ("projection error, power iterations: {}", ("2", "4")),
        "stable_rank": ("stable rank of {}", None),
    }
    rows = []
    for table, (text, only) in names.items():
        for key in errors[0][0][table]:
            if only is None or key in only:
                digits = 1 if table == "stable_rank" else 3
                cells = (f"{_mean(errors, i, table, key):.{digits}f}" for i in range(len(steps)))
                rows.append([text.format(key), *cells])
    return _table(["over training", *(f"step {step}" for step in steps)], rows)


def draw(folder: pathlib.Path):
    """Draw `ablation.png`: one small panel a part."""
    from matplotlib.figure import Figure

    summary = read_json(folder / "summary.json")
    parts = {part: rows for part, rows in summary["parts"].items() if part in TITLES and rows}
    panels: list[Any] = [(TITLES[part], _draw_accuracies, rows) for part, rows in parts.items()]
    if summary["error"]:
        panels.append(("error against rank k", _draw_error_by_rank, summary["error"]))
        panels.append(("error over training, by source", _draw_error_by_source, summary["error"]))
        panels.append(("stable rank over training", _draw_stable_rank, summary["error"]))
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.0 * height), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False)
    for axes, (title, paint, content) in zip(grid.flat, panels, strict=False):
        paint(axes, content)
        axes.set_title(title, fontsize="medium")
        axes.tick_params(labelsize="x-small")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="xx-small")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(folder / "ablation.png", dpi=130)


def _draw_accuracies(axes, rows: Rows):
    values = _unique(rows, "value")
    for line in _unique(rows, "line"):
        own = [row for row in rows if row["line"] == line]
        places = [values.index(row["value"]) for row in own]
        means, spreads = [row["mean"] for row in own], [row["std"] for row in own]
        axes.errorbar(places, means, spreads, marker="o", markersize=3, capsize=2, label=line)
    tilt = 25 if max(map(len, values)) > 6 else 0
    axes.set_xticks(range(len(values)), values, rotation=tilt)
    axes.set_ylabel("test accuracy", fontsize="x-small")


def _draw_error_by_rank(axes, errors):
    for i, point in enumerate(errors[0]):
        ranks = list(point["error_by_rank"])
        means = [_mean(errors, i, "error_by_rank", k) for k in ranks]
        axes.plot([int(k) for k in ranks], means, marker=".", label=f"step {point['step']}")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("rank k", fontsize="x-small")
    axes.set_ylabel("share outside of the subspace", fontsize="x-small")


def _over_training(axes, errors, table: str):
    steps = [point["step"] for point in errors[0]]
    for key in errors[0][0][table]:
        means = [_mean(errors, i, table, key) for i in range(len(steps))]
        axes.plot(steps, means, marker=".", label=key)
    axes.set_xlabel("step", fontsize="x-small")


def _draw_error_by_source(axes, errors):
    _over_training(axes, errors, "error_by_source")
    axes.set_ylim(0, 1.02)


def _draw_stable_rank(axes, errors):
    _over_training(axes, errors, "stable_rank")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("squared Frobenius norm over largest eigenvalue", fontsize="x-small")
