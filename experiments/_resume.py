"""Runs of `experiments.gep` that can be killed and resumed, by `jdp.Ledger` and checkpoints."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jdp
from experiments import _run
from experiments._run import Keys, UsageError

Resume: TypeAlias = Callable[[Any, str], Any]
"""`(state at step 0, text of the program) -> a jdp.ResumableRun`."""


class Unsaved:
    """What a run uses of `jdp.ResumableRun`, where nothing is to be saved."""

    def __init__(self, state: Any, steps: int):
        self.state, self.steps, self.step = state, steps, 0
        self.notes: dict[str, Any] = {}

    def chunks(self, every: int) -> Iterator[tuple[int, int]]:
        """Ranges of steps."""
        for start in range(0, self.steps, every):
            yield start, min(start + every, self.steps)


def once(
    work: Callable[[Keys], dict[str, Any]], keys: Keys, resume: Resume | None, program: str
) -> dict[str, Any]:
    """The result of a method that releases everything at once, and takes no steps."""
    saved = resume(keys, program) if resume else Unsaved(keys, 1)
    for _ in saved.chunks(saved.steps):
        saved.notes["result"] = work(saved.state)
        saved.state = Keys(*saved.state)
    return saved.notes["result"]


def accounted(method: str, plan: Any, size: int, steps: int, delta: float, z: float | None) -> Any:
    """What is charged for a run: its plan; None where no private data are read.

    Args:
      method: its name.
      plan: the method's own plan, if it has one.
      size: number of private records.
      steps: of the method.
      delta: of the statement.
      z: noise multiplier of a method without a plan: of one release, or 0 for no privacy at all.
    """
    if plan is not None or z is None:
        return plan
    steps = 1 if method == "class-means" else steps
    return jdp.plan(size, size, steps, delta=delta, noise_multiplier=z, sampling="fixed-batches")


@contextlib.contextmanager
def open_ledger(folder: _run.Folder) -> Iterator[jdp.Ledger]:
    """The ledger of a run folder, locked for this process."""
    with explained():
        ledger = jdp.Ledger(folder.path)
    with ledger:
        yield ledger


def resumable(
    ledger: jdp.Ledger, plan: Any, config: dict[str, Any], steps: int, **options: Any
) -> Resume:
    """How a run of a method is taken up; the options are those of `jdp.ResumableRun`."""

    def resume(state: Any, program: str) -> jdp.ResumableRun:
        known = {key: value for key, value in config.items() if key != "data"}
        own: Any = {"config": known, "data": config["data"]} | options
        own |= {"steps": steps} if plan is None else {}
        with explained():
            return jdp.ResumableRun(ledger, plan, state, program, **own)

    return resume


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn refusals of ledger and checkpoints into usage errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        text = str(getattr(error, "strerror", None) or error)
        raise UsageError(text.replace("resume as new", "resume with --resume-as-new")) from error


@dataclasses.dataclass(frozen=True)
class Spent:
    """What the runs of a method cost: epsilon of the dearest, and a line for the statement."""

    epsilon: float | None
    line: str = ""


def spent(ledger: jdp.Ledger, pieces: list[str], planned: float | None) -> Spent:
    """What was planned, or what the ledger says where a run was resumed as new."""
    again = [piece for piece in pieces if len(ledger.segments(piece)) > 1]
    charged = [own for own in again if any(s.statement for s in ledger.segments(own))]
    if planned is None or not charged:
        return Spent(planned)
    epsilon = max(ledger.spent(piece).epsilon for piece in charged)
    names = ", ".join(charged)
    line = f"Resumed as new: {names}; with the steps that were charged again, epsilon {epsilon:.6g}"
    return Spent(max(planned, epsilon), f"\n{line}")
