"""A durable record of what was released, on disk BEFORE it is: it never says too little.

`ledger.jsonl` has one JSON object a line, only ever appended to. A *segment* is opened by the line
that says what determines its queries (public names and numbers, never a hash of private data), and
charged in ranges of steps, each before its noise is drawn. Steps that a resumed run repeats with
the same keys and queries are the same release, and are not charged twice. Host code.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import time
import zlib
from collections.abc import Mapping
from typing import Any

import dp_accounting as dpa

from jdp import _check, accounting
from jdp.accounting import Event, PrivacySpent
from jdp.planning import TrainingPlan

FILE = "ledger.jsonl"
_NAME = re.compile(r"\w[\w.-]*")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Part of a run in which keys and queries do not change.

    Attributes:
      number: of the segment's first line, from 0.
      run: name of the run.
      start: the first step; before it the run was another segment.
      queries: what determines the queries, by name.
      nonce: folded into all keys where the segment began, or None.
      charged: the first step that is not paid for.
      event: of the steps that are.
      statement: adjacency, accountant and delta; None where there is no plan.
    """

    number: int
    run: str
    start: int
    queries: dict[str, str]
    nonce: tuple[int, ...] | None
    charged: int
    event: Event
    statement: dict[str, Any] | None

    def differences(self, queries: Mapping[str, str]) -> list[str]:
        """What differs from these queries, in words."""
        names = sorted(self.queries.keys() | queries.keys())
        was, now = ([own.get(name, "absent") for name in names] for own in (self.queries, queries))
        pairs = zip(names, was, now, strict=True)
        return [f"{name} was {old}, now {new}" for name, old, new in pairs if old != new]


