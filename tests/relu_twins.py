"""ReLU regressions that are broken on purpose; `test_relu_regression.py` must catch each.

Each takes pytest's monkeypatch and breaks `jdp.relu_fit` in one way.
"""

import jax.numpy as jnp

import jdp
from jdp import glmtron, relu_fit


def threshold_from_gradient_rows(monkeypatch):
    """Blocks that overlap: the rows of the threshold are rows of a gradient too."""
    own = relu_fit.DisjointBlocks.partition

    def partition(self, key, epoch=0):
        thresholds_, gradients = own(self, key, epoch)
        return gradients[:, : thresholds_.shape[1]], gradients

    monkeypatch.setattr(relu_fit.DisjointBlocks, "partition", partition)


def same_block_twice(monkeypatch):
    own = relu_fit.DisjointBlocks.partition

    def partition(self, key, epoch=0):
        thresholds_, gradients = own(self, key, epoch)
        return thresholds_, gradients.at[1].set(gradients[0])

    monkeypatch.setattr(relu_fit.DisjointBlocks, "partition", partition)


def sum_without_clip(monkeypatch):
    def clipped_sum(w, data, mask, s, descent, true=False):
        c = glmtron.coefficients(w, data, jnp.inf, descent, true)
        total = jnp.where(jnp.isfinite(c), c, 0) @ data.x
        return jdp.ClippedSum((total,), (descent.feature_bound * s,), rows=len(c))

    monkeypatch.setattr(relu_fit, "clipped_sum", clipped_sum)


def threshold_scale_from_data(monkeypatch):
    """The noise scale follows the block's own largest residual."""
    own = relu_fit.clipped_sum

    def clipped_sum(w, data, mask, s, descent, true=False):
        largest = jnp.nanmax(jnp.where(jnp.isfinite(data.y), data.y, 0))
        return own(w, data, mask, largest, descent, true)

    monkeypatch.setattr(relu_fit, "clipped_sum", clipped_sum)


RELU_TWINS = {
    "threshold from gradient rows": threshold_from_gradient_rows,
    "same block twice": same_block_twice,
    "sum without clip": sum_without_clip,
    "scale from the data": threshold_scale_from_data,
}
