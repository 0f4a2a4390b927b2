"""Compare private learning with and without public images, under one privacy budget.

Six methods side by side on real images:

  non-private   ordinary SGD on the private images: the ceiling
  dp-sgd        clipped and noised gradients (Abadi et al. 2016)
  gep           gradient embedding perturbation (Yu et al. 2021): noise in the subspace of public
                gradients, and separately on what is left of each gradient outside it
  b-gep         the biased form: only the subspace part
  public-only   SGD on the public images WITH their labels, no private data: the floor
  class-means   one noisy release of the class means; no training at all

and, only where it is asked for (it trains hundreds of networks; see `python -m experiments.pate`):

  pate          teachers on disjoint private images label the public ones (Papernot et al. 2018)

GEP uses the public images without their labels. The default data, 5,000 MNIST digits, come inside
a Python package, so `python -m experiments.gep` needs no download. Results go to a folder
(summary.json, report.txt, curves.png); a run that was interrupted is taken up where it stopped.
The last line on standard output is the summary as one JSON object.

  python -m experiments.gep                                     all six methods, 5 seeds, epsilon 1
  python -m experiments.gep --epsilon 0.5 --methods dp-sgd gep  two of them, under another budget
  python -m experiments.gep --smoke                             a few steps, to see it work
"""

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from experiments import _run, datasets, models
from experiments._methods import (
    METHODS,
    OPTIONAL,
    PLANNED,
    Budget,
    PateSetting,
    Setting,
    budget,
    make_run,
)
from experiments._run import UsageError

# mnist-5k: what `python -m experiments.search_gep` found for gep and dp-sgd on validation parts of
# the private set (the trials are in experiments/results); b-gep has gep's setting.
TUNED_GEP: dict[str, Any] = {"steps": 100, "learning_rate": 0.042, "clip_norms": (2.6, 1.2)}
TUNED_GEP |= {"average": 0.9, "refresh_every": 10, "warm_start": True, "whitening": 0.5}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist-5k": {
        "non-private": {"steps": 300, "batch_size": 128, "learning_rate": 0.05},
        "dp-sgd": {"steps": 100, "learning_rate": 0.1, "clip_norm": 1.0},
        "b-gep": TUNED_GEP,
        "gep": TUNED_GEP,
        "public-only": {"steps": 300, "batch_size": 64, "learning_rate": 0.05},
        "pate": {"steps": 100, "batch_size": 32, "queries": 50},  # for epsilon 1
    },
    "digits": {
        "non-private": {"steps": 600, "batch_size": 64},
        "public-only": {"steps": 600, "batch_size": 64},
        "pate": {"steps": 100, "batch_size": 32, "teachers": 60, "queries": 50},
    },
}
# The paper's setting at epsilon 2 (50 epochs), for the larger data sets.
PAPER: dict[str, Any] = {"batch_size": 1_000, "weight_decay": 1e-4, "schedule": "step", "groups": 5}
PAPER |= {"refresh_every": 10, "clip_norm": 10.0, "clip_norms": (10.0, 2.0)}
PAPER_EPOCHS = 50
MODELS = {"mnist-5k": "mnist_cnn", "mnist": "mnist_cnn", "digits": "mlp"}


