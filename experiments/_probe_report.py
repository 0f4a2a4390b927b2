"""The report, the table and the picture of `experiments.linear_probe`, from its summary alone."""

import pathlib
from typing import Any

from experiments import _run

Rows = dict[str, dict[float | None, dict[str, Any]]]


def by_method(summary: dict[str, Any]) -> tuple[Rows, list[float]]:
    """Method -> epsilon -> row, and the epsilons."""
    rows: Rows = {}
    for row in summary["rows"]:
        rows.setdefault(row["method"], {})[row["epsilon"]] = row
    epsilons = sorted({row["epsilon"] for row in summary["rows"] if row["epsilon"] is not None})
    return rows, epsilons


def _accuracy(row: dict[str, Any] | None, seeds: int) -> str:
    if row is None:
        return "-"
    spread = f" ± {100 * row['test_accuracy_std']:.1f}" if seeds > 1 else ""
    return f"{100 * row['test_accuracy_mean']:.1f}{spread}"


def _cells(summary: dict[str, Any]) -> list[list[str]]:
    """The table: a head, then a row for each method."""
    rows, epsilons = by_method(summary)
    head = ["method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)]
    lines = [[*head, "knows of the public examples", "CPU seconds a run"]]
    for method, own in rows.items():
        found = [own.get(epsilon, own.get(None)) for epsilon in epsilons]
        accuracies = [_accuracy(row, summary["seeds"]) for row in found]
        seconds = max(row["cpu_seconds"] for row in own.values())
        lines.append([method, *accuracies, summary["methods_know"][method], f"{seconds:.1f}"])
    return lines


def markdown(summary: dict[str, Any]) -> str:
    """The tables for README.md, with the command that made them."""
    rows, epsilons = by_method(summary)
    head, *lines = _cells(summary)
    lines = [head, ["---"] * len(head), *lines]
    text = [f"`{summary['provenance']['command']}`", ""]
    text += [f"| {' | '.join(line)} |" for line in lines]
    text += ["", f"| setting chosen | {' | '.join(f'epsilon {e:g}' for e in epsilons)} |"]
    text.append(f"| {' | '.join(['---'] * (1 + len(epsilons)))} |")
    for method, own in rows.items():
        found = [own.get(epsilon, own.get(None)) for epsilon in epsilons]
        cells = ["-" if row is None else _setting(row["setting"]) for row in found]
        text.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _setting(setting: dict[str, Any]) -> str:
    short = {"learning_rate": "rate", "clip_norm": "clip"}
    return ", ".join(
        f"{short.get(key, key)} {value:g}" for key, value in setting.items() if value is not None
    )


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    shared = summary["shared"]
    lines = [
        summary["features"],
        f"{shared['num_public']} of the test examples are public and not tested on; "
        f"{shared['steps']} steps, expected batch {shared['batch_size']:,}, delta "
        f"{summary['delta']:g}",
        _run.key_statement(shared["seed"]),
        "",
        f"Test accuracy (%) after the last step: mean and standard deviation of "
        f"{summary['seeds']} run(s).",
    ]
    cells = _cells(summary)
    widths = [max(map(len, column)) + 2 for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("".join(padded).rstrip())
    lines += ["", "Settings, and accuracy on the held-out private examples that chose them:"]
    for row in summary["rows"]:
        budget = "" if row["epsilon"] is None else f"epsilon {row['epsilon']:g}"
        best = max(trial[-1] for trial in row["trials"])
        text = f"{_setting(row['setting'])}: {100 * best:.1f} (best of {len(row['trials'])})"
        lines.append(f"{row['method']:<14}{budget:<14}{text}")
    if "unprotected_share_outside" in summary:
        shares = summary["unprotected_share_outside"].items()
        lines += [
            "",
            "NOT private, for diagnosis: share of the squared norm of private gradients at the "
            "start\nthat lies outside of the subspace of public gradients, by rank:",
            ", ".join(f"{r}: {v:.2f}" for r, v in shares),
        ]
    lines += [
        "",
        "Each budget is that of ONE run. Not paid for: the search for settings on private",
        "examples, and publishing more than one of these runs. What the network learned its",
        "features from counts as public.",
    ]
    for statement in summary["privacy"].values():
        lines += ["", statement]
    return "\n".join(lines) + "\n"


def draw(folder: pathlib.Path):
    """Draw `probe.png` from the `summary.json` of a run folder: accuracy against epsilon."""
    from matplotlib.figure import Figure

    summary = _run.read_json(folder / "summary.json")
    rows, epsilons = by_method(summary)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for colour, (method, own) in enumerate(rows.items()):
        style: dict[str, Any] = {"color": f"C{colour}", "label": method}
        if None in own:
            axes.axhline(100 * own[None]["test_accuracy_mean"], linestyle="--", **style)
            continue
        means, spreads = (
            [100 * own[epsilon][f"test_accuracy_{part}"] for epsilon in epsilons]
            for part in ("mean", "std")
        )
        axes.errorbar(epsilons, means, spreads, marker=".", capsize=3, **style)
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    axes.set_xlabel(f"epsilon (delta {summary['delta']:g})")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(f"Linear probe, mean and standard deviation of {summary['seeds']} runs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(folder / "probe.png", dpi=130)
