"""The summary of `experiments.hypernet_regression` as tables in Markdown."""

from typing import Any

from experiments._hypernet_report import group, k_table, references, slope_table, table


def markdown(summary: dict[str, Any]) -> str:
    """The tables of one run, with the command that made it."""
    lines = [f"`{summary['provenance']['command']}` ({summary['seconds'] / 60:.0f} minutes)"]
    for (gamma, zeta), rows in group(summary.get("dimension", []), "gamma", "zeta").items():
        what = f"excess risk over |w|², gamma {gamma:g}, N = d^{1 + zeta:g}, epsilon 1"
        lines += ["", *_rows(what, table(rows, "d"))]
    if summary.get("dimension"):
        lines += ["", *_rows(None, references(summary["dimension"]))]
        lines += ["", *_rows(None, slope_table(summary["slopes"]))]
    for part, column in (("epsilon", "epsilon"), ("size", "n")):
        if rows := summary.get(part):
            where = f"d = {rows[0]['d']}, "
            where += f"N = {rows[0]['n']:,}" if part == "epsilon" else "epsilon 1"
            what = f"excess risk over |w|², gamma {rows[0]['gamma']:g}, {where}"
            lines += ["", *_rows(what, table(rows, column))]
    if "coordinates" in summary:
        lines += ["", *_rows("best k: gamma", k_table(summary["coordinates"]["slopes"]))]
    return "\n".join(lines) + "\n"


def _rows(corner: str | None, lines: list[list[str]]) -> list[str]:
    head, *rest = lines
    head = [text.replace("|", r"\|") for text in (corner or head[0], *head[1:])]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest)]
