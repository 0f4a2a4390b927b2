"""Private linear regressions that nobody trained: the closed form and its rivals, 24 settings each.

All are (epsilon, delta)-DP under zero-out adjacency, with N public. A setting is (a, b, size):

  closed-form   U_k (mean of clip_C(y U_k^T x) + noise), which is an untrained DP-DeepSets: the
                encoder keeps k coordinates of y x.           a = log k / log d, b = C / sqrt(k)
  bayes-mean    noisy mean of clip_C(y x) in all d coordinates, then each coordinate shrunk by its
                (public) prior variance i^-2gamma / 3.        a = C / sqrt(d), b = noise variance
                                                              assumed, over the one computed
  dp-gd         full-batch gradient descent from zero.        a = step, b = C / sqrt(d), size = T
  dp-sgd        the same on Poisson samples of N / 4.         likewise
  adassp        noisy X^T X, its least eigenvalue and X^T y as one Gaussian, then a ridge (Wang
                2018).                                        a = ridge over noise, b = clip of y
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jdp
from experiments._hypernet_data import DELTA, bounds, draw
from jdp.clipping import HEADROOM
from jdp.planning import TrainingPlan
from jdp.relu_regression import plan_blocks
from jdp.set_embedding import plan_embedding, private_embedding

SGD_SHARE = 4  # a Poisson sample of dp-sgd has N / 4 records on average


class Setting(NamedTuple):
    """One point of a grid; see the module."""

    a: float
    b: float
    size: int = 1


class Problem(NamedTuple):
    """One data set, and what is public: gamma."""

    x: jax.Array
    y: jax.Array
    gamma: jax.Array


def _closed_form(key, data: Problem, z, a, b, size, plan):
    (n, d), k = data.x.shape, jnp.round(data.x.shape[1] ** a)
    kept = jnp.arange(d) < k

    def encode(record):
        x, y = record
        return jnp.where(kept, y * x, 0.0)

    options: dict[str, Any] = {"noise_multiplier": z, "num_records": n, "adjacency": "zero-out"}
    e = private_embedding(key, encode, (data.x, data.y), clip_norm=b * jnp.sqrt(k), **options)
    return jnp.where(kept, e, 0.0)


def _bayes_mean(key, data: Problem, z, a, b, size, plan):
    (n, d), clip_norm = data.x.shape, a * math.sqrt(data.x.shape[1])
    options: dict[str, Any] = {"noise_multiplier": z, "num_records": n, "adjacency": "zero-out"}
    encode = lambda record: record[1] * record[0]  # noqa: E731
    e = private_embedding(key, encode, (data.x, data.y), clip_norm=clip_norm, **options)
    prior = bounds(d, data.gamma) ** 2 / 3
    noise = (z * clip_norm / n) ** 2 + (1 + jnp.sum(prior)) / n
    return e * prior / (prior + b * noise)


def _gradient(clip_norm):
    loss = lambda w, record: (record[0] @ w - record[1]) ** 2 / 2  # noqa: E731
    return jdp.clipped_grad(loss, jdp.clip_by_norm(clip_norm))


def _dp_sgd(key, data: Problem, z, a, b, size, plan: TrainingPlan):
    (n, d), full = data.x.shape, plan.batch_size == data.x.shape[0]
    gradient = _gradient(b * math.sqrt(d))
    noise_key, sampling_key = jax.random.split(key)

    def step(w, t):
        rows, mask = (data.x, data.y), jnp.ones(n, bool)
        if not full:
            indices, mask = plan.batch(sampling_key, t)
            rows = data.x[indices], data.y[indices]
        total = gradient(w, rows, mask=mask)
        total = jdp.add_noise(jax.random.fold_in(noise_key, t), total, z, adjacency="zero-out")
        return w - a * total / plan.batch_size, None

    return jax.lax.scan(step, jnp.zeros(d), jnp.arange(plan.steps))[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Three(jdp.ClippedSum):
    """Second moments, their least eigenvalue, and first moments."""

    def combine(self, parts):
        """Return all three."""
        return parts


def moments(x, y, radius: float, label_bound) -> Three:
    """Sums over records cut to |x| <= R and |y| <= B, not yet private.

    A record moves x x^T by at most R^2 in Frobenius norm, the least eigenvalue by as much (Weyl),
    and y x by at most R B; in three parts, each has sqrt(3) times that as its noise scale.
    """
    norms = jnp.linalg.norm(x, axis=1)
    keep = jnp.isfinite(norms) & jnp.isfinite(y)
    x = jnp.where(keep[:, None], x * (HEADROOM * jnp.minimum(1.0, radius / norms))[:, None], 0.0)
    y = jnp.where(keep, jnp.clip(y, -label_bound, label_bound), 0.0)
    gram = x.T @ x
    squared, root = radius**2, math.sqrt(3)
    scales = (root * squared, root * squared, root * radius * label_bound)
    parts = (gram, jnp.linalg.eigvalsh(gram)[:1], x.T @ y)
    return Three(parts, scales, rows=len(y), rounding=6 * 2.0**-24 * len(y))


def _adassp(key, data: Problem, z, a, b, size, plan):
    d = data.x.shape[1]
    total = moments(data.x, data.y, math.sqrt(d), b)
    gram, least, moment = jdp.add_noise(key, total, z, adjacency="zero-out")
    # A symmetric matrix of such noise has a norm of about sqrt(2 d) times its standard deviation.
    spread = z * total.noise_scales[0] * math.sqrt(2 * d)
    least = jnp.maximum(least[0] - 2 * z * total.noise_scales[1], 0.0)
    ridge = jnp.maximum(a * spread - least, 0.0)
    values, vectors = jnp.linalg.eigh((gram + gram.T) / 2)
    return vectors @ ((vectors.T @ moment) / jnp.maximum(values + ridge, 0.1 * spread))


def _one_release(n, epsilon, size) -> TrainingPlan:
    return plan_embedding(n, epsilon=epsilon, delta=DELTA)


def _full_batches(n, epsilon, size) -> TrainingPlan:
    return plan_blocks(n, n, size, epsilon=epsilon, delta=DELTA)


@functools.cache
def _poisson(n, epsilon, size) -> TrainingPlan:
    return jdp.plan(n, n // SGD_SHARE, size, epsilon=epsilon, delta=DELTA)


@dataclasses.dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
      fit: (key, problem, noise multiplier, a, b, size, plan) -> (d,) weights.
      plan: (N, epsilon, size) -> plan.
      a: of the grid.
      b: of the grid.
      sizes: of the grid.
    """

    fit: Callable[..., jax.Array]
    plan: Callable[[int, float, int], TrainingPlan]
    a: tuple[float, ...]
    b: tuple[float, ...]
    sizes: tuple[int, ...] = (1,)

    def grid(self) -> list[Setting]:
        """All settings."""
        return [Setting(*p) for p in itertools.product(self.a, self.b, self.sizes)]


