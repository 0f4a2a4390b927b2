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
PerExample: TypeAlias = PyTree
"""A pytree whose every leaf has the examples on its leading axis."""

Loss: TypeAlias = Callable[[PyTree, PyTree], Float[Array, ""]]
"""`loss(params, example) -> scalar`, for ONE example (any pytree)."""

Adjacency: TypeAlias = Literal["zero-out", "add-remove", "replace-one"]
"""Which datasets count as neighbours: see `jdp.accounting`."""
