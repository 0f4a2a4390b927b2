import copy
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp import accounting
from jdp.planning import plan, steps_for_epochs
from jdp.sampling import FixedBatches, PoissonSampling, WithoutReplacement

RUN = dict(num_examples=3500, batch_size=64, steps=300, delta=1e-5)
NAMES = [
    dict(),
    dict(adjacency="add-remove"),
    dict(adjacency="replace-one"),
    dict(accountant="rdp"),
    dict(sampling="fixed-batches"),
    dict(sampling="fixed-batches", adjacency="replace-one"),
    dict(sampling="without-replacement", adjacency="replace-one", accountant="rdp"),
    dict(capacity=80),
]


@pytest.mark.parametrize("options", NAMES, ids=lambda options: "-".join(map(str, options.values())))
def test_sampler_multiplier_and_event_agree(options):
    p = plan(**RUN, **options, epsilon=2.0)
    assert 1.98 <= p.epsilon <= 2.0 == p.target_epsilon
    assert p.delta == 1e-5 and p.steps == 300 and p.batch_size == 64
    assert p.adjacency == p.noise_multiplier.adjacency == options.get("adjacency", "zero-out")
    assert p.event == p.sampler.event(p.noise_multiplier, p.steps)
    again = accounting.privacy_spent(
        p.event,
        delta=p.delta,
        accountant=options.get("accountant", "pld"),
        adjacency=p.adjacency,
    )
    assert again == p.spent
    given = plan(**RUN, **options, noise_multiplier=p.noise_multiplier)
    assert given == dataclasses.replace(p, target_epsilon=None)
    key = jax.random.key(0)
    for indices, mask in (p.batch(key, 0), p.host_batch(key, 0)):
        assert indices.shape == mask.shape == (p.sampler.capacity,)


def test_poisson_plan():
    p = plan(**RUN, epsilon=2.0)
    assert isinstance(p.sampler, PoissonSampling)
    assert 0 <= 64 / 3500 - p.sampler.sampling_rate < 2**-32
    direct = accounting.epsilon(
        p.noise_multiplier, delta=1e-5, steps=300, sampling_rate=p.sampler.sampling_rate
    )
    assert p.epsilon == pytest.approx(direct, rel=2e-3)


def test_forced_capacity_costs_epsilon():
    free = plan(**RUN, noise_multiplier=1.0)
    forced = plan(**RUN, noise_multiplier=1.0, capacity=80)
    assert forced.sampler.capacity == 80 < free.sampler.capacity
    assert forced.epsilon > 1.1 * free.epsilon


def test_other_samplers():
    fixed = plan(**RUN, sampling="fixed-batches", noise_multiplier=2.0)
    assert isinstance(fixed.sampler, FixedBatches)
    epochs = math.ceil(300 / 55)
    assert fixed.epsilon == accounting.epsilon(2.0, steps=epochs, delta=1e-5)
    assert fixed.spent.mu == pytest.approx(math.sqrt(epochs) / 2)
    options = dict(sampling="without-replacement", adjacency="replace-one", accountant="rdp")
    subset = plan(**RUN, **options, noise_multiplier=2.0)
    assert isinstance(subset.sampler, WithoutReplacement)


def test_no_noise_is_no_privacy():
    p = plan(**RUN, noise_multiplier=0)
    assert p.epsilon == math.inf
    assert json.loads(p.to_json())["epsilon"] == "inf"
    assert "(inf, 1e-05)" in p.report()


def test_steps_past_the_end_are_refused():
    p = plan(**RUN, noise_multiplier=1.0)
    key = jax.random.key(0)
    for draw in (p.batch, p.host_batch):
        draw(key, 299)
        for step in (300, np.int64(300), jnp.int32(300), -1, jnp.int32(-1)):
            with pytest.raises(ValueError, match="`step` must be.*plan"):
                draw(key, step)
        draw(key, jnp.int32(299))
        for step in (1.5, jnp.float32(1), True):
            with pytest.raises(TypeError, match="`step` must be"):
                draw(key, step)
    jax.jit(p.batch)(key, 0)  # a traced step cannot be looked at


@pytest.mark.parametrize(
    ("change", "name", "error"),
    [
        (dict(sampling="weighted"), "sampling", ValueError),
        (dict(sampling=PoissonSampling(10, 0.5)), "sampling", ValueError),
        (dict(epsilon=None), "epsilon", ValueError),
        (dict(noise_multiplier=1.0), "epsilon", ValueError),
        (dict(epsilon=0.0), "epsilon", ValueError),
        (dict(epsilon=-1.0), "epsilon", ValueError),
        (dict(delta=1.5), "delta", ValueError),
        (dict(delta=0), "delta", ValueError),
        (dict(num_examples=0), "num_examples", ValueError),
        (dict(num_examples=3500.0), "num_examples", TypeError),
        (dict(batch_size=3501), "batch_size", ValueError),
        (dict(steps=0), "steps", ValueError),
        (dict(steps=10.5), "steps", TypeError),
        (dict(capacity=0), "capacity", ValueError),
        (dict(capacity=100, sampling="fixed-batches"), "capacity", ValueError),
        (dict(adjacency="add-remove", sampling="fixed-batches"), "adjacency", ValueError),
        (dict(adjacency="substitute"), "adjacency", ValueError),
        (dict(accountant="gdp"), "accountant", ValueError),
        (dict(sampling="without-replacement"), "event", ValueError),
    ],
)
def test_bad_input_is_refused_by_name(change, name, error):
    with pytest.raises(error, match=f"`{name}` must be"):
        plan(**{**RUN, "epsilon": 2.0, **change})


