"""Adapters trained by gradients on ONE set: without privacy, by DP-SGD, with public images."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from experiments import _diffusion
from experiments._diffusion import Diffusion
from jdp import lora

PRIVATE = ("dp-sgd", "public-then-dp-sgd", "pda-dpmd")
METHODS = ("non-private", *PRIVATE)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Training of an adapter; as in the paper (Nishikawa et al. 2026) but for Adam.

    Attributes:
      steps: of the private methods.
      batch_size: expected number of the set's records a step.
      clip_norm: of a record's gradient.
      learning_rates: the grid that every method's learning rate is chosen from.
      free_steps: of the methods that spend no privacy: non-private, and the public stage.
      public_learning_rate: of the public stage.
      mixing: weight of the private update in pda-dpmd.
    """

    steps: int = 50
    batch_size: int = 32
    clip_norm: float = 1e-2
    learning_rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1, 3e-1)
    free_steps: int = 200
    public_learning_rate: float = 1e-3
    mixing: float = 0.5


class Problem(NamedTuple):
    """What every method adapts, and the public images that some of them use."""

    diffusion: Diffusion
    base: Any
    start: Any
    public: np.ndarray
    first_level: int  # noise levels below this one tell hardly anything about the set


def record_loss(problem: Problem, adapters: Any, example: Any, base: Any = None) -> jax.Array:
    """The denoising loss of ONE record: (image, level, noise)."""
    params = lora.merge(problem.base if base is None else base, adapters)
    one = jax.tree.map(lambda leaf: leaf[None], example)
    return _diffusion.losses(problem.diffusion, params, *one)[0]


def plans(setting: Setting, size: int, epsilon: float, delta: float, adjacency) -> Any:
    """The plan of one private run on a set of so many records."""
    return jdp.plan(
        num_examples=size,
        batch_size=setting.batch_size,
        steps=setting.steps,
        epsilon=epsilon,
        delta=delta,
        adjacency=adjacency,
    )


Train = Callable[[Any, np.ndarray, float, jax.Array, Any], Any]
"""`train(start, images, learning_rate, key, plan) -> adapters`; the plan of a private method."""


def trainer(problem: Problem, setting: Setting, method: str) -> Train:
    """Make the training of one method, compiled once for all sets, learning rates and budgets.

    Args:
      problem: what is adapted.
      setting: the hyper-parameters.
      method: one of `METHODS`, or "public" for the public stage.
    """
    private = method in PRIVATE
    steps = setting.steps if private else setting.free_steps
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, steps // 10), steps)

    def mean_loss(adapters, examples, base):
        params = lora.merge(base, adapters)
        return _diffusion.losses(problem.diffusion, params, *examples).mean()

    def public_gradient(adapters, key, base, public):
        rows_key, key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (setting.batch_size,), 0, len(public))
        return jax.grad(mean_loss)(adapters, _draw(problem, key, public[rows]), base)

    def transformation(keys, z, adjacency, base, public):
        parts: list[Any] = [optax.scale_by_adam()]
        if method == "pda-dpmd":
            gradient = functools.partial(public_gradient, base=base, public=public)
            parts.insert(0, jdp.public_data.mix_public(setting.mixing, gradient, key=keys[1]))
        if private:
            options = {"batch_size": setting.batch_size, "key": keys[0], "adjacency": adjacency}
            parts.insert(0, jdp.privatize(z, **options))
        return optax.chain(*parts)

    # Budgets differ in z alone: it is traced, and the sampler that they share is static.
    @functools.partial(jax.jit, static_argnames=("sampler", "adjacency"))
    def step(adapters, state, index, data, rate, keys, z, base, *, sampler, adjacency):
        images, public = data
        tx = transformation(keys, z, adjacency, base, public)
        draw_key = jax.random.fold_in(keys[2], index)
        if private:
            rows, mask = sampler.batch(keys[3], index)
            examples = _draw(problem, draw_key, images[rows])
            loss = lambda own, example: record_loss(problem, own, example, base)  # noqa: E731
            clipper = jdp.clip_by_norm(setting.clip_norm)
            # One microbatch: loops make convolutions slow on a CPU.
            gradient: Any = jdp.clipped_grad(loss, clipper, microbatch_size=len(rows))
            gradient = gradient(adapters, examples, mask=mask)
        else:
            row_key = jax.random.fold_in(keys[3], index)
            rows = jax.random.randint(row_key, (setting.batch_size,), 0, len(images))
            gradient = jax.grad(mean_loss)(adapters, _draw(problem, draw_key, images[rows]), base)
        updates, state = tx.update(gradient, state, adapters)
        scale = -rate * schedule(index)
        updates = jax.tree.map(lambda leaf: scale * leaf, updates)
        return optax.apply_updates(adapters, updates), state

    def train(start, images, learning_rate, key, plan: Any = None):
        keys = tuple(jax.random.split(key, 4))
        public = problem.public if method == "pda-dpmd" else problem.public[:1]
        data, rate = (jnp.asarray(images), jnp.asarray(public)), np.float32(learning_rate)
        z, static = np.float32(0), {"sampler": None, "adjacency": None}
        if private:
            z = np.float32(plan.noise_multiplier)
            static = {"sampler": plan.sampler, "adjacency": plan.adjacency}
        adapters, base = start, problem.base
        state = transformation(keys, jnp.asarray(z), static["adjacency"], base, data[1]).init(start)
        for index in range(steps):
            rest = data, rate, keys, z, base
            adapters, state = step(adapters, state, index, *rest, **static)
        return adapters

    return train


def _draw(problem: Problem, key: jax.Array, images: jax.Array) -> tuple[jax.Array, ...]:
    """Draw levels and noise for each image."""
    return _diffusion.draw(problem.diffusion, key, images, problem.first_level)
