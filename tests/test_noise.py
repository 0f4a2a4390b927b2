import pathlib
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from checks import ALL
from strategies import PARAMS

import jdp
from jdp import _normal, noise
from jdp._typing import NoiseMultiplier
from jdp.noise import step_key


def _zeros(shape=(), clip_norm=1.0, dtype=jnp.float32):
    return jdp.ClippedSum((jnp.zeros(shape, dtype),), (clip_norm,))


def _mapped(function, count=20_000):
    mapped = jax.jit(jax.vmap(function))
    return np.asarray(mapped(jax.random.split(jax.random.key(1), count)), np.float64)


@pytest.mark.parametrize("adjacency, factor", [("zero-out", 1), ("add-remove", 1), (None, 1)])
def test_std_is_multiplier_times_scale(adjacency, factor):
    draws = _mapped(lambda key: jdp.add_noise(key, _zeros((), 0.5), 3.0, adjacency=adjacency))
    assert abs(draws.std() / (1.5 * factor) - 1) < 0.02
    assert abs(draws.mean()) < 5 * 1.5 / len(draws) ** 0.5


def test_replace_one_doubles_and_votes_take_root_two(key):
    once = jdp.add_noise(key, _zeros(4), 1.0)
    np.testing.assert_allclose(
        jdp.add_noise(key, _zeros(4), 1.0, adjacency="replace-one"), 2 * once, atol=2e-3
    )

    class Votes(jdp.ClippedSum):
        replace_one_factor = 2**0.5

    votes = Votes((jnp.zeros(4),), (1.0,))
    np.testing.assert_allclose(
        jdp.add_noise(key, votes, 1.0, adjacency="replace-one"), 2**0.5 * once, atol=2e-3
    )


def test_the_multiplier_carries_its_adjacency(key):
    z = NoiseMultiplier(1.0, "replace-one")
    np.testing.assert_array_equal(
        jdp.add_noise(key, _zeros(4), z),
        jdp.add_noise(key, _zeros(4), 1.0, adjacency="replace-one"),
    )
    with pytest.raises(ValueError, match="adjacency"):
        jdp.add_noise(key, _zeros(4), z, adjacency="zero-out")


def test_no_noise_is_legal_also_without_clipping(key):
    total = jdp.ClippedSum((jnp.arange(3.0),), (float("inf"),))
    np.testing.assert_array_equal(jdp.add_noise(key, total, 0.0), jnp.arange(3.0))
    traced = jax.jit(lambda z: jdp.add_noise(key, total, z, adjacency="zero-out"))(jnp.float32(0))
    np.testing.assert_array_equal(traced, jnp.arange(3.0))


def test_noise_on_a_narrow_sum_is_float32(key):
    assert jdp.add_noise(key, _zeros(4, dtype=jnp.bfloat16), 1.0).dtype == jnp.float32


def test_a_broken_scale_destroys_the_release(key):
    noised = jax.jit(lambda s: jdp.add_noise(key, _zeros(4, s), 1.0))
    assert np.isnan(noised(jnp.float32(jnp.nan))).all()
    assert not np.isfinite(noised(jnp.float32(jnp.inf))).any()


def test_secure_keys_differ_and_have_all_their_bits():
    data = np.stack([jax.random.key_data(jdp.secure_key()) for _ in range(64)])
    assert len(np.unique(data, axis=0)) == 64
    for word in data.T:  # a 32-bit seed would leave the first word at zero
        assert np.bitwise_or.reduce(word) == 0xFFFFFFFF
        assert np.bitwise_and.reduce(word) == 0


def test_secure_key_is_not_baked_into_a_compiled_function():
    with pytest.raises(RuntimeError, match="outside jit"):
        jax.jit(jdp.secure_key)()


def test_an_array_needs_its_adjacency(key):
    # It cannot carry the one that it was calibrated for: replace-one would lose its factor 2.
    with pytest.raises(ValueError, match="adjacency"):
        jdp.add_noise(key, _zeros(4), jnp.float32(NoiseMultiplier(1.0, "replace-one")))


def test_scaling_a_multiplier_keeps_its_adjacency(key):
    for z in (2 * NoiseMultiplier(0.5, "replace-one"), NoiseMultiplier(2.0, "replace-one") / 2):
        np.testing.assert_array_equal(
            jdp.add_noise(key, _zeros(4), z),
            jdp.add_noise(key, _zeros(4), 1.0, adjacency="replace-one"),
        )


