"""Everything public that clips or releases, as the contract table sees it."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import BATCH, Clip, Door
from strategies import GROUPS, PARAMS, SHAPES, SIZE, span, tree_of

import jdp
from jdp import public_data
from jdp.adaptive import clip_and_count
from jdp.glmtron import Descent, clipped_sum, records
from jdp.pate import most_votes, vote_sum
from jdp.set_embedding import embedding_sum
from jdp.subspace import Bases, bases_from_rows
from jdp.thresholds import Grid, PrivateThreshold

ROOT2 = math.sqrt(2)


@functools.cache
def bases() -> Bases:
    """Two orthonormal rows for each of the two groups; their span is `strategies.span()`."""
    rows = [jnp.asarray(span()[:2, :15], jnp.float32), jnp.asarray(span()[2:, 15:], jnp.float32)]
    like = {name: jnp.zeros((1, *shape)) for name, shape in SHAPES.items()}
    return bases_from_rows(rows, like, (0, 0, 1))


def weighted_bases() -> Bases:
    """The same, with weights for the coordinates."""
    return dataclasses.replace(bases(), weights=(jnp.array([0.3, 4.0]), jnp.array([1.0, 0.5])))


def in_subspace(s1, s2, get_bases=bases, **options):
    return lambda unit: jdp.clip_in_subspace(
        get_bases(), (s1 * unit, None if s2 is None else s2 * unit), **options
    )


KEPT_AT = np.flatnonzero(np.arange(SIZE) % 3)
KEPT = tree_of(np.isin(np.arange(SIZE), KEPT_AT), bool)
WEIGHTS = tree_of(np.geomspace(0.1, 30, SIZE))


def sparsified(make):
    return lambda unit: public_data.clip_sparsified(make(unit), KEPT)


def preconditioned(unit):
    return public_data.clip_preconditioned(jdp.clip_by_norm(unit), WEIGHTS)


def by_bookkeeping(clipper, floats_per_product=None):
    """The clipper behind a loss whose per-example gradients are the given ones.

    Each leaf W enters as a product, loss = sum_t <(I W)_t, g_t>. A zero for `floats_per_product`
    forces norms from Gram matrices.
    """

    def loss(params, gradients):
        return sum(
            jnp.sum((jnp.eye(len(leaf), dtype=leaf.dtype) @ params[name].astype(leaf.dtype)) * leaf)
            for name, leaf in gradients.items()
        )

    def clip(per_example, mask):
        gradient = jdp.clipped_grad(loss, clipper, strategy="book-keeping")
        with pytest.MonkeyPatch.context() as patch:
            if floats_per_product is not None:
                patch.setattr("jdp.bookkeeping.FLOATS_PER_PRODUCT", floats_per_product)
            return gradient(PARAMS, per_example, mask=mask)

    return clip


def record(per_example):
    """Read rows of 27 entries as (w, features, label) of a ReLU regression."""
    rows = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in per_example.values()], axis=1)
    rows = rows.astype(jnp.float32)
    return jnp.linspace(-0.2, 0.3, SIZE - 1), rows[:, :-1], rows[:, -1]


def relu(gradient, clip):
    """The sum of `jdp.relu_regression.fit`, of threshold 0.3 and feature bound 0.8."""

    def make(unit):
        descent = Descent(1.0, 0.8 * unit, gradient=gradient, clip=clip)

        def clipper(per_example, mask):
            w, x, y = record(per_example)
            return clipped_sum(w, records(x, y, descent), mask, 0.3, descent, gradient == "true")

        return clipper

    return make


def count_levels(mechanism):
    """Counts by level of the rows' norms."""
    threshold = PrivateThreshold(Grid(0.5, 5), mechanism=mechanism)

    def make(unit):
        def clipper(per_example, mask):
            _, x, y = record(per_example)
            return threshold.count(jnp.sqrt(jnp.sum(x * x, axis=1) + y * y) / unit, mask)

        return clipper

    return make


