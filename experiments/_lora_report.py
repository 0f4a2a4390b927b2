"""Report and pictures of the study of generated adapters."""

import pathlib
from typing import Any

import jax
import numpy as np

from experiments import _run
from experiments._lora_stages import Sets

FRECHET = "Frechet distance"


def facts(sets: Sets) -> dict[str, Any]:
    """What the sets are like."""
    rows = [set(own.tolist()) for own in sets.private_sets]
    pairs = [len(a & b) for i, a in enumerate(rows) for b in rows[:i]]
    labels = [np.bincount(sets.images.private_labels[own]) for own in sets.private_sets]
    return {
        "source": sets.images.source,
        "classifier_accuracy": sets.accuracy,
        "most_shared_records": max(pairs, default=0),
        "main_labels": [int(counts.argmax()) for counts in labels],
        "main_label_shares": [float(counts.max() / counts.sum()) for counts in labels],
    }


def sizes(base: Any, start: Any) -> dict[str, int]:
    """Numbers of parameters."""
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    return {"base": count(base), "adapters": count(start)}


def statistics(row: dict[str, Any]) -> dict[str, Any]:
    """Means and spreads over sets, and in how many the own distance beats the mismatched one."""
    result: dict[str, Any] = {"method": row["method"], "epsilon": row["epsilon"]}
    for name in ("frechet", "kernel"):
        own, other = (np.array(row[name][key]) for key in ("own", "mismatched"))
        result |= {
            f"{name}_mean": float(own.mean()),
            f"{name}_std": float(own.std(ddof=1)),
            f"{name}_own": own.tolist(),
        }
        prefix = "mismatched" if name == "frechet" else "kernel_mismatched"
        result |= {f"{prefix}_mean": float(other.mean()), f"{prefix}_std": float(other.std(ddof=1))}
        if name == "frechet":
            result["mismatched"] = other.tolist()
            closer = own < other * (1 - 1e-9)  # not where all samples are the same
            result["better_than_mismatched"] = int(closer.sum())
    return result


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    sets, counts = summary["sets_facts"], summary["sizes"]
    accuracy = sets["classifier_accuracy"]
    network = summary["features"]
    if accuracy is not None:
        network = f"a classifier trained on the public images ({accuracy:.3f} right on private)"
    lines = [
        sets["source"],
        f"diffusion model of {counts['base']:,} parameters, adapters of {counts['adapters']:,}",
        f"{summary['sets']} private sets (at most {sets['most_shared_records']} records shared by "
        f"two), {summary['samples']} samples each, {summary['sampling_steps']} DDIM steps",
        f"delta {summary['delta']:g}, {summary['adjacency']}; distances in features of {network}",
        "",
        f"{'method':<22}{'epsilon':<10}{FRECHET:<20}{'mismatched sets':<18}"
        f"{'sets better':<14}{'kernel distance':<22}learning rate",
    ]
    for name, row in summary["methods"].items():
        epsilon = "-" if row["epsilon"] is None else f"{row['epsilon']:g}"
        if row["method"] == "dp-deepsets" and row["epsilon"] is None:
            epsilon = "no noise"
        rate = summary["learning_rates"].get(name, {}).get("learning_rate")
        spread = f"{row['frechet_mean']:.1f} +- {row['frechet_std']:.1f}"
        better = f"{row['better_than_mismatched']} of {summary['sets']}"
        kernel = f"{row['kernel_mean']:.2f} +- {row['kernel_std']:.2f}"
        lines.append(
            f"{row['method']:<22}{epsilon:<10}{spread:<20}{row['mismatched_mean']:<18.1f}"
            f"{better:<14}{kernel:<22}{'' if rate is None else f'{rate:g}'}"
        )
    lines += ["", "mean +- standard deviation over sets; mismatched: samples of the other sets"]
    scales = ", ".join(f"{eps}: {own['std']:.3g}" for eps, own in summary["noise"].items())
    lines += [f"noise on each coordinate of the mean embedding, by epsilon: {scales}", ""]
    return "\n".join(lines)


def draw_distances(folder: pathlib.Path):
    """Draw `distances.png` from the `summary.json` of a run folder, and from nothing else."""
    from matplotlib.figure import Figure

    summary = _run.read_json(folder / "summary.json")
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    epsilons = sorted(summary["epsilons"])
    rows = summary["methods"].values()
    names = list(dict.fromkeys(row["method"] for row in rows))
    for colour, name in enumerate(names):
        own = [row for row in rows if row["method"] == name]
        curve = sorted((row for row in own if row["epsilon"]), key=lambda row: row["epsilon"])
        flat = [row for row in own if row["epsilon"] is None]
        style: dict[str, Any] = {"color": f"C{colour}"}
        if not curve:
            axes.axhline(flat[0]["frechet_mean"], linestyle="--", label=name, **style)
            continue
        error = [row["frechet_std"] / summary["sets"] ** 0.5 for row in curve]
        x = [row["epsilon"] for row in curve]
        means = [row["frechet_mean"] for row in curve]
        axes.errorbar(x, means, error, marker="o", capsize=3, label=name, **style)
        if name == "dp-deepsets":
            other = [row["mismatched_mean"] for row in curve]
            axes.plot(x, other, linestyle=":", label="dp-deepsets, mismatched sets", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_yscale("log")
    axes.set_xlabel(f"epsilon (delta {summary['delta']:g}, {summary['adjacency']})")
    axes.set_ylabel("Frechet distance to the private set")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(folder / "distances.png", dpi=150)


def draw_samples(folder: pathlib.Path, sets: Sets):
    """Draw `samples.png`: for some sets a strip of each method's samples under the set itself."""
    from matplotlib.figure import Figure

    summary = _run.read_json(folder / "summary.json")
    epsilon = min(summary["epsilons"], key=lambda value: abs(value - 4))
    names = [f"dp-deepsets-eps{epsilon:g}", f"dp-sgd-eps{epsilon:g}", "non-private"]
    names = [name for name in names if name in summary["methods"]]
    titles = ["private set", "dp-deepsets, no noise", *names]
    names = ["dp-deepsets", *names]
    count = min(6, len(sets.private_sets))
    figure = Figure(figsize=(2.4 * len(titles), 1.05 * count + 0.4), layout="constrained")
    grid = np.atleast_2d(figure.subplots(count, len(titles)))
    for column, title in enumerate(titles):
        grid[0, column].set_title(title, fontsize=8)
        if column:
            with np.load(folder / f"samples-{names[column - 1]}.npz") as stored:
                images = stored["images"]
        else:
            images = sets.images.private[sets.private_sets]
        for row in range(count):
            axes = grid[row, column]
            axes.imshow(_tiled(images[row][:18], 3), cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
    figure.savefig(folder / "samples.png", dpi=110)


def _tiled(images: np.ndarray, rows: int) -> np.ndarray:
    """Images in a grid, pixels in 0..1."""
    images = images[: len(images) // rows * rows]
    tiles = images.reshape(rows, -1, *images.shape[1:]).swapaxes(1, 2)
    joined = tiles.reshape(rows * images.shape[1], -1, images.shape[-1])
    return np.clip(joined.squeeze(-1) if joined.shape[-1] == 1 else joined, -1, 1) / 2 + 0.5
