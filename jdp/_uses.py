"""Where parameters enter a loss as a product: found in its jaxpr, with no registry of layers.

A *use* is an equation y = f(x, w), linear in w, by which one example's gradient of w is a sum of
outer products over positions: matrix products, convolutions, table look-ups. A *view* is a
parameter that was only rearranged on the way (transposed, reshaped, cast), or one slice of it at a
time, where a scan runs over layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_REARRANGEMENTS = ("transpose", "reshape", "squeeze", "copy", "expand_dims")
_CAST = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class View:
    """A rearrangement of one parameter leaf, or of its slices, one a turn of a scan.

    Attributes:
      leaf: its number.
      steps: the equations that lead to it, each with the number of axes sliced off before.
      loops: the length of each scan around it, outermost first, and whether that scan slices it.
    """

    leaf: int
    steps: tuple[tuple[Any, int], ...] = ()
    loops: tuple[tuple[int, bool], ...] = ()

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes that were sliced off."""
        return tuple(length for length, sliced in self.loops if sliced)

    def then(self, equation: Any) -> "View":
        """Return what an equation makes of it."""
        return dataclasses.replace(self, steps=(*self.steps, (equation, len(self.stack))))

    def within(self, length: int, sliced: bool) -> "View":
        """Return what it is inside a scan."""
        return dataclasses.replace(self, loops=(*self.loops, (length, sliced)))

    def apply(self, leaf: Array) -> Array:
        """Rearrange the leaf, into an array of shape (*stack, ...)."""
        for equation, depth in self.steps:
            step: Callable[..., Any] = functools.partial(_only_output, equation)
            for _ in range(depth):
                step = jax.vmap(step)
            leaf = step(leaf)
        return leaf


