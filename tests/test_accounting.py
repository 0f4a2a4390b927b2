"""Every number is closed-form, published, or dp-accounting's own at its default grid."""

import copy
import math
import pickle

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jdp import accounting
from jdp._typing import NoiseMultiplier
from jdp.accounting import calibrate_noise_multiplier, dp_sgd_event, epsilon, privacy_spent

few = settings(max_examples=10, deadline=None, derandomize=True)

# q, sigma, steps, delta, RDP, PLD; None: not published
PUBLISHED = [
    (256 / 60000, 1.1, 14062, 1e-5, 2.597, 2.382),
    (256 / 60000, 1.3, 3515, 1e-5, 0.954, 0.865),
    (150 / 60000, 1.3, 6000, 1e-5, 0.7242234026, None),
    (0.001, 1.0, 30000, 1e-7, 1.4154988495, None),
    (1, 0.7, 2, 1e-5, 10.8602036, 10.1224946),
    (0.01, 1, 300, 1e-5, 1.4514, 1.068),
    (1, 10, 100, 1e-5, None, 4.377178),
    (1, 1, 1, 1e-5, None, 4.377178),
    (0.001, 50, 10000, 1e-5, 0.0056, None),
]


def tolerance(published: float) -> float:
    """Half a unit of the last printed digit, plus what the grid may add."""
    digits = len(repr(published).split(".")[1])
    return 0.6 * 10**-digits + 5e-4 * published


@pytest.mark.parametrize(("q", "sigma", "steps", "delta", "rdp", "pld"), PUBLISHED)
def test_published_numbers(q, sigma, steps, delta, rdp, pld):
    run = dict(delta=delta, steps=steps, sampling_rate=q)
    found = {name: epsilon(sigma, **run, accountant=name) for name in ("rdp", "pld")}
    if rdp is not None:
        assert found["rdp"] == pytest.approx(rdp, abs=0.6 * 10 ** -len(str(rdp).split(".")[1]))
    if pld is not None:
        assert found["pld"] == pytest.approx(pld, abs=tolerance(pld))
    assert found["pld"] <= found["rdp"]


def test_classic_conversion_of_abadi_et_al_is_looser():
    """1.26 was printed for (0.01, 4, 10000, 1e-5): epsilon = rdp + log(1/delta) / (order - 1)."""
    accountant = dpa.rdp.RdpAccountant()
    accountant.compose(dp_sgd_event(4.0, steps=10000, sampling_rate=0.01))
    classic = np.min(accountant.rdp + math.log(1e5) / (accountant.orders - 1))
    assert classic == pytest.approx(1.2586, abs=1e-4)
    run = dict(delta=1e-5, steps=10000, sampling_rate=0.01)
    assert epsilon(4.0, **run) < epsilon(4.0, **run, accountant="rdp") < classic


def test_exact_gaussian():
    event = dpa.GaussianDpEvent(1.0)
    assert privacy_spent(event, delta=0.12693674).epsilon == pytest.approx(1.0, abs=1e-7)
    # delta(0) = 2 Phi(mu / 2) - 1
    at_zero = 2 * stats.norm.cdf(0.5) - 1
    assert privacy_spent(event, delta=at_zero * (1 + 1e-9)).epsilon == 0
    assert 0 < privacy_spent(event, delta=at_zero * (1 - 1e-6)).epsilon < 1e-5


@pytest.mark.parametrize(
    ("target", "exact", "delta_of_classical"),
    [(0.05, 57.77, 1.3e-9), (1, 3.731, 4.1e-8), (8, 0.6002, 8e-6), (10, 0.4999, 2.3e-5),
     (64, 0.1267, 0.95)],
)  # fmt: skip
def test_exact_calibration_and_not_the_classical_formula(target, exact, delta_of_classical):
    assert calibrate_noise_multiplier(target, delta=1e-5) == pytest.approx(exact, rel=3e-4)
    classical = math.sqrt(2 * math.log(1.25e5)) / target
    spent = epsilon(classical, delta=delta_of_classical)
    assert spent == pytest.approx(target, rel=0.03, abs=0.01)


@pytest.mark.parametrize("target", [1e-3, 0.1, 1, 10, 50, 500])
@pytest.mark.parametrize(("q", "steps"), [(1.0, 100), (0.01, 1000), (0.1, 1)])
def test_calibration_stays_within_the_target_and_close_to_it(target, q, steps):
    run = dict(delta=1e-5, steps=steps, sampling_rate=q)
    z = calibrate_noise_multiplier(target, **run)
    assert 0.99 * target <= epsilon(z, **run) <= target


