import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _ablation_report, gep_ablation
from experiments._ablation_cases import CASES, SOURCES, TITLES
from experiments._ablation_subspace import (
    residuals,
    unprotected_projection_error,
    unprotected_stable_rank,
)
from experiments._methods import Setting
from experiments._run import UsageError, read_json

FIELDS = {field.name for field in dataclasses.fields(Setting)} | set(gep_ablation.OPTIONS)
ARGS = gep_ablation.Args(parts=("noise", "groups", "error"), smoke=True)


def test_projection_error_of_known_bases():
    gradients = jax.random.normal(jax.random.key(0), (7, 400))
    rows = jnp.linalg.qr(gradients.T)[0].T  # spans them all
    assert unprotected_projection_error(rows, gradients) < 1e-5
    outside = residuals(rows, jax.random.normal(jax.random.key(1), (7, 400)))
    np.testing.assert_allclose(unprotected_projection_error(rows, outside), 1, rtol=1e-5)
    chance = jnp.linalg.qr(jax.random.normal(jax.random.key(2), (400, 20)))[0].T
    expected = (1 - 20 / 400) ** 0.5  # of a random subspace; the paper has above 0.95
    np.testing.assert_allclose(unprotected_projection_error(chance, gradients), expected, atol=0.02)


def test_stable_rank_of_known_matrices():
    np.testing.assert_allclose(unprotected_stable_rank(3 * jnp.eye(5, 9)), 5, rtol=1e-5)
    one = jnp.outer(jnp.arange(1.0, 4), jnp.arange(1.0, 6))
    np.testing.assert_allclose(unprotected_stable_rank(one), 1, rtol=1e-5)


def test_cases_change_one_known_thing_and_share_their_names():
    named = {}
    for part, cases in CASES.items():
        assert part in TITLES
        assert any(len({c.value for c in cases if c.line == case.line}) > 1 for case in cases)
        places = [(case.line, case.value) for case in cases]
        assert len(set(places)) == len(places), part
        for case in cases:
            assert case.change.keys() <= FIELDS
            assert named.setdefault(case.name, case.change) == case.change
    assert {"gep", "b-gep", "dp-sgd"} <= named.keys()  # the defaults
    assert len(next(iter(SOURCES.values()))) == 0


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("ablation")
    return out, gep_ablation.main(dataclasses.replace(ARGS, out=out, data_dir=out))


@pytest.mark.slow
def test_parts_end_in_tables_and_a_picture(smoke):
    out, brief = smoke
    assert list(brief["parts"]) == ["noise", "groups"]
    assert brief["errors"] == 1
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "summary.json",
        "report.txt",
        "ablation.png",
    }
    summary = read_json(out / "summary.json")
    rows = {row["value"]: row for row in summary["parts"]["noise"]}
    assert rows.keys() == {"equal split", "optimal split", "joint clip"}
    assert all(row["seconds_per_step"] > 0 and row["temporary_bytes"] > 0 for row in rows.values())
    base = rows["equal split"]["accuracies"]
    assert base == summary["parts"]["groups"][0]["accuracies"]  # the default, run once
    pieces = read_json(out / "results.json")
    assert sum(piece.startswith("gep/") for piece in pieces) == 1
    text = (out / "report.txt").read_text()
    assert text == _ablation_report.markdown(summary)
    assert "| accuracy: budget between the two parts | equal split |" in text
    assert "projection error, rank 150" in text and "stable rank of residuals" in text


@pytest.mark.slow
def test_errors_fall_with_the_rank_and_chance_is_worst(smoke):
    (points,) = read_json(smoke[0] / "summary.json")["error"]
    for point in points:
        by_rank = list(point["error_by_rank"].values())
        assert by_rank == sorted(by_rank, reverse=True)
        by_source = point["error_by_source"]
        assert "natural images" not in by_source  # not in this folder
        # Of the 10 x 64 + 10 + 64 x 64 + 64 parameters chance holds 150.
        assert by_source.pop("Gaussian") > 0.95 > max(by_source.values())


@pytest.mark.slow
def test_finished_cases_are_not_run_again(smoke, monkeypatch):
    out, brief = smoke
    monkeypatch.setattr(gep_ablation, "make_run", lambda *_: pytest.fail("trained again"))
    again = gep_ablation.main(dataclasses.replace(ARGS, out=out, data_dir=out))
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(brief))
    with pytest.raises(UsageError, match="epsilon was 1.0, now 2.0"):
        gep_ablation.main(dataclasses.replace(ARGS, out=out, data_dir=out, epsilon=2.0))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": ("rank", "size")}, "--parts must be different ones of rank"),
        ({"parts": ()}, "--parts"),
        ({"seeds": 0}, "--seeds must be above 0"),
        ({"epsilon": -1.0}, "--epsilon must be above 0"),
    ],
)
def test_bad_options_are_named(change, message, monkeypatch):
    monkeypatch.setattr(gep_ablation.datasets, "load", lambda *_: pytest.fail("data was touched"))
    with pytest.raises(UsageError, match=message):
        gep_ablation.main(dataclasses.replace(ARGS, **change))
