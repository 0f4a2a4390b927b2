"""Gaussian noise from the operating system's generator, added on the host in float64.

The keys are threefry keys of a kind of their own. All that is drawn with them is what threefry
draws, but for noise, which `jdp.add_noise` leaves to the functions here.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend import random
from jaxtyping import Array, Float

from jdp import _check
from jdp._typing import Key, Scalar

_DRAWS = 4  # a value
_CHUNK = 2**15  # values at a time, that their draws stay in the cores' caches
_GRID = 2.0**-20  # of the noise's standard deviation; what is released are multiples of about that
_threefry = random.threefry_prng_impl
KIND: Any = random.define_prng_impl(
    key_shape=_threefry.key_shape,
    seed=_threefry.seed,
    split=_threefry.split,
    random_bits=_threefry.random_bits,
    fold_in=_threefry.fold_in,
    name="system noise",
    tag="sys",
)


def is_asked_by(key: Key) -> bool:
    """Whether a key asks for noise from the operating system."""
    return jax.random.key_impl(key) == KIND


def gaussian(count: int) -> Float[np.ndarray, " count"]:
    """Return standard normal values in float64, each the scaled sum of four (Box and Muller 1958).

    Every draw takes 106 bits of the generator. The values of a sum of four are far too many to tell
    from one of them what was added to it (Holohan and Braghin 2021).
    """
    values = np.empty(count)
    for start in range(0, count, _CHUNK):
        chunk = values[start : start + _CHUNK]
        shape = 2, _DRAWS, len(chunk)
        words = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64).reshape(shape)
        one, two = ((words >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
        draws = np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * two)
        np.sum(draws, axis=0, out=chunk)
    return values * _DRAWS**-0.5


def noised(
    exact: Float[np.ndarray, "*shape"], std: Float[np.ndarray, ""]
) -> Float[np.ndarray, "*shape"]:
    """Return a leaf plus noise, added in float64 and rounded to a public grid.

    The last bits of a sum of floating-point numbers tell what was added (Mironov 2012). Here they
    are below the grid, of which a cell holds 2^30 possible values.
    """
    whole = exact.astype(np.float64) + np.float64(std) * gaussian(exact.size).reshape(exact.shape)
    if 0 < std < np.inf:
        grid = _GRID * 2.0 ** np.floor(np.log2(np.float64(std)))
        whole = np.round(whole / grid) * grid
    return whole.astype(exact.dtype)


def add(key: Key, leaves: Sequence[Array], stds: Sequence[Scalar]) -> list[Array]:
    """Return the leaves plus noise of these standard deviations.

    Args:
      key: is not read; under `vmap` over keys every one has noise of its own.
      leaves: sums, float32 or wider.
      stds: of each leaf's noise.
    """
    for leaf in leaves:
        if jax.typeof(leaf).sharding.mesh.manual_axes:
            remedy = "Devices would draw different noise; add it outside, or take another key."
            got = _check.Words("one inside jax.shard_map")
            _check.fail("key", "without system_noise inside jax.shard_map", got, remedy)

    def on_host(_, leaves, stds):
        pairs = zip(map(np.asarray, leaves), map(np.asarray, stds), strict=True)
        return [noised(leaf, std) for leaf, std in pairs]

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    return io_callback(on_host, shapes, jax.random.key_data(key), list(leaves), list(stds))
