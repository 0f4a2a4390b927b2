"""Killed at any moment, a run ends as if it had not been, or it is refused, or it pays again."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import random
import resource
import shutil
import stat
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from experiments import _run, gep
from experiments._run import UsageError
from jdp import _queries, _store, checkpoints
from jdp.ledger import Ledger

ROOT = pathlib.Path(__file__).parents[1]
X = jax.random.normal(jax.random.key(1), (60, 4))
PLAN = jdp.plan(num_examples=60, batch_size=20, steps=6, noise_multiplier=1.0, delta=1e-3)
KEYS = jax.random.split(jax.random.key(5))
OTHERS = tuple(jax.random.split(jax.random.key(6)))


class Killed(Exception):
    pass


def _loss(w, example):
    return 0.5 * (w @ example - 0.5) ** 2


def _program(plan=PLAN, loss=_loss, clip_norm=1.0, rate=0.1, data=X, batch_size=20):
    grad = jdp.clipped_grad(loss, jdp.clip_by_norm(clip_norm))

    def begin(keys):
        tx = jdp.privatize(plan.noise_multiplier, batch_size=batch_size, key=keys[0])
        return jnp.zeros(4), tx.init(jnp.zeros(4)), keys[1]

    def step(i, state):
        w, inner, key = state
        rows, mask = plan.batch(key, i)
        tx = jdp.privatize(plan.noise_multiplier, batch_size=batch_size, key=OTHERS[0])
        update, inner = tx.update(grad(w, data[rows], mask=mask), inner, w)
        return w - rate * update, inner, key

    return begin, step


PROGRAM = _program()
STEP = jax.jit(PROGRAM[1])


def _train(folder, keys=OTHERS, program=None, plan=PLAN, kill_at=None, every=2, **options):
    """Train in a folder; returns the parameters after every chunk of this attempt."""
    begin, step = program or PROGRAM
    take = STEP if program is None else jax.jit(step)
    options = {"data": "noise, version 1", "save_every": 0.0} | options
    path = []
    with Ledger(folder) as ledger:
        run = jdp.ResumableRun(ledger, plan, begin(keys), step, **options)
        for start, stop in run.chunks(every):
            state = run.state
            for i in range(start, stop):
                state = take(i, state)
            if kill_at is not None and stop > kill_at:
                raise Killed  # after the release, before it is saved
            run.state = state
            path.append(np.asarray(state[0]))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("whole"), keys=KEYS)


@pytest.fixture
def killed(tmp_path):
    """A run that was killed in step 3, with a checkpoint at step 2."""
    with pytest.raises(Killed):
        _train(tmp_path, keys=KEYS, kill_at=2)
    return tmp_path


def _spent(folder):
    return Ledger(folder, read_only=True).spent("run")


@pytest.mark.parametrize("kill_at", [0, 1, 2, 4, 5])
def test_a_resumed_run_ends_bit_equal_and_pays_once(kill_at, whole, tmp_path):
    with pytest.raises(Killed):
        _train(tmp_path, keys=KEYS, kill_at=kill_at)
    assert Ledger(tmp_path, read_only=True).segments("run")[-1].charged > kill_at
    np.testing.assert_array_equal(_train(tmp_path)[-1], whole[-1])
    assert _spent(tmp_path) == PLAN.spent
    assert _train(tmp_path) == []  # it is finished


def test_it_may_be_killed_again_and_resumed_in_other_chunks(killed, whole):
    for kill_at in (2, 4, 4):
        with pytest.raises(Killed):
            _train(killed, kill_at=kill_at)
    np.testing.assert_array_equal(_train(killed, every=5)[-1], whole[-1])
    assert _spent(killed) == PLAN.spent


@jax.jit
def _without_noise(w, key):
    """What step 1 would release if there were no noise."""
    rows, mask = PLAN.batch(key, 1)
    total = jdp.clipped_grad(_loss, jdp.clip_by_norm(1.0))(w, X[rows], mask=mask)
    return jdp.add_noise(key, total, 0.0) / 20


def test_the_attack_noise_cancels_under_naive_replay():
    releases, private = [], []
    for rate in (0.1, 2.0):
        step = jax.jit(_program(rate=rate)[1])
        one = step(0, PROGRAM[0](KEYS))
        releases.append(np.asarray(one[0] - step(1, one)[0]) / rate)  # what step 1 released
        private.append(np.asarray(_without_noise(one[0], one[2])))
    difference, private = releases[0] - releases[1], private[0] - private[1]
    std = PLAN.noise_multiplier / 20
    np.testing.assert_allclose(difference, private, atol=3e-3 * std)  # nothing is hidden
    assert np.linalg.norm(private) > 0.1 * std


def test_the_attack_fails_refused_or_with_new_noise_and_a_new_charge(killed):
    other = _program(rate=2.0)
    before = (killed / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="must be resumed as it began, but program was .* cancel"):
        _train(killed, program=other)
    assert (killed / "ledger.jsonl").read_bytes() == before
    shutil.copytree(killed, killed / "old")
    shutil.copytree(killed, killed / "new", ignore=shutil.ignore_patterns("old"))
    old = _train(killed / "old", every=1)
    new = _train(killed / "new", program=other, as_new=True, every=1)
    assert len(old) == len(new) == 4  # both begin at step 2, with the same parameters
    std = PLAN.noise_multiplier / 20
    first = [own[0] - own[1] for own in (old, new)]
    difference = first[0] / 0.1 - first[1] / 2.0
    assert np.linalg.norm(difference) > 0.5 * std
    assert _spent(killed / "old") == PLAN.spent
    again = _spent(killed / "new").epsilon
    steps = [PLAN.sampler.event(1.0, n) for n in (4, 4)]  # 4 were charged, and 2 to 5 again
    event = jdp.accounting.dpa.ComposedDpEvent(steps)
    assert again == jdp.accounting.privacy_spent(event, delta=1e-3).epsilon > PLAN.epsilon


def test_a_run_that_was_resumed_as_new_is_itself_resumed(killed):
    other = _program(rate=2.0)
    shutil.copytree(killed, killed / "copy")
    with pytest.raises(Killed):
        _train(killed, program=other, as_new=True, kill_at=2)  # no checkpoint of its own yet
    lines = (killed / "ledger.jsonl").read_bytes().count(b"\n")
    first, second = Ledger(killed, read_only=True).segments("run")
    assert (first.charged, second.start, second.charged) == (4, 2, 4)
    end = _train(killed, program=other)
    assert (killed / "ledger.jsonl").read_bytes().count(b"\n") == lines + 1
    other_nonce = _train(killed / "copy", program=other, as_new=True)
    assert not np.array_equal(end[-1], other_nonce[-1])
    assert _spent(killed) == _spent(killed / "copy")
    assert len(Ledger(killed, read_only=True).segments("run")) == 2


def _with(patch):
    return lambda monkeypatch: patch(monkeypatch) or {}


def _version(monkeypatch):
    version = _queries.importlib.metadata.version
    monkeypatch.setattr(
        _queries.importlib.metadata,
        "version",
        lambda name: "0.0" if name == "jaxlib" else version(name),
    )


LONGER = jdp.plan(num_examples=60, batch_size=20, steps=7, noise_multiplier=1.0, delta=1e-3)
CHANGES = {
    "program": {"program": _program(rate=0.1001)},
    "program ": {"program": _program(clip_norm=2.0)},
    "program  ": {"program": _program(loss=lambda w, example: jnp.abs(w @ example - 3.0))},
    "program   ": {"program": _program(batch_size=21)},
    "plan.steps was 6, now 7": {"program": _program(LONGER), "plan": LONGER},
    'data was "?noise': {"data": "noise, version 2"},
    "config.layers was absent, now 3": {"config": {"layers": 3}},
    "jaxlib was .* now 0.0": _with(_version),
    "backend was cpu, now gpu": _with(
        lambda m: m.setattr(_queries.jax, "default_backend", lambda: "gpu")
    ),
    "devices was 1, now 8": _with(lambda m: m.setattr(_queries.jax, "device_count", lambda: 8)),
    "device kind was": _with(lambda m: m.setattr(_queries.os, "sched_getaffinity", lambda _: [])),
    "XLA_FLAGS was": _with(lambda m: m.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")),
}


@pytest.mark.parametrize("message", CHANGES)
def test_whatever_changed_is_named(message, killed, monkeypatch):
    change = CHANGES[message]
    options = change(monkeypatch) if callable(change) else change
    with pytest.raises(ValueError, match=f"must be resumed as it began, but .*{message.strip()}"):
        _train(killed, **options)


def test_queries_are_described_without_any_hash_of_the_data():
    begin, step = PROGRAM
    text = _queries.program_text(step, begin(KEYS))
    other = _queries.program_text(_program(data=X * 2 + 1)[1], begin(OTHERS))
    assert text == other  # the contents of what is closed over, and of the state, are no part of it
    assert text != _queries.program_text(_program(data=X[:59])[1], begin(KEYS))
    assert "0x" not in text
    found = _queries.describe(PLAN, step, begin(KEYS), "x", {"rate": (0.1, None)})
    assert found["config.rate"] == "[0.1, null]" and len(found["program"]) == 32
    assert {"jdp", "jax", "jaxlib", "backend", "devices", "plan.sampler"} <= found.keys()
    with pytest.raises(TypeError, match="config"):
        _queries.describe(PLAN, step, begin(KEYS), "x", {"loss": _loss})
    with pytest.raises(TypeError, match="public name and version"):
        _queries.describe(PLAN, step, begin(KEYS), "", {})


def _noise_key_outside(key=KEYS[0], wrap=lambda step: step):
    """A step that draws noise of a key that is not in the state, though two others are."""
    grad = jdp.clipped_grad(_loss, jdp.clip_by_norm(1.0))

    def step(i, state):
        w, sampling, other = state
        rows, mask = PLAN.batch(sampling, i)
        total = grad(w, X[rows], mask=mask)
        return w - jdp.add_noise(jax.random.fold_in(key, i), total, 1.0) / 20, sampling, other

    return lambda keys: (jnp.zeros(4), *keys), wrap(step)


def _in_a_scan(step):
    def body(state, i):
        return step(i, state), None

    return lambda i, state: jax.lax.scan(body, state, jnp.array([i]))[0]


def _in_a_branch(step):
    return lambda i, state: jax.lax.cond(i > 0, lambda s: step(i, s), lambda s: s, state)


WRAPS = {"plain": lambda step: step, "jit": jax.jit, "scan": _in_a_scan, "cond": _in_a_branch}
WRAPS["remat"] = jax.checkpoint


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_key_outside_of_the_state_is_refused(wrap, tmp_path):
    begin, step = _noise_key_outside(wrap=WRAPS[wrap])
    text = str(jax.make_jaxpr(step)(0, begin(OTHERS)))
    with Ledger(tmp_path) as ledger:
        for program in (step, text):
            with pytest.raises(ValueError, match="keys are all in its state.* closes over a key"):
                jdp.ResumableRun(ledger, PLAN, begin(OTHERS), program, data="x")
        assert ledger.length == 0 and not (tmp_path / "checkpoints").exists()
        good = WRAPS[wrap](PROGRAM[1])
        for program in (good, str(jax.make_jaxpr(good)(0, PROGRAM[0](KEYS)))):
            assert _queries.program_text(program, PROGRAM[0](KEYS))


SCALARS = (np.float64, np.float32, jnp.float32, np.array, jnp.array, jnp.bfloat16, int)


@pytest.mark.parametrize("wrap", ["plain", "jit", "scan"])
@pytest.mark.parametrize("scalar", SCALARS, ids=lambda kind: kind.__name__)
def test_numbers_that_a_step_closes_over_are_compared_by_value(scalar, wrap):
    def text(value):
        value = scalar(value)
        step = WRAPS[wrap](lambda i, state: (state[0] * value, *state[1:]))
        return _queries.program_text(step, (jnp.zeros(4), *KEYS))

    assert text(1) == text(1) != text(3)


def test_keys_are_on_disk_before_anything_is_charged_and_nobody_else_may_read_them(tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x")
        assert ledger.segments("run")[-1].charged == 0
        folder = tmp_path / "checkpoints" / "run"
        assert [path.name for path in folder.iterdir() if path.name.isdigit()] == ["0"]
        for path in [folder.parent, folder, *folder.rglob("*")]:
            mode = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == mode, path
        run.discard()
        assert not folder.parent.exists()
        with pytest.raises(ValueError, match="Make another ResumableRun"):
            next(run.chunks(2))


def test_folders_of_checkpoints_are_closed_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        _train(tmp_path, keys=KEYS)
    finally:
        os.umask(before)
    folder = tmp_path / "checkpoints"
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_only_the_last_few_are_kept_and_notes_come_back(tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x", save_every=0, keep=2)
        for _, stop in run.chunks(1):
            run.state = (*run.state[:2], run.state[2])
            run.notes["curve"] = [*run.notes.get("curve", []), stop]
        again = jdp.ResumableRun(ledger, PLAN, begin(OTHERS), step, data="x")
        assert (again.step, again.notes) == (6, {"curve": [1, 2, 3, 4, 5, 6]})
        again.discard()
    _train(tmp_path / "b", keep=2)
    steps = [path for path in (tmp_path / "b/checkpoints/run").iterdir() if path.name.isdigit()]
    assert len(steps) == 2


def _break(path):
    """Cut the largest file of a checkpoint in half."""
    files = [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def _checkpoints(folder):
    steps = [path for path in (folder / "checkpoints/run").iterdir() if path.name.isdigit()]
    return sorted(steps, key=lambda path: int(path.name))


def test_a_torn_checkpoint_gives_way_to_the_one_before(killed, whole):
    with pytest.raises(Killed):
        _train(killed, kill_at=4)
    *earlier, last = _checkpoints(killed)
    _break(last)
    with pytest.warns(UserWarning, match="cannot be read .* one before"):
        end = _train(killed)
    np.testing.assert_array_equal(end[-1], whole[-1])
    assert _spent(killed) == PLAN.spent


@pytest.mark.parametrize("edit", ["step", "notes", "no check"])
def test_a_checkpoint_whose_description_was_altered_gives_way_too(edit, killed, whole):
    with pytest.raises(Killed):
        _train(killed, kill_at=4)
    file = _checkpoints(killed)[-1] / "about" / "metadata"
    about = json.loads(file.read_text())
    assert (about["step"], about["notes"]) == (4, {})
    change = {"step": {"step": 3}, "notes": {"notes": {"x": 1}}}.get(edit, {})
    kept = {name: value for name, value in about.items() if (edit, name) != ("no check", "check")}
    file.write_text(json.dumps(kept | change))
    with pytest.warns(UserWarning, match="check sum.* one before"):
        end = _train(killed)
    np.testing.assert_array_equal(end[-1], whole[-1])


def test_without_a_checkpoint_that_can_be_read_nothing_is_lost_from_the_account(killed):
    for path in _checkpoints(killed):
        _break(path)
    with pytest.warns(UserWarning), pytest.raises(OSError, match="none of the checkpoints"):
        _train(killed)
    shutil.rmtree(killed / "checkpoints")
    with pytest.raises(ValueError, match="steps below 4 may have been released, but their check"):
        _train(killed)
    assert len(_train(killed, as_new=True)) == 3
    assert [own.charged for own in Ledger(killed, read_only=True).segments("run")] == [4, 6]


def test_a_ledger_that_lost_lines_is_refused(killed):
    path = killed / "ledger.jsonl"
    first = path.read_bytes().splitlines(keepends=True)[0]
    for rest in (first, b""):
        path.write_bytes(rest)
        for as_new in (False, True):
            with pytest.raises(ValueError, match="lines are lost"):
                _train(killed, as_new=as_new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
def test_a_full_disk_leaves_checkpoints_and_ledger_intact(killed, whole):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (killed / "ledger.jsonl").stat()
    with pytest.raises(OSError, match=r"cannot write a checkpoint .* make room"):
        try:
            with Ledger(killed) as ledger:
                begin, step = PROGRAM
                options = {"data": "noise, version 1", "save_every": 0.0}
                run = jdp.ResumableRun(ledger, PLAN, begin(OTHERS), step, **options)
                for start, stop in run.chunks(2):
                    state = run.state
                    for i in range(start, stop):
                        state = STEP(i, state)
                    run.state = state
                    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
                    # (the ledger would meet the same limit, and is tested for it elsewhere)
                    ledger.charge = lambda *_, **__: None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    np.testing.assert_array_equal(_train(killed)[-1], whole[-1])
    assert _spent(killed) == PLAN.spent


def test_a_full_disk_is_said_to_be_full(tmp_path, monkeypatch):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x", save_every=0)
        text = f"RESOURCE_EXHAUSTED: Failed to write: {os.strerror(errno.ENOSPC)} [os_error_code]"

        def full(*_, **__):
            raise ValueError(text)

        monkeypatch.setattr(run._store._manager, "save", full)
        with pytest.raises(
            OSError, match=r"cannot write .*/run: disk full\. Earlier.* make room, "
        ):
            for _ in run.chunks(2):
                run.state = (*run.state[:2], run.state[2])


def test_errors_of_orbax_are_logged_for_who_debugs_only():
    error = (OSError, OSError(), None)
    for path, info, shown in (
        ("orbax/future.py", error, False),
        ("orbax/future.py", None, True),
        ("jdp/x.py", error, True),
    ):
        record = logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)
        assert _run._is_no_traceback_of_orbax(record) == shown


@pytest.mark.parametrize(
    "change, message",
    [
        ({"state": (jnp.zeros(4), KEYS[0])}, "two keys or more, of noise and sampling"),
        ({"ledger": "folder"}, r"Open one with jdp.Ledger"),
        ({"plan": "plan"}, "Call jdp.plan"),
        ({"steps": 5}, "if and only if plan is None"),
        ({"plan": None}, "if and only if plan is None"),
        ({"plan": None, "steps": 0}, "an integer >= 1"),
        ({"name": "../run"}, "Take a plain name"),
        ({"keep": 0}, "an integer >= 1"),
        ({"save_every": -1.0}, ">= 0"),
        ({"as_new": 1}, "True or False"),
    ],
)
def test_bad_arguments_are_named_and_leave_nothing(change, message, tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        own = {"ledger": ledger, "plan": PLAN, "state": begin(KEYS), "program": step}
        with pytest.raises((ValueError, TypeError), match=message):
            jdp.ResumableRun(**(own | {"data": "x"} | change))
        assert ledger.length == 0 and not (tmp_path / "checkpoints").exists()


def test_misuse_of_the_loop_is_refused(tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x")
        with pytest.raises(ValueError, match=r"run.state. must be new .* repeats its noise"):
            for _ in run.chunks(2):
                pass
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x")
        for _ in run.chunks(2):
            break
        with pytest.raises(ValueError, match="Make another ResumableRun"):
            next(run.chunks(2))
        with pytest.raises(ValueError, match="state.* as in the checkpoint"):
            jdp.ResumableRun(
                ledger, PLAN, (*begin(KEYS), 1.0), lambda i, s: s, data="x", as_new=True
            )


@pytest.mark.parametrize("when", ["before the loop", "in a chunk"])
def test_a_second_run_of_one_name_ends_the_first(when, tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        own = {"data": "x", "save_every": 0.0}
        first = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, **own)
        chunks = first.chunks(2)
        if when == "in a chunk":
            for _ in range(2):
                taken = jax.lax.fori_loop(*next(chunks), step, first.state)
                first.state = taken
        other = _program(rate=2.0)[1]
        second = jdp.ResumableRun(ledger, PLAN, begin(OTHERS), other, as_new=True, **own)
        before = ledger.path.read_bytes()
        with pytest.raises(ValueError, match="Make another|the newest of its name"):
            next(chunks)
        assert ledger.path.read_bytes() == before
        for start, stop in second.chunks(2):
            second.state = jax.lax.fori_loop(start, stop, other, second.state)
        segments = [(own.start, own.charged) for own in ledger.segments("run")]
        assert segments == ([(0, 4), (2, 6)] if when == "in a chunk" else [(0, 0), (0, 6)])
        again = jdp.ResumableRun(ledger, PLAN, begin(KEYS), other, data="x")
        np.testing.assert_array_equal(again.state[0], second.state[0])  # nothing of the first's


def test_a_segment_that_another_opened_is_not_paid_from(tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x")
        ledger.open_segment("run", PLAN, {"rate": "2"}, start=4)
        before = ledger.path.read_bytes()
        with pytest.raises(ValueError, match="the newest of its name"):
            next(run.chunks(2))
        assert ledger.path.read_bytes() == before


def test_what_cannot_be_deleted_is_named(tmp_path, monkeypatch):
    _train(tmp_path, keys=KEYS)
    folder = tmp_path / "checkpoints" / "run"
    unlink = os.unlink

    def refused(path, **options):
        if os.path.basename(path) == "manifest.ocdbt":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        unlink(path, **options)

    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger, monkeypatch.context() as patch:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="noise, version 1")
        patch.setattr(os, "unlink", refused)
        message = (
            f"cannot delete .*manifest.ocdbt.*: Permission denied.* {folder} still has the sec"
        )
        for discard in (run.discard, lambda: checkpoints.discard(tmp_path)):
            with pytest.raises(PermissionError, match=message):
                discard()
        left = {path.name for path in folder.rglob("*") if path.is_file()}
        assert left == {"manifest.ocdbt"}  # all that could be deleted is
    checkpoints.discard(tmp_path)
    checkpoints.discard(tmp_path)  # there is nothing left, which is no error
    assert not folder.parent.exists()


def test_notes_that_are_not_plain_are_named(tmp_path):
    begin, step = PROGRAM
    with Ledger(tmp_path) as ledger:
        run = jdp.ResumableRun(ledger, PLAN, begin(KEYS), step, data="x", save_every=0)
        run.notes["accuracy"] = np.float32(0.5)
        with pytest.raises(ValueError, match="`run.notes` must be plain values"):
            for _, _ in run.chunks(2):
                run.state = (*run.state[:2], run.state[2])


def test_states_of_many_kinds_come_back(tmp_path):
    state = {
        "bf16": jnp.arange(3, dtype=jnp.bfloat16),
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "numpy": np.arange(4, dtype=np.int8),
        "flag": jnp.array(True),
        "number": 3,
        "keys": (jax.random.key(0), jax.random.key(1, impl="rbg")),
    }
    store = _store.Store(tmp_path / "a", 1)
    store.save(state, {"step": 0})
    store.wait()
    about, leaves = store.newest()
    empty = jax.tree.map(
        lambda leaf: (
            leaf
            if isinstance(leaf, int) or _store._is_key(leaf)
            else leaf ^ leaf
            if leaf.dtype in (bool, np.int8)
            else leaf - leaf
        ),
        state,
    )
    back = _store.fit(leaves, about["leaves"], empty)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for own, was in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert type(own) is type(was) and _store._dtype(own) == _store._dtype(was)
        assert bool(jnp.all(own == was))
    folded = _store.fold(state, (1, 2))
    assert _store.distinct_keys((state, folded)) == 4
    store.close()


def _start(program, folder):
    command = [sys.executable, ROOT / "tests" / "resumed.py", program, folder]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), env=os.environ | cache, **quiet)


def _finish(process):
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error.decode()


def _taken(folder):
    """The last step that each run began, from what the program noted."""
    taken = {}
    if (folder / "taken").exists():
        for line in (folder / "taken").read_text().splitlines():
            name, stop = line.split()
            taken[name] = max(int(stop), taken.get(name, 0))
    return taken


def _untimed(pieces):
    """Results of all pieces, without what was measured in seconds and bytes."""
    timed = ("seconds", "seconds_per_step", "compile_seconds", "temporary_bytes")
    results = {name: piece["result"] for name, piece in pieces.items()}
    return {n: {k: v for k, v in own.items() if k not in timed} for n, own in results.items()}


def _kill_and_compare(program, kills, tmp_path):
    """Kill a program at random moments of its work, until it has been often enough."""
    chance = random.Random(program)
    whole = tmp_path / "whole"
    whole.mkdir()
    _finish(_start(program, whole))
    begun = time.monotonic()
    ends = {file.name: dict(np.load(file)) for file in whole.glob("*.npz")}
    assert ends
    done = rounds = 0
    while done < kills:
        folder = tmp_path / f"round{rounds}"
        folder.mkdir()
        rounds += 1
        while True:
            process = _start(program, folder)
            seen = (folder / "taken").stat().st_size if (folder / "taken").exists() else 0
            while process.poll() is None and done < kills:
                file = folder / "taken"
                if file.exists() and file.stat().st_size > seen:
                    break
                if chance.random() < 0.0003:
                    break  # now and then while it starts
                time.sleep(0.01)
            if done < kills and process.poll() is None:
                time.sleep(chance.uniform(0, 0.5 if program == "loop" else 1.5))
            if done < kills and process.poll() is None:
                process.kill()
                process.communicate()
                done += 1
            else:
                _finish(process)
            ledger = Ledger(folder, read_only=True) if (folder / "ledger.jsonl").exists() else None
            for name, stop in _taken(folder).items():
                own = ledger.segments(name)
                assert len(own) == 1
                assert own[0].statement is None or own[0].charged >= stop
            if process.returncode == 0:
                break
        assert {file.name for file in folder.glob("*.npz")} == ends.keys()
        for name, end in ends.items():
            found = np.load(folder / name)
            for leaf, value in end.items():
                np.testing.assert_array_equal(found[leaf], value, err_msg=f"{name} {leaf}")
        if program != "loop":
            pieces = [_run.read_json(own / "results.json") for own in (whole, folder)]
            assert _untimed(pieces[0]) == _untimed(pieces[1])
        both = [Ledger(own, read_only=True) for own in (whole, folder)]
        assert [b.spent(name) for b in both[:1] for name in b.runs] == [
            b.spent(name) for b in both[1:] for name in b.runs
        ]
    print(f"{program}: {done} kills in {rounds} runs, {time.monotonic() - begun:.0f} s")


def test_kill_nine_and_resume_a_loop(tmp_path):
    _kill_and_compare("loop", 1, tmp_path)


@pytest.mark.slow
def test_kill_nine_fifty_times_the_experiment(tmp_path):
    _kill_and_compare("gep", 50, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["b-gep", "adadps", "pate"])
def test_kill_nine_and_resume_other_methods(method, tmp_path):
    _kill_and_compare(method, 3, tmp_path)


def test_the_experiment_is_taken_up_or_refused_or_pays_again(tmp_path, monkeypatch, capsys):
    options = {"dataset": "digits", "smoke": True, "seed": 3, "save_every": 0.0, "eval_every": 1}
    args = gep.Args(methods=("dp-sgd",), out=tmp_path / "run", **options)

    @contextlib.contextmanager
    def killed(label, total):
        def advance(steps, left=[3]):  # noqa: B006
            left[0] -= 1
            if not left[0]:
                raise Killed

        yield advance

    with monkeypatch.context() as patch:
        patch.setattr(_run, "progress", killed)
        with pytest.raises(Killed):
            gep.main(args)
    again = dataclasses.replace(args, out=tmp_path / "again", learning_rate=(0.2,))
    shutil.copytree(args.out, again.out)
    with pytest.raises(UsageError, match="config.learning_rate was 0.1, now 0.2.*--resume-as-new"):
        gep.main(again)
    with Ledger(args.out), pytest.raises(UsageError, match="another process is at work"):
        gep.main(args)
    row = gep.main(args)["methods"]["dp-sgd"]
    assert 0.99 < row["epsilon_spent"] <= 1
    result = _run.read_json(args.out / "results.json")["dp-sgd/0"]["result"]
    assert [step for step, _ in result["curve"]] == [1, 2, 3, 4]  # two are from before
    assert not (args.out / "checkpoints").exists()
    assert "Resumed as new" not in capsys.readouterr().out
    new = gep.main(dataclasses.replace(again, resume_as_new=True))
    assert new["methods"]["dp-sgd"]["epsilon_spent"] > 1
    assert "Resumed as new: dp-sgd-0; with the steps that were" in capsys.readouterr().out
