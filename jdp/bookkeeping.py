r"""Clipped sums at about the cost of one forward and one backward pass, for any loss function.

Where a parameter enters the loss as a product, one example's gradient is a sum of outer products
over positions t (words, pixels), $g = \sum_t u_t v_t^\top$, with u what the parameter is multiplied
with and v the gradient of the result. Book-keeping (Goodfellow 2015, arXiv 1510.01799; Bu et al.
2023, arXiv 2210.00038) computes u and v in one forward and one backward pass, squared norms from
them, and the clipped sum as one contraction of $(c_i u_i, v_i)$ over examples and positions. A
parameter that is used in another way (biases, scales, inside a loop) has its per-example gradient
written out as usual: that costs more, and is never wrong.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _tree
from jdp._typing import Loss, Mask, Params, PyTree, Scalar
from jdp._uses import Use, View, evaluate, find, walk
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
# Bytes of patches at a time: about what stays in one core's cache, more where there are many.
_PATCHES = {"cpu": 2**20, "gpu": 2**28, "tpu": 2**28}
_CHUNK = 128  # outer products that one contraction adds in an order of its own
_TINY = 1e-30
_FEW_CHUNKS = 4  # whose sums are held side by side; more are added one after the other


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one use: g_i = sum_t u_it v_it^T.

    Attributes:
      u: (n, T, a), or (n, T) row numbers for a look-up, whose u_t is the indicator of a row.
      v: (n, T, b).
    """

    u: Array
    v: Float[Array, "n T b"]

    @property
    def is_lookup(self) -> bool:
        """Whether u holds row numbers."""
        return self.u.ndim == 2

    def turn(self) -> "Factors":
        """Return the factors of the transpose."""
        return Factors(self.v, self.u)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _patches(use: Use, x: Float[Array, "n ..."]) -> Float[Array, "n T a"]:
    """Return the windows that a convolution multiplies with its kernel, one a position."""
    params = use.equation.params
    numbers = params["dimension_numbers"]
    batch, channel, *spatial = (i + 1 for i in numbers.lhs_spec)
    x = x.transpose([0, batch, *spatial, channel])
    edges = [(0, 0, 0), *((low, high, 0) for low, high in params["padding"]), (0, 0, 0)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges])
    kernel = [use.weight.shape[i] for i in numbers.rhs_spec[2:]]
    counts = [use.output.shape[i] for i in numbers.out_spec[2:]]
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    # Axis by axis, from the last: each time few slices, of ever longer runs of memory.
    for axis in reversed(range(len(kernel))):
        count, stride, dilation = counts[axis], strides[axis], dilations[axis]
        starts = [i * dilation for i in range(kernel[axis])]
        windows = [
            jax.lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis + 2)
            for start in starts
        ]
        x = jnp.stack(windows, axis=len(kernel) + 2)
    return x.reshape(x.shape[0], -1, use.size[0])


def factors_of(use: Use, x: Array, d: Array) -> Factors:
    """Return the factors from a use's other input x and its output gradient d, both (n, ...)."""
    n, width = d.shape[0], use.size[1]
    d = _tree.wide(d)
    if use.kind != "lookup" and not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(d.dtype)  # integers and booleans
    if use.kind == "conv":
        numbers = use.equation.params["dimension_numbers"]
        batch, channel, *spatial = (i + 1 for i in numbers.out_spec)
        v = d.transpose([0, batch, *spatial, channel]).reshape(n, -1, width)
        return Factors(_tree.wide(_patches(use, x)), v)
    if use.kind == "lookup":
        rows, v = x.reshape(n, -1).astype(jnp.int32), d.reshape(n, -1, width)
        inside = (rows >= 0) & (rows < use.size[0])  # no gradient flows from other rows
        return Factors(jnp.where(inside, rows, 0), jnp.where(inside[..., None], v, 0))
    contracted = use.equation.params["dimension_numbers"][0][1 - use.operand]
    free = [i for i in range(x.ndim - 1) if i not in contracted]
    u = _tree.wide(x).transpose([0, *(i + 1 for i in (*free, *contracted))])
    u = u.reshape(n, -1, use.size[0])
    if use.operand == 1:
        return Factors(u, d.reshape(n, -1, width))
    return Factors(u, d.reshape(n, width, -1).swapaxes(1, 2))


def _same_rows(rows: Array, v: Array) -> Array:
    """Return (n, T, b): each row's v summed over its occurrences, at the first one, else zero."""
    same = rows[:, :, None] == rows[:, None, :]
    first = jnp.argmax(same, axis=2) == jnp.arange(rows.shape[1])[None]
    return jnp.where(first[..., None], _matmul(same.astype(v.dtype), v), 0)


def _square(x: Array) -> Float[Array, " n"]:
    return jnp.sum(x * x, axis=tuple(range(1, x.ndim)))


def _without_tiny(x: Array) -> Array:
    """Return x with zero for what is so small that a product with it could underflow unseen."""
    return jnp.where(jnp.abs(x) < _TINY, 0, x)


