import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import subspace
from jdp.subspace import lift, project, public_bases

K, M, P = 6, 20, 40
basis_of = jax.jit(lambda key, anchors: jdp.power_iteration(key, anchors, K))


def _error(rows):
    rows = np.asarray(rows, np.float64)
    return np.linalg.norm(rows @ rows.T - np.eye(len(rows)))


def _anchors(kind):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(M, P))
    left, _, right = np.linalg.svd(a, full_matrices=False)
    if kind == "ill-conditioned":
        a = left * 10.0 ** -np.arange(M) @ right
    elif kind == "rank 2":
        a = left[:, :2] * [3.0, 1.0] @ right[:2]
    elif kind == "rank 1":
        a = np.ones((M, P))
    elif kind == "zero":
        a = np.zeros((M, P))
    elif kind == "one NaN row":
        a[3, 4] = np.nan
    elif kind == "all NaN":
        a[:] = np.nan
    elif kind == "infinite":
        a[0, 0] = np.inf
    elif kind == "tiny":
        a *= 1e-25
    elif kind == "huge":
        a *= 1e25
    elif kind == "dead units":
        a[:, 10:] = 0
    elif kind == "few":
        a[4:] = 0
    return jnp.asarray(a, jnp.float32)


KINDS = ["plain", "ill-conditioned", "rank 2", "rank 1", "zero", "one NaN row", "all NaN"]
KINDS += ["infinite", "tiny", "huge", "dead units", "few"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_orthonormal(kind, key):
    rows = basis_of(key, _anchors(kind))
    assert rows.shape == (K, P)
    assert _error(rows) < 1e-5


def test_projector_is_idempotent(key):
    rows = np.asarray(basis_of(key, _anchors("plain")), np.float64)
    projector = rows.T @ rows
    np.testing.assert_allclose(projector @ projector, projector, atol=1e-5)


@pytest.mark.parametrize("kind", ["rank 2", "rank 1", "few", "tiny", "huge"])
def test_low_rank_anchors_are_captured(kind, key):
    anchors = np.asarray(_anchors(kind), np.float64)
    if np.linalg.matrix_rank(anchors) > K:
        anchors = anchors[:K]
    rows = np.asarray(basis_of(key, jnp.asarray(np.resize(anchors, (M, P)), jnp.float32)))
    lost = anchors - anchors @ rows.T @ rows
    assert np.linalg.norm(lost) < 1e-3 * np.linalg.norm(anchors)


def test_top_subspace_is_captured(key):
    rng = np.random.default_rng(3)
    left, right = (np.linalg.qr(rng.normal(size=(n, K)))[0] for n in (M, P))
    spectrum = left * np.linspace(2, 1, K) @ right.T
    anchors = spectrum + 1e-2 * rng.normal(size=(M, P)) / P**0.5
    rows = jdp.power_iteration(key, jnp.asarray(anchors, jnp.float32), K, iterations=3)
    assert np.linalg.norm(np.asarray(rows) @ right, -2) > 0.999  # the smallest cosine


def test_more_iterations_and_a_warm_start_come_closer(key):
    anchors = _anchors("plain")

    def energy(rows):
        return np.linalg.norm(np.asarray(anchors) @ np.asarray(rows).T)

    best = np.linalg.norm(np.linalg.svd(np.asarray(anchors))[1][:K])
    once = jdp.power_iteration(key, anchors, K)
    again = jdp.power_iteration(key, anchors, K, start=once)
    many = jdp.power_iteration(key, anchors, K, iterations=12)
    assert energy(once) < energy(again) < energy(many) <= best * (1 + 1e-5)
    assert energy(many) > 0.98 * best


def test_full_rank_spans_everything(key):
    rows = jdp.power_iteration(key, jnp.asarray(np.eye(5), jnp.float32), 5)
    assert _error(rows) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decaying", "rank 100", "zero"])
def test_rank_500_is_orthonormal(kind, key):
    rng = np.random.default_rng(5)
    anchors = rng.normal(size=(1000, 3000)) * np.logspace(0, -9, 1000)[:, None]
    if kind == "rank 100":
        anchors = rng.normal(size=(1000, 100)) @ rng.normal(size=(100, 3000))
    anchors = 0 * anchors if kind == "zero" else anchors
    rows = jax.jit(lambda a: jdp.power_iteration(key, a, 500))(jnp.asarray(anchors, jnp.float32))
    assert _error(rows) < 1e-4


def test_householder_takes_over(key, monkeypatch):
    # Nothing in the table above makes the Cholesky passes fail; a NaN stands in for it.
    monkeypatch.setattr(subspace.jnp.linalg, "cholesky", lambda gram: jnp.full_like(gram, jnp.nan))
    assert _error(subspace.orthonormalize(key, _anchors("plain")[:K])) < 1e-5


# Groups ------------------------------------------------------------------------------------------

TREE = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(3), "c": jnp.zeros((2, 2))}
GROUPS = (0, 1, 0)  # not consecutive


def _per_example(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(n, *leaf.shape)), jnp.float32)
        for name, leaf in TREE.items()
    }


def test_bases_by_group_are_orthonormal_each(key):
    bases = public_bases(key, _per_example(9), ranks=(4, 2), groups=GROUPS)
    assert {name: leaf.shape for name, leaf in bases.rows.items()} == {
        "a": (4, 3, 4),
        "b": (2, 3),
        "c": (4, 2, 2),
    }
    joined = jnp.concatenate([bases.rows["a"].reshape(4, 12), bases.rows["c"].reshape(4, 4)], 1)
    assert _error(joined) < 1e-5
    assert _error(bases.rows["b"].reshape(2, 3)) < 1e-5


