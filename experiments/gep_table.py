"""DP-SGD, B-GEP and GEP under the budgets of the GEP paper, beside the accuracies that it prints.

The paper's Table 1 has MNIST, SVHN and CIFAR-10 at epsilon 2, 5 and 8, natural images as public
data, and settings that it does not tune. By default this runs a part of each data set that 2 cores
can do, with networks and settings below, fixed beforehand and the same for all budgets; `--full`
runs the paper's size and settings with `python -m experiments.gep`'s defaults (use a GPU). Methods
that read labels of public images (adadps, pda-dpmd, public-only) need `--num-public`.

Results go to a folder, one for each budget, and summary.json with the table; a run that was
interrupted is taken up where it stopped. The last line on standard output is one JSON object.

  python -m experiments.gep_table                          MNIST, 10,000 private images
  python -m experiments.gep_table --dataset svhn_cropped   8,000 private images
  python -m experiments.gep_table --dataset mnist --full   60,000 images, 50 epochs
  python -m experiments.gep_table --methods gep adadps --num-public 1000
"""

import dataclasses
import itertools
import pathlib
from typing import Any, Literal

from experiments import _run, gep
from experiments._run import UsageError

METHODS = ("non-private", "dp-sgd", "pate", "b-gep", "gep")
NATURAL: dict[str, Any] = {"num_public": 0, "anchors": "tiny-imagenet"}
# Chosen at epsilon 2 on 2,000 (SVHN: 1,000) held-out private images by `python -m experiments.gep
# --validation`, one run a setting, for all budgets: learning rate 0.3 or 1, and for MNIST the
# residual clipped at a fifth (as in the paper) or half of the embedding's clip norm.
CLIPS: dict[str, Any] = {"clip_norm": 1.0, "clip_norms": (1.0, 0.5), "average": 0.9}
CLIPS |= {"schedule": "cosine"}
RATES = {
    "mnist": {"non-private": 0.1, "dp-sgd": 0.3, "b-gep": 1.0, "gep": 1.0},
    "svhn_cropped": {"non-private": 0.1, "dp-sgd": 0.3, "b-gep": 0.3, "gep": 0.3},
}
SMALL: dict[str, dict[str, Any]] = {
    "mnist": NATURAL
    | CLIPS
    | {"max_examples": 10_000, "num_anchors": 1_000, "rank": 200, "batch_size": 500, "epochs": 10},
    "svhn_cropped": NATURAL
    | CLIPS
    | {"model": "mnist_cnn", "num_anchors": 1_000, "rank": 200, "groups": 4}
    | {"batch_size": 500, "epochs": 20},
    "digits": {"steps": 20},
}
# PATE's student learns from public images of the same source, which the other methods do not have.
# Teachers and queries by epsilon: the noise on a query is about a seventh of the teachers.
PATE: dict[str, Any] = {"num_public": 1_000, "anchors": "in-distribution", "num_anchors": None}
PATE |= {"epochs": None, "steps": 100, "batch_size": 32, "teachers": 250}
QUERIES: dict[float, int] = {2: 150, 5: 600, 8: 1_000}
# Table 1 of Yu et al. 2021, in percent; from memory, but for 74.9 and 95.1 (GEP at epsilon 8 on
# CIFAR-10 and SVHN), which were seen in print.
PRINTED: dict[str, dict[str, dict[float, float]]] = {
    "mnist": {
        "dp-sgd": {2: 94.7, 5: 96.8, 8: 97.2},
        "pate": {2: 98.5, 5: 98.5, 8: 98.6},
        "b-gep": {2: 93.1, 5: 94.5, 8: 95.9},
        "gep": {2: 96.3, 5: 97.9, 8: 98.4},
    },
    "svhn_cropped": {
        "dp-sgd": {2: 87.1, 5: 91.3, 8: 91.6},
        "pate": {2: 80.7, 5: 91.6, 8: 91.6},
        "b-gep": {2: 88.5, 5: 91.8, 8: 92.3},
        "gep": {2: 92.3, 5: 94.7, 8: 95.1},
    },
    "cifar10": {
        "dp-sgd": {2: 43.6, 5: 52.2, 8: 56.4},
        "pate": {2: 34.2, 5: 41.9, 8: 43.6},
        "b-gep": {2: 50.3, 5: 59.5, 8: 63.0},
        "gep": {2: 59.7, 5: 70.1, 8: 74.9},
    },
}
PRINTED_NON_PRIVATE = {"mnist": 99.1, "svhn_cropped": 95.9, "cifar10": 90.4}
EPOCHS: dict[float, int] = {2: 50, 5: 100, 8: 200}  # of the paper; a tenth of that for SVHN


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    dataset: Literal["mnist", "svhn_cropped", "cifar10", "digits"] = "mnist"
    """Data set; read from --data-dir, or downloaded by tensorflow-datasets."""
    epsilons: tuple[float, ...] = (2.0, 5.0, 8.0)
    """Privacy budgets of each single run."""
    methods: tuple[str, ...] = METHODS
    """Methods, as in experiments.gep."""
    seeds: int = 2
    """Number of runs of each method under each budget."""
    seed: int | None = None
    """Make the run reproducible; it is then NOT private against whoever knows the seed."""
    anchors: str | None = None
    """Public images for the subspace, all of them, as in experiments.gep (PATH.npy, for one); by
    default tiny-imagenet. Not for pate, whose student has 1,000 images of the same kind."""
    num_public: int | None = None
    """How many training images become public, with labels, for all methods but pate; by default
    none (with digits: 200)."""
    full: bool = False
    """The paper's size and settings."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/gep_table/<data set>, with -full."""


