"""A subspace that follows the parameters: found from public gradients, anew every few steps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jdp import _check, _tree
from jdp._typing import Key, Params, PyTree
from jdp.aggregate import check_per_example
from jdp.anchors import PublicGradients
from jdp.noise import step_key
from jdp.subspace import Bases, allocate_rank, public_bases


@dataclasses.dataclass(frozen=True)
class MovingSubspace:
    """What decides the bases at a step, besides the parameters; `jdp.gep` describes each.

    Everything here is public, and so are the bases: nothing but public gradients at released
    parameters goes into them.
    """

    rank: int
    public_gradients: PublicGradients
    groups: PyTree | None = None
    refresh_every: int = 1
    power_iterations: int = 1
    warm_start: bool = False
    whitening: float = 0.0

    def __post_init__(self):
        _check.boolean("warm_start", self.warm_start)
        _check.integer("rank", self.rank, at_least=1, remedy="It is the dimension of the subspace.")
        paper = "The paper uses 1."
        _check.integer("refresh_every", self.refresh_every, at_least=1, remedy=paper)
        _check.integer("power_iterations", self.power_iterations, at_least=1, remedy=paper)
        _check.number(
            "whitening", self.whitening, at_least=0, at_most=1, remedy="0 is the paper's GEP."
        )
        if not callable(self.public_gradients):
            _check.fail(
                "public_gradients",
                "a function (params, key) -> per-example gradients",
                self.public_gradients,
                "Make it with jdp.random_label_gradients(loss, public_images, num_classes=...).",
                TypeError,
            )

    def start(self, key: Key, params: Params) -> Bases:
        """Return bases of the right shapes, not orthonormal yet: step 0 always refreshes."""
        anchors = jax.eval_shape(self.public_gradients, params, key)
        check_per_example(params, anchors, "public_gradients(params, key)")
        labels = _tree.group_labels(self.groups, anchors)
        leaves, structure = jax.tree.flatten(anchors)
        by_group = _tree.leaves_by_group(anchors, labels)
        sizes = [sum(math.prod(leaf.shape[1:]) for leaf in group) for group in by_group]
        ranks = allocate_rank(self.rank, sizes, leaves[0].shape[0])
        dtypes = [
            jnp.result_type(*(_tree.wide_dtype(leaf.dtype) for leaf in group)) for group in by_group
        ]
        leaf_keys = jax.random.split(step_key(key, "start", jnp.zeros((), int)), len(leaves))
        rows = [
            jax.random.normal(leaf_key, (ranks[label], *leaf.shape[1:]), dtypes[label])
            for leaf_key, leaf, label in zip(leaf_keys, leaves, labels, strict=True)
        ]
        weights = tuple(map(jnp.ones, ranks, dtypes)) if self.whitening else None
        return Bases(jax.tree.unflatten(structure, rows), labels, weights)

    def at(self, key: Key, step: Int[Array, ""], params: Params, last: Bases) -> Bases:
        """Return the bases at a step, `last` being those of the step before."""
        sizes = (rows.shape[0] for rows in jax.tree.leaves(last.rows))
        ranks = dict(zip(last.groups, sizes, strict=True))

        def refresh() -> Bases:
            return public_bases(
                step_key(key, "sketch", step),
                self.public_gradients(params, step_key(key, "labels", step)),
                [ranks[group] for group in sorted(ranks)],
                last.groups,
                iterations=self.power_iterations,
                start=last if self.warm_start else None,
                whitening=self.whitening,
            )

        if self.refresh_every == 1:
            return refresh()
        return jax.lax.cond(step % self.refresh_every == 0, refresh, lambda: last)
