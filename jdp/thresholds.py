r"""How far residuals are let through: thresholds $s_t$ that are fixed, public, or private.

A threshold is chosen from the grid $s_j = \Delta 2^j$, $j < L$, whose floor $\Delta > 0$ and number
of levels are public, so that noise in proportion to it never vanishes and never explodes. Each is a
function `(key, magnitudes, mask, noise_multiplier, adjacency) -> s`, of the absolute residuals of
the rows that it may read.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from scipy import stats

from jdp import _check
from jdp._typing import Adjacency, Key, Mask, Scalar
from jdp.clipping import ClippedSum
from jdp.noise import add_noise, sparse_vector

Mechanism: TypeAlias = Literal["histogram", "counts", "sparse-vector"]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The levels `floor * 2**j` for j = 0 ... levels - 1, in units of the label.

    Raises:
      ValueError: the floor is not positive, or there is no level.

    >>> print(Grid(0.01, 3).values())
    [0.01 0.02 0.04]
    """

    floor: float = 0.01
    levels: int = 8

    def __post_init__(self):
        """Validate."""
        remedy = "Choose the grid without looking at private data."
        _check.number("floor", self.floor, at_least=1e-9, at_most=1e9, remedy=remedy)
        _check.integer("levels", self.levels, at_least=1, at_most=60, remedy=remedy)

    def values(self) -> Float[Array, " levels"]:
        """All levels, rising."""
        return float(self.floor) * 2.0 ** jnp.arange(self.levels, dtype=jnp.float32)

    def above(self, magnitudes: Float[Array, " n"]) -> Int[Array, " n"]:
        """How many levels each magnitude exceeds; 0 for NaN."""
        return jnp.sum(magnitudes[:, None] > self.values()[None, :], axis=1)


MOST_ROWS = 2**24  # up to here float32 counts are exact in any order


