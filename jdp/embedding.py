"""Gradient embedding perturbation (Yu, Zhang, Chen, Liu, ICLR 2021, arXiv 2102.12677)."""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jdp import _check, _tree
from jdp._typing import Adjacency, Key, Loss, Mask, Params, PerExample, PyTree, Scalar
from jdp.aggregate import (
    as_update,
    check_divisor,
    check_finite_clip,
    check_per_example,
    initial_state,
    transformation,
)
from jdp.anchors import PublicGradients
from jdp.clipping import ClippedSum, Clipper, bounded_factors, shrink
from jdp.gradients import clipped_grad, partition
from jdp.moving_subspace import MovingSubspace
from jdp.noise import add_noise, adjacency_of, step_key
from jdp.subspace import Bases, lift, project

NoiseSplit = Literal["equal", "optimal"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SubspaceSum(ClippedSum):
    """Sums of clipped (weighted) embeddings and, unless biased, of clipped residuals."""

    bases: Bases = dataclasses.field(kw_only=True)

    def combine(self, parts: tuple[PyTree, ...]) -> PyTree:
        """Return B^T (weighted embedding) + residual, like the parameters; B is public."""
        embedding, *residual = parts
        lifted = lift(self.bases, self.bases.weigh(embedding))
        return jax.tree.map(jnp.add, lifted, residual[0]) if residual else lifted


def clip_in_subspace(
    bases: Bases,
    clip_norms: tuple[Scalar, Scalar | None],
    *,
    noise_split: NoiseSplit = "equal",
    joint_clip: bool = False,
) -> Clipper:
    r"""The clipper of GEP: split $g_i$ into embedding $w_i = B g_i$ and residual $r_i$, clip both.

    $$ \Big(\sum_i w_i \min(1, S_1/|w_i|),\quad \sum_i r_i \min(1, S_2/|r_i|)\Big),
       \qquad r_i = g_i - B^\top w_i $$

    (Yu et al. 2021, Algorithm 2.) Each residual is computed, and clipped by its own norm, not by
    $|g|^2 - |w|^2$: that saves a product, but float32 rounding can make it small when the residual
    is not (measured: contributions of 9.9 $S_2$ at p = 262,144). So the bases need not even be
    orthonormal for the guarantee. Residuals of a microbatch exist at a time (`jdp.clipped_grad`).

    **Guarantee.** The two sums change by at most $S_1$ and $S_2$. With noise scales
    $(a_1 S_1, a_2 S_2)$, $1/a_1^2 + 1/a_2^2 = 1$, the joint L2 sensitivity is 1 in these units
    (zero-out, add-or-remove; 2 under replace-one): one Gaussian, one event. `equal` is the paper's
    $a_1 = a_2 = \sqrt 2$. With `joint_clip` the pair $(w_i/S_1, r_i/S_2)$ is clipped to norm 1 as a
    whole, and the scales are $(S_1, S_2)$. The bases must be a function of public data and of
    released values only.

    Where the bases have weights, $w_i$ is weighted, for clipping and again on the way back.

    Args:
      bases: from `jdp.subspace.public_bases`.
      clip_norms: (S1, S2), > 0. S2 = None leaves the residual out: the biased B-GEP, one part,
        scale S1. May be traced.
      noise_split: "equal", or "optimal": the a's that minimise the total noise
        $a_1^2 S_1^2 k + a_2^2 S_2^2 p$ (a sound extension, not in the paper).
      joint_clip: clip the pair jointly (a sound extension, not in the paper).

    Returns:
      A clipper, as `jdp.clip_by_norm`.

    Raises:
      TypeError: `clip_norms` is no pair of numbers or floating scalars.
      ValueError: a clip norm is not positive, or `noise_split` is unknown.

    >>> import jax.numpy as jnp, jdp
    >>> from jdp.subspace import bases_from_rows
    >>> gradients = jnp.array([[30.0, 40.0, 0.0]])
    >>> bases = bases_from_rows([jnp.eye(3)[:1]], gradients, groups=(0,))
    >>> clipped = jdp.clip_in_subspace(bases, (5.0, 1.0))(gradients, jnp.array([True]))
    >>> [part.round(2).tolist() for part in (clipped.parts[0][0], clipped.parts[1])]
    [[5.0], [0.0, 1.0, 0.0]]
    """
    if not isinstance(bases, Bases):
        remedy = "Make them with jdp.subspace.public_bases."
        _check.fail("bases", "jdp.subspace.Bases", bases, remedy, TypeError)
    s1, s2 = check_clip_norms(clip_norms)
    _check.boolean("joint_clip", joint_clip)
    _check.choice("noise_split", noise_split, ("equal", "optimal"))

    def clipper(per_example: PerExample, mask: Mask) -> SubspaceSum:
        rows = _tree.num_examples(per_example, mask)
        embeddings = project(bases, per_example)
        halves: list[tuple[PyTree, Scalar]] = [(bases.weigh(embeddings), s1)]
        scales: tuple[Scalar, ...] = (s1,)
        if s2 is not None:
            inside = lift(bases, embeddings)
            residuals = jax.tree.map(lambda g, part: _tree.wide(g) - part, per_example, inside)
            halves.append((residuals, s2))
            k = sum(embedding.shape[1] for embedding in embeddings)
            p = sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(per_example))
            a1, a2 = _split(s1 * math.sqrt(k), s2 * math.sqrt(p), noise_split)
            scales = (s1, s2) if joint_clip else (a1 * s1, a2 * s2)
        squares = [_tree.squared_norms(jax.tree.leaves(half), norm) for half, norm in halves]
        if joint_clip and s2 is not None:
            squares = [squares[0] + squares[1]] * 2
        factors, keep = bounded_factors(squares, mask, shrink)
        parts = tuple(
            jax.tree.map(lambda leaf, f=factor: _tree.weighted_sum(leaf, f, keep), half)
            for (half, _), factor in zip(halves, factors, strict=True)
        )
        return SubspaceSum(parts, scales, rows=rows, rounding=_tree.rounding(rows), bases=bases)

    return clipper


