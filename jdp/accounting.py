"""What a run costs: noise multipliers, dp-accounting events, epsilon, and calibration.

Host code: Python floats in and out, never inside `jit`.

**Noise multiplier.** Everywhere in this library `z = std / L2 sensitivity UNDER THE DECLARED
ADJACENCY`, also inside the events made here. With a per-example clip norm `C`:

| adjacency | neighbours | sensitivity of a clipped sum |
| --- | --- | --- |
| "zero-out" (default) | one record becomes a null record that contributes zero | C |
| "add-remove" | one record more or fewer | C |
| "replace-one" | one record becomes any other | 2 C |

dp-accounting reads `z` as std / C under REPLACE_ONE; the conversion happens here and nowhere else.

**Which accountant.** Without subsampling every accountant but "rdp" gives way to the exact curve of
the Gaussian mechanism (Balle and Wang 2018). "pld" composes privacy loss distributions, rounded
pessimistically on a grid that follows the answer. "rdp" is looser, and there to reproduce
published numbers.

| event | "pld" | "rdp" |
| --- | --- | --- |
| Gaussian | exact | any adjacency |
| Poisson-sampled Gaussian | any adjacency | zero-out, add-remove |
| truncated Poisson-sampled Gaussian | any adjacency | zero-out, add-remove |
| Gaussian on a fixed-size sample without replacement | - | replace-one |
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import dp_accounting as dpa
import numpy as np
from scipy import optimize

from jdp import _accountants, _check
from jdp._typing import Adjacency, NoiseMultiplier

Accountant: TypeAlias = Literal["pld", "rdp"]
Event: TypeAlias = dpa.DpEvent


@dataclasses.dataclass(frozen=True)
class PrivacySpent:
    """An accountant's answer: (epsilon, delta)-differential privacy, and how it was computed.

    Attributes:
      epsilon: an upper bound on the privacy loss; infinite when there is no noise.
      delta: the probability with which the bound may fail.
      adjacency: which data sets count as neighbours.
      accountant: "exact", "pld" or "rdp".
      method: the conversion or discretisation behind the number, for the record.
      mu: the Gaussian differential privacy parameter where the curve is exactly that of one
        Gaussian of multiplier `1 / mu`, else None.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: str
    method: str
    mu: float | None = None


def combine_noise_multipliers(*noise_multipliers: float) -> float:
    """Noise multiplier of the ONE Gaussian that several Gaussians on the same sample amount to.

    `(sum_i z_i^-2)^(-1/2)`. Combine before subsampling: charging each release its own sample
    understates the loss, because both see the same one.

    Args:
      *noise_multipliers: one multiplier a release, each >= 0.

    Returns:
      The joint multiplier; 0 if any is 0.

    >>> round(combine_noise_multipliers(2.0, 2.0), 6)  # 2 / sqrt(2)
    1.414214
    """
    zs = [float(_check.noise_multiplier(z)) for z in noise_multipliers]
    if not zs:
        _check.fail("noise_multipliers", "at least one number", zs, "Pass one a release.")
    return 0.0 if min(zs) == 0 else 1 / math.hypot(*(1 / z for z in zs))


def dp_sgd_event(noise_multiplier: float, *, steps: int, sampling_rate: float = 1.0) -> Event:
    """The event of `steps` Gaussian releases, each on a fresh Poisson sample.

    Args:
      noise_multiplier: std / L2 sensitivity of each release (see the module's convention).
      steps: number of releases, >= 0.
      sampling_rate: probability with which each record takes part in a step, in (0, 1].

    Returns:
      A dp-accounting event, for `privacy_spent`.

    >>> dp_sgd_event(1.0, steps=100, sampling_rate=0.01).count
    100
    """
    noise_multiplier = float(_check.noise_multiplier(noise_multiplier))
    steps = _steps(steps)
    _sampling_rate(sampling_rate)
    event = dpa.GaussianDpEvent(noise_multiplier)
    if sampling_rate < 1:
        event = dpa.PoissonSampledDpEvent(float(sampling_rate), event)
    return dpa.SelfComposedDpEvent(event, steps)


