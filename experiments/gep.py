"""Compare private learning with and without public images, under one privacy budget.

Six methods side by side on real images:

  non-private   ordinary SGD on the private images: the ceiling
  dp-sgd        clipped and noised gradients (Abadi et al. 2016)
  gep           gradient embedding perturbation (Yu et al. 2021): noise in the subspace of public
                gradients, and separately on what is left of each gradient outside it
  b-gep         the biased form: only the subspace part
  public-only   SGD on the public images WITH their labels, no private data: the floor
  class-means   one noisy release of the class means; no training at all

and, where --methods asks for them:

  sparsified        dp-sgd on a random part of the coordinates (Zhu and Blaschko 2023)
  dp-adam           Adam in place of momentum, as it is
  dp-adam-bc        and without the noise's part in its second moment (Tang et al. 2024)
  projected-dp-sgd  dp-sgd, projected onto GEP's subspace after the noise (Zhou et al. 2021)
  adadps            gradients scaled by public ones before the clip (Li et al. 2022)
  pda-dpmd          dp-sgd mixed with the public gradient after the noise (Amid et al. 2022)
  pate              teachers on disjoint private images label public ones (Papernot et al. 2018);
                    it trains hundreds of networks: see `python -m experiments.pate`

The table says for every method which public data it used: of adadps, pda-dpmd and public-only the
labels too. Any method can have what made dp-sgd strong since (De et al. 2022): --augmentations,
--batch-size, --average. The default data, 5,000 MNIST digits, come inside a Python package, so
`python -m experiments.gep` needs no download. Results go to a folder (summary.json, report.txt,
curves.png, and ledger.jsonl, which records what was released); a run that was killed is taken up
where it stopped, and ends as if it had not been. If anything changed meanwhile it is refused,
unless --resume-as-new pays for the repeated steps again. While a run is unfinished the folder holds
its secret keys (checkpoints/, readable by its owner alone). The last line on standard output is the
summary as one JSON object.

  python -m experiments.gep                                     all six methods, 5 seeds, epsilon 1
  python -m experiments.gep --epsilon 0.5 --methods dp-sgd gep  two of them, under another budget
  python -m experiments.gep --methods dp-sgd gep --augmentations 8 --average 0.9
  python -m experiments.gep --smoke                             a few steps, to see it work
"""

import dataclasses
import pathlib
import zlib
from typing import Any

import numpy as np

from experiments import _options, _pate, _resume, _run, datasets, models
from experiments._gep_args import Args, check
from experiments._methods import (
    IN_SUBSPACE,
    METHODS,
    PLANNED,
    WITH_LABELS,
    Budget,
    PateSetting,
    Setting,
    budget,
    make_run,
    public_data,
)
from experiments._run import UsageError
from jdp import checkpoints

# mnist-5k: what `python -m experiments.search_gep` found for gep and dp-sgd on validation parts of
# the private set (the trials are in experiments/results); b-gep has gep's setting.
TUNED_GEP: dict[str, Any] = {"steps": 100, "learning_rate": 0.042, "clip_norms": (2.6, 1.2)}
MOVING: dict[str, Any] = {"refresh_every": 10, "warm_start": True}
TUNED_GEP |= MOVING | {"average": 0.9, "whitening": 0.5}
TUNED_DP_SGD: dict[str, Any] = {"steps": 100, "learning_rate": 0.1, "clip_norm": 1.0}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist-5k": {
        "non-private": {"steps": 300, "batch_size": 128, "learning_rate": 0.05},
        "dp-sgd": TUNED_DP_SGD,
        "b-gep": TUNED_GEP,
        "gep": TUNED_GEP,
        "public-only": {"steps": 300, "batch_size": 64, "learning_rate": 0.05},
        "sparsified": TUNED_DP_SGD,
        "dp-adam": {"steps": 150, "learning_rate": 0.007, "clip_norm": 3.2, "average": 0.9}
        | {"schedule": "cosine"},
        "dp-adam-bc": TUNED_DP_SGD | {"learning_rate": 0.005, "floor": 0.005},
        "projected-dp-sgd": MOVING
        | {"steps": 150, "learning_rate": 0.063, "clip_norm": 1.8, "average": 0.9},
        "adadps": TUNED_DP_SGD,
        "pda-dpmd": {"steps": 150, "learning_rate": 0.055, "clip_norm": 1.7, "average": 0.95}
        | {"mixing": 0.5},
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
SMOKE: dict[str, Any] = {"seeds": 1, "steps": 4, "batch_size": 32, "rank": 8, "max_examples": 200}
SMOKE |= {"teachers": 10, "queries": 20}
MODELS = {"mnist-5k": "mnist_cnn", "mnist": "mnist_cnn", "digits": "mlp"}


