import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from checks import ALL, BATCH
from mechanisms import bases, dense
from strategies import GROUPS, PARAMS, ROWS, SIZE, flat, row, rows, span, tree_of

import jdp
from jdp.subspace import bases_from_rows, project

MASK = jnp.asarray(ALL)


def _parts(clipped):
    embedding = np.concatenate([np.asarray(w, np.float64) for w in clipped.parts[0]])
    return embedding, flat(clipped.parts[1]) if len(clipped.parts) > 1 else None


def oracle(matrix, s1, s2, basis, joint=False):
    """GEP as in the paper, everything written out, in float64."""
    g = np.asarray(matrix, np.float64)
    w = g @ basis.T
    r = g - w @ basis
    w_norm, r_norm = (np.linalg.norm(x, axis=1, keepdims=True) + 1e-300 for x in (w, r))
    a, c = np.minimum(1, s1 / w_norm), np.minimum(1, s2 / r_norm)
    if joint:
        a = c = np.minimum(1, 1 / np.hypot(w_norm / s1, r_norm / s2))
    return (a * w).sum(0), (c * r).sum(0)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("s1, s2", [(1.0, 0.2), (10.0, 2.0), (0.1, 3.0), (1e3, 1e3)])
def test_sums_are_those_of_the_paper(s1, s2, joint):
    matrix = rows(["normal", "in_span", "orthogonal", "tiny", "bf16", "zero"], 3)
    clipped = jdp.clip_in_subspace(bases(), (s1, s2), joint_clip=joint)(tree_of(matrix), MASK)
    got, want = _parts(clipped), oracle(matrix, s1, s2, span(), joint)
    for a, b, scale in zip(got, want, (s1, s2), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * min(scale, 10))


