"""The contracts as plain functions: each raises AssertionError for a mechanism that breaks it.

`test_contract.py` runs them on everything that jdp exports; `test_twins.py` runs them on
mechanisms that are broken on purpose, each of which they must catch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from strategies import PARAMS, ROWS, SIZE, flat, rows, tree_of

from jdp._typing import NoiseMultiplier

ROUNDING = 3e-4  # of a float32 sum of six contributions, in units of the noise scale
STEP = 2e-3  # at most, of what is released, in units of the noise scale
BATCH = 4.0  # the expected batch size in every check; never the number of rows
ALL = np.ones(ROWS, bool)
NONE = np.zeros(ROWS, bool)


@dataclasses.dataclass(frozen=True)
class Clip:
    """A clipper to check.

    Attributes:
      name: for the test's id.
      make: from a (traced) factor on all clip norms to a clipper.
      limit: whether an infinite factor is legal and gives the plain masked sum.
      rounding: what float32 rounding may add to the sensitivity, relative to it.
    """

    name: str
    make: Callable[[Any], Callable]
    limit: bool = True
    rounding: float = 1e-4

    @functools.cached_property
    def jitted(self):
        return jax.jit(lambda unit, grads, mask: self.make(unit)(grads, mask))

    def __call__(self, matrix, mask=ALL, unit=1.0):
        return self.jitted(jnp.float32(unit), tree_of(matrix), jnp.asarray(mask))


@dataclasses.dataclass(frozen=True)
class Door:
    """An optax door to check.

    Attributes:
      name: for the test's id.
      make: `make(key=..., noise_multiplier=..., adjacency=...) -> transformation`, with clip norms
        of order 1 and the expected batch size BATCH.
      whiten: `(update, state before, state after) -> (p',)` values that are independent standard
        normals for an empty batch at noise multiplier 1.
      bound: how far one example may move BATCH times the noiseless update.
      feed: `(per_example, mask) -> (updates, extra arguments)`.
      unclipped: like make, with infinite clip norms, or None.
    """

    name: str
    make: Callable[..., Any]
    whiten: Callable[[Any, Any, Any], jax.Array]
    bound: float = 1.0
    feed: Callable = lambda grads, mask: (grads, {"mask": mask})
    unclipped: Callable[..., Any] | None = None

    def run(self, key, grads, mask, *, z=1.0, steps=1, make=None, carried=None, **options):
        """Of each of `steps` steps on the same batch: (update, state before, state after)."""
        z = z if carried is None else NoiseMultiplier(z, carried)
        tx = (make or self.make)(key=key, noise_multiplier=z, **options)
        state, trace = tx.init(PARAMS), []
        for _ in range(steps):
            updates, extra = self.feed(grads, mask)
            before = state
            update, state = tx.update(updates, before, PARAMS, **extra)
            trace.append((update, before, state))
        return trace

    @functools.cached_property
    def jitted(self):
        return jax.jit(lambda key, grads, mask: self.run(key, grads, mask)[0])

    def step(self, matrix, mask=ALL, *, seed=3, **options):
        """(update as a float64 vector, state), at noise multiplier 1 unless told otherwise.

        Whatever is not the default runs eagerly, since compiling costs more than running.
        """
        arguments = jax.random.key(seed), tree_of(matrix), jnp.asarray(mask)
        run = (lambda *args: self.run(*args, **options)[0]) if options else self.jitted
        update, _, state = run(*arguments)
        return flat(update), state


def _vectors(clipped):
    return [
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(part)])
        for part in clipped.parts
    ]


def assert_same_bits(a, b):
    """Equal structures, dtypes and bits (NaN equals NaN, and a key its copy)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert np.asarray(x).dtype == np.asarray(y).dtype


def assert_public_unchanged(a, b):
    """C1: nothing but the parts depends on the examples."""
    hidden = {"parts": None}
    assert_same_bits(dataclasses.replace(a, **hidden), dataclasses.replace(b, **hidden))
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    assert shapes(a.parts) == shapes(b.parts)