def check_clip_norms(clip_norms: tuple[Scalar, Scalar | None]) -> tuple[Scalar, Scalar | None]:
    """Return the pair of clip norms, checked; the second may be None."""
    if not isinstance(clip_norms, tuple) or len(clip_norms) != 2:
        _check.fail("clip_norms", "a pair (S1, S2)", clip_norms, "Try (10.0, 2.0).", TypeError)
    first, second = clip_norms
    return _check.clip_norm("clip_norms[0]", first), (
        None if second is None else _check.clip_norm("clip_norms[1]", second)
    )


def _split(a: Scalar, d: Scalar, noise_split: NoiseSplit) -> tuple[Scalar, Scalar]:
    """Return the a's of the two parts; `a`, `d` are clip norm times root of dimension."""
    if noise_split == "equal":
        return math.sqrt(2), math.sqrt(2)
    return ((a + d) / a) ** 0.5, ((a + d) / d) ** 0.5


class SubspaceState(NamedTuple):
    """The state of GEP: a SECRET key, the step, and the current (public) bases."""

    key: Key
    step: Int[Array, ""]
    bases: Bases


def gep(
    *,
    rank: int,
    clip_norms: tuple[Scalar, Scalar | None],
    noise_multiplier: Scalar,
    batch_size: float,
    key: Key,
    public_gradients: PublicGradients,
    groups: PyTree | None = None,
    refresh_every: int = 1,
    power_iterations: int = 1,
    warm_start: bool = False,
    noise_split: NoiseSplit = "equal",
    joint_clip: bool = False,
    whitening: float = 0.0,
    loss: Loss | None = None,
    microbatch_size: int | None = None,
    trainable: PyTree | None = None,
    adjacency: Adjacency | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradient embedding perturbation (Yu et al. 2021): less noise where public data can tell.

    Every `refresh_every` steps a subspace is found by power iteration on public gradients at the
    current parameters. Private gradients are split into embedding and residual, clipped
    separately (`jdp.clip_in_subspace`), noised and put together again:
    $v = \frac{1}{B}(B^\top \tilde w + \tilde r)$, unbiased but for clipping.

    **Guarantee.** Each update is ONE Gaussian mechanism of noise multiplier z on the batch. In the
    paper's terms $\sigma_1 = \sigma_2 = \sqrt 2 z$; the factor is inside, so pass
    `plan.noise_multiplier` as it is. Event as for `jdp.privatize`. `public_gradients` must see
    public data only.

    Args:
      rank: k, the total number of basis vectors over all groups. No group gets more than it has
        parameters, or than there are public gradients.
      clip_norms: (S1, S2) for embeddings and residuals; the paper uses 10 and 2. With S2 = None
        residuals are left out: see `jdp.biased_gep`.
      noise_multiplier: z >= 0, the joint one. May be traced.
      batch_size: the expected batch size, public.
      key: one typed, secret PRNG key.
      public_gradients: `(params, key) -> per-example gradients` of public data, for example
        `jdp.random_label_gradients(...)`.
      groups: labels like the (trainable) parameters, each group with a basis of its own and a
        share of the rank in proportion to the root of its size (`jdp.group_leaves(params, 5)`);
        one group by default.
      refresh_every: steps between new bases; the paper uses 1.
      power_iterations: the paper uses 1.
      warm_start: start the power iteration from the last bases.
      noise_split: as in `jdp.clip_in_subspace`.
      joint_clip: as in `jdp.clip_in_subspace`.
      whitening: from 0 to 1. Above 0, coordinates along the principal axes of the public gradients
        are weighted by (mean square of these along the axis)^(-whitening / 2) before they are
        clipped, and once more after the noise: rare directions come out of the noise and learn
        faster (a sound extension, not in the paper; a public preconditioner, so that the update is
        no longer an unbiased estimate of the gradient).
      loss: None, or `loss(params, example)` as in `jdp.clipped_grad`: `update` then takes the batch
        of EXAMPLES in place of their gradients, and memory does not grow with the batch.
      microbatch_size: as in `jdp.clipped_grad`; with `loss` only.
      trainable: with `loss`, as in `jdp.clipped_grad`; the same as for `public_gradients`.
      adjacency: as in `jdp.add_noise`.

    Returns:
      An optax transformation: `update(per_example, state, params, mask=mask)`, or with `loss`
      `update(batch, state, params, mask=mask)`.

    Raises:
      TypeError, ValueError: as in `jdp.dp_aggregate`, or for a number out of range.

    >>> import jax, jax.numpy as jnp, jdp
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> anchors = jdp.random_label_gradients(loss, jnp.eye(3), num_classes=2)
    >>> tx = jdp.gep(rank=2, clip_norms=(1.0, 0.2), noise_multiplier=0.0, batch_size=2,
    ...              key=jax.random.key(0), public_gradients=anchors)
    >>> params, batch = jnp.zeros(3), (jnp.eye(3)[:2], jnp.array([0.1, 0.1]))
    >>> gradients = jdp.per_example_grad(loss)(params, batch)
    >>> mask = jnp.array([True, True])
    >>> updates, _ = tx.update(gradients, tx.init(params), params, mask=mask)
    >>> print(updates.round(3) + 0)
    [-0.05 -0.05  0.  ]
    """
    _check.noise_multiplier(noise_multiplier)
    batch_size = check_divisor(batch_size)
    _check.typed_key("key", key)
    adjacency_of(noise_multiplier, adjacency)
    check_clip_norms(clip_norms)
    check_finite_clip(clip_norms, noise_multiplier)
    _check.choice("noise_split", noise_split, ("equal", "optimal"))
    _check.boolean("joint_clip", joint_clip)
    subspace = MovingSubspace(
        rank,
        public_gradients,
        groups=groups,
        refresh_every=refresh_every,
        power_iterations=power_iterations,
        warm_start=warm_start,
        whitening=whitening,
    )
    if loss is None and (microbatch_size is not None or trainable is not None):
        _check.fail(
            "loss",
            "given with microbatch_size or trainable",
            loss,
            "Pass loss=, and the batch of examples to update.",
        )

    def init_fn(params: Params) -> SubspaceState:
        bases = subspace.start(key, params)
        if loss is not None:
            _check_same_leaves(bases, params, trainable)
        return SubspaceState(*initial_state(key), bases)

    def update_fn(
        updates: PyTree,
        state: SubspaceState,
        params: Params | None = None,
        *,
        mask: Mask,
        **extra,
    ):
        del extra
        if loss is None or params is None:
            check_per_example(params, updates)
        if loss is not None:
            _check_same_leaves(state.bases, params, trainable)
        bases = subspace.at(state.key, state.step, params, state.bases)
        clipper = clip_in_subspace(
            bases, clip_norms, noise_split=noise_split, joint_clip=joint_clip
        )
        if loss is None:
            total = clipper(updates, mask)
        else:
            gradient = clipped_grad(
                loss, clipper, microbatch_size=microbatch_size, trainable=trainable
            )
            total = gradient(params, updates, mask=mask)
        noise_key = step_key(state.key, "noise", state.step)
        estimate = add_noise(noise_key, total, noise_multiplier, adjacency=adjacency)
        update = as_update(estimate, params, batch_size)
        return update, SubspaceState(state.key, state.step + 1, bases)

    return transformation(init_fn, update_fn)


def _check_same_leaves(bases: Bases, params: Params, trainable: PyTree | None) -> None:
    """Refuse parameters that are frozen for private gradients only, or for public ones only."""
    own, public = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (partition(params, trainable), bases.rows)
    )
    known = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}
    for name in sorted(own ^ public):
        if name not in known:
            remedy = "Call tx.init(params) with the same parameters."
            expected = f"with a leaf at {name}, as tx.init had them"
            _check.fail("params", expected, _check.Words(f"leaves {sorted(known)}"), remedy)
        remedy = "Give jdp.random_label_gradients and this one the same trainable=."
        expected = f"{name in public}, as for public_gradients"
        _check.fail(f"trainable{name}", expected, _check.Words(f"{name in own}"), remedy)


def biased_gep(
    *,
    rank: int,
    clip_norm: float,
    noise_multiplier: Scalar,
    batch_size: float,
    key: Key,
    public_gradients: PublicGradients,
    groups: PyTree | None = None,
    refresh_every: int = 1,
    power_iterations: int = 1,
    warm_start: bool = False,
    whitening: float = 0.0,
    loss: Loss | None = None,
    microbatch_size: int | None = None,
    trainable: PyTree | None = None,
    adjacency: Adjacency | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""B-GEP (Yu et al. 2021): only the embedding is released, $v = \frac{1}{B} B^\top \tilde w$.

    Biased, since the residual is dropped, but noise is k-dimensional and all of the budget goes to
    the embedding ($\sigma_1 = z$).

    **Guarantee.** As `jdp.gep`: one Gaussian of noise multiplier z a step.

    Args:
      rank: as in `jdp.gep`.
      clip_norm: S1, for embeddings.
      noise_multiplier: as in `jdp.gep`.
      batch_size: as in `jdp.gep`.
      key: as in `jdp.gep`.
      public_gradients: as in `jdp.gep`.
      groups: as in `jdp.gep`.
      refresh_every: as in `jdp.gep`.
      power_iterations: as in `jdp.gep`.
      warm_start: as in `jdp.gep`.
      whitening: as in `jdp.gep`.
      loss: as in `jdp.gep`.
      microbatch_size: as in `jdp.gep`.
      trainable: as in `jdp.gep`.
      adjacency: as in `jdp.add_noise`.

    Returns:
      An optax transformation, as `jdp.gep`.

    Raises:
      TypeError, ValueError: as in `jdp.gep`.

    >>> import jax, jax.numpy as jnp, jdp
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> anchors = jdp.random_label_gradients(loss, jnp.eye(3), num_classes=2)
    >>> tx = jdp.biased_gep(rank=2, clip_norm=1.0, noise_multiplier=0.0, batch_size=2,
    ...                     key=jax.random.key(0), public_gradients=anchors)
    >>> tx.init(jnp.zeros(3)).bases.rows.shape
    (2, 3)
    """
    _check.clip_norm("clip_norm", clip_norm)
    return gep(
        clip_norms=(clip_norm, None),
        rank=rank,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
        key=key,
        public_gradients=public_gradients,
        groups=groups,
        refresh_every=refresh_every,
        power_iterations=power_iterations,
        warm_start=warm_start,
        whitening=whitening,
        loss=loss,
        microbatch_size=microbatch_size,
        trainable=trainable,
        adjacency=adjacency,
    )
