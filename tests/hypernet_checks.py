"""What a private mean embedding promises, as checks: of jdp's, and of broken twins in `twins.py`.

A release is a function `(key, records, mask, noise_multiplier, adjacency) -> (features,)`, with
CLIP and RECORDS as its clip norm and public number of records.
"""

import jax
import jax.numpy as jnp
import numpy as np
from strategies import ROWS, SIZE, rows

CLIP = 0.7
RECORDS = ROWS
MATRIX = np.random.default_rng(5).normal(size=(SIZE, 9)).astype(np.float32) / 5


def encode(record):
    """A per-record map with an offset, so that an absent record is not one that is zero."""
    return record.astype(jnp.float32) @ jnp.asarray(MATRIX) + 0.2


def _mean(release, matrix, mask):
    arguments = jnp.asarray(matrix, jnp.float32), jnp.asarray(mask)
    return np.asarray(release(jax.random.key(1), *arguments, 0.0, "zero-out"), np.float64)


def check_mean_sensitivity(release):
    """Replacing a record moves the mean by at most 2C/N, zeroing one by at most C/N."""
    for seed, kind in enumerate(("normal", "huge", "zero", "nan")):
        batch = rows(["normal", kind, "normal", "normal", "zero", "normal"], 100 * seed)
        for i in (0, 1):
            swapped, mask = batch.copy(), np.ones(ROWS, bool)
            swapped[i] = rows(["huge"], 7 + seed)[0] * -1
            without = mask.copy()
            without[i] = False
            base = _mean(release, batch, mask)
            assert np.isfinite(base).all()
            for other, most in (((swapped, mask), 2), ((batch, without), 1)):
                change = np.linalg.norm(base - _mean(release, *other))
                assert change <= most * CLIP / RECORDS * (1 + 1e-4)


def check_mean_noise(release):
    """Of no record at all the noise is left: of std z C/N, and twice that under replace-one."""
    nothing = jnp.full((ROWS, SIZE), jnp.nan), jnp.zeros(ROWS, bool)
    for adjacency, factor in (("zero-out", 1), ("replace-one", 2)):
        draw = lambda key, adjacency=adjacency: release(key, *nothing, 3.0, adjacency)  # noqa: E731
        found = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(2), 3000))
        std = np.asarray(found).std() / (3 * factor * CLIP / RECORDS)
        assert abs(std - 1) < 0.02
        assert abs(np.asarray(found).mean()) < 0.1
