"""How well public subspaces hold gradients: what these functions read is NOT protected.

The program gives them test images, which no method trains on and which count as public here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jdp
from experiments import _training
from experiments._methods import Setting
from experiments._run import Keys
from experiments._updates import public_gradients
from experiments.datasets import Dataset
from experiments.models import Model

CHECKPOINTS = (0, 0.1, 0.25, 0.5, 1)  # shares of the steps
RANKS = (5, 10, 25, 50, 100, 150, 250, 400)


def unprotected_projection_error(rows: jax.Array, gradients: jax.Array) -> jax.Array:
    r"""$\|G - G B^\top B\|_F / \|G\|_F$: the share of the gradients' norm outside. NOT private.

    Args:
      rows: B (k, p), orthonormal.
      gradients: G (n, p), one for each example.
    """
    return jnp.linalg.norm(residuals(rows, gradients)) / jnp.linalg.norm(gradients)


def unprotected_stable_rank(gradients: jax.Array) -> jax.Array:
    r"""$\|G\|_F^2 / \|G\|_2^2$ of a matrix of gradients (n, p). NOT private."""
    gram = jnp.matmul(gradients, gradients.T, precision="highest")
    return jnp.trace(gram) / jnp.linalg.eigvalsh(gram)[-1]


def residuals(rows: jax.Array, gradients: jax.Array) -> jax.Array:
    """What of every gradient (n, p) lies outside of the span of the rows (k, p)."""
    inside = jnp.matmul(gradients, rows.T, precision="highest")
    return gradients - jnp.matmul(inside, rows, precision="highest")


def matrix(per_example: Any) -> jax.Array:
    """Gradients of n examples as (n, p)."""
    leaves = jax.tree.leaves(per_example)
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@functools.partial(jax.jit, static_argnames=("iterations",))
def _rows(key, anchors, iterations: int = 1):
    """A basis of the largest rank; its first k rows are that of rank k, from the same start."""
    rank = min(max(RANKS), len(anchors))
    return jdp.power_iteration(key, anchors, rank, iterations=iterations)


def measure(
    setting: Setting,
    model: Model,
    data: Dataset,
    sources: dict[str, tuple[Setting, Any]],
    plan: Any,
    keys: Keys,
    advance: Callable[[int], None],
    examples: int = 500,
) -> list[dict[str, Any]]:
    """Train by `gep`, and measure subspaces on gradients of test images on the way.

    Args:
      setting: of the training; its rank is that of all but the sweep over ranks.
      model: what is trained.
      data: what is trained on.
      sources: for each a setting with its `subspace`, and its anchors; the first is that of the
        training.
      plan: of the run.
      keys: of the run.
      advance: is called with the number of checkpoints done.
      examples: how many test images.

    Returns:
      For each checkpoint errors by rank, by source and by power iterations, and stable ranks.
    """
    first = next(iter(sources.values()))[1]
    trainer = _training.make_trainer("gep", setting, model, data, first, plan)
    gradients_of = jax.jit(jdp.per_example_grad(model.loss))
    anchors_of = {
        name: jax.jit(public_gradients(own, model, data, jnp.asarray(images)))
        for name, (own, images) in sources.items()
    }
    test = (jnp.asarray(data.test_images[:examples]), jnp.asarray(data.test_labels[:examples]))
    carry, done, found = trainer.begin(keys), 0, []
    program = trainer.compile(carry, keys)[0]
    key = jax.random.fold_in(keys.init, 3)
    for share in CHECKPOINTS:
        step = round(share * setting.steps)
        carry, done = program(done, step, carry, keys), step
        anchors = {name: matrix(own(carry[0], key)) for name, own in anchors_of.items()}
        gradients = matrix(gradients_of(carry[0], test))
        found.append({"step": step} | _measure_at(key, gradients, anchors, setting.rank))
        advance(1)
    return found


def _measure_at(
    key: jax.Array, gradients: jax.Array, anchors: dict[str, jax.Array], rank: int
) -> dict[str, dict[Any, float]]:
    """At one checkpoint; the first of the anchors are those of the training."""
    spanning = next(iter(anchors.values()))
    rows = {name: _rows(key, own) for name, own in anchors.items()}
    best = next(iter(rows.values()))
    powers = {1: best} | {n: _rows(key, spanning, n) for n in (2, 4)}

    def error(basis: jax.Array, most: int) -> float:
        return float(unprotected_projection_error(basis[:most], gradients))

    matrices = {"gradients": gradients, "residuals": residuals(best[:rank], gradients)}
    return {
        "error_by_rank": {k: error(best, k) for k in RANKS if k <= len(best)},
        "error_by_source": {name: error(own, rank) for name, own in rows.items()},
        "error_by_iterations": {n: error(own, rank) for n, own in powers.items()},
        "stable_rank": {
            name: float(unprotected_stable_rank(own))
            for name, own in (matrices | {"anchors": spanning}).items()
        },
    }
