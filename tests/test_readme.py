"""What README.md says is so: its program runs, and its numbers are those of committed results."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tyro

from experiments import datasets, gep, relu_regression
from experiments.tables import tables

README = pathlib.Path(__file__).parents[1] / "README.md"


PROGRAMS = re.findall(r"```python\n(import jax.*?)```", README.read_text(), re.DOTALL)


def _run(program, folder):
    command = [sys.executable, "-c", program]
    ours = os.environ | {"PYTHONPATH": str(README.parent)}
    done = subprocess.run(command, cwd=folder, env=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_in_the_readme_runs(tmp_path):
    accuracy, statement = _run(PROGRAMS[0], tmp_path).split("\n", 1)
    assert float(accuracy) > 0.8
    assert "(2, 1e-05)-differential privacy" in statement


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(PROGRAMS)))
def test_further_programs_in_the_readme_run(number, tmp_path):
    assert _run(PROGRAMS[number], tmp_path)


@pytest.mark.parametrize(("name", "text"), tables().items(), ids=lambda value: value[:20])
def test_tables_are_those_of_the_committed_results(name, text):
    assert text in README.read_text(), f"paste the output of python -m experiments.tables ({name})"


COMMANDS = re.findall(r"python -m experiments\.gep( .*)?$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize("options", COMMANDS)
def test_commands_in_the_readme_are_accepted(options, monkeypatch):
    # On data sets of the right shape, up to the point where work would begin.
    class Begin(Exception):
        pass

    def begin(*_):
        raise Begin

    def load(name, data_dir, max_examples, num_public):
        public = 2_000 if num_public is None else num_public
        parts = [np.zeros((n, *datasets.shape(name)), np.float32) for n in (5_000, public, 10)]
        labels = [np.zeros(len(part), np.int32) for part in parts]
        together = [array for pair in zip(parts, labels, strict=True) for array in pair]
        return datasets.Dataset(name, *together, 10, "stub")

    monkeypatch.setattr(datasets, "load", load)
    monkeypatch.setattr(datasets, "anchors", lambda *_: np.zeros((2_000, 1)))
    monkeypatch.setattr(gep._run, "Folder", begin)
    args = tyro.cli(gep.Args, args=(options or "").split())
    with pytest.raises(Begin):
        gep.main(args)


@pytest.mark.parametrize(
    "options",
    re.findall(r"python -m experiments\.relu_regression([^`\n]*)", README.read_text()),
)
def test_commands_of_the_relu_study_are_accepted(options):
    relu_regression.check(tyro.cli(relu_regression.Args, args=options.split()))


def test_pictures_and_files_that_are_linked_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link