def privacy_spent(
    event: Event,
    *,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "zero-out",
) -> PrivacySpent:
    """Privacy spent by an event, at one delta.

    Args:
      event: a composition of the events in the module's table, whose noise multipliers follow the
        module's convention.
      delta: in (0, 1).
      accountant: "pld" or "rdp".
      adjacency: the neighbouring relation under which the noise multipliers are meant.

    Returns:
      An upper bound on epsilon, with the method that gave it.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot bound the event under this
        adjacency; it never guesses.

    >>> spent = privacy_spent(dp_sgd_event(10.0, steps=100), delta=1e-5)
    >>> spent.accountant, round(spent.epsilon, 5), spent.mu
    ('exact', 4.37718, 1.0)
    """
    delta = _check.delta(delta)
    _check.choice("accountant", accountant, get_args(Accountant))
    _check.choice("adjacency", adjacency, _accountants.RELATIONS)
    leaves = list(_accountants.flatten(event))
    for leaf, _ in leaves:
        _accountants.check_supported(leaf, accountant, adjacency)
    mu = _accountants.gaussian_mu(leaves)
    if any(_accountants.noise(leaf) == 0 for leaf, _ in leaves):
        return PrivacySpent(math.inf, delta, adjacency, "exact", "a release without noise")
    worst = _accountants.worst_mu(leaves)
    if math.isinf(worst * worst):
        method = "the noise is too small for floating-point numbers"
        return PrivacySpent(math.inf, delta, adjacency, "exact", method)
    if mu is not None and accountant == "pld":
        method = "exact curve of the Gaussian mechanism (Balle and Wang 2018)"
        return PrivacySpent(
            _accountants.gaussian_epsilon(mu, delta), delta, adjacency, "exact", method, mu
        )
    share, spend = {
        "pld": (0.01, _accountants.pld_epsilon),
        "rdp": (math.inf, _accountants.rdp_epsilon),
    }[accountant]
    leaves, left = _accountants.untruncated(leaves, delta, share)
    if left <= 0:
        method = "the sample is truncated too often for this delta"
        return PrivacySpent(math.inf, delta, adjacency, accountant, method)
    epsilon_, method = spend(leaves, left, adjacency)
    if left < delta:
        method += f"; {delta - left:.1e} of delta pays for truncated samples"
    return PrivacySpent(max(epsilon_, 0.0), delta, adjacency, accountant, method, mu)


def epsilon(
    noise_multiplier: float,
    *,
    delta: float,
    steps: int = 1,
    sampling_rate: float = 1.0,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "zero-out",
) -> float:
    """Epsilon of `steps` Gaussian releases on Poisson samples.

    Args:
      noise_multiplier: std / L2 sensitivity under `adjacency`; 0 gives infinity.
      delta: in (0, 1).
      steps: number of releases; 0 gives 0.
      sampling_rate: in (0, 1]; 1 gives the exact curve of the Gaussian mechanism.
      accountant: "pld" (tight) or "rdp".
      adjacency: "zero-out", "add-remove" or "replace-one".

    Returns:
      An upper bound on epsilon.

    Raises:
      ValueError: an argument is out of range, or a `NoiseMultiplier` was computed under another
        adjacency.

    >>> round(epsilon(1.1, delta=1e-5, steps=14_062, sampling_rate=256 / 60_000), 2)
    2.38
    """
    z = under_adjacency(noise_multiplier, adjacency)
    event = dp_sgd_event(z, steps=steps, sampling_rate=sampling_rate)
    return privacy_spent(event, delta=delta, accountant=accountant, adjacency=adjacency).epsilon


def under_adjacency(noise_multiplier: float, adjacency: Adjacency) -> NoiseMultiplier:
    """Declare the adjacency under which a noise multiplier is meant.

    Args:
      noise_multiplier: std / L2 sensitivity under `adjacency`, >= 0.
      adjacency: "zero-out", "add-remove" or "replace-one".

    Returns:
      The same number, which now remembers the adjacency.

    Raises:
      ValueError: it already remembers another one.

    >>> under_adjacency(1.5, "replace-one").adjacency
    'replace-one'
    """
    z = float(_check.noise_multiplier(noise_multiplier))
    _check.choice("adjacency", adjacency, _accountants.RELATIONS)
    declared = getattr(noise_multiplier, "adjacency", adjacency)
    if declared != adjacency:
        remedy = f"This noise multiplier was computed under {declared!r}: pass that."
        _check.fail("adjacency", repr(declared), adjacency, remedy)
    return NoiseMultiplier(z, adjacency)


