"""Not only pictures: a private labelled set becomes the linear head of a classifier of features.

A task is to tell two classes apart. Its private set is N records, each the features of an image and
a label; the result is a linear head, tested on images of the same two classes. Methods:

  dp-deepsets   a hypernetwork, trained on tasks made of public images, reads ONE noisy mean
  noisy mean    the same by hand: the head is the clipped, noised mean of label times features
  dp-sgd        the head trained by DP-SGD
  logistic      the head trained without privacy: the ceiling

each at every epsilon and size N, since gradients gain more from N than one mean does: the summary
says where the lines cross. All cells have the same tasks and noise draws, so that rows are not
independent of each other. With --unseen, the classes of the private tasks are in no public task.
Hyper-parameters are chosen on public tasks. Features are a .npz file with the arrays train,
train_labels, test and test_labels (as `python -m experiments.linear_probe` writes them), or the
pixels of scikit-learn's 8x8 digits. The last line on standard output is the summary as JSON.

  python -m experiments.hypernet_head                            on digits, a few minutes
  python -m experiments.hypernet_head --features cifar10.npz --sizes 64 256 1024 4096 --unseen
  python -m experiments.hypernet_head --smoke
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments import _options, _run
from experiments._head_tasks import Pool, load, pairs, records
from experiments._run import UsageError
from jdp import hypernet

METHODS = ("dp-deepsets", "noisy mean", "dp-sgd", "logistic")
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STEPS = (50, 200)
SETTINGS = tuple((rate, steps) for rate in RATES for steps in STEPS)
TRAINED_SIZE = 50  # records of a public task; other sizes differ in their noise only
UNSEEN = 4  # classes of private tasks alone
QUERIES = 32  # further examples of each public task, in the loss
SMOKE: dict[str, Any] = {"steps": 20, "tasks": 3, "sizes": (50,), "epsilons": (4.0,)}


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    features: str = "digits"
    """A .npz file of features, or digits."""
    epsilons: tuple[float, ...] = (0.5, 1.0, 4.0, 16.0)
    """Privacy budgets of each task."""
    sizes: tuple[int, ...] = (25, 50, 100)
    """Records N of a private set."""
    delta: float = 1e-5
    """Probability with which each privacy bound may fail."""
    tasks: int = 20
    """Private tasks; the summary has mean and standard deviation over them."""
    unseen: bool = False
    """Keep four classes for private tasks alone: no public image is of them."""
    dimension: int = 64
    """Principal components (of public features) that are kept."""
    steps: int = 3_000
    """Training steps of the hypernetwork, each on 16 public tasks."""
    seed: int = 0
    """Seed of everything. The data are public, so runs of this study need not be private."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/hypernet_head, or runs/hypernet_head-smoke."""
    smoke: bool = False
    """Only check that everything works: 20 steps, 3 tasks; options that are given stay."""


def loss(head: Any, example: Any) -> jax.Array:
    """The logistic loss of ONE example."""
    x, y = example
    return jax.nn.softplus(-y * (x @ head["w"] + head["b"]))


def make_net(dimension: int, size: int, noise_multiplier: Any) -> hypernet.Hypernet:
    """The hypernetwork for sets of `size` records."""
    like = {"w": jnp.zeros(dimension), "b": jnp.zeros(())}
    count, detokenise = hypernet.flat_tokens(like, dimension + 1)
    return hypernet.Hypernet(
        hypernet.MLPEncoder((128, 64)),
        hypernet.LinearDecoder(count, dimension + 1),
        lambda tokens: jax.tree.map(lambda leaf: 10 * leaf, detokenise(tokens)),
        num_records=size,
        noise_multiplier=noise_multiplier,
        adjacency="replace-one",
    )


def train(args: Args, public: Pool, classes: np.ndarray, noise: list[float]) -> Any:
    """Train ONE hypernetwork on public tasks, at each step under the noise of a random cell."""
    tx = optax.adam(hypernet.warmup_cosine(2e-3, args.steps))
    dimension = public.x.shape[1]
    key = jax.random.key(args.seed)
    rng = np.random.default_rng(args.seed)

    def batch(count: int = 16):
        drawn = [
            (public.draw(rng, pair, TRAINED_SIZE), public.draw(rng, pair, QUERIES))
            for pair in pairs(classes, rng, count)
        ]
        own, queries = (
            jax.tree.map(lambda *a: np.stack(a), *side) for side in zip(*drawn, strict=True)
        )
        return records(*own), queries

    def of_task(head, queries):
        return jax.vmap(loss, in_axes=(None, 0))(head, queries).mean()

    first = make_net(dimension, TRAINED_SIZE, noise[0])
    state = hypernet.init_training(first, tx, key, batch(8)[0].reshape(-1, 2 * dimension + 1))

    @jax.jit
    def step(state, noise_multiplier, seen, queries):
        net = make_net(dimension, TRAINED_SIZE, noise_multiplier)
        return hypernet.train_step(net, of_task, tx)(state, hypernet.Tasks(seen, queries))[0]

    with _run.progress("hypernetwork", args.steps) as advance:
        for _ in range(args.steps):
            state = step(state, np.float32(rng.choice(noise)), *batch())
            advance(1)
    return state.params


