"""Noise from the operating system's generator: its law, its freshness, its last bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import jdp
from jdp import _system
from jdp.noise import sparse_vector


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """The tests' bytes come from a seed, so that no test fails by chance."""
    monkeypatch.setattr(_system.os, "urandom", np.random.default_rng(7).bytes)


@pytest.fixture
def key():
    return jdp.secure_key(system_noise=True)


def _zeros(*shapes, scale=1.0, fill=0.0):
    return jdp.ClippedSum((tuple(jnp.full(shape, fill) for shape in shapes),), (scale,))


def test_values_are_normal_to_the_tails():
    draws = _system.gaussian(400_000)
    assert draws.dtype == np.float64 and len(np.unique(draws)) == len(draws)
    assert scipy.stats.kstest(draws, "norm").pvalue > 1e-3
    for wrong in (0.98, 1.02):
        assert scipy.stats.kstest(draws * wrong, "norm").pvalue < 1e-4
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = np.std(draws**power) / len(draws) ** 0.5
        assert abs(np.mean(draws**power) - moment) < 5 * spread
    beyond = np.mean(np.abs(draws) > 4) / (2 * scipy.stats.norm.sf(4))
    assert 0.5 < beyond < 1.6  # 25 expected
    for lag in (1, 2, _system._CHUNK):  # neighbours, and chunks
        assert abs(np.mean(draws[lag:] * draws[:-lag])) < 5 / len(draws) ** 0.5


def test_the_generator_is_that_of_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(_system.os, "urandom", lambda n: asked.append(n) or b"\xff" * n)
    assert np.all(_system.gaussian(3) == 0) and sum(asked) == 3 * 8 * 2 * _system._DRAWS


def test_scales_parts_and_leaves_have_their_own_noise(key):
    parts = _zeros((2, 3), (4,)).parts + (jnp.zeros(5),)
    noised = jax.jit(lambda key: jdp.add_noise(key, Raw(parts, (0.5, 3.0)), 2.0))
    draws = np.stack([np.concatenate([np.ravel(x) for x in noised(key)]) for _ in range(3000)])
    np.testing.assert_allclose(draws.std(0), [1.0] * 10 + [6.0] * 5, rtol=0.07)
    correlation = np.corrcoef(draws, rowvar=False) - np.eye(15)
    assert np.abs(correlation).max() < 6 / 3000**0.5
    calls = (draws / draws.std(0))[1:] * (draws / draws.std(0))[:-1]
    assert np.abs(calls.mean()) < 5 / calls.size**0.5


class Raw(jdp.ClippedSum):
    def combine(self, parts):
        return jax.tree.leaves(parts)


def test_no_call_repeats_another(key):
    total = _zeros(50)
    eager = [jdp.add_noise(key, total, 1.0)[0] for _ in range(2)]
    one = jax.jit(lambda key: jdp.add_noise(key, total, 1.0)[0])
    scanned = jax.jit(lambda key: jax.lax.scan(lambda c, _: (c, one(key)), 0, length=3)[1])(key)
    mapped = jax.jit(jax.vmap(one))(jnp.stack([key, key]))
    values = np.concatenate([np.ravel(x) for x in (*eager, one(key), one(key), scanned, mapped)])
    assert len(values) == 450 and len(np.unique(values)) > 449


def test_replace_one_and_the_rounding_margin_raise_it(key):
    total = jdp.ClippedSum((jnp.zeros(20_000),), (1.0,), rounding=0.5)
    noised = jdp.add_noise(key, total, 1.0, adjacency="replace-one")
    assert abs(np.std(noised) / 3 - 1) < 0.02


def test_no_noise_and_broken_scales(key):
    exact = jdp.ClippedSum((jnp.arange(3.0),), (float("inf"),))
    np.testing.assert_array_equal(jdp.add_noise(key, exact, 0.0), jnp.arange(3.0))
    noised = jax.jit(lambda scale: jdp.add_noise(key, _zeros(4, scale=scale), 1.0)[0])
    assert np.isnan(noised(jnp.float32(jnp.nan))).all()
    assert not np.isfinite(noised(jnp.float32(jnp.inf))).any()


def test_all_else_is_derived_from_the_key(key):
    plain = jax.random.wrap_key_data(jax.random.key_data(key))
    for draw in (jax.random.bits, jax.random.split, lambda key: jax.random.fold_in(key, 3)):
        one, two = (draw(k) for k in (key, plain))
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_array_equal(one, two)


