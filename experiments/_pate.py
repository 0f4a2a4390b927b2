"""PATE on images: teachers on disjoint private ones, a student on public ones they label."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments import _resume
from experiments._run import Keys
from experiments.datasets import Dataset
from experiments.models import Model

Fit = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Any]


def make_fit(setting: Any, model: Model) -> Fit:
    """Ordinary SGD, for teachers and student alike: `fit(key, images, labels, counts) -> params`.

    `counts` says which examples count; all of the others are never drawn. Where none counts, the
    parameters stay as they were initialised.
    """

    def loss(params, images, labels):
        logits = model.logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def fit(key, images, labels, counts):
        init_key, batch_key = jax.random.split(key)
        params = model.init(init_key)
        transformation = optax.chain(
            optax.add_decayed_weights(setting.weight_decay),
            optax.sgd(setting.learning_rates(), setting.momentum),
        )
        batch = min(setting.batch_size, len(labels))

        def step(index, carry):
            params, state = carry
            key = jax.random.fold_in(batch_key, index)
            rows = jax.random.categorical(key, jnp.log(counts.astype(jnp.float32)), shape=(batch,))
            gradient = jax.grad(loss)(params, images[rows], labels[rows])
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        labels = jnp.maximum(labels, 0)  # -1 is no label: drawn only where there is none at all
        start = params, transformation.init(params)
        trained = jax.lax.fori_loop(0, setting.steps, step, start)[0]
        taught = jnp.any(counts)
        return jax.tree.map(lambda new, old: jnp.where(taught, new, old), trained, params)

    return fit


def answers(runs: list[dict[str, Any]]) -> str:
    """How many queries were answered in each run: as private as the labels."""
    counts = [run["answered"] for run in runs]
    text = f"pate: {', '.join(map(str, counts))} queries answered, run by run"
    if 0 in counts:
        text += ". Without any label the student\nstays as it was initialised: its accuracy is "
        text += "chance. Lower --threshold or raise --epsilon; another run\nspends its own budget"
    return text + "."


def make_run(setting: Any, model: Model, data: Dataset, public: np.ndarray, plan: Any) -> Any:
    """Prepare PATE, compiled once for all its runs.

    Args:
      setting: a `PateSetting`.
      model: of teachers and student.
      data: private and test parts.
      public: images without labels; the first `plan.queries` are asked about, in this order.
      plan: of `jdp.pate.plan_votes`.

    Returns:
      `run(keys, advance, resume=None) -> result`, as of `make_run` in `experiments._methods`.
    """
    fit = make_fit(setting, model)
    asked = jnp.asarray(public[: plan.queries])
    examples = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    # On a CPU five teachers of mnist_cnn at once take about twice the time of five in turn.
    together = 1 if jax.default_backend() == "cpu" else 25

    @jax.jit
    def ask(key, teachers, examples, asked):
        def train(key, shard):
            images, labels = shard
            params = fit(key, images, labels, jnp.ones(len(labels), bool))
            return model.logits(params, asked).argmax(-1)

        return jdp.pate.teacher_votes(key, train, examples, plan, teachers, together=together)

    @jax.jit
    def vote(key, votes):
        return jdp.pate.noisy_labels(key, votes, plan, num_classes=data.num_classes)

    @jax.jit
    def study(key, asked, found):
        return fit(key, asked, found.labels, found.answered)

    @jax.jit
    def correct(params, images, labels):
        return jnp.sum(model.logits(params, images).argmax(-1) == labels)

    def accuracy(params, rows: int = 1_000) -> float:
        starts = range(0, len(data.test_labels), rows)
        parts = [
            correct(params, data.test_images[i : i + rows], data.test_labels[i : i + rows])
            for i in starts
        ]
        return sum(map(int, parts)) / len(data.test_labels)

    def release(keys: Keys, advance: Callable[[int], None]) -> dict[str, Any]:
        started = time.monotonic()
        votes = []
        for start in range(0, plan.teachers, together):
            numbers = np.arange(start, min(start + together, plan.teachers))
            padded = np.resize(numbers, together)  # one program for all groups
            votes.append(ask(keys.sampling, padded, examples, asked)[: len(numbers)])
            jax.block_until_ready(votes[-1])
            advance(len(numbers))
        found = vote(keys.noise, jnp.concatenate(votes))
        reached = accuracy(study(keys.init, asked, found))
        return {
            "test_accuracy": reached,
            "curve": [[setting.steps, reached]],
            "answered": int(found.answered.sum()),
            "seconds": time.monotonic() - started,
        }

    def run(keys: Keys, advance: Callable[[int], None], resume=None) -> dict[str, Any]:
        program = ""
        if resume:
            numbers = np.zeros(together, np.int64)
            votes = jax.ShapeDtypeStruct((plan.teachers, len(asked)), jnp.int32)
            parts = jax.make_jaxpr(ask)(keys.sampling, numbers, examples, asked)
            program = f"{parts} {jax.make_jaxpr(vote)(keys.noise, votes)}"
        return _resume.once(lambda keys: release(keys, advance), keys, resume, program)

    return run
