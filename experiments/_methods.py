"""How each method of `experiments.gep` turns data into a model, or a test accuracy."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from experiments import _pate
from experiments._run import Keys
from experiments.datasets import Dataset
from experiments.models import Model, stage_groups

METHODS = ("non-private", "dp-sgd", "b-gep", "gep", "public-only", "class-means")
OPTIONAL = ("pate",)  # run where asked for
PLANNED = ("dp-sgd", "b-gep", "gep")  # these take many steps under one privacy budget


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hyper-parameters of one method; each method reads those that concern it."""

    steps: int = 300
    batch_size: int = 350
    learning_rate: float = 0.1
    schedule: Literal["constant", "step", "cosine"] = "constant"
    momentum: float = 0.9
    weight_decay: float = 0.0
    average: float = 0.0
    clip_norm: float = 1.0
    clip_norms: tuple[float, float] = (0.5, 0.2)
    rank: int = 150
    groups: int = 1
    power_iterations: int = 1
    refresh_every: int = 1
    warm_start: bool = False
    whitening: float = 0.0
    noise_split: Literal["equal", "optimal"] = "equal"
    joint_clip: bool = False
    components: int = 60

    def learning_rates(self) -> optax.Schedule:
        """The learning rate of each step."""
        if self.schedule == "cosine":
            return optax.cosine_decay_schedule(self.learning_rate, self.steps)
        change = {self.steps // 2: 0.1} if self.schedule == "step" else {}
        return optax.piecewise_constant_schedule(self.learning_rate, change)


@dataclasses.dataclass(frozen=True)
class PateSetting(Setting):
    """And what concerns `pate` alone; steps, batches and learning rate are of every network."""

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 0.05
    teachers: int = 250
    queries: int = 500
    threshold: float | None = None
    answers: int | None = None


class Budget(NamedTuple):
    """What a method may spend.

    Attributes:
      plan: a `jdp.plan` for the methods in `PLANNED`, or of votes for `pate`, else None.
      epsilon_spent: of one run; None is no bound at all.
      noise_multiplier: noise over joint sensitivity; None where no private data are used.
      statement: the privacy statement, for a method without a plan.
    """

    plan: Any
    epsilon_spent: float | None
    noise_multiplier: float | None
    statement: str


def budget(method: str, setting: Setting, size: int, epsilon: float, delta: float) -> Budget:
    """Find the least noise with which a method keeps (epsilon, delta) on `size` private records."""
    if method == "non-private":
        return Budget(None, None, 0.0, "No privacy.")
    if method == "public-only":
        text = "Uses no private data: epsilon 0. The labels of the public images are used."
        return Budget(None, 0.0, None, text)
    if method == "class-means":
        z = jdp.accounting.calibrate_noise_multiplier(epsilon, delta=delta)
        spent = jdp.accounting.epsilon(z, delta=delta)
        text = (
            f"({spent:.6g}, {delta:g})-differential privacy (target {epsilon:g}), {z.adjacency}: "
            f"ONE Gaussian\nrelease of noise multiplier {z:.6g}, exact accounting."
        )
        return Budget(None, spent, float(z), text)
    if isinstance(setting, PateSetting):
        plan = jdp.pate.plan_votes(
            size,
            setting.teachers,
            setting.queries,
            epsilon=epsilon,
            delta=delta,
            threshold=setting.threshold,
            answers=setting.answers,
        )
        return Budget(plan, plan.epsilon, float(plan.noise_multiplier), "")
    plan = jdp.plan(
        num_examples=size,
        batch_size=setting.batch_size,
        steps=setting.steps,
        epsilon=epsilon,
        delta=delta,
    )
    return Budget(plan, plan.epsilon, float(plan.noise_multiplier), "")


Run = Callable[[Keys, Callable[[int], None]], dict[str, Any]]


def make_run(
    method: str,
    setting: Setting,
    model: Model,
    data: Dataset,
    anchors: np.ndarray,
    spend: Budget,
    eval_every: int,
    devices: int = 1,
) -> Run:
    """Prepare one method, compiled once for all its runs.

    Args:
      method: one of `METHODS` or `OPTIONAL`.
      setting: its hyper-parameters.
      model: what is trained; `class-means` does not use it.
      data: private, public and test parts.
      anchors: public images for the subspace (GEP) or the principal components (`class-means`).
      spend: the method's budget.
      eval_every: steps between two evaluations.
      devices: how many to share the private data and every batch out to.

    Returns:
      `run(keys, advance) -> result`: the test accuracy after the last step (of the moving average
      of the parameters, where the setting has one), the curve, and the time. `advance(steps)`
      is called as it goes.
    """
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("batch",), auto, devices=jax.devices()[:devices])
    shared, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
    if method == "class-means":
        return _class_means(setting, data, anchors, spend.noise_multiplier, shared)
    plan = spend.plan
    if method == "pate":
        return _pate.make_run(setting, model, data, anchors, plan)
    images, labels = data.train_images, data.train_labels
    if method == "public-only":
        images, labels = data.public_images, data.public_labels
    examples = jax.device_put((_pad(images, devices), _pad(labels, devices)), shared)
    size = len(labels)
    public = jnp.asarray(anchors)

    def transformation(params, key):
        after = (
            optax.add_decayed_weights(setting.weight_decay),
            optax.sgd(setting.learning_rates(), setting.momentum),
        )
        if method not in PLANNED:
            return optax.chain(*after)
        return optax.chain(_private(method, setting, model, params, public, plan, key), *after)

    def private_gradient(params, batch, mask) -> tuple[Any, dict[str, Any]]:
        if method != "dp-sgd":
            return batch, {"mask": mask}  # the loss is with gep
        gradient = jdp.clipped_grad(model.loss, jdp.clip_by_norm(setting.clip_norm))
        return gradient(params, batch, mask=mask), {}

    def take(examples, rows):
        batch = jax.tree.map(lambda leaf: leaf[rows], examples)
        return batch if len(rows) % devices else jax.lax.with_sharding_constraint(batch, shared)

    def step(index, carry, keys: Keys, examples):
        params, state, mean = carry
        if method in PLANNED:
            rows, mask = (_pad(part, devices) for part in plan.batch(keys.sampling, index))
            gradient, extra = private_gradient(params, take(examples, rows), mask)
        else:
            key = jax.random.fold_in(keys.sampling, index)
            batch = take(examples, jax.random.randint(key, (setting.batch_size,), 0, size))
            losses = jax.vmap(model.loss, in_axes=(None, 0))
            gradient, extra = jax.grad(lambda p: losses(p, batch).mean())(params), {}
        updates, state = transformation(params, keys.noise).update(gradient, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, mean, 1 - setting.average)

    jit = functools.partial(jax.jit, out_shardings=everywhere)

    @jit
    def begin(keys: Keys):
        params = model.init(keys.init)
        return params, transformation(params, keys.noise).init(params), params

    @functools.partial(jit, donate_argnums=2)
    def advance_to(start, stop, carry, keys: Keys, examples):
        return jax.lax.fori_loop(
            start, stop, lambda index, carry: step(index, carry, keys, examples), carry
        )

    accuracy = _accuracy(model, data)

    programs: list[tuple[Any, float]] = []  # one, for all runs, and the seconds it took to compile

    def run(keys: Keys, advance: Callable[[int], None]) -> dict[str, Any]:
        started = time.monotonic()
        carry, curve, seconds = begin(keys), [], []
        if not programs:
            before = time.monotonic()
            program = advance_to.lower(0, 0, carry, keys, examples).compile()
            programs.append((program, time.monotonic() - before))
        program, compile_seconds = programs[0]
        for start in range(0, setting.steps, eval_every):
            stop = min(start + eval_every, setting.steps)
            before = time.monotonic()
            carry = jax.block_until_ready(program(start, stop, carry, keys, examples))
            seconds.append((time.monotonic() - before) / (stop - start))
            curve.append([stop, accuracy(carry[-1])])
            advance(stop - start)
        return {
            "test_accuracy": curve[-1][1],
            "curve": curve,
            "seconds": time.monotonic() - started,
            "seconds_per_step": float(np.median(seconds)),
            "compile_seconds": compile_seconds,
        }

    return run


