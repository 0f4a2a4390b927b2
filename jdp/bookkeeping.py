r"""Clipped sums at about the cost of one forward and one backward pass, for any loss function.

Where a parameter enters the loss as a product, one example's gradient is a sum of outer products
over positions t (words, pixels), $g = \sum_t u_t v_t^\top$, with u what the parameter is multiplied
with and v the gradient of the result. Book-keeping (Goodfellow 2015, arXiv 1510.01799; Bu et al.
2023, arXiv 2210.00038) computes u and v in one forward and one backward pass, squared norms from
them, and the clipped sum as one contraction of $(c_i u_i, v_i)$ over examples and positions. In a
`lax.scan` over layers every slice of a stacked parameter is such a matrix by itself; what a scan
closes over, as the weights of a recurrent net, has the positions of all its turns. A parameter that
is used in another way (biases, scales) has its per-example gradient written out as usual: that
costs more, and is never wrong.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _tree
from jdp._factors import Factors, by_slice, factors_of
from jdp._typing import Loss, Mask, Params, PerExample, PyTree, Scalar
from jdp._uses import Use
from jdp._walk import find, views_of, walk
from jdp.clipping import ClippedSum, NormClipper

# Norms computed without writing the gradient out can cancel: inputs that are nearly constant over
# positions times output gradients that sum to nearly zero. Raised by this times
# (sum_t |u_t||v_t|)^2 the squared norm is an upper bound, and no c_i u_i v_i exceeds 32 clip norms.
GRAM_MARGIN = 1e-3
# The same for a table that is looked up and multiplied with, whose two parts alone can cancel.
TABLE_MARGIN = 1e-5
# A gradient is written out if it takes fewer than this many floats for each multiplication that
# its Gram form takes; beyond it memory, not arithmetic, would set the pace.
FLOATS_PER_PRODUCT = 4
_SMALL_TABLE = 2**14  # entries; a look-up table that is also multiplied with is then written out
_PATCHES = 2**22  # bytes of patches at a time: about what stays in the cores' caches
_CHUNK = 128  # outer products that one contraction adds in an order of its own
_TINY = 1e-30
_FEW_CHUNKS = 4  # whose sums are held side by side; more are added one after the other


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _same_rows(rows: Array, v: Array) -> Array:
    """Return (n, T, b): each row's v summed over its occurrences, at the first one, else zero."""
    same = rows[:, :, None] == rows[:, None, :]
    first = jnp.argmax(same, axis=2) == jnp.arange(rows.shape[1])[None]
    return jnp.where(first[..., None], _matmul(same.astype(v.dtype), v), 0)


def _square(x: Array) -> Float[Array, " n"]:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _without_tiny(x: Array) -> Array:
    """Return x with zero for what is so small that its square could underflow unseen."""
    return jnp.where(jnp.abs(x) < _TINY, 0, x)


