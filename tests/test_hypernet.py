"""DP-DeepSets: the release, its plan, what sees private records, networks, learning, messages."""

import dataclasses
import functools
import math

import flax.linen as nn
import hypernet_checks
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypernet_checks import CLIP, RECORDS, encode
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import batching, partial_eval

import jdp
from jdp import accounting, hypernet_model, set_embedding
from jdp.hypernet import (
    Hypernet,
    LinearDecoder,
    MLPEncoder,
    Tasks,
    TransformerDecoder,
    flat_tokens,
    init_training,
    plan_embedding,
    private_embedding,
    train_step,
    warmup_cosine,
)

DELTA = 1e-5
TARGET = {"b": jnp.zeros(2), "w": jnp.zeros((3, 5))}
RECORDS_OF = functools.partial(jax.random.normal, shape=(RECORDS, 4))


def net(encoder=None, decoder=None, **options):
    num_tokens, detokenise = flat_tokens(TARGET, 6)
    options = {"num_records": RECORDS, "noise_multiplier": 0.0} | options
    decoder = decoder or LinearDecoder(num_tokens, 6, kernel_init=nn.initializers.normal(1.0))
    return Hypernet(encoder or MLPEncoder((7, 4)), decoder, detokenise, **options)


def parameters(own, seed=0):
    return own.init(jax.random.key(seed), RECORDS_OF(jax.random.key(9)))


# The release ---------------------------------------------------------------------------------


def release(key, records, mask, noise_multiplier, adjacency):
    options = {"clip_norm": CLIP, "noise_multiplier": noise_multiplier, "num_records": RECORDS}
    return private_embedding(key, encode, records, mask, adjacency=adjacency, **options)


@pytest.mark.parametrize(
    "check", [hypernet_checks.check_mean_sensitivity, hypernet_checks.check_mean_noise]
)
def test_the_mean_keeps_its_promise(check):
    check(release)


def test_padding_and_broken_records_contribute_nothing():
    records = RECORDS_OF(jax.random.key(1))
    mask = jnp.arange(RECORDS) < 4
    options = {"clip_norm": 1.0, "noise_multiplier": 0.0, "num_records": 4}
    mean = private_embedding(jax.random.key(0), lambda p: p, records, mask, **options)
    for bad in (jnp.nan, jnp.inf, 1e30):
        padded = records.at[4:].set(bad)
        found = private_embedding(jax.random.key(0), lambda p: p, padded, mask, **options)
        np.testing.assert_array_equal(mean, found)
        found = private_embedding(jax.random.key(0), lambda p: p, padded, mask | True, **options)
        np.testing.assert_array_equal(mean, found)


def test_the_clip_is_in_float32_whatever_the_records_are():
    records = (RECORDS_OF(jax.random.key(1)) * 100).astype(jnp.bfloat16)
    options = {"clip_norm": 1.0, "noise_multiplier": 0.0, "num_records": 1}
    found = private_embedding(jax.random.key(0), lambda p: p, records[:1], **options)
    assert found.dtype == jnp.float32
    assert 1 - 1e-4 < np.linalg.norm(np.asarray(found, np.float64)) <= 1


# What it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "epsilon, std", [(1, 0.0583), (2, 0.0311), (4, 0.0169), (8, 0.00938), (16, 0.00538)]
)
def test_noise_scales_for_128_records(epsilon, std):
    options = {"epsilon": float(epsilon), "delta": DELTA}
    plan = plan_embedding(128, adjacency="replace-one", **options)
    assert plan.std(1.0) == pytest.approx(std, rel=5e-3)
    assert plan_embedding(128, **options).std(1.0) == pytest.approx(plan.std(1.0) / 2)
    assert 0.999 * epsilon < plan.epsilon <= epsilon
    classical = math.sqrt(2 * math.log(1.25 / DELTA)) / epsilon
    spent = plan_embedding(128, noise_multiplier=classical, delta=DELTA).epsilon
    assert (spent > epsilon) == (epsilon > 8.42)  # where the classical formula is no bound


