"""Mechanisms that are broken on purpose, each in one way that people have got wrong before.

`TWINS` pairs each with the contract check that must catch it; `test_twins.py` sees to that.
"""

import dataclasses
import math

import checks
import hypernet_checks
import jax
import jax.numpy as jnp
import mechanisms
import optax
import pate_checks
from checks import BATCH, Clip, Door

import jdp
from jdp import _tree, pate, public_data, subspace
from jdp.clipping import HEADROOM
from jdp.set_embedding import embedding_sum


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
            fields = {"rows": clipped.rows, "rounding": clipped.rounding}
            return kind(clipped.parts, clipped.noise_scales, **fields)

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


def residual_norm_by_subtraction(unit):
    """GEP's residual clipped by |r|^2 = |g|^2 - |w|^2, which cancels in float32."""
    s1, s2 = 1.0 * unit, 0.2 * unit
    bases = mechanisms.bases()

    def clipper(per_example, mask):
        sound = jdp.clip_in_subspace(bases, (s1, s2))(per_example, mask)
        embeddings = subspace.project(bases, per_example)
        g2 = _tree.squared_norms(jax.tree.leaves(per_example), s2)
        r2 = jnp.maximum(g2 - _tree.squared_norms(embeddings, s2), 0)
        keep = mask & jnp.isfinite(r2)
        factors = jnp.where(keep, jnp.minimum(1, HEADROOM / jnp.sqrt(r2)), 0)
        inside = subspace.lift(bases, embeddings)
        residuals = jax.tree.map(jnp.subtract, per_example, inside)
        parts = (sound.parts[0], _sum(residuals, factors, keep))
        return dataclasses.replace(sound, parts=parts)

    return clipper


def basis_from_private_gradients(unit):
    """GEP in a subspace found from the private gradients themselves."""

    def clipper(per_example, mask):
        clean = jax.tree.map(
            lambda leaf: jnp.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0), per_example
        )
        bases = subspace.public_bases(jax.random.key(0), clean, (2, 2), (0, 0, 1))
        return jdp.clip_in_subspace(bases, (1.0 * unit, 0.2 * unit))(per_example, mask)

    return clipper


def sparsified_by_size(unit):
    """The coordinates that are largest in the private batch, instead of random ones."""

    def clipper(per_example, mask):
        total = _sum(per_example, jnp.ones(len(mask)), mask)
        kept = jax.tree.map(lambda leaf: jnp.abs(leaf) >= jnp.median(jnp.abs(leaf)), total)
        return public_data.clip_sparsified(jdp.clip_by_norm(unit), kept)(per_example, mask)

    return clipper


sparsified_with_less_noise = scaled_by(
    mechanisms.sparsified(jdp.clip_by_norm),
    math.sqrt(2 / 3),  # the fraction that is kept
)


def preconditioned_after_the_clip(unit):
    def clipper(per_example, mask):
        clipped = jdp.clip_by_norm(unit)(per_example, mask)
        parts = jax.tree.map(jnp.multiply, clipped.parts[0], mechanisms.WEIGHTS)
        return dataclasses.replace(clipped, parts=(parts,))

    return clipper


def preconditioned_by_private_gradients(unit):
    """AdaDPS whose second moments are those of the private batch."""

    def clipper(per_example, mask):
        squares = jax.tree.map(jnp.square, per_example)
        v = _sum(squares, jnp.ones(len(mask)), mask)
        weights = public_data.inverse_root(v, floor=1e-3)
        return public_data.clip_preconditioned(jdp.clip_by_norm(unit), weights)(per_example, mask)

    return clipper


# Broken doors ----------------------------------------------------------------------------------


def door(
    name,
    release,
    divisor=lambda mask: BATCH,
    step_of=lambda step: step,
    next_of=lambda step, mask: step + 1,
):
    """`release(key, clipped sum, noise multiplier, adjacency)` inside an optax transformation."""

    def make_with(clip_norm):
        def make(key, noise_multiplier, adjacency=None):
            def update_fn(updates, state, params=None, *, mask):
                clipped = jdp.clip_by_norm(clip_norm)(updates, mask)
                step_key = jax.random.fold_in(state.key, step_of(state.step))
                total = release(step_key, clipped, noise_multiplier, adjacency)
                update = jax.tree.map(lambda leaf: leaf / divisor(mask), total)
                return update, state._replace(step=next_of(state.step, mask))

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


