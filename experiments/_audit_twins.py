"""The broken twins of `tests/twins.py`, as `experiments.audit` attacks them.

The twins are those of the test suite, read from the checkout, so that the same code is caught by a
contract there and exposed by an attack here. Neighbours are chosen for each.
"""

import functools
import importlib
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdp
from experiments._audit_frame import ALWAYS, HUGE, Case, Claim, flat, gaussian, raw
from experiments._run import UsageError
from jdp import pate
from jdp.relu_regression import Descent, FixedThreshold, Grid, PrivateThreshold, fit, plan_blocks

TESTS = pathlib.Path(__file__).parents[1] / "tests"
ROWS, SIZE = 6, 27  # as tests/strategies.py has them

# Broken, but no threat to privacy: contract tests alone can catch these.
HARMLESS = {
    "scales add in merge": "too much noise",
    "noise in merge": "noise is added twice, and half of the data is lost",
    "divided by the padded size": "a public constant factor",
    "noise of the sum on the mean": "the sum is released, with the noise of a sum",
}
PENDING: tuple[str, ...] = ()  # not attacked yet


@functools.cache
def _tests(module: str) -> Any:
    if not TESTS.is_dir():
        raise UsageError(
            f"there is no {TESTS}; the part `twins` needs a checkout of the repository"
        )
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"the part `twins` needs the extra dev ({error})") from error


def twin(name: str) -> Any:
    """The twin of that name, as the tests have it."""
    return _tests("twins").TWINS[name][1]


def normal(seed: int, rows: int = ROWS) -> np.ndarray:
    """Ordinary rows."""
    return np.random.default_rng(seed).normal(size=(rows, SIZE)).astype(np.float32)


def batch(canary: Any, others: np.ndarray | None = None) -> np.ndarray:
    """Others, canary last."""
    others = normal(5, ROWS - 1) if others is None else others
    return np.concatenate([others, np.broadcast_to(np.float32(canary), (1, SIZE))])


def clip(
    name: str,
    present: np.ndarray,
    absent: np.ndarray | None = None,
    *,
    masks: tuple[Any, Any] | None = None,
    adjacency: Any = "zero-out",
    publish: Callable[[Any], Any] = raw,
    neighbours: str = "a record, or none",
) -> Case:
    """A broken clipper, noised soundly; without `absent`, the last row is masked instead."""
    if masks is None:
        masks = (np.ones(ROWS, bool), np.arange(ROWS) < (ROWS - 1 if absent is None else ROWS))
    absent = present if absent is None else absent
    clipper, tree_of = twin(name).make(1.0), _tests("strategies").tree_of

    def release(key, is_present):
        matrix = jnp.where(is_present, present, absent)
        clipped = clipper(tree_of(matrix), jnp.where(is_present, *map(jnp.asarray, masks)))
        return flat(jdp.add_noise(key, publish(clipped), 1.0, adjacency=adjacency)), ALWAYS

    return Case(release, gaussian(1.0, adjacency), neighbours)


def as_is(clipped: Any) -> Any:
    """Published as the mechanism publishes it."""
    return clipped


PADDED = (np.arange(ROWS) < 1, np.arange(ROWS) < 1)
_PADDING = "record 0 and its copies in masked rows, or zeros"


def padded(name: str, row: np.ndarray) -> Case:
    """Masked rows hold record 0 again, as `plan.batch` pads."""
    matrix = np.tile(np.float32(row), (ROWS, 1))
    options: Any = {"masks": PADDED, "neighbours": _PADDING}
    return clip(name, matrix, np.zeros_like(matrix), **options)


def preconditioned_by_private_gradients() -> Case:
    """Without the canary, coordinates 0 and 1 weigh the same; with it, coordinate 0 nothing."""
    others = np.tile(np.float32(np.eye(SIZE)[0] + np.eye(SIZE)[1]), (ROWS - 1, 1))
    return clip("preconditioned by private gradients", batch(-HUGE * np.eye(SIZE)[0], others))


