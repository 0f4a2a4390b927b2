r"""Runs in which a record is read at a known number of places: blocks, same rows, trees.

Host code. One pass over disjoint blocks costs ONE Gaussian, at every epsilon: fix two neighbouring
data sets, which differ in a record of one block. Outputs before that block's release have the same
law; the release is a Gaussian mechanism of multiplier z, given those outputs; all later outputs are
functions of released values and of the other records. So a pass costs the largest of its releases
(`one_visit_event`), not their sum, however the iterates in between adapt, and with all of them
published.

Where a record takes part in k releases of a pass (k = 2 when the threshold is taken from the very
rows that give the gradient, k = height of the tree under tree aggregation), each gets multiplier
$z \sqrt k$, so that together they are one Gaussian of multiplier z.
"""

import dataclasses
import math
from typing import ClassVar, Literal, TypeAlias, get_args

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from scipy import special

from jdp import _check, accounting
from jdp._typing import Adjacency, Key
from jdp.accounting import Event
from jdp.planning import TrainingPlan
from jdp.sampling import Batch, FixedBatches, HostBatch
from jdp.shuffling import calibrate_shuffled, shuffled_epsilon

Release: TypeAlias = Literal["blocks", "same-rows", "tree"]

_BUDGET_REMEDY = "It is the privacy budget; values between 0.1 and 10 are usual."
_SIZE_REMEDY = "It is a public number of records, known without looking at the data."


def one_visit_event(*noise_multipliers: float, passes: int = 1) -> Event:
    r"""The event of releases on disjoint parts of the data, e.g. threshold rows and gradient rows.

    $\delta(\varepsilon) = \max_i \delta_{z_i}(\varepsilon)$: one Gaussian of the smallest
    multiplier a pass. So there is nothing to gain from unequal ones.

    Args:
      *noise_multipliers: std / L2 sensitivity of each kind of release.
      passes: how often all of the data are gone through.

    Returns:
      A dp-accounting event, under zero-out or replace-one (the parts are fixed).

    >>> one_visit_event(3.0, 2.0, passes=4)  # as one Gaussian of multiplier 2 / sqrt(4)
    SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=4)
    """
    zs = [float(_check.noise_multiplier(z)) for z in noise_multipliers]
    if not zs:
        _check.fail("noise_multipliers", "at least one number", zs, "Pass one a release.")
    passes = _check.integer("passes", passes, at_least=0, remedy="Count whole passes.")
    return dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(min(zs)), passes)


def pure_event(epsilon: float) -> dpa.GaussianDpEvent:
    r"""A Gaussian that dominates every (epsilon, 0)-DP mechanism, under any adjacency.

    The trade-off function of pure DP is two lines that meet at $p = 1 / (1 + e^\varepsilon)$. The
    Gaussian's is convex, has the same ends, and passes through $(p, p)$ for
    $\mu = -2 \Phi^{-1}(p)$, so that it lies below both lines (Dong, Roth and Su 2022). It is loose
    at a small delta, where it has several times epsilon; what it buys is composition by every
    accountant.

    Args:
      epsilon: of the mechanism, > 0.

    Returns:
      A dp-accounting event.

    >>> round(pure_event(1.0).noise_multiplier, 3)
    0.812
    """
    epsilon = float(_check.number("epsilon", epsilon, above=0, remedy=_BUDGET_REMEDY))
    mu = -2 * float(special.ndtri_exp(special.log_expit(-epsilon)))
    return dpa.GaussianDpEvent(1 / (mu * (1 + 1e-12) + 1e-15))  # margins for rounding


def tree_height(leaves: int) -> int:
    """Nodes of the binary tree over `leaves` steps that one step is in, one a level.

    >>> [tree_height(leaves) for leaves in (1, 2, 3, 4, 1000)]
    [1, 2, 2, 3, 10]
    """
    return _check.integer("leaves", leaves, at_least=1, remedy="Count steps.").bit_length()