_CLIPS = (0.1, 0.4, 1.5)
METHODS = {
    "closed-form": Method(
        _closed_form, _one_release, tuple(j / 7 for j in range(8)), b=(1.25, 2.5, 5.0)
    ),
    "bayes-mean": Method(
        _bayes_mean, _one_release, (0.5, 0.8, 1.3, 2.0, 3.2, 5.0), b=(0.25, 0.7, 2.0, 4.0)
    ),
    "dp-gd": Method(_dp_sgd, _full_batches, (0.03, 0.1, 0.3, 1.0), _CLIPS, (10, 40)),
    "dp-sgd": Method(_dp_sgd, _poisson, (0.02, 0.06, 0.2, 0.6), _CLIPS, (15, 60)),
    "adassp": Method(
        _adassp, _one_release, (0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0), b=(1.0, 2.0, 4.0)
    ),
}
_TOGETHER = 12  # data sets of one call
_FLOATS = 2_000_000  # of the records of data sets that are mapped over side by side


@functools.cache
def _program(method: str, n: int, d: int, size: int):
    """Errors (data sets, settings) and |w|^2 of data sets, compiled once for each size."""
    own = METHODS[method]
    # For its sizes; the noise multiplier is an argument, and so is epsilon with it.
    plan = own.plan(n, 1.0, size)

    def one(key, gamma, z, settings):
        data_key, noise_key = jax.random.split(key)
        x, y, w = draw(data_key, n, d, gamma)

        def error(a, b):
            found = own.fit(noise_key, Problem(x, y, gamma), z, a, b, size, plan)
            return jnp.sum((found - w) ** 2)

        skipped = lambda a, b: jnp.float32(jnp.nan)  # noqa: E731
        run = lambda setting: jax.lax.cond(setting[2], error, skipped, *setting[:2])  # noqa: E731
        return jax.lax.map(run, settings), jnp.sum(w**2)

    def many(keys, gamma, z, settings):
        together = max(1, min(len(keys), _FLOATS // (n * d)))
        each = lambda key: one(key, gamma, z, settings)  # noqa: E731
        return jax.lax.map(each, keys, batch_size=together)

    return jax.jit(many)


def errors(method: str, settings: list[Setting], keys, n, d, gamma, epsilon):
    """Errors (settings, data sets), and |w|^2 of the data sets.

    Always of `_TOGETHER` data sets and of all settings of a size, those that are not asked for
    left out at run time: compiling takes longer than running.
    """
    found, norms = {}, np.zeros(len(keys))
    padded = jnp.concatenate([keys, jnp.repeat(keys[:1], -len(keys) % _TOGETHER, axis=0)])
    for size in dict.fromkeys(s.size for s in settings):
        grid = [s for s in METHODS[method].grid() if s.size == size]
        z = jnp.float32(METHODS[method].plan(n, epsilon, size).noise_multiplier)
        a, b = (jnp.array([s[i] for s in grid], jnp.float32) for i in (0, 1))
        arguments = (jnp.float32(gamma), z, (a, b, jnp.array([s in settings for s in grid])))
        program = _program(method, n, d, size)
        chunks = [program(part, *arguments) for part in padded.reshape(-1, _TOGETHER)]
        table, norms = (np.concatenate(own)[: len(keys)] for own in zip(*chunks, strict=True))
        found |= dict(zip(grid, np.asarray(table, np.float64).T, strict=True))
    return np.stack([found[s] for s in settings]), np.asarray(norms, np.float64)


def tuned(method: str, keys, n, d, gamma, epsilon) -> tuple[Setting, list[float]]:
    """The setting with the least error on the tuning data sets, and all relative errors."""
    settings = METHODS[method].grid()
    found, norms = errors(method, settings, keys, n, d, gamma, epsilon)
    means = np.nan_to_num(found, nan=1e30, posinf=1e30).mean(1) / norms.mean()
    return settings[int(means.argmin())], means.tolist()
