r"""What a vote of teachers costs: the plan of a PATE run, made from public numbers only.

Host code. The noise on the most votes of a query ($z_t$) is charged for EVERY query, answered or
not, for its outcome tells which they are; the noise on the votes ($z_v$) for as many answers as
there may be. So the event does not depend on the data; see `jdp.pate` for the sensitivities.
"""

import dataclasses
import math
from typing import Any

import dp_accounting as dpa

from jdp import _check, accounting
from jdp._typing import Adjacency
from jdp.accounting import Event
from jdp.one_visit import DisjointBlocks
from jdp.planning import TrainingPlan

ADJACENCY: Adjacency = "replace-one"
_COUNT = "Count public examples; the number must not depend on private data."
_MECHANISM = "PATE: noisy plurality of teachers on disjoint records (GNMax, Papernot et al. 2018)"


def votes_event(
    vote_noise_multiplier: float,
    answers: int,
    threshold_noise_multiplier: float | None = None,
    queries: int = 0,
) -> Event:
    r"""The event of PATE, whatever the votes are: one Gaussian a query, and one more an answer.

    Args:
      vote_noise_multiplier: $z_v$, std over $\sqrt 2$ (the sigma_2 of Papernot 2018 is the std).
      answers: A, the most answers that are given.
      threshold_noise_multiplier: $z_t$, std over 1 (their sigma_1).
      queries: Q, how often the most votes are compared with a threshold; 0 for none.

    Returns:
      A dp-accounting event, under replace-one in `jdp.accounting`'s convention.

    >>> event = votes_event(40 / 2**0.5, 286, 150.0, 683)
    >>> round(accounting.privacy_spent(event, delta=1e-5, adjacency="replace-one").epsilon, 2)
    2.55
    """
    z_votes = float(_check.noise_multiplier(vote_noise_multiplier, "vote_noise_multiplier"))
    answers = _check.integer("answers", answers, at_least=0, remedy=_COUNT)
    queries = _check.integer("queries", queries, at_least=0, remedy=_COUNT)
    votes = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(z_votes), answers)
    if queries == 0:
        return votes
    name = "threshold_noise_multiplier"
    z_threshold = float(_check.noise_multiplier(threshold_noise_multiplier, name))
    thresholds = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(z_threshold), queries)
    return dpa.ComposedDpEvent([thresholds, votes])


@dataclasses.dataclass(frozen=True)
class VotePlan(TrainingPlan):
    """What `plan_votes` returns: `steps` is the number of teachers, `sampler` their shards.

    `noise_multiplier` is that of the ONE Gaussian which all releases together amount to.

    Attributes:
      queries: public examples that are asked about.
      answers: the most of them that get a label.
      threshold: votes that a class needs, up to noise; None where every query is answered.
      threshold_share: of the budget (of $1/z^2$), spent on finding out which queries pass it.
    """

    queries: int = dataclasses.field(kw_only=True)
    answers: int = dataclasses.field(kw_only=True)
    threshold: float | None = dataclasses.field(kw_only=True)
    threshold_share: float = dataclasses.field(kw_only=True)

    @property
    def teachers(self) -> int:
        """How many teachers there are, each with a shard of `batch_size` records."""
        return self.steps

    @property
    def vote_std(self) -> float:
        """Standard deviation of the noise on the votes for each class of an answered query."""
        z = float(self.noise_multiplier) / math.sqrt(1 - self.threshold_share)
        return z * math.sqrt(2 * self.answers)

    @property
    def threshold_std(self) -> float | None:
        """Standard deviation of the noise on the most votes of each query."""
        if self.threshold is None:
            return None
        return float(self.noise_multiplier) * math.sqrt(self.queries / self.threshold_share)

    def to_dict(self, **facts: Any) -> dict[str, Any]:
        """As `TrainingPlan.to_dict`, with the numbers of the vote."""
        votes = {name: getattr(self, name) for name in ("teachers", "queries", "answers")}
        votes |= {"vote_std": self.vote_std, "threshold": self.threshold}
        votes |= {"threshold_std": self.threshold_std, "mechanism": _MECHANISM}
        return super().to_dict(**(votes | facts))

    def report(self, **facts: Any) -> str:
        """As `TrainingPlan.report`."""
        asked = f"of noise std {self.vote_std:.4g} a class"
        if self.threshold is not None:
            asked += (
                f", where noise of std {self.threshold_std:.4g} puts the most votes at or above "
                f"{self.threshold:g}; that noise is charged for all queries"
            )
        rows = {
            "mechanism": _MECHANISM,
            "clip_norms": "none: a teacher has one vote on each query",
            "Releases": f"labels of at most {self.answers} of {self.queries} queries, {asked}",
            "Steps": f"none; {self.teachers} teachers, each trained on its own records alone",
            "Divisor": f"none; {self.batch_size} records a teacher, a public number",
            "Relation": "the same bound holds for zero-out, and for all records of one teacher",
        }
        return super().report(**(rows | facts))


