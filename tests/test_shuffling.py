"""Amplification by shuffling: its conditions are checked, and it is used only where it helps."""

import math

import numpy as np
import pytest

from jdp import shuffling
from jdp._accountants import gaussian_log_delta
from jdp.one_visit import plan_blocks
from jdp.shuffling import calibrate_shuffled, most_local_delta, shuffled_epsilon

DELTA = 1e-5

# [D] of the notes: the multiplier of the clones bound at delta 1e-5.
CLONES = [(1_000, 0.2, 16.4), (1_000, 0.5, 7.01), (10_000, 0.05, 20.3), (10_000, 0.5, 3.41)]
CLONES += [(60_000, 0.2, 3.67), (60_000, 1.0, 1.78), (1_000_000, 0.5, 1.62)]


@pytest.mark.parametrize("n, epsilon, z", CLONES)
def test_it_reproduces_the_table_and_is_used_only_where_it_helps(n, epsilon, z):
    found = calibrate_shuffled(epsilon, delta=DELTA, num_examples=n)
    assert found == pytest.approx(z, rel=1e-2) and found.adjacency == "replace-one"
    assert shuffled_epsilon(found, delta=DELTA, num_examples=n) <= epsilon
    assert shuffled_epsilon(found / 1.01, delta=DELTA, num_examples=n) > epsilon
    options = {"epsilon": epsilon, "delta": DELTA, "adjacency": "replace-one"}
    plain, shuffled = plan_blocks(n, 1, **options), plan_blocks(n, 1, shuffling=True, **options)
    assert float(shuffled.noise_multiplier) == min(found, plain.noise_multiplier)
    assert shuffled.epsilon <= epsilon
    if found < plain.noise_multiplier:
        assert shuffled.spent.accountant == "shuffling" and shuffled.spent.mu is None
        assert "Feldman" in shuffled.report() and "secret random order" in shuffled.report()
        assert len(shuffled.to_dict()["curve"]) == 1  # the bound is one point, not a curve
    else:
        assert shuffled.spent.accountant == "exact"


def test_it_is_off_by_default():
    options = {"epsilon": 0.5, "delta": DELTA, "adjacency": "replace-one"}
    plain = plan_blocks(10_000, 1, **options)
    assert plain.spent.accountant == "exact"
    assert (
        plain.noise_multiplier
        > 2 * plan_blocks(10_000, 1, shuffling=True, **options).noise_multiplier
    )


def by_search(z, n, side=True):
    """The bound by trying many epsilon_0, with all conditions written out once more."""
    first = DELTA / 2
    for eps in np.linspace(1e-3, math.log(n / (16 * math.log(4 / first))), 20_000):
        grown = 8 * math.sqrt(math.exp(eps) * math.log(4 / first) / n) + 8 * math.exp(eps) / n
        total = math.log(1 + grown * (1 - math.exp(-eps)) / (1 + math.exp(-eps) / (1 + grown)))
        most = (DELTA - first) / ((math.exp(total) + 1) * (1 + math.exp(eps) / 2) * n)
        if side:
            tries = 2 + math.log(2 / first) / math.log(1 / (1 - math.exp(-5 * eps)))
            most = min(most, (1 - math.exp(-eps)) * first / (4 * math.exp(eps) * tries))
        if gaussian_log_delta(eps, 1 / z) <= math.log(most):
            return total
    return math.inf


@pytest.mark.parametrize(
    "n, z", [(1_000, 5.0), (2_000, 3.0), (10_000, 3.0), (10**5, 2.0), (500, 30.0)]
)
def test_the_bound_is_that_of_a_search_over_the_conditions(n, z):
    found = shuffled_epsilon(z, delta=DELTA, num_examples=n)
    assert found == pytest.approx(by_search(z, n), rel=3e-3)


@pytest.mark.parametrize("n, z", [(2_000, 3.0), (10_000, 2.0), (100_000, 1.5)])
def test_where_the_side_condition_fails_nothing_is_promised(n, z):
    assert math.isfinite(by_search(z, n, side=False))  # all that holds is the other condition
    assert shuffled_epsilon(z, delta=DELTA, num_examples=n) == math.inf


def test_a_bound_without_the_side_condition_would_be_caught(monkeypatch):
    def without(eps_0, delta, n):
        epsilon = shuffling._clones(eps_0, delta / 2, n)
        return delta / 2 / ((math.exp(epsilon) + 1) * (1 + math.exp(eps_0) / 2) * n)

    monkeypatch.setattr(shuffling, "most_local_delta", without)
    with pytest.raises(AssertionError):
        test_where_the_side_condition_fails_nothing_is_promised(10_000, 2.0)
    with pytest.raises(AssertionError):
        test_the_bound_is_that_of_a_search_over_the_conditions(10**5, 2.0)


def test_every_step_may_lose_less_where_more_is_amplified():
    allowed = [most_local_delta(eps, DELTA, 10_000) for eps in (0.1, 0.5, 2.0, 3.0)]
    assert all(0 < value < DELTA / 1e4 for value in allowed)
    assert allowed[-1] < allowed[1]


def test_out_of_its_range_it_promises_nothing_and_is_not_used():
    assert shuffled_epsilon(0.3, delta=DELTA, num_examples=1_000) == math.inf
    assert shuffled_epsilon(3.0, delta=DELTA, num_examples=100) == math.inf
    assert calibrate_shuffled(0.5, delta=DELTA, num_examples=100) is None
    options = {"epsilon": 0.5, "delta": DELTA, "adjacency": "replace-one"}
    plan = plan_blocks(100, 1, shuffling=True, **options)
    assert plan.spent.accountant == "exact"
    assert plan.noise_multiplier == plan_blocks(100, 1, **options).noise_multiplier


@pytest.mark.parametrize(
    "change",
    [
        {"adjacency": "zero-out"},
        {"batch_size": 2},
        {"threshold_rows": 1},
        {"steps": 2_000},
        {"release": "tree"},
        {"release": "same-rows"},
    ],
)
def test_it_is_refused_where_its_theorem_does_not_apply(change):
    options = {"num_examples": 1_000, "batch_size": 1, "epsilon": 1.0, "delta": DELTA}
    options |= {"adjacency": "replace-one", "shuffling": True} | change
    with pytest.raises(ValueError, match="shuffling"):
        plan_blocks(**options)


@pytest.mark.parametrize("change", [{"delta": 0.0}, {"noise_multiplier": 0.0}, {"num_examples": 0}])
def test_bad_numbers_are_refused(change):
    options = {"noise_multiplier": 3.0, "delta": DELTA, "num_examples": 1_000} | change
    noise_multiplier = options.pop("noise_multiplier")
    with pytest.raises(ValueError):
        shuffled_epsilon(noise_multiplier, **options)
