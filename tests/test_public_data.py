import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import optax
import pytest
from checks import ALL, BATCH
from mechanisms import KEPT, KEPT_AT, WEIGHTS, anchors
from strategies import PARAMS, ROWS, SIZE, flat, row, rows, tree_of

import jdp
from jdp import public_data
from jdp.projection import ProjectionState

MASK = jnp.asarray(ALL)
KEY = jax.random.key(0)


def _clip(matrix, norm):
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix * np.minimum(1, norm / np.maximum(norms, 1e-300))


def _estimate(clipper, matrix):
    clipped = clipper(tree_of(matrix), MASK)
    return flat(clipped.combine(clipped.parts))


def quadratic(params, example):
    """<example, params> summed over leaves: its gradient is the example."""
    return sum(jnp.sum(params[name] * leaf) for name, leaf in example.items())


# Random sparsification ---------------------------------------------------------------------------


def test_sparsified_sum_is_that_of_the_paper():
    matrix = rows(["normal", "in_span", "tiny", "zero", "huge", "normal"], 3)
    masked = np.where(np.isin(np.arange(SIZE), KEPT_AT), np.asarray(matrix, np.float64), 0)
    got = _estimate(public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT), matrix)
    np.testing.assert_allclose(got, _clip(masked, 1.0).sum(0), atol=1e-4)


def test_noise_is_on_the_kept_coordinates_only():
    clipper = public_data.clip_sparsified(jdp.clip_by_norm(0.8), KEPT)
    clipped = clipper(tree_of(np.zeros((ROWS, SIZE))), MASK)
    keys = jax.random.split(KEY, 2000)
    noise = flat(jax.vmap(lambda key: jdp.add_noise(key, clipped, 2.0))(keys), 1)
    np.testing.assert_array_equal(np.delete(noise, KEPT_AT, axis=1), 0)
    assert abs(noise[:, KEPT_AT].std() / 1.6 - 1) < 0.02


def test_sparsified_gep_is_gep_on_what_is_kept():
    matrix = rows(["normal"] * ROWS, 5)
    inner = mechanisms.in_subspace(1e3, 1e3)(1.0)
    got = _estimate(public_data.clip_sparsified(inner, KEPT), matrix)
    np.testing.assert_allclose(got[KEPT_AT], matrix.sum(0)[KEPT_AT], atol=1e-4)
    np.testing.assert_array_equal(np.delete(got, KEPT_AT), 0)


def test_what_is_dropped_may_hold_nothing_that_is_not_finite():
    matrix = rows(["normal"] * ROWS, 7)
    without = np.array(matrix)
    matrix[2, 0], without[2] = np.nan, 0  # coordinate 0 is dropped, example 2 all the same
    clipper = public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT)
    np.testing.assert_array_equal(_estimate(clipper, matrix), _estimate(clipper, without))


def test_sums_of_other_coordinates_are_not_merged():
    other = jax.tree.map(jnp.logical_not, KEPT)
    mine, same, theirs = (
        public_data.clip_sparsified(jdp.clip_by_norm(1.0), kept)(
            tree_of(rows(["normal"] * ROWS, 3)), MASK
        )
        for kept in (KEPT, jax.tree.map(jnp.copy, KEPT), other)
    )
    merged = mine.merge(same)
    np.testing.assert_array_equal(flat(merged.parts[0]), 2 * flat(mine.parts[0]))
    with pytest.raises(ValueError, match="`other` must be a sum of the same coordinates"):
        mine.merge(theirs)
    jax.eval_shape(lambda total: mine.merge(total).parts, theirs)  # traced: not looked at


def test_random_coordinates():
    params = {"a": jnp.zeros((40, 50)), "frozen": None, "b": jnp.zeros(3000)}
    draw = jax.jit(lambda key, rate: public_data.random_coordinates(key, params, rate))
    kept = draw(KEY, jnp.float32(0.9))
    assert kept["frozen"] is None and kept["a"].shape == (40, 50) and kept["b"].dtype == bool
    share = np.mean([kept["a"].mean(), kept["b"].mean()])
    assert abs(share - 0.1) < 3 * np.sqrt(0.09 / 5000)
    assert not np.array_equal(kept["b"][:2000], kept["a"].ravel())  # leaves are independent
    assert not np.array_equal(kept["b"], draw(jax.random.key(1), jnp.float32(0.9))["b"])
    for rate, all_kept in ((0.0, True), (1.0, False)):
        some = public_data.random_coordinates(KEY, PARAMS, rate)
        assert all(np.all(leaf == all_kept) for leaf in some.values())


# AdaDPS ------------------------------------------------------------------------------------------


def test_preconditioned_sum_is_that_of_the_paper():
    matrix = rows(["normal", "in_span", "tiny", "zero", "huge", "normal"], 3)
    weighted = np.asarray(matrix, np.float64) * flat(WEIGHTS)
    got = _estimate(public_data.clip_preconditioned(jdp.clip_by_norm(1.0), WEIGHTS), matrix)
    np.testing.assert_allclose(got, _clip(weighted, 1.0).sum(0), atol=1e-4)