def test_rounding_margin_raises_the_noise(key):
    plain = jdp.add_noise(key, _zeros(4), 1.0)
    wide = jdp.ClippedSum((jnp.zeros(4),), (1.0,), rows=1000, rounding=0.01)
    np.testing.assert_allclose(jdp.add_noise(key, wide, 1.0), 1.01 * plain, atol=1.1e-3)


def test_noise_is_not_confined_to_the_values_of_one_draw():
    # A single float32 draw takes 2^32 values; where nobody contributed that would show.
    draws = _mapped(lambda key: _normal.sum_of_two(key, 0, 512, jnp.dtype("float32")), 256).ravel()
    assert len(np.unique(draws.astype(np.float32))) > 0.98 * len(draws)


def test_a_draw_is_the_quantile_of_its_bits_also_in_the_tail():
    tails = np.concatenate(
        [np.arange(3_000), 2**31 - 1 - np.arange(3_000), 7919 * np.arange(2**17)]
    )
    bits = np.concatenate([tails, tails]).astype(np.uint32) << 1
    bits[: len(tails)] |= 1
    exact = scipy.stats.norm.ppf((tails + 0.5) / 2**32)
    draws = np.asarray(jax.jit(_normal._from_bits)(bits), np.float64)
    np.testing.assert_allclose(draws, np.concatenate([exact, -exact]), atol=3e-6)


def test_every_multiple_up_to_eight_deviations_can_be_drawn():
    """One that cannot, but could with some record, would tell that it is there."""
    draws = np.asarray(jax.jit(_normal._from_bits)(np.arange(150_000, dtype=np.uint32) << 1))
    step = noise._GRID
    seen = np.unique(
        np.concatenate(
            [
                np.unique(np.round((one + draws) * np.float32(0.5**0.5) / step))
                for one in draws[:400]
            ]
        )
    )
    wanted = np.arange(6.5 / step, 8 / step)
    assert np.isin(wanted, seen).all()
    assert 8.9 < seen.max() * step < 9


def test_every_purpose_and_step_has_a_key_of_its_own(key):
    keys = [step_key(key, purpose, jnp.int32(t)) for purpose in noise._TAGS for t in range(3)]
    data = {tuple(np.asarray(jax.random.key_data(one)).tolist()) for one in [key, *keys]}
    assert len(data) == 1 + 3 * len(noise._TAGS)


BAD = [
    ((0, _zeros(), 1.0), {}, TypeError, "key"),
    ((jax.random.PRNGKey(0), _zeros(), 1.0), {}, TypeError, "key"),
    ((jax.random.split(jax.random.key(0)), _zeros(), 1.0), {}, TypeError, "key"),
    ((jax.random.key(0), jnp.zeros(3), 1.0), {}, TypeError, "clipped_sum"),
    ((jax.random.key(0), _zeros(), -1.0), {}, ValueError, "noise_multiplier"),
    ((jax.random.key(0), _zeros(), float("nan")), {}, ValueError, "noise_multiplier"),
    ((jax.random.key(0), _zeros(), float("inf")), {}, ValueError, "noise_multiplier"),
    ((jax.random.key(0), _zeros(), "1"), {}, TypeError, "noise_multiplier"),
    ((jax.random.key(0), _zeros(), jnp.bfloat16(1)), {}, TypeError, "hyperparam_dtype"),
    ((jax.random.key(0), _zeros(clip_norm=np.inf), 1.0), {}, ValueError, "clip_norm"),
    ((jax.random.key(0), _zeros(), 1.0), {"adjacency": "both"}, ValueError, "adjacency"),
]


@pytest.mark.parametrize("arguments, options, error, match", BAD, ids=range(len(BAD)))
def test_bad_input(arguments, options, error, match):
    with pytest.raises(error, match=match):
        jdp.add_noise(*arguments, **options)


def test_noise_is_drawn_in_one_place_only():
    # C2. Elsewhere Gaussians only start or complete public subspaces, and start adapters.
    package = pathlib.Path(jdp.__file__).parent
    draws = {
        path.name: len(
            re.findall(r"random\.(?:normal|laplace|exponential|multivariate_normal)\(", text)
        )
        for path in package.glob("*.py")
        if (text := re.sub(r">>> .*", "", path.read_text()))  # examples may
    }
    assert {name: count for name, count in draws.items() if count} == {
        "_normal.py": 1,
        "lora.py": 1,
        "subspace.py": 2,
        "moving_subspace.py": 1,
    }
    for draw in ("_normal.", "_system.add(", "_system.gaussian("):
        users = {path.name for path in package.glob("*.py") if draw in path.read_text()}
        assert users <= {"noise.py"}, draw


