"""The optax doors inside what users build around them."""

import warnings

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import optax
import pytest
from checks import ALL, BATCH
from strategies import PARAMS, ROWS, flat, rows, tree_of

import jdp
from jdp._typing import NoiseMultiplier

MASK = jnp.asarray(ALL)
# privatize, one clipper, and every door with a state of its own
DOORS = [
    door
    for door in mechanisms.DOORS
    if door.name in ("aggregate-norm", "privatize", "adaptive", "gep", "gep-biased")
]
doors = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)


def _grads(seed=1, dtype=jnp.float32):
    return tree_of(rows(["normal"] * ROWS, seed), dtype)


def _update(door, tx, grads, params=PARAMS, mask=MASK):
    updates, extra = door.feed(grads, mask)
    return tx.update(updates, tx.init(params), params, **extra)


@doors
def test_in_optax_chains(door, key):
    plain, _ = _update(door, door.make(key=key, noise_multiplier=1.0), _grads())
    sgd = optax.chain(door.make(key=key, noise_multiplier=1.0), optax.sgd(0.5, momentum=0.9))
    update, _ = _update(door, sgd, _grads())
    np.testing.assert_allclose(flat(update), -0.5 * flat(plain), rtol=1e-5)
    named = optax.named_chain(
        ("private", door.make(key=key, noise_multiplier=1.0)), ("sgd", optax.sgd(0.5))
    )
    update, state = _update(door, named, _grads())
    np.testing.assert_allclose(flat(update), -0.5 * flat(plain), rtol=1e-5)
    assert int(state["private"].step) == 1
    adamw = optax.chain(
        door.make(key=key, noise_multiplier=1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    )
    update, _ = _update(door, adamw, _grads())
    np.testing.assert_allclose(np.abs(flat(update)), 1e-3, rtol=1e-2)  # Adam's first step


def test_inject_hyperparams(key):
    tx = optax.inject_hyperparams(jdp.privatize, static_args=("batch_size", "key", "adjacency"))(
        lambda step: 1.0 + step, batch_size=BATCH, key=key, adjacency="zero-out"
    )
    door = next(door for door in DOORS if door.name == "privatize")
    update, state = jax.jit(lambda grads: _update(door, tx, grads))(_grads())
    plain, _ = _update(door, door.make(key=key, noise_multiplier=1.0), _grads())
    np.testing.assert_allclose(flat(update), flat(plain), rtol=1e-5, atol=1e-6)
    assert float(state.hyperparams["noise_multiplier"]) == 1.0


def test_inject_hyperparams_never_narrows_the_noise(key):
    # It casts hyper-parameters to the parameters' dtype: 1.0625 would become the noise for 1.065.
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    door = next(door for door in DOORS if door.name == "privatize")
    static = ("batch_size", "key", "adjacency")
    options = {"batch_size": BATCH, "key": key, "adjacency": "zero-out"}
    tx = optax.inject_hyperparams(jdp.privatize, static_args=static)(1.065, **options)
    with pytest.raises(TypeError, match="hyperparam_dtype"):
        _update(door, tx, _grads(dtype=jnp.bfloat16), narrow)
    tx = optax.inject_hyperparams(jdp.privatize, static_args=static, hyperparam_dtype=jnp.float32)(
        1.065, **options
    )
    update, _ = _update(door, tx, _grads(), narrow)
    assert update["a"].dtype == jnp.bfloat16


@doors
def test_updates_have_the_dtype_of_bfloat16_parameters(door, key):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    tx = door.make(key=key, noise_multiplier=1.0)
    grads = _grads(dtype=jnp.bfloat16)
    update, state = _update(door, tx, grads, narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(update)} == {jnp.dtype(jnp.bfloat16)}
    wide, _ = _update(door, tx, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads))
    np.testing.assert_allclose(flat(update), flat(wide), rtol=1e-2, atol=1e-2)
    # Another step with the state that came out, so that it can be carried through a scan.
    updates, extra = door.feed(grads, MASK)
    _, after = tx.update(updates, state, narrow, **extra)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert a.dtype == b.dtype


@doors
def test_vmapped_keys_are_separate_runs(door):
    keys = jax.random.split(jax.random.key(4), 3)
    run = lambda key: door.run(key, _grads(), MASK)[0][0]  # noqa: E731
    together = jax.jit(jax.vmap(run))(keys)
    for i in range(3):
        alone = run(keys[i])
        np.testing.assert_allclose(
            flat(jax.tree.map(lambda leaf, i=i: leaf[i], together)), flat(alone), atol=2e-5
        )


def test_adjacency_is_what_the_multiplier_was_calibrated_for(key):
    z = NoiseMultiplier(1.0, "replace-one")
    for make in (
        lambda **options: jdp.privatize(z, batch_size=4, key=key, **options),
        lambda **options: jdp.dp_aggregate(
            jdp.clip_by_norm(1.0), z, batch_size=4, key=key, **options
        ),
        lambda **options: jdp.dp_aggregate_adaptive(z, batch_size=40, key=key, **options),
        lambda **options: jdp.gep(
            rank=3,
            clip_norms=(1.0, 0.2),
            noise_multiplier=z,
            batch_size=4,
            key=key,
            public_gradients=mechanisms.anchors,
            **options,
        ),
    ):
        make(adjacency="replace-one")
        with pytest.raises(ValueError, match="calibrated for"):
            make(adjacency="zero-out")


def test_no_noise_equals_optax_on_full_finite_batches(key):
    # optax.contrib divides by the batch that it is given and knows no mask.
    oracle = optax.contrib.differentially_private_aggregate(0.7, 0.0, key=jax.random.key(0))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        want, _ = oracle.update(_grads(), oracle.init(PARAMS))
    tx = jdp.dp_aggregate(jdp.clip_by_norm(0.7), 0.0, batch_size=ROWS, key=key)
    update, _ = tx.update(_grads(), tx.init(PARAMS), PARAMS, mask=MASK)
    np.testing.assert_allclose(flat(update), flat(want), rtol=1e-4, atol=1e-6)


def test_no_noise_equals_jax_privacy_on_full_finite_batches():
    jax_privacy = pytest.importorskip("jax_privacy")

    def loss(params, example):
        return jnp.sum(jnp.tanh(example @ params["w"]) ** 2)

    params = {"w": jnp.linspace(-1, 1, 8).reshape(4, 2)}
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        oracle = jax_privacy.clipped_grad(
            loss, l2_clip_norm=0.3, batch_argnums=1, keep_batch_dim=False
        )
        want = oracle(params, batch)["w"]
    got = jdp.clipped_grad(loss, jdp.clip_by_norm(0.3))(params, batch, mask=jnp.ones(5, bool))
    np.testing.assert_allclose(got.parts[0]["w"], want, rtol=1e-4, atol=1e-6)
