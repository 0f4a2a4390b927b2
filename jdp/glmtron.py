r"""GLMtron and gradient descent for ReLU regression, private or not, as `lax.scan` programs.

The model is $y = \mathrm{ReLU}(w^* \cdot x) + \text{noise}$; the contribution of one record at w is

$$ v = \mathrm{clip}(\mathrm{ReLU}(w \cdot x) - y, -s, s)\; g\; x \min(1, R/|x|), $$

with $g = 1$ for GLMtron (Kakade et al. 2011, arXiv 1104.2018: the gradient of the convex surrogate
$\int_0^{w \cdot x} (\mathrm{ReLU}(t) - y)\,dt$), and $g = 1[w \cdot x > 0]$ for the true gradient
of half the squared loss, which is zero at w = 0. All contributions get the factors of
`jdp.clip_by_norm(R s)`, so that a sum has sensitivity R s whatever the arithmetic above does.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdp import _check, _tree
from jdp._typing import Mask, Scalar
from jdp.clipping import ClippedSum, clip_by_norm

Gradient: TypeAlias = Literal["surrogate", "true", "switch"]
Clip: TypeAlias = Literal["residual", "vector"]
Decay: TypeAlias = Literal["constant", "halving"]
Average: TypeAlias = Literal["tail", "all", "last"]


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Descent:
    """How to descend; public, and a pytree whose numbers may be traced.

    Attributes:
      learning_rate: eta > 0, of a step on the MEAN contribution. With |x| about 1, good values are
        one to four times the number of features, for large blocks.
      feature_bound: R > 0; each x is scaled down to this norm, always.
      radius: W > 0; iterates are projected to this ball. Infinity means no projection.
      gradient: "surrogate" (GLMtron); "true"; or "switch": the surrogate for the first half of the
        steps, which does not stall, then the true gradient, whose estimate has half the variance.
      clip: "residual" as above, or "vector": (ReLU(w.x) - y) g x as a whole, to norm R s.
      decay: "constant", or "halving" every T / log2(T) steps (Wu et al. 2023).
      average: of the iterates: "tail" (the second half), "all" as in the papers, or "last".

    Raises:
      ValueError: a number is out of range or a choice unknown.
    """

    learning_rate: Scalar = 1.0
    feature_bound: Scalar = 1.0
    radius: Scalar = math.inf
    gradient: Gradient = _static("surrogate")
    clip: Clip = _static("residual")
    decay: Decay = _static("constant")
    average: Average = _static("tail")

    def __post_init__(self):
        """Validate what is static."""
        remedy = "Choose it without looking at private data."
        for name in ("learning_rate", "feature_bound", "radius"):
            value = getattr(self, name)
            if _check.is_static_number(value) or isinstance(value, str | bytes):
                finite = name == "learning_rate"
                _check.number(name, value, above=0, finite=finite, remedy=remedy)
        for name, kind in (
            ("gradient", Gradient),
            ("clip", Clip),
            ("decay", Decay),
            ("average", Average),
        ):
            _check.choice(name, getattr(self, name), get_args(kind))

    def rates(self, steps: int) -> Float[Array, " t"]:
        """The learning rate of every step."""
        halvings = jnp.arange(steps) // max(1, round(steps / max(1.0, math.log2(steps))))
        exponent = -halvings if self.decay == "halving" else 0 * halvings
        return self.learning_rate * 2.0 ** exponent.astype(jnp.float32)

    def is_true(self, t: Int[Array, ""], steps: int) -> bool | Bool[Array, ""]:
        """Whether step t of `steps` uses the true gradient."""
        return t >= steps // 2 if self.gradient == "switch" else self.gradient == "true"

    def shares(self, steps: int) -> Float[Array, " t"]:
        """The weight of every iterate in the average."""
        first = {"tail": steps // 2, "all": 0, "last": steps - 1}[self.average]
        return jnp.where(jnp.arange(steps) < first, 0.0, 1 / (steps - first))


def predict(w: Float[Array, " d"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
    """The model, ReLU(x w).

    >>> print(predict(jnp.array([1.0, -2.0]), jnp.array([[3.0, 1.0], [1.0, 1.0]])))
    [1. 0.]
    """
    _check.floating("x", x, ("n", "d"), remedy="Give the features of one record a row.")
    _check.floating("w", w, x.shape[1:], remedy="Give one weight for each feature.")
    return jax.nn.relu(jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST))


class Records(NamedTuple):
    """Records made ready once for many sums; where x is not finite, x is 0, y and norm are NaN.

    Attributes:
      x: (n, d) features, float32 or wider.
      y: (n,) labels.
      norms: (n,) norms of the rows of x, in units of R.
    """

    x: Float[Array, "n d"]
    y: Float[Array, " n"]
    norms: Float[Array, " n"]

    def take(self, rows: Int[Array, " m"]) -> "Records":
        """Some of the records."""
        return Records(*(part[rows] for part in self))


def records(x: Float[Array, "n d"], y: Float[Array, " n"], descent: Descent) -> Records:
    """Measure the records; a norm that overflows counts as not finite.

    Entries below 1e-15 R become zero: a product with one could be large though its square is lost.
    """
    _check.floating("x", x, ("n", "d"), remedy="Give the features of one record a row.")
    _check.floating("y", y, x.shape[:1], remedy="Give one label for each record.")
    if not isinstance(descent, Descent):
        _check.fail("descent", "a Descent", descent, "Make one: Descent(learning_rate).", TypeError)
    x, y, bound = _tree.wide(x), _tree.wide(y), descent.feature_bound
    dtype = jnp.result_type(x, y, bound)  # one for all, which loops carry
    x, y = x.astype(dtype), y.astype(dtype)
    least = 1e-15 * jnp.where(jnp.isinf(bound), 0, bound)
    x = jnp.where(jnp.abs(x) < least, 0, x)
    norms = jnp.sqrt(_tree.squared_norms([x], bound))
    finite = jnp.isfinite(norms) & jnp.all(jnp.isfinite(x), axis=1)
    y, norms = (jnp.where(finite, part, jnp.nan) for part in (y, norms))
    return Records(jnp.where(finite[:, None], x, 0), y, norms)


def coefficients(
    w: Float[Array, " d"], data: Records, s: Scalar, descent: Descent, true: bool | Bool[Array, ""]
) -> Float[Array, " n"]:
    """What each record's x is multiplied with, up to the last clip (see the module's formula)."""
    # w comes first: mapped over many w, the product then has the layout of what follows.
    score = jnp.matmul(w, data.x.T, precision=jax.lax.Precision.HIGHEST)
    residual = jax.nn.relu(score) - data.y
    residual = jnp.where(jnp.isfinite(residual), residual, jnp.nan)  # dropped, not clipped
    if descent.clip == "residual":
        residual = jnp.clip(residual, -s, s) * jnp.minimum(1, 1 / data.norms)
    return jnp.where((score <= 0) & true, 0, residual)


def clipped_sum(
    w: Float[Array, " d"],
    data: Records,
    mask: Mask,
    s: Scalar,
    descent: Descent,
    true: bool | Bool[Array, ""] = False,
) -> ClippedSum:
    r"""The sum of the contributions, not yet private; noise scale R s.

    **Guarantee.** As `jdp.clip_by_norm(R s)`, whose factors these are: contributions $c_i x_i$ are
    never written out, as their norms are $|c_i| |x_i|$.

    Args:
      w: (d,) the iterate.
      data: n records.
      mask: (n,) False for padding.
      s: the threshold.
      descent: R, and how to clip.
      true: whether to use the true gradient.
    """
    clipper = clip_by_norm(descent.feature_bound * s)
    c = coefficients(w, data, s, descent, true)
    (factors,), keep = clipper.factors([(c / s * data.norms) ** 2], mask)
    total, rounding = _add_up(jnp.where(keep, c * factors, 0), data.x)
    return clipper.clipped_sum(total, rows=mask.shape[0], rounding=rounding)


def _add_up(c: Float[Array, " n"], x: Float[Array, "n d"]) -> tuple[Float[Array, " d"], float]:
    r"""The sum of c_i x_i over rows of norm at most 1, and what its rounding adds to sensitivity.

    A chunk of $m \le \sqrt n$ rows is one product, which adds them in an order of its own: its
    error is at most u m^2 in each of the two neighbours. Chunks are added in pairs.
    """
    n, d = x.shape
    chunk = max(1, math.isqrt(n))
    whole = n - n % chunk
    chunks = c[:whole].reshape(-1, chunk), x[:whole].reshape(-1, chunk, d)
    sums = jnp.einsum("kc,kcd->kd", *chunks, precision=jax.lax.Precision.HIGHEST)
    rest = jnp.matmul(c[whole:], x[whole:], precision=jax.lax.Precision.HIGHEST)
    rounding = 2 * 2.0**-24 * chunk**2 + _tree.rounding(n)
    return _tree.pairwise_sum(jnp.concatenate([sums, rest[None]])), rounding
