"""The law of every sampler, and that the event says the same law."""

import dataclasses

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jdp import sampling
from jdp.sampling import FixedBatches, PoissonSampling, WithoutReplacement

N, RATE, STEPS = 40, 0.25, 4000
FORMS = ["jit", "host"]


def draws(sampler, form, steps=STEPS, seed=0):
    """Membership (steps, N) of every record, and the masks."""
    key = jax.random.key(seed)
    if form == "jit":
        one = jax.jit(lambda key, step: sampler.batch(key, step))
        batches = jax.vmap(one, (None, 0))(key, jnp.arange(steps))
        indices, masks = map(np.asarray, batches)
    else:
        indices, masks = map(
            np.stack, zip(*(sampler.host_batch(key, i) for i in range(steps)), strict=True)
        )
    assert indices.dtype == np.int32 and masks.dtype == bool
    assert indices.shape == masks.shape == (steps, sampler.capacity)
    assert np.all(indices[~masks] == 0)
    members = np.zeros((steps, sampler.num_examples), int)
    np.add.at(members, (np.nonzero(masks)[0], indices[masks]), 1)
    assert members.max() <= 1  # no record twice in a batch
    return members


def assert_uniform(members, probability):
    """Every record is a member as often as every other, up to 5 standard errors."""
    error = np.sqrt(probability * (1 - probability) / len(members))
    assert np.abs(members.mean(0) - probability).max() < 5 * error


