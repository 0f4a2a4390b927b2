"""The methods that `experiments.relu_regression` compares, each with a grid of sixteen settings.

A setting is (learning rate, size, knob). Size is the number of steps or blocks; the knob is what
else a method has to choose: the clip norm of residuals, the share of them that a private threshold
lets through, the quantile of a public one, or the radius of the ball that DP-PGD projects to. Grids
are for data with |x| about 1; all learning rates of large blocks are the same.
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
from jdp.glmtron import Gradient
from jdp.planning import TrainingPlan
from jdp.relu_fit import check_threshold
from jdp.relu_regression import (
    Descent,
    FixedThreshold,
    Grid,
    PrivateThreshold,
    PublicThreshold,
    fit,
    plan_blocks,
)

BIG = (1.0, 5.0, 20.0, 100.0)
SMALL = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
CLIPS = (0.1, 0.4)
NUM_PUBLIC = 100  # records that set the public threshold of dp-glmtron
MARGIN = 0.5  # labels are taken to be below |w| R + MARGIN in DP-PGD's worst case


class Setting(NamedTuple):
    """One point of a grid."""

    learning_rate: float
    size: int
    knob: float


@dataclasses.dataclass(frozen=True)
class Method:
    """A method to compare.

    Attributes:
      plan: (n, epsilon, delta, size) -> plan.
      threshold: (knob, public x, public y, R) -> threshold.
      gradient: "surrogate" or "true".
      sizes: of the grid; 0 for methods of fixed size.
      knobs: of the grid.
      rates: of the grid.
      private: whether epsilon matters.
      clipped: whether contributions are clipped at all.
      projects: whether the knob is a radius.
      steps_are_small: many steps on few rows, to be run side by side.
    """

    plan: Callable[[int, float, float, int], TrainingPlan]
    threshold: Callable[[Any, Any, Any, float], Any]
    gradient: Gradient = "surrogate"
    sizes: tuple[int, ...] = (20, 100)
    knobs: tuple[float, ...] = CLIPS
    rates: tuple[float, ...] = BIG
    private: bool = True
    clipped: bool = True
    projects: bool = False
    steps_are_small: bool = False

    def grid(self) -> list[Setting]:
        """The sixteen settings."""
        return [Setting(*p) for p in itertools.product(self.rates, self.sizes, self.knobs)]


def _full(n, epsilon, delta, size):
    return plan_blocks(n, n, size, epsilon=epsilon, delta=delta)


def _free(n, epsilon, delta, size):
    return plan_blocks(n, n, size, noise_multiplier=0.0, delta=delta)


def _free_pass(n, epsilon, delta, size):
    return plan_blocks(n, 1, noise_multiplier=0.0, delta=delta)


@functools.cache
def _poisson(n, epsilon, delta, size):
    return jdp.plan(n, max(1, n // 10), size, epsilon=epsilon, delta=delta)


def _blocks(n, epsilon, delta, size):
    return plan_blocks(n, n // size, epsilon=epsilon, delta=delta)


def _tree(n, epsilon, delta, size):
    return plan_blocks(n, n // size, epsilon=epsilon, delta=delta, release="tree")


def _histogram(n, epsilon, delta, size):
    """A tenth of the rows for thresholds, or up to half where noise asks for more."""
    z = plan_blocks(n, 1, epsilon=epsilon, delta=delta).noise_multiplier
    needed = math.ceil(1.5 * PrivateThreshold().slack(float(z), "zero-out"))
    block = n // size
    rows = max(block // 10, min(needed, block // 2))
    return plan_blocks(n, block - rows, epsilon=epsilon, delta=delta, threshold_rows=rows)


def _single(n, epsilon, delta, size):
    return plan_blocks(n, 1, epsilon=epsilon, delta=delta)


def _shuffled(n, epsilon, delta, size):
    options: dict[str, Any] = {"shuffling": True, "adjacency": "replace-one"}
    return plan_blocks(n, 1, epsilon=epsilon, delta=delta, **options)


def _fixed(knob, x, y, bound):
    return FixedThreshold(knob)


def _worst_case(knob, x, y, bound):
    return FixedThreshold(2 * knob * bound + MARGIN)


def _unclipped(knob, x, y, bound):
    return FixedThreshold(math.inf)


def _public(knob, x, y, bound):
    return PublicThreshold(x, y, Grid(0.01, 8), quantile=knob)


def _private(knob, x, y, bound):
    return PrivateThreshold(Grid(0.01, 8), share=knob)


_BLOCKS: dict[str, Any] = {"sizes": (5, 30)}
_ONE_PASS: dict[str, Any] = {"sizes": (0,), "rates": SMALL, "steps_are_small": True}
_PGD: dict[str, Any] = {"knobs": (1.0, 2.0), "projects": True}
METHODS = {
    "glmtron": Method(_free, _fixed, private=False),  # dp-gd-glmtron without noise
    "sgd": Method(
        _free_pass, _unclipped, "true", knobs=(0.0,), private=False, clipped=False, **_ONE_PASS
    ),
    "dp-gd-glmtron": Method(_full, _fixed),
    "dp-gd-true": Method(_full, _fixed, "true"),
    "dp-gd-switch": Method(_full, _fixed, "switch"),
    "dp-sgd": Method(_poisson, _fixed, "true", sizes=(25, 100)),
    "dp-sgd-surrogate": Method(_poisson, _fixed, sizes=(25, 100)),
    "dp-mbglmtron": Method(_histogram, _private, knobs=(0.05, 0.3), **_BLOCKS),
    "dp-mbglmtron-fixed": Method(_blocks, _fixed, **_BLOCKS),
    "dp-taglmtron": Method(_tree, _fixed, rates=(0.3, 1.0, 5.0, 20.0), sizes=(16, 128)),
    "dp-glmtron": Method(_single, _public, knobs=(0.9, 1.0), **_ONE_PASS),
    "dp-glmtron-shuffled": Method(_shuffled, _public, knobs=(0.9, 1.0), **_ONE_PASS),
    "dp-pgd-true": Method(_full, _worst_case, "true", **_PGD),
    "dp-pgd-surrogate": Method(_full, _worst_case, **_PGD),
}


@functools.cache
def _program(method: str, n: int, size: int):
    """The compiled run of one setting on one data set, or of several side by side.

    Arguments: key, data, R, noise multiplier, learning rate, knob. Settings (and then data sets)
    are mapped over where steps are small.
    """
    own = METHODS[method]
    plan = own.plan(n, 1.0, 1e-5, size)  # for its sizes; the noise multiplier is an argument

    def one(key, data: Data, bound, z, rate, knob):
        radius = knob if own.projects else math.inf
        descent = Descent(rate, bound, radius, gradient=own.gradient)
        if not own.clipped:
            descent = Descent(rate, math.inf, gradient=own.gradient, clip="vector")
        noisy = dataclasses.replace(plan, noise_multiplier=z)
        threshold = own.threshold(knob, data.public_x, data.public_y, bound)
        options: dict[str, Any] = {"threshold": threshold, "descent": descent, "start": data.start}
        return fit(key, data.x, data.y, noisy, **options).weights

    if own.steps_are_small:
        one = jax.vmap(jax.vmap(one, (0, 0, None, None, None, None)), (None,) * 4 + (0, 0))
    return jax.jit(one)


class Data(NamedTuple):
    """Data sets side by side."""

    x: jax.Array
    y: jax.Array
    start: jax.Array
    public_x: jax.Array
    public_y: jax.Array


def refused(method: str, n: int, epsilon: float, delta: float, setting: Setting) -> str | None:
    """The library's reason why this setting cannot be run privately, if so."""
    own = METHODS[method]
    try:
        plan = own.plan(n, epsilon, delta, setting.size)
        threshold = own.threshold(setting.knob, jnp.zeros((1, 1)), jnp.zeros(1), 1.0)
        check_threshold(plan, threshold)
    except ValueError as error:
        return str(error)
    return None


def run(method: str, settings: list[Setting], key, sets: list[Data], epsilon, delta, bound):
    """Weights (S, D, d) of each setting on each data set; compiled once for each size."""
    keys = jax.random.split(key, len(sets))
    found: dict[Setting, np.ndarray] = {}
    for size in dict.fromkeys(s.size for s in settings):
        own = [s for s in settings if s.size == size]
        n = len(sets[0].y)
        plan = METHODS[method].plan(n, epsilon, delta, size)
        program, z = _program(method, n, size), jnp.float32(plan.noise_multiplier)
        if METHODS[method].steps_are_small:
            rates, knobs = (jnp.array([s[i] for s in own]) for i in (0, 2))
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
            weights = program(keys, stacked, bound, z, rates, knobs)
        else:
            weights = [
                [
                    program(k, data, bound, z, s.learning_rate, s.knob)
                    for k, data in zip(keys, sets, strict=True)
                ]
                for s in own
            ]
        found |= dict(zip(own, np.asarray(weights), strict=True))
    return np.stack([found[s] for s in settings])