@functools.partial(jax.jit, static_argnames=("private", "steps", "sampler", "batch_size"))
def descend(x, y, key, rate, z, *, private: bool, steps: int, sampler: Any, batch_size: int) -> Any:
    """Train a head by DP-SGD on Poisson batches, or by full gradients without privacy."""
    noise_key, sampling_key = jax.random.split(key)
    head = {"w": jnp.zeros(x.shape[1]), "b": jnp.zeros(())}
    after = optax.sgd(rate)
    clip = jdp.clip_by_norm(1.0)
    options = {"batch_size": batch_size, "key": noise_key, "adjacency": "replace-one"}
    tx = optax.chain(jdp.privatize(z, **options), after) if private else after

    def step(index, carry):
        head, state = carry
        if private:
            rows, mask = sampler.batch(sampling_key, index)
            gradient: Any = jdp.clipped_grad(loss, clip)(head, (x[rows], y[rows]), mask=mask)
        else:
            mean = lambda head: jax.vmap(loss, in_axes=(None, 0))(head, (x, y)).mean()  # noqa: E731
            gradient = jax.grad(mean)(head)
        updates, state = tx.update(gradient, state, head)
        return optax.apply_updates(head, updates), state

    return jax.lax.fori_loop(0, steps, step, (head, tx.init(head)))[0]


def accuracy(head: Any, test: tuple[np.ndarray, np.ndarray]) -> float:
    """The share of test images on the right side."""
    scores = test[0] @ np.asarray(head["w"]) + float(head["b"])
    return float((np.sign(scores) == test[1]).mean())


def cell(args: Args, learnt: Any, pool: Pool, chosen, test: Pool, epsilon, size, settings, seed):
    """Accuracies on each task of every method; of dp-sgd and logistic for each setting."""
    plan = hypernet.plan_embedding(size, epsilon=epsilon, delta=args.delta, adjacency="replace-one")
    batch = max(1, size // 4)
    budget = {"epsilon": epsilon, "delta": args.delta, "adjacency": "replace-one"}
    sgd = {steps: jdp.plan(size, batch, steps, **budget) for steps in STEPS}
    net = make_net(pool.x.shape[1], size, plan.noise_multiplier)
    generate = jax.jit(net.generate)
    found: dict[str, list[float]] = {}
    for number, pair in enumerate(chosen):
        rng = np.random.default_rng([seed, number])
        (x, y), held = pool.draw(rng, pair, size), test.all_of(pair)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 3)
        heads = {"dp-deepsets": generate(learnt, records(x, y), keys[0])}
        mean = hypernet.private_embedding(
            keys[1],
            lambda record: record,
            np.concatenate([x * y[:, None], y[:, None] / 2], 1),
            clip_norm=1.0,
            noise_multiplier=plan.noise_multiplier,
            num_records=size,
        )
        heads["noisy mean"] = {"w": mean[:-1], "b": 0 * mean[-1]}
        for rate, steps in settings:
            options: Any = {"steps": steps, "sampler": sgd[steps].sampler, "batch_size": batch}
            rest = keys[2], np.float32(rate), np.float32(sgd[steps].noise_multiplier)
            for private, name in ((True, "dp-sgd"), (False, "logistic")):
                heads[f"{name}/{rate:g}/{steps}"] = descend(x, y, *rest, private=private, **options)
        for name, head in heads.items():
            found.setdefault(name, []).append(accuracy(head, held))
    return found


