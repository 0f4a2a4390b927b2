"""Book-keeping looks into scans and checkpoints, and leaves what it does not know there alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp._walk import find, views_of, walk

N, D = 5, 4
MASK = jnp.arange(N) != 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3, D)).astype(np.float32)  # three positions


def primitives(jaxpr):
    """The names of all primitives in a jaxpr, also inside calls and loops."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            names |= primitives(inner) if hasattr(inner, "eqns") else set()
    return names


def scan(*args, **options):
    return jax.lax.scan(*args, **options)[0]


def layer(x, w):
    return jnp.tanh(x @ w), None


def turns(p, x):
    return scan(lambda x, _: layer(x, p["w"]), x, length=3)


def handing_on(change):
    """The weights are part of the carry."""

    def logits(p, x):
        step = lambda carry, _: ((jnp.tanh(carry[0] @ carry[1]), change(carry[1])), None)  # noqa: E731
        return scan(step, (x, p["w"]), length=3)[0]

    return logits


def stacking(p, x):
    """Returns the weights, stacked."""
    x, stack = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w.T), x, p["w"])
    return scan(layer, x, stack)


def branching(p, x):
    pick = lambda x, w: jax.lax.cond(x[0, 0] > 0, jnp.matmul, lambda x, w: x, x, w)  # noqa: E731
    return scan(lambda x, w: (pick(x, w), None), x, p["w"])


def convolving(p, x):
    numbers = ("NWC", "WIO", "NWC")
    one = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x[None], w, (1,), "SAME", dimension_numbers=numbers
    )[0]
    x = scan(lambda x, w: (jnp.tanh(one(x, w)), None), x, p["w"])
    return scan(lambda x, _: (jnp.tanh(one(x, p["v"])), None), x, length=2)


def looking_up(p, x):
    words = jnp.arange(5) - 2
    return scan(lambda x, table: (x + jnp.tanh(table[words]).sum(0)[None], None), x, p["w"])


def key_and_counter(p, x):
    """Carries and slices that are no floats."""

    def step(carry, slices):
        (x, key, scale), (w, number) = carry, slices
        key, own = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(own, 0.7, x.shape), jnp.tanh(x @ w), 0)
        return (x * scale + number.astype(x.dtype), key, scale * 2.0), None

    return scan(step, (x, jax.random.key(1), 1.0), (p["w"], jnp.arange(3)))[0]


@jax.custom_vjp
def odd_product(x, w):
    return x @ w


odd_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))

STACK, MATRIX = (3, D, D), (D, D)
CASES = {  # logits, shape of w, whether it is book-kept
    "layers": (lambda p, x: scan(layer, x, p["w"]), STACK, True),
    "backwards": (lambda p, x: scan(layer, x, p["w"], reverse=True), STACK, True),
    "unrolled": (lambda p, x: scan(layer, x, p["w"], unroll=2), STACK, True),
    "turns": (turns, MATRIX, True),
    "turns and outside": (lambda p, x: turns(p, x @ p["w"]) @ p["w"].T, MATRIX, True),
    "carried": (handing_on(lambda w: w), MATRIX, True),  # which JAX closes over instead
    "slices of slices": (
        lambda p, x: scan(lambda x, w: (scan(layer, x, w), None), x, p["w"]),
        (2, 3, D, D),
        True,
    ),
    "turns of slices": (
        lambda p, x: scan(lambda x, _: (scan(layer, x, p["w"]), None), x, length=2),
        STACK,
        True,
    ),
    "slices of turns": (
        lambda p, x: scan(lambda x, w: (turns({"w": w}, x), None), x, p["w"]),
        STACK,
        True,
    ),
    "another axis, transposed": (
        lambda p, x: scan(lambda x, w: layer(x, w.T), x, jnp.moveaxis(p["w"], 1, 0)),
        (D, 3, D),
        True,
    ),
    "twice a turn, and another scan": (
        lambda p, x: scan(layer, scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, p["w"]), p["w"]),
        STACK,
        True,
    ),
    "a transposed stack": (
        lambda p, x: scan(layer, scan(layer, x, p["w"]), p["w"].mT, reverse=True),
        STACK,
        True,
    ),
    "a stack as stacks": (
        lambda p, x: scan(
            lambda x, w: (scan(layer, x, w), None),
            scan(layer, x, p["w"]),
            p["w"].reshape(2, 2, D, D),
        ),
        (4, D, D),
        True,
    ),
    "one slice, and turns": (
        lambda p, x: turns({"w": p["w"].reshape(D, D)}, scan(layer, x, p["w"])),
        (1, D, D),
        True,
    ),
    "checkpoints": (
        lambda p, x: scan(jax.checkpoint(layer), x, p["w"]),
        STACK,
        True,
    ),
    "a checkpoint that returns the weights": (
        lambda p, x: jnp.matmul(*jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), w.T))(x, p["w"])),
        MATRIX,
        True,
    ),
    "checkpoints of scans": (
        lambda p, x: scan(
            jax.checkpoint(lambda x, w: (scan(jax.checkpoint(layer), x, w), None)), x, p["w"]
        ),
        (2, 3, D, D),
        True,
    ),
    "half precision": (
        lambda p, x: scan(
            lambda x, w: layer(x, w.astype(jnp.bfloat16).astype(jnp.float32)), x, p["w"]
        ),
        STACK,
        True,
    ),
    "gradient of the inputs": (
        lambda p, x: jax.grad(lambda x: scan(layer, x, p["w"]).sum())(x),
        STACK,
        True,
    ),
    "keys and counters": (key_and_counter, STACK, True),
    "tables": (looking_up, (3, 7, D), True),
    "no turns": (lambda p, x: scan(layer, x, p["w"]) * p["v"].sum(), (0, D, D), False),
    "no rows": (lambda p, x: x + jnp.zeros((3, 0)) @ p["w"] + p["v"].sum(), (0, D), False),
    "carried and changed": (handing_on(lambda w: 0.9 * w), MATRIX, False),
    "carried, changed, and outside": (
        lambda p, x: handing_on(lambda w: 0.9 * w)(p, x @ p["w"]),
        MATRIX,
        False,
    ),
    "carried and turned": (handing_on(lambda w: w.T), MATRIX, False),
    "stacked again": (stacking, STACK, False),
    "a slice outside": (lambda p, x: scan(layer, x, p["w"]) @ p["w"][1], STACK, False),
    "a penalty outside": (
        lambda p, x: scan(layer, x, p["w"]) + jnp.sum(p["w"] ** 2),
        STACK,
        False,
    ),
    "a flipped stack": (
        lambda p, x: scan(layer, scan(layer, x, p["w"]), p["w"][::-1]),
        STACK,
        False,
    ),
    "two axes": (
        lambda p, x: scan(layer, scan(layer, x, p["w"]), jnp.moveaxis(p["w"], 1, 0)),
        (D, D, D),
        False,
    ),
    "a slice and the whole": (
        lambda p, x: scan(
            lambda x, w: (jnp.tanh(x @ w + x @ p["w"].reshape(D, D * D)[:, :D]), None), x, p["w"]
        ),
        (D, D, D),
        False,
    ),
    "squares": (lambda p, x: scan(lambda x, w: layer(x, w @ w), x, p["w"]), STACK, False),
    "branches": (branching, STACK, False),
    "odd derivatives": (
        lambda p, x: scan(lambda x, w: (jnp.tanh(odd_product(x, w)), None), x, p["w"]),
        STACK,
        False,
    ),
}