def ballot(per_example, mask):
    """Read rows as teachers, each with a vote for one of four classes on each of five queries.

    A teacher that is masked, or has a number that is not finite, abstains.
    """
    _, x, _ = record(per_example)
    votes = jnp.argmax(x[:, :20].reshape(len(x), 5, 4), axis=2)
    keep = mask & jnp.all(jnp.isfinite(x * x), axis=1)
    return jnp.where(keep[:, None], votes, -1)


def votes(total):
    return lambda unit: lambda per_example, mask: total(ballot(per_example, mask), 4)


def set_embedding(unit):
    """Read rows as records of a set, embedded by an affine map of all their entries."""
    matrix = np.random.default_rng(3).normal(size=(SIZE, 5)).astype(np.float32) / 4

    def encode(record):
        return vector(jax.tree.map(lambda leaf: leaf.ravel().astype(jnp.float32), record)) @ matrix

    def clipper(per_example, mask):
        centre = jnp.linspace(-0.5, 0.5, 5)
        return embedding_sum(encode, per_example, mask, 0.8 * unit, centre)

    return clipper


# Not in the table, as a maximum cannot merge; test_pate.py has it.
MOST_VOTES = Clip("pate-most-votes", votes(most_votes), limit=False)
CLIPS = (
    Clip("pate-votes", votes(vote_sum), limit=False),
    Clip("set-embedding", set_embedding, limit=False),
    Clip("relu-surrogate", relu("surrogate", "residual"), limit=False),
    Clip("relu-true", relu("true", "residual"), limit=False),
    Clip("relu-vector", relu("surrogate", "vector"), limit=False),
    Clip("threshold-histogram", count_levels("histogram"), limit=False),
    Clip("threshold-counts", count_levels("counts"), limit=False),
    Clip("norm", lambda unit: jdp.clip_by_norm(unit)),
    Clip("group", lambda unit: jdp.clip_by_group((1.0 * unit, 0.3 * unit), GROUPS)),
    Clip("automatic", lambda unit: jdp.clip_automatic(unit), limit=False),
    Clip(
        "count",
        lambda unit: clip_and_count(unit, gradient_scale=1.25, count_scale=5 / 3),
        limit=False,
    ),
    Clip("book-keeping", lambda unit: by_bookkeeping(jdp.clip_by_norm(unit))),
    Clip(
        "book-keeping-group",
        lambda unit: by_bookkeeping(jdp.clip_by_group((1.0 * unit, 0.3 * unit), GROUPS)),
    ),
    Clip(
        "book-keeping-gram", lambda unit: by_bookkeeping(jdp.clip_by_norm(unit), 0), rounding=0.01
    ),
    Clip("subspace-equal", in_subspace(1.0, 0.2)),
    Clip("subspace-optimal", in_subspace(1.0, 0.2, noise_split="optimal")),
    Clip("subspace-joint", in_subspace(1.0, 0.2, joint_clip=True)),
    Clip("subspace-weighted", in_subspace(1.0, 0.2, weighted_bases), limit=False),
    Clip("subspace-biased", in_subspace(1.0, None), limit=False),
    Clip("sparsified", sparsified(jdp.clip_by_norm), limit=False),
    Clip("sparsified-subspace", sparsified(in_subspace(1.0, 0.2)), limit=False),
    Clip("preconditioned", preconditioned, limit=False),
)


def vector(tree):
    return jnp.concatenate([leaf.ravel() for leaf in tree.values()])


def aggregate(name, clipper, whiten, unclipped=None, bound=1.0):
    def make_with(clipper):
        return lambda key, noise_multiplier, **options: jdp.dp_aggregate(
            clipper, noise_multiplier, batch_size=BATCH, key=key, **options
        )

    return Door(
        f"aggregate-{name}",
        make_with(clipper),
        whiten,
        bound=bound,
        unclipped=unclipped and make_with(unclipped),
    )


