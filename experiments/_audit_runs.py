"""Runs, ReLU regressions, votes and embeddings, as `experiments.audit` attacks them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments._audit_frame import (
    ALWAYS,
    FRAME,
    HUGE,
    Case,
    Claim,
    flat,
    gaussian,
    mask_of,
    rows,
)
from jdp import hypernet, pate
from jdp._typing import Adjacency
from jdp.relu_regression import Descent, FixedThreshold, Grid, PrivateThreshold, fit, plan_blocks

# Runs of several steps ----------------------------------------------------------------------------


def mixture_score(rate: float, separation: float) -> Callable[[np.ndarray], np.ndarray]:
    """Log-likelihood ratio of steps that the record joins with probability `rate`.

    Takes one column a step, in units of the noise, which the record moves by `separation`.
    """
    tilt = lambda x: np.exp(separation * x - separation**2 / 2)  # noqa: E731
    return lambda draws: np.log1p(rate * (tilt(draws.astype(np.float64)) - 1)).sum(axis=1)


def poisson_run() -> Case:
    """A training run: plan, Poisson batches, clipped gradients, noise, and SGD over four steps."""
    z = 0.8
    plan = jdp.plan(8, 2, 4, noise_multiplier=z, delta=1e-5)
    grad = jdp.clipped_grad(lambda w, x: w @ x, jdp.clip_by_norm(1.0))

    def release(key, present):
        noise_key, sampling_key = jax.random.split(key)
        data = jnp.zeros((8, 3)).at[-1].set(jnp.where(present, -HUGE, 0) * jnp.eye(3)[0])
        inner = jdp.privatize(z, batch_size=plan.batch_size, key=noise_key)
        tx: Any = optax.chain(inner, optax.sgd(1.0))

        def step(carry, i):
            w, state = carry
            taken, mask = plan.batch(sampling_key, i)
            updates, state = tx.update(grad(w, data[taken], mask=mask), state, w)
            return (optax.apply_updates(w, updates), state), updates[0]

        start = jnp.zeros(3), tx.init(jnp.zeros(3))
        updates = jax.lax.scan(step, start, jnp.arange(plan.steps))[1]
        return updates * plan.batch_size / z, ALWAYS

    return Case(release, Claim(plan.event), score=mixture_score(0.25, 1 / z))


# ReLU regression ----------------------------------------------------------------------------------


def relu(
    plan: Any,
    threshold: Any = FixedThreshold(1.0),  # noqa: B008
    *,
    place: int | None = None,
    whole_path: bool = False,
    far: int = 0,
    score: Any = None,
    **descent: Any,
) -> Case:
    """`relu_regression.fit` on null records and one of label a million.

    Published are all steps, in units of the threshold; where blocks are disjoint, only the step of
    the canary's block can tell anything, and the order is public. `place` keeps those runs where it
    is in this block (in a threshold's rows it is in none). With `far`, thresholds are looked at
    too, in runs where half of 2 * `far` rows with residuals beyond all levels are in that block.
    """
    n, b = plan.sampler.num_examples, plan.batch_size
    options = Descent(1.0, 1.0, **descent)
    distant = jnp.array([100.0, 0.0]) if options.gradient == "true" else None

    def release(key, present):
        x = jnp.zeros((n, 2)).at[-1, 0].set(jnp.where(present, 1.0, 0.0))
        y = jnp.zeros(n).at[: 2 * far].set(1e6).at[-1].set(jnp.where(present, 1e6, 0.0))
        found = fit(key, x, y, plan, threshold=threshold, descent=options, start=distant)
        first = jnp.zeros((1, 2)) if distant is None else distant[None]
        steps = jnp.diff(found.path, axis=0, prepend=first) * b / found.thresholds[:, None]
        if whole_path and place is None:
            return steps.ravel(), ALWAYS
        blocks = plan.sampler.partition(jax.random.split(key)[1], 0)[1]  # as `fit` does
        holds = jnp.any(blocks == n - 1, axis=1)
        own = jnp.argmax(holds)
        near = jnp.sum(blocks[own] < 2 * far) == far
        values = steps.ravel() if whole_path else steps[own]
        level = jnp.log2(found.thresholds[own])[None] if far else jnp.zeros(0)
        return jnp.append(values, level), near & (jnp.any(holds) if place is None else holds[place])

    return Case(release, Claim(plan.event), score=score)


def blocks(*sizes: int, z: float = 1.0, **options: Any) -> Any:
    """A plan over disjoint blocks."""
    return plan_blocks(*sizes, noise_multiplier=z, delta=1e-5, **options)


def relu_poisson() -> Case:
    """DP-SGD for ReLU regression, two Poisson batches."""
    plan = jdp.plan(8, 4, 2, noise_multiplier=1.0, delta=1e-5)
    score = lambda draws: mixture_score(0.5, 1.0)(draws[:, ::2])  # noqa: E731
    return relu(plan, whole_path=True, gradient="true", score=score)


def private_threshold(levels: int = 2) -> PrivateThreshold:
    """A private threshold of few levels."""
    return PrivateThreshold(Grid(0.5, levels))


def level_counts(mechanism: Any) -> Case:
    """The noised counts of a private threshold; a residual of zero, or beyond all levels."""
    threshold = PrivateThreshold(Grid(0.5, 3), mechanism=mechanism)
    histogram = mechanism == "histogram"
    adjacency = "replace-one" if histogram else "zero-out"

    def release(key, present):
        magnitudes = jnp.array([0.1, 0.7, 3.0, 0.0]).at[-1].set(jnp.where(present, 1e6, 0.0))
        total = threshold.count(magnitudes, jnp.ones(4, bool))
        return flat(jdp.add_noise(key, total, 1.0, adjacency=adjacency)), ALWAYS

    return Case(release, gaussian(1.0, adjacency), "a residual of 0, or beyond all levels")


def sparse_vector() -> Case:
    """The level that the sparse vector technique releases, of pure epsilon 1."""
    threshold = PrivateThreshold(Grid(0.5, 2), mechanism="sparse-vector")

    def release(key, present):
        far = jnp.arange(30) < 20
        magnitudes = jnp.where(far, 1e6, 0.0).at[-1].set(jnp.where(present, 1e6, 0.0))
        level = threshold.choose(key, magnitudes, jnp.ones(30, bool), 1.0, "zero-out")
        return jnp.log2(level)[None], ALWAYS

    return Case(release, Claim(pure=1.0), "a residual of 0, or beyond all levels")


# PATE ---------------------------------------------------------------------------------------------


def ballots(present: jax.Array, teachers: int, queries: int) -> jax.Array:
    """Teachers that are split evenly between two classes, and one more that decides."""
    even = jnp.arange(teachers - 1) % 2
    votes = jnp.append(even, jnp.where(present, 1, 0))
    return jnp.tile(votes[:, None], (1, queries)).astype(jnp.int32)


_VOTES = "all records of a teacher, which then votes otherwise"


def pate_votes() -> Case:
    """The noisy votes themselves, on three queries."""

    def release(key, present):
        total = pate.vote_sum(ballots(present, 7, 3), 2)
        return flat(jdp.add_noise(key, total, 1.0, adjacency="replace-one")), ALWAYS

    return Case(release, gaussian(1.0, "replace-one"), _VOTES)


def pate_labels(**options: Any) -> Case:
    """The labels, and which queries have one."""
    plan = pate.plan_votes(21, 21, noise_multiplier=1.0, delta=1e-5, **options)

    def release(key, present):
        found = pate.noisy_labels(key, ballots(present, 21, plan.queries), plan, num_classes=2)
        return flat((found.answered, found.labels)), ALWAYS

    return Case(release, Claim(plan.event, plan.adjacency), _VOTES)


# Mean embeddings ----------------------------------------------------------------------------------


def private_embedding(adjacency: Adjacency = "zero-out") -> Case:
    """The noisy mean of six embedded records, one of them huge, and masked or replaced."""
    matrix, offset = jnp.asarray(FRAME[:4].T), jnp.linspace(-0.2, 0.3, 4)
    replace_one = adjacency == "replace-one"

    def release(key, present):
        records = rows(HUGE * FRAME[0])
        if replace_one:
            records = records.at[-1].multiply(jnp.where(present, 1.0, -1.0))
        e = hypernet.private_embedding(
            key,
            lambda record: record @ matrix + offset,
            records,
            mask_of(present | replace_one),
            clip_norm=0.7,
            noise_multiplier=1.0,
            num_records=6,
            centre=offset / 2,
            adjacency=adjacency,
        )
        return e, ALWAYS

    neighbours = "a record, or its opposite" if replace_one else "a record, or none"
    return Case(release, gaussian(1.0, adjacency), neighbours)
