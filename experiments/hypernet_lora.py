"""Adapt a diffusion model to a private set of 128 images: one noisy mean, or noisy gradients.

An unconditional diffusion model is trained on public images. Each private set is 128 images that
resemble each other, and a method turns it into low-rank adapters of the model (LoRA), whose samples
should look like the set:

  no adaptation       the public model as it is: the floor
  dp-deepsets         a hypernetwork, trained on public sets, reads ONE noisy mean of the private
                      set and writes the adapters (Nishikawa et al. 2026)
  non-private         adapters trained by gradients, without privacy: the ceiling of that way
  dp-sgd              adapters trained by DP-SGD
  public-then-dp-sgd  the same, started from adapters trained on the public images
  pda-dpmd            DP-SGD with public gradients mixed in (Amid et al. 2022)

All private methods have the same (epsilon, delta) under the same adjacency. Learning rates come
from one grid, chosen on public sets. The measure is the Frechet distance between samples and set,
in features of a classifier trained on the public images. The control: a set's distance to the
samples that OTHER sets gave. A method that does not beat it has learnt nothing about the set.

The public sets are public images with their nearest neighbours; the private sets come from the
other half of the data. Default data are MNIST at 16x16. Stages are features, pretrain, hypernet,
baselines and evaluate; each is kept in the run folder (summary.json, report.txt, distances.png,
samples.png), and an interrupted run is taken up where it stopped. The last line on standard output
is the summary as one JSON object.

  python -m experiments.hypernet_lora                             about 2 hours on one core
  python -m experiments.hypernet_lora --stages features pretrain  only these, the rest later
  python -m experiments.hypernet_lora --smoke                     a few steps, to see it work
  python -m experiments.hypernet_lora --config full --checkpoint imagenet64_uncond_100M_1500K.pt
                                                                  the paper's size, for accelerators
"""

import dataclasses
import pathlib
from typing import Any, Literal, get_args

from experiments import (
    _lora_config,
    _lora_evaluate,
    _lora_report,
    _lora_stages,
    _options,
    _run,
)
from experiments._lora_baselines import METHODS
from experiments._lora_config import CONFIGS, Config
from experiments._run import UsageError
from jdp import hypernet

