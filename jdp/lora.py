"""Low-rank adapters (LoRA; Hu et al. 2022) of any parameter pytree, and their form as tokens.

An adapter of a matrix W is a pair of thin factors; the adapted matrix is
W + scale * down^T up. Adapters are a pytree of their own, so that gradients, clipping and noise
concern them alone and the base parameters are never written to.
"""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _check, _tree
from jdp._typing import Key, Params, PyTree, Scalar


def init(key: Key, params: Params, patterns: str | Sequence[str], *, rank: int) -> PyTree:
    r"""Return adapters of the matrices whose paths match: $\Delta W = 0$ to begin with.

    A leaf of shape (..., m) counts as a matrix of n rows, all its axes but the last, and m columns:
    a dense kernel is (inputs, outputs), a convolution's (height * width * inputs, outputs). A
    projection to queries, keys and values in one leaf is one matrix with one adapter.

    A kernel of (inputs, heads, outputs of a head), as flax's attention has for queries, keys and
    values, counts as (inputs * heads, outputs of a head) therefore: the adapter then is of rank r
    in this form, but its change of the map from inputs to all outputs is not. Where that is to be
    of rank r, keep the leaf as (inputs, heads * outputs) and reshape it where the loss applies it.

    Args:
      key: a typed PRNG key; the start is public.
      params: any pytree of arrays, or of shapes under `jax.eval_shape`.
      patterns: shell patterns, at least one of which a path must match. A path is the keys joined
        by slashes, and `*` matches slashes too: "*/qkv/kernel". A bracket opens a choice of
        characters: to match the key "a[0]" itself, write "a[[]0]".
      rank: r, at least 1 and at most the sides of every matrix.

    Returns:
      `{path: {"down": (r, n), "up": (r, m)}}`: down is N(0, 1/n), up is zero, in the leaf's dtype.

    Raises:
      TypeError: an argument has another type.
      ValueError: a pattern matches nothing, or a leaf that is no floating matrix, or two leaves of
        one path, or the rank is out of range.

    >>> import jax, jax.numpy as jnp
    >>> from jdp import lora
    >>> layer = {"kernel": jnp.ones((4, 12)), "bias": jnp.ones(12)}
    >>> params = {"qkv": layer, "out": jnp.ones((12, 2))}
    >>> adapters = lora.init(jax.random.key(0), params, "*/kernel", rank=1)
    >>> jax.tree.map(jnp.shape, adapters)
    {'qkv/kernel': {'down': (1, 4), 'up': (1, 12)}}
    """
    _check.typed_key("key", key)
    _check.integer("rank", rank, at_least=1, remedy="1 to 16 is usual.")
    adapters = {}
    for number, (path, leaf) in enumerate(_matching(params, patterns).items()):
        rows, columns = math.prod(leaf.shape[:-1]), leaf.shape[-1]
        if rank > min(rows, columns):
            remedy = f"At {path}, {rows} x {columns}, it would cost more than the matrix itself."
            _check.fail("rank", f"at most {min(rows, columns)}", rank, remedy)
        draw = jax.random.normal(jax.random.fold_in(key, number), (rank, rows))
        down = (draw / math.sqrt(rows)).astype(leaf.dtype)
        adapters[path] = {"down": down, "up": jnp.zeros((rank, columns), leaf.dtype)}
    return adapters


