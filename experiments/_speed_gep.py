"""GEP's step beside DP-SGD's and beside a naive GEP, for `experiments.speed`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jdp
from experiments import models
from experiments._speed_models import Row
from experiments._speed_steps import NON_PRIVATE, Contestant, contestants
from jdp.gradients import in_parts
from jdp.subspace import project

CLIP_NORMS, LEARNING_RATE = (10.0, 2.0), 0.1


class Size(NamedTuple):
    """How large one comparison is; the subspace is refreshed every `refresh_every` steps."""

    model: str
    batch_size: int
    anchors: int
    rank: int
    groups: int
    refresh_every: int = 10
    microbatch_size: int = 250


SIZES = {
    "gep, p=26,010": Size("cnn-patches", 1_000, 2_000, 500, 4),
    "gep, p=268,346": Size("resnet20", 32, 64, 32, 5, microbatch_size=32),
}
SMOKE = {"gep, smoke": Size("mlp", 16, 16, 4, 1, 2, 8)}


def _labels(params: Any, size: Size, groups: int) -> Any:
    if groups == 1:
        return None
    stages = size.model == "resnet20"
    return models.stage_groups(params) if stages else jdp.group_leaves(params, groups)


def _cycle(step, params, state, batch, steps: int) -> Contestant:
    def calls(compiled):
        now, own = params, state
        for _ in range(steps):
            now, own = compiled(now, own, batch)
        return now

    return Contestant(step, (params, state, batch), steps, calls)


def gep_contestants(row: Row, size: Size) -> dict[str, Contestant]:
    """DP-SGD and GEP: of the latter, one refresh of the subspace and the steps up to the next.

    Beside them what a GEP that writes gradients out cannot do without, each by itself: gradients,
    a microbatch at a time, read once for their norms, and ONE product of them with the basis.
    """
    row = row._replace(batch_size=size.batch_size)
    found = {}
    for name, entry in contestants(row, strategies=("book-keeping", "vmap")).items():
        if name.startswith("jdp"):
            params, state, batch = entry.arguments
            found[f"dp-sgd, {name[4:]}"] = _cycle(entry.fun, params, state, batch, 3)
    params, _, batch = contestants(row, strategies=())[NON_PRIVATE].arguments
    images, _ = row.examples(jax.random.key(3), size.anchors)
    micro = size.microbatch_size
    public = jdp.random_label_gradients(row.loss, images, num_classes=10, microbatch_size=micro)
    gradient = jdp.per_example_grad(row.loss)
    gradients = jax.jit(gradient)(params, batch)

    def norms(params, batch):
        of_some = lambda some: _squares(gradient(params, some))  # noqa: E731
        return in_parts(of_some, batch, micro)

    found["alone: per-example gradients"] = Contestant(norms, (params, batch))
    for groups in dict.fromkeys((size.groups, 1)):
        labels = _labels(params, size, groups)
        name = f"{groups} groups" if groups > 1 else "1 group"
        for loss in (row.loss, None) if groups > 1 else (row.loss,):
            step, state = _gep(row, size, public, labels, params, loss)
            if loss:
                one = Contestant(project, (state[0].bases, gradients))
                found[f"alone: one projection, {name}"] = one
            ending = "" if loss else ", gradients in"
            found[f"gep, {name}{ending}"] = _cycle(step, params, state, batch, size.refresh_every)
        step, state = naive_gep(row, size, public, labels, params)
        found[f"naive, {name}"] = _cycle(step, params, state, batch, size.refresh_every)
    return found


def _squares(gradients: Any) -> jax.Array:
    return sum(
        (jnp.sum(leaf**2, axis=range(1, leaf.ndim)) for leaf in jax.tree.leaves(gradients)),
        jnp.zeros(()),
    )


def _gep(row: Row, size: Size, public, labels, params, loss):
    """With the loss, which bounds memory, or (`loss=None`) with per-example gradients."""
    tx = optax.chain(
        jdp.gep(
            rank=size.rank,
            clip_norms=CLIP_NORMS,
            noise_multiplier=1.0,
            batch_size=size.batch_size,
            key=jax.random.key(1),
            public_gradients=public,
            groups=labels,
            refresh_every=size.refresh_every,
            warm_start=True,
            loss=loss,
            microbatch_size=size.microbatch_size if loss else None,
        ),
        optax.sgd(LEARNING_RATE),
    )

    def step(params, state, batch):
        mask = jnp.ones(size.batch_size, bool)
        given = batch if loss else jdp.per_example_grad(row.loss)(params, batch)
        updates, state = tx.update(given, state, params, mask=mask)
        return optax.apply_updates(params, updates), state

    return step, jax.jit(tx.init)(params)


def naive_gep(row: Row, size: Size, public, labels, params, noise_multiplier: float = 1.0):
    """GEP as one would write it down, and as the paper's code does.

    All gradients and residuals are held at once, the basis is orthonormalised by Householder QR and
    found anew from Gaussian rows. A yardstick for time: it has none of the checks of `jdp.gep`.
    """
    leaves, structure = jax.tree.flatten(params)
    numbers = jax.tree.leaves(labels) if labels is not None else [0] * len(leaves)
    members = [[i for i, number in enumerate(numbers) if number == g] for g in sorted(set(numbers))]
    sizes = [sum(leaves[i].size for i in own) for own in members]
    ranks = jdp.allocate_rank(size.rank, sizes, size.anchors)
    n, (s1, s2) = size.batch_size, CLIP_NORMS

    def by_group(gradients) -> list[jax.Array]:
        flat = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(gradients)]
        return [jnp.concatenate([flat[i] for i in own], axis=1) for own in members]

    def refresh(params, key) -> list[jax.Array]:
        bases = []
        for anchors, rank in zip(by_group(public(params, key)), ranks, strict=True):
            rows = jax.random.normal(key, (rank, anchors.shape[1]))
            bases.append(jnp.linalg.qr(((rows @ anchors.T) @ anchors).T)[0].T)
        return bases

    def clipped_sum(parts: Sequence[jax.Array], bound: float) -> list[jax.Array]:
        norms = jnp.sqrt(sum(jnp.sum(part**2, axis=1) for part in parts))
        factors = jnp.minimum(1, bound / jnp.maximum(norms, 1e-30))
        return [factors @ part for part in parts]

    def step(params, state, batch):
        count, bases, key = state
        key, own, draw = jax.random.split(key, 3)
        bases = jax.lax.cond(
            count % size.refresh_every == 0, lambda: refresh(params, own), lambda: bases
        )
        gradients = by_group(jax.vmap(jax.grad(row.loss), in_axes=(None, 0))(params, batch))
        inside = [g @ basis.T for g, basis in zip(gradients, bases, strict=True)]
        outside = [g - w @ basis for g, w, basis in zip(gradients, inside, bases, strict=True)]
        sums = clipped_sum(inside, s1) + clipped_sum(outside, s2)
        stds = [2**0.5 * noise_multiplier * s for s in (s1, s2) for _ in bases]
        keys = jax.random.split(draw, len(sums))
        noised = [
            total + std * jax.random.normal(k, total.shape)
            for total, std, k in zip(sums, stds, keys, strict=True)
        ]
        flat: list[jax.Array] = [jnp.zeros(())] * len(leaves)
        for own, w, r, basis in zip(
            members, noised[: len(bases)], noised[len(bases) :], bases, strict=True
        ):
            ends = [sum(leaves[i].size for i in own[:j]) for j in range(1, len(own))]
            for i, part in zip(own, jnp.split(w @ basis + r, ends), strict=True):
                flat[i] = part.reshape(leaves[i].shape)
        update = jax.tree.unflatten(structure, flat)
        moved = jax.tree.map(lambda p, u: p - LEARNING_RATE / n * u, params, update)
        return moved, (count + 1, bases, key)

    bases = [jnp.zeros(shape) for shape in zip(ranks, sizes, strict=True)]
    return step, (jnp.zeros((), jnp.int32), bases, jax.random.key(1))
