"""Studies that were interrupted: finished parts are kept, and a changed option is refused by name.

What a part computes is left out here; `test_resume.py` kills whole programs.
"""

import dataclasses
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments import _relu_parts, _run, gep_ablation, linear_probe, relu_regression, search_gep
from experiments._methods import Budget
from experiments._run import UsageError

OTHER_IMAGES = str(pathlib.Path(tempfile.mkdtemp()) / "other.npy")
np.save(OTHER_IMAGES, np.zeros((300, 8, 8)))


class Interrupted(Exception):
    pass


class Study(NamedTuple):
    """A study in small.

    Attributes:
      module: its program.
      args: its options.
      stubs: what takes long, and what it returns instead.
      free: options that choose among parts, and may change.
      changed: other values of all other options, and how the refusal names the difference.
    """

    module: Any
    args: Any
    stubs: dict[tuple[Any, str], Any]
    free: set[str]
    changed: dict[str, tuple[Any, str]]


def _returns(value):
    return lambda *args, **options: value


def _accuracy(*key):
    return {"test_accuracy": (hash(key) % 97) / 97, "cpu_seconds": 0.0}


def _probe_train(method, setting, *rest):
    return lambda data, keys, knobs, advance: _accuracy(method, setting)


def _run_of(method, setting, *rest):
    result = {"seconds_per_step": 0.1, "temporary_bytes": 1} | _accuracy(method, setting)
    return lambda keys, advance: result


def _risk_cell(method, epsilons, *rest):
    row = {"setting": {}, "risks": [1.0], "mean": 1.0, "standard_error": 0.1}
    return [{"epsilon": epsilon} | row for epsilon in epsilons]


REPORTS = {
    (linear_probe._probe_report, "draw"): _returns(None),
    (relu_regression, "report"): _returns(""),
    (relu_regression, "draw_pictures"): _returns(None),
    (gep_ablation._ablation_report, "markdown"): _returns(""),
    (gep_ablation._ablation_report, "draw"): _returns(None),
}
STUDIES = {
    "linear_probe": Study(
        linear_probe,
        linear_probe.Args(smoke=True, seed=1, methods=("dp-sgd", "public-only")),
        {
            (linear_probe, "make_train"): _probe_train,
            (linear_probe._probe_methods, "unprotected_share_outside"): _returns(0.5),
        },
        {"methods", "epsilons", "seeds", "data_dir", "out", "smoke", "unprotected_share_outside"},
        {
            "features": ("other.npz", "features"),
            "delta": (1e-6, "delta"),
            "seed": (2, "seed"),
            "batch_size": (50, "batch_size"),
            "steps": (5, "steps"),
            "num_public": (40, "num_public"),
            "groups": (2, "groups"),
            "validation": (100, "validation"),
        },
    ),
    "relu_regression": Study(
        relu_regression,
        relu_regression.Args(
            smoke=True,
            parts=("stall", "risk", "tables"),
            methods=("glmtron", "dp-gd-glmtron"),
            tables=("diabetes",),
        ),
        {
            (relu_regression, "cell"): _risk_cell,
            (relu_regression, "data_sets"): _returns(None),
            (relu_regression, "imitations"): _returns(None),
            (relu_regression, "on_table"): lambda method, epsilons, *rest: [
                {"epsilon": epsilon, "mean": 1.0} for epsilon in epsilons
            ],
            (_relu_parts, "_from_zero"): _returns({}),
            (_relu_parts, "_from_random"): _returns({}),
        },
        {"parts", "methods", "designs", "dimensions", "sizes", "most_single", "tables"}
        | {"data_dir", "out", "smoke", "paper_size"},
        {
            "epsilons": ((1.0,), "epsilons"),
            "delta": (1e-6, "delta"),
            "seeds": (3, "seeds"),
            "tuning_draws": (2, "tuning_draws"),
            "seed": (1, "seed"),
        },
    ),
    "search_gep": Study(
        search_gep,
        search_gep.Args(
            dataset="digits",
            methods=("dp-sgd", "class-means"),
            trials=3,
            parts=2,
            finalists=2,
            validation=100,
        ),
        {(search_gep, "make_run"): _run_of, (search_gep, "budget"): _returns(None)},
        {"methods", "trials", "finalists", "parts", "data_dir", "out"},
        {
            "dataset": ("mnist-5k", "data"),
            "epsilon": (2.0, "epsilon"),
            "delta": (1e-6, "delta"),
            "validation": (300, "data|validation"),
            "anchors": (OTHER_IMAGES, "anchors"),
            "seed": (1, "seed"),
            "max_steps": (2, "steps"),
            "max_examples": (700, "data"),
        },
    ),
    "gep_ablation": Study(
        gep_ablation,
        gep_ablation.Args(
            dataset="digits", seeds=2, batch_size=16, steps=2, parts=("noise", "error")
        ),
        {
            (gep_ablation, "make_run"): _run_of,
            (gep_ablation, "budget"): _returns(Budget(None, 1.0, 1.0, "")),
            (gep_ablation._ablation_subspace, "measure"): _returns([{"step": 0}]),
        },
        {"parts", "seeds", "data_dir", "out", "smoke"},
        {
            "dataset": ("mnist-5k", "data"),
            "epsilon": (2.0, "epsilon"),
            "delta": (1e-6, "delta"),
            "seed": (1, "seed"),
            "batch_size": (17, "batch_size"),
            "steps": (3, "steps"),
        },
    ),
}


