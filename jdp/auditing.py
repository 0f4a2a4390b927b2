r"""Auditing: lower confidence bounds on epsilon, from what a mechanism released.

Host code, which knows nothing of the mechanism. An audit can refute a claim and never prove one: a
bound above the claimed epsilon shows that the claim is false (but for the stated significance), a
bound below it shows what this attack could do.

| audit | runs | score | sound for |
| --- | --- | --- | --- |
| `epsilon_many_runs` | thousands with a record, thousands without | one a run | any mechanism |
| `mu_many_runs` | the same | the same | a claim of mu-Gaussian DP |
| `epsilon_one_run` | one, with many canaries, each in it by a coin | one a canary | any mechanism |

If a mechanism is $(\varepsilon, \delta)$-DP, every event E has
$P(E) \le e^\varepsilon P'(E) + \delta$ on neighbouring data sets (Dwork et al. 2006). Draws give
confidence bounds on both sides (Clopper and Pearson 1934), hence one on epsilon (Jagielski, Ullman
and Oprea 2020; Nasr et al. 2021). The event is "the score is at or above a threshold" under the
data set with the record, or "below it" under the one without; which of them, and the threshold, is
chosen on the first half of the draws, and the bound comes from the second half alone.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import special, stats

from jdp import _check
from jdp._confidence import LEAST, MORE, check_significance, floats
from jdp._confidence import lower_confidence as lower_confidence
from jdp._confidence import upper_confidence as upper_confidence
from jdp.one_run import OneRunAudit as OneRunAudit
from jdp.one_run import epsilon_one_run as epsilon_one_run
from jdp.one_run import one_run_p_value as one_run_p_value

_RIDGE = 1e-6  # in units of a coordinate's variance: noise far below it counts as none
_TAILS = 32  # numbers of draws beyond a threshold that are tried, on either side


@dataclasses.dataclass(frozen=True)
class Audit:
    """A lower confidence bound on epsilon or mu, and the event that it rests on.

    Attributes:
      bound: the parameter is at least this, but for the significance; 0 where nothing was found.
      delta: for which epsilon is bounded; None for mu.
      threshold: of the score.
      above: whether the event is "score >= threshold", likely where the record is present, or
        "score < threshold", likely where it is absent.
      likely: how often the event happened where it is likely, among `trials[0]` draws.
      unlikely: how often it happened on the neighbour, among `trials[1]`.
      trials: draws of the second halves.
      significance: probability with which the bound may be too high.
    """

    bound: float
    delta: float | None
    threshold: float
    above: bool
    likely: int
    unlikely: int
    trials: tuple[int, int]
    significance: float

    def power(self, claimed: float) -> float:
        """Return a lower confidence bound on how often a repetition would refute a claim.

        A repetition draws new second halves, keeps the threshold, and refutes a claim that is below
        its own bound. How often depends on the event's two probabilities, which are taken at their
        confidence bounds, the less favourable way: the answer holds but for the significance.

        Args:
          claimed: epsilon at `delta`, or mu.

        Returns:
          A probability.

        >>> rng = np.random.default_rng(0)
        >>> with_record, without = rng.normal(3, 1, 4000), rng.normal(0, 1, 4000)
        >>> audit = mu_many_runs(with_record, without, significance=0.01)
        >>> round(audit.bound, 2), round(audit.power(2.0), 3), round(audit.power(3.0), 3)
        (2.77, 1.0, 0.0)
        """
        _check.number("claimed", claimed, at_least=0, remedy="It is what the mechanism claims.")
        half = self.significance / 2
        p = lower_confidence(self.likely, self.trials[0], half)
        q = upper_confidence(self.unlikely, self.trials[1], half)
        low, high = stats.binom.interval(1 - 1e-9, self.trials[1], q)
        counts = np.arange(int(low), int(high) + 1)
        allowed = _allowed(upper_confidence(counts, self.trials[1], half), claimed, self.delta)
        needed = stats.binom.isf(half, self.trials[0], allowed) + 1
        refuted = np.where(allowed < 1, stats.binom.sf(needed - 1, self.trials[0], p), 0)
        return float(np.sum(stats.binom.pmf(counts, self.trials[1], q) * refuted))


def epsilon_many_runs(
    present: Float[np.ndarray, " n"],
    absent: Float[np.ndarray, " m"],
    *,
    delta: float,
    significance: float,
) -> Audit:
    r"""Bound epsilon from below by scores of independent runs on two neighbouring data sets.

    $\ln((\underline{P}(E) - \delta) / \overline{P'}(E))$, with Clopper-Pearson bounds at half of
    the significance each. With n draws in each second half no bound exceeds about
    $\ln(n / \ln(2 / \text{significance}))$, so that large epsilons at tiny delta stay out of reach;
    a larger delta, or `mu_many_runs` where the claim is a Gaussian, tells more.

    Args:
      present: scores of runs on the data with the record; higher should mean that it is there. May
        be infinite. The first half, by position, chooses the event.
      absent: scores of runs on the data without it.
      delta: in [0, 1).
      significance: probability with which the bound may be too high, in (0, 1).

    Returns:
      An `Audit` of epsilon.

    Raises:
      TypeError, ValueError: scores are not vectors of at least four numbers, one is NaN, or a
        number is out of range.

    >>> rng = np.random.default_rng(0)  # the Laplace mechanism, of epsilon 1
    >>> present, absent = rng.laplace(1, 1, 100_000), rng.laplace(0, 1, 100_000)
    >>> audit = epsilon_many_runs(present, absent, delta=0.0, significance=0.01)
    >>> round(audit.bound, 2)
    0.97
    """
    _check.number("delta", delta, at_least=0, below=1, remedy="Use the delta of the claim.")
    return _audit(present, absent, float(delta), significance)


def mu_many_runs(
    present: Float[np.ndarray, " n"], absent: Float[np.ndarray, " m"], *, significance: float
) -> Audit:
    r"""Bound mu of Gaussian differential privacy from below, as `epsilon_many_runs`.

    $\Phi^{-1}(\underline{P}(E)) - \Phi^{-1}(\overline{P'}(E))$ (Dong, Roth and Su 2022; used for
    audits by Nasr et al. 2023). It refutes the claim that the mechanism is at most as revealing as
    N(mu, 1) against N(0, 1), which is what one Gaussian of noise multiplier 1/mu claims, at every
    epsilon at once; so events of middling probability count, and far fewer runs are needed.

    Args:
      present: as in `epsilon_many_runs`.
      absent: as in `epsilon_many_runs`.
      significance: as in `epsilon_many_runs`.

    Returns:
      An `Audit` of mu.

    Raises:
      TypeError, ValueError: as in `epsilon_many_runs`.

    >>> rng = np.random.default_rng(0)
    >>> present, absent = rng.normal(1, 1, 100_000), rng.normal(0, 1, 100_000)
    >>> round(mu_many_runs(present, absent, significance=0.01).bound, 2)
    0.96
    """
    return _audit(present, absent, None, significance)


def _audit(present: Any, absent: Any, delta: float | None, significance: float) -> Audit:
    check_significance(significance, 4 * LEAST)  # it is shared out
    present, absent = (
        floats(name, value, 1, 4) for name, value in (("present", present), ("absent", absent))
    )
    for name, value in (("present", present), ("absent", absent)):
        if np.isnan(value).any():
            remedy = "Score what is not finite as an event of its own (gaussian_score does)."
            _check.fail(name, "free of NaN", value, remedy)
    pilots = [np.sort(first_half(value)) for value in (present, absent)]
    rest = [np.sort(second_half(value)) for value in (present, absent)]
    thresholds = _candidates(np.sort(np.concatenate(pilots)))
    # The best of many is partly luck, mostly that of rare events; wider intervals discourage it.
    wide = max(significance**2, 4 * LEAST)
    options = [
        (_bound(*_counts(pilots, thresholds, above), delta, wide), above) for above in (True, False)
    ]
    bounds, above = max(options, key=lambda option: option[0].max())
    threshold = thresholds[int(bounds.argmax())]
    likely, unlikely, trials = _counts(rest, threshold, above)
    bound = float(_bound(likely, unlikely, trials, delta, significance))
    chosen = float(threshold), above, int(likely), int(unlikely)
    return Audit(max(bound, 0.0), delta, *chosen, trials, significance)


def _candidates(pooled: np.ndarray) -> np.ndarray:
    """Thresholds with numbers of draws beyond them that grow geometrically from either end."""
    tails = np.unique(np.geomspace(1, len(pooled) / 2, _TAILS).astype(int))
    return np.unique(pooled[np.concatenate([tails - 1, len(pooled) - tails, [len(pooled) // 2]])])


def _counts(halves: list[np.ndarray], threshold: Any, above: bool) -> tuple[Any, Any, Any]:
    """How often the event happened where it is likely and on the neighbour, and the trials."""
    present, absent = halves
    below = [np.searchsorted(half, threshold) for half in halves]
    if above:
        return len(present) - below[0], len(absent) - below[1], (len(present), len(absent))
    return below[1], below[0], (len(absent), len(present))


def _bound(likely, unlikely, trials, delta: float | None, significance: float) -> Any:
    p = lower_confidence(likely, trials[0], significance / 2)
    q = upper_confidence(unlikely, trials[1], significance / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        if delta is None:
            return special.ndtri(p) - special.ndtri(q)
        return np.where(p > delta, np.log((p - delta) / q), -math.inf)


def _allowed(unlikely: Any, claimed: float, delta: float | None) -> Any:
    """The largest probability that a claim allows an event that is this unlikely."""
    if delta is None:
        return special.ndtr(special.ndtri(unlikely) + claimed)
    return np.minimum(1, np.exp(np.minimum(0, claimed + np.log(unlikely))) + delta)


def first_half(draws: np.ndarray) -> np.ndarray:
    """The draws that choose the score and the event."""
    return draws[: _count(draws) // 2]


def second_half(draws: np.ndarray) -> np.ndarray:
    """The draws that the bound is taken from."""
    return draws[_count(draws) // 2 :]


def _count(draws: np.ndarray) -> int:
    expected = "an array with a draw a row"
    if not _check.as_array("draws", draws, expected).ndim:
        _check.fail("draws", expected, draws, MORE, TypeError)
    return len(draws)


def gaussian_score(
    present: Float[np.ndarray, "n d"], absent: Float[np.ndarray, "m d"]
) -> Callable[[Float[np.ndarray, "k d"]], Float[np.ndarray, " k"]]:
    r"""Fit the log-likelihood ratio of two Gaussians, the best score where releases are Gaussian.

    $\frac12 (x - m_0)^\top \Sigma_0^{-1} (x - m_0) - \frac12 (x - m_1)^\top \Sigma_1^{-1}(x - m_1)$
    up to a constant. With equal covariances it is the projection on the direction in which the
    record moves the release, in units of the noise; where the record changes the noise it sees that
    too. A direction without noise counts as one with a thousandth of the coordinate's spread, and a
    release that is not finite as a sign of whichever data set has more of them. Whatever the fit,
    an audit by this score is sound, if the draws that it was fitted to are not those that the bound
    is taken from: use `first_half` of all draws.

    Args:
      present: releases with the record, one a row; at least d + 2.
      absent: releases without it.

    Returns:
      A function from releases to scores, free of NaN.

    Raises:
      TypeError, ValueError: the arguments are not matrices of the same width, or have too few rows.

    >>> rng = np.random.default_rng(0)
    >>> present, absent = rng.normal(size=(2, 4000, 3))
    >>> present[:, 0] += 1
    >>> score = gaussian_score(first_half(present), first_half(absent))
    >>> scores = score(present), score(absent)
    >>> round(mu_many_runs(*scores, significance=0.01).bound, 1)
    0.8
    """
    present, absent = (
        floats(name, value, 2, 2) for name, value in (("present", present), ("absent", absent))
    )
    if present.shape[1] != absent.shape[1]:
        expected = f"of shape (m, {present.shape[1]}), as present has it"
        _check.fail("absent", expected, absent, "Flatten both releases the same way.")
    finite = [draws[np.isfinite(draws).all(axis=1)] for draws in (present, absent)]
    broken = [
        1 - len(kept) / len(draws) for kept, draws in zip(finite, (present, absent), strict=True)
    ]
    verdict = math.inf if broken[0] > broken[1] else -math.inf
    if min(map(len, finite)) < present.shape[1] + 2:
        if max(broken) == 0:
            expected = f"at least {present.shape[1] + 2} rows, for a covariance"
            _check.fail("present", expected, present, MORE)
        return lambda draws: np.where(np.isfinite(_rows(draws)).all(axis=1), 0.0, verdict)
    variance = (finite[0].var(axis=0) + finite[1].var(axis=0)) / 2
    largest = variance.max()
    spread = np.sqrt(np.where(variance > 1e-12 * largest, variance, largest or 1.0))
    parts = [_fit(draws / spread) for draws in finite]

    def score(draws: np.ndarray) -> np.ndarray:
        draws = _rows(draws)
        whole: Any = np.isfinite(draws).all(axis=1)
        scaled = np.where(whole[:, None], draws, 0) / spread
        with_, without = (
            np.sum(((scaled - mean) @ root) ** 2, axis=1) - constant
            for mean, root, constant in parts
        )
        return np.where(whole, (without - with_) / 2, verdict)

    return score


def _rows(draws: Any) -> np.ndarray:
    return np.asarray(draws, np.float64)


def _fit(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean, inverse root of the covariance with a ridge, and the logarithm of its determinant."""
    covariance = np.cov(draws, rowvar=False).reshape(draws.shape[1], -1)
    values, vectors = np.linalg.eigh(covariance + _RIDGE * np.eye(len(covariance)))
    values = np.maximum(values, _RIDGE / 2)
    return draws.mean(axis=0), vectors / np.sqrt(values), -float(np.log(values).sum())
