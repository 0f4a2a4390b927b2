"""Which records take part in which step, in batches of static shape.

A sampler is public configuration. `batch(key, step)` runs under `jit`; `host_batch(key, step)` is
its NumPy form, for data read by random access. Both return `capacity` indices and a mask; a padded
row has the valid index 0 and a False mask, and must contribute nothing. `event(z, steps)` is what
the accountant must be told, so that what is drawn and what is accounted for cannot differ.

| sampler | a step sees | accounted as |
| --- | --- | --- |
| `PoissonSampling` | each record independently with probability q | subsampled Gaussian |
| `WithoutReplacement` | a fresh uniform subset of fixed size | subsampled Gaussian, RDP |
| `FixedBatches` | the next batch of a shuffled epoch | no amplification |

Amplification by sampling holds only while the SAMPLE IS SECRET: keep the key, draw it from
operating-system entropy, and publish neither batches nor their sizes. `host_batch` draws other
batches than `batch` (same law, different generator): a run must keep to one of them.
"""

import dataclasses
import math
from typing import ClassVar, TypeAlias

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32
from scipy import stats

from jdp import _check
from jdp._typing import Key

Batch: TypeAlias = tuple[Int32[Array, "capacity"], Bool[Array, "capacity"]]
HostBatch: TypeAlias = tuple[Int32[np.ndarray, "capacity"], Bool[np.ndarray, "capacity"]]

_GRID = 2**32  # rates are multiples of 1 / _GRID: a 32-bit word is compared with a threshold
_SIZE_REMEDY = "It is a public number of records, known without looking at the data."


@dataclasses.dataclass(frozen=True)
class PoissonSampling:
    """Each record takes part in a step independently with probability `sampling_rate`.

    The rate is rounded down to a multiple of 2^-32, which the attribute reports. When more than
    `capacity` records are drawn, a uniformly random subset of `capacity` is kept, and `event`
    charges for it (truncated Poisson sampling, arXiv 2508.15089).

    Attributes:
      num_examples: public number of records, below 2^31.
      sampling_rate: in [2^-32, 1]; batch_size / num_examples for an expected batch size.
      capacity: rows of every batch. By default the least multiple of 8 that overflows with
        probability at most 1e-12 a step, at most num_examples.

    Raises:
      ValueError: an argument is out of range.

    >>> sampler = PoissonSampling(100_000, 16 / 100_000)
    >>> abs(sampler.sampling_rate - 1.6e-4) < 2**-32, sampler.capacity
    (True, 56)
    >>> indices, mask = sampler.batch(jax.random.key(0), 0)
    >>> indices.shape, mask.dtype.name
    ((56,), 'bool')
    """

    num_examples: int
    sampling_rate: float
    capacity: int = dataclasses.field(default=None)  # pyright: ignore
    statement: ClassVar[str] = "Poisson: each record joins each step independently"

    def __post_init__(self):
        """Round the rate down to the grid and choose the capacity."""
        _check_num_examples(self.num_examples)
        remedy = "It is batch_size / num_examples."
        _check.number(
            "sampling_rate", self.sampling_rate, at_least=1 / _GRID, at_most=1, remedy=remedy
        )
        rate = math.floor(self.sampling_rate * _GRID) / _GRID
        object.__setattr__(self, "sampling_rate", rate)
        capacity = self.capacity
        if capacity is None:
            capacity = capacity_for(self.num_examples, rate, 1e-12)
        remedy = "It bounds the rows of a batch; leave it out for a safe choice."
        _check.integer("capacity", capacity, at_least=1, at_most=self.num_examples, remedy=remedy)
        object.__setattr__(self, "capacity", capacity)

    def batch(self, key: Key, step: int | Int32[Array, ""]) -> Batch:
        """Draw the batch of one step; one compilation serves all steps.

        Args:
          key: the run's sampling key, secret and used for nothing else.
          step: number of the step, may be traced.

        Returns:
          Indices into the data and the mask of rows that are real.
        """
        words = _words(key, step, self.num_examples)
        threshold = int(self.sampling_rate * _GRID)
        drawn = jnp.ones(self.num_examples, bool)
        if threshold < _GRID:
            drawn = words[0] < jnp.uint32(threshold)
        if self.capacity < self.num_examples:
            drawn = _smallest(words, drawn, self.capacity)
        return _compact(drawn, self.capacity)

    def host_batch(self, key: Key, step: int) -> HostBatch:
        """Same law as `batch`, in time proportional to the batch: a binomial count, then a subset.

        Args:
          key: the run's sampling key.
          step: number of the step.

        Returns:
          NumPy indices and mask.
        """
        generator = _host_generator(key, step)
        count = min(generator.binomial(self.num_examples, self.sampling_rate), self.capacity)
        return _pad(_host_subset(generator, self.num_examples, count), self.capacity)

    def event(self, noise_multiplier: float, steps: int) -> dpa.DpEvent:
        """The dp-accounting event of `steps` Gaussian releases on these batches."""
        noise_multiplier, steps = _check_event(noise_multiplier, steps)
        if self.capacity == self.num_examples:
            event = dpa.PoissonSampledDpEvent(
                self.sampling_rate, dpa.GaussianDpEvent(noise_multiplier)
            )
        else:
            event = dpa.TruncatedSubsampledGaussianDpEvent(
                self.num_examples, self.sampling_rate, self.capacity, noise_multiplier
            )
        return dpa.SelfComposedDpEvent(event, steps)


