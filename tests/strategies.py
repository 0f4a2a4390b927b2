"""Inputs for the contract checks. Shapes are few and fixed, so that compilations are reused."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

ROWS = 6
SHAPES = {"a": (3, 4), "b": (3,), "c": (3, 4)}  # two leaves of equal shape
SIZE = 27
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
GROUPS = {"a": 0, "b": 0, "c": 1}

KINDS = (
    "normal",
    "zero",
    "huge",
    "overflow",
    "nan",
    "inf",
    "denormal",
    "tiny",
    "in_span",
    "huge_in_span",
    "orthogonal",
    "bf16",
    "one_coordinate",
)
FINITE = ("normal", "zero", "tiny", "in_span", "orthogonal", "bf16", "one_coordinate")


def tree_of(matrix, dtype=jnp.float32):
    """Cut (n, 27) into per-example gradients of PARAMS, or (27,) into a tree like PARAMS."""
    leaves, first = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        piece = matrix[..., first : first + size]
        leaves[name] = jnp.asarray(piece.reshape(*piece.shape[:-1], *shape), dtype)
        first += size
    return leaves


def flat(tree, batch_axes=0):
    """The opposite of tree_of, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in tree.values()]
    return np.concatenate([x.reshape(*x.shape[:batch_axes], -1) for x in leaves], axis=-1)


@functools.cache
def span():
    """(4, 27): orthonormal rows of the subspace that the subspace clippers use, by group."""
    rng = np.random.default_rng(7)
    rows = np.zeros((4, SIZE))
    rows[:2, :15] = np.linalg.qr(rng.normal(size=(15, 2)))[0].T
    rows[2:, 15:] = np.linalg.qr(rng.normal(size=(12, 2)))[0].T
    return rows


def row(kind, seed):
    """One adversarial gradient of 27 entries, in float32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SIZE)
    inside = span().T @ rng.normal(size=4)
    if kind == "zero":
        x = np.zeros(SIZE)
    elif kind == "huge":
        x = x * 1e12
    elif kind == "overflow":
        x = x * 1e30
    elif kind in ("nan", "inf"):
        x[seed % SIZE] = np.nan if kind == "nan" else (-1) ** seed * np.inf
    elif kind == "denormal":
        x = x * 1e-40
    elif kind == "tiny":
        x = x * 1e-12
    elif kind == "in_span":
        x = inside
    elif kind == "huge_in_span":
        x = inside * 1e10
    elif kind == "orthogonal":
        x = x - span().T @ (span() @ x)
    elif kind == "bf16":
        x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    elif kind == "one_coordinate":
        x = 5.0 * np.eye(SIZE)[seed % SIZE]
    return x.astype(np.float32)


def rows(kinds, seed):
    return np.stack([row(kind, seed + i) for i, kind in enumerate(kinds)])


masks = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array)
clip_norms = st.sampled_from([1e-6, 1e-3, 0.5, 1.0, 30.0, 1e6])
seeds = st.integers(0, 2**16)
indices = st.integers(0, ROWS - 1)


def gradients(kinds=KINDS):
    """(6, 27) matrices whose every row is drawn from the given kinds."""
    some = st.lists(st.sampled_from(kinds), min_size=ROWS, max_size=ROWS)
    return st.builds(rows, some, seeds)


# Random models -----------------------------------------------------------------------------------

PLACES, WIDTH, WORDS, DEPTH = 4, 4, 7, 3


def _dense(w, x, words):
    return jnp.tanh(x @ w["kernel"] + w["bias"][None])


def _conv(w, x, words):
    numbers = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(x[None], w["kernel"], (1,), "SAME", dimension_numbers=numbers)
    return x + jnp.tanh(y[0])


def _attention(w, x, words):
    query, key, value = jnp.einsum("td,dhk->thk", x, w["query"]), x @ w["key"], x @ w["value"]
    scores = jnp.einsum("thk,sk->hts", query, key)
    return x + jnp.einsum("hts,sk->tk", jax.nn.softmax(scores), value) @ w["out"]


def _embedding(w, x, words):
    return x + w["table"][words]


def _tied(w, x, words):
    logits = (x + w["table"][words]) @ w["table"].T
    return jax.nn.softmax(logits) @ w["table"]


def _layers(w, x, words):
    """A scan over layers."""
    return jax.lax.scan(lambda x, w: (_dense(w, x, words), None), x, w)[0]


def _recurrent(w, x, words):
    """A scan over positions, backwards, that closes over its weights."""

    def step(state, inputs):
        state = jnp.tanh(inputs @ w["from_input"] + state @ w["from_state"] + w["bias"])
        return state, state

    return jax.lax.scan(step, jnp.zeros(WIDTH), x, reverse=True)[1]


_SQUARE, _TABLE = (WIDTH, WIDTH), (WORDS, WIDTH)
LAYERS = {
    _dense: {"kernel": _SQUARE, "bias": (WIDTH,)},
    _conv: {"kernel": (3, *_SQUARE)},
    _attention: {"query": (WIDTH, 2, 3), "key": (WIDTH, 3), "value": _SQUARE, "out": _SQUARE},
    _embedding: {"table": _TABLE},
    _tied: {"table": _TABLE},
    _layers: {"kernel": (DEPTH, *_SQUARE), "bias": (DEPTH, WIDTH)},
    _recurrent: {"from_input": _SQUARE, "from_state": _SQUARE, "bias": (WIDTH,)},
}


def model(layers, seed):
    """A loss, its parameters and ROWS examples; layers of one kind and number share weights."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {}
    for layer, number in layers:
        made = {name: normal(*shape) for name, shape in LAYERS[layer].items()}
        params.setdefault(f"{layer.__name__} {number}", made)

    def loss(params, example):
        x, words, target = example
        for layer, number in layers:
            x = layer(params[f"{layer.__name__} {number}"], x, words)
        return jnp.sum((x - target) ** 2)

    x, target = normal(ROWS, PLACES, WIDTH), normal(ROWS, PLACES, WIDTH)
    words = jnp.asarray(rng.integers(0, WORDS, (ROWS, PLACES)))
    return loss, params, (x, words, target)


models = st.builds(
    model,
    st.lists(st.tuples(st.sampled_from(list(LAYERS)), st.integers(0, 1)), min_size=1, max_size=3),
    seeds,
)
