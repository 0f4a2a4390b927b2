"""Optax doors to the trusted core: per-example gradients or a clipped sum in, a private update out.

What comes after one of these in an `optax.chain` and reads only the updates, the parameters and
public numbers (momentum, Adam, weight decay, schedules) is post-processing. A transformation that
takes a private `value=`, `grad=` or `mask=` (line search, reduce_on_plateau) is not. Nothing may
come before. Neither `optax.masked` nor `optax.multi_transform` may wrap them: freeze parameters by
`trainable=`, and clip groups by `jdp.clip_by_group`, which pays for all groups at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jdp import _check, noise
from jdp._typing import Adjacency, Key, Mask, Params, PerExample, PyTree, Scalar
from jdp.clipping import ClippedSum, Clipper, NormClipper


class PrivateState(NamedTuple):
    """What a private transformation remembers: nothing that is private, but the key is SECRET."""

    key: Key
    step: Int[Array, ""]


def transformation(
    init_fn: Callable[..., Any], update_fn: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
    """Pair the two functions; optax's types know neither a ClippedSum nor a required extra."""
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def initial_state(key: Key) -> PrivateState:
    """Return the state at step 0, with a copy of the key (a donated state must not delete it)."""
    return PrivateState(jnp.copy(key), jnp.zeros((), jnp.int32))


def check_divisor(batch_size: float) -> float:
    """Return the divisor: the EXPECTED batch size, a public static number (contract C3)."""
    return _check.number(
        "batch_size",
        batch_size,
        above=0,
        remedy="It is the expected batch size, the public divisor (plan.batch_size), never the "
        "number of examples present; with optax.inject_hyperparams, name it in static_args.",
    )


def check_aggregate(params: Params | None, update: PyTree, name: str = "updates") -> None:
    """Check that an aggregated update fits the parameters (None stands for a frozen leaf)."""
    _compare(params, update, 0, name)


def check_per_example(
    params: Params | None, per_example: PerExample, name: str = "updates"
) -> None:
    """Check that gradients are the parameters' with one leading axis of examples."""
    if isinstance(per_example, ClippedSum):
        _check.fail(
            "updates",
            "per-example gradients",
            _check.Words("a ClippedSum"),
            "Use jdp.privatize for a clipped sum.",
            TypeError,
        )
    _compare(params, per_example, 1, name)


def _is_none(leaf: PyTree) -> bool:
    return leaf is None


def _is_masked(leaf: PyTree) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _compare(
    params: Params | None, updates: PyTree, batch_axes: int, name: str = "updates"
) -> None:
    what = "per-example gradients" if batch_axes else "an update"
    remedy = (
        "Call tx.update(gradients, state, params, ...) with the output of jdp.per_example_grad"
        "(loss)(params, batch), and let nothing change it before this transformation."
    )
    if params is None:
        _check.fail("params", "given", params, remedy)
    if any(
        isinstance(leaf, optax.MaskedNode)
        for leaf in jax.tree.leaves((params, updates), is_leaf=_is_masked)
    ):
        _check.fail(
            "updates",
            "whole",
            _check.Words("leaves left out by optax.masked or optax.multi_transform"),
            "They would pass un-noised, or share noise. Freeze parameters with trainable= in "
            "jdp.per_example_grad or jdp.clipped_grad; clip by group with jdp.clip_by_group.",
        )
    expected = jax.tree.structure(jax.tree.map(lambda _: 0, params, is_leaf=_is_none))
    got = jax.tree.structure(jax.tree.map(lambda _: 0, updates, is_leaf=_is_none))
    if got != expected:
        _check.fail(name, f"{what} with the structure of params, {expected}", got, remedy)
    for (path, leaf), update in zip(
        jax.tree.leaves_with_path(params, is_leaf=_is_none),
        jax.tree.leaves(updates, is_leaf=_is_none),
        strict=True,
    ):
        if update is None:
            continue
        if jnp.ndim(update) < batch_axes or jnp.shape(update)[batch_axes:] != jnp.shape(leaf):
            shape = ("n", *jnp.shape(leaf)) if batch_axes else jnp.shape(leaf)
            _check.fail(
                f"{name}{jax.tree_util.keystr(path)}",
                f"of shape {shape}",
                _check.Words(f"shape {jnp.shape(update)}"),
                remedy,
            )


def as_update(estimate: PyTree, params: Params, batch_size: float) -> PyTree:
    """Return the estimate over the divisor, in the parameters' dtypes, zero where frozen."""
    check_aggregate(params, estimate)
    return jax.tree.map(
        lambda total, leaf: (
            jnp.zeros_like(leaf)
            if total is None
            else (total / batch_size).astype(jnp.result_type(leaf))
        ),
        estimate,
        params,
        is_leaf=_is_none,
    )


