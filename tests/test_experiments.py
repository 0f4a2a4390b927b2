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

import jdp
from experiments import _augment, _methods, _run, datasets, gep, gep_table, models, search_gep
from experiments._methods import METHODS, OPTIONAL, PLANNED, WITH_LABELS, Setting, public_data
from experiments._run import UsageError
from experiments._training import make_trainer

ROOT = pathlib.Path(__file__).parents[1]
FIELDS = {"test_accuracy_mean", "test_accuracy_std", "epsilon_spent", "noise_multiplier", "seconds"}
FIELDS |= {"compile_seconds", "public_data"}
DIGITS = gep.Args(dataset="digits", methods=("class-means",), seeds=2, seed=0)


def _command(module, *arguments):
    command = [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "smoke"
    options = ("--dataset", "digits", "--smoke", "--seed", 3, "--out", out)
    return out, _command("gep", *options)


def test_smoke_runs_every_method_and_ends_in_one_json_line(smoke):
    out, done = smoke
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["dataset"], last["epsilon"], last["delta"]) == ("digits", 1.0, 1e-5)
    assert tuple(last["methods"]) == METHODS
    for method, row in last["methods"].items():
        assert row.keys() == FIELDS, method
        assert 0 <= row["test_accuracy_mean"] <= 1
    summary = json.loads((out / "summary.json").read_text())
    public = {method: row["public_data"] for method, row in summary["methods"].items()}
    assert public["dp-sgd"] == public["non-private"] == "none"
    assert public["gep"] == public["class-means"] == "200 in-distribution, no labels"
    assert public["public-only"] == "200 in-distribution, with labels"
    for method in ("dp-sgd", "b-gep", "gep", "class-means"):
        row = last["methods"][method]
        assert 0.99 <= row["epsilon_spent"] <= 1 and row["noise_multiplier"] > 0
    assert last["methods"]["public-only"]["epsilon_spent"] == 0
    assert last["methods"]["non-private"]["epsilon_spent"] is None
    files = {path.name for path in out.iterdir()}
    assert files == {"results.json", "summary.json", "report.txt", "curves.png", "ledger.jsonl"}
    ledger = jdp.Ledger(out, read_only=True)
    assert ledger.runs == tuple(f"{method}-0" for method in METHODS)
    spent = {run: ledger.spent(run).epsilon for run in ledger.runs}
    assert all(0.99 <= spent[f"{m}-0"] <= 1 for m in ("dp-sgd", "b-gep", "gep", "class-means"))
    assert (spent["non-private-0"], spent["public-only-0"]) == (float("inf"), 0)
    report = (out / "report.txt").read_text()
    assert "NOT private against whoever knows the seed" in report
    assert "Not paid for" in report and report in done.stdout
    assert "left" in done.stderr  # progress


def test_a_finished_run_is_taken_up_and_another_configuration_refused(smoke, monkeypatch):
    out, done = smoke
    args = gep.Args(dataset="digits", smoke=True, seed=3, out=out)
    monkeypatch.setattr(gep, "make_run", lambda *_: pytest.fail("trained again"))
    summary = gep.main(args)
    assert summary == json.loads(done.stdout.splitlines()[-1])
    with pytest.raises(UsageError, match="epsilon was 1.0, now 2.0"):
        gep.main(dataclasses.replace(args, epsilon=2.0))
    with pytest.raises(UsageError, match="clip_norm was 1.0, now 3.0"):
        gep.main(dataclasses.replace(args, clip_norm=3.0))


def test_curves_are_drawn_from_the_summary_alone(smoke, tmp_path):
    (tmp_path / "summary.json").write_text((smoke[0] / "summary.json").read_text())
    _run.draw_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes() == (smoke[0] / "curves.png").read_bytes()


@pytest.mark.slow
def test_class_means_learn_and_a_seed_reproduces_them(tmp_path):
    rows = [
        gep.main(dataclasses.replace(DIGITS, out=tmp_path / name))["methods"]["class-means"]
        for name in ("a", "b")
    ]
    assert rows[0]["test_accuracy_mean"] == rows[1]["test_accuracy_mean"] > 0.6
    assert rows[0]["test_accuracy_std"] > 0
    text = (tmp_path / "a" / "report.txt").read_text()
    assert "+-" in text and "2 run(s)" in text


