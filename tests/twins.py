"""Mechanisms that are broken on purpose, each in one way that people have got wrong before.

`TWINS` pairs each with the contract check that must catch it; `test_twins.py` sees to that.
"""

import dataclasses
import math

import checks
import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import optax
from checks import BATCH, Clip, Door
from strategies import SIZE, span, tree_of

import jdp
from jdp import _tree
from jdp.clipping import HEADROOM
from jdp.subspace import bases_from_rows


def _norms(per_example):
    return jnp.sqrt(_tree.squared_norms(jax.tree.leaves(per_example), 1.0))


def _sum(per_example, factors, keep):
    return jax.tree.map(lambda leaf: _tree.weighted_sum(leaf, factors, keep), per_example)


# Broken clippers -------------------------------------------------------------------------------


def no_clip(unit):
    def clipper(per_example, mask):
        norms = _norms(per_example)
        return jdp.ClippedSum(
            (_sum(per_example, jnp.ones_like(norms), mask & jnp.isfinite(norms)),), (unit,)
        )

    return clipper


def clip_after_sum(unit):
    def clipper(per_example, mask):
        norms = _norms(per_example)
        total = _sum(per_example, jnp.ones_like(norms), mask & jnp.isfinite(norms))
        norm = optax.tree.norm(total)
        total = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, unit / norm), total)
        return jdp.ClippedSum((total,), (unit,))

    return clipper


def clip_each_leaf(unit):
    """Every leaf clipped to C by itself, as if that bounded the whole by C."""

    def clipper(per_example, mask):
        parts = {
            name: jdp.clip_by_norm(unit)({name: leaf}, mask).parts[0][name]
            for name, leaf in per_example.items()
        }
        return jdp.ClippedSum((parts,), (unit,))

    return clipper


def dropped_mask(unit):
    def clipper(per_example, mask):
        return jdp.clip_by_norm(unit)(per_example, jnp.ones_like(mask))

    return clipper


def nan_times_zero(unit):
    """A factor of zero for what is not finite, but no `where` on the rows."""

    def clipper(per_example, mask):
        norms = _norms(per_example)
        keep = mask & jnp.isfinite(norms)
        factors = jnp.where(keep, jnp.minimum(1, HEADROOM * unit / norms), 0)
        total = jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, axes=1), per_example)
        return jdp.ClippedSum((total,), (unit,))

    return clipper


def norm_in_bfloat16(unit):
    """The norm in the gradients' own precision."""

    def clipper(per_example, mask):
        norms = jax.lax.reduce_precision(_norms(per_example), exponent_bits=8, mantissa_bits=7)
        keep = mask & jnp.isfinite(norms)
        factors = jnp.where(keep, jnp.minimum(1, HEADROOM * unit / norms), 0)
        return jdp.ClippedSum((_sum(per_example, factors, keep),), (unit,))

    return clipper


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalesAdd(jdp.ClippedSum):
    def merge(self, other):
        merged = super().merge(other)
        scales = tuple(a + b for a, b in zip(self.noise_scales, other.noise_scales, strict=True))
        return dataclasses.replace(merged, noise_scales=scales)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseInMerge(jdp.ClippedSum):
    def merge(self, other):
        noised = jdp.add_noise(jax.random.key(0), self, 1.0)
        return dataclasses.replace(super().merge(other), parts=(noised,))


def wrapped(kind):
    def make(unit):
        def clipper(per_example, mask):
            clipped = jdp.clip_by_norm(unit)(per_example, mask)
            return kind(clipped.parts, clipped.noise_scales)

        return clipper

    return make


def scaled_by(make, *factors):
    """The same sums under other noise scales."""

    def broken(unit):
        def clipper(per_example, mask):
            clipped = make(unit)(per_example, mask)
            scales = tuple(a * s for a, s in zip(factors, clipped.noise_scales, strict=True))
            return dataclasses.replace(clipped, noise_scales=scales)

        return clipper

    return broken


gep_without_root2 = scaled_by(mechanisms.in_subspace(1.0, 0.2), 2**-0.5, 2**-0.5)
groups_without_root = scaled_by(
    lambda unit: jdp.clip_by_group((unit, 0.3 * unit), mechanisms.GROUPS), *[2**-0.5] * 3
)


def count_not_paid_for(unit):
    return scaled_by(
        lambda unit: jdp.adaptive.clip_and_count(unit, gradient_scale=1.25, count_scale=5 / 3),
        1 / 1.25,  # the gradient keeps all of the budget
        1.0,
    )(unit)


def ill_conditioned_rows():
    """Four rows of the span, all but parallel: what a power iteration leaves behind."""
    mix = np.random.default_rng(0).normal(size=(4, 4)) @ np.diag([1.0, 1e-1, 1e-4, 1e-6])
    return (mix @ span()).astype(np.float32)


def gram_schmidt_once(rows):
    """One-pass modified Gram-Schmidt in float32, as in the reference code."""
    rows = rows.copy()
    for i in range(len(rows)):
        rows[i] /= np.linalg.norm(rows[i])
        for j in range(i + 1, len(rows)):
            rows[j] -= (rows[i] @ rows[j]) * rows[i]
    return rows


def residual_without_margin(rows):
    """GEP's clip with |r|^2 = |g|^2 - |w|^2 taken at its word."""

    def make(unit):
        like = tree_of(np.zeros((1, SIZE)))
        rough = bases_from_rows([jnp.asarray(rows)], like, (0, 0, 0))
        trusted = dataclasses.replace(rough, error=jnp.float32(-1e-5))  # cancels the margin
        return jdp.clip_in_subspace(trusted, (1.0 * unit, 0.2 * unit))

    return make


