"""The methods that `experiments.relu_regression` compares, each with a grid of up to 30 settings.

A setting is (learning rate, size, knob). Size is the number of steps or blocks; the knob is what
else a method has to choose: the clip norm of residuals, the share of them that a private threshold
lets through, the quantile of a public one, or the radius of the ball that DP-PGD projects to. Grids
are for data with |x| about 1. Runs that differ in numbers only (epsilon, learning rate, knob) share
data and noise, and are one compiled program side by side.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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

BIG = (1.5, 4.0, 10.0, 25.0, 60.0)
SMALL = (1e-6, 1e-5, 3e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)
CLIPS = (0.05, 0.2)
NUM_PUBLIC = 100  # records that set the public threshold of dp-glmtron
MARGIN = 0.5  # labels are taken to be below |w| R + MARGIN in DP-PGD's worst case

Plan: TypeAlias = Callable[[int, float, float, int], TrainingPlan]
"""(n, epsilon, delta, size) -> plan."""


class Setting(NamedTuple):
    """One point of a grid."""

    learning_rate: float
    size: int
    knob: float


Column: TypeAlias = tuple[Setting, float | None]
"""A setting, and epsilon where the method is private."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A method to compare.

    Attributes:
      plan: see `Plan`.
      threshold: (knob, public x, public y) -> threshold.
      gradient: "surrogate", "true" or "switch".
      sizes: of the grid; 0 for methods of fixed size.
      knobs: of the grid.
      rates: of the grid.
      private: whether epsilon matters.
      clipped: whether contributions are clipped at all.
      worst_case: whether the knob is a radius, which sets the largest residual that can be.
      one_pass: whether every record is read once: then compiling takes longer than running.
      steps_are_small: many steps on few rows, to be run side by side over data sets too.
    """

    plan: Plan
    threshold: Callable[[Any, Any, Any], Any]
    gradient: Gradient = "surrogate"
    sizes: tuple[int, ...] = (10, 40, 160)
    knobs: tuple[float, ...] = CLIPS
    rates: tuple[float, ...] = BIG
    private: bool = True
    clipped: bool = True
    worst_case: bool = False
    one_pass: bool = False
    steps_are_small: bool = False

    def grid(self) -> list[Setting]:
        """All settings."""
        return [Setting(*p) for p in itertools.product(self.rates, self.sizes, self.knobs)]

    def numbers(self, setting: Setting, bound: float) -> tuple[float, float, float]:
        """Learning rate, radius and the threshold's number."""
        rate, _, knob = setting
        if self.worst_case:
            return rate, knob, 2 * knob * bound + MARGIN
        return rate, math.inf, knob


@functools.cache
def _full(n, epsilon, delta, size):
    return plan_blocks(n, n, size, epsilon=epsilon, delta=delta)


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


@functools.cache
def _single(n, epsilon, delta, size):
    return plan_blocks(n, 1, epsilon=epsilon, delta=delta)


@functools.cache
def _shuffled(n, epsilon, delta, size):
    options: dict[str, Any] = {"shuffling": True, "adjacency": "replace-one"}
    return plan_blocks(n, 1, epsilon=epsilon, delta=delta, **options)


def _fixed(knob, x, y):
    return FixedThreshold(knob)


def _unclipped(knob, x, y):
    return FixedThreshold(math.inf)


def _public(knob, x, y):
    return PublicThreshold(x, y, Grid(0.01, 8), quantile=knob)


def _private(knob, x, y):
    return PrivateThreshold(Grid(0.01, 8), share=knob)