def test_releases_compose():
    one, four = (plan_embedding(128, epsilon=1.0, delta=DELTA, releases=k) for k in (1, 4))
    assert four.noise_multiplier == pytest.approx(2 * one.noise_multiplier, rel=1e-4)
    assert four.epsilon <= 1.0 and four.spent.accountant == "exact"
    spent = accounting.privacy_spent(four.event, delta=DELTA)
    assert spent.epsilon == four.epsilon
    with pytest.raises(ValueError, match="plans? pays for 4|steps"):
        four.batch(jax.random.key(0), 4)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_report_says_which_adjacency(adjacency):
    plan = plan_embedding(128, epsilon=1.0, delta=DELTA, adjacency=adjacency, releases=2)
    report = plan.report(clip_norms=1.0)
    assert f"Adjacency:         {adjacency}" in report.replace(
        "Adjacency         ", "Adjacency:         "
    )
    assert "2 noisy means" in report and "exact" in report
    assert plan.to_dict()["adjacency"] == plan.noise_multiplier.adjacency == adjacency
    own = net(noise_multiplier=plan.noise_multiplier)
    with pytest.raises(ValueError, match="adjacency"):
        other = {"zero-out": "replace-one", "replace-one": "zero-out"}[adjacency]
        own = dataclasses.replace(own, adjacency=other)
        own.embed(parameters(own), RECORDS_OF(jax.random.key(0)), jax.random.key(1))


def test_noise_is_that_of_the_plan():
    plan = plan_embedding(RECORDS, epsilon=2.0, delta=DELTA, adjacency="replace-one")
    own = net(noise_multiplier=plan.noise_multiplier, clip_norm=0.5)
    params, records = parameters(own), RECORDS_OF(jax.random.key(2))
    draw = jax.jit(jax.vmap(lambda key: own.embed(params, records, key)))
    found = np.asarray(draw(jax.random.split(jax.random.key(3), 4000)))
    np.testing.assert_allclose(found.std(0), plan.std(0.5), rtol=0.06)
    quiet = dataclasses.replace(own, noise_multiplier=0.0).embed(params, records, jax.random.key(0))
    np.testing.assert_allclose(found.mean(0), quiet, atol=5 * plan.std(0.5) / 4000**0.5)


# What sees private records -------------------------------------------------------------------


def test_generate_reads_records_in_private_embedding_only(monkeypatch):
    own = net(noise_multiplier=1.0)
    params, key = parameters(own), jax.random.key(1)

    def used(records):
        traced = jax.make_jaxpr(lambda r: own.generate(params, r, key))(records)
        return partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))[1]

    records = RECORDS_OF(jax.random.key(2))
    assert used(records)[-1]
    e = own.embed(params, records, key)
    jax.tree.map(
        np.testing.assert_array_equal,
        own.generate(params, records, key),
        own.decode(params, e),
    )
    monkeypatch.setattr(hypernet_model, "private_embedding", lambda *args, **options: e)
    assert not used(records)[-1]


def test_swapping_a_record_moves_the_embedding_by_its_sensitivity():
    own = net(clip_norm=0.3)
    params, key = parameters(own), jax.random.key(1)
    records = RECORDS_OF(jax.random.key(2)) * 10
    base = own.embed(params, records, key)
    for i in range(RECORDS):
        swapped = records.at[i].multiply(-50)
        change = np.linalg.norm(own.embed(params, swapped, key) - base)
        assert 0 < change <= 2 * 0.3 / RECORDS * (1 + 1e-5)


def host(record):
    """Over a batch, numpy is given all records in one call."""
    return jax.pure_callback(lambda p: p, record, record, vmap_method="expand_dims")


@jax.custom_batching.custom_vmap
def centred(record):
    return record


@centred.def_vmap
def _(size, batched, records):
    return records - records.mean(0), True


own = jax.extend.core.Primitive("centred")
own.def_abstract_eval(lambda record: record)
batching.primitive_batchers[own] = lambda records, dims: (records[0] - records[0].mean(0), dims[0])


