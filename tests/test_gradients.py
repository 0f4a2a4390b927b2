import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import moved

import jdp
from jdp import gradients

PARAMS = {"w": jnp.linspace(-1, 1, 8).reshape(4, 2), "b": jnp.zeros(2)}
N = 7


def loss(params, example):
    x, y = example
    return jnp.sum((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)


def _batch(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(N, 4)), rng.normal(size=(N, 2))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


MASK = jnp.array([True, False, True, True, True, True, False])


def test_rows_are_gradients_of_single_examples():
    per_example = jax.jit(jdp.per_example_grad(loss))(PARAMS, _batch())
    for i in range(N):
        one = jax.grad(loss)(PARAMS, jax.tree.map(lambda leaf, i=i: leaf[i], _batch()))
        for name in PARAMS:
            np.testing.assert_allclose(per_example[name][i], one[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
def test_microbatches_give_the_same_sum(size):
    clipper = jdp.clip_by_group((0.5, 0.1), {"w": 0, "b": 1})
    whole = jdp.clipped_grad(loss, clipper)(PARAMS, _batch(), mask=MASK)
    parts = jdp.clipped_grad(loss, clipper, microbatch_size=size)
    for function in (parts, jax.jit(parts)) if size == 2 else (jax.jit(parts),):
        clipped = function(PARAMS, _batch(), mask=MASK)
        assert moved(whole, clipped) < 1e-6
        assert clipped.structure == whole.structure


@pytest.mark.parametrize("strategy", ["book-keeping", "scan", "vmap"])
def test_every_strategy_leaves_masked_rows_out(strategy):
    grad = jax.jit(jdp.clipped_grad(loss, jdp.clip_by_norm(0.5), strategy=strategy))
    want = jdp.clip_by_norm(0.5)(jax.vmap(jax.grad(loss), (None, 0))(PARAMS, _batch()), MASK)
    assert moved(want, grad(PARAMS, _batch(), mask=MASK)) < 1e-5


def test_rounding_of_many_microbatches_is_within_the_margin():
    n = 4096  # rows of one sign, the worst case for a plain float32 sum
    x = jnp.full((n, 3), 0.3)
    grad = jdp.clipped_grad(lambda w, x: w @ x, jdp.clip_by_norm(2.0), microbatch_size=2)
    clipped = jax.jit(lambda w: grad(w, x, mask=jnp.ones(n, bool)))(jnp.zeros(3))
    error = np.abs(clipped.parts[0] - np.asarray(x, np.float64).sum(0)).max()
    assert error < 1e-3 and 3e-3 < clipped.rounding < 4e-3


@hypothesis.given(st.lists(st.booleans(), min_size=N, max_size=N))
def test_padding_may_hold_anything(mask):
    x, y = _batch()
    mask = jnp.asarray(mask)
    x = jnp.where(mask[:, None], x, jnp.nan)
    got = PADDED(PARAMS, (x, y), mask)
    want = PADDED(PARAMS, _batch(), mask)
    for a, b in zip(jax.tree.leaves(got.parts), jax.tree.leaves(want.parts), strict=True):
        np.testing.assert_array_equal(a, b)


PADDED = jax.jit(
    lambda params, batch, mask: jdp.clipped_grad(loss, jdp.clip_by_norm(0.5), microbatch_size=3)(
        params, batch, mask=mask
    )
)


def test_one_compilation_for_all_poisson_batches():
    traces = 0

    @jax.jit
    def step(mask):
        nonlocal traces
        traces += 1
        return jdp.clipped_grad(loss, jdp.clip_by_norm(1.0))(PARAMS, _batch(), mask=mask)

    for count in range(N + 1):
        step(jnp.arange(N) < count)
    assert traces == 1


def test_gep_in_microbatches_through_the_second_door(key):
    # clipped_grad with clip_in_subspace: the same sums as with all gradients at once.
    anchors = jdp.per_example_grad(loss)(PARAMS, _batch(1))
    bases = jdp.subspace.public_bases(key, anchors, ranks=(3,), groups=(0, 0))
    clipper = jdp.clip_in_subspace(bases, (0.5, 0.1))
    whole = jdp.clipped_grad(loss, clipper)(PARAMS, _batch(), mask=MASK)
    parts = jdp.clipped_grad(loss, clipper, microbatch_size=2)(PARAMS, _batch(), mask=MASK)
    assert moved(whole, parts) < 1e-5


def test_adaptive_clip_norm_may_be_traced_through_microbatches():
    @jax.jit
    def clip(norm):
        grad = jdp.clipped_grad(loss, jdp.clip_by_norm(norm), microbatch_size=2)
        return grad(PARAMS, _batch(), mask=MASK)

    clipped = clip(jnp.float32(0.25))
    want = jdp.clipped_grad(loss, jdp.clip_by_norm(0.25))(PARAMS, _batch(), mask=MASK)
    assert float(clipped.noise_scales[0]) == 0.25
    assert moved(want, clipped) < 1e-6


def test_accumulation_adds_noise_once(key):
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(0.5))
    x, y = _batch()
    halves = [grad(PARAMS, (x[s], y[s]), mask=MASK[s]) for s in (slice(0, 3), slice(3, 7))]
    merged = jdp.add_noise(key, halves[0].merge(halves[1]), 1.0)
    whole = jdp.add_noise(key, grad(PARAMS, (x, y), mask=MASK), 1.0)
    for name in PARAMS:
        np.testing.assert_allclose(merged[name], whole[name], atol=1e-6)


def test_dropout_keys_travel_in_the_example(key):
    def noisy(params, example):
        batch, key = example
        return loss(params, batch) * jax.random.uniform(key)

    keys = jax.random.split(key, N)
    per_example = jdp.per_example_grad(noisy)(PARAMS, (_batch(), keys))
    plain = jdp.per_example_grad(loss)(PARAMS, _batch())
    factors = jax.vmap(jax.random.uniform)(keys)
    np.testing.assert_allclose(per_example["b"], plain["b"] * factors[:, None], rtol=1e-5)
    grad = jdp.clipped_grad(noisy, jdp.clip_by_norm(1.0), microbatch_size=2)
    assert grad(PARAMS, (_batch(), keys), mask=MASK).parts[0]["b"].shape == (2,)


FROZEN = {"w": False, "b": True}


def test_frozen_leaves_get_no_gradient_norm_or_noise(key):
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(0.5), trainable=FROZEN, microbatch_size=3)
    clipped = grad(PARAMS, _batch(), mask=MASK)
    assert clipped.parts[0]["w"] is None
    alone = jdp.per_example_grad(lambda b, example: loss(PARAMS | {"b": b}, example))
    want = jdp.clip_by_norm(0.5)(alone(PARAMS["b"], _batch()), MASK)
    np.testing.assert_allclose(clipped.parts[0]["b"], want.parts[0], rtol=1e-5)
    for tx, updates, extra in (
        (jdp.privatize(1.0, batch_size=4, key=key), clipped, {}),
        (
            jdp.dp_aggregate(jdp.clip_by_norm(0.5), 1.0, batch_size=4, key=key),
            jdp.per_example_grad(loss, trainable=FROZEN)(PARAMS, _batch()),
            {"mask": MASK},
        ),
    ):
        update, _ = tx.update(updates, tx.init(PARAMS), PARAMS, **extra)
        assert not update["w"].any() and update["b"].any()


def test_integer_leaves_may_be_frozen():
    params = PARAMS | {"steps": jnp.zeros((), jnp.int32)}
    with pytest.raises(TypeError, match="steps"):
        jdp.per_example_grad(loss)(params, _batch())
    flags = {"w": True, "b": True, "steps": False}
    assert jdp.per_example_grad(loss, trainable=flags)(params, _batch())["steps"] is None


def test_bfloat16_parameters_have_a_float32_sum():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _batch())
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(1e-2), microbatch_size=2)
    (total,) = grad(narrow, batch, mask=MASK).parts
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("width", [3])
def test_empty_chunk_of_a_convolution(width):
    # Microbatching evaluates an empty chunk for its shapes.
    def conv(params, example):
        out = jax.lax.conv(example[None, None], params, (1, 1), "SAME")
        return jnp.mean(jax.nn.relu(out) ** 2)

    params, images = jnp.ones((2, 1, width, width)), jnp.ones((5, 6, 6))
    sums = [
        jdp.clipped_grad(conv, jdp.clip_by_norm(1.0), microbatch_size=size)(
            params, images, mask=jnp.ones(5, bool)
        )
        for size in (None, 2)
    ]
    assert moved(*sums) < 1e-6


