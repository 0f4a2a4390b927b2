"""Groups of parameters, each with a subspace of its own, and shares of the rank."""

import itertools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdp import _check
from jdp._typing import Params, PyTree


def _natural(name: str) -> list[str | int]:
    """Sort key by which layer2 comes before layer10: text and numbers alternate."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def group_leaves(params: Params, num_groups: int) -> PyTree:
    """Return labels 0..G-1 that share out the parameters, whole layers at a time.

    Layers (leaves with the same parent) are taken in natural order and cut into G consecutive
    groups so that the sum of squared group sizes, which GEP's time and memory follow, is least.

    Args:
      params: any pytree of arrays.
      num_groups: G, at most the number of layers. The paper uses 5.

    Returns:
      A pytree of integers like `params`.

    Raises:
      TypeError: `num_groups` is not an integer.
      ValueError: it is not between 1 and the number of layers.

    >>> import jax.numpy as jnp, jdp
    >>> layer = {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2))}
    >>> jdp.group_leaves({"layer1": layer, "layer2": layer}, 2)
    {'layer1': {'bias': 0, 'kernel': 0}, 'layer2': {'bias': 1, 'kernel': 1}}
    """
    paths, structure = jax.tree.flatten_with_path(params)
    if not paths:
        remedy = "Pass the parameters of the model."
        _check.fail("params", "a pytree with at least one array", params, remedy)
    for path, leaf in paths:
        if not _check.is_array(leaf) and not _check.is_static_number(leaf):
            name = f"params{jax.tree_util.keystr(path)}"
            _check.fail(name, "an array", leaf, "Pass the parameters of the model.", TypeError)
    parents = [jax.tree_util.keystr(path[:-1]) if len(path) > 1 else str(path) for path, _ in paths]
    sizes: dict[str, int] = {}
    for parent, (_, leaf) in zip(parents, paths, strict=True):
        sizes[parent] = sizes.get(parent, 0) + jnp.size(leaf)
    layers = sorted(sizes, key=_natural)
    _check.integer(
        "num_groups",
        num_groups,
        at_least=1,
        at_most=len(layers),
        remedy="Layers are not cut; use at most one group for each.",
    )
    ends = [0, *itertools.accumulate(sizes[layer] for layer in layers)]
    # best[j] = (cost, cuts) of the first j layers in the current number of groups.
    best = {j: (ends[j] ** 2, (0,)) for j in range(1, len(layers) + 1)}
    for count in range(2, num_groups + 1):
        best = {
            j: min(
                (best[i][0] + (ends[j] - ends[i]) ** 2, (*best[i][1], i))
                for i in range(count - 1, j)
            )
            for j in range(count, len(layers) + 1)
        }
    cuts = best[len(layers)][1]
    label = {layer: sum(cut <= index for cut in cuts) - 1 for index, layer in enumerate(layers)}
    return jax.tree.unflatten(structure, [label[parent] for parent in parents])


def allocate_rank(
    rank: int, group_sizes: Sequence[int], num_anchors: int | None = None
) -> tuple[int, ...]:
    r"""Share out a total rank by $k_g = \lfloor k \sqrt{p_g} / \sum_h \sqrt{p_h} \rfloor$.

    Yu et al. 2021, section 3.1; then $k_g \le \min(p_g, m)$ and at least 1.

    Args:
      rank: the total k.
      group_sizes: the number of parameters p_g in each group.
      num_anchors: m; more directions than anchors carry noise only. Unlimited by default.

    Raises:
      TypeError: a number is not an integer.
      ValueError: the rank is less than the number of groups.

    >>> import jdp
    >>> jdp.allocate_rank(1000, (432, 13_824, 50_688, 202_752, 650), 2000)
    (24, 140, 268, 536, 30)
    """
    remedy = "Give the number of parameters in each group."
    group_sizes = _check.sequence("group_sizes", group_sizes, "integers", remedy)
    sizes = [
        _check.integer("group_sizes", size, at_least=1, remedy="Give parameters per group.")
        for size in group_sizes
    ]
    _check.integer(
        "rank", rank, at_least=len(sizes), remedy="Every group needs one direction at least."
    )
    limit = rank if num_anchors is None else num_anchors
    _check.integer("num_anchors", limit, at_least=1, remedy="Give the number of public examples.")
    roots = [size**0.5 for size in sizes]
    return tuple(
        max(1, min(int(rank * root / sum(roots)), size, limit))
        for root, size in zip(roots, sizes, strict=True)
    )
