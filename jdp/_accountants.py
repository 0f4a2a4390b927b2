"""The three accountants behind `jdp.accounting`, over flattened dp-accounting events.

A *leaf* is an event that is no composition; `(leaf, count)` is the leaf repeated. Noise multipliers
of leaves are in this library's convention: std / L2 sensitivity under the declared adjacency.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant, rdp_privacy_accountant
from scipy import special, stats

from jdp import _check

Event: TypeAlias = dpa.DpEvent
Leaf: TypeAlias = Any
Leaves: TypeAlias = Sequence[tuple[Leaf, int]]

RELATIONS = {
    "zero-out": dpa.NeighboringRelation.REPLACE_SPECIAL,
    "add-remove": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}

_LARGEST_INTERVAL = 512.0  # dp-accounting takes exp of the interval
_MOST_STEPS = 10**7  # dp-accounting composes more of them for minutes or without end
_UNAMPLIFIED = (
    "exact curve of the Gaussian mechanism without amplification: the loss is too large, or the "
    "steps are too many, for this accountant"
)


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    """Log of delta of a Gaussian of multiplier 1 / mu (Balle and Wang 2018, theorem 8).

    It is log(Phi(x) - exp(epsilon) Phi(y)). As y^2 - x^2 is 2 epsilon, scaled tails give the ratio
    of the two terms without the difference of huge numbers that the plain formula takes.
    """
    x, y = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    if x < -1e9:
        return -math.inf
    first, tail = float(special.log_ndtr(x)), float(special.erfcx(-y / math.sqrt(2)))
    if x < 0:
        ratio = tail / float(special.erfcx(-x / math.sqrt(2)))
    else:
        ratio = tail / 2 * math.exp(-x * x / 2 - first)
    return first + math.log1p(-ratio) if ratio < 1 else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon of a Gaussian of multiplier 1 / mu, rounded up."""
    low, high = 0.0, 1.0
    if math.isinf(mu * mu):
        return math.inf
    if mu == 0 or gaussian_log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    while gaussian_log_delta(high, mu) > math.log(delta):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high) and high - low > 1e-14 * high:
        too_small = gaussian_log_delta(middle, mu) > math.log(delta)
        low, high = (middle, high) if too_small else (low, middle)
    return high


def pld_epsilon(leaves: Leaves, delta: float, adjacency: str) -> tuple[float, str]:
    """Compose on a grid of about epsilon / (64 sqrt(steps)), which errs by less than 0.2%.

    The grid needs the answer; each answer is an upper bound, so start from the bound without
    amplification and refine until the answer no longer halves.
    """
    steps = sum(count for _, count in leaves)
    factor = 2.0 if adjacency == "replace-one" else 1.0
    span = max(_largest_loss(leaf) for leaf, _ in leaves)
    bound = gaussian_epsilon(worst_mu(leaves), delta)
    while True:
        if bound == 0:
            return 0.0, "no loss at this delta even without amplification"
        interval = max(bound / (64 * math.sqrt(steps)), span / 2**20)
        if interval >= _LARGEST_INTERVAL or steps > _MOST_STEPS:
            return bound, _UNAMPLIFIED
        interval = 2.0 ** math.floor(math.log2(interval))
        accountant = PLDAccountant(RELATIONS[adjacency], interval)
        for leaf, count in leaves:
            accountant.compose(_scaled(leaf, factor), count)
        found = accountant.get_epsilon(delta)
        if found >= bound / 2 or found == 0:
            return min(found, bound), (
                "privacy loss distributions (connect the dots, pessimistic), "
                f"grid interval {interval:.3g}"
            )
        bound = found


def rdp_epsilon(leaves: Leaves, delta: float, adjacency: str) -> tuple[float, str]:
    """Sum Renyi divergences, whose formulas take std / sensitivity, as our leaves do."""
    orders: Any = rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    total: Any = np.zeros(len(orders))
    try:
        for leaf, count in leaves:
            fixed_size = isinstance(leaf, dpa.SampledWithoutReplacementDpEvent)
            relation = RELATIONS["replace-one" if fixed_size else "add-remove"]
            total += RdpAccountant(orders, relation).compose(leaf, count).rdp
        epsilon = rdp_privacy_accountant.compute_epsilon(orders, total, delta)[0]
    except ArithmeticError:  # extreme noise: the formulas overflow
        return gaussian_epsilon(worst_mu(leaves), delta), _UNAMPLIFIED
    return float(epsilon), (
        "Renyi divergences of orders 1.1 to 1024, converted by Canonne, Kamath and Steinke (2020)"
    )


def untruncated(leaves: Leaves, delta: float, share: float) -> tuple[Leaves, float]:
    """Take truncation off delta where it costs at most `share` of it.

    Whether `capacity` or more of the OTHER records are drawn is independent of the record in
    question. If not, nothing is truncated, in either of two neighbouring worlds; so with beta the
    probability that it ever happens, (epsilon, delta - beta) of the untruncated run gives
    (epsilon, delta) of this one.

    Returns:
      Leaves without the truncations that were taken off, and what is left of delta (maybe <= 0).
    """
    kept, left = [], delta
    for leaf, count in leaves:
        if isinstance(leaf, dpa.TruncatedSubsampledGaussianDpEvent):
            rate, others = leaf.sampling_probability, leaf.dataset_size - 1
            beta = count * float(stats.binom.sf(leaf.truncated_batch_size - 1, others, rate))
            if beta <= share * delta:
                left -= beta
                leaf = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(leaf.noise_multiplier))
        kept.append((leaf, count))
    return kept, left


