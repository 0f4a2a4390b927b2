"""What README.md says is so: its program runs, and its numbers are those of committed results."""

import pathlib
import re
import subprocess
import sys

import pytest

from experiments.tables import tables

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_program_in_the_readme_runs():
    program = re.search(r"```python\n(import jax.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    done = subprocess.run(
        [sys.executable, "-c", program.group(1)], capture_output=True, text=True, check=True
    )
    accuracy, statement = done.stdout.split("\n", 1)
    assert float(accuracy) > 0.8
    assert "(2, 1e-05)-differential privacy" in statement


@pytest.mark.parametrize(("name", "text"), tables().items(), ids=lambda value: value[:20])
def test_tables_are_those_of_the_committed_results(name, text):
    assert text in README.read_text(), f"paste the output of python -m experiments.tables ({name})"


def test_pictures_and_files_that_are_linked_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link
