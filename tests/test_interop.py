"""Parameters of any make: the core knows pytrees only."""

import dataclasses

import flax.linen as linen
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import moved

import jdp

N = 6
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 4)), jnp.float32)
Y = jnp.arange(N) % 3
MASK = jnp.array([True, True, True, False, True, True])


def _cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def _linen():
    model = linen.Sequential([linen.Dense(5), linen.LayerNorm(), jnp.tanh, linen.Dense(3)])
    params = jax.jit(model.init)(jax.random.key(0), X[:1])["params"]
    return params, lambda p, e: _cross_entropy(model.apply({"params": p}, e[0][None])[0], e[1])


class _Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 5, rngs=rngs)
        self.out = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def _nnx():
    graph, params = nnx.split(_Nnx(nnx.Rngs(0)))
    return params, lambda p, e: _cross_entropy(nnx.merge(graph, p)(e[0][None])[0], e[1])


def _dict():
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (4, 3)), "layers": [jnp.zeros(3), (jnp.ones(()),)]}

    def loss(p, e):
        logits = (e[0] @ p["w"] + p["layers"][0]) * p["layers"][1][0]
        return _cross_entropy(logits, e[1])

    return params, loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:  # as equinox modules are: parameters and static fields in one object
    weight: jax.Array
    bias: jax.Array | None
    activation: str = dataclasses.field(metadata={"static": True}, default="tanh")

    def __call__(self, x):
        return getattr(jnp, self.activation)(x @ self.weight + self.bias)


def _dataclass():
    model = Affine(jax.random.normal(jax.random.key(0), (4, 3)), jnp.zeros(3))
    return model, lambda m, e: _cross_entropy(m(e[0]), e[1])


MAKES = {"linen": _linen, "nnx": _nnx, "dict": _dict, "dataclass": _dataclass}


@pytest.mark.parametrize("make", MAKES)
def test_two_steps_of_training_by_both_doors(make, key):
    params, loss = MAKES[make]()
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(0.5), microbatch_size=4)
    one = optax.chain(jdp.privatize(0.0, batch_size=5, key=key), optax.adamw(1e-2))
    two = optax.chain(
        jdp.dp_aggregate(jdp.clip_by_norm(0.5), 0.0, batch_size=5, key=key), optax.adamw(1e-2)
    )

    @jax.jit
    def train(params):
        a = b = params
        one_state, two_state = one.init(params), two.init(params)
        for _ in range(2):
            update, one_state = one.update(grad(a, (X, Y), mask=MASK), one_state, a)
            a = optax.apply_updates(a, update)
            gradients = jdp.per_example_grad(loss)(b, (X, Y))
            update, two_state = two.update(gradients, two_state, b, mask=MASK)
            b = optax.apply_updates(b, update)
        return a, b

    a, b = train(params)
    assert jax.tree.structure(a) == jax.tree.structure(params)
    before, after = (jnp.mean(jax.vmap(loss, (None, 0))(p, (X, Y))[MASK]) for p in (params, a))
    assert after < before
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("make", ["linen", "nnx"])
def test_gep_with_groups(make, key):
    params, loss = MAKES[make]()
    tx = jdp.gep(
        rank=4,
        clip_norms=(1.0, 0.2),
        noise_multiplier=1.0,
        batch_size=5,
        key=key,
        public_gradients=jdp.random_label_gradients(loss, X, num_classes=3),
        groups=jdp.group_leaves(params, 2),
    )
    step = jax.jit(
        lambda state: tx.update(
            jdp.per_example_grad(loss)(params, (X, Y)), state, params, mask=MASK
        )
    )
    update, state = step(tx.init(params))
    assert jax.tree.structure(update) == jax.tree.structure(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))
    assert int(state.step) == 1


def test_batch_statistics_are_refused():
    model = linen.BatchNorm(use_running_average=False)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert "batch_stats" in variables
    with pytest.raises(ValueError, match="GroupNorm"):
        jdp.per_example_grad(lambda v, e: 0.0)(variables, (X, Y))


def test_numpy_parameters_and_batches():
    params, loss = _dict()
    as_numpy = jax.tree.map(np.asarray, params)
    batch = np.asarray(X), np.asarray(Y)
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(0.5))
    a = grad(as_numpy, batch, mask=np.asarray(MASK))
    b = grad(params, (X, Y), mask=MASK)
    assert moved(a, b) < 1e-6
