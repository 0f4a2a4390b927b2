"""Adam and AdamW after private noise: as they are, or without the noise's bias."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jdp import _check, _tree
from jdp._typing import Params, PyTree, Scalar
from jdp.aggregate import check_aggregate, transformation


class CorrectedAdamState(NamedTuple):
    """The state of `scale_by_adam_corrected`: moments of released updates."""

    step: Int[Array, ""]
    mean: PyTree
    square: PyTree


def scale_by_adam_corrected(
    noise_std: Scalar | PyTree, *, floor: float, b1: float = 0.9, b2: float = 0.999
) -> optax.GradientTransformationExtraArgs:
    r"""DP-AdamBC: $\hat m / \sqrt{\max(\hat v - s^2, \gamma)}$ (Tang, Shpilevskiy, Lécuyer 2024).

    AAAI 2024, arXiv 2312.14334. Noise of standard deviation s adds $s^2$ to the second moment of
    every coordinate. At usual batch sizes that is most of it, so plain DP-Adam divides all
    coordinates by about s and is DP-SGD with momentum. Subtracting the known $s^2$ brings Adam's
    scaling back. What is left of the noise in $\hat v$ has a standard deviation of about
    $s^2 \sqrt{2 (1 - b_2) / (1 + b_2)}$, so a floor far below that lets noise be divided by little.

    **Guarantee.** That of what comes before: post-processing of the released update and of s, which
    is public. Place it AFTER `jdp.privatize`. Plain DP-Adam and DP-AdamW are ordinary chains,
    without this. With decoupled weight decay it is the bias-corrected DP-AdamW (arXiv 2511.07843,
    whose authors found that the correction made AdamW less accurate).

    Args:
      noise_std: s > 0 of each coordinate of the update: z a C / B with `jdp.clip_by_norm(C)` or
        `jdp.clip_automatic(C)`, where B is the batch size and a is 2 under replace-one, else 1. A
        pytree of numbers like the parameters where it differs, as after `jdp.clip_by_group`, where
        C is $\sqrt G C_g$. May be traced.
      floor: $\gamma > 0$, in units of squared gradients; the paper tunes it.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).

    Returns:
      An optax transformation, as `optax.scale_by_adam`. Moments are float32 or wider.

    Raises:
      TypeError: an argument is not a number or (`noise_std`) a pytree of numbers.
      ValueError: an argument is out of range, or structures or shapes do not fit: a `ClippedSum`
        or per-example gradients, which are not private yet.

    >>> import jax, jax.numpy as jnp, jdp, optax
    >>> def private():
    ...     return jdp.privatize(1.0, batch_size=100, key=jax.random.key(0))
    >>> dp_adam = optax.chain(private(), optax.adam(1e-3))
    >>> dp_adamw = optax.chain(private(), optax.adamw(1e-3, weight_decay=0.01))
    >>> dp_adamw_bc = optax.chain(
    ...     private(),
    ...     jdp.scale_by_adam_corrected(1.0 * 0.5 / 100, floor=1e-6),  # z C / B
    ...     optax.add_decayed_weights(0.01),
    ...     optax.scale_by_learning_rate(1e-3))
    >>> params, clipped = jnp.zeros(2), jdp.clip_by_norm(0.5)(jnp.ones((90, 2)), jnp.ones(90, bool))
    >>> for tx in (dp_adam, dp_adamw, dp_adamw_bc):
    ...     updates, _ = jax.jit(tx.update)(clipped, tx.init(params), params)
    ...     print(updates.round(4))
    [-0.001 -0.001]
    [-0.001 -0.001]
    [-0.001 -0.001]
    """
    for std in jax.tree.leaves(noise_std) or [noise_std]:
        remedy = "It is z C / B for clip_by_norm(C) and batches of B."
        _check.number("noise_std", std, above=0, traced=True, remedy=remedy)
    remedy = "It bounds what an update is divided by."
    floor = _check.number("floor", floor, above=0, remedy=remedy)
    for name, decay in {"b1": b1, "b2": b2}.items():
        _check.number(name, decay, at_least=0, below=1, remedy="Adam uses 0.9 and 0.999.")

    def init_fn(params: Params) -> CorrectedAdamState:
        def zeros() -> PyTree:
            return jax.tree.map(lambda leaf: jnp.zeros_like(_tree.wide(leaf)), params)

        return CorrectedAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update_fn(
        updates: PyTree, state: CorrectedAdamState, params: Params | None = None, **extra
    ):
        del extra
        check_aggregate(state.mean if params is None else params, updates)
        stds = _for_each_leaf(noise_std, updates)
        wide = jax.tree.map(_tree.wide, updates)
        mean = optax.tree.update_moment(wide, state.mean, b1, 1)
        square = optax.tree.update_moment(wide, state.square, b2, 2)
        step = state.step + 1
        unbiased_mean = optax.tree.bias_correction(mean, b1, step)
        unbiased_square = optax.tree.bias_correction(square, b2, step)

        def scaled(m: Array, v: Array, std: Scalar, update: Array) -> Array:
            variance = jnp.asarray(std, v.dtype) ** 2
            return (m / jnp.sqrt(jnp.maximum(v - variance, floor))).astype(update.dtype)

        result = jax.tree.map(scaled, unbiased_mean, unbiased_square, stds, updates)
        return result, CorrectedAdamState(step, mean, square)

    return transformation(init_fn, update_fn)


def _for_each_leaf(noise_std: Scalar | PyTree, updates: PyTree) -> PyTree:
    structure, got = jax.tree.structure(updates), jax.tree.structure(noise_std)
    if got == jax.tree.structure(0):
        return jax.tree.map(lambda _: noise_std, updates)
    if got != structure:
        remedy = "Give one number, or one for each leaf of the parameters."
        _check.fail("noise_std", f"a pytree with structure {structure}", got, remedy)
    return noise_std