def moved(a, b):
    """How far the parts are apart, in units of the joint sensitivity."""
    scales = [float(scale) for scale in a.noise_scales]
    changes = [np.linalg.norm(x - y) for x, y in zip(_vectors(a), _vectors(b), strict=True)]
    if not all(np.isfinite(changes)):
        return np.inf
    return float(np.linalg.norm(np.array(changes) / np.array(scales)))


def check_invariant(clip, matrix, mask, i, other, unit):
    """C1: zeroing example i moves the parts by at most 1, replacing it by at most the factor."""
    mask = np.array(mask)
    mask[i] = True
    without = mask.copy()
    without[i] = False
    replaced = np.array(matrix)
    replaced[i] = other
    base, zeroed, swapped = (
        clip(matrix, mask, unit),
        clip(matrix, without, unit),
        clip(replaced, mask, unit),
    )
    for neighbour, factor in ((zeroed, 1.0), (swapped, type(base).replace_one_factor)):
        assert_public_unchanged(base, neighbour)
        assert moved(base, neighbour) <= factor * (1 + ROUNDING)


def check_invariant_on(clip, kinds, unit=1.0):
    """The invariant on one fixed batch of each kind; used where hypothesis is not needed."""
    for seed, kind in enumerate(kinds):
        for last in (kind, "zero"):
            batch = rows(["normal", "normal", kind, "zero", "normal", last], 100 * seed)
            for i in (0, 2):
                check_invariant(clip, batch, ALL, i, rows([kind], 999 + seed)[0], unit)


def check_masked_rows(clip):
    """C4: what a masked row holds does not matter, and masked rows alone give exactly zero."""
    mask = np.array([True, True, False, True, False, True])
    results = []
    for kind in ("normal", "zero", "huge", "nan", "inf"):
        batch = rows(["normal"] * ROWS, 5)
        batch[~mask] = rows([kind] * 2, 50)
        results.append(clip(batch, mask))
        for part in _vectors(clip(rows([kind] * ROWS, 60), NONE)):
            np.testing.assert_array_equal(part, 0)
    for result in results[1:]:
        assert_same_bits(results[0], result)


def check_nonfinite(clip):
    """C5: an example with one NaN or Inf does what its absence does, bit for bit."""
    for kind in ("nan", "inf", "overflow"):
        batch = rows(["normal", kind, "normal", "normal", "zero", "normal"], 11)
        mask = ALL.copy()
        mask[1] = False
        base = clip(batch)
        assert all(np.isfinite(part).all() for part in _vectors(base))
        assert_same_bits(base, clip(batch, mask))


def check_order(clip):
    """C6: the order of examples changes rounding only."""
    batch = rows(["normal", "in_span", "orthogonal", "bf16", "tiny", "normal"], 17)
    a, b = clip(batch), clip(batch[::-1].copy())
    assert moved(a, b) <= 1e-5


def check_merge(clip):
    """C6: sums of disjoint parts of a batch merge into the sum of the batch, scales unchanged."""
    batch = rows(["normal", "in_span", "orthogonal", "bf16", "nan", "normal"], 23)
    whole = clip(batch)
    pieces = [clip(batch[s], ALL[s]) for s in (slice(0, 2), slice(2, 6))]
    merged = pieces[0].merge(pieces[1])
    assert type(whole) is type(merged)
    assert merged.rows == ROWS and whole.rounding <= merged.rounding < clip.rounding
    assert_public_unchanged(whole, dataclasses.replace(merged, rounding=whole.rounding))
    assert moved(whole, merged) <= 1e-5


def check_jit(clip):
    """C6: jit changes nothing beyond rounding."""
    batch, mask = rows(["normal", "huge", "nan", "zero", "in_span", "normal"], 31), ALL.copy()
    mask[5] = False
    eager = clip.make(jnp.float32(1.0))(tree_of(batch), jnp.asarray(mask))
    assert moved(clip(batch, mask), eager) <= 1e-5


