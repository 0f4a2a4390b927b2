"""The linear probe: features, fairness, what is tuned on what, resuming, messages."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

import jdp
from experiments import _features, _probe_methods, _probe_report, _run, linear_probe
from experiments._probe_methods import METHODS, PRIVATE, grid
from experiments._run import UsageError

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = linear_probe.Args(smoke=True, seed=1, methods=("dp-sgd", "public-only"))


def _features_of(n=60, tests=20, d=3):
    rng = np.random.RandomState(0)
    parts = [
        (rng.rand(k, d).astype(np.float32), np.arange(k, dtype=np.int32) % 4) for k in (n, tests)
    ]
    return _features.Features(*parts[0], *parts[1], source="stub")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("probe")
    jax.config.update("jax_disable_most_optimizations", True)
    return out, linear_probe.main(dataclasses.replace(SMOKE, out=out))


def test_smoke_run_is_complete_and_taken_up_again(smoke, monkeypatch):
    out, brief = smoke
    rows = {row["method"]: row for row in brief["rows"]}
    assert tuple(rows) == SMOKE.methods
    assert all(0 <= row["test_accuracy_mean"] <= 1 for row in rows.values())
    assert rows["dp-sgd"]["noise_multiplier"] > 0
    assert rows["public-only"]["noise_multiplier"] is None
    names = {path.name for path in out.iterdir()}
    assert names == {"results.json", "summary.json", "report.txt", "probe.png"}
    summary = _run.read_json(out / "summary.json")
    spent = {row["method"]: row["epsilon_spent"] for row in summary["rows"]}
    assert spent["public-only"] == 0 and 1.98 <= spent["dp-sgd"] <= 2
    assert all(len(row["trials"]) == 2 and len(row["runs"]) == 2 for row in summary["rows"])
    monkeypatch.setattr(linear_probe, "make_train", lambda *_: pytest.fail("trained again"))
    assert linear_probe.main(dataclasses.replace(SMOKE, out=out)) == brief
    with pytest.raises(UsageError, match="num_public was 50, now 60|seed was 1, now 2"):
        linear_probe.main(dataclasses.replace(SMOKE, out=out, seed=2))


def test_report_table_and_picture_come_from_the_summary(smoke, tmp_path):
    out, _ = smoke
    summary = _run.read_json(out / "summary.json")
    text = (out / "report.txt").read_text()
    assert text == _probe_report.report(summary)
    assert "NOT private against whoever knows the seed" in text
    assert "Not paid for: the search" in text and "(2, 1e-05)-differential privacy" in text
    table = _probe_report.markdown(summary)
    assert "NOT private, for diagnosis" not in text
    assert "| method | epsilon 2 | knows of the public examples | CPU seconds a run |" in table
    for method in SMOKE.methods:
        assert f"| {METHODS[method]} |" in table
    (tmp_path / "summary.json").write_text((out / "summary.json").read_text())
    _probe_report.draw(tmp_path)
    assert (tmp_path / "probe.png").read_bytes() == (out / "probe.png").read_bytes()


@pytest.mark.slow
def test_what_private_gradients_show_is_published_where_it_is_asked_for_only(smoke, monkeypatch):
    out, _ = smoke
    path, brief = out / "summary.json", _run.read_json(out / "summary.json")
    assert "unprotected" not in path.read_text() + (out / "results.json").read_text()
    monkeypatch.setattr(linear_probe, "make_train", lambda *_: pytest.fail("trained again"))
    asked = dataclasses.replace(SMOKE, out=out, unprotected_share_outside=True)
    try:
        linear_probe.main(asked)
        summary = _run.read_json(path)
        assert 0 <= summary["unprotected_share_outside"]["300"] < 0.5
        text = (out / "report.txt").read_text()
        assert "NOT private, for diagnosis" in text and text == _probe_report.report(summary)
        assert _probe_report.markdown(summary) == _probe_report.markdown(brief)
    finally:  # the folder as the other tests know it
        linear_probe.main(dataclasses.replace(SMOKE, out=out))


def test_the_committed_report_comes_from_the_committed_summary():
    folder = ROOT / "experiments/results/linear_probe"
    summary = _run.read_json(folder / "summary.json")
    assert _probe_report.report(summary) == (folder / "report.txt").read_text()


@pytest.mark.slow
def test_the_smoke_command_runs_every_method_and_ends_in_json(tmp_path):
    command = [sys.executable, "-m", "experiments.linear_probe", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [row["method"] for row in last["rows"]] == list(METHODS)
    assert "left" in done.stderr


def test_every_private_method_has_as_many_different_settings():
    for classes in (2, 10):
        grids = {method: grid(method, classes) for method in METHODS}
        assert {len(grids[method]) for method in PRIVATE} == {16}
        assert all(len(set(own)) == len(own) for own in grids.values())


def test_parts_do_not_overlap_and_features_have_length_one():
    features = _features_of()
    final = linear_probe.split(features, num_public=5, validation=0)
    tune = linear_probe.split(features, num_public=5, validation=15)
    assert [len(part) for part in final[::2]] == [60, 15, 5]
    assert [len(part) for part in tune[::2]] == [45, 15, 5]
    with_one = np.concatenate([features.train, np.ones((60, 1))], axis=1)
    np.testing.assert_allclose(np.linalg.norm(final.train, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(final.train / final.train[:, -1:], with_one, rtol=1e-6)
    rows = lambda *parts: {tuple(np.asarray(row)) for part in parts for row in part}  # noqa: E731
    assert len(rows(final.test, final.public)) == 20
    assert rows(tune.train, tune.test) == rows(final.train)
    assert rows(tune.public) == rows(final.public)


def test_tuning_does_not_look_at_the_test_part(tmp_path):
    features = _features_of(n=300)
    args = dataclasses.replace(SMOKE, num_public=4, batch_size=20, steps=2, validation=50)
    args = dataclasses.replace(args, epsilons=(2.0,), methods=("dp-sgd",))
    order = np.random.RandomState(0).permutation(len(features.test))
    test = features.test.copy()
    test[order[4:]] = np.nan  # all but the public ones
    found = [
        linear_probe.Study(args, own, _run.Folder(tmp_path / name, "linear_probe")).tune("dp-sgd")
        for name, own in (("a", features), ("b", dataclasses.replace(features, test=test)))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_where_there_is_little_noise(method):
    x = np.eye(4, dtype=np.float32)[np.arange(80) % 4] + np.float32(0.1)
    y = np.arange(80, dtype=np.int32) % 4
    features = _features.Features(x, y, x[:40], y[:40], "stub")
    data = linear_probe.split(features, num_public=20, validation=0)
    setting = grid(method, 4)[0]._replace(rank=16)
    sampler = jdp.sampling.PoissonSampling(80, 0.5)
    train = _probe_methods.make_train(method, setting, sampler, 40, 30, 4, 2)
    done = []
    knobs = _probe_methods.Knobs(0.01, 0.1, 1.0, 0.2)
    result = train(data, _run.keys(0, 0), knobs, done.append)
    assert result["test_accuracy"] == 1 and sum(done) == 30


def test_blocks_are_one_matrix():
    blocks = [jnp.arange(8.0).reshape(2, 4)[:, own] for own in (slice(0, 1), slice(1, 4))]
    np.testing.assert_array_equal(_probe_methods.matrix(blocks), np.arange(8).reshape(2, 4))
    assert [leaf.shape for leaf in _probe_methods.zeros(3, 10, 4)] == [(3, 3)] * 2 + [(3, 2)] * 2
    example = (jnp.array([1.0, 2.0]), 3)
    whole = [_probe_methods.matrix(blocks)]
    assert _probe_methods.loss(whole, example) == _probe_methods.loss(blocks, example)


@pytest.mark.slow
def test_share_outside_of_the_subspace():
    # Labels' gradients span (features + bias) x (classes - 1) directions.
    data = linear_probe.split(_features_of(), num_public=16, validation=10)
    measure = _probe_methods.unprotected_share_outside
    assert measure(data, 12, 4, 1) == pytest.approx(0, abs=1e-5)
    assert measure(data, 2, 4, 1) > 0.01


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": ("sgd",)}, "--methods must be different ones"),
        ({"methods": ("gep", "gep")}, "--methods must be different ones"),
        ({"methods": ()}, "but got nothing"),
        ({"epsilons": (1.0, 0.0)}, "--epsilons must be at least 0.001"),
        ({"epsilons": (float("nan"),)}, "--epsilons must be at least"),
        ({"delta": 1.0}, "--delta must lie between 0 and 1"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"num_public": 1}, "--num-public must be at least 2"),
        ({"seed": -1}, "--seed must be at least 0"),
    ],
)
def test_bad_options_are_named_before_data_is_touched(change, message, monkeypatch):
    for name in ("read", "digits", "cifar10"):
        monkeypatch.setattr(_features, name, lambda *_: pytest.fail("data was touched"))
    with pytest.raises(UsageError, match=message):
        linear_probe.main(linear_probe.Args(**change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"validation": 50, "batch_size": 20}, "exceed the 60 private examples together"),
        ({"num_public": 20}, "must be below the 20 test examples"),
        ({"delta": 0.02}, "--delta must be below 1 / 60"),
        ({"groups": 5}, "--groups 5 exceeds the 4 classes"),
    ],
)
def test_options_that_do_not_fit_the_data_are_named(change, message):
    args = linear_probe.Args(num_public=5, validation=10, batch_size=20, groups=2)
    with pytest.raises(UsageError, match=re.escape(message)):
        linear_probe.check_data(dataclasses.replace(args, **change), _features_of())


@pytest.mark.parametrize("largest", [0, 60])
def test_labels_that_are_no_numbers_of_classes_are_named(largest):
    args = linear_probe.Args(num_public=5, validation=10, batch_size=20, groups=1)
    features = _features_of()
    labels = [np.full_like(y, largest) for y in (features.train_labels, features.test_labels)]
    features = dataclasses.replace(features, train_labels=labels[0], test_labels=labels[1])
    with pytest.raises(UsageError, match=f"2 classes or more.*but the largest is {largest};"):
        linear_probe.check_data(args, features)


def test_features_of_any_finite_size_have_length_one():
    features = _features_of()
    features = dataclasses.replace(features, train=features.train * np.float32(3e38))
    train = linear_probe.split(features, num_public=5, validation=0).train
    assert train.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(train, axis=1), 1, rtol=1e-6)


@pytest.mark.slow
def test_a_file_that_was_replaced_is_another_one(tmp_path):
    args = dataclasses.replace(SMOKE, num_public=4, batch_size=20, steps=2, validation=50)
    args = dataclasses.replace(args, features=tmp_path / "own.npz")
    features, folder = _features_of(n=300), _run.Folder(tmp_path, "linear_probe")
    shared = lambda own: linear_probe.Study(args, own, folder).shared  # noqa: E731
    same = shared(features)
    change = lambda name: {name: getattr(features, name)[::-1]}  # noqa: E731
    for name in ("test", "test_labels"):
        assert shared(dataclasses.replace(features, **change(name))) != same
    shorter = {"train": features.train[:-1], "train_labels": features.train_labels[:-1]}
    assert shared(dataclasses.replace(features, **shorter)) != same
    private = change("train") | change("train_labels")  # nothing of them may be kept
    assert shared(dataclasses.replace(features, **private)) == same


def test_features_of_a_file_and_what_is_wrong_with_it(tmp_path):
    good = dict(zip(_features.NAMES, dataclasses.astuple(_features_of())[:4], strict=True))
    path = tmp_path / "own.npz"

    def read(**change):
        np.savez(path, **{k: v for k, v in (good | change).items() if v is not None})
        return _features.read(path)

    half = read(train=good["train"].astype(np.float16))
    assert half.train.dtype == np.float32 and half.num_classes == 4
    assert "own.npz: 3 features of 60 private and 20 test examples" in half.source
    for change, message in (
        ({"train": None}, "with these arrays"),
        ({"train": good["train"][:, 0]}, r"train of shape \(60,\)"),
        ({"train": good["train"].astype(int)}, "int64"),
        ({"test": good["test"][:, :2]}, "other features in test"),
        ({"test": good["test"] * np.nan}, "finite in float32, but test has others"),
        ({"train": good["train"] + np.float64(1e300)}, "finite in float32, but train has others"),
        ({"train": good["train"][:, :0]}, r"train of shape \(60, 0\)"),
        (
            {"train_labels": good["train_labels"].astype(int) + 2**32},
            "train_labels that are negative, or 2",
        ),
        (
            {"test_labels": good["test_labels"].astype(int) - 2**32},
            "test_labels that are negative, or 2",
        ),
        ({"test_labels": good["test_labels"].astype("u8") + 2**31}, "test_labels that are neg"),
        ({"train_labels": good["train_labels"][:5]}, r"train_labels of shape \(5,\)"),
        ({"test_labels": good["test_labels"] - 1}, "test_labels"),
        ({"test_labels": good["test_labels"].astype(object)}, "with these arrays"),
    ):
        with pytest.raises(UsageError, match=message):
            read(**change)
    with pytest.raises(UsageError, match="there is no .*--features takes the path"):
        _features.read(tmp_path / "none.npz")
    path.write_text("text")
    with pytest.raises(UsageError, match="with these arrays"):
        _features.read(path)


def test_without_torch_the_remedies_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE", str(tmp_path))
    monkeypatch.setattr(_features.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(_features.datasets, "load", lambda *_, **__: pytest.fail("data touched"))
    with pytest.raises(UsageError, match=r"need torch.*pip install 'jdp\[features\]'.*--features"):
        _features.cifar10(None)


def test_extraction_is_taken_up_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE", str(tmp_path))
    monkeypatch.setattr(_features, "PART", 4)
    monkeypatch.setattr(_features.importlib.util, "find_spec", lambda _: True)
    images = np.arange(10 * 12, dtype=np.float32).reshape(10, 2, 2, 3)
    labels = np.arange(10, dtype=np.int32)
    empty = images[:0], labels[:0]
    data = _features.datasets.Dataset(
        "cifar10", images, labels, *empty, images[:5], labels[:5], 10, ""
    )
    monkeypatch.setattr(_features.datasets, "load", lambda *_, **__: data)
    calls = []

    def network(part, fail_at):
        calls.append(len(part))
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return part.reshape(len(part), -1)[:, :3].astype(np.float16)

    monkeypatch.setattr(_features, "_network", lambda: lambda part: network(part, 3))
    with pytest.raises(KeyboardInterrupt):
        _features.cifar10(None)
    monkeypatch.setattr(_features, "_network", lambda: lambda part: network(part, None))
    features = _features.cifar10(None)
    assert calls == [4, 4, 2, 2, 4, 1]  # the third part of train twice, then test
    np.testing.assert_array_equal(features.train, images.reshape(10, -1)[:, :3])
    np.testing.assert_array_equal(features.test, images[:5].reshape(5, -1)[:, :3])
    assert [path.name for path in tmp_path.iterdir()] == ["cifar10-efficientnet-lite0-128.npz"]
    monkeypatch.setattr(_features.importlib.util, "find_spec", lambda _: None)
    np.testing.assert_array_equal(_features.cifar10(None).test, features.test)


@pytest.mark.parametrize(
    "options",
    re.findall(r"python -m experiments\.linear_probe([^`\n]*)", (ROOT / "README.md").read_text()),
)
def test_commands_in_the_readme_are_accepted(options):
    linear_probe.check(tyro.cli(linear_probe.Args, args=options.split("  ")[0].split()))


def test_digits_are_features():
    features = _features.digits()
    assert features.train.shape == (1_447, 64) and len(features.test) == 350
    assert features.num_classes == 10 and isinstance(jax.numpy.asarray(features.train), jax.Array)
