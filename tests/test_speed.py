import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import _speed_tables, _timing, speed, tables
from experiments._run import UsageError
from experiments._speed_models import rows
from experiments._speed_steps import NON_PRIVATE, contestants, num_parameters
from experiments._timing import ratio

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "smoke"
    command = [sys.executable, "-m", "experiments.speed", "--smoke", "--out", str(out)]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling is what takes time
    return out, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quick)


@pytest.mark.slow
def test_smoke_times_every_part_and_ends_in_one_json_line(smoke):
    out, done = smoke
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["models"]["mlp"][NON_PRIVATE] == 1
    assert {"jdp book-keeping", "jdp vmap", "optax.contrib"} <= last["models"]["mlp"].keys()
    assert {"gep, 1 group", "alone: one projection, 1 group"} <= last["gep"]["gep, smoke"].keys()
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "summary.json",
        "report.txt",
        "speed.png",
    }
    assert (out / "report.txt").read_text() in done.stdout and "left" in done.stderr
    text = tables.table(json.loads((out / "summary.json").read_text()))
    assert "| MLP 16-8-8-10; batch 8 | **" in text and "`python -m experiments.speed" in text


@pytest.mark.slow
def test_a_finished_run_is_taken_up_and_another_configuration_refused(smoke, monkeypatch):
    out, done = smoke
    args = speed.Args(smoke=True, out=out)
    monkeypatch.setattr(speed, "prepare", lambda *_: pytest.fail("timed again"))
    assert speed.main(args) == json.loads(done.stdout.splitlines()[-1])
    with pytest.raises(UsageError, match="budget was 12.0, now 1.0"):
        speed.main(dataclasses.replace(args, budget=1.0))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"models": ("vgg",)}, "--models must be different ones"),
        ({"peers": ("opacus", "opacus")}, "--peers must be different ones"),
        ({"parts": ("all",)}, "--parts must be different ones"),
        ({"repeats": 0}, "--repeats must be above 0"),
        ({"budget": float("nan")}, "--budget must be above 0"),
    ],
)
def test_bad_options_are_named(change, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        speed.main(speed.Args(**change, out=tmp_path))


@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")  # in jax-privacy
@pytest.mark.parametrize(
    "name, peers",
    [
        ("mlp", ("optax", "jax-privacy")),
        pytest.param("lora", ("optax",), marks=pytest.mark.slow),
    ],
)
def test_all_contestants_take_the_same_step_without_noise(name, peers):
    entries = contestants(rows(smoke=True)[name], peers, noise_multiplier=0.0)
    moves = {}
    for key, entry in entries.items():
        moved = jax.jit(entry.fun)(*entry.arguments)[0]
        parts = jax.tree.map(lambda a, b: np.ravel(a - b), moved, entry.arguments[0])
        moves[key] = np.concatenate(jax.tree.leaves(parts))
    reference = moves["jdp vmap"]
    assert np.linalg.norm(reference) > 1e-4
    for key in moves.keys() - {NON_PRIVATE}:
        # Book-keeping may take a norm for up to 3% too high.
        assert np.linalg.norm(moves[key] - reference) < 0.03 * np.linalg.norm(reference), key
    if name == "mlp":  # whose gradients are longer than the clip norm
        assert np.linalg.norm(moves[NON_PRIVATE] - reference) > 0.03 * np.linalg.norm(reference)


def test_sizes_of_the_networks():
    sizes = {name: num_parameters(row) for name, row in rows().items()}
    assert sizes["mlp"] == 669_706 and sizes["resnet20"] == 268_346
    assert sizes["cnn"] == sizes["cnn-patches"] == 26_010
    assert sizes["text"] - sizes["transformer"] == 8_192 * 128
    assert sizes["lora"] == 2 * 2 * 2 * 8 * 128


def test_ratios_are_taken_within_rounds():
    base = [1.0, 2.0, 10.0, 1.0, 3.0]
    found = ratio([2 * seconds for seconds in base], base)
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert ratio([None, 2.0], [5.0, 1.0])["ratio"] == 2.0


def test_slow_calls_sit_out_once_they_have_had_their_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def call():
            now[0] += seconds

        return call

    times = _timing.race({"slow": takes(0.04), "fast": takes(0.005)}, 8, budget=0.25)
    assert times["slow"] == [pytest.approx(0.04)] * 7 + [None]
    assert times["fast"] == [pytest.approx(0.005)] * 8
    assert _timing.race({"slow": takes(9)}, 6, budget=1)["slow"] == [9] * 5 + [None]


def test_the_fastest_peer_is_another_library():
    entries = {"non-private": 1, "jdp vmap": 2, "its clipped sum": 1, "optax.contrib": 4, "x": 3}
    found = {name: {"seconds": seconds} for name, seconds in entries.items()}
    assert _speed_tables.fastest_peer(found) == "x"
    assert _speed_tables.fastest_peer({"non-private": {"seconds": 1}}) is None
