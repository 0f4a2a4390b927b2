"""The training loop of `experiments.gep`, the same for every method that takes steps."""

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from experiments import _augment
from experiments._resume import Resume, Unsaved
from experiments._run import Keys
from experiments._updates import descent, private_update
from experiments.datasets import Dataset
from experiments.models import Model

if TYPE_CHECKING:
    from experiments._methods import Setting

Run = Callable[..., dict[str, Any]]


class Trainer(NamedTuple):
    """A method, compiled once for all its runs.

    Attributes:
      begin: `(keys) -> carry`, whose first entry are the parameters, the last their average.
      text: `(carry, keys) -> the program as text`, which determines every query.
      compile: `(carry, keys) -> (program, bytes of temporary memory)`;
        `program(start, stop, carry, keys) -> carry` takes steps.
      accuracy: `(params) -> test accuracy`.
    """

    begin: Callable[[Keys], Any]
    text: Callable[[Any, Keys], str]
    compile: Callable[[Any, Keys], tuple[Callable[..., Any], int | None]]
    accuracy: Callable[[Any], float]


def batch_sharding(devices: int) -> tuple[NamedSharding, NamedSharding]:
    """How rows of a batch, and everything else, lie on so many devices."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("batch",), auto, devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())


def pad_rows(leaf, devices: int) -> jax.Array:
    """Zeros (False) after the last row, so that every device gets as many rows as any other."""
    return jnp.pad(leaf, [(0, -len(leaf) % devices), *[(0, 0)] * (leaf.ndim - 1)])


def make_trainer(
    method: str,
    setting: "Setting",
    model: Model,
    data: Dataset,
    anchors: np.ndarray,
    plan: Any,
    devices: int = 1,
) -> Trainer:
    """Prepare a method; the arguments are those of `experiments._methods.make_run`."""
    shared, everywhere = batch_sharding(devices)
    images, labels = data.train_images, data.train_labels
    if method == "public-only":
        images, labels = data.public_images, data.public_labels
    padded = (pad_rows(images, devices), pad_rows(labels, devices))
    examples = jax.device_put(padded, shared)
    size, public = len(labels), jnp.asarray(anchors)
    several = setting.augmentations > 0
    loss = _augment.mean_over_views(model.loss) if several else model.loss

    def transformation(params, keys: Keys):
        after = descent(method, setting, plan)
        if plan is None:
            return optax.with_extra_args_support(after)
        own = (loss, data, public, plan, keys.noise, jax.random.fold_in(keys.init, 1))
        return optax.chain(private_update(method, setting, model, *own, params), after)

    def take(examples, rows, key):
        batch = jax.tree.map(lambda leaf: leaf[rows], examples)
        if len(rows) % devices == 0:
            batch = jax.lax.with_sharding_constraint(batch, shared)
        if not several:
            return batch
        flip = data.name == "cifar10"  # digits are not mirrored
        return _augment.views(key, batch[0], setting.augmentations, flip), batch[1]

    def step(index, carry, keys: Keys, examples):
        params, state, mean = carry
        augment_key = jax.random.fold_in(jax.random.fold_in(keys.init, 2), index)
        if plan is not None:
            rows, mask = (pad_rows(part, devices) for part in plan.batch(keys.sampling, index))
            gradient, extra = take(examples, rows, augment_key), {"mask": mask}
        else:
            key = jax.random.fold_in(keys.sampling, index)
            rows = jax.random.randint(key, (setting.batch_size,), 0, size)
            batch = take(examples, rows, augment_key)
            losses = jax.vmap(loss, in_axes=(None, 0))
            gradient, extra = jax.grad(lambda p: losses(p, batch).mean())(params), {}
        updates, state = transformation(params, keys).update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, mean, 1 - setting.average)

    init = jax.jit(model.init)

    def begin(keys: Keys):
        params = init(keys.init)
        # Not jitted: the random draws in it are then compiled once for all methods.
        carry = (params, transformation(params, keys).init(params), params)
        return jax.device_put(jax.tree.map(jnp.copy, carry), everywhere)  # to be donated

    @functools.partial(jax.jit, out_shardings=everywhere, donate_argnums=2)
    def advance(start, stop, carry, keys: Keys, examples):
        body = lambda index, carry: step(index, carry, keys, examples)  # noqa: E731
        return jax.lax.fori_loop(start, stop, body, carry)

    def text(carry, keys: Keys):
        return str(advance.trace(0, 0, carry, keys, examples).jaxpr)

    def compiled(carry, keys: Keys):
        program = advance.lower(0, 0, carry, keys, examples).compile()
        memory = program.memory_analysis()
        return (
            lambda start, stop, carry, keys: program(start, stop, carry, keys, examples),
            None if memory is None else memory.temp_size_in_bytes,
        )

    return Trainer(begin, text, compiled, _accuracy(model, data))


def make_run(trainer: Trainer, steps: int, eval_every: int) -> Run:
    """Run a trainer to its last step, with an accuracy every few steps on the way."""
    programs: list[Any] = []  # one, for all runs, with its memory and the seconds to compile it

    def run(
        keys: Keys, advance: Callable[[int], None], resume: Resume | None = None
    ) -> dict[str, Any]:
        started = time.monotonic()
        carry = trainer.begin(keys)
        saved: Any = Unsaved((keys, carry), steps)
        if resume:
            saved = resume((keys, carry), trainer.text(carry, keys))
        if not programs:
            before = time.monotonic()
            compiled = trainer.compile(carry, keys)
            programs.append((*compiled, time.monotonic() - before))
        program, temporary_bytes, compile_seconds = programs[0]
        notes = saved.notes
        curve, seconds = notes.setdefault("curve", []), notes.setdefault("seconds", [])
        earlier = notes.get("elapsed", 0.0)
        if saved.step:
            advance(saved.step)
        for start, stop in saved.chunks(eval_every):
            before = time.monotonic()
            keys, carry = saved.state
            carry = jax.block_until_ready(program(start, stop, carry, keys))
            saved.state = keys, carry
            seconds.append((time.monotonic() - before) / (stop - start))
            curve.append([stop, trainer.accuracy(carry[-1])])
            notes["elapsed"] = earlier + time.monotonic() - started
            advance(stop - start)
        return {
            "test_accuracy": curve[-1][1],
            "curve": curve,
            "seconds": notes["elapsed"],
            "seconds_per_step": float(np.median(seconds)),
            "compile_seconds": compile_seconds,
            "temporary_bytes": temporary_bytes,
        }

    return run


def _accuracy(model: Model, data: Dataset, rows: int = 1_000) -> Callable[[Any], float]:
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels)

    @jax.jit
    def correct(params, images, labels):
        return jnp.sum(model.logits(params, images).argmax(-1) == labels)

    def accuracy(params):
        starts = range(0, len(labels), rows)
        parts = [correct(params, images[i : i + rows], labels[i : i + rows]) for i in starts]
        return sum(map(int, parts)) / len(labels)

    return accuracy
