"""Public gradients, from which GEP takes its subspace."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jdp import _check
from jdp._typing import Key, Loss, Params, PerExample, PyTree
from jdp.gradients import examples_that_fit, in_parts, per_example_grad, prepare

PublicGradients: TypeAlias = Callable[[Params, Key], PerExample]
"""`(params, key) -> per-example gradients` of public data, leaves of shape (m, ...)."""


def random_label_gradients(
    loss: Loss,
    images: Array,
    *,
    num_classes: int,
    microbatch_size: int | None = None,
    trainable: PyTree | None = None,
) -> PublicGradients:
    """Return the paper's anchors: gradients of public images under fresh uniform random labels.

    (Yu et al. 2021, section 3.3.) Labels of the public images are not needed; random ones also
    keep the anchor gradients from vanishing as training goes on.

    Args:
      loss: `loss(params, (image, label)) -> scalar` for one example, as in
        `jdp.per_example_grad`; the label is an int32 scalar.
      images: (m, ...) PUBLIC inputs.
      num_classes: labels are drawn from 0..num_classes-1.
      microbatch_size: how many gradients to compute at a time; by default as many as
        `jdp.clipped_grad` would.
      trainable: as in `jdp.per_example_grad`; the same as for the private gradients.

    Returns:
      `(params, key) -> gradients`, leaves of shape (m, ...).

    Raises:
      TypeError: `num_classes` or `microbatch_size` is not an integer.
      ValueError: they are out of range, or there is no image.

    >>> import jax, jax.numpy as jnp, jdp
    >>> loss = lambda w, example: w @ example[0] * (example[1] - 0.5)
    >>> anchors = jdp.random_label_gradients(loss, jnp.eye(2), num_classes=2)
    >>> anchors(jnp.zeros(2), jax.random.key(0)).shape
    (2, 2)
    """
    remedy = "Labels need two classes."
    _check.integer("num_classes", num_classes, at_least=2, at_most=2**31 - 1, remedy=remedy)
    if microbatch_size is not None:
        _check.integer("microbatch_size", microbatch_size, at_least=1, remedy="Or None.")
    if not _check.is_array(images):
        _check.fail("images", "an array", images, "Give public images.", TypeError)
    if jnp.ndim(images) < 1 or jnp.shape(images)[0] == 0:
        _check.fail("images", "of shape (m, ...), m >= 1", images, "Give public images.")
    images = jnp.asarray(images)
    gradients = per_example_grad(loss, trainable=trainable)

    def anchors(params: Params, key: Key) -> PerExample:
        _check.typed_key("key", key)
        labels = jax.random.randint(key, images.shape[:1], 0, num_classes)
        # Or else XLA would work on these constants while it compiles, for seconds.
        batch = (jax.lax.optimization_barrier(images), labels)
        free, loss_of = prepare(loss, params, batch, trainable)
        fit = microbatch_size or examples_that_fit(loss_of, free, batch, written=True)
        return in_parts(lambda part: gradients(params, part), batch, fit)

    return anchors
