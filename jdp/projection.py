"""Projected DP-SGD (Zhou, Wu, Banerjee, ICLR 2021, arXiv 2007.03813)."""

from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, Int

from jdp import _check, _tree
from jdp._typing import Key, Params, PyTree
from jdp.aggregate import check_aggregate, initial_state, transformation
from jdp.anchors import PublicGradients
from jdp.moving_subspace import MovingSubspace
from jdp.subspace import Bases, lift, project


class ProjectionState(NamedTuple):
    """The state of the projection: a key, the step and the current bases, all public."""

    key: Key
    step: Int[Array, ""]
    bases: Bases


def project_updates(
    *,
    rank: int,
    public_gradients: PublicGradients,
    key: Key,
    groups: PyTree | None = None,
    refresh_every: int = 1,
    power_iterations: int = 1,
    warm_start: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Project private updates onto a public subspace, $u = B^\top B v$ (Zhou et al. 2021).

    "Bypassing the ambient dimension": the rows of B span the principal directions of public
    gradients at the current parameters (power iteration, as in `jdp.gep`), so that of p noisy
    coordinates only k are left. Gradients are clipped whole: what of them lies outside of the
    subspace uses up clip norm and is then lost. `jdp.biased_gep` clips after projecting instead.

    **Guarantee.** That of what comes before: post-processing, since it reads the released update,
    the parameters and public data only. Place it AFTER `jdp.privatize` (or another private
    transformation), before momentum and learning rate.

    Args:
      rank: k, as in `jdp.gep`.
      public_gradients: `(params, key) -> per-example gradients` of public data, as in `jdp.gep`.
      key: a typed key, for the sketch and public labels.
      groups: as in `jdp.gep`.
      refresh_every: steps between new bases; the paper uses 1.
      power_iterations: as in `jdp.gep`. The paper takes exact eigenvectors; more iterations come
        closer to them.
      warm_start: as in `jdp.gep`.

    Returns:
      An optax transformation; updates keep their dtypes, and frozen leaves (None in the public
      gradients) pass as they are.

    Raises:
      TypeError: an argument has another type.
      ValueError: a number is out of range, or `params`, the public gradients or the updates do not
        fit: a `ClippedSum` or per-example gradients, which are not private yet.

    >>> import jax, jax.numpy as jnp, jdp, optax
    >>> from jdp import public_data
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> public = lambda w, key: jdp.per_example_grad(loss)(w, (jnp.eye(3)[:1], jnp.ones(1)))
    >>> tx = optax.chain(
    ...     jdp.privatize(1.0, batch_size=2, key=jax.random.key(0)),
    ...     public_data.project_updates(rank=1, public_gradients=public, key=jax.random.key(1)),
    ...     optax.sgd(0.1))
    >>> params, clipped = jnp.zeros(3), jdp.clip_by_norm(1.0)(jnp.eye(3), jnp.ones(3, bool))
    >>> updates, _ = jax.jit(tx.update)(clipped, tx.init(params), params)
    >>> print(abs(updates) > 1e-6)  # no noise but along the public gradient
    [ True False False]
    """
    _check.typed_key("key", key)
    subspace = MovingSubspace(
        rank,
        public_gradients,
        groups=groups,
        refresh_every=refresh_every,
        power_iterations=power_iterations,
        warm_start=warm_start,
    )

    def init_fn(params: Params) -> ProjectionState:
        return ProjectionState(*initial_state(key), subspace.start(key, params))

    def update_fn(updates: PyTree, state: ProjectionState, params: Params | None = None, **extra):
        del extra
        check_aggregate(params, updates)
        bases = subspace.at(state.key, state.step, params, state.bases)
        free = jax.tree.map(
            lambda rows, update: None if rows is None else _tree.wide(update)[None],
            bases.rows,
            updates,
            is_leaf=lambda leaf: leaf is None,
        )
        coordinates = [part[0] for part in project(bases, free)]
        projected = jax.tree.map(
            lambda inside, update: update if inside is None else inside.astype(update.dtype),
            lift(bases, coordinates),
            updates,
            is_leaf=lambda leaf: leaf is None,
        )
        return projected, ProjectionState(state.key, state.step + 1, bases)

    return transformation(init_fn, update_fn)
