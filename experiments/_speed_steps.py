"""What `experiments.speed` times: one training step, non-private and private in many ways."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jdp
from experiments._speed_models import Row

STRATEGIES = ("book-keeping", "vmap", "scan")
NON_PRIVATE, BOOKKEEPING = "non-private", "jdp book-keeping"
PEERS = ("optax", "jax-privacy")
MICROBATCHES = (None, 16, 1)
CLIP_NORM, LEARNING_RATE = 1.0, 0.01
SCAN_FLOATS = 2**26  # per-example gradients that jdp's scan holds at a time; less is vmap's case


class Contestant(NamedTuple):
    """A function to compile, its arguments, and how many steps of training one call of it is.

    `calls` takes the compiled function and does the steps; by default one call is one step.
    """

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    steps: int = 1
    calls: Callable[[Callable[..., Any]], Any] | None = None


def has_jax_privacy() -> bool:
    """Whether jax-privacy is installed."""
    return importlib.util.find_spec("jax_privacy") is not None


def _free(row: Row, params) -> tuple[Any, Callable[[Any], Any]]:
    """The trainable parameters (None where frozen), and how to put all together again."""
    if row.trainable is None:
        return params, lambda free: free
    flags = row.trainable(params)
    free = jax.tree.map(lambda leaf, flag: leaf if flag else None, params, flags)
    is_none = lambda leaf: leaf is None  # noqa: E731
    return free, lambda free: jax.tree.map(
        lambda own, given: given if own is None else own, free, params, is_leaf=is_none
    )


def _step(row: Row, gradient, tx) -> Callable[..., Any]:
    """One step from a gradient of the trainable parameters: for all but jdp."""

    def step(params, state, batch):
        free, whole = _free(row, params)
        updates, state = tx.update(gradient(free, whole, batch), state, free)
        return whole(optax.apply_updates(free, updates)), state

    return step


def _jdp_step(row: Row, params, batch_size: int, strategy, z: float) -> tuple[Any, Any, Any]:
    """The step, and its two parts: the clipped sum, and the noise with the update."""
    clipper = jdp.clip_by_norm(CLIP_NORM)
    trainable = None if row.trainable is None else row.trainable(params)
    gradient: Any = jdp.clipped_grad(row.loss, clipper, strategy=strategy, trainable=trainable)
    private = jdp.privatize(z, batch_size=batch_size, key=jax.random.key(1))
    tx = optax.chain(private, optax.sgd(LEARNING_RATE))

    def step(params, state, batch):
        mask = jnp.ones(batch_size, bool)
        updates, state = tx.update(gradient(params, batch, mask=mask), state, params)
        return optax.apply_updates(params, updates), state

    return step, gradient, tx


def _jax_privacy(row: Row, batch_size: int, microbatch_size: int | None, z: float):
    from jax_privacy import clipping, noise_addition

    def gradient(free, whole, batch):
        return clipping.clipped_grad(
            lambda free, example: row.loss(whole(free), example),
            l2_clip_norm=CLIP_NORM,
            normalize_by=batch_size,
            keep_batch_dim=False,
            microbatch_size=microbatch_size,
        )(free, batch)

    std = z * CLIP_NORM / batch_size
    noise = noise_addition.gaussian_privatizer(stddev=std, prng_key=jax.random.key(1))
    return gradient, optax.chain(noise, optax.sgd(LEARNING_RATE))


def contestants(
    row: Row,
    peers: tuple[str, ...] = (),
    strategies: tuple[str, ...] = STRATEGIES,
    parts: bool = False,
    noise_multiplier: float = 1.0,
) -> dict[str, Contestant]:
    """Every way to take one step on one batch of the row.

    Args:
      row: the network and its data.
      peers: of `PEERS`.
      strategies: of jdp; `scan` only where it differs from `vmap`.
      parts: also the two parts of the book-keeping step by themselves.
      noise_multiplier: of the private ones.
    """
    n, z = row.batch_size, noise_multiplier
    params = jax.jit(row.init)(jax.random.key(0))
    batch = row.examples(jax.random.key(2), n)
    free, _ = _free(row, params)
    floats = num_parameters(row) * n
    sgd = optax.sgd(LEARNING_RATE)

    def contestant(gradient, tx):
        return Contestant(_step(row, gradient, tx), (params, tx.init(free), batch))

    def non_private(free, whole, batch):
        return jax.grad(lambda free: row.mean_loss(whole(free), batch))(free)

    def per_example(free, whole, batch):
        one = jax.grad(lambda free, example: row.loss(whole(free), example))
        return jax.vmap(one, in_axes=(None, 0))(free, batch)

    found = {NON_PRIVATE: contestant(non_private, sgd)}
    for strategy in strategies:
        if strategy == "scan" and floats <= SCAN_FLOATS:
            continue
        step, gradient, tx = _jdp_step(row, params, n, strategy, z)
        state = jax.jit(tx.init)(params)
        found[f"jdp {strategy}"] = Contestant(step, (params, state, batch))
        if parts and strategy == "book-keeping":
            norms = jdp.unprotected_gradient_norms(
                row.loss, trainable=None if row.trainable is None else row.trainable(params)
            )
            found |= _parts(row, norms, gradient, tx, params, state, batch)
    if "optax" in peers:
        aggregate = optax.contrib.differentially_private_aggregate(
            CLIP_NORM, z, key=jax.random.key(1)
        )
        found["optax.contrib"] = contestant(per_example, optax.chain(aggregate, sgd))
    if "jax-privacy" in peers and has_jax_privacy():
        for size in MICROBATCHES:
            if size is None or size < n:
                name = f"jax-privacy, microbatch {str(size).lower()}"
                found[name] = contestant(*_jax_privacy(row, n, size, z))
    return found


def _parts(row: Row, norms, gradient, tx, params, state, batch) -> dict[str, Contestant]:
    mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool)

    def clipped(params, batch):
        return gradient(params, batch, mask=mask)

    def rest(total, state, params):
        updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), state

    total = jax.eval_shape(clipped, params, batch)
    total = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), total)
    return {
        "its forward pass": Contestant(row.mean_loss, (params, batch)),
        "its norms": Contestant(norms, (params, batch)),
        "its clipped sum": Contestant(clipped, (params, batch)),
        "its noise and update": Contestant(rest, (total, state, params)),
    }


def num_parameters(row: Row) -> int:
    """The number of trainable parameters."""
    free, _ = _free(row, jax.eval_shape(row.init, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(free))


def prepare(
    entries: Mapping[str, Contestant], advance: Callable[[int], None]
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, Any]]]:
    """Compile the contestants.

    Returns:
      What `race` takes, and for each contestant its compile time and XLA's temporary memory.
    """
    calls, facts = {}, {}
    for name, entry in entries.items():
        begin = time.monotonic()
        compiled = jax.jit(entry.fun).lower(*entry.arguments).compile()
        facts[name] = {"compile_seconds": time.monotonic() - begin, "steps": entry.steps}
        memory = compiled.memory_analysis()
        facts[name]["temporary_bytes"] = None if memory is None else memory.temp_size_in_bytes
        calls[name] = _caller(compiled, entry)
        advance(1)
    return calls, facts


def _caller(compiled, entry: Contestant) -> Callable[[], Any]:
    if entry.calls is not None:
        steps = entry.calls
        return lambda: jax.block_until_ready(steps(compiled))
    return lambda: jax.block_until_ready(compiled(*entry.arguments))