# Broken thresholds and ReLU regressions ----------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneBin(jdp.ClippedSum):
    """A histogram as if a replaced record did not leave one bin for another."""

    replace_one_factor = 1.0


def histogram_without_root2(unit):
    inner = mechanisms.count_levels("histogram")(unit)
    return lambda per_example, mask: OneBin(inner(per_example, mask).parts, (1.0,))


def counts_without_root(unit):
    inner = mechanisms.count_levels("counts")(unit)
    return lambda per_example, mask: dataclasses.replace(
        inner(per_example, mask), noise_scales=(1.0,)
    )


def features_not_clipped(unit):
    """Residuals clipped, features trusted to be within R."""

    def clipper(per_example, mask):
        w, x, y = mechanisms.record(per_example)
        rows = jnp.clip(jnp.maximum(x @ w, 0) - y, -0.3, 0.3)[:, None] * x
        keep = mask & jnp.all(jnp.isfinite(rows), axis=1)
        return jdp.ClippedSum(
            (_tree.weighted_sum(rows, jnp.ones(len(y)), keep),), (0.3 * 0.8 * unit,)
        )

    return clipper


# Broken votes ------------------------------------------------------------------------------------


def votes_without_root2(unit):
    """A teacher that votes otherwise as if it only fell silent."""
    inner = mechanisms.votes(pate.vote_sum)(unit)
    return lambda per_example, mask: _without_root2(inner(per_example, mask))


def votes_as_one_query(unit):
    """Sensitivity of one histogram for the votes on all queries together."""
    inner = mechanisms.votes(pate.vote_sum)(unit)
    return lambda per_example, mask: dataclasses.replace(
        inner(per_example, mask), noise_scales=(1.0,)
    )


def _without_root2(total):
    scales = tuple(scale / math.sqrt(2) for scale in total.noise_scales)
    return dataclasses.replace(total, noise_scales=scales)


def labels_without_root2(key, votes, plan, *, num_classes):
    """Noise of std z on each class, the sensitivity taken for 1."""
    plan = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / math.sqrt(2))
    return pate.noisy_labels(key, votes, plan, num_classes=num_classes)


def threshold_noise_where_answered(key, votes, plan, *, num_classes):
    """Only queries that pass the threshold without noise meet the noisy one."""
    found = pate.noisy_labels(key, votes, plan, num_classes=num_classes)
    (most,) = pate.most_votes(votes, num_classes).parts
    answered = found.answered & (most >= plan.threshold)
    return pate.NoisyLabels(jnp.where(answered, found.labels, -1), answered)


def threshold_charged_where_answered(queries, answers, epsilon):
    """The noise on the most votes counted for the answers only."""
    del queries
    options = {"epsilon": epsilon, "delta": pate_checks.DELTA, "threshold": 150.0}
    return pate.plan_votes(5_000, 250, answers, answers=answers, **options)


def votes_charged_without_root2(queries, answers, epsilon):
    class Broken(pate.VotePlan):
        @property
        def vote_std(self):
            return super().vote_std / math.sqrt(2)

    options = {"epsilon": epsilon, "delta": pate_checks.DELTA, "threshold": 150.0}
    plan = pate.plan_votes(5_000, 250, queries, answers=answers, **options)
    return Broken(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})


# Broken mean embeddings ------------------------------------------------------------------------


def mean_embedding(sums=embedding_sum, divide=None, adjacency_of=lambda adjacency: adjacency):
    """`private_embedding` in which something may be swapped for something wrong."""

    def release(key, records, mask, noise_multiplier, adjacency):
        total = sums(hypernet_checks.encode, records, mask, hypernet_checks.CLIP)
        total = jdp.add_noise(key, total, noise_multiplier, adjacency=adjacency_of(adjacency))
        return total / (hypernet_checks.RECORDS if divide is None else divide(mask))

    return release


