"""The UNet: the published layout, its names and shapes, and PyTorch's outputs."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _unet
from experiments._run import UsageError
from jdp import lora

TINY = _unet.UNetConfig(16, 3, 16, 2, (1, 2), (8,), heads=4, groups=8, learned_sigma=True)


def torch_unet(config):
    """A PyTorch UNet with the published names, written from the paper's description."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Res(nn.Module):
        def __init__(self, inputs, features, width):
            super().__init__()
            norm = lambda c: nn.GroupNorm(config.groups, c)  # noqa: E731
            self.in_layers = nn.Sequential(
                norm(inputs), nn.SiLU(), nn.Conv2d(inputs, features, 3, 1, 1)
            )
            self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * features))
            last = nn.Conv2d(features, features, 3, 1, 1)
            self.out_layers = nn.Sequential(norm(features), nn.SiLU(), nn.Dropout(0.0), last)
            same = inputs == features
            self.skip_connection = nn.Identity() if same else nn.Conv2d(inputs, features, 1)

        def forward(self, x, embedding):
            scale, shift = self.emb_layers(embedding)[..., None, None].chunk(2, dim=1)
            h = self.out_layers[0](self.in_layers(x)) * (1 + scale) + shift
            return self.skip_connection(x) + self.out_layers[1:](h)

    class Attention(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.norm = nn.GroupNorm(config.groups, c)
            self.qkv, self.proj_out = nn.Conv1d(c, 3 * c, 1), nn.Conv1d(c, c, 1)

        def forward(self, x, _):
            n, c, *rest = x.shape
            qkv = self.qkv(self.norm(x).reshape(n, c, -1))
            q, k, v = qkv.reshape(n * config.heads, -1, qkv.shape[-1]).chunk(3, dim=1)
            scale = q.shape[1] ** -0.25
            weights = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), -1)
            h = torch.einsum("bts,bcs->bct", weights, v).reshape(n, c, -1)
            return x + self.proj_out(h).reshape(x.shape)

    class Down(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.op = nn.Conv2d(c, c, 3, 2, 1)

        def forward(self, x, _):
            return self.op(x)

    class Up(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.conv = nn.Conv2d(c, c, 3, 1, 1)

        def forward(self, x, _):
            return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))

    class First(nn.Conv2d):
        def forward(self, x, _):
            return super().forward(x)

    class Block(nn.Sequential):
        def forward(self, x, embedding):
            for layer in self:
                x = layer(x, embedding)
            return x

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            width, c = 4 * config.width, config.width
            self.time_embed = nn.Sequential(nn.Linear(c, width), nn.SiLU(), nn.Linear(width, width))
            self.input_blocks = nn.ModuleList([Block(First(config.channels, c, 3, 1, 1))])
            skips, size = [c], config.size
            for level, multiplier in enumerate(config.multipliers):
                for _ in range(config.blocks):
                    layers = [Res(c, config.width * multiplier, width)]
                    c = config.width * multiplier
                    layers += [Attention(c)] if size in config.attention else []
                    self.input_blocks.append(Block(*layers))
                    skips.append(c)
                if level < len(config.multipliers) - 1:
                    self.input_blocks.append(Block(Down(c)))
                    skips.append(c)
                    size //= 2
            self.middle_block = Block(Res(c, c, width), Attention(c), Res(c, c, width))
            self.output_blocks = nn.ModuleList()
            for level, multiplier in reversed(list(enumerate(config.multipliers))):
                for number in range(config.blocks + 1):
                    layers = [Res(c + skips.pop(), config.width * multiplier, width)]
                    c = config.width * multiplier
                    layers += [Attention(c)] if size in config.attention else []
                    if level and number == config.blocks:
                        layers.append(Up(c))
                        size *= 2
                    self.output_blocks.append(Block(*layers))
            outputs = config.channels * (2 if config.learned_sigma else 1)
            last = nn.Conv2d(c, outputs, 3, 1, 1)
            self.out = nn.Sequential(nn.GroupNorm(config.groups, c), nn.SiLU(), last)

        def forward(self, x, times):
            half = config.width // 2
            angles = times[:, None] * torch.exp(-np.log(10_000) * torch.arange(half) / half)
            embedding = torch.cat([torch.cos(angles), torch.sin(angles)], -1)
            embedding, skips = self.time_embed(embedding), []
            for block in self.input_blocks:
                x = block(x, embedding)
                skips.append(x)
            x = self.middle_block(x, embedding)
            for block in self.output_blocks:
                x = block(torch.cat([x, skips.pop()], 1), embedding)
            return self.out(x)

    return Whole()


def shapes_of(config):
    return jax.eval_shape(lambda: _unet.init(config, jax.random.key(0)))


