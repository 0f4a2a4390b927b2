"""ReLU regression: what one record can change, noise, stalling, refusals, reference points."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from relu_twins import RELU_TWINS

import jdp
from jdp import relu_fit, thresholds, tree_aggregation
from jdp._typing import NoiseMultiplier
from jdp.relu_regression import (
    Descent,
    FixedThreshold,
    Grid,
    PrivateThreshold,
    PublicThreshold,
    clipped_sum,
    fit,
    plan_blocks,
    records,
    unprotected_glmtron,
    unprotected_sgd,
)

N, D, DELTA = 96, 4, 1e-5
NO_NOISE = {"noise_multiplier": 0.0, "delta": DELTA}
DESCENT = Descent(2.0, 1.0)
PRIVATE = PrivateThreshold(Grid(0.05, 4), share=0.2)


def data(seed=0, n=N, d=D, noise=0.1):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=d)
    w = w / np.linalg.norm(w)
    x = rng.normal(size=(n, d)) / d**0.5
    y = np.maximum(0, x @ w) + noise * rng.normal(size=n)
    return x.astype(np.float32), y.astype(np.float32), w.astype(np.float32)


PUBLIC = PublicThreshold(*map(jnp.asarray, data(9, 20)[:2]), Grid(0.05, 4), quantile=0.9)
# name: plan, threshold, how often a record is in a release of a pass
RUNS = {
    "full": (plan_blocks(N, N, 3, **NO_NOISE), FixedThreshold(0.3), 3),
    "full-same-rows": (plan_blocks(N, N, 3, release="same-rows", **NO_NOISE), PRIVATE, 6),
    "single": (plan_blocks(N, 1, **NO_NOISE), PUBLIC, 1),
    "blocks": (plan_blocks(N, 16, threshold_rows=8, **NO_NOISE), PRIVATE, 1),
    "blocks-rarely": (
        plan_blocks(N, 10, threshold_rows=8, threshold_every=2, **NO_NOISE),
        dataclasses.replace(PRIVATE, mechanism="counts"),
        1,
    ),
    "tree": (plan_blocks(N, 12, release="tree", **NO_NOISE), FixedThreshold(0.3), 4),
    "two-passes": (plan_blocks(N, 16, 12, **NO_NOISE), FixedThreshold(0.3), 2),
}
KINDS = {
    "other": (np.full(D, 0.5), 0.1),
    "huge x": (np.full(D, 1e6), 0.0),
    "overflowing x": (np.full(D, 1e30), 0.0),
    "zero x": (np.zeros(D), 1.0),
    "nan x": (np.array([np.nan, 1, 1, 1]), 0.0),
    "inf y": (np.full(D, 0.5), np.inf),
    "residual above the grid": (np.full(D, 0.5), 1e8),
}


def recorded(monkeypatch, plan, threshold):
    """`(x, y) -> releases`: (what, parts, scales) before noise, given outputs that never change."""
    log = []

    def stub(what):
        def add_noise(key, clipped, z, *, adjacency):
            def record(parts, scales):
                log.append((what, [np.asarray(p) for p in parts], np.asarray(scales)))

            scales = jnp.stack([jnp.asarray(s, jnp.float32) for s in clipped.noise_scales])
            jax.debug.callback(record, clipped.parts, scales, ordered=True)
            draw = lambda part: 3 + jax.random.normal(key, part.shape)  # noqa: E731
            return clipped.combine(jax.tree.map(draw, clipped.parts))

        return add_noise

    monkeypatch.setattr(relu_fit, "add_noise", stub("gradient"))
    monkeypatch.setattr(tree_aggregation, "add_noise", stub("nodes"))
    monkeypatch.setattr(thresholds, "add_noise", stub("threshold"))
    monkeypatch.setattr(relu_fit, "check_threshold", lambda *_: None)
    run = jax.jit(
        lambda x, y: fit(jax.random.key(1), x, y, plan, threshold=threshold, descent=DESCENT)
    )

    def releases(x, y):
        log.clear()
        jax.block_until_ready(run(x, y))
        jax.effects_barrier()
        return list(log)

    return releases


def changes(first, second, factor):
    """How far each release moved, in units of what its part may move under replace-one."""
    found = []
    for step, ((what, a, scales), (_, b, same)) in enumerate(zip(first, second, strict=True)):
        np.testing.assert_array_equal(scales, same)  # never depends on the data but by outputs
        for level, (p, q, scale) in enumerate(zip(a, b, scales, strict=True)):
            if what == "nodes":
                scale = scale / len(a) ** 0.5  # the joint release pays for all levels
                if (step + 1) % 2**level:
                    continue  # not full, not released
            own = factor if what != "threshold" else max(1.0, factor / 2**0.5)
            moved = np.linalg.norm(p - q) / (scale * own)
            assert moved <= 1 + 3e-4
            found.append(moved)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_one_record_changes_its_own_releases_only_and_by_the_bound(name, monkeypatch):
    plan, threshold, times = RUNS[name]
    releases = recorded(monkeypatch, plan, threshold)
    x, y, _ = data()
    base = releases(x, y)
    seen = set()
    for record, (kind, (other_x, other_y)) in zip(
        range(0, N, 7), list(KINDS.items()) * 2, strict=False
    ):
        other = x.copy(), y.copy()
        other[0][record], other[1][record] = other_x, other_y
        replaced = changes(base, releases(*other), 2.0)
        other[0][record] = np.nan  # contributes nothing: zero-out
        zeroed = changes(base, releases(*other), 1.0)
        assert np.count_nonzero(replaced) <= times, kind
        assert np.count_nonzero(zeroed) <= times, kind
        seen.add(np.count_nonzero(zeroed))
    assert max(seen) == times or (name, max(seen)) == ("tree", 3)


@pytest.mark.parametrize("name", RELU_TWINS)
def test_broken_runs_are_caught(name, monkeypatch):
    RELU_TWINS[name](monkeypatch)
    run = "tree" if "tree" in name else "blocks"
    with pytest.raises(AssertionError):
        test_one_record_changes_its_own_releases_only_and_by_the_bound(run, monkeypatch)


def test_nodes_are_sums_of_their_leaves_with_the_noise_of_the_largest_threshold():
    key, steps, scales = jax.random.key(0), 13, np.array([1, 2, 1, 8, 1, 1, 4, 1, 1, 1, 2, 1, 1.0])
    leaves = np.random.default_rng(0).normal(size=(steps, D)).astype(np.float32)

    def walk(z, key):
        def step(state, t):
            leaf = jdp.ClippedSum((leaves_[t],), (scales_[t],), rows=1)
            grown, state = tree_aggregation.climb(
                jax.random.fold_in(key, t), t, leaf, state, z, "zero-out"
            )
            return state, (grown, state.prefix)

        leaves_, scales_ = jnp.asarray(leaves), jnp.asarray(scales, jnp.float32)
        return jax.lax.scan(step, tree_aggregation.initial_tree(4, leaves_[0]), jnp.arange(steps))[
            1
        ]

    grown, prefix = jax.jit(walk, static_argnums=0)(0.0, key)
    np.testing.assert_allclose(prefix, np.cumsum(leaves, 0), atol=1e-5)
    np.testing.assert_allclose(np.cumsum(grown, 0), prefix, atol=1e-5)
    draws = jax.jit(jax.vmap(lambda key: walk(1.0, key)[1]))(jax.random.split(key, 2000))
    std = (np.asarray(draws) - np.asarray(prefix)).std(axis=(0, 2))
    for t in range(1, steps + 1):
        nodes, end = [], t
        for level in range(4):
            if t >> level & 1:
                nodes.append(scales[end - 2**level : end].max())
                end -= 2**level
        expected = 2 * math.sqrt(sum(node**2 for node in nodes))  # sqrt(height) = 2
        assert std[t - 1] == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("leaves, rows", [(1, 90_000), (4, 10_000)])
def test_nodes_pay_for_the_rounding_of_their_leaves(leaves, rows, monkeypatch):
    leaf = clipped_sum(
        jnp.zeros(1),
        records(jnp.ones((rows, 1)), jnp.ones(rows), Descent()),
        jnp.ones(rows, bool),
        0.3,
        Descent(),
    )
    found = []
    monkeypatch.setattr(
        tree_aggregation, "add_noise", lambda _, total, *__, **___: found.append(total) or total
    )
    state = tree_aggregation.initial_tree(leaves.bit_length(), jnp.zeros(1))
    with pytest.raises(TypeError):  # what takes the noise's place is no array
        tree_aggregation.climb(jax.random.key(0), jnp.int32(0), leaf, state, 1.0, "zero-out")
    assert leaf.rounding > 1e-3
    assert found[0].rounding > leaf.rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks-rarely", "tree"])
def test_records_of_two_widths_are_brought_to_one(name):
    plan, threshold, _ = RUNS[name]
    x, y, _ = data()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        grid = Grid(np.float64(0.05), 4)
        if isinstance(threshold, PrivateThreshold):
            threshold = dataclasses.replace(threshold, grid=grid)

        def run(x, y, descent):
            options = {"threshold": threshold, "descent": descent}
            return fit(jax.random.key(0), x, y, plan, **options).weights

        wide = [x.astype(np.float64), y.astype(np.float64)]
        expected = run(*wide, DESCENT)
        radius = Descent(2.0, 1.0, jnp.float64(9.0))
        for own in ([x, wide[1], DESCENT], [wide[0], y, DESCENT], [x, y, radius]):
            found = run(*own)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        assert run(x, wide[1], DESCENT).dtype == jnp.float64


@pytest.mark.parametrize("adjacency, factor", [("zero-out", 1.0), ("replace-one", 2.0)])
def test_noise_is_proportional_to_threshold_and_bound(adjacency, factor):
    plan = plan_blocks(64, 16, noise_multiplier=3.0, delta=DELTA, adjacency=adjacency)
    x, y = jnp.zeros((64, D)), jnp.zeros(64)

    def run(key):
        return fit(
            key,
            x,
            y,
            plan,
            threshold=FixedThreshold(0.2),
            descent=Descent(2.0, 1.5, average="last"),
        ).path

    paths = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 1500))
    steps = np.diff(np.asarray(paths), axis=1, prepend=0)
    expected = 2.0 * 3.0 * factor * 1.5 * 0.2 / 16
    assert steps.std(axis=(0, 2)) == pytest.approx(np.full(4, expected), rel=0.04)
    correlation = np.corrcoef(steps.reshape(1500, -1), rowvar=False) - np.eye(16)
    assert np.abs(correlation).max() < 0.15


def test_runs_are_pure_and_vmap_over_seeds_and_numbers():
    plan = plan_blocks(N, 16, noise_multiplier=1.0, delta=DELTA, threshold_rows=8)
    plan = dataclasses.replace(plan, noise_multiplier=NoiseMultiplier(1.0, "zero-out"))
    x, y, _ = map(jnp.asarray, data())
    small = PrivateThreshold(Grid(0.05, 2), share=0.2)

    def run(key, rate):
        return fit(key, x, y, plan, threshold=small, descent=Descent(rate)).weights

    keys, rates = jax.random.split(jax.random.key(3), 3), jnp.array([0.5, 1.0, 2.0])
    together = jax.jit(jax.vmap(run))(keys, rates)
    one = jax.jit(run)
    np.testing.assert_allclose(
        together, [one(*a) for a in zip(keys, rates, strict=True)], atol=1e-5
    )
    np.testing.assert_array_equal(one(keys[0], rates[0]), one(keys[0], rates[0]))
    assert not np.allclose(one(keys[0], rates[0]), one(keys[1], rates[0]))


def test_without_noise_and_clipping_it_is_gradient_descent():
    x, y, _ = data()
    w = np.zeros(D)
    for _ in range(5):
        w = w - 0.5 * ((np.maximum(0, x @ w) - y)[:, None] * x).mean(0)
    np.testing.assert_allclose(
        unprotected_glmtron(x, y, steps=5, learning_rate=0.5).weights, w, atol=1e-5
    )
    start = np.full(D, 0.3, np.float32)
    order = np.asarray(
        plan_blocks(N, 1, **NO_NOISE).sampler.partition(jax.random.split(jax.random.key(0))[1])[1]
    ).ravel()
    w, path = start.astype(np.float64), []
    for i in order:
        w = w - 0.1 * (np.maximum(0, x[i] @ w) - y[i]) * (x[i] @ w > 0) * x[i]
        path.append(w)
    found = unprotected_sgd(jax.random.key(0), x, y, learning_rate=0.1, start=jnp.asarray(start))
    np.testing.assert_allclose(found.path, path, atol=1e-5)
    np.testing.assert_allclose(found.weights, np.mean(path[N // 2 :], 0), atol=1e-5)


def test_sgd_stalls_at_zero_where_glmtron_and_noise_do_not():
    x, y, truth = data(n=200, noise=0.0)
    sgd = unprotected_sgd(jax.random.key(0), x, y, learning_rate=0.5, passes=2)
    np.testing.assert_array_equal(sgd.path, 0)
    found = unprotected_glmtron(x, y, steps=200, learning_rate=4.0).weights
    np.testing.assert_allclose(found, truth, atol=1e-2)
    plan = jdp.plan(200, 20, 5, noise_multiplier=1.0, delta=DELTA)
    descent = Descent(1.0, gradient="true", average="last")
    path = fit(jax.random.key(0), x, y, plan, threshold=FixedThreshold(0.1), descent=descent).path
    assert np.all(np.any(np.asarray(path) != 0, axis=1))  # one step is enough


def test_true_gradient_keeps_wrong_signs_and_the_switch_does_not():
    rng = np.random.default_rng(0)
    x = np.eye(D)[rng.integers(0, D, 400)] * rng.choice([-1, 1], (400, 1))
    truth, start = np.array([0.5, -0.5, 0.5, -0.5]), jnp.array([-0.5, 0.5, 0.5, -0.5])
    x, y = x.astype(np.float32), np.maximum(0, x @ truth).astype(np.float32)
    plan = plan_blocks(400, 400, 60, **NO_NOISE)
    found = {
        g: np.asarray(
            fit(
                jax.random.key(0),
                x,
                y,
                plan,
                threshold=FixedThreshold(1.0),
                descent=Descent(4.0, gradient=g, average="last"),
                start=start,
            ).weights
        )
        for g in ("true", "surrogate", "switch")
    }
    np.testing.assert_allclose(found["true"][:2], 0, atol=1e-3)
    for gradient in ("surrogate", "switch"):
        np.testing.assert_allclose(found[gradient], truth, atol=1e-3)


def test_radius_average_and_decay():
    x, y, _ = data()
    plan = plan_blocks(N, N, 8, **NO_NOISE)
    descent = Descent(4.0, radius=0.5, average="all")
    found = fit(jax.random.key(0), x, 5 * y, plan, threshold=FixedThreshold(9.0), descent=descent)
    path = np.asarray(found.path)
    assert np.linalg.norm(path, axis=1).max() <= 0.5 + 1e-5
    np.testing.assert_allclose(found.weights, path.mean(0), atol=1e-6)
    np.testing.assert_allclose(Descent().shares(8) @ path, path[4:].mean(0), atol=1e-6)
    np.testing.assert_array_equal(Descent(average="last").shares(8) @ path, path[-1])
    rates = Descent(1.0, decay="halving").rates(8)  # every 8 / 3 steps, rounded
    np.testing.assert_allclose(rates, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(Descent(0.3).rates(3), 0.3)
    assert Descent(1.0, decay="halving").rates(1).shape == (1,)


# Refusals --------------------------------------------------------------------------------------


X, Y, _ = data()
FULL = plan_blocks(N, N, 3, **NO_NOISE)
PAID = {"epsilon": 1.0, "delta": DELTA}
BAD = [
    ({"key": 3}, TypeError, "key"),
    ({"x": X[:-1]}, ValueError, "x.*96"),
    ({"x": X[:, 0]}, ValueError, "x"),
    ({"y": X}, ValueError, "y"),
    ({"x": X.astype(int)}, TypeError, "x.*floating"),
    ({"y": [1.0] * N}, TypeError, "y"),
    ({"plan": None}, TypeError, "plan"),
    ({"start": jnp.zeros(D + 1)}, ValueError, "start"),
    ({"threshold": PublicThreshold(jnp.ones((5, D + 1)), jnp.ones(5))}, ValueError, "threshold.x"),
    ({"plan": jdp.plan(N, 8, 3, sampling="fixed-batches", **NO_NOISE)}, TypeError, "plan"),
    ({"threshold": 0.3}, TypeError, "threshold"),
    ({"x": X[:, :0]}, ValueError, "x"),
    ({"descent": None}, TypeError, "descent"),
    ({"descent": Descent(1.0, 1e10), "threshold": FixedThreshold(1e10)}, ValueError, "1e.12"),
    ({"descent": Descent(1.0, 1e-9), "threshold": FixedThreshold(1e-9)}, ValueError, "1e-12"),
    (
        {"descent": Descent(1.0, math.inf), "plan": plan_blocks(N, N, epsilon=1, delta=DELTA)},
        ValueError,
        "feature_bound.*finite when",
    ),
    ({"threshold": PRIVATE}, ValueError, "threshold"),
    ({"plan": plan_blocks(N, 9, threshold_rows=9, **NO_NOISE)}, ValueError, "threshold"),
    (
        {
            "plan": plan_blocks(N, 9, threshold_rows=9, **NO_NOISE),
            "threshold": PrivateThreshold(mechanism="sparse-vector"),
        },
        ValueError,
        "mechanism",
    ),
    (
        {
            "threshold": FixedThreshold(math.inf),
            "plan": plan_blocks(N, N, 3, epsilon=1, delta=DELTA),
        },
        ValueError,
        "finite when",
    ),
    # The same numbers as concrete arrays.
    ({"descent": Descent(jnp.float32(-1.0))}, ValueError, "learning_rate"),
    ({"descent": Descent(1.0, jnp.float32(0.0))}, ValueError, "feature_bound"),
    ({"threshold": FixedThreshold(jnp.float32(1e13))}, ValueError, "between 1e-12"),
    (
        {"descent": Descent(1.0, jnp.float32(math.inf)), "plan": plan_blocks(N, N, **PAID)},
        ValueError,
        "feature_bound.*finite when",
    ),
    (
        {"threshold": FixedThreshold(jnp.float32(math.inf)), "plan": plan_blocks(N, N, **PAID)},
        ValueError,
        "finite when",
    ),
    (
        {"plan": jdp.plan(N, 8, 3, adjacency="add-remove", **NO_NOISE)},
        ValueError,
        "zero-out.*add-remove.*not finite",
    ),
    ({"plan": dataclasses.replace(FULL, steps=10**10)}, ValueError, "steps.*10000000000"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_what_does_not_belong_together_is_refused(change, error, message):
    arguments = {"key": jax.random.key(0), "x": X, "y": Y, "plan": FULL}
    arguments |= {"threshold": FixedThreshold(0.3), "descent": DESCENT} | change
    with pytest.raises(error, match=message):
        fit(**arguments)


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: Descent(0.0), ValueError),
        (lambda: Descent(math.inf), ValueError),
        (lambda: Descent(1.0, -1.0), ValueError),
        (lambda: FixedThreshold(0.0), ValueError),
        (lambda: FixedThreshold(jnp.float32(-1.0)), ValueError),
        (lambda: PrivateThreshold(share=jnp.float32(7.0)), ValueError),
        (lambda: PrivateThreshold(share=jnp.ones((), jnp.bfloat16)), TypeError),
        (lambda: PublicThreshold(X, Y, quantile=jnp.float32(0.0)), ValueError),  # pyright: ignore
        (lambda: Descent(gradient="false"), ValueError),  # pyright: ignore
        (lambda: Grid(0.0), ValueError),
        (lambda: Grid(1.0, 0), ValueError),
        (lambda: PrivateThreshold(share=1.0), ValueError),
        (lambda: PrivateThreshold(failure=0.0), ValueError),
        (lambda: PrivateThreshold(mechanism="laplace"), ValueError),  # pyright: ignore
        (lambda: PublicThreshold(X, Y, quantile=0.0), ValueError),  # pyright: ignore
        (lambda: PublicThreshold(X[:0], Y[:0]), TypeError),  # pyright: ignore
        (lambda: PublicThreshold(X, Y[:-1]), ValueError),  # pyright: ignore
        (lambda: PublicThreshold([[1.0]], [1.0]), TypeError),  # pyright: ignore
        (lambda: PublicThreshold(X.astype(int), Y), TypeError),  # pyright: ignore
    ],
)
def test_bad_configuration_is_refused(make, error):
    with pytest.raises(error):
        make()