def tree_event(node_noise_multiplier: float, leaves: int) -> Event:
    r"""The event of tree aggregation over one pass (DP-TAGLMtron, DP-FTRL).

    A record is in one node a level: `Gaussian(z / sqrt(height))`, whatever the nodes' scales.

    Args:
      node_noise_multiplier: std / L2 sensitivity of each node.
      leaves: steps of the pass.

    Returns:
      A dp-accounting event, under zero-out or replace-one.

    >>> tree_event(3.0, 255).noise_multiplier == 3 / 8**0.5
    True
    """
    z = float(_check.noise_multiplier(node_noise_multiplier, "node_noise_multiplier"))
    return dpa.GaussianDpEvent(z / math.sqrt(tree_height(leaves)))


@dataclasses.dataclass(frozen=True)
class DisjointBlocks(FixedBatches):
    """Passes over shuffled disjoint blocks: rows for thresholds, and rows for gradients.

    A pass has as many blocks of `batch_size` gradient rows as fit, and `threshold_rows` further
    rows before each `threshold_every`-th block; what is left over is not read. No record has two
    roles in a pass, nor two blocks. The order may be public, but for shuffling's amplification.

    Attributes:
      num_examples: public number of records, below 2^31.
      batch_size: gradient rows of a block, and the divisor of their sum.
      threshold_rows: rows of each threshold, 0 where none is taken from private data.
      threshold_every: blocks for which a threshold is kept.
      release: "blocks"; "same-rows", where a threshold is taken from the gradient rows of the
        block that it is first used on; or "tree".

    Raises:
      ValueError: an argument is out of range, or not one block fits.

    >>> sampler = DisjointBlocks(100_000, 18_000, threshold_rows=2_000)
    >>> sampler.steps_per_epoch, sampler.event(2.0, 5).count
    (5, 1)
    """

    threshold_rows: int = 0
    threshold_every: int = 1
    release: Release = "blocks"
    statement: ClassVar[str] = "one visit a pass: each record is in at most one block, in one role"

    def __post_init__(self):
        """Validate."""
        super().__post_init__()
        _check.integer("threshold_rows", self.threshold_rows, at_least=0, remedy=_SIZE_REMEDY)
        remedy = "Count blocks; 1 takes a fresh threshold for each."
        _check.integer("threshold_every", self.threshold_every, at_least=1, remedy=remedy)
        _check.choice("release", self.release, get_args(Release))
        if self.release == "same-rows" and self.threshold_rows:
            remedy = "These thresholds use the gradient rows; leave threshold_rows out."
            _check.fail("threshold_rows", "0 for release='same-rows'", self.threshold_rows, remedy)
        if self.steps_per_epoch < 1:
            expected = f"at most num_examples ({self.num_examples}) together with threshold_rows"
            _check.fail("batch_size", expected, self.batch_size, "Take smaller blocks.")

    @property
    def steps_per_epoch(self) -> int:
        """Blocks of a pass."""
        group = self.threshold_every * self.batch_size + self.threshold_rows
        groups, rest = divmod(self.num_examples, group)
        return groups * self.threshold_every + max(0, rest - self.threshold_rows) // self.batch_size

    @property
    def releases(self) -> int:
        """In how many releases of a pass a record can take part."""
        tree = tree_height(self.steps_per_epoch) if self.release == "tree" else 1
        return 2 if self.release == "same-rows" else tree

    def partition(
        self, key: Key, epoch: int | Int32[Array, ""] = 0
    ) -> tuple[Int32[Array, "k m"], Int32[Array, "t b"]]:
        """The rows of each threshold and of each block of one pass, disjoint."""
        _check.typed_key("key", key)
        _check.step(epoch, name="epoch", remedy="Count passes from 0.")
        order = jnp.arange(self.num_examples, dtype=jnp.int32)
        if self.batch_size < self.num_examples:
            order = jax.random.permutation(jax.random.fold_in(key, epoch), order)
        blocks = self.steps_per_epoch
        split = blocks * self.batch_size
        end = split + -(-blocks // self.threshold_every) * self.threshold_rows
        gradient_rows = order[:split].reshape(blocks, self.batch_size)
        return order[split:end].reshape(-(-blocks // self.threshold_every), -1), gradient_rows

    def batch(self, key: Key, step: int | Int32[Array, ""]) -> Batch:
        """The gradient rows of one step, all real; shuffles the whole pass at every call."""
        _check.typed_key("key", key)
        _check.step(step)
        epoch, position = jnp.divmod(step, self.steps_per_epoch)
        return self.partition(key, epoch)[1][position], jnp.ones(self.batch_size, bool)

    def host_batch(self, key: Key, step: int) -> HostBatch:
        """`batch` as NumPy arrays."""
        indices, mask = self.batch(key, step)
        return np.asarray(indices), np.asarray(mask)


@dataclasses.dataclass(frozen=True)
class PointPlan(TrainingPlan):
    """A plan whose guarantee is ONE point (epsilon, delta), not the curve of its event.

    The event dominates the run, and is looser than the point: it is for composition with others,
    which a `Ledger` does.
    """

    releases: str = ""

    def _curve(self) -> list[dict[str, float]]:
        return [{"epsilon": self.epsilon, "delta": self.delta}]

    def report(self, **facts) -> str:
        """As `TrainingPlan.report`."""
        return super().report(**({"Releases": self.releases} | facts))


def plan_blocks(
    num_examples: int,
    batch_size: int,
    steps: int | None = None,
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    threshold_rows: int = 0,
    threshold_every: int = 1,
    release: Release = "blocks",
    sparse_vector: bool = False,
    shuffling: bool = False,
    adjacency: Adjacency = "zero-out",
) -> TrainingPlan:
    """Plan a run on disjoint blocks: sampler, noise and account that belong together.

    | run | arguments | event |
    | --- | --- | --- |
    | full batches (DP-PGD, dp-gd-glmtron) | batch_size=num_examples, steps=T | T Gaussians |
    | one pass (DP-GLMtron, DP-MBGLMtron) | steps left out | one Gaussian |
    | E passes | steps = E passes of blocks | E Gaussians |
    | tree aggregation (DP-TAGLMtron) | release="tree" | one Gaussian, `height` parts |
    | sparse vector thresholds | sparse_vector=True | the larger of a Gaussian and `pure_event` |

    Args:
      num_examples: public number of records.
      batch_size: gradient rows of a block, and the divisor.
      steps: blocks in all; by default one pass.
      delta: in (0, 1); below 1 / num_examples.
      epsilon: the budget, for which the least noise is found. Give this or `noise_multiplier`.
      noise_multiplier: z of a record's releases in one pass together; 0 for no privacy.
      threshold_rows: as in `DisjointBlocks`.
      threshold_every: as in `DisjointBlocks`.
      release: as in `DisjointBlocks`.
      sparse_vector: thresholds come from the sparse vector technique, which is (epsilon, 0)-DP:
        one pass, needs `epsilon`. The guarantee then is one point, and no curve; in a `Ledger`
        such a run costs several times its epsilon, as `pure_event` does.
      shuffling: use the amplification by shuffling of `jdp.shuffling` where it needs less noise
        than none: one record a block, one pass, no threshold from private rows, replace-one, and
        the order must be SECRET. The guarantee then is one point, and no curve.
      adjacency: "zero-out" or "replace-one".

    Returns:
      A `TrainingPlan` with a `DisjointBlocks` sampler; its epsilon is at most the target.

    Raises:
      ValueError: an argument is out of range, or the run cannot be accounted for.
      TypeError: an argument has the wrong type.

    >>> p = plan_blocks(100_000, 18_000, epsilon=0.5, delta=1e-5, threshold_rows=2_000)
    >>> p.steps, round(p.noise_multiplier, 2), p.spent.accountant
    (5, 7.03, 'exact')
    """
    delta = _check.delta(delta)
    sampler = DisjointBlocks(num_examples, batch_size, threshold_rows, threshold_every, release)
    per_pass = sampler.steps_per_epoch
    steps = per_pass if steps is None else steps
    _check.integer("steps", steps, at_least=1, remedy="Count blocks as an integer.")
    if (epsilon is None) == (noise_multiplier is None):
        given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
        _check.fail("epsilon", "given if and only if noise_multiplier is not", given, "Give one.")
    if epsilon is not None:
        epsilon = float(_check.number("epsilon", epsilon, above=0, remedy=_BUDGET_REMEDY))
    if adjacency not in ("zero-out", "replace-one"):
        remedy = "Blocks of fixed size need a public number of records."
        _check.fail("adjacency", "'zero-out' or 'replace-one' for blocks", adjacency, remedy)
    if release == "tree" and steps > per_pass:
        _check.fail("steps", f"one pass ({per_pass}) for a tree", steps, "Take smaller blocks.")
    _check_point(sampler, steps, epsilon, adjacency, sparse_vector, shuffling)

    event = lambda z: sampler.event(z, steps)  # noqa: E731
    if noise_multiplier is None:
        assert epsilon is not None
        z = accounting.calibrate_event(event, epsilon, delta=delta, adjacency=adjacency)
    else:
        z = accounting.under_adjacency(noise_multiplier, adjacency)
    spent = accounting.privacy_spent(event(float(z)), delta=delta, adjacency=adjacency)
    releases, least = "", math.inf
    if shuffling and epsilon is not None:
        amplified = calibrate_shuffled(epsilon, delta=delta, num_examples=num_examples)
        if amplified is not None and amplified < z:
            z, releases = amplified, "one Gaussian a step, on one record of a secret random order"
            found = shuffled_epsilon(float(z), delta=delta, num_examples=num_examples)
            method = "amplification by shuffling (Feldman, McMillan and Talwar 2021, theorem 3.8)"
            spent = accounting.PrivacySpent(found, delta, adjacency, "shuffling", method)
    if sparse_vector and epsilon is not None:
        method = f"the larger of {spent.method} and the pure epsilon of sparse vector thresholds"
        spent = dataclasses.replace(spent, epsilon=epsilon, method=method, mu=None)
        releases = "ONE Gaussian for a gradient row, sparse vector for a threshold row"
        least = pure_event(epsilon).noise_multiplier
    # A record is in one of the two releases, so the run costs no more than the larger one does.
    parts = (sampler, z, steps, batch_size, event(min(float(z), least)), spent, epsilon)
    return PointPlan(*parts, releases=releases) if releases else TrainingPlan(*parts)


def _check_point(sampler, steps, epsilon, adjacency, sparse_vector, shuffling) -> None:
    """Refuse sparse vector thresholds and shuffling where their conditions do not hold."""
    _check.boolean("sparse_vector", sparse_vector)
    _check.boolean("shuffling", shuffling)
    one_pass = steps <= sampler.steps_per_epoch and sampler.release == "blocks"
    if sparse_vector and not (one_pass and epsilon is not None and sampler.threshold_rows):
        expected = "False unless epsilon and threshold_rows are given, for one pass over blocks"
        remedy = "Leave it out and use the histogram, which composes."
        _check.fail("sparse_vector", expected, sparse_vector, remedy)
    holds = one_pass and sampler.batch_size == 1 and not sampler.threshold_rows
    if shuffling and not (holds and epsilon is not None and adjacency == "replace-one"):
        expected = "False unless epsilon is given, batch_size is 1, no threshold is taken from "
        expected += "private rows, adjacency is 'replace-one', and steps are one pass"
        _check.fail("shuffling", expected, shuffling, "Leave it out.")
