"""Change one thing of gradient embedding perturbation (GEP) at a time, and see what it does.

Around the default of `python -m experiments.gep`, on 5,000 MNIST digits at epsilon 1 with batches
of 100 and for 60 steps (a quarter of the default's time), with the same seeds for every
case, so that differences are paired:

  rank      accuracy against the rank k, of gep and b-gep, with whitening and without
  anchors   against the number of public images
  source    what spans the subspace: the public digits under random labels (the default) or their
            true ones, natural images, other digits, or chance
  power     power iterations, from the last subspace or from Gaussian rows
  refresh   steps for which a subspace is kept
  noise     equal or optimal split of the budget, or a joint clip
  groups    parameter groups, with time and memory; those of ResNet20 too (a few steps)
  levers    what De et al. 2022 added to dp-sgd, for dp-sgd and gep
  error     no accuracy: the share of gradients outside of the subspace, and stable ranks, over
            training. Measured on test images: on private ones it would not be private.

Results go to a folder (summary.json, report.txt, ablation.png); a run that was interrupted is taken
up case by case where it stopped. The last line on standard output is one JSON object.

  python -m experiments.gep_ablation                      all parts, 3 seeds
  python -m experiments.gep_ablation --parts rank error   two of them
  python -m experiments.gep_ablation --smoke              8x8 digits, a few steps
"""

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from experiments import _ablation_report, _ablation_subspace, _options, _run, datasets, gep, models
from experiments._ablation_cases import CASES, SOURCES, Case
from experiments._methods import Setting, budget, make_run
from experiments._run import UsageError
from experiments.datasets import Dataset

PARTS = (*CASES, "error")
SMOKE: dict[str, Any] = {"dataset": "digits", "seeds": 1, "batch_size": 16, "steps": 2}
OPTIONS = ("anchors", "num_anchors")  # of a case, that are no hyper-parameters


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    parts: tuple[str, ...] = PARTS
    """Which parts to run."""
    dataset: Literal["mnist-5k", "digits"] = "mnist-5k"
    """Data set."""
    epsilon: float = 1.0
    """Privacy budget of each single run."""
    delta: float = 1e-5
    """Probability with which each privacy bound may fail."""
    seeds: int = 3
    """Number of runs of each case."""
    seed: int = 0
    """Seed of all cases: the runs are NOT private against whoever knows it."""
    batch_size: int = 100
    """Expected batch size."""
    steps: int = 60
    """Training steps."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, for the natural images; without them their cases stay out."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/gep_ablation/<data set>-eps<epsilon>."""
    smoke: bool = False
    """Only check that everything works: digits, 1 seed, 2 steps, where not given."""