def _pad(leaf, devices: int) -> jax.Array:
    """Zeros (False) after the last row, so that every device gets as many rows as any other."""
    return jnp.pad(leaf, [(0, -len(leaf) % devices), *[(0, 0)] * (leaf.ndim - 1)])


def _private(method, setting, model, params, public, plan, key):
    """The transformation that makes the private gradient, first in its chain."""
    budget = {"batch_size": plan.batch_size, "key": key}
    if method == "dp-sgd":
        return jdp.privatize(plan.noise_multiplier, **budget)
    paper_groups = setting.groups == 5 and "stage1_0" in params
    options = {
        "rank": setting.rank,
        "noise_multiplier": plan.noise_multiplier,
        "loss": model.loss,
        "public_gradients": jdp.random_label_gradients(model.loss, public, num_classes=10),
        "groups": stage_groups(params)
        if paper_groups
        else jdp.group_leaves(params, setting.groups),
        "refresh_every": setting.refresh_every,
        "power_iterations": setting.power_iterations,
        "warm_start": setting.warm_start,
        "whitening": setting.whitening,
        **budget,
    }
    if method == "b-gep":
        return jdp.biased_gep(clip_norm=setting.clip_norms[0], **options)
    return jdp.gep(
        clip_norms=setting.clip_norms,
        noise_split=setting.noise_split,
        joint_clip=setting.joint_clip,
        **options,
    )


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


