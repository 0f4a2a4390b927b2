import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from checks import ALL
from strategies import GROUPS, PARAMS, flat, rows, tree_of

import jdp
from jdp.clipping import GroupedSum, NormClipper


def _clip(clip_norm, matrix, mask=ALL):
    return flat(jdp.clip_by_norm(clip_norm)(tree_of(matrix), jnp.asarray(mask)).parts[0])


@hypothesis.given(matrix=strategies.gradients(strategies.FINITE), unit=strategies.clip_norms)
def test_flat_clipping_is_that_of_abadi(matrix, unit):
    wide = matrix.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    want = (wide * np.minimum(1, unit / np.maximum(norms, 1e-300))).sum(0)
    np.testing.assert_allclose(_clip(unit, matrix), want, rtol=1e-4, atol=3e-5 * unit)


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 5.0, 1e4])
def test_norm_never_exceeds_the_clip_norm(clip_norm):
    directions = rows(["normal"] * 200, 0).astype(np.float64)
    directions *= 10 * clip_norm / np.linalg.norm(directions, axis=1, keepdims=True)
    one = jax.jit(lambda x: jdp.clip_by_norm(clip_norm)(x, jnp.ones(1, bool)).parts[0])
    for x in directions[:30].astype(np.float32):
        norm = np.linalg.norm(flat(one(tree_of(x[None]))))
        assert clip_norm * (1 - 3e-5) <= norm <= clip_norm


@pytest.mark.parametrize("factor", [7.0, np.inf, np.nan, -1.0])
def test_whatever_the_factor_contributions_stay_within_the_clip_norm(factor):
    clipper = NormClipper((0.5,), lambda norm, group: jnp.full_like(norm, factor))
    total = flat(clipper(tree_of(rows(["normal"], 1)), jnp.ones(1, bool)).parts[0])
    assert np.linalg.norm(total) <= 0.5


def test_automatic_clipping_is_that_of_bu():
    batch = rows(["normal", "tiny", "zero", "huge", "normal", "normal"], 3)
    clipped = jdp.clip_automatic(2.0, stabilizer=0.5)(tree_of(batch), jnp.asarray(ALL))
    wide = batch.astype(np.float64)
    want = (2.0 * wide / (np.linalg.norm(wide, axis=1, keepdims=True) + 0.5)).sum(0)
    np.testing.assert_allclose(flat(clipped.parts[0]), want, rtol=1e-4, atol=1e-6)
    assert clipped.noise_scales == (2.0,)


