"""The stages on private sets: adapters of every method, samples, and how far they are off."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np

from experiments import _diffusion, _lora_baselines, _lora_features, _lora_stages, _run
from experiments._lora_baselines import PRIVATE, Problem
from experiments._lora_config import Config
from experiments._lora_stages import Sets
from jdp import hypernet, lora

DEEPSETS = "dp-deepsets"
SHOWN = 24  # samples of each set that are kept for the pictures


def piece(method: str, epsilon: float | None) -> str:
    """The name of a method under a budget, in files and results."""
    return method if epsilon is None else f"{method}-eps{epsilon:g}"


def tasks(options: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Every (method, epsilon) that trains adapters by gradients."""
    found: list[tuple[str, float | None]] = []
    for method in options["methods"]:
        budgets = options["epsilons"] if method in PRIVATE else (None,)
        found += [(method, epsilon) for epsilon in budgets]
    return found


def _start(method: str, task: Problem, config: Config, folder: _run.Folder, key) -> Any:
    """Where a method starts: the usual start, or adapters trained on all public images."""
    if method != "public-then-dp-sgd":
        return task.start
    path = folder.path / "public.msgpack"
    if not path.exists():
        train = _lora_baselines.trainer(task, config.baseline, "public")
        rate = config.baseline.public_learning_rate
        _lora_stages.save(path, train(task.start, task.public, rate, key, None))
    return _lora_stages.load(path, task.start)


def baselines(
    config: Config, folder: _run.Folder, options: dict[str, Any], sets: Sets, task: Problem
) -> dict[str, Any]:
    """Stage `baselines`: choose each learning rate on PUBLIC sets, then train on the private ones.

    Returns:
      For each (method, epsilon): `{"learning_rate": ..., "tuning": {rate: distance}}`; adapters of
      all sets are in the folder.
    """
    own = config.part(
        "baseline", "tuning_sets", "tuning_samples", "first_level", "patterns", "rank"
    )
    own |= {key: options[key] for key in ("seed", "delta", "adjacency", "sampling_steps")}
    rates = config.baseline.learning_rates
    sample = _diffusion.sampler(task.diffusion, options["sampling_steps"])
    root = jax.random.fold_in(jax.random.key(options["seed"]), 5)
    rng = np.random.default_rng(options["seed"] + 1)
    public_rows = sets.public_sets[rng.integers(0, len(sets.public_sets), config.tuning_sets)]

    def tune(train, start, plan, advance) -> dict[str, float]:
        scores = {f"{rate:g}": 0.0 for rate in rates}
        for rate in rates:
            for number, rows in enumerate(public_rows):
                key = jax.random.fold_in(root, number)
                adapters = train(start, sets.images.public[rows], rate, key, plan)
                images = sample(lora.merge(task.base, adapters), key, config.tuning_samples)
                found = distance(sets.features(images), sets.public_features[rows])
                scores[f"{rate:g}"] += found / len(public_rows)
                advance(1)
        return scores

    def train_all(train, start, plan, rate: float, advance) -> Any:
        trained = []
        for number, rows in enumerate(sets.private_sets):
            key = jax.random.fold_in(root, 1_000 + number)
            trained.append(train(start, sets.images.private[rows], rate, key, plan))
            advance(1)
        return _stacked(trained)

    make = functools.cache(functools.partial(_lora_baselines.trainer, task, config.baseline))
    found, count = {}, len(rates) * config.tuning_sets
    total = (count + len(sets.private_sets)) * len(tasks(options))
    with _run.progress("baselines", total) as advance:
        for method, epsilon in tasks(options):
            name, plan = piece(method, epsilon), None
            pieces = (f"tuning/{name}", own), (f"baselines/{name}", own | {"sets": options["sets"]})
            found[name] = folder.get(*pieces[1])
            if found[name]:
                advance(count + len(sets.private_sets))
                continue
            if epsilon is not None:
                budget = (epsilon, options["delta"], options["adjacency"])
                plan = _lora_baselines.plans(config.baseline, config.set_size, *budget)
            start = _start(method, task, config, folder, root)
            tuned = folder.get(*pieces[0])
            if tuned is None:
                tuned = folder.put(*pieces[0], tune(make(method), start, plan, advance))
            rate = float(min(tuned, key=lambda rate, t=tuned: t[rate]))
            adapters = train_all(make(method), start, plan, rate, advance)
            _lora_stages.save(folder.path / f"{name}.msgpack", adapters)
            done = {"learning_rate": rate, "tuning": tuned}
            done["noise_multiplier"] = plan and float(plan.noise_multiplier)
            found[name] = folder.put(*pieces[1], done)
    return found


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def distance(drawn: np.ndarray, real: np.ndarray) -> float:
    """The Frechet distance; a very large one where training diverged and samples are not finite."""
    return _lora_features.frechet(drawn, real) if np.isfinite(drawn).all() else 1e9


