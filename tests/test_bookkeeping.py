"""Book-keeping gives the clipped sum of written-out gradients, for any loss."""

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import models

import jdp
from jdp import bookkeeping, gradients
from jdp._walk import find

N, CLASSES = 6, 5
MASK = jnp.arange(N) != 4


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (12, 9):
            x = nn.relu(nn.Dense(width)(x.ravel()))
        return nn.Dense(CLASSES)(x)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Conv(6, (3, 3), strides=2)(x[None]))
        x = nn.GroupNorm(2)(x)
        x = nn.Conv(4, (3, 2), kernel_dilation=(1, 2), padding="VALID")(x)
        x = nn.Conv(4, (3, 3), feature_group_count=2)(x)
        return nn.Dense(CLASSES)(x.ravel())


class Attention(nn.Module):
    tied: bool = False
    vocabulary: int = 11

    @nn.compact
    def __call__(self, words):
        table = nn.Embed(self.vocabulary, 8)
        x = table(words)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        logits = table.attend(x).mean(0)[:CLASSES] if self.tied else nn.Dense(CLASSES)(x.mean(0))
        return logits


def of_module(module, inputs):
    params = jax.jit(module.init)(jax.random.key(0), inputs[0])["params"]

    def loss(params, example):
        logits = module.apply({"params": params}, example[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])

    return loss, params, inputs


def of_matrices(logits, **shapes):
    params = {
        name: jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(shapes.items())
    }

    def loss(params, example):
        values = logits(params, example[0])
        return optax.softmax_cross_entropy_with_integer_labels(values, example[1])

    return loss, params, VECTORS


VECTORS = jax.random.normal(jax.random.key(1), (N, 7))
IMAGES = jax.random.normal(jax.random.key(2), (N, 9, 8, 2))
WORDS = jax.random.randint(jax.random.key(3), (N, 6), 0, 11)
LABELS = jnp.arange(N) % CLASSES


def table(logits, words=None, rows=11):
    """A loss that looks up; words out of range among them."""
    words = jnp.array([[-3, 0, 2], [13, 5, 5], [1, 2, 3], [4, 10, 11], [0, 0, 0], [9, -1, 8]])
    loss, params, _ = of_matrices(logits, e=(rows, 4), w=(4, CLASSES))
    return loss, params, words


def promoted(params, x):
    with jax.numpy_dtype_promotion("standard"):
        return x @ params["w"]


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
    return x @ params["out"]


def branching(params, x):
    x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    return jax.lax.cond(x[0] > 0, lambda: x @ params["w"], lambda: 2 * x @ params["w"])


CASES = {
    "dense": lambda: of_module(Dense(), VECTORS),
    "conv": lambda: of_module(Conv(), IMAGES),
    "attention": lambda: of_module(Attention(), WORDS),
    "tied table": lambda: of_module(Attention(tied=True), WORDS),
    "used twice": lambda: of_matrices(
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"].T) @ p["w"], w=(7, CLASSES)
    ),
    "two views that do not fit": lambda: of_matrices(
        lambda p, x: x @ p["w"] + x[:CLASSES] @ p["w"].reshape(CLASSES, 7)[:, :CLASSES],
        w=(7, CLASSES),
    ),
    "reshaped and cast": lambda: of_matrices(
        lambda p, x: x @ p["w"].astype(jnp.float32).reshape(CLASSES, 7).T, w=(5 * 7,)
    ),
    "weight norm": lambda: of_matrices(
        lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"])), w=(7, CLASSES)
    ),
    "scan": lambda: of_matrices(scanned, w=(3, 7, 7), out=(7, CLASSES)),
    "cond": lambda: of_matrices(branching, w=(7, CLASSES)),
    "weight on the left": lambda: of_matrices(
        lambda p, x: (p["w"] @ jnp.outer(x, x[:3])).sum(1), w=(CLASSES, 7)
    ),
    "penalty on one of two layers": lambda: of_matrices(
        lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"] * jnp.sum(p["a"] ** 2), a=(7, 4), b=(4, CLASSES)
    ),
    "inner gradient step": lambda: of_matrices(
        lambda p, x: x @ (p["a"] - jax.grad(lambda a: jnp.sum((x @ a) ** 2))(p["a"])) @ p["b"],
        a=(7, 4),
        b=(4, CLASSES),
    ),
    "clamped words": lambda: table(
        lambda p, x: (jnp.take(p["e"], x, axis=0, mode="clip") @ p["w"]).sum(0)
    ),
    "words out of range": lambda: table(
        lambda p, x: (jnp.take(p["e"], x, axis=0, mode="fill", fill_value=0) @ p["w"]).sum(0)
    ),
    "bytes": lambda: table(
        lambda p, x: (jnp.take(p["e"], x.astype(jnp.uint8), axis=0) @ p["w"]).sum(0), rows=256
    ),
    "short integers": lambda: table(
        lambda p, x: (jnp.take(p["e"], x.astype(jnp.int8), axis=0) @ p["w"]).sum(0), rows=300
    ),
    "integer inputs": lambda: (
        *of_matrices(promoted, w=(3, CLASSES))[:2],
        jnp.arange(3 * N, dtype=jnp.uint8).reshape(N, 3),
    ),
    "empty leaf": lambda: of_matrices(
        lambda p, x: x @ p["w"] + jnp.sum(p["none"]), w=(7, CLASSES), none=(0, 3)
    ),
    "unused": lambda: of_matrices(lambda p, x: x @ p["w"], w=(7, CLASSES), idle=(3, 2)),
}


