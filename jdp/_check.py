"""Validators for static (public) arguments.

Every message names the argument, what was expected, what came, and the remedy. A traced value is
never checked: its value may be private, and whether something raises must not depend on it.
"""

import math
import numbers
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def fail(name: str, expected: str, got: Any, remedy: str, error: type[Exception] = ValueError):
    """Raise `error` with the one message shape that the whole library uses."""
    raise error(f"`{name}` must be {expected}, but got {_show(got)}. {remedy}")


def _show(value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        return f"a traced value of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, jax.Array | np.ndarray) and value.size > 1:
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, Words):
        return str(value)
    if isinstance(value, dict | list | tuple):
        value = _without_values(value)
    try:
        text = repr(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _without_values(value: Any) -> Any:
    """The same containers, with words for arrays: what these hold may be private."""
    if isinstance(value, dict):
        return {key: _without_values(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_values, value))
    if isinstance(value, jax.Array | np.ndarray):
        return _Bare(f"an array of shape {value.shape}")
    return value


class _Bare(str):
    __repr__ = str.__str__


def _number(value: float) -> str:
    """The number, exactly where it is an integer."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def is_static_number(value: Any) -> bool:
    """Whether `value` is a plain number, which may be checked (a traced or device array is not)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_static_integer(value: Any) -> bool:
    """Whether `value` is a plain integer, of Python or NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    finite: bool = True,
    traced: bool = False,
    remedy: str,
) -> Any:
    """Return `value` if it is a number in the given range.

    Args:
      name: the argument's name, for the message.
      value: what the caller passed.
      above: exclusive lower bound.
      at_least: inclusive lower bound.
      below: exclusive upper bound.
      at_most: inclusive upper bound.
      finite: whether infinity is refused; NaN always is.
      traced: whether a scalar array (whose value is then not looked at) is allowed.
      remedy: the last sentence of the message.

    Returns:
      The number; as a float where JAX would not hold an integer of its size.

    Raises:
      TypeError: it is not a number.
      ValueError: it is out of range.
    """
    bounds = [
        f"{sign} {_number(bound)}"
        for sign, bound in ((">", above), (">=", at_least), ("<", below), ("<=", at_most))
        if math.isfinite(bound)
    ]
    expected = " ".join(["a finite number" if finite else "a number", " and ".join(bounds)]).strip()
    if traced and isinstance(value, jax.Array):
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        if value.shape != () or not floating or jnp.finfo(value.dtype).bits < 32:
            # In bfloat16 a noise scale could come out 0.4% too small.
            remedy += " (With optax.inject_hyperparams, set hyperparam_dtype=jnp.float32.)"
            fail(name, f"{expected} or a float32 scalar array", value, remedy, TypeError)
        return value
    if not is_static_number(value):
        fail(name, expected, value, remedy, TypeError)
    if is_static_integer(value) and abs(value) >= 2**31:
        try:
            value = float(value)
        except OverflowError:
            fail(name, expected, value, remedy)
    in_range = (
        (above == -math.inf or value > above)
        and (below == math.inf or value < below)
        and at_least <= value <= at_most
    )
    if math.isnan(value) or (finite and math.isinf(value)) or not in_range:
        fail(name, expected, value, remedy)
    return value


MOST = 2**53  # beyond it floats do not hold every integer


def integer(name: str, value: Any, *, at_least: int, at_most: float = MOST, remedy: str) -> int:
    """Return `value` as an int if it is a whole number in the range; see `number` for errors."""
    expected = f"an integer >= {at_least}"
    is_integer = is_static_integer(value)
    if at_most < MOST or (is_integer and value > at_most):
        expected += f" and <= {_number(at_most)}"
    if not is_integer:
        fail(name, expected, value, remedy, TypeError)
    if not at_least <= int(value) <= at_most:
        fail(name, expected, value, remedy)
    return int(value)


def instance(name: str, value: Any, kind: type, remedy: str) -> Any:
    """Return `value` if it is of this class.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        fail(name, f"{article} {kind.__name__}", value, remedy, TypeError)
    return value


def sequence(name: str, value: Any, of: str, remedy: str) -> tuple[Any, ...]:
    """Return `value` as a tuple if it is a sequence of at least one element, and no text.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        fail(name, f"a non-empty sequence of {of}", value, remedy, TypeError)
    return tuple(value)


class Words(str):
    """A description of what came, shown in a message as it is."""


def boolean(name: str, value: Any) -> bool:
    """Return `value` if it is True or False.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(value, bool):
        fail(name, "True or False", value, "Pass a Python boolean.", TypeError)
    return value


def path(name: str, value: Any) -> pathlib.Path:
    """Return `value` as a path, if it is one.

    Raises:
      TypeError: it is not.
      ValueError: no file system could have it.
    """
    remedy = "Pass a string or a pathlib.Path."
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or text == "":
        fail(name, "a path", value, remedy, TypeError)
    try:
        possible = b"\0" not in os.fsencode(str(text))
    except UnicodeEncodeError:
        possible = False
    if not possible:
        fail(name, "a path of characters that a file's name can have", value, remedy)
    return pathlib.Path(value)


def as_array(name: str, value: Any, expected: str) -> np.ndarray:
    """Return `value` as a NumPy array, of any dtype.

    Raises:
      TypeError: it is made of rows of different lengths.
    """
    try:
        return np.asarray(value)
    except ValueError:
        got = Words("parts of different shapes")
        fail(name, expected, got, "Give every row the same length.", TypeError)
        raise


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numbers, booleans or keys, or the shape of one."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return True
    dtype = getattr(value, "dtype", None)
    kinds = (jnp.number, jnp.bool_)
    numeric = isinstance(dtype, np.dtype) and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    return numeric and isinstance(getattr(value, "shape", None), tuple)


def is_floating(value: Any) -> bool:
    """Whether `value` is an array of floats, or the shape of one."""
    return is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)


