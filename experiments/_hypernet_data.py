"""Linear regressions with decaying weights (Nishikawa et al. 2026), and their closed-form rates.

x is uniform on the sphere of radius sqrt(d), y = w.x + N(0, 1), and w_i is uniform on
[-i^-gamma, i^-gamma]. So E[x x^T] = I and E[y x] = w: the excess risk of v is |v - w|^2, and the
mean of y x is an estimate. Errors are relative to |w|^2, that is to the excess risk of v = 0:
the sum over data sets of one, over the sum of the other.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DELTA = 1e-5


def bounds(d: int, gamma) -> jax.Array:
    """The bounds i^-gamma of |w_i|, which are public."""
    return jnp.arange(1.0, d + 1) ** -gamma


def draw_weights(key: jax.Array, d: int, gamma) -> jax.Array:
    """One w."""
    return bounds(d, gamma) * jax.random.uniform(key, (d,), minval=-1.0, maxval=1.0)


def draw_inputs(key: jax.Array, n: int, d: int) -> jax.Array:
    """Inputs x (n, d), uniform on the sphere of radius sqrt(d)."""
    x = jax.random.normal(key, (n, d))
    return x * (math.sqrt(d) / jnp.linalg.norm(x, axis=1, keepdims=True))


def draw(key: jax.Array, n: int, d: int, gamma) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One data set: x (n, d), y (n,) and w (d,)."""
    weights, inputs, labels = jax.random.split(key, 3)
    w, x = draw_weights(weights, d, gamma), draw_inputs(inputs, n, d)
    return x, x @ w + jax.random.normal(labels, (n,)), w


def relative(errors: np.ndarray, norms: np.ndarray) -> tuple[float, float]:
    """The errors of all data sets relative to the |w|^2 of all, and its standard error (jackknife).

    A mean of ratios would hang on the few data sets with a small w.
    """
    errors, norms = np.asarray(errors, np.float64), np.asarray(norms, np.float64)
    mean, n = errors.sum() / norms.sum(), len(errors)
    if n < 2:
        return float(mean), 0.0
    left = (errors.sum() - errors) / (norms.sum() - norms)
    return float(mean), float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))


def best_k_slope(gamma: float, clip_rule: str) -> float:
    """Slope of log k in log(epsilon N) at the best k, where noise outweighs sampling error.

    k C^2 / (epsilon N)^2 meets the bias k^(1 - 2 gamma): with C = k as in the paper at k of order
    (epsilon N)^(1 / (gamma + 1)), with C a multiple of sqrt(k) at (epsilon N)^(2 / (2 gamma + 1)).
    """
    return 1 / (gamma + 1) if clip_rule == "k" else 2 / (2 * gamma + 1)


def rate_slope(gamma: float, clip_rule: str = "k") -> float:
    """Slope of log error in log(epsilon N) at the best k: (1 - 2 gamma) times `best_k_slope`."""
    return (1 - 2 * gamma) * best_k_slope(gamma, clip_rule)


def sgd_lower_bound(d: int, n: int, epsilon: float) -> float:
    """The paper's lower bound for DP-SGD, without its constant: min(d^3 log(1/delta)/(eps N)^2, 1).

    Its other term, d/N, is left out: it holds without privacy too.
    """
    return min(1.0, d**3 * math.log(1 / DELTA) / (epsilon * n) ** 2)


def size_of(d: int, zeta: float) -> int:
    """N = d^(1 + zeta)."""
    return round(d ** (1 + zeta))


Row = dict[str, Any]
