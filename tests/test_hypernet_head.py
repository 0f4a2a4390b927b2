"""The study of linear heads: fair tasks, a run that resumes, messages."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import hypernet_head, hypernet_regression
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
    with pytest.raises(UsageError, match="lacks the arrays train_labels test test_labels"):
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