class Study:
    """The data, the defaults, and the folder with what is finished."""

    def __init__(self, args: Args):
        same = {"dataset": args.dataset, "epsilon": args.epsilon, "delta": args.delta}
        self.args, self.gep = args, gep.Args(**same)
        self.data = datasets.load(args.dataset)
        self.name = gep.MODELS[args.dataset]
        self.model = models.build(self.name, datasets.shape(args.dataset))
        default = pathlib.Path("runs", "gep_ablation", f"{args.dataset}-eps{args.epsilon:g}")
        self.folder = _run.Folder(args.out or default, "gep_ablation")
        self.shared = same | {"seed": args.seed, "data": self.data.source, "model": self.name}

    def setting(self, method: str, change: dict[str, Any]) -> Setting:
        """The hyper-parameters of a case."""
        own = gep.setting(self.gep, method, len(self.data.train_labels), self.name)
        base = {"batch_size": self.args.batch_size, "steps": self.args.steps}
        changes = base | {k: v for k, v in change.items() if k not in OPTIONS}
        return dataclasses.replace(own, **changes)

    def anchors(self, change: dict[str, Any]) -> np.ndarray:
        """The public images of a case."""
        name, count = change.get("anchors", "in-distribution"), change.get("num_anchors")
        return datasets.anchors(name, self.data, count, self.args.data_dir)

    def fits(self, case: Case) -> bool:
        """Whether a case can be run on these data; where not, say why and leave it out."""
        own = self.setting(case.method, case.change)
        options = {key: case.change[key] for key in OPTIONS if key in case.change}
        try:
            images = len(self.anchors(case.change))
            settings = {case.method: own}
            checked = dataclasses.replace(self.gep, **options)
            gep.check_settings(checked, settings, self.name, self.data, images)
        except UsageError as error:
            print(f"left out {case.name}: {error}")
            return False
        return True

    def run(self, case: Case, repeats: int) -> list[dict[str, Any]]:
        """The results of a case, computed where they are not there yet."""
        own, run, results = self.setting(case.method, case.change), None, []
        options = {key: case.change.get(key) for key in OPTIONS}
        config = self.shared | options | dataclasses.asdict(own)
        for repeat in range(repeats):
            piece = f"{case.name}/{repeat}"
            result = self.folder.get(piece, config)
            if result is None:
                args = (self.data, self.anchors(case.change))
                run = run or self._compile(case.method, own, *args)
                with _run.progress(piece, own.steps) as advance:
                    result = run(_run.keys(self.args.seed, repeat), advance)
                result = self.folder.put(piece, config, result)
            results.append(result)
        return results

    def _compile(self, method: str, own: Setting, data: Dataset, anchors: np.ndarray):
        spend = budget(method, own, len(data.train_labels), self.args.epsilon, self.args.delta)
        every = max(1, own.steps // 10)
        return make_run(method, own, self.model, data, anchors, spend, every)

    def errors(self, repeat: int) -> list[dict[str, Any]]:
        """What `experiments._ablation_subspace` measures in one run."""
        own = self.setting("gep", {})
        config = self.shared | dataclasses.asdict(own)
        changes = {
            name: change
            for name, change in SOURCES.items()
            if self.fits(Case("", "", "gep", change))
        }
        left_out = sorted(SOURCES.keys() - changes.keys())
        piece = f"error{' without ' + ', '.join(left_out) if left_out else ''}/{repeat}"
        result = self.folder.get(piece, config)
        if result is None:
            sources = {n: (self.setting("gep", c), self.anchors(c)) for n, c in changes.items()}
            size = len(self.data.train_labels)
            plan = budget("gep", own, size, self.args.epsilon, self.args.delta).plan
            points = len(_ablation_subspace.CHECKPOINTS)
            with _run.progress(f"error {repeat}", points) as advance:
                found = _ablation_subspace.measure(
                    own,
                    self.model,
                    self.data,
                    sources,
                    plan,
                    _run.keys(self.args.seed, repeat),
                    advance,
                )
            result = self.folder.put(piece, config, {"checkpoints": found})
        return result["checkpoints"]

    def resnet_groups(self) -> list[dict[str, Any]]:
        """Time and memory of GEP with ResNet20 in 1 and in 5 groups; on noise, for a few steps."""
        source = np.random.default_rng(0)
        images = source.normal(size=(160, 32, 32, 3)).astype(np.float32)
        labels = source.integers(10, size=160).astype(np.int32)
        parts = [part for rows in (slice(64), slice(32, 160), slice(8)) for part in (rows,) * 2]
        arrays = [(images if i % 2 == 0 else labels)[rows] for i, rows in enumerate(parts)]
        data = Dataset("noise", *arrays, num_classes=10, source="noise")
        own = {"batch_size": 32, "steps": 4, "rank": 100, "refresh_every": 2, "warm_start": True}
        rows = []
        for groups in (1, 5):
            setting = Setting(groups=groups, **own)
            piece, config = f"resnet20 groups={groups}", dataclasses.asdict(setting)
            result = self.folder.get(piece, config)
            if result is None:
                model = models.build("resnet20", (32, 32, 3))
                spend = budget("gep", setting, 64, 8.0, 1e-3)
                run = make_run("gep", setting, model, data, data.public_images, spend, 2)
                with _run.progress(piece, setting.steps) as advance:
                    result = self.folder.put(piece, config, run(_run.keys(0, 0), advance))
            rows.append({"line": "gep, resnet20", "value": f"{groups}"} | _cost([result]))
        return rows


def _cost(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seconds_per_step": float(np.median([r["seconds_per_step"] for r in results])),
        "temporary_bytes": results[0]["temporary_bytes"],
    }


def check(args: Args):
    """Refuse what can be refused before data is touched."""
    _options.check_names(args, {"parts": PARTS})
    names = ("epsilon", "delta", "seeds", "seed", "batch_size", "steps")
    gep.check(gep.Args(**{name: getattr(args, name) for name in names}))


def main(args: Args) -> dict[str, Any]:
    """Run the parts and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    study = Study(args)
    parts: dict[str, list[dict[str, Any]]] = {}
    for part in args.parts:
        if part == "error":
            continue
        parts[part] = []
        for case in CASES[part]:
            if not study.fits(case):
                continue
            results = study.run(case, args.seeds)
            accuracies = [result["test_accuracy"] for result in results]
            spread = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0
            row = {"line": case.line, "value": case.value, "method": case.method}
            row |= {"change": case.change, "accuracies": accuracies}
            row |= {"mean": float(np.mean(accuracies)), "std": spread}
            parts[part].append(row | _cost(results))
        if part == "groups" and not args.smoke:
            parts["resnet20"] = study.resnet_groups()
    errors = [study.errors(repeat) for repeat in range(args.seeds)] if "error" in args.parts else []
    summary = {
        "experiment": "gep_ablation",
        "shared": study.shared | {"seeds": args.seeds, "backend": jax.default_backend()},
        "base": {m: dataclasses.asdict(study.setting(m, {})) for m in ("gep", "b-gep", "dp-sgd")},
        "parts": parts,
        "error": errors,
        "provenance": _run.provenance(),
    }
    _run.write_json(study.folder.path / "summary.json", summary)
    text = _ablation_report.markdown(summary)
    (study.folder.path / "report.txt").write_text(text)
    _ablation_report.draw(study.folder.path)
    print(f"{text}\nwritten to {study.folder.path}")
    brief = {
        part: {f"{r['line']} {r['value']}": r.get("mean") for r in rows}
        for part, rows in parts.items()
    }
    return {"experiment": "gep_ablation", "parts": brief, "errors": len(errors)}


if __name__ == "__main__":
    _run.command_line(Args, main)
