"""One-run audits: canaries in a training run, by the ordinary pipeline (Steinke et al. 2023).

A linear model learns handwritten digits, and has a slot for each canary: a record whose gradient is
large, in its own slot and nowhere else. A fair coin decides whether a canary is in the data. With
plain SGD the slot of the final parameters holds the sum of all that was released about it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments._audit_frame import HUGE
from jdp.auditing import OneRunAudit, epsilon_one_run

NOISE_MULTIPLIER = 3.0
STEPS = 8


class Data(NamedTuple):
    """Digits, then canaries; `slot` is -1 for a digit."""

    x: jax.Array
    y: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True)
class Training:
    """One way to train.

    Attributes:
      transform: `(plan, key) -> optax transformation`.
      gradient: from the loss to what `update` takes.
      broken: whether its guarantee is false on purpose.
    """

    transform: Callable[[Any, jax.Array], Any]
    gradient: Callable[[Any], Callable[..., Any]]
    broken: bool = False


def loss(params: Any, example: Data) -> jax.Array:
    """Cross-entropy on a digit; a steep slope in the slot of a canary."""
    logits = example.x @ params["w"]
    digit = optax.softmax_cross_entropy_with_integer_labels(logits, example.y)
    canary = HUGE * params["slots"][jnp.maximum(example.slot, 0)]
    return jnp.where(example.slot < 0, digit, canary)


def _clipped(clip_norm: float = 1.0, forget: float = 1.0) -> Callable[[Any], Callable[..., Any]]:
    """Clipped sums whose noise scale is `forget` times what it should be."""
    clipper: Any = jdp.clip_by_norm(clip_norm)

    def gradient(loss):
        grad = jdp.clipped_grad(loss, clipper)

        def of_batch(params, batch, mask):
            total = grad(params, batch, mask=mask)
            (scale,) = total.noise_scales
            return dataclasses.replace(total, noise_scales=(forget * scale,))

        return of_batch

    return gradient


def _written_out(loss: Any) -> Callable[..., Any]:
    grad = jdp.per_example_grad(loss)
    return lambda params, batch, mask: grad(params, batch)


def _privatize(plan: Any, key: jax.Array) -> Any:
    return jdp.privatize(plan.noise_multiplier, batch_size=plan.batch_size, key=key)


def _adaptive(plan: Any, key: jax.Array) -> Any:
    return jdp.dp_aggregate_adaptive(
        float(plan.noise_multiplier), batch_size=plan.batch_size, key=key, initial_clip_norm=1.0
    )


TRAININGS = {
    "one run, dp-sgd": Training(_privatize, _clipped()),
    "one run, adaptive clipping": Training(_adaptive, _written_out),
    "one run, an eighth of the noise": Training(_privatize, _clipped(forget=1 / 8), True),
    "one run, noise for the mean on the sum": Training(_privatize, _clipped(forget=0.002), True),
    "one run, clip norm 10 with noise for 1": Training(_privatize, _clipped(10.0, 0.1), True),
}


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits, pixels in [0, 1]."""
    from sklearn.datasets import load_digits

    x, y = map(np.asarray, load_digits(return_X_y=True))
    return (x / 16).astype(np.float32), y.astype(np.int32)


def make_plan(canaries: int) -> jdp.TrainingPlan:
    """Poisson batches of half of the records; absent canaries are null records (zero-out)."""
    n = len(digits()[1]) + canaries
    return jdp.plan(n, n // 2, STEPS, noise_multiplier=NOISE_MULTIPLIER, delta=1e-5)


@functools.cache
def _program(name: str, canaries: int) -> Callable[..., Any]:
    plan, training = make_plan(canaries), TRAININGS[name]
    x, y = digits()
    data = Data(
        jnp.concatenate([jnp.asarray(x), jnp.zeros((canaries, x.shape[1]))]),
        jnp.concatenate([jnp.asarray(y), jnp.zeros(canaries, jnp.int32)]),
        jnp.concatenate([jnp.full(len(y), -1), jnp.arange(canaries)]),
    )
    gradient = training.gradient(loss)

    @jax.jit
    def run(key, included):
        noise_key, sampling_key = jax.random.split(key)
        there = jnp.concatenate([jnp.ones(len(y), bool), included])
        params = {"w": jnp.zeros((x.shape[1], 10)), "slots": jnp.zeros(canaries)}
        tx: Any = optax.chain(training.transform(plan, noise_key), optax.sgd(1.0))

        def step(carry, i):
            params, state = carry
            rows, mask = plan.batch(sampling_key, i)
            batch, mask = jax.tree.map(lambda leaf: leaf[rows], data), mask & there[rows]
            found = gradient(params, batch, mask)
            options = {} if isinstance(found, jdp.ClippedSum) else {"mask": mask}
            updates, state = tx.update(found, state, params, **options)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(plan.steps))
        return params

    return run


def audit(
    name: str, key: jax.Array, canaries: int, *, delta: float, significance: float
) -> tuple[OneRunAudit, float]:
    """Train once and audit; also the accuracy on the digits, to show that it learned."""
    coins, run_key = jax.random.split(key)
    included = jax.random.bernoulli(coins, shape=(canaries,))
    params = jax.tree.map(np.asarray, _program(name, canaries)(run_key, included))
    x, y = digits()
    accuracy = float(np.mean((x @ params["w"]).argmax(1) == y))
    found = epsilon_one_run(
        -params["slots"],
        np.asarray(included),
        guesses=canaries // 5 // 2 * 2,
        delta=delta,
        significance=significance,
    )
    return found, accuracy