def test_inverse_root_has_a_positive_floor():
    v = {"a": jnp.array([0.0, 1e-12, 4.0]), "frozen": None}
    got = public_data.inverse_root(v, floor=0.5)
    np.testing.assert_allclose(got["a"], [2.0, 2.0, 0.4], rtol=1e-5)
    assert got["frozen"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_preconditioner_that_is_not_finite_lets_nothing_through(bad):
    weights = tree_of(np.full(SIZE, bad))
    got = _estimate(
        public_data.clip_preconditioned(jdp.clip_by_norm(1.0), weights),
        rows(["normal", "zero", "huge"] * 2, 1),
    )
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize(
    "clipper",
    [
        public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT),
        public_data.clip_preconditioned(jdp.clip_by_norm(1.0), WEIGHTS),
    ],
    ids=["sparsified", "preconditioned"],
)
def test_strategies_of_clipped_grad(clipper):
    batch = tree_of(rows(["normal"] * ROWS, 9))
    want = clipper(batch, MASK)
    for options in ({}, {"microbatch_size": 4}, {"strategy": "vmap"}):
        got = jax.jit(jdp.clipped_grad(quadratic, clipper, **options))(PARAMS, batch, mask=MASK)
        assert type(got) is type(want)
        np.testing.assert_allclose(
            flat(got.combine(got.parts)), flat(want.combine(want.parts)), atol=1e-5
        )
    with pytest.raises(ValueError, match="strategy"):
        jdp.clipped_grad(quadratic, clipper, strategy="book-keeping")


def test_frozen_leaves_have_no_weight():
    batch = tree_of(rows(["normal"] * ROWS, 9))
    free = {"a": True, "b": False, "c": True}
    for clipper in (
        public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT),
        public_data.clip_preconditioned(jdp.clip_by_norm(1.0), WEIGHTS),
    ):
        grad = jdp.clipped_grad(quadratic, clipper, trainable=free)
        tx = jdp.privatize(1.0, batch_size=BATCH, key=KEY)
        update, _ = tx.update(grad(PARAMS, batch, mask=MASK), tx.init(PARAMS), PARAMS)
        np.testing.assert_array_equal(update["b"], 0)


# PDA-DPMD ----------------------------------------------------------------------------------------

CURVATURE = np.diag([4.0, 1.0, 0.25]).astype(np.float32)
MINIMUM = jnp.array([1.0, -2.0, 0.5])
PRIVATE = jnp.array([0.3, -0.7, 1.1])  # what the private step says, standing still


def public_loss(theta):
    return 0.5 * (theta - MINIMUM) @ CURVATURE @ (theta - MINIMUM)


def _descend(mixing, learning_rate, steps, curvature=CURVATURE):
    """The practical form from the minimum of the public loss, the private update standing still."""
    gradient = lambda theta, key: curvature @ (theta - MINIMUM)  # noqa: E731
    tx = optax.chain(
        public_data.mix_public(mixing, gradient, key=KEY), optax.sgd(float(learning_rate))
    )

    def step(carry, _):
        theta, state = carry
        updates, state = tx.update(PRIVATE, state, theta)
        return (optax.apply_updates(theta, updates), state), None

    (theta, _), _ = jax.lax.scan(step, (MINIMUM, tx.init(MINIMUM)), length=steps)
    return theta


def _mirror(eta, curvature=CURVATURE):
    """The exact mirror step from the minimum: argmin eta <g, theta> + B(theta, MINIMUM)."""
    return MINIMUM - eta * np.linalg.inv(curvature) @ PRIVATE


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8])
def test_mixing_is_the_gradient_of_the_exact_mirror_step(alpha):
    eta = alpha / (1 - alpha)

    def objective(theta):
        bregman = (
            public_loss(theta)
            - public_loss(MINIMUM)
            - jax.grad(public_loss)(MINIMUM) @ (theta - MINIMUM)
        )
        return eta * PRIVATE @ theta + bregman

    tx = public_data.mix_public(alpha, lambda theta, key: jax.grad(public_loss)(theta), key=KEY)
    for seed in range(3):
        theta = jax.random.normal(jax.random.key(seed), (3,))
        update, _ = tx.update(PRIVATE, tx.init(theta), theta)
        want = (1 - alpha) * jax.grad(objective)(theta)
        np.testing.assert_allclose(update, want, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 0.5])
def test_mixing_comes_to_the_exact_mirror_step(alpha):
    theta = _descend(alpha, 0.4, 400)
    np.testing.assert_allclose(theta, _mirror(alpha / (1 - alpha)), atol=1e-4)