@pytest.mark.parametrize("form", FORMS)
def test_poisson_law(form):
    sampler = PoissonSampling(N, RATE, capacity=N)
    members = draws(sampler, form)
    assert_uniform(members, RATE)
    correlation = np.corrcoef(members.T) - np.eye(N)
    assert np.abs(correlation).max() < 5 / np.sqrt(STEPS)
    assert abs(np.corrcoef(members[:-1].ravel(), members[1:].ravel())[0, 1]) < 5 / np.sqrt(
        STEPS * N
    )
    counts = np.bincount(members.sum(1), minlength=N + 1)
    expected = STEPS * stats.binom.pmf(np.arange(N + 1), N, RATE)
    usual = expected > 5
    observed = np.append(counts[usual], counts[~usual].sum())
    expected = np.append(expected[usual], expected[~usual].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def first_by_index(words, drawn, count):
    """The broken twin: on overflow it keeps the records of lowest index."""
    del words
    return drawn & (jnp.cumsum(drawn) <= count)


def overflowing_members(form):
    members = draws(PoissonSampling(N, RATE, capacity=6), form)
    assert np.mean(members.sum(1) == 6) > 0.8  # forced overflow
    return members


def kept_probability():
    """P(record kept) = E[min(count, 6)] / N."""
    counts = np.arange(N + 1)
    return np.minimum(counts, 6) @ stats.binom.pmf(counts, N, RATE) / N


@pytest.mark.parametrize("form", FORMS)
def test_overflow_keeps_a_uniform_subset(form):
    members = overflowing_members(form)
    assert_uniform(members, kept_probability())
    full = members[members.sum(1) == 6]
    pairs = full.T @ full / len(full)
    expected = 6 * 5 / (N * (N - 1))  # any two records together
    error = np.sqrt(expected / len(full))
    assert (
        np.abs(pairs - np.diag(np.diag(pairs)))[~np.eye(N, dtype=bool)].max() < expected + 5 * error
    )


def test_overflow_twin_is_caught(monkeypatch):
    monkeypatch.setattr(sampling, "_smallest", first_by_index)
    with pytest.raises(AssertionError):
        assert_uniform(overflowing_members("jit"), kept_probability())


def test_smallest_against_a_sort_with_ties():
    generator = np.random.default_rng(0)
    for high in (2, 5, 2**32):  # 2 and 5: nearly every first word is tied
        words = generator.integers(0, high, (2, 50), dtype=np.uint32)
        words[1] = generator.permutation(50)
        drawn = generator.random(50) < 0.6
        for count in (1, 7, int(drawn.sum()), 50):
            kept = np.asarray(sampling._smallest(jnp.asarray(words), jnp.asarray(drawn), count))
            order = [i for i in np.lexsort((words[1], words[0])) if drawn[i]][:count]
            assert set(np.flatnonzero(kept)) == set(order)


def test_rate_is_rounded_down_to_the_grid():
    for rate in (16 / 100_000, 1 / 3, 2**-32, 1.0):
        sampler = PoissonSampling(100_000, rate)
        assert rate - 2**-32 < sampler.sampling_rate <= rate
        assert (sampler.sampling_rate * 2**32).is_integer()
    event = PoissonSampling(100_000, 1 / 3, capacity=100_000).event(1.0, 7)
    assert event.count == 7 and event.event.sampling_probability < 1 / 3


@pytest.mark.parametrize("form", FORMS)
def test_rate_one_takes_everyone(form):
    assert draws(PoissonSampling(N, 1.0), form, steps=3).sum() == 3 * N


@pytest.mark.parametrize("form", FORMS)
def test_empty_batch_is_a_batch(form):
    assert draws(PoissonSampling(N, 2**-32, capacity=8), form, steps=3).sum() == 0


def test_one_trace_serves_all_batches():
    traces = []
    for sampler in (PoissonSampling(N, RATE), WithoutReplacement(N, 8), FixedBatches(N, 8)):

        @jax.jit
        def batch(key, step, sampler=sampler):
            traces.append(sampler)
            return sampler.batch(key, step)

        for step in range(2):
            jitted = batch(jax.random.key(1), step)
            eager = sampler.batch(jax.random.key(1), step)
            for a, b in zip(jitted, eager, strict=True):
                assert np.array_equal(a, b)
    assert len(traces) == 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampler", [PoissonSampling(N, RATE), WithoutReplacement(N, 8)])
def test_key_and_step_decide_and_differ(sampler, form):
    first = draws(sampler, form, steps=30)
    assert np.array_equal(first, draws(sampler, form, steps=30))
    assert not np.array_equal(first, draws(sampler, form, steps=30, seed=1))
    assert len(np.unique(first, axis=0)) > 25


def test_host_form_uses_every_bit_of_the_key():
    sampler = PoissonSampling(1000, 0.5)
    data = np.array([1, 2], np.uint32)
    batches = set()
    for word in range(2):
        for bit in range(32):
            changed = data.copy()
            changed[word] ^= np.uint32(1) << np.uint32(bit)
            key = jax.random.wrap_key_data(jnp.asarray(changed))
            batches.add(sampler.host_batch(key, 0)[0].tobytes())
    assert len(batches) == 64


def test_host_form_of_a_million_records_costs_only_the_batch():
    sampler = PoissonSampling(5_000_000, 1e-4)
    indices, mask = sampler.host_batch(jax.random.key(0), 0)
    assert len(indices) == sampler.capacity < 700
    assert 350 < mask.sum() < 650 and indices.max() > 4_000_000


@pytest.mark.parametrize("form", FORMS)
def test_without_replacement_law(form):
    members = draws(WithoutReplacement(N, 10), form)
    assert np.all(members.sum(1) == 10)
    assert_uniform(members, 0.25)


@pytest.mark.parametrize("form", FORMS)
def test_fixed_batches_see_everyone_once_an_epoch(form):
    sampler = FixedBatches(N, 7)
    members = draws(sampler, form, steps=4 * 6).reshape(4, 6, N)
    assert sampler.steps_per_epoch == 6
    assert np.all(members.sum(1) == 1)
    assert np.all(members.sum(2) == [7, 7, 7, 7, 7, 5])
    assert not np.array_equal(members[0], members[1])


def test_default_capacity_overflows_as_rarely_as_it_says():
    for num_examples, rate in ((60_000, 1 / 60), (3500, 64 / 3500), (100_000, 1.6e-4)):
        for allowed in (1e-6, 1e-12):
            capacity = sampling.capacity_for(num_examples, rate, allowed)
            assert capacity % 8 == 0
            assert stats.binom.sf(capacity, num_examples, rate) <= allowed
            assert stats.binom.sf(capacity - 9, num_examples, rate) > allowed
    assert sampling.capacity_for(30, 0.9, 1e-12) == 30


def test_events_say_what_is_drawn():
    poisson = PoissonSampling(N, RATE, capacity=N).event(1.5, 9)
    assert poisson == dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(RATE, dpa.GaussianDpEvent(1.5)), 9
    )
    truncated = PoissonSampling(N, RATE, capacity=6).event(1.5, 9)
    assert truncated.event == dpa.TruncatedSubsampledGaussianDpEvent(N, RATE, 6, 1.5)
    fixed = WithoutReplacement(N, 8).event(1.5, 9)
    assert fixed.event == dpa.SampledWithoutReplacementDpEvent(N, 8, dpa.GaussianDpEvent(1.5))
    for steps, epochs in ((1, 1), (6, 1), (7, 2), (12, 2)):
        epoch = FixedBatches(N, 7).event(1.5, steps)
        assert epoch == dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(1.5), epochs)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PoissonSampling(0, 0.5), "num_examples"),
        (lambda: PoissonSampling(2**31, 0.5), "num_examples"),
        (lambda: PoissonSampling(10, 0.0), "sampling_rate"),
        (lambda: PoissonSampling(10, 1.5), "sampling_rate"),
        (lambda: PoissonSampling(10, 2**-33), "sampling_rate"),
        (lambda: PoissonSampling(10, 0.5, capacity=0), "capacity"),
        (lambda: PoissonSampling(10, 0.5, capacity=11), "capacity"),
        (lambda: WithoutReplacement(10, 11), "batch_size"),
        (lambda: FixedBatches(10, 0), "batch_size"),
        (lambda: PoissonSampling(10, 0.5).host_batch(jax.random.key(0), -1), "step"),
    ],
)
def test_bad_input_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        make()