def arguments(
    args: Args, methods: tuple[str, ...], epsilon: float, folder: pathlib.Path
) -> gep.Args:
    """What `experiments.gep` is asked to run under one budget: pate, or the other methods."""
    if args.full:
        svhn = args.dataset == "svhn_cropped"
        epochs = EPOCHS.get(epsilon, 50) / (10 if svhn else 1)
        chosen: dict[str, Any] = {"epochs": epochs, "delta": 1e-6 if svhn else 1e-5}
        chosen |= NATURAL | {"refresh_every": 1}
        chosen |= {"rank": 2_000} if args.dataset == "cifar10" else {}
    elif args.dataset in SMALL:
        chosen = SMALL[args.dataset]
    else:
        raise UsageError(f"{args.dataset} has no small version; use --full, or experiments.gep")
    ending = ""
    if args.anchors is not None:
        chosen = chosen | {"anchors": args.anchors, "num_anchors": None}
    if args.num_public is not None:
        chosen = chosen | {"num_public": args.num_public}
    if not args.full and args.dataset in RATES:
        rates = RATES[args.dataset]
        chosen = chosen | {"learning_rate": tuple(rates.get(method, 0.1) for method in methods)}
    if methods == ("pate",):
        kept = {key: chosen[key] for key in ("model", "max_examples", "delta") if key in chosen}
        digits = args.dataset == "digits"
        own = {"steps": 20, "teachers": 20, "queries": 20} if digits else PATE
        chosen, ending = kept | {"queries": QUERIES.get(epsilon, 150)} | own, "-pate"
    return gep.Args(
        dataset=args.dataset,
        methods=methods,
        epsilon=epsilon,
        seeds=args.seeds,
        seed=args.seed,
        data_dir=args.data_dir,
        out=folder / f"eps{epsilon:g}{ending}",
        **chosen,
    )


def main(args: Args) -> dict[str, Any]:
    """Run every method under every budget, and return the table."""
    for key in ("epsilons", "methods"):
        values = getattr(args, key)
        if not values or len(set(values)) < len(values):
            raise UsageError(f"--{key} must be one or more different values, but got {values}")
    name = args.dataset + ("-full" if args.full else "")
    folder = args.out or pathlib.Path("runs", "gep_table", name)
    methods: dict[str, Any] = {method: {"budgets": []} for method in args.methods}
    public: dict[str, list[str]] = {method: [] for method in args.methods}
    in_one_run = tuple(method for method in args.methods if method != "pate")
    groups = [group for group in (in_one_run, ("pate",)) if set(group) & set(args.methods)]
    pairs = itertools.product(args.epsilons, groups)
    wanted = [(epsilon, arguments(args, group, epsilon, folder)) for epsilon, group in pairs]
    for _, own in wanted:
        gep.check(own)
    for _, own in wanted:  # refuses the last budget before work on the first
        gep.prepare(own, gep.network(own))
    lock = _run.Folder(folder, "gep_table")
    for epsilon, own in wanted:
        gep.main(own)
        assert own.out is not None
        summary = _run.read_json(own.out / "summary.json")
        same = summary["shared"] | {"delta": summary["delta"]}
        for method, row in summary["methods"].items():
            keys = ("test_accuracy_mean", "test_accuracy_std", "noise_multiplier")
            printed = PRINTED.get(args.dataset, {}).get(method, {}).get(epsilon)
            if method == "non-private":
                printed = PRINTED_NON_PRIVATE.get(args.dataset)
            cell = {key: row[key] for key in keys} | {"epsilon": epsilon, "printed": printed}
            seconds = [run.get("seconds_per_step") for run in row["runs"]]
            cell |= {"seconds_per_step": seconds, "setting": row["setting"], "shared": same}
            methods[method]["budgets"].append(cell)
            public[method].append(row["public_data"])
            methods[method]["public_data"] = "; ".join(dict.fromkeys(public[method]))
    summary = {"experiment": "gep_table", "dataset": args.dataset}
    summary |= {"methods": methods, "provenance": _run.provenance()}
    _run.write_json(lock.path / "summary.json", summary)
    print(f"{markdown(summary)}\nwritten to {folder}")
    brief = {
        method: {f"{cell['epsilon']:g}": cell["test_accuracy_mean"] for cell in row["budgets"]}
        for method, row in methods.items()
    }
    return {"dataset": args.dataset, "methods": brief}


def markdown(summary: dict[str, Any]) -> str:
    """The table, with the command that made it; in brackets what the paper prints."""
    budgets = next(iter(summary["methods"].values()))["budgets"]
    head = ["test accuracy (printed)", *(f"epsilon {cell['epsilon']:g}" for cell in budgets)]
    head += ["public data", "a step"]
    lines = [f"`{summary['provenance']['command']}`", "", f"| {' | '.join(head)} |"]
    lines.append(f"| {' | '.join(['---'] * len(head))} |")
    for method, row in summary["methods"].items():
        cells = [method]
        for cell in row["budgets"]:
            text = f"{100 * cell['test_accuracy_mean']:.1f} ± {100 * cell['test_accuracy_std']:.1f}"
            cells.append(text + (f" ({cell['printed']})" if cell["printed"] else ""))
        steps = [s for cell in row["budgets"] for s in cell["seconds_per_step"] if s is not None]
        step = f"{1e3 * sorted(steps)[len(steps) // 2]:.0f} ms" if steps else "-"
        lines.append(f"| {' | '.join([*cells, row['public_data'], step])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _run.command_line(Args, main)
