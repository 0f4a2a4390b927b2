"""Public gradients mixed into private updates (Amid et al., ICML 2022, arXiv 2112.00193)."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jdp import _check, _tree
from jdp._typing import Key, Loss, Params, PyTree, Scalar
from jdp.aggregate import PrivateState, check_aggregate, initial_state, transformation
from jdp.gradients import prepare
from jdp.noise import step_key

PublicGradient: TypeAlias = Callable[[Params, Key], PyTree]
"""`(params, key) -> mean gradient` of public data, like the (trainable) parameters."""


def mean_gradient(
    loss: Loss,
    examples: PyTree,
    *,
    batch_size: int | None = None,
    trainable: PyTree | None = None,
) -> PublicGradient:
    """Return the gradient of the mean loss over PUBLIC examples, as a function of (params, key).

    Args:
      loss: as in `jdp.per_example_grad`.
      examples: public examples, on the leading axis.
      batch_size: how many to draw (uniformly, with replacement) at each call; all by default.
      trainable: as in `jdp.per_example_grad`; the same as for the private gradients.

    Returns:
      `(params, key) -> gradient`, None at frozen leaves. Unlike private gradients it is not
      clipped.

    Raises:
      TypeError, ValueError: as in `jdp.per_example_grad`, or `batch_size` is no positive integer.

    >>> import jax, jax.numpy as jnp
    >>> from jdp import public_data
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> public = (jnp.eye(2), jnp.array([1.0, 3.0]))
    >>> print(public_data.mean_gradient(loss, public)(jnp.zeros(2), jax.random.key(0)))
    [-0.5 -1.5]
    """
    if not callable(loss):
        remedy = "Write it for ONE example; it returns one floating scalar."
        _check.fail("loss", "a function of (params, example)", loss, remedy, TypeError)
    if batch_size is not None:
        _check.integer("batch_size", batch_size, at_least=1, remedy="Or None for all of them.")
    remedy = "Stack public examples; every leaf has one row an example."
    count = _check.rows("examples", examples, "examples", remedy)
    if not count:
        _check.fail("examples", "one or more", _check.Words("none"), remedy)

    def gradient(params: Params, key: Key) -> PyTree:
        batch = jax.tree.map(jnp.asarray, examples)
        free, loss_of = prepare(loss, params, batch, trainable)
        if batch_size is not None:
            _check.typed_key("key", key)
            rows = jax.random.randint(key, (batch_size,), 0, count)
            batch = jax.tree.map(lambda leaf: leaf[rows], batch)
        losses = jax.vmap(loss_of, in_axes=(None, 0))
        return jax.grad(lambda free: jnp.mean(losses(free, batch)))(free)

    return gradient


def mix_public(
    mixing: float | optax.Schedule, public_gradient: PublicGradient, *, key: Key
) -> optax.GradientTransformationExtraArgs:
    r"""PDA-DPMD in practical form: $u_t = \alpha_t v_t + (1 - \alpha_t) \nabla\Psi(\theta_t)$.

    Public data-assisted DP mirror descent (Amid et al. 2022). $v_t$ is the private update, $\Psi$
    the public loss. The exact step, with $\Psi$ as mirror map, is
    $\theta_{t+1} = \arg\min_\theta \eta \langle v_t, \theta\rangle + B_\Psi(\theta, \theta_t)$; for
    a quadratic $\Psi$ with Hessian H it is $\theta_t - \eta H^{-1} v_t$. From the minimum of
    $\Psi$, where the paper starts, $u_t$ is the gradient of that objective with
    $\eta = \alpha/(1 - \alpha)$, times $1 - \alpha$: descent along it is a first-order method for
    the exact step, reaches it if $v_t$ stands still, and needs no Hessian.

    **Guarantee.** That of what comes before: post-processing, since it reads the released update,
    the parameters and public data only. Place it AFTER `jdp.privatize` (or another private
    transformation), before momentum and learning rate.

    Args:
      mixing: $\alpha$ in [0, 1], the weight of the private update; a number, or a function of the
        step (clipped to [0, 1]), as `cosine_mixing(steps)`. 1 is DP-SGD, 0 public training.
      public_gradient: `(params, key) -> mean gradient` of public data, for example
        `mean_gradient(loss, examples)`. It is not clipped, so alpha also balances lengths.
      key: a typed key, for the public batches.

    Returns:
      An optax transformation; updates keep their dtypes.

    Raises:
      TypeError: an argument has another type, or `mixing` returns no number.
      ValueError: `mixing` is out of range or returns no scalar, or `params` or the updates do not
        fit: a `ClippedSum` or per-example gradients, which are not private yet.

    >>> import jax, jax.numpy as jnp, jdp, optax
    >>> from jdp import public_data
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> public = (jnp.eye(2), jnp.array([1.0, 3.0]))
    >>> tx = optax.chain(
    ...     jdp.privatize(0.0, batch_size=2, key=jax.random.key(0)),
    ...     public_data.mix_public(
    ...         0.5, public_data.mean_gradient(loss, public), key=jax.random.key(1)),
    ...     optax.sgd(1.0))
    >>> params, clipped = jnp.zeros(2), jdp.clip_by_norm(1.0)(-jnp.eye(2), jnp.ones(2, bool))
    >>> updates, _ = jax.jit(tx.update)(clipped, tx.init(params), params)
    >>> print(updates.round(2))
    [0.5 1. ]
    """
    if callable(mixing):
        _weight(mixing, jnp.zeros((), jnp.int32))
    else:
        remedy = "Or a function of the step, as public_data.cosine_mixing(steps)."
        _check.number("mixing", mixing, at_least=0, at_most=1, remedy=remedy)
    if not callable(public_gradient):
        _check.fail(
            "public_gradient",
            "a function (params, key) -> mean gradient",
            public_gradient,
            "Make it with public_data.mean_gradient(loss, public_examples).",
            TypeError,
        )
    _check.typed_key("key", key)

    def init_fn(params: Params) -> PrivateState:
        del params
        return initial_state(key)

    def update_fn(updates: PyTree, state: PrivateState, params: Params | None = None, **extra):
        del extra
        check_aggregate(params, updates)
        alpha = _weight(mixing, state.step) if callable(mixing) else jnp.float32(mixing)
        public = public_gradient(params, step_key(state.key, "labels", state.step))
        check_aggregate(params, public, "public_gradient(params, key)")

        def mix(public: Array | None, private: Array) -> Array:
            if public is None:  # a frozen leaf, whose update is zero
                return private
            own, other = _tree.wide(private), _tree.wide(public)
            weight = alpha.astype(own.dtype)
            return (weight * own + (1 - weight) * other.astype(own.dtype)).astype(private.dtype)

        mixed = jax.tree.map(mix, public, updates, is_leaf=lambda leaf: leaf is None)
        return mixed, state._replace(step=state.step + 1)

    return transformation(init_fn, update_fn)


def _weight(mixing: optax.Schedule, step: Scalar) -> Float[Array, ""]:
    """The weight of the private update at a step, if it is one number."""
    alpha: Any = mixing(step)
    remedy = "It is the weight of the whole private update, as of public_data.cosine_mixing(steps)."
    real = hasattr(alpha, "dtype") and jnp.isrealobj(alpha)
    if not real and not _check.is_static_number(alpha):
        _check.fail("mixing(step)", "a number", alpha, remedy, TypeError)
    if jnp.shape(alpha) != ():
        _check.fail("mixing(step)", "a scalar", alpha, remedy)
    return jnp.clip(jnp.asarray(alpha, jnp.float32), 0, 1)


def cosine_mixing(steps: int) -> Callable[[Scalar], Float[Array, ""]]:
    r"""Return $\alpha_t = \cos(\pi t / (2K))$: private at the start, public from step K on.

    (The schedule of Amid et al. 2022.)

    Args:
      steps: K, usually the number of steps of the run.

    Raises:
      TypeError: `steps` is not an integer.
      ValueError: it is less than 1.

    >>> from jdp import public_data
    >>> mixing = public_data.cosine_mixing(100)
    >>> print(*(mixing(t).round(3) for t in (0, 50, 100)))
    1.0 0.707 0.0
    """
    _check.integer("steps", steps, at_least=1, remedy="It is the number of steps of the run.")

    def mixing(step: Scalar) -> Float[Array, ""]:
        left = jnp.maximum(1 - jnp.asarray(step, jnp.float32) / steps, 0)
        return jnp.sin(jnp.pi / 2 * left)  # the same, and exactly 0 at the end

    return mixing
