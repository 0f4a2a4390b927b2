"""What each private method of `experiments.gep` makes of a batch: one noised update.

Every method is ONE optax transformation, `update(batch, state, params, mask=mask)`, that ends in
descent directions; what follows (weight decay, momentum or Adam) is the same program for all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jdp
from experiments.datasets import Dataset
from experiments.models import Model, stage_groups
from jdp import public_data
from jdp.aggregate import transformation

if TYPE_CHECKING:
    from experiments._methods import Setting

Loss = Callable[[Any, Any], jax.Array]


def private_update(
    method: str,
    setting: "Setting",
    model: Model,
    loss: Loss,
    data: Dataset,
    anchors: jax.Array,
    plan: Any,
    noise_key: jax.Array,
    public_key: jax.Array,
    params: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of a method.

    Args:
      method: one of `PLANNED` in `experiments._methods`.
      setting: its hyper-parameters.
      model: what is trained.
      loss: of one private example; with augmentations not that of the model.
      data: of which the public part is read.
      anchors: public images for the subspace.
      plan: of the run.
      noise_key: secret.
      public_key: for what is random but not secret.
      params: of the model; only the structure is read.
    """
    budget: dict[str, Any] = {"batch_size": plan.batch_size, "key": noise_key}
    if method in ("gep", "b-gep"):
        common = budget | _subspace(setting, model, data, anchors, params)
        common |= {"noise_multiplier": plan.noise_multiplier, "loss": loss}
        common |= {"whitening": setting.whitening}
        if method == "b-gep":
            return jdp.biased_gep(clip_norm=setting.clip_norms[0], **common)
        split = {"noise_split": setting.noise_split, "joint_clip": setting.joint_clip}
        return jdp.gep(clip_norms=setting.clip_norms, **split, **common)
    labelled = (jnp.asarray(data.public_images), jnp.asarray(data.public_labels))
    noised = jdp.privatize(plan.noise_multiplier, **budget)
    if method == "adadps":
        clipper = _adadps(setting, _mean_gradient(model, labelled), public_key)
        return _clip_and_noise(loss, clipper, noised, lambda params: optax.tree.zeros_like(params))
    if method == "sparsified":
        epoch = max(1, round(len(data.train_labels) / plan.batch_size))
        return _clip_and_noise(loss, _sparsified(setting, epoch, public_key), noised)
    by_norm = jdp.clip_by_norm(setting.clip_norm)
    clipped = _clip_and_noise(loss, lambda params, memory, step: (by_norm, memory), noised)
    if method == "projected-dp-sgd":
        subspace = _subspace(setting, model, data, anchors, params)
        return optax.chain(clipped, public_data.project_updates(key=public_key, **subspace))
    if method == "pda-dpmd":
        mixing: Any = setting.mixing
        if mixing is None:
            mixing = public_data.cosine_mixing(setting.steps)
        gradient = _mean_gradient(model, labelled)
        return optax.chain(clipped, public_data.mix_public(mixing, gradient, key=public_key))
    return clipped  # dp-sgd, dp-adam, dp-adam-bc


def descent(method: str, setting: "Setting", plan: Any) -> optax.GradientTransformation:
    """From an update, private or not, to a change of the parameters: SGD, or Adam."""
    scaling = [optax.trace(setting.momentum)]
    if method == "dp-adam":
        scaling = [optax.scale_by_adam(setting.momentum)]
    if method == "dp-adam-bc":
        std = plan.noise_multiplier * setting.clip_norm / plan.batch_size
        scaling = [jdp.scale_by_adam_corrected(std, floor=setting.floor**2, b1=setting.momentum)]
    decay = [optax.add_decayed_weights(setting.weight_decay)]
    # Decoupled from Adam's scaling (AdamW); under momentum as in the GEP paper.
    order = scaling + decay if method.startswith("dp-adam") else decay + scaling
    return optax.chain(*order, optax.scale_by_learning_rate(setting.learning_rates()))


class ClipperState(NamedTuple):
    """The step, what a clipper keeps of public things, and the state of the noise."""

    step: jax.Array
    memory: Any
    noise: Any


def _clip_and_noise(loss: Loss, clipper_at, noised, memory=lambda params: ()):
    """From batches to private updates, by a clipper that may change from step to step.

    `clipper_at(params, memory, step) -> (clipper, memory)` reads public things only.
    """

    def init_fn(params):
        return ClipperState(jnp.zeros((), jnp.int32), memory(params), noised.init(params))

    def update_fn(batch, state, params=None, *, mask, **extra):
        del extra
        clipper, kept = clipper_at(params, state.memory, state.step)
        total = jdp.clipped_grad(loss, clipper)(params, batch, mask=mask)
        update, noise = noised.update(total, state.noise, params)
        return update, ClipperState(state.step + 1, kept, noise)

    return transformation(init_fn, update_fn)


def _mean_gradient(model: Model, examples):
    # Without the barrier XLA would work on these constants while it compiles.
    return lambda params, key: public_data.mean_gradient(
        model.loss, jax.lax.optimization_barrier(examples)
    )(params, key)


def _adadps(setting: "Setting", public_gradient, key):
    """The clipper of AdaDPS; weights keep the public gradient's norm, so clip norms compare."""

    def at(params, moments, step):
        gradient = public_gradient(params, key)
        moments = optax.tree.update_moment(gradient, moments, 0.9, 2)
        unbiased = optax.tree.bias_correction(moments, 0.9, step + 1)
        weights = public_data.inverse_root(unbiased, floor=setting.floor)
        weighted = optax.tree.norm(optax.tree.mul(weights, gradient))
        weights = optax.tree.scale(optax.tree.norm(gradient) / weighted, weights)
        clipper = jdp.clip_by_norm(setting.clip_norm)
        return public_data.clip_preconditioned(clipper, weights), moments

    return at


def _sparsified(setting: "Setting", epoch: int, key):
    """The clipper of random sparsification: a new choice each epoch, of ever fewer coordinates."""
    rates = optax.linear_schedule(0.0, setting.drop_rate, setting.steps)

    def at(params, memory, step):
        own = jax.random.fold_in(key, step // epoch)
        rate = jnp.asarray(rates(step // epoch * epoch))
        kept = public_data.random_coordinates(own, params, rate)
        return public_data.clip_sparsified(jdp.clip_by_norm(setting.clip_norm), kept), memory

    return at


def _subspace(setting: "Setting", model: Model, data: Dataset, anchors, params) -> dict[str, Any]:
    """What decides a moving subspace."""
    paper_groups = setting.groups == 5 and "stage1_0" in params
    return {
        "rank": setting.rank,
        "public_gradients": public_gradients(setting, model, data, anchors),
        "groups": stage_groups(params)
        if paper_groups
        else jdp.group_leaves(params, setting.groups),
        "refresh_every": setting.refresh_every,
        "power_iterations": setting.power_iterations,
        "warm_start": setting.warm_start,
    }


def public_gradients(setting: "Setting", model: Model, data: Dataset, anchors):
    """What spans the subspace: `(params, key) -> per-example gradients`, or Gaussian rows."""
    if setting.subspace == "random-labels":
        return jdp.random_label_gradients(model.loss, anchors, num_classes=data.num_classes)
    if setting.subspace == "true-labels":
        labels = jnp.asarray(data.public_labels[: len(anchors)])
        gradients = jdp.per_example_grad(model.loss)
        return lambda params, key: gradients(
            params, (jax.lax.optimization_barrier(anchors), labels)
        )

    def gaussian(params, key):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        rows = [
            jax.random.normal(own, (setting.rank, *leaf.shape))
            for own, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, rows)

    return gaussian
