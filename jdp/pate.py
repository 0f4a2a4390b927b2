r"""PATE: teachers on disjoint shards of the private records vote on the labels of public examples.

Papernot et al. (2017, 2018). A record is in one shard, so it changes one teacher, and that one's
vote on each query. Only noisy votes leave this module; whatever is then trained on the labelled
public examples (the student) is post-processing.

| release, on one query | L2 sensitivity | noise |
| --- | --- | --- |
| votes for each class, $n_j$ (GNMax) | $\sqrt 2$ | $\sqrt 2\, z_v$ a class |
| most votes, $\max_j n_j$ | 1 | $z_t$ |

The sensitivity of the votes is $\sqrt 2$ under EVERY relation between single records. Also where a
record is taken out or zeroed its teacher still votes, maybe for another class; only a teacher that
falls silent, with all its records, changes the histogram by 1. Hence all plans here are for
replace-one, and hold for zero-out too, and for all the records of one teacher. (A record more would
shift all shards, so there is no add-or-remove: N is public and fixed.)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant
from jaxtyping import Array, Bool, Float, Int
from scipy import special

from jdp import _check
from jdp._typing import Key, PyTree
from jdp.clipping import ClippedSum
from jdp.noise import add_noise
from jdp.vote_plan import ADJACENCY
from jdp.vote_plan import VotePlan as VotePlan
from jdp.vote_plan import plan_votes as plan_votes
from jdp.vote_plan import votes_event as votes_event

_VOTES = "Take them from teacher_votes, for all teachers of the plan, each once."

Train: TypeAlias = Callable[[Key, PyTree], Int[Array, " queries"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VoteSum(ClippedSum):
    """Votes by class, one row a TEACHER; its scale covers one that leaves one class for another.

    A zeroed record too leaves a teacher that votes, maybe for another class.
    """

    replace_one_factor: ClassVar[float] = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MostVotes(ClippedSum):
    """The most votes that a class has: one teacher changes it by at most 1, whatever it does."""

    replace_one_factor: ClassVar[float] = 1.0

    def merge(self, other: ClippedSum) -> ClippedSum:
        """Refuse: a maximum over all teachers is no sum of maxima.

        Raises:
          TypeError: always.
        """
        _check.fail("other", "left out", other, "Merge the votes, not their maxima.", TypeError)
        return self


def teacher_votes(
    key: Key,
    train: Train,
    data: PyTree,
    plan: VotePlan,
    teachers: Int[Array, " t"] | None = None,
    *,
    together: int = 1,
) -> Int[Array, "t queries"]:
    """Train teachers, each on its own shard, and return their votes: not private before noise.

    That shards are disjoint is all that the guarantee asks of teachers; `train` sees no more than
    one. Whatever else it uses must be public, or the same whatever the private records are: batch
    statistics, constants for scaling, or hyper-parameters that come from all the records are not.

    Args:
      key: of the partition and of training; need not be secret. Not the key of `noisy_labels`.
      train: `train(key, shard) -> (queries,)` classes as integers, where `shard` is like `data`,
        with `plan.batch_size` rows. May be traced.
      data: a pytree of arrays with the `num_examples` private records on the leading axis.
      plan: of `plan_votes`.
      teachers: which of them, by number from 0, each once; all by default. A teacher's votes do
        not depend on who else is asked.
      together: how many are trained at once, under `vmap`. One by one is faster on CPUs, where a
        convolution under `vmap` is slow; an accelerator has room for tens.

    Returns:
      A row a teacher.

    Raises:
      TypeError: an argument has another type.
      ValueError: `data` is of another size than planned, `train` gives another shape, or numbers of
        teachers are unknown or repeated (traced ones: the unknown abstain, repeated are up to you).

    >>> x = jax.random.normal(jax.random.key(0), (1000, 2))
    >>> public = jnp.array([[1.0, 1.0], [-1.0, 1.0]])
    >>> def train(key, shard):  # the sign of the first coordinate, on average
    ...     return jnp.where(jnp.mean(shard[0] * shard[1]) > 0, public[:, 0] > 0, 0).astype(int)
    >>> plan = plan_votes(1000, teachers=50, queries=2, epsilon=1.0, delta=1e-5)
    >>> votes = teacher_votes(jax.random.key(1), train, (x[:, 0], jnp.sign(x[:, 0])), plan)
    >>> votes.shape, votes.sum(0).tolist()
    ((50, 2), [50, 0])
    """
    _check.typed_key("key", key)
    _check_plan(plan)
    remedy = "1 on a CPU, tens on an accelerator."
    _check.integer("together", together, at_least=1, remedy=remedy)
    if not callable(train):
        remedy = "It trains one teacher on its shard, and classifies the public examples."
        _check.fail("train", "a function (key, shard) -> classes", train, remedy, TypeError)
    n = plan.sampler.num_examples
    for leaf in jax.tree.leaves(data) or [data]:
        if jnp.shape(leaf)[:1] != (n,):
            expected = f"a pytree of arrays with {n} rows, as the plan has it"
            _check.fail("data", expected, leaf, "Plan for the number of records that there are.")
    partition_key, train_key = jax.random.split(key)
    sampler: Any = plan.sampler
    _, shards = sampler.partition(partition_key)

    data = jax.tree.map(jnp.asarray, data)

    def vote(teacher: Int[Array, ""]) -> Int[Array, " queries"]:
        shard = jax.tree.map(lambda leaf: leaf[shards[teacher]], data)
        return train(jax.random.fold_in(train_key, teacher), shard)

    def vote_or_abstain(teacher: Int[Array, ""]) -> Int[Array, " queries"]:
        # Indexing would take a (traced) number that is no teacher's for that of another one.
        known = (teacher >= 0) & (teacher < plan.teachers)
        return jnp.where(known, vote(teacher).astype(jnp.int32), -1)

    asked = np.arange(plan.teachers) if teachers is None else teachers
    integers = hasattr(asked, "dtype") and jnp.issubdtype(asked.dtype, jnp.integer)
    if not integers or jnp.ndim(asked) != 1 or not len(asked):
        remedy = "Pass jnp.arange(start, stop), or leave it out for all."
        _check.fail("teachers", "numbers of teachers, of shape (t,)", teachers, remedy)
    if not isinstance(asked, jax.core.Tracer):
        numbers = np.asarray(asked).tolist()
        known = 0 <= min(numbers) and max(numbers) < plan.teachers
        if not known or len(set(numbers)) < len(numbers):
            expected = f"different numbers from 0 to {plan.teachers - 1}"
            remedy = "A teacher that voted twice would give a record two votes."
            _check.fail("teachers", expected, teachers, remedy)
    teachers = jnp.asarray(asked)
    found = jax.eval_shape(vote, teachers[0])
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if shape != (plan.queries,) or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        expected = f"a function that returns integers of shape ({plan.queries},)"
        _check.fail("train", expected, found, "Return logits.argmax(-1) on the public examples.")
    return jax.lax.map(vote_or_abstain, teachers, batch_size=None if together == 1 else together)


class NoisyLabels(NamedTuple):
    """What `noisy_labels` returns; all of it is private.

    Attributes:
      labels: (queries,) classes; -1 where there is no answer.
      answered: (queries,) whether there is one.
    """

    labels: Int[Array, " queries"]
    answered: Bool[Array, " queries"]


def noisy_labels(
    key: Key, votes: Int[Array, "teachers queries"], plan: VotePlan, *, num_classes: int
) -> NoisyLabels:
    r"""Label public examples by noisy plurality: GNMax, and the confident aggregator around it.

    $\arg\max_j (n_j + \sqrt 2\, z_v N(0, 1))$; with a threshold $\tau$ only for the first A queries
    of those where $\max_j n_j + z_t N(0, 1) \ge \tau$ (Papernot et al. 2018, Algorithm 1).

    **Guarantee.** `plan.epsilon` at `plan.delta` for any one record, zeroed or replaced, or all
    records of one teacher. One teacher changes each $n_j$ histogram by at most $\sqrt 2$, and each
    maximum by at most 1. All Q maxima are released first, each with its own noise; A histograms,
    which those noisy maxima and nothing else select, after that. So there are Q + A Gaussians whose
    multipliers are fixed in advance, however many queries pass. Pure; may be jitted.

    Args:
      key: one typed PRNG key, secret and used for nothing else.
      votes: classes from 0 to num_classes - 1; anything else is an abstention.
      plan: of `plan_votes`.
      num_classes: K, a public number.

    Returns:
      Labels, and which queries have one.

    Raises:
      TypeError: an argument has another type.
      ValueError: the shape of `votes` is not that of the plan.

    >>> plan = plan_votes(3000, teachers=300, queries=3, epsilon=1.0, delta=1e-5)
    >>> votes = jnp.tile(jnp.array([2, 0, 1]), (300, 1))
    >>> print(noisy_labels(jax.random.key(0), votes, plan, num_classes=3).labels)
    [2 0 1]
    """
    _check.typed_key("key", key)
    votes = _checked(votes, plan)
    threshold_key, vote_key = jax.random.split(key)
    z, share = plan.noise_multiplier, plan.threshold_share
    slots = jnp.arange(plan.queries)
    if plan.threshold is not None:
        most = most_votes(votes, num_classes)
        most = add_noise(threshold_key, most, z / math.sqrt(share), adjacency=ADJACENCY)
        (slots,) = jnp.nonzero(most >= plan.threshold, size=plan.answers, fill_value=plan.queries)
    chosen = votes.at[:, slots].get(mode="fill", fill_value=-1)  # nobody votes in an unused slot
    total = vote_sum(chosen, num_classes)
    noised = add_noise(vote_key, total, z / math.sqrt(1 - share), adjacency=ADJACENCY)
    labels = jnp.full(plan.queries, -1, jnp.int32)
    labels = labels.at[slots].set(jnp.argmax(noised, axis=1).astype(jnp.int32), mode="drop")
    return NoisyLabels(labels, labels >= 0)


def vote_sum(votes: Int[Array, "teachers queries"], num_classes: int) -> VoteSum:
    """Votes by query and class, not yet private: exact sums of zeros and ones.

    Q histograms, in each of which one teacher may leave one class for another: noise scale
    sqrt(2 Q), under every relation between records.
    """
    counts = _counts(_integers(votes), num_classes)
    return VoteSum((counts,), (math.sqrt(2 * votes.shape[1]),), rows=votes.shape[0])


def most_votes(votes: Int[Array, "teachers queries"], num_classes: int) -> MostVotes:
    """The most votes that a class has on each query, not yet private: noise scale sqrt(Q)."""
    most = jnp.max(_counts(_integers(votes), num_classes), axis=1)
    return MostVotes((most,), (math.sqrt(votes.shape[1]),), rows=votes.shape[0])


def _counts(votes: Int[Array, "t q"], num_classes: int) -> Float[Array, "q k"]:
    remedy = "It is a public number of classes."
    _check.integer("num_classes", num_classes, at_least=2, at_most=2**31 - 1, remedy=remedy)
    votes = jnp.asarray(votes).astype(jnp.int32)  # in a narrow type large classes would wrap
    classes = jnp.arange(num_classes, dtype=jnp.int32)
    return jnp.sum(votes[:, :, None] == classes[None, None, :], axis=0, dtype=jnp.float32)


def _checked(votes: Any, plan: VotePlan) -> Int[Array, "t q"]:
    """The votes as int32, if they are what was planned."""
    _check_plan(plan)
    shape = (plan.teachers, plan.queries)
    if _integers(votes).shape != shape:
        _check.fail("votes", f"of shape {shape}, as the plan has it", votes, _VOTES)
    return jnp.asarray(votes).astype(jnp.int32)


def _integers(votes: Any) -> Any:
    if not hasattr(votes, "dtype") or not jnp.issubdtype(votes.dtype, jnp.integer):
        _check.fail("votes", "an array of integers", votes, _VOTES, TypeError)
    if votes.ndim != 2 or not votes.size:
        _check.fail("votes", "a matrix with a row a teacher, a column a query", votes, _VOTES)
    return votes


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, VotePlan):
        remedy = "Make it with jdp.pate.plan_votes."
        _check.fail("plan", "a VotePlan", _check.Words(type(plan).__name__), remedy, TypeError)


def unprotected_epsilon(
    votes: Int[Array, "teachers queries"], plan: VotePlan, *, num_classes: int
) -> float:
    r"""Epsilon of these very votes, which is smaller where teachers agree. NOT private.

    It depends on the votes, so publishing it leaks; nor may noise, or whether to release anything,
    be chosen by it. `plan.epsilon` is the guarantee. Papernot et al. (2018): theorem 6, with q
    bounded by proposition 7 and the two orders of proposition 10, for the vote on each query; the
    threshold at its data-independent cost. The A costliest queries are charged, order by order,
    since which are answered is random. Bounds the divergence of the outcome on these records from
    that on any neighbour, not the reverse.

    Args:
      votes: as in `noisy_labels`.
      plan: of `plan_votes`.
      num_classes: K.

    Returns:
      Epsilon at `plan.delta`, at most `plan.epsilon`. Host code; not under `jit`.

    Raises:
      TypeError: an argument has another type, or the votes are traced.
      ValueError: the shape of `votes` is not that of the plan.

    >>> plan = plan_votes(3000, teachers=300, queries=100, noise_multiplier=2.0, delta=1e-5)
    >>> votes = jnp.zeros((300, 100), int)  # unanimous
    >>> round(plan.epsilon, 2), round(unprotected_epsilon(votes, plan, num_classes=10), 2)
    (1.99, 0.0)
    """
    if isinstance(votes, jax.core.Tracer):
        remedy = "Call it outside of jit, vmap and grad: it computes on the host."
        _check.fail("votes", "an array that is not traced", votes, remedy, TypeError)
    counts = np.asarray(_counts(_checked(votes, plan), num_classes), np.float64)
    orders: Any = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    if plan.noise_multiplier == 0:
        return math.inf
    costs = np.stack([gnmax_divergences(row, plan.vote_std, orders) for row in counts])
    total = np.sort(costs, axis=0)[-plan.answers :].sum(axis=0)
    if plan.threshold_std is not None:
        total += plan.queries * orders / (2 * plan.threshold_std**2)
    convert: Any = rdp_privacy_accountant.compute_epsilon
    return min(float(convert(orders, total, plan.delta)[0]), plan.epsilon)


def gnmax_divergences(counts: np.ndarray, std: float, orders: np.ndarray) -> np.ndarray:
    """Renyi divergences of GNMax with these votes from that of any neighbour; see the caller.

    Args:
      counts: (classes,) votes.
      std: of the noise on each count.
      orders: above 1.
    """
    independent = orders / std**2  # of a Gaussian with sensitivity sqrt(2)
    gaps = counts.max() - np.delete(counts, counts.argmax())
    union: Any = special.logsumexp(special.log_ndtr(-gaps / (math.sqrt(2) * std)))
    log_q = min(float(union), math.log1p(-1 / len(counts)))
    mu_2 = std * math.sqrt(-log_q)
    mu_1 = mu_2 + 1
    if not 1 < mu_2 < math.inf:
        return independent
    epsilon_1, epsilon_2 = mu_1 / std**2, mu_2 / std**2
    most = (mu_2 - 1) * epsilon_2 - mu_2 * math.log(mu_1 / (mu_1 - 1) * mu_2 / (mu_2 - 1))
    if log_q > most or log_q + epsilon_2 >= 0:
        return independent
    log_rest = math.log1p(-math.exp(log_q))
    log_a = log_rest - math.log(-math.expm1((log_q + epsilon_2) * (mu_2 - 1) / mu_2))
    log_b = epsilon_1 - log_q / (mu_1 - 1)
    steps = orders - 1
    found = np.logaddexp(log_rest + steps * log_a, log_q + steps * log_b) / steps
    return np.where(orders <= mu_1, np.minimum(np.maximum(found, 0), independent), independent)