def rows(name: str, tree: Any, what: str, remedy: str) -> int:
    """Return the number of rows that all arrays of a pytree have.

    Args:
      name: the argument's name, for the message.
      tree: what the caller passed.
      what: one row is one of these.
      remedy: the last sentence of the message.

    Raises:
      ValueError: there is no array, a leaf is none, or their leading sizes differ.
    """
    leaves = jax.tree.leaves(tree)
    sizes: set[Any] = {leaf.shape[:1] if is_array(leaf) else () for leaf in leaves}
    if len(sizes) != 1 or sizes == {()}:
        kinds = [getattr(leaf, "shape", Words(type(leaf).__name__)) for leaf in leaves]
        dtypes = {str(leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype")}
        got = f"leaves of shapes {_without_values(kinds)} and dtypes {sorted(dtypes)}"
        expected = f"a pytree of arrays with the {what} on their leading axis"
        fail(name, expected, Words(got), remedy)
    return sizes.pop()[0]


def floating(name: str, value: Any, shape: tuple[int | str, ...], *, remedy: str) -> Any:
    """Return `value` if it is a floating array of this shape, where a letter is any size but 0.

    Raises:
      TypeError: it is no floating array.
      ValueError: it has another shape.
    """
    if not is_floating(value):
        fail(name, "a floating array", value, remedy, TypeError)
    fits = len(value.shape) == len(shape) and all(
        size > 0 if isinstance(want, str) else size == want
        for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        fail(name, f"of shape ({sizes})", value, remedy)
    return value


def step(
    value: Any,
    *,
    at_most: float = 2**31 - 1,
    name: str = "step",
    remedy: str = "Count steps from 0.",
) -> Any:
    """Return the number of a step: an integer in the range, or a traced integer scalar."""
    if isinstance(value, jax.Array) and value.shape == ():
        if isinstance(value, jax.core.Tracer):
            if jnp.issubdtype(value.dtype, jnp.integer):
                return value
        else:
            value = value.item()
    return integer(name, value, at_least=0, at_most=at_most, remedy=remedy)


def choice(name: str, value: Any, options: Collection[str]) -> str:
    """Return `value` if it is one of `options`.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(value, str) or value not in options:
        fail(name, f"one of {sorted(options)}", value, "Choose one of these.")
    return value


def noise_multiplier(value: Any, name: str = "noise_multiplier") -> Any:
    """Return a noise multiplier: a number >= 0, or a traced scalar."""
    return number(
        name,
        value,
        at_least=0,
        traced=True,
        remedy="It is the noise's standard deviation over the L2 sensitivity; take it from "
        "jdp.plan(...).noise_multiplier.",
    )


CLIP_NORM_RANGE = (1e-12, 1e12)


def clip_norm(name: str, value: Any) -> Any:
    """Return a clip norm: a float in 1e-12..1e12 or infinity (no clipping), or a traced scalar.

    Outside that range float32 squares, sums or noise would overflow or vanish. A traced value
    outside it becomes NaN: then every contribution is zero and the noise is NaN.
    """
    low, high = CLIP_NORM_RANGE
    remedy = (
        "It bounds the L2 norm of each example's contribution; 1.0 is a usual start. Infinity "
        "means no clipping."
    )
    number(name, value, above=0, finite=False, traced=True, remedy=remedy)
    if not is_static_number(value):
        inside = ((value >= low) & (value <= high)) | (value == jnp.inf)
        return jnp.where(inside, value, jnp.nan)
    if not low <= value <= high and value != math.inf:
        fail(name, f"between {low:g} and {high:g}, or infinity", value, remedy)
    return float(value)


def delta(value: Any) -> float:
    """Return delta as a float: a number in (0, 1)."""
    remedy = (
        "It is the probability of a privacy failure; use less than 1 / num_examples, for example "
        "1e-5."
    )
    return float(number("delta", value, above=0, below=1, remedy=remedy))


def typed_key(name: str, value: Any) -> Any:
    """Return `value` if it is one typed PRNG key.

    Raises:
      TypeError: it is not.
    """
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not is_key or value.shape != ():
        fail(
            name,
            "one typed PRNG key (shape ())",
            value,
            "Make one with jax.random.key(seed) to reproduce a run, or with jdp.secure_key() "
            "for a run that is private.",
            TypeError,
        )
    return value