def main(args: Args) -> dict[str, Any]:
    """Run the methods and return the summary."""
    if args.smoke:
        instead = () if args.epochs is None else ("steps",)
        args = _options.smaller(args, {k: v for k, v in SMOKE.items() if k not in instead})
    if not args.methods:
        public = args.num_public != 0
        methods = tuple(method for method in METHODS if public or method != "public-only")
        args = dataclasses.replace(args, methods=methods)
    check(args)
    name = network(args)
    model = models.build(name, datasets.shape(args.dataset), 10, args.activation)
    data, anchors, chosen = prepare(args, name)
    size = len(data.train_labels)
    ending = "-smoke" if args.smoke else "-validation" if args.validation else ""
    default = pathlib.Path("runs", "gep", f"{args.dataset}-eps{args.epsilon:g}{ending}")
    folder = _run.Folder(args.out or default, "gep")
    shared = {key: getattr(args, key) for key in ("epsilon", "delta", "seed", "activation")}
    shared |= {"data": data.source, "model": name, "anchors": f"{len(anchors)} {args.anchors}"}
    shared |= datasets.identity(args.anchors, anchors)
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
    public_images = {"anchors_check": zlib.crc32(anchors.tobytes()), "devices": args.devices}
    with _resume.open_ledger(folder) as ledger:
        for method in args.methods:
            own, spend = chosen[method], budgets[method]
            every = args.eval_every or max(1, own.steps // 20)
            run, runs, names = None, [], []
            rest = own.steps, args.delta, spend.noise_multiplier
            plan = _resume.accounted(method, spend.plan, size, *rest)
            for repeat in range(args.seeds):
                piece, config = pieces[method, repeat]
                name = piece.replace("/", "-")
                result = folder.get(piece, config)
                if result is None:
                    given = spend, every, args.devices
                    run = run or make_run(method, own, model, data, anchors, *given)
                    resume = _resume.resumable(
                        ledger,
                        plan,
                        config | public_images,
                        own.steps,
                        name=name,
                        save_every=args.save_every,
                        as_new=args.resume_as_new,
                    )
                    total = {"class-means": 1, "pate": getattr(own, "teachers", 0)}
                    total = total.get(method, own.steps)
                    with _run.progress(f"{method} {repeat + 1}/{args.seeds}", total) as advance:
                        result = run(_run.keys(args.seed, repeat), advance, resume)
                    result = folder.put(piece, config, result)
                checkpoints.discard(folder.path, name)  # and the keys
                runs.append(result)
                names.append(name)
            accuracies = [result["test_accuracy"] for result in runs]
            public = public_data(method, own, shared["anchors"], len(data.public_labels))
            cost = _resume.spent(ledger, names, spend.epsilon_spent)
            rows[method] = {
                "test_accuracy_mean": float(np.mean(accuracies)),
                "test_accuracy_std": float(np.std(accuracies, ddof=1)) if len(runs) > 1 else 0.0,
                "epsilon_spent": cost.epsilon,
                "noise_multiplier": spend.noise_multiplier,
                "seconds": sum(result["seconds"] for result in runs),
                "compile_seconds": runs[0].get("compile_seconds"),
                "setting": dataclasses.asdict(own),
                "public_data": public,
                "privacy": statement(args, method, own, spend, public) + cost.line,
                "runs": runs,
            }
    summary = {
        "experiment": "gep",
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


def network(args: Args) -> str:
    """The name of the network that is trained."""
    return args.model or MODELS.get(args.dataset, "resnet20")


def prepare(args: Args, model: str) -> tuple[datasets.Dataset, np.ndarray, dict[str, Setting]]:
    """The data, the anchors, and the setting of every method, if they belong together."""
    data = datasets.load(args.dataset, args.data_dir, args.max_examples, args.num_public)
    anchors = datasets.anchors(args.anchors, data, args.num_anchors, args.data_dir)
    if args.validation:
        data = data.validation(args.validation)
    size = len(data.train_labels)
    chosen = {method: setting(args, method, size, model) for method in args.methods}
    check_settings(args, chosen, model, data, len(anchors))
    return data, anchors, chosen


def check_settings(
    args: Args, settings: dict[str, Setting], model: str, data: datasets.Dataset, anchors: int
):
    """Refuse what depends on the model or on the amount of data."""
    size, layers = len(data.train_labels), models.LAYERS[model]
    for method, own in settings.items():
        if method in PLANNED and own.batch_size > size:
            raise UsageError(f"--batch-size {own.batch_size} exceeds the {size:,} private images")
        if method in IN_SUBSPACE and own.groups > layers:
            raise UsageError(f"--groups {own.groups} exceeds the {layers} layers of {model}")
        spanned = method in IN_SUBSPACE and own.subspace != "gaussian"
        if spanned and own.rank > anchors * own.groups:
            raise UsageError(f"--rank {own.rank} exceeds what {anchors} anchors span")
        if own.subspace == "true-labels" and args.anchors != "in-distribution":
            raise UsageError("--subspace true-labels needs --anchors in-distribution")
        if isinstance(own, PateSetting):
            _check_votes(own, size, anchors)
        if method == "class-means" and anchors < 2:
            raise UsageError(f"class-means needs 2 public images or more, but got {anchors}")
    for method in settings:
        if method in WITH_LABELS and not len(data.public_labels):
            raise UsageError(f"{method} needs --num-public above 0; leave it out of --methods")
    if args.delta >= 1 / size:
        raise UsageError(f"--delta must be below 1 / {size:,} private images, but got {args.delta}")


def _check_votes(own: PateSetting, size: int, anchors: int):
    if own.queries > anchors:
        raise UsageError(f"--queries {own.queries} exceeds the {anchors} public images")
    if own.teachers > size:
        raise UsageError(f"--teachers {own.teachers} exceeds the {size:,} private images")
    if (own.threshold is None) != (own.answers is None):
        raise UsageError("give --threshold and --answers together, or neither")
    if own.threshold is not None and own.threshold > own.teachers:
        raise UsageError(f"--threshold {own.threshold} exceeds the {own.teachers} teachers")
    if own.answers is not None and own.answers > own.queries:
        raise UsageError(f"--answers {own.answers} exceeds the {own.queries} queries")


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


def statement(args: Args, method: str, own: Setting, spent: Budget, public: str) -> str:
    """The privacy statement of one run of a method."""
    if spent.plan is None:
        return spent.statement
    norms = {"dp-sgd": own.clip_norm, "gep": own.clip_norms, "b-gep": own.clip_norms[0]}
    norms |= {"pate": "none: a teacher has one vote on each query"}
    return spent.plan.report(
        mechanism=method,
        clip_norms=norms.get(method, own.clip_norm),
        sampler_used="yes, inside the jitted step",
        steps_taken=own.steps,
        key_source=_run.key_statement(args.seed),
        public_data=public,
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
        f"{'method':<18}{part + ' accuracy':<22}{'epsilon':<10}{'noise':<10}{'seconds':<10}"
        f"{'compile':<10}public data",
    ]
    for method, row in summary["methods"].items():
        accuracy = f"{row['test_accuracy_mean']:.4f} +- {row['test_accuracy_std']:.4f}"
        epsilon, noise = (
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("epsilon_spent", "noise_multiplier")
        )
        compiling = "-" if row["compile_seconds"] is None else f"{row['compile_seconds']:.1f}"
        lines.append(
            f"{method:<18}{accuracy:<22}{epsilon:<10}{noise:<10}{row['seconds']:<10.1f}"
            f"{compiling:<10}{row['public_data']}"
        )
    lines += [
        "",
        f"Accuracy after the last step: mean and standard deviation of {args.seeds} run(s).",
        "Not paid for: a search for hyper-parameters on private data, publishing more than one of",
        "these models or runs, and whatever the public images say about the private ones.",
    ]
    if "pate" in summary["methods"]:
        lines.append(_pate.answers(summary["methods"]["pate"]["runs"]))
    for method, row in summary["methods"].items():
        lines += ["", f"== {method} ==", row["privacy"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _run.command_line(Args, main)
