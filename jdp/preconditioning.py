r"""Clippers that weight coordinates before the clip: random sparsification, and AdaDPS.

Weights $d$ turn the contribution of an example into $\operatorname{clip}(d \odot g_i)$, which is as
bounded as any clipped contribution, whatever the weights. They must come from public data, released
values, or a key that knows nothing of the data: then they say nothing about it. Since norms of
weighted gradients need the gradients, these clippers do not go through book-keeping;
`jdp.clipped_grad` writes gradients out, a microbatch at a time.
"""

import dataclasses

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp import _check, _tree
from jdp._typing import Key, Mask, Params, PerExample, PyTree, Scalar
from jdp.clipping import ClippedSum, Clipper


def _is_none(leaf: PyTree) -> bool:
    return leaf is None


def _weigh(name: str, weights: PyTree, per_example: PerExample) -> tuple[PerExample, PyTree]:
    """Return the gradients times the weights, and the weights of the leaves that have gradients.

    A product even where weights are 0: an example that is not finite anywhere counts nowhere.
    """
    remedy = "Give one weight for each parameter, in a pytree like the parameters."
    structures = [
        jax.tree.structure(jax.tree.map(lambda _: 0, tree, is_leaf=_is_none))
        for tree in (per_example, weights)
    ]
    if structures[0] != structures[1]:
        _check.fail(name, f"a pytree with structure {structures[0]}", structures[1], remedy)

    def checked(path, leaf, weight):
        if leaf is None:
            return None
        where = name + jax.tree_util.keystr(path)
        if not hasattr(weight, "dtype") and not isinstance(weight, bool | int | float):
            _check.fail(where, "an array", weight, remedy, TypeError)
        if jnp.shape(weight) != leaf.shape[1:]:
            _check.fail(where, f"of shape {leaf.shape[1:]}", weight, remedy)
        return weight

    free = jax.tree_util.tree_map_with_path(checked, per_example, weights, is_leaf=_is_none)
    weighted = jax.tree.map(
        lambda leaf, weight: _tree.wide(leaf) * _factor(weight, leaf)[None], per_example, free
    )
    return weighted, free


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


