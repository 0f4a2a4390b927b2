r"""The trusted core, first half: clipped sums.

Every private release is `contribution of one example -> clipped, masked SUM -> one Gaussian draw`.
A *clipper* `(per_example, mask) -> ClippedSum` makes the sum; `jdp.noise.add_noise` is the only way
out of it.

The invariant that every clipper keeps, and that the guarantee rests on (contract C1): adding or
zeroing out one example changes the parts so that

$$ \sum_i \lVert \Delta_i \rVert_2^2 / s_i^2 \le 1, $$

with `s_i` the noise scales, and leaves the scales, all shapes and whatever `combine` reads as they
were. Noise of standard deviation `z * s_i` on part i then is ONE Gaussian mechanism with noise
multiplier z.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jdp import _check, _tree
from jdp._typing import Mask, PerExample, PyTree, Scalar

# Clipped contributions stay this much below the clip norm, which covers the float32 rounding of
# the norm and of the product (XLA adds squares in a tree; measured: below 1e-6 to 4e7 entries).
HEADROOM = 1 - 1e-5


# A norm that underflows to 0 hides entries below 1e-19 clip norms; this keeps them harmless.
_MOST = 1e6
_LEAST = float(jnp.finfo(jnp.float32).tiny)  # of a squared norm, in units of the clip norm


def _seal() -> jax.Array:
    return jax.random.key(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Sums of clipped contributions, not yet private: only `jdp.add_noise` should read them.

    Attributes:
      parts: pytrees of float32 (or wider) arrays, each a sum over examples.
      noise_scales: for each part, the noise's standard deviation per unit of the joint noise
        multiplier, so that the whole release has L2 sensitivity 1 in these units under zero-out
        and add-or-remove adjacency.
      rows: how many rows were summed, padding included.
      rounding: what float32 rounding of the sums may add to the sensitivity, relative to it;
        `jdp.add_noise` raises the noise by it.
      seal: a PRNG key that nothing reads. Its dtype makes most transformations of gradients
        (scaling, clipping, Adam, tree addition) raise instead of silently changing a sum whose
        sensitivity is already fixed.
    """

    parts: tuple[PyTree, ...]
    noise_scales: tuple[Scalar, ...]
    rows: int = dataclasses.field(default=0, kw_only=True, metadata={"static": True})
    rounding: float = dataclasses.field(default=0.0, kw_only=True, metadata={"static": True})
    seal: jax.Array = dataclasses.field(default_factory=_seal, kw_only=True)

    replace_one_factor: ClassVar[float] = 2.0
    """Sensitivity under replace-one over that under zero-out: the triangle inequality gives 2."""

    def combine(self, parts: tuple[PyTree, ...]) -> PyTree:
        """Turn noised parts into an estimate of the sum, a pytree like one contribution."""
        (part,) = parts
        return part

    def merge(self, other: "ClippedSum") -> "ClippedSum":
        """Return the clipped sum over two disjoint sets of examples.

        The parts add up. The scales do not: an example is in one of the two sums. For gradient
        accumulation, merge the sums of the microbatches in a Python loop, then add noise once;
        inside a compiled loop use `jdp.clipped_grad(..., microbatch_size=...)`. GEP's bases are
        taken from this one, so both must have been made with the same.

        Raises:
          TypeError: the two are of different kinds.
          ValueError: the structures or the (static) noise scales differ.
        """
        if type(self) is not type(other):
            _check.fail("other", f"a {type(self).__name__}", other, _MERGE_REMEDY, TypeError)
        mine, theirs = (
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), total.parts)
            for total in (self, other)
        )
        if mine != theirs:
            _check.fail("other", f"a sum with parts {mine}", theirs, _MERGE_REMEDY)
        scales = tuple(map(_merged_scale, self.noise_scales, other.noise_scales))
        parts = jax.tree.map(jnp.add, self.parts, other.parts)
        rows = self.rows + other.rows
        rounding = max(self.rounding, other.rounding) + _tree.rounding(rows) / 3
        return dataclasses.replace(
            self, parts=parts, noise_scales=scales, rows=rows, rounding=rounding
        )


def bounded_factors(
    squared_norms: Sequence[Float[Array, " n"]],
    mask: Mask,
    factor: Callable[[Float[Array, " n"], int], Float[Array, " n"]],
) -> tuple[list[Float[Array, " n"]], Bool[Array, " n"]]:
    """Return clip factors with `norm * factor <= HEADROOM`, and which examples count.

    An example counts if it is real and its norm and factor are finite in every group.

    Args:
      squared_norms: of each group, in units of its clip norm.
      mask: False for padding.
      factor: from (norms, group) to factors; bounded here, whatever it returns.
    """
    keep, factors = mask, []
    for group, square in enumerate(squared_norms):
        norm = jnp.sqrt(jnp.maximum(square, _LEAST))  # whose derivative is finite at zero
        chosen = jnp.clip(factor(norm, group), 0, jnp.minimum(HEADROOM / norm, _MOST))
        keep = keep & jnp.isfinite(square) & jnp.isfinite(chosen)
        factors.append(chosen)
    return [jnp.where(keep, chosen, 0) for chosen in factors], keep


