"""Train a linear classifier on pretrained features of CIFAR-10 privately, by several methods.

The setting of Appendix A of Yu et al. 2021 (GEP), with features that come inside a Python package:
50,000 private training images, 500 test images that count as public, and the other 9,500 to test.
Every method takes the same Poisson batches, steps, optimizer (Adam, whose learning rate falls to
zero along a cosine) and noise; they differ in what they release, and in what they know of the
public images (the table says so):

  non-private   no clipping and no noise: the ceiling
  dp-sgd        clipped and noised gradients
  b-gep         only the part in the subspace of public gradients
  gep           that part, and separately the rest, clipped at a fifth or at half of its norm
  projected     dp-sgd, of whose noisy gradients only the part in the subspace is kept
  adadps        gradients divided by the public gradients' root mean square, before the clip
  pda-dpmd      dp-sgd, mixed with the gradient of the public images WITH their labels
  public-only   the public images WITH their labels and nothing else: the floor

Protocol: for every budget each private method tries the same number of settings, once each, on the
private images without 5,000 of them, and is scored on these 5,000; the best is then run on all
private images with several seeds. The test images decide nothing. The search is NOT paid for.

Features are computed once (torch is needed for that: `pip install 'jdp[features]'`), with progress,
and kept in the cache folder ($JDP_CACHE, or ~/.cache/jdp). Results go to a run folder
(summary.json, report.txt, probe.png); a run that was interrupted is taken up where it stopped. The
last line on standard output is the result as one JSON object.

  python -m experiments.linear_probe                         everything; the search takes longest
  python -m experiments.linear_probe --features mine.npz --epsilons 1 --methods dp-sgd gep
  python -m experiments.linear_probe --smoke                 8x8 digits: a few steps, no torch
"""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

import jdp
from experiments import _features, _options, _probe_methods, _probe_report, _run
from experiments._features import Features
from experiments._probe_methods import METHODS, PRIVATE, Data, Knobs, Setting, grid, make_train
from experiments._run import UsageError

SMOKE: dict[str, Any] = {"epsilons": (2.0,), "seeds": 2, "batch_size": 100, "steps": 4}
SMOKE |= {"num_public": 50, "validation": 200, "groups": 1}
TUNING = 10_000  # number of the keys that tuning runs share; those of seeds come before


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    features: pathlib.Path | None = None
    """A .npz file of features: arrays train, train_labels, test and test_labels."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which methods to run."""
    epsilons: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0)
    """Privacy budgets of each single run."""
    delta: float = 1e-5
    """Probability with which each privacy bound may fail; keep it below 1 / private examples."""
    seeds: int = 5
    """Number of runs for each number; the summary has mean and standard deviation."""
    seed: int | None = None
    """Make the run reproducible; it is then NOT private against whoever knows the seed."""
    batch_size: int = 2_000
    """Expected batch size (each record is drawn independently for each batch)."""
    steps: int = 100
    """Training steps."""
    num_public: int = 500
    """How many test examples count as public (and are not tested on)."""
    groups: int = 10
    """Parameter groups of methods with a subspace: blocks of classes, each with its own."""
    validation: int = 5_000
    """Private examples that are held out to choose settings."""
    unprotected_share_outside: bool = False
    """Also publish how much of private gradients lies outside of the public subspace. It reads
    private gradients without noise: the privacy statement does not cover that number."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/linear_probe."""
    smoke: bool = False
    """Only check that everything works: digits, 1 budget, 2 seeds, 4 steps, where not given, and 2
    settings a method."""


