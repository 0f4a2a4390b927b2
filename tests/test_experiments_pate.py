"""The experiment: PATE alone, and beside the methods of experiments.gep."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

import jdp
from experiments import _pate, gep, models, pate
from experiments._methods import METHODS, PateSetting, budget
from experiments._run import UsageError

DIGITS = pate.Args(dataset="digits", seeds=1, seed=0, teachers=20, queries=60, epsilon=30.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("pate")
    args = dataclasses.replace(DIGITS, steps=60, learning_rate=0.1, batch_size=32, out=out)
    return out, args, pate.main(args)


@pytest.mark.slow
def test_a_student_learns_from_noisy_labels(run):
    out, _, brief = run
    row = json.loads(json.dumps(brief))["methods"]["pate"]
    assert row["test_accuracy_mean"] > 0.7
    assert 0.999 * 30 < row["epsilon_spent"] <= 30
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "summary.json",
        "report.txt",
        "curves.png",
        "ledger.jsonl",
    }
    text = (out / "report.txt").read_text()
    assert "labels of at most 60 of 60 queries" in text and "20 teachers" in text
    assert "replace-one" in text
    assert "60 of 200 in-distribution, no labels" in text
    assert "pate: 60 queries answered, run by run." in text
    setting = json.loads((out / "summary.json").read_text())["methods"]["pate"]["setting"]
    assert (setting["teachers"], setting["steps"], setting["learning_rate"]) == (20, 60, 0.1)


@pytest.mark.slow
def test_it_is_taken_up_and_stands_in_the_table_of_the_others(run, monkeypatch):
    out, args, brief = run
    make_run = gep.make_run

    def untrained(method, *rest):
        return pytest.fail("trained again") if method == "pate" else make_run(method, *rest)

    monkeypatch.setattr(gep, "make_run", untrained)
    assert pate.main(args) == brief
    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    options |= {"learning_rate": (1.0, 0.1), "methods": ("class-means", "pate")}
    both = gep.main(gep.Args(**options))["methods"]
    assert list(both) == ["class-means", "pate"] and both["pate"] == brief["methods"]["pate"]
    with pytest.raises(UsageError, match="teachers was 20, now 30"):
        pate.main(dataclasses.replace(args, teachers=30))


def test_without_an_answer_the_student_is_untaught(tmp_path, monkeypatch):
    ask = jdp.pate.noisy_labels

    def refuse(key, votes, plan, **options):
        labels, answered = ask(key, votes, plan, **options)
        return jdp.pate.NoisyLabels(jnp.full_like(labels, -1), jnp.zeros_like(answered))

    monkeypatch.setattr(jdp.pate, "noisy_labels", refuse)
    args = dataclasses.replace(DIGITS, smoke=True, threshold=10.0, answers=3, out=tmp_path)
    row = pate.main(args)["methods"]["pate"]
    assert row["test_accuracy_mean"] < 0.35
    text = (tmp_path / "report.txt").read_text()
    assert "labels of at most 3 of 60 queries" in text
    assert "pate: 0 queries answered" in text and "\nstays as it was initialised" in text


def test_a_student_without_a_label_is_the_one_that_was_initialised():
    model = models.build("mlp", (8, 8, 1))
    setting = PateSetting(steps=3, batch_size=4, weight_decay=0.1)
    fit = _pate.make_fit(setting, model)
    images, labels = jnp.ones((5, 8, 8, 1)), jnp.array([-1, 2, -1, -1, -1])
    key = jax.random.key(0)
    first = model.init(jax.random.split(key)[0])
    untaught = fit(key, images, jnp.full(5, -1), jnp.zeros(5, bool))
    for new, old in zip(jax.tree.leaves(untaught), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(new, old)
    taught = fit(key, images, labels, labels >= 0)
    assert model.logits(taught, images).argmax(-1).tolist() == [2] * 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"queries": 201}, "--queries 201 exceeds the 200 public images"),
        ({"teachers": 0}, "--teachers must be above 0"),
        ({"threshold": -1.0}, "--threshold must be above 0"),
    ],
)
def test_bad_options_are_named(change, message):
    with pytest.raises(UsageError, match=message):
        pate.main(dataclasses.replace(DIGITS, **change))


REFUSED = {"answers": {"answers": 3}, "teachers": {"teachers": 5_000}, "answer": {"threshold": 5.0}}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_belong_together_are_refused(name, tmp_path):
    with pytest.raises(UsageError, match=name):
        pate.main(dataclasses.replace(DIGITS, out=tmp_path, **REFUSED[name]))


def test_it_runs_where_it_is_asked_for_only():
    assert "pate" not in METHODS
    for dataset in ("mnist-5k", "digits", "mnist", "svhn_cropped"):
        own = gep.setting(gep.Args(dataset=dataset), "pate", 3_500, "mnist_cnn")
        assert isinstance(own, PateSetting)
        spent = budget("pate", own, 3_500, 1.0, 1e-5)
        assert 0.999 < spent.epsilon_spent <= 1 and spent.plan.teachers == own.teachers


def test_every_example_in_the_help_is_accepted():
    for line in (pate.__doc__ or "").splitlines():
        if "python -m experiments.pate " in line and not line.startswith("`"):
            words = line.split("experiments.pate")[1].split("  ")[0].split()
            tyro.cli(pate.Args, args=words)
