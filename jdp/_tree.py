"""Arithmetic on pytrees whose leaves have the examples on their leading axis."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jdp import _check
from jdp._typing import PerExample, PyTree, Scalar


def num_examples(per_example: PerExample, mask: Array, name: str = "per_example") -> int:
    """Return the static number of rows, after checking that every leaf and the mask have it.

    Args:
      per_example: floating leaves of shape (n, ...).
      mask: (n,) booleans, False for padding.
      name: what the user calls `per_example`.

    Raises:
      TypeError: a leaf is not floating, or the mask is not a boolean array.
      ValueError: there is no leaf, a leaf is a scalar, or the leading sizes differ.
    """
    if not isinstance(mask, jax.Array) and not hasattr(mask, "dtype"):
        _check.fail(
            "mask",
            "a boolean array of shape (n,)",
            mask,
            "Pass jnp.ones(n, bool) if every row is a real example.",
            TypeError,
        )
    if mask.dtype != jnp.bool_:
        _check.fail(
            "mask", "an array of booleans", mask, "Compare explicitly: mask=weights > 0.", TypeError
        )
    leaves = jax.tree.leaves_with_path(per_example)
    if not leaves:
        _check.fail(
            "per_example",
            "a pytree with at least one array",
            per_example,
            "Pass the output of jdp.per_example_grad(loss)(params, batch).",
        )
    for path, leaf in leaves:
        where = name + jax.tree_util.keystr(path)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            _check.fail(
                where,
                "a floating array",
                leaf,
                "Differentiate floating parameters only.",
                TypeError,
            )
        if leaf.ndim == 0 or mask.shape != leaf.shape[:1]:
            _check.fail(
                where,
                f"of shape (n, ...) with the mask's n (mask shape {mask.shape})",
                leaf,
                "Give per-example values, examples on the leading axis, not an aggregate.",
            )
    return mask.shape[0]


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return float32, or the floating dtype itself if it is wider."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def wide(leaf: Array) -> Array:
    """Return the leaf as a JAX array in float32 or wider."""
    leaf = jnp.asarray(leaf)
    return leaf.astype(wide_dtype(leaf.dtype))


def auto_sharded(fun: Callable[..., Array], spec: Sequence[Any], *args: Any) -> Array:
    """Return `fun(*args)`, laid out as `spec`; the compiler chooses the layouts inside `fun`.

    That is how meshes with automatic axes work anyway. With explicit axes JAX refuses to reshape or
    add across shards unless it is told where the result goes; here nobody but the caller minds.

    Args:
      fun: from arrays to one array.
      spec: for each axis of the result, the mesh axes that it is sharded over.
      args: pytrees of arrays or numbers.
    """
    for leaf in jax.tree.leaves(args):
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.explicit_axes:
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            mapped: Any = jax.sharding.auto_axes(fun, out_sharding=sharding)
            return mapped(*args)
    return fun(*args)


def _spec(leaf: Array) -> tuple[Any, ...]:
    spec = jax.typeof(leaf).sharding.spec
    return (*spec, *[None] * (jnp.ndim(leaf) - len(spec)))


def vary_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return the tree as different, for JAX, on each device that `like` differs on.

    Only matters inside `jax.shard_map`. There the gradient of what all devices share is silently
    added up over devices, so that a row would no longer be the gradient of one example.
    """
    leaves = jax.tree.leaves(like)
    if not any(jax.typeof(leaf).sharding.mesh.manual_axes for leaf in leaves):
        return tree
    # A sum of nothing, which has the type that is wanted in every version of JAX.
    zero = sum(jnp.sum(jnp.isnan(_numbers(leaf)[:0])) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(zero).astype(leaf.dtype), tree)


def _numbers(leaf: Array) -> Array:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def rows(leaf: Float[Array, "n ..."]) -> Float[Array, "n p"]:
    """Return the leaf as a matrix with one row an example, in float32 or wider."""
    shape = leaf.shape[0], math.prod(leaf.shape[1:])
    return auto_sharded(lambda leaf: wide(leaf).reshape(shape), _spec(leaf)[:1], leaf)


def squared_norms(leaves: Sequence[Array], unit: Scalar) -> Float[Array, " n"]:
    """Return each example's squared L2 norm over all leaves, in units of `unit`.

    Measured in units of the clip norm, so that a small clip norm does not underflow. A norm that
    overflows comes out infinite, like that of an example with an infinite entry.

    Args:
      leaves: arrays of shape (n, ...).
      unit: a positive scalar; infinity gives zero for finite examples.
    """

    def total(leaves: Sequence[Array], unit: Scalar) -> Array:
        squares = jnp.zeros(leaves[0].shape[0], wide(leaves[0]).dtype)
        for leaf in leaves:
            scaled = rows(leaf) / unit
            squares += jnp.sum(scaled * scaled, axis=1)
        return squares

    return auto_sharded(total, _spec(leaves[0])[:1], leaves, unit)


