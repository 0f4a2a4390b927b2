"""A hypernetwork: two networks, and between them the one private release."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _check
from jdp._typing import Adjacency, Key, Mask, PyTree, Scalar
from jdp.set_embedding import (
    features,
    num_rows,
    one_record,
    private_embedding,
    refusing_axis_names,
)

Tokens: TypeAlias = Float[Array, "t d"]
Detokenise: TypeAlias = Callable[[Tokens], PyTree]

_INIT = "Make them with Hypernet.init, or take them from a TrainState."


class HypernetParams(NamedTuple):
    r"""What a hypernetwork has learnt; all public.

    Attributes:
      encoder: parameters of $\phi_1$.
      decoder: parameters of $\phi_2$.
      centre: (features,) mean embedding of public records, subtracted before the clip.
    """

    encoder: PyTree
    decoder: PyTree
    centre: Float[Array, " features"]


@dataclasses.dataclass(frozen=True)
class Hypernet:
    r"""A hypernetwork; see `jdp.hypernet`.

    **Guarantee.** Of the records, `embed`, and so `generate`, releases ONE Gaussian mechanism of
    noise multiplier z (event `GaussianDpEvent(z)`) under the adjacency of `noise_multiplier`: L2
    sensitivity C/N (zero-out) or 2C/N (replace-one) by the clip, N public. `decode` is
    post-processing. It holds only if parameters were learnt without these records.

    Attributes:
      encoder: a linen module for ONE record, `encoder(record) -> (features,)`.
      decoder: a linen module, `decoder(context) -> (t, d)`.
      detokenise: from (t, d) tokens to a pytree, the target's parameters; see `flat_tokens`.
      num_records: N, the public divisor: `plan.batch_size`.
      noise_multiplier: `plan.noise_multiplier`. May be an array, with `adjacency`.
      clip_norm: C.
      context_tokens: into how many equal tokens the embedding is cut for the decoder.
      adjacency: as in `jdp.add_noise`.

    Raises:
      TypeError: an argument has another type.
      ValueError: a number is out of range.

    >>> from jdp.hypernet import LinearDecoder, MLPEncoder, plan_embedding
    >>> plan = plan_embedding(4, epsilon=1.0, delta=1e-5)
    >>> num_tokens, detokenise = flat_tokens({"w": jnp.zeros(6), "b": jnp.zeros(())}, 4)
    >>> net = Hypernet(MLPEncoder((8,)), LinearDecoder(num_tokens, 4), detokenise,
    ...                num_records=4, noise_multiplier=plan.noise_multiplier)
    >>> params = net.init(jax.random.key(0), jnp.eye(4))
    >>> net.generate(params, jnp.eye(4), jax.random.key(1))["w"].shape
    (6,)
    """

    encoder: nn.Module
    decoder: nn.Module
    detokenise: Detokenise
    _: dataclasses.KW_ONLY
    num_records: int
    noise_multiplier: Scalar
    clip_norm: float = 1.0
    context_tokens: int = 1
    adjacency: Adjacency | None = None

    def __post_init__(self):
        """Validate."""
        for name in ("encoder", "decoder"):
            if not isinstance(getattr(self, name), nn.Module):
                remedy = "Wrap a function in a module with one __call__."
                _check.fail(name, "a flax.linen module", getattr(self, name), remedy, TypeError)
        if not callable(self.detokenise):
            remedy = "Take it from flat_tokens, or from a low-rank adapter."
            expected = "a function from (t, d) tokens to a pytree"
            _check.fail("detokenise", expected, self.detokenise, remedy, TypeError)
        remedy = "It is the public number of records in the set; take plan.batch_size."
        _check.integer("num_records", self.num_records, at_least=1, remedy=remedy)
        _check.noise_multiplier(self.noise_multiplier)
        remedy = "It bounds the length of each record's embedding; 1.0 is usual."
        _check.number("clip_norm", self.clip_norm, above=0, remedy=remedy)
        remedy = "1 is usual; it must divide the encoder's number of features."
        _check.integer("context_tokens", self.context_tokens, at_least=1, remedy=remedy)
        if self.adjacency is not None:
            _check.choice("adjacency", self.adjacency, get_args(Adjacency))

    def init(self, key: Key, public_records: PyTree) -> HypernetParams:
        """Draw parameters; the centre is the mean embedding of the public records.

        Args:
          key: one typed key; need not be secret.
          public_records: a pytree of arrays with public records on the leading axis.

        Returns:
          Parameters.

        Raises:
          TypeError: `key` is no typed key.
          ValueError: the encoder keeps batch statistics or mixes records, or shapes do not fit.
        """
        _check.typed_key("key", key)
        encoder_key, decoder_key = jax.random.split(key)
        if not num_rows(public_records, "public_records"):
            got, remedy = _check.Words("none"), "The centre is their mean embedding."
            _check.fail("public_records", "at least one record", got, remedy)
        record = one_record(public_records)
        with refusing_axis_names("encoder"):
            variables = jax.eval_shape(self.encoder.init, encoder_key, record)
        _only_params("encoder", variables)
        first = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), record)
        encoder = self.encoder.init(encoder_key, first).get("params", {})
        size = features(lambda record: self._encode(encoder, record), record)
        if size % self.context_tokens:
            remedy = "Change the encoder's last width, or the number of tokens."
            expected = f"a divisor of the encoder's {size} features"
            _check.fail("context_tokens", expected, self.context_tokens, remedy)
        context = jnp.zeros((self.context_tokens, size // self.context_tokens))
        _only_params("decoder", jax.eval_shape(self.decoder.init, decoder_key, context))
        decoder = self.decoder.init(decoder_key, context).get("params", {})
        centre = self.mean_embedding(encoder, public_records)
        return HypernetParams(encoder, decoder, centre)

    def embed(
        self, params: HypernetParams, records: PyTree, key: Key, mask: Mask | None = None
    ) -> Float[Array, " features"]:
        """The private mean embedding of a set: the ONLY place where records are read.

        Args:
          params: learnt on public sets.
          records: a pytree of arrays with the set's records on the leading axis.
          key: one typed PRNG key, secret (`jdp.secure_key()`) and never used before.
          mask: (n,) booleans, False for padding.

        Returns:
          e, which may be kept and published.
        """
        _check.instance("params", params, HypernetParams, _INIT)
        return private_embedding(
            key,
            lambda record: self._encode(params.encoder, record),
            records,
            mask,
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            num_records=self.num_records,
            centre=params.centre,
            adjacency=self.adjacency,
        )

    def decode(self, params: HypernetParams, embedding: Float[Array, " features"]) -> PyTree:
        """The target's parameters from a released embedding: post-processing, free of charge."""
        _check.instance("params", params, HypernetParams, _INIT)
        remedy = "It is what `embed` returned."
        _check.floating("embedding", embedding, jnp.shape(params.centre), remedy=remedy)
        size = embedding.shape[0]
        # Coordinates of order 1 where the clip norm is used up.
        context = embedding * (math.sqrt(size) / self.clip_norm)
        context = context.reshape(self.context_tokens, size // self.context_tokens)
        tokens: Any = self.decoder.apply({"params": params.decoder}, context)
        if not isinstance(tokens, jax.Array):
            remedy = "Return one array of tokens, (t, d)."
            _check.fail("decoder", "a module that returns an array", tokens, remedy, TypeError)
        return self.detokenise(tokens)

    def generate(
        self, params: HypernetParams, records: PyTree, key: Key, mask: Mask | None = None
    ) -> PyTree:
        """`decode` of `embed`: one private release, as a pytree like the target's parameters."""
        return self.decode(params, self.embed(params, records, key, mask))

    def _encode(self, encoder: PyTree, record: PyTree) -> Float[Array, " features"]:
        found: Any = self.encoder.apply({"params": encoder}, record)
        return found  # what else it may be, `features` refuses

    def mean_embedding(
        self, encoder: PyTree, records: PyTree, mask: Array | None = None
    ) -> Float[Array, " features"]:
        """The mean over PUBLIC records with finite embeddings, neither clipped nor noised."""
        num_rows(records)
        if not isinstance(encoder, Mapping):
            _check.fail("encoder", "a pytree of parameters", encoder, _INIT, TypeError)
        embeddings = jax.vmap(lambda record: self._encode(encoder, record))(records)
        if mask is not None and jnp.shape(mask) != embeddings.shape[:1]:
            remedy = "It tells for each record whether it is one, or padding."
            _check.fail("mask", f"of shape {embeddings.shape[:1]}, like the records", mask, remedy)
        counted = jnp.isfinite(embeddings).all(axis=1)
        counted = counted if mask is None else counted & mask
        total = jnp.sum(embeddings, axis=0, where=counted[:, None], dtype=jnp.float32)
        return total / jnp.maximum(jnp.sum(counted), 1)


def _only_params(name: str, variables: Any) -> None:
    """Refuse collections besides parameters: batch statistics mix records, others carry state."""
    if extra := sorted(set(variables) - {"params"}):
        remedy = "Batch normalisation mixes records: use LayerNorm or GroupNorm, and keep no state."
        _check.fail(name, "a module with parameters only", _check.Words(f"also {extra}"), remedy)


def flat_tokens(like: PyTree, token_size: int) -> tuple[int, Detokenise]:
    """Tokens for a plain pytree: its entries in order, cut into equal tokens, zero-padded.

    Args:
      like: the target's parameters; only shapes and dtypes matter.
      token_size: entries of a token.

    Returns:
      How many tokens there are, and the function from (t, d) tokens to a pytree like `like`.

    Raises:
      TypeError: a leaf is not a floating array.
      ValueError: there is no leaf, or `token_size` is below 1; that function, where tokens have
        another shape.

    >>> num_tokens, detokenise = flat_tokens({"b": jnp.zeros(2), "w": jnp.zeros((2, 3))}, 5)
    >>> num_tokens, detokenise(jnp.arange(10.0).reshape(2, 5))["b"].tolist()
    (2, [0.0, 1.0])
    """
    _check.integer("token_size", token_size, at_least=1, remedy="Count a token's entries.")
    leaves, structure = jax.tree.flatten(like)
    for leaf in leaves or [like]:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = "Generate floating parameters only."
            _check.fail("like", "a pytree of floating arrays", leaf, remedy, TypeError)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    ends = [0]
    for shape, _ in shapes:
        ends.append(ends[-1] + math.prod(shape))

    count = -(-ends[-1] // token_size)

    def detokenise(tokens: Tokens) -> PyTree:
        remedy = "Make the decoder with this number and size of tokens."
        flat = _check.floating("tokens", tokens, (count, token_size), remedy=remedy).ravel()
        pieces = zip(ends, ends[1:], shapes, strict=False)
        parts = [flat[a:b].reshape(shape).astype(dtype) for a, b, (shape, dtype) in pieces]
        return jax.tree.unflatten(structure, parts)

    return count, detokenise
