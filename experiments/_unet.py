"""The denoising UNet of improved-diffusion (Nichol and Dhariwal 2021), in Flax, any size.

Residual blocks whose normalisation is scaled and shifted by the time embedding, and self-attention
with ONE fused projection to queries, keys and values. `from_torch` reads the published weights.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments._run import UsageError


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """The layout of a UNet.

    Attributes:
      size: height and width of an image.
      channels: of an image.
      width: base channels.
      blocks: residual blocks a level.
      multipliers: channels of each level, in units of `width`; each level halves the resolution.
      attention: the resolutions (as seen by the network) that have self-attention.
      heads: attention heads.
      groups: groups of each normalisation.
      learned_sigma: twice the output channels, as in the published checkpoint; the second half is
        not used here.
      patch: side of the squares of pixels that become channels first (space to depth).
    """

    size: int
    channels: int
    width: int = 128
    blocks: int = 3
    multipliers: tuple[int, ...] = (1, 2, 3, 4)
    attention: tuple[int, ...] = (16, 8)
    heads: int = 4
    groups: int = 32
    learned_sigma: bool = False
    patch: int = 1


IMAGENET_64 = UNetConfig(64, 3, learned_sigma=True)
SMALL = UNetConfig(16, 1, 32, 1, (1, 2), (8, 4), heads=2, groups=8, patch=2)

_ZEROS = nn.initializers.zeros


def _conv(features: int, name: str, *, stride: int = 1, kernel: int = 3, zero: bool = False):
    init: dict[str, Any] = {"kernel_init": _ZEROS} if zero else {}
    pad = kernel // 2
    return nn.Conv(
        features, (kernel, kernel), strides=stride, padding=((pad, pad),) * 2, name=name, **init
    )


def time_embedding(times: jax.Array, width: int) -> jax.Array:
    """Cosines and sines of the times at `width / 2` frequencies: (..., width)."""
    frequencies = jnp.exp(jnp.linspace(0.0, -math.log(10_000.0), width // 2, endpoint=False))
    angles = times[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


class ResBlock(nn.Module):
    """Two convolutions; the time embedding scales and shifts between them."""

    features: int
    groups: int

    @nn.compact
    def __call__(self, x, embedding):
        """Map (n, h, w, c) to (n, h, w, features)."""
        norm = lambda name: nn.GroupNorm(self.groups, epsilon=1e-5, name=name)  # noqa: E731
        h = _conv(self.features, "in_conv")(nn.silu(norm("in_norm")(x)))
        film = nn.Dense(2 * self.features, name="emb")(nn.silu(embedding))
        scale, shift = jnp.split(film[:, None, None], 2, axis=-1)
        h = norm("out_norm")(h) * (1 + scale) + shift
        h = _conv(self.features, "out_conv", zero=True)(nn.silu(h))
        if x.shape[-1] != self.features:
            x = _conv(self.features, "skip", kernel=1)(x)
        return x + h


class AttentionBlock(nn.Module):
    """Self-attention over all positions; each head's queries, keys and values lie together."""

    heads: int
    groups: int

    @nn.compact
    def __call__(self, x):
        """Map (n, h, w, c) to the same shape."""
        n, height, width, c = x.shape
        h = nn.GroupNorm(self.groups, epsilon=1e-5, name="norm")(x).reshape(n, height * width, c)
        qkv = nn.Dense(3 * c, name="qkv")(h).reshape(n, height * width, self.heads, -1)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("nthc,nshc->nhts", q, k) / q.shape[-1] ** 0.5)
        h = jnp.einsum("nhts,nshc->nthc", weights, v).reshape(n, height * width, c)
        return x + nn.Dense(c, kernel_init=_ZEROS, name="proj_out")(h).reshape(x.shape)


