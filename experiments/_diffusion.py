"""Denoising diffusion (Ho et al. 2020; Nichol and Dhariwal 2021): the loss, and DDIM sampling."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._unet import UNet, UNetConfig

Predict = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Diffusion(NamedTuple):
    """A noise schedule and the network that undoes it.

    Attributes:
      config: the UNet.
      signal: (levels,), the share of the image's variance that is left at each noise level.
      predict: `(params, images, levels) -> noise`, all with a leading axis.
    """

    config: UNetConfig
    signal: np.ndarray
    predict: Predict

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one image."""
        return self.config.size, self.config.size, self.config.channels


def cosine(levels: int) -> np.ndarray:
    """The cosine schedule: the signal's share after each of the noise levels."""
    angle = (np.arange(levels + 1) / levels + 0.008) / 1.008 * np.pi / 2
    kept = np.cos(angle) ** 2
    return np.cumprod(1 - np.minimum(1 - kept[1:] / kept[:-1], 0.999))


def build(config: UNetConfig, levels: int) -> Diffusion:
    """Return the diffusion of a UNet whose weights were trained with so many noise levels."""
    network = UNet(config)

    def predict(params, images, index):
        # The published weights know the time as one of 1,000, however many levels there are.
        times = index.astype(jnp.float32) * (1_000.0 / levels)
        outputs: Any = network.apply({"params": params}, images, times)
        return outputs[..., : config.channels]

    return Diffusion(config, cosine(levels), predict)


def draw(
    diffusion: Diffusion, key: jax.Array, images: jax.Array, first: int = 0
) -> tuple[jax.Array, ...]:
    """Return (images, levels, noise): what the loss of each image needs; levels from `first` on."""
    level_key, noise_key = jax.random.split(key)
    levels = jax.random.randint(level_key, images.shape[:-3], first, len(diffusion.signal))
    return images, levels, jax.random.normal(noise_key, images.shape)


def losses(diffusion: Diffusion, params: Any, images, levels, noise) -> jax.Array:
    """The squared error of the predicted noise of each of n images: (n,)."""
    signal = jnp.asarray(diffusion.signal, jnp.float32)[levels][:, None, None, None]
    noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise
    errors = diffusion.predict(params, noisy, levels) - noise
    return jnp.mean(errors**2, axis=(1, 2, 3))


def sampler(diffusion: Diffusion, steps: int) -> Callable[[Any, jax.Array, int], np.ndarray]:
    """Return `sample(params, key, count) -> images` in -1..1, by DDIM (Song et al. 2021).

    Args:
      diffusion: the network and its schedule.
      steps: network evaluations an image, at evenly spaced noise levels: the middles of as many
        equal parts, since at the very last one nothing of an image is left to tell.
    """
    levels = ((np.arange(steps) + 0.5) / steps * len(diffusion.signal)).astype(int)
    after = np.append(diffusion.signal, 1.0)[np.append(-1, levels[:-1])]

    @jax.jit
    def one(params, x, level, now, then):
        noise = diffusion.predict(params, x, jnp.full(len(x), level))
        image = jnp.clip((x - jnp.sqrt(1 - now) * noise) / jnp.sqrt(now), -1, 1)
        noise = (x - jnp.sqrt(now) * image) / jnp.sqrt(1 - now)
        return jnp.sqrt(then) * image + jnp.sqrt(1 - then) * noise

    def sample(params: Any, key: jax.Array, count: int) -> np.ndarray:
        x = jax.random.normal(key, (count, *diffusion.shape))
        for level, then in zip(levels[::-1], after[::-1], strict=True):
            numbers = (np.float32(diffusion.signal[level]), np.float32(then))
            x = one(params, x, np.int32(level), *numbers)
        return np.asarray(x)

    return sample