@pytest.fixture
def study(request, monkeypatch, tmp_path):
    found = STUDIES[request.param]
    for (module, name), stub in (REPORTS | found.stubs).items():
        monkeypatch.setattr(module, name, stub)
    monkeypatch.chdir(tmp_path)
    return found._replace(args=dataclasses.replace(found.args, out=tmp_path / "run"))


def _puts(monkeypatch, stop=None):
    """Count the parts that are stored, and interrupt the one with this number."""
    count, put = [0], _run.Folder.put

    def counted(self, *part):
        if count[0] == stop:
            raise Interrupted
        count[0] += 1
        return put(self, *part)

    monkeypatch.setattr(_run.Folder, "put", counted)
    return count


def _summary(folder):
    found = _run.read_json(folder / "summary.json")
    return {key: value for key, value in found.items() if key not in ("provenance", "seconds")}


@pytest.mark.parametrize("study", STUDIES, indirect=True)
def test_an_interrupted_part_starts_again_and_finished_ones_are_kept(study, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        total = _puts(patch)
        study.module.main(study.args)
    (total,) = total
    assert total > 4
    whole = _summary(study.args.out)
    again = dataclasses.replace(study.args, out=tmp_path / "again")
    for stop in (0, total // 2, total - 1):
        with monkeypatch.context() as patch:
            done = len(_run.Folder(again.out, study.module.__name__.split(".")[1])._pieces)
            _puts(patch, stop - done)
            with pytest.raises(Interrupted):
                study.module.main(again)
        kept = json.loads((again.out / "results.json").read_text()) if stop else {}
        assert len(kept) == stop and not (again.out / "summary.json").exists()
    with monkeypatch.context() as patch:
        rest = _puts(patch)
        study.module.main(again)
    assert rest == [1]
    seconds = "seconds_of_processor"
    assert {**_summary(again.out), seconds: 0} == {**whole, seconds: 0}


@pytest.mark.parametrize("study", STUDIES, indirect=True)
def test_every_other_option_is_refused_with_the_difference_named(study, monkeypatch, tmp_path):
    options = {field.name for field in dataclasses.fields(study.args)}
    assert options == study.free | study.changed.keys() and not study.free & study.changed.keys()
    parts = ("train", "test")
    features = {part: np.ones((600, 3), np.float32) for part in parts}
    np.savez("other.npz", **features, **{f"{part}_labels": np.arange(600) % 10 for part in parts})
    study.module.main(study.args)
    before = (study.args.out / "results.json").read_bytes()
    for name, (value, difference) in study.changed.items():
        value = tmp_path / value if name == "features" else value
        message = rf"another configuration \(.*({difference}) was .* now"
        with pytest.raises(UsageError, match=message):
            study.module.main(dataclasses.replace(study.args, **{name: value}))
        assert (study.args.out / "results.json").read_bytes() == before
