"""Networks for the experiments: pure functions around Flax modules, for ONE example at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments._run import UsageError

LAYERS = {"mnist_cnn": 4, "resnet20": 20, "mlp": 2}
NAMES = tuple(LAYERS)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"tanh": nn.tanh, "relu": nn.relu}


class Model(NamedTuple):
    """A classifier.

    Attributes:
      init: `init(key) -> params`.
      loss: `loss(params, (image, label)) -> scalar`, the cross-entropy of ONE example.
      logits: `logits(params, images) -> (images, classes)`.
    """

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    logits: Callable[[Any, jax.Array], jax.Array]


def build(
    name: str, input_shape: tuple[int, ...], num_classes: int = 10, activation: str = "tanh"
) -> Model:
    """Build a model.

    Args:
      name: `mnist_cnn` (26,010 parameters on 28x28x1), `resnet20` (GroupNorm, 268,346 parameters
        on colour images) or `mlp` (one hidden layer).
      input_shape: (height, width, channels) of one image.
      num_classes: the number of logits.
      activation: `tanh`, which bounds what one example can do, or `relu`; `resnet20` has relu.

    Returns:
      The model.

    Raises:
      UsageError: an unknown name, or images too small for `mnist_cnn`.
    """
    if name not in NAMES:
        raise UsageError(f"--model must be one of {', '.join(NAMES)}, but got {name!r}")
    if activation not in ACTIVATIONS:
        raise UsageError(f"--activation must be tanh or relu, but got {activation!r}")
    if name == "mnist_cnn" and min(input_shape[:2]) < 16:
        raise UsageError("--model mnist_cnn needs images of 16x16 or more; use --model mlp")
    module: nn.Module
    if name == "mnist_cnn":
        module = MnistCNN(num_classes, ACTIVATIONS[activation])
    elif name == "resnet20":
        module = ResNet20(num_classes)
    else:
        module = MLP(num_classes, ACTIVATIONS[activation])

    def init(key):
        return module.init(key, jnp.zeros((1, *input_shape)))["params"]

    def logits(params, images):
        outputs = module.apply({"params": params}, images)
        assert isinstance(outputs, jax.Array)
        return outputs

    def loss(params, example):
        image, label = example
        return -jax.nn.log_softmax(logits(params, image[None])[0])[label]

    return Model(init, loss, logits)


def stage_groups(params: Any) -> Any:
    """Parameter groups of `resnet20` as in the GEP paper: input, three stages, output (0 to 4)."""

    def label(path, _):
        module = path[0].key
        return int(module[5]) if module.startswith("stage") else {"input": 0, "output": 4}[module]

    return jax.tree_util.tree_map_with_path(label, params)


class PatchConv(nn.Module):
    """`nn.Conv` with square kernels, as one matrix product over patches.

    The parameters are those of `nn.Conv`. Under `vmap(grad)` a convolution becomes a grouped one,
    which XLA runs slowly on CPUs. Here strides move into the channels first (space to depth), so
    that patches are plain slices: 2.6 times as fast as gathered patches in `MnistCNN`.
    """

    features: int
    size: int
    stride: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, height, width, channels) in and out; the stride must divide the size."""
        (batch, height, width, channels), stride = images.shape, self.stride
        blocks = self.size // stride
        kernel = self.param(
            "kernel",
            nn.initializers.lecun_normal(),
            (self.size, self.size, channels, self.features),
        )
        counts, pads = [], [(0, 0)]
        for length in (height, width):
            count = (
                -(-length // stride)
                if self.padding == "SAME"
                else (length - self.size) // stride + 1
            )
            missing = (count - 1 + blocks) * stride - length
            low = max(missing, 0) // 2 if self.padding == "SAME" else 0
            counts.append(count)
            pads.append((low, missing - low))
        rows, columns = counts
        zero = jnp.zeros((), images.dtype)
        images = jax.lax.pad(images, zero, [(low, high, 0) for low, high in [*pads, (0, 0)]])
        images = images.reshape(
            batch, rows - 1 + blocks, stride, columns - 1 + blocks, stride, channels
        ).swapaxes(2, 3)
        patches = jnp.stack(
            [
                images[:, i : i + rows, j : j + columns]
                for i in range(blocks)
                for j in range(blocks)
            ],
            axis=3,
        ).reshape(batch, rows * columns, -1)
        # Kernel entries in the order of the patches: block, then place in the block, then channel.
        shape = (blocks, stride, blocks, stride, channels, self.features)
        weights = kernel.reshape(shape).swapaxes(1, 2).reshape(-1, self.features)
        outputs = patches @ weights + self.param("bias", nn.initializers.zeros, (self.features,))
        return outputs.reshape(batch, rows, columns, self.features)


def _max_pool(images: jax.Array) -> jax.Array:
    """2x2 max-pool of stride 1, by `maximum`, whose gradient is cheaper than a window's."""
    images = jnp.maximum(images[:, 1:], images[:, :-1])
    return jnp.maximum(images[:, :, 1:], images[:, :, :-1])


class MnistCNN(nn.Module):
    """The small MNIST network of the DP-SGD literature: two convolutions, two dense layers."""

    num_classes: int
    activation: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, 28, 28, 1) to (batch, classes)."""
        x = _max_pool(self.activation(PatchConv(16, 8, 2, name="conv1")(images)))
        x = _max_pool(self.activation(PatchConv(32, 4, 2, "VALID", name="conv2")(x)))
        x = self.activation(nn.Dense(32, name="dense1")(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_classes, name="dense2")(x)


class MLP(nn.Module):
    """One hidden layer of 64 units."""

    num_classes: int
    activation: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, ...) to (batch, classes)."""
        x = self.activation(nn.Dense(64, name="dense1")(images.reshape(images.shape[0], -1)))
        return nn.Dense(self.num_classes, name="dense2")(x)


def _conv(width: int, name: str, stride: int = 1) -> nn.Conv:
    return nn.Conv(width, (3, 3), stride, use_bias=False, name=name)


def _norm() -> nn.GroupNorm:
    return nn.GroupNorm(4, use_bias=False, use_scale=False, epsilon=1e-5)


class ResNet20(nn.Module):
    """ResNet20 with GroupNorm (4 groups, no affine part), which never mixes examples.

    A shortcut that changes shape is a strided average-pool and zero channels, without parameters.
    """

    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, 32, 32, 3) to (batch, classes)."""
        x = nn.relu(_norm()(_conv(16, "input")(images)))
        for stage, width in enumerate((16, 32, 64), start=1):
            for block in range(3):
                x = Block(
                    width, 2 if stage > 1 and block == 0 else 1, name=f"stage{stage}_{block}"
                )(x)
        return nn.Dense(self.num_classes, name="output")(x.mean((1, 2)))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels) in and out."""
        y = nn.relu(_norm()(_conv(self.width, "conv1", self.stride)(x)))
        y = _norm()(_conv(self.width, "conv2")(y))
        if self.stride > 1:
            x = nn.avg_pool(x, (2, 2), (2, 2))
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, self.width - x.shape[-1])])
        return nn.relu(x + y)