def check_bf16(clip):
    """C1 for bfloat16 gradients; sums and scales are float32."""
    batch = rows(["normal", "huge", "in_span", "zero", "nan", "normal"], 37)
    sums = []
    for i in (None, 0, 1, 2):
        mask = np.arange(ROWS) != (-1 if i is None else i)
        sums.append(clip.jitted(jnp.float32(1.0), tree_of(batch, jnp.bfloat16), jnp.asarray(mask)))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sums[-1].parts))
    for neighbour in sums[1:]:
        assert moved(sums[0], neighbour) <= 1 + ROUNDING


def check_unclipped(clip):
    """An infinite clip norm is legal, and the sum is the plain masked sum."""
    batch = rows(["normal", "in_span", "bf16", "tiny", "orthogonal", "normal"], 41)
    mask = np.array([True, True, True, True, False, True])
    clipped = clip(batch, mask, np.inf)
    total = flat(clipped.combine(clipped.parts))
    np.testing.assert_allclose(total, batch[mask].sum(0), atol=1e-4)


CLIP_CHECKS = (
    check_masked_rows,
    check_nonfinite,
    check_order,
    check_merge,
    check_jit,
    check_bf16,
)

# Doors -------------------------------------------------------------------------------------------

DRAWS = 1200


@functools.cache
def _noise(door):
    """(draws, steps, p'): whitened updates of an empty batch, one key a draw."""

    grads, mask = tree_of(np.full((ROWS, SIZE), np.nan)), jnp.asarray(NONE)

    def draw(key):
        tx = door.make(key=key, noise_multiplier=1.0)

        def step(before, _):
            updates, extra = door.feed(grads, mask)
            update, after = tx.update(updates, before, PARAMS, **extra)
            return after, door.whiten(update, before, after)

        return jax.lax.scan(step, tx.init(PARAMS), length=2)[1]

    draws = jax.jit(jax.vmap(draw))
    return np.asarray(draws(jax.random.split(jax.random.key(8), DRAWS)))


def check_noise_scale(door):
    """C2, C4: an empty batch is pure Gaussian noise of the right standard deviation."""
    noise = _noise(door)
    assert np.isfinite(noise).all()
    assert abs(noise.std() - 1) < 0.02
    each = noise.std(axis=(0, 1))  # of every coordinate: none may lack its noise
    assert np.all(np.abs(each - 1) < 5 / np.sqrt(4 * DRAWS))
    sample = noise[:, 0].ravel()[:8000]
    assert scipy.stats.kstest(sample, "norm").pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert scipy.stats.kstest(sample * wrong, "norm").pvalue < 1e-6


def check_noise_independence(door):
    """C2: coordinates, leaves, parts and steps are uncorrelated, and keys give other noise."""
    noise = _noise(door).reshape(DRAWS, -1)
    assert noise.std(axis=0).min() > 0.5  # keys matter
    correlation = np.corrcoef(noise, rowvar=False) - np.eye(noise.shape[1])
    assert np.abs(correlation).max() < 6 / np.sqrt(DRAWS)
    assert np.abs((noise[1:] * noise[:-1]).mean()) < 6 / np.sqrt(noise.size)


def check_divisor(door):
    """C3: neighbours with zero gradients get bit-identical updates, whatever the batch holds."""
    batch = np.zeros((ROWS, SIZE), np.float32)
    three = np.arange(ROWS) < 3
    updates = [door.step(batch, mask)[0] for mask in (ALL, three, NONE)]
    for update in updates[1:]:
        np.testing.assert_array_equal(updates[0], update)


def check_sensitivity(door):
    """One example moves the update, the noise held fixed, by at most bound / BATCH and a step."""
    allowed = door.bound / BATCH * (1 + ROUNDING + STEP * SIZE**0.5)
    for seed, kind in enumerate(("normal", "huge", "nan", "huge_in_span", "overflow")):
        batch = rows(["normal", kind, "normal", "normal", kind, "normal"], 200 + seed)
        for i in (0, 1):
            change = door.step(batch)[0] - door.step(batch, np.arange(ROWS) != i)[0]
            assert np.linalg.norm(change) <= allowed