def norm_in_bfloat16() -> Case:
    """A norm just above 1 that rounds to 1: 0.4% too much, seen at mu 3 in millions of draws."""
    z, clipper = 1 / 3, twin("norm in bfloat16").make(1.0)
    row = jnp.array([[1 + 2**-8 - 2**-16]])

    def release(key, present):
        return jdp.add_noise(key, clipper({"w": row}, present[None]), z)["w"], ALWAYS

    return Case(release, gaussian(3.0), score=lambda draws: draws[:, 0], draws=96)


# Doors --------------------------------------------------------------------------------------------


def door(
    name: str,
    canary: np.ndarray,
    *,
    adjacency: Any = None,
    others: np.ndarray | None = None,
    masks: Any = None,
    steps: int = 1,
    opposite: bool = False,
) -> Case:
    """A broken door on the same batch; `masks(present)` gives the mask of each step."""
    made, strategies = twin(name).make, _tests("strategies")
    matrix = batch(canary, others)
    everyone = np.ones(ROWS, bool)

    def mask_of(present):
        return [jnp.asarray(everyone).at[-1].set(present | opposite)] * steps

    def release(key, present):
        tx = made(key=key, noise_multiplier=1.0, adjacency=adjacency)
        rows = jnp.asarray(matrix)
        if opposite:
            rows = rows.at[-1].multiply(jnp.where(present, 1.0, -1.0))
        state, found = tx.init(strategies.PARAMS), []
        for mask in (masks or mask_of)(present):
            update, state = tx.update(strategies.tree_of(rows), state, strategies.PARAMS, mask=mask)
            found.append(flat(update))
        return jnp.concatenate(found), ALWAYS

    claim = gaussian(math.sqrt(steps), adjacency or "zero-out")
    return Case(release, claim, "a record, or its opposite" if opposite else "a record, or none")


def _first_step_only(present: jax.Array) -> list[jax.Array]:
    """The canary may be in the first batch; the second is one of others."""
    others = jnp.arange(ROWS) < ROWS - 1
    return [others.at[-1].set(present), others]


def _alone_in_the_first_step(present: jax.Array) -> list[jax.Array]:
    nobody = jnp.zeros(ROWS, bool)
    return [nobody.at[-1].set(present), nobody]


def along(*coordinates: int, size: float = HUGE) -> np.ndarray:
    """A gradient with equal entries there."""
    return size * np.eye(SIZE, dtype=np.float32)[list(coordinates)].sum(axis=0)


# Votes --------------------------------------------------------------------------------------------

_VOTES = "all records of a teacher, which then votes otherwise"


def votes(name: str) -> Case:
    """Everybody's last teacher moves on all five queries; rows are read as ballots."""
    present, absent = normal(5), normal(5)
    choice = np.arange(SIZE - 1) % 4
    present[-1, :-1], absent[-1, :-1] = 1.0 * (choice == 0), 1.0 * (choice == 1)
    options: Any = {"adjacency": "replace-one", "publish": as_is, "neighbours": _VOTES}
    return clip(name, present, absent, **options)


def labels(name: str, most: tuple[int, int], **options: Any) -> Case:
    """One query, answered by noisy votes; a teacher more on one side or on the other."""
    plan = pate.plan_votes(21, 21, 1, noise_multiplier=1.0, delta=1e-5, **options)
    vote = twin(name)
    ayes, noes = most
    others = jnp.arange(20)
    split = jnp.where(others < ayes, 0, jnp.where(others < ayes + noes, 1, -1))

    def release(key, present):
        ballots = jnp.append(split, jnp.where(present, 0, 1))[:, None]
        found = vote(key, ballots, plan, num_classes=2)
        return flat((found.answered, found.labels)), ALWAYS

    return Case(release, Claim(plan.event, plan.adjacency), _VOTES)


def charged(name: str, queries: int, answers: int) -> Case:
    """Noisy maxima and votes with the plan's noise, for as many queries as were really asked."""
    plan = twin(name)(queries, answers, 1.5)

    def release(key, present):
        moved = jnp.where(present, 1.0, 0.0)
        keys = jax.random.split(key)
        most = moved + plan.threshold_std * jax.random.normal(keys[0], (queries,))
        counts = jnp.array([moved, 1 - moved])[None] * jnp.ones((answers, 1))
        return jnp.append(
            most, counts + plan.vote_std * jax.random.normal(keys[1], counts.shape)
        ), (ALWAYS)

    return Case(release, gaussian(1 / float(plan.noise_multiplier), "replace-one"), _VOTES)