_MERGE_REMEDY = "Merge sums that the same clipper made."


def _merged_scale(mine: Scalar, theirs: Scalar) -> Scalar:
    if not (_check.is_static_number(mine) and _check.is_static_number(theirs)):
        return jnp.maximum(mine, theirs)
    if mine != theirs:
        _check.fail("other", f"a sum with noise scale {mine}", theirs, _MERGE_REMEDY)
    return mine


Clipper = Callable[[PerExample, Mask], ClippedSum]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedSum(ClippedSum):
    """A clipped sum with one part a leaf, so that each leaf has its group's noise scale."""

    structure: Any = dataclasses.field(kw_only=True, metadata={"static": True})

    def combine(self, parts: tuple[PyTree, ...]) -> PyTree:
        """Put the leaves back into their tree."""
        return jax.tree.unflatten(self.structure, parts)


@dataclasses.dataclass(frozen=True)
class NormClipper:
    """A clipper that scales each example's gradient by a factor of its norm, group by group.

    Attributes:
      clip_norms: one bound a group.
      factor: maps the norms of one group, in units of its clip norm, to factors. Whatever it
        returns, factors are kept within 0 and `HEADROOM / norm`.
      groups: a pytree of group labels like the parameters, or None for one group.
    """

    clip_norms: tuple[Scalar, ...]
    factor: Callable[[Float[Array, " n"], int], Float[Array, " n"]]
    groups: PyTree | None = None

    def labels(self, per_example: PerExample) -> tuple[int, ...]:
        """Return each leaf's group, checked against the number of clip norms."""
        labels = _tree.group_labels(self.groups, per_example)
        if max(labels) + 1 != len(self.clip_norms):
            _check.fail(
                "clip_norms",
                f"one for each of the {max(labels) + 1} groups",
                self.clip_norms,
                "Give as many clip norms as there are groups.",
            )
        return labels

    def factors(
        self, squared_norms: Sequence[Float[Array, " n"]], mask: Mask
    ) -> tuple[list[Float[Array, " n"]], Bool[Array, " n"]]:
        """Return each group's factors, and which examples count: real, and finite in every group.

        Args:
          squared_norms: for each group, in units of its clip norm.
          mask: False for padding.
        """
        return bounded_factors(squared_norms, mask, self.factor)

    def noise_scales(self) -> tuple[Scalar, ...]:
        """Return each group's noise scale; together they give L2 sensitivity 1."""
        root = math.sqrt(len(self.clip_norms))
        return tuple(root * norm if root > 1 else norm for norm in self.clip_norms)

    def __call__(self, per_example: PerExample, mask: Mask) -> ClippedSum:
        """Clip and sum; see `jdp.clip_by_norm` for the guarantee."""
        _tree.num_examples(per_example, mask)
        labels = self.labels(per_example)
        squares = [
            _tree.squared_norms(leaves, norm)
            for leaves, norm in zip(
                _tree.leaves_by_group(per_example, labels), self.clip_norms, strict=True
            )
        ]
        factors, keep = self.factors(squares, mask)
        leaves, structure = jax.tree.flatten(per_example)
        sums = [
            _tree.weighted_sum(leaf, factors[label], keep)
            for leaf, label in zip(leaves, labels, strict=True)
        ]
        rows = mask.shape[0]
        return self.clipped_sum(
            jax.tree.unflatten(structure, sums), rows=rows, rounding=_tree.rounding(rows)
        )

    def clipped_sum(self, total: PyTree, *, rows: int, rounding: float) -> ClippedSum:
        """Label a sum of this clipper's contributions with its noise scales."""
        scales = self.noise_scales()
        if len(scales) == 1:
            return ClippedSum((total,), scales, rows=rows, rounding=rounding)
        leaves, structure = jax.tree.flatten(total)
        labels = self.labels(total)
        return GroupedSum(
            tuple(leaves),
            tuple(scales[label] for label in labels),
            rows=rows,
            rounding=rounding,
            structure=structure,
        )


def shrink(norm: Float[Array, " n"], group: int) -> Float[Array, " n"]:
    """Return the factors of ordinary clipping: 1 within the clip norm, else down to it."""
    del group
    return jnp.minimum(1, HEADROOM / norm)