def test_groups_are_clipped_separately():
    batch = rows(["normal"] * 6, 5)
    clipped = jdp.clip_by_group((1.0, 0.1), GROUPS)(tree_of(batch), jnp.asarray(ALL))
    assert isinstance(clipped, GroupedSum)
    first = batch[:, :15] / np.linalg.norm(batch[:, :15], axis=1, keepdims=True)
    second = 0.1 * batch[:, 15:] / np.linalg.norm(batch[:, 15:], axis=1, keepdims=True)
    want = np.concatenate([first.sum(0), second.sum(0)])
    np.testing.assert_allclose(flat(clipped.combine(clipped.parts)), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(clipped.noise_scales, 2**0.5 * np.array([1.0, 1.0, 0.1]))


def test_equal_group_norms_give_the_noise_of_flat_clipping():
    norm = 3.0 / 2**0.5
    clipped = jdp.clip_by_group((norm, norm), GROUPS)(tree_of(rows(["zero"] * 6, 0)), ALL)
    np.testing.assert_allclose(clipped.noise_scales, 3.0)


def test_an_example_not_finite_in_one_group_is_left_out_of_all():
    batch = rows(["normal", "normal", "normal"], 5)
    batch[1, 20] = np.nan  # in group 1
    clipper = jdp.clip_by_group((1.0, 1.0), GROUPS)
    got = clipper(tree_of(batch), jnp.ones(3, bool))
    want = clipper(tree_of(batch), jnp.array([True, False, True]))
    for a, b in zip(got.parts, want.parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_examples_at_all():
    empty = tree_of(np.zeros((0, 27), np.float32))
    for clipper in (jdp.clip_by_norm(1.0), jdp.clip_automatic(), jdp.clip_by_group((1, 2), GROUPS)):
        clipped = clipper(empty, jnp.zeros(0, bool))
        assert all(not leaf.any() for leaf in jax.tree.leaves(clipped.parts))


def test_bfloat16_contribution_stays_below_the_norm():
    batch = tree_of(1e3 * rows(["normal"], 8), jnp.bfloat16)
    clipped = jdp.clip_by_norm(1.0)(batch, jnp.ones(1, bool))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(clipped.parts))
    assert 1 - 1e-4 < np.linalg.norm(flat(clipped.parts[0])) <= 1


def _sum(clip_norm=1.0):
    return jdp.clip_by_norm(clip_norm)(tree_of(rows(["normal"] * 6, 1)), jnp.asarray(ALL))


def test_merge_refuses_other_scales_and_kinds():
    with pytest.raises(ValueError, match="noise scale 1.0"):
        _sum().merge(_sum(2.0))
    grouped = jdp.clip_by_group((1.0, 1.0), GROUPS)(PARAMS_ROWS, jnp.asarray(ALL))
    with pytest.raises(TypeError, match="ClippedSum"):
        _sum().merge(grouped)
    with pytest.raises(ValueError, match="parts"):
        other = jdp.clip_by_norm(1.0)(jnp.ones((6, 2)), jnp.asarray(ALL))
        _sum().merge(other)


PARAMS_ROWS = jax.tree.map(lambda leaf: jnp.ones((6, *leaf.shape)), PARAMS)


def test_merge_of_traced_scales_keeps_the_larger():
    clip = jax.jit(lambda norm: jdp.clip_by_norm(norm)(PARAMS_ROWS, jnp.asarray(ALL)))
    merged = clip(jnp.float32(1.0)).merge(clip(jnp.float32(2.0)))
    assert float(merged.noise_scales[0]) == 2.0


@pytest.mark.parametrize("norm", [0.0, -1.0, 1e-20, 1e20, np.nan])
def test_a_traced_clip_norm_out_of_range_releases_nothing(norm, key):
    clip = jax.jit(lambda norm: jdp.clip_by_norm(norm)(PARAMS_ROWS, jnp.asarray(ALL)))
    clipped = clip(jnp.float32(norm))
    assert not flat(clipped.parts[0]).any()
    assert np.isnan(flat(jdp.add_noise(key, clipped, 1.0))).all()


def test_rounding_of_long_sums_is_within_the_margin():
    n = 4096  # rows of one sign, the worst case for a plain float32 sum
    x = (
        jnp.full((n, 3), 1 / 3**0.5)
        * (1 + 1e-3 * jnp.sin(jnp.arange(n, dtype=jnp.float32)))[:, None]
    )
    clip = jax.jit(lambda mask: jdp.clip_by_norm(1.0)(x, mask))
    base, without = clip(jnp.ones(n, bool)), clip(jnp.arange(n) != 77)
    change = np.linalg.norm(np.float64(base.parts[0]) - np.float64(without.parts[0]))
    assert change <= 1 + base.rounding
    assert 1e-3 < base.rounding < 2e-3


def test_a_clipped_sum_is_frozen_and_crosses_jit():
    clipped = jax.jit(lambda x: x)(_sum())
    np.testing.assert_array_equal(flat(clipped.parts[0]), flat(_sum().parts[0]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        clipped.noise_scales = (0.0,)


BAD = [
    (lambda: jdp.clip_by_norm(0.0), ValueError, "clip_norm"),
    (lambda: jdp.clip_by_norm(-1.0), ValueError, "clip_norm"),
    (lambda: jdp.clip_by_norm(float("nan")), ValueError, "clip_norm"),
    (lambda: jdp.clip_by_norm(1e-13), ValueError, "1e-12"),
    (lambda: jdp.clip_by_norm(1e13), ValueError, r"1e\+12"),
    (lambda: jdp.clip_by_norm("1"), TypeError, "clip_norm"),
    (lambda: jdp.clip_by_norm(True), TypeError, "clip_norm"),
    (lambda: jdp.clip_by_norm(jnp.ones(2)), TypeError, "clip_norm"),
    (lambda: jdp.clip_by_norm(jnp.bfloat16(1.0)), TypeError, "hyperparam_dtype"),
    (lambda: jdp.clip_automatic(float("inf")), ValueError, "clip_norm"),
    (lambda: jdp.clip_automatic(1.0, stabilizer=0.0), ValueError, "stabilizer"),
    (lambda: jdp.clip_by_group(1.0, GROUPS), TypeError, "clip_norms"),
    (lambda: jdp.clip_by_group((), GROUPS), TypeError, "clip_norms"),
    (lambda: jdp.clip_by_group((1.0, 0.0), GROUPS), ValueError, r"clip_norms\[1\]"),
    (lambda: jdp.clip_by_group((1.0,), GROUPS)(PARAMS_ROWS, ALL), ValueError, "clip_norms"),
    (
        lambda: jdp.clip_by_group((1.0, 1.0), GROUPS | {"c": 2})(PARAMS_ROWS, ALL),
        ValueError,
        "labels",
    ),
    (lambda: jdp.clip_by_group((1.0,), {"a": 0})(PARAMS_ROWS, ALL), ValueError, "groups"),
    (lambda: jdp.clip_by_norm(1.0)(PARAMS_ROWS, [True] * 6), TypeError, "mask"),
    (lambda: jdp.clip_by_norm(1.0)(PARAMS_ROWS, jnp.ones(6)), TypeError, "mask"),
    (lambda: jdp.clip_by_norm(1.0)(PARAMS_ROWS, jnp.ones(5, bool)), ValueError, "mask"),
    (lambda: jdp.clip_by_norm(1.0)({}, ALL), ValueError, "per_example"),
    (lambda: jdp.clip_by_norm(1.0)(jnp.ones(6, int), ALL), TypeError, "floating"),
    (lambda: jdp.clip_by_norm(1.0)(jnp.float32(1.0), ALL), ValueError, "aggregate"),
    (
        lambda: jdp.clip_by_norm(1.0)({"a": jnp.ones((6, 2)), "b": jnp.ones((5, 2))}, ALL),
        ValueError,
        r"\['b'\]",
    ),
]


@pytest.mark.parametrize("make, error, match", BAD, ids=range(len(BAD)))
def test_bad_input(make, error, match):
    with pytest.raises(error, match=match):
        make()