@dataclasses.dataclass(frozen=True)
class Args:
    """Options; a hyper-parameter that is not given has its tuned or published default."""

    dataset: Literal["mnist-5k", "digits", "mnist", "cifar10", "svhn_cropped"] = "mnist-5k"
    """Data set; the last three are read from --data-dir, or downloaded by tensorflow-datasets."""
    methods: tuple[str, ...] = ()
    """Which methods to run; all by default, but for public-only where --num-public is 0."""
    model: Literal["mnist_cnn", "resnet20", "mlp"] | None = None
    """Network; by default mnist_cnn on 28x28 images, resnet20 on 32x32, mlp on 8x8."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of mnist_cnn and mlp."""
    epsilon: float = 1.0
    """Privacy budget of each private method."""
    delta: float = 1e-5
    """Probability with which the privacy bound may fail; keep it below 1 / private images."""
    seeds: int = 5
    """Number of runs of each method; the summary has mean and standard deviation."""
    seed: int | None = None
    """Make the run reproducible; it is then NOT private against whoever knows the seed."""
    anchors: str = "in-distribution"
    """Public images for GEP: in-distribution, tiny-imagenet, imagenet, digits, or PATH.npy."""
    num_anchors: int | None = None
    """How many public images to use; all by default."""
    num_public: int | None = None
    """How many training images become public (and leave the private part)."""
    max_examples: int | None = None
    """Use only so many private and so many test images."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    validation: int = 0
    """Evaluate on this many of the private records, held out, instead of the test set."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/gep/<data set>-eps<epsilon>."""
    eval_every: int | None = None
    """Steps between two evaluations; by default a twentieth of the run."""
    devices: int = 1
    """How many devices share the private data and every batch."""
    smoke: bool = False
    """Only check that everything works: 1 seed, 4 steps, 200 examples, rank 8."""
    epochs: float | None = None
    """Passes over the private data, instead of --steps."""
    steps: int | None = None
    """Training steps."""
    batch_size: int | None = None
    """Expected batch size (each record is drawn independently for each batch)."""
    learning_rate: tuple[float, ...] | None = None
    """Learning rate: one for all methods, or one for each of --methods in their order."""
    schedule: Literal["constant", "step", "cosine"] | None = None
    """Learning rate over time; step divides it by ten half-way, as in the paper."""
    momentum: float | None = None
    """Momentum, applied after the noise."""
    weight_decay: float | None = None
    """Weight decay, applied after the noise."""
    average: float | None = None
    """Evaluate the exponential moving average of the parameters, with this decay."""
    clip_norm: float | None = None
    """Clip norm of dp-sgd."""
    clip_norms: tuple[float, float] | None = None
    """Clip norms S1 S2 of gep: in the subspace, and outside it; b-gep uses S1."""
    rank: int | None = None
    """Dimension of the subspace, shared out over the parameter groups."""
    groups: int | None = None
    """Number of parameter groups, each with a subspace of its own."""
    power_iterations: int | None = None
    """Power iterations for each subspace."""
    refresh_every: int | None = None
    """Steps for which a subspace is kept."""
    warm_start: bool | None = None
    """Start the power iteration from the last subspace."""
    whitening: float | None = None
    """How far to even out the coordinates in the subspace: 0 (not at all) to 1."""
    noise_split: Literal["equal", "optimal"] | None = None
    """Share of the budget between the two parts of gep; equal as in the paper."""
    joint_clip: bool | None = None
    """Clip the two parts of gep together, which halves the variance of the noise."""
    components: int | None = None
    """Principal components for class-means."""
    teachers: int | None = None
    """Teachers of pate; the private images are shared out to them."""
    queries: int | None = None
    """Public images that pate's teachers are asked about."""
    threshold: float | None = None
    """Votes that an image needs for its label in pate; by default every query gets one."""
    answers: int | None = None
    """With --threshold: how many queries are answered at most."""


