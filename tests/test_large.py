"""Large and long: parameters, examples, steps and batches as users have them, bounded in memory."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import accounting, sampling

pytestmark = pytest.mark.slow
MIB = 2**20


def _loss(params, example):
    x, label = example
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer)
    return -jax.nn.log_softmax(x @ params[-1])[label]


def _mebibytes(name):
    """Memory of this process in Linux's account: RssAnon is without mapped files."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def _alone(program, *arguments):
    """What a program prints, in a process of its own, and the most memory that it had."""
    peak = "line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line"
    script = f"{program}\nprint(*({peak}))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *printed, peak = done.stdout.split()
    return int(peak) / 1024, printed


def test_ten_million_parameters():
    # 24 gradients of 1e7 floats would take 1 GB; book-keeping never writes them out.
    widths = (784, 2_795, 2_795, 10)
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys, zip(widths, widths[1:], strict=False), strict=True)
    ]
    size = sum(layer.size for layer in params)
    assert size > 1e7
    batch = jax.random.normal(keys[0], (24, 784)), jnp.zeros(24, int)
    tx = jdp.privatize(1.0, batch_size=24, key=jax.random.key(1))
    grad = jdp.clipped_grad(_loss, jdp.clip_by_norm(1.0))

    @jax.jit
    def step(params, state):
        return tx.update(grad(params, batch, mask=jnp.ones(24, bool)), state, params)

    compiled = step.lower(params, tx.init(params)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 700 * MIB
    updates, _ = compiled(params, tx.init(params))
    square = sum(float(jnp.sum(jnp.square(update))) for update in updates)
    np.testing.assert_allclose(square, size / 24**2, rtol=0.01)  # noise, almost all of it


def test_a_million_examples_by_random_access(tmp_path):
    # 1e6 rows of 1,024 floats: 4 GB, which this file only pretends to have.
    shape = (1_000_000, 1_024)
    path = tmp_path / "examples.bin"
    with open(path, "wb") as file:
        file.truncate(4 * shape[0] * shape[1])
    written = np.memmap(path, np.float32, "r+", shape=shape)
    written[::100_000, 0] = 1.0
    written.flush()
    data = np.memmap(path, np.float32, "r", shape=shape)
    plan = jdp.plan(shape[0], 256, 100, epsilon=1.0, delta=1e-7)
    grad = jax.jit(jdp.clipped_grad(lambda w, x: 0.5 * (w @ x - 1) ** 2, jdp.clip_by_norm(1.0)))
    before = _mebibytes("RssAnon")
    begun, seen = time.monotonic(), 0
    for step in range(plan.steps):
        rows, mask = plan.host_batch(jax.random.key(0), step)
        assert len(rows) == plan.sampler.capacity < 400 and rows.max() < shape[0]
        total = grad(jnp.zeros(shape[1]), data[rows], mask=mask)
        seen += int(mask.sum())
    assert np.isfinite(total.parts[0]).all() and abs(seen - 25_600) < 5 * 25_600**0.5
    assert _mebibytes("RssAnon") - before < 700
    assert time.monotonic() - begun < 60


def test_the_accountant_takes_less_than_a_second_for_1e5_steps():
    accounting.epsilon(1.0, delta=1e-6, steps=10, sampling_rate=0.01)
    # Losses that are rarer and larger need a finer grid, and the last one 1.9 seconds.
    for z, rate, most in ((1.0, 1e-3, 1), (5.0, 1e-2, 1), (1.0, 1e-2, 1), (0.7, 1e-4, 4)):
        begun = time.process_time()
        assert 0 < accounting.epsilon(z, delta=1e-6, steps=100_000, sampling_rate=rate) < 100
        assert time.process_time() - begun < most


CALIBRATE = """
import sys, time
from jdp import accounting
target, steps, rate = map(float, sys.argv[1:])
begun = time.process_time()
options = {"delta": 1e-5, "steps": int(steps), "sampling_rate": rate}
z = accounting.calibrate_noise_multiplier(target, **options)
print(time.process_time() - begun, accounting.epsilon(z, **options) / target)
"""


@pytest.mark.parametrize("target", [1e-3, 0.1, 1.0, 10.0, 50.0, 500.0])
def test_calibration_is_bounded_in_time_and_memory(target):
    peak, (seconds, share) = _alone(CALIBRATE, target, 10_000, 0.01)
    assert 0.99 <= float(share) <= 1
    assert float(seconds) < 30 and peak < 1_024


def test_a_batch_of_65536_by_microbatches():
    rows = 65_536
    x = jax.random.normal(jax.random.key(0), (rows, 32))
    batch = x, jnp.arange(rows) % 10
    params = [jax.random.normal(jax.random.key(1), (32, 10)) / 32**0.5]
    mask = jnp.arange(rows) % 3 > 0
    whole = jdp.clipped_grad(_loss, jdp.clip_by_norm(0.5), strategy="book-keeping")
    parts = jdp.clipped_grad(_loss, jdp.clip_by_norm(0.5), microbatch_size=512)
    one, many = (jax.jit(grad)(params, batch, mask=mask) for grad in (whole, parts))
    # In float64, by hand.
    logits = np.asarray(x, np.float64) @ np.asarray(params[0], np.float64)
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(rows), batch[1]] -= 1
    norms = np.linalg.norm(chances, axis=1) * np.linalg.norm(np.asarray(x, np.float64), axis=1)
    factors = np.minimum(1, 0.5 / norms) * np.asarray(mask)
    exact = np.asarray(x, np.float64).T @ (factors[:, None] * chances)
    for total in (one, many):
        error = np.linalg.norm(np.asarray(total.parts[0][0], np.float64) - exact)
        assert error < 1e-4 * np.linalg.norm(exact)
        assert error < total.rounding * 0.5 * rows  # far inside what the noise is raised for
    assert many.rows == rows and many.noise_scales == (0.5,)
    sampler = sampling.PoissonSampling(10**6, rows / 10**6)
    assert rows < sampler.capacity < 1.05 * rows
