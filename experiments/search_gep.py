"""Search hyper-parameters for `experiments.gep` on a validation part of the private set.

Every method gets the same number of settings, the present default and then random ones from a
fixed seed, each run once on the private records without a validation part, and scored on that
part. The best of them, the finalists, are run again with other parts held out, and the best mean
wins. The test set is not looked at. The search is NOT paid for: it reads private records, and so
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

from experiments import _options, _run, datasets, gep, models
from experiments._methods import METHODS, OPTIONAL, Setting, budget, make_run


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the search."""

    dataset: Literal["mnist-5k", "digits", "mnist"] = "mnist-5k"
    """Data set."""
    methods: tuple[str, ...] = METHODS
    """Which methods to search, also OPTIONAL ones but pate; all get the same number of trials."""
    trials: int = 12
    """Random settings for each method."""
    finalists: int = 4
    """How many of the best settings are run again."""
    parts: int = 4
    """Held-out parts on which a finalist is scored."""
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


def draw(method: str, generator: np.random.RandomState, size: int) -> Setting:
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
    clip, travel, steps = log_uniform(0.5, 4.0), log_uniform(4, 40), pick(50, 100, 150)
    # Clipped steps of size rate * clip norm travel a similar distance in all good runs.
    common = Setting(
        steps=steps,
        batch_size=round(size * 0.1),
        learning_rate=float(f"{travel / steps / clip:.2g}"),
        schedule=pick("constant", "cosine"),
        average=pick(0.0, 0.9, 0.95),
        clip_norm=clip,
        clip_norms=(clip, float(f"{clip * log_uniform(0.05, 0.5):.2g}")),
        rank=150,
        refresh_every=10,
        warm_start=True,
        whitening=pick(0.5, 1.0),
    )
    if method == "sparsified":
        return dataclasses.replace(common, drop_rate=pick(0.3, 0.6, 0.9))
    if method == "adadps":
        return dataclasses.replace(common, floor=log_uniform(1e-4, 1e-1))
    if method == "pda-dpmd":
        return dataclasses.replace(common, mixing=pick(None, 0.5, 0.8))
    if method.startswith("dp-adam"):
        rate, floor = log_uniform(1e-3, 3e-2), log_uniform(2e-3, 2e-2)
        return dataclasses.replace(common, learning_rate=rate, floor=float(f"{clip * floor:.2g}"))
    return common


def main(args: Args) -> dict[str, Any]:
    """Run the trials that are not finished yet, and return the best setting of each method."""
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    for name in ("trials", "finalists", "parts", "max_steps", "out"):
        options.pop(name)
    searched = [name for name in METHODS + OPTIONAL if name != "pate"]
    _options.check_names(args, {"methods": searched})
    least = ("trials", "validation", "finalists", "parts", "max_steps")
    _options.check_least(args, dict.fromkeys(least, 1))
    same = gep.Args(**options)
    gep.check(same)
    name = gep.MODELS[args.dataset]
    model = models.build(name, datasets.shape(args.dataset))
    data = datasets.load(args.dataset, args.data_dir, args.max_examples)
    anchors = datasets.anchors(args.anchors, data, data_dir=args.data_dir)
    splits = [data.validation(args.validation, part) for part in range(args.parts)]
    size = len(splits[0].train_labels)
    default = pathlib.Path("runs", "search_gep", f"{args.dataset}-eps{args.epsilon:g}")
    folder = _run.Folder(args.out or default, "search_gep")

    def setting(method: str, trial: int) -> Setting:
        source = np.random.RandomState([args.seed, (METHODS + OPTIONAL).index(method), trial])
        own = draw(method, source, size)
        if trial == 0:
            own = gep.setting(same, method, size, name)  # what the table has now
        own = dataclasses.replace(own, steps=min(own.steps, args.max_steps))
        gep.check_settings(same, {method: own}, name, splits[0], len(anchors))
        return own

    def score(method: str, trial: int, part: int) -> float:
        own = setting(method, trial)
        config = {"epsilon": args.epsilon, "delta": args.delta, "data": data.source}
        config |= {"validation": [args.validation, part], "anchors": args.anchors}
        config |= datasets.identity(args.anchors, anchors)
        config |= {"seed": args.seed} | dataclasses.asdict(own)
        piece = f"{method}/{trial}/{part}"
        result = folder.get(piece, config)
        if result is None:
            spend = budget(method, own, size, args.epsilon, args.delta)
            run = make_run(method, own, model, splits[part], anchors, spend, own.steps)
            # Every setting meets the same initial parameters and samples, part by part.
            result = folder.put(piece, config, run(_run.keys(args.seed, part), lambda _: None))
        return result["test_accuracy"]

    best = {}
    for method in args.methods:
        finalists = min(args.finalists, args.trials)
        runs = args.trials + finalists * (args.parts - 1)
        with _run.progress(f"search {method}", runs) as advance:

            def scored(trial: int, part: int) -> float:
                accuracy = score(method, trial, part)  # noqa: B023
                advance(1)  # noqa: B023
                return accuracy

            scores = {trial: [scored(trial, 0)] for trial in range(args.trials)}
            ranking = sorted(scores, key=scores.__getitem__, reverse=True)
            for trial in ranking[:finalists]:
                scores[trial] += [scored(trial, part) for part in range(1, args.parts)]
        trial = max(ranking[:finalists], key=lambda trial: np.mean(scores[trial]))
        defaults = dataclasses.asdict(Setting())
        own = dataclasses.asdict(setting(method, trial))
        changed = {key: value for key, value in own.items() if value != defaults[key]}
        mean = float(np.mean(scores[trial]))
        best[method] = {"validation_accuracy": mean, "trial": trial, "setting": changed}
        best[method]["scores"] = {trial: scores[trial] for trial in ranking}
        print(f"{method}: {mean:.4f} by trial {trial}, {changed}; all: {best[method]['scores']}")
    print("The search was not paid for: it read the private records without noise on its scores.")
    summary = {key: getattr(args, key) for key in ("dataset", "epsilon", "delta", "trials")}
    summary |= {"validation": args.validation, "parts": args.parts, "best": best}
    summary |= {"experiment": "search_gep"}
    _run.write_json(folder.path / "summary.json", summary | {"provenance": _run.provenance()})
    return summary


if __name__ == "__main__":
    _run.command_line(Args, main)