def plan_votes(
    num_examples: int,
    teachers: int,
    queries: int,
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    threshold: float | None = None,
    answers: int | None = None,
    threshold_share: float = 0.1,
) -> VotePlan:
    r"""Plan a vote: shards, noise and account that belong together.

    All of it is one Gaussian of multiplier z, $1/z^2 = Q/z_t^2 + A/z_v^2$, under replace-one, of
    which the threshold gets a share. Exact (Balle and Wang 2018), and independent of the data.

    Args:
      num_examples: public number of private records; the rest of a division by `teachers` is left
        unread.
      teachers: how many, each with `num_examples // teachers` records.
      queries: Q, public examples to ask about, chosen without looking at private data.
      delta: in (0, 1); below 1 / num_examples.
      epsilon: the budget, for which the least noise is found. Give this or `noise_multiplier`.
      noise_multiplier: z of all releases together; 0 for no privacy.
      threshold: votes that a class must have, up to noise, for its query to be answered (the
        confident aggregator). A public number, from 0 to `teachers`. None answers every query.
      answers: A, the most queries that are answered, given if and only if `threshold` is.
      threshold_share: in (0, 1); of $1/z^2$, for the threshold.

    Returns:
      A `VotePlan`; its epsilon is at most the target.

    Raises:
      ValueError: an argument is out of range, or two do not belong together.
      TypeError: an argument has the wrong type.

    >>> plan = plan_votes(60_000, teachers=250, queries=500, epsilon=2.0, delta=1e-5)
    >>> plan.batch_size, round(plan.vote_std, 1), plan.spent.accountant
    (240, 63.0, 'exact')
    """
    delta = _check.delta(delta)
    remedy = "It is a public number of records, known without looking at the data."
    _check.integer("num_examples", num_examples, at_least=1, remedy=remedy)
    remedy = "Each teacher needs a record; about as many records each as there are classes is few."
    _check.integer("teachers", teachers, at_least=1, at_most=num_examples, remedy=remedy)
    _check.integer("queries", queries, at_least=1, remedy=_COUNT)
    if (epsilon is None) == (noise_multiplier is None):
        given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
        _check.fail("epsilon", "given if and only if noise_multiplier is not", given, "Give one.")
    if (threshold is None) != (answers is None):
        given = {"threshold": threshold, "answers": answers}
        remedy = "Without a threshold every query is answered: ask fewer."
        _check.fail("answers", "given if and only if threshold is", given, remedy)
    if threshold is None:
        answers, share = queries, 0.0
    else:
        remedy = "It is a number of votes, public: 0.6 * teachers is a usual start."
        _check.number("threshold", threshold, at_least=0, at_most=teachers, remedy=remedy)
        answers = _check.integer("answers", answers, at_least=1, at_most=queries, remedy=_COUNT)
        remedy = "The rest is for the labels, which need more: 0.1 is usual."
        share = _check.number("threshold_share", threshold_share, above=0, below=1, remedy=remedy)

    def event(z: float) -> Event:
        z_votes = z * math.sqrt(answers / (1 - share))
        if threshold is None:
            return votes_event(z_votes, answers)
        return votes_event(z_votes, answers, z * math.sqrt(queries / share), queries)

    if noise_multiplier is None:
        assert epsilon is not None
        z = accounting.calibrate_event(event, epsilon, delta=delta, adjacency=ADJACENCY)
    else:
        z = accounting.under_adjacency(noise_multiplier, ADJACENCY)
    size = num_examples // teachers
    spent = accounting.privacy_spent(event(float(z)), delta=delta, adjacency=ADJACENCY)
    rest = {"queries": queries, "answers": answers, "threshold": threshold}
    return VotePlan(
        DisjointBlocks(num_examples, size),
        z,
        teachers,
        size,
        event(float(z)),
        spent,
        epsilon,
        threshold_share=share,
        **rest,
    )
