"""Several devices and several processes give what one device gives, and noise is drawn once."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROUNDING = 2e-5  # a step of what is released: a last bit of a sum may decide which


def _start(devices, *command):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(*processes):
    """What each process printed; they run side by side, and end with this."""
    try:
        with ThreadPoolExecutor() as threads:
            done = list(threads.map(lambda process: process.communicate(timeout=120), processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    errors = [err[-3000:] for _, err in done]
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return [out for out, _ in done]


def _run(case, *arguments, devices=8):
    script = str(ROOT / "tests" / "on_devices.py")
    return _start(devices, script, case, *map(str, arguments))


def _result(output):
    return json.loads(output.splitlines()[-1])


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def layouts():
    return _result(*_output(_run("layouts")))


def _as_one(result):
    return all(distance < ROUNDING for distance, _ in result["doors"].values())


def test_eight_devices_are_as_one_and_updates_lie_where_the_parameters_do(layouts):
    results = dict(layouts["results"])
    twin = results.pop("same examples everywhere")
    assert len(results) == 5
    for layout, result in results.items():
        assert _as_one(result), (layout, result)
        assert all(in_place for _, in_place in result["doors"].values()), (layout, result)
    # Devices hold different examples. If all held the same, nothing above would go unnoticed.
    assert results["batch, Auto"]["shards"] == results["batch, Explicit"]["shards"] == 8
    assert twin["shards"] == 1
    assert all(distance > 1e-2 for distance, _ in twin["doors"].values())


def test_devices_share_the_work_and_send_sums_not_examples():
    result = _result(*_output(_run("work")))
    (one, _), (eighth, sent) = result["counts"]
    assert eighth < one / 6
    assert sent <= 2 * result["parameters"]


def _right_noise(moments):
    return (
        abs(moments["std"] - 1) < 0.01
        and moments["normal"] > 1e-3
        and moments["correlation"] < 0.06  # 8,192 numbers a device: a standard error of 0.011
    )


def test_noise_is_drawn_once_also_where_it_is_sharded():
    result = _result(*_output(_run("noise")))
    assert len(result["noise"]) == 4
    for layout, moments in result["noise"].items():
        assert _right_noise(moments), (layout, moments)
        assert moments["distance"] < ROUNDING, layout  # what one device draws
        if "sharded" in layout:
            assert "batch" in moments["spec"]
            # No device holds more than about an eighth of the two draws.
            assert moments["largest"] < 2 * result["numbers"] / 4
    twins = result["twins"]
    assert abs(twins["drawn on every device and added"]["std"] / 8**0.5 - 1) < 0.01
    assert not any(map(_right_noise, twins.values()))


def test_adding_clipped_sums_over_devices_is_refused():
    total, *parts = _result(*_output(_run("psum")))
    assert total.startswith("TypeError") and "key" in total
    # It is the seal that refuses. What each device has summed are its own examples, one a row.
    assert all(distance < 1e-4 for distance in parts), parts


def test_two_processes_are_as_one(layouts):
    port = _free_port()
    pair = [_run("process", port, rank, devices=1) for rank in (0, 1)]
    first, second = map(_result, _output(*pair))
    alone = layouts["alone"]
    assert (first["processes"], first["devices"]) == (2, 2)
    assert first["examples"] != second["examples"]
    assert first["updates"].keys() == alone["updates"].keys()
    for name, update in alone["updates"].items():
        assert first["updates"][name] == second["updates"][name]
        np.testing.assert_allclose(first["updates"][name], update, atol=ROUNDING)
    assert first["noise"] == second["noise"]
    np.testing.assert_allclose(first["noise"], alone["noise"], atol=ROUNDING)
    # Their secure keys are the same in both processes, and each is new.
    assert first["secure"] == second["secure"]
    assert first["secure"][0] != first["secure"][1]


@pytest.mark.slow
def test_the_experiment_on_three_devices_is_as_on_one():
    for method, (distance, size) in _result(*_output(_run("experiment", devices=3))).items():
        assert distance < ROUNDING < size, method


@pytest.mark.parametrize(
    "processes, steps, accuracy",
    [pytest.param(1, 100, 0.7, marks=pytest.mark.slow), (2, 10, 0.3)],
)
def test_the_recipe_in_the_readme_runs(processes, steps, accuracy):
    text = (ROOT / "README.md").read_text().split("## Many devices, many hosts")[1]
    recipe = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert recipe is not None
    program, devices = recipe.group(1).replace("steps=100", f"steps={steps}"), 8
    if processes == 2:
        # One device each: several virtual ones a process can wait for each other for ever on a CPU.
        where, devices = f"'127.0.0.1:{_free_port()}', 2, int(sys.argv[1])", 1
        program = f"import jax, sys\njax.distributed.initialize({where})\n{program}"
    running = [_start(devices, "-c", program, str(rank)) for rank in range(processes)]
    accuracies = [float(out.splitlines()[-1]) for out in _output(*running)]
    assert accuracies[0] > accuracy
    assert len(set(accuracies)) == 1