_ONE_PASS: dict[str, Any] = {"sizes": (0,), "rates": SMALL, "steps_are_small": True}
_PUBLIC: dict[str, Any] = {"threshold": _public, "knobs": (0.9, 1.0), **_ONE_PASS}
_FEW: dict[str, Any] = {"rates": (2.5, 8.0, 25.0, 80.0, 250.0), "one_pass": True}
_PGD: dict[str, Any] = {"knobs": (1.0, 2.0), "rates": (0.3, 1.0, 4.0, 15.0, 50.0)}
METHODS = {
    "glmtron": Method(_full, _fixed, private=False),  # dp-gd-glmtron without noise
    "sgd": Method(
        _single, _unclipped, "true", knobs=(0.0,), private=False, clipped=False, **_ONE_PASS
    ),
    "dp-gd-glmtron": Method(_full, _fixed),
    "dp-gd-true": Method(_full, _fixed, "true"),
    "dp-gd-switch": Method(_full, _fixed, "switch"),
    "dp-sgd": Method(_poisson, _fixed, "true"),
    "dp-sgd-surrogate": Method(_poisson, _fixed),
    "dp-mbglmtron": Method(_histogram, _private, knobs=(0.05, 0.3), sizes=(3, 8, 30), **_FEW),
    "dp-mbglmtron-fixed": Method(_blocks, _fixed, sizes=(3, 8, 30), **_FEW),
    "dp-taglmtron": Method(_tree, _fixed, sizes=(4, 16, 64), one_pass=True),
    "dp-glmtron": Method(_single, **_PUBLIC),
    "dp-glmtron-shuffled": Method(_shuffled, **_PUBLIC),
    "dp-pgd-true": Method(_full, _fixed, "true", worst_case=True, **_PGD),
    "dp-pgd-surrogate": Method(_full, _fixed, worst_case=True, **_PGD),
}


class Data(NamedTuple):
    """A data set, or several side by side."""

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
        threshold = own.threshold(setting.knob, jnp.zeros((1, 1)), jnp.zeros(1))
        check_threshold(plan, threshold)
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def _program(plan: TrainingPlan, threshold, gradient: Gradient, clipped: bool, many: bool):
    """The compiled run: key, data, R, noise multipliers, rates, radii, knobs -> weights.

    Weights are (columns, d), or (data sets, columns, d) for `many` data sets, each with its key.

    For SYNTHETIC or public data only: columns share one key, so that all have the same noise. It
    makes comparisons fair, and cancels in the differences of two columns, so nothing is private.
    """

    def one(key, data: Data, bound, z, rate, radius, knob):
        descent = Descent(rate, bound, radius, gradient=gradient)
        if not clipped:
            descent = Descent(rate, math.inf, gradient=gradient, clip="vector")
        noisy = dataclasses.replace(plan, noise_multiplier=z)
        chosen = threshold(knob, data.public_x, data.public_y)
        options: dict[str, Any] = {"threshold": chosen, "descent": descent, "start": data.start}
        return fit(key, data.x, data.y, noisy, **options).weights

    columns = jax.vmap(one, (None, None, None, 0, 0, 0, 0))
    if many:
        columns = jax.vmap(columns, (0, 0, None, None, None, None, None))
    return jax.jit(columns)


_first_of: dict[Any, TrainingPlan] = {}  # plans that differ in noise only are one program


def run(
    method: str,
    columns: Sequence[Column],
    key,
    sets: Sequence[Data],
    delta: float,
    bound: float,
    width: int = 1,
) -> np.ndarray:
    """Weights (columns, data sets, d) of each column on each data set.

    Columns whose plans differ in noise only are one program, compiled for their number, or for
    `width` if that is more.
    """
    own, n, keys = METHODS[method], len(sets[0].y), jax.random.split(key, len(sets))
    groups: dict[Any, list[int]] = {}
    numbers = []
    for i, (setting, epsilon) in enumerate(columns):
        plan = own.plan(n, epsilon or 1.0, delta, setting.size)
        noise = 0.0 if epsilon is None else float(plan.noise_multiplier)
        numbers.append((noise, *own.numbers(setting, bound)))
        shape = plan.sampler, plan.steps, plan.adjacency
        _first_of.setdefault(shape, plan)
        groups.setdefault(shape, []).append(i)
    weights = np.zeros((len(columns), len(sets), sets[0].x.shape[1]), np.float32)
    for shape, chosen in groups.items():
        parts = own.threshold, own.gradient, own.clipped, own.steps_are_small
        program = _program(_first_of[shape], *parts)
        padded = chosen + chosen[:1] * (width - len(chosen))
        arrays = jnp.asarray([numbers[i] for i in padded], jnp.float32).T
        if own.steps_are_small:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
            found = program(keys, stacked, bound, *arrays)
        else:
            pairs = zip(keys, sets, strict=True)
            found = np.stack([program(k, data, bound, *arrays) for k, data in pairs])
        weights[chosen] = np.moveaxis(np.asarray(found), 1, 0)[: len(chosen)]
    return weights