def test_embedding_and_residual_reconstruct(key):
    bases = public_bases(key, _per_example(9), ranks=(4, 2), groups=GROUPS)
    one = _per_example(1, seed=5)
    inside = lift(bases, [w[0] for w in project(bases, one)])
    residual = jax.tree.map(lambda g, x: g[0] - x, one, inside)
    again = project(bases, jax.tree.map(lambda leaf: leaf[None], residual))
    for w in again:  # nothing of the residual is in the subspace
        np.testing.assert_allclose(w, 0, atol=1e-5)
    squares = [sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(t)) for t in (inside, residual)]
    total = sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(one))
    np.testing.assert_allclose(sum(squares), total, rtol=1e-5)


@pytest.mark.parametrize("case", ["zero", "nan", "one direction"])
def test_weights_are_finite_and_bounded_whatever_the_anchors(key, case):
    anchors = jax.tree.map(jnp.zeros_like, _per_example(9))
    if case == "nan":
        anchors["a"] = anchors["a"].at[0].set(jnp.nan)
    if case == "one direction":
        anchors["a"] = anchors["a"].at[:, 0, 0].set(1e-20)
    bases = public_bases(key, anchors, ranks=(4, 2), groups=GROUPS, whitening=1.0)
    for weights in bases.weights:
        assert np.isfinite(weights).all() and np.all((weights > 0) & (weights <= 100))
    np.testing.assert_allclose(bases.weights[1], 1, rtol=1e-5)


RESNET20 = (432, 13_824, 50_688, 202_752, 650)


def test_rank_allocation_of_the_paper():
    assert sum(RESNET20) == 268_346
    assert jdp.allocate_rank(1000, RESNET20, 2000) == (24, 140, 268, 536, 30)
    assert jdp.allocate_rank(10_000, RESNET20, 2000) == (247, 1400, 2000, 2000, 303)
    assert jdp.allocate_rank(10**6, (4, 9)) == (4, 9)
    assert jdp.allocate_rank(3, (1, 1, 10**6)) == (1, 1, 2)  # one direction at least


@pytest.mark.parametrize("rank", [5, 17, 100, 1000, 5000])
def test_rank_allocation_never_exceeds_the_total(rank):
    ranks = jdp.allocate_rank(rank, RESNET20)
    # A group's one direction at least may round up.
    assert sum(ranks) <= rank + len(RESNET20) - 1
    assert all(1 <= k <= p for k, p in zip(ranks, RESNET20, strict=True))


def test_leaves_are_grouped_by_whole_layers_in_natural_order():
    layer = {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}
    params = {f"layer{i}": layer for i in (1, 2, 10)} | {"head": {"kernel": jnp.zeros((2, 2))}}
    assert jdp.group_leaves(params, 1) == jax.tree.map(lambda _: 0, params)
    labels = jdp.group_leaves(params, 4)
    assert labels["layer1"]["kernel"] == labels["layer1"]["bias"]
    order = [labels[f"layer{i}"]["kernel"] for i in (1, 2, 10)]
    assert order == sorted(order) and len(set(order)) == 3  # 2 before 10
    assert set(jax.tree.leaves(labels)) == {0, 1, 2, 3}


def test_groups_are_as_even_as_whole_layers_allow():
    sizes = (5, 1, 1, 1, 4)
    params = {f"layer{i}": {"kernel": jnp.zeros(size)} for i, size in enumerate(sizes)}
    labels = [leaf for leaf in jax.tree.leaves(jdp.group_leaves(params, 3))]
    assert labels == [0, 1, 1, 1, 2]


BAD = [
    (lambda: jdp.power_iteration(0, jnp.ones((2, 3)), 1), TypeError, "key"),
    (lambda: jdp.power_iteration(jax.random.key(0), jnp.ones(3), 1), ValueError, "anchors"),
    (lambda: jdp.power_iteration(jax.random.key(0), jnp.ones((2, 3)), 4), ValueError, "rank"),
    (lambda: jdp.power_iteration(jax.random.key(0), jnp.ones((2, 3)), 0), ValueError, "rank"),
    (lambda: jdp.power_iteration(jax.random.key(0), jnp.ones((2, 3)), 1.0), TypeError, "rank"),
    (
        lambda: jdp.power_iteration(jax.random.key(0), jnp.ones((2, 3)), 1, iterations=0),
        ValueError,
        "iterations",
    ),
    (lambda: jdp.group_leaves({"a": jnp.ones(3)}, 2), ValueError, "num_groups"),
    (lambda: jdp.group_leaves({"a": jnp.ones(3)}, 0), ValueError, "num_groups"),
    (lambda: jdp.allocate_rank(1, (5, 5)), ValueError, "rank"),
    (lambda: jdp.allocate_rank(5, (5, 0)), ValueError, "group_sizes"),
    (lambda: jdp.allocate_rank(5, (5, 5), 0), ValueError, "num_anchors"),
]


@pytest.mark.parametrize("make, error, match", BAD, ids=range(len(BAD)))
def test_bad_input(make, error, match):
    with pytest.raises(error, match=match):
        make()