@pytest.mark.slow
@pytest.mark.parametrize("target", [1e-3, 1, 500])
def test_calibration_of_long_runs(target):
    run = dict(delta=1e-5, steps=10_000, sampling_rate=0.001)
    z = calibrate_noise_multiplier(target, **run)
    assert 0.99 * target <= epsilon(z, **run) <= target


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta", "z"),
    [(2, 0.02, 2500, 1e-5, 2.143), (8, 0.02, 10000, 1e-5, 1.389),
     (2, 1000 / 60000, 3000, 1e-5, 1.977), (2, 0.00165, 3021, 1e-6, 0.685),
     (8, 0.00165, 12087, 1e-6, 0.523)],
)  # fmt: skip
def test_noise_multipliers_of_the_gep_settings(target, q, steps, delta, z):
    run = dict(delta=delta, steps=steps, sampling_rate=q)
    assert calibrate_noise_multiplier(target, **run) == pytest.approx(z, rel=2e-3)


def test_two_releases_on_one_sample_are_one_gaussian():
    """Twice the RDP of one subsampled release understates: SVHN was run at 0.87 for epsilon 2."""
    joint = accounting.combine_noise_multipliers(0.87, 0.87)
    assert joint == pytest.approx(0.87 / math.sqrt(2))
    run = dict(delta=1e-6, steps=3021, sampling_rate=0.00165)
    assert epsilon(joint, **run) == pytest.approx(3.06, abs=0.01)
    accountant = dpa.rdp.RdpAccountant()
    accountant.compose(dp_sgd_event(0.87, steps=2 * 3021, sampling_rate=0.00165))
    assert accountant.get_epsilon(1e-6) < 2.1


def test_combining():
    assert accounting.combine_noise_multipliers(1.5) == pytest.approx(1.5)
    assert accounting.combine_noise_multipliers(1.0, 0) == 0
    with pytest.raises(ValueError, match="noise_multipliers"):
        accounting.combine_noise_multipliers()


@few
@given(
    st.floats(0.6, 5.0), st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([1, 30]),
    st.sampled_from([1e-7, 1e-5, 1e-3]),
)  # fmt: skip
def test_monotone(z, q, steps, delta):
    run = dict(delta=delta, steps=steps, sampling_rate=q)
    spent, slack = epsilon(z, **run), 1 + 4e-3
    assert epsilon(1.1 * z, **run) <= slack * spent
    assert epsilon(z, **{**run, "delta": delta * 2}) <= slack * spent
    assert spent <= slack * epsilon(z, **{**run, "steps": 2 * steps})
    assert spent <= slack * epsilon(z, **{**run, "sampling_rate": min(1.0, 2 * q)})
    assert spent == epsilon(z, **run)  # and asking again changes nothing
    assert spent <= slack * epsilon(z, **run, accountant="rdp")


def test_composition_is_additive_over_any_split():
    def spent(*parts, accountant):
        events = [dp_sgd_event(1.0, steps=steps, sampling_rate=0.01) for steps in parts]
        event = dpa.ComposedDpEvent(events)
        return privacy_spent(event, delta=1e-5, accountant=accountant).epsilon

    for accountant, rel in (("rdp", 1e-12), ("pld", 1e-3)):
        whole = spent(100, accountant=accountant)
        assert spent(37, 63, accountant=accountant) == pytest.approx(whole, rel=rel)
        assert spent(10, 0, 90, accountant=accountant) == pytest.approx(whole, rel=rel)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("q", [0.01, 1.0])
def test_limits(accountant, q):
    run = dict(delta=1e-5, sampling_rate=q, accountant=accountant)
    assert epsilon(0.0, **run) == math.inf
    assert epsilon(1.0, steps=0, **run) == 0
    assert epsilon(0.0, steps=0, **run) == 0
    assert privacy_spent(dpa.NoOpDpEvent(), delta=1e-5, accountant=accountant).epsilon == 0


def test_full_sample_equals_plain_gaussian():
    plain = privacy_spent(dpa.GaussianDpEvent(1.0), delta=1e-5)
    assert epsilon(10.0, delta=1e-5, steps=100, sampling_rate=1) == pytest.approx(plain.epsilon)
    poisson = dpa.PoissonSampledDpEvent(1.0, dpa.GaussianDpEvent(1.0))
    assert privacy_spent(poisson, delta=1e-5) == plain
    assert plain.mu == 1.0


