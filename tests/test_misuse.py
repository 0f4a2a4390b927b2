"""What happens when something is put where it does not belong: the table in the README."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import ALL, BATCH
from strategies import PARAMS, ROWS, flat, rows, tree_of

import jdp
from jdp import public_data

WEIGHTS = jax.tree.map(lambda leaf: leaf + 1, PARAMS)
MASK = jnp.asarray(ALL)
RAISES = (TypeError, ValueError, NotImplementedError, AttributeError)


def _batch(seed=1):
    return tree_of(rows(["normal"] * ROWS, seed))


def _clipped(jit=True, seed=1):
    clipped = jdp.clip_by_norm(0.8)(_batch(seed), MASK)
    return jax.jit(lambda x: x)(clipped) if jit else clipped  # out of jit, the scales are arrays


def _privatize(z=1.0):
    return jdp.privatize(z, batch_size=BATCH, key=jax.random.key(0))


def _aggregate(z=1.0):
    return jdp.dp_aggregate(jdp.clip_by_norm(0.8), z, batch_size=BATCH, key=jax.random.key(0))


def _update(tx, updates, **extra):
    return tx.update(updates, tx.init(WEIGHTS), WEIGHTS, **extra)[0]


def _public(params, key):
    return jax.tree.map(lambda leaf: jax.random.normal(key, (5, *leaf.shape)), params)


AFTER_THE_NOISE = {
    "mix_public": public_data.mix_public(0.5, lambda params, key: params, key=jax.random.key(1)),
    "project_updates": public_data.project_updates(
        rank=3, public_gradients=_public, key=jax.random.key(1)
    ),
    "scale_by_adam_corrected": jdp.scale_by_adam_corrected(0.1, floor=1e-6),
}
BEFORE_PRIVATIZE = AFTER_THE_NOISE | {
    "scale": optax.scale(0.5),
    "scale_by_learning_rate": optax.scale_by_learning_rate(0.1),
    "scale_by_schedule": optax.scale_by_schedule(lambda step: 0.5),
    "clip": optax.clip(0.1),
    "clip_by_global_norm": optax.clip_by_global_norm(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_rms": optax.scale_by_rms(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
    "add_decayed_weights": optax.add_decayed_weights(0.01),
    "add_noise": optax.add_noise(0.1, 0.55, jax.random.key(1)),
    "apply_every": optax.apply_every(2),
    "sgd": optax.sgd(0.1),
}


@pytest.mark.parametrize("jit", [False, True], ids=["python-scales", "traced-scales"])
@pytest.mark.parametrize("name", BEFORE_PRIVATIZE)
def test_before_privatize_is_refused(name, jit):
    with pytest.raises(RAISES):
        _update(optax.chain(BEFORE_PRIVATIZE[name], _privatize()), _clipped(jit))


WRAPPERS = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False, "c": True}),
    "partition": lambda tx: optax.partition({0: tx, 1: tx}, {"a": 0, "b": 1, "c": 0}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_are_refused(wrapper):
    with pytest.raises(RAISES):
        _update(WRAPPERS[wrapper](_privatize()), _clipped())
    with pytest.raises(RAISES):
        _update(WRAPPERS[wrapper](_aggregate()), _batch(), mask=MASK)


def test_masked_and_partition_name_the_remedy():
    for wrapper in ("masked", "partition"):
        with pytest.raises(ValueError, match="trainable="):
            _update(WRAPPERS[wrapper](_aggregate()), _batch(), mask=MASK)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("tx", [optax.identity(), optax.zero_nans()], ids=["identity", "zero_nans"])
def test_before_privatize_passes_and_changes_nothing(tx, jit):
    # A clipped sum holds no NaN, and its scales are NaN only with a NaN clip norm, with which
    # every contribution is zero.
    got = _update(optax.chain(tx, _privatize()), _clipped(jit))
    np.testing.assert_array_equal(flat(got), flat(_update(_privatize(), _clipped(jit))))


def test_a_nan_clip_norm_lets_nothing_through_zero_nans():
    clip = jax.jit(lambda norm: jdp.clip_by_norm(norm)(_batch(), MASK))
    got = _update(optax.chain(optax.zero_nans(), _privatize()), clip(jnp.float32(jnp.nan)))
    np.testing.assert_array_equal(flat(got), 0)


def test_before_privatize_centralize_passes_and_shortens():
    # Only with traced scales: it subtracts means from the parts of rank 2 and more, a linear map
    # that shortens vectors, so the sensitivity still holds. Python scales make it raise.
    with pytest.raises(AttributeError):
        _update(optax.chain(optax.centralize(), _privatize()), _clipped(jit=False))
    tx = optax.centralize()
    one, other = _clipped(seed=1), _clipped(seed=2)
    centred = [tx.update(clipped, tx.init(PARAMS))[0] for clipped in (one, other)]
    assert [float(c.noise_scales[0]) for c in centred] == [float(one.noise_scales[0])] * 2
    change = flat(centred[0].parts[0]) - flat(centred[1].parts[0])
    assert np.linalg.norm(change) <= np.linalg.norm(flat(one.parts[0]) - flat(other.parts[0]))


def test_before_privatize_set_to_zero_passes_and_says_nothing():
    got = _update(optax.chain(optax.set_to_zero(), _privatize()), _clipped())
    np.testing.assert_array_equal(flat(got), 0)  # no noise, and no data either


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean])
def test_collectives_on_a_clipped_sum_are_refused(collective):
    # psum would multiply the noise scale by the number of devices.
    def device(batch):
        return collective(jdp.clip_by_norm(0.8)(batch, MASK), "device")

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), _batch())
    with pytest.raises(RAISES):
        jax.vmap(device, axis_name="device")(stacked)


@pytest.mark.parametrize(
    "function",
    [
        lambda sum_: jax.tree.map(jnp.add, sum_, sum_),
        lambda sum_: jax.tree.map(lambda leaf: leaf / 4, sum_),
        lambda sum_: jax.tree.map(jnp.mean, sum_),
        lambda sum_: optax.tree.norm(sum_),
        lambda sum_: optax.tree.add(sum_, sum_),
        lambda sum_: jax.tree.map(lambda leaf: leaf.astype(jnp.float16), sum_),
    ],
    ids=["add", "divide", "mean", "norm", "tree.add", "astype"],
)
def test_arithmetic_on_a_clipped_sum_is_refused(function):
    with pytest.raises(RAISES):
        function(_clipped())


def test_optimizers_do_not_take_a_clipped_sum():
    for tx in (optax.sgd(0.1), optax.adam(0.1)):
        with pytest.raises(RAISES):
            _update(tx, _clipped())


# Before dp_aggregate: what is caught -------------------------------------------------------------


@pytest.mark.parametrize(
    "updates, error, match",
    [
        (lambda: WEIGHTS, ValueError, "shape"),
        (lambda: jax.tree.map(lambda leaf: leaf[0], _batch()), ValueError, "shape"),
        (lambda: jnp.ones((6, 27)), ValueError, "structure"),
        (lambda: _batch() | {"a": jnp.ones((5, 3, 4))}, ValueError, "mask"),
        (lambda: _batch() | {"a": jnp.ones((6, 4, 3))}, ValueError, r"\['a'\]"),
        (lambda: _batch() | {"a": jnp.ones((6, 3, 4), int)}, TypeError, "floating"),
        (_clipped, TypeError, "privatize"),
    ],
    ids=["aggregate", "one-example", "structure", "ragged", "transposed", "integers", "sum"],
)
def test_before_aggregate_is_caught(updates, error, match):
    with pytest.raises(error, match=match):
        _update(_aggregate(), updates(), mask=MASK)


@pytest.mark.parametrize("name", AFTER_THE_NOISE)
def test_before_aggregate_what_acts_after_the_noise_is_caught(name):
    with pytest.raises(ValueError, match="shape"):
        _update(optax.chain(AFTER_THE_NOISE[name], _aggregate()), _batch(), mask=MASK)


@pytest.mark.parametrize("name", ["sm3", "adaptive_grad_clip"])
def test_before_aggregate_fails_in_the_transformation(name):
    before = {"sm3": optax.scale_by_sm3(), "adaptive_grad_clip": optax.adaptive_grad_clip(0.1)}
    with pytest.raises(RAISES):
        _update(optax.chain(before[name], _aggregate()), _batch(), mask=MASK)


# Before dp_aggregate: what is not caught, and what it does ---------------------------------------


def _moves_others(tx, steps=1):
    """Whether changing example 0 changes what the transformation gives for the other examples."""

    def run(batch):
        state = tx.init(WEIGHTS)
        for _ in range(steps):
            updates, state = tx.update(batch, state, WEIGHTS)
        return updates

    batch = rows(["normal"] * ROWS, 1)
    neighbour = batch.copy()
    neighbour[0] *= 1e3
    a, b = (flat(run(tree_of(x)), 1) for x in (batch, neighbour))
    return not np.allclose(a[1:], b[1:], rtol=1e-5)


MIXES = {
    "clip_by_global_norm": optax.clip_by_global_norm(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
}
ROW_BY_ROW = {
    "identity": optax.identity(),
    "scale": optax.scale(0.5),
    "clip": optax.clip(0.1),
    "scale_by_sign": optax.scale_by_sign(),
    "centralize": optax.centralize(),
    "zero_nans": optax.zero_nans(),
    "add_decayed_weights": optax.add_decayed_weights(0.01),
}
# Row by row in one step, but they carry un-noised gradients from step to step.
REMEMBERS = {
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_rms": optax.scale_by_rms(),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
}


@pytest.mark.parametrize("name", MIXES)
def test_before_aggregate_is_not_caught_and_voids_privacy(name):
    # Shapes cannot tell. The documentation of `dp_aggregate` says that nothing may come before it.
    _update(optax.chain(MIXES[name], _aggregate()), _batch(), mask=MASK)
    assert _moves_others(MIXES[name])


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_before_aggregate_is_not_caught_and_is_harmless(name):
    _update(optax.chain(ROW_BY_ROW[name], _aggregate()), _batch(), mask=MASK)
    assert not _moves_others(ROW_BY_ROW[name], steps=2)


@pytest.mark.parametrize("name", REMEMBERS)
def test_before_aggregate_is_not_caught_and_remembers(name):
    tx = REMEMBERS[name]
    _update(optax.chain(tx, _aggregate()), _batch(), mask=MASK)
    _, fresh = tx.update(_batch(1), tx.init(WEIGHTS))
    _, other = tx.update(_batch(2), tx.init(WEIGHTS))
    changed = [
        not np.allclose(a, b)
        for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(other), strict=True)
    ]
    assert any(changed)  # the state holds private values, and outlives the step


# Arguments ---------------------------------------------------------------------------------------

KEY = jax.random.key(0)


def gep(**options):
    defaults = {
        "rank": 3,
        "clip_norms": (1.0, 0.2),
        "noise_multiplier": 1.0,
        "batch_size": 4,
        "key": KEY,
        "public_gradients": _public,
    }
    return jdp.gep(**defaults | options)


def aggregate(clipper=None, z=1.0, **options):
    clipper = jdp.clip_by_norm(1.0) if clipper is None else clipper
    return jdp.dp_aggregate(clipper, z, **{"batch_size": 4, "key": KEY} | options)


def adaptive(z=1.0, **options):
    return jdp.dp_aggregate_adaptive(z, **{"batch_size": 100, "key": KEY} | options)


def anchors_of(**options):
    defaults = {"images": jnp.ones((3, 2)), "num_classes": 2}
    return jdp.random_label_gradients(lambda p, e: 0.0, **defaults | options)


def mix(mixing=0.5, gradient=lambda params, key: params, **options):
    return public_data.mix_public(mixing, gradient, **{"key": KEY} | options)


def projection(**options):
    defaults = {"rank": 3, "public_gradients": _public, "key": KEY}
    return public_data.project_updates(**defaults | options)


def corrected(std=0.1, floor=1e-6, **options):
    return jdp.scale_by_adam_corrected(std, floor=floor, **options)


def coordinates(key=KEY, rate=0.5):
    return public_data.random_coordinates(key, WEIGHTS, rate)


def weighted(make, weights):
    return make(jdp.clip_by_norm(1.0), weights)(_batch(), MASK)


sparsified, preconditioned = public_data.clip_sparsified, public_data.clip_preconditioned


def vote_plan(**options):
    defaults = {"num_examples": 100, "teachers": 10, "queries": 4, "epsilon": 1.0, "delta": 1e-5}
    return jdp.pate.plan_votes(**defaults | options)


def teach(train=lambda key, shard: jnp.zeros(4, int), data=None, plan=None, **options):
    data, plan = (jnp.ones(100), vote_plan()) if data is None else (data, plan or vote_plan())
    return jdp.pate.teacher_votes(KEY, train, data, plan, **options)


def labels(**options):
    defaults = {"key": KEY, "votes": jnp.zeros((10, 4), int), "plan": vote_plan()}
    return jdp.pate.noisy_labels(**defaults | {"num_classes": 3} | options)


ARGUMENTS = {
    "pate key": (lambda: labels(key=0), TypeError, "key"),
    "pate plan": (lambda: labels(plan=1.0), TypeError, "plan_votes"),
    "pate logits": (lambda: labels(votes=jnp.zeros((10, 4))), TypeError, "votes"),
    "pate some teachers": (lambda: labels(votes=jnp.zeros((9, 4), int)), ValueError, "votes"),
    "pate transposed": (lambda: labels(votes=jnp.zeros((4, 10), int)), ValueError, "votes"),
    "pate classes": (lambda: labels(num_classes=1), ValueError, "num_classes"),
    "pate delta": (lambda: vote_plan(delta=1.0), ValueError, "delta"),
    "pate epsilon": (lambda: vote_plan(epsilon=None), ValueError, "epsilon"),
    "pate z twice": (lambda: vote_plan(noise_multiplier=1.0), ValueError, "epsilon"),
    "pate teachers": (lambda: vote_plan(teachers=101), ValueError, "teachers"),
    "pate queries": (lambda: vote_plan(queries=0), ValueError, "queries"),
    "pate answers": (lambda: vote_plan(answers=3), ValueError, "answers"),
    "pate no answers": (lambda: vote_plan(threshold=6.0), ValueError, "answers"),
    "pate too many answers": (lambda: vote_plan(threshold=6.0, answers=5), ValueError, "answers"),
    "pate threshold": (lambda: vote_plan(threshold=11.0, answers=3), ValueError, "threshold"),
    "pate share": (
        lambda: vote_plan(threshold=6.0, answers=3, threshold_share=1.0),
        ValueError,
        "threshold_share",
    ),
    "pate z": (lambda: jdp.pate.votes_event(-1.0, 3), ValueError, "noise_multiplier"),
    "pate data": (lambda: teach(data=jnp.ones(99)), ValueError, "data"),
    "pate scalar data": (lambda: teach(data=(jnp.ones(100), 1.0)), ValueError, "data"),
    "pate train": (lambda: teach(lambda key, shard: jnp.zeros(4)), ValueError, "train"),
    "pate train shape": (lambda: teach(lambda key, shard: jnp.zeros(3, int)), ValueError, "train"),
    "pate train pair": (lambda: teach(lambda key, shard: (1, 2)), ValueError, "train"),
    "pate together": (lambda: teach(together=0), ValueError, "together"),
    "pate teacher numbers": (lambda: teach(teachers=jnp.ones((2, 2), int)), ValueError, "teachers"),
    "key int": (lambda: aggregate(key=0), TypeError, "key"),
    "key raw": (lambda: aggregate(key=jax.random.PRNGKey(0)), TypeError, "key"),
    "key batch": (lambda: aggregate(key=jax.random.split(KEY)), TypeError, "key"),
    "key gep": (lambda: gep(key=None), TypeError, "secure_key"),
    "key adaptive": (lambda: adaptive(key=1), TypeError, "key"),
    "key left out": (lambda: jdp.privatize(1.0, batch_size=4), TypeError, "key"),
    "z negative": (lambda: aggregate(z=-1.0), ValueError, "noise_multiplier"),
    "z nan": (lambda: aggregate(z=float("nan")), ValueError, "noise_multiplier"),
    "z text": (lambda: aggregate(z="1"), TypeError, "noise_multiplier"),
    "z bool": (lambda: aggregate(z=True), TypeError, "noise_multiplier"),
    "z traced, adaptive": (lambda: adaptive(jnp.float32(1)), TypeError, "noise_multiplier"),
    "batch_size zero": (lambda: aggregate(batch_size=0), ValueError, "batch_size"),
    "batch_size traced": (lambda: aggregate(batch_size=jnp.float32(4)), TypeError, "static_args"),
    "batch_size inf": (lambda: gep(batch_size=float("inf")), ValueError, "batch_size"),
    "clipper": (lambda: aggregate(1.0), TypeError, "clipper"),
    "clip inf": (lambda: aggregate(jdp.clip_by_norm(float("inf"))), ValueError, "clip_norm"),
    "clip inf gep": (lambda: gep(clip_norms=(1.0, float("inf"))), ValueError, "clip_norm"),
    "clip zero gep": (lambda: gep(clip_norms=(1.0, 0.0)), ValueError, r"clip_norms\[1\]"),
    "clip pair gep": (lambda: gep(clip_norms=1.0), TypeError, "clip_norms"),
    "clip None gep": (lambda: gep(clip_norms=(None, 1.0)), TypeError, r"clip_norms\[0\]"),
    "adjacency": (lambda: aggregate(adjacency="add"), ValueError, "adjacency"),
    "rank zero": (lambda: gep(rank=0), ValueError, "rank"),
    "rank real": (lambda: gep(rank=2.0), TypeError, "rank"),
    "rank < groups": (
        lambda: gep(rank=1, groups={"a": 0, "b": 1, "c": 2}).init(PARAMS),
        ValueError,
        "rank",
    ),
    "refresh_every": (lambda: gep(refresh_every=0), ValueError, "refresh_every"),
    "power_iterations": (lambda: gep(power_iterations=0), ValueError, "power_iterations"),
    "whitening above 1": (lambda: gep(whitening=2.0), ValueError, "whitening"),
    "whitening text": (lambda: gep(whitening="full"), TypeError, "whitening"),
    "noise_split": (lambda: gep(noise_split="best"), ValueError, "noise_split"),
    "public_gradients": (lambda: gep(public_gradients=1), TypeError, "public_gradients"),
    "public gradients aggregated": (
        lambda: gep(public_gradients=lambda params, key: params).init(PARAMS),
        ValueError,
        "shape",
    ),
    "groups": (lambda: gep(groups={"a": 0}).init(PARAMS), ValueError, "groups"),
    "num_classes": (lambda: anchors_of(num_classes=1), ValueError, "num_classes"),
    "no images": (lambda: anchors_of(images=jnp.ones((0, 2))), ValueError, "images"),
    "target_quantile": (lambda: adaptive(target_quantile=1.0), ValueError, "target_quantile"),
    "clip_learning_rate": (lambda: adaptive(clip_learning_rate=0), ValueError, "clip_learning"),
    "initial_clip_norm": (lambda: adaptive(initial_clip_norm=0), ValueError, "initial_clip"),
    "rate": (lambda: coordinates(rate=1.5), ValueError, "rate"),
    "rate text": (lambda: coordinates(rate="half"), TypeError, "rate"),
    "key coordinates": (lambda: coordinates(0), TypeError, "key"),
    "clipper sparsified": (lambda: sparsified(1.0, WEIGHTS), TypeError, "clipper"),
    "clipper preconditioned": (lambda: preconditioned(1.0, WEIGHTS), TypeError, "clipper"),
    "kept structure": (lambda: weighted(sparsified, {"a": True}), ValueError, "kept"),
    "kept shape": (lambda: weighted(sparsified, _batch()), ValueError, r"kept\['a'\]"),
    "weights": (lambda: weighted(preconditioned, WEIGHTS["a"]), ValueError, "preconditioner"),
    "floor": (lambda: public_data.inverse_root(WEIGHTS, floor=0.0), ValueError, "floor"),
    "mixing": (lambda: mix(-0.1), ValueError, "mixing"),
    "mixing text": (lambda: mix("cosine"), TypeError, "mixing"),
    "public gradient": (lambda: mix(gradient=WEIGHTS), TypeError, "public_gradient"),
    "public gradient per example": (
        lambda: _update(mix(gradient=_public), WEIGHTS),
        ValueError,
        r"public_gradient\(params, key\)",
    ),
    "key mix": (lambda: mix(key=None), TypeError, "key"),
    "cosine steps": (lambda: public_data.cosine_mixing(0), ValueError, "steps"),
    "public batch_size": (
        lambda: public_data.mean_gradient(lambda p, e: 0.0, jnp.ones(3), batch_size=0),
        ValueError,
        "batch_size",
    ),
    "public loss": (lambda: public_data.mean_gradient(1, jnp.ones(3)), TypeError, "loss"),
    "rank projection": (lambda: projection(rank=0), ValueError, "rank"),
    "key projection": (lambda: projection(key=0), TypeError, "key"),
    "anchors projection": (lambda: projection(public_gradients=1), TypeError, "public_gradients"),
    "params projection": (
        lambda: projection().update(WEIGHTS, projection().init(WEIGHTS)),
        ValueError,
        "params",
    ),
    "noise_std": (lambda: corrected(0.0), ValueError, "noise_std"),
    "noise_std of a leaf": (lambda: corrected({"a": -1.0}), ValueError, "noise_std"),
    "noise_std structure": (
        lambda: _update(corrected({"a": 0.1}), WEIGHTS),
        ValueError,
        "noise_std",
    ),
    "floor of Adam": (lambda: corrected(floor=0.0), ValueError, "floor"),
    "b2": (lambda: corrected(b2=1.0), ValueError, "b2"),
    "count_noise_std": (lambda: adaptive(count_noise_std=0.5), ValueError, "count_noise_std"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_argument(name):
    make, error, match = ARGUMENTS[name]
    with pytest.raises(error, match=match):
        make()


UPDATES = {"aggregate": aggregate, "gep": gep, "adaptive": adaptive}


@pytest.mark.parametrize("name", UPDATES)
def test_mask_and_params_are_required(name):
    tx = UPDATES[name]()
    state = tx.init(WEIGHTS)
    with pytest.raises(TypeError, match="mask"):
        tx.update(_batch(), state, WEIGHTS)
    with pytest.raises(TypeError, match="mask"):
        tx.update(_batch(), state, WEIGHTS, maks=MASK)
    with pytest.raises(ValueError, match="params"):
        tx.update(_batch(), state, mask=MASK)
    with pytest.raises(ValueError, match="shape"):
        tx.update(WEIGHTS, state, WEIGHTS, mask=MASK)
    with pytest.raises(TypeError, match="booleans"):
        tx.update(_batch(), state, WEIGHTS, mask=jnp.ones(ROWS))


def test_privatize_requires_params_and_a_sum():
    tx = _privatize()
    state = tx.init(WEIGHTS)
    with pytest.raises(ValueError, match="params"):
        tx.update(_clipped(), state)
    with pytest.raises(TypeError, match="dp_aggregate"):
        tx.update(WEIGHTS, state, WEIGHTS)
    with pytest.raises(ValueError, match="structure"):
        tx.update(_clipped(), state, jnp.zeros(27))