Stage = Literal["features", "pretrain", "hypernet", "baselines", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
SMOKE = {"sets": 3, "samples": 72, "sampling_steps": 2, "epsilons": (4.0,)}


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    config: Literal["small", "full"] = "small"
    """Sizes: MNIST at 16x16 for two cores, or the ImageNet-64 model with CIFAR-10 of the paper."""
    stages: tuple[Stage, ...] = STAGES
    """Stages to run now, after those earlier ones that they need and that have not been run."""
    methods: tuple[str, ...] = METHODS
    """Which of the methods that train adapters by gradients to run."""
    epsilons: tuple[float, ...] = (1.0, 4.0, 16.0)
    """Privacy budgets."""
    delta: float = 1e-5
    """Probability with which each privacy bound may fail."""
    adjacency: Literal["replace-one", "zero-out"] = "replace-one"
    """Which data sets are neighbours, for all methods; replace-one is the paper's, and stricter."""
    sets: int = 10
    """Private sets."""
    samples: int = 512
    """Images sampled for each set."""
    sampling_steps: int = 15
    """Network evaluations for each image (DDIM)."""
    features: str = "classifier"
    """Features for neighbours and distances: classifier, or MODULE:FUNCTION of your own."""
    checkpoint: str | None = None
    """PyTorch weights of the diffusion model, instead of pretraining; see --config full."""
    seed: int = 0
    """Seed of everything. The data are public, so runs of this study need not be private."""
    data_dir: str | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/hypernet_lora/<config>."""
    smoke: bool = False
    """Only check that everything works: a few steps on 2,000 digits that come inside a package;
    options that are given stay."""


def main(args: Args) -> dict[str, Any]:
    """Run the stages and return the summary."""
    config = CONFIGS[args.config]
    if args.smoke:
        if args.config != "small":
            raise UsageError("--smoke has sizes of its own; leave out --config")
        config = _lora_config.SMOKE
        args = _options.smaller(args, SMOKE)
    check(args, config)
    default = "smoke" if args.smoke else args.config
    path = pathlib.Path("runs", "hypernet_lora", default)
    folder = _run.Folder(args.out or path, "hypernet_lora")
    options = dataclasses.asdict(args)
    stages = [stage for stage in STAGES if stage in args.stages]
    summary: dict[str, Any] = {"experiment": "hypernet_lora", "config": args.config}
    shared = ("epsilons", "delta", "adjacency", "sets", "samples", "sampling_steps", "features")
    summary |= {key: options[key] for key in shared}

    sets = _lora_stages.find_sets(config, folder, options)
    summary["sets_facts"] = _lora_report.facts(sets)
    if stages == ["features"]:
        return summary
    base = _lora_stages.pretrain(config, folder, options, sets)
    if stages[-1] == "pretrain":
        return summary
    task = _lora_stages.problem(config, base, sets, args.seed)
    summary["sizes"] = _lora_report.sizes(base, task.start)
    plans: dict[float | None, Any] = {
        epsilon: hypernet.plan_embedding(
            config.set_size, epsilon=epsilon, delta=args.delta, adjacency=args.adjacency
        )
        for epsilon in args.epsilons
    }
    multipliers = [float(plan.noise_multiplier) for plan in plans.values()]
    learnt: Any = None
    if {"hypernet", "evaluate"} & set(stages):
        learnt = _lora_stages.train_hypernet(config, folder, options, sets, task, multipliers)
    if {"baselines", "evaluate"} & set(stages):
        summary["learning_rates"] = _lora_evaluate.baselines(config, folder, options, sets, task)
    if "evaluate" not in stages:
        return summary
    rows = _lora_evaluate.evaluate(config, folder, options, sets, task, learnt, plans)
    summary["methods"] = {name: _lora_report.statistics(row) for name, row in rows.items()}
    summary["noise"] = {
        f"{epsilon:g}": {"noise_multiplier": float(plan.noise_multiplier), "std": plan.std(1.0)}
        for epsilon, plan in plans.items()
    }
    summary["setting"] = dataclasses.asdict(config)
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = _lora_report.report(summary)
    (folder.path / "report.txt").write_text(text)
    _lora_report.draw_distances(folder.path)
    _lora_report.draw_samples(folder.path, sets)
    print(f"{text}\nwritten to {folder.path}")
    brief = {k: v for k, v in summary.items() if k not in ("setting", "provenance")}
    kept = ("frechet_mean", "frechet_std", "mismatched_mean", "better_than_mismatched")
    brief["methods"] = {name: {k: row[k] for k in kept} for name, row in summary["methods"].items()}
    return brief


def check(args: Args, config: Config):
    """Refuse what can be refused before any work."""
    least = {"sets": 2, "samples": 65, "sampling_steps": 1, "epsilons": 1e-3}
    _options.check_least(args, least)
    _options.check_seed(args.seed)
    _options.check_different(args, "epsilons")
    if not 0 < args.delta < 1 / config.set_size:
        bound = f"above 0 and below 1 / {config.set_size} records of a set"
        raise UsageError(f"--delta must be {bound}, but got {args.delta}")
    if args.sets > config.candidates:
        raise UsageError(f"--sets must be at most {config.candidates}, but got {args.sets}")
    unknown = [method for method in args.methods if method not in METHODS]
    if unknown or len(set(args.methods)) < len(args.methods):
        got = " ".join(unknown or args.methods)
        raise UsageError(f"--methods must be different ones of {' '.join(METHODS)}, but got {got}")
    if not args.stages:
        raise UsageError(f"--stages must be some of {' '.join(STAGES)}")
    if args.config == "full" and args.checkpoint is None and not args.smoke:
        raise UsageError("--config full needs --checkpoint, the published weights of the model")
    if args.checkpoint and not pathlib.Path(args.checkpoint).exists():
        raise UsageError(f"there is no {args.checkpoint}, which --checkpoint names")


if __name__ == "__main__":
    _run.command_line(Args, main)