@pytest.mark.slow
def test_validation_does_not_touch_the_test_set(tmp_path, monkeypatch):
    load = gep.datasets.load

    def without_test(*arguments):
        data = load(*arguments)
        return dataclasses.replace(data, test_images=data.test_images * np.nan)

    monkeypatch.setattr(gep.datasets, "load", without_test)
    args = dataclasses.replace(DIGITS, validation=200, out=tmp_path)
    assert gep.main(args)["methods"]["class-means"]["test_accuracy_mean"] > 0.6
    assert "VALIDATION" in (tmp_path / "report.txt").read_text()


def test_without_a_seed_the_keys_are_fresh_and_independent():
    data = [jax.random.key_data(key).tolist() for key in (*_run.keys(None, 0), *_run.keys(None, 0))]
    assert len({tuple(key) for key in data}) == 6
    assert "entropy" in _run.key_statement(None)
    again = [jax.random.key_data(k).tolist() for k in _run.keys(7, 1)]
    assert again == [jax.random.key_data(k).tolist() for k in _run.keys(7, 1)]
    assert again != [jax.random.key_data(k).tolist() for k in _run.keys(7, 2)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": ("sgd",)}, "--methods must be different ones"),
        ({"methods": ("gep", "gep")}, "--methods must be different ones"),
        ({"momentum": float("inf")}, "--momentum must be at least 0 and below 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"clip_norm": 1e-30}, "clip norms must be from 1e-12"),
        ({"mixing": 2.0}, "--mixing must be from 0 to 1"),
        ({"drop_rate": -0.1}, "--drop-rate must be from 0 to 1"),
        ({"floor": 0.0}, "--floor must be above 0"),
        ({"augmentations": -1}, "--augmentations must be at least 0"),
        ({"epsilon": -1.0}, "--epsilon must be above 0"),
        ({"epsilon": float("nan")}, "--epsilon must be above 0"),
        ({"delta": 1.0}, "--delta must lie between 0 and 1"),
        ({"devices": 99}, "--devices must be 1 to .*xla_force_host_platform_device_count"),
        ({"devices": 0}, "--devices must be 1 to"),
        ({"steps": 0}, "--steps must be above 0"),
        ({"steps": 5, "epochs": 1.0}, "not both"),
        ({"learning_rate": (0.1, 0.2)}, "--learning-rate takes one value"),
        ({"clip_norms": (1.0, 0.0)}, "--clip-norms must be above 0"),
        ({"weight_decay": -1.0}, "--weight-decay must be at least 0"),
        ({"model": "mnist_cnn"}, "needs images of 16x16"),
    ],
)
def test_bad_options_are_named_before_data_is_touched(change, message, monkeypatch):
    monkeypatch.setattr(gep.datasets, "load", lambda *_: pytest.fail("data was touched"))
    with pytest.raises(UsageError, match=message):
        gep.main(dataclasses.replace(DIGITS, **change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"methods": ("dp-sgd",), "batch_size": 5_000}, "exceeds the 1,247 private images"),
        ({"methods": ("gep",), "groups": 9}, "exceeds the 2 layers of mlp"),
        ({"methods": ("gep",), "rank": 900}, "exceeds what 200 anchors span"),
        ({"methods": ("public-only",), "num_public": 0, "anchors": "other"}, "--num-public"),
        ({"methods": ("adadps",), "num_public": 0, "anchors": "other"}, "adadps needs"),
        (
            {"methods": ("gep",), "subspace": "true-labels", "anchors": "other"},
            "--subspace true-labels needs --anchors in-distribution",
        ),
        ({"delta": 0.01}, "--delta must be below 1 / 1,247"),
        ({"anchors": "in-distribution", "num_public": 0}, "--num-public above 0"),
    ],
)
def test_options_that_do_not_fit_the_data_are_named(change, message, tmp_path):
    if change.get("anchors") == "other":
        np.save(tmp_path / "other.npy", np.zeros((300, 8, 8)))
        change = change | {"anchors": str(tmp_path / "other.npy")}
    with pytest.raises(UsageError, match=message):
        gep.main(dataclasses.replace(DIGITS, **change))


