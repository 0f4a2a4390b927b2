"""Low-dimensional subspaces of gradients, from PUBLIC gradients only."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _check, _tree
from jdp._typing import Key, PerExample, PyTree
from jdp.groups import allocate_rank as allocate_rank
from jdp.groups import group_leaves as group_leaves

_BASES = "Make them with subspace.public_bases."
_POWER = "0 leaves the rows as they are."
_MOST_PASSES = 7  # of Cholesky QR


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bases:
    """Rows spanning a subspace for each group of parameters, orthonormal for best use of it.

    Attributes:
      rows: like the parameters, with leaves of shape (k_g, *parameter shape) for group g; the
        leaves of one group, flattened and put side by side, are B_g of shape (k_g, p_g).
      groups: the group of each leaf, in tree order.
      weights: for each group the public factors (k_g,) of its coordinates; None for one each.
    """

    rows: PyTree
    groups: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    weights: tuple[Float[Array, " k_g"], ...] | None = None

    def weigh(self, coordinates: Sequence[Array]) -> tuple[Array, ...]:
        """Return the coordinates times the weights."""
        if self.weights is None:
            return tuple(coordinates)
        pairs = zip(coordinates, self.weights, strict=True)
        return tuple(part * jnp.broadcast_to(own, part.shape) for part, own in pairs)


def _by_group(tree: PyTree, groups: Sequence[int]) -> list[Float[Array, "rows p_g"]]:
    return [
        jnp.concatenate([_tree.rows(leaf) for leaf in leaves], axis=1)
        for leaves in _tree.leaves_by_group(tree, groups)
    ]


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _check_fit(bases: Bases, per_example: PerExample) -> None:
    """Refuse gradients of other parameters than the bases were made for."""
    _check.instance("bases", bases, Bases, _BASES)
    remedy = "Make both with the same parameters and the same trainable=."
    got, expected = (
        {jax.tree_util.keystr(k): leaf.shape[1:] for k, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (per_example, bases.rows)
    )
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            wanted, came = (_rows_of(own.get(name)) for own in (expected, got))
            what = f"of shape {wanted}, as the bases have it"
            _check.fail(f"per_example{name}", what, _check.Words(came), remedy)


def _rows_of(shape: tuple[int, ...] | None) -> str:
    return "None" if shape is None else f"({', '.join(['n', *map(str, shape)])})"


def project(bases: Bases, per_example: PerExample) -> tuple[Float[Array, "n k_g"], ...]:
    """Return the coordinates B_g g_i of every example in every group's subspace.

    Args:
      bases: k_g rows for each group.
      per_example: leaves of shape (n, ...).
    """
    _check_fit(bases, per_example)
    coordinates: dict[int, Array] = {}
    for leaf, rows, group in zip(
        jax.tree.leaves(per_example), jax.tree.leaves(bases.rows), bases.groups, strict=True
    ):
        part = _matmul(_tree.rows(leaf), _tree.rows(rows).T)
        coordinates[group] = coordinates[group] + part if group in coordinates else part
    return tuple(coordinates[group] for group in sorted(coordinates))


def lift(bases: Bases, coordinates: Sequence[Float[Array, "*n k_g"]]) -> PyTree:
    """Return B^T w, shaped like the parameters: the vector (or n vectors) with coordinates w."""
    _check.instance("bases", bases, Bases, _BASES)
    leaves, structure = jax.tree.flatten(bases.rows)
    ranks = {group: rows.shape[0] for rows, group in zip(leaves, bases.groups, strict=True)}
    expected, got = [ranks[group] for group in sorted(ranks)], _last_sizes(coordinates)
    if got != expected:
        what = f"for each group an array whose last axis has sizes {expected}"
        remedy = "Take them from project(bases, per_example)."
        _check.fail("coordinates", what, _check.Words(f"sizes {got}"), remedy)
    return jax.tree.unflatten(
        structure,
        [
            jnp.tensordot(coordinates[group], _tree.wide(rows), axes=1, precision="highest")
            for rows, group in zip(leaves, bases.groups, strict=True)
        ],
    )


def _last_sizes(coordinates: Any) -> list[int]:
    if not isinstance(coordinates, Sequence):
        return []
    return [part.shape[-1] if _check.is_floating(part) and part.ndim else 0 for part in coordinates]


def orthonormalize(key: Key, rows: Float[Array, "k p"]) -> Float[Array, "k p"]:
    """Return orthonormal rows with the span of `rows`, completed at random where it is deficient.

    Shifted Cholesky QR (Fukaya et al. 2020), whose cost is matrix products. Rows are normalised,
    and a random matrix at rounding level is added: then even a rank-deficient or zero matrix has
    full rank, and each shifted pass enlarges its small directions about a thousandfold. Passes end
    when the rows are orthonormal to rounding (after two or three for a warm start); Householder QR
    takes over where seven leave them off by more than 1e-4 in Frobenius norm.

    Args:
      key: a typed key; it decides the completion only.
      rows: float32, k <= p. Rows that are not finite are treated as zero.
    """
    _check.typed_key("key", key)
    remedy = "A basis has at most p orthonormal rows."
    k, p = _check.floating("rows", rows, ("k", "p"), remedy=remedy).shape
    if k > p:
        _check.fail("rows", "of shape (k, p), k <= p", rows, remedy)
    norms = jnp.linalg.norm(rows, axis=1, keepdims=True)
    usable = jnp.isfinite(norms) & (norms > 0)
    unit = jnp.where(usable, rows / jnp.where(usable, norms, 1), 0)
    # A random Toeplitz matrix has full rank and needs p + k draws only.
    draws = 1e-7 / p**0.5 * jax.random.normal(key, (p + k,), rows.dtype)
    full = unit + jax.vmap(lambda i: jax.lax.dynamic_slice(draws, (i,), (p,)))(jnp.arange(k))
    eye = jnp.eye(k, dtype=rows.dtype)

    def gram_of(rows: Array) -> tuple[Array, Array]:
        gram = _matmul(rows, rows.T)
        return gram, jnp.linalg.norm(gram - eye)

    def is_off(carry: tuple) -> Array:
        count, _, (_, error) = carry
        return (count < _MOST_PASSES) & ~(error < 1e-6 * k**0.5)

    def one_pass(carry: tuple) -> tuple:
        count, rows, (gram, error) = carry
        # Without a shift only once all eigenvalues are near 1.
        shift = jnp.where(error < 0.5, 0, 1e-6) * jnp.trace(gram)
        factor = jnp.linalg.cholesky(gram + shift * eye)
        inverse = jax.lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)
        rows = _matmul(inverse, rows)
        return count + 1, rows, gram_of(rows)

    _, result, (_, error) = jax.lax.while_loop(is_off, one_pass, (0, full, gram_of(full)))
    return jax.lax.cond(error < 1e-4, lambda: result, lambda: jnp.linalg.qr(full.T)[0].T)


def _scaled(anchors: Float[Array, "m p"]) -> Float[Array, "m p"]:
    """Zero rows that are not finite, and divide by the largest entry."""
    anchors = _tree.wide(anchors)
    finite = jnp.all(jnp.isfinite(anchors), axis=1, keepdims=True)
    anchors = jnp.where(finite, anchors, 0)
    # The scale is public and cancels; without it squares of small gradients would underflow.
    largest = jnp.max(jnp.abs(anchors))
    return anchors / jnp.where(largest > 0, largest, 1)


def principal_axes(
    rows: Float[Array, "k p"], anchors: Float[Array, "m p"], power: float
) -> tuple[Float[Array, "k p"], Float[Array, " k"]]:
    r"""Turn the rows to the principal axes of the anchors; return them, and their weights.

    With $\lambda_i$ the anchors' mean square along axis i (at least $10^{-4}$ of the largest), the
    weights are proportional to $\lambda_i^{-power/2}$, and keep the anchors' mean square.
    """
    _check.floating("rows", rows, ("k", "p"), remedy="Take them from power_iteration.")
    _check.number("power", power, at_least=0, at_most=1, remedy=_POWER)
    remedy = "Give one public gradient a row, of as many entries as the basis has."
    _check.floating("anchors", anchors, ("m", rows.shape[1]), remedy=remedy)
    inside = _matmul(_scaled(anchors), rows.T)
    spread, axes = jnp.linalg.eigh(_matmul(inside.T, inside))
    spread = spread / jnp.where(spread[-1] > 0, spread[-1], 1)
    spread = jnp.maximum(spread, 1e-4)
    factors = spread**-power
    return _matmul(axes.T, rows), jnp.sqrt(factors * spread.sum() / (factors * spread).sum())


def power_iteration(
    key: Key,
    anchors: Float[Array, "m p"],
    rank: int,
    *,
    iterations: int = 1,
    start: Float[Array, "k p"] | None = None,
) -> Float[Array, "k p"]:
    """Return orthonormal rows near the span of the top right singular vectors of `anchors`.

    Block power iteration, `Q <- orthonormalize(Q A^T A)` from a Gaussian start (Yu et al. 2021,
    Algorithm 1). Orthonormal to 1e-4 in Frobenius norm also for ill-conditioned, rank-
    deficient or zero anchors, whose missing directions are filled in at random.

    **Guarantee.** None needed: the anchors must be PUBLIC (gradients of public data at released
    parameters), and then the result is free of privacy cost.

    Args:
      key: a typed key.
      anchors: A, m public gradients of p entries; rows that are not finite count as zero.
      rank: k, at most p.
      iterations: how many times to multiply; the paper uses 1.
      start: k rows to start from instead of Gaussian ones, for example the last result.

    Raises:
      TypeError: the key is no typed key, or a number is not an integer.
      ValueError: `anchors` is no matrix, or rank or iterations are out of range.

    >>> import jax, jax.numpy as jnp, jdp
    >>> anchors = jnp.array([[3.0, 0.0, 0.0], [0.0, 0.0, 0.1]])
    >>> basis = jdp.power_iteration(jax.random.key(0), anchors, 1, iterations=3)
    >>> print(jnp.abs(basis).round(2))
    [[1. 0. 0.]]
    """
    _check.typed_key("key", key)
    _check.floating("anchors", anchors, ("m", "p"), remedy="Give one public gradient a row.")
    p = anchors.shape[1]
    if start is not None:
        remedy = "Give one row for each direction."
        _check.floating("start", start, (rank, p), remedy=remedy)
    _check.integer(
        "rank", rank, at_least=1, at_most=p, remedy="A basis has at most p orthonormal rows."
    )
    _check.integer("iterations", iterations, at_least=1, remedy="The paper uses 1.")
    anchors = _scaled(anchors)
    keys = jax.random.split(key, iterations + 1)
    rows = jax.random.normal(keys[0], (rank, p), anchors.dtype) if start is None else start
    for step_key in keys[1:]:
        rows = orthonormalize(step_key, _matmul(_matmul(rows, anchors.T), anchors))
    return rows


def public_bases(
    key: Key,
    anchors: PerExample,
    ranks: Sequence[int],
    groups: Sequence[int],
    *,
    iterations: int = 1,
    start: Bases | None = None,
    whitening: float = 0.0,
) -> Bases:
    """Return one power-iteration basis for each group of parameters.

    Args:
      key: a typed key.
      anchors: per-example gradients of PUBLIC data, leaves of shape (m, ...).
      ranks: k_g for each group.
      groups: the group of each leaf, in tree order.
      iterations: as in `power_iteration`.
      start: bases to start from (a warm start).
      whitening: the power of `principal_axes`; 0 leaves rows as they are, without weights.

    >>> import jax, jax.numpy as jnp
    >>> from jdp.subspace import public_bases
    >>> anchors = {"b": jnp.ones((4, 2)), "w": jnp.ones((4, 3))}
    >>> bases = public_bases(jax.random.key(0), anchors, ranks=(1, 2), groups=(0, 1))
    >>> bases.rows["w"].shape
    (2, 3)
    """
    _check.typed_key("key", key)
    labels = _labels(groups, anchors)
    known = isinstance(ranks, Sequence) and not isinstance(ranks, str | bytes)
    if not known or len(ranks) != max(labels) + 1:
        expected = f"one rank for each of the {max(labels) + 1} groups"
        _check.fail("ranks", expected, ranks, "Take them from jdp.allocate_rank.", TypeError)
    _check.number("whitening", whitening, at_least=0, at_most=1, remedy=_POWER)
    if start is not None:
        _check.instance("start", start, Bases, _BASES)
    matrices = _by_group(anchors, groups)
    starts = [None] * len(matrices) if start is None else _by_group(start.rows, groups)
    rows = [
        power_iteration(group_key, matrix, rank, iterations=iterations, start=first)
        for group_key, matrix, rank, first in zip(
            jax.random.split(key, len(matrices)), matrices, ranks, starts, strict=True
        )
    ]
    if not whitening:
        return bases_from_rows(rows, anchors, groups)
    pairs = zip(rows, matrices, strict=True)
    turned, weights = zip(*(principal_axes(*pair, whitening) for pair in pairs), strict=True)
    return dataclasses.replace(bases_from_rows(turned, anchors, groups), weights=weights)


def bases_from_rows(
    rows: Sequence[Float[Array, "k_g p_g"]], like: PerExample, groups: Sequence[int]
) -> Bases:
    """Return `Bases` of these matrices.

    Args:
      rows: B_g for each group, the leaves of the group flattened and side by side.
      like: a pytree with leaves of shape (any, *parameter shape).
      groups: the group of each leaf, in tree order.
    """
    sizes = [0] * (max(_labels(groups, like)) + 1)
    leaves, structure = jax.tree.flatten(like)
    for leaf, group in zip(leaves, groups, strict=True):
        sizes[group] += math.prod(leaf.shape[1:])
    known = isinstance(rows, Sequence) and all(map(_check.is_floating, rows))
    if not known or [matrix.shape[1:] for matrix in rows] != [(size,) for size in sizes]:
        expected = f"floating matrices with {sizes} columns, one for each group"
        _check.fail("rows", expected, rows, "Flatten the leaves side by side.")
    used = [0] * len(rows)
    split = []
    for leaf, group in zip(leaves, groups, strict=True):
        matrix, first = rows[group], used[group]
        used[group] += math.prod(leaf.shape[1:])
        split.append(matrix[:, first : used[group]].reshape(-1, *leaf.shape[1:]))
    return Bases(jax.tree.unflatten(structure, split), tuple(groups))


def _labels(groups: Sequence[int], like: PerExample) -> Sequence[int]:
    """The group of each leaf, if they are 0, 1, ... and there is one for each leaf."""
    count = len(jax.tree.leaves(like))
    _check.rows("per_example", like, "examples", "Pass the output of jdp.per_example_grad.")
    known = isinstance(groups, Sequence) and all(map(_check.is_static_integer, groups))
    if not known or len(groups) != count or set(groups) != set(range(len(set(groups)))):
        expected = f"labels 0, 1, ..., one for each of the {count} leaves"
        remedy = "Take them from jax.tree.leaves(jdp.group_leaves(params, num_groups))."
        _check.fail("groups", expected, groups, remedy)
    return groups