# Mean embeddings ----------------------------------------------------------------------------------


def embedding(
    name: str, canary: np.ndarray, others: np.ndarray | None = None, *, adjacency: Any = "zero-out"
) -> Case:
    """A broken mean of embeddings; the canary is a null record instead, or its opposite."""
    mean, replace_one = twin(name), adjacency == "replace-one"
    matrix, everyone = batch(canary, others), np.ones(ROWS, bool)

    def release(key, present):
        factor = jnp.where(present, 1.0, -1.0 if replace_one else 0.0)
        records = jnp.asarray(matrix).at[-1].multiply(factor)
        mask = jnp.asarray(everyone).at[-1].set(present | replace_one)
        return mean(key, records, mask, 1.0, adjacency), ALWAYS

    neighbours = "a record, or its opposite" if replace_one else "a record, or a null record"
    return Case(release, gaussian(1.0, adjacency), neighbours)


# ReLU regression ----------------------------------------------------------------------------------


def relu(name: str, plan: Any, threshold: Any, *, label: float = 1e6, far: int = 0) -> Case:
    """A broken `relu_regression.fit`: all steps in units of the threshold, and all thresholds.

    The canary is in the first block; so are `far` of the 2 * `far` others whose residuals are above
    all levels (the order is public).
    """
    n, b = plan.sampler.num_examples, plan.batch_size
    breaks = _tests("relu_twins").RELU_TWINS[name]
    pytest = importlib.import_module("pytest")
    labels_ = jnp.zeros(n)

    def release(key, present):
        with pytest.MonkeyPatch.context() as patch:
            breaks(patch)
            x = jnp.zeros((n, 2)).at[-1, 0].set(jnp.where(present, 1.0, 0.0))
            y = labels_.at[: 2 * far].set(1e6).at[-1].set(jnp.where(present, label, 0.0))
            descent = Descent(1.0, 1.0)
            found = fit(key, x, y, plan, threshold=threshold, descent=descent)
            sampling_key = jax.random.split(key)[1]
            blocks = plan.sampler.partition(sampling_key, 0)[1]
        steps = jnp.diff(found.path, axis=0, prepend=jnp.zeros((1, 2))) * b
        steps = steps / found.thresholds[:, None]
        values = jnp.append(steps.ravel(), jnp.log2(found.thresholds))
        near = jnp.sum(blocks[0] < 2 * far) == far
        return values, jnp.any(blocks[0] == n - 1) & near

    return Case(release, Claim(plan.event, plan.adjacency), draws=4 if far else 1)


def _blocks(*sizes: int, **options: Any) -> Any:
    return plan_blocks(*sizes, noise_multiplier=1.0, delta=1e-5, **options)


SPAN = functools.cache(lambda: _tests("strategies").span().astype(np.float32))


def _in_and_out() -> np.ndarray:
    inside = SPAN().sum(axis=0)
    outside = normal(9, 1)[0]
    return HUGE * (inside + outside - SPAN().T @ (SPAN() @ outside))