def evaluate(
    config: Config,
    folder: _run.Folder,
    options: dict[str, Any],
    sets: Sets,
    task: Problem,
    learnt: hypernet.HypernetParams,
    plans: dict[float | None, Any],
) -> dict[str, dict[str, Any]]:
    """Stage `evaluate`: samples of every method for every private set, and all distances.

    Returns:
      For each (method, epsilon): the distance of each set to its own samples, (sets,), and to the
      samples of the other sets, averaged, which is the control of mismatched sets.
    """
    adapted: list[tuple[str, float | None]] = [("no adaptation", None), *tasks(options)]
    adapted += [(DEEPSETS, None), *((DEEPSETS, epsilon) for epsilon in options["epsilons"])]
    sample = _diffusion.sampler(task.diffusion, options["sampling_steps"])
    real = [sets.private_features[rows] for rows in sets.private_sets]
    found = {}
    with _run.progress("evaluate", len(adapted) * len(real)) as advance:
        for method, epsilon in adapted:
            name = piece(method, epsilon)
            own = {key: options[key] for key in ("seed", "samples", "sampling_steps", "sets")}
            done = folder.get(f"evaluate/{name}", own)
            if done is None:
                adapters = _adapters(method, epsilon, config, folder, options, sets, task)
                if method == DEEPSETS:
                    adapters = generated(config, options, sets, task, learnt, plans.get(epsilon))
                drawn, shown = [], []
                for number in range(len(real)):
                    key = jax.random.fold_in(jax.random.key(options["seed"] + 6), number)
                    if method == "no adaptation" and number:
                        drawn.append(drawn[0])
                    else:
                        one = jax.tree.map(lambda leaf, n=number: leaf[n], adapters)
                        images = sample(lora.merge(task.base, one), key, options["samples"])
                        drawn.append(sets.features(images))
                        shown.append(images[:SHOWN])
                    advance(1)
                np.savez(_images(folder.path, name), images=np.stack(shown))
                done = folder.put(f"evaluate/{name}", own, distances(drawn, real))
            else:
                advance(len(real))
            found[name] = {"method": method, "epsilon": epsilon} | done
    return found


def _images(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f"samples-{name.replace(' ', '-')}.npz"


def _adapters(method, epsilon, config, folder, options, sets, task) -> Any:
    count = len(sets.private_sets)
    like = jax.tree.map(lambda leaf: np.stack([leaf] * count), task.start)
    if method in ("no adaptation", DEEPSETS):
        return like
    return _lora_stages.load(folder.path / f"{piece(method, epsilon)}.msgpack", like)


def generated(config, options, sets: Sets, task: Problem, learnt, plan) -> Any:
    """Adapters from the hypernetwork for all private sets, each from ONE release."""
    z = 0.0 if plan is None else plan.noise_multiplier
    generate = _lora_stages.generator(config, options, sets, task, learnt, z)
    root = jax.random.fold_in(jax.random.key(options["seed"]), 7)
    if plan is not None:  # budgets have noise of their own, not one noise scaled
        root = jax.random.fold_in(root, round(1_000 * plan.target_epsilon))
    keys = jax.random.split(root, len(sets.private_sets))
    return _stacked(
        [generate(rows, key) for rows, key in zip(sets.private_sets, keys, strict=True)]
    )


def distances(drawn: list[np.ndarray], real: list[np.ndarray]) -> dict[str, Any]:
    """Distances of each set to its own samples, and to those of the other sets."""
    result: dict[str, Any] = {}
    for name, measure in (("frechet", distance), ("kernel", _lora_features.kernel_distance)):
        table = np.array([[measure(own, other) for other in real] for own in drawn])
        others = (table.sum(0) - np.diag(table)) / max(1, len(real) - 1)
        result[name] = {"own": np.diag(table).tolist(), "mismatched": others.tolist()}
    return result
