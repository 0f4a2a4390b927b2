"""Where parameters enter a loss as a product: found in its jaxpr, with no registry of layers.

A *use* is an equation y = f(x, w), linear in w, by which one example's gradient of w is a sum of
outer products over positions: matrix products, convolutions, table look-ups. A *view* is a
parameter that was only rearranged on the way (transposed, reshaped, cast).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jaxtyping import Array

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
_REARRANGEMENTS = ("transpose", "reshape", "squeeze", "copy", "expand_dims")


@dataclasses.dataclass(frozen=True)
class View:
    """A rearrangement of one parameter leaf: its number, and the equations that lead to it."""

    leaf: int
    steps: tuple[Any, ...] = ()

    def apply(self, leaf: Array) -> Array:
        """Rearrange the leaf."""
        for equation in self.steps:
            (leaf,) = evaluate(equation, [leaf])
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

    def to_leaf(self, matrix: Array, leaf: Any) -> Array:
        """Turn a matrix of the view's entries back into the leaf's shape."""
        order = (*self.rows, *self.columns)
        ordered = matrix.reshape([self.weight.shape[i] for i in order])
        view = ordered.transpose([order.index(i) for i in range(len(order))])
        wide = [step for step in self.view.steps if step.primitive.name != "convert_element_type"]
        rearrange = dataclasses.replace(self.view, steps=tuple(wide)).apply
        (back,) = jax.linear_transpose(rearrange, leaf.astype(view.dtype))(view)
        return back

    def entries(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the view as a matrix whose entries are numbers of the leaf's entries."""
        numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        for step in self.view.steps:
            if step.primitive.name == "transpose":
                numbers = numbers.transpose(step.params["permutation"])
            else:
                numbers = numbers.reshape(step.outvars[0].aval.shape)
        return numbers.transpose((*self.rows, *self.columns)).reshape(self.size)


def evaluate(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute an equation's outputs."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # before jax 0.9
    outputs = equation.primitive.bind(*functions, *inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def primitives(jaxpr: Any) -> set[str]:
    """Return the names of all primitives in a jaxpr, also inside calls and loops."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


def _called(equation: Any) -> Any:
    """Return the jaxpr that an equation calls, if calling it is all that it does."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return inner if inner is None or hasattr(inner, "consts") else jex.ClosedJaxpr(inner, ())


def _rearranges(equation: Any) -> bool:
    name = equation.primitive.name
    if len(equation.invars) != 1:
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    if name == "convert_element_type":
        return jnp.issubdtype(after.dtype, jnp.floating)
    keeps_size = math.prod(before.shape) == math.prod(after.shape)
    in_order = tuple(equation.params.get("broadcast_dimensions", ()))
    grows = name == "broadcast_in_dim" and in_order == tuple(sorted(in_order))
    return keeps_size and (name in _REARRANGEMENTS or grows)


def _use(equation: Any, views: Sequence[View | None]) -> Use | None:
    """Return how an equation uses its view; None if it has two, or in a way not known here."""
    at = [i for i, view in enumerate(views) if view is not None]
    view = views[at[0]]
    if len(at) != 1 or view is None:
        return None
    name, params = equation.primitive.name, equation.params
    if name == "dot_general" and params["dimension_numbers"][1] == ((), ()):
        return Use("dot", view, equation, at[0])
    if name == "conv_general_dilated" and at == [1]:
        groups = (params["batch_group_count"], params["feature_group_count"])
        plain = groups == (1, 1) and set(params["lhs_dilation"]) <= {1}
        return Use("conv", view, equation, 1) if plain else None
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


def walk(
    jaxpr: Any,
    views: Sequence[View | None],
    visit: Callable[[Use, Sequence[Any]], Any],
    spoil: Callable[[View], None],
    values: Sequence[Any] | None = None,
) -> tuple[list[Any], list[View | None]]:
    """Go through a jaxpr in order, following views of parameters into calls.

    Args:
      jaxpr: a closed jaxpr.
      views: for each of its inputs, the parameter it is, or None.
      visit: called with each use and its inputs' values; returns the value of its output.
      spoil: hears of every view that is used in another way.
      values: the inputs' values; None to look without computing (`visit` then gets no values).

    Returns:
      The outputs' values (None without `values`), and which views the outputs are.
    """
    seen: dict[Any, View | None] = dict(zip(jaxpr.jaxpr.invars, views, strict=True))
    env: dict[Any, Any] = {}
    computing = values is not None
    if values is not None:
        env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.jaxpr.invars, values, strict=True))

    def view_of(atom: Any) -> View | None:
        return None if isinstance(atom, jex.Literal) else seen.get(atom)

    def read(atom: Any) -> Any:
        if not computing:
            return None
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for equation in jaxpr.jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        its_views = [view_of(atom) for atom in equation.invars]
        found = [view for view in its_views if view is not None]
        called = _called(equation) if found else None
        use = _use(equation, its_views) if found else None
        if called is not None:
            outputs, out_views = walk(
                called, its_views, visit, spoil, inputs if computing else None
            )
            seen.update(zip(equation.outvars, out_views, strict=True))
        elif use is not None:
            outputs = [visit(use, inputs)]
        else:
            outputs = evaluate(equation, inputs) if computing else [None] * len(equation.outvars)
            if found and _rearranges(equation):
                seen[equation.outvars[0]] = View(found[0].leaf, (*found[0].steps, equation))
            else:
                for view in found:
                    spoil(view)
        env.update(zip(equation.outvars, outputs, strict=True))
    outvars = jaxpr.jaxpr.outvars
    return [read(atom) for atom in outvars], [view_of(atom) for atom in outvars]


def find(jaxpr: Any, shapes: Sequence[tuple[int, ...]]) -> dict[int, tuple[bool, ...]]:
    """Return the leaves (the first inputs of the jaxpr, of these shapes) used in products only.

    Leaves used several times are among them if all uses see the same matrix, or its transpose.

    Returns:
      For each such leaf, which of its uses, in order of evaluation, see the transpose of the
      matrix that the first other one sees.
    """
    uses: list[Use] = []
    spoilt: set[int] = set()
    views: list[View | None] = [View(i) for i in range(len(shapes))]
    views += [None] * (len(jaxpr.jaxpr.invars) - len(shapes))
    _, out_views = walk(
        jaxpr, views, lambda use, _: uses.append(use), lambda view: spoilt.add(view.leaf)
    )
    spoilt |= {view.leaf for view in out_views if view is not None}
    numbers: dict[int, list[int]] = {}
    for number, use in enumerate(uses):
        numbers.setdefault(use.view.leaf, []).append(number)
    leaves = {}
    for leaf, own in numbers.items():
        turned = _turned([uses[number] for number in own], shapes[leaf])
        if leaf not in spoilt and turned is not None:
            leaves[leaf] = turned
    return leaves


def _turned(uses: Sequence[Use], shape: tuple[int, ...]) -> tuple[bool, ...] | None:
    if len(uses) == 1:
        return (False,)
    # A look-up's rows must stay rows, so it sets the orientation.
    reference = sorted(uses, key=lambda use: use.kind != "lookup")[0].entries(shape)
    turned = []
    for use in uses:
        entries = use.entries(shape)
        if np.array_equal(entries, reference):
            turned.append(False)
        elif use.kind != "lookup" and np.array_equal(entries.T, reference):
            turned.append(True)
        else:
            return None
    return tuple(turned)
