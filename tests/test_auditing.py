"""Audits: their bounds hold, are not idle, and the study attacks all that the library has."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tyro
from scipy import stats

from experiments import _audit_cases, _audit_tables, _audit_twins, audit
from experiments._run import UsageError
from jdp import auditing, one_run
from jdp.accounting import privacy_spent

ROOT = pathlib.Path(__file__).parents[1]
SIGNIFICANCE = 0.05
GAUSS = {"significance": SIGNIFICANCE}


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.003, 0.3, 0.98])
def test_confidence_bounds_cover(p):
    draws = np.random.default_rng(0).binomial(200, p, 20_000)
    assert (auditing.upper_confidence(draws, 200, 0.1) < p).mean() <= 0.1
    assert (auditing.lower_confidence(draws, 200, 0.1) > p).mean() <= 0.1


def test_confidence_bounds_are_clopper_and_pearsons():
    for k in (0, 3, 100, 200):
        exact = stats.binomtest(k, 200).proportion_ci(0.9, "exact")
        found = (f(k, 200, 0.05) for f in (auditing.lower_confidence, auditing.upper_confidence))
        np.testing.assert_allclose(list(found), [exact.low, exact.high], atol=1e-12)


LAWS = {  # scores with and without the record, and (epsilon, delta) that is exact for them
    "laplace": (lambda rng, n, moved: rng.laplace(moved, 1, n), 1.0, 0.0),
    "gaussian": (lambda rng, n, moved: rng.normal(moved, 1, n), 2.3177890, 0.01),
    "randomised response": (
        lambda rng, n, moved: (rng.random(n) < (0.75 if moved else 0.25)).astype(float),
        math.log(3),
        0.0,
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_bounds_on_epsilon_hold_and_come_close(law):
    draw, epsilon, delta = LAWS[law]
    rng, wrong, bounds = np.random.default_rng(1), 0, []
    for _ in range(200):
        present, absent = draw(rng, 2_000, 1), draw(rng, 2_000, 0)
        found = auditing.epsilon_many_runs(present, absent, delta=delta, **GAUSS)
        wrong += found.bound > epsilon
        bounds.append(found.bound)
    assert stats.binomtest(wrong, 200, SIGNIFICANCE, "greater").pvalue > 1e-3
    assert np.median(bounds) > 0.5 * epsilon
    large = [draw(rng, 400_000, moved) for moved in (1, 0)]
    bound = auditing.epsilon_many_runs(*large, delta=delta, **GAUSS).bound
    assert 0.9 * epsilon < bound <= epsilon


def test_bounds_on_mu_hold_and_come_close():
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(200):
        found = auditing.mu_many_runs(rng.normal(1, 1, 2_000), rng.normal(0, 1, 2_000), **GAUSS)
        wrong += found.bound > 1
    assert stats.binomtest(wrong, 200, SIGNIFICANCE, "greater").pvalue > 1e-3
    found = auditing.mu_many_runs(rng.normal(1, 1, 200_000), rng.normal(0, 1, 200_000), **GAUSS)
    assert 0.97 < found.bound <= 1


def test_events_of_either_kind_are_found():
    """Where "not there" is the telling event, it is the one."""
    rng = np.random.default_rng(3)
    present = np.maximum(rng.normal(size=20_000), -1.0)
    absent = rng.normal(size=20_000)  # below -1 only without the record
    found = auditing.epsilon_many_runs(present, absent, delta=0.0, **GAUSS)
    assert not found.above and found.unlikely == 0 and found.bound > 5
    mirrored = auditing.epsilon_many_runs(-absent, -present, delta=0.0, **GAUSS)
    assert mirrored.above and mirrored.bound == pytest.approx(found.bound, rel=0.1)


def test_the_same_law_gives_nothing():
    rng = np.random.default_rng(4)
    same = rng.normal(size=(2, 10_000))
    assert auditing.epsilon_many_runs(*same, delta=1e-5, **GAUSS).bound == 0
    assert auditing.mu_many_runs(*same, **GAUSS).bound == 0
    constant = np.zeros(100)
    assert auditing.mu_many_runs(constant, constant, **GAUSS).bound == 0


def test_power_is_how_often_a_repetition_refutes():
    rng, claimed, trials = np.random.default_rng(5), 0.93, 20_000
    found = auditing.mu_many_runs(rng.normal(1, 1, trials), rng.normal(0, 1, trials), **GAUSS)
    lower = lambda k: auditing.lower_confidence(k, found.trials[0], SIGNIFICANCE / 2)  # noqa: E731
    upper = lambda k: auditing.upper_confidence(k, found.trials[1], SIGNIFICANCE / 2)  # noqa: E731

    def refuted(p, q):
        likely, unlikely = (
            rng.binomial(found.trials[0], p, 4_000),
            rng.binomial(trials // 2, q, 4_000),
        )
        return (stats.norm.ppf(lower(likely)) - stats.norm.ppf(upper(unlikely)) > claimed).mean()

    least = refuted(lower(found.likely), upper(found.unlikely))
    assert found.power(claimed) == pytest.approx(least, abs=0.04)
    shift = 1 if found.above else -1
    with_, without = stats.norm.sf(shift * found.threshold, [shift, 0][::shift], 1)
    assert found.power(claimed) <= refuted(with_, without)
    assert found.power(0.5) > 0.999 and found.power(1.1) < 1e-3


# Scores -------------------------------------------------------------------------------------------


def _mu(present, absent):
    score = auditing.gaussian_score(*map(auditing.first_half, (present, absent)))
    return auditing.mu_many_runs(score(present), score(absent), **GAUSS).bound


def test_the_fitted_score_is_the_likelihood_ratio():
    rng = np.random.default_rng(6)
    root = rng.normal(size=(4, 4))
    present, absent = rng.normal(size=(2, 40_000, 4)) @ root
    moved = 0.8 * root[0] * np.sign(root[0, 0])
    assert 0.72 < _mu(present + moved, absent) <= 0.8
    assert 0.5 < _mu(1.3 * present, absent) <= 2  # the noise alone tells
    assert _mu(present, absent) == 0


def test_noise_that_is_missing_or_not_finite_is_seen():
    rng = np.random.default_rng(7)
    present, absent = rng.normal(size=(2, 4_000, 3))
    present[:, 1] = absent[:, 1] = 1e-5 * absent[0, 0]
    assert _mu(present, absent) == 0
    present[:, 1] += 0.1
    assert _mu(present, absent) > 4
    absent[:, 1] = present[:, 1]
    assert _mu(present, absent) == 0
    broken = present.copy()
    broken[:, 2] = np.nan
    for one, two in ((broken, absent), (absent, broken)):
        assert _mu(one, two) > 4
    assert _mu(broken, broken) == 0


# One run ------------------------------------------------------------------------------------------


def test_randomised_response_is_exact():
    """Steinke et al.: every guess is right with probability e^eps / (1 + e^eps), none better."""
    epsilon, m = 1.2, 400
    right = np.exp(epsilon) / (1 + np.exp(epsilon))
    for v in (250, 307, 340):
        exact = stats.binom.sf(v - 1, m, right)
        found = auditing.one_run_p_value(v, m, m, epsilon=epsilon, delta=0.0)
        assert found == pytest.approx(exact, rel=1e-9)
    rng, bounds = np.random.default_rng(8), []
    for _ in range(300):
        included = rng.random(m) < 0.5
        answers = included ^ (rng.random(m) > right)
        scores = answers + 1e-3 * rng.random(m)
        options = {"guesses": 100, "delta": 0.0, "significance": SIGNIFICANCE}
        bounds.append(auditing.epsilon_one_run(scores, included, **options).bound)
    wrong = sum(bound > epsilon for bound in bounds)
    assert stats.binomtest(wrong, 300, SIGNIFICANCE, "greater").pvalue > 1e-3
    assert wrong > 0.02 * 300  # exact, so not much rarer either
    assert np.median(bounds) > 0.55 * epsilon


def test_one_run_agrees_with_jax_privacy():
    theirs = pytest.importorskip("jax_privacy.auditing")
    for m, r, v in ((1_000, 100, 90), (1_000, 400, 300), (5_000, 5_000, 4_000)):
        for delta in (0.0, 1e-7, 1e-5):
            for epsilon in (0.0, 0.5, 2.0):
                own = auditing.one_run_p_value(v, r, m, epsilon=epsilon, delta=delta)
                other = theirs._one_run_p_value(m, r, v, epsilon, delta)
                assert own == pytest.approx(other, rel=1e-9)
            bound = one_run._largest_refuted((v, r, m), delta, SIGNIFICANCE)
            other = theirs._epsilon_one_run(0.0, m, r, v, SIGNIFICANCE, delta)
            assert bound == pytest.approx(other, abs=1e-4)


def test_one_run_does_not_pass_the_epsilon_of_a_gaussian():
    import dp_accounting as dpa

    rng = np.random.default_rng(9)
    claim = privacy_spent(dpa.GaussianDpEvent(1.0), delta=1e-6).epsilon
    for _ in range(30):
        included = rng.random(2_000) < 0.5
        scores = included + rng.normal(size=2_000)
        found = auditing.epsilon_one_run(scores, included, guesses=200, delta=1e-6, **GAUSS)
        assert 1 < found.bound < claim


# Bad input ----------------------------------------------------------------------------------------

_ONES = np.ones(10)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: auditing.mu_many_runs([1.0], _ONES, **GAUSS), ValueError, "present"),
        (lambda: auditing.mu_many_runs(_ONES, np.ones((4, 2)), **GAUSS), ValueError, "absent"),
        (lambda: auditing.mu_many_runs(_ONES, ["a"] * 5, **GAUSS), TypeError, "absent"),
        (lambda: auditing.mu_many_runs(_ONES, _ONES * np.nan, **GAUSS), ValueError, "NaN"),
        (lambda: auditing.mu_many_runs(_ONES, _ONES, significance=0), ValueError, "significance"),
        (lambda: auditing.mu_many_runs(_ONES, _ONES, significance="a"), TypeError, "significance"),
        (
            lambda: auditing.epsilon_many_runs(_ONES, _ONES, delta=1.0, **GAUSS),
            ValueError,
            "delta",
        ),
        (lambda: auditing.gaussian_score(_ONES, _ONES), ValueError, "matrix"),
        (lambda: auditing.gaussian_score(np.ones((9, 2)), np.ones((9, 3))), ValueError, "absent"),
        (lambda: auditing.gaussian_score(np.ones((3, 2)), np.ones((9, 2))), ValueError, "rows"),
        (
            lambda: auditing.epsilon_one_run(_ONES, _ONES, guesses=2, delta=0.0, **GAUSS),
            TypeError,
            "included",
        ),
        (
            lambda: auditing.epsilon_one_run(_ONES, _ONES > 0, guesses=3, delta=0.0, **GAUSS),
            ValueError,
            "even",
        ),
        (
            lambda: auditing.epsilon_one_run(_ONES, _ONES > 0, guesses=12, delta=0.0, **GAUSS),
            ValueError,
            "guesses",
        ),
        (
            lambda: auditing.one_run_p_value(5, 4, 9, epsilon=1.0, delta=0.0),
            ValueError,
            "correct",
        ),
        (
            lambda: auditing.one_run_p_value(3, 4, 9, epsilon=-1.0, delta=0.0),
            ValueError,
            "epsilon",
        ),
        (
            lambda: auditing.mu_many_runs(_ONES, _ONES, **GAUSS).power(-1.0),
            ValueError,
            "claimed",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# The study ----------------------------------------------------------------------------------------

SMALL = audit.Args(smoke=True, only=("pate, labels", "half the noise"))


def test_every_twin_of_the_tests_is_attacked():
    import relu_twins
    import twins

    known = set(twins.TWINS) | set(relu_twins.RELU_TWINS)
    attacked = set(_audit_twins.TWINS) | set(_audit_twins.HARMLESS)
    assert attacked | set(_audit_twins.PENDING) == known
    assert not attacked & set(_audit_twins.PENDING)
    assert not set(_audit_twins.TWINS) & set(_audit_twins.HARMLESS)


def test_worst_neighbours_are_as_far_apart_as_is_claimed():
    """The attack is as strong as the claim, on a mechanism of each kind."""
    for name, least in (("adaptive clipping", 0.95), ("dp-taglmtron", 0.9)):
        case = _audit_cases.MECHANISMS[name]()
        present, absent = audit.draw(case, jax.random.key(0), 8_192)
        change = present.mean(0) - absent.mean(0)
        covariance = (np.cov(present, rowvar=False) + np.cov(absent, rowvar=False)) / 2
        mu = math.sqrt(change @ np.linalg.pinv(covariance) @ change)
        assert least < mu < 1.15, name


def test_smoke_run_resumes_and_draws_from_its_summary(tmp_path, monkeypatch, capsys):
    args = dataclasses.replace(SMALL, out=tmp_path)
    brief = audit.main(args)
    assert brief["verdict"] == brief["verdict"] | {"sound_exceeding": [], "broken_not_exposed": []}
    assert json.loads(json.dumps(brief))["experiment"] == "audit"
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"results.json", "summary.json", "report.txt", "audit.png"}
    text = (tmp_path / "report.txt").read_text()
    assert "| half the noise | 2.32 / " in text and "99% confidence" in text
    monkeypatch.setattr(audit, "many_runs", lambda *_: pytest.fail("ran again"))
    assert audit.main(args)["rows"] == brief["rows"]
    with pytest.raises(UsageError, match="seed was 0, now 5"):
        audit.main(dataclasses.replace(args, seed=5))


def test_the_committed_table_shows_what_it_must():
    path = ROOT / "experiments" / "results" / "audit" / "summary.json"
    summary = json.loads(path.read_text())
    assert {row["name"] for row in summary["rows"]} == set(audit.NAMES)
    assert 2 * len(audit.NAMES) <= summary["statements"] == audit.STATEMENTS
    found = _audit_tables.verdict(summary)
    assert found["sound_exceeding"] == [] and found["broken_not_exposed"] == []
    assert found["least_power"] > 0.8
    for row in summary["rows"]:
        event = row["epsilon_event"]
        assert event["significance"] == pytest.approx(0.01 / summary["statements"])
        if row["part"] == "training":
            continue
        likely, unlikely = event["likely"], event["unlikely"]
        half = event["significance"] / 2
        p = auditing.lower_confidence(likely, event["trials"][0], half)
        q = auditing.upper_confidence(unlikely, event["trials"][1], half)
        bound = math.log((p - event["delta"]) / q) if p > event["delta"] else 0
        assert row["epsilon_audited"] == pytest.approx(max(bound, 0))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": ()}, "--parts"),
        ({"parts": ("twins", "twins")}, "--parts"),
        ({"only": ("dp-sdg",)}, "--only"),
        ({"draws": 10}, "--draws"),
        ({"delta": 0.0}, "--delta"),
        ({"canaries": 1}, "--canaries"),
        ({"repeats": 0}, "--repeats"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(UsageError, match=message):
        audit.main(dataclasses.replace(audit.Args(), **change))


def test_the_command_is_documented():
    command = [sys.executable, "-m", "experiments.audit", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--canaries" in done.stdout and "How to read" in done.stdout
    assert tyro.cli(audit.Args, args=[]) == audit.Args()


def test_extreme_significances_and_claims_have_answers():
    audit = auditing.mu_many_runs(np.arange(20.0), np.arange(20.0), significance=1e-40)
    assert audit.bound == 0
    scores = np.arange(4000.0)
    audit = auditing.epsilon_many_runs(scores + 4000, scores, delta=0.0, significance=0.05)
    assert audit.bound > 1
    assert audit.power(1.0) == pytest.approx(1)
    assert audit.power(1000.0) == 0
