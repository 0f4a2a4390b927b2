"""Aliases shared by every room."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
from jaxtyping import Array, Bool, Float
from jaxtyping import Key as KeyArray

PyTree: TypeAlias = Any
Scalar: TypeAlias = float | jax.Array
Key: TypeAlias = KeyArray[Array, ""]
Mask: TypeAlias = Bool[Array, "batch"]
Params: TypeAlias = PyTree
PerExample: TypeAlias = PyTree
"""A pytree whose every leaf has the examples on its leading axis."""

Loss: TypeAlias = Callable[[PyTree, PyTree], Float[Array, ""]]
"""`loss(params, example) -> scalar`, for ONE example (any pytree)."""

Adjacency: TypeAlias = Literal["zero-out", "add-remove", "replace-one"]
"""Which datasets count as neighbours: see `jdp.accounting`."""


class NoiseMultiplier(float):
    """A noise multiplier that remembers the adjacency under which it was computed.

    It is the noise's standard deviation over the L2 sensitivity under `adjacency`. Multiplied or
    divided by a number it stays one; other arithmetic gives plain floats, which remember nothing.
    """

    adjacency: Adjacency

    def __new__(cls, value: float, adjacency: Adjacency) -> "NoiseMultiplier":
        """Make a float that carries `adjacency`."""
        self = super().__new__(cls, value)
        self.adjacency = adjacency
        return self

    def __mul__(self, other):
        """Scale the multiplier; anything but a Python number is left to the other operand."""
        if not isinstance(other, int | float):
            return NotImplemented
        return NoiseMultiplier(float(self) * other, self.adjacency)

    __rmul__ = __mul__

    def __truediv__(self, other):
        """Divide the multiplier by a Python number."""
        if not isinstance(other, int | float):
            return NotImplemented
        return NoiseMultiplier(float(self) / other, self.adjacency)

    def __reduce__(self):  # copy and pickle keep the adjacency
        return NoiseMultiplier, (float(self), self.adjacency)