def test_a_usage_error_is_one_line_and_exit_code_2():
    done = _command("gep", "--epsilon", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --epsilon must be above 0, but got -1.0\n"


def test_defaults_and_overrides():
    args = gep.Args(methods=("dp-sgd", "gep"), learning_rate=(0.3, 0.7), epochs=2.0, batch_size=100)
    settings = [gep.setting(args, method, 3_500, "mnist_cnn") for method in args.methods]
    assert [own.learning_rate for own in settings] == [0.3, 0.7]
    assert [own.steps for own in settings] == [70, 70]
    paper = gep.setting(gep.Args(dataset="mnist"), "gep", 60_000, "mnist_cnn")
    assert (paper.steps, paper.batch_size, paper.rank, paper.refresh_every) == (
        3_000,
        1_000,
        500,
        10,
    )
    assert (paper.clip_norms, paper.groups, paper.weight_decay) == ((10.0, 2.0), 4, 1e-4)
    for dataset, methods in gep.DEFAULTS.items():
        for method in methods:
            own = gep.setting(gep.Args(dataset=dataset), method, 3_500, "mnist_cnn")
            assert isinstance(own, Setting) and own.steps > 0


@pytest.mark.parametrize("schedule, last", [("constant", 0.5), ("step", 0.05), ("cosine", 0.0)])
def test_learning_rates(schedule, last):
    rates = Setting(steps=100, learning_rate=0.5, schedule=schedule).learning_rates()
    assert float(rates(0)) == 0.5
    assert float(rates(100)) == pytest.approx(last, abs=1e-6)


@pytest.mark.slow
def test_search_is_resumable_fair_and_deterministic(tmp_path):
    args = search_gep.Args(dataset="digits", methods=("public-only", "class-means"), trials=2)
    args = dataclasses.replace(args, max_steps=2, validation=100, parts=3, out=tmp_path)
    first = search_gep.main(args)
    assert search_gep.main(args) == first
    pieces = json.loads((tmp_path / "results.json").read_text())
    assert sorted(pieces) == [
        f"{method}/{trial}/{part}"
        for method in ("class-means", "public-only")
        for trial in range(2)
        for part in range(3)
    ]
    scores = first["best"]["class-means"]["scores"]
    assert all(len(parts) == 3 for parts in scores.values())
    more = search_gep.main(dataclasses.replace(args, trials=3, methods=("class-means",)))
    row = more["best"]["class-means"]
    assert row["validation_accuracy"] >= first["best"]["class-means"]["validation_accuracy"]
    one = dataclasses.replace(args, finalists=1, out=tmp_path / "one")
    lengths = [
        len(parts) for parts in search_gep.main(one)["best"]["public-only"]["scores"].values()
    ]
    assert lengths == [3, 1]
    for option in ("trials", "finalists", "parts"):
        with pytest.raises(UsageError, match=f"--{option}"):
            search_gep.main(dataclasses.replace(args, **{option: 0}))


def test_folder_replaces_files_atomically(tmp_path):
    folder = _run.Folder(tmp_path / "run", "gep")
    assert folder.get("a", {"x": 1}) is None
    folder.put("a", {"x": (1, 2)}, {"score": 0.5})
    assert _run.Folder(tmp_path / "run", "gep").get("a", {"x": (1, 2)}) == {"score": 0.5}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["results.json"]


@pytest.fixture(scope="module")
def digits():
    data = datasets.load("digits", max_examples=200)
    return data, datasets.anchors("in-distribution", data), models.build("mlp", (8, 8, 1))


def _carries(digits, method, counts, **change):
    """Parameters, state and average after so many steps of a method, all with the same keys.

    The third step begins the second epoch.
    """
    data, anchors, model = digits
    setting = Setting(steps=8, batch_size=100, rank=8, **change)
    plan = _methods.budget(method, setting, len(data.train_labels), 1.0, 1e-5).plan
    trainer = make_trainer(method, setting, model, data, anchors, plan)
    keys = _run.keys(0, 0)
    program = trainer.compile(trainer.begin(keys), keys)[0]
    return [program(0, count, trainer.begin(keys), keys) for count in counts]


def _carry(digits, method, steps=3, **change):
    return _carries(digits, method, (steps,), **change)[0]


def _vector(params):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])


@pytest.fixture(scope="module")
def plain(digits):
    return _vector(_carry(digits, "dp-sgd")[0])