@dataclasses.dataclass(frozen=True)
class WithoutReplacement:
    """Each step sees a fresh, uniformly random subset of exactly `batch_size` records.

    dp-accounting bounds it with Renyi divergences under replace-one only (Wang, Balle and
    Kasiviswanathan 2019); Poisson sampling usually costs less.

    Attributes:
      num_examples: public number of records, below 2^31.
      batch_size: rows of every batch, at most num_examples.

    Raises:
      ValueError: an argument is out of range.

    >>> indices, mask = WithoutReplacement(100, 10).batch(jax.random.key(0), 0)
    >>> len(set(indices.tolist())), bool(mask.all())
    (10, True)
    """

    num_examples: int
    batch_size: int
    statement: ClassVar[str] = "without replacement: each step a fresh uniform subset of fixed size"

    def __post_init__(self):
        """Validate."""
        _check_num_examples(self.num_examples)
        _check_batch_size(self.batch_size, self.num_examples)

    @property
    def capacity(self) -> int:
        """Rows of every batch."""
        return self.batch_size

    def batch(self, key: Key, step: int | Int32[Array, ""]) -> Batch:
        """Draw the batch of one step; see `PoissonSampling.batch`."""
        everyone = jnp.ones(self.num_examples, bool)
        words = _words(key, step, self.num_examples)
        return _compact(_smallest(words, everyone, self.batch_size), self.batch_size)

    def host_batch(self, key: Key, step: int) -> HostBatch:
        """Same law as `batch`, in NumPy; see `PoissonSampling.host_batch`."""
        subset = _host_subset(_host_generator(key, step), self.num_examples, self.batch_size)
        return _pad(subset, self.batch_size)

    def event(self, noise_multiplier: float, steps: int) -> dpa.DpEvent:
        """The dp-accounting event of `steps` Gaussian releases on these batches."""
        noise_multiplier, steps = _check_event(noise_multiplier, steps)
        event = dpa.SampledWithoutReplacementDpEvent(
            self.num_examples, self.batch_size, dpa.GaussianDpEvent(noise_multiplier)
        )
        return dpa.SelfComposedDpEvent(event, steps)


