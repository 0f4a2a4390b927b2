r"""Auditing with one training run (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846)."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float
from scipy import special, stats

from jdp import _check, _confidence


def one_run_p_value(
    correct: int, guesses: int, canaries: int, *, epsilon: float, delta: float
) -> float:
    r"""How likely so many correct guesses are at most, if a run is $(\varepsilon, \delta)$-DP.

    m canaries, each in the data by a fair coin; r guesses which are, m - r abstentions; v correct:

    $$ P(V \ge v) \le \beta + 2 m \delta \max_{1 \le i \le v} \frac{P(v > W \ge v - i)}{i}, \qquad
       \beta = P(W \ge v), \quad W \sim \mathrm{Bin}(r, e^\varepsilon / (1 + e^\varepsilon)) $$

    (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846, theorem 5.2 and appendix D.) For
    randomised response and delta 0 it is exact: each guess is right with that very probability.

    Args:
      correct: v.
      guesses: r, at most m.
      canaries: m.
      epsilon: >= 0, for the relation "one canary in or out" (add-remove or zero-out).
      delta: in [0, 1).

    Returns:
      A probability.

    Raises:
      TypeError, ValueError: a number is out of range.

    >>> round(one_run_p_value(90, 100, 100, epsilon=np.log(4), delta=0.0), 4)  # of Bin(100, 0.8)
    0.0057
    """
    remedy = "Count canaries, guesses among them, and those that were right."
    _check.integer("canaries", canaries, at_least=1, remedy=remedy)
    _check.integer("guesses", guesses, at_least=0, at_most=canaries, remedy=remedy)
    _check.integer("correct", correct, at_least=0, at_most=guesses, remedy=remedy)
    epsilon = _check.number("epsilon", epsilon, at_least=0, remedy="It is the epsilon to test.")
    _check.number("delta", delta, at_least=0, below=1, remedy="Use the delta of the claim.")
    tail = lambda v: stats.binom.sf(v - 1, guesses, special.expit(epsilon))  # noqa: E731
    beta, i = tail(correct), np.arange(1, correct + 1)
    alpha = np.max((tail(correct - i) - beta) / i, initial=0)
    return float(min(1, beta + 2 * canaries * delta * alpha))


@dataclasses.dataclass(frozen=True)
class OneRunAudit:
    """A lower confidence bound on the epsilon of one run.

    Attributes:
      bound: epsilon is at least this, but for the significance; 0 where nothing was found.
      delta: the delta.
      canaries: how many there were.
      guesses: for how many a guess was made.
      correct: how many guesses were right.
      significance: probability with which the bound may be too high.
    """

    bound: float
    delta: float
    canaries: int
    guesses: int
    correct: int
    significance: float


def epsilon_one_run(
    scores: Float[np.ndarray, " m"],
    included: Bool[np.ndarray, " m"],
    *,
    guesses: int,
    delta: float,
    significance: float,
) -> OneRunAudit:
    r"""Bound the epsilon of ONE run from below, by guessing which canaries were in its data.

    Half of the guesses say "in", for the highest scores, half "out", for the lowest; on the rest
    the auditor abstains. The bound is the largest epsilon at which `one_run_p_value` is at most
    the significance. Canaries must not share what they change, or they drown each other: one
    direction of the parameters each is best.

    Args:
      scores: of each canary, higher where it seems to have been in the data; may not depend on
        `included` but through what the run released.
      included: which were in, by independent fair coins tossed BEFORE the run.
      guesses: r, even, at least 2; chosen before looking at the scores.
      delta: in [0, 1).
      significance: probability with which the bound may be too high, in (0, 1).

    Returns:
      A `OneRunAudit`.

    Raises:
      TypeError, ValueError: arrays do not fit, a score is NaN, or a number is out of range.

    >>> rng = np.random.default_rng(0)
    >>> included = rng.random(10_000) < 0.5
    >>> scores = included + rng.normal(size=10_000)  # each canary through a Gaussian with mu = 1
    >>> audit = epsilon_one_run(scores, included, guesses=400, delta=1e-5, significance=0.01)
    >>> audit.correct, round(audit.bound, 2)
    (366, 1.9)
    """
    _confidence.check_significance(significance)
    scores = _confidence.floats("scores", scores, 1, 2)
    if np.isnan(scores).any():
        remedy = "Score a canary whose score is not finite by infinity, one way or the other."
        _check.fail("scores", "free of NaN", scores, remedy)
    expected = f"booleans of shape {scores.shape}, as scores have it"
    included = _check.as_array("included", included, expected)
    if included.dtype != bool or included.shape != scores.shape:
        _check.fail("included", expected, included, "Pass one coin a canary.", TypeError)
    remedy = "Half of them say that a canary was in, half that it was out."
    _check.integer("guesses", guesses, at_least=2, at_most=len(scores), remedy=remedy)
    if guesses % 2:
        _check.fail("guesses", "even", guesses, remedy)
    order = np.argsort(scores, kind="stable")
    ins, outs = order[-(guesses // 2) :], order[: guesses // 2]
    correct = int(included[ins].sum() + (~included[outs]).sum())
    counted = correct, guesses, len(scores)
    bound = _largest_refuted(counted, delta, significance)
    return OneRunAudit(bound, float(delta), len(scores), guesses, correct, significance)


def _largest_refuted(counted: tuple[int, int, int], delta: float, significance: float) -> float:
    """The epsilon up to which so many correct guesses would be too unlikely, by bisection."""

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(*counted, epsilon=epsilon, delta=delta) <= significance

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
