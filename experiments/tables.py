"""Print the result tables of README.md from the committed summaries in experiments/results.

python -m experiments.tables
"""

import pathlib
from typing import Any

from experiments import (
    _ablation_report,
    _audit_tables,
    _hypernet_tables,
    _lora_tables,
    _probe_report,
    _speed_tables,
    gep_table,
)
from experiments._methods import Setting, public_data
from experiments._relu_tables import relu_tables
from experiments._run import read_json

RESULTS = pathlib.Path(__file__).parent / "results"


def table(summary: dict[str, Any]) -> str:
    """One run's table in Markdown, with the command that made it."""
    if "methods" not in summary:
        return _speed_tables.markdown(summary)
    lines = [
        f"`{summary['provenance']['command']}`",
        "",
        "| method | test accuracy | epsilon spent | noise multiplier | public data | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method, row in summary["methods"].items():
        accuracy = f"{100 * row['test_accuracy_mean']:.1f}"
        if len(row["runs"]) > 1:
            accuracy += f" ± {100 * row['test_accuracy_std']:.1f}"
        epsilon, noise = (
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("epsilon_spent", "noise_multiplier")
        )
        cells = (method, accuracy, epsilon, noise, _public(summary, method))
        lines.append(f"| {' | '.join(cells)} | {row['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def _public(summary: dict[str, Any], method: str) -> str:
    """What a method read of public data; older summaries do not say so themselves."""
    anchors = summary["shared"]["anchors"]
    known = summary["methods"][method].get("public_data")
    return known or public_data(method, Setting(), anchors, int(anchors.split()[0]))


def tables() -> dict[str, str]:
    """The table of every committed run, by the name of its folder."""
    summaries = {
        path.parent.name: read_json(path) for path in sorted(RESULTS.glob("*/summary.json"))
    }
    write = {
        "relu_regression": relu_tables,
        "gep_ablation": _ablation_report.markdown,
        "gep_table": gep_table.markdown,
        "linear_probe": _probe_report.markdown,
        "hypernet_regression": _hypernet_tables.markdown,
        "hypernet_lora": _lora_tables.markdown,
        "hypernet_head": _lora_tables.head_markdown,
        "audit": _audit_tables.markdown,
    }
    return {
        name: write.get(summary.get("experiment", ""), table)(summary)
        for name, summary in summaries.items()
    }


if __name__ == "__main__":
    for name, text in tables().items():
        print(f"## {name}\n\n{text}")