NEUTRAL = {
    "sparsified": {"drop_rate": 0.0},
    "adadps": {"floor": 1e6},  # all weights are the same, and keep norms
    "pda-dpmd": {"mixing": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in OPTIONAL if m in PLANNED])
def test_methods_differ_from_dp_sgd_but_not_where_they_are_neutral(method, digits, plain):
    change = {"learning_rate": 0.01, "floor": 0.01} if method.startswith("dp-adam") else {}
    own = _vector(_carry(digits, method, **change)[0])
    assert jnp.isfinite(own).all()
    assert jnp.linalg.norm(own - plain) > 0.002 * jnp.linalg.norm(plain)
    if method in NEUTRAL:
        same = _vector(_carry(digits, method, **NEUTRAL[method])[0])
        # Book-keeping, which only dp-sgd can use, may take a norm for up to 3% too high.
        assert jnp.linalg.norm(same - plain) < 0.001 * jnp.linalg.norm(plain)


@pytest.mark.slow
def test_projected_updates_stay_in_the_subspace(digits):
    carries = _carries(digits, "projected-dp-sgd", (0, 1, 2, 3))
    first, *steps = (_vector(carry[0]) for carry in carries)
    steps = [step - first for step in steps]
    assert jnp.linalg.matrix_rank(jnp.stack(steps), rtol=1e-3) == 3
    kept = _vector(_carry(digits, "projected-dp-sgd", 1, subspace="gaussian")[0]) - first
    whole = _vector(_carry(digits, "dp-sgd", 1)[0]) - first
    share = jnp.linalg.norm(kept) / jnp.linalg.norm(whole)  # 8 of 4,810 directions
    assert 0.2 < share / (8 / 4_810) ** 0.5 < 3
    cosine = kept @ whole / jnp.linalg.norm(kept) / jnp.linalg.norm(whole)
    np.testing.assert_allclose(cosine, share, rtol=1e-3)