@pytest.mark.parametrize("form", ["batch", "host_batch"])
@pytest.mark.parametrize("key", [0, np.zeros(2, np.uint32), None])
def test_untyped_keys_are_refused(form, key):
    for sampler in (PoissonSampling(N, RATE), WithoutReplacement(N, 8), FixedBatches(N, 8)):
        with pytest.raises(TypeError, match="`key` must be"):
            getattr(sampler, form)(key, 0)


def test_samplers_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PoissonSampling(N, RATE).capacity = 3  # pyright: ignore


SAMPLERS = [PoissonSampling(N, RATE), WithoutReplacement(N, 8), FixedBatches(N, 8)]


@pytest.mark.parametrize("sampler", [*SAMPLERS, PoissonSampling(N, RATE, capacity=N)])
@pytest.mark.parametrize(
    ("z", "steps", "name", "error"),
    [(np.nan, 7, "noise_multiplier", ValueError), (-1.0, 7, "noise_multiplier", ValueError),
     (1.0, -3, "steps", ValueError), (1.0, 2.5, "steps", TypeError)],
)  # fmt: skip
def test_events_of_nonsense_are_refused(sampler, z, steps, name, error):
    with pytest.raises(error, match=f"`{name}` must be"):
        sampler.event(z, steps)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("form", ["batch", "host_batch"])
@pytest.mark.parametrize(
    ("step", "error"),
    [(-1, ValueError), (jnp.int32(-1), ValueError), (1.5, TypeError), (jnp.float32(1), TypeError),
     (np.float64(1.5), TypeError), (True, TypeError), (None, TypeError),
     (jnp.zeros(2, int), TypeError)],
)  # fmt: skip
def test_steps_that_are_none_are_refused(sampler, form, step, error):
    with pytest.raises(error, match="`step` must be"):
        getattr(sampler, form)(jax.random.key(0), step)


def test_a_traced_step_must_be_an_integer_too():
    for sampler in SAMPLERS:
        with pytest.raises(TypeError, match="`step` must be"):
            jax.jit(sampler.batch)(jax.random.key(0), 1.5)


def test_bounds_are_printed_in_full():
    with pytest.raises(ValueError, match="<= 2147483647,"):
        PoissonSampling(10**10, 0.5)