def check_limit(door):
    """Without noise and clipping, the update is the masked sum over the expected batch size."""
    batch = rows(["normal", "in_span", "bf16", "tiny", "orthogonal", "normal"], 43)
    mask = np.array([True, True, True, False, False, True])
    update, _ = door.step(batch, mask, z=0.0, make=door.unclipped)
    np.testing.assert_allclose(update, batch[mask].sum(0) / BATCH, atol=1e-4)


def check_replace_one(door):
    """C11: under replace-one the noise is twice that under zero-out and add-remove."""
    batch = np.zeros((ROWS, SIZE), np.float32)
    noise = {
        adjacency: door.step(batch, NONE, adjacency=adjacency)[0]
        for adjacency in (None, "zero-out", "add-remove", "replace-one")
    }
    np.testing.assert_array_equal(noise[None], noise["zero-out"])
    np.testing.assert_array_equal(noise[None], noise["add-remove"])
    np.testing.assert_allclose(noise["replace-one"], 2 * noise[None], rtol=1e-5, atol=1e-6)
    carried, _ = door.step(batch, NONE, carried="replace-one")
    np.testing.assert_array_equal(noise["replace-one"], carried)


def check_order_of_examples(door):
    """C6: the order of examples changes rounding only, noise and all."""
    batch = rows(["normal", "in_span", "orthogonal", "bf16", "tiny", "nan"], 47)
    a, b = door.step(batch)[0], door.step(batch[::-1].copy())[0]
    np.testing.assert_allclose(a, b, atol=1e-5)


def check_jitted_door(door):
    """C6: jit changes nothing beyond rounding."""
    batch = rows(["normal", "huge", "nan", "zero", "in_span", "normal"], 53)
    ((update, _, state),) = door.run(jax.random.key(3), tree_of(batch), jnp.asarray(ALL))
    jitted, jitted_state = door.step(batch)
    np.testing.assert_allclose(flat(update), jitted, atol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(jitted_state)


def check_state(door):
    """State: fixed structure of arrays, survives donation and another init; the key is copied."""
    key = jax.random.key(5)
    tx = door.make(key=key, noise_multiplier=1.0)
    batch = tree_of(rows(["normal"] * ROWS, 59))
    updates, extra = door.feed(batch, jnp.asarray(ALL))
    step = jax.jit(
        lambda state, updates, extra: tx.update(updates, state, PARAMS, **extra), donate_argnums=0
    )
    first = tx.init(PARAMS)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first)
    update, state = step(first, updates, extra)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == shapes
    again, _ = step(tx.init(PARAMS), updates, extra)  # donation deleted `first`
    assert_same_bits(update, again)  # the same key: the documented repetition
    jax.random.key_data(key)  # not deleted
    updates, extra = door.feed(batch, jnp.asarray(NONE))
    empty, state = step(state, updates, extra)
    assert int(state.step) == 2  # an empty batch is a step, and has a number
    assert np.isfinite(flat(empty)).all()
    other, _ = step(state, updates, extra)
    assert not np.array_equal(flat(empty), flat(other))


def check_outputs(door):
    """C12: the state, like the update, tells of private data through the noised release only.

    Under overwhelming noise (the adaptive clip norm then runs into its public bounds) the state
    must be the same to the bit for unrelated private batches.
    """
    one, two = rows(["normal"] * ROWS, 61), rows(["huge", "nan", "zero"] * (ROWS // 3), 67)
    states = [door.step(batch, mask, z=1e9)[1] for batch, mask in ((one, ALL), (two, NONE))]
    assert_same_bits(*states)


DOOR_CHECKS = (
    check_outputs,
    check_noise_scale,
    check_noise_independence,
    check_divisor,
    check_sensitivity,
    check_replace_one,
    check_order_of_examples,
    check_jitted_door,
    check_state,
)