@pytest.mark.parametrize("adjacency", ["zero-out", "add-remove", "replace-one"])
def test_noise_multiplier_is_std_over_sensitivity_under_every_adjacency(adjacency):
    """The un-subsampled curve is that of N(0, z^2) against N(1, z^2), whatever the adjacency."""
    for accountant, expected in (("pld", 4.377178), ("rdp", 4.728507)):
        found = epsilon(1.0, delta=1e-5, accountant=accountant, adjacency=adjacency)
        assert found == pytest.approx(expected, abs=1e-5)
    # composed with a subsampled step so that PLD itself is used; a rate near 1 changes little
    event = dpa.PoissonSampledDpEvent(1 - 1e-9, dpa.GaussianDpEvent(1.0))
    spent = privacy_spent(event, delta=1e-5, adjacency=adjacency)
    assert spent.accountant == "pld"
    assert spent.epsilon == pytest.approx(4.377178, rel=1e-3)


def test_replace_one_with_poisson_sampling():
    """dp-accounting reads std / clip norm, twice our multiplier; it costs more than zero-out."""
    run = dict(delta=1e-5, steps=100, sampling_rate=0.1)
    ours = epsilon(1.0, **run, adjacency="replace-one")
    oracle = PLDAccountant(dpa.NeighboringRelation.REPLACE_ONE, 1e-4)
    oracle.compose(dp_sgd_event(2.0, steps=100, sampling_rate=0.1))
    assert ours == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)
    same_noise = epsilon(2.0, **run, adjacency="zero-out")  # std 2 C, sensitivity C
    assert ours > same_noise
    with pytest.raises(ValueError, match="accountant='pld'"):
        epsilon(1.0, **run, adjacency="replace-one", accountant="rdp")


def test_without_replacement_needs_rdp_and_replace_one():
    sample = dpa.SampledWithoutReplacementDpEvent(10_000, 100, dpa.GaussianDpEvent(1.0))
    event = dpa.SelfComposedDpEvent(sample, 100)
    for accountant, adjacency in (("pld", "replace-one"), ("rdp", "zero-out")):
        with pytest.raises(ValueError, match="without replacement"):
            privacy_spent(event, delta=1e-5, accountant=accountant, adjacency=adjacency)
    spent = privacy_spent(event, delta=1e-5, accountant="rdp", adjacency="replace-one").epsilon
    # Above what one feasible pair of neighbours loses (the record is 1 or -1, all others are 0),
    # and below no amplification.
    poisson = epsilon(1.0, delta=1e-5, steps=100, sampling_rate=0.01, adjacency="replace-one")
    assert poisson < spent < epsilon(1.0, delta=1e-5, steps=100, adjacency="replace-one")
    # A sample of everything is one Gaussian of the same multiplier: no factor 2 is lost.
    everyone = dpa.SampledWithoutReplacementDpEvent(100, 100, dpa.GaussianDpEvent(1.0))
    rdp = dict(delta=1e-5, accountant="rdp", adjacency="replace-one")
    assert privacy_spent(everyone, **rdp).epsilon == pytest.approx(epsilon(1.0, **rdp))


def truncated(capacity, z=1.5):
    event = dpa.TruncatedSubsampledGaussianDpEvent(3500, 64 / 3500, capacity, z)
    return dpa.SelfComposedDpEvent(event, 100)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_truncation_costs_what_it_must(accountant):
    run = dict(delta=1e-5, accountant=accountant)
    free = epsilon(1.5, steps=100, sampling_rate=64 / 3500, **run)
    rare = privacy_spent(truncated(120), **run)
    often = privacy_spent(truncated(80), **run)
    assert (1 - 2e-3) * free <= rare.epsilon <= 1.01 * free
    assert "of delta pays" in rare.method
    assert often.epsilon > 1.5 * free  # RDP: infinite
    assert math.isinf(often.epsilon) == (accountant == "rdp")


def test_taking_truncation_off_delta_agrees_with_the_truncated_event():
    oracle = PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL, 2**-12)
    oracle.compose(truncated(120))
    expected = oracle.get_epsilon(1e-5)
    assert privacy_spent(truncated(120), delta=1e-5).epsilon == pytest.approx(expected, rel=3e-3)


def test_multiplier_remembers_its_adjacency():
    z = calibrate_noise_multiplier(1.0, delta=1e-5, adjacency="replace-one")
    for twin in (z, copy.deepcopy(z), pickle.loads(pickle.dumps(z))):
        assert isinstance(twin, NoiseMultiplier) and twin.adjacency == "replace-one"
    for scaled in (z * 2, 2 * z, z / 2):
        assert isinstance(scaled, NoiseMultiplier) and scaled.adjacency == "replace-one"
    assert type(z + 1) is float
    with pytest.raises(ValueError, match="replace-one"):
        epsilon(z, delta=1e-5)
    assert epsilon(z, delta=1e-5, adjacency="replace-one") <= 1.0


