"""Adaptive clipping (Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021, arXiv 1905.03871)."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jdp import _check, _tree, noise
from jdp._typing import Adjacency, Key, Mask, Params, PerExample, PyTree, Scalar
from jdp.aggregate import (
    as_update,
    check_divisor,
    check_per_example,
    initial_state,
    transformation,
)
from jdp.clipping import ClippedSum, Clipper, clip_by_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountedSum(ClippedSum):
    """A clipped sum and a centred count of the examples that were not clipped."""

    def combine(self, parts: tuple[PyTree, ...]) -> PyTree:
        """Return (estimate of the sum, estimate of the centred count)."""
        return parts


def clip_and_count(clip_norm: Scalar, *, gradient_scale: float, count_scale: float) -> Clipper:
    r"""Flat clipping, with the number of examples below the clip norm released beside the sum.

    **Guarantee.** The sum changes by at most C, the centred count $\sum_i (1[|g_i| \le C] - 1/2)$
    by at most 1/2. With noise scales $a_1 C$ and $a_2 / 2$, where $1/a_1^2 + 1/a_2^2 \le 1$, the
    joint L2 sensitivity is 1 in these units: the count is inside the noise multiplier.

    Args:
      clip_norm: C > 0. May be traced.
      gradient_scale: $a_1$.
      count_scale: $a_2$.

    Returns:
      A clipper, as `jdp.clip_by_norm`.

    Raises:
      ValueError: $1/a_1^2 + 1/a_2^2 > 1$: the count would not be paid for.

    >>> import jax.numpy as jnp
    >>> from jdp.adaptive import clip_and_count
    >>> clipper = clip_and_count(1.0, gradient_scale=2**0.5, count_scale=2**0.5)
    >>> clipped = clipper(jnp.array([[3.0, 4.0], [0.1, 0.1]]), jnp.array([True, True]))
    >>> print(clipped.parts[1])
    0.0
    """
    if gradient_scale**-2 + count_scale**-2 > 1 + 1e-12:
        _check.fail(
            "gradient_scale",
            "such that gradient_scale**-2 + count_scale**-2 <= 1",
            (gradient_scale, count_scale),
            "Both equal to sqrt(2) pays for both equally.",
        )
    clip_norm = _check.clip_norm("clip_norm", clip_norm)
    flat = clip_by_norm(clip_norm)

    def clipper(per_example: PerExample, mask: Mask) -> ClippedSum:
        clipped = flat(per_example, mask)
        square = _tree.squared_norms(jax.tree.leaves(per_example), clip_norm)
        below = jnp.where(square <= 1, 0.5, -0.5)
        count = jnp.sum(jnp.where(mask & jnp.isfinite(square), below, 0))
        (total,), (scale,) = clipped.parts, clipped.noise_scales
        return CountedSum(
            (total, count),
            (gradient_scale * scale, count_scale / 2),
            rows=clipped.rows,
            rounding=clipped.rounding,
        )

    return clipper


class AdaptiveState(NamedTuple):
    """The state of adaptive clipping; the clip norm comes from released values only."""

    key: Key
    step: Int[Array, ""]
    clip_norm: Float[Array, ""]


def dp_aggregate_adaptive(
    noise_multiplier: float,
    *,
    batch_size: float,
    key: Key,
    initial_clip_norm: float = 0.1,
    target_quantile: float = 0.5,
    clip_learning_rate: float = 0.2,
    count_noise_std: float | None = None,
    adjacency: Adjacency | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clip at a private estimate of a quantile of the gradient norms (Andrew et al. 2021, Alg. 1).

    After each step $C \leftarrow C \exp(-\eta_C(\tilde b - \gamma))$, with $\tilde b$ the noisy
    fraction of examples whose norm was at most C.

    **Guarantee.** One Gaussian mechanism of noise multiplier z a step, count included: the
    gradient's own multiplier is $z_\Delta = (z^{-2} - (2\sigma_b)^{-2})^{-1/2}$, as in the paper's
    Theorem 1. So `plan.noise_multiplier` is what to pass, and the event is that of plain DP-SGD.

    Args:
      noise_multiplier: z >= 0, the joint one; a Python number.
      batch_size: the expected batch size, public.
      key: one typed, secret PRNG key.
      initial_clip_norm: C at step 0; chosen without looking at private data.
      target_quantile: $\gamma$ in (0, 1).
      clip_learning_rate: $\eta_C$ > 0.
      count_noise_std: $\sigma_b$, the noise on the count, in examples; `batch_size / 20` by
        default, as in the paper. Must exceed z / 2.
      adjacency: as in `jdp.add_noise`.

    Returns:
      An optax transformation: `update(per_example, state, params, mask=mask)`.

    Raises:
      TypeError, ValueError: as in `jdp.dp_aggregate`; also if $2 \sigma_b \le z$: then the count
        alone spends more than z allows.

    >>> import jax, jax.numpy as jnp, jdp
    >>> params, gradients = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> tx = jdp.dp_aggregate_adaptive(0.0, batch_size=2, key=jax.random.key(0))
    >>> mask = jnp.array([True, True])
    >>> _, state = tx.update(gradients, tx.init(params), params, mask=mask)
    >>> print(state.clip_norm.round(4))  # both were clipped, so it grows
    0.1105
    """
    if not _check.is_static_number(noise_multiplier):
        _check.fail(
            "noise_multiplier",
            "a Python number",
            noise_multiplier,
            "The split between gradient and count is fixed when this is constructed.",
            TypeError,
        )
    _check.noise_multiplier(noise_multiplier)
    batch_size = check_divisor(batch_size)
    _check.typed_key("key", key)
    noise.adjacency_of(noise_multiplier, adjacency)
    positive = {"initial_clip_norm": initial_clip_norm, "clip_learning_rate": clip_learning_rate}
    for name, value in positive.items():
        _check.number(name, value, above=0, remedy="Start with 0.1 and 0.2, as in the paper.")
    _check.number(
        "target_quantile", target_quantile, above=0, below=1, remedy="0.5 clips half of them."
    )
    if count_noise_std is None:
        count_noise_std = max(batch_size / 20, float(noise_multiplier))
    _check.number(
        "count_noise_std",
        count_noise_std,
        above=noise_multiplier / 2,
        remedy="More noise on the count leaves more of the budget to the gradient; the paper uses "
        "batch_size / 20. Raise it, or the batch size.",
    )
    count_scale = 2 * count_noise_std / noise_multiplier if noise_multiplier > 0 else math.sqrt(2)
    gradient_scale = (1 - count_scale**-2) ** -0.5

    def init_fn(params: Params) -> AdaptiveState:
        del params
        return AdaptiveState(*initial_state(key), jnp.asarray(initial_clip_norm, jnp.float32))

    def update_fn(
        updates: PerExample,
        state: AdaptiveState,
        params: Params | None = None,
        *,
        mask: Mask,
        **extra,
    ):
        del extra
        check_per_example(params, updates)
        clipper = clip_and_count(
            state.clip_norm, gradient_scale=gradient_scale, count_scale=count_scale
        )
        total, count = noise.add_noise(
            noise.step_key(state.key, "noise", state.step),
            clipper(updates, mask),
            noise_multiplier,
            adjacency=adjacency,
        )
        fraction = count / batch_size + 0.5
        grown = state.clip_norm * jnp.exp(-clip_learning_rate * (fraction - target_quantile))
        # Public bounds: without them a long run could drive C to 0 or infinity.
        clip_norm = jnp.clip(grown, 1e-6 * initial_clip_norm, 1e6 * initial_clip_norm)
        update = as_update(total, params, batch_size)
        return update, AdaptiveState(state.key, state.step + 1, clip_norm)

    return transformation(init_fn, update_fn)
