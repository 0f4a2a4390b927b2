"""PATE: the vote's noise and event, its teachers, and the bound that is not private."""

import functools
import itertools
import math

import checks
import dp_accounting as dpa
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pate_checks
import pytest
import strategies
from dp_accounting.pld import PLDAccountant
from scipy import special, stats

import jdp
from jdp.pate import (
    gnmax_divergences,
    most_votes,
    noisy_labels,
    plan_votes,
    teacher_votes,
    unprotected_epsilon,
    vote_sum,
    votes_event,
)

DELTA = 1e-5
PLAN = functools.partial(plan_votes, 40, 20, 6, delta=DELTA)


# Sensitivity ---------------------------------------------------------------------------------


@hypothesis.given(
    matrix=strategies.gradients(),
    mask=strategies.masks,
    i=strategies.indices,
    other=st.builds(strategies.row, st.sampled_from(strategies.KINDS), strategies.seeds),
)
def test_invariant_of_most_votes(matrix, mask, i, other):
    checks.check_invariant(mechanisms.MOST_VOTES, matrix, mask, i, other, 1.0)


@pytest.mark.parametrize(
    "check",
    [c for c in checks.CLIP_CHECKS if c is not checks.check_merge],
    ids=lambda c: c.__name__,
)
def test_most_votes(check):
    check(mechanisms.MOST_VOTES)


def test_maxima_do_not_merge():
    total = most_votes(jnp.zeros((3, 2), jnp.int32), 2)
    with pytest.raises(TypeError, match="Merge the votes"):
        total.merge(total)


def test_sensitivities_over_all_votes_of_four_teachers():
    """Exhaustive: a teacher that votes otherwise moves a histogram by sqrt 2, the maximum by 1."""
    ballots = jnp.array(list(itertools.product(range(3), repeat=4)), jnp.int32).T  # (4, 81)
    histograms = np.asarray(vote_sum(ballots, 3).parts[0])
    most = np.asarray(most_votes(ballots, 3).parts[0])
    number = {tuple(column): i for i, column in enumerate(np.asarray(ballots).T.tolist())}
    moved = {"histogram": 0.0, "most": 0.0}
    for column, i in number.items():
        for teacher, vote in itertools.product(range(4), range(3)):
            j = number[column[:teacher] + (vote,) + column[teacher + 1 :]]
            change = float(np.linalg.norm(histograms[i] - histograms[j]))
            moved["histogram"] = max(moved["histogram"], change)
            moved["most"] = max(moved["most"], abs(float(most[i] - most[j])))
    one = ballots[:, :1]
    for total, measured in ((vote_sum(one, 3), "histogram"), (most_votes(one, 3), "most")):
        assert total.noise_scales == (pytest.approx(moved[measured]),)
        assert total.replace_one_factor == 1.0  # whatever happens to a record


def test_votes_have_the_same_noise_under_every_relation():
    total = vote_sum(jnp.zeros((5, 200), jnp.int32), 50)
    for adjacency in ("zero-out", "replace-one"):
        noised = jdp.add_noise(jax.random.key(0), total, 3.0, adjacency=adjacency)
        std = float(jnp.std(noised - total.parts[0]))
        assert std == pytest.approx(3 * math.sqrt(2 * 200), rel=0.02)


def test_narrow_votes_count_once():
    assert vote_sum(jnp.zeros((10, 1), jnp.uint8), 300).parts[0].sum() == 10


def _voters(teachers):
    plan = plan_votes(100, 10, 1, epsilon=5.0, delta=DELTA)
    train = lambda key, shard: jnp.sum(shard)[None].astype(int)  # noqa: E731
    return teacher_votes(jax.random.key(0), train, jnp.arange(100), plan, teachers)


@pytest.mark.parametrize("teachers", [np.arange(1, 11), np.zeros(10, int), np.arange(-5, 5)])
def test_no_teacher_votes_twice(teachers):
    with pytest.raises(ValueError, match="`teachers` must be different numbers from 0 to 9"):
        _voters(teachers)
    votes = np.asarray(jax.jit(_voters)(jnp.asarray(teachers)))[:, 0]
    outside = (teachers < 0) | (teachers > 9)
    assert (votes[outside] == -1).all() and (votes[~outside] >= 0).all()


