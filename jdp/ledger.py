"""A durable record of what was released, on disk BEFORE it is: it never says too little.

`ledger.jsonl` has one JSON object a line, only ever appended to. A *segment* is opened by the line
that says what determines its queries (public names and numbers, never a hash of private data), and
charged in ranges of steps, each before its noise is drawn. Steps that a resumed run repeats with
the same keys and queries are the same release, and are not charged twice. Host code.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import dp_accounting as dpa
import numpy as np

from jdp import _check, accounting
from jdp._journal import Journal
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
      statement: adjacency, accountant, delta and all else that decides what a step costs; None
        where there is no plan.
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
    refused, and so is every charge once the file was removed or replaced. A last line that a crash
    tore was never acknowledged, so nothing was released under it: it is dropped, with a warning.
    Any other damage is an error.

    **Guarantee.** `charge` returns only when the disk has the charge; whoever draws noise after it
    cannot spend what is not recorded. What is recorded may not have been spent.

    Args:
      folder: is created where missing.
      read_only: neither lock nor write.

    Raises:
      BlockingIOError: another process has the ledger open.
      OSError: the folder cannot be read or written.
      ValueError: the file is damaged, no ledger, or of another version of jdp.

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
        self.folder = _check.path("folder", folder)
        _check.boolean("read_only", read_only)
        self.path = self.folder / FILE
        self._segments: dict[str, list[Segment]] = {}
        self._journal = Journal(self.path, read_only=read_only)
        try:
            for entry in self._journal.entries:
                self._read(entry)
        except BaseException:
            self.close()
            raise
        self._journal.entries.clear()  # a long run has many

    def __enter__(self) -> "Ledger":
        """Return itself."""
        return self

    def __exit__(self, *_) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give the lock back; nothing can be charged after this."""
        self._journal.close()

    @property
    def length(self) -> int:
        """Number of lines."""
        return self._journal.length

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(self._segments)

    def segments(self, run: str) -> tuple[Segment, ...]:
        """The segments of a run, the current one last; none where the run is not known."""
        if not isinstance(run, str):
            _check.fail("run", "the name of a run", run, f"Known are {self.runs}.", TypeError)
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
          start: the first step; at most the plan's number of steps.
          nonce: public words of 32 bits, folded into all keys of the run.

        Raises:
          ValueError: the name has other characters, adjacency or accountant changed, or a number
            is out of range.
          OSError: the ledger could not be written.
        """
        check_name(run)
        _check_plan(plan)
        if not isinstance(queries, Mapping) or not all(
            isinstance(part, str) for pair in queries.items() for part in pair
        ):
            remedy = "Write down in words what determines the queries: {'learning_rate': '0.1'}."
            _check.fail("queries", "a dictionary of strings", queries, remedy, TypeError)
        most = 2**53 if plan is None else plan.steps
        remedy = "Count steps from 0, no further than the plan."
        start = _check.integer("start", start, at_least=0, at_most=most, remedy=remedy)
        statement = _statement(plan) if plan is not None else None
        for own in self.segments(run):
            was, now = (_account(part) for part in (own.statement, statement))
            if was and now and was != now:
                remedy = "One run has one account: begin in another folder."
                _check.fail("plan", f"of {was}", now, remedy)
        entry = {
            "kind": "segment",
            "start": start,
            "nonce": _words(nonce),
            "queries": dict(queries),
        }
        self._take(self._journal.append(entry | {"run": run, "statement": statement}))

    def charge(self, run: str, plan: TrainingPlan, *, stop: int) -> None:
        """Charge a run's steps below `stop`; what its segment has paid for already stays paid.

        Args:
          run: name of the run, of which a segment is open.
          plan: that of the segment.
          stop: the first step that may NOT draw noise after this.

        Raises:
          ValueError: the plan is another one than the segment's, it does not pay for so many steps,
            or no segment is open.
          OSError: the ledger could not be written; nothing may be released.
        """
        _check_plan(plan, required=True)
        remedy = f"The plan pays for {plan.steps} steps; plan more of them before training."
        stop = _check.integer("stop", stop, at_least=0, at_most=plan.steps, remedy=remedy)
        segments = self.segments(run)
        if not segments or segments[-1].statement is None:
            expected = f"one of {self.runs} that has a plan"
            _check.fail("run", expected, run, "Call open_segment first, with the plan.")
        own, said = _statement(plan), segments[-1].statement or {}
        if differences := [name for name in own if own[name] != said.get(name)]:
            expected = f"the one of the segment, whose {' and '.join(differences)} differs"
            remedy = "Charge with the plan of open_segment; another one needs a segment of its own."
            _check.fail("plan", expected, plan, remedy)
        if stop > segments[-1].charged:
            event = _encode(cost(plan, segments[-1].start, stop))
            entry = {"run": run, "kind": "charge", "stop": stop, "event": event}
            self._take(self._journal.append(entry))

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
        if run is not None and check_name(run) not in self.runs:
            _check.fail("run", f"one of {self.runs}", run, f"The ledger is {self.path}.")
        if delta is not None:
            delta = _check.delta(delta)
        names = self.runs if run is None else [run]
        segments = [own for name in names for own in self.segments(name)]
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
        return accounting.privacy_spent(event, delta=delta, **own)

    def _read(self, entry: dict[str, Any]) -> None:
        """Follow a line that somebody wrote, maybe another version of jdp."""
        try:
            self._take(entry)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"line {entry['number'] + 1} of {self.path} is whole, but says what this version "
                "of jdp does not know. Read it with the version that wrote it, or take another "
                "folder (and add up by hand)."
            ) from error

    def _take(self, entry: dict[str, Any]) -> None:
        """Follow a line that the disk has."""
        run, kind = check_name(entry["run"]), entry["kind"]
        if kind == "charge":
            own = self._segments[run]
            event, stop = _decode(entry["event"]), _count(entry["stop"])
            own[-1] = dataclasses.replace(own[-1], charged=stop, event=event)
            return
        if kind != "segment":
            raise ValueError(kind)
        start, statement, queries = _count(entry["start"]), entry["statement"], entry["queries"]
        _account(statement)
        nonce = tuple(_words(entry["nonce"]) or ()) or None
        paid = (start, dpa.NoOpDpEvent(), statement)
        segment = Segment(entry["number"], run, start, dict(queries), nonce, *paid)
        self._segments.setdefault(run, []).append(segment)


def check_name(run: str, argument: str = "run") -> str:
    """Return the name of a run, which also names a folder."""
    if not isinstance(run, str) or not _NAME.fullmatch(run):
        expected = 'letters, digits, and "-", "_" or "." after the first'
        _check.fail(argument, expected, run, "Take a plain name.")
    return run


def _check_plan(plan: Any, *, required: bool = False) -> None:
    if not isinstance(plan, TrainingPlan) and (required or plan is not None):
        expected = "a jdp.TrainingPlan" + ("" if required else ", or None")
        _check.fail("plan", expected, plan, "Call jdp.plan.", TypeError)


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


def _statement(plan: TrainingPlan) -> dict[str, Any]:
    """All that decides what a range of steps costs, as plain values."""
    return {
        "adjacency": plan.adjacency,
        "delta": float(plan.delta),
        "accountant": "rdp" if plan.spent.accountant == "rdp" else "pld",
        "plan": type(plan).__name__,
        "sampler": repr(plan.sampler),
        "steps": int(plan.steps),
        "noise_multiplier": float(plan.noise_multiplier),
        "event": _encode(plan.event),
    }


def _account(statement: dict[str, Any] | None) -> dict[str, str]:
    return {name: statement[name] for name in ("adjacency", "accountant")} if statement else {}


def _words(nonce: Any) -> list[int] | None:
    """A nonce as plain integers."""
    if nonce is None:
        return None
    fits = isinstance(nonce, tuple | list) and len(nonce) > 0
    if not fits or not all(_check.is_static_integer(word) and 0 <= word < 2**32 for word in nonce):
        expected = "None, or a tuple of integers >= 0 and < 2**32"
        _check.fail("nonce", expected, nonce, "Take two random ones.")
    return [int(word) for word in nonce]


def _count(value: Any) -> int:
    return _check.integer("step", value, at_least=0, remedy="Count steps from 0.")


def _encode(event: Any) -> Any:
    """An event as plain values: its class, and its fields."""
    if isinstance(event, dpa.DpEvent):
        names = [field.name for field in type(event).__attrs_attrs__]  # pyright: ignore
        own = {name: _encode(getattr(event, name)) for name in names}
        return {"type": type(event).__name__, **own}
    if isinstance(event, list | tuple):
        return [_encode(part) for part in event]
    return event.item() if isinstance(event, np.generic) else event


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _decode(part) for name, part in value.items() if name != "type"}
        kind = vars(dpa)[value["type"]]
        if not issubclass(kind, dpa.DpEvent):
            raise TypeError(kind)
        return kind(**fields)
    return [_decode(part) for part in value] if isinstance(value, list) else value