GOOD = dict(noise_multiplier=1.0, delta=1e-5, steps=1, sampling_rate=0.5)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("delta", value, ValueError) for value in (0.0, 1.0, 1.5, -1.0, math.nan)]
    + [("delta", "1e-5", TypeError)]
    + [("sampling_rate", value, ValueError) for value in (0.0, -0.1, 1.01, math.nan)]
    + [("noise_multiplier", value, ValueError) for value in (-1.0, math.nan, math.inf)]
    + [("noise_multiplier", "1", TypeError), ("noise_multiplier", None, TypeError)]
    + [("steps", -1, ValueError), ("steps", 1.5, TypeError), ("steps", True, TypeError)]
    + [("accountant", "gdp", ValueError), ("adjacency", "substitute", ValueError)],
)
def test_bad_input_is_refused_by_name(name, value, error):
    with pytest.raises(error, match=f"`{name}` must be"):
        epsilon(**{**GOOD, name: value})


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_bad_target_is_refused(target):
    with pytest.raises(ValueError, match="`epsilon` must be"):
        calibrate_noise_multiplier(target, delta=1e-5)


def test_delta_below_what_the_grid_resolves():
    """PLD cuts tails of 1e-15 a composition: for this delta the bound without sampling is left."""
    run = dict(delta=1e-20, steps=10, sampling_rate=0.1)
    z = calibrate_noise_multiplier(1.0, **run)
    assert 0 < epsilon(z, **run) <= 1
    assert z <= calibrate_noise_multiplier(1.0, delta=1e-20, steps=10) * 1.001


@pytest.mark.parametrize(
    "event",
    [
        dpa.LaplaceDpEvent(1.0),
        dpa.UnsupportedDpEvent(),
        dpa.PoissonSampledDpEvent(
            0.1, dpa.ComposedDpEvent([dpa.GaussianDpEvent(1.0), dpa.GaussianDpEvent(1.0)])
        ),
    ],
)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_unknown_events_are_refused(event, accountant):
    with pytest.raises(ValueError, match="`event` must be"):
        privacy_spent(event, delta=1e-5, accountant=accountant)


def poisson(q, z):
    return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))


@pytest.mark.parametrize(
    "event",
    [dpa.GaussianDpEvent(z) for z in (math.nan, -1.0, math.inf)]
    + [poisson(0.1, z) for z in (math.nan, -1.0, math.inf)]
    + [poisson(q, 1.0) for q in (0, -0.5, 1.5, math.nan)]
    + [poisson(1.0, math.nan)]
    + [dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(1.0), n) for n in (-1, 2.5, math.nan)]
    + [dpa.SelfComposedDpEvent(dpa.SelfComposedDpEvent(poisson(0.1, 1.0), -1), -1)]
    + [dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(math.nan), 0)]
    + [dpa.ComposedDpEvent([dpa.GaussianDpEvent(1.0), dpa.GaussianDpEvent(math.nan)])]
    + [dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 50, z) for z in (math.nan, -1.0)]
    + [dpa.TruncatedSubsampledGaussianDpEvent(100, q, 50, 1.0) for q in (0.0, -0.5, math.nan)]
    + [dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, size, 1.0) for size in (0, -1, 101)]
    + [dpa.SampledWithoutReplacementDpEvent(100, size, dpa.GaussianDpEvent(1.0))
       for size in (0, -1, 101)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nonsense_in_an_event_is_refused_never_answered(event, accountant):
    with pytest.raises(ValueError, match="`event` must be"):
        privacy_spent(event, delta=1e-5, accountant=accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("z", "q", "steps"),
    [(z, 0.1, 10) for z in (1e-3, 1e-9, 1e-200, 1e-320, 1e200)]
    + [(1e-200, 1.0, 10), (1.0, 0.01, 10**24), (1.0, 1.0, 10**400), (1.0, 0.01, 10**400)],
)
def test_extreme_runs_cost_at_most_the_unamplified_gaussian(z, q, steps, accountant):
    spent = epsilon(z, delta=1e-5, steps=steps, sampling_rate=q, accountant=accountant)
    unamplified = epsilon(z, delta=1e-5, steps=steps, accountant=accountant)
    assert 0 <= spent <= unamplified
    assert z > 1 or spent > 1e4


@pytest.mark.parametrize("mu", [1e4, 1e9, 1e12])
def test_a_huge_gaussian_loss_is_not_understated(mu):
    """Its loss is N(mu^2 / 2, mu^2), and Phi(4.2649) is 1 - 1e-5; the plain formula cancels."""
    excess = privacy_spent(dpa.GaussianDpEvent(1 / mu), delta=1e-5).epsilon - mu**2 / 2
    assert excess / mu == pytest.approx(4.2649, rel=1e-3, abs=mu * 1e-15)