def merge(params: Params, adapters: PyTree, scale: Scalar = 1.0) -> Params:
    r"""Return the parameters with $W + s\,\text{down}^\top \text{up}$ where there is an adapter.

    All other leaves are the very same arrays. Differentiable in the adapters; under `jax.vmap` over
    adapters only the adapted leaves get a batch axis.

    Args:
      params: the base parameters.
      adapters: as from `init`, for these parameters.
      scale: s, often alpha / rank.

    Returns:
      Parameters of the same structure, shapes and dtypes.

    Raises:
      TypeError: `adapters` has another form.
      ValueError: an adapter fits no leaf, or two leaves have its path.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> adapters = {"w": {"down": jnp.array([[1.0, 2.0]]), "up": jnp.array([[0.0, 1.0]])}}
    >>> print(lora.merge({"w": jnp.eye(2), "b": jnp.ones(2)}, adapters)["w"])
    [[1. 1.]
     [0. 3.]]
    """
    scale = _scale(scale)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    shapes = {_name(path): _shape(leaf) for path, leaf in leaves}
    pairs = isinstance(adapters, Mapping) and all(
        isinstance(factors, Mapping) and factors.keys() == {"down", "up"}
        for factors in adapters.values()
    )
    if not pairs:
        expected = 'of the form {path: {"down": ..., "up": ...}}'
        _check.fail("adapters", expected, adapters, "Make them with lora.init.", TypeError)
    _one_leaf_each(adapters, [_name(path) for path, _ in leaves])
    for path, factors in adapters.items():
        shape, (down, up) = shapes.get(path), (jnp.shape(factors[name]) for name in ("down", "up"))
        matrix = shape and (math.prod(shape[:-1]), shape[-1])
        if len(down) != 2 or len(up) != 2 or down[0] != up[0] or matrix != (down[1], up[1]):
            got = _check.Words(f"factors {down} and {up} at {path}: {shape}")
            remedy = "Make adapters with lora.init for these very parameters."
            _check.fail("adapters", "factors (r, n) and (r, m) of an n x m leaf", got, remedy)

    def adapted(path: Any, leaf: Array) -> Array:
        factors = adapters.get(_name(path))
        if factors is None:
            return leaf
        down, up = _tree.wide(factors["down"]), _tree.wide(factors["up"])
        change = scale * jnp.matmul(down.T, up, precision=jax.lax.Precision.HIGHEST)
        return (_tree.wide(leaf) + change.reshape(jnp.shape(leaf))).astype(leaf.dtype)

    return structure.unflatten([adapted(path, leaf) for path, leaf in leaves])


def unmerge(params: Params, adapters: PyTree, scale: Scalar = 1.0) -> Params:
    """Take the adapters out of merged parameters again, up to rounding.

    Where the base must be bit-equal, keep it: `merge` leaves it as it is.

    Args:
      params: what `merge` returned.
      adapters: those that were merged.
      scale: the same as in `merge`.

    Returns:
      The base parameters.

    Raises:
      TypeError, ValueError: as `merge`.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> adapters = {"w": {"down": jnp.array([[1.0, 2.0]]), "up": jnp.array([[0.0, 1.0]])}}
    >>> print(lora.unmerge(lora.merge({"w": jnp.eye(2)}, adapters), adapters)["w"])
    [[1. 0.]
     [0. 1.]]
    """
    return merge(params, adapters, -_scale(scale))


def _scale(scale: Any) -> Scalar:
    _check.number("scale", scale, traced=True, remedy="It is alpha / rank; 1.0 is usual.")
    return scale if isinstance(scale, jax.Array) else float(scale)


def token_length(adapters: PyTree) -> int:
    """Return the longest token length that divides every factor: no padding is needed.

    Args:
      adapters: arrays, or shapes from `jax.eval_shape`.

    Returns:
      The greatest common divisor of the lengths of all last axes.

    Raises:
      ValueError: there is no array, or one is a scalar.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> lora.token_length({"down": jnp.zeros((1, 384)), "up": jnp.zeros((1, 1152))})
    384
    """
    return math.gcd(*(leaf.shape[-1] for leaf in _vectors(adapters)))


def tokenise(adapters: PyTree, length: int) -> Float[Array, "T length"]:
    """Cut every vector (every row of every factor) into tokens; none mixes two of them.

    A vector whose length is no multiple of `length` is filled up with zeros at its end.

    Args:
      adapters: floating arrays; the last axis is along the vectors.
      length: of a token, for example `token_length(adapters)`.

    Returns:
      The tokens, in tree order, float32 or wider. `detokenise` inverts it.

    Raises:
      TypeError, ValueError: `length` is no positive integer, or there is nothing to cut: no leaf,
        or one that is a scalar or not floating.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> print(lora.tokenise({"down": jnp.arange(4.0)[None], "up": jnp.ones((1, 3))}, 2))
    [[0. 1.]
     [2. 3.]
     [1. 1.]
     [1. 0.]]
    """
    _check.integer("length", length, at_least=1, remedy="Take lora.token_length(adapters).")
    tokens = []
    for leaf in _vectors(adapters):
        rows = _tree.wide(leaf).reshape(-1, leaf.shape[-1])
        padded = jnp.pad(rows, ((0, 0), (0, -leaf.shape[-1] % length)))
        tokens.append(padded.reshape(-1, length))
    return jnp.concatenate(tokens)