def test_multiplier_of_another_adjacency_is_refused():
    z = plan(**RUN, epsilon=2.0, adjacency="replace-one").noise_multiplier
    with pytest.raises(ValueError, match="replace-one"):
        plan(**RUN, noise_multiplier=z)


def test_statement_lists_what_a_reader_needs():
    p = plan(**RUN, epsilon=2.0)
    blank, facts = p.report(), dict(clip_norms=[10.0, 2.0], sampler_used="yes", method="gep")
    for line in (
        "Guarantee", "Setting", "Unit", "Adjacency", "Mechanism", "ONE Gaussian a step", "Sampling",
        "Sampler used", "Clip norms", "Steps", "Divisor", "Accountant", "grid interval", "Curve",
        "Public data", "NOT paid for", "dp-accounting", "jaxlib", "optax", "numpy", "zero-out",
    ):  # fmt: skip
        assert line in blank
    assert blank.count("not stated") == 6
    assert "gep" in p.report(**facts) and "[10.0, 2.0]" in p.report(**facts)
    statement = json.loads(p.to_json(**facts))
    assert statement["clip_norms"] == [10.0, 2.0] and statement["method"] == "gep"
    assert statement["epsilon"] == p.epsilon and statement["sampler"]["name"] == "PoissonSampling"
    curve = {point["delta"]: point["epsilon"] for point in statement["curve"]}
    assert curve[1e-5] == p.epsilon
    assert sorted(curve.values(), reverse=True) == [curve[delta] for delta in sorted(curve)]
    with pytest.raises(ValueError, match="`facts`"):
        p.report(epsilon=0.1)


def test_plans_are_frozen_values():
    p = plan(**RUN, noise_multiplier=1.0)
    assert copy.deepcopy(p) == p
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.steps = 10_000  # pyright: ignore


def test_steps_are_counted_in_integers():
    assert steps_for_epochs(90, 100, 4) == 2250
    assert steps_for_epochs(50, 60_000, 1_000) == 3_000
    assert steps_for_epochs(1, 10, 3) == 4
    with pytest.raises(TypeError, match="epochs"):
        steps_for_epochs(0.5, 10, 3)  # pyright: ignore


def test_facts_may_be_arrays():
    facts = dict(clip_norms=jnp.float32(1), a=np.arange(2), b=[np.float64(3)], c={"d": jnp.ones(1)})
    statement = json.loads(plan(**RUN, noise_multiplier=1.0).to_json(**facts, e=jnp.inf))
    assert statement["clip_norms"] == 1.0 and statement["a"] == [0, 1] and statement["b"] == [3.0]
    assert statement["c"] == {"d": [1.0]} and statement["e"] == "inf"


@pytest.mark.parametrize(
    "options", [dict(epsilon=1e5), dict(noise_multiplier=1e-4), dict(epsilon=1, delta=0.5)]
)
def test_extreme_plans(options):
    p = plan(100, 10, 5, **{"delta": 1e-5, **options})
    assert 0 <= p.epsilon <= options.get("epsilon", 1e10)


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta"),
    [(1e4, 0.01, 100, 1e-5), (1e9, 0.01, 100, 1e-5), (1.0, 0.1, 5, 0.5), (1e100, 0.1, 5, 1e-5)],
)
def test_calibration_of_extreme_targets(target, q, steps, delta):
    run = dict(delta=delta, steps=steps, sampling_rate=q)
    z = accounting.calibrate_noise_multiplier(target, **run)
    assert accounting.epsilon(z, **run) <= target


def log_uniform(low, high):
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    log_uniform(-300, 300), log_uniform(-12, 0), log_uniform(0, 30).map(int),
    log_uniform(-12, -0.01), st.sampled_from(["pld", "rdp"]),
    st.sampled_from(["zero-out", "replace-one"]),
)  # fmt: skip
def test_any_run_has_an_epsilon_or_a_value_error(z, q, steps, delta, accountant, adjacency):
    run = dict(delta=delta, steps=steps, accountant=accountant, adjacency=adjacency)
    try:
        assert 0 <= accounting.epsilon(z, sampling_rate=q, **run) <= math.inf
    except ValueError as error:
        assert "`event` must be" in str(error)