# Broken doors ----------------------------------------------------------------------------------


def door(name, release, divisor=lambda mask: BATCH, step_of=lambda step: step):
    """`release(key, clipped sum, noise multiplier, adjacency)` inside an optax transformation."""

    def make_with(clip_norm):
        def make(key, noise_multiplier, adjacency=None):
            def update_fn(updates, state, params=None, *, mask):
                clipped = jdp.clip_by_norm(clip_norm)(updates, mask)
                step_key = jax.random.fold_in(state.key, step_of(state.step))
                total = release(step_key, clipped, noise_multiplier, adjacency)
                update = jax.tree.map(lambda leaf: leaf / divisor(mask), total)
                return update, state._replace(step=state.step + 1)

            inner = jdp.privatize(noise_multiplier, batch_size=BATCH, key=key, adjacency=adjacency)
            return optax.GradientTransformationExtraArgs(inner.init, update_fn)

        return make

    return Door(name, make_with(0.8), mechanisms.white(0.8), unclipped=make_with(math.inf))


def sound(key, clipped, z, adjacency):
    return jdp.add_noise(key, clipped, z, adjacency=adjacency)


def half_noise(key, clipped, z, adjacency):
    return jdp.add_noise(key, clipped, z / 2, adjacency=adjacency)


def uniform_noise(key, clipped, z, adjacency):
    """Of the right standard deviation."""
    del adjacency
    return jax.tree.map(
        lambda leaf: (
            leaf + 0.8 * z * jax.random.uniform(key, leaf.shape, minval=-1, maxval=1) * math.sqrt(3)
        ),
        clipped.parts[0],
    )


def same_key_for_every_leaf(key, clipped, z, adjacency):
    del adjacency
    return jax.tree.map(
        lambda leaf: leaf + 0.8 * z * jax.random.normal(key, leaf.shape), clipped.parts[0]
    )


def one_leaf_only(key, clipped, z, adjacency):
    noised = jdp.add_noise(key, clipped, z, adjacency=adjacency)
    return clipped.parts[0] | {"a": noised["a"]}


def replace_one_without_factor(key, clipped, z, adjacency):
    del adjacency
    return jdp.add_noise(key, clipped, z)


def constant_key(key, clipped, z, adjacency):
    del key
    return jdp.add_noise(jax.random.key(0), clipped, z, adjacency=adjacency)


def noise_scaled_by_batch(key, clipped, z, adjacency):
    """Noise for the mean added to the sum."""
    return jdp.add_noise(key, clipped, z / BATCH, adjacency=adjacency)


SOUND = door("sound", sound)


def _residual(check_rows):
    return Clip("", residual_without_margin(check_rows))


def invariant(kinds, unit=1.0):
    def check(clip):
        checks.check_invariant_on(clip, kinds, unit)

    return check


TWINS = {
    "no clip": (invariant(["huge"]), Clip("", no_clip)),
    "clip after the sum": (invariant(["normal", "huge"]), Clip("", clip_after_sum)),
    "each leaf clipped by itself": (invariant(["huge"]), Clip("", clip_each_leaf)),
    "mask dropped": (checks.check_masked_rows, Clip("", dropped_mask)),
    "NaN times zero": (checks.check_nonfinite, Clip("", nan_times_zero)),
    "masked NaN times zero": (checks.check_masked_rows, Clip("", nan_times_zero)),
    "norm in bfloat16": (
        invariant(["normal", "huge", "in_span", "orthogonal"]),
        Clip("", norm_in_bfloat16),
    ),
    "scales add in merge": (checks.check_merge, Clip("", wrapped(ScalesAdd))),
    "noise in merge": (checks.check_merge, Clip("", wrapped(NoiseInMerge))),
    "GEP without sqrt 2": (invariant(["normal", "huge"]), Clip("", gep_without_root2)),
    "groups without sqrt G": (invariant(["huge"]), Clip("", groups_without_root)),
    "count not paid for": (invariant(["normal", "huge"]), Clip("", count_not_paid_for)),
    "basis not orthonormal": (
        invariant(["in_span"], unit=1e-3),
        _residual(gram_schmidt_once(ill_conditioned_rows())),
    ),
    "residual norm without margin": (
        invariant(["huge_in_span"]),
        _residual(span().astype(np.float32)),
    ),
    "half the noise": (checks.check_noise_scale, door("", half_noise)),
    "noise for the mean on the sum": (checks.check_noise_scale, door("", noise_scaled_by_batch)),
    "uniform noise": (checks.check_noise_scale, door("", uniform_noise)),
    "noise on one leaf": (checks.check_noise_scale, door("", one_leaf_only)),
    "same key for every leaf": (
        checks.check_noise_independence,
        door("", same_key_for_every_leaf),
    ),
    "same key at every step": (
        checks.check_noise_independence,
        door("", sound, step_of=lambda step: 0 * step),
    ),
    "same key for every run": (checks.check_noise_independence, door("", constant_key)),
    "divided by the actual count": (
        checks.check_divisor,
        door("", sound, divisor=lambda mask: jnp.maximum(1.0, jnp.sum(mask).astype(jnp.float32))),
    ),
    "divided by the padded size": (
        checks.check_limit,
        door("", sound, divisor=lambda mask: float(mask.shape[0])),
    ),
    "replace-one without the factor": (
        checks.check_replace_one,
        door("", replace_one_without_factor),
    ),
}
