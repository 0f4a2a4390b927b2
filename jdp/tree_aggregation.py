"""Tree aggregation: noisy prefix sums of a stream of clipped sums, inside `lax.scan`.

Level l sums 2^l consecutive leaves (Dwork et al. 2010; Kairouz et al. 2021 for learning). A prefix
is the sum of the nodes of its binary digits, so that it carries the noise of at most `height` nodes
instead of one draw a step. A leaf is in one node a level: `height` releases.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdp import _tree
from jdp._typing import Adjacency, Key, PyTree, Scalar
from jdp.clipping import ClippedSum
from jdp.noise import add_noise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeSum(ClippedSum):
    """The nodes that end with a leaf, one a level; together they are one release."""

    def combine(self, parts: tuple[PyTree, ...]) -> Float[Array, "height d"]:
        """The nodes as rows."""
        return jnp.stack(parts)


class TreeState(NamedTuple):
    """What goes from leaf to leaf; `waiting` is NOT private.

    Attributes:
      waiting: at each level the sum of the full node that waits for its sibling.
      scales: its noise scale.
      released: at each level the last full node, noised.
      prefix: the last noisy prefix sum.
    """

    waiting: Float[Array, "height d"]
    scales: Float[Array, " height"]
    released: Float[Array, "height d"]
    prefix: Float[Array, " d"]


def initial_tree(height: int, like: Float[Array, " d"]) -> TreeState:
    """The state before the first leaf."""
    nodes = jnp.zeros((height, *like.shape), _tree.wide(like).dtype)
    return TreeState(nodes, jnp.zeros(height, jnp.float32), nodes, nodes[0])


def climb(
    key: Key,
    t: Int[Array, ""],
    leaf: ClippedSum,
    state: TreeState,
    noise_multiplier: Scalar,
    adjacency: Adjacency,
) -> tuple[Float[Array, " d"], TreeState]:
    r"""Add leaf t = 0, 1, ... and return what it adds to the noisy prefix sum.

    **Guarantee.** Each node has the noise scale of its largest leaf, times $\sqrt{height}$, so all
    nodes of a leaf are ONE Gaussian of the given multiplier, also where later leaves depend on what
    was released. Nodes are sums of two nodes, so rounding is that of pairwise addition, after
    that within the leaf.

    Args:
      key: one typed key, for this leaf only.
      t: number of the leaf.
      leaf: one part, (d,).
      state: of the last call.
      noise_multiplier: joint, of all nodes that a record is in.
      adjacency: as in `jdp.add_noise`.

    Returns:
      The increment, and the new state.
    """
    (part,), (scale,) = leaf.parts, leaf.noise_scales
    levels = jnp.arange(state.waiting.shape[0])
    ends = (t + 1) % 2**levels == 0  # a node ends here
    first = (t >> levels) % 2 == 0  # it has no sibling yet

    def merge(node, level):
        waiting, ours, keeps = level
        total, largest = node
        kept = jnp.where(keeps, total, waiting), jnp.where(keeps, largest, ours)
        return (total + waiting, jnp.maximum(largest, ours)), (node, kept)

    start = part, jnp.asarray(scale, jnp.float32)
    levels_of = state.waiting, state.scales, ends & first
    _, ((nodes, largest), (waiting, scales)) = jax.lax.scan(merge, start, levels_of)
    height = levels.shape[0]
    total = NodeSum(
        tuple(nodes),
        tuple(math.sqrt(height) * largest),
        rows=leaf.rows * 2 ** (height - 1),
        rounding=leaf.rounding + _tree.rounding(leaf.rows * 2 ** (height - 1)),
    )
    noised = add_noise(key, total, noise_multiplier, adjacency=adjacency)
    released = jnp.where(ends[:, None], noised, state.released)
    digits = ((t + 1) >> levels) % 2 == 1
    prefix = jnp.sum(jnp.where(digits[:, None], released, 0), axis=0)
    return prefix - state.prefix, TreeState(waiting, scales, released, prefix)