class UNet(nn.Module):
    """Predicts the noise in images at given times: (n, size, size, channels) to the same."""

    config: UNetConfig

    @nn.compact
    def __call__(self, images, times):
        """Predict the noise; with a learned sigma the channels are twice as many."""
        own = self.config
        x = _to_depth(images, own.patch)
        embedding = nn.Dense(4 * own.width, name="time_embed_0")(time_embedding(times, own.width))
        embedding = nn.Dense(4 * own.width, name="time_embed_2")(nn.silu(embedding))
        resolution = own.size // own.patch

        def block(x, features, name):
            x = ResBlock(features, own.groups, name=f"{name}_0")(x, embedding)
            if resolution in own.attention:
                x = AttentionBlock(own.heads, own.groups, name=f"{name}_1")(x)
            return x

        x = _conv(own.width, "input_blocks_0_0")(x)
        skips, count = [x], 1
        for level, multiplier in enumerate(own.multipliers):
            for _ in range(own.blocks):
                x = block(x, own.width * multiplier, f"input_blocks_{count}")
                skips, count = [*skips, x], count + 1
            if level < len(own.multipliers) - 1:
                x = _conv(x.shape[-1], f"input_blocks_{count}_0", stride=2)(x)
                skips, count, resolution = [*skips, x], count + 1, resolution // 2
        x = ResBlock(x.shape[-1], own.groups, name="middle_block_0")(x, embedding)
        x = AttentionBlock(own.heads, own.groups, name="middle_block_1")(x)
        x = ResBlock(x.shape[-1], own.groups, name="middle_block_2")(x, embedding)
        count = 0
        for level, multiplier in reversed(list(enumerate(own.multipliers))):
            for number in range(own.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], -1)
                x = block(x, own.width * multiplier, f"output_blocks_{count}")
                if level and number == own.blocks:
                    place = 2 if resolution in own.attention else 1
                    x = x.repeat(2, axis=1).repeat(2, axis=2)
                    x = _conv(x.shape[-1], f"output_blocks_{count}_{place}")(x)
                    resolution *= 2
                count += 1
        x = nn.silu(nn.GroupNorm(own.groups, epsilon=1e-5, name="out_0")(x))
        outputs = own.channels * own.patch**2 * (2 if own.learned_sigma else 1)
        return _to_space(_conv(outputs, "out_2", zero=True)(x), own.patch)


def _to_depth(images, patch: int):
    n, height, width, c = images.shape
    cells = images.reshape(n, height // patch, patch, width // patch, patch, c)
    return cells.swapaxes(2, 3).reshape(n, height // patch, width // patch, patch * patch * c)


def _to_space(x, patch: int):
    n, height, width, c = x.shape
    cells = x.reshape(n, height, width, patch, patch, c // patch**2)
    return cells.swapaxes(2, 3).reshape(n, height * patch, width * patch, c // patch**2)


def init(config: UNetConfig, key: jax.Array) -> Any:
    """Return the parameters of a UNet."""
    images = jnp.zeros((1, config.size, config.size, config.channels))
    return jax.jit(UNet(config).init)(key, images, jnp.zeros(1))["params"]


_INNER = {
    "in_layers.0": "in_norm",
    "in_layers.2": "in_conv",
    "emb_layers.1": "emb",
    "out_layers.0": "out_norm",
    "out_layers.3": "out_conv",
    "skip_connection": "skip",
}


def flax_path(name: str) -> tuple[str, ...]:
    """Return where a tensor of the published PyTorch checkpoint belongs in the Flax tree.

    >>> flax_path("input_blocks.1.0.in_layers.2.weight")
    ('input_blocks_1_0', 'in_conv', 'weight')
    """
    blocks = re.match(
        r"((?:input|output)_blocks\.\d+\.\d+|(?:middle_block|out|time_embed)\.\d+)", name
    )
    if not blocks:
        raise UsageError(f"the checkpoint has a tensor {name}, which this UNet does not have")
    block, (inner, leaf) = blocks[0].replace(".", "_"), name[blocks.end() :].rpartition(".")[::2]
    inner = inner.strip(".")
    if inner in ("op", "conv"):  # of a down- or upsampling block, which is one convolution here
        inner = ""
    return (block, *([_INNER.get(inner, inner)] if inner else []), leaf)


def from_torch(config: UNetConfig, tensors: Mapping[str, np.ndarray]) -> Any:
    """Map the published checkpoint onto the Flax tree, checked tensor by tensor.

    Args:
      config: the layout that the checkpoint has, for example `IMAGENET_64`.
      tensors: name to array, as in a PyTorch state dict.

    Returns:
      The parameters, float32.

    Raises:
      UsageError: a tensor is missing, unknown, or of another shape.
    """
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    expected = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, leaf = flax_path(name)
        value = np.asarray(tensor, np.float32)
        if leaf == "weight" and value.ndim > 1:  # a 1x1 convolution over positions is a dense layer
            value = value[:, :, 0] if value.ndim == 3 else value
            value = value.transpose((2, 3, 1, 0) if value.ndim == 4 else (1, 0))
            leaf = "kernel"
        leaf = "scale" if leaf == "weight" else leaf
        shape = expected.pop((*path, leaf), None)
        if shape != value.shape:
            raise UsageError(f"the checkpoint's {name} is {value.shape}, expected {shape}")
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    if expected:
        missing = sorted("/".join(path) for path in expected)
        raise UsageError(f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    return params