def buffers(record):
    shape = jax.ShapeDtypeStruct(record.shape, record.dtype)
    call = buffer_callback(lambda *_: None, shape, vmap_method="expand_dims")
    return call(record)


@pytest.mark.parametrize(
    "name",
    ["sees the batch", "passes on", "prints", "calls back", "leaves jax", "into buffers"]
    + ["batches itself", "nested", "an operation of its own"],
)
def test_encoders_that_may_see_other_records_are_refused(name):
    encoders = {
        "leaves jax": host,
        "into buffers": buffers,
        "an operation of its own": own.bind,
        "passes on": lambda p: p - jax.lax.ppermute(p, "sets", [(0, 1), (1, 0)]),
        "batches itself": centred,
        "nested": lambda p: jax.lax.cond(p[0] > 0, jax.jit(centred), jnp.sin, p),
        "sees the batch": lambda p: p - jax.lax.pmean(p, "sets"),
        "prints": lambda p: jax.debug.print("{}", p) or p,
        "calls back": lambda p: jax.experimental.io_callback(lambda p: p, p, p),
    }
    options = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_records": RECORDS}
    one = lambda key, sets: private_embedding(key, encoders[name], sets, **options)  # noqa: E731
    sets = jnp.stack([RECORDS_OF(jax.random.key(i)) for i in range(2)])
    with pytest.raises(ValueError, match="`encode` must be a function of ONE record"):
        one(jax.random.key(0), sets[0])
    with pytest.raises(ValueError, match="`encode` must be a function of ONE record"):
        jax.vmap(one, axis_name="sets")(jax.random.split(jax.random.key(0)), sets)


class Normalised(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, record):
        norm = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)
        return norm(nn.Dense(4)(record))


class Attending(nn.Module):
    @nn.compact
    def __call__(self, record):
        return nn.Dense(4)(record) - jax.lax.pmean(record, "sets")


def test_modules_that_mix_records_are_refused():
    for encoder in (Normalised(), Normalised("sets")):
        with pytest.raises(ValueError, match="LayerNorm or GroupNorm"):
            parameters(net(encoder))
    with pytest.raises(ValueError, match="ONE record"):
        parameters(net(Attending()))
    with pytest.raises(ValueError, match="`decoder`"):
        parameters(net(decoder=Normalised()))


def test_a_module_of_ones_own_serves_as_encoder():
    class Convolutional(nn.Module):
        @nn.compact
        def __call__(self, record):
            image, label = record["image"], record["label"]
            x = nn.GroupNorm(2)(nn.Conv(4, (3, 3))(image))
            return jnp.concatenate([x.mean((0, 1)), jax.nn.one_hot(label, 3)])

    own = net(Convolutional())
    images = jax.random.normal(jax.random.key(0), (RECORDS, 6, 6, 1))
    records = {"image": images, "label": jnp.arange(RECORDS) % 3}
    params = own.init(jax.random.key(1), records)
    found = own.generate(params, records, jax.random.key(2))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, TARGET)


# Networks ------------------------------------------------------------------------------------


def test_with_one_context_token_cross_attention_is_the_same_for_all_tokens():
    decoder = TransformerDecoder(5, 6, width=8, heads=2, mlp_width=12, layers=1)
    one, three = (jax.random.normal(jax.random.key(c), (c, 4)) for c in (1, 3))
    leaves, structure = jax.tree.flatten(jax.jit(decoder.init)(jax.random.key(0), one))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(structure, leaves)  # away from the symmetric start

    @jax.jit
    def added(context):
        _, state = decoder.apply(params, context, capture_intermediates=True)
        return state["intermediates"]["cross_attention_0"]["__call__"][0]

    def size(params, context):
        return jnp.sum(decoder.apply(params, context) ** 2)

    np.testing.assert_allclose(added(one), np.tile(added(one)[:1], (5, 1)), atol=1e-6)
    assert np.abs(added(three) - added(three)[:1]).max() > 1e-3
    layer = jax.jit(jax.grad(size))(params, one)["params"]["cross_attention_0"]
    for name in ("query", "key"):
        np.testing.assert_allclose(layer[name]["kernel"], 0, atol=1e-6)
    assert np.abs(layer["value"]["kernel"]).max() > 1e-3