def known(value: Scalar) -> Scalar:
    """A public number as a plain one where it can be read; one that is traced stays as it is."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or value.ndim:
        return value
    floating = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize >= 4
    return float(value) if floating else value  # others are refused by their dtype


def _check_grid(grid: Any) -> None:
    if not isinstance(grid, Grid):
        _check.fail("grid", "a Grid", grid, "Make one: Grid(floor, levels).", TypeError)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedThreshold:
    """The same public threshold at every step.

    Attributes:
      value: in units of the label; about the size of the label noise is best. Infinity means no
        clipping (then only a noise multiplier of 0 makes sense). May be traced.

    Raises:
      ValueError: the value is not positive.
    """

    value: Scalar

    def __post_init__(self):
        """Validate what is static."""
        value = known(self.value)
        if _check.is_static_number(value) or isinstance(value, str | bytes):
            remedy = "About the size of the label noise is best."
            _check.number("value", value, above=0, finite=False, remedy=remedy)


@dataclasses.dataclass(frozen=True)
class PublicThreshold:
    r"""The least level that a share of public residuals stays below: DP-GLMtron's (Algorithm 2).

    The least $s_j$ with $|\{ i : |\mathrm{ReLU}(x'_i \cdot w_t) - y'_i| \le s_j \}| \ge q m$, else
    the last level. It costs no privacy: it reads public data and released iterates only. The
    paper's q = 1 takes the largest residual, so that one public outlier raises the noise of all.

    Attributes:
      x: (m, d) public features.
      y: (m,) public labels.
      grid: the levels.
      quantile: q in (0, 1]; may be traced.

    Raises:
      TypeError: `x` or `y` is not a floating array of at least one record.
      ValueError: their lengths differ, or the quantile is out of range.
    """

    x: Float[Array, "m d"]
    y: Float[Array, " m"]
    grid: Grid = Grid()
    quantile: Scalar = 1.0

    def __post_init__(self):
        """Validate; public values may be looked at."""
        for name, value, ndim in (("x", self.x, 2), ("y", self.y, 1)):
            floating = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
            if not floating or value.ndim != ndim or value.shape[0] < 1:
                expected = f"a floating array of {ndim} dimension(s) with a row for each record"
                _check.fail(name, expected, value, "Give at least one public record.", TypeError)
        if self.x.shape[0] != self.y.shape[0]:
            expected = f"of shape ({self.x.shape[0]},), as x has records"
            _check.fail("y", expected, self.y, "Give as many labels as records.")
        _check_grid(self.grid)
        remedy = "1 is the paper's choice; 0.9 bears outliers."
        value = known(self.quantile)
        _check.number("quantile", value, above=0, at_most=1, traced=True, remedy=remedy)

    def choose(self, magnitudes: Float[Array, " m"]) -> Scalar:
        """The threshold for the public residuals' magnitudes."""
        within = self.grid.above(magnitudes)[:, None] <= jnp.arange(self.grid.levels)[None, :]
        within &= jnp.isfinite(magnitudes)[:, None]
        share = jnp.mean(within.astype(jnp.float32), axis=0)
        return _first(share >= self.quantile * (1 - 1e-6), self.grid)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountSum(ClippedSum):
    """Counts of records by level: exact sums of zeros and ones, not yet private."""

    replace_one_factor: ClassVar[float] = math.sqrt(2)  # a record leaves one bin for another


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MonotoneSum(CountSum):
    """Counts that one record changes all in the same direction, by at most 1."""

    replace_one_factor: ClassVar[float] = 1.0


@dataclasses.dataclass(frozen=True)
class PrivateThreshold:
    r"""The least level that all but a share of private residuals stay below, up to noise.

    Three mechanisms, of one noise multiplier z or, for the last, of one epsilon:

    | mechanism | releases | noise per count | slack at level j |
    | --- | --- | --- | --- |
    | "histogram" | counts of disjoint bins | $z a$ | $\kappa z a \sqrt{L - j}$ |
    | "counts" | counts above each level | $z \sqrt L$ | $\kappa z \sqrt L$ |
    | "sparse-vector" | the level only | Laplace | $(4/\varepsilon) \ln((L + 1)/\beta)$ |

    **Guarantee.** The histogram has L2 sensitivity 1 under zero-out and $a = \sqrt 2$ under
    replace-one; the counts above levels $\sqrt L$ under both, as a record changes a contiguous run
    of them, all in the same direction. Both are one Gaussian of multiplier z. Sparse vector is
    $(\varepsilon, 0)$-DP; all of one record's changes have the same sign, so it is the monotone
    case. The level chosen is the first whose noisy count above is at most $\rho m$ plus the slack,
    $\kappa = \Phi^{-1}(1 - \beta/L)$: without slack noise would rule out all levels. Residuals that
    are not finite count nowhere. Counts are exact, as there are at most 2^24 rows.

    Attributes:
      grid: the levels.
      share: rho in [0, 1), of residuals that may stay above; may be traced.
      failure: beta in (0, 1): with at most about this probability a level is missed by noise.
      mechanism: "histogram" (the default), "counts" (as the paper describes) or "sparse-vector".
    """

    grid: Grid = Grid()
    share: Scalar = 0.1
    failure: float = 0.1
    mechanism: Mechanism = "histogram"

    def __post_init__(self):
        """Validate."""
        _check_grid(self.grid)
        remedy = "It is a share of the records that are clipped; 0.1 is usual."
        value = known(self.share)
        _check.number("share", value, at_least=0, below=1, traced=True, remedy=remedy)
        _check.number("failure", self.failure, above=0, below=1, remedy="0.1 is usual.")
        _check.choice("mechanism", self.mechanism, get_args(Mechanism))

    def slack(self, noise: Any, adjacency: Adjacency, level: Any = 0) -> Any:
        """What noise may put on a count above a level; `noise` is z, or 1 / epsilon."""
        levels = self.grid.levels
        if self.mechanism == "sparse-vector":
            return 4 * noise * math.log((levels + 1) / self.failure)
        kappa = max(0.0, float(stats.norm.isf(self.failure / levels)))
        if self.mechanism == "counts":
            return kappa * noise * levels**0.5
        factor = CountSum.replace_one_factor if adjacency == "replace-one" else 1.0
        return kappa * noise * factor * (levels - level) ** 0.5

    def check(self, rows: int, noise: float, adjacency: Adjacency) -> None:
        """Refuse rows so few that noise would choose the level, or too many to count.

        A traced share is taken for 0, which needs the fewest rows.

        Raises:
          ValueError: with no residual below any level, the lowest one could still be chosen; or
            more than 2^24 rows.
        """
        _check_rows(rows)
        slack, share = self.slack(noise, adjacency), known(self.share)
        share = share if _check.is_static_number(share) else 0.0
        needed = math.ceil(slack / (1 - share)) + 1
        if rows < needed:
            _check.fail(
                "threshold_rows",
                f"at least {needed:,} for this noise ({noise:.4g}): the counts must exceed it",
                rows,
                "Take larger blocks of threshold rows (a fresh threshold less often, with "
                "threshold_every, leaves more for each), or a fixed or public threshold.",
            )

    def count(self, magnitudes: Float[Array, " m"], mask: Mask) -> ClippedSum:
        """Count the residuals: by bin for "histogram", else above each level; not yet private."""
        levels, rows = self.grid.levels, mask.shape[0]
        _check_rows(rows)
        keep = (mask & jnp.isfinite(magnitudes))[:, None]
        bins = jax.nn.one_hot(self.grid.above(magnitudes), levels + 1, dtype=jnp.float32)
        histogram = jnp.sum(jnp.where(keep, bins, 0), axis=0)
        if self.mechanism == "histogram":
            return CountSum((histogram,), (1.0,), rows=rows)
        return MonotoneSum((_tails(histogram),), (levels**0.5,), rows=rows)

    def choose(
        self, key: Key, magnitudes: Float[Array, " m"], mask: Mask, noise: Scalar, adjacency
    ) -> Scalar:
        """Release a level of the grid; `noise` is z, or 1 / epsilon for the sparse vector."""
        total, bound = self.count(magnitudes, mask), self.share * mask.shape[0]
        if self.mechanism == "sparse-vector":
            (counts,), bound = total.parts, bound + self.slack(noise, adjacency)
            return self.grid.values()[sparse_vector(key, counts, bound, 1 / noise)]
        counts = add_noise(key, total, noise, adjacency=adjacency)
        counts = _tails(counts) if self.mechanism == "histogram" else counts
        levels = jnp.arange(self.grid.levels, dtype=jnp.float32)
        return _first(counts <= bound + self.slack(noise, adjacency, levels), self.grid)


def _check_rows(rows: int) -> None:
    if rows > MOST_ROWS:
        remedy = "Count fewer: float32 does not count further, and a level needs no more."
        _check.fail("threshold_rows", f"at most {MOST_ROWS:,}", rows, remedy)


def _tails(histogram: Float[Array, " bins"]) -> Float[Array, " levels"]:
    """Of each level, the count in the bins above it."""
    return jnp.cumsum(histogram[::-1])[-2::-1]


Threshold: TypeAlias = FixedThreshold | PublicThreshold | PrivateThreshold


def _first(enough: Array, grid: Grid) -> Scalar:
    index = jnp.where(jnp.any(enough), jnp.argmax(enough), grid.levels - 1)
    return grid.values()[index]