def main(args: Args) -> dict[str, Any]:
    """Tune and run the methods, and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    if args.features is not None:
        features = _features.read(args.features)
    else:
        features = _features.digits() if args.smoke else _features.cifar10(args.data_dir)
    check_data(args, features)
    ending = "-smoke" if args.smoke else ""
    default = pathlib.Path("runs", f"linear_probe{ending}")
    folder = _run.Folder(args.out or default, "linear_probe")
    study = Study(args, features, folder)
    tuned = {method: study.tune(method) for method in args.methods}
    rows = [row for method in args.methods for row in study.run(method, tuned[method])]
    summary = {
        "experiment": "linear_probe",
        "features": features.source,
        "shared": study.shared,
        "delta": args.delta,
        "seeds": args.seeds,
        "methods_know": {method: METHODS[method] for method in args.methods},
        "rows": rows,
    }
    if args.unprotected_share_outside:
        summary["unprotected_share_outside"] = study.unprotected_share_outside()
    summary |= {
        "privacy": {f"{epsilon:g}": study.statement(epsilon) for epsilon in args.epsilons},
        "provenance": _run.provenance(),
    }
    _run.write_json(folder.path / "summary.json", summary)
    text = _probe_report.report(summary)
    (folder.path / "report.txt").write_text(text)
    _probe_report.draw(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    kept = ("method", "epsilon", "test_accuracy_mean", "test_accuracy_std", "noise_multiplier")
    brief = [{key: row[key] for key in kept} for row in rows]
    return {"experiment": "linear_probe", "features": features.source, "rows": brief}


def check(args: Args):
    """Refuse what can be refused before data is touched."""
    _options.check_names(args, {"methods": METHODS})
    _options.check_delta(args.delta)
    least = {"epsilons": 1e-3, "seeds": 1, "batch_size": 1, "steps": 1, "num_public": 2}
    _options.check_least(args, least | {"groups": 1, "validation": 1})
    _options.check_seed(args.seed)


def check_data(args: Args, features: Features):
    """Refuse what depends on the amount of data."""
    size, tests = len(features.train), len(features.test)
    if args.validation + args.batch_size > size:
        got = f"--validation {args.validation} and --batch-size {args.batch_size}"
        raise UsageError(f"{got} exceed the {size:,} private examples together")
    if not 2 <= features.num_classes <= size:
        raise UsageError(
            f"labels must count 2 classes or more, and at most as many as the {size:,} private "
            f"examples, but the largest is {features.num_classes - 1}; number classes from 0"
        )
    if args.groups > features.num_classes:
        raise UsageError(f"--groups {args.groups} exceeds the {features.num_classes} classes")
    if args.num_public >= tests:
        raise UsageError(f"--num-public must be below the {tests:,} test examples")
    if args.delta >= 1 / size:
        raise UsageError(f"--delta must be below 1 / {size:,} examples, but got {args.delta}")


def split(features: Features, num_public: int, validation: int) -> Data:
    """The data, tested on the test part, or on the last `validation` private examples if not 0.

    Every example gets one more feature, 1, for the bias, and is then scaled to length 1, which
    needs no statistics of the data.
    """

    def scaled(x: np.ndarray) -> np.ndarray:
        x = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
        # In float64: squares of what float32 holds may be more than it holds.
        norms = np.sqrt(np.einsum("ij,ij->i", x, x, dtype=np.float64))[:, None]
        return np.divide(x, norms, out=x, casting="same_kind")

    order = np.random.RandomState(0).permutation(len(features.test))
    public, rest = order[:num_public], order[num_public:]
    train, test = (features.train, features.train_labels), (features.test, features.test_labels)
    if validation:
        train, tested = ([part[s] for part in train] for s in _cut(len(train[0]), validation))
    else:
        tested = [part[rest] for part in test]
    parts = [train, tested, [part[public] for part in test]]
    return Data(*(jnp.asarray(a) for x, y in parts for a in (scaled(x), y)))


def _cut(count: int, last: int) -> tuple[slice, slice]:
    return slice(count - last), slice(count - last, None)


class Study:
    """The runs of one configuration, kept in a folder."""

    def __init__(self, args: Args, features: Features, folder: _run.Folder):
        self.args, self.folder = args, folder
        self.classes = features.num_classes
        self.shared: dict[str, Any] = {"features": features.source}
        names = ("delta", "batch_size", "steps", "num_public", "groups", "validation", "seed")
        self.shared |= {name: getattr(args, name) for name in names}
        if args.features is not None:  # a name and sizes do not tell one file from another
            self.shared["file"] = str(args.features.resolve())
            self.shared["public_digest"] = _features.public_digest(features)
        self.data, self.plans = {}, {}
        for stage, held in (("tune", args.validation), ("final", 0)):
            self.data[stage] = split(features, args.num_public, held)
            self.plans[stage] = {
                epsilon: jdp.plan(
                    num_examples=len(self.data[stage].train),
                    batch_size=args.batch_size,
                    steps=args.steps,
                    epsilon=epsilon,
                    delta=args.delta,
                )
                for epsilon in args.epsilons
            }
        self.programs: dict[Any, Any] = {}

    def budgets(self, method: str) -> tuple[float | None, ...]:
        """The budgets under which a method runs; None is one that no budget concerns."""
        return self.args.epsilons if method in PRIVATE else (None,)

    def tune(self, method: str) -> dict[float | None, dict[str, Any]]:
        """For every budget the best setting, and the scores of all."""
        settings = grid(method, self.classes)
        if self.args.smoke:
            settings = settings[:: len(settings) // 2][:2]
        runs = [(e, s, TUNING) for s in settings for e in self.budgets(method)]
        results = self._all("tune", method, runs)
        chosen = {}
        for epsilon in self.budgets(method):
            scores = [results[epsilon, s, TUNING]["test_accuracy"] for s in settings]
            trials = [[*s, score] for s, score in zip(settings, scores, strict=True)]
            chosen[epsilon] = {"setting": settings[int(np.argmax(scores))], "trials": trials}
        return chosen

    def run(self, method: str, tuned: dict[float | None, dict[str, Any]]) -> list[dict[str, Any]]:
        """One row for each budget: test accuracy with the best setting."""
        own = {epsilon: tuned[epsilon]["setting"] for epsilon in self.budgets(method)}
        runs = [(e, s, r) for e, s in own.items() for r in range(self.args.seeds)]
        results = self._all("final", method, runs)
        rows = []
        for epsilon, setting in own.items():
            found = [results[epsilon, setting, r] for r in range(self.args.seeds)]
            accuracies = [result["test_accuracy"] for result in found]
            plan = None if epsilon is None else self.plans["final"][epsilon]
            spread = float(np.std(accuracies, ddof=1)) if len(found) > 1 else 0.0
            row = {"method": method, "epsilon": epsilon}
            row["epsilon_spent"] = 0.0 if method == "public-only" else plan and plan.epsilon
            row["noise_multiplier"] = plan and float(plan.noise_multiplier)
            row |= {"test_accuracy_mean": float(np.mean(accuracies)), "test_accuracy_std": spread}
            row |= {"cpu_seconds": float(np.median([result["cpu_seconds"] for result in found]))}
            row |= {"setting": setting._asdict(), "trials": tuned[epsilon]["trials"]}
            rows.append(row | {"runs": accuracies})
        return rows

    def _all(self, stage: str, method: str, runs: list[tuple[Any, Setting, int]]) -> dict[Any, Any]:
        """Results by run; those that are missing are computed, compiled as rarely as can be."""
        args, results, missing = self.args, {}, []
        for run in runs:
            epsilon, setting, repeat = run
            budget = "" if epsilon is None else f"eps{epsilon:g}/"
            piece = f"{stage}/{method}/{budget}" + "-".join(f"{v}" for v in (*setting, repeat))
            config = self.shared | {"epsilon": epsilon} | setting._asdict()
            found = self.folder.get(piece, config)
            if found is None:
                missing.append((run, piece, config))
            else:
                results[run] = found
        plans = self.plans[stage]
        sampler = next(iter(plans.values())).sampler
        if any(plan.sampler != sampler for plan in plans.values()):
            raise ValueError(f"plans of {stage} have several samplers, but one program for all")
        with _run.progress(f"{stage} {method}", max(1, len(missing)) * args.steps) as advance:
            for run, piece, config in missing:
                epsilon, setting, repeat = run
                program = (stage, method, setting.rank, setting.horizon)
                if program not in self.programs:
                    rest = (sampler, args.batch_size, args.steps, self.classes, args.groups)
                    self.programs[program] = make_train(method, setting, *rest)
                noise = 0.0 if epsilon is None else float(plans[epsilon].noise_multiplier)
                clips = setting.clip_norm or 0.0, setting.residual or 0.0
                knobs = Knobs(noise, setting.learning_rate, *clips)
                keys = _run.keys(args.seed, repeat)
                result = self.programs[program](self.data[stage], keys, knobs, advance)
                results[run] = self.folder.put(piece, config, result)
        return results

    def unprotected_share_outside(self) -> dict[str, float]:
        """By rank, how much of private gradients is outside of the public subspace: NOT private."""
        ranks = {s.rank for method in METHODS for s in grid(method, self.classes) if s.rank}
        config = self.shared | {"ranks": sorted(ranks)}
        found = self.folder.get("unprotected share outside", config)
        if found is None:
            data, rest = self.data["tune"], (self.classes, self.args.groups)
            measure = _probe_methods.unprotected_share_outside
            found = {str(rank): measure(data, rank, *rest) for rank in sorted(ranks)}
            found = self.folder.put("unprotected share outside", config, found)
        return found

    def statement(self, epsilon: float) -> str:
        """The privacy statement of one run of one private method."""
        args = self.args
        return self.plans["final"][epsilon].report(
            mechanism="any ONE run of one of the private methods: they share this plan",
            clip_norms="as chosen for the method",
            sampler_used="yes, inside the jitted step",
            steps_taken=args.steps,
            key_source=_run.key_statement(args.seed),
            public_data=f"{args.num_public} test examples, as the table says for each method",
            hyperparameter_search=f"settings chosen on {args.validation:,} of the private examples",
        )


if __name__ == "__main__":
    _run.command_line(Args, main)