def test_it_trains_in_a_compiled_loop(key):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(60, 3)), jnp.float32)
    grad = jdp.clipped_grad(lambda w, x: 0.5 * (w @ x - x[0]) ** 2, jdp.clip_by_norm(1.0))
    tx = optax.chain(jdp.privatize(0.1, batch_size=60, key=key), optax.sgd(1.0))

    def step(_, carry):
        updates, state = tx.update(grad(carry[0], x, mask=jnp.ones(60, bool)), carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    fit = jax.jit(lambda w: jax.lax.fori_loop(0, 20, step, (w, tx.init(w))))
    (first, state), (second, _) = fit(jnp.zeros(3)), fit(jnp.zeros(3))
    for w in (first, second):
        np.testing.assert_allclose(w, [1, 0, 0], atol=0.1)
    assert not np.array_equal(first, second) and int(state[0].step) == 20


def test_what_would_repeat_or_divide_it_is_refused(key, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="Laplace"):
        sparse_vector(key, jnp.ones(3), 1.0, 1.0)
    mesh = jax.make_mesh((1,), ("batch",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("batch")
    noised = jax.shard_map(
        lambda x: jdp.add_noise(key, jdp.ClippedSum((x,), (1.0,)), 1.0),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
    )
    with pytest.raises(ValueError, match="shard_map"):
        noised(jnp.zeros(4))
    plan = jdp.plan(100, 10, 5, noise_multiplier=1.0, delta=1e-3)
    state = jnp.zeros(2), key, jdp.secure_key()
    with jdp.Ledger(tmp_path) as ledger, pytest.raises(ValueError, match="taken again must repeat"):
        jdp.ResumableRun(ledger, plan, state, lambda i, state: state, data="none")
    with pytest.raises(TypeError, match="system_noise"):
        jdp.secure_key(system_noise=1)  # pyright: ignore
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="several processes"):
        jdp.secure_key(system_noise=True)


# What SECURITY.md says of float32 ----------------------------------------------------------------


def _released(key, fill, count=200_000):
    return np.asarray(jdp.add_noise(key, _zeros(count, fill=fill), 1.0)[0], np.float64)


@pytest.mark.parametrize("key_kind, step", [("float32", 2**10), ("system", 2**20)])
def test_what_is_released_has_no_last_bits(key_kind, step, key):
    """Multiples of a public step, whatever the sum; without it, the bits tell the sum."""
    key = key if key_kind == "system" else jax.random.key(0)
    for fill in (0.0, 0.3, 1.0, 1.3):
        values = _released(key, fill, 20_000) * step
        np.testing.assert_array_equal(values, np.round(values))
        assert len(np.unique(values)) > 4_000  # no coarser than is said


@pytest.mark.parametrize("without, share", [(0.0, 0.257), (0.3, 0.139)])
def test_float32_noise_that_is_not_rounded_tells_the_sum(without, share, monkeypatch):
    """How often a value released without a record, that adds 1, is finer than any with it."""
    monkeypatch.setattr(jdp.noise, "_on_grid", lambda noised, std: noised)

    def finer(fill):
        return np.mean(np.mod(_released(jax.random.key(0), fill) * 2**24, 1) != 0)

    assert finer(without) == pytest.approx(share, abs=0.005)
    assert finer(without + 1) == 0


@pytest.mark.slow
def test_every_cell_is_released_as_often_as_it_should_be():
    """4e7 values in 6,145 cells: where the sum lies between the cells' edges is not to be seen."""
    edges = (np.arange(-3 * 1024, 3 * 1024 + 2) - 0.5) / 1024
    for fill in (0.0, 0.3, 1.0):
        counts = np.zeros(len(edges) - 1)
        for part in range(10):
            counts += np.histogram(_released(jax.random.key(part), fill, 4_000_000), edges)[0]
        expected = 4e7 * np.diff(scipy.stats.norm.cdf(edges, loc=fill))
        chosen = expected > 100
        chi = np.sum((counts - expected)[chosen] ** 2 / expected[chosen])
        assert scipy.stats.chi2.sf(chi, chosen.sum() - 1) > 1e-4


@pytest.mark.parametrize("std", [0.0, 1e-38, 1e-3, 1.0, 1.5, 1e20])
def test_rounding_loses_less_than_a_thousandth_of_the_noise(std):
    exact = np.array([0.0, 1e-30, 0.3, -1000.3, 1e30], np.float32)
    rounded = np.asarray(jdp.noise._on_grid(jnp.asarray(exact), jnp.float32(std)))
    assert np.abs(rounded - exact).max() <= 0.001 * std


def test_released_values_lie_closer_than_the_noise():
    for total, spacing in ((1, 1.2e-7), (1_000, 6.2e-5), (65_536, 7.9e-3)):
        assert np.spacing(np.float32(total)) < spacing