def _class_means(
    setting: Setting, data: Dataset, anchors: np.ndarray, noise_multiplier, shared: NamedSharding
) -> Run:
    """ONE noisy release of sums and counts by class; then the nearest mean, without training.

    Features are principal components of the anchors, partly whitened, and the clip norm is the
    median norm of the anchors' features: public, all of it. The count of a class travels in the
    same release as its sum, scaled to half the clip norm.
    """
    flat = anchors.reshape(len(anchors), -1)
    centre = flat.mean(0)
    _, spread, rows = np.linalg.svd(flat - centre, full_matrices=False)
    variance = np.square(spread[: setting.components])
    whiten = 1 / np.sqrt(variance + 0.3 * variance.mean())
    basis = (rows[: setting.components] * whiten[:, None]).T

    def features(images):
        return (images.reshape(len(images), -1) - centre) @ basis

    size = float(np.median(np.linalg.norm(features(anchors), axis=1)))
    weight = size / 2

    def run(keys: Keys, advance: Callable[[int], None]) -> dict[str, Any]:
        started = time.monotonic()
        own = np.eye(data.num_classes, dtype=np.float32)[data.train_labels]
        contributions = {
            "sum": own[:, :, None] * features(data.train_images)[:, None, :],
            "count": own * weight,
        }
        real = np.ones(len(own), bool)
        devices = shared.mesh.size
        rows = jax.tree.map(lambda leaf: _pad(leaf, devices), (contributions, real))
        clipper = jdp.clip_by_norm(float(np.hypot(size, weight)))
        total = clipper(*jax.device_put(rows, shared))
        release = jdp.add_noise(keys.noise, total, noise_multiplier)
        counts = np.maximum(np.asarray(release["count"]) / weight, 1)
        means = np.asarray(release["sum"]) / counts[:, None]
        distances = np.square(features(data.test_images)[:, None, :] - means).sum(-1)
        accuracy = float((distances.argmin(1) == data.test_labels).mean())
        advance(1)
        seconds = time.monotonic() - started
        return {"test_accuracy": accuracy, "curve": [[1, accuracy]], "seconds": seconds}

    return run