def by_group(params):
    leaves, structure = jax.tree.flatten(params)
    groups = [number % 2 for number in range(len(leaves))]
    return jdp.clip_by_group((0.3, 0.2)[: len(set(groups))], structure.unflatten(groups))


CLIPPERS = {
    "norm": lambda params: jdp.clip_by_norm(0.3),
    "automatic": lambda params: jdp.clip_automatic(0.3),
    "group": by_group,
}


def both(loss, params, batch, clipper, mask=MASK):
    """By book-keeping, and from per-example gradients that only JAX had a hand in."""

    @jax.jit
    def reference(params):
        return clipper(jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch), mask)

    ours = jdp.clipped_grad(loss, clipper, strategy="book-keeping")
    return [jax.jit(lambda p: ours(p, batch, mask=mask))(params), reference(params)]


def assert_close(ours, reference, tolerance=1e-5):
    whole = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(reference.parts)))
    for one, two in zip(jax.tree.leaves(ours.parts), jax.tree.leaves(reference.parts), strict=True):
        assert np.linalg.norm(np.subtract(one, two)) <= tolerance * whole


@pytest.mark.parametrize("case", CASES)
def test_same_sum_as_written_out(case):
    loss, params, inputs = CASES[case]()
    if inputs.dtype == jnp.float32:
        inputs = inputs.at[1].set(jnp.nan).at[4].set(jnp.inf)
    ours, reference = both(loss, params, (inputs, LABELS), jdp.clip_by_norm(0.3))
    assert type(ours) is type(reference)
    assert_close(ours, reference)


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_every_clipper_of_norms(clipper):
    loss, params, inputs = CASES["attention"]()
    ours, reference = both(loss, params, (inputs, LABELS), CLIPPERS[clipper](params))
    assert_close(ours, reference)
    assert ours.noise_scales == reference.noise_scales


def test_rematerialised_and_jitted_losses():
    loss, params, inputs = CASES["attention"]()
    for wrapped in (jax.checkpoint(loss), jax.jit(loss)):
        assert_close(*both(wrapped, params, (inputs, LABELS), jdp.clip_by_norm(0.3)))


def test_microbatches_and_frozen_leaves():
    loss, params, inputs = CASES["attention"]()
    batch, clipper = (inputs, LABELS), jdp.clip_by_norm(0.3)
    flags = jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )
    sums = [
        jax.jit(
            lambda p, options=options: jdp.clipped_grad(loss, clipper, trainable=flags, **options)(
                p, batch, mask=MASK
            )
        )(params)
        for options in ({"microbatch_size": 4}, {"strategy": "vmap"})
    ]
    assert_close(*sums)
    frozen = [not flag for flag in jax.tree.leaves(flags)]
    nothing = [x is None for x in jax.tree.leaves(sums[0].parts, is_leaf=lambda x: x is None)]
    assert nothing == frozen


def test_bfloat16_parameters_have_float32_norms_and_sums():
    loss, params, inputs = CASES["dense"]()
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    batch = inputs.astype(jnp.bfloat16), LABELS
    ours, reference = both(loss, narrow, batch, jdp.clip_by_norm(0.3))
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.parts)} == {jnp.dtype(jnp.float32)}
    assert_close(ours, reference, 0.02)  # both are exact to bfloat16's activations