@pytest.mark.parametrize("s2", [1e-3, 0.2, 5.0])
@pytest.mark.parametrize("kind", ["in_span", "huge_in_span", "orthogonal", "normal", "huge"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_no_contribution_exceeds_its_norm(kind, s2, scale):
    clip = CLIP_ONE
    for seed in range(4):
        clipped = clip(jnp.float32(s2), tree_of(scale * row(kind, seed)[None]))
        embedding, residual = _parts(clipped)
        assert np.linalg.norm(embedding) <= 1.0
        assert np.linalg.norm(residual) <= s2


CLIP_ONE = jax.jit(lambda s2, one: jdp.clip_in_subspace(bases(), (1.0, s2))(one, jnp.ones(1, bool)))


def test_bases_need_not_be_orthonormal_for_the_bound():
    skewed = bases_from_rows(
        [jnp.asarray(np.ones((2, 15)) + np.eye(2, 15) * 1e-3, jnp.float32), 3 * jnp.eye(2, 12)],
        tree_of(np.zeros((1, SIZE))),
        (0, 0, 1),
    )
    for kind in ("normal", "in_span", "huge"):
        clipped = jdp.clip_in_subspace(skewed, (1.0, 0.2))(
            tree_of(row(kind, 1)[None]), jnp.ones(1, bool)
        )
        embedding, residual = _parts(clipped)
        assert np.linalg.norm(embedding) <= 1.0
        assert np.linalg.norm(residual) <= 0.2


def test_unclipped_embedding_and_residual_add_up_to_the_gradient():
    matrix = rows(["normal"] * ROWS, 6)
    clipped = jdp.clip_in_subspace(bases(), (1e6, 1e6))(tree_of(matrix), MASK)
    np.testing.assert_allclose(flat(clipped.combine(clipped.parts)), matrix.sum(0), atol=1e-4)
    embedding, residual = _parts(clipped)
    np.testing.assert_allclose(span() @ residual, 0, atol=1e-5)
    np.testing.assert_allclose(embedding, span() @ matrix.sum(0), atol=1e-4)


def test_weights_act_before_clipping_and_on_the_way_back():
    matrix = rows(["normal", "in_span", "orthogonal", "tiny", "bf16", "zero"], 4)
    weighted = mechanisms.weighted_bases()
    weights = np.concatenate(weighted.weights)
    clipped = jdp.clip_in_subspace(weighted, (1.0, 0.2))(tree_of(matrix), MASK)
    w = weights * (np.asarray(matrix, np.float64) @ span().T)
    w *= np.minimum(1, 1 / (np.linalg.norm(w, axis=1, keepdims=True) + 1e-300))
    embedding, residual = _parts(clipped)
    np.testing.assert_allclose(embedding, w.sum(0), atol=1e-4)
    np.testing.assert_allclose(residual, oracle(matrix, 1.0, 0.2, span())[1], atol=1e-4)
    want = (weights * w.sum(0)) @ span() + residual
    np.testing.assert_allclose(flat(clipped.combine(clipped.parts)), want, atol=2e-4)


def test_full_rank_leaves_no_residual():
    everything = bases_from_rows(
        [jnp.eye(15), jnp.eye(12)], tree_of(np.zeros((1, SIZE))), (0, 0, 1)
    )
    matrix = rows(["normal"] * ROWS, 6)
    clipped = jdp.clip_in_subspace(everything, (1e6, 1.0))(tree_of(matrix), MASK)
    embedding, residual = _parts(clipped)
    np.testing.assert_allclose(residual, 0, atol=1e-5)
    np.testing.assert_allclose(embedding, matrix.sum(0), atol=1e-4)


def test_biased_is_the_limit_of_a_vanishing_residual():
    matrix = rows(["normal"] * ROWS, 7)
    biased = jdp.clip_in_subspace(bases(), (1.0, None))(tree_of(matrix), MASK)
    small = jdp.clip_in_subspace(bases(), (1.0, 1e-9))(tree_of(matrix), MASK)
    assert len(biased.parts) == 1 and biased.noise_scales == (1.0,)
    np.testing.assert_allclose(_parts(biased)[0], _parts(small)[0], rtol=1e-6)
    np.testing.assert_allclose(
        flat(biased.combine(biased.parts)), flat(small.combine(small.parts)), atol=1e-6
    )


# Noise -------------------------------------------------------------------------------------------


def _scales(**options):
    nothing = tree_of(np.zeros((1, SIZE), np.float32))
    clipper = jdp.clip_in_subspace(bases(), (10.0, 2.0), **options)
    return np.array([float(s) for s in clipper(nothing, jnp.ones(1, bool)).noise_scales])


def test_equal_split_is_one_gaussian_of_the_paper():
    # sigma1 = sigma2 = sqrt(2) z
    np.testing.assert_allclose(_scales(), 2**0.5 * np.array([10.0, 2.0]), rtol=1e-6)
    np.testing.assert_allclose(_scales(joint_clip=True), [10.0, 2.0], rtol=1e-6)


def test_optimal_split_spends_the_budget_with_least_noise():
    s, dims = np.array([10.0, 2.0]), np.array([4, SIZE])
    best = _scales(noise_split="optimal")
    a = best / s
    np.testing.assert_allclose(np.sum(a**-2.0), 1, rtol=1e-6)

    def total(a):
        return np.sum(a**2 * s**2 * dims)

    np.testing.assert_allclose(total(a), np.sum(s * dims**0.5) ** 2, rtol=1e-5)
    assert total(a) < total(_scales() / s)
    for share in np.linspace(0.02, 0.98, 49):  # every other way to share the budget
        assert total(a) <= total(np.array([share**-0.5, (1 - share) ** -0.5])) * (1 + 1e-6)


def test_optimal_split_of_resnet20():
    # 22% less noise than the equal split: algorithms worked out by hand.
    from jdp.embedding import _split

    p, k = 268_346, 1000
    a1, a2 = _split(10 * k**0.5, 2 * p**0.5, "optimal")
    total = a1**2 * 100 * k + a2**2 * 4 * p
    np.testing.assert_allclose(total, 1.83e6, rtol=5e-3)
    np.testing.assert_allclose(total / (2 * (100 * k + 4 * p)), 0.78, rtol=5e-3)


# The doors ---------------------------------------------------------------------------------------


def _gep(key, public=mechanisms.anchors, z=0.0, **options):
    return jdp.gep(
        rank=5,
        clip_norms=(1.0, 0.2),
        noise_multiplier=z,
        batch_size=BATCH,
        key=key,
        public_gradients=public,
        groups=GROUPS,
        **options,
    )


def _steps(tx, count, matrix):
    def step(state, _):
        update, state = tx.update(tree_of(matrix), state, PARAMS, mask=MASK)
        return state, (update, state.bases.rows)

    return jax.jit(lambda: jax.lax.scan(step, tx.init(PARAMS), length=count))()[1]


def test_update_is_that_of_the_oracle(key):
    matrix = rows(["normal", "in_span", "orthogonal", "tiny", "bf16", "zero"], 3)
    tx = _gep(key)
    update, state = tx.update(tree_of(matrix), tx.init(PARAMS), PARAMS, mask=MASK)
    basis = np.asarray(dense(state.bases), np.float64)
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-5)
    w, r = oracle(matrix, 1.0, 0.2, basis)
    np.testing.assert_allclose(flat(update), (basis.T @ w + r) / BATCH, atol=1e-5)


def test_bases_do_not_depend_on_private_data(key):
    found = [
        _steps(_gep(key, z=1.0, warm_start=True, refresh_every=2), 3, rows([kind] * ROWS, 9))[1]
        for kind in ("normal", "nan", "huge")
    ]
    for other in found[1:]:
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


def _changes(stack):
    """Whether the bases of each step differ from those of the step before."""
    rows = np.asarray(stack["a"])
    return [not np.array_equal(a, b) for a, b in zip(rows[:-1], rows[1:], strict=True)]


def test_refresh_every(key):
    zeros = np.zeros((ROWS, SIZE), np.float32)
    assert _changes(_steps(_gep(key, refresh_every=3), 7, zeros)[1]) == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert _changes(_steps(_gep(key), 3, zeros)[1]) == [True, True]


def _fixed_public(params, key):
    """Anchors that no label changes, with a slowly decaying spectrum."""
    del params, key
    rng = np.random.default_rng(0)
    return tree_of((rng.normal(size=(20, SIZE)) * 0.9 ** np.arange(SIZE)).astype(np.float32))


def test_warm_start_goes_on_with_the_power_iteration(key):
    zeros = np.zeros((ROWS, SIZE), np.float32)
    anchors = flat(_fixed_public(None, None), 1)

    def energies(**options):
        _, stack = _steps(_gep(key, _fixed_public, **options), 8, zeros)
        found = []
        for t in range(8):
            rows = jax.tree.map(lambda leaf, t=t: leaf[t], stack)
            b = np.asarray(dense(jdp.subspace.Bases(rows, (0, 0, 1))))
            found.append(np.linalg.norm(anchors @ b.T))
        return np.array(found)

    warm, cold = energies(warm_start=True), energies()
    assert warm[-1] > warm[1] > warm[0]
    assert warm[-1] > cold.max()


def test_whitened_public_gradients_have_equal_mean_squares(key):
    _, state = _gep(key, _fixed_public, whitening=1.0).update(
        tree_of(np.zeros((ROWS, SIZE), np.float32)),
        _gep(key, whitening=1.0).init(PARAMS),
        PARAMS,
        mask=MASK,
    )
    for embedding, weight in zip(
        project(state.bases, _fixed_public(None, None)), state.bases.weights, strict=True
    ):
        whole = np.asarray(embedding)
        white = whole * np.asarray(weight)
        gram = white.T @ white
        np.testing.assert_allclose(gram, gram[0, 0] * np.eye(len(gram)), atol=1e-3 * gram[0, 0])
        np.testing.assert_allclose(np.sum(white**2), np.sum(whole**2), rtol=1e-4)


def test_labels_are_fresh_at_every_refresh_and_uniform(key):
    seen = []

    def loss(params, example):
        image, label = example
        return jnp.sum(params["b"] * label.astype(jnp.float32)) + 0 * image.sum()

    images = jnp.zeros((400, 2))
    anchors = jdp.random_label_gradients(loss, images, num_classes=4)
    for step_key in jax.random.split(key, 3):
        seen.append(np.asarray(anchors({"b": jnp.zeros(1)}, step_key)["b"][:, 0]))
    for labels in seen:
        counts = np.bincount(labels.astype(int), minlength=4)
        assert counts.sum() == 400 and counts.min() > 70 and len(counts) == 4
    agreement = np.mean(seen[0] == seen[1]), np.mean(seen[1] == seen[2])
    assert max(agreement) < 0.35


def test_every_step_asks_for_labels_with_another_key():
    keys = []

    def public(params, key):
        keys.append(key)
        return mechanisms.anchors(params, key)

    tx = _gep(jax.random.key(1), public)
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = tx.update(tree_of(rows(["zero"] * ROWS, 0)), state, PARAMS, mask=MASK)
    data = [tuple(np.asarray(jax.random.key_data(k))) for k in keys if not _is_traced(k)]
    assert len(set(data)) == len(data) >= 3


def _is_traced(value):
    return isinstance(value, jax.core.Tracer)


def test_anchors_in_microbatches_are_the_same(key):
    def loss(params, example):
        image, label = example
        return jnp.sum(params["b"] * jax.nn.one_hot(label, 3)) * image.sum()

    images, params = jnp.arange(14.0).reshape(7, 2), {"b": jnp.zeros(3)}
    whole = jdp.random_label_gradients(loss, images, num_classes=3)(params, key)
    parts = jdp.random_label_gradients(loss, images, num_classes=3, microbatch_size=3)(params, key)
    np.testing.assert_allclose(whole["b"], parts["b"], rtol=1e-6)


def test_the_average_over_keys_is_unbiased_but_for_clipping():
    # GEP's noise has mean zero, and without clipping the update's mean is the gradient's.
    matrix = 1e-3 * rows(["normal"] * ROWS, 11)

    def update(key):
        return _gep_update(key, matrix)

    draw = jax.jit(jax.vmap(update))
    mean = np.asarray(draw(jax.random.split(jax.random.key(2), 400))).mean(0)
    want = matrix.sum(0) / BATCH
    np.testing.assert_allclose(mean, want, atol=6 * 0.01 * 1.5 / BATCH / 20)


def _gep_update(key, matrix):
    tx = _gep(key, z=0.01)
    update, _ = tx.update(tree_of(matrix), tx.init(PARAMS), PARAMS, mask=MASK)
    return mechanisms.vector(update)


def test_frozen_leaves_go_through_gep(key):
    flags = {"a": True, "b": False, "c": True}

    def loss(params, example):
        image, label = example
        out = jnp.tanh(image @ params["a"] * params["c"].sum()) + params["b"].sum()
        return jnp.sum((out - label.astype(jnp.float32)) ** 2)

    params = jax.tree.map(lambda leaf: leaf + 0.1, PARAMS)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    anchors = jdp.random_label_gradients(loss, images, num_classes=3, trainable=flags)
    tx = jdp.gep(
        rank=3,
        clip_norms=(1.0, 0.2),
        noise_multiplier=1.0,
        batch_size=BATCH,
        key=key,
        public_gradients=anchors,
    )
    batch = images, jnp.arange(8) % 3
    grads = jdp.per_example_grad(lambda p, e: loss(p, e), trainable=flags)(params, batch)
    update, _ = tx.update(grads, tx.init(params), params, mask=jnp.ones(8, bool))
    assert not update["b"].any() and update["a"].any() and update["c"].any()


@pytest.mark.slow
def test_the_loss_may_stay_with_gep(key):
    batch = jax.random.normal(key, (6, 3)), jnp.arange(6) % 2
    params, mask = {"w": jnp.zeros((3, 2)), "frozen": jnp.ones(3)}, jnp.arange(6) != 2
    flags = {"w": True, "frozen": False}

    def loss(params, example):
        x, label = example
        return -jax.nn.log_softmax((x * params["frozen"]) @ params["w"])[label]

    updates = []
    for options in ({}, {"loss": loss, "microbatch_size": 4, "trainable": flags}):
        tx = jdp.gep(
            rank=2,
            clip_norms=(0.5, 0.1),
            noise_multiplier=1.0,
            batch_size=4,
            key=key,
            public_gradients=jdp.random_label_gradients(
                loss, jnp.eye(3), num_classes=2, trainable=flags
            ),
            **options,
        )
        gradients = batch if options else jdp.per_example_grad(loss, trainable=flags)(params, batch)
        update, _ = tx.update(gradients, tx.init(params), params, mask=mask)
        updates.append(update)
    np.testing.assert_allclose(updates[0]["w"], updates[1]["w"], rtol=1e-5, atol=1e-6)
    assert not updates[1]["frozen"].any()


def test_a_microbatch_size_needs_the_loss(key):
    with pytest.raises(ValueError, match="Pass loss="):
        jdp.biased_gep(
            rank=1,
            clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=1,
            key=key,
            public_gradients=lambda params, key: params,
            microbatch_size=2,
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bases_keep_their_type_under_64_bits(dtype):
    with jax.enable_x64(True):
        params = jnp.zeros(3, dtype)
        tx = jdp.gep(
            rank=2,
            clip_norms=(1.0, 0.2),
            noise_multiplier=1.0,
            batch_size=2,
            key=jax.random.key(0),
            public_gradients=lambda params, key: jnp.eye(3, dtype=params.dtype),
            refresh_every=2,
            whitening=0.5,
        )
        state = tx.init(params)
        _, after = tx.update(jnp.eye(3, dtype=dtype), state, params, mask=jnp.ones(3, bool))
        assert [x.dtype for x in jax.tree.leaves(after)] == [
            x.dtype for x in jax.tree.leaves(state)
        ]
        assert after.bases.rows.dtype == dtype
