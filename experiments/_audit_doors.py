"""Optax doors and clippers, as `experiments.audit` attacks them: one step each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments._audit_frame import (
    ALWAYS,
    BATCH,
    FRAME,
    HUGE,
    OTHERS,
    PARAMS,
    Case,
    flat,
    gaussian,
    mask_of,
    rows,
    tree_of,
)


def door(make: Callable[[jax.Array], Any], canary: np.ndarray, extra=lambda state: []) -> Case:
    """An optax door, one step; `extra` gives what else of its state is published."""
    gradients = tree_of(rows(canary))

    def release(key, present):
        tx = make(key)
        update, state = tx.update(gradients, tx.init(PARAMS), PARAMS, mask=mask_of(present))
        return jnp.append(flat(update), jnp.asarray(extra(state), jnp.float32)), ALWAYS

    return Case(release)


def aggregate(clipper, canary: np.ndarray = HUGE * FRAME[0]) -> Case:
    """`jdp.dp_aggregate` with a clipper."""
    return door(lambda key: jdp.dp_aggregate(clipper, 1.0, batch_size=BATCH, key=key), canary)


def followed_by(make_after: Callable[[jax.Array], Any], canary: np.ndarray) -> Case:
    """DP-SGD, then something after the noise."""

    def make(key):
        keys = jax.random.split(key)
        inner = jdp.dp_aggregate(jdp.clip_by_norm(1.0), 1.0, batch_size=BATCH, key=keys[0])
        return optax.chain(inner, make_after(keys[1]))

    return door(make, canary)


def strategy(**options: Any) -> Case:
    """`jdp.clipped_grad` and `jdp.privatize`; gradients are x^T t, over four positions."""
    rng = np.random.default_rng(1)
    x, t = rng.normal(size=(6, 4, 2)), rng.normal(size=(6, 4, 5))
    x[-1] *= HUGE
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)
    grad = jdp.clipped_grad(
        lambda w, e: jnp.sum((e[0] @ w) * e[1]), jdp.clip_by_norm(1.0), **options
    )

    def release(key, present):
        params = jnp.zeros((2, 5))
        tx = jdp.privatize(1.0, batch_size=BATCH, key=key)
        clipped: Any = grad(params, batch, mask=mask_of(present))
        return flat(tx.update(clipped, tx.init(params), params)[0]), ALWAYS

    return Case(release)


def replace_one() -> Case:
    """DP-SGD where a record is replaced by its opposite."""

    def release(key, present):
        canary = jnp.where(present, 1, -1) * HUGE * FRAME[0]
        gradients = tree_of(jnp.concatenate([OTHERS, canary[None]]))
        clipped = jdp.clip_by_norm(1.0)(gradients, jnp.ones(6, bool))
        return flat(jdp.add_noise(key, clipped, 1.0, adjacency="replace-one")), ALWAYS

    return Case(release, gaussian(1.0, "replace-one"), "a record, or its opposite")


def anchors(params: Any, key: jax.Array) -> Any:
    """Public gradients whose span is always that of the first two rows of FRAME."""
    del params, key
    return tree_of(FRAME[:2] * np.array([[2.0], [1.0]], np.float32))


BOTH = HUGE * (FRAME[0] + FRAME[2])  # in the subspace and out of it


def gep(canary: np.ndarray = BOTH, make: Callable[..., Any] = jdp.gep, **options: Any) -> Case:
    """GEP with one step."""
    if make is jdp.gep:
        options = {"clip_norms": (1.0, 0.2)} | options
    options |= {"rank": 2, "noise_multiplier": 1.0, "batch_size": BATCH}
    return door(lambda key: make(key=key, public_gradients=anchors, **options), canary)


def linear(params: Any, gradients: Any) -> jax.Array:
    """A loss whose gradient is the example."""
    return sum((jnp.sum(params[name] * leaf) for name, leaf in gradients.items()), jnp.zeros(()))


def adaptive() -> Case:
    """Adaptive clipping; the count shows in the next clip norm."""

    def make(key):
        return jdp.dp_aggregate_adaptive(1.0, batch_size=BATCH, key=key, initial_clip_norm=0.8)

    return door(make, HUGE * FRAME[0], lambda state: [jnp.log(state.clip_norm)])