TWINS: dict[str, Callable[[], Case]] = {
    "no clip": lambda: clip("no clip", batch(along(0, size=30.0))),
    "clip after the sum": lambda: clip(
        "clip after the sum", batch(-2 * normal(5, ROWS - 1).sum(axis=0))
    ),
    "each leaf clipped by itself": lambda: clip(
        "each leaf clipped by itself", batch(along(0, 12, 15))
    ),
    "mask dropped": lambda: padded("mask dropped", along(0)),
    "NaN times zero": lambda: clip(
        "NaN times zero", batch(np.full(SIZE, np.nan)), batch(np.zeros(SIZE))
    ),
    "masked NaN times zero": lambda: padded(
        "masked NaN times zero", np.where(np.arange(SIZE) == 0, np.nan, 0)
    ),
    "norm in bfloat16": norm_in_bfloat16,
    "GEP without sqrt 2": lambda: clip("GEP without sqrt 2", batch(_in_and_out())),
    "groups without sqrt G": lambda: clip("groups without sqrt G", batch(along(0, 12, 15))),
    "count not paid for": lambda: clip("count not paid for", batch(along(0))),
    "residual norm by subtraction": lambda: clip(
        "residual norm by subtraction", batch(1e10 * SPAN()[0])
    ),
    "basis from private gradients": lambda: clip(
        "basis from private gradients", batch(along(2)), publish=as_is
    ),
    "sparsified by size": lambda: clip(
        "sparsified by size", batch(along(*range(0, SIZE, 2), size=3.0)), publish=as_is
    ),
    "less noise where sparsified": lambda: clip("less noise where sparsified", batch(along(1))),
    "preconditioned after the clip": lambda: clip(
        "preconditioned after the clip", batch(along(SIZE - 1))
    ),
    "preconditioned by private gradients": preconditioned_by_private_gradients,
    "half the noise": lambda: door("half the noise", along(0)),
    "noise for the mean on the sum": lambda: door("noise for the mean on the sum", along(0)),
    "uniform noise": lambda: door("uniform noise", along(0)),
    "noise on one leaf": lambda: door("noise on one leaf", along(0, 15)),
    "same key for every leaf": lambda: door("same key for every leaf", along(0)),
    "same key at every step": lambda: door(
        "same key at every step", along(0), masks=_first_step_only, steps=2
    ),
    "same key for every run": lambda: door("same key for every run", along(0)),
    "divided by the actual count": lambda: door(
        "divided by the actual count", along(0), others=np.zeros((ROWS - 1, SIZE), np.float32)
    ),
    "empty batches not counted": lambda: door(
        "empty batches not counted", along(0), masks=_alone_in_the_first_step, steps=2
    ),
    "histogram without sqrt 2": lambda: clip(
        "histogram without sqrt 2",
        batch(along(0)),
        batch(0.0),
        adjacency="replace-one",
        publish=as_is,
        neighbours="a residual of 0, or beyond all levels",
    ),
    "counts without sqrt L": lambda: clip("counts without sqrt L", batch(along(0))),
    "features not clipped": lambda: clip("features not clipped", batch(along(0, 26, size=50.0))),
    "votes without sqrt 2": lambda: votes("votes without sqrt 2"),
    "votes as one query": lambda: votes("votes as one query"),
    "labels without sqrt 2": lambda: labels("labels without sqrt 2", (10, 10)),
    "votes charged without sqrt 2": lambda: charged("votes charged without sqrt 2", 1, 1),
    "threshold noise on answered queries only": lambda: labels(
        "threshold noise on answered queries only", (10, 8), threshold=11.0, answers=1
    ),
    "threshold charged for answered queries only": lambda: charged(
        "threshold charged for answered queries only", 40, 1
    ),
    "replace-one without the factor": lambda: door(
        "replace-one without the factor", along(0), adjacency="replace-one", opposite=True
    ),
    "clip after the mean": lambda: embedding(
        "clip after the mean", -2 * normal(5, ROWS - 1).sum(axis=0)
    ),
    "centred by private records": lambda: embedding("centred by private records", along(0)),
    "normalised over the set": lambda: embedding("normalised over the set", along(0)),
    "mean of the records present": lambda: embedding(
        "mean of the records present", along(0), np.tile(-along(0), (ROWS - 1, 1))
    ),
    "mean under the wrong adjacency": lambda: embedding(
        "mean under the wrong adjacency", along(0), adjacency="replace-one"
    ),
    "threshold from gradient rows": lambda: relu(
        "threshold from gradient rows",
        _blocks(48, 24, threshold_rows=24),
        PrivateThreshold(Grid(0.5, 2)),
        far=4,
    ),
    "same block twice": lambda: relu("same block twice", _blocks(8, 4), FixedThreshold(1.0)),
    "sum without clip": lambda: relu(
        "sum without clip", _blocks(4, 4), FixedThreshold(1.0), label=30.0
    ),
    "scale from the data": lambda: relu(
        "scale from the data", _blocks(4, 4), FixedThreshold(1.0), label=30.0
    ),
}