def _lengths(x: Array) -> Float[Array, "n T"]:
    return jnp.sqrt(jnp.sum(x * x, axis=2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradient:
    """Per-example gradients of one leaf, in whichever form is cheapest.

    Attributes:
      square: squared norms, in units of the clip norm; never below the truth.
      form: the arrays that `total` reads.
      total: from the form, factors c (n,) and a mask of examples to the sum of c_i g_i.
      rounding: what float32 rounding adds to the sensitivity of the sum, relative.
    """

    square: Float[Array, " n"]
    form: PyTree
    total: Callable[[Any, Array, Array], Array] = dataclasses.field(metadata={"static": True})
    rounding: float = dataclasses.field(metadata={"static": True})

    def weighted_sum(self, factors: Array, keep: Array) -> Array:
        """Return the sum of c_i g_i over the kept examples."""
        return self.total(self.form, factors, keep)


def _written_out(whole: Array, unit: Scalar) -> Gradient:
    square = _tree.squared_norms([whole], unit)
    return Gradient(square, whole, _tree.weighted_sum, _tree.rounding(whole.shape[0]))


def _contract(size: tuple[int, int], per_chunk: int) -> Callable:
    """Return the function from (parts, factors, keep) to the sum of c_i u_it v_it^T, (a, b)."""

    def of_chunk(chunk: Sequence[tuple[Array, Array]]) -> Array:
        total = jnp.zeros(size, chunk[0][1].dtype)
        for u, v in chunk:
            v = v.reshape(-1, v.shape[-1])
            if jnp.issubdtype(u.dtype, jnp.integer):
                total = total.at[u.reshape(-1)].add(v)
            else:
                total = total + _matmul(u.reshape(-1, u.shape[-1]).T, v)
        return total

    def weighted_sum(parts: Sequence[Factors], factors: Array, keep: Array) -> Array:
        weighted = []
        for part in parts:
            v = jnp.where(keep[:, None, None], part.v * factors[:, None, None], 0)
            u = part.u if part.is_lookup else jnp.where(keep[:, None, None], part.u, 0)
            weighted.append((u, v))
        n = keep.shape[0]
        if n <= _FEW_CHUNKS * per_chunk:
            starts = range(0, n, per_chunk)
            sums = [
                of_chunk(jax.tree.map(lambda x, i=i: x[i : i + per_chunk], weighted))
                for i in starts
            ]
            return _tree.pairwise_sum(jnp.stack(sums)) if len(sums) > 1 else sums[0]
        whole = n // per_chunk * per_chunk
        stacked = jax.tree.map(lambda x: x[:whole].reshape(-1, per_chunk, *x.shape[1:]), weighted)
        rest = of_chunk(jax.tree.map(lambda x: x[whole:], weighted))

        def add(carry, chunk):
            total, lost = carry
            return _tree.compensated_add(total, lost, of_chunk(chunk)), None

        (total, lost), _ = jax.lax.scan(add, (rest, jnp.zeros_like(rest)), stacked)
        return total - lost

    return weighted_sum


def _outer_products(parts: Sequence[Factors], size: tuple[int, int]) -> Float[Array, "n a b"]:
    n = parts[0].v.shape[0]
    total = jnp.zeros((n, size[1], size[0]), parts[0].v.dtype)
    for part in parts:
        u = jax.nn.one_hot(part.u, size[0], dtype=total.dtype) if part.is_lookup else part.u
        total = total + _matmul(part.v.swapaxes(1, 2), u)
    return total.swapaxes(1, 2)


def _better_written(positions: int, size: tuple[int, int]) -> bool:
    a, b = size
    return positions > 1 and FLOATS_PER_PRODUCT * positions**2 * (a + b) > a * b


def _written_by_patches(
    use: Use, x: Float[Array, "n turns ..."], d: Float[Array, "n turns ..."]
) -> Float[Array, "n a b"]:
    """Return a convolution's per-example gradients; on CPUs from patches of few at a time."""

    def of_some(pair: tuple[Array, Array]) -> Array:
        return _outer_products([factors_of(use, *pair)], use.size)

    n, positions = d.shape[0], math.prod(d.shape[1:]) // use.size[1]
    at_a_time = max(1, _PATCHES // (4 * positions * sum(use.size)))
    if n <= at_a_time or jax.default_backend() != "cpu":
        return of_some((x, d))
    of_one = lambda pair: of_some(jax.tree.map(lambda leaf: leaf[None], pair))[0]  # noqa: E731
    return jax.lax.map(of_one, (x, d), batch_size=-(-n // -(-n // at_a_time)))


def _gradient(parts: Sequence[Factors], size: tuple[int, int], unit: Scalar) -> Gradient:
    """Choose the form from static shapes."""
    (a, b), n = size, parts[0].v.shape[0]
    dense = [part for part in parts if not part.is_lookup]
    tables = [part for part in parts if part.is_lookup]
    positions = sum(part.v.shape[1] for part in dense)
    mixed = tables and dense and a * b <= _SMALL_TABLE
    if mixed or (_better_written(positions, size) and not tables):
        return _written_out(_outer_products(parts, size), unit)
    if tables:
        rows = jnp.concatenate([part.u for part in tables], axis=1)
        tables = [Factors(rows, _same_rows(rows, jnp.concatenate([p.v for p in tables], axis=1)))]
    square, most, u, v = jnp.zeros(n, parts[0].v.dtype), 1.0, parts[0].u, parts[0].v
    if dense:
        u = jnp.concatenate([part.u for part in dense], axis=1)
        v = jnp.concatenate([part.v for part in dense], axis=1)
        # Each u_t is brought to largest entry 1, and v_t takes its size. What is tiny then is small
        # in the product too, and is left out of norm and sum alike: no square underflows unseen.
        size_of_u = jnp.max(jnp.abs(u), axis=2, keepdims=True)
        u = jnp.where(size_of_u > 0, u / jnp.where(size_of_u > 0, size_of_u, 1), u)
        dense = [Factors(_without_tiny(u), _without_tiny(v * size_of_u))]
        u, v = dense[0].u, dense[0].v / unit
        if positions == 1:
            square = _square(u) * _square(v)
            reach = jnp.sqrt(square)
        else:
            gram = _matmul(u, u.swapaxes(1, 2)) * _matmul(v, v.swapaxes(1, 2))
            reach = jnp.sum(_lengths(u) * _lengths(v), axis=1)
            square = jnp.maximum(jnp.sum(gram, axis=(1, 2)), 0) + GRAM_MARGIN * reach**2
            most = GRAM_MARGIN**-0.5
    if tables:
        (table,) = tables
        scaled = table.v / unit
        if dense:
            picked = jnp.take_along_axis(u, table.u[:, None, :], axis=2)  # (n, positions, T)
            there = _matmul(picked.swapaxes(1, 2), v)  # the dense part's rows at the table's
            reach = jnp.sqrt(square) + jnp.sqrt(_square(scaled))
            square = square + 2 * jnp.sum(there * scaled, axis=(1, 2)) + _square(scaled)
            square = jnp.maximum(square, 0) + TABLE_MARGIN * reach**2
            most = TABLE_MARGIN**-0.5
        else:
            square = _square(scaled)
    forms = [*dense, *tables]
    length = max(sum(form.v.shape[1] for form in forms), 1)
    per_chunk = max(1, int(_CHUNK / (length * most) ** 0.5))
    # In a chunk: any order of per_chunk * length terms that add up to per_chunk * most clip norms.
    rounding = 2 * 2.0**-24 * per_chunk**2 * length * most + _tree.rounding(n)
    return Gradient(square, forms, _contract(size, per_chunk), rounding)


def _of_matrix(
    uses: Sequence[Use],
    turned: Sequence[bool],
    unit: Scalar,
    inputs: Sequence[Float[Array, "n turns ..."]],
    outputs: Sequence[Float[Array, "n turns ..."]],
) -> Gradient:
    """Return the gradients of one matrix from what its uses multiply with and their gradients."""
    if len(uses) == 1 and uses[0].kind == "conv":
        positions = math.prod(outputs[0].shape[1:]) // uses[0].size[1]
        if _better_written(positions, uses[0].size):
            return _written_out(_written_by_patches(uses[0], inputs[0], outputs[0]), unit)
    found = zip(map(factors_of, uses, inputs, outputs), turned, strict=True)
    parts = [part.turn() if turn else part for part, turn in found]
    return _gradient(parts, uses[turned.index(False)].size, unit)


def _by_slice(
    of_matrix: Callable[[Sequence[Array], Sequence[Array]], Gradient],
    inputs: Sequence[Float[Array, "slices n turns ..."]],
    outputs: Sequence[Float[Array, "slices n turns ..."]],
) -> Gradient:
    """Return the gradients of a leaf whose slices are matrices by themselves.

    Squared norms add up over slices. So do squared rounding errors, each proportional to how much
    the examples put into that slice: the whole has the relative rounding of one slice.
    """
    if len(outputs[0]) == 1:
        return of_matrix([x[0] for x in inputs], [d[0] for d in outputs])
    each = jax.vmap(of_matrix)(inputs, outputs)

    def total(each: Gradient, factors: Array, keep: Array) -> Array:
        return jax.vmap(lambda one: one.weighted_sum(factors, keep))(each)

    return Gradient(_tree.pairwise_sum(each.square), each, total, each.rounding)


class _Pass(NamedTuple):
    """One forward and one backward pass over a batch.

    Attributes:
      covered: for the leaves that are used in products only, which uses see them transposed.
      uses: of these leaves.
      inputs: for each use, what it multiplies with, (n, *loops, ...).
      outputs: for each use, the gradients of its output, (n, *loops, ...).
      written: the per-example gradients of the other leaves.
    """

    covered: dict[int, tuple[bool, ...]]
    uses: list[Use]
    inputs: list[Array]
    outputs: list[Array]
    written: dict[int, Array]


def _both_passes(
    loss: Loss,
    params: Params,
    batch: PyTree,
    chosen: Callable[[Sequence[Use]], bool] = lambda uses: True,
) -> _Pass:
    """Compute what gradients are made of.

    Args:
      loss: of one example.
      params: the parameters.
      batch: n examples.
      chosen: whether not to write a leaf's gradients out, given its uses.
    """
    leaves = jax.tree.leaves(params)
    example = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], batch)
    jaxpr = jax.make_jaxpr(loss)(params, example)
    covered = find(jaxpr, [leaf.shape for leaf in leaves])
    uses = walk(jaxpr, views_of(jaxpr, covered)).uses
    covered = {
        i: turned
        for i, turned in covered.items()
        if chosen([use for use in uses if use.view.leaf == i])
    }
    views = views_of(jaxpr, covered)
    uses = walk(jaxpr, views).uses
    free = {i: leaf for i, leaf in enumerate(leaves) if i not in covered}

    def forward(taps: list[Array], free: dict[int, Array], example: PyTree):
        values = [free.get(i, leaf) for i, leaf in enumerate(leaves)]
        done = walk(jaxpr, views, ([*values, *jax.tree.leaves(example)], iter(taps)))
        (value,) = done.outputs
        return value, done.inputs

    taps = _tree.vary_like([use.tap for use in uses], batch)
    (outputs, written), inputs = jax.vmap(
        jax.grad(forward, argnums=(0, 1), has_aux=True), in_axes=(None, None, 0)
    )(taps, free, batch)
    return _Pass(covered, uses, inputs, outputs, written)


def gradients(
    loss: Loss, params: Params, batch: PyTree, units: Sequence[Scalar]
) -> list[tuple[Gradient, Callable[[Array], Array]]]:
    """Return each leaf's per-example gradients, and how to shape their weighted sum.

    Args:
      loss: of one example.
      params: the parameters.
      batch: n examples.
      units: for each leaf, the clip norm of its group.
    """
    covered, uses, inputs, outputs, written = _both_passes(loss, params, batch)
    result = []
    for i, leaf in enumerate(jax.tree.leaves(params)):
        if i not in covered:
            result.append((_written_out(written[i], units[i]), lambda total: total))
            continue
        own = [k for k, use in enumerate(uses) if use.view.leaf == i]
        its_uses = [uses[k] for k in own]
        of_matrix = functools.partial(_of_matrix, its_uses, covered[i], units[i])
        gradient = _by_slice(
            of_matrix,
            [by_slice(uses[k], inputs[k]) for k in own],
            [by_slice(uses[k], outputs[k]) for k in own],
        )
        straight = its_uses[covered[i].index(False)]
        result.append((gradient, functools.partial(straight.to_leaf, leaf=leaf)))
    return result


def per_example_gradients(loss: Loss, params: Params, batch: PyTree) -> PerExample:
    """Return `vmap(grad(loss))`, with the gradients of convolutions' kernels from patches.

    That is faster on CPUs, and much faster inside loops and branches, where XLA is slow at them.

    Args:
      loss: of one example.
      params: the parameters.
      batch: n >= 1 examples.
    """

    def chosen(uses: Sequence[Use]) -> bool:
        return len(uses) == 1 and uses[0].kind == "conv" and not uses[0].view.loops

    found = _both_passes(loss, params, batch, chosen)
    leaves, structure = jax.tree.flatten(params)
    whole = dict(found.written)
    for use, x, d in zip(found.uses, found.inputs, found.outputs, strict=True):
        leaf = leaves[use.view.leaf]
        matrices = _written_by_patches(use, x[:, None], d[:, None])
        back = jax.vmap(lambda matrix, use=use, leaf=leaf: use.to_leaf(matrix[None], leaf))
        whole[use.view.leaf] = back(matrices).astype(leaf.dtype)
    return jax.tree.unflatten(structure, [whole[i] for i in range(len(leaves))])


def clipped_sum(
    loss: Loss, clipper: NormClipper, params: Params, batch: PyTree, mask: Mask
) -> ClippedSum:
    """Return the clipped sum of `clipper` over the batch; the same as from written-out gradients.

    Args:
      loss: of one example.
      clipper: a clipper that reads norms only.
      params: the trainable parameters.
      batch: n examples.
      mask: (n,) booleans.
    """
    labels = clipper.labels(params)
    leaves = gradients(loss, params, batch, [clipper.clip_norms[label] for label in labels])
    squares = [jnp.zeros(mask.shape[0], jnp.float32) for _ in clipper.clip_norms]
    for label, (gradient, _) in zip(labels, leaves, strict=True):
        squares[label] = squares[label] + gradient.square
    factors, keep = clipper.factors(squares, mask)
    sums = [
        shape(gradient.weighted_sum(factors[label], keep))
        for label, (gradient, shape) in zip(labels, leaves, strict=True)
    ]
    rounding = max(gradient.rounding for gradient, _ in leaves)
    total = jax.tree.unflatten(jax.tree.structure(params), sums)
    return clipper.clipped_sum(total, rows=mask.shape[0], rounding=rounding)
