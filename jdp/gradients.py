"""Per-example gradients and their clipped sums: the only vmap over examples."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdp import _check, _tree
from jdp._typing import Loss, Mask, Params, PerExample, PyTree
from jdp.clipping import ClippedSum, Clipper


def _partition(params: Params, trainable: PyTree | None) -> PyTree:
    """Return `params` with None at frozen leaves."""
    if trainable is None:
        return params
    structure = jax.tree.structure(params)
    if jax.tree.structure(trainable) != structure or not all(
        isinstance(flag, bool) for flag in jax.tree.leaves(trainable)
    ):
        _check.fail(
            "trainable",
            f"a pytree of Python booleans with the structure of params, {structure}",
            trainable,
            "Make it with jax.tree_util.tree_map_with_path(lambda path, leaf: ..., params).",
        )
    return jax.tree.map(lambda leaf, flag: leaf if flag else None, params, trainable)


def _is_statistic(node: PyTree) -> bool:
    # flax.nnx marks running statistics by this type of variable; the core imports no flax.
    return type(node).__name__ == "BatchStat"


def _check_params(params: Params) -> None:
    for path, node in jax.tree.leaves_with_path(params, is_leaf=_is_statistic):
        if _is_statistic(node):
            _check.fail(
                "params",
                "free of running batch statistics",
                _check.Words(f"an nnx.BatchStat at {jax.tree_util.keystr(path)}"),
                "Batch normalisation mixes examples, so no example has a gradient of its own. "
                "Use GroupNorm or LayerNorm, and split with nnx.split(model, nnx.Param, ...).",
            )
    for path, _ in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "batch_stats" in name:
            _check.fail(
                "params",
                "free of running batch statistics",
                _check.Words(f"a leaf at {name}"),
                "Batch normalisation mixes examples, so no example has a gradient of its own. "
                "Use GroupNorm or LayerNorm, and pass only variables['params'].",
            )


def _leading_size(batch: PyTree) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or sizes == {()}:
        _check.fail(
            "batch",
            "a pytree of arrays with the examples on their leading axis",
            _check.Words(f"leaves of shapes {shapes}"),
            "Stack the examples; give labels shape (n,), and a dropout key per example.",
        )
    return sizes.pop()[0]


def per_example_grad(
    loss: Loss, *, trainable: PyTree | None = None
) -> Callable[[Params, PyTree], PerExample]:
    """Return a function that computes the gradient of every example by itself.

    Memory is n times the number of parameters; `jdp.clipped_grad` with a microbatch size bounds it.

    What one example is decides the unit of privacy. Dropout and augmentation keys travel in it.
    Several augmentations of one record are averaged inside `loss`; all records of one user, given
    as one example, make the guarantee user-level.

    Args:
      loss: `loss(params, example) -> scalar` for ONE example (any pytree, no batch axis). It must
        not read other examples (no batch normalisation).
      trainable: booleans with the structure of the parameters; frozen leaves (False) get no
        gradient (None), no norm, no noise and no memory. All are trainable by default.

    Returns:
      `(params, batch) -> gradients`: `batch` is an example with a leading axis of size n on every
      leaf; the result has the structure of the parameters, with leaves of shape (n, ...).

    Raises:
      TypeError: the loss does not return one floating scalar.
      ValueError: `batch` has no common leading axis, the parameters hold batch statistics, or
        `trainable` has another structure.

    >>> import jax.numpy as jnp, jdp
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> batch = (jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([1.0, 1.0]))
    >>> jdp.per_example_grad(loss)(jnp.zeros(2), batch).tolist()
    [[-1.0, -0.0], [-0.0, -2.0]]
    """
    if not callable(loss):
        _check.fail(
            "loss",
            "a function of (params, example)",
            loss,
            "Write it for ONE example; it returns one floating scalar.",
            TypeError,
        )

    def gradients(params: Params, batch: PyTree) -> PerExample:
        _check_params(params)
        _leading_size(batch)
        free = _partition(params, trainable)
        for path, leaf in jax.tree.leaves_with_path(free):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                _check.fail(
                    f"params{jax.tree_util.keystr(path)}",
                    "a floating array",
                    leaf,
                    "Mark it as frozen with trainable=, or close over it in the loss.",
                    TypeError,
                )

        def loss_of(free: PyTree, example: PyTree) -> jax.Array:
            whole = jax.tree.map(
                lambda own, given: given if own is None else own,
                free,
                params,
                is_leaf=lambda leaf: leaf is None,
            )
            value = loss(whole, example)
            scalar = jax.tree_util.all_leaves([value]) and jnp.shape(value) == ()
            if not scalar or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                _check.fail(
                    "loss",
                    "a function of ONE example that returns one floating scalar",
                    value,
                    "Do not give the example a batch axis; return no auxiliary values.",
                    TypeError,
                )
            return value

        return jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(free, batch)

    return gradients


def clipped_grad(
    loss: Loss,
    clipper: Clipper,
    *,
    microbatch_size: int | None = None,
    trainable: PyTree | None = None,
) -> Callable[..., ClippedSum]:
    """Return a function that computes the clipped sum of per-example gradients.

    **Guarantee.** That of `clipper`; the microbatch size is memory only and does not change the
    sum beyond rounding.

    Args:
      loss: as in `jdp.per_example_grad`.
      clipper: for example `jdp.clip_by_norm(1.0)`. It may close over traced values (an adaptive
        clip norm, GEP bases) when this is called inside the step.
      microbatch_size: how many per-example gradients to hold at a time; all of them by default.
        A batch that it does not divide is padded and masked.
      trainable: as in `jdp.per_example_grad`.

    Returns:
      `(params, batch, *, mask) -> ClippedSum`; mask is (n,) booleans, False for padding (which may
      hold anything, NaN too). The mask is required: pass `jnp.ones(n, bool)` for a full batch.

    Raises:
      TypeError, ValueError: as in `jdp.per_example_grad` and the clipper.

    >>> import jax.numpy as jnp, jdp
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> batch = (jnp.array([[1.0, 0.0], [0.0, 9.0]]), jnp.array([1.0, 1.0]))
    >>> grad = jdp.clipped_grad(loss, jdp.clip_by_norm(1.0), microbatch_size=1)
    >>> grad(jnp.zeros(2), batch, mask=jnp.array([True, True])).parts[0].round(3).tolist()
    [-1.0, -1.0]
    """
    gradients = per_example_grad(loss, trainable=trainable)
    if not callable(clipper):
        _check.fail(
            "clipper", "a clipper", clipper, "For example jdp.clip_by_norm(1.0).", TypeError
        )
    if microbatch_size is not None:
        _check.integer(
            "microbatch_size",
            microbatch_size,
            at_least=1,
            remedy="It bounds memory only; None takes the whole batch at once.",
        )

    def clipped_sum(params: Params, batch: PyTree, *, mask: Mask) -> ClippedSum:
        size = _leading_size(batch)
        _tree.num_examples(jnp.zeros(size), mask)
        if microbatch_size is None or size <= microbatch_size:
            return clipper(gradients(params, batch), mask)
        steps = -(-size // microbatch_size)
        # Padding repeats the last example, so that it is as valid an input as any.
        rows = jnp.minimum(jnp.arange(steps * microbatch_size), size - 1)
        real = (jnp.arange(steps * microbatch_size) < size) & mask[rows]
        shape = (steps, microbatch_size)
        rows, real = rows.reshape(shape), real.reshape(shape)

        nothing = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:0], batch)
        empty = clipper(gradients(params, nothing), jnp.zeros(0, bool))

        def add(carry: tuple[PyTree, PyTree], chunk: tuple[jax.Array, jax.Array]):
            rows, real = chunk
            part = jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], batch)
            return _tree.compensated_add(*carry, clipper(gradients(params, part), real).parts), None

        lost = jax.tree.map(jnp.zeros_like, empty.parts)
        (parts, _), _ = jax.lax.scan(add, (empty.parts, lost), (rows, real))
        padded = steps * microbatch_size
        rounding = _tree.rounding(microbatch_size) + _tree.rounding(padded)
        return dataclasses.replace(empty, parts=parts, rows=padded, rounding=rounding)

    return clipped_sum