def model(case):
    logits, shape, kept = CASES[case]
    params = {
        "w": jnp.asarray(RNG.normal(size=shape), jnp.float32),
        "v": jnp.asarray(RNG.normal(size=(3, D, D)), jnp.float32),
    }
    return lambda params, x: jnp.sum(jnp.sin(logits(params, x))), params, kept


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_and_the_same_sum_as_written_out(case):
    loss, params, kept = model(case)
    jaxpr = jax.make_jaxpr(loss)(params, X[0])
    assert (1 in find(jaxpr, [params["v"].shape, params["w"].shape])) == kept
    inputs = jnp.asarray(X).at[1].set(jnp.nan).at[3].set(jnp.inf)
    ours, reference = (
        jax.jit(
            lambda p, strategy=strategy: jdp.clipped_grad(
                loss, jdp.clip_by_norm(0.3), strategy=strategy
            )(p, inputs, mask=MASK).parts[0]["w"]
        )(params)
        for strategy in ("book-keeping", "vmap")
    )
    assert np.isfinite(ours).all()
    tolerance = 0.01 if case == "half precision" else 1e-5  # written out, gradients are rounded
    atol = tolerance * np.linalg.norm(reference)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=atol)


def test_what_is_computed_again_still_is():
    loss, params, _ = model("checkpoints of scans")
    gradient = jdp.clipped_grad(loss, jdp.clip_by_norm(0.3), strategy="book-keeping")
    used = primitives(jax.make_jaxpr(lambda p: gradient(p, X, mask=MASK))(params).jaxpr)
    assert used & {"remat", "remat2", "checkpoint"}


def test_what_uses_share_is_recorded_once():
    def loss(params, x):
        step = lambda x, w: (jnp.tanh(x @ w[0]) * (x @ w[1]), None)  # noqa: E731
        return scan(step, x, params).sum()

    params = (jnp.ones(STACK), jnp.ones(STACK))
    jaxpr = jax.make_jaxpr(loss)(params, X[0])
    views = views_of(jaxpr, (0, 1))
    taps = [use.tap for use in walk(jaxpr, views).uses]
    first, second = walk(jaxpr, views, ([*params, X[0]], iter(taps))).inputs
    assert first is second and first.shape == (3, *X[0].shape)


def test_inside_shard_map():
    loss, params, _ = model("turns of slices")
    mesh = jax.make_mesh((1,), ("batch",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("batch")
    gradient = jdp.clipped_grad(loss, jdp.clip_by_norm(0.3), microbatch_size=N)
    of_device = jax.shard_map(
        lambda p, x, mask: jax.tree.map(lambda leaf: leaf[None], gradient(p, x, mask=mask).parts),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), rows, rows),
        out_specs=rows,
    )
    (ours,) = jax.jit(of_device)(params, X, MASK)
    reference = jax.jit(lambda p: gradient(p, X, mask=MASK).parts[0])(params)
    np.testing.assert_allclose(ours["w"][0], reference["w"], atol=1e-6)
