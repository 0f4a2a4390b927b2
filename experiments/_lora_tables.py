"""The tables of README.md from a `summary.json` of `hypernet_lora` and of `hypernet_head`."""

from typing import Any

LABELS = {
    "no adaptation": "no adaptation",
    "dp-deepsets": "DP-DeepSets",
    "non-private": "LoRA, not private",
    "dp-sgd": "DP-SGD LoRA",
    "public-then-dp-sgd": "public LoRA, then DP-SGD",
    "pda-dpmd": "PDA-DPMD LoRA",
}


def markdown(summary: dict[str, Any]) -> str:
    """One row a method, one column an epsilon: mean and standard deviation over private sets."""
    epsilons = sorted(summary["epsilons"])
    heads = [f"epsilon {epsilon:g}" for epsilon in epsilons]
    lines = [f"`{summary['provenance']['command']}`", ""]
    lines.append(f"| Frechet distance | {' | '.join(heads)} | not private |")
    lines.append("| --- |" + " --- |" * (len(epsilons) + 1))
    rows = list(summary["methods"].values())
    best = {
        epsilon: min(row["frechet_mean"] for row in rows if row["epsilon"] == epsilon)
        for epsilon in epsilons
    }

    def line(label: str, method: str, key: str) -> str:
        own = {row["epsilon"]: row for row in rows if row["method"] == method}
        cells = []
        for epsilon in (*epsilons, None):
            if epsilon not in own:
                cells.append("")
                continue
            mean, std = (own[epsilon][f"{key}_{part}"] for part in ("mean", "std"))
            text = f"{mean:.1f} ± {std:.1f}"
            winner = key == "frechet" and epsilon is not None and mean == best[epsilon]
            cells.append(f"**{text}**" if winner else text)
        return f"| {label} | {' | '.join(cells)} |"

    for method in dict.fromkeys(str(row["method"]) for row in rows):
        lines.append(line(LABELS.get(method, method), method, "frechet"))
        if method == "dp-deepsets":
            lines.append(line("the control: samples of the other sets", method, "mismatched"))
    return "\n".join(lines) + "\n"


def head_markdown(summary: dict[str, Any]) -> str:
    """One row an epsilon, one column a size: the accuracies of the private methods."""
    methods = ("dp-deepsets", "noisy mean", "dp-sgd")
    setting = summary["setting"]
    sizes, epsilons = setting["sizes"], setting["epsilons"]
    lines = [f"`{summary['provenance']['command']}`", ""]
    heads = [f"N {size:,}" for size in sizes]
    lines.append(f"| {' / '.join(methods)} | {' | '.join(heads)} |")
    lines.append("| --- |" + " --- |" * len(sizes))
    for epsilon in epsilons:
        rows = [summary["cells"][f"epsilon {epsilon:g}, N {size}"] for size in sizes]
        cells = [" / ".join(f"{100 * row[m]['mean']:.1f}" for m in methods) for row in rows]
        lines.append(f"| epsilon {epsilon:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
