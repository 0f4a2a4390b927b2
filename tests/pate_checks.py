"""What PATE promises, as checks of a vote: `test_pate.py` runs them on jdp's, `twins.py` on twins.

A vote is a function `(key, votes, plan, num_classes=...) -> NoisyLabels`.
"""

import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting.pld import PLDAccountant
from scipy import stats

from jdp.pate import plan_votes

DRAWS = 10_000
DELTA = 1e-5


def _ballots(ayes, noes):
    """A column of ballots a query: so many for class 0, so many for class 1."""
    column = jnp.repeat(jnp.arange(2), jnp.array([ayes, noes]), total_repeat_length=ayes + noes)
    return column[:, None]


def _draw(vote, ballots, plan):
    keys = jax.random.split(jax.random.key(4), DRAWS)
    run = jax.jit(jax.vmap(lambda key: vote(key, ballots, plan, num_classes=2)))
    return jax.tree.map(np.asarray, run(keys))


def _assert_frequency(happened, probability):
    deviation = math.sqrt(probability * (1 - probability) / DRAWS)
    assert abs(happened.mean() - probability) < 5 * deviation


def check_label_law(vote):
    """One query, z = 3: the noise on each class has std 3 sqrt(2), on the difference 6."""
    plan = plan_votes(20, 20, 1, noise_multiplier=3.0, delta=DELTA)
    found = _draw(vote, _ballots(13, 7), plan)
    assert found.answered.all()
    _assert_frequency(found.labels[:, 0] == 0, float(stats.norm.cdf(6 / 6)))


def check_answer_law(vote):
    """Whether a query is answered is as noisy where the most votes are below the threshold."""
    for most in (16, 10):
        plan = plan_votes(
            20, 20, 1, noise_multiplier=3.0, delta=DELTA, threshold=13.0, answers=1,
            threshold_share=0.36,
        )  # fmt: skip
        found = _draw(vote, _ballots(most, 20 - most), plan)
        _assert_frequency(found.answered[:, 0], float(stats.norm.cdf((most - 13) / (3 / 0.6))))
        assert np.array_equal(found.answered, found.labels >= 0)


def check_epsilon(plan_for):
    """`plan_for(queries, answers, epsilon)`: its noise costs what dp-accounting says by hand."""
    queries, answers, epsilon = 400, 60, 1.5
    plan = plan_for(queries, answers, epsilon)
    sigma_1, sigma_2 = plan.threshold_std, plan.vote_std
    accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    accountant.compose(dpa.GaussianDpEvent(sigma_1 / 1), queries)
    accountant.compose(dpa.GaussianDpEvent(sigma_2 / math.sqrt(2)), answers)
    by_hand = accountant.get_epsilon(DELTA)
    assert abs(by_hand - plan.epsilon) < 5e-3
    assert 0.99 * epsilon < by_hand < epsilon + 5e-3