@pytest.mark.parametrize("method", ["non-private", "dp-sgd", "gep"])
def test_the_average_of_parameters_is_the_same_for_every_method(method, digits):
    points = _carries(digits, method, range(3), average=0.5)
    expected = _vector(points[0][0])
    for carry in points:
        expected = 0.5 * expected + 0.5 * _vector(carry[0])
        np.testing.assert_allclose(_vector(carry[-1]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_views_are_shifts_and_their_mean_loss_is_that_of_one_record():
    image = jnp.zeros((1, 28, 28, 1)).at[0, 14, 14, 0].set(1.0)
    views = _augment.views(jax.random.key(0), image, 50)
    assert views.shape == (1, 50, 28, 28, 1)
    places = {tuple(map(int, jnp.argwhere(view[..., 0])[0] - 14)) for view in views[0]}
    assert max(abs(shift) for place in places for shift in place) == 2
    assert len(places) > 15
    ramp = jnp.broadcast_to(jnp.arange(10.0)[None, None, :, None], (1, 10, 10, 1))
    flipped = _augment.views(jax.random.key(1), ramp, 20, flip=True)[0, :, 5, :, 0]
    rising = (flipped[:, -1] > flipped[:, 0]).sum()
    assert 3 < rising < 17

    def loss(w, example):
        return jnp.sum(w * example[0]) * example[1]

    record, w = (jnp.stack([ramp[0], 3 * ramp[0]]), 2.0), jnp.ones((10, 10, 1))
    mean = jax.grad(_augment.mean_over_views(loss))(w, record)
    np.testing.assert_allclose(mean, 4 * ramp[0])


@pytest.mark.slow
def test_augmentations_and_labels_change_the_run_of_every_kind_of_method(digits, plain):
    several = _vector(_carry(digits, "dp-sgd", augmentations=2)[0])
    assert 1e-3 < jnp.linalg.norm(plain - several) < 0.5 * jnp.linalg.norm(plain)
    changes = ({}, {"augmentations": 2}, {"subspace": "true-labels"})
    one, several, true = (_vector(_carry(digits, "gep", **change)[0]) for change in changes)
    assert jnp.linalg.norm(one - several) > 1e-3
    assert jnp.linalg.norm(one - true) > 1e-3


def test_public_data_are_named_for_every_method():
    for method in METHODS + OPTIONAL:
        text = public_data(method, Setting(), "500 tiny-imagenet", 7)
        assert ("with labels" in text) == (method in WITH_LABELS)
    gaussian = Setting(subspace="gaussian")
    assert public_data("gep", gaussian, "500 tiny-imagenet", 7) == "none"
    assert public_data("dp-adam", Setting(), "500 tiny-imagenet", 7) == "none"
    true = Setting(subspace="true-labels")
    assert public_data("b-gep", true, "9 in-distribution", 7) == "9 in-distribution, with labels"


@pytest.mark.slow
def test_further_methods_run_by_name(tmp_path):
    methods = ("dp-adam", "pda-dpmd")
    options = {"dataset": "digits", "smoke": True, "seed": 1, "augmentations": 2, "average": 0.5}
    summary = gep.main(gep.Args(methods=methods, out=tmp_path, **options))
    assert tuple(summary["methods"]) == methods
    assert all(0.99 <= row["epsilon_spent"] <= 1 for row in summary["methods"].values())
    text = (tmp_path / "report.txt").read_text()
    assert "200 in-distribution, with labels" in text
    assert re.search("Mechanism +pda-dpmd", text)


@pytest.mark.slow
def test_table_stands_beside_what_the_paper_prints(tmp_path, monkeypatch):
    monkeypatch.setitem(gep_table.PRINTED, "digits", {"class-means": {4: 12.3}})
    args = gep_table.Args(dataset="digits", methods=("class-means",), epsilons=(1.0, 4.0))
    args = dataclasses.replace(args, seed=0, out=tmp_path)
    brief = gep_table.main(args)
    assert brief["methods"]["class-means"]["4"] > brief["methods"]["class-means"]["1"] > 0.6
    text = gep_table.markdown(json.loads((tmp_path / "summary.json").read_text()))
    assert "epsilon 1 | epsilon 4 | public data" in text and " (12.3) |" in text
    assert "200 in-distribution, no labels" in text
    monkeypatch.setattr(_methods, "_class_means", lambda *_: pytest.fail("run again"))
    assert gep_table.main(args) == brief
    with pytest.raises(UsageError, match="no small version"):
        gep_table.main(dataclasses.replace(args, dataset="cifar10"))
    full = gep_table.Args(dataset="svhn_cropped", full=True)
    own = gep_table.arguments(full, ("gep",), 8.0, tmp_path)
    assert (own.epochs, own.delta, own.refresh_every, own.num_public) == (20, 1e-6, 1, 0)
    paper = gep_table.Args(dataset="cifar10", full=True)
    assert gep_table.arguments(paper, ("gep",), 8.0, tmp_path).rank == 2_000
    pate = gep_table.arguments(full, ("pate",), 5.0, tmp_path)
    assert (pate.queries, pate.anchors, pate.delta) == (600, "in-distribution", 1e-6)
    setting = gep.setting(own, "gep", 604_388, "resnet20")
    assert (setting.steps, setting.clip_norms, setting.groups) == (12_088, (10.0, 2.0), 5)


@pytest.mark.slow
def test_table_takes_public_images_and_labels(tmp_path):
    np.save(tmp_path / "own.npy", np.random.RandomState(0).randint(256, size=(30, 8, 8)))
    args = gep_table.Args(dataset="digits", methods=("adadps", "pate"), epsilons=(8.0,), seed=0)
    given = {"anchors": str(tmp_path / "own.npy"), "num_public": 100, "seeds": 1}
    args = dataclasses.replace(args, out=tmp_path / "run", **given)
    gep_table.main(args)
    rows = json.loads((tmp_path / "run/summary.json").read_text())["methods"]
    assert rows["adadps"]["public_data"] == "100 in-distribution, with labels"
    assert "in-distribution, no labels" in rows["pate"]["public_data"]
    shared = rows["adadps"]["budgets"][0]["shared"]
    assert shared["anchors"].startswith("30 ") and "; 1,347 private, 100 public" in shared["data"]
    own = gep_table.arguments(args, ("gep",), 8.0, tmp_path)
    assert (own.anchors, own.num_anchors) == (given["anchors"], None)
    np.save(tmp_path / "own.npy", np.zeros((30, 8, 8)))  # another file under the same path
    with pytest.raises(UsageError, match="anchors_check was"):
        gep_table.main(args)
