r"""The factors of one example's gradient of a matrix: $g = \sum_t u_t v_t^\top$."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _tree
from jdp._uses import Use


@jax.tree_util.register_dataclass
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


def by_slice(use: Use, x: Array) -> Float[Array, "slices n turns ..."]:
    """Sort (n, *loops, ...) by the slice of the leaf that a turn of the loops around a use saw."""
    loops = use.view.loops
    sliced = [i for i, loop in enumerate(loops, start=1) if loop[1]]
    turns = math.prod(length for length, whole in loops if not whole)
    x = jnp.moveaxis(x, sliced, range(len(sliced)))
    n, *shape = x.shape[len(sliced)], *x.shape[1 + len(loops) :]
    return x.reshape(math.prod(use.view.stack), n, turns, *shape)


def factors_of(use: Use, x: Float[Array, "n turns ..."], d: Float[Array, "n turns ..."]) -> Factors:
    """Return the factors from a use's other input x and its output gradient d."""
    n, turns = d.shape[:2]
    x, d = x.reshape(n * turns, *x.shape[2:]), d.reshape(n * turns, *d.shape[2:])
    one_turn = _factors_of(use, x, d)
    positions = turns * one_turn.v.shape[1]
    return Factors(
        one_turn.u.reshape(n, positions, *one_turn.u.shape[2:]),
        one_turn.v.reshape(n, positions, *one_turn.v.shape[2:]),
    )


def _factors_of(use: Use, x: Float[Array, "n ..."], d: Float[Array, "n ..."]) -> Factors:
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