def test_the_paper_size():
    decoder = TransformerDecoder(318, 128)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.zeros((1, 128)))
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert 1.0e6 < size < 1.2e6
    head = jax.random.key(0), jnp.ones((1, 4))
    decoder = TransformerDecoder(9, 40, width=64, layers=1)
    params = jax.jit(decoder.init)(*head)["params"]["head"]
    assert np.std(params["kernel"]) == pytest.approx(0.01, rel=0.05)
    assert not np.any(params["bias"])


def test_context_tokens_cut_the_embedding():
    decoder = TransformerDecoder(3, 6, width=8, heads=2, mlp_width=8, layers=1)
    own = net(decoder=decoder, context_tokens=2)
    params = parameters(own)
    assert params.decoder["cross_attention_0"]["value"]["kernel"].shape[0] == 2
    own.generate(params, RECORDS_OF(jax.random.key(0)), jax.random.key(1))
    with pytest.raises(ValueError, match="`context_tokens`.*4 features"):
        parameters(net(decoder=decoder, context_tokens=3))


def test_flat_tokens_hold_every_entry_once():
    like = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((), jnp.bfloat16), "c": jnp.zeros(0)}
    num_tokens, detokenise = flat_tokens(like, 4)
    found = detokenise(jnp.arange(8.0).reshape(2, 4))
    assert num_tokens == 2
    np.testing.assert_array_equal(found["a"], np.arange(6.0).reshape(2, 3))
    assert found["b"] == 6 and found["b"].dtype == jnp.bfloat16 and found["c"].shape == (0,)


# Learning ------------------------------------------------------------------------------------


def public_tasks(key, sets=16, mask=None):
    """Sets about a mean each, which is what the target should be."""
    means = jax.random.normal(key, (sets, 1, 2))
    noise = jax.random.normal(jax.random.fold_in(key, 1), (sets, RECORDS, 2))
    return Tasks(5 + means + 0.1 * noise, means[:, 0], mask)


@pytest.mark.slow
def test_it_learns_to_tell_sets_apart():
    num_tokens, detokenise = flat_tokens(jnp.zeros(2), 2)
    plan = plan_embedding(RECORDS, epsilon=16.0, delta=DELTA)
    own = Hypernet(
        MLPEncoder((16, 4)),
        LinearDecoder(num_tokens, 2),
        detokenise,
        num_records=plan.batch_size,
        noise_multiplier=plan.noise_multiplier,
    )
    loss = lambda target, mean: jnp.mean((target - mean) ** 2)  # noqa: E731
    tx = optax.adam(warmup_cosine(1e-2, 400))
    records = public_tasks(jax.random.key(0)).records.reshape(-1, 2)
    step = train_step(own, loss, tx)

    def run(key):
        state = init_training(own, tx, key, records)
        body = lambda state, t: step(state, public_tasks(jax.random.fold_in(key, t)))  # noqa: E731
        return jax.lax.scan(body, state, jnp.arange(400))

    state, losses = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), 2))
    assert np.all(losses[:, -20:].mean((1, 2)) < 0.3 * losses[:, :5].mean((1, 2)))
    assert np.array_equal(state.step, [400, 400])
    params = jax.tree.map(lambda leaf: leaf[0], state.params)
    centre = own.mean_embedding(params.encoder, records)
    assert np.linalg.norm(params.centre - centre) < 0.3 * np.linalg.norm(centre)
    tasks = public_tasks(jax.random.key(7))
    keys = jax.random.split(jax.random.key(8), 16)
    found = jax.vmap(lambda r, k: own.generate(params, r, k))(tasks.records, keys)
    own_error = np.mean((found - tasks.examples) ** 2)
    mismatched = np.mean((found - jnp.roll(tasks.examples, 1, 0)) ** 2)
    assert own_error < 0.3 * mismatched


