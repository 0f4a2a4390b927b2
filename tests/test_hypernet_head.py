"""The study of linear heads: fair tasks, a run that resumes, messages."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import hypernet_head, hypernet_regression
from experiments._head_tasks import load
from experiments._run import UsageError


def test_tasks_are_balanced_and_draw_no_record_twice():
    x = np.arange(40.0).reshape(40, 1)
    pool = hypernet_head.Pool(x, np.repeat([0, 1, 2, 3], 10))
    drawn, signs = pool.draw(np.random.default_rng(0), np.array([3, 1]), 20)
    assert len(set(drawn.ravel())) == 20 and signs.sum() == 0
    assert (drawn[signs == -1] >= 30).all()  # the first of the pair is -1
    held, labels = pool.all_of(np.array([3, 1]))
    assert len(held) == 20 and (labels[held[:, 0] < 20] == 1).all()
    with pytest.raises(UsageError, match="--sizes must be at most 20"):
        pool.draw(np.random.default_rng(0), np.array([3, 1]), 22)


@pytest.mark.slow
def test_smoke_run_resumes(tmp_path, monkeypatch):
    args = hypernet_head.Args(smoke=True, out=tmp_path)
    brief = hypernet_head.main(args)
    row = json.loads(json.dumps(brief))["cells"]["epsilon 4, N 50"]
    assert set(row) == set(hypernet_head.METHODS)
    assert row["logistic"]["mean"] > 0.9
    assert "dp-deepsets" in (tmp_path / "report.txt").read_text()
    monkeypatch.setattr(hypernet_head, "train", lambda *_: pytest.fail("ran again"))
    assert hypernet_head.main(args)["cells"] == brief["cells"]
    with pytest.raises(UsageError, match="seed was 0, now 1"):
        hypernet_head.main(dataclasses.replace(args, seed=1))


@pytest.mark.parametrize(
    "change, match",
    [
        ({"sizes": (4,)}, "--sizes must be at least 8"),
        ({"delta": 0.5}, "--delta must be above 0 and below 1 / 100"),
        ({"epsilons": (4.0, 4.0000001)}, "--epsilons must be different, in their first six digits"),
        ({"sizes": (25, 25)}, "--sizes must be different"),
        ({"seed": 2**33}, "--seed must be at least 0 and below 4294967296"),
        ({"features": "nowhere.npz"}, "there is no nowhere.npz"),
        ({"sizes": (25, 500)}, "--sizes must be at most 1[0-9][0-9] for"),
    ],
)
def test_bad_options_are_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        hypernet_head.main(hypernet_head.Args(out=tmp_path, **change))


def test_a_file_without_features_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", train=np.zeros((4, 2)))
    args = hypernet_head.Args(features=str(tmp_path / "other.npz"), out=tmp_path)
    with pytest.raises(UsageError, match="must hold train, train_labels, test, test_labels"):
        hypernet_head.main(args)


def _file(path, labels):
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(size=(60, 3)).astype("f") for name in ("train", "test")}
    arrays |= {"train_labels": labels, "test_labels": np.resize(np.unique(labels), 60)}
    np.savez(path, **arrays)
    return str(path)


def test_what_is_unseen_is_in_no_public_image(tmp_path):
    file = _file(tmp_path / "features.npz", np.arange(60) % 6)
    public, private, test, *_ = load(file, 2, unseen=4)
    assert set(public.y) == {0, 1} and set(private.y) == set(test.y) == set(range(6))
    assert abs(public.x.mean(0)).max() < 1e-6  # centred by its own mean, which private ones are not
    assert abs(private.x.mean(0)).max() > 1e-3
    few = _file(tmp_path / "few.npz", np.arange(60) % 5)
    args = hypernet_head.Args(features=few, unseen=True, out=tmp_path)
    with pytest.raises(UsageError, match="--features must have 6 classes or more, but has 5"):
        hypernet_head.main(args)


def test_unseen_classes_are_chosen_once_from_all_labels(tmp_path):
    for labels in (
        10 * (np.arange(60) % 10),  # names of classes with gaps between them
        np.r_[np.arange(30) % 9, np.arange(30) % 10],  # a public half without the last class
    ):
        parts = load(_file(tmp_path / "features.npz", labels), 2, unseen=4)
        assert not np.isin(parts.public.y, parts.private_classes).any()
        assert set(parts.public.y) == set(parts.classes) == set(np.unique(labels)[:6])
        assert set(parts.private_classes) == set(np.unique(labels)[6:]) <= set(parts.private.y)
    without = np.r_[np.arange(30) % 10, np.arange(30) % 9]
    with pytest.raises(UsageError, match=r"in its private, second half, but has none of \[9\]"):
        load(_file(tmp_path / "without.npz", without), 2, unseen=4)
    sorted_by_class = np.arange(60) // 6
    with pytest.raises(UsageError, match="private tasks in train, in its private, second half"):
        load(_file(tmp_path / "sorted.npz", sorted_by_class), 2, unseen=0)


def _finished(monkeypatch):
    monkeypatch.setattr(hypernet_head, "train", lambda *_: None)
    row = dict.fromkeys(hypernet_head.METHODS, {"mean": 0.5, "std": 0.1, "setting": None})
    monkeypatch.setattr(hypernet_head, "tuned", lambda *_: row)


def test_a_smoke_run_keeps_the_options_that_are_given(tmp_path, monkeypatch):
    _finished(monkeypatch)
    args = hypernet_head.Args(smoke=True, sizes=(64,), epsilons=(1.0,), out=tmp_path)
    assert list(hypernet_head.main(args)["cells"]) == ["epsilon 1, N 64"]


def test_a_run_is_not_taken_up_with_another_file_of_the_same_name(tmp_path, monkeypatch):
    _finished(monkeypatch)
    file = _file(tmp_path / "features.npz", np.arange(60) % 6)
    args = hypernet_head.Args(features=file, sizes=(8,), smoke=True, out=tmp_path / "run")
    hypernet_head.main(args)
    arrays = dict(np.load(file))
    np.savez(file, **arrays | {"train": np.r_[arrays["train"][:30], -arrays["train"][30:]]})
    hypernet_head.main(args)  # what the private part holds has no share in it
    np.savez(file, **arrays | {"test": -arrays["test"]})
    with pytest.raises(UsageError, match="public_digest was"):
        hypernet_head.main(args)


@pytest.mark.parametrize("study", [hypernet_head, hypernet_regression])
def test_a_smoke_run_leaves_the_folder_of_the_study_alone(study, monkeypatch):
    class Begin(Exception):
        pass

    paths = []

    def folder(path, experiment):
        del experiment
        paths.append(path)
        raise Begin

    monkeypatch.setattr(study._run, "Folder", folder)
    for smoke in (False, True):
        with pytest.raises(Begin):
            study.main(study.Args(smoke=smoke))
    assert len(set(paths)) == 2
