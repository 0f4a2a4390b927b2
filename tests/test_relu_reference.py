"""ReLU regression reaches the excess risks of a separate implementation, at full size."""

import jax
import numpy as np
import pytest
from test_relu_regression import data

from jdp.relu_regression import Descent, FixedThreshold, Grid, PrivateThreshold, fit, plan_blocks

DELTA = 1e-5
GAUSSIAN = Descent(20.0, 1.25)
HISTOGRAM = Grid(0.01, 8)
REFERENCE = {  # plan, threshold, most excess risk (mean of several draws)
    "full": (
        plan_blocks(100_000, 100_000, 20, epsilon=0.2, delta=DELTA),
        FixedThreshold(0.1),
        5e-6,
    ),
    "histogram, epsilon 1": (
        plan_blocks(100_000, 18_000, epsilon=1, delta=DELTA, threshold_rows=2_000),
        PrivateThreshold(HISTOGRAM, share=0.0),
        6e-6,
    ),
    "histogram, epsilon 0.2": (
        plan_blocks(100_000, 18_000, epsilon=0.2, delta=DELTA, threshold_rows=2_000),
        PrivateThreshold(HISTOGRAM, share=0.3),
        1.2e-5,
    ),
    "fixed": (plan_blocks(10_000, 1_000, epsilon=1, delta=DELTA), FixedThreshold(0.1), 1e-4),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_points_are_reached(name):
    plan, threshold, most = REFERENCE[name]
    run = jax.jit(
        lambda key, x, y: fit(key, x, y, plan, threshold=threshold, descent=GAUSSIAN).weights
    )
    risks = []
    for seed in range(2):
        x, y, truth = data(seed, plan.sampler.num_examples, 10)
        w = np.asarray(run(jax.random.key(seed), x, y))
        fresh = data(99 + seed, 50_000, 10)[0]
        risks.append(np.mean((np.maximum(0, fresh @ w) - np.maximum(0, fresh @ truth)) ** 2))
    assert np.mean(risks) <= most