def test_training_noise_is_fresh_and_masks_are_kept():
    own = net(noise_multiplier=1.0)
    tx, key = optax.sgd(0.0), jax.random.key(0)
    mask = jnp.arange(RECORDS) < 4
    records = jnp.where(mask[None, :, None], 1.0, jnp.nan) * jnp.ones((3, RECORDS, 4))
    tasks = Tasks(records, jnp.zeros((3, 1)), jnp.broadcast_to(mask, (3, RECORDS)))
    step = jax.jit(train_step(own, lambda target, _: jnp.sum(target["b"]), tx))
    state = init_training(own, tx, key, jnp.ones((2, 4)))
    later, first = step(state, tasks)
    _, second = step(later, tasks)
    values = np.concatenate([first, second])
    assert np.isfinite(values).all() and len(set(values.tolist())) == 6
    assert np.isfinite(later.params.centre).all()
    np.testing.assert_array_equal(step(state, tasks)[1], first)


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.1])
def test_the_encoder_learns_through_noise_and_rounding(noise_multiplier):
    """What is released is rounded, whose derivative is zero; its gradient is that of the mean."""
    own = net(noise_multiplier=noise_multiplier)
    params, records = parameters(own), RECORDS_OF(jax.random.key(3))

    def first(encoder, own):
        changed = params._replace(encoder=encoder)
        return jnp.sum(own.generate(changed, records, jax.random.key(0))["b"])

    found = jax.grad(first)(params.encoder, own)
    exact = jax.grad(first)(params.encoder, net())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        assert np.linalg.norm(one) > 0


def test_padding_and_records_at_the_centre_leave_the_encoder_finite():
    own = net(noise_multiplier=1.0)
    mask = jnp.arange(RECORDS) < 4
    same = jnp.ones((2, RECORDS, 4))  # whose embedding is the centre
    padded = jnp.where(mask[None, :, None], RECORDS_OF(KEY)[None], jnp.nan) * jnp.ones((2, 1, 1))
    tx = optax.sgd(0.1)
    step = jax.jit(train_step(own, lambda target, _: jnp.sum(target["b"]), tx))
    for records, seen in ((same, same[0]), (padded, RECORDS_OF(KEY))):
        state = init_training(own, tx, KEY, seen)
        for _ in range(2):
            state, losses = step(state, Tasks(records, jnp.zeros((2, 1)), jnp.stack([mask] * 2)))
        leaves = [*jax.tree.leaves(state.params.encoder), state.params.centre, losses]
        assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_a_public_record_that_is_not_finite_leaves_the_centre_alone():
    own, records = net(), RECORDS_OF(KEY)
    clean = own.init(KEY, records[1:])
    broken = own.init(KEY, records.at[0].set(jnp.nan))
    np.testing.assert_allclose(broken.centre, clean.centre, rtol=1e-5)
    with pytest.raises(ValueError, match="`centre` must be finite"):
        embed(centre=jnp.full(4, jnp.nan))


# Messages ------------------------------------------------------------------------------------

KEY = jax.random.key(0)
GOOD = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_records": RECORDS}


def embed(records=None, mask=None, encode=lambda p: p, key=KEY, **options):
    records = RECORDS_OF(KEY) if records is None else records
    return private_embedding(key, encode, records, mask, **GOOD | options)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x), x


