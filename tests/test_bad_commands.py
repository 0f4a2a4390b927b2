"""Wrong command lines: each ends with status 2 and one message, and leaves everything as it was."""

import fcntl
import importlib
import json
import os
import runpy
import sys

import jax
import numpy as np
import pytest

from experiments import _features, _run, datasets, gep
from jdp import _cli

# Experiment, options, and words of the message. An option that a parser refuses by itself is named
# in its message. Nothing here gets as far as reading data.
BEFORE_DATA = [
    ("gep", "--epsilon x", "--epsilon"),
    ("gep", "--epsilon", "--epsilon"),
    ("gep", "--epsilon -1", "--epsilon must be above 0, but got -1.0"),
    ("gep", "--epsilon 0", "--epsilon must be above 0, but got 0.0"),
    ("gep", "--epsilon inf", "--epsilon must be above 0, but got inf"),
    ("gep", "--delta 0", "--delta must lie between 0 and 1, but got 0.0"),
    ("gep", "--delta nan", "--delta must lie between 0 and 1, but got nan"),
    ("gep", "--stesp 5", "--stesp"),
    ("gep", "--steps 1.5", "--steps"),
    ("gep", "--steps -3", "--steps must be above 0, but got -3"),
    ("gep", "--steps 5 --epochs 2", "--steps or --epochs, not both"),
    ("gep", "--seeds 0", "--seeds must be above 0, but got 0"),
    ("gep", "--seed 4294967296", "--seed must be at least 0 and below 4294967296"),
    ("gep", "--batch-size 0", "--batch-size must be above 0, but got 0"),
    ("gep", "--learning-rate nan", "--learning-rate must be above 0, but got (nan,)"),
    ("gep", "--learning-rate 1 2 --methods gep", "--learning-rate takes one value, or one for"),
    ("gep", "--momentum 1", "--momentum must be at least 0 and below 1, but got 1.0"),
    ("gep", "--clip-norm inf", "--clip-norm must be above 0, but got inf"),
    ("gep", "--clip-norm 1e-30", "clip norms must be from 1e-12 to 1e12, but got 1e-30"),
    ("gep", "--clip-norms 1", "--clip-norms"),
    ("gep", "--whitening 2", "--whitening must be from 0 to 1, but got 2.0"),
    ("gep", "--methods sgd", "--methods must be different ones of non-private", "but got sgd"),
    ("gep", "--methods gep gep", "--methods must be different ones", "but got gep gep"),
    ("gep", "--dataset imagenet", "--dataset"),
    ("gep", "--model vgg", "--model"),
    ("gep", "--devices 99", "--devices must be 1 to", "but got 99", "virtual"),
    ("gep", "--devices 2 --methods gep pate", "--devices must be 1 for pate", "run pate by itself"),
    ("gep", "--max-examples 0", "--max-examples must be above 0, but got 0"),
    ("gep", "--num-public -1", "--num-public must be at least 0, but got -1"),
    ("gep", "--save-every nan", "--save-every must be at least 0, but got nan"),
    ("gep", "--smoke --seeds 5", "--seeds must be other than its default 5 beside --smoke"),
    ("gep", "more", "more"),
    ("pate", "--teachers 0", "--teachers must be above 0, but got 0"),
    ("pate", "--threshold nan", "--threshold must be above 0, but got nan"),
    ("pate", "--devices 2", "--devices"),
    ("pate", "--smoke --seeds=5", "--seeds must be other than its default 5 beside --smoke"),
    ("gep_table", "--epsilons", "--epsilons must be one or more different values"),
    ("gep_table", "--methods", "--methods must be one or more different values"),
    ("gep_table", "--dataset cifar10", "cifar10 has no small version; use --full"),
    ("gep_table", "--methods gep pda-dpmd", "pda-dpmd needs --num-public above 0"),
    ("gep_table", "--methods adadps --num-public -1", "--num-public must be at least 0"),
    ("gep", "--methods gep adadps --num-public 0", "adadps needs --num-public above 0; leave it"),
    ("gep_table", "--epsilons 0", "--epsilon must be above 0, but got 0.0"),
    ("gep_table", "--seeds 0", "--seeds must be above 0, but got 0"),
    ("gep_ablation", "--parts all", "--parts must be different ones of rank", "but got all"),
    ("gep_ablation", "--parts rank rank", "--parts must be different", "but got rank, rank"),
    ("gep_ablation", "--parts", "--parts must be different ones of rank", "but got nothing"),
    ("gep_ablation", "--seeds 0", "--seeds must be above 0, but got 0"),
    ("gep_ablation", "--seed -1", "--seed must be at least 0", "but got -1"),
    ("gep_ablation", "--delta 2", "--delta must lie between 0 and 1, but got 2.0"),
    ("gep_ablation", "--batch-size 0", "--batch-size must be above 0, but got 0"),
    ("search_gep", "--trials 0", "--trials must be at least 1, but got 0"),
    ("search_gep", "--methods pate", "--methods must be different ones", "but got pate"),
    ("search_gep", "--methods", "--methods must be different ones", "but got nothing"),
    ("search_gep", "--max-steps 0", "--max-steps must be at least 1, but got 0"),
    ("search_gep", "--seed -1", "--seed must be at least 0", "but got -1"),
    ("linear_probe", "--features none.npz", "there is no none.npz", "--features"),
    ("linear_probe", "--features torn.npz", "--features torn.npz must hold train, train_labels"),
    ("linear_probe", "--features empty.npz", "--features empty.npz must hold train, train_labels"),
    ("linear_probe", "--features other.npz", "--features other.npz must hold train, train_labels"),
    ("linear_probe", "--features large.npz", "large.npz must hold features that are finite"),
    ("linear_probe", "--features wrapped.npz", "train_labels that are negative, or 2**31 and more"),
    (
        "linear_probe",
        "--features one-class.npz --methods gep --validation 10 --batch-size 9 --groups 1",
        "labels must count 2 classes or more",
        "but the largest is 0",
    ),
    ("linear_probe", "--epsilons 0", "--epsilons must be at least 0.001, but got (0.0,)"),
    ("linear_probe", "--epsilons 1 nan", "--epsilons must be at least 0.001, but got (1.0, nan)"),
    ("linear_probe", "--methods svm", "--methods must be different ones of", "but got svm"),
    ("linear_probe", "--num-public 1", "--num-public must be at least 2, but got 1"),
    ("linear_probe", "--seed -3", "--seed must be at least 0", "but got -3"),
    ("linear_probe", "--smoke --steps 100", "--steps must be other than its default 100"),
    ("relu_regression", "--parts", "--parts must be different ones of stall", "but got nothing"),
    ("relu_regression", "--designs cauchy", "--designs must be different ones", "but got cauchy"),
    ("relu_regression", "--sizes 10", "--sizes must be at least 100, but got (10,)"),
    ("relu_regression", "--dimensions 0", "--dimensions must be at least 1, but got (0,)"),
    ("relu_regression", "--epsilons inf", "--epsilons must be at least 0.001, but got (inf,)"),
    ("relu_regression", "--delta 0.5", "--delta must be at most 1 / 100,000 records"),
    ("relu_regression", "--seed 9999999999", "--seed must be at least 0 and below 4294967296"),
    ("relu_regression", "--tables flights", "--tables must be different ones", "but got flights"),
    ("hypernet_regression", "--steps 150", "--steps must be a multiple of", "but got 150"),
    ("hypernet_regression", "--gammas 0.5", "--gammas must be at least 0.51, but got (0.5,)"),
    ("hypernet_regression", "--zetas nan", "--zetas must be at least 0, but got (nan,)"),
    ("hypernet_regression", "--methods ols", "--methods must be different ones", "but got ols"),
    ("hypernet_regression", "--dimensions 2", "--dimensions must be at least 4, but got (2,)"),
    ("hypernet_regression", "--seed -1", "--seed must be at least 0", "but got -1"),
    ("hypernet_lora", "--sets 1", "--sets must be at least 2, but got 1"),
    ("hypernet_lora", "--epsilons nan", "--epsilons must be at least 0.001, but got (nan,)"),
    ("hypernet_lora", "--delta 0.5", "--delta must be above 0 and below 1 / 128 records of a set"),
    ("hypernet_lora", "--config full", "--config full needs --checkpoint"),
    ("hypernet_lora", "--checkpoint none.pt", "there is no none.pt, which --checkpoint names"),
    ("hypernet_lora", "--smoke --config full", "--smoke has sizes of its own"),
    ("hypernet_lora", "--seed -1", "--seed must be at least 0", "but got -1"),
    ("audit", "--draws 10", "--draws must be at least 1000, but got 10"),
    ("audit", "--only sgd", "--only must be different ones of dp-sgd", "but got sgd"),
    ("audit", "--delta 0", "--delta must lie between 0 and 1, but got 0.0"),
    ("audit", "--repeats 0", "--repeats must be at least 1, but got 0"),
    ("audit", "--seed -1", "--seed must be at least 0", "but got -1"),
    ("speed", "--models vgg", "--models must be different ones of mlp", "but got vgg"),
    ("speed", "--parts", "--parts must be different ones of models", "but got nothing"),
    ("speed", "--peers tf", "--peers must be different ones of optax", "but got tf"),
    ("speed", "--repeats 0", "--repeats must be above 0, but got 0"),
    ("speed", "--budget nan", "--budget must be above 0, but got nan"),
    ("tables", "--out x", "--out"),
]
# These need the sizes of the data (digits, which come inside a package).
WITH_DATA = [
    ("gep", "--delta 0.01", "--delta must be below 1 / 1,247 private images, but got 0.01"),
    ("gep", "--methods dp-sgd --batch-size 5000", "--batch-size 5000 exceeds the 1,247 private"),
    ("gep", "--methods dp-sgd --epochs 1e-9", "--epochs 1e-09 is less than one step of"),
    ("gep", "--methods gep --rank 900", "--rank 900 exceeds what 200 anchors span"),
    ("gep", "--methods gep --groups 9", "--groups 9 exceeds the 2 layers of mlp"),
    ("gep", "--num-public 9999", "--num-public 9999 leaves no private image of 1,447"),
    ("gep", "--num-anchors 999", "--num-anchors must be from 1 to 200, but got 999"),
    ("gep", "--validation 9999", "--validation must be from 1 to 1246, but got 9999"),
    ("gep", "--anchors none.npy", "there is no none.npy", "--anchors takes a path that exists"),
    ("gep", "--anchors torn.npy", "--anchors torn.npy must be an array of images"),
    ("gep", "--anchors empty.npy", "--anchors empty.npy must be an array of images"),
    ("gep", "--anchors nan.npy", "--anchors nan.npy must be an array of images"),
    ("gep", "--anchors wide.npy", "--anchors must have shape (n, 8, 8, 1), but wide.npy has"),
    ("gep", "--anchors cats", "--anchors must be one of in-distribution", "but got 'cats'"),
    ("gep", "--anchors imagenet --data-dir torn", "imagenet_sample_1000", "cannot be read"),
    ("gep", "--anchors imagenet --data-dir none", "imagenet_sample_1000", "--data-dir"),
    ("gep", "--out torn.npy", "cannot write to torn.npy", "Choose another --out"),
    ("gep", "--out /dev/null/run", "cannot write to /dev/null/run", "Choose another --out"),
    ("gep", "--out list", "results.json is not a results file", "move it away"),
    ("gep", "--out torn", "results.json is not a results file", "move it away"),
    ("gep", "--out busy", "another process is at work in", "another --out"),
    ("gep", "--out unowned", "has a summary of another program, which gep would overwrite"),
    ("gep_table", "--anchors none.npy", "there is no none.npy", "--anchors takes a path that"),
    ("gep_table", "--anchors wide.npy", "--anchors must have shape (n, 8, 8, 1), but wide.npy has"),
    ("gep_table", "--num-public 9999", "--num-public 9999 leaves no private image of 1,447"),
    ("pate", "--teachers 2000", "--teachers 2000 exceeds the 1,247 private images"),
    ("pate", "--threshold 10", "give --threshold and --answers together, or neither"),
    ("pate", "--threshold 99 --answers 3", "--threshold 99.0 exceeds the 60 teachers"),
    ("pate", "--threshold 9 --answers 99", "--answers 99 exceeds the 50 queries"),
    ("pate", "--queries 201", "--queries 201 exceeds the 200 public images"),
    ("search_gep", "--validation 5000", "--validation must be from 1 to 1246, but got 5000"),
    ("linear_probe", "--smoke --groups 11", "--groups 11 exceeds the 10 classes"),
    ("linear_probe", "--smoke --num-public 350", "--num-public must be below the 350 test"),
    ("linear_probe", "--smoke --delta 0.1", "--delta must be below 1 / 1,447 examples, but got"),
    ("linear_probe", "--smoke --batch-size 1400", "exceed the 1,447 private examples together"),
    ("relu_regression", "--parts tables --tables power-plant --data-dir torn", "is not the table"),
    (
        "relu_regression",
        "--parts tables --tables blog-feedback --data-dir torn",
        "is not the table",
    ),
]
EXPERIMENTS = ("gep", "gep_ablation", "search_gep", "linear_probe", "relu_regression")
EXPERIMENTS += ("hypernet_lora", "hypernet_regression", "audit", "speed", "gep_table", "pate")
BATCH = {"gep": "digits", "pate": "digits", "search_gep": "digits", "gep_table": "digits"}


