"""The mechanisms that `experiments.audit` attacks: one release each, and the worst neighbours.

Every case is small on purpose: what is audited is the release, not the model. The record in
question (the canary) is last in its data set and pushes every part of the release as far as a
record can; the others are ordinary, and public to the auditor.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp import accounting, pate, public_data
from jdp._typing import Adjacency
from jdp.clipping import ClippedSum
from jdp.relu_regression import (
    Descent,
    FixedThreshold,
    Grid,
    PrivateThreshold,
    PublicThreshold,
    fit,
    plan_blocks,
)

ALWAYS = jnp.bool_(True)
GROUPS = {"a": 0, "b": 1}
PARAMS = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
SIZE = 10
BATCH = 4.0
_RNG = np.random.default_rng(2026)
OTHERS = _RNG.normal(size=(5, SIZE)).astype(np.float32)
FRAME = np.linalg.qr(_RNG.normal(size=(SIZE, SIZE)))[0].T.astype(np.float32)
HUGE = 1e4


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a mechanism claims: the curve of an event, or a pure epsilon."""

    event: Any = None
    adjacency: Adjacency = "zero-out"
    pure: float = math.inf

    def epsilon(self, delta: float) -> float:
        """The claimed epsilon, by the library's own accountant."""
        if self.event is None:
            return self.pure
        options: Any = {"delta": delta, "adjacency": self.adjacency}
        return accounting.privacy_spent(self.event, **options).epsilon

    @property
    def mu(self) -> float | None:
        """The claimed mu, where the claim is the curve of one Gaussian."""
        if self.event is None:
            return None
        return accounting.privacy_spent(self.event, delta=0.5, adjacency=self.adjacency).mu


def gaussian(mu: float = 1.0, adjacency: Adjacency = "zero-out") -> Claim:
    """One Gaussian of noise multiplier 1 / mu."""
    return Claim(dpa.GaussianDpEvent(1 / mu), adjacency)


@dataclasses.dataclass(frozen=True)
class Case:
    """One release to attack.

    Attributes:
      release: `(key, present) -> (values, counts)`, what one run publishes, as a vector, with the
        record or without it; runs for which `counts` is False are left out, which may depend on
        what is public only (the place of the record in a public order).
      claim: what it is said to cost.
      neighbours: how the two data sets differ.
      score: from releases to scores, if not the fitted likelihood ratio.
      draws: times as many as for other cases.
    """

    release: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    claim: Claim = dataclasses.field(default_factory=gaussian)
    neighbours: str = "a record, or none"
    score: Callable[[np.ndarray], np.ndarray] | None = None
    draws: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RawSum(ClippedSum):
    """A clipped sum whose noised parts are published as they are."""

    def combine(self, parts):
        """All parts."""
        return parts


def raw(clipped: ClippedSum) -> ClippedSum:
    """The same, to be published part by part."""
    options: Any = {"rows": clipped.rows, "rounding": clipped.rounding}
    return RawSum(clipped.parts, clipped.noise_scales, **options)


def tree_of(matrix: Any) -> dict[str, jax.Array]:
    """Cut (..., 10) into a tree like PARAMS."""
    matrix = jnp.asarray(matrix, jnp.float32)
    return {"a": matrix[..., :6].reshape(*matrix.shape[:-1], 2, 3), "b": matrix[..., 6:]}