def _factor(weight: PyTree, like: jax.Array) -> jax.Array:
    return jnp.asarray(weight).astype(_tree.wide_dtype(like.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseSum(ClippedSum):
    """A clipped sum of which only the kept coordinates are released.

    Attributes:
      kept: booleans like one contribution; public.
      dense: the inner clipper's sum, of which only what `combine` reads is left.
    """

    kept: PyTree = dataclasses.field(kw_only=True)
    dense: ClippedSum = dataclasses.field(kw_only=True)

    def combine(self, parts: tuple[PyTree, ...]) -> PyTree:
        """Put the parts together and zero, noise and all, what was not kept."""
        total = self.dense.combine(parts)
        return jax.tree.map(lambda leaf, kept: leaf * _factor(kept, leaf), total, self.kept)

    def merge(self, other: ClippedSum) -> ClippedSum:
        """As `ClippedSum.merge`, of sums that keep the same coordinates.

        Raises:
          TypeError: the two are of different kinds.
          ValueError: the structures, the (static) noise scales or what is kept differ; traced
            booleans are not compared.
        """
        merged = super().merge(other)
        assert isinstance(other, SparseSum)
        remedy = "Merge sums that were sparsified by the same coordinates."
        mine, theirs = (_shapes((total.kept, total.dense)) for total in (self, other))
        if mine != theirs:
            _check.fail("other", f"a sum of which is kept {mine}", theirs, remedy)
        pairs = zip(jax.tree.leaves(self.kept), jax.tree.leaves(other.kept), strict=True)
        for pair in pairs:
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in pair)
            if not traced and pair[0] is not pair[1] and not np.array_equal(*pair):
                _check.fail(
                    "other", "a sum of the same coordinates", _check.Words("others"), remedy
                )
        return merged


def clip_sparsified(clipper: Clipper, kept: PyTree) -> Clipper:
    r"""Random sparsification, $\bar g_i = \operatorname{clip}(m \odot g_i)$ (Zhu, Blaschko 2023).

    TMLR 2023, arXiv 2112.00845. Coordinates outside a random set are zeroed BEFORE the clip, and
    the estimate is $m \odot (\sum_i \bar g_i + \mathrm{noise})$: a gradient loses norm by it, so
    that more of the rest survives the clip, and the noise of what was dropped is dropped too. Not
    rescaled, as in its authors' code: the learning rate does that.

    **Guarantee.** That of `clipper` (same scales, same event): the $\bar g_i$ are contributions of
    the inner clipper, and dropping coordinates after the noise is post-processing. It gives no less
    noise a coordinate, only less of it in all. m must not depend on private data: not on the
    largest coordinates of private gradients. It may be known to everybody.

    Args:
      clipper: for example `jdp.clip_by_norm(1.0)`; for GEP as in the paper's code
        `jdp.clip_in_subspace(...)`, with bases from public gradients multiplied by m.
      kept: m, booleans like the parameters, the same for all examples of a step; from
        `random_coordinates`.

    Returns:
      A clipper, as `jdp.clip_by_norm`.

    Raises:
      TypeError: `clipper` is not callable; (when called) it makes no `ClippedSum`, or `kept` has
        other leaves than arrays.
      ValueError: (when called) `kept`, or the estimate of the clipper, is not like the gradients.

    >>> import jax.numpy as jnp, jdp, numpy as np
    >>> from jdp import public_data
    >>> kept = jnp.array([True, True, False])
    >>> clipper = public_data.clip_sparsified(jdp.clip_by_norm(5.0), kept)
    >>> clipped = clipper(jnp.array([[3.0, 4.0, 12.0]]), jnp.array([True]))
    >>> print(np.asarray(clipped.combine(clipped.parts)).round(3))
    [3. 4. 0.]
    """
    _check_clipper(clipper)

    def sparse(per_example: PerExample, mask: Mask) -> ClippedSum:
        _tree.num_examples(per_example, mask)
        weighted, own = _weigh("kept", kept, per_example)
        total = clipper(weighted, mask)
        _check_estimate(total, weighted)
        dense = dataclasses.replace(total, parts=(), noise_scales=(), rows=0, rounding=0.0)
        return SparseSum(
            total.parts,
            total.noise_scales,
            rows=total.rows,
            rounding=total.rounding,
            kept=own,
            dense=dense,
        )

    return sparse


def random_coordinates(key: Key, params: Params, rate: Scalar) -> PyTree:
    """Return which coordinates to keep: each is dropped with probability `rate`, independently.

    The paper drops a set of fixed size, drawn anew every epoch,
    `jax.random.fold_in(key, step // steps_per_epoch)`, with a rate that rises linearly,
    `optax.linear_schedule(0.0, 0.9, steps)(step)`.

    Args:
      key: a typed key; it need not be secret, so it must be neither the noise's nor the sampler's.
      params: the parameters.
      rate: r in [0, 1]. May be traced.

    Returns:
      Booleans like the parameters.

    Raises:
      TypeError: the key is no typed key, or the rate no number.
      ValueError: the rate is out of range.

    >>> import jax, jax.numpy as jnp
    >>> from jdp import public_data
    >>> kept = public_data.random_coordinates(jax.random.key(0), jnp.zeros(1000), 0.9)
    >>> print(kept.sum())
    84
    """
    _check.typed_key("key", key)
    remedy = "It is the fraction of coordinates to drop."
    _check.number("rate", rate, at_least=0, at_most=1, traced=True, remedy=remedy)
    leaves, structure = jax.tree.flatten(params)
    if not all(map(_check.is_array, leaves)):
        _check.fail("params", "a pytree of arrays", params, "Pass the parameters.", TypeError)
    keys = jax.random.split(key, max(len(leaves), 1))
    kept = [
        jax.random.uniform(leaf_key, jnp.shape(leaf)) >= rate
        for leaf_key, leaf in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(structure, kept)


def clip_preconditioned(clipper: Clipper, preconditioner: PyTree) -> Clipper:
    r"""AdaDPS, $\bar g_i = \operatorname{clip}(d \odot g_i)$ (Li, Zaheer, Reddi, Smith 2022).

    ICML 2022, arXiv 2202.05963, Algorithm 1. With $d = 1/(\sqrt v + \text{floor})$, v a moving
    second moment of PUBLIC gradients (`inverse_root`), gradients are brought to one scale before
    they are clipped, so that rare coordinates are not lost under the noise. The sum stays
    preconditioned: follow it with plain SGD.

    **Guarantee.** That of `clipper` for preconditioned gradients (same scales, same event),
    whatever d is: the clip comes after. d must come from public data and released values only, and
    the clip norm is in units of the preconditioned gradient.

    Args:
      clipper: for example `jdp.clip_by_norm(1.0)`.
      preconditioner: d, floating, like the parameters.

    Returns:
      A clipper, as `jdp.clip_by_norm`. Where d is not finite, every example contributes zero.

    Raises:
      TypeError: `clipper` is not callable; (when called) `preconditioner` has other leaves than
        arrays.
      ValueError: (when called) `preconditioner` is not like the gradients.

    >>> import jax, jax.numpy as jnp, jdp, optax
    >>> from jdp import public_data
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> public = (jnp.diag(jnp.array([10.0, 0.1])), jnp.ones(2))
    >>> public_gradient = public_data.mean_gradient(loss, public)
    >>> params, v = jnp.zeros(2), jnp.zeros(2)  # v is carried from step to step
    >>> v = optax.tree.update_moment(public_gradient(params, jax.random.key(0)), v, 0.9, 2)
    >>> d = public_data.inverse_root(v, floor=1e-3)
    >>> grad = jdp.clipped_grad(loss, public_data.clip_preconditioned(jdp.clip_by_norm(1.0), d))
    >>> grad(params, public, mask=jnp.array([True, True])).parts[0].round(2).tolist()
    [-1.0, -1.0]
    """
    _check_clipper(clipper)

    def preconditioned(per_example: PerExample, mask: Mask) -> ClippedSum:
        _tree.num_examples(per_example, mask)
        return clipper(_weigh("preconditioner", preconditioner, per_example)[0], mask)

    return preconditioned


def inverse_root(second_moments: PyTree, *, floor: float) -> PyTree:
    r"""Return the preconditioner of AdaDPS, $1 / (\sqrt v + \text{floor})$.

    Args:
      second_moments: v, of PUBLIC gradients, like the parameters. RMSProp's are
        `optax.tree.update_moment(public_gradient, v, 0.9, 2)`; AdaGrad's are sums of squares.
      floor: > 0; no coordinate is weighted by more than 1 / floor.

    Returns:
      Weights like the parameters, in (0, 1 / floor]; NaN where a traced moment is negative.

    Raises:
      TypeError: `floor` is not a number, or a leaf no floating array.
      ValueError: `floor` is not positive, or a leaf that is not traced has a negative value.

    >>> import jax.numpy as jnp
    >>> from jdp import public_data
    >>> print(public_data.inverse_root(jnp.array([0.0, 9.0]), floor=1.0))
    [1.   0.25]
    """
    remedy = "It bounds the weights of silent coordinates."
    floor = _check.number("floor", floor, above=0, remedy=remedy)
    for path, leaf in jax.tree.leaves_with_path(second_moments):
        name = f"second_moments{jax.tree_util.keystr(path)}"
        remedy = "Average squares of public gradients, as floats."
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            _check.fail(name, "a floating array", leaf, remedy, TypeError)
        if not isinstance(leaf, jax.core.Tracer) and (np.asarray(leaf) < 0).any():
            _check.fail(name, "at least 0 everywhere", _check.Words("negative values"), remedy)
    return jax.tree.map(lambda v: 1 / (jnp.sqrt(_tree.wide(v)) + floor), second_moments)


def _check_estimate(total: PyTree, like: PyTree) -> None:
    """Refuse a sum of which no coordinates can be dropped: its estimate is not like gradients."""
    remedy = "Wrap one that estimates the sum of the gradients, for example jdp.clip_by_norm(1.0)."
    if not isinstance(total, ClippedSum):
        kind = _check.Words(f"one that returns {type(total).__name__}")
        _check.fail("clipper", "one that returns a ClippedSum", kind, remedy, TypeError)
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)  # noqa: E731
    estimate = shapes(jax.eval_shape(total.combine, total.parts))
    expected = jax.tree.map(lambda leaf: leaf.shape[1:], like)
    if estimate != expected:
        _check.fail("clipper", f"one that estimates a sum of shapes {expected}", estimate, remedy)


def _check_clipper(clipper: Clipper) -> None:
    if not callable(clipper):
        remedy = "For example jdp.clip_by_norm(1.0)."
        _check.fail("clipper", "a clipper", clipper, remedy, TypeError)