def _write_wrong_files(folder):
    for name in ("torn", "list", "busy", "unowned", "audit", "torn/anchor"):
        (folder / name).mkdir()
    np.save(folder / "wide.npy", np.zeros((3, 9, 9)))
    np.save(folder / "nan.npy", np.full((3, 8, 8), np.nan))
    np.savez(folder / "other.npz", train=np.zeros((3, 2)))
    x, y = np.ones((40, 2)), np.zeros(40, int)
    features = {"train": x, "train_labels": y, "test": x, "test_labels": y}
    np.savez(folder / "one-class.npz", **features)
    np.savez(folder / "large.npz", **features | {"train": 1e300 * x})
    np.savez(folder / "wrapped.npz", **features | {"train_labels": y + 2**32})
    whole = (folder / "other.npz").read_bytes()
    for name in ("torn.npz", "torn.npy", "torn/results.json"):
        (folder / name).write_bytes(whole[: len(whole) // 2])
    for colour in ("gray28", "rgb32"):
        (folder / f"torn/anchor/imagenet_sample_1000_{colour}.webp").write_bytes(whole)
    for name in ("power_plant_ccpp.csv.xz", "blog_feedback.npz"):
        (folder / "torn" / name).write_bytes(whole)
    (folder / "empty.npz").touch()
    (folder / "empty.npy").touch()
    (folder / "list/results.json").write_text("[1]")
    (folder / "unowned/summary.json").write_text("[1]")
    (folder / "audit/summary.json").write_text('{"experiment": "audit"}')


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    _write_wrong_files(folder)
    lock = os.open(folder / "busy", os.O_RDONLY)  # as another process would
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield folder
    os.close(lock)


def _contents(folder):
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


def _message(experiment, options, folder, monkeypatch, capsys):
    """Run a command that must be refused, in a folder that must stay as it is."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{experiment}.py", *options.split()])
    before = _contents(folder)
    with pytest.raises(SystemExit) as status:
        if experiment == "tables":
            sys.modules.pop("experiments.tables", None)  # or runpy warns
            runpy.run_module("experiments.tables", run_name="__main__")
        module = importlib.import_module(f"experiments.{experiment}")
        _run.command_line(module.Args, module.main)
    out, err = capsys.readouterr()
    assert (status.value.code, out) == (2, "")
    assert "Traceback" not in err and _contents(folder) == before
    return err


@pytest.mark.parametrize("row", BEFORE_DATA, ids=lambda row: " ".join(row[:2]))
def test_wrong_options_are_refused_before_data_is_touched(row, wrong_files, monkeypatch, capsys):
    for module, name in ((datasets, "load"), (_features, "digits"), (_features, "cifar10")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("data was touched"))
    if "--devices 2 " in row[1]:
        monkeypatch.setattr(jax, "device_count", lambda: 2)
    experiment, options, *words = row
    err = _message(experiment, options, wrong_files, monkeypatch, capsys)
    if err.startswith("error: "):
        assert err.count("\n") == 1
    for word in words:
        assert word in err, err


@pytest.mark.parametrize("row", WITH_DATA, ids=lambda row: " ".join(row[:2]))
def test_options_that_do_not_fit_data_or_files_are_refused(row, wrong_files, monkeypatch, capsys):
    experiment, options, *words = row
    monkeypatch.setattr(gep, "make_run", lambda *_: pytest.fail("trained"))
    if experiment in BATCH:
        options = f"--dataset digits {options}"
    err = _message(experiment, options, wrong_files, monkeypatch, capsys)
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err, err


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_results_of_another_experiment_are_not_overwritten(
    experiment, wrong_files, monkeypatch, capsys
):
    out = wrong_files / ("audit" if experiment != "audit" else "other")
    if experiment == "audit":
        out.mkdir(exist_ok=True)
        command = "python -m experiments.speed --smoke"  # as older versions left it
        (out / "summary.json").write_text(json.dumps({"provenance": {"command": command}}))
    options = f"--dataset digits --out {out}" if experiment in BATCH else f"--out {out}"
    if experiment in ("linear_probe", "gep_ablation"):
        options += " --smoke"
    if experiment == "search_gep":
        options += " --validation 100"
    err = _message(experiment, options, wrong_files, monkeypatch, capsys)
    owner = "speed" if experiment == "audit" else "audit"
    assert f"has a summary of {owner}, which" in err and "choose another --out" in err


def test_debug_shows_where(wrong_files, monkeypatch):
    monkeypatch.chdir(wrong_files)
    monkeypatch.setattr(sys, "argv", ["gep.py", "--epsilon", "-1", "--debug"])
    with pytest.raises(_run.UsageError, match="--epsilon must be above 0"):
        _run.command_line(gep.Args, gep.main)
    with pytest.raises(ValueError, match="delta"):
        _cli.main("epsilon --noise-multiplier 1 --delta 2 --debug".split())


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    err = _message("audit", "--out locked", tmp_path, monkeypatch, capsys)
    assert "cannot write to locked" in err and "Permission denied" in err


def test_smoke_keeps_what_was_given():
    args = gep._options.smaller(gep.Args(smoke=True, steps=7, seeds=2), gep.SMOKE)
    assert (args.steps, args.seeds, args.batch_size) == (7, 2, 32)