def flatten(event: Event, count: int = 1) -> Iterator[tuple[Leaf, int]]:
    """Flatten compositions; drop what costs nothing; a sample of everything is no sample.

    Raises:
      ValueError: a number in the event is none that an event can have.
    """
    match event:
        case dpa.NoOpDpEvent():
            return
        case dpa.SelfComposedDpEvent():
            if not _is_count(event.count):
                _check.fail("event", "composed a whole number >= 0 of times", event, _EVENT_REMEDY)
            yield from flatten(event.event, count * int(event.count))
        case dpa.ComposedDpEvent():
            for part in event.events:
                yield from flatten(part, count)
        case dpa.PoissonSampledDpEvent() if event.sampling_probability == 1:
            yield from flatten(event.event, count)
        case _:
            _check_numbers(event)
            if count > 0:
                yield event, count


_EVENT_REMEDY = "Make events with jdp.accounting.dp_sgd_event or a sampler's event method."


def _is_count(value: Any, at_least: int = 0) -> bool:
    return _check.is_static_integer(value) and value >= at_least


def _check_numbers(leaf: Leaf) -> None:
    """Refuse a leaf with a noise multiplier, rate or size that no such leaf can have."""
    z = getattr(getattr(leaf, "event", leaf), "noise_multiplier", 0.0)
    if not _check.is_static_number(z) or not 0 <= z < math.inf:
        expected = "one whose noise multiplier is finite and >= 0"
        _check.fail("event", expected, leaf, _EVENT_REMEDY)
    q = getattr(leaf, "sampling_probability", 1.0)
    if not _check.is_static_number(q) or not 0 < q <= 1:
        expected = "one whose sampling probability is > 0 and <= 1"
        _check.fail("event", expected, leaf, _EVENT_REMEDY)
    sizes = {
        dpa.SampledWithoutReplacementDpEvent: ("source_dataset_size", "sample_size"),
        dpa.TruncatedSubsampledGaussianDpEvent: ("dataset_size", "truncated_batch_size"),
    }.get(type(leaf))
    if sizes is None:
        return
    size, part = (getattr(leaf, name) for name in sizes)
    if not _is_count(size, 1) or not _is_count(part, 1) or part > size:
        expected = "one whose sample is a whole number >= 1 of records, at most all of them"
        _check.fail("event", expected, leaf, _EVENT_REMEDY)


def noise(leaf: Leaf) -> float:
    """The leaf's noise multiplier."""
    if isinstance(leaf, dpa.NonPrivateDpEvent):
        return 0.0
    return getattr(leaf, "event", leaf).noise_multiplier


def rate(leaf: Leaf) -> float:
    """The share of records that takes part in one step."""
    match leaf:
        case dpa.PoissonSampledDpEvent() | dpa.TruncatedSubsampledGaussianDpEvent():
            return leaf.sampling_probability
        case dpa.SampledWithoutReplacementDpEvent():
            return leaf.sample_size / leaf.source_dataset_size
        case _:
            return 1.0


def _scaled(leaf: Leaf, factor: float) -> Leaf:
    """The same event in dp-accounting's units."""
    if isinstance(leaf, dpa.PoissonSampledDpEvent):
        return attr.evolve(leaf, event=_scaled(leaf.event, factor))
    return attr.evolve(leaf, noise_multiplier=leaf.noise_multiplier * factor)


def gaussian_mu(leaves: Leaves) -> float | None:
    """Parameter of the one Gaussian that the leaves amount to, if they do."""
    if not all(isinstance(leaf, dpa.GaussianDpEvent) and noise(leaf) > 0 for leaf, _ in leaves):
        return None
    return worst_mu(leaves)


def worst_mu(leaves: Leaves) -> float:
    """Parameter of the Gaussian that bounds the leaves without amplification, maybe infinite."""
    try:
        return math.hypot(*(math.sqrt(count) * _worst_mu(leaf) for leaf, count in leaves))
    except OverflowError:  # a count beyond the floats
        return math.inf


def _worst_mu(leaf: Leaf) -> float:
    """Mu without amplification; a truncated record also displaces another one."""
    truncated = isinstance(leaf, dpa.TruncatedSubsampledGaussianDpEvent)
    return (2 if truncated else 1) / noise(leaf)


def _largest_loss(leaf: Leaf) -> float:
    """About the largest privacy loss of one step that the grid has to hold."""
    mu = _worst_mu(leaf)
    loss = mu * mu / 2 + 10 * mu
    return float(np.logaddexp(0, math.log(rate(leaf)) + loss))


def check_supported(leaf: Leaf, accountant: str, adjacency: str) -> None:
    """Refuse what the accountant cannot bound under this adjacency."""
    of_gaussian = isinstance(getattr(leaf, "event", None), dpa.GaussianDpEvent)
    poisson = isinstance(leaf, dpa.TruncatedSubsampledGaussianDpEvent) or (
        isinstance(leaf, dpa.PoissonSampledDpEvent) and of_gaussian
    )
    if isinstance(leaf, dpa.GaussianDpEvent | dpa.NonPrivateDpEvent):
        return
    if poisson:
        if accountant == "pld" or adjacency != "replace-one":
            return
        remedy = "Use accountant='pld' for Poisson sampling under replace-one."
    elif isinstance(leaf, dpa.SampledWithoutReplacementDpEvent) and of_gaussian:
        if accountant == "rdp" and adjacency == "replace-one":
            return
        remedy = (
            "Sampling without replacement needs accountant='rdp' and adjacency='replace-one' "
            "(which implies zero-out at the same epsilon); or sample with Poisson."
        )
    else:
        remedy = (
            "Use the events of the table in jdp.accounting; first combine several Gaussians on one "
            "sample with combine_noise_multipliers."
        )
    _check.fail("event", f"one that {accountant!r} bounds under {adjacency!r}", leaf, remedy)