def test_auto_keeps_books_only_for_clippers_of_norms():
    loss, params, inputs = CASES["dense"]()
    batch, clipper = (inputs, LABELS), jdp.clip_by_norm(0.3)
    by_default = jdp.clipped_grad(loss, clipper)(params, batch, mask=MASK)
    ours = jdp.clipped_grad(loss, clipper, strategy="book-keeping")(params, batch, mask=MASK)
    jax.tree.map(np.testing.assert_array_equal, by_default.parts, ours.parts)
    with pytest.raises(ValueError, match="reads more than norms"):
        jdp.clipped_grad(loss, lambda gradients, mask: None, strategy="book-keeping")


def test_microbatches_are_as_large_as_memory_allows(monkeypatch):
    loss, params, inputs = CASES["dense"]()
    batch, clipper = (inputs, LABELS), jdp.clip_by_norm(0.3)
    floats = sum(leaf.size for leaf in jax.tree.leaves(params))
    written, kept = (
        jdp.clipped_grad(loss, clipper, strategy="scan"),
        jdp.clipped_grad(loss, clipper),
    )
    reference = jdp.clipped_grad(loss, clipper, strategy="vmap")(params, batch, mask=MASK)

    def scans(function):
        return "scan" in str(jax.make_jaxpr(lambda p: function(p, batch, mask=MASK))(params))

    assert not scans(written) and not scans(kept)
    # Written out, all parameters count, and there is more room.
    for sizes in gradients._WORKING_SETS.values():
        monkeypatch.setitem(sizes, "written out", 24 * floats)
        monkeypatch.setitem(sizes, "ordinary", 6 * floats)
    assert scans(written) and not scans(kept)
    assert_close(written(params, batch, mask=MASK), reference)
    for sizes in gradients._WORKING_SETS.values():
        monkeypatch.setitem(sizes, "ordinary", 1)
    assert scans(kept)
    assert_close(kept(params, batch, mask=MASK), reference)


GEOMETRIES = {
    "stride 2, same": (2, "SAME", 1, ("NHWC", "HWIO", "NHWC")),
    "stride 3, valid, dilated": ((3, 1), "VALID", 2, ("NHWC", "HWIO", "NHWC")),
    "uneven padding": (1, ((3, 0), (0, 2)), 1, ("NHWC", "HWIO", "NHWC")),
    "negative padding": (2, ((-1, 1), (0, -1)), 1, ("NHWC", "HWIO", "NHWC")),
    "channels first": (2, "SAME", 1, ("NCHW", "OIHW", "NCHW")),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("inside", ["top level", "branch"])
def test_convolutions_of_every_geometry(geometry, inside):
    # Kernels' gradients come from patches, inputs' gradients from kernels turned by hand.
    strides, padding, dilation, layouts = GEOMETRIES[geometry]
    strides = strides if isinstance(strides, tuple) else (strides, strides)
    first, last = layouts[0].index("C"), layouts[1].index("O")

    def loss(params, example):
        x = example[None]
        for kernel, steps in ((params["one"], (1, 1)), (params["two"], strides)):
            x = jax.lax.conv_general_dilated(
                jnp.tanh(x),
                kernel,
                steps,
                padding if steps == strides else "SAME",
                rhs_dilation=(dilation, dilation),
                dimension_numbers=layouts,
            )
        return jnp.sum(jnp.sin(x))

    rng = np.random.default_rng(0)
    kernel = [3, 2, 2, 2] if last == 3 else [2, 2, 3, 2]
    params = {name: jnp.asarray(rng.normal(size=kernel), jnp.float32) for name in ("one", "two")}
    image = [8, 7, 2] if first == 3 else [2, 8, 7]
    batch = jnp.asarray(rng.normal(size=(N, *image)), jnp.float32)

    def ours(params):
        return jdp.per_example_grad(loss)(params, batch)

    if inside == "branch":
        ours = lambda params, plain=ours: jax.lax.cond(True, plain, plain, params)  # noqa: E731
    reference = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    for one, two in zip(jax.tree.leaves(ours(params)), jax.tree.leaves(reference), strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        "dense",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("conv", "attention")),
        "tied table",
    ],
)
def test_unprotected_norms(case):
    loss, params, inputs = CASES[case]()
    norms = jax.jit(jdp.unprotected_gradient_norms(loss))(params, (inputs, LABELS))
    leaves = jax.tree.leaves(jax.vmap(jax.grad(loss), (None, 0))(params, (inputs, LABELS)))
    want = np.linalg.norm(np.concatenate([leaf.reshape(N, -1) for leaf in leaves], axis=1), axis=1)
    assert (norms >= want * (1 - 1e-5)).all() and (norms <= want * 1.03).all()


