"""Per-example gradients and their clipped sums: the only vmap over examples that users see."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdp import _check, _tree, bookkeeping
from jdp._typing import Loss, Mask, Params, PerExample, PyTree
from jdp._uses import primitives
from jdp.clipping import ClippedSum, Clipper, NormClipper

Strategy: TypeAlias = Literal["auto", "book-keeping", "scan", "vmap"]

# Bytes that a microbatch may hold if its size is not given: on CPUs about what fits caches (smaller
# and larger ones were slower), on accelerators what keeps them busy. Where gradients are written
# out there is room for more: what reads them (GEP's products) likes many rows.
_WORKING_SETS = {
    "cpu": {"ordinary": 24 * 2**20, "convolutions": 16 * 2**20, "written out": 64 * 2**20},
    "accelerator": {"ordinary": 2**30, "convolutions": 2**30, "written out": 2**32},
}


def partition(params: Params, trainable: PyTree | None) -> PyTree:
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
    remedy = "Stack the examples; give labels shape (n,), and a dropout key per example."
    return _check.rows("batch", batch, "examples", remedy)


def _check_loss(loss: Loss):
    if not callable(loss):
        _check.fail(
            "loss",
            "a function of (params, example)",
            loss,
            "Write it for ONE example; it returns one floating scalar.",
            TypeError,
        )


def prepare(
    loss: Loss, params: Params, batch: PyTree, trainable: PyTree | None
) -> tuple[Params, Loss]:
    """Check the arguments; return the trainable parameters, and the loss as a function of them."""
    _check_params(params)
    _leading_size(batch)
    free = partition(params, trainable)
    if not jax.tree.leaves(free):
        _check.fail(
            "trainable" if jax.tree.leaves(params) else "params",
            "such that some parameter is trained",
            trainable if jax.tree.leaves(params) else params,
            "Leave it True for at least one leaf.",
        )
    for path, leaf in jax.tree.leaves_with_path(free):
        if not _check.is_floating(leaf) and not isinstance(leaf, float):
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

    return _tree.vary_like(jax.tree.map(jnp.asarray, free), batch), loss_of


def examples_that_fit(loss: Loss, params: Params, batch: PyTree, *, written: bool) -> int:
    """Return how many examples one device works on at a time, by what the backward pass holds.

    Args:
      loss: of one example.
      params: the trainable parameters.
      batch: n examples.
      written: whether their gradients are written out.
    """
    losses = jax.vmap(loss, in_axes=(None, 0))

    def backward(params: Params, examples: PyTree) -> PyTree:
        return jax.vjp(lambda params: losses(params, examples), params)[1]

    one, two = (
        sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(jax.eval_shape(backward, params, _shapes(batch, n)))
        )
        for n in (1, 2)
    )
    each, kind = two - one, "convolutions" if _convolves(loss, params, batch) else "ordinary"
    if written:
        each, kind = (
            each + sum(4 * jnp.size(leaf) for leaf in jax.tree.leaves(params)),
            "written out",
        )
    place = "cpu" if jax.default_backend() == "cpu" else "accelerator"
    return max(1, _WORKING_SETS[place][kind] // max(each, 1))


def _near(fit: int, size: int, devices: int) -> int:
    """Return a microbatch of about `fit` of `size` examples, shared out evenly over devices.

    All about equal; but where that works on more than a hundredth of the examples twice, rather a
    divisor of the size, if one is near (a factor of 1.5).
    """
    steps = -(-size // fit)
    even = -(-size // (steps * devices)) * devices
    if steps == 1 or 100 * (-size % even) <= size:
        return even
    near = range(devices, min(size, 3 * fit // 2) + 1, devices)
    divisors = [m for m in near if size % m == 0 and 3 * m >= 2 * fit]
    return min(divisors, key=lambda m: max(m / fit, fit / m), default=even)


def _convolves(loss: Loss, params: Params, batch: PyTree) -> bool:
    one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), _shapes(batch, 1)
    )
    return "conv_general_dilated" in primitives(jax.make_jaxpr(loss)(params, one).jaxpr)


def _shapes(batch: PyTree, n: int) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((n, *jnp.shape(leaf)[1:]), jnp.result_type(leaf)), batch
    )


def in_parts(fun: Callable[[PyTree], PyTree], batch: PyTree, at_a_time: int) -> PyTree:
    """Return `fun(batch)`, whose results have the examples on their leading axis, part by part.

    Args:
      fun: of a batch; it treats every example by itself.
      batch: n examples.
      at_a_time: how many of them.
    """
    size = _leading_size(batch)
    if at_a_time >= size:
        return fun(batch)
    steps = -(-size // at_a_time)
    each = -(-size // steps)
    batch = jax.tree.map(jnp.asarray, batch)
    rows = jnp.minimum(jnp.arange(steps * each), size - 1).reshape(steps, each)
    found = jax.lax.map(lambda rows: fun(jax.tree.map(lambda leaf: leaf[rows], batch)), rows)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], found)


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
    _check_loss(loss)

    def gradients(params: Params, batch: PyTree) -> PerExample:
        free, loss_of = prepare(loss, params, batch, trainable)
        return _written_out(loss_of, free, batch)

    return gradients


def _written_out(loss: Loss, params: Params, batch: PyTree) -> PerExample:
    """Return `vmap(grad(loss))`, computed in parts that stay in caches."""
    meshes = _meshes((params, batch))
    if _leading_size(batch) == 0 or any(mesh.explicit_axes for mesh in meshes):
        return jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)

    def of_some(examples: PyTree) -> PerExample:
        return bookkeeping.per_example_gradients(loss, params, examples)

    if any(mesh.size > 1 for mesh in meshes):  # each device has its part already
        return of_some(batch)
    return in_parts(of_some, batch, examples_that_fit(loss, params, batch, written=False))


def _meshes(tree: PyTree) -> list[Any]:
    return [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]


def unprotected_gradient_norms(
    loss: Loss, *, trainable: PyTree | None = None
) -> Callable[[Params, PyTree], Float[Array, " n"]]:
    """Return a function that computes the norm of every example's gradient: NOT private.

    For research and on public data, for example to choose a clip norm. Computed by book-keeping,
    so it costs about one forward and one backward pass; where a norm is only bounded (layers with
    many positions) it is up to 3% too high, more where an example's terms cancel.

    Args:
      loss: as in `jdp.per_example_grad`.
      trainable: as in `jdp.per_example_grad`.

    Returns:
      `(params, batch) -> (n,)` norms in units of the gradient, float32.

    Raises:
      TypeError, ValueError: as in `jdp.per_example_grad`.

    >>> import jax.numpy as jnp, jdp
    >>> loss = lambda w, example: 0.5 * (w @ example[0] - example[1]) ** 2
    >>> batch = (jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.array([1.0, 1.0]))
    >>> print(jdp.unprotected_gradient_norms(loss)(jnp.zeros(2), batch))
    [5. 2.]
    """
    _check_loss(loss)

    def norms(params: Params, batch: PyTree) -> Float[Array, " n"]:
        free, loss_of = prepare(loss, params, batch, trainable)
        if not _leading_size(batch):
            return jnp.zeros(0)
        if any(mesh.explicit_axes for mesh in _meshes((free, batch))):
            written = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(free, batch)
            return jnp.sqrt(_tree.squared_norms(jax.tree.leaves(written), 1.0))
        units = [1.0] * len(jax.tree.leaves(free))

        def of_some(examples: PyTree) -> Float[Array, " m"]:
            leaves = bookkeeping.gradients(loss_of, free, examples, units)
            return jnp.sqrt(sum(gradient.square for gradient, _ in leaves))

        fit = examples_that_fit(loss_of, free, batch, written=False)
        return in_parts(of_some, batch, fit)

    return norms


def clipped_grad(
    loss: Loss,
    clipper: Clipper,
    *,
    microbatch_size: int | None = None,
    strategy: Strategy = "auto",
    trainable: PyTree | None = None,
) -> Callable[..., ClippedSum]:
    """Return a function that computes the clipped sum of per-example gradients.

    **Guarantee.** That of `clipper`; microbatch size and strategy are time and memory only. They
    do not change the sum beyond rounding, but that book-keeping may take a norm for up to 3% too
    high (more where an example's terms cancel), and never for too low. Its rounding, which the
    noise pays for (`ClippedSum.rounding`, relative), is 0.2% for layers with many positions, and
    grows with the length of sequences where a large table is looked up and also multiplied with
    (tied embeddings): 0.5% at 64 positions, 8% at 1,024. `strategy="vmap"` has neither.

    Args:
      loss: as in `jdp.per_example_grad`.
      clipper: for example `jdp.clip_by_norm(1.0)`. It may close over traced values (an adaptive
        clip norm, GEP bases) when this is called inside the step.
      microbatch_size: how many examples to work on at a time. By default about as
        many as 24 MiB hold on a CPU (16 with convolutions, 64 where gradients are written out) and
        1 GiB elsewhere (4 written out), and all of them under "vmap". Where it does not divide the
        batch, a few examples are worked on twice, and counted once.
      strategy: "book-keeping" computes norms and clipped sums from one forward and one backward
        pass without per-example gradients (`jdp.bookkeeping`; clippers of norms only, that is
        not `jdp.clip_in_subspace`). "vmap" writes all per-example gradients out, "scan" those of
        a microbatch at a time. "auto" is book-keeping where the clipper allows it, else scan;
        on a mesh with explicit axes it is vmap.
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
    _check_loss(loss)
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
    _check.choice("strategy", strategy, ("auto", "book-keeping", "scan", "vmap"))
    by_norm = isinstance(clipper, NormClipper)
    if strategy == "book-keeping" and not by_norm:
        _check.fail(
            "strategy",
            "'auto', 'scan' or 'vmap' with a clipper that reads more than norms",
            strategy,
            "Leave it at 'auto'.",
        )

    def clipped_sum(params: Params, batch: PyTree, *, mask: Mask) -> ClippedSum:
        size = _leading_size(batch)
        _tree.num_examples(jnp.zeros(size), mask, name="batch")
        mask = jnp.asarray(mask)
        free, loss_of = prepare(loss, params, batch, trainable)
        meshes = _meshes((params, batch))
        devices = max((mesh.size for mesh in meshes), default=1) or 1
        explicit = any(mesh.explicit_axes for mesh in meshes)
        if explicit and (microbatch_size is not None or strategy in ("book-keeping", "scan")):
            _check.fail(
                "strategy",
                "'auto' or 'vmap', without microbatch_size, on a mesh with explicit axes",
                strategy,
                "Make the mesh with axis_types=(jax.sharding.AxisType.Auto,): that is faster too.",
            )

        def sum_of(batch: PyTree, mask: Mask) -> ClippedSum:
            books = strategy in ("auto", "book-keeping") and mask.shape[0] > 0 and not explicit
            if books and isinstance(clipper, NormClipper):
                return bookkeeping.clipped_sum(loss_of, clipper, free, batch, mask)
            return clipper(_written_out(loss_of, free, batch), mask)

        if size == 0 or (microbatch_size is None and (strategy == "vmap" or explicit)):
            return sum_of(batch, mask)
        if microbatch_size is None:
            written = strategy == "scan" or not by_norm
            fit = devices * examples_that_fit(loss_of, free, batch, written=written)
            microbatch = _near(fit, size, devices)
        else:
            microbatch = min(microbatch_size, size)
        steps = -(-size // microbatch)
        if steps == 1:
            return sum_of(batch, mask)
        padded = steps * microbatch
        batch, chunks = jax.tree.map(jnp.asarray, batch), None
        if devices > 1:
            # Microbatch j has examples j, j + steps, ...: a share of every device's. Padding
            # repeats the last example, so that it is as valid an input as any.
            rows = jnp.minimum(jnp.arange(padded), size - 1)
            real = (jnp.arange(padded) < size) & mask[rows]
            even = batch if padded == size else jax.tree.map(lambda leaf: leaf[rows], batch)
            shape = microbatch, steps
            chunks = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), (even, real))

        def microbatch_of(index: Array) -> tuple[PyTree, Mask]:
            if chunks is not None:
                take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False)  # noqa: E731
                return jax.tree.map(take, chunks)
            # The last one begins early enough to be whole; what was there already does not count.
            first = jnp.minimum(index * microbatch, size - microbatch)
            take = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, microbatch)  # noqa: E731
            new = first + jnp.arange(microbatch) >= index * microbatch
            return jax.tree.map(take, batch), take(mask) & new

        empty = sum_of(jax.tree.map(lambda leaf: leaf[:0], batch), jnp.zeros(0, bool))
        roundings = []  # of a microbatch: static, the same for all

        def add(carry: tuple[PyTree, PyTree], index: Array):
            total = sum_of(*microbatch_of(index))
            roundings.append(total.rounding)
            return _tree.compensated_add(*carry, total.parts), None

        none = _tree.vary_like(jax.tree.map(jnp.zeros_like, empty.parts), batch)
        (parts, _), _ = jax.lax.scan(add, (none, none), jnp.arange(steps))
        rounding = max(roundings) + _tree.rounding(padded)
        return dataclasses.replace(empty, parts=parts, rows=padded, rounding=rounding)

    return clipped_sum