@dataclasses.dataclass(frozen=True)
class FixedBatches:
    """Shuffled epochs: every record exactly once an epoch, in batches of `batch_size`.

    The last batch of an epoch is padded. Shuffling is not charged as amplification: an epoch costs
    one Gaussian, because each record is in one of its batches. A run of less than an epoch is a
    partition of the records into disjoint batches. Where the epoch's order is public this still
    holds.

    Attributes:
      num_examples: public number of records, below 2^31.
      batch_size: rows of every batch, at most num_examples.

    Raises:
      ValueError: an argument is out of range.

    >>> sampler = FixedBatches(10, 4)
    >>> sampler.steps_per_epoch, int(sampler.batch(jax.random.key(0), 2)[1].sum())
    (3, 2)
    """

    num_examples: int
    batch_size: int
    statement: ClassVar[str] = "shuffled epochs of fixed batches, accounted without amplification"

    def __post_init__(self):
        """Validate."""
        _check_num_examples(self.num_examples)
        _check_batch_size(self.batch_size, self.num_examples)

    @property
    def capacity(self) -> int:
        """Rows of every batch."""
        return self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every record is seen once."""
        return -(-self.num_examples // self.batch_size)

    def batch(self, key: Key, step: int | Int32[Array, ""]) -> Batch:
        """The batch of one step; see `PoissonSampling.batch`."""
        _check.typed_key("key", key)
        _check.step(step)
        epoch, position = jnp.divmod(step, self.steps_per_epoch)
        order = jax.random.permutation(jax.random.fold_in(key, epoch), self.num_examples)
        rows = position * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        mask = rows < self.num_examples
        indices = order.astype(jnp.int32)[jnp.where(mask, rows, 0)]
        return jnp.where(mask, indices, 0), mask

    def host_batch(self, key: Key, step: int) -> HostBatch:
        """Same law as `batch`, in NumPy; shuffles the whole epoch at every call."""
        step = _check.step(step)
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _host_generator(key, epoch).permutation(self.num_examples)
        start = position * self.batch_size
        return _pad(order[start : start + self.batch_size], self.batch_size)

    def event(self, noise_multiplier: float, steps: int) -> dpa.DpEvent:
        """The dp-accounting event of `steps` Gaussian releases: one Gaussian an epoch begun."""
        noise_multiplier, steps = _check_event(noise_multiplier, steps)
        return dpa.SelfComposedDpEvent(
            dpa.GaussianDpEvent(noise_multiplier), -(-steps // self.steps_per_epoch)
        )


Sampler: TypeAlias = PoissonSampling | WithoutReplacement | FixedBatches


def capacity_for(num_examples: int, sampling_rate: float, overflow_probability: float) -> int:
    """The least multiple of 8 that a Poisson batch exceeds with at most the given probability.

    Args:
      num_examples: public number of records.
      sampling_rate: in (0, 1].
      overflow_probability: allowed for one step.

    Returns:
      A number of rows, at most num_examples.

    >>> capacity_for(60_000, 1 / 60, 1e-9)
    1200
    """
    _check_num_examples(num_examples)
    remedy = "It is batch_size / num_examples."
    _check.number("sampling_rate", sampling_rate, above=0, at_most=1, remedy=remedy)
    remedy = "It is that of one step: a small share of delta, over the number of steps."
    name = "overflow_probability"
    _check.number(name, overflow_probability, above=0, below=1, remedy=remedy)
    enough = int(stats.binom.isf(overflow_probability, num_examples, sampling_rate))
    return min(-(-max(enough, 1) // 8) * 8, num_examples)


def _words(key: Key, step, num_examples: int) -> UInt32[Array, "2 n"]:
    """Sixty-four random bits a record, most significant word first."""
    _check.typed_key("key", key)
    _check.step(step)
    return jax.random.bits(jax.random.fold_in(key, step), (2, num_examples), jnp.uint32)


def _smallest(words: UInt32[Array, "2 n"], drawn: Bool[Array, "n"], count: int) -> Bool[Array, "n"]:
    """Keep the `count` drawn records of smallest words, or all where there are no more.

    Given that a record is drawn, its first word is uniform below the threshold, so those kept are a
    uniformly random subset; ties go to the second word. Bit by bit, find the `room`-th smallest
    word: a few passes over the records, much cheaper than a sort.
    """
    kept, tied = jnp.zeros_like(drawn), drawn
    for word in words:
        room = count - jnp.sum(kept)

        def raise_bar(i, bar, word=word, tied=tied, room=room):
            higher = bar | (jnp.uint32(1) << (jnp.uint32(31) - jnp.uint32(i)))
            return jnp.where(jnp.sum(tied & (word < higher)) < room, higher, bar)

        bar = jax.lax.fori_loop(0, 32, raise_bar, jnp.uint32(0))
        kept, tied = kept | (tied & (word < bar)), tied & (word == bar)
    return kept | tied


def _compact(kept: Bool[Array, "n"], capacity: int) -> Batch:
    (indices,) = jnp.nonzero(kept, size=capacity, fill_value=0)
    return indices.astype(jnp.int32), jnp.arange(capacity) < jnp.sum(kept)


def _host_generator(key: Key, step: int) -> np.random.Generator:
    """A generator that depends on every bit of the key, and on the step."""
    _check.typed_key("key", key)
    step = _check.step(step)
    entropy = [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]
    seed = np.random.SeedSequence(entropy, spawn_key=(step,), pool_size=8)
    return np.random.Generator(np.random.Philox(seed))


def _host_subset(generator: np.random.Generator, num_examples: int, size: int) -> np.ndarray:
    return generator.choice(num_examples, size, replace=False, shuffle=False)


def _pad(indices: np.ndarray, capacity: int) -> HostBatch:
    padded = np.zeros(capacity, np.int32)
    padded[: len(indices)] = indices
    return padded, np.arange(capacity) < len(indices)


def _check_num_examples(value: int) -> None:
    _check.integer("num_examples", value, at_least=1, at_most=2**31 - 1, remedy=_SIZE_REMEDY)


def _check_batch_size(value: int, num_examples: int) -> None:
    _check.integer("batch_size", value, at_least=1, at_most=num_examples, remedy=_SIZE_REMEDY)


def _check_event(noise_multiplier: float, steps: int) -> tuple[float, int]:
    z = _check.noise_multiplier(noise_multiplier)
    remedy = "Count optimizer steps as an integer."
    return float(z), _check.integer("steps", steps, at_least=0, remedy=remedy)
