"""Walks through a loss's jaxpr: which parameters are used in products only, and with what.

Calls, scans and checkpoints are walked into; branches and other loops are not. In a scan over
layers a view is one slice of a parameter a turn, and what a scan closes over (the weights of a
recurrent net) is used once a turn.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend import core as jex
from jaxtyping import Array

from jdp._uses import Use, View, evaluate, rearranges, use_of

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("remat", "remat2", "checkpoint")

Given: TypeAlias = tuple[Sequence[Any], Iterator[Array]]  # an input's values, and taps


@dataclasses.dataclass
class Walk:
    """What a walk through a jaxpr found, in order of evaluation, and computed.

    Attributes:
      outputs: the values of the outputs; None each, if only looking.
      views: which views the outputs are.
      uses: of views.
      inputs: for each use, what it multiplies its view with: (*loops, ...); none if only looking.
      spoilt: the leaves that are used in another way as well.
    """

    outputs: list[Any] = dataclasses.field(default_factory=list)
    views: list[View | None] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)
    inputs: list[Array] = dataclasses.field(default_factory=list)
    spoilt: set[int] = dataclasses.field(default_factory=set)

    def spoil(self, views: Sequence[View | None]):
        """Note that these views are used in a way not known here."""
        self.spoilt |= {view.leaf for view in views if view is not None}

    def enter(self, inner: "Walk") -> tuple[list[Any], list[View | None]]:
        """Take over what the walk through an inner jaxpr found; return its outputs and views."""
        self.uses += inner.uses
        self.inputs += inner.inputs
        self.spoilt |= inner.spoilt
        return inner.outputs, inner.views


def walk(jaxpr: Any, views: Sequence[View | None], given: Given | None = None) -> Walk:
    """Go through a jaxpr in order, following views of parameters into calls and scans.

    Args:
      jaxpr: a closed jaxpr.
      views: for each of its inputs, the parameter it is, or None.
      given: the inputs' values, and for each use what to add to its output; None to look only.
    """
    seen: dict[Any, View | None] = dict(zip(jaxpr.jaxpr.invars, views, strict=True))
    env: dict[Any, Any] = {}
    result, (values, taps) = Walk(), given or (None, iter(()))
    if values is not None:
        env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.jaxpr.invars, values, strict=True))

    def view_of(atom: Any) -> View | None:
        return None if isinstance(atom, jex.Literal) else seen.get(atom)

    def read(atom: Any) -> Any:
        if values is None:
            return None
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for equation in jaxpr.jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        its_views = [view_of(atom) for atom in equation.invars]
        out_views: list[View | None] = [None] * len(equation.outvars)
        found = [view for view in its_views if view is not None]
        use = use_of(equation, its_views) if found else None
        inner = _inner(equation) if found else None
        if inner is not None:
            done = inner(its_views, None if values is None else (inputs, taps))
            outputs, out_views = result.enter(done)
        else:
            outputs: list[Any] = [None] * len(equation.outvars)
            if values is not None:
                outputs = list(evaluate(equation, inputs))
            if use is not None:
                result.uses.append(use)
                if values is not None:
                    result.inputs.append(inputs[1 - use.operand])
                    outputs = [outputs[0] + next(taps)]
            elif found and rearranges(equation):
                out_views = [found[0].then(equation)]
            else:
                result.spoil(found)
        env.update(zip(equation.outvars, outputs, strict=True))
        seen.update(zip(equation.outvars, out_views, strict=True))
    outvars = jaxpr.jaxpr.outvars
    result.outputs = [read(atom) for atom in outvars]
    result.views = [view_of(atom) for atom in outvars]
    return result


def _inner(equation: Any) -> Callable[[Sequence[View | None], Given | None], Walk] | None:
    """Return the walk through the jaxpr that an equation runs, if it is one that is walked into."""
    name, params = equation.primitive.name, equation.params
    if name == "scan" and params["length"]:
        return functools.partial(_walk_scan, params)
    if name in _CALLS + _REMATS:
        jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
        closed = jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())
        return functools.partial(walk if name in _CALLS else _walk_remat(params), closed)
    return None


def _walk_in(
    jaxpr: Any,
    views: Sequence[View | None],
    given: Given | None,
    apply: Callable[[Callable, Sequence[Any], list[Array]], tuple[list[Any], list[Array]]],
) -> Walk:
    """Walk through a jaxpr that runs in a transformation of JAX: nothing but arrays leaves it.

    Args:
      jaxpr: a closed jaxpr.
      views: as in `walk`.
      given: as in `walk`.
      apply: calls the function it gets, of (values, taps), with the values and taps it gets.
    """
    result = walk(jaxpr, views)
    if given is None:
        return result
    values, taps = given
    places: list[int] = []

    def inside(values: Sequence[Any], own: Sequence[Array]) -> tuple[list[Any], list[Array]]:
        done = walk(jaxpr, views, (values, iter(own)))
        different = {id(x): x for x in done.inputs}  # queries, keys and values share theirs
        places[:] = [list(different).index(id(x)) for x in done.inputs]
        return done.outputs, list(different.values())

    own = [next(taps) for _ in result.uses]
    result.outputs, inputs = apply(inside, values, own)
    result.inputs = [inputs[i] for i in places]
    return result


def _walk_remat(params: dict[str, Any]) -> Callable[..., Walk]:
    """Return the walk through what is computed again in the backward pass: it still is."""
    again = functools.partial(
        jax.checkpoint, prevent_cse=bool(np.any(params["prevent_cse"])), policy=params["policy"]
    )
    return functools.partial(_walk_in, apply=lambda inside, *given: again(inside)(*given))


def _walk_scan(params: dict[str, Any], views: Sequence[View | None], given: Given | None) -> Walk:
    """Walk through a scan: taps come in by slices, and what uses multiply with goes out stacked."""
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def apply(inside: Callable, values: Sequence[Any], own: list[Array]):
        def turn(carry: list[Any], slices: tuple[list[Any], list[Array]]):
            xs, taps = slices
            outputs, inputs = inside([*values[:first], *carry, *xs], taps)
            return outputs[: last - first], (outputs[last - first :], inputs)

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        slices = (list(values[last:]), own)
        carry, (ys, inputs) = jax.lax.scan(turn, list(values[first:last]), slices, **options)
        return [*carry, *ys], inputs

    inner = [
        None if view is None or first <= i < last else view.within(params["length"], i >= last)
        for i, view in enumerate(views)
    ]
    result = _walk_in(params["jaxpr"], inner, given, apply)
    result.spoil([*views[first:last], *result.views])  # what a turn hands on or stacks is lost
    result.views = [None] * len(result.views)
    return result


def views_of(jaxpr: Any, leaves: Iterable[int]) -> list[View | None]:
    """Return the views that a jaxpr's inputs are, where these of its first inputs are leaves."""
    chosen = set(leaves)
    return [View(i) if i in chosen else None for i in range(len(jaxpr.jaxpr.invars))]


def find(jaxpr: Any, shapes: Sequence[tuple[int, ...]]) -> dict[int, tuple[bool, ...]]:
    """Return the leaves (the first inputs of the jaxpr, of these shapes) used in products only.

    Leaves used several times are among them if all uses see the same matrix, or its transpose; of
    leaves that scans slice, the same matrices.

    Returns:
      For each such leaf, which of its uses, in order of evaluation, see the transpose of the
      matrix that the first other one sees.
    """
    found = walk(jaxpr, views_of(jaxpr, range(len(shapes))))
    found.spoil(found.views)
    numbers: dict[int, list[int]] = {}
    for number, use in enumerate(found.uses):
        numbers.setdefault(use.view.leaf, []).append(number)
    leaves = {}
    for leaf, own in numbers.items():
        turned = _turned([found.uses[number] for number in own], shapes[leaf])
        if leaf not in found.spoilt and turned is not None:
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
        elif use.kind != "lookup" and np.array_equal(entries.swapaxes(1, 2), reference):
            turned.append(True)
        else:
            return None
    return tuple(turned)
