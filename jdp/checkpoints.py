"""Runs that can be killed at any moment, and resumed: the same release, or one that is paid for.

A resumed run repeats the steps since its last checkpoint. With the same keys and the same queries
that is the same release, and costs nothing. With the same keys and OTHER queries it is a disaster:
subtract the two, and the noise is gone. So a run goes on only under an unchanged description of all
that determines its queries; else it refuses, or takes new keys and pays for these steps again.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jdp import _check, _queries, _store
from jdp._queries import Program
from jdp._typing import PyTree
from jdp.ledger import Ledger, check_name
from jdp.planning import TrainingPlan

FOLDER = "checkpoints"
_AT_WORK: "weakref.WeakValueDictionary[tuple[int, str], ResumableRun]"
_AT_WORK = weakref.WeakValueDictionary()  # by ledger and name


class ResumableRun:
    """A training run with a ledger and checkpoints, for a loop of your own.

    **Guarantee.** Steps are charged to the ledger, on disk, before the loop sees them, and steps
    past the plan never appear. The keys are on disk before the first charge. A run that was killed
    goes on from its last checkpoint with the same keys, batches and queries, is the same release,
    and ends bit-equal to an uninterrupted one where the computation itself is reproducible (on one
    CPU it is). Queries that changed are refused with the difference named. What the description of
    the queries cannot see must be named in `data` and `config`: the contents of arrays that the
    program closes over (data, public images; scalars are compared by value), what a host callback
    (`jax.pure_callback`, `jax.experimental.io_callback`) does, and code that runs outside it.

    **Secret.** A checkpoint holds the keys of noise and sampling: whoever reads it undoes the
    privacy. They lie in folders of mode 0700; `discard` them when the run is over. A second run of
    the same name on the same open ledger ends the first, which then neither charges nor saves.

    Args:
      ledger: an open `jdp.Ledger`; checkpoints go to its folder too.
      plan: of the run; None for one that reads no private data and is not charged.
      state: a pytree of everything that a step reads and changes, at step 0: parameters, optimizer
        state (which has the noise key), sampling key, and no key left outside. Where there is a
        checkpoint, only its structure and placement are used.
      program: `(step, state) -> state`, ONE step, which is traced, not run; or the text of a
        jaxpr, where a step cannot be traced as a whole.
      data: public name and version of the data.
      config: anything else that determines the queries, by name; plain values, none of them
        computed from private data.
      name: of the run, in the ledger.
      steps: how many, where there is no plan.
      save_every: seconds between checkpoints; the last step has one in any case.
      keep: how many checkpoints to keep.
      as_new: where queries changed (or the checkpoint is lost), fold a fresh nonce into all keys of
        the state, and charge the steps since the checkpoint again. Without a change, it is ignored.

    Attributes:
      state: of the run; the loop sets it.
      step: how many steps the state has taken.
      notes: a dictionary of plain values that is saved and restored with the state.

    Raises:
      ValueError: the queries changed and `as_new` is False; the state has fewer than two keys, or
        the program closes over one; the ledger has lost lines; or the state does not fit the
        checkpoint.
      OSError: the folder cannot be read or written.

    >>> import jax, jax.numpy as jnp, jdp, optax, tempfile
    >>> x = jnp.ones((100, 2))
    >>> plan = jdp.plan(num_examples=100, batch_size=10, steps=6, epsilon=1.0, delta=1e-3)
    >>> grad = jdp.clipped_grad(lambda w, example: w @ example, jdp.clip_by_norm(1.0))
    >>> tx = jdp.privatize(plan.noise_multiplier, batch_size=10, key=jdp.secure_key())
    >>> def step(i, state):
    ...     w, noise, key = state
    ...     rows, mask = plan.batch(key, i)
    ...     updates, noise = tx.update(grad(w, x[rows], mask=mask), noise, w)
    ...     return w - updates, noise, key
    >>> def fit(folder):
    ...     state = jnp.zeros(2), tx.init(jnp.zeros(2)), jdp.secure_key()
    ...     with jdp.Ledger(folder) as ledger:
    ...         run = jdp.ResumableRun(ledger, plan, state, step, data="ones, version 1")
    ...         for start, stop in run.chunks(3):
    ...             run.state = jax.lax.fori_loop(start, stop, step, run.state)
    ...         return run.state[0], ledger.spent().epsilon <= 1
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (first, _), (again, within) = fit(folder), fit(folder)  # the second finds it finished
    >>> bool((first == again).all()), within
    (True, True)
    """

    def __init__(
        self,
        ledger: Ledger,
        plan: TrainingPlan | None,
        state: PyTree,
        program: Program,
        *,
        data: str,
        config: Mapping[str, Any] | None = None,
        name: str = "run",
        steps: int | None = None,
        save_every: float = 60.0,
        keep: int = 3,
        as_new: bool = False,
    ):
        _check_arguments(ledger, plan, state, steps, as_new)
        if not isinstance(program, str) and not callable(program):
            remedy = "Pass the function that takes ONE step."
            expected = "a function (step, state) -> state, or the text of a jaxpr"
            _check.fail("program", expected, program, remedy, TypeError)
        if config is not None and not isinstance(config, Mapping):
            remedy = "Name what else determines the queries: {'learning_rate': 0.1}."
            _check.fail("config", "a dictionary", config, remedy, TypeError)
        self._ledger, self._plan, self._name = ledger, plan, check_name(name, "name")
        self._steps = steps if plan is None else plan.steps
        remedy = "60 loses a minute at most; 0 saves after every chunk."
        self._seconds = _check.number("save_every", save_every, at_least=0, remedy=remedy)
        keep = _check.integer("keep", keep, at_least=1, remedy="Three are plenty.")
        queries = _queries.describe(plan, program, state, data, config or {})
        if (earlier := _AT_WORK.get((id(ledger), name))) is not None:
            earlier._leave()
        _AT_WORK[id(ledger), name] = self
        self._ended = False
        self._store = _store.Store(ledger.folder / FOLDER / name, keep)
        try:
            found = self._store.newest()
            self.step, self.notes, self._over, self._saved = 0, {}, False, time.monotonic()
            if found is None:
                self.state = self._begin(state, queries, as_new)
            else:
                self.state = self._resume(*found, state, queries, as_new)
        except BaseException:
            self._store.close()
            raise

    @property
    def steps(self) -> int:
        """How many steps the run has."""
        return self._steps  # pyright: ignore[reportReturnType]

    def _begin(self, state: PyTree, queries: dict[str, str], as_new: bool) -> PyTree:
        """Open the first segment, and have the keys on disk before anything can be charged."""
        segments = self._ledger.segments(self._name)
        charged = max((own.charged for own in segments if own.charged > own.start), default=0)
        if charged and not as_new:
            lost = f"steps below {charged} may have been released, but their checkpoint is gone"
            _refuse(self._name, self._ledger, [lost])
        nonce = _nonce() if charged else None
        if charged or not segments or segments[-1].differences(queries):
            self._ledger.open_segment(self._name, self._plan, queries, nonce=nonce)
        self.state = _store.fold(state, nonce)
        self._segment = self._ledger.segments(self._name)[-1].number
        self._save()
        self._store.wait()
        return self.state

    def _resume(self, about, leaves, state: PyTree, queries: dict[str, str], as_new: bool):
        """Take a checkpoint up, in its own segment or in a new one."""
        segments = self._ledger.segments(self._name)
        if about["lines"] > self._ledger.length or not segments:
            raise ValueError(
                f"{self._ledger.path} has {self._ledger.length} lines, but the checkpoint of "
                f"{self._name} saw {about['lines']}: lines are lost, and with them what was "
                "released. Restore the file from a copy."
            )
        self.step, self.notes = about["step"], about["notes"]
        current = segments[-1]
        differences = current.differences(queries)
        nonce = None
        if about["segment"] != current.number:
            nonce = current.nonce
            if current.start != self.step:
                differences.append(f"checkpoints since step {current.start} are gone")
        if differences:
            if not as_new:
                _refuse(self._name, self._ledger, differences)
            nonce = _nonce()
        taken = _store.fold(_store.fit(leaves, about["leaves"], state), nonce)
        if differences:
            own = {"start": self.step, "nonce": nonce}
            self._ledger.open_segment(self._name, self._plan, queries, **own)
        self._segment = self._ledger.segments(self._name)[-1].number
        return taken

    def chunks(self, every: int) -> Iterator[tuple[int, int]]:
        """Charge and yield the ranges of steps that are left, and save now and then.

        The body must take exactly these steps, and set `state`. After an exception or a `break` the
        run is over: whoever wants to go on makes a new one, from the last checkpoint.

        Args:
          every: steps of a range; the last may have fewer.

        Yields:
          (start, stop): steps start, ..., stop - 1.

        Raises:
          ValueError: the body did not set `state`, or the run is over, or another one of its name
            began on the same ledger.
          OSError: ledger or checkpoint could not be written.
        """
        remedy = "Charges and checkpoints come between chunks; a second's worth of steps is fine."
        _check.integer("every", every, at_least=1, remedy=remedy)
        if self._over:
            remedy = "Make another ResumableRun, which goes on from the last checkpoint."
            _check.fail("run", "at a checkpoint", _check.Words("one that was left"), remedy)
        self._over = True
        try:
            while self.step < self.steps:
                stop, before = min(self.step + every, self.steps), self.state
                self._check_newest()
                if self._plan is not None:
                    self._ledger.charge(self._name, self._plan, stop=stop)
                yield self.step, stop
                self._check_newest()
                if self.state is before:
                    remedy = "Set run.state in the body; a step taken twice repeats its noise."
                    got = _check.Words("the one of before")
                    _check.fail("run.state", "new after each chunk", got, remedy)
                self.step = stop
                if stop == self.steps or time.monotonic() - self._saved >= self._seconds:
                    self._save()
            self._store.wait()
        finally:
            self._store.close()

    def discard(self) -> None:
        """Delete the checkpoints, and the keys in them. The ledger stays.

        Raises:
          OSError: some of them could not be deleted; the keys are still there.
        """
        self._over = True
        self._store.delete()

    def _leave(self) -> None:
        """End, because another one of this name begins; what is being written is completed."""
        self._over = self._ended = True
        with contextlib.suppress(OSError):
            self._store.close()

    def _check_newest(self) -> None:
        """Refuse to pay from, or save as, what another run of this name began."""
        segment = self._ledger.segments(self._name)[-1].number
        if self._ended or segment != self._segment:
            remedy = "Go on with the newer one; what this one still holds is paid for, not saved."
            got = _check.Words("one that a newer one took over from")
            _check.fail("run", "the newest of its name on its ledger", got, remedy)

    def _save(self) -> None:
        about = {"step": self.step, "notes": self.notes, "lines": self._ledger.length}
        about["segment"] = self._segment
        self._store.save(self.state, about)
        self._saved = time.monotonic()


def discard(folder: str | os.PathLike, name: str = "run") -> None:
    """Delete the checkpoints of a run in a ledger's folder, and the keys in them.

    Raises:
      OSError: some of them could not be deleted; the keys are still there.
    """
    _store.delete(_check.path("folder", folder) / FOLDER / check_name(name, "name"))


def _check_arguments(ledger, plan, state, steps, as_new) -> None:
    if not isinstance(ledger, Ledger):
        remedy = "Open one with jdp.Ledger(folder)."
        _check.fail("ledger", "a jdp.Ledger", ledger, remedy, TypeError)
    if plan is not None and not isinstance(plan, TrainingPlan):
        _check.fail("plan", "a jdp.TrainingPlan or None", plan, "Call jdp.plan.", TypeError)
    if (steps is None) == (plan is None):
        _check.fail("steps", "given if and only if plan is None", steps, "A plan has its own.")
    if steps is not None:
        _check.integer("steps", steps, at_least=1, remedy="Count optimizer steps as an integer.")
    _check.boolean("as_new", as_new)
    if jax.process_count() > 1:
        got = _check.Words(f"{jax.process_count()}")
        _check.fail("jax.process_count()", "1", got, "Only one process can be resumed so far.")
    if _store.has_system_noise(state):
        remedy = "Steps that are taken again must repeat their noise: take jdp.secure_key()."
        _check.fail("state", "without keys of system_noise", _check.Words("one of them"), remedy)
    keys = _store.distinct_keys(state)
    if plan is not None and keys < 2:
        remedy = "Put the optimizer's state and the sampling key there, so that both are saved."
        got = _check.Words(f"{keys}")
        _check.fail("state", "a pytree with two keys or more, of noise and sampling", got, remedy)


def _refuse(name: str, ledger: Ledger, differences: list[str]) -> None:
    raise ValueError(
        f"`{name}` in {ledger.folder} must be resumed as it began, but {'; '.join(differences)}. "
        "The same noise on other queries would cancel out. Undo the change, begin in another "
        "folder, or resume as new: with new keys, and the steps since the checkpoint charged again."
    )


def _nonce() -> tuple[int, ...]:
    return tuple(int(word) for word in np.frombuffer(os.urandom(8), np.uint32))
