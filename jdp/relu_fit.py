r"""ReLU regression as `lax.scan` programs: one `fit`, and two that are not private.

One program, `fit`, is all of these:

| method | plan | threshold s | descent |
| --- | --- | --- | --- |
| DP-PGD (Shen et al. 2023) | `plan_blocks(N, N, T)` | fixed, $R W + Y$ | radius W, any gradient |
| dp-gd-glmtron | `plan_blocks(N, N, T)` | fixed, small | surrogate, or switch |
| DP-SGD | `jdp.plan(N, batch, T)` | fixed, small | true gradient |
| DP-GLMtron (Ding et al. 2025, Algorithm 1) | `plan_blocks(N, 1)` | public | surrogate |
| DP-MBGLMtron (Algorithm 3) | `plan_blocks(N, b, threshold_rows=m)` | private | surrogate |
| DP-TAGLMtron (Ding et al. 2024) | `plan_blocks(N, b, release="tree")` | any | surrogate |
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdp import _check
from jdp._typing import Key, PyTree, Scalar
from jdp.glmtron import Average, Descent, Gradient, Records, clipped_sum, predict, records
from jdp.noise import add_noise
from jdp.one_visit import DisjointBlocks, PointPlan, plan_blocks
from jdp.planning import TrainingPlan
from jdp.sampling import PoissonSampling
from jdp.thresholds import FixedThreshold, PrivateThreshold, PublicThreshold, Threshold, known
from jdp.tree_aggregation import climb, initial_tree


class Fit(NamedTuple):
    """What `fit` returns; all of it is private, as all iterates may be published.

    Attributes:
      weights: (d,) the average of the iterates.
      path: (steps, d) the iterates.
      thresholds: (steps,) the thresholds used.
    """

    weights: Float[Array, " d"]
    path: Float[Array, "t d"]
    thresholds: Float[Array, " t"]


def fit(
    key: Key,
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    plan: TrainingPlan,
    *,
    threshold: Threshold,
    descent: Descent,
    start: Float[Array, " d"] | None = None,
) -> Fit:
    r"""Run a planned method of the module's table.

    $w_{t+1} = \Pi_W(w_t - \eta_t (\sum_{i \in G_t} v_i + z\,a\,R\,s_t\,N(0, I)) / b)$, with b the
    plan's batch size and a = 1, or 2 under replace-one. Pure, and may be vmapped over keys. Over
    data, `start`, and the numbers in `descent` and `threshold` only together with a key each:
    under one key all runs have the same noise, which cancels in their differences, and NOTHING is
    private. And each run costs `plan.epsilon`.

    **Guarantee.** `plan.epsilon` at `plan.delta`, for all iterates and thresholds together: given
    the released $s_t$, a block's sum has sensitivity $R s_t$ (zero-out; twice that under
    replace-one), so its noise has the constant multiplier z; see `jdp.one_visit` for why a pass
    costs one Gaussian. Records that are not finite contribute nothing.

    Args:
      key: one typed PRNG key, secret and used for nothing else.
      x: (n, d) features, floating; n as in the plan.
      y: (n,) labels, floating.
      plan: of `plan_blocks`, or of `jdp.plan` with Poisson sampling.
      threshold: a `FixedThreshold`, `PublicThreshold` or (with blocks) `PrivateThreshold`.
      descent: step sizes and bounds.
      start: (d,) the first iterate, public; zero by default, where the true gradient is zero.

    Returns:
      The averaged weights, all iterates, and all thresholds.

    Raises:
      TypeError: an argument has another type.
      ValueError: shapes do not match the plan, or plan and threshold do not belong together, or so
        few threshold rows that noise would choose the level, or the plan is under add-remove. All
        of this before data is read.

    >>> from jdp.one_visit import plan_blocks
    >>> x = jax.random.uniform(jax.random.key(0), (2000, 3), minval=-1.0)
    >>> y = predict(jnp.array([1.0, 0.0, -1.0]), x)
    >>> plan = plan_blocks(2000, 2000, 10, epsilon=2.0, delta=1e-5)
    >>> key = jax.random.key(1)  # jdp.secure_key() for a run that is private
    >>> descent = Descent(learning_rate=6.0, feature_bound=1.5)
    >>> w = fit(key, x, y, plan, threshold=FixedThreshold(0.2), descent=descent).weights
    >>> bool(jnp.linalg.norm(w - jnp.array([1.0, 0.0, -1.0])) < 0.2)
    True
    """
    _check.typed_key("key", key)
    _check_data(x, y, plan, start, threshold)
    check_threshold(plan, threshold)
    _check_descent(plan, threshold, descent)
    data = records(x, y, descent)
    like = data.x[0]
    start = jnp.zeros_like(like) if start is None else jnp.asarray(start, like.dtype)
    noise_key, sampling_key = jax.random.split(key)
    program = _blocks if isinstance(plan.sampler, DisjointBlocks) else _poisson
    step, memory = program(noise_key, sampling_key, data, plan, threshold, descent)

    def one(carry: Any, t: Int[Array, ""]) -> Any:
        w, mean, memory = carry
        gradient, s, memory = step(t, w, memory)
        w = w - rates[t].astype(w.dtype) * gradient.astype(w.dtype)
        norm = jnp.linalg.norm(w)
        w = jnp.where(norm > descent.radius, w * (descent.radius / norm), w).astype(w.dtype)
        return (w, mean + shares[t].astype(w.dtype) * w, memory), (w, s)

    rates, shares = descent.rates(plan.steps), descent.shares(plan.steps)
    carry = start, jnp.zeros_like(start), memory  # so a path that nobody reads costs nothing
    (_, mean, _), (path, thresholds) = jax.lax.scan(one, carry, jnp.arange(plan.steps))
    return Fit(mean, path, thresholds)


Step: TypeAlias = Callable[[Any, Array, PyTree], tuple[Array, Scalar, PyTree]]


def _poisson(
    noise_key, sampling_key, data: Records, plan, threshold, descent
) -> tuple[Step, PyTree]:
    def step(t, w, memory):
        rows, mask = plan.batch(sampling_key, t)
        s = _public(threshold, w)
        true = descent.is_true(t, plan.steps)
        total = clipped_sum(w, data.take(rows), mask, s, descent, true)
        key = jax.random.fold_in(noise_key, t)
        total = add_noise(key, total, plan.noise_multiplier, adjacency=plan.adjacency)
        return total / plan.batch_size, s, memory

    return step, ()


def _blocks(
    noise_key, sampling_key, data: Records, plan, threshold, descent
) -> tuple[Step, PyTree]:
    sampler: DisjointBlocks = plan.sampler
    per_pass, every = sampler.steps_per_epoch, sampler.threshold_every
    whole = sampler.batch_size == sampler.num_examples
    passes = 1 if whole else -(-plan.steps // per_pass)
    thresholds, gradients = jax.vmap(sampler.partition, (None, 0))(sampling_key, jnp.arange(passes))
    own = sampler.release == "same-rows"
    z = plan.noise_multiplier * (math.sqrt(sampler.releases) if own else 1)
    ones = jnp.ones(sampler.batch_size, bool)

    def read(rows: Array) -> Records:
        return data if whole else data.take(rows)

    def step(t, w, memory):
        s, tree = memory
        epoch, position = (0, 0) if whole else jnp.divmod(t, per_pass)
        rows = gradients[epoch, position]
        key = jax.random.fold_in(noise_key, t)
        gradient_key, threshold_key = jax.random.split(key)
        if isinstance(threshold, PrivateThreshold):
            lookup = rows if own else thresholds[epoch, position // every]
            pure = threshold.mechanism == "sparse-vector"
            noise = 1 / plan.epsilon if pure else z

            def fresh():
                found = read(lookup) if own else data.take(lookup)
                magnitudes = jnp.abs(predict(w, found.x) - found.y)
                mask = jnp.ones(magnitudes.shape[0], bool)
                return threshold.choose(threshold_key, magnitudes, mask, noise, plan.adjacency)

            s = fresh() if every == 1 else jax.lax.cond(position % every == 0, fresh, lambda: s)
        else:
            s = _public(threshold, w)
        true = descent.is_true(t, plan.steps)
        total = clipped_sum(w, read(rows), ones, s, descent, true)
        if sampler.release == "tree":
            total, tree = climb(gradient_key, t, total, tree, z, plan.adjacency)
        else:
            total = add_noise(gradient_key, total, z, adjacency=plan.adjacency)
        return total / sampler.batch_size, s, (s, tree)

    tree = initial_tree(sampler.releases, data.x[0]) if sampler.release == "tree" else ()
    return step, (jnp.float32(0), tree)


def _public(threshold: FixedThreshold | PublicThreshold, w: Array) -> Scalar:
    if isinstance(threshold, FixedThreshold):
        return jnp.asarray(threshold.value, jnp.float32)
    return threshold.choose(jnp.abs(predict(w, threshold.x) - threshold.y))


def check_threshold(plan: TrainingPlan, threshold: Threshold) -> None:
    """Refuse a threshold that the plan does not pay for, or that noise would choose.

    Raises:
      TypeError: `threshold` or the plan's sampler is of another kind.
      ValueError: they do not belong together.
    """
    sampler = plan.sampler
    if not isinstance(threshold, FixedThreshold | PublicThreshold | PrivateThreshold):
        kinds = "a FixedThreshold, PublicThreshold or PrivateThreshold"
        _check.fail("threshold", kinds, threshold, "Make one of these.", TypeError)
    if not isinstance(sampler, DisjointBlocks | PoissonSampling):
        remedy = "Make it with jdp.relu_regression.plan_blocks, or jdp.plan (Poisson)."
        _check.fail("plan", "one over blocks or Poisson samples", sampler, remedy, TypeError)
    rows, own = 0, False
    if isinstance(sampler, DisjointBlocks):
        own = sampler.release == "same-rows"
        rows = sampler.batch_size if own else sampler.threshold_rows
    if isinstance(threshold, PrivateThreshold) != (rows > 0):
        remedy = "Plan threshold_rows (or release='same-rows') for a PrivateThreshold, and only "
        _check.fail(
            "threshold",
            "private if and only if the plan has rows for it",
            threshold,
            remedy + "then.",
        )
    z, static = known(plan.noise_multiplier), _check.is_static_number
    if isinstance(threshold, FixedThreshold) and static(z) and z > 0:
        value = known(threshold.value)
        if static(value) and math.isinf(value):
            remedy = "Noise is proportional to the threshold; choose a finite one."
            _check.fail("value", "finite when noise_multiplier > 0", value, remedy)
    if not isinstance(threshold, PrivateThreshold):
        return
    pure = threshold.mechanism == "sparse-vector"
    if pure != (isinstance(plan, PointPlan)):
        remedy = "Plan with sparse_vector=True for the mechanism 'sparse-vector', and only then."
        _check.fail("mechanism", "the one that the plan pays for", threshold.mechanism, remedy)
    if pure or static(z):
        noise = 1 / plan.epsilon if pure else float(z) * (2**0.5 if own else 1)
        threshold.check(rows, noise, plan.adjacency)


def _check_data(x: Any, y: Any, plan: TrainingPlan, start: Any, threshold: Any) -> None:
    if not isinstance(plan, TrainingPlan):
        remedy = "Make it with jdp.relu_regression.plan_blocks or jdp.plan."
        _check.fail("plan", "a TrainingPlan", plan, remedy, TypeError)
    if plan.adjacency == "add-remove":
        remedy = "Every record of x is read, so N is public: plan under 'zero-out', where a record "
        remedy += "that is taken out becomes one that is not finite and contributes nothing."
        _check.fail("plan", "under 'zero-out' or 'replace-one'", _check.Words("add-remove"), remedy)
    if plan.steps >= 2**31:
        _check.fail("plan", "of fewer than 2^31 steps", plan.steps, "Take fewer steps.")
    n = plan.sampler.num_examples
    for name, value, ndim in (("x", x, 2), ("y", y, 1)):
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
            _check.fail(name, "a floating array", value, "Convert it to float32.", TypeError)
        if value.ndim != ndim or value.shape[0] != n or 0 in value.shape:
            expected = f"of shape ({n},{' d' if ndim == 2 else ''}), as the plan has it"
            _check.fail(name, expected, value, "Plan for the number of records that there are.")
    if start is not None and jnp.shape(start) != x.shape[1:]:
        _check.fail("start", f"of shape {x.shape[1:]}, as x has features", start, "Leave it out.")
    if isinstance(threshold, PublicThreshold) and threshold.x.shape[1:] != x.shape[1:]:
        remedy = "Public records need the private ones' features."
        _check.fail("threshold.x", f"of shape (m, {x.shape[1]})", threshold.x, remedy)


def _check_descent(plan: TrainingPlan, threshold: Threshold, descent: Any) -> None:
    """Refuse clip norms R s that are infinite under noise, or beyond what float32 can hold."""
    if not isinstance(descent, Descent):
        _check.fail("descent", "a Descent", descent, "Make one: Descent(learning_rate).", TypeError)
    names = ("learning_rate", "feature_bound", "radius")
    given = {name: known(getattr(descent, name)) for name in names}
    given |= {"value": known(threshold.value)} if isinstance(threshold, FixedThreshold) else {}
    for name, value in given.items():
        finite, remedy = name == "learning_rate", "Choose it without looking at private data."
        _check.number(name, value, above=0, finite=finite, traced=True, remedy=remedy)
    static, bound, z = _check.is_static_number, given["feature_bound"], known(plan.noise_multiplier)
    levels: list[Any] = []
    if isinstance(threshold, FixedThreshold):
        levels = [given["value"]]
    else:
        levels = [threshold.grid.floor, threshold.grid.floor * 2.0 ** (threshold.grid.levels - 1)]
    if not static(bound) or not all(map(static, levels)):
        return
    if static(z) and z > 0 and math.isinf(bound):
        remedy = "Noise is proportional to it; choose a public bound on |x|."
        _check.fail("feature_bound", "finite when noise_multiplier > 0", bound, remedy)
    for level in levels:
        _check.clip_norm("feature_bound * threshold", float(bound) * level)


def unprotected_glmtron(
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    *,
    steps: int,
    learning_rate: Scalar,
    start: Float[Array, " d"] | None = None,
    average: Average = "last",
) -> Fit:
    """GLMtron on all records at every step, NOT private: `w <- w - eta mean((ReLU(x w) - y) x)`.

    Args:
      x: (n, d) features.
      y: (n,) labels.
      steps: full passes.
      learning_rate: eta.
      start: (d,) the first iterate; zero by default.
      average: as in `Descent`.

    Returns:
      As `fit`.

    >>> x = jax.random.uniform(jax.random.key(0), (500, 2), minval=-2.0, maxval=2.0)
    >>> y = predict(jnp.array([1.0, -1.0]), x)
    >>> print(unprotected_glmtron(x, y, steps=40, learning_rate=1.0).weights.round(3))
    [ 1. -1.]
    """
    _check_matrix(x)
    plan = plan_blocks(x.shape[0], x.shape[0], steps, noise_multiplier=0.0, delta=0.5)
    return _unclipped(jax.random.key(0), x, y, plan, learning_rate, start, average, "surrogate")


def unprotected_sgd(
    key: Key,
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    *,
    learning_rate: Scalar,
    batch_size: int = 1,
    passes: int = 1,
    start: Float[Array, " d"] | None = None,
    average: Average = "tail",
    gradient: Gradient = "true",
) -> Fit:
    """One or more shuffled passes of SGD on the squared loss, NOT private.

    Started at w = 0 it stays there: the true gradient is zero. With `gradient="surrogate"` it is
    one-pass GLMtron (Wu et al. 2023).

    Args:
      key: of the order.
      x: (n, d) features.
      y: (n,) labels.
      learning_rate: eta.
      batch_size: records a step.
      passes: over the data.
      start: (d,) the first iterate; zero by default.
      average: as in `Descent`.
      gradient: as in `Descent`.

    Returns:
      As `fit`.

    >>> x = jax.random.uniform(jax.random.key(0), (500, 2), minval=-2.0, maxval=2.0)
    >>> y = predict(jnp.array([1.0, -1.0]), x)
    >>> print(unprotected_sgd(jax.random.key(1), x, y, learning_rate=0.1).weights)
    [0. 0.]
    """
    _check_matrix(x)
    most = x.shape[0]
    remedy = "It is a number of records; 1 is plain SGD."
    _check.integer("batch_size", batch_size, at_least=1, at_most=most, remedy=remedy)
    _check.integer("passes", passes, at_least=1, remedy="Count whole passes over the data.")
    steps = passes * (x.shape[0] // batch_size)
    plan = plan_blocks(x.shape[0], batch_size, steps, noise_multiplier=0.0, delta=0.5)
    return _unclipped(key, x, y, plan, learning_rate, start, average, gradient)


def _check_matrix(x: Any) -> None:
    _check.floating("x", x, ("n", "d"), remedy="Give the features of one record a row.")


def _unclipped(key, x, y, plan, learning_rate, start, average, gradient) -> Fit:
    descent = Descent(learning_rate, math.inf, gradient=gradient, clip="vector", average=average)
    return fit(key, x, y, plan, threshold=FixedThreshold(math.inf), descent=descent, start=start)
