"""The study of linear regression: data, rates, fairness, resuming, messages."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    _hypernet_coordinates,
    _hypernet_data,
    _hypernet_report,
    _hypernet_tables,
    hypernet_regression,
)
from experiments._hypernet_rivals import METHODS, moments
from experiments._run import UsageError, read_json

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "hypernet_regression"
SMALL = hypernet_regression.Args(parts=("dimension",), methods=("closed-form",), smoke=True)


def test_data_are_as_claimed():
    x, y, w = map(np.asarray, _hypernet_data.draw(jax.random.key(0), 50_000, 6, 1.0))
    np.testing.assert_allclose((x * x).sum(1), 6, rtol=1e-5)
    np.testing.assert_allclose(x.T @ x / len(x), np.eye(6), atol=0.03)
    np.testing.assert_allclose((y[:, None] * x).mean(0), w, atol=0.03)
    assert np.var(y - x @ w) == pytest.approx(1, abs=0.03)
    assert np.all(np.abs(w) <= 1 / np.arange(1, 7))


def test_relative_errors_are_a_ratio_of_sums():
    rng = np.random.default_rng(0)
    norms = rng.uniform(0.1, 1, 400)
    mean, error = _hypernet_data.relative(0.3 * norms, norms)
    assert mean == pytest.approx(0.3) and error < 1e-12
    found = [_hypernet_data.relative(rng.exponential(norms), norms)[0] for _ in range(300)]
    _, error = _hypernet_data.relative(rng.exponential(norms), norms)
    assert error == pytest.approx(np.std(found), rel=0.3)


def test_rates_are_those_of_the_notes():
    assert _hypernet_data.best_k_slope(1.0, "k") == pytest.approx(1 / 2)
    assert _hypernet_data.rate_slope(1.5) == pytest.approx(-2 / 2.5)
    # both balance noise k C^2 / m^2 against the bias k^(1 - 2 gamma)
    for rule, power in (("k", 3), ("sqrt", 2)):
        ks = np.geomspace(1, 1e6, 20_000)
        best = [ks[(ks**power / m**2 + ks ** (1 - 3.0)).argmin()] for m in (1e3, 1e5)]
        slope = np.log(best[1] / best[0]) / np.log(100)
        assert slope == pytest.approx(_hypernet_data.best_k_slope(1.5, rule), abs=0.01)
    assert _hypernet_data.sgd_lower_bound(64, 64, 1.0) == 1.0
    small = _hypernet_data.sgd_lower_bound(4, 1_000, 1.0)
    assert small == pytest.approx(64 * math.log(1e5) / 1e6)


def test_every_method_has_as_many_settings():
    assert {len(set(own.grid())) for own in METHODS.values()} == {24}


def test_moments_keep_their_sensitivity():
    x = np.array(jax.random.normal(jax.random.key(0), (9, 3))) * 4
    y = np.array(jax.random.normal(jax.random.key(1), (9,))) * 9
    for bad in (np.zeros(3), np.full(3, 1e9), np.full(3, np.nan)):
        other_x, other_y = x.copy(), y.copy()
        other_x[0], other_y[0] = bad, -y[0]
        x[0] = 50.0
        sums = [moments(*map(jnp.asarray, pair), 2.0, 3.0) for pair in ((x, y), (other_x, other_y))]
        change = [np.linalg.norm(a - b) for a, b in zip(sums[0].parts, sums[1].parts, strict=True)]
        scaled = np.linalg.norm(np.array(change) / np.array(sums[0].noise_scales))
        zero = 1.0 if np.isnan(bad).any() or not bad.any() else 2.0  # zeroed, or replaced
        assert 0.3 < scaled <= zero * (1 + 1e-5)


def test_best_k_is_found_by_its_parabola():
    ks = _hypernet_coordinates.grid_of_k(128)
    curve = [(np.log(k / 9.3)) ** 2 + 0.2 for k in ks]
    cell = {"k": ks, "errors": {"k": [np.exp(curve).tolist()]}, "n": 64, "d": 128, "gamma": 1.0}
    cell |= {"epsilons": [1.0], "noise_multipliers": [3.7], "mean_square": 0.5}
    found = _hypernet_coordinates.best(cell, "k", 0)
    assert found["k"] == pytest.approx(9.3, rel=0.02) and found["in_fit"]
    points = [
        found | {"epsilon_n": m, "k": 0.4 * m**0.5, "in_fit": True} for m in (50, 500, 5_000, 9_000)
    ]
    (slope,) = _hypernet_coordinates.slopes(points)
    assert slope["slope"] == pytest.approx(0.5)
    assert slope["k_over_rate"] == pytest.approx(0.4)


def test_smoke_run_resumes_and_draws_from_its_summary(tmp_path, monkeypatch):
    args = dataclasses.replace(SMALL, out=tmp_path)
    result = hypernet_regression.main(args)
    assert json.loads(json.dumps(result))["experiment"] == "hypernet_regression"
    assert all(0 < row["mean"] < 10 for row in result["dimension"])
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "summary.json", "report.txt", "regression.png"}
    report = (tmp_path / "report.txt").read_text()
    assert "closed-form" in report and "N = d^1.5" in report and "zero-out" in report
    assert "| closed-form |" in _hypernet_tables.markdown(read_json(tmp_path / "summary.json"))
    monkeypatch.setattr(hypernet_regression, "measure", lambda *_: pytest.fail("ran again"))
    again = hypernet_regression.main(args)
    assert again["dimension"] == result["dimension"]
    with pytest.raises(UsageError, match="seed was 0, now 5"):
        hypernet_regression.main(dataclasses.replace(args, seed=5))


@pytest.mark.slow
def test_smoke_run_of_everything(tmp_path):
    result = hypernet_regression.main(hypernet_regression.Args(smoke=True, out=tmp_path))
    assert {"dimension", "epsilon", "size", "coordinates"} <= result.keys()
    assert {row["method"] for row in result["size"]} == set(hypernet_regression.ALL)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": ("noise",)}, "--parts"),
        ({"methods": ("dp-gd", "dp-gd")}, "--methods"),
        ({"dimensions": ()}, "--dimensions"),
        ({"epsilons": (0.0,)}, "--epsilons"),
        ({"gammas": (0.5,)}, "--gammas"),
        ({"sizes": (10,)}, "--sizes"),
        ({"steps": 150}, "--steps must be a multiple"),
        ({"tuning_draws": 0}, "--tuning-draws"),
        ({"parts": ("dimension",), "most_measured": 1}, "--parts dimension has nothing to measure"),
        ({"methods": ("learned",), "most_trained": 0}, "or for learned --most-trained 0"),
        ({"methods": ("adassp",), "dimensions": (1024,)}, "or for adassp 256 dimensions"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(UsageError, match=message):
        hypernet_regression.main(dataclasses.replace(hypernet_regression.Args(), **change))


def test_the_command_is_documented():
    command = [sys.executable, "-m", "experiments.hypernet_regression", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--tuning-draws" in done.stdout and "adassp" in done.stdout


def test_committed_results_say_what_the_report_says():
    summary = read_json(RESULTS / "summary.json")
    assert (RESULTS / "report.txt").read_text() == _hypernet_report.report(summary)
    assert summary["provenance"]["command"].startswith("python -m experiments.hypernet_regression")
