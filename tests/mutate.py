"""Break jdp in every way of `mutants.txt`, one at a time, and see that the tests notice.

Each mutant is a copy of the tree with one place changed, in a process forked from this one, which
has imported JAX but has not started it. The same tests must pass on the unchanged tree, which comes
first. Survivors are listed at the end, and make the exit status 1.

  python -m tests.mutate                   # all
  python -m tests.mutate clipping "mask"   # those with one of these words in file or harm
"""

import argparse
import compileall
import gc
import importlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

import rich.console
import rich.progress

ROOT = pathlib.Path(__file__).parents[1]
TABLE = pathlib.Path(__file__).with_name("mutants.txt")
# What the tests import, so that forks have it already; but nothing that imports jdp.
IMPORTS = ("jax", "flax.linen", "optax", "scipy.stats", "dp_accounting.pld", "dp_accounting.rdp")
IMPORTS += ("hypothesis", "pytest")
# No threads before a fork, and no plugin of pytest's that these tests can do without.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception")
SECONDS = 120  # a mutant that takes longer never ends, which is noticed too


class Mutant(NamedTuple):
    """One change: see the head of `mutants.txt`."""

    file: str
    harm: str
    old: str
    new: str
    tests: tuple[str, ...]


def load() -> list[Mutant]:
    """Read the table."""
    mutants = []
    for block in TABLE.read_text().strip().split("\n\n")[1:]:
        head, *lines = block.split("\n")
        assert all(line[:2] in ("- ", "+ ", "> ") for line in lines), block
        old, new, tests = ([ln[2:] for ln in lines if ln[0] == mark] for mark in "-+>")
        mutants.append(Mutant(*head.split(": ", 1), "\n".join(old), "\n".join(new), tuple(tests)))
    return mutants


class _Watch:
    """Shares compiled programs with the mutants before, and notes which test failed."""

    failed = ""

    def __init__(self, compiled: pathlib.Path):
        self.compiled = compiled

    def pytest_sessionstart(self):
        import jax

        jax.config.update("jax_compilation_cache_dir", str(self.compiled))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


def start(mutant: Mutant, base: pathlib.Path, folder: pathlib.Path, compiled: pathlib.Path) -> int:
    """Run a mutant's tests in a fork, whose number is returned and whose exit status is pytest's.

    Args:
      mutant: an `old` of "" changes nothing.
      base: the tree.
      folder: for its copy.
      compiled: for programs; no other fork may use it at the same time.
    """
    shutil.copytree(base, folder)
    if mutant.old:
        path = folder / "jdp" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} has not exactly one {mutant.old!r}"
        path.write_text(text.replace(mutant.old, mutant.new))
    if (child := os.fork()) != 0:
        return child
    code = 3
    try:
        import pytest

        signal.alarm(SECONDS if mutant.old else 10 * SECONDS)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        (folder / "tmp").mkdir()
        tempfile.tempdir = str(folder / "tmp")
        watch = _Watch(compiled)
        tests = [f"tests/{test}" for test in mutant.tests]
        code = int(pytest.main([*OPTIONS, *tests], plugins=[watch]))
        (folder / "killer").write_text(watch.failed)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(mutant: Mutant, status: int, folder: pathlib.Path) -> tuple[bool, str]:
    """Whether all is as it should be, and what happened."""
    code = os.waitstatus_to_exitcode(status)
    if not mutant.old:
        return code == 0, "as it should be" if code == 0 else "BROKEN, so nothing can be told"
    if code == 1:
        return True, "killed by " + (folder / "killer").read_text().removeprefix("tests/")
    if code == -signal.SIGALRM:
        return True, f"killed: no end after {SECONDS} s"
    return False, "SURVIVED" if code == 0 else f"INVALID: its tests could not run ({code})"


def main() -> int:
    """Run the mutants that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the file or the harm; all mutants by default")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="at a time (default: cores)")
    args = parser.parse_args()
    waiting = [
        mutant
        for mutant in load()
        if not args.words or any(word in f"{mutant.file}: {mutant.harm}" for word in args.words)
    ]
    if not waiting or args.jobs < 1:
        parser.error("no mutant has one of these words, or --jobs is less than 1")
    os.environ.update(ENVIRONMENT)
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    count = len(waiting)
    tests = tuple(dict.fromkeys(test for mutant in waiting for test in mutant.tests))
    waiting.insert(0, Mutant("", f"the unchanged tree, {len(tests)} tests", "", "", tests))
    begin, wrong, running, free = time.monotonic(), [], {}, list(range(args.jobs))
    columns = (
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)
    # No refreshing thread: a process is forked safely only while it has one.
    with (
        tempfile.TemporaryDirectory(prefix="jdp-mutants-") as temporary,
        rich.progress.Progress(*columns, console=console, auto_refresh=False) as bar,
    ):
        top = pathlib.Path(temporary)
        base, task = top / "base", bar.add_task("", total=len(waiting))
        for part in ("jdp", "tests"):
            shutil.copytree(ROOT / part, base / part)
        shutil.copy(ROOT / "pyproject.toml", base)
        compileall.compile_dir(base, quiet=2)
        while waiting or running:
            while waiting and free:
                mutant, folder, own = waiting.pop(0), top / str(len(waiting)), free.pop()
                child = start(mutant, base, folder, top / f"compiled-{own}")
                running[child] = mutant, folder, own, time.monotonic()
            child, status = os.wait()
            mutant, folder, own, since = running.pop(child)
            free.append(own)
            right, what = verdict(mutant, status, folder)
            label = f"{mutant.file}: {mutant.harm}" if mutant.file else mutant.harm
            console.print(f"{time.monotonic() - since:5.1f} s  {label}: {what}")
            if not right:
                wrong.append(f"{label}: {what}")
                console.print((folder / "log").read_text()[-2000:])
            shutil.rmtree(folder)
            bar.update(task, advance=1)
            bar.refresh()
    console.print(f"{count} mutants in {time.monotonic() - begin:.0f} s")
    console.print("survivors: " + ("none" if not wrong else "\n  ".join(["", *wrong])))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