def test_which_leaves_are_covered():
    # Every kernel and table; no bias, no scale.
    loss, params, inputs = CASES["attention"]()
    jaxpr = jax.make_jaxpr(loss)(params, (inputs[0], LABELS[0]))
    leaves = jax.tree.leaves_with_path(params)
    covered = find(jaxpr, [leaf.shape for _, leaf in leaves])
    for i, (path, _) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        assert (i in covered) == ("kernel" in name or "embedding" in name), name


def _random_model_check(model, name, gram):
    loss, params, batch = model
    clipper = CLIPPERS[name](params)
    with pytest.MonkeyPatch.context() as patch:
        if gram:  # norms from Gram matrices throughout, and exact ones
            patch.setattr(bookkeeping, "FLOATS_PER_PRODUCT", 0)
            patch.setattr(bookkeeping, "_SMALL_TABLE", 0)
            patch.setattr(bookkeeping, "GRAM_MARGIN", 1e-12)
            patch.setattr(bookkeeping, "TABLE_MARGIN", 1e-12)
        assert_close(*both(loss, params, batch, clipper))


GIVEN = {"model": models, "name": st.sampled_from(sorted(CLIPPERS)), "gram": st.booleans()}


@hypothesis.given(**GIVEN)
@hypothesis.settings(max_examples=6)
def test_random_models(model, name, gram):
    _random_model_check(model, name, gram)


@pytest.mark.slow
@hypothesis.given(**GIVEN)
@hypothesis.settings(max_examples=40)
def test_many_random_models(model, name, gram):
    _random_model_check(model, name, gram)


# The Gram form -----------------------------------------------------------------------------------


def cancelling(positions, width):
    """Inputs that hardly differ over positions, output gradients that sum to nearly nothing."""
    generator = np.random.RandomState(0)
    u = 1 + 1e-3 * generator.randn(N, positions, width)
    v = generator.randn(N, positions, width)
    v -= v.mean(1, keepdims=True)
    return jnp.asarray(u, jnp.float32), jnp.asarray(v, jnp.float32)


def by_matrix(w, u, v):
    return jnp.sum((u @ w[0]) * v)


def by_layer(w, u, v):
    """Three slices of the weights, each used alike."""
    return jnp.sum(jax.lax.map(lambda w: by_matrix(w[None], u, v), w))


def by_turn(w, u, v):
    """One position a turn."""
    return jnp.sum(jax.lax.map(lambda uv: by_matrix(w, uv[0][None], uv[1][None]), (u, v)))


USES = {by_matrix: 1, by_layer: 3, by_turn: 1}


def largest_contribution(use):
    """The norm of the largest clipped contribution at clip norm 1, in float64."""
    batch = cancelling(64, 128)
    w, clipper = jnp.zeros((USES[use], 128, 128)), jdp.clip_by_norm(1.0)
    sum_of = jax.jit(
        lambda mask: bookkeeping.clipped_sum(
            lambda w, example: 1e3 * use(w, *example), clipper, w, batch, mask
        )
    )
    alone = [sum_of(jnp.arange(N) == i).parts[0] for i in range(N)]
    return max(np.linalg.norm(np.asarray(total, np.float64)) for total in alone)


@pytest.mark.parametrize("use", USES)
def test_contributions_stay_within_the_clip_norm(use, monkeypatch):
    assert largest_contribution(use) <= 1
    monkeypatch.setattr(bookkeeping, "FLOATS_PER_PRODUCT", 0)
    assert largest_contribution(use) <= 1


def tied(table, example):
    """Rows are looked up, and the same table is multiplied with."""
    words, picks, slopes = example
    return jnp.sum((table[words] - picks @ table) * slopes)


def tied_batch(share, noise):
    keys = jax.random.split(jax.random.key(0), 2)
    words = WORDS[:, :1]
    picks = share * jax.nn.one_hot(words, 64) + noise * jax.random.normal(keys[0], (N, 1, 64))
    return words, picks, 1e3 * jax.random.normal(keys[1], (N, 1, 64))


def test_contributions_of_tied_tables_stay_within_the_clip_norm(monkeypatch):
    # A row is looked up and subtracted again by a product: what is left is far below rounding.
    monkeypatch.setattr(bookkeeping, "_SMALL_TABLE", 0)
    batch = tied_batch(1.0, 3e-5)

    def largest():
        gradient = jdp.clipped_grad(tied, jdp.clip_by_norm(1.0), strategy="book-keeping")
        sum_of = jax.jit(lambda mask: gradient(jnp.zeros((64, 64)), batch, mask=mask).parts[0])
        alone = [np.asarray(sum_of(jnp.arange(N) == i), np.float64) for i in range(N)]
        return max(map(np.linalg.norm, alone))

    assert largest() <= 1
    monkeypatch.setattr(bookkeeping, "TABLE_MARGIN", 1e-12)
    assert largest() > 1.005  # the twin without the margin is caught