def white(*scales):
    """Whiten updates whose noise is `scale` on every leaf, or one scale a leaf."""

    def whiten(update, before, after):
        del before, after
        per_leaf = scales * 3 if len(scales) == 1 else scales
        parts = [
            leaf.ravel() * BATCH / s for leaf, s in zip(update.values(), per_leaf, strict=True)
        ]
        return jnp.concatenate(parts)

    return whiten


def dense(basis: Bases):
    """B as one (k, p) matrix, block-diagonal over groups."""
    ranks = dict(zip(basis.groups, (x.shape[0] for x in basis.rows.values()), strict=True))
    first = dict(zip(ranks, itertools.accumulate([0, *ranks.values()]), strict=False))
    columns = []
    for label, leaf in zip(basis.groups, basis.rows.values(), strict=True):
        block = leaf.reshape(ranks[label], -1)
        after = sum(ranks.values()) - first[label] - ranks[label]
        columns.append(jnp.pad(block, ((first[label], after), (0, 0))))
    return jnp.concatenate(columns, axis=1)


def white_gep(get_bases, embedding, residual):
    """Whiten GEP's noise: along the basis both parts add up, across it the residual's is alone."""

    def whiten(update, before, after):
        del before
        found = get_bases(after)
        rows = dense(found)
        frame = jnp.linalg.qr(rows.T, mode="complete")[0]
        k = rows.shape[0]
        values = frame.T @ (vector(update) * BATCH)
        weights = 1.0 if found.weights is None else jnp.concatenate(found.weights)
        inside = values[:k] / jnp.sqrt((weights * embedding) ** 2 + residual**2)
        return inside if residual == 0 else jnp.concatenate([inside, values[k:] / residual])

    return whiten


def anchors(params, key):
    """Public gradients: nine random ones, fresh for every key."""
    del params
    return tree_of(jax.random.normal(key, (9, SIZE)))


def gep(name, s1, s2, whiten, **options):
    def make_with(s1, s2):
        return lambda key, noise_multiplier, **more: jdp.gep(
            rank=5,
            clip_norms=(s1, s2),
            noise_multiplier=noise_multiplier,
            batch_size=BATCH,
            key=key,
            public_gradients=anchors,
            **options,
            **more,
        )

    return Door(
        name,
        make_with(s1, s2),
        whiten,
        bound=s1 + s2,
        unclipped=make_with(math.inf, math.inf),
    )


def of_state(state):
    return state.bases


def _optimal(s1, k, s2, p):
    a, d = s1 * k**0.5, s2 * p**0.5
    return s1 * ((a + d) / a) ** 0.5, s2 * ((a + d) / d) ** 0.5


class Chained(NamedTuple):
    """The state of an `optax.chain`, with the number of the step where the checks look for it."""

    step: jax.Array
    states: Any


def followed_by(name, make_after, whiten):
    """DP-SGD with a transformation after the noise."""

    def make(key, noise_multiplier, **options):
        tx = optax.chain(
            jdp.dp_aggregate(
                jdp.clip_by_norm(0.8), noise_multiplier, batch_size=BATCH, key=key, **options
            ),
            make_after(key),
        )

        def update_fn(updates, state, params=None, **extra):
            updates, states = tx.update(updates, state.states, params, **extra)
            return updates, Chained(state.step + 1, states)

        init_fn = lambda params: Chained(jnp.zeros((), jnp.int32), tx.init(params))  # noqa: E731
        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    return Door(name, make, whiten)


def white_kept(update, before, after):
    """Whiten what is kept."""
    return white(0.8)(update, before, after)[KEPT_AT]


def white_projected(update, before, after):
    """Whiten the coordinates in the subspace."""
    del before
    return dense(after.states[1].bases) @ vector(update) * BATCH / 0.8


COUNT_STD = 0.6
GRADIENT_SCALE = (1 - (2 * COUNT_STD) ** -2) ** -0.5  # what is left of noise multiplier 1


