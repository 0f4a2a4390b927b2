"""What every experiment shares: errors, progress, keys, the run folder and the last line."""

import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

import jdp
from experiments import _options
from experiments._options import UsageError as UsageError

VERSIONS = ("jdp", "jax", "jaxlib", "flax", "optax", "dp-accounting", "numpy")


class Keys(NamedTuple):
    """Independent keys of one run: `noise` and `sampling` must stay secret for it to be private."""

    noise: jax.Array
    sampling: jax.Array
    init: jax.Array


def keys(seed: int | None, repeat: int) -> Keys:
    """Keys of the `repeat`-th run: from the operating system, or all from one `seed`."""
    if seed is None:
        return Keys(jdp.secure_key(), jdp.secure_key(), jdp.secure_key())
    return Keys(*jax.random.split(jax.random.fold_in(jax.random.key(seed), repeat), 3))


def key_statement(seed: int | None) -> str:
    """What the report says about the keys."""
    if seed is None:
        return "noise and sampling keys: independent, from the operating system's entropy"
    return f"seed {seed}: reproducible, NOT private against whoever knows the seed"


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress and the time left on stderr; yields `advance(steps)`.

    Where stderr is not a terminal, a plain line appears about every ten seconds instead of a bar.
    """
    if sys.stderr.isatty():
        import rich.console
        import rich.progress as bars

        with bars.Progress(
            bars.TextColumn("{task.description:<24}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
        ) as bar:
            task = bar.add_task(label, total=total)
            yield lambda steps: bar.advance(task, steps)
        return
    begin = last = time.monotonic()
    done = 0

    def advance(steps: int):
        nonlocal done, last
        done += steps
        now = time.monotonic()
        if now - last >= 10 or done >= total:
            last = now
            left = (now - begin) / done * (total - done)
            print(f"{label}: {done:,} of {total:,}, {left:.0f} s left", file=sys.stderr, flush=True)

    yield advance


class Folder:
    """A run folder that remembers finished pieces, so that an interrupted run is taken up again.

    `results.json` holds each finished piece with its configuration. A piece of another
    configuration is refused, so results of different settings are never mixed. Refused is also a
    folder with the results of another experiment, or in which another process is at work.

    Args:
      path: is created where missing.
      experiment: whose results they are.
    """

    def __init__(self, path: str | os.PathLike, experiment: str):
        self.path = pathlib.Path(path)
        self._file = self.path / "results.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".{os.getpid()}.tmp"
            probe.touch()
            probe.unlink()
            self._lock = _Lock.of(self.path)
        except OSError as error:
            raise UsageError(
                f"cannot write to {self.path}: {error.strerror}. Choose another --out"
            ) from error
        owner = _owner(self.path / "summary.json")
        if owner not in (None, experiment):
            raise UsageError(
                f"{self.path} has a summary of {owner}, which {experiment} would overwrite; "
                "choose another --out"
            )
        try:
            pieces = read_json(self._file) if self._file.exists() else {}
        except (ValueError, RecursionError):
            pieces = None
        if not isinstance(pieces, dict):
            raise UsageError(
                f"{self._file} is not a results file; move it away or choose another --out"
            )
        self._pieces: dict[str, Any] = pieces

    def get(self, piece: str, config: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a finished piece, or None.

        Raises:
          UsageError: the piece was finished with another configuration.
        """
        stored = self._pieces.get(piece)
        if stored is None:
            return None
        if not isinstance(stored, dict) or not {"config", "result"} <= stored.keys():
            raise UsageError(f"{self.path} holds results of another program; choose another --out")
        old, new = stored["config"], json.loads(json.dumps(config))
        differences = [
            f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
        if differences:
            raise UsageError(
                f"{self.path} holds {piece} of another configuration ({'; '.join(differences)}). "
                "Choose another folder with --out, or delete this one."
            )
        return stored["result"]

    def put(self, piece: str, config: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Store the result of a piece, durably, and return it as it will read back."""
        self._pieces[piece] = json.loads(json.dumps({"config": config, "result": result}))
        write_json(self._file, self._pieces)
        return self._pieces[piece]["result"]


class _Lock:
    """A folder that no other process may work in: each would undo what the other one wrote."""

    _file = -1
    _held: "weakref.WeakValueDictionary[pathlib.Path, _Lock]" = weakref.WeakValueDictionary()

    def __init__(self, path: pathlib.Path):
        import fcntl  # not on Windows

        self._file = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is at work in {path}. Wait for it, or choose another --out"
            ) from None
        except OSError:
            pass  # a file system (NFS, for one) that locks no folders

    def __del__(self):
        if self._file >= 0:
            os.close(self._file)

    @classmethod
    def of(cls, path: pathlib.Path) -> "_Lock":
        """The lock of a folder, one for all of this process."""
        path = path.resolve()
        lock = cls._held.get(path) or cls(path)
        cls._held[path] = lock
        return lock


def _owner(summary: pathlib.Path) -> str | None:
    """The experiment that wrote a summary; None where there is none, or it does not say."""
    if not summary.exists():
        return None
    try:
        found = read_json(summary)
        name = found.get("experiment")
        if name is None:  # of an older version
            name = found["provenance"]["command"].split()[2].removeprefix("experiments.")
            name = {"pate": "gep", "gep_table": "gep"}.get(name, name)
            name = name if pathlib.Path(__file__).with_name(f"{name}.py").exists() else None
        return name
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "another program"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read one JSON file."""
    return json.loads(path.read_text())


def write_json(path: pathlib.Path, content: dict[str, Any]):
    """Write a JSON file so that a reader sees the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def _commit() -> str:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


COMMIT = _commit()  # when the run started: the tree may move on while it runs


def provenance() -> dict[str, Any]:
    """Versions, commit, command and time: enough to repeat a run."""
    return {
        "command": " ".join(["python", "-m", "experiments." + pathlib.Path(sys.argv[0]).stem])
        + "".join(f" {argument}" for argument in sys.argv[1:]),
        "commit": COMMIT,
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "python": sys.version.split()[0],
        "backend": jax.default_backend(),
        "cpus": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def draw_curves(folder: pathlib.Path):
    """Draw `curves.png` from the `summary.json` of a run folder, and from nothing else."""
    from matplotlib.figure import Figure

    summary = read_json(folder / "summary.json")
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for colour, (method, row) in enumerate(summary["methods"].items()):
        style: dict[str, Any] = {
            "color": f"C{colour}",
            "label": f"{method} ({row['test_accuracy_mean']:.3f})",
        }
        if len(row["runs"][0]["curve"]) == 1:
            axes.axhline(row["test_accuracy_mean"], linestyle="--", **style)
        for run in row["runs"]:
            if len(run["curve"]) > 1:
                steps, accuracies = zip(*run["curve"], strict=True)
                axes.plot([s / steps[-1] for s in steps], accuracies, **style)
                style.pop("label", None)
    epsilon, delta = summary["epsilon"], summary["delta"]
    axes.set_title(f"{summary['dataset']}: epsilon {epsilon:g}, delta {delta:g}")
    axes.set_xlabel("share of the training steps")
    axes.set_ylabel("test accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(folder / "curves.png", dpi=150)


def command_line(args_type: type, main: Callable[[Any], dict[str, Any]]):
    """Parse the arguments, run, and print the result as one JSON object on the last line."""
    import tyro

    module = sys.modules[main.__module__]
    words = [word for word in sys.argv[1:] if word != "--debug"]
    about = f"{module.__doc__}\nErrors are one line; with --debug they show where they happened."
    if "--debug" not in sys.argv:
        logging.getLogger("absl").addFilter(_is_no_traceback_of_orbax)
    try:
        args = tyro.cli(args_type, description=about, args=words)
    except BrokenPipeError:  # of --help, whose reader has read enough
        _stop_printing()
        raise SystemExit(0) from None
    try:
        if getattr(args, "smoke", False):
            _options.check_smoke(args, getattr(module, "SMOKE", {}), words)
        result = json.dumps(main(args))
        with contextlib.suppress(BrokenPipeError):
            print(result, flush=True)
            return
        _stop_printing()
    except (UsageError, ValueError, TypeError, OSError, ArithmeticError) as error:
        if isinstance(error, BrokenPipeError):
            _stop_printing()
        if "--debug" in sys.argv:
            raise
        text = str(error)
        if not isinstance(error, UsageError):
            text = f"{(text.splitlines() or [type(error).__name__])[0]} (--debug shows where)"
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(2) from None


def _stop_printing():
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
    """Its threads log what they raise, and then it is raised for us."""
    return not (record.exc_info and "orbax" in record.pathname)