def privatize(
    noise_multiplier: Scalar,
    *,
    batch_size: float,
    key: Key,
    adjacency: Adjacency | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Noise a `ClippedSum` and divide it: $\frac{1}{B}(\sum_i \bar g_i + z\,a\,s\,N(0, I))$.

    DP-SGD (Abadi et al. 2016, Alg. 1) when the sum comes from `jdp.clip_by_norm`.

    **Guarantee.** Each update is one Gaussian mechanism of noise multiplier z on the batch, as
    `jdp.add_noise`. Over a run with Poisson batches, the event is
    `SelfComposed(PoissonSampled(q, Gaussian(z)), steps)`: `jdp.plan` computes z for it. Noise is
    independent over steps. Two transformations, or two `init`s, with one key repeat it: give every
    transformation in every run a key of its own (`jdp.secure_key()`).

    Args:
      noise_multiplier: z >= 0, usually `plan.noise_multiplier`. May be traced
        (`optax.inject_hyperparams`; then give `adjacency`), but only a plan may vary it.
      batch_size: B, the expected batch size, public (`plan.batch_size`).
      key: one typed, secret PRNG key.
      adjacency: as in `jdp.add_noise`.

    Returns:
      An optax transformation, to be FIRST in its chain; `update(clipped_sum, state, params)`.
      Updates have the parameters' dtypes, and are zero for frozen leaves.

    Raises:
      TypeError: the updates are not a ClippedSum, or an argument has another type.
      ValueError: an argument is out of range, or `params` is missing or of other shapes.

    >>> import jax, jax.numpy as jnp, jdp, optax, numpy as np
    >>> loss = lambda w, example: 0.5 * (w @ example - 1.0) ** 2
    >>> params, batch = jnp.zeros(2), jnp.array([[1.0, 0.0], [0.0, 5.0]])
    >>> grad = jdp.clipped_grad(loss, jdp.clip_by_norm(1.0))
    >>> tx = optax.chain(jdp.privatize(0.0, batch_size=2, key=jax.random.key(0)), optax.sgd(1.0))
    >>> clipped = grad(params, batch, mask=jnp.array([True, True]))
    >>> updates, _ = tx.update(clipped, tx.init(params), params)
    >>> print(np.asarray(updates).round(2))
    [0.5 0.5]
    """
    _check.noise_multiplier(noise_multiplier)
    batch_size = check_divisor(batch_size)
    _check.typed_key("key", key)
    noise.adjacency_of(noise_multiplier, adjacency)

    def init_fn(params: Params) -> PrivateState:
        del params
        return initial_state(key)

    def update_fn(updates: ClippedSum, state: PrivateState, params: Params | None = None, **extra):
        del extra
        if not isinstance(updates, ClippedSum):
            _check.fail(
                "updates",
                "a ClippedSum",
                _check.Words(type(updates).__name__),
                "Make one with jdp.clipped_grad(loss, clipper), or use jdp.dp_aggregate, which "
                "takes per-example gradients; put it first in the chain.",
                TypeError,
            )
        if params is None:
            check_aggregate(params, None)
        estimate = noise.add_noise(
            noise.step_key(state.key, "noise", state.step),
            updates,
            noise_multiplier,
            adjacency=adjacency,
        )
        return as_update(estimate, params, batch_size), state._replace(step=state.step + 1)

    return transformation(init_fn, update_fn)


def dp_aggregate(
    clipper: Clipper,
    noise_multiplier: Scalar,
    *,
    batch_size: float,
    key: Key,
    adjacency: Adjacency | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip, sum, noise and divide per-example gradients: `clipper`, then `jdp.privatize`.

    **Guarantee.** As `jdp.privatize`, if the gradients are what `jdp.per_example_grad` computed:
    row i depends on example i alone. A transformation placed before this one can break that
    without any sign; only wrong shapes and structures are caught.

    Args:
      clipper: for example `jdp.clip_by_norm(1.0)`.
      noise_multiplier: as in `jdp.privatize`.
      batch_size: as in `jdp.privatize`.
      key: as in `jdp.privatize`.
      adjacency: as in `jdp.add_noise`.

    Returns:
      An optax transformation: `update(per_example, state, params, mask=mask)`, with (n,) booleans
      `mask`, False for padding.

    Raises:
      TypeError, ValueError: as in `jdp.privatize`; also without `mask`, or when a gradient's shape
        is not (n, *parameter shape), as an aggregated gradient's.

    >>> import jax, jax.numpy as jnp, jdp, numpy as np
    >>> params, gradients = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> tx = jdp.dp_aggregate(jdp.clip_by_norm(1.0), 0.0, batch_size=2, key=jax.random.key(0))
    >>> mask = jnp.array([True, True])
    >>> updates, _ = tx.update(gradients, tx.init(params), params, mask=mask)
    >>> print(np.asarray(updates).round(2))
    [0.3  0.65]
    """
    if not callable(clipper):
        _check.fail(
            "clipper", "a clipper", clipper, "For example jdp.clip_by_norm(1.0).", TypeError
        )
    if isinstance(clipper, NormClipper):
        check_finite_clip(clipper.clip_norms, noise_multiplier)
    inner = privatize(noise_multiplier, batch_size=batch_size, key=key, adjacency=adjacency)

    def update_fn(
        updates: PerExample,
        state: optax.OptState,
        params: Params | None = None,
        *,
        mask: Mask,
        **extra,
    ):
        del extra
        check_per_example(params, updates)
        clipped: Any = clipper(updates, mask)
        return inner.update(clipped, state, params)

    return transformation(inner.init, update_fn)


def check_finite_clip(clip_norms: Sequence[Any], noise_multiplier: Scalar) -> None:
    """Refuse an infinite clip norm with noise, as soon as both are known."""
    known = _check.is_static_number
    for norm in clip_norms:
        if known(norm) and math.isinf(norm) and known(noise_multiplier) and noise_multiplier > 0:
            _check.fail(
                "clip_norm",
                "finite when noise_multiplier > 0",
                norm,
                "Noise is proportional to the clip norm; choose a finite one.",
            )
