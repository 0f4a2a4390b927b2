"""DP-DeepSets trained on synthetic public regressions; nothing here sees a private one.

A record is y (x, 1) / sqrt(d), and the decoder gives w. The loss is that of other examples of each
public set, (y - x.w)^2, so that no public set's own w is needed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import _run
from experiments._hypernet_data import DELTA, draw, draw_inputs, draw_weights
from jdp.hypernet import (
    Hypernet,
    LinearDecoder,
    MLPEncoder,
    Tasks,
    flat_tokens,
    init_training,
    plan_embedding,
    train_step,
    warmup_cosine,
)

WIDTH = 64  # features of an embedding
EXAMPLES = 256  # of each public set in the loss
RECORDS = 16_384  # of all public sets of a step together, more or less
LEARNING_RATE = 3e-3
CHUNK = 100  # steps of a scan
POOL = 16_384  # inputs x that the public sets of a chunk share, with signs of their own


def sets_per_step(n: int) -> int:
    """More sets where they are small: 128 at most, 16 at least."""
    return max(16, min(128, RECORDS // n))


def record(x, y):
    """What the encoder sees."""
    ones = jnp.ones_like(y[..., None])
    return y[..., None] * jnp.concatenate([x, ones], axis=-1) / math.sqrt(x.shape[-1])


def network(n: int, d: int, noise_multiplier) -> Hypernet:
    """The hypernetwork: linear encoder and decoder."""
    num_tokens, detokenise = flat_tokens(jnp.zeros(d), d)
    decoder = LinearDecoder(num_tokens, d, kernel_init=jax.nn.initializers.lecun_normal())
    return Hypernet(
        MLPEncoder((min(WIDTH, d),)),
        decoder,
        detokenise,
        num_records=n,
        noise_multiplier=noise_multiplier,
        adjacency="zero-out",
    )


def tasks(key, pool, sets: int, n: int, gamma) -> Tasks:
    """Public sets: w and labels are drawn afresh, inputs are runs of the pool with other signs."""
    d = pool.shape[1]

    def labelled(key, w, size):
        signs, start, noise = jax.random.split(key, 3)
        start = jax.random.randint(start, (), 0, len(pool) - size + 1)
        x = jax.lax.dynamic_slice_in_dim(pool, start, size)
        x = x * jax.random.rademacher(signs, (d,), jnp.float32)
        return x, x @ w + jax.random.normal(noise, (size,))

    def one(key):
        keys = jax.random.split(key, 3)
        w = draw_weights(keys[0], d, gamma)
        return record(*labelled(keys[1], w, n)), labelled(keys[2], w, EXAMPLES)

    return Tasks(*jax.vmap(one)(jax.random.split(key, sets)))


def loss(w, examples):
    """Mean squared error of one set's examples."""
    x, y = examples
    return jnp.mean((y - x @ w) ** 2)


@functools.cache
def _programs(n: int, d: int, steps: int):
    """(start, chunk of steps), compiled once for each size; seeds are mapped over."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(warmup_cosine(LEARNING_RATE, steps))
    )

    def start(key, gamma, z):
        pool = draw_inputs(jax.random.fold_in(key, 1), max(POOL, n), d)
        public = tasks(key, pool, 8, n, gamma).records.reshape(-1, d + 1)
        return init_training(network(n, d, z), optimizer, key, public)

    def chunk(state, key, gamma, z):
        step = train_step(network(n, d, z), loss, optimizer)
        pool = draw_inputs(
            jax.random.fold_in(jax.random.fold_in(key, 1), state.step), max(POOL, n), d
        )

        def body(state, _):
            own = jax.random.fold_in(jax.random.fold_in(key, 2), state.step)
            public = tasks(own, pool, sets_per_step(n), n, gamma)
            state, losses = step(state, public)
            return state, jnp.mean(losses)

        return jax.lax.scan(body, state, length=CHUNK)

    mapped: Any = (0, 0, None, None)
    return jax.jit(jax.vmap(start, (0, None, None))), jax.jit(jax.vmap(chunk, mapped))


def train(keys, n: int, d: int, gamma: float, epsilon: float, steps: int, label: str):
    """Train one hypernetwork a key; returns their parameters and the losses of the last chunk."""
    start, chunk = _programs(n, d, steps)
    z = jnp.float32(plan_embedding(n, epsilon=epsilon, delta=DELTA).noise_multiplier)
    halves = jax.vmap(jax.random.split)(keys)
    state, losses = start(halves[:, 0], jnp.float32(gamma), z), None
    with _run.progress(label, steps) as advance:
        for _ in range(steps // CHUNK):
            state, losses = chunk(state, halves[:, 1], jnp.float32(gamma), z)
            jax.block_until_ready(losses)
            advance(CHUNK)
    assert losses is not None
    return state.params, np.asarray(losses, np.float64).mean(1)


@functools.cache
def _evaluation(n: int, d: int):
    def one(params, key, gamma, z):
        data_key, noise_key = jax.random.split(key)
        x, y, w = draw(data_key, n, d, gamma)
        found = network(n, d, z).generate(params, record(x, y), noise_key)
        return jnp.sum((found - w) ** 2), jnp.sum(w**2)

    def many(params, keys, gamma, z):
        return jax.lax.map(lambda key: one(params, key, gamma, z), keys)

    return jax.jit(jax.vmap(many, (0, None, None, None)))


def errors(params, keys, n: int, d: int, gamma: float, epsilon: float):
    """Errors (trainings, data sets), and |w|^2 of the data sets."""
    z = jnp.float32(plan_embedding(n, epsilon=epsilon, delta=DELTA).noise_multiplier)
    found, norms = _evaluation(n, d)(params, keys, jnp.float32(gamma), z)
    return np.asarray(found, np.float64), np.asarray(norms, np.float64)[0]