def calibrate_noise_multiplier(
    epsilon: float,
    *,
    delta: float,
    steps: int = 1,
    sampling_rate: float = 1.0,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "zero-out",
) -> NoiseMultiplier:
    """The smallest noise multiplier whose epsilon does not exceed the target.

    Args:
      epsilon: the target, > 0.
      delta: in (0, 1).
      steps: number of releases, >= 1.
      sampling_rate: in (0, 1].
      accountant: "pld" (tight) or "rdp".
      adjacency: "zero-out", "add-remove" or "replace-one".

    Returns:
      A float that remembers `adjacency`. `accounting.epsilon` of it is at most the target.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot reach the target.

    >>> z = calibrate_noise_multiplier(2.0, delta=1e-5, steps=2_500, sampling_rate=0.02)
    >>> round(z, 2), z.adjacency
    (2.14, 'zero-out')
    """
    _steps(steps, at_least=1)
    _sampling_rate(sampling_rate)
    return calibrate_event(
        lambda z: dp_sgd_event(z, steps=steps, sampling_rate=sampling_rate),
        epsilon,
        delta=delta,
        accountant=accountant,
        adjacency=adjacency,
    )


def calibrate_event(
    make_event: Callable[[float], Event],
    epsilon: float,
    *,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "zero-out",
) -> NoiseMultiplier:
    """As `calibrate_noise_multiplier`, for any event that depends on one noise multiplier.

    Args:
      make_event: noise multiplier -> event; more noise must not cost more.
      epsilon: the target, > 0.
      delta: in (0, 1).
      accountant: "pld" or "rdp".
      adjacency: "zero-out", "add-remove" or "replace-one".

    Returns:
      A multiplier whose event costs at most the target, by this very accountant.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot reach the target.
    """
    if not callable(make_event):
        expected = "a function from a noise multiplier to an event"
        remedy = "For example dp_accounting.GaussianDpEvent."
        _check.fail("make_event", expected, make_event, remedy, TypeError)
    remedy = "It is the privacy budget; values between 0.1 and 10 are usual."
    epsilon = _check.number("epsilon", epsilon, above=0, remedy=remedy)

    def gap(log_z: float) -> float:  # log(spent / target): rises to the left, > 0 is too little
        spent = privacy_spent(
            make_event(math.exp(log_z)), delta=delta, accountant=accountant, adjacency=adjacency
        )
        return math.log(min(max(spent.epsilon / epsilon, 1e-3), 1e3))

    delta = _check.delta(delta)
    low = high = _first_guess(list(_accountants.flatten(make_event(1.0))), epsilon, delta)
    step = 0.25
    while gap(high) > 0:
        low, high, step = high, high + step, 2 * step
        if step > 32:
            expected = f"one that {accountant!r} can reach at delta {delta:g}"
            remedy = f"Even a noise multiplier of {math.exp(low):.1e} spends more than that; raise "
            remedy += "epsilon or delta, or use the other accountant."
            _check.fail("epsilon", expected, epsilon, remedy)
    step = 0.25
    while low == high or gap(low) <= 0:
        low, high, step = low - step, low, 2 * step
    log_z = float(optimize.brentq(gap, low, high, xtol=1e-5))  # pyright: ignore
    step = 1e-6
    while gap(log_z) > 0:
        log_z, step = log_z + step, 2 * step
    return NoiseMultiplier(math.exp(log_z), adjacency)


def _first_guess(leaves, epsilon: float, delta: float) -> float:
    """Log of the multiplier that the central limit theorem suggests for the first leaf."""
    if not leaves:
        return 0.0
    leaf, count = leaves[0]

    def excess(log_mu: float) -> float:
        log_delta = _accountants.gaussian_log_delta(epsilon, math.exp(log_mu))
        return max(log_delta, -1e6) - math.log(delta)

    log_mu = float(optimize.brentq(excess, -30.0, 350.0, xtol=1e-3))  # pyright: ignore
    rate = _accountants.rate(leaf)
    log_per_step = 2 * (log_mu - math.log(rate)) - math.log(count)
    if rate < 1 and log_per_step > -30:  # else log(log1p(exp(x))) is x
        log_per_step = math.log(float(np.logaddexp(0, log_per_step)))
    return -0.5 * log_per_step


def _steps(value: int, at_least: int = 0) -> int:
    remedy = "Count optimizer steps as an integer, for example epochs * num_examples // batch_size."
    return _check.integer("steps", value, at_least=at_least, at_most=math.inf, remedy=remedy)


def _sampling_rate(value: float) -> float:
    remedy = "It is batch_size / num_examples; 1.0 means that every step sees every record."
    # Accountants divide by it.
    return _check.number("sampling_rate", value, at_least=1e-100, at_most=1, remedy=remedy)
