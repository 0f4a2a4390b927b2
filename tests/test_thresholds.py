"""Thresholds: private, public, and refused where noise would choose them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_relu_regression import DELTA, DESCENT, PUBLIC, D

import jdp
from jdp.relu_regression import Grid, PrivateThreshold, PublicThreshold, fit, plan_blocks


def residuals(m=2000):
    return jnp.abs(jnp.asarray(np.random.default_rng(1).normal(size=m), jnp.float32)) * 0.1


@pytest.mark.parametrize("mechanism", ["histogram", "counts", "sparse-vector"])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_private_thresholds_find_the_level_that_is_needed(mechanism, adjacency):
    magnitudes, mask = residuals(), jnp.ones(2000, bool)
    threshold = PrivateThreshold(Grid(0.01, 8), share=0.05, mechanism=mechanism)
    choose = jax.jit(
        jax.vmap(lambda key, m: threshold.choose(key, m, mask, 2.0, adjacency), (0, None))
    )
    keys = jax.random.split(jax.random.key(0), 200)
    found = np.asarray(choose(keys, magnitudes))
    # The 95% quantile is 0.196: level 0.32, or 0.16 (11% above) where the slack lets it pass.
    assert set(np.rint(100 * found).tolist()) <= {16, 32}
    assert np.all(np.asarray(choose(keys, magnitudes * 1e9)) == np.float32(1.28))  # above the grid
    assert np.all(np.asarray(choose(keys, magnitudes * 0)) == np.float32(0.01))  # the public floor
    assert np.all(np.asarray(choose(keys, magnitudes * jnp.nan)) == np.float32(0.01))


def test_public_thresholds_bear_outliers_by_their_quantile():
    x, y = jnp.eye(10), jnp.zeros(10).at[3].set(5.0)
    levels = {
        q: float(PublicThreshold(x, y, Grid(0.05, 8), quantile=q).choose(jnp.abs(y)))
        for q in (0.9, 1.0)
    }
    assert levels == {0.9: pytest.approx(0.05), 1.0: pytest.approx(6.4)}
    assert float(PUBLIC.choose(jnp.full(20, 1e9))) == pytest.approx(0.4)  # else the last


def test_sparse_vector_is_private_by_count():
    """Frequencies of each answer on neighbours differ by at most exp(epsilon)."""
    keys = jax.random.split(jax.random.key(0), 200_000)
    epsilon = 1.0
    run = jax.jit(jax.vmap(lambda key, c: jdp.noise.sparse_vector(key, c, 2.0, epsilon), (0, None)))
    one, two = jnp.array([4.0, 3.0, 2.0, 0.0]), jnp.array([3.0, 2.0, 1.0, 0.0])
    p, q = (np.bincount(np.asarray(run(keys, c)), minlength=4) / len(keys) for c in (one, two))
    ratio = np.log(p / q)
    assert np.abs(ratio).max() <= epsilon + 0.02 and np.abs(ratio).max() > 0.2
    # About the worst that one record can do: the counts before the answer fall, and it stays.
    one, two = jnp.array([3.0] * 5 + [2.0, 99.0]), jnp.array([2.0] * 5 + [2.0, 99.0])
    p, q = (np.mean(np.asarray(run(keys, c)) == 5) for c in (one, two))
    assert 0.75 < np.log(p / q) < 0.95  # 0.85 in theory


@pytest.mark.parametrize("mechanism", ["histogram", "counts", "sparse-vector"])
def test_a_private_threshold_of_batch_32_is_refused_before_data_is_read(mechanism):
    threshold = PrivateThreshold(mechanism=mechanism)
    plan = plan_blocks(
        10_000,
        32,
        epsilon=0.05,
        delta=DELTA,
        threshold_rows=32,
        sparse_vector=mechanism == "sparse-vector",
    )

    class Unread:
        dtype, ndim = np.dtype(np.float32), 2

        def __init__(self, *shape):
            self.shape, self.ndim = shape, len(shape)

        def __array__(self, *_, **__):
            raise AssertionError("data was read")

    with pytest.raises(ValueError, match="threshold_rows.*at least.*larger blocks"):
        fit(
            jax.random.key(0),
            Unread(10_000, D),  # pyright: ignore
            Unread(10_000),  # pyright: ignore
            plan,
            threshold=threshold,
            descent=DESCENT,
        )


def test_reasonable_private_thresholds_are_accepted():
    # Ten noise standard deviations of rows, as in the feasibility study.
    for epsilon, rows in ((0.05, 600), (0.5, 75), (1.0, 40)):
        z = plan_blocks(9_999, 1, epsilon=epsilon, delta=DELTA).noise_multiplier
        PrivateThreshold(Grid(0.01, 8), share=0.1).check(rows, float(z), "zero-out")


@pytest.mark.parametrize("mechanism", ["histogram", "sparse-vector"])
def test_a_share_that_is_an_array_is_no_way_around_the_refusal(mechanism):
    options = {"epsilon": 0.5, "delta": DELTA, "threshold_rows": 32}
    plan = plan_blocks(96, 32, **options, sparse_vector=mechanism == "sparse-vector")
    x, y = jnp.zeros((96, D)), jnp.zeros(96)

    def run(share):
        threshold = PrivateThreshold(share=share, mechanism=mechanism)
        return fit(jax.random.key(0), x, y, plan, threshold=threshold, descent=DESCENT)

    for call in (run, jax.jit(run)):  # traced, it is taken for the most lenient one
        with pytest.raises(ValueError, match="threshold_rows.*at least"):
            call(jnp.float32(0.1))
    threshold = PrivateThreshold(share=jnp.float32(0.5))
    with pytest.raises(ValueError, match="at least 13"):
        threshold.check(12, 0.9, "zero-out")
    threshold.check(13, 0.9, "zero-out")


def test_more_rows_than_float32_counts_are_refused():
    def count(rows):
        magnitudes = jax.ShapeDtypeStruct((rows,), jnp.float32)
        mask = jax.ShapeDtypeStruct((rows,), jnp.bool)
        return jax.eval_shape(PrivateThreshold().count, magnitudes, mask)

    assert count(2**24).rows == 2**24
    with pytest.raises(ValueError, match="threshold_rows.*at most 16,777,216"):
        count(2**24 + 1)
    with pytest.raises(ValueError, match="threshold_rows.*at most 16,777,216"):
        PrivateThreshold().check(2**24 + 1, 1.0, "zero-out")