class Ledger:
    """The ledger of one folder, in which several runs may be recorded.

    It is locked for as long as it is open: a second process (or a second `Ledger`) on the folder is
    refused. A last line that a crash tore was never acknowledged, so nothing was released under it:
    it is dropped. Any other damage is an error.

    **Guarantee.** `charge` returns only when the disk has the charge; whoever draws noise after it
    cannot spend what is not recorded. What is recorded may not have been spent.

    Args:
      folder: is created where missing.
      read_only: neither lock nor write.

    Raises:
      BlockingIOError: another process has the ledger open.
      OSError: the folder cannot be read or written.
      ValueError: the file is damaged, or no ledger.

    >>> import jdp, tempfile
    >>> plan = jdp.plan(num_examples=1_000, batch_size=100, steps=50, delta=1e-5, epsilon=1.0)
    >>> with tempfile.TemporaryDirectory() as folder, jdp.Ledger(folder) as ledger:
    ...     ledger.open_segment("mine", plan, {"learning_rate": "0.1"})
    ...     ledger.charge("mine", plan, stop=10)  # now steps 0 to 9 may draw their noise
    ...     ledger.charge("mine", plan, stop=50)
    ...     spent = ledger.spent("mine")
    >>> spent.epsilon == plan.epsilon
    True
    """

    def __init__(self, folder: str | os.PathLike, *, read_only: bool = False):
        self.folder = pathlib.Path(folder)
        self.path = self.folder / FILE
        self.length = 0  # lines
        self._segments: dict[str, list[Segment]] = {}
        self._file: int | None = None
        if not read_only:
            with _explained(f"cannot open the ledger {self.path}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if self._file is not None:
                _lock(self._file, self.path)
            text = self.path.read_bytes()
            for entry in _parse(text, self.path):
                self._take(entry)
            if self._file is not None:
                with _explained(f"cannot repair the ledger {self.path}"):
                    os.ftruncate(self._file, text.rfind(b"\n") + 1)
                    os.fsync(self._file)  # its writer may have died before
                    _sync_folder(self.folder)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Ledger":
        """Return itself."""
        return self

    def __exit__(self, *_) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give the lock back; nothing can be charged after this."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(self._segments)

    def segments(self, run: str) -> tuple[Segment, ...]:
        """The segments of a run, the current one last; none where the run is not known."""
        return tuple(self._segments.get(run, ()))

    def open_segment(
        self,
        run: str,
        plan: TrainingPlan | None,
        queries: Mapping[str, str],
        *,
        start: int = 0,
        nonce: tuple[int, ...] | None = None,
    ) -> None:
        """Record that from `start` on the run's queries are determined by these, and by no others.

        Args:
          run: name of the run: letters, digits, and "-", "_" or "." after the first.
          plan: what is charged for; None for a run that reads no private data.
          queries: what determines the queries, by name.
          start: the first step.
          nonce: public words, folded into all keys of the run.

        Raises:
          ValueError: the name has other characters.
          OSError: the ledger could not be written.
        """
        check_name(run)
        statement = None
        if plan is not None:
            accountant = "rdp" if plan.spent.accountant == "rdp" else "pld"
            statement = {"adjacency": plan.adjacency, "delta": plan.delta, "accountant": accountant}
        entry = {"kind": "segment", "start": start, "nonce": nonce, "queries": dict(queries)}
        self._append(run, entry | {"statement": statement})

    def charge(self, run: str, plan: TrainingPlan, *, stop: int) -> None:
        """Charge a run's steps below `stop`; what its segment has paid for already stays paid.

        Args:
          run: name of the run, of which a segment is open.
          plan: its plan.
          stop: the first step that may NOT draw noise after this.

        Raises:
          ValueError: the plan does not pay for so many steps, or no segment is open.
          OSError: the ledger could not be written; nothing may be released.
        """
        remedy = f"The plan pays for {plan.steps} steps; plan more of them before training."
        _check.integer("stop", stop, at_least=0, at_most=plan.steps, remedy=remedy)
        if not (segments := self.segments(run)):
            _check.fail("run", f"one of {self.runs}", run, "Call open_segment first.")
        if stop > segments[-1].charged:
            event = _encode(cost(plan, segments[-1].start, stop))
            self._append(run, {"kind": "charge", "stop": stop, "event": event})

    def spent(self, run: str | None = None, *, delta: float | None = None) -> PrivacySpent:
        """What a run has spent at most, or all runs of the folder together.

        Args:
          run: name of one run; all of them by default.
          delta: in (0, 1); by default the largest among the plans.

        Returns:
          As `jdp.accounting.privacy_spent`, from the composition of all that was charged.

        Raises:
          ValueError: nothing is known of the run, or the runs' adjacencies or accountants differ.
        """
        if run is not None and run not in self.runs:
            _check.fail("run", f"one of {self.runs}", run, f"The ledger is {self.path}.")
        segments = [own for name in ([run] if run else self.runs) for own in self.segments(name)]
        charged = [(own.event, own.statement) for own in segments if own.statement]
        kinds = {(statement["adjacency"], statement["accountant"]) for _, statement in charged}
        if len(kinds) > 1:
            remedy = "Ask for one run; there is no account of all of them together."
            _check.fail("run", "of one adjacency and accountant", sorted(kinds), remedy)
        adjacency, accountant = kinds.pop() if kinds else ("zero-out", "pld")
        if delta is None:
            delta = max((float(statement["delta"]) for _, statement in charged), default=0.5)
        event = dpa.ComposedDpEvent([event for event, _ in charged])
        own: Any = {"accountant": accountant, "adjacency": adjacency}
        return accounting.privacy_spent(event, delta=float(delta), **own)

    def _append(self, run: str, entry: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError(
                f"`{self.path}` must be open, but got closed or read-only. Nothing was released; "
                "open it with jdp.Ledger(folder), and resume."
            )
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        entry = {"number": self.length, "run": run, "time": when} | entry
        line = _line(entry)
        try:
            with _explained(f"cannot write to the ledger {self.path}, so nothing was released"):
                _write(self._file, line)
        except BaseException:
            self.close()  # what the disk has is not known: read it again
            raise
        self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        """Follow a line that the disk has."""
        run, number = entry["run"], self.length
        self.length += 1
        own = self._segments.setdefault(run, [])
        if entry["kind"] == "charge":
            event = _decode(entry["event"])
            own[-1] = dataclasses.replace(own[-1], charged=entry["stop"], event=event)
            return
        nonce = tuple(entry["nonce"]) if entry["nonce"] else None
        start, rest = entry["start"], (dpa.NoOpDpEvent(), entry["statement"])
        own.append(Segment(number, run, start, entry["queries"], nonce, start, *rest))


def check_name(run: str) -> str:
    """Return the name of a run, which also names a folder."""
    if not isinstance(run, str) or not _NAME.fullmatch(run):
        expected = 'letters, digits, and "-", "_" or "." after the first'
        _check.fail("run", expected, run, "Take a plain name.")
    return run


def cost(plan: TrainingPlan, start: int, stop: int) -> Event:
    """The event of a run's steps in a range; all of it where the plan is no sequence of steps.

    A record that is seen once an epoch is seen once more where the range begins within an epoch.

    >>> import jdp
    >>> plan = jdp.plan(10, 5, 8, noise_multiplier=1.0, delta=1e-5, sampling="fixed-batches")
    >>> cost(plan, 0, 4).count, cost(plan, 1, 3).count  # epochs have two steps
    (2, 2)
    """
    if type(plan) is not TrainingPlan:
        return plan.event
    skipped = start % getattr(plan.sampler, "steps_per_epoch", 1)
    return plan.sampler.event(float(plan.noise_multiplier), stop - start + skipped)


def _encode(event: Any) -> Any:
    """An event as plain values: its class, and its fields."""
    if isinstance(event, dpa.DpEvent):
        names = [field.name for field in type(event).__attrs_attrs__]  # pyright: ignore
        own = {name: _encode(getattr(event, name)) for name in names}
        return {"type": type(event).__name__, **own}
    return [_encode(part) for part in event] if isinstance(event, list) else event


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _decode(part) for name, part in value.items() if name != "type"}
        return getattr(dpa, value["type"])(**fields)
    return [_decode(part) for part in value] if isinstance(value, list) else value


def _line(entry: dict[str, Any]) -> bytes:
    """A line, with a check sum of its (public) text."""
    text = json.dumps(entry, sort_keys=True)
    checked = json.loads(text) | {"check": zlib.crc32(text.encode())}
    return json.dumps(checked, sort_keys=True).encode() + b"\n"


def _parse(text: bytes, path: pathlib.Path) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(text.splitlines(keepends=True)):
        if not line.endswith(b"\n"):
            break  # torn: never acknowledged
        try:
            entry = json.loads(line)
            del entry["check"]
            assert _line(entry) == line and entry["number"] == number
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(
                f"line {number + 1} of {path} is damaged, so what was released is not known. "
                "Restore the file from a copy, or take another folder (and add up by hand)."
            ) from error
        entries.append(entry)
    return entries


def _write(file: int, line: bytes) -> None:
    """Append a line and sync it, or leave the file as it was."""
    end = os.fstat(file).st_size
    try:
        rest = line
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file, end)
        raise


def _lock(file: int, path: pathlib.Path) -> None:
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            f"another process is at work in {path.parent} and has its ledger locked. Wait for it, "
            "or take another folder",
        ) from None


def _sync_folder(folder: pathlib.Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _explained(what: str):
    """Say what an operating-system error meant for the ledger."""
    try:
        yield
    except OSError as error:
        remedy = "Choose another folder, or change its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free some space, and run again"
        text = f"{what}: {error.strerror or error}. {remedy}"
        raise OSError(error.errno, text) from error