def white_adaptive(update, before, after):
    """Whiten the update and the count, which shows in the next clip norm."""
    fraction = jnp.log(after.clip_norm / before.clip_norm) / -0.2 + 0.5
    count = (fraction - 0.5) * BATCH / COUNT_STD
    values = vector(update) * BATCH / (GRADIENT_SCALE * before.clip_norm)
    return jnp.concatenate([values, count[None]])


DOORS = (
    aggregate("norm", jdp.clip_by_norm(0.8), white(0.8), jdp.clip_by_norm(math.inf)),
    aggregate(
        "group",
        jdp.clip_by_group((1.0, 0.3), GROUPS),
        white(ROOT2, ROOT2, 0.3 * ROOT2),
        jdp.clip_by_group((math.inf, math.inf), GROUPS),
        bound=math.hypot(1.0, 0.3),
    ),
    aggregate("automatic", jdp.clip_automatic(0.5), white(0.5)),
    aggregate(
        "subspace",
        in_subspace(1.0, 0.2)(1.0),
        white_gep(lambda state: bases(), ROOT2, 0.2 * ROOT2),
        in_subspace(math.inf, math.inf)(1.0),
        bound=1.2,
    ),
    aggregate("sparsified", sparsified(jdp.clip_by_norm)(0.8), white_kept),
    aggregate("preconditioned", preconditioned(0.8), white(0.8)),
    followed_by(
        "mixed",
        lambda key: public_data.mix_public(
            0.25, lambda params, key: jax.tree.map(jnp.zeros_like, params), key=key
        ),
        white(0.25 * 0.8),
    ),
    followed_by(
        "projected",
        lambda key: public_data.project_updates(rank=5, public_gradients=anchors, key=key),
        white_projected,
    ),
    Door(
        "adaptive",
        lambda key, noise_multiplier, **options: jdp.dp_aggregate_adaptive(
            noise_multiplier,
            batch_size=BATCH,
            key=key,
            initial_clip_norm=0.8,
            count_noise_std=COUNT_STD * max(1.0, noise_multiplier),
            **options,
        ),
        white_adaptive,
    ),
    Door(
        "privatize",
        lambda key, noise_multiplier, **options: jdp.privatize(
            noise_multiplier, batch_size=BATCH, key=key, **options
        ),
        white(0.8),
        feed=lambda grads, mask: (jdp.clip_by_norm(0.8)(grads, mask), {}),
    ),
    gep("gep", 1.0, 0.2, white_gep(of_state, ROOT2, 0.2 * ROOT2)),
    gep(
        "gep-loss",
        1.0,
        0.2,
        white_gep(of_state, ROOT2, 0.2 * ROOT2),
        loss=lambda params, gradients: sum(
            jnp.sum(params[name].astype(leaf.dtype) * leaf) for name, leaf in gradients.items()
        ),
        microbatch_size=4,
    ),
    gep(
        "gep-grouped-warm",
        1.0,
        0.2,
        white_gep(of_state, ROOT2, 0.2 * ROOT2),
        groups=GROUPS,
        refresh_every=2,
        warm_start=True,
    ),
    gep(
        "gep-optimal",
        1.0,
        0.2,
        white_gep(of_state, *_optimal(1.0, 5, 0.2, 27)),
        noise_split="optimal",
    ),
    gep("gep-joint", 1.0, 0.2, white_gep(of_state, 1.0, 0.2), joint_clip=True),
    dataclasses.replace(
        gep(
            "gep-whitened",
            1.0,
            0.2,
            white_gep(of_state, ROOT2, 0.2 * ROOT2),
            groups=GROUPS,
            whitening=1.0,
        ),
        bound=2.2,  # no weight of these anchors is above 2
        unclipped=None,  # the update is a preconditioned one
    ),
    Door(
        "gep-biased",
        lambda key, noise_multiplier, **options: jdp.biased_gep(
            rank=5,
            clip_norm=1.0,
            noise_multiplier=noise_multiplier,
            batch_size=BATCH,
            key=key,
            public_gradients=anchors,
            **options,
        ),
        white_gep(of_state, 1.0, 0.0),
    ),
)