# Noise ---------------------------------------------------------------------------------------


def test_labels_have_the_noise_that_the_plan_states():
    pate_checks.check_label_law(noisy_labels)


def test_every_query_has_the_threshold_noise():
    pate_checks.check_answer_law(noisy_labels)


def test_queries_and_classes_have_independent_noise():
    plan = plan_votes(1, 1, 40, noise_multiplier=1e6, delta=DELTA)  # noise alone
    run = jax.vmap(lambda key: noisy_labels(key, jnp.zeros((1, 40), int), plan, num_classes=4))
    labels = np.asarray(jax.jit(run)(jax.random.split(jax.random.key(0), 3_000)).labels)
    for k in range(4):
        assert abs((labels == k).mean() - 0.25) < 0.01
        correlation = np.corrcoef(labels == k, rowvar=False) - np.eye(40)
        assert np.abs(correlation).max() < 6 / math.sqrt(3_000)


def test_another_adjacency_than_replace_one_is_refused():
    z = jdp.accounting.under_adjacency(1.0, "zero-out")
    with pytest.raises(ValueError, match="zero-out"):
        plan_votes(10, 2, 3, noise_multiplier=z, delta=DELTA)


# The event -----------------------------------------------------------------------------------


def test_epsilon_matches_dp_accounting_on_a_hand_computed_case():
    """250 teachers, sigma_1 = 150 on 683 queries, sigma_2 = 40 on 286 answers.

    A record moves a maximum by 1 and a histogram by sqrt 2, so the whole is one Gaussian with
    mu^2 = 683 / 150^2 + 286 * 2 / 40^2 = 0.0303556 + 0.3575 = 0.3878556.
    """
    event = votes_event(40 / math.sqrt(2), 286, 150.0, 683)
    spent = jdp.accounting.privacy_spent(event, delta=DELTA, adjacency="replace-one")
    mu = math.sqrt(0.3878556)
    assert spent.mu == pytest.approx(mu, rel=1e-6)
    left = stats.norm.cdf(mu / 2 - spent.epsilon / mu)
    right = stats.norm.cdf(-mu / 2 - spent.epsilon / mu)
    assert left - math.exp(spent.epsilon) * right == pytest.approx(DELTA, rel=1e-5)
    # dp-accounting composes each release; under REPLACE_ONE it doubles what it is given.
    for relation, factor in (("ADD_OR_REMOVE_ONE", 1), ("REPLACE_ONE", 2)):
        accountant = PLDAccountant(getattr(dpa.NeighboringRelation, relation), 1e-3)
        accountant.compose(dpa.GaussianDpEvent(factor * 150.0), 683)
        accountant.compose(dpa.GaussianDpEvent(factor * 40 / math.sqrt(2)), 286)
        assert accountant.get_epsilon(DELTA) == pytest.approx(spent.epsilon, abs=2e-3)


def confident(queries, answers, epsilon):
    return plan_votes(
        5_000, 250, queries, epsilon=epsilon, delta=DELTA, threshold=150.0, answers=answers
    )


def test_plan_charges_all_thresholds_and_all_answers():
    pate_checks.check_epsilon(confident)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_plan_without_threshold_is_one_gaussian_a_query(epsilon):
    plan = plan_votes(3_500, 250, 100, epsilon=epsilon, delta=DELTA)
    assert 0.999 * epsilon < plan.epsilon <= epsilon
    assert (plan.teachers, plan.batch_size, plan.answers) == (250, 14, 100)
    one = jdp.accounting.calibrate_noise_multiplier(
        epsilon, delta=DELTA, steps=100, adjacency="replace-one"
    )
    assert plan.vote_std == pytest.approx(one * math.sqrt(2), rel=1e-4)
    assert plan.threshold_std is None