@dataclasses.dataclass(frozen=True)
class Use:
    """One equation that multiplies a view with something.

    Attributes:
      kind: "dot", "conv" or "lookup".
      view: the parameter's view.
      equation: the jaxpr equation.
      operand: which of its inputs is the view; the other is what it is multiplied with.
    """

    kind: str
    view: View
    equation: Any
    operand: int

    @property
    def output(self) -> Any:
        """Shape and dtype of what the equation computes."""
        return self.equation.outvars[0].aval

    @property
    def weight(self) -> Any:
        """Shape and dtype of the view."""
        return self.equation.invars[self.operand].aval

    @property
    def rows(self) -> tuple[int, ...]:
        """The view's dimensions that face the input; `columns` face the output."""
        if self.kind == "dot":
            return tuple(self.equation.params["dimension_numbers"][0][self.operand])
        if self.kind == "conv":
            _, channel, *spatial = self.equation.params["dimension_numbers"].rhs_spec
            return (*spatial, channel)
        return (0,)

    @property
    def columns(self) -> tuple[int, ...]:
        """The view's other dimensions."""
        return tuple(i for i in range(len(self.weight.shape)) if i not in self.rows)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the view as a matrix."""
        shape = self.weight.shape
        return math.prod(shape[i] for i in self.rows), math.prod(shape[i] for i in self.columns)

    @property
    def tap(self) -> Array:
        """Zeros to add to the output, of every turn of the scans around the equation."""
        lengths = [length for length, _ in self.view.loops]
        return jnp.zeros((*lengths, *self.output.shape), self.output.dtype)

    def to_leaf(self, matrices: Array, leaf: Any) -> Array:
        """Turn matrices of the slices' entries, (slices, rows, columns), back into the leaf."""
        order = (*self.rows, *self.columns)
        ordered = matrices.reshape(*self.view.stack, *(self.weight.shape[i] for i in order))
        view = ordered.transpose(_inside(self.view.stack, [order.index(i) for i in sorted(order)]))
        wide = [step for step in self.view.steps if step[0].primitive.name != _CAST]
        rearrange = dataclasses.replace(self.view, steps=tuple(wide)).apply
        (back,) = jax.linear_transpose(rearrange, leaf.astype(view.dtype))(view)
        return back

    def entries(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the slices as matrices whose entries are numbers of the leaf's entries."""
        numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        for equation, depth in self.view.steps:
            stack = numbers.shape[:depth]
            if equation.primitive.name == "transpose":
                numbers = numbers.transpose(_inside(stack, equation.params["permutation"]))
            else:
                numbers = numbers.reshape(*stack, *equation.outvars[0].aval.shape)
        numbers = numbers.transpose(_inside(self.view.stack, (*self.rows, *self.columns)))
        return numbers.reshape(-1, *self.size)


def _inside(stack: tuple[int, ...], axes: Sequence[int]) -> list[int]:
    """Return a permutation of axes as one that leaves the axes of a stack in front."""
    return [*range(len(stack)), *(len(stack) + i for i in axes)]


def evaluate(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute an equation's outputs."""
    if equation.primitive.name == "conv_general_dilated" and _is_plain(equation):
        return [_convolve(equation, *inputs)]
    return _bind(equation, inputs)


def _is_plain(equation: Any) -> bool:
    """Whether a convolution has neither groups nor a dilated input."""
    params = equation.params
    groups = (params["batch_group_count"], params["feature_group_count"])
    return groups == (1, 1) and set(params["lhs_dilation"]) <= {1}


def _convolve(equation: Any, x: Array, kernel: Array) -> Array:
    """Convolve, with an input gradient that is fast inside of loops and branches too.

    XLA on CPUs rearranges kernels for speed at the top level of a program only; elsewhere the
    input gradient as JAX writes it takes up to nine times as long as with a kernel turned by hand.
    """

    def plain(x: Array, kernel: Array) -> Array:
        (y,) = _bind(equation, [x, kernel])
        return y

    def backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
        x, kernel = saved
        (d_kernel,) = jax.vjp(lambda kernel: plain(x, kernel), kernel)[1](d)
        return _input_gradient(equation, x, kernel, d), d_kernel

    convolve = jax.custom_vjp(plain)
    convolve.defvjp(lambda x, kernel: (plain(x, kernel), (x, kernel)), backward)
    return convolve(x, kernel)


def _input_gradient(equation: Any, x: Array, kernel: Array, d: Array) -> Array:
    params = equation.params
    numbers = params["dimension_numbers"]
    outputs, inputs, *spatial = numbers.rhs_spec
    padding = []
    for axis, (low, _) in enumerate(params["padding"]):
        reach = (kernel.shape[spatial[axis]] - 1) * params["rhs_dilation"][axis]
        spread = (d.shape[numbers.out_spec[axis + 2]] - 1) * params["window_strides"][axis]
        padding.append((reach - low, x.shape[numbers.lhs_spec[axis + 2]] - 1 - spread + low))
    gradient = jax.lax.conv_general_dilated(
        d.astype(kernel.dtype),
        jnp.flip(kernel, spatial).swapaxes(outputs, inputs),
        window_strides=(1,) * len(spatial),
        padding=padding,
        lhs_dilation=params["window_strides"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec
        ),
        precision=params["precision"],
    )
    return gradient.astype(x.dtype)


def _bind(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # before jax 0.9
    outputs = equation.primitive.bind(*functions, *inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _only_output(equation: Any, x: Array) -> Array:
    (y,) = evaluate(equation, [x])
    return y


def rearranges(equation: Any) -> bool:
    """Return whether an equation only rearranges its one input."""
    name = equation.primitive.name
    if len(equation.invars) != 1:
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    if name == _CAST:
        return jnp.issubdtype(after.dtype, jnp.floating)
    keeps_size = math.prod(before.shape) == math.prod(after.shape)
    in_order = tuple(equation.params.get("broadcast_dimensions", ()))
    grows = name == "broadcast_in_dim" and in_order == tuple(sorted(in_order))
    return keeps_size and (name in _REARRANGEMENTS or grows)


def use_of(equation: Any, views: Sequence[View | None]) -> Use | None:
    """Return how an equation uses its view; None for two views, an empty one, or another way."""
    at = [i for i, view in enumerate(views) if view is not None]
    view = views[at[0]]
    if len(at) != 1 or view is None or 0 in equation.invars[at[0]].aval.shape:
        return None
    name, params = equation.primitive.name, equation.params
    if any(jnp.iscomplexobj(var.aval) for var in (*equation.invars, *equation.outvars)):
        return None
    if name == "dot_general" and params["dimension_numbers"][1] == ((), ()):
        return Use("dot", view, equation, at[0])
    if name == "conv_general_dilated" and at == [1]:
        return Use("conv", view, equation, 1) if _is_plain(equation) else None
    if name == "gather" and at == [0]:
        numbers, shape = params["dimension_numbers"], equation.invars[0].aval.shape
        of_rows = (
            len(shape) == 2
            and tuple(numbers.collapsed_slice_dims) == (0,)
            and tuple(numbers.start_index_map) == (0,)
            and tuple(numbers.offset_dims) == (len(equation.invars[1].aval.shape) - 1,)
            and tuple(params["slice_sizes"]) == (1, shape[1])
            and params["mode"] != jax.lax.GatherScatterMode.CLIP  # whose gradient goes elsewhere
        )
        return Use("lookup", view, equation, 0) if of_rows else None
    return None


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params):
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                yield from equations(inner)


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all operations in a jaxpr, and in the jaxprs inside it."""
    return (equation.primitive.name for equation in equations(jaxpr))
