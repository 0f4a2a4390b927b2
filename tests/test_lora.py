"""Adapters: which matrices, an untouched base, merging, and tokens that mix no factors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdp import lora


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Conv(6, (3, 3), name="conv")(x).reshape(-1, 6)
        return nn.Dense(4, name="out")(nn.Dense(18, name="qkv")(h))


@pytest.fixture(scope="module")
def params():
    return jax.jit(Block().init)(jax.random.key(0), jnp.ones((4, 4, 2)))["params"]


def adapters_of(params, patterns=("qkv/kernel", "*conv/kernel"), rank=2):
    adapters = lora.init(jax.random.key(1), params, patterns, rank=rank)
    fill = lambda leaf: leaf + jax.random.normal(jax.random.key(2), leaf.shape)  # noqa: E731
    return jax.tree.map(fill, adapters)


def test_it_starts_where_the_base_is(params):
    adapters = lora.init(jax.random.key(1), params, "*/kernel", rank=3)
    shapes = {path: jax.tree.map(jnp.shape, factors) for path, factors in adapters.items()}
    assert shapes == {
        "conv/kernel": {"down": (3, 18), "up": (3, 6)},
        "qkv/kernel": {"down": (3, 6), "up": (3, 18)},
        "out/kernel": {"down": (3, 18), "up": (3, 4)},
    }
    jax.tree.map(np.testing.assert_array_equal, lora.merge(params, adapters), params)
    downs = [factors["down"] for factors in adapters.values()]
    assert all(0.4 < jnp.std(down) * down.shape[1] ** 0.5 < 2 for down in downs)
    assert not jnp.array_equal(downs[0], downs[2])


def test_merge_adds_the_products_and_unmerge_takes_them_out(params):
    adapters = adapters_of(params)
    merged = lora.merge(params, adapters, 0.5)
    for name in ("qkv", "conv"):
        factors = adapters[f"{name}/kernel"]
        base = np.asarray(params[name]["kernel"])
        change = 0.5 * np.asarray(factors["down"]).T @ np.asarray(factors["up"])
        expected = base + change.reshape(base.shape)
        np.testing.assert_allclose(merged[name]["kernel"], expected, rtol=1e-5, atol=1e-6)
    assert merged["out"]["kernel"] is params["out"]["kernel"]
    assert merged["conv"]["bias"] is params["conv"]["bias"]
    back = lora.unmerge(merged, adapters, 0.5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(close, back, params)


def test_a_key_with_brackets_is_matched_by_a_bracket_in_brackets():
    params = {"a[0]": jnp.ones((2, 3))}
    assert lora.init(jax.random.key(0), params, "a[[]0]", rank=1).keys() == params.keys()
    with pytest.raises(ValueError, match="`patterns` must be such that each matches"):
        lora.init(jax.random.key(0), params, "a[0]", rank=1)


def test_heads_in_an_axis_of_their_own_count_as_rows_and_a_reshaped_kernel_has_rank_r():
    kernel = jnp.zeros((8, 4, 3))
    ranks = []
    for leaf in (kernel, kernel.reshape(8, 12)):
        adapters = adapters_of({"q": leaf}, "q", rank=1)
        change = np.asarray(lora.merge({"q": leaf}, adapters)["q"]).reshape(8, 12)
        ranks.append(np.linalg.matrix_rank(change, tol=1e-4))
    assert ranks == [4, 1]


def test_training_moves_adapters_only(params):
    before = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), params)
    x, y = jax.random.normal(jax.random.key(3), (4, 4, 2)), jnp.ones((16, 4))
    adapters = lora.init(jax.random.key(1), params, "qkv/kernel", rank=1)
    tx = optax.sgd(0.5, momentum=0.9)

    @jax.jit
    def step(adapters, state):
        def loss(own):
            return jnp.mean((Block().apply({"params": lora.merge(params, own)}, x) - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(adapters)
        updates, state = tx.update(gradient, state, adapters)
        return optax.apply_updates(adapters, updates), state, value

    state, losses = tx.init(adapters), []
    for _ in range(20):
        adapters, state, value = step(adapters, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), params) == before


@pytest.mark.parametrize("length", [1, 4, 6, 18, 50])
def test_tokens_hold_one_vector_each_and_go_back(params, length):
    adapters = adapters_of(params)
    tokens = lora.tokenise(adapters, length)
    assert tokens.shape == (lora.num_tokens(adapters, length), length)
    back = lora.detokenise(tokens, adapters)
    jax.tree.map(np.testing.assert_array_equal, back, adapters)
    # Number the vectors: a token that mixed two would hold two numbers.
    numbers = iter(range(1, 100))
    label = lambda leaf: jnp.stack([jnp.full(leaf.shape[1], next(numbers)) for _ in leaf])  # noqa: E731
    labels = lora.tokenise(jax.tree.map(lambda leaf: label(leaf) * 1.0, adapters), length)
    assert all(len(set(np.unique(token)) - {0.0}) == 1 for token in np.asarray(labels))


def test_token_length_needs_no_padding(params):
    adapters = adapters_of(params)
    length = lora.token_length(adapters)
    assert length == 6
    total = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert lora.num_tokens(adapters, length) * length == total


def test_half_precision_and_lists_and_vmap():
    params = [jnp.ones((4, 6), jnp.bfloat16), {"b": jnp.ones(6)}]
    adapters = lora.init(jax.random.key(0), params, "0", rank=1)
    assert list(adapters) == ["0"] and adapters["0"]["down"].dtype == jnp.bfloat16
    assert lora.merge(params, adapters)[0].dtype == jnp.bfloat16
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), adapters)
    merged = jax.vmap(lambda own: lora.merge(params, own)[0])(many)
    assert merged.shape == (2, 4, 6)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda p: lora.init(jax.random.key(0), p, "*/kernle", rank=1), "`patterns`.*conv/bias"),
        (lambda p: lora.init(jax.random.key(0), p, "*/bias", rank=1), "matrices only.*bias"),
        (lambda p: lora.init(jax.random.key(0), p, "out/kernel", rank=5), "`rank`.*at most 4"),
        (lambda p: lora.init(jax.random.key(0), p, "out/kernel", rank=0), "`rank`"),
        (lambda p: lora.merge({"w": jnp.ones((2, 2))}, adapters_of(p)), "`adapters`"),
        (
            lambda p: lora.merge({"w": p}, {"w": {"down": jnp.ones(2), "up": jnp.ones((1, 2))}}),
            "`adapters`.*at w",
        ),
        (lambda p: lora.tokenise(adapters_of(p), 0), "`length`"),
        (lambda p: lora.tokenise({}, 2), "`adapters`"),
        (lambda p: lora.detokenise(jnp.ones((3, 6)), adapters_of(p)), "`tokens`.*16 tokens"),
        (lambda p: lora.detokenise(jnp.ones(3), adapters_of(p)), "`tokens`.*shape"),
    ],
)
def test_bad_input_is_named(params, call, match):
    with pytest.raises(ValueError, match=match):
        call(params)


def test_leaves_that_are_no_arrays_stay_as_they_are():
    params = {"w": jnp.ones((2, 3)), "act": jnp.tanh, "slope": 0.1}
    adapters = lora.init(jax.random.key(0), params, "w", rank=1)
    merged = lora.merge(params, adapters)
    assert merged["act"] is jnp.tanh and merged["slope"] == 0.1
    for name in ("act", "slope"):
        with pytest.raises(ValueError, match=f"matrices only.*{name}"):
            lora.init(jax.random.key(0), params, name, rank=1)
    with pytest.raises(TypeError, match="`key`"):
        lora.init(0, params, "w", rank=1)


def test_two_leaves_of_one_path_are_refused():
    params = {"a/b": jnp.ones((2, 2)), "a": {"b": jnp.ones((2, 2)), "c": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match="`params`.*a/b.*rename"):
        lora.init(jax.random.key(0), params, "*b", rank=1)
    one = lora.init(jax.random.key(0), params, "a/c", rank=1)
    with pytest.raises(ValueError, match="`params`.*a/b.*rename"):
        lora.merge(params, {"a/b": one["a/c"]})


def test_patterns_are_strings(params):
    with pytest.raises(TypeError, match="`patterns`"):
        lora.init(jax.random.key(0), params, (), rank=1)


@pytest.mark.parametrize("adapters", [None, {"w": 1}, {"w": {"down": jnp.ones((1, 2))}}])
def test_adapters_are_pairs_of_factors(adapters):
    with pytest.raises(TypeError, match="`adapters`.*down"):
        lora.merge({"w": jnp.ones((2, 2))}, adapters)