def flat(tree: Any) -> jax.Array:
    """All leaves as one vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def rows(canary: np.ndarray, others: np.ndarray = OTHERS) -> jax.Array:
    """The data set, canary last."""
    return jnp.asarray(np.concatenate([others, canary[None]]), jnp.float32)


def mask_of(present: jax.Array, others: int = len(OTHERS)) -> jax.Array:
    """The others, and the canary where it is present."""
    return jnp.append(jnp.ones(others, bool), present)


# Doors --------------------------------------------------------------------------------------------


def door(make: Callable[[jax.Array], Any], canary: np.ndarray, extra=lambda state: []) -> Case:
    """An optax door, one step; `extra` gives what else of its state is published."""
    gradients = tree_of(rows(canary))

    def release(key, present):
        tx = make(key)
        update, state = tx.update(gradients, tx.init(PARAMS), PARAMS, mask=mask_of(present))
        return jnp.append(flat(update), jnp.asarray(extra(state), jnp.float32)), ALWAYS

    return Case(release)


def aggregate(clipper, canary: np.ndarray = HUGE * FRAME[0]) -> Case:
    """`jdp.dp_aggregate` with a clipper."""
    return door(lambda key: jdp.dp_aggregate(clipper, 1.0, batch_size=BATCH, key=key), canary)


def followed_by(make_after: Callable[[jax.Array], Any], canary: np.ndarray) -> Case:
    """DP-SGD, then something after the noise."""

    def make(key):
        keys = jax.random.split(key)
        inner = jdp.dp_aggregate(jdp.clip_by_norm(1.0), 1.0, batch_size=BATCH, key=keys[0])
        return optax.chain(inner, make_after(keys[1]))

    return door(make, canary)


def strategy(**options: Any) -> Case:
    """`jdp.clipped_grad` and `jdp.privatize`; gradients are x^T t, over four positions."""
    rng = np.random.default_rng(1)
    x, t = rng.normal(size=(6, 4, 2)), rng.normal(size=(6, 4, 5))
    x[-1] *= HUGE
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)
    grad = jdp.clipped_grad(
        lambda w, e: jnp.sum((e[0] @ w) * e[1]), jdp.clip_by_norm(1.0), **options
    )

    def release(key, present):
        params = jnp.zeros((2, 5))
        tx = jdp.privatize(1.0, batch_size=BATCH, key=key)
        clipped = grad(params, batch, mask=mask_of(present))
        return flat(tx.update(clipped, tx.init(params), params)[0]), ALWAYS

    return Case(release)


def replace_one() -> Case:
    """DP-SGD where a record is replaced by its opposite."""

    def release(key, present):
        canary = jnp.where(present, 1, -1) * HUGE * FRAME[0]
        gradients = tree_of(jnp.concatenate([OTHERS, canary[None]]))
        clipped = jdp.clip_by_norm(1.0)(gradients, jnp.ones(6, bool))
        return flat(jdp.add_noise(key, clipped, 1.0, adjacency="replace-one")), ALWAYS

    return Case(release, gaussian(1.0, "replace-one"), "a record, or its opposite")


def anchors(params: Any, key: jax.Array) -> Any:
    """Public gradients whose span is always that of the first two rows of FRAME."""
    del params, key
    return tree_of(FRAME[:2] * np.array([[2.0], [1.0]], np.float32))


BOTH = HUGE * (FRAME[0] + FRAME[2])  # in the subspace and out of it


def gep(canary: np.ndarray = BOTH, make: Callable[..., Any] = jdp.gep, **options: Any) -> Case:
    """GEP with one step."""
    if make is jdp.gep:
        options = {"clip_norms": (1.0, 0.2)} | options
    options |= {"rank": 2, "noise_multiplier": 1.0, "batch_size": BATCH}
    return door(lambda key: make(key=key, public_gradients=anchors, **options), canary)


def linear(params: Any, gradients: Any) -> jax.Array:
    """A loss whose gradient is the example."""
    return sum((jnp.sum(params[name] * leaf) for name, leaf in gradients.items()), jnp.zeros(()))


def adaptive() -> Case:
    """Adaptive clipping; the count shows in the next clip norm."""

    def make(key):
        return jdp.dp_aggregate_adaptive(1.0, batch_size=BATCH, key=key, initial_clip_norm=0.8)

    return door(make, HUGE * FRAME[0], lambda state: [jnp.log(state.clip_norm)])


WEIGHTS = tree_of(np.geomspace(0.1, 30, SIZE))
KEPT_AT = np.arange(SIZE) % 3 > 0
KEPT = jax.tree.map(lambda leaf: leaf > 0, tree_of(KEPT_AT))


# Runs of several steps ----------------------------------------------------------------------------


def mixture_score(rate: float, separation: float) -> Callable[[np.ndarray], np.ndarray]:
    """Log-likelihood ratio of steps that the record joins with probability `rate`.

    Takes one column a step, in units of the noise, which the record moves by `separation`.
    """
    tilt = lambda x: np.exp(separation * x - separation**2 / 2)  # noqa: E731
    return lambda draws: np.log1p(rate * (tilt(draws.astype(np.float64)) - 1)).sum(axis=1)


def poisson_run() -> Case:
    """A training run: plan, Poisson batches, clipped gradients, noise, and SGD over four steps."""
    z = 0.8
    plan = jdp.plan(8, 2, 4, noise_multiplier=z, delta=1e-5)
    grad = jdp.clipped_grad(lambda w, x: w @ x, jdp.clip_by_norm(1.0))

    def release(key, present):
        noise_key, sampling_key = jax.random.split(key)
        data = jnp.zeros((8, 3)).at[-1].set(jnp.where(present, -HUGE, 0) * jnp.eye(3)[0])
        tx = jdp.privatize(z, batch_size=plan.batch_size, key=noise_key)
        tx = optax.chain(tx, optax.sgd(1.0))

        def step(carry, i):
            w, state = carry
            taken, mask = plan.batch(sampling_key, i)
            updates, state = tx.update(grad(w, data[taken], mask=mask), state, w)
            return (optax.apply_updates(w, updates), state), updates[0]

        start = jnp.zeros(3), tx.init(jnp.zeros(3))
        updates = jax.lax.scan(step, start, jnp.arange(plan.steps))[1]
        return updates * plan.batch_size / z, ALWAYS

    return Case(release, Claim(plan.event), score=mixture_score(0.25, 1 / z))


# ReLU regression ----------------------------------------------------------------------------------


def relu(
    plan: Any,
    threshold: Any = FixedThreshold(1.0),  # noqa: B008
    *,
    place: int | None = None,
    whole_path: bool = False,
    far: int = 0,
    score: Any = None,
    **descent: Any,
) -> Case:
    """`relu_regression.fit` on null records and one of label a million.

    Published are all steps, in units of the threshold; where blocks are disjoint, only the step of
    the canary's block can tell anything, and the order is public. `place` keeps those runs where it
    is in this block (in a threshold's rows it is in none). With `far`, thresholds are looked at
    too, in runs where half of 2 * `far` rows with residuals beyond all levels are in that block.
    """
    n, b = plan.sampler.num_examples, plan.batch_size
    options = Descent(1.0, 1.0, **descent)
    distant = jnp.array([100.0, 0.0]) if options.gradient == "true" else None

    def release(key, present):
        x = jnp.zeros((n, 2)).at[-1, 0].set(jnp.where(present, 1.0, 0.0))
        y = jnp.zeros(n).at[: 2 * far].set(1e6).at[-1].set(jnp.where(present, 1e6, 0.0))
        found = fit(key, x, y, plan, threshold=threshold, descent=options, start=distant)
        first = jnp.zeros((1, 2)) if distant is None else distant[None]
        steps = jnp.diff(found.path, axis=0, prepend=first) * b / found.thresholds[:, None]
        if whole_path and place is None:
            return steps.ravel(), ALWAYS
        blocks = plan.sampler.partition(jax.random.split(key)[1], 0)[1]  # as `fit` does
        holds = jnp.any(blocks == n - 1, axis=1)
        own = jnp.argmax(holds)
        near = jnp.sum(blocks[own] < 2 * far) == far
        values = steps.ravel() if whole_path else steps[own]
        level = jnp.log2(found.thresholds[own])[None] if far else jnp.zeros(0)
        return jnp.append(values, level), near & (jnp.any(holds) if place is None else holds[place])

    return Case(release, Claim(plan.event), score=score)


def _blocks(*sizes: int, z: float = 1.0, **options: Any) -> Any:
    return plan_blocks(*sizes, noise_multiplier=z, delta=1e-5, **options)


def relu_poisson() -> Case:
    """DP-SGD for ReLU regression, two Poisson batches."""
    plan = jdp.plan(8, 4, 2, noise_multiplier=1.0, delta=1e-5)
    score = lambda draws: mixture_score(0.5, 1.0)(draws[:, ::2])  # noqa: E731
    return relu(plan, whole_path=True, gradient="true", score=score)


def private_threshold(levels: int = 2) -> PrivateThreshold:
    """A private threshold of few levels."""
    return PrivateThreshold(Grid(0.5, levels))


def level_counts(mechanism: Any) -> Case:
    """The noised counts of a private threshold; a residual of zero, or beyond all levels."""
    threshold = PrivateThreshold(Grid(0.5, 3), mechanism=mechanism)
    histogram = mechanism == "histogram"
    adjacency = "replace-one" if histogram else "zero-out"

    def release(key, present):
        magnitudes = jnp.array([0.1, 0.7, 3.0, 0.0]).at[-1].set(jnp.where(present, 1e6, 0.0))
        total = threshold.count(magnitudes, jnp.ones(4, bool))
        return flat(jdp.add_noise(key, total, 1.0, adjacency=adjacency)), ALWAYS

    return Case(release, gaussian(1.0, adjacency), "a residual of 0, or beyond all levels")


def sparse_vector() -> Case:
    """The level that the sparse vector technique releases, of pure epsilon 1."""
    threshold = PrivateThreshold(Grid(0.5, 2), mechanism="sparse-vector")

    def release(key, present):
        far = jnp.arange(30) < 20
        magnitudes = jnp.where(far, 1e6, 0.0).at[-1].set(jnp.where(present, 1e6, 0.0))
        level = threshold.choose(key, magnitudes, jnp.ones(30, bool), 1.0, "zero-out")
        return jnp.log2(level)[None], ALWAYS

    return Case(release, Claim(pure=1.0), "a residual of 0, or beyond all levels")


# PATE ---------------------------------------------------------------------------------------------


def ballots(present: jax.Array, teachers: int, queries: int) -> jax.Array:
    """Teachers that are split evenly between two classes, and one more that decides."""
    even = jnp.arange(teachers - 1) % 2
    votes = jnp.append(even, jnp.where(present, 1, 0))
    return jnp.tile(votes[:, None], (1, queries)).astype(jnp.int32)


_VOTES = "all records of a teacher, which then votes otherwise"


def pate_votes() -> Case:
    """The noisy votes themselves, on three queries."""

    def release(key, present):
        total = pate.vote_sum(ballots(present, 7, 3), 2)
        return flat(jdp.add_noise(key, total, 1.0, adjacency="replace-one")), ALWAYS

    return Case(release, gaussian(1.0, "replace-one"), _VOTES)


def pate_labels(**options: Any) -> Case:
    """The labels, and which queries have one."""
    plan = pate.plan_votes(21, 21, noise_multiplier=1.0, delta=1e-5, **options)

    def release(key, present):
        found = pate.noisy_labels(key, ballots(present, 21, plan.queries), plan, num_classes=2)
        return flat((found.answered, found.labels)), ALWAYS

    return Case(release, Claim(plan.event, plan.adjacency), _VOTES)


MECHANISMS: dict[str, Callable[[], Case]] = {
    "dp-sgd": lambda: aggregate(jdp.clip_by_norm(1.0)),
    "dp-sgd, replace-one": replace_one,
    "dp-sgd, vmap": lambda: strategy(strategy="vmap"),
    "dp-sgd, scan": lambda: strategy(strategy="scan", microbatch_size=2),
    "dp-sgd, book-keeping": lambda: strategy(strategy="book-keeping"),
    "dp-sgd, book-keeping in microbatches": lambda: strategy(microbatch_size=4),
    "dp-sgd, Poisson run of 4 steps": poisson_run,
    "per-group clipping": lambda: aggregate(
        jdp.clip_by_group((1.0, 0.3), GROUPS), HUGE * np.ones(SIZE, np.float32)
    ),
    "automatic clipping": lambda: aggregate(jdp.clip_automatic(1.0)),
    "adaptive clipping": adaptive,
    "gep": gep,
    "gep, through the loss": lambda: gep(loss=linear, microbatch_size=2),
    "gep, optimal split": lambda: gep(noise_split="optimal"),
    "gep, joint clip": lambda: gep(HUGE * FRAME[2], joint_clip=True),
    "gep, whitened": lambda: gep(whitening=1.0),
    "b-gep": lambda: gep(HUGE * FRAME[0], jdp.biased_gep, clip_norm=1.0),
    "projected dp-sgd": lambda: followed_by(
        lambda key: public_data.project_updates(rank=2, public_gradients=anchors, key=key),
        HUGE * FRAME[0],
    ),
    "AdaDPS": lambda: aggregate(
        public_data.clip_preconditioned(jdp.clip_by_norm(1.0), WEIGHTS),
    ),
    "PDA-DPMD": lambda: followed_by(
        lambda key: public_data.mix_public(
            0.25, lambda params, key: jax.tree.map(jnp.ones_like, params), key=key
        ),
        HUGE * FRAME[0],
    ),
    "random sparsification": lambda: aggregate(
        public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT), HUGE * KEPT_AT
    ),
    "pate, votes": pate_votes,
    "pate, labels": lambda: pate_labels(queries=1),
    "pate, confident": lambda: pate_labels(queries=2, threshold=11.0, answers=1),
    "dp-pgd": lambda: relu(_blocks(4, 4, 3, z=3**0.5), whole_path=True, gradient="true"),
    "dp-gd-glmtron": lambda: relu(_blocks(4, 4, 3, z=3**0.5), whole_path=True),
    "relu dp-sgd, Poisson run of 2 steps": relu_poisson,
    "dp-glmtron": lambda: relu(
        _blocks(4, 1), PublicThreshold(jnp.eye(2), jnp.array([0.1, 0.3]), Grid(0.1, 4))
    ),
    "dp-mbglmtron": lambda: relu(_blocks(16, 8, threshold_rows=8), private_threshold(), place=0),
    "dp-mbglmtron, same rows": lambda: relu(
        _blocks(16, 8, release="same-rows"), private_threshold(), far=4
    ),
    "dp-taglmtron": lambda: relu(_blocks(8, 2, release="tree"), place=0, whole_path=True),
    "threshold, histogram": lambda: level_counts("histogram"),
    "threshold, counts": lambda: level_counts("counts"),
    "threshold, sparse vector": sparse_vector,
}
# Attacked as soon as the library has them: name -> the module that would hold it.
PENDING = {"private embedding": "jdp.hypernet"}
