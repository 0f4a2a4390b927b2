"""How each method of `experiments.linear_probe` turns features into a linear classifier."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments._run import Keys
from jdp.public_data import (
    clip_preconditioned,
    cosine_mixing,
    inverse_root,
    mean_gradient,
    mix_public,
    project_updates,
)

# What each method knows of the public examples.
METHODS = {
    "non-private": "none",
    "dp-sgd": "none",
    "b-gep": "features, random labels",
    "gep": "features, random labels",
    "projected": "features, random labels",
    "adadps": "features, random labels",
    "pda-dpmd": "features, TRUE labels",
    "public-only": "features, TRUE labels",
}
PRIVATE = tuple(name for name in METHODS if name not in ("non-private", "public-only"))
WITH_LOSS = ("b-gep", "gep")  # take examples in place of gradients
IN_SUBSPACE = (*WITH_LOSS, "projected")
REFRESH_EVERY = 20  # steps between two subspaces
FLOOR = 1e-3  # of adadps, added to the root of a second moment


class Data(NamedTuple):
    """Arrays of one split; features (examples, d + 1), with one for the bias."""

    train: jax.Array
    train_labels: jax.Array
    test: jax.Array
    test_labels: jax.Array
    public: jax.Array
    public_labels: jax.Array


class Setting(NamedTuple):
    """Hyper-parameters; a method reads those that concern it, the others are None."""

    learning_rate: float
    clip_norm: float | None = None
    rank: int | None = None
    horizon: int | None = None  # of pda-dpmd, over the steps: when the private weight reaches 0
    residual: float | None = None  # of gep: clip norm of the residual over that of the embedding


class Knobs(NamedTuple):
    """What may change without compiling again."""

    noise_multiplier: float
    learning_rate: float
    clip_norm: float
    residual: float = 0.0


def grid(method: str, classes: int) -> list[Setting]:
    """The settings that are tried: sixteen a method, or one a learning rate where nothing clips."""
    if method not in PRIVATE:
        return [Setting(rate) for rate in (0.03, 0.06, 0.12, 0.24, 0.48)]
    rates = (0.06, 0.12, 0.24, 0.48)
    if method == "gep":  # the paper's ratio of clip norms, and one that keeps more of the residual
        pairs = [(clip, ratio) for clip in (0.125, 0.25) for ratio in (0.2, 0.5)]
        rank = 100 * classes
        return [Setting(rate, clip, rank, residual=own) for rate in rates for clip, own in pairs]
    if method in IN_SUBSPACE:
        pairs = [(clip, each * classes) for clip in (0.125, 0.25) for each in (30, 100)]
        return [Setting(rate, clip, rank) for rate in rates for clip, rank in pairs]
    if method == "pda-dpmd":
        pairs = [(clip, horizon) for clip in (0.125, 0.25) for horizon in (1, 4)]
        return [Setting(rate, clip, horizon=own) for rate in rates for clip, own in pairs]
    return [Setting(rate, clip) for rate in rates for clip in (0.0625, 0.125, 0.25, 0.5)]


def loss(params, example):
    """Cross-entropy of ONE example; params are blocks of columns of a matrix (d + 1, classes)."""
    features, label = example
    logits = jnp.concatenate([features @ own for own in params])
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def matrix(params: list[jax.Array]) -> jax.Array:
    """The matrix (d + 1, classes) of its blocks."""
    return params[0] if len(params) == 1 else jnp.concatenate(params, axis=1)


def zeros(rows: int, classes: int, groups: int) -> list[jax.Array]:
    """The first parameters: blocks of about as many columns each."""
    return [jnp.zeros((rows, len(own))) for own in np.array_split(np.arange(classes), groups)]


def make_train(
    method: str,
    setting: Setting,
    sampler: Any,
    batch_size: int,
    steps: int,
    classes: int,
    groups: int,
) -> Callable[..., dict[str, Any]]:
    """Prepare a method; compiled once for all budgets, settings and seeds.

    With as many groups as classes every class has a subspace of its own. Its gradients are
    multiples of the features, so little is lost, and products are smaller by the number of groups.

    Args:
      method: one of `METHODS`.
      setting: of which only the rank and the horizon matter here.
      sampler: of the plan; `batch_size` and `steps` are its own.
      batch_size: expected number of examples a step.
      steps: number of steps.
      classes: number of labels.
      groups: parameter groups of methods with a subspace.

    Returns:
      `train(data, keys, knobs, advance) -> result`: test accuracy after the last step, and time
      of all CPUs (waiting for others does not count).
    """
    groups = groups if method in IN_SUBSPACE else 1

    def transformation(data: Data, keys: Keys, knobs: Knobs):
        adam = optax.adam(optax.cosine_decay_schedule(knobs.learning_rate, steps))
        if method == "public-only":
            return adam
        return optax.chain(*private(data, keys, knobs), adam)

    def private(data: Data, keys: Keys, knobs: Knobs) -> list[Any]:
        if method == "non-private":
            return [jdp.privatize(0.0, batch_size=batch_size, key=keys.noise)]
        common: dict[str, Any] = {"noise_multiplier": knobs.noise_multiplier}
        common |= {"batch_size": batch_size, "key": keys.noise, "adjacency": "zero-out"}
        subspace: dict[str, Any] = {"rank": setting.rank, "groups": list(range(groups))}
        subspace |= {"public_gradients": anchors(data, classes)}
        subspace |= {"refresh_every": REFRESH_EVERY, "warm_start": True}
        if method == "b-gep":
            return [jdp.biased_gep(clip_norm=knobs.clip_norm, loss=loss, **subspace, **common)]
        if method == "gep":
            clip_norms = (knobs.clip_norm, knobs.residual * knobs.clip_norm)
            return [jdp.gep(clip_norms=clip_norms, loss=loss, **subspace, **common)]
        if method == "projected":
            return [jdp.privatize(**common), project_updates(key=keys.init, **subspace)]
        if method == "pda-dpmd":
            gradient = mean_gradient(loss, (data.public, data.public_labels))
            mixing: Any = cosine_mixing(steps * (setting.horizon or 1))
            return [jdp.privatize(**common), mix_public(mixing, gradient, key=keys.init)]
        return [jdp.privatize(**common)]

    def clipper(params, index, data: Data, keys: Keys, knobs: Knobs):
        if method == "non-private":
            return jdp.clip_by_norm(np.inf)
        inner = jdp.clip_by_norm(knobs.clip_norm)
        if method != "adadps":
            return inner
        gradients = anchors(data, classes)(params, jax.random.fold_in(keys.init, index))
        moments = jax.tree.map(lambda leaf: jnp.mean(leaf**2, axis=0), gradients)
        weights = inverse_root(moments, floor=FLOOR)
        # Public gradients keep their mean square, so that clip norms mean what they mean elsewhere.
        after = sum(jnp.sum(v * d**2) for v, d in zip(moments, weights, strict=True))
        scale = jnp.sqrt(sum(map(jnp.sum, moments)) / after)
        return clip_preconditioned(inner, jax.tree.map(lambda d: d * scale, weights))

    def step(index, carry, data: Data, keys: Keys, knobs: Knobs):
        params, state = carry
        gradient: Any
        extra: dict[str, Any] = {}
        if method == "public-only":
            gradient = mean_gradient(loss, (data.public, data.public_labels))(params, keys.init)
        else:
            rows, mask = sampler.batch(keys.sampling, index)
            batch = (data.train[rows], data.train_labels[rows])
            if method in WITH_LOSS:
                gradient, extra = batch, {"mask": mask}
            else:
                own = clipper(params, index, data, keys, knobs)
                gradient = jdp.clipped_grad(loss, own)(params, batch, mask=mask)
        updates, state = transformation(data, keys, knobs).update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def begin(data: Data, keys: Keys, knobs: Knobs):
        params = zeros(data.train.shape[1], classes, groups)
        return params, transformation(data, keys, knobs).init(params)

    @functools.partial(jax.jit, donate_argnums=2)
    def advance_to(start, stop, carry, data: Data, keys: Keys, knobs: Knobs):
        body = lambda index, carry: step(index, carry, data, keys, knobs)  # noqa: E731
        return jax.lax.fori_loop(start, stop, body, carry)

    def train(data: Data, keys: Keys, knobs: Knobs, advance: Callable[[int], None]):
        started = time.process_time()
        carry = begin(data, keys, knobs)
        every = max(1, steps // 10)
        for start in range(0, steps, every):
            stop = min(start + every, steps)
            carry = jax.block_until_ready(advance_to(start, stop, carry, data, keys, knobs))
            advance(stop - start)
        return {
            "test_accuracy": float(_accuracy(carry[0], data)),
            "cpu_seconds": time.process_time() - started,
        }

    return train


def anchors(data: Data, classes: int):
    """Gradients of the public examples under random labels, as a function of (params, key)."""
    return jdp.random_label_gradients(loss, data.public, num_classes=classes)


@jax.jit
def _accuracy(params, data: Data) -> jax.Array:
    return jnp.mean((data.test @ matrix(params)).argmax(1) == data.test_labels)


def unprotected_share_outside(
    data: Data, rank: int, classes: int, groups: int, rows: int = 500
) -> float:
    """How much of private gradients at the start lies outside of the public subspace: NOT private.

    As a share of their squared norm, over the first `rows` private examples.
    """
    params = zeros(data.train.shape[1], classes, groups)
    ranks = jdp.allocate_rank(rank, [leaf.size for leaf in params], len(data.public))
    key = jax.random.key(0)
    bases = jdp.subspace.public_bases(
        key, anchors(data, classes)(params, key), ranks, tuple(range(groups))
    )
    batch = (data.train[:rows], data.train_labels[:rows])
    gradients = jdp.per_example_grad(loss)(params, batch)
    inside = sum(jnp.sum(part**2) for part in jdp.subspace.project(bases, gradients))
    return float(1 - inside / sum(jnp.sum(leaf**2) for leaf in gradients))