def pairwise_sum(rows: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """Return the sum over rows, added in neighbouring pairs.

    One row takes part in log2(n) additions, and changing it leaves all others as they were.
    `rounding` is the bound that follows. On a mesh each device's rows are added first: a row that
    is paired across devices would be sent to both.
    """
    count = rows.shape[0]
    if count == 0:
        return jnp.zeros(rows.shape[1:], rows.dtype)
    blocks = math.gcd(count, jax.typeof(rows).sharding.mesh.size or 1)
    if blocks > 1:
        rows = jax.vmap(_add_pairs)(rows.reshape(blocks, count // blocks, *rows.shape[1:]))
    return _add_pairs(rows)


def _add_pairs(rows: Float[Array, "n ..."]) -> Float[Array, "..."]:
    while rows.shape[0] > 1:
        if rows.shape[0] % 2:
            rows = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
        pairs = rows.reshape(rows.shape[0] // 2, 2, *rows.shape[1:])
        rows = pairs[:, 0] + pairs[:, 1]
    return rows[0]


def compensated_add(total: PyTree, lost: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
    """Kahan addition: return the new total, and what rounding put in it too much."""
    correct = jax.tree.map(jnp.subtract, part, lost)
    new = jax.tree.map(jnp.add, total, correct)
    lost = jax.tree.map(lambda new, old, added: (new - old) - added, new, total, correct)
    return new, lost


def rounding(num_rows: int) -> float:
    r"""Bound what float32 rounding adds to the sensitivity of a sum, relative to the clip norm.

    At level l of `pairwise_sum` the changed row's partial sum has at most min(2^l, n) rows of norm
    1, so its rounding error is at most u times that (u = 2^-24), in each of the two neighbours:
    $2u \sum_l \min(2^l, n) \le 6un$. Added in b blocks of m = n/b rows first, then block by block,
    it is $2u (\sum_l \min(2^l, m) + m \sum_l \min(2^l, b))$, and since $\sum_l \min(2^l, m)$ is
    0, 2 or at most 3m - 4 (for m = 1, 2, more), that is at most 6un again. For compensated (Kahan)
    addition of n rows it is 4un.
    """
    return 6 * 2.0**-24 * num_rows


def weighted_sum(
    leaf: Float[Array, "n ..."], weights: Float[Array, " n"], keep: Bool[Array, " n"]
) -> Float[Array, "..."]:
    """Return the sum over kept examples of weight times row, in float32 or wider.

    Rows that are not kept are replaced before the product, since zero times NaN is NaN.
    """

    def total(leaf: Array, weights: Array, keep: Array) -> Array:
        kept = jnp.where(keep[:, None], rows(leaf), 0)
        summed = pairwise_sum(kept * weights[:, None].astype(kept.dtype))
        return summed.reshape(leaf.shape[1:])

    return auto_sharded(total, _spec(leaf)[1:], leaf, weights, keep)


def leaves_by_group(tree: PyTree, groups: Sequence[int]) -> list[list[Array]]:
    """Return the leaves of each group, in tree order; `groups` labels the leaves 0, 1, ..."""
    leaves = jax.tree.leaves(tree)
    return [
        [leaf for leaf, label in zip(leaves, groups, strict=True) if label == group]
        for group in range(max(groups) + 1)
    ]


def group_labels(groups: PyTree, like: PyTree, name: str = "groups") -> tuple[int, ...]:
    """Return the group of each leaf of `like` as a tuple, checked to use 0..G-1 each at least once.

    Args:
      groups: a pytree of integers with the structure of `like`, or None for one group.
      like: the parameters, or per-example gradients.
      name: the argument's name, for messages.

    Raises:
      ValueError: another structure, or labels that are not 0..G-1.
    """
    leaves, structure = jax.tree.flatten(like)
    if groups is None:
        return (0,) * len(leaves)
    labels, got = jax.tree.flatten(groups)
    remedy = "Take them from jdp.group_leaves(params, num_groups)."
    if got != structure:
        _check.fail(name, f"a pytree of integers with structure {structure}", got, remedy)
    if not all(isinstance(label, int) for label in labels) or set(labels) != set(
        range(len(set(labels)))
    ):
        _check.fail(name, "labels 0, 1, ..., G-1, each used", sorted(set(labels)), remedy)
    return tuple(labels)
