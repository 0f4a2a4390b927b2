"""Augmentation multiplicity (De et al. 2022): several random views of one record in ONE loss.

The gradients of the views are averaged before the clip, so privacy is that of the record.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Batch = tuple[jax.Array, jax.Array]


def views(key: jax.Array, images: jax.Array, count: int, flip: bool = False) -> jax.Array:
    """Return (n, count, height, width, channels): each image shifted at random, `count` times.

    By up to a tenth of its height in every direction, the border repeated.

    Args:
      key: a typed key.
      images: (n, height, width, channels).
      count: number of views of an image.
      flip: mirror every other view, at random.
    """
    n, height, width, channels = images.shape
    pixels = max(1, height // 10)
    margin = [(0, 0), (pixels, pixels), (pixels, pixels), (0, 0)]
    padded = jnp.pad(images, margin, mode="edge")
    shift_key, flip_key = jax.random.split(key)
    shifts = jax.random.randint(shift_key, (n, count, 2), 0, 2 * pixels + 1)

    def one(image, shift):
        start = (shift[0], shift[1], jnp.zeros((), shift.dtype))
        return jax.lax.dynamic_slice(image, start, (height, width, channels))

    result = jax.vmap(jax.vmap(one, (None, 0)))(padded, shifts)
    if not flip:
        return result
    mirrored = jax.random.bernoulli(flip_key, shape=(n, count, 1, 1, 1))
    return jnp.where(mirrored, result[:, :, :, ::-1], result)


def mean_over_views(loss: Callable[[Any, Batch], jax.Array]) -> Callable[[Any, Batch], jax.Array]:
    """The loss of one record, given as (its views, its label)."""

    def mean(params, example):
        images, label = example
        return jnp.mean(jax.vmap(lambda image: loss(params, (image, label)))(images))

    return mean