@pytest.mark.parametrize("seed, count", [(0, 1), (7, 4097)])
def test_threefry_is_that_of_jax(seed, count):
    key, counter = jax.random.key(seed), jnp.arange(count, dtype=jnp.uint32)
    one, two = _normal.threefry(key, jnp.zeros_like(counter), counter)
    np.testing.assert_array_equal(one ^ two, jax.random.bits(key, (count,), jnp.uint32))
    expected = jax.extend.random.threefry2x32_p.bind(
        *jax.random.key_data(key), counter + 1, counter
    )
    for word, other in zip(_normal.threefry(key, counter + 1, counter), expected, strict=True):
        np.testing.assert_array_equal(word, other)


@pytest.mark.parametrize("impl, dtype", [("threefry2x32", jnp.float32), ("rbg", jnp.float32)])
def test_normal_values(impl, dtype):
    # Both halves of the sum, and both words of one block, are independent: variance and law fit.
    keys = jax.random.split(jax.random.key(3, impl=impl), 64)
    draws = np.stack(
        [_normal.sum_of_two(key, i % 2, 1024, jnp.dtype(dtype)) for i, key in enumerate(keys)]
    )
    assert scipy.stats.kstest(draws.ravel(), "norm").pvalue > 1e-3
    neighbours = np.mean(draws[:, 1:] * draws[:, :-1])
    assert abs(neighbours) < 5 / draws.size**0.5


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_streams_differ(impl):
    key = jax.random.key(3, impl=impl)
    one, two = (_normal.sum_of_two(key, i, 100, jnp.dtype(jnp.float32)) for i in (0, 1))
    assert np.intersect1d(one, two).size < 3  # floats may meet by chance


def test_large_leaves_have_noise_of_their_own(monkeypatch, key):
    shapes = [(3, 4), (5,), (3, 4), (2,), (7, 2), ()]
    parts = tuple(jnp.zeros(shape) for shape in shapes)
    clipped = jdp.ClippedSum((parts,), (1.0,))
    for bound in (0, 10, 2**16):
        monkeypatch.setattr("jdp.noise._LARGE", bound)
        noised = jax.jit(lambda key: jdp.add_noise(key, clipped, 1.0))(key)
        assert [leaf.shape for leaf in noised] == shapes
        values = np.concatenate([np.ravel(leaf) for leaf in noised])
        assert len(np.unique(values)) > values.size - 3 and np.abs(values).max() < 6
    monkeypatch.setattr("jdp.noise._LARGE", 6)
    draws = _mapped(lambda key: jnp.stack([leaf[0, 0] for leaf in _two_leaves(key)]), 20_000)
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.04
    assert (np.abs(draws.std(axis=0) - 1) < 0.03).all()


def _two_leaves(key):
    return jdp.add_noise(key, jdp.ClippedSum(((jnp.zeros((2, 3)),) * 2,), (1.0,)), 1.0)


def test_counters_go_on_beyond_a_chunk(monkeypatch, key):
    monkeypatch.setattr(_normal, "_PER_CHUNK", 100)
    draws = _normal.sum_of_two(key, 3, 250, jnp.dtype(jnp.float32))
    assert draws.shape == (250,) and len(np.unique(draws)) == 250


def test_pair_of_doors_agree(key):
    # dp_aggregate is clip, add_noise and divide with the step's key.
    grads = jax.tree.map(lambda leaf: jnp.ones((6, *leaf.shape)), PARAMS)
    tx = jdp.dp_aggregate(jdp.clip_by_norm(0.5), 1.3, batch_size=7, key=key)
    update, _ = tx.update(grads, tx.init(PARAMS), PARAMS, mask=jnp.asarray(ALL))
    clipped = jdp.clip_by_norm(0.5)(grads, jnp.asarray(ALL))
    noised = jdp.add_noise(step_key(key, "noise", jnp.int32(0)), clipped, 1.3)
    for name in PARAMS:
        np.testing.assert_allclose(update[name], noised[name] / 7, rtol=1e-6)
