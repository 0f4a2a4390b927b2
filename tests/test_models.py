import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments._run import UsageError

CASES = [("mnist_cnn", (28, 28, 1), 26_010), ("resnet20", (32, 32, 3), 268_346)]
CASES += [("mlp", (8, 8, 1), 4_810)]


def _images(shape, count=3):
    return jax.random.normal(jax.random.key(1), (count, *shape))


@pytest.mark.parametrize("name, shape, size", CASES)
def test_parameter_count_and_shapes(name, shape, size):
    model = models.build(name, shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
    assert jax.eval_shape(model.logits, params, _images(shape)).shape == (3, 10)
    assert jax.eval_shape(model.loss, params, (_images(shape)[0], 1)).shape == ()


def test_loss_is_the_cross_entropy_of_one_example():
    model = models.build("mlp", (8, 8, 1))
    params, images = model.init(jax.random.key(0)), _images((8, 8, 1))
    labels = jnp.array([0, 3, 9])
    losses = jax.vmap(model.loss, (None, 0))(params, (images, labels))
    expected = -jax.nn.log_softmax(model.logits(params, images))[jnp.arange(3), labels]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("size, stride, padding", [(8, 2, "SAME"), (4, 2, "VALID"), (3, 1, "SAME")])
def test_patch_convolution_equals_flax(size, stride, padding):
    images = _images((13, 13, 2))
    ours = models.PatchConv(5, size, stride, padding)
    theirs = nn.Conv(5, (size, size), stride, padding)
    params = jax.jit(theirs.init)(jax.random.key(0), images)
    shapes = jax.tree.map(jnp.shape, params)
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), images)) == shapes
    np.testing.assert_allclose(ours.apply(params, images), theirs.apply(params, images), atol=1e-5)


def test_resnet20_groups_are_the_five_of_the_paper():
    params = jax.eval_shape(models.build("resnet20", (32, 32, 3)).init, jax.random.key(0))
    sizes = [0] * 5
    groups = models.stage_groups(params)
    for leaf, group in zip(jax.tree.leaves(params), jax.tree.leaves(groups), strict=True):
        sizes[group] += leaf.size
    assert sizes == [432, 13_824, 50_688, 202_752, 650]


def test_resnet20_does_not_mix_examples():
    model = models.build("resnet20", (8, 8, 3))
    params, images = jax.jit(model.init)(jax.random.key(0)), _images((8, 8, 3), 2)
    logits = jax.jit(model.logits)
    one = logits(params, images)[0]
    np.testing.assert_allclose(one, logits(params, images.at[1].set(7.0))[0], atol=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("vgg", (28, 28, 1)), "--model must be one of"),
        (("mnist_cnn", (8, 8, 1)), "needs images of 16x16"),
        (("mlp", (8, 8, 1), 10, "gelu"), "--activation must be"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        models.build(*arguments)