def clip_by_norm(clip_norm: Scalar) -> NormClipper:
    r"""Flat clipping, $\bar g_i = g_i \min(1, C / |g_i|_2)$ (Abadi et al. 2016, Algorithm 1).

    **Guarantee.** The sum of the $\bar g_i$ has L2 sensitivity C under zero-out and add-or-remove
    adjacency, 2C under replace-one. One part, noise scale C.

    Examples that are masked, or whose norm is not finite in float32 in units of C (NaN, infinity,
    more than about 1e19 C), contribute exactly zero and change nothing else. Norms and sums are
    float32 or wider; sums are added in pairs, and what rounding may still add to the sensitivity
    (4e-7 times the number of rows, relative) is recorded and paid for in the noise.

    Args:
      clip_norm: C, in units of the gradient, from 1e-12 to 1e12; infinity means no clipping (then
        only a noise multiplier of 0 makes sense). May be traced (float32).

    Returns:
      A clipper `(per_example, mask) -> ClippedSum`; `per_example` is a pytree of (n, ...) floating
      arrays, `mask` is (n,) booleans.

    Raises:
      TypeError: `clip_norm` is not a number or floating scalar.
      ValueError: `clip_norm` is out of range.

    >>> import jax.numpy as jnp, jdp, numpy as np
    >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 0.0]])}
    >>> clipped = jdp.clip_by_norm(1.0)(gradients, jnp.array([True, True, True]))
    >>> print(np.asarray(clipped.parts[0]["w"]).round(3), clipped.noise_scales)
    [0.9 1.2] (1.0,)
    """
    return NormClipper((_check.clip_norm("clip_norm", clip_norm),), shrink)


def clip_by_group(clip_norms: Sequence[Scalar], groups: PyTree) -> NormClipper:
    r"""Per-layer clipping: the gradient of group g is clipped to $C_g$ (McMahan et al. 2018).

    **Guarantee.** The parts change by at most $C_g$ each, so with noise scales $\sqrt{G}\, C_g$
    the joint L2 sensitivity is 1 in these units (zero-out, add-or-remove; 2 under replace-one):
    one Gaussian, whatever the number of groups G. With equal $C_g = C / \sqrt G$ it is flat noise
    of scale C.

    Args:
      clip_norms: $C_g > 0$ for each group. May be traced.
      groups: a pytree of labels 0..G-1 like the parameters, e.g. `jdp.group_leaves(params, 5)`.

    Returns:
      A clipper, as `jdp.clip_by_norm`. An example that is not finite in one group contributes
      zero to all.

    Raises:
      TypeError: a clip norm is not a number or floating scalar.
      ValueError: a clip norm is not positive, or (when called) labels and clip norms do not match.

    >>> import jax.numpy as jnp, jdp, numpy as np
    >>> gradients = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[6.0, 8.0]])}
    >>> clipper = jdp.clip_by_group((1.0, 2.0), {"a": 0, "b": 1})
    >>> clipped = clipper(gradients, jnp.array([True]))
    >>> print(*(np.asarray(part).round(2) for part in clipped.parts))
    [0.6 0.8] [1.2 1.6]
    """
    remedy = "Give one clip norm for each group."
    clip_norms = _check.sequence("clip_norms", clip_norms, "numbers", remedy)
    norms = tuple(_check.clip_norm(f"clip_norms[{i}]", norm) for i, norm in enumerate(clip_norms))
    return NormClipper(norms, shrink, groups)


@dataclasses.dataclass(frozen=True)
class _Automatic:
    stabilizer: Scalar  # in units of the clip norm

    def __call__(self, norm: Float[Array, " n"], group: int) -> Float[Array, " n"]:
        del group
        # A stabilizer below this could not be told from zero; NaN drops every example.
        stabilizer = jnp.maximum(jnp.asarray(self.stabilizer, norm.dtype), 1e-6)
        return HEADROOM / (norm + stabilizer)


def clip_automatic(clip_norm: Scalar = 1.0, *, stabilizer: Scalar = 0.01) -> NormClipper:
    r"""Automatic clipping, $\bar g_i = C g_i / (\lVert g_i \rVert_2 + \gamma)$ (Bu et al. 2023).

    AUTO-S: every example is normalised, small ones less, so the clip norm is only a unit of the
    learning rate and need not be tuned.

    **Guarantee.** As `jdp.clip_by_norm`: L2 sensitivity C (zero-out, add-or-remove), 2C
    (replace-one). One part, noise scale C.

    Args:
      clip_norm: C, finite and > 0. May be traced.
      stabilizer: $\gamma > 0$, in units of the gradient; at least 1e-6 C is used. May be traced.

    Returns:
      A clipper, as `jdp.clip_by_norm`.

    Raises:
      TypeError: an argument is not a number or floating scalar.
      ValueError: an argument is not positive and finite.

    >>> import jax.numpy as jnp, jdp, numpy as np
    >>> clipped = jdp.clip_automatic()(jnp.array([[30.0, 40.0]]), jnp.array([True]))
    >>> print(np.asarray(clipped.parts[0]).round(2))
    [0.6 0.8]
    """
    clip_norm = _check.clip_norm("clip_norm", clip_norm)
    remedy = "Use clip_norm=1.0 and stabilizer=0.01 as in the paper."
    _check.number("clip_norm", clip_norm, above=0, traced=True, remedy=remedy)
    _check.number("stabilizer", stabilizer, above=0, traced=True, remedy=remedy)
    return NormClipper((clip_norm,), _Automatic(stabilizer / clip_norm))
