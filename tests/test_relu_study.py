"""The study of ReLU regression: exact risks, tables, fairness, resuming, messages."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import (
    _relu_data,
    _relu_methods,
    _relu_parts,
    _relu_report,
    _relu_tables,
    _run,
    relu_regression,
)
from experiments._relu_methods import METHODS, refused, run
from experiments._run import UsageError
from jdp.relu_regression import Fit

DELTA = 1e-3
ROOT = pathlib.Path(__file__).parents[1]
SMALL = relu_regression.Args(parts=("risk",), methods=("dp-gd-glmtron",), smoke=True)


@pytest.mark.parametrize("design", _relu_data.DESIGNS)
def test_designs_have_the_second_moments_and_risks_that_are_claimed(design):
    draw = jax.jit(_relu_data.draw, static_argnums=(0, 2, 3))
    x, y, truth = map(np.asarray, draw(design, jax.random.key(0), 40_000, 4))
    values = _relu_data.eigenvalues(design, 4)
    assert values.sum() == pytest.approx(1)
    np.testing.assert_allclose(x.T @ x / len(x), np.diag(values), atol=0.02)
    assert np.linalg.norm(truth) == pytest.approx(1, abs=1e-5)
    w = np.array([0.5, -0.2, 0.8, 0.1])
    direct = np.mean((np.maximum(0, x @ w) - np.maximum(0, x @ truth)) ** 2)
    assert _relu_data.excess_risk(design, w, truth) == pytest.approx(direct, rel=0.05)
    assert _relu_data.excess_risk(design, truth, truth) == pytest.approx(0, abs=1e-9)
    assert np.abs((y - np.maximum(0, x @ truth)).mean()) < 0.01
    assert np.mean(np.linalg.norm(x, axis=1) > _relu_data.bound(design)) < 0.2


def test_every_method_has_as_many_settings():
    private = {name: len(own.grid()) for name, own in METHODS.items() if own.private}
    assert set(private.values()) == {30}
    assert all(len(set(own.grid())) == len(own.grid()) for own in METHODS.values())
    counts = {"settings": {name: len(METHODS[name].grid()) for name in ("dp-sgd", "sgd")}}
    assert _relu_report._settings(counts) == "30 settings a method (15 of sgd)"


@pytest.mark.parametrize("method", ["dp-pgd-surrogate", "dp-glmtron"])
def test_columns_side_by_side_are_those_run_alone(method):
    sets, _ = relu_regression.data_sets("gaussian", 200, 3, 2, jax.random.key(0))
    grid = METHODS[method].grid()
    columns = [(grid[0], 0.5), (grid[0], 2.0), (grid[-1], 2.0)]
    key = jax.random.key(1)
    together = run(method, columns, key, sets, 1e-5, 1.25, width=4)
    assert together.shape == (3, 2, 3)
    for i, column in enumerate(columns):
        alone = run(method, [column], key, sets, 1e-5, 1.25)
        np.testing.assert_allclose(together[i], alone[0], rtol=1e-3, atol=1e-4)
    assert not np.allclose(together[0], together[1]) and not np.allclose(together[1], together[2])


def test_every_epsilon_has_the_threshold_rows_that_it_needs(monkeypatch):
    plans = []

    def program(plan, *_):
        plans.append(plan)
        return lambda key, data, bound, z, *_: np.zeros((len(z), data.x.shape[1]))

    monkeypatch.setattr(_relu_methods, "_program", program)
    sets, _ = relu_regression.data_sets("gaussian", 10_000, 2, 1, jax.random.key(0))
    setting = METHODS["dp-mbglmtron"].grid()[0]
    run("dp-mbglmtron", [(setting, 0.05), (setting, 1.0)], jax.random.key(0), sets, 1e-5, 1.25)
    rows = [plan.sampler.threshold_rows for plan in plans]
    assert rows[0] >= 387 and rows[1] == 333 and len(rows) == 2


def test_smoke_run_resumes_and_draws_from_its_summary(tmp_path, monkeypatch):
    args = dataclasses.replace(SMALL, out=tmp_path)
    brief = relu_regression.main(args)
    rows = {row["method"]: row for row in brief["risk"]}
    assert 0 < rows["dp-gd-glmtron"]["mean"] < 0.05
    assert json.loads(json.dumps(brief))["experiment"] == "relu_regression"
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "summary.json", "report.txt", "risk-d10.png"}
    report = (tmp_path / "report.txt").read_text()
    assert "dp-gd-glmtron" in report and "gaussian, d = 10, N = 300" in report
    assert "number: 30 settings a method, on" in report
    monkeypatch.setattr(relu_regression, "cell", lambda *_: pytest.fail("ran again"))
    assert relu_regression.main(args)["risk"] == brief["risk"]
    with pytest.raises(UsageError, match="seed was 0, now 5"):
        relu_regression.main(dataclasses.replace(args, seed=5))


def test_methods_refuse_what_the_library_refuses():
    setting = METHODS["dp-mbglmtron"].grid()[0]
    assert "threshold_rows" in str(refused("dp-mbglmtron", 1_000, 0.05, 1e-5, setting))
    assert refused("dp-mbglmtron", 100_000, 0.5, 1e-5, setting) is None


def test_slopes_are_fitted_where_each_regime_holds():
    base = {"design": "gaussian", "d": 10, "standard_error": 1e-9}
    rows = []
    for n in (1_000, 10_000, 100_000, 1_000_000):
        rows.append(base | {"n": n, "method": "glmtron", "epsilon": None, "mean": 0.1 / n})
        risk = 0.1 / n + 5e4 / n**2
        rows.append(base | {"n": n, "method": "dp", "epsilon": 0.1, "mean": risk})
        rows.append(base | {"n": n, "method": "dp", "epsilon": 2.0, "mean": 0.15 / n})
    found = {(s["epsilon"], s["regime"]): s for s in _relu_parts.slopes(rows)}
    assert found[2.0, "statistics"]["slope"] == pytest.approx(-1)
    assert np.exp(found[2.0, "statistics"]["intercept"]) == pytest.approx(0.15)
    assert -2.05 < found[0.1, "privacy"]["slope"] < -1.5
    assert 1_000 not in found[0.1, "privacy"]["sizes"]  # no better than w = 0
    found[0.1, "privacy"] |= {"sizes": [10_000, 100_000]}
    summary = {"slopes": list(found.values())}
    text = "\n".join(_relu_report._slopes(summary))
    assert "fit to 4 sizes: N = 1,000" in text and "through 2 sizes, no fit: N = 10,000" in text
    assert "N^-1.00 (standard error 0.00; fit" in text
    table = "\n".join(_relu_tables._slopes(summary))
    assert "| dp | - | -1.00 ± 0.00 (10, 2, 4) |" in table  # of two sizes there is none


def test_the_stall_part_shows_what_a_heavy_tail_does_to_means(tmp_path, monkeypatch):
    monkeypatch.setattr(_relu_parts, "STALL_SIZES", (400,))
    monkeypatch.setattr(_relu_parts, "_from_zero", lambda *_: {})
    monkeypatch.setattr(_relu_parts, "STALL_STEPS", 4)
    monkeypatch.setattr(_relu_parts, "STALL_DRAWS", 1)
    monkeypatch.setattr(_relu_parts, "STALL_GRID", ((5.0, 0.1),))
    found = _relu_parts.stall(_run.Folder(tmp_path, "relu_regression"), 1, 0, DELTA)
    assert found["runs_n400"] == 20
    least = 10 * np.median(found["surrogate_runs_n400"])
    for gradient in ("true", "surrogate", "switch"):
        risks = np.array(found[f"{gradient}_runs_n400"])
        assert found[f"private_{gradient}_median_n400"] == pytest.approx(np.median(risks), 0.01)
        assert found[f"share_of_{gradient}_runs_stuck_n400"] == np.mean(risks > least)
    printed = "\n".join(_relu_report._stall({"stall": found}))
    table = "\n".join(_relu_tables._stall({"stall": found}))
    assert "private_true_median_n400" in printed and "_true_runs_stuck_n400" in printed
    assert table.count("N = 400: median") == 3
    assert table.count("above ten times the surrogate's median, true gradient, N = 400") == 1


def test_the_published_setting_says_which_private_thresholds_are_refused(tmp_path, monkeypatch):
    still = lambda _, x, *__, **___: Fit(x[0], x[:1], x[0])  # noqa: E731
    monkeypatch.setattr(_relu_parts, "fit", still)
    folder = _run.Folder(tmp_path, "relu_regression")
    rows = _relu_parts.paper(folder, 200, (1.0, 5.0), 1e-3, 1, 0)
    text = "\n".join(_relu_report._paper({"paper": rows}))
    several, once = "dp-mbglmtron, threshold 0.4", "dp-mbglmtron, threshold 0.4, one pass"
    assert f"{several}: a private threshold of 32 rows is refused at epsilon 1, 5:" in text
    assert f"{once}: a private threshold of 32 rows is refused" not in text  # less noise
    table = "\n".join(_relu_tables._paper({"paper": rows}))
    assert f"| {several}: a private threshold of 32 rows instead | refused | refused |" in table


def test_methods_are_compared_within_a_cell_and_on_the_same_data():
    rows = []
    for d, scale in ((10, 1.0), (50, 10.0)):  # noise that all methods share cancels
        shared = scale * np.exp(np.random.default_rng(d).normal(size=10))
        for method, factor in (("dp-sgd", 2.0), ("dp-gd", 1.0), ("dp-glmtron-shuffled", 0.1)):
            row = {"design": "gaussian", "d": d, "n": 1_000, "method": method, "epsilon": 1.0}
            rows.append(row | {"risks": (factor * shared).tolist()})
            rows[-1]["mean"] = factor * shared.mean()
    text = "\n".join(_relu_tables._compared(1_000, rows, [1.0]))
    assert "| dp-gd | 1.00 | 1.00 | 1 | 2 / 0 of 2 |" in text
    assert "| dp-sgd | 2.00 | 2.00 | 2 | 0 / 0 of 2 |" in text
    assert "shuffled" not in text


def test_tables_fall_back_to_what_scikit_learn_has(tmp_path, capsys, monkeypatch):
    args = relu_regression.Args(
        parts=("tables",),
        methods=("dp-gd-glmtron",),
        epsilons=(2.0,),
        seeds=2,
        tuning_draws=1,
        data_dir=tmp_path / "nothing",
        out=tmp_path / "run",
    )
    relu_regression.main(args)
    printed = capsys.readouterr().out
    assert "gas-turbine is left out" in printed and "diabetes" in printed
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["tables"]
    assert {row["table"] for row in rows} == {"diabetes"}
    assert all(row["mean"] < 1 for row in rows)

    # Another table of the same shape is not taken for this one.
    def other(name, folder=None, load=_relu_data.table):
        found = load(name, folder)
        return found and dataclasses.replace(found, digest="other")

    monkeypatch.setattr(_relu_data, "table", other)
    with pytest.raises(UsageError, match="digest was"):
        relu_regression.main(args)


def test_a_table_is_read_and_scaled_by_its_public_rows(tmp_path):
    import lzma

    rng = np.random.default_rng(0)
    lines = ['"a", "b","energy"'] + [
        f"{i},{v:.3f},{i / 10}" for i, v in enumerate(rng.normal(size=500))
    ]
    lines[7] = "6,,0.6"

    def read():
        with lzma.open(tmp_path / "power_plant_ccpp.csv.xz", "wt") as file:
            file.write("\n".join(lines) + "\n")
        table = _relu_data.table("power-plant", tmp_path)
        assert table is not None
        return table

    table = read()
    lines[8] = lines[8] + "1"
    assert read().source == table.source and read().digest != table.digest
    assert [len(part) for part in (table.public_y, table.y, table.test_y)] == [50, 360, 90]
    assert table.x.shape == (360, 3) and np.all((table.y >= 0) & (table.y <= 1))
    np.testing.assert_allclose(table.public_x[:, :2].mean(0), 0, atol=0.1)
    assert "50 public" in table.source


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": ("noise",)}, "--parts"),
        ({"methods": ("sgd", "sgd")}, "--methods"),
        ({"designs": ()}, "--designs"),
        ({"epsilons": (0.0,)}, "--epsilons"),
        ({"sizes": (10,)}, "--sizes"),
        ({"delta": 0.1}, "--delta"),
        ({"delta": 0.0, "parts": ("tables",)}, "--delta"),
        ({"delta": 2e-5, "parts": ("stall",)}, "--delta must be at most 1 / 100,000 .*stall"),
        ({"parts": ("paper",), "paper_size": 200_000}, "--delta .*paper"),
        ({"parts": ("tables",), "tables": ("diabetes",), "delta": 0.01}, "--delta .*diabetes"),
        ({"epsilons": (1.0, 1.0)}, "--epsilons must be different"),
        ({"sizes": (300, 300)}, "--sizes must be different"),
        ({"dimensions": (10, 10)}, "--dimensions must be different"),
        ({"seeds": 0}, "--seeds"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(UsageError, match=message):
        relu_regression.main(dataclasses.replace(relu_regression.Args(), **change))


def test_the_command_is_documented():
    command = [sys.executable, "-m", "experiments.relu_regression", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--tuning-draws" in done.stdout
