"""Search hyper-parameters for `experiments.gep` on a validation part of the private set.

Every method gets the same number of settings, the present default and then random ones from a
fixed seed, each run once on the private records without the validation part, and scored on that
part; the test set is not looked at. The search is NOT paid for: it reads private records, and so
do the settings it finds. Paste the best ones into `DEFAULTS` of `experiments/gep.py`.

Finished trials are kept in the run folder (results.json), so the search can be interrupted, and
continued with more --trials. The last line on standard output is one JSON object with the best
setting of each method.

  python -m experiments.search_gep --trials 12
"""

import dataclasses
import pathlib
from typing import Any, Literal

import numpy as np

from experiments import _run, datasets, gep, models
from experiments._methods import METHODS, Setting, budget, make_run


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the search."""

    dataset: Literal["mnist-5k", "digits", "mnist"] = "mnist-5k"
    """Data set."""
    methods: tuple[str, ...] = METHODS
    """Which methods to search; all get the same number of trials."""
    trials: int = 12
    """Random settings for each method."""
    epsilon: float = 1.0
    """Privacy budget of each trial."""
    delta: float = 1e-5
    """Probability with which the privacy bound may fail."""
    validation: int = 500
    """Private records held out to score a setting."""
    anchors: str = "in-distribution"
    """Public images for GEP, as in experiments.gep."""
    seed: int = 0
    """Seed of the settings and of the runs."""
    max_steps: int = 1_000_000
    """Upper bound on the steps of a trial, to try things quickly."""
    max_examples: int | None = None
    """Use only so many private images."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/search_gep/<data set>-eps<epsilon>."""


def draw(method: str, generator: np.random.RandomState, size: int, layers: int) -> Setting:
    """One random setting. Every method draws from the same ranges, as far as they concern it."""

    def log_uniform(low: float, high: float) -> float:
        return float(f"{np.exp(generator.uniform(np.log(low), np.log(high))):.2g}")

    def pick(*options):
        return options[generator.randint(len(options))]

    if method == "class-means":
        return Setting(components=pick(*range(5, 105, 5)))
    if method in ("non-private", "public-only"):
        rate = log_uniform(0.005, 0.3)
        return Setting(
            steps=pick(300, 600, 1_000), batch_size=pick(32, 64, 128), learning_rate=rate
        )
    # Clipped steps of size rate * clip norm travel a similar distance in all good runs.
    clip, travel, steps = log_uniform(0.2, 2.0), log_uniform(4, 40), pick(100, 200, 300)
    return Setting(
        steps=steps,
        batch_size=round(size * pick(0.05, 0.1, 0.2)),
        learning_rate=float(f"{travel / steps / clip:.2g}"),
        schedule=pick("constant", "cosine"),
        clip_norm=clip,
        clip_norms=(clip, float(f"{clip * generator.uniform(0.1, 0.5):.2g}")),
        rank=pick(100, 150, 250),
        groups=pick(1, layers),
        refresh_every=pick(5, 10),
    )


def main(args: Args) -> dict[str, Any]:
    """Run the trials that are not finished yet, and return the best setting of each method."""
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    for name in ("trials", "max_steps", "out"):
        options.pop(name)
    if args.trials < 1 or args.validation < 1:
        raise _run.UsageError("--trials and --validation must be at least 1")
    same = gep.Args(**options)
    gep.check(same)
    name = gep.MODELS[args.dataset]
    model = models.build(name, datasets.shape(args.dataset))
    data = datasets.load(args.dataset, args.data_dir, args.max_examples)
    anchors = datasets.anchors(args.anchors, data, data_dir=args.data_dir)
    data = data.validation(args.validation)
    size = len(data.train_labels)
    folder = _run.Folder(
        args.out or pathlib.Path("runs", "search_gep", f"{args.dataset}-eps{args.epsilon:g}")
    )
    best = {}
    for method in args.methods:
        scores = []
        with _run.progress(f"search {method}", args.trials) as advance:
            for trial in range(args.trials):
                source = np.random.RandomState([args.seed, METHODS.index(method), trial])
                own = draw(method, source, size, models.LAYERS[name])
                if trial == 0:
                    own = gep.setting(same, method, size, name)  # what the table has now
                own = dataclasses.replace(own, steps=min(own.steps, args.max_steps))
                gep.check_settings(same, {method: own}, name, data, len(anchors))
                config = {"epsilon": args.epsilon, "delta": args.delta, "data": data.source}
                config |= {"anchors": args.anchors, "seed": args.seed} | dataclasses.asdict(own)
                result = folder.get(f"{method}/{trial}", config)
                if result is None:
                    spend = budget(method, own, size, args.epsilon, args.delta)
                    run = make_run(method, own, model, data, anchors, spend, own.steps)
                    result = run(_run.keys(args.seed, trial), lambda _: None)
                    folder.put(f"{method}/{trial}", config, result)
                scores.append((result["test_accuracy"], trial, dataclasses.asdict(own)))
                advance(1)
        score, trial, setting = max(scores, key=lambda entry: entry[:2])
        defaults = dataclasses.asdict(Setting())
        changed = {key: value for key, value in setting.items() if value != defaults[key]}
        ranking = sorted((entry[:2] for entry in scores), reverse=True)
        best[method] = {"validation_accuracy": score, "trial": trial, "setting": changed}
        print(f"{method}: {score:.4f} by trial {trial}, {changed}; all: {ranking}")
    print("The search was not paid for: it read the private records without noise on its scores.")
    summary = {"dataset": args.dataset, "epsilon": args.epsilon, "delta": args.delta}
    summary |= {"trials": args.trials, "validation": args.validation, "best": best}
    _run.write_json(folder.path / "summary.json", summary | {"provenance": _run.provenance()})
    return summary


if __name__ == "__main__":
    _run.command_line(Args, main)
