import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import ALL
from strategies import PARAMS, ROWS, flat, rows, tree_of

import jdp
from jdp.adaptive import clip_and_count


def _run(tx, grads, mask, steps):
    def step(state, _):
        update, state = tx.update(grads, state, PARAMS, mask=mask)
        return state, (update, state.clip_norm)

    return jax.jit(lambda: jax.lax.scan(step, tx.init(PARAMS), length=steps))()[1]


def test_clip_norm_finds_the_quantile(key):
    directions = rows(["normal"] * ROWS, 2)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    norms = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], np.float32)
    tx = jdp.dp_aggregate_adaptive(
        0.0, batch_size=ROWS, key=key, initial_clip_norm=0.1, target_quantile=0.5
    )
    _, clip = _run(tx, tree_of(directions * norms[:, None]), jnp.asarray(ALL), 120)
    assert 3 * 0.95 < float(clip[-1]) < 4 * 1.05


def test_one_step_is_that_of_andrew(key):
    batch = rows(["normal", "zero", "tiny", "nan", "huge", "normal"], 3)
    mask = jnp.array([True, True, True, True, True, False])
    tx = jdp.dp_aggregate_adaptive(
        0.0, batch_size=5, key=key, initial_clip_norm=0.5, target_quantile=0.4
    )
    _, clip = _run(tx, tree_of(batch), mask, 1)
    # zero and tiny are below, normal and huge above; NaN counts as half, as its absence would.
    fraction = (2 * 0.5 - 2 * 0.5) / 5 + 0.5
    np.testing.assert_allclose(float(clip[0]), 0.5 * math.exp(-0.2 * (fraction - 0.4)), rtol=1e-5)


def test_clip_norm_stays_within_public_bounds(key):
    zeros = tree_of(np.zeros((ROWS, 27), np.float32))
    tx = jdp.dp_aggregate_adaptive(
        0.0, batch_size=1e-2, key=key, initial_clip_norm=0.5, clip_learning_rate=10.0
    )
    _, clip = _run(tx, zeros, jnp.asarray(ALL), 5)
    np.testing.assert_allclose(clip[-1], 0.5e-6, rtol=1e-5)


@pytest.mark.parametrize("z, count_std", [(1.0, 0.6), (0.7, 5.0), (3.0, 1.6)])
def test_the_count_is_paid_for(z, count_std, key):
    # 1/z^2 = 1/z_gradient^2 + 1/(2 sigma_b)^2: Theorem 1 of the paper.
    nothing = tree_of(np.zeros((ROWS, 27), np.float32)), jnp.zeros(ROWS, bool)

    def draw(key):
        tx = jdp.dp_aggregate_adaptive(
            z, batch_size=1.0, key=key, initial_clip_norm=1.0, count_noise_std=count_std
        )
        update, state = tx.update(nothing[0], tx.init(PARAMS), PARAMS, mask=nothing[1])
        return update["a"], jnp.log(state.clip_norm) / -0.2

    noise, count = jax.jit(jax.vmap(draw))(jax.random.split(key, 4000))
    gradient = np.asarray(noise).std()
    of_count = np.asarray(count).std()
    assert abs(gradient**-2 + (2 * of_count) ** -2 - z**-2) < 0.05 * z**-2
    assert abs(of_count / count_std - 1) < 0.04


def test_too_little_noise_on_the_count_is_refused(key):
    for std in (0.5, 0.49, 0.0, -1.0):
        with pytest.raises(ValueError, match="count_noise_std"):
            jdp.dp_aggregate_adaptive(1.0, batch_size=100, key=key, count_noise_std=std)
    with pytest.raises(ValueError, match="gradient_scale"):
        clip_and_count(1.0, gradient_scale=1.0, count_scale=10.0)


@pytest.mark.parametrize("z, batch_size", [(1.0, 10.0), (30.0, 10.0), (1.0, 1000.0)])
def test_default_count_noise_is_legal_and_finite(z, batch_size, key):
    tx = jdp.dp_aggregate_adaptive(z, batch_size=batch_size, key=key)
    updates, clip = _run(tx, tree_of(rows(["normal"] * ROWS, 1)), jnp.asarray(ALL), 2)
    assert np.isfinite(flat(updates, 1)).all() and np.isfinite(clip).all()
