import jax
import jax.numpy as jnp
import numpy as np
import optax
from checks import BATCH

import jdp

STD = 1.5 * 0.8 / BATCH


def _noisy_adam(signal, steps=3000, size=2000, floor=1e-9):
    """Directions of corrected and plain Adam on signal plus private noise; the corrected state."""
    params = jnp.zeros(size)
    private = jdp.privatize(1.5, batch_size=BATCH, key=jax.random.key(0))
    nothing = jdp.clip_by_norm(0.8)(jnp.zeros((1, size)), jnp.ones(1, bool))
    transformations = (
        private,
        jdp.scale_by_adam_corrected(STD, floor=floor),
        optax.scale_by_adam(eps=0.0),
    )

    def step(states, _):
        noise, first = private.update(nothing, states[0], params)
        corrected, second = transformations[1].update(noise + signal, states[1], params)
        plain, third = transformations[2].update(noise + signal, states[2])
        return (first, second, third), (corrected, plain)

    states = tuple(tx.init(params) for tx in transformations)
    states, (corrected, plain) = jax.lax.scan(step, states, length=steps)
    return corrected[-1], plain[-1], states[1]


def test_noise_raises_the_second_moment_by_what_is_subtracted():
    # Zero gradients: all of the second moment is bias, and subtracting it leaves nothing.
    state = _noisy_adam(0.0)[2]
    square = state.square / (1 - 0.999**3000)
    assert abs(square.mean() / STD**2 - 1) < 0.01
    spread = np.sqrt(2 * 0.001 / 1.999)
    assert abs(square.std() / STD**2 / spread - 1) < 0.1  # as the docstring has it


def test_corrected_adam_takes_steps_of_one_size_whatever_the_gradient():
    # Where plain DP-Adam divides by the noise: its steps are proportional to the gradient.
    for signal in (0.5, 1.0):
        corrected, plain, _ = _noisy_adam(signal * STD, floor=1e-3 * STD**2)
        assert abs(corrected.mean() - 1) < 0.05
        assert abs(plain.mean() - signal / np.hypot(signal, 1)) < 0.03


def test_corrected_adam_is_adam_where_there_is_hardly_any_noise(key):
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    ours = jdp.scale_by_adam_corrected({"a": 1e-8, "b": 1e-9}, floor=1e-12, b1=0.8, b2=0.95)
    adam = optax.scale_by_adam(b1=0.8, b2=0.95, eps=0.0)
    states = ours.init(params), adam.init(params)
    for seed in range(3):
        updates = jax.tree.map(
            lambda leaf, seed=seed: jax.random.normal(jax.random.key(seed), leaf.shape), params
        )
        got, first = ours.update(updates, states[0], params)
        want, second = adam.update(updates, states[1])
        states = first, second
        for name in params:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4)


def test_corrected_adam_knows_the_noise_of_each_leaf_and_keeps_types():
    params = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(2)}
    tx = jdp.scale_by_adam_corrected({"a": 0.6, "b": jnp.float32(0.8)}, floor=1e-9)
    update, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert update["a"].dtype == jnp.bfloat16 and state.square["a"].dtype == jnp.float32
    np.testing.assert_allclose(update["a"].astype(jnp.float32), 1 / 0.8, rtol=1e-2)
    np.testing.assert_allclose(update["b"], 1 / 0.6, rtol=1e-4)
