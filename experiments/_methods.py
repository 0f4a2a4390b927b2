"""How each method of `experiments.gep` turns data into a model, or a test accuracy."""

import dataclasses
import inspect
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

import jdp
from experiments import _pate, _resume, _training
from experiments._run import Keys
from experiments._training import Run, pad_rows
from experiments.datasets import Dataset
from experiments.models import Model

METHODS = ("non-private", "dp-sgd", "b-gep", "gep", "public-only", "class-means")
OPTIONAL = (  # run where asked for
    "sparsified",
    "dp-adam",
    "dp-adam-bc",
    "projected-dp-sgd",
    "adadps",
    "pda-dpmd",
    "pate",
)
PLANNED = ("dp-sgd", "b-gep", "gep")  # these take many steps under one privacy budget
PLANNED += ("sparsified", "dp-adam", "dp-adam-bc", "projected-dp-sgd", "adadps", "pda-dpmd")
IN_SUBSPACE = ("b-gep", "gep", "projected-dp-sgd")
WITH_LABELS = ("public-only", "adadps", "pda-dpmd")  # read the labels of public images
WITHOUT_PUBLIC = ("non-private", "dp-sgd", "sparsified", "dp-adam", "dp-adam-bc")


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
    subspace: Literal["random-labels", "true-labels", "gaussian"] = "random-labels"
    drop_rate: float = 0.9
    floor: float = 1e-3
    mixing: float | None = None
    augmentations: int = 0
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


def public_data(method: str, setting: Setting, anchors: str, labelled: int) -> str:
    """Which public data a method reads, in words.

    Args:
      method: any of them.
      setting: its hyper-parameters.
      anchors: how many anchors, and which, as "500 in-distribution".
      labelled: how many public images have labels.
    """
    if method in WITHOUT_PUBLIC:
        return "none"
    if method in WITH_LABELS:
        return f"{labelled} in-distribution, with labels"
    if method in IN_SUBSPACE and setting.subspace != "random-labels":
        return "none" if setting.subspace == "gaussian" else f"{anchors}, with labels"
    if isinstance(setting, PateSetting) and setting.queries < int(anchors.split()[0]):
        return f"{setting.queries} of {anchors}, no labels"
    return f"{anchors}, no labels"


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
      `run(keys, advance, resume=None) -> result`: the test accuracy after the last step (of the
      moving average of the parameters, where the setting has one), the curve, and the time.
      `advance(steps)` is called as it goes; with `resume` (see `experiments._resume`) the run is
      saved, and taken up.
    """
    if method == "class-means":
        shared = _training.batch_sharding(devices)[0]
        return _class_means(setting, data, anchors, spend.noise_multiplier, shared)
    plan = spend.plan
    if method == "pate":
        return _pate.make_run(setting, model, data, anchors, plan)
    trainer = _training.make_trainer(method, setting, model, data, anchors, plan, devices)
    return _training.make_run(trainer, setting.steps, eval_every)


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

    def release(keys: Keys, advance: Callable[[int], None]) -> dict[str, Any]:
        started = time.monotonic()
        own = np.eye(data.num_classes, dtype=np.float32)[data.train_labels]
        contributions = {
            "sum": own[:, :, None] * features(data.train_images)[:, None, :],
            "count": own * weight,
        }
        real = np.ones(len(own), bool)
        devices = shared.mesh.size
        rows = jax.tree.map(lambda leaf: pad_rows(leaf, devices), (contributions, real))
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

    def run(keys: Keys, advance: Callable[[int], None], resume=None) -> dict[str, Any]:
        program = inspect.getsource(_class_means)
        return _resume.once(lambda keys: release(keys, advance), keys, resume, program)

    return run