def generated(own):
    return own.generate(parameters(own), RECORDS_OF(KEY), KEY)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: embed(key=0), TypeError, "`key`"),
        (lambda: embed(num_records=0), ValueError, "`num_records`"),
        (lambda: embed(num_records=6.0), TypeError, "`num_records`"),
        (lambda: embed(num_records=7), ValueError, "\\(7\\) .*but got 6 rows.*pass a mask"),
        (lambda: embed(jnp.zeros(())), ValueError, "`records`.*leading axis"),
        (lambda: embed((jnp.zeros((6, 2)), jnp.zeros(5))), ValueError, "`records`"),
        (lambda: embed({}), ValueError, "`records`"),
        (lambda: embed(mask=jnp.ones(6)), TypeError, "`mask`.*booleans"),
        (lambda: embed(mask=jnp.ones(5, bool)), ValueError, "`mask`"),
        (lambda: embed(clip_norm=0.0), ValueError, "`clip_norm`"),
        (lambda: embed(clip_norm=math.inf), ValueError, "`clip_norm`.*finite"),
        (lambda: embed(clip_norm="1"), TypeError, "`clip_norm`"),
        (lambda: embed(noise_multiplier=-1.0), ValueError, "`noise_multiplier`"),
        (lambda: embed(noise_multiplier=jnp.ones(())), ValueError, "`adjacency`"),
        (lambda: embed(adjacency="bounded"), ValueError, "`adjacency`"),
        (lambda: embed(centre=jnp.zeros(3)), ValueError, "`centre`.*\\(4,\\)"),
        (lambda: embed(encode=lambda p: p[:, None]), ValueError, "`encode`.*vector"),
        (lambda: embed(encode=jnp.sum), ValueError, "`encode`.*vector"),
        (lambda: embed(encode=lambda p: p > 0), TypeError, "`encode`.*floating"),
        (lambda: embed(encode=lambda p: (p, p)), TypeError, "`encode`.*floating"),
        (lambda: plan_embedding(0, epsilon=1.0, delta=DELTA), ValueError, "`num_records`"),
        (lambda: plan_embedding(9, epsilon=-1.0, delta=DELTA), ValueError, "`epsilon`"),
        (lambda: plan_embedding(9, epsilon=1.0, delta=1.0), ValueError, "`delta`"),
        (lambda: plan_embedding(9, delta=DELTA), ValueError, "`epsilon`"),
        (lambda: plan_embedding(9, epsilon=1.0, delta=DELTA, releases=0), ValueError, "`releases`"),
        (
            lambda: plan_embedding(9, epsilon=1.0, delta=DELTA, adjacency="add-remove"),
            ValueError,
            "`adjacency`",
        ),
        (lambda: net(encoder=jnp.sin), TypeError, "`encoder`.*linen module"),
        (lambda: Hypernet(MLPEncoder(), 3, 4, **GOOD), TypeError, "`decoder`.*linen module"),
        (
            lambda: Hypernet(MLPEncoder(), LinearDecoder(1, 1), 4, **GOOD),
            TypeError,
            "`detokenise`",
        ),
        (lambda: net(num_records=-1), ValueError, "`num_records`"),
        (lambda: net(noise_multiplier=math.nan), ValueError, "`noise_multiplier`"),
        (lambda: net(clip_norm=math.inf), ValueError, "`clip_norm`"),
        (lambda: net(context_tokens=0), ValueError, "`context_tokens`"),
        (lambda: net().init(0, RECORDS_OF(KEY)), TypeError, "`key`"),
        (lambda: generated(net(Pair())), TypeError, "`encode`.*floating"),
        (lambda: generated(net(decoder=Pair())), TypeError, "`decoder`.*array"),
        (lambda: generated(net(decoder=LinearDecoder(4, 6))), ValueError, "`tokens`.*\\(3, 6\\)"),
        (lambda: init_training(net(), optax.sgd(1.0), 0, RECORDS_OF(KEY)), TypeError, "`key`"),
        (lambda: flat_tokens({}, 3), TypeError, "`like`"),
        (lambda: flat_tokens({"a": jnp.zeros(3, int)}, 3), TypeError, "`like`.*floating"),
        (lambda: flat_tokens(TARGET, 0), ValueError, "`token_size`"),
        (lambda: train_step(net(), "mse", optax.sgd(1.0)), TypeError, "`loss`"),
        (lambda: warmup_cosine(0.0, 10), ValueError, "`peak`"),
        (lambda: warmup_cosine(1.0, 0), ValueError, "`steps`"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_errors_come_before_records_are_touched():
    def touched(record):
        assert isinstance(record, jax.core.Tracer)
        return record[:, None]

    with pytest.raises(ValueError, match="`encode`"):
        embed(np.zeros((RECORDS, 4), np.float32), encode=touched)


def test_names_are_exported():
    assert jdp.add_noise and set_embedding.private_embedding is private_embedding
