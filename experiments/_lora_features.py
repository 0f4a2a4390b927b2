"""Features of images, from a classifier of public images, and distances between sets in them."""

import importlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from experiments._run import UsageError

Features = Callable[[np.ndarray], np.ndarray]
"""Images (n, height, width, channels) in -1..1 to features (n, d)."""


class Classifier(nn.Module):
    """Two convolutions and a hidden layer, whose values before the nonlinearity are features."""

    width: int = 64
    classes: int = 10

    @nn.compact
    def __call__(self, images):
        """Return (features, logits)."""
        x = nn.avg_pool(nn.gelu(nn.Conv(16, (3, 3))(images)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.gelu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        features = nn.Dense(self.width)(x.reshape(len(x), -1))
        return features, nn.Dense(self.classes)(nn.gelu(features))


def train(images, labels, key, *, steps: int, advance, batch_size: int = 128) -> Any:
    """Train the classifier on public images; return its parameters."""
    module = Classifier(classes=int(np.max(labels)) + 1)
    params = module.init(key, images[:1])["params"]
    tx = optax.adam(optax.cosine_decay_schedule(2e-3, steps))

    @jax.jit
    def step(params, state, x, y):
        def loss(params):
            outputs: Any = module.apply({"params": params}, x)
            logits = outputs[1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.integers(0, len(images), batch_size)
        params, state = step(params, state, images[rows], labels[rows])
        advance(1)
    return params


def accuracy(params: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that the classifier gets right."""
    logits = _in_blocks(jax.jit(lambda x: _apply(params, x)[1]), images)
    return float((logits.argmax(1) == labels).mean())


def of_classifier(params: Any) -> Features:
    """The features of a trained classifier."""
    return lambda images: _in_blocks(_features, images, params)


def given(name: str) -> Features:
    """The function `module:function` that the user named, for example one around Inception."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--features must be classifier, or module:function that maps images in -1..1 to "
            f"features (n, d), but got {name!r} ({error})"
        ) from error


def _apply(params, images):
    classes = params["Dense_1"]["bias"].shape[0]
    return Classifier(params["Dense_0"]["bias"].shape[0], classes).apply({"params": params}, images)


@jax.jit
def _features(images, params):
    return _apply(params, images)[0]


def _in_blocks(fun, images, *rest, size: int = 512) -> np.ndarray:
    parts = []
    for start in range(0, len(images), size):
        part = images[start : start + size]
        filled = np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
        parts.append(np.asarray(fun(filled, *rest))[: len(part)])
    return np.concatenate(parts)


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    r"""The Frechet distance $|m_a - m_b|^2 + \mathrm{tr}(C_a + C_b - 2 (C_a C_b)^{1/2})$.

    Args:
      a: features (n, d).
      b: features (m, d).
    """
    a, b = a.astype(float), b.astype(float)
    ca, cb = np.cov(a.T), np.cov(b.T)
    values, vectors = np.linalg.eigh(ca)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ cb @ root), 0)).sum()
    shift = a.mean(0) - b.mean(0)
    return float(shift @ shift + np.trace(ca) + np.trace(cb) - 2 * cross)


def kernel_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The kernel distance (KID): unbiased squared discrepancy under (x.y/d + 1)^3.

    Unlike the Frechet distance it has no bias where a set has few images.
    """
    kernel = lambda x, y: (x.astype(float) @ y.T.astype(float) / x.shape[1] + 1) ** 3  # noqa: E731
    within = lambda x: (kernel(x, x).sum() - np.trace(kernel(x, x))) / (len(x) * (len(x) - 1))  # noqa: E731
    return float(within(a) + within(b) - 2 * kernel(a, b).mean())