def clip_after_the_mean(encode, records, mask, clip_norm):
    embeddings = jnp.where(mask[:, None], jax.vmap(encode)(records), 0)
    mean = jnp.nan_to_num(embeddings).mean(0, keepdims=True)
    clipped = jdp.clip_by_norm(clip_norm)(mean, jnp.ones(1, bool))
    parts = (clipped.parts[0] * len(mask),)
    return dataclasses.replace(clipped, parts=parts)


def centred_by_private_records(encode, records, mask, clip_norm):
    embeddings = jnp.nan_to_num(jax.vmap(encode)(records))
    centre = jnp.where(mask[:, None], embeddings, 0).mean(0)
    return embedding_sum(encode, records, mask, clip_norm, centre)


def normalised_over_the_set(encode, records, mask, clip_norm):
    """Batch normalisation over the records, before a clip that bounds each of them."""
    embeddings = jnp.nan_to_num(jax.vmap(encode)(records))
    centred = embeddings - embeddings.mean(0, keepdims=True)
    embeddings = centred / (embeddings.std(0, keepdims=True) + 1e-3)
    return jdp.clip_by_norm(clip_norm)(embeddings, mask)


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
    "residual norm by subtraction": (
        invariant(["huge_in_span"]),
        Clip("", residual_norm_by_subtraction),
    ),
    "basis from private gradients": (
        invariant(["normal"]),
        Clip("", basis_from_private_gradients),
    ),
    "sparsified by size": (invariant(["normal"]), Clip("", sparsified_by_size)),
    "less noise where sparsified": (invariant(["huge"]), Clip("", sparsified_with_less_noise)),
    "preconditioned after the clip": (
        invariant(["normal", "huge"]),
        Clip("", preconditioned_after_the_clip),
    ),
    "preconditioned by private gradients": (
        invariant(["huge"]),
        Clip("", preconditioned_by_private_gradients),
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
    "empty batches not counted": (
        checks.check_outputs,
        door("", sound, next_of=lambda step, mask: step + jnp.any(mask).astype(step.dtype)),
    ),
    "histogram without sqrt 2": (
        invariant(["normal", "huge"]),
        Clip("", histogram_without_root2),
    ),
    "counts without sqrt L": (invariant(["huge"]), Clip("", counts_without_root)),
    "features not clipped": (invariant(["huge"]), Clip("", features_not_clipped)),
    "votes without sqrt 2": (invariant(["normal"]), Clip("", votes_without_root2)),
    "votes as one query": (invariant(["normal"]), Clip("", votes_as_one_query)),
    "labels without sqrt 2": (pate_checks.check_label_law, labels_without_root2),
    "votes charged without sqrt 2": (pate_checks.check_epsilon, votes_charged_without_root2),
    "threshold noise on answered queries only": (
        pate_checks.check_answer_law,
        threshold_noise_where_answered,
    ),
    "threshold charged for answered queries only": (
        pate_checks.check_epsilon,
        threshold_charged_where_answered,
    ),
    "clip after the mean": (
        hypernet_checks.check_mean_sensitivity,
        mean_embedding(clip_after_the_mean),
    ),
    "centred by private records": (
        hypernet_checks.check_mean_sensitivity,
        mean_embedding(centred_by_private_records),
    ),
    "normalised over the set": (
        hypernet_checks.check_mean_sensitivity,
        mean_embedding(normalised_over_the_set),
    ),
    "mean of the records present": (
        hypernet_checks.check_mean_sensitivity,
        mean_embedding(divide=lambda mask: jnp.maximum(1.0, mask.sum().astype(jnp.float32))),
    ),
    "noise of the sum on the mean": (
        hypernet_checks.check_mean_noise,
        mean_embedding(divide=lambda mask: 1.0),
    ),
    "mean under the wrong adjacency": (
        hypernet_checks.check_mean_noise,
        mean_embedding(adjacency_of=lambda adjacency: "zero-out"),
    ),
    "replace-one without the factor": (
        checks.check_replace_one,
        door("", replace_one_without_factor),
    ),
}
