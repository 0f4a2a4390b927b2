"""Book-keeping on what tripped it up: complex numbers, tiny factors, NumPy, explicit meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jdp
from jdp import gradients

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 6)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(6, 6)), jnp.float32)
MASK = jnp.ones(4, bool)


def complex_activations(w, example):
    return jnp.sum(jnp.tanh(0.3 * jnp.abs((example + 1j * example[::-1]) @ w)))


def tiny_times_huge(w, example):
    return jnp.sum((1e-32 * example) @ w * 1e32)


def huge_times_tiny(w, example):
    return jnp.sum((1e32 * example[:1]) @ w * 1e-32)


@pytest.mark.parametrize("loss", [complex_activations, tiny_times_huge, huge_times_tiny])
@pytest.mark.parametrize("positions", [1, 5])
def test_norms_and_sums_are_those_of_single_examples(loss, positions):
    x = X[:, :positions]
    rows = jnp.stack([jax.grad(loss)(W, example) for example in x])
    norms = jnp.linalg.norm(rows.reshape(4, -1), axis=1)
    ours = jdp.unprotected_gradient_norms(loss)(W, x)
    assert ours.dtype == jnp.float32
    assert (ours >= norms * (1 - 1e-5)).all() and (ours <= norms * 1.03).all()
    clip_norm = float(jnp.median(norms))
    for strategy in ("book-keeping", "vmap"):
        grad = jdp.clipped_grad(loss, jdp.clip_by_norm(clip_norm), strategy=strategy)
        total = grad(W, x, mask=MASK).parts[0]
        reference = jdp.clip_by_norm(clip_norm)(rows, MASK).parts[0]
        np.testing.assert_allclose(total, reference, atol=0.03 * clip_norm * 4)
        assert jnp.linalg.norm(total) > 0.5 * clip_norm


def test_numpy_batches_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr(gradients, "examples_that_fit", lambda *_, **__: 2)
    x, loss = np.asarray(X), lambda w, example: jnp.sum(jnp.tanh(example @ w))
    expected = jax.vmap(jax.grad(loss), in_axes=(None, 0))(W, x)
    np.testing.assert_allclose(jdp.per_example_grad(loss)(W, x), expected, rtol=1e-5, atol=1e-6)
    norms = jdp.unprotected_gradient_norms(loss)(W, x)
    lengths = jnp.linalg.norm(expected.reshape(4, -1), axis=1)
    assert (norms >= lengths * (1 - 1e-5)).all() and (norms <= lengths * 1.03).all()
    for strategy in ("vmap", "scan", "book-keeping"):
        grad = jdp.clipped_grad(loss, jdp.clip_by_norm(np.inf), strategy=strategy)
        total = grad(W, x, mask=np.ones(4, bool)).parts[0]
        np.testing.assert_allclose(total, expected.sum(0), rtol=1e-4, atol=1e-5)


def test_norms_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("batch",), (AxisType.Explicit,), devices=jax.devices()[:1])
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("batch")))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
    loss = lambda w, example: jnp.sum(jnp.tanh(example @ w))  # noqa: E731
    rows = jax.vmap(jax.grad(loss), in_axes=(None, 0))(W, X).reshape(4, -1)
    with jax.set_mesh(mesh):
        norms = jdp.unprotected_gradient_norms(loss)(w, x)
    np.testing.assert_allclose(norms, jnp.linalg.norm(rows, axis=1), rtol=1e-5)