def published(config):
    """Names and shapes of the tensors of a published checkpoint, with random values."""
    shapes, width = {}, 4 * config.width

    def layer(name, *weight):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = weight, weight[:1]

    def block(name, inputs, c, size):
        layer(f"{name}.0.in_layers.0", inputs)
        layer(f"{name}.0.in_layers.2", c, inputs, 3, 3)
        layer(f"{name}.0.emb_layers.1", 2 * c, width)
        layer(f"{name}.0.out_layers.0", c)
        layer(f"{name}.0.out_layers.3", c, c, 3, 3)
        if inputs != c:
            layer(f"{name}.0.skip_connection", c, inputs, 1, 1)
        if size in config.attention:
            attention(f"{name}.1", c)
        return c

    def attention(name, c):
        layer(f"{name}.norm", c)
        layer(f"{name}.qkv", 3 * c, c, 1)
        layer(f"{name}.proj_out", c, c, 1)

    c, size, number, skips = config.width, config.size, 1, [config.width]
    layer("time_embed.0", width, c)
    layer("time_embed.2", width, width)
    layer("input_blocks.0.0", c, config.channels, 3, 3)
    for level, multiplier in enumerate(config.multipliers):
        for _ in range(config.blocks):
            c = block(f"input_blocks.{number}", c, config.width * multiplier, size)
            number, skips = number + 1, [*skips, c]
        if level < len(config.multipliers) - 1:
            layer(f"input_blocks.{number}.0.op", c, c, 3, 3)
            number, skips, size = number + 1, [*skips, c], size // 2
    block("middle_block", c, c, None)
    attention("middle_block.1", c)
    for name in [name for name in shapes if name.startswith("middle_block.0")]:
        shapes[name.replace("block.0", "block.2")] = shapes[name]
    number = 0
    for level, multiplier in reversed(list(enumerate(config.multipliers))):
        for i in range(config.blocks + 1):
            name = f"output_blocks.{number}"
            c = block(name, c + skips.pop(), config.width * multiplier, size)
            if level and i == config.blocks:
                layer(f"{name}.{2 if size in config.attention else 1}.conv", c, c, 3, 3)
                size *= 2
            number += 1
    layer("out.0", c)
    layer("out.2", config.channels * (2 if config.learned_sigma else 1), c, 3, 3)
    return shapes


def test_it_agrees_with_pytorch():
    torch = pytest.importorskip("torch")
    model = torch_unet(TINY)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in tensors.items()} == published(TINY)
    params = _unet.from_torch(TINY, tensors)
    images = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    times = np.array([3.0, 700.0], np.float32)
    with torch.no_grad():
        channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        expected = model(channels_first, torch.from_numpy(times)).numpy().transpose(0, 2, 3, 1)
    found = jax.jit(_unet.UNet(TINY).apply)({"params": params}, images, times)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_full_layout_has_the_published_names_and_shapes():
    shapes = published(_unet.IMAGENET_64)
    state = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    found = jax.eval_shape(lambda: _unet.from_torch(_unet.IMAGENET_64, state))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes_of(_unet.IMAGENET_64))
    count = sum(leaf.size for leaf in jax.tree.leaves(found))
    assert 115e6 < count < 125e6


def test_adapters_of_the_full_layout_have_the_published_sizes():
    shapes = shapes_of(_unet.IMAGENET_64)
    patterns = ("*/qkv/kernel", "*/proj_out/kernel")
    build = lambda key, params: lora.init(key, params, patterns, rank=1)  # noqa: E731
    adapters = jax.eval_shape(build, jax.random.key(0), shapes)
    assert len(adapters) == 30  # two of each of 15 attention blocks
    assert sum(leaf.size for leaf in jax.tree.leaves(adapters)) == 40_704
    assert lora.token_length(adapters) == 128
    tokens = jax.eval_shape(lambda tree: lora.tokenise(tree, 128), adapters)
    assert tokens.shape == (318, 128)
    back = jax.eval_shape(lambda t: lora.detokenise(t, adapters), tokens)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, adapters)


def test_every_tensor_is_placed_and_checked():
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape) for name, shape in published(TINY).items()}
    params = _unet.from_torch(TINY, tensors)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes_of(TINY))
    first = tensors["input_blocks.0.0.weight"]
    kernel = params["input_blocks_0_0"]["kernel"]
    first = first.astype(np.float32)
    np.testing.assert_array_equal(kernel[1, 2, 0], first[:, 0, 1, 2])
    qkv = tensors["middle_block.1.qkv.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["middle_block_1"]["qkv"]["kernel"], qkv[:, :, 0].T)
    less = dict(tensors)
    del less["out.2.bias"]
    with pytest.raises(UsageError, match="lacks 1 tensors, first out_2/bias"):
        _unet.from_torch(TINY, less)
    with pytest.raises(UsageError, match="label_emb.weight, which this UNet does not have"):
        _unet.from_torch(TINY, tensors | {"label_emb.weight": np.zeros((10, 64))})
    with pytest.raises(UsageError, match=r"time_embed.0.bias is \(3,\), expected \(64,\)"):
        _unet.from_torch(TINY, tensors | {"time_embed.0.bias": np.zeros(3)})


def test_space_to_depth_goes_back():
    x = jnp.arange(2 * 8 * 8 * 3.0).reshape(2, 8, 8, 3)
    deep = _unet._to_depth(x, 2)
    assert deep.shape == (2, 4, 4, 12)
    np.testing.assert_array_equal(_unet._to_space(deep, 2), x)
    config = dataclasses.replace(TINY, size=8, width=8, multipliers=(1,), blocks=1, patch=2)
    config = dataclasses.replace(config, attention=(4,), learned_sigma=False)
    out, variables = nn.jit(_unet.UNet)(config).init_with_output(jax.random.key(0), x, jnp.zeros(2))
    assert out.shape == x.shape and not out.any()  # the last convolution starts at zero
    assert "input_blocks_1_1" in variables["params"]
