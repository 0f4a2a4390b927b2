r"""Amplification by shuffling, for one pass over single records in a secret random order.

Host code. The "clones" bound of Feldman, McMillan and Talwar 2021 (arXiv 2012.12803): if every
step's randomiser is $(\varepsilon_0, \delta_0)$-DP under replace-one for every prefix of outputs,
and depends on its own record, earlier outputs and public data only, then shuffling n records gives
$(\varepsilon, \delta)$ with (theorem 3.8, as in Apple's `ml-shuffling-amplification`)

$$ \varepsilon = \ln\Bigl(1 + A\,\frac{1 - e^{-\varepsilon_0}}{1 + e^{-\varepsilon_0}/(1 + A)}
   \Bigr), \qquad
   A = 8 \sqrt{e^{\varepsilon_0} \ln(4/\delta_1) / n} + 8 e^{\varepsilon_0} / n, $$

if $\varepsilon_0 \le \ln(n / (16 \ln(4/\delta_1)))$. For Gaussian randomisers
$\delta = \delta_1 + (e^\varepsilon + 1)(1 + e^{\varepsilon_0}/2)\, n \delta_0$, if $\delta_0 \le
(1 - e^{-\varepsilon_0}) \delta_1 / (4 e^{\varepsilon_0} (2 + \ln(2/\delta_1) / \ln(1/(1 -
e^{-5 \varepsilon_0}))))$. Both are checked (`most_local_delta`): where no $\varepsilon_0$ fulfils
them the bound is infinite, and not used. Published code has $e^{\pm\varepsilon_0}/2$ in the first;
the larger is used here. The side condition binds for z below about 4; it is the one formula here
that was written from memory of the paper, which is why `shuffling` is off by default.
"""

import math

from scipy import optimize

from jdp import _accountants, _check
from jdp._typing import NoiseMultiplier

_REMEDY = "It is a public number of records, known without looking at the data."


def shuffled_epsilon(noise_multiplier: float, *, delta: float, num_examples: int) -> float:
    r"""Epsilon of one shuffled pass of single-record Gaussians, under replace-one.

    Args:
      noise_multiplier: std / replace-one sensitivity of each step, > 0.
      delta: in (0, 1), for the whole pass.
      num_examples: n, public.

    Returns:
      An upper bound on epsilon; infinity where no choice of $\varepsilon_0$ fulfils the conditions.

    Raises:
      ValueError: an argument is out of range.

    >>> round(shuffled_epsilon(3.5, delta=1e-5, num_examples=10_000), 2)
    0.48
    """
    remedy = "It is the noise's standard deviation over the replace-one sensitivity."
    z = float(_check.number("noise_multiplier", noise_multiplier, above=0, remedy=remedy))
    delta = _check.delta(delta)
    n = _check.integer("num_examples", num_examples, at_least=1, remedy=_REMEDY)
    log_delta_0 = lambda eps: _accountants.gaussian_log_delta(eps, 1 / z)  # noqa: E731
    slack = lambda eps: math.log(most_local_delta(eps, delta, n)) - log_delta_0(eps)  # noqa: E731
    low, high = 1e-6, math.log(n / (16 * math.log(8 / delta)))
    if high <= low or slack(high) < 0:
        return math.inf
    eps_0 = low
    if slack(low) < 0:  # the least that fulfils the conditions: slack rises
        eps_0 = float(optimize.brentq(slack, low, high, xtol=1e-12)) + 1e-11  # pyright: ignore
    return _clones(eps_0, delta / 2, n) if slack(eps_0) >= 0 else math.inf


def most_local_delta(eps_0: float, delta: float, num_examples: int) -> float:
    r"""The largest $\delta_0$ of each step with which the bound holds: the module's two conditions.

    Half of `delta` is $\delta_1$; the other half is what the steps' own $\delta_0$ may add up to.

    Args:
      eps_0: of each step, > 0.
      delta: of the whole pass.
      num_examples: n.
    """
    delta_1 = delta / 2
    epsilon = _clones(eps_0, delta_1, num_examples)
    added = (math.exp(epsilon) + 1) * (1 + math.exp(eps_0) / 2) * num_examples
    clones = 2 + math.log(2 / delta_1) / -math.log1p(-math.exp(-5 * eps_0))
    side = -math.expm1(-eps_0) * delta_1 / (4 * math.exp(eps_0) * clones)
    return min((delta - delta_1) / added, side)


def calibrate_shuffled(
    epsilon: float, *, delta: float, num_examples: int
) -> NoiseMultiplier | None:
    """The least multiplier (under replace-one) of one shuffled pass within a budget.

    Args:
      epsilon: the target, > 0.
      delta: in (0, 1).
      num_examples: n, public.

    Returns:
      A noise multiplier, or None where the bound cannot reach the target.

    >>> z = calibrate_shuffled(0.5, delta=1e-5, num_examples=10_000)
    >>> 3.4 < z < 3.6, shuffled_epsilon(z, delta=1e-5, num_examples=10_000) <= 0.5
    (True, True)
    """
    _check.number("epsilon", epsilon, above=0, remedy="It is the privacy budget.")
    spent = lambda z: shuffled_epsilon(z, delta=delta, num_examples=num_examples)  # noqa: E731
    low, high = 1e-2, 1e4
    if spent(high) > epsilon:
        return None
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return NoiseMultiplier(high, "replace-one")


def _clones(eps_0: float, delta_1: float, n: int) -> float:
    a = 8 * math.sqrt(math.exp(eps_0) * math.log(4 / delta_1) / n) + 8 * math.exp(eps_0) / n
    return math.log1p(a * -math.expm1(-eps_0) / (1 + math.exp(-eps_0) / (1 + a)))
