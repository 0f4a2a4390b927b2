"""What a case of `experiments.audit` is: a release, its claim, and neighbouring data sets."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np

from jdp import accounting
from jdp._typing import Adjacency
from jdp.clipping import ClippedSum

ALWAYS = jnp.bool_(True)
GROUPS = {"a": 0, "b": 1}
PARAMS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
SIZE = 10
BATCH = 4.0
_RNG = np.random.default_rng(2026)
OTHERS = _RNG.normal(size=(5, SIZE)).astype(np.float32)
FRAME = np.linalg.qr(_RNG.normal(size=(SIZE, SIZE)))[0].T.astype(np.float32)
HUGE = 1e4


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a mechanism claims: the curve of an event, or a pure epsilon."""

    event: Any = None
    adjacency: Adjacency = "zero-out"
    pure: float = math.inf

    def epsilon(self, delta: float) -> float:
        """The claimed epsilon, by the library's own accountant."""
        if self.event is None:
            return self.pure
        options: Any = {"delta": delta, "adjacency": self.adjacency}
        return accounting.privacy_spent(self.event, **options).epsilon

    @property
    def mu(self) -> float | None:
        """The claimed mu, where the claim is the curve of one Gaussian."""
        if self.event is None:
            return None
        return accounting.privacy_spent(self.event, delta=0.5, adjacency=self.adjacency).mu


def gaussian(mu: float = 1.0, adjacency: Adjacency = "zero-out") -> Claim:
    """One Gaussian of noise multiplier 1 / mu."""
    return Claim(dpa.GaussianDpEvent(1 / mu), adjacency)


@dataclasses.dataclass(frozen=True)
class Case:
    """One release to attack.

    Attributes:
      release: `(key, present) -> (values, counts)`, what one run publishes, as a vector, with the
        record or without it; runs for which `counts` is False are left out, which may depend on
        what is public only (the place of the record in a public order).
      claim: what it is said to cost.
      neighbours: how the two data sets differ.
      score: from releases to scores, if not the fitted likelihood ratio.
      draws: times as many as for other cases.
    """

    release: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    claim: Claim = dataclasses.field(default_factory=gaussian)
    neighbours: str = "a record, or none"
    score: Callable[[np.ndarray], np.ndarray] | None = None
    draws: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RawSum(ClippedSum):
    """A clipped sum whose noised parts are published as they are."""

    def combine(self, parts):
        """All parts."""
        return parts


def raw(clipped: ClippedSum) -> ClippedSum:
    """The same, to be published part by part."""
    options: Any = {"rows": clipped.rows, "rounding": clipped.rounding}
    return RawSum(clipped.parts, clipped.noise_scales, **options)


def tree_of(matrix: Any) -> dict[str, jax.Array]:
    """Cut (..., 10) into a tree like PARAMS."""
    matrix = jnp.asarray(matrix, jnp.float32)
    return {"a": matrix[..., :6].reshape(*matrix.shape[:-1], 2, 3), "b": matrix[..., 6:]}


def flat(tree: Any) -> jax.Array:
    """All leaves as one vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def rows(canary: np.ndarray, others: np.ndarray = OTHERS) -> jax.Array:
    """The data set, canary last."""
    return jnp.asarray(np.concatenate([others, canary[None]]), jnp.float32)


def mask_of(present: jax.Array, others: int = len(OTHERS)) -> jax.Array:
    """The others, and the canary where it is present."""
    return jnp.append(jnp.ones(others, bool), present)