def test_one_step_of_mixing_is_the_exact_mirror_step_where_curvature_is_one_number():
    alpha, h = 0.3, 2.5
    curvature = h * np.eye(3, dtype=np.float32)
    theta = _descend(alpha, 1 / (h * (1 - alpha)), 1, curvature)
    np.testing.assert_allclose(theta, _mirror(alpha / (1 - alpha), curvature), rtol=1e-5)


def test_mixing_schedules():
    cosine = public_data.cosine_mixing(10)
    values = [float(cosine(jnp.int32(t))) for t in range(12)]
    np.testing.assert_allclose(values[:11], np.cos(np.pi * np.arange(11) / 20), atol=1e-6)
    assert values[0] == 1 and values[10] == values[11] == 0
    for mixing, share in (
        (0.25, 0.25),
        (lambda step: jnp.where(step == 0, 0.5, 1), 0.5),
        (lambda step: 7.0, 1.0),
    ):
        tx = public_data.mix_public(mixing, lambda params, key: params, key=KEY)
        update, state = tx.update(tree_of(np.ones(SIZE)), tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(flat(update), share, rtol=1e-6)  # PARAMS are zero
    assert int(state.step) == 1


def test_mixing_draws_a_public_batch_a_step_and_keeps_types_and_frozen_leaves():
    params = {"a": jnp.zeros(2, jnp.bfloat16), "frozen": jnp.ones(2)}
    updates = jax.tree.map(jnp.zeros_like, params)
    public = lambda params, key: {"a": jax.random.normal(key, (2,)), "frozen": None}  # noqa: E731
    tx = public_data.mix_public(0.5, public, key=KEY)
    state, seen = tx.init(params), []
    for _ in range(2):
        update, state = tx.update(updates, state, params)
        assert update["a"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(update["frozen"], 0)
        seen.append(np.asarray(update["a"], np.float32))
    assert not np.array_equal(*seen)


def test_mean_gradient():
    matrix = rows(["normal"] * ROWS, 13)
    free = {"a": True, "b": False, "c": True}
    gradient = public_data.mean_gradient(quadratic, tree_of(matrix))(PARAMS, KEY)
    np.testing.assert_allclose(flat(gradient), matrix.mean(0), atol=1e-6)
    gradient = public_data.mean_gradient(quadratic, tree_of(matrix), trainable=free)(PARAMS, KEY)
    assert gradient["b"] is None
    one = jax.jit(public_data.mean_gradient(quadratic, tree_of(matrix), batch_size=1))
    drawn = {
        int(np.argmin(np.abs(matrix - flat(one(PARAMS, jax.random.key(seed)))).sum(1)))
        for seed in range(40)
    }
    assert drawn == set(range(ROWS))


# Projected DP-SGD --------------------------------------------------------------------------------


def _projection(rank=3, refresh_every=1, gradients=None, **options):
    return public_data.project_updates(
        rank=rank,
        public_gradients=gradients or anchors,
        refresh_every=refresh_every,
        key=KEY,
        **options,
    )


def test_projection_is_onto_the_span_of_public_gradients():
    spanned = rows(["normal"] * 3, 17)
    tx = _projection(gradients=lambda params, key: tree_of(spanned), power_iterations=2)
    update, _ = tx.update(tree_of(row("normal", 5)), tx.init(PARAMS), PARAMS)
    axes = np.linalg.svd(spanned.astype(np.float64), full_matrices=False)[2]
    np.testing.assert_allclose(flat(update), axes.T @ (axes @ row("normal", 5)), atol=1e-4)


def test_projection_in_groups_changes_the_leaves_of_each_by_itself():
    tx = _projection(rank=4, groups=mechanisms.GROUPS)
    vector = row("normal", 5)
    vector[15:] = 0  # group 1 is the last leaf
    update, _ = tx.update(tree_of(vector), tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(update["c"], 0)
    assert 0.05 < np.linalg.norm(flat(update)) < np.linalg.norm(vector)


def test_subspace_is_refreshed_every_few_steps():
    tx = _projection(refresh_every=2)
    state, bases = tx.init(PARAMS), []
    update = jax.jit(tx.update)
    for _ in range(3):
        _, state = update(tree_of(row("normal", 5)), state, PARAMS)
        assert isinstance(state, ProjectionState)
        bases.append(flat(state.bases.rows, 1))
    np.testing.assert_array_equal(bases[0], bases[1])
    assert not np.allclose(bases[0], bases[2])
    np.testing.assert_allclose(bases[2] @ bases[2].T, np.eye(3), atol=1e-4)


def test_projection_keeps_types_and_frozen_leaves():
    params = PARAMS | {"a": PARAMS["a"].astype(jnp.bfloat16)}
    tx = _projection(gradients=lambda params, key: anchors(params, key) | {"b": None})
    updates = jax.tree.map(jnp.ones_like, params)
    update, _ = tx.update(updates, tx.init(params), params)
    assert update["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(update["b"], updates["b"])
