"""The table of `mutants.txt` fits the tree; `python -m tests.mutate` runs it."""

import ast
import pathlib

from mutate import load

import jdp

PACKAGE, TESTS = pathlib.Path(jdp.__file__).parent, pathlib.Path(__file__).parent


def test_every_mutant_can_be_made_and_names_tests_that_exist():
    mutants = load()
    assert len(mutants) >= 100
    assert len({(mutant.file, mutant.harm) for mutant in mutants}) == len(mutants)
    defined = {
        path.name: {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        for path in TESTS.glob("test_*.py")
    }
    for mutant in mutants:
        text = (PACKAGE / mutant.file).read_text()
        assert text.count(mutant.old) == 1 and mutant.new != mutant.old, mutant
        ast.parse(text.replace(mutant.old, mutant.new))
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert name.partition("[")[0] in defined[file], test