def test_report_says_what_is_released():
    plan = confident(500, 200, 2.0)
    text = plan.report()
    assert "labels of at most 200 of 500 queries" in text and "charged for all queries" in text
    assert "replace-one" in text and "250 teachers" in text and "zero-out" in text
    assert "GNMax" in text and "pate" in plan.report(mechanism="pate")
    facts = plan.to_dict(clip_norms="none")
    assert (facts["answers"], facts["threshold"]) == (200, 150.0)
    assert facts["accountant"] == "exact" and len(facts["curve"]) == 4
    assert plan.to_json()


# The vote ------------------------------------------------------------------------------------


def vote(key, votes, plan, num_classes):
    return jax.jit(functools.partial(noisy_labels, plan=plan, num_classes=num_classes))(key, votes)


def ballots():
    votes = np.random.default_rng(0).integers(0, 3, (20, 6))
    return jnp.asarray(votes, jnp.int32)


def test_without_noise_it_is_the_plurality():
    votes = ballots()
    found = vote(jax.random.key(0), votes, PLAN(noise_multiplier=0.0), 3)
    counts = np.asarray(vote_sum(votes, 3).parts[0])
    np.testing.assert_array_equal(found.labels, counts.argmax(1))
    assert found.answered.all()
    abstained = votes.at[:, 0].set(-1).at[0, 0].set(2).at[1, 0].set(7)
    found = vote(jax.random.key(0), abstained, PLAN(noise_multiplier=0.0), 3)
    assert found.labels[0] == 2


@pytest.mark.parametrize("answers, expected", [(1, [0]), (3, [0, 2, 3]), (6, [0, 2, 3, 5])])
def test_at_most_so_many_answers_the_first_that_pass(answers, expected):
    most = np.array([12, 9, 20, 11, 8, 15])  # of 20 votes; the threshold is 10
    votes = jnp.asarray(np.where(np.arange(20)[:, None] < most, 1, np.arange(20)[:, None] % 3 * 2))
    plan = PLAN(noise_multiplier=0.0, threshold=10.0, answers=answers)
    found = vote(jax.random.key(0), votes, plan, 5)
    assert np.flatnonzero(found.answered).tolist() == expected
    np.testing.assert_array_equal(found.labels, np.where(found.answered, 1, -1))


def test_under_noise_there_are_never_more_answers():
    plan = PLAN(noise_multiplier=5.0, threshold=0.0, answers=2)
    run = jax.vmap(lambda key: noisy_labels(key, ballots(), plan, num_classes=3).answered)
    answered = np.asarray(jax.jit(run)(jax.random.split(jax.random.key(0), 500))).sum(1)
    assert answered.max() == 2 and answered.min() <= 2


def test_jit_and_dtype_change_nothing():
    plan = PLAN(epsilon=3.0, threshold=8.0, answers=4)
    key, votes = jax.random.key(2), ballots()
    eager = noisy_labels(key, votes, plan, num_classes=3)
    for same in (votes, votes.astype(jnp.uint8)):
        checks.assert_same_bits(eager, vote(key, same, plan, 3))


# Teachers ------------------------------------------------------------------------------------

RECORDS = (jnp.arange(45), jnp.arange(45.0) ** 2)
SEEN = functools.partial(plan_votes, 45, 7, 6, epsilon=1.0, delta=DELTA)  # shards of 6 records


def test_shards_are_disjoint_and_whole():
    votes = teacher_votes(jax.random.key(0), lambda key, shard: shard[0], RECORDS, SEEN())
    assert votes.shape == (7, 6)  # each teacher "votes" for the records that it sees
    seen = np.asarray(votes).ravel()
    assert len(set(seen.tolist())) == 42 and set(seen.tolist()) <= set(range(45))


def learner(key, shard):
    noise = jax.random.normal(key, (6,))
    return (jnp.sum(shard[1]) + 100 * noise).astype(jnp.int32) % 10