def test_norms_of_tied_tables_have_their_cross_terms(monkeypatch):
    monkeypatch.setattr(bookkeeping, "_SMALL_TABLE", 0)
    table, batch = jnp.zeros((64, 64)), tied_batch(0.5, 0.02)
    norms = jdp.unprotected_gradient_norms(tied)(table, batch)
    whole = jax.vmap(jax.grad(tied), (None, 0))(table, batch)
    want = np.linalg.norm(np.reshape(whole, (N, -1)), axis=1)
    np.testing.assert_allclose(norms, want, rtol=1e-3)


@pytest.mark.parametrize("make", [jdp.clip_by_norm, jdp.clip_automatic])
@pytest.mark.parametrize("positions", [0, 1, 3])
@pytest.mark.parametrize(
    "x, scale, unit", [(1e-19, 1e19, 1.0), (1e-19, 1e9, 1e-10), (1e-25, 1e27, 1.0)]
)
def test_squares_that_underflow_hide_nothing(make, positions, x, scale, unit, monkeypatch):
    monkeypatch.setattr(bookkeeping, "FLOATS_PER_PRODUCT", 0)  # norms from Gram matrices
    shape = (2, 1000) if positions == 0 else (2, positions, 1000)
    loss = lambda w, x: (x @ w).sum() * scale  # noqa: E731
    gradient = jdp.clipped_grad(loss, make(unit), strategy="book-keeping")
    inputs = jnp.full(shape, x).at[1].set(0)
    if positions == 3:
        inputs = inputs.at[0, 0].set(0).at[0, 1].multiply(1e-18)
    (total,) = gradient(jnp.zeros((1000, 1)), inputs, mask=jnp.ones(2, bool)).parts
    assert np.linalg.norm(np.asarray(total, np.float64)) <= unit


@pytest.mark.parametrize("use", USES)
def test_twin_without_the_margin_is_caught(use, monkeypatch):
    monkeypatch.setattr(bookkeeping, "FLOATS_PER_PRODUCT", 0)
    monkeypatch.setattr(bookkeeping, "GRAM_MARGIN", 1e-30)
    assert largest_contribution(use) > 1.005


def test_gram_form_is_close_on_ordinary_data(monkeypatch):
    monkeypatch.setattr(bookkeeping, "FLOATS_PER_PRODUCT", 0)
    monkeypatch.setattr(bookkeeping, "_SMALL_TABLE", 0)
    for case in ("attention", "tied table"):
        loss, params, inputs = CASES[case]()
        ours, reference = both(loss, params, (inputs, LABELS), jdp.clip_by_norm(0.3))
        assert_close(ours, reference, 0.02)
        norms = [
            np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.parts)]))
            for s in (ours, reference)
        ]
        assert norms[0] <= norms[1] * (1 + 1e-3)


@pytest.mark.parametrize("case", ["attention", "scan"])
def test_chunks_add_up(case, monkeypatch):
    loss, params, inputs = CASES[case]()
    ours, _ = both(loss, params, (inputs, LABELS), jdp.clip_by_norm(0.3))
    monkeypatch.setattr(bookkeeping, "_CHUNK", 4)
    chunked, reference = both(loss, params, (inputs, LABELS), jdp.clip_by_norm(0.3))
    assert_close(chunked, reference)
    assert chunked.rounding < ours.rounding


def test_examples_beyond_the_last_whole_chunk_count(monkeypatch):
    monkeypatch.setattr(bookkeeping, "_CHUNK", 4)
    x = jax.random.normal(jax.random.key(0), (23, 3))
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w))  # noqa: E731
    sums = [
        jdp.clipped_grad(loss, jdp.clip_by_norm(1.0), strategy=strategy)(
            jnp.ones((3, 2)), x, mask=jnp.ones(23, bool)
        )
        for strategy in ("book-keeping", "vmap")
    ]
    assert_close(*sums)


def test_the_sum_carries_its_rounding():
    loss, params, inputs = CASES["dense"]()
    ours, _ = both(loss, params, (inputs, LABELS), jdp.clip_by_norm(0.3))
    assert 0 < ours.rounding < 0.01