def _lengths(x: Array) -> Float[Array, "n T"]:
    return jnp.sqrt(jnp.sum(x * x, axis=2))


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Per-example gradients of one leaf, in whichever form is cheapest.

    Attributes:
      square: squared norms, in units of the clip norm; never below the truth.
      weighted_sum: from factors c (n,) and a mask of examples to the sum of c_i g_i.
      rounding: what float32 rounding adds to the sensitivity of the sum, relative.
    """

    square: Float[Array, " n"]
    weighted_sum: Callable[[Array, Array], Array]
    rounding: float


def _written_out(whole: Array, unit: Scalar) -> Gradient:
    return Gradient(
        _tree.squared_norms([whole], unit),
        lambda factors, keep: _tree.weighted_sum(whole, factors, keep),
        _tree.rounding(whole.shape[0]),
    )


def _contract(parts: Sequence[Factors], size: tuple[int, int], per_chunk: int) -> Callable:
    """Return the function from (factors, keep) to the sum of c_i u_it v_it^T, (a, b)."""

    def of_chunk(chunk: Sequence[tuple[Array, Array]]) -> Array:
        total = jnp.zeros(size, parts[0].v.dtype)
        for u, v in chunk:
            v = v.reshape(-1, v.shape[-1])
            if jnp.issubdtype(u.dtype, jnp.integer):
                total = total.at[u.reshape(-1)].add(v)
            else:
                total = total + _matmul(u.reshape(-1, u.shape[-1]).T, v)
        return total

    def weighted_sum(factors: Array, keep: Array) -> Array:
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


def _written_by_patches(use: Use, x: Array, d: Array) -> Float[Array, "n a b"] | None:
    """Return a convolution's per-example gradients, from patches of few examples at a time."""
    positions = math.prod(use.output.shape) // use.size[1]
    if use.kind != "conv" or not _better_written(positions, use.size):
        return None

    def of_one(pair: tuple[Array, Array]) -> Array:
        x, d = pair
        return _outer_products([factors_of(use, x[None], d[None])], use.size)[0]

    at_a_time = max(1, _PATCHES[jax.default_backend()] // (4 * positions * sum(use.size)))
    chunks = -(-d.shape[0] // at_a_time)
    return jax.lax.map(of_one, (x, d), batch_size=-(-d.shape[0] // chunks))


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
    dense = [Factors(_without_tiny(part.u), _without_tiny(part.v)) for part in dense]
    if dense:
        u = jnp.concatenate([part.u for part in dense], axis=1)
        v = jnp.concatenate([part.v for part in dense], axis=1)
        # Each u_t is brought to largest entry 1, and v_t takes its size in units of the clip norm:
        # then no square underflows but of contributions that are harmlessly small.
        size_of_u = jnp.max(jnp.abs(u), axis=2, keepdims=True)
        u = jnp.where(size_of_u > 0, u / jnp.where(size_of_u > 0, size_of_u, 1), u)
        v = v * size_of_u / unit
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
    return Gradient(square, _contract(forms, size, per_chunk), rounding)


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
    leaves = jax.tree.leaves(params)
    example = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], batch)
    jaxpr = jax.make_jaxpr(loss)(params, example)
    covered = find(jaxpr, [leaf.shape for leaf in leaves])
    views: list[View | None] = [View(i) if i in covered else None for i in range(len(leaves))]
    views += [None] * (len(jaxpr.jaxpr.invars) - len(leaves))
    uses: list[Use] = []
    walk(jaxpr, views, lambda use, _: uses.append(use), lambda view: None)
    own = {i: [k for k, use in enumerate(uses) if use.view.leaf == i] for i in covered}
    free = {i: leaf for i, leaf in enumerate(leaves) if i not in covered}

    def forward(taps: list[Array], free: dict[int, Array], example: PyTree):
        inputs: list[Array] = []

        def visit(use: Use, values: Sequence[Array]) -> Array:
            inputs.append(values[1 - use.operand])
            (y,) = evaluate(use.equation, values)
            return y + taps[len(inputs) - 1]

        values = [free.get(i, leaf) for i, leaf in enumerate(leaves)]
        (value,), _ = walk(
            jaxpr, views, visit, lambda view: None, [*values, *jax.tree.leaves(example)]
        )
        return value, inputs

    taps = [jnp.zeros(use.output.shape, use.output.dtype) for use in uses]
    taps = _tree.vary_like(taps, batch)
    (outputs, written), inputs = jax.vmap(
        jax.grad(forward, argnums=(0, 1), has_aux=True), in_axes=(None, None, 0)
    )(taps, free, batch)
    result = []
    for i, leaf in enumerate(leaves):
        if i not in covered:
            result.append((_written_out(written[i], units[i]), lambda total: total))
            continue
        straight = own[i][covered[i].index(False)]
        shape = functools.partial(uses[straight].to_leaf, leaf=leaf)
        whole = None
        if len(own[i]) == 1:
            whole = _written_by_patches(uses[straight], inputs[straight], outputs[straight])
        if whole is not None:
            result.append((_written_out(whole, units[i]), shape))
            continue
        parts = []
        for number, turned in zip(own[i], covered[i], strict=True):
            part = factors_of(uses[number], inputs[number], outputs[number])
            parts.append(part.turn() if turned else part)
        result.append((_gradient(parts, uses[straight].size, units[i]), shape))
    return result


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