def test_a_record_changes_one_teacher():
    teach = functools.partial(teacher_votes, jax.random.key(1), learner, plan=SEEN())
    neighbours = RECORDS[1][None] + 13 * jnp.eye(46)[:, :45]  # the last one is the data set itself
    votes = jax.jit(jax.vmap(lambda values: teach(data=(RECORDS[0], values))))(neighbours)
    changed = np.asarray((votes != votes[-1:]).any(2).sum(1)).tolist()
    assert sorted(changed) == [0] * 4 + [1] * 42  # three records are left over


def test_teachers_vote_alike_alone_and_together():
    key, plan = jax.random.key(1), SEEN()
    votes = teacher_votes(key, learner, RECORDS, plan)
    again = teacher_votes(key, learner, RECORDS, plan, together=3)
    np.testing.assert_array_equal(again, votes)
    some = jax.jit(lambda teachers: teacher_votes(key, learner, RECORDS, plan, teachers))
    np.testing.assert_array_equal(some(jnp.array([5, 0, 5])), votes[jnp.array([5, 0, 5])])
    assert len({tuple(row) for row in np.asarray(votes).tolist()}) > 1


# The bound that is not private -----------------------------------------------------------------


def _outcome(counts, std):
    """The law of GNMax's outcome, by quadrature."""
    grid = np.linspace(-12, 12, 4001)
    probabilities = []
    for j, own in enumerate(counts):
        others = np.delete(counts, j)
        below = stats.norm.cdf(grid[:, None] + (own - others) / std).prod(1)
        probabilities.append(np.trapezoid(stats.norm.pdf(grid) * below, grid))
    return np.array(probabilities)


def _divergences(p, q, orders):
    p, q = np.log(p), np.log(q)
    return np.array([special.logsumexp(a * p + (1 - a) * q) / (a - 1) for a in orders])


@pytest.mark.parametrize("counts", [(20, 0), (30, 5), (12, 8), (10, 10), (25, 5, 0), (14, 8, 8)])
@pytest.mark.parametrize("std", [2.0, 4.0, 8.0])
def test_data_dependent_bound_holds_against_exact_divergences(counts, std):
    orders = np.array([1.5, 2.0, 4.0, 8.0, 16.0])
    counts = np.array(counts, float)
    bound = gnmax_divergences(counts, std, orders)
    law = _outcome(counts, std)
    assert law.sum() == pytest.approx(1, abs=1e-6)
    for i, j in itertools.permutations(range(len(counts)), 2):
        if counts[i] == 0:
            continue
        neighbour = counts.copy()
        neighbour[i] -= 1
        neighbour[j] += 1
        exact = _divergences(law, _outcome(neighbour, std), orders)
        assert np.all(exact <= bound + 1e-6)
    assert np.all(bound <= orders / std**2 + 1e-12)


def test_data_dependent_epsilon_is_small_for_unanimous_teachers_only():
    plan = plan_votes(3_000, 300, 50, noise_multiplier=1.0, delta=DELTA)
    agreed = jnp.zeros((300, 50), int)
    split = jnp.tile(jnp.arange(300)[:, None] % 2, (1, 50))
    of = functools.partial(unprotected_epsilon, plan=plan, num_classes=10)
    assert of(agreed) < 0.1 * plan.epsilon
    assert 0.9 * plan.epsilon < of(split) <= plan.epsilon
    # One query of fifty that is split costs what a query costs.
    mixed = agreed.at[:, 0].set(split[:, 0])
    assert of(agreed) < of(mixed) < of(split)
    # With a threshold the costliest answers are charged, and all thresholds.
    options = {"threshold": 150.0, "answers": 10, "noise_multiplier": 1.0, "delta": DELTA}
    confident = plan_votes(3_000, 300, 50, **options)
    cost = unprotected_epsilon(mixed, confident, num_classes=10)
    threshold = votes_event(1.0, 0, confident.threshold_std, 50)
    assert cost > jdp.accounting.privacy_spent(threshold, delta=DELTA).epsilon
    noiseless = plan_votes(3_000, 300, 50, noise_multiplier=0.0, delta=DELTA)
    assert unprotected_epsilon(agreed, noiseless, num_classes=10) == math.inf