def test_masks_of_numpy_and_python_numbers_as_parameters():
    def linear(params, example):
        return params["scale"] * loss(PARAMS, example)

    grad = jdp.clipped_grad(linear, jdp.clip_by_norm(1.0), microbatch_size=2)
    clipped = jax.jit(lambda: grad({"scale": 2.0}, _batch(), mask=np.ones(N, bool)))()
    assert clipped.parts[0]["scale"].shape == ()


def test_norms_of_an_empty_batch():
    nothing = jax.tree.map(lambda leaf: leaf[:0], _batch())
    assert jdp.unprotected_gradient_norms(loss)(PARAMS, nothing).shape == (0,)


BAD = [
    (lambda: jdp.per_example_grad(3.0), TypeError, "loss"),
    (lambda: jdp.clipped_grad(loss, 1.0), TypeError, "clipper"),
    (lambda: jdp.clipped_grad(loss, CLIP, microbatch_size=0), ValueError, "microbatch_size"),
    (lambda: jdp.clipped_grad(loss, CLIP, microbatch_size=2.0), TypeError, "microbatch_size"),
    (lambda: jdp.clipped_grad(loss, CLIP)(PARAMS, _batch()), TypeError, "mask"),
    (
        lambda: jdp.clipped_grad(loss, CLIP)(PARAMS, _batch(), mask=jnp.ones(3, bool)),
        ValueError,
        "`batch`.*mask",
    ),
    (
        lambda: jdp.clipped_grad(loss, CLIP)(PARAMS, _batch(), mask=jnp.ones(N)),
        TypeError,
        "booleans",
    ),
    (lambda: jdp.per_example_grad(lambda p, e: p["b"])(PARAMS, _batch()), TypeError, "scalar"),
    (
        lambda: jdp.per_example_grad(lambda p, e: (loss(p, e), {}))(PARAMS, _batch()),
        TypeError,
        "auxiliary",
    ),
    (lambda: jdp.per_example_grad(loss)(PARAMS, (_batch()[0], 1.0)), ValueError, "batch"),
    (lambda: jdp.per_example_grad(loss)(PARAMS, ()), ValueError, "batch"),
    (
        lambda: jdp.per_example_grad(loss)({"params": PARAMS, "batch_stats": PARAMS}, _batch()),
        ValueError,
        "GroupNorm",
    ),
    (
        lambda: jdp.per_example_grad(loss, trainable={"w": True})(PARAMS, _batch()),
        ValueError,
        "trainable",
    ),
    (
        lambda: jdp.per_example_grad(loss, trainable={"w": 1, "b": 0})(PARAMS, _batch()),
        ValueError,
        "trainable",
    ),
    (
        lambda: jdp.per_example_grad(loss, trainable={"w": False, "b": False})(PARAMS, _batch()),
        ValueError,
        "trainable",
    ),
]
CLIP = jdp.clip_by_norm(1.0)


@pytest.mark.parametrize("make, error, match", BAD, ids=range(len(BAD)))
def test_bad_input(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_microbatches_are_near_what_fits_and_waste_little():
    for fit, size, devices, expected in [
        (12, 64, 1, 16),  # 6 of 11 would work on two examples twice
        (5, 64, 1, 4),
        (2_029, 4_096, 1, 1_366),  # nearly even already
        (7, 61, 1, 7),  # nothing near divides a prime
        (50, 1_000, 8, 56),
        (100, 97, 8, 104),
    ]:
        assert gradients._near(fit, size, devices) == expected