def detokenise(tokens: Float[Array, "T length"], like: PyTree) -> PyTree:
    """Put tokens together again: the inverse of `tokenise`; what fills up is dropped.

    Args:
      tokens: (T, length).
      like: adapters, or their shapes from `jax.eval_shape`.

    Returns:
      Arrays of the structure, shapes and dtypes of `like`.

    Raises:
      ValueError: the number of tokens is not that of `like`.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> like = {"down": jnp.zeros((1, 4)), "up": jnp.zeros((1, 3))}
    >>> tokens = lora.tokenise({"down": jnp.arange(4.0)[None], "up": jnp.ones((1, 3))}, 2)
    >>> print(lora.detokenise(tokens, like)["up"])
    [[1. 1. 1.]]
    """
    shape: Any = tokens.shape if _check.is_floating(tokens) else ()
    if len(shape) != 2 or shape[0] != num_tokens(like, shape[1]):
        expected = "of shape (T, length)"
        if len(shape) == 2:
            expected = f"{num_tokens(like, shape[1])} tokens of length {shape[1]}"
        remedy = "Make as many as lora.num_tokens(like, length)."
        _check.fail("tokens", expected, _check.Words(f"shape {shape}"), remedy)
    leaves, start = [], 0
    for leaf in _vectors(like):
        vectors = math.prod(leaf.shape[:-1])
        end = start + vectors * -(-leaf.shape[-1] // shape[1])
        rows = tokens[start:end].reshape(vectors, -1)[:, : leaf.shape[-1]]
        leaves.append(rows.reshape(leaf.shape).astype(leaf.dtype))
        start = end
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def num_tokens(adapters: PyTree, length: int) -> int:
    """Return the number of tokens that `tokenise` makes.

    Args:
      adapters: arrays, or shapes from `jax.eval_shape`.
      length: of a token.

    Raises:
      TypeError, ValueError: as `tokenise`.

    >>> import jax.numpy as jnp
    >>> from jdp import lora
    >>> lora.num_tokens({"down": jnp.zeros((1, 4)), "up": jnp.zeros((1, 3))}, 2)
    4
    """
    _check.integer("length", length, at_least=1, remedy="Take lora.token_length(adapters).")
    return sum(
        math.prod(leaf.shape[:-1]) * -(-leaf.shape[-1] // length) for leaf in _vectors(adapters)
    )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _shape(leaf: Any) -> tuple[int, ...]:
    """The shape of an array; () of anything else, such as an activation function."""
    return getattr(leaf, "shape", ())


def _one_leaf_each(wanted: Collection[str], names: Sequence[str]) -> None:
    """Refuse paths that two leaves share: "a/b" as one key, and as "b" under "a"."""
    for path in wanted:
        if names.count(path) > 1:
            remedy = "Two leaves have this path: rename a key that has a slash in it."
            _check.fail("params", "such that paths with adapters differ", path, remedy)


def _matching(params: Params, patterns: str | Sequence[str]) -> dict[str, Any]:
    """The leaves whose path matches a pattern, after checking that each can have an adapter."""
    several = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    wanted: tuple[Any, ...] = tuple(patterns) if several else (patterns,)
    if not wanted or not all(isinstance(pattern, str) for pattern in wanted):
        remedy = 'For example "*/qkv/kernel".'
        _check.fail("patterns", "one shell pattern or more", patterns, remedy, TypeError)
    flat = jax.tree_util.tree_leaves_with_path(params)
    leaves, found = {_name(path): leaf for path, leaf in flat}, {}
    for pattern in wanted:
        matches = [path for path in leaves if fnmatch.fnmatchcase(path, pattern)]
        if not matches:
            some = ", ".join(list(leaves)[:3])
            _check.fail("patterns", "such that each matches", pattern, f"Paths are {some}, ...")
        found |= dict.fromkeys(matches)
    _one_leaf_each(found, [_name(path) for path, _ in flat])
    for path in found:
        leaf = leaves[path]
        shape = _shape(leaf)
        if len(shape) < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            got = _check.Words(f"{path}, {kind}{list(shape)}")
            remedy = "Only floating arrays of two axes or more have adapters; name kernels."
            _check.fail("patterns", "such that they match matrices only", got, remedy)
    return {path: leaf for path, leaf in leaves.items() if path in found}


def _vectors(adapters: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(adapters)
    found = [tuple(leaf.shape) if _check.is_floating(leaf) else () for leaf in leaves]
    if () in found or not sum(map(math.prod, found)):
        shapes = _check.Words(f"floating leaves of shapes {found}")
        _check.fail("adapters", "a pytree of vectors", shapes, "Make adapters with lora.init.")
    return leaves