def tuned(tune, test_on, seed: int) -> dict[str, Any]:
    """Choose rate and steps of one cell on public tasks; accuracies on the private ones."""
    tried = tune(SETTINGS, seed + 2)
    name_of = lambda name, setting: f"{name}/{setting[0]:g}/{setting[1]}"  # noqa: E731
    chosen = {
        name: max(SETTINGS, key=lambda own, n=name: float(np.mean(tried[name_of(n, own)])))
        for name in ("dp-sgd", "logistic")
    }
    found = test_on(tuple(set(chosen.values())), seed + 3)
    found |= {name: found[name_of(name, own)] for name, own in chosen.items()}
    spread = lambda values: float(np.std(values, ddof=1))  # noqa: E731
    return {
        name: {
            "mean": float(np.mean(found[name])),
            "std": spread(found[name]),
            "setting": chosen.get(name),
        }
        for name in METHODS
    }


def main(args: Args) -> dict[str, Any]:
    """Train, choose rates on public tasks, measure on private ones, and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    parts = load(args.features, args.dimension, UNSEEN if args.unseen else 0)
    public, private, test, own, other, source, digest = parts
    most = min(public.largest(own), private.largest(other))
    if max(args.sizes) > most:
        raise UsageError(f"--sizes must be at most {most} for {source}, but got {args.sizes}")
    cells = [(epsilon, size) for epsilon in args.epsilons for size in args.sizes]
    noise = [
        float(hypernet.plan_embedding(n, epsilon=e, delta=args.delta).noise_multiplier)
        * (TRAINED_SIZE / n)
        for e, n in cells
    ]
    default = "hypernet_head-smoke" if args.smoke else "hypernet_head"
    folder = _run.Folder(args.out or pathlib.Path("runs", default), "hypernet_head")
    config = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("out", "smoke")}
    config |= {"grid": SETTINGS, "public_digest": digest}
    rng = np.random.default_rng(args.seed + 1)
    tuning, chosen = pairs(own, rng, 4), pairs(other, rng, args.tasks)
    rows, learnt = {}, None
    with _run.progress("cells", len(cells)) as advance:
        for epsilon, size in cells:
            name = f"epsilon {epsilon:g}, N {size}"
            rows[name] = folder.get(name, config)
            if rows[name] is None:
                if learnt is None:
                    learnt = train(args, public, own, noise)
                tune = functools.partial(cell, args, learnt, public, tuning, public, epsilon, size)
                test_on = functools.partial(
                    cell, args, learnt, private, chosen, test, epsilon, size
                )
                rows[name] = folder.put(name, config, tuned(tune, test_on, args.seed))
            advance(1)
    summary = {"experiment": "hypernet_head", "source": source, "setting": config, "cells": rows}
    summary["crossing"] = crossings(args, rows)
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = report(summary)
    (folder.path / "report.txt").write_text(text)
    print(f"{text}\nwritten to {folder.path}")
    return {key: value for key, value in summary.items() if key not in ("setting", "provenance")}


def crossings(args: Args, rows: dict[str, Any]) -> dict[str, int | None]:
    """For each epsilon the smallest N at which dp-sgd is at least as good as dp-deepsets."""
    found: dict[str, int | None] = {}
    for epsilon in args.epsilons:
        better = [
            size
            for size in sorted(args.sizes)
            if rows[f"epsilon {epsilon:g}, N {size}"]["dp-sgd"]["mean"]
            >= rows[f"epsilon {epsilon:g}, N {size}"]["dp-deepsets"]["mean"]
        ]
        found[f"{epsilon:g}"] = better[0] if better else None
    return found


def check(args: Args):
    """Refuse what can be refused before any work."""
    least = {"epsilons": 1e-3, "sizes": 8, "tasks": 2, "dimension": 1, "steps": 1}
    _options.check_least(args, least)
    _options.check_different(args, "epsilons", "sizes")
    _options.check_seed(args.seed)
    if not 0 < args.delta < 1 / max(args.sizes):
        bound = f"above 0 and below 1 / {max(args.sizes)} records"
        raise UsageError(f"--delta must be {bound}, but got {args.delta}")


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    own = summary["setting"]
    where = "of classes that no public task has" if own["unseen"] else "of the same ten classes"
    lines = [summary["source"], f"{own['tasks']} private tasks {where}; test accuracy; replace-one"]
    lines += ["", f"{'':<24}" + "".join(f"{method:<18}" for method in METHODS)]
    for name, row in summary["cells"].items():
        shown = (f"{row[m]['mean']:.3f} +- {row[m]['std']:.3f}" for m in METHODS)
        lines.append(f"{name:<24}" + "".join(f"{text:<18}" for text in shown))
    for epsilon, size in summary["crossing"].items():
        text = "at no size here" if size is None else f"from N = {size}"
        lines.append(f"epsilon {epsilon}: dp-sgd is at least as good as dp-deepsets {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    _run.command_line(Args, main)
