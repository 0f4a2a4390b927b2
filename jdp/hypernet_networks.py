"""The two networks of DP-DeepSets in Flax (linen): a record's encoder, and decoders to tokens.

`Hypernet` takes any modules of the same form: `encoder(record) -> (features,)` for ONE record, and
`decoder(context) -> (tokens, token size)` with `context` of shape (context tokens, width).
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _check

_MOST = 2**31 - 1  # sizes that JAX can index
_INIT = nn.initializers.normal(0.01)


class MLPEncoder(nn.Module):
    """Layers of the given widths over the flattened record, GELU between them.

    >>> encoder = MLPEncoder((32, 8))
    >>> params = encoder.init(jax.random.key(0), jnp.zeros((4, 4)))
    >>> encoder.apply(params, jnp.ones((4, 4))).shape
    (8,)
    """

    widths: Sequence[int] = (256, 128)

    @nn.compact
    def __call__(self, record: Float[Array, "..."]) -> Float[Array, " features"]:
        """Encode one record, an array of any shape."""
        remedy = "The last one is the number of features, for example (256, 128)."
        for width in _check.sequence("widths", self.widths, "integers", remedy):
            _check.integer("widths", width, at_least=1, at_most=_MOST, remedy="Count units.")
        x = jnp.ravel(record)
        for width in self.widths[:-1]:
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def _check_sizes(module: nn.Module, *names: str) -> None:
    for name in names:
        remedy = "jdp.hypernet.flat_tokens tells the number and size of tokens."
        _check.integer(name, getattr(module, name), at_least=1, at_most=_MOST, remedy=remedy)


class LinearDecoder(nn.Module):
    """All tokens as one linear map of the context: the simple choice, and quick to learn.

    >>> decoder = LinearDecoder(6, 16)
    >>> decoder.init_with_output(jax.random.key(0), jnp.ones((1, 8)))[0].shape
    (6, 16)
    """

    num_tokens: int
    token_size: int
    kernel_init: Callable[..., jax.Array] = _INIT

    @nn.compact
    def __call__(self, context: Float[Array, "c width"]) -> Float[Array, "t d"]:
        """Decode the context."""
        _check_sizes(self, "num_tokens", "token_size")
        size = self.num_tokens * self.token_size
        flat = nn.Dense(size, kernel_init=self.kernel_init, name="head")(jnp.ravel(context))
        return flat.reshape(self.num_tokens, self.token_size)


class TransformerDecoder(nn.Module):
    """Learnable positions attend to each other and to the context, layer by layer (pre-norm).

    With ONE context token the softmax over it is 1: cross-attention adds the same vector to every
    token, and its queries and keys learn nothing. What tells the tokens apart then is their
    positions, through self-attention and the MLPs.

    Attributes:
      num_tokens: t.
      token_size: d.
      width: of the tokens inside.
      heads: of each attention.
      mlp_width: of the hidden layer that each token passes.
      layers: how many.

    >>> decoder = TransformerDecoder(6, 16, width=8, heads=2, mlp_width=16, layers=1)
    >>> decoder.init_with_output(jax.random.key(0), jnp.ones((1, 8)))[0].shape
    (6, 16)
    """

    num_tokens: int
    token_size: int
    width: int = 128
    heads: int = 4
    mlp_width: int = 512
    layers: int = 4

    @nn.compact
    def __call__(self, context: Float[Array, "c width"]) -> Float[Array, "t d"]:
        """Decode the context."""
        sizes = ("num_tokens", "token_size", "width", "heads", "mlp_width", "layers")
        _check_sizes(self, *sizes)
        if self.width % self.heads:
            expected = f"a divisor of the width, {self.width}"
            _check.fail("heads", expected, self.heads, "Each head has an equal share of it.")
        shape = (self.num_tokens, self.width)
        x = self.param("positions", nn.initializers.normal(1.0), shape)
        for layer in range(self.layers):
            attend = lambda name: nn.MultiHeadDotProductAttention(  # noqa: E731
                self.heads, qkv_features=self.width, out_features=self.width, name=name
            )
            normed = nn.LayerNorm()(x)
            x = x + attend(f"self_attention_{layer}")(normed)
            x = x + attend(f"cross_attention_{layer}")(nn.LayerNorm()(x), context)
            hidden = nn.gelu(nn.Dense(self.mlp_width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(self.token_size, kernel_init=_INIT, name="head")(nn.LayerNorm()(x))