def main(args: Args) -> dict[str, Any]:
    """Run the methods and return the summary."""
    if args.smoke:
        small = {"seeds": 1, "steps": 4, "epochs": None, "batch_size": 32, "rank": 8}
        small |= {"teachers": 10, "queries": 20}
        args = dataclasses.replace(args, max_examples=200, **small)
    if not args.methods:
        public = args.num_public != 0
        methods = tuple(method for method in METHODS if public or method != "public-only")
        args = dataclasses.replace(args, methods=methods)
    check(args)
    name = args.model or MODELS.get(args.dataset, "resnet20")
    model = models.build(name, datasets.shape(args.dataset), 10, args.activation)
    data = datasets.load(args.dataset, args.data_dir, args.max_examples, args.num_public)
    anchors = datasets.anchors(args.anchors, data, args.num_anchors, args.data_dir)
    if args.validation:
        data = data.validation(args.validation)
    size = len(data.train_labels)
    chosen = {method: setting(args, method, size, name) for method in args.methods}
    check_settings(args, chosen, name, data, len(anchors))

    ending = "-smoke" if args.smoke else "-validation" if args.validation else ""
    default = pathlib.Path("runs", "gep", f"{args.dataset}-eps{args.epsilon:g}{ending}")
    folder = _run.Folder(args.out or default)
    shared = {key: getattr(args, key) for key in ("epsilon", "delta", "seed", "activation")}
    shared |= {"data": data.source, "model": name, "anchors": f"{len(anchors)} {args.anchors}"}
    pieces = {
        (method, repeat): (f"{method}/{repeat}", shared | dataclasses.asdict(chosen[method]))
        for method in args.methods
        for repeat in range(args.seeds)
    }
    for piece, config in pieces.values():
        folder.get(piece, config)  # refuses a folder of another configuration before any work

    budgets = {
        method: budget(method, own, size, args.epsilon, args.delta)
        for method, own in chosen.items()
    }
    rows = {}
    for method in args.methods:
        own = chosen[method]
        run, runs = None, []
        for repeat in range(args.seeds):
            result = folder.get(*pieces[method, repeat])
            if result is None:
                every = args.eval_every or max(1, own.steps // 20)
                rest = budgets[method], every, args.devices
                run = run or make_run(method, own, model, data, anchors, *rest)
                total = {"class-means": 1, "pate": getattr(own, "teachers", 0)}
                total = total.get(method, own.steps)
                with _run.progress(f"{method} {repeat + 1}/{args.seeds}", total) as advance:
                    result = run(_run.keys(args.seed, repeat), advance)
                result = folder.put(*pieces[method, repeat], result)
            runs.append(result)
        accuracies = [result["test_accuracy"] for result in runs]
        rows[method] = {
            "test_accuracy_mean": float(np.mean(accuracies)),
            "test_accuracy_std": float(np.std(accuracies, ddof=1)) if len(runs) > 1 else 0.0,
            "epsilon_spent": budgets[method].epsilon_spent,
            "noise_multiplier": budgets[method].noise_multiplier,
            "seconds": sum(result["seconds"] for result in runs),
            "compile_seconds": runs[0].get("compile_seconds"),
            "setting": dataclasses.asdict(own),
            "privacy": statement(args, method, own, budgets[method]),
            "runs": runs,
        }
    summary = {
        "dataset": args.dataset,
        "epsilon": args.epsilon,
        "delta": args.delta,
        "methods": rows,
        "shared": shared,
        "provenance": _run.provenance(),
    }
    _run.write_json(folder.path / "summary.json", summary)
    text = report(args, summary)
    (folder.path / "report.txt").write_text(text)
    _run.draw_curves(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    long = ("setting", "privacy", "runs")
    brief = {m: {k: v for k, v in row.items() if k not in long} for m, row in rows.items()}
    return {key: summary[key] for key in ("dataset", "epsilon", "delta")} | {"methods": brief}


def check(args: Args):
    """Refuse what can be refused before data is touched."""
    unknown = [method for method in args.methods if method not in METHODS + OPTIONAL]
    if unknown or len(set(args.methods)) < len(args.methods):
        got = " ".join(unknown or args.methods)
        raise UsageError(
            f"--methods must be different ones of {' '.join(METHODS + OPTIONAL)}, but got {got}"
        )
    if not 0 < args.delta < 1:
        raise UsageError(f"--delta must lie between 0 and 1, but got {args.delta}")
    available = jax.device_count()
    if not 1 <= args.devices <= available:
        remedy = "on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual ones"
        raise UsageError(f"--devices must be 1 to {available}, but got {args.devices}; {remedy}")
    if args.learning_rate and len(args.learning_rate) not in (1, len(args.methods)):
        raise UsageError("--learning-rate takes one value, or one for each of --methods")
    if args.steps is not None and args.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    positive = ("epsilon", "seeds", "epochs", "steps", "batch_size", "clip_norm", "clip_norms")
    positive += ("learning_rate", "rank", "groups", "power_iterations", "refresh_every")
    positive += ("teachers", "queries", "threshold", "answers")
    for key in (*positive, "components", "eval_every", "num_anchors", "max_examples"):
        value = getattr(args, key)
        values = value if isinstance(value, tuple) else (value,)
        if not all(v is None or (v > 0 and np.isfinite(v)) for v in values):
            raise UsageError(f"--{key.replace('_', '-')} must be above 0, but got {value}")
    limits = {
        "momentum": 1,
        "weight_decay": 1,
        "average": 1,
        "validation": np.inf,
        "num_public": np.inf,
    }
    for key, limit in (limits | {"seed": 2**32}).items():
        value = getattr(args, key)
        if value is not None and not 0 <= value < limit:
            bounds = "at least 0" if np.isinf(limit) else f"at least 0 and below {limit}"
            raise UsageError(f"--{key.replace('_', '-')} must be {bounds}, but got {value}")
    if args.whitening is not None and not 0 <= args.whitening <= 1:
        raise UsageError(f"--whitening must be from 0 to 1, but got {args.whitening}")
    for norm in (args.clip_norm, *(args.clip_norms or ())):
        if norm is not None and not 1e-12 <= norm <= 1e12:
            raise UsageError(f"clip norms must be from 1e-12 to 1e12, but got {norm}")


def check_settings(
    args: Args, settings: dict[str, Setting], model: str, data: datasets.Dataset, anchors: int
):
    """Refuse what depends on the model or on the amount of data."""
    size, layers = len(data.train_labels), models.LAYERS[model]
    for method, own in settings.items():
        if method in PLANNED and own.batch_size > size:
            raise UsageError(f"--batch-size {own.batch_size} exceeds the {size:,} private images")
        if method in ("gep", "b-gep") and own.groups > layers:
            raise UsageError(f"--groups {own.groups} exceeds the {layers} layers of {model}")
        if method in ("gep", "b-gep") and own.rank > anchors * own.groups:
            raise UsageError(f"--rank {own.rank} exceeds what {anchors} anchors span")
        if isinstance(own, PateSetting) and own.queries > anchors:
            raise UsageError(f"--queries {own.queries} exceeds the {anchors} public images")
        if method == "class-means" and anchors < 2:
            raise UsageError(f"class-means needs 2 public images or more, but got {anchors}")
    if "public-only" in settings and not len(data.public_labels):
        raise UsageError("public-only needs --num-public above 0; leave it out of --methods")
    if args.delta >= 1 / size:
        raise UsageError(f"--delta must be below 1 / {size:,} private images, but got {args.delta}")


def setting(args: Args, method: str, size: int, model: str) -> Setting:
    """The hyper-parameters of a method: its defaults, then what was given on the command line."""
    kind = PateSetting if method == "pate" else Setting
    if args.dataset in DEFAULTS or method == "pate":
        values = DEFAULTS.get(args.dataset, {}).get(method, {})
    else:
        rank = 500 if args.dataset == "mnist" else 1_000
        batch = min(PAPER["batch_size"], max(1, size // 10))
        values = PAPER | {"batch_size": batch, "rank": rank}
        values["groups"] = min(values["groups"], models.LAYERS[model])
        values["steps"] = max(1, round(PAPER_EPOCHS * size / batch))
    names = [field.name for field in dataclasses.fields(kind) if field.name != "learning_rate"]
    given = {name: getattr(args, name) for name in names}
    own = kind(**values)
    own = dataclasses.replace(own, **{k: v for k, v in given.items() if v is not None})
    if args.epochs is not None:
        steps = round(args.epochs * size / own.batch_size)
        if steps < 1:
            raise UsageError(f"--epochs {args.epochs} is less than one step of {own.batch_size}")
        own = dataclasses.replace(own, steps=steps)
    if args.learning_rate:
        position = args.methods.index(method) if len(args.learning_rate) > 1 else 0
        own = dataclasses.replace(own, learning_rate=args.learning_rate[position])
    return own


def statement(args: Args, method: str, own: Setting, spent: Budget) -> str:
    """The privacy statement of one run of a method."""
    if spent.plan is None:
        return spent.statement
    norms = {"dp-sgd": own.clip_norm, "gep": own.clip_norms, "b-gep": own.clip_norms[0]}
    norms |= {"pate": "none: a teacher has one vote on each query"}
    images = f"{args.anchors} images without labels"
    return spent.plan.report(
        mechanism=method,
        clip_norms=norms[method],
        sampler_used="yes, inside the jitted step",
        steps_taken=own.steps,
        key_source=_run.key_statement(args.seed),
        public_data="none" if method == "dp-sgd" else images,
        hyperparameter_search=search_statement(args, method, own),
    )


def search_statement(args: Args, method: str, own: Setting) -> str:
    """How the hyper-parameters came about, as far as this program knows."""
    if args.dataset != "mnist-5k":
        return "published or given by the user; how these were chosen is not known here"
    if own == type(own)(**DEFAULTS["mnist-5k"].get(method, {})):
        return "chosen on a validation part of the private set"
    return "given by the user; how they were chosen is not known here"


def report(args: Args, summary: dict[str, Any]) -> str:
    """The report for people."""
    part = "VALIDATION" if args.validation else "test"
    lines = [
        f"{args.dataset} ({summary['shared']['data']})",
        f"model {summary['shared']['model']}, anchors {summary['shared']['anchors']}",
        f"{_run.key_statement(args.seed)}",
        "",
        f"{'method':<14}{part + ' accuracy':<22}{'epsilon':<10}{'noise':<10}{'seconds':<10}compile",
    ]
    for method, row in summary["methods"].items():
        accuracy = f"{row['test_accuracy_mean']:.4f} +- {row['test_accuracy_std']:.4f}"
        epsilon, noise = (
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("epsilon_spent", "noise_multiplier")
        )
        compiling = "-" if row["compile_seconds"] is None else f"{row['compile_seconds']:.1f}"
        lines.append(
            f"{method:<14}{accuracy:<22}{epsilon:<10}{noise:<10}{row['seconds']:<10.1f}{compiling}"
        )
    lines += [
        "",
        f"Accuracy after the last step: mean and standard deviation of {args.seeds} run(s).",
        "Not paid for: a search for hyper-parameters on private data, publishing more than one of",
        "these models or runs, and whatever the public images say about the private ones.",
    ]
    for method, row in summary["methods"].items():
        lines += ["", f"== {method} ==", row["privacy"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _run.command_line(Args, main)
