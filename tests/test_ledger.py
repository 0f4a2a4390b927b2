"""The ledger never says too little, whatever happens to the process, the disk or the file."""

import errno
import json
import os
import subprocess
import sys

import dp_accounting as dpa
import numpy as np
import pytest

import jdp
from jdp import _journal, accounting, ledger
from jdp.ledger import Ledger

QUERIES = {"learning_rate": "0.1"}


def _plan(**change):
    own = {"num_examples": 1_000, "batch_size": 100, "steps": 20, "delta": 1e-5}
    own["noise_multiplier"] = 2.0
    return jdp.plan(**(own | change))


@pytest.fixture(scope="module")
def plan():
    return _plan()


@pytest.fixture
def book(tmp_path, plan):
    with Ledger(tmp_path) as book:
        book.open_segment("a", plan, QUERIES)
        book.charge("a", plan, stop=5)
        yield book


def test_a_charge_is_on_disk_and_synced_when_it_returns(book, plan, monkeypatch):
    calls = []
    for name in ("write", "fsync"):
        own = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, own=own: (calls.append(name), own(*a))[1]
        )
    book.charge("a", plan, stop=10)
    assert calls == ["write", "fsync"]
    assert Ledger(book.folder, read_only=True).segments("a")[-1].charged == 10


PLANS = {
    "poisson": {},
    "truncated": {"capacity": 120},
    "fixed-batches": {"sampling": "fixed-batches"},
    "without-replacement": {
        "sampling": "without-replacement",
        "accountant": "rdp",
        "adjacency": "replace-one",
    },
}


@pytest.mark.parametrize("kind", PLANS)
def test_chunks_cost_what_the_plan_says_and_no_step_is_charged_twice(kind, tmp_path):
    plan = _plan(**PLANS[kind])
    with Ledger(tmp_path) as book:
        book.open_segment("a", plan, QUERIES)
        for stop in (3, 7, 7, 5, 20, 1):
            book.charge("a", plan, stop=stop)
        lines = book.length
        assert book.spent("a").epsilon == plan.epsilon
    with Ledger(tmp_path) as book:
        book.charge("a", plan, stop=12)
        assert (book.length, book.spent()) == (lines, book.spent("a"))
        assert book.spent("a").delta == plan.delta and lines == 4


def test_a_plan_that_is_no_sequence_of_steps_is_charged_whole(tmp_path):
    plan = jdp.pate.plan_votes(1_000, 50, 20, delta=1e-5, epsilon=2.0)
    with Ledger(tmp_path) as book:
        book.open_segment("votes", plan, QUERIES)
        book.charge("votes", plan, stop=1)
        assert book.spent("votes") == accounting.privacy_spent(
            plan.event, delta=1e-5, adjacency="replace-one"
        )


def test_a_step_past_the_plan_is_refused_and_nothing_written(book, plan):
    before = book.path.read_bytes()
    with pytest.raises(ValueError, match="The plan pays for 20 steps"):
        book.charge("a", plan, stop=21)
    assert book.path.read_bytes() == before
    with pytest.raises(ValueError, match="open_segment first"):
        book.charge("b", plan, stop=1)
    book.open_segment("b", None, QUERIES)
    with pytest.raises(ValueError, match="one of .* that has a plan"):
        book.charge("b", plan, stop=1)
    with pytest.raises(ValueError, match="One run has one account"):
        book.open_segment("a", _plan(adjacency="replace-one"), QUERIES)


OTHER_PLANS = [
    {"noise_multiplier": 50.0},
    {"delta": 1e-4},
    {"steps": 21},
    {"capacity": 120},
    {"num_examples": 2_000},
    {"sampling": "fixed-batches"},
    {"adjacency": "replace-one"},
    {"accountant": "rdp"},
]


def test_a_segment_is_paid_for_by_its_own_plan_only(book, plan):
    before = book.path.read_bytes()
    for change in OTHER_PLANS:
        with pytest.raises(ValueError, match="the one of the segment, whose .* another one needs"):
            book.charge("a", _plan(**change), stop=10)
    votes = jdp.pate.plan_votes(1_000, 50, 20, delta=1e-5, epsilon=2.0)
    with pytest.raises(ValueError, match="the one of the segment"):
        book.charge("a", votes, stop=10)
    assert book.path.read_bytes() == before
    book.charge("a", _plan(), stop=10)  # an equal one is the same
    epochs = [_plan(sampling="fixed-batches", batch_size=own, steps=10) for own in (100, 50)]
    assert epochs[0].event == epochs[1].event  # yet a part of an epoch costs another share
    book.open_segment("b", epochs[0], QUERIES)
    with pytest.raises(ValueError, match="whose sampler differs"):
        book.charge("b", epochs[1], stop=10)


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
def test_a_file_that_was_removed_or_replaced_is_not_written_to(how, book, plan):
    text = book.path.read_bytes()
    if how == "moved":
        book.folder.rename(book.folder.with_name("elsewhere"))
    else:
        book.path.unlink()
    if how == "replaced":
        book.path.write_bytes(text)
    with pytest.raises(OSError, match="removed or replaced while it was open, so nothing was"):
        book.charge("a", plan, stop=10)
    with pytest.raises(ValueError, match="closed or read-only"):
        book.charge("a", plan, stop=10)
    if how == "replaced":
        assert Ledger(book.folder, read_only=True).segments("a")[-1].charged == 5


def test_a_file_that_is_replaced_before_it_is_locked_is_refused(tmp_path, plan, monkeypatch):
    lock = _journal._lock

    def replaced(file, path):
        path.unlink()
        path.touch()
        lock(file, path)

    with monkeypatch.context() as patch:
        patch.setattr("jdp._journal._lock", replaced)
        with pytest.raises(OSError, match="removed or replaced"):
            Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_a_new_segment_is_charged_on_top(book, plan):
    book.open_segment("a", plan, {"learning_rate": "0.2"}, start=3, nonce=(1, 2))
    book.charge("a", plan, stop=20)
    events = [plan.sampler.event(float(plan.noise_multiplier), n) for n in (5, 17)]
    both = accounting.privacy_spent(dpa.ComposedDpEvent(events), delta=plan.delta)
    assert book.spent("a") == both and both.epsilon > plan.epsilon
    first, second = book.segments("a")
    assert (first.charged, second.start, second.charged, second.nonce) == (5, 3, 20, (1, 2))
    assert first.differences(second.queries) == ["learning_rate was 0.1, now 0.2"]
    assert first.differences({}) == ["learning_rate was 0.1, now absent"]


def test_records_that_are_seen_again_within_an_epoch_are_charged(tmp_path):
    plan = _plan(sampling="fixed-batches")  # epochs of 10 steps
    counts = [ledger.cost(plan, *ends).count for ends in ((0, 10), (0, 20), (5, 10), (5, 15))]
    assert counts == [1, 2, 1, 2]


def test_all_runs_together(book, plan):
    book.open_segment("public", None, QUERIES)
    book.open_segment("b", plan, QUERIES)
    book.charge("b", plan, stop=20)
    assert book.runs == ("a", "public", "b")
    assert book.spent("public").epsilon == 0
    assert book.spent().epsilon > book.spent("b").epsilon == plan.epsilon
    assert book.spent("b", delta=1e-3).epsilon < plan.epsilon
    votes = jdp.pate.plan_votes(1_000, 50, 20, delta=1e-5, epsilon=2.0)
    book.open_segment("c", votes, QUERIES)
    with pytest.raises(ValueError, match="of one adjacency and accountant"):
        book.spent()
    with pytest.raises(ValueError, match=r"one of \('a', 'public', 'b', 'c'\)"):
        book.spent("d")
    for name in ("", "..", "a/b", ".hidden", "a b", None):
        with pytest.raises(ValueError, match="Take a plain name"):
            book.open_segment(name, plan, QUERIES)


TRUNCATED = dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0)
EVENTS = [
    dpa.NoOpDpEvent(),
    dpa.NonPrivateDpEvent(),
    dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(0.1 + 0.2)), 7),
    dpa.ComposedDpEvent([dpa.GaussianDpEvent(1.5), dpa.SelfComposedDpEvent(TRUNCATED, 2)]),
    dpa.SampledWithoutReplacementDpEvent(100, 10, dpa.GaussianDpEvent(1 / 3)),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_read_back_exactly(event):
    assert ledger._decode(json.loads(json.dumps(ledger._encode(event)))) == event


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(tmp_path, plan):
    with Ledger(tmp_path) as book:
        book.open_segment("a", plan, QUERIES)
        whole = book.path.read_bytes()
        book.charge("a", plan, stop=5)
    torn = book.path.read_bytes()
    for end in range(len(whole) + 1, len(torn) - 1):
        book.path.write_bytes(torn[:end])
        with pytest.warns(UserWarning, match="line 2 of .* is torn, .* and is dropped"):
            assert Ledger(tmp_path, read_only=True).segments("a")[-1].charged == 0
    with pytest.warns(UserWarning, match="is dropped"), Ledger(tmp_path) as book:
        assert book.path.read_bytes() == whole
        book.charge("a", plan, stop=5)
    assert Ledger(tmp_path, read_only=True).segments("a")[-1].charged == 5


def test_a_whole_last_line_that_lost_its_end_is_kept(book, plan):
    whole = book.path.read_bytes()
    book.close()
    book.path.write_bytes(whole[:-1])
    assert Ledger(book.folder, read_only=True).segments("a")[-1].charged == 5
    assert book.path.read_bytes() == whole[:-1]
    with Ledger(book.folder) as again:
        assert book.path.read_bytes() == whole
        again.charge("a", plan, stop=6)
    assert Ledger(book.folder, read_only=True).segments("a")[-1].charged == 6


def test_any_other_damage_is_an_error_that_names_the_line(book, plan):
    book.charge("a", plan, stop=10)
    good = book.path.read_bytes()
    book.close()
    lines = good.splitlines(keepends=True)
    damaged = {
        2: good.replace(b'"stop": 5', b'"stop": 4'),
        1: b"".join([lines[1], lines[0], lines[2]]),
        3: b"".join([*lines[:2], lines[2][:-9] + b"\n"]),
    }
    damaged_by_loss = b"".join([lines[0], lines[2]])
    for number, text in [*damaged.items(), (2, damaged_by_loss), (1, b"not a ledger\n")]:
        book.path.write_bytes(text)
        with pytest.raises(ValueError, match=f"line {number} of .* is damaged"):
            Ledger(book.folder)
        assert book.path.read_bytes() == text  # and nothing is repaired behind the user's back


STRIPPED = """
import sys, jdp
assert False, "not stripped"
jdp.Ledger(sys.argv[1], read_only=True)
"""


def test_damage_is_found_by_an_interpreter_that_strips_assertions(book):
    text = book.path.read_bytes()
    other = text.replace(b'"noise_multiplier": 2.0', b'"noise_multiplier": 9.0')
    assert other != text
    book.path.write_bytes(other)
    command = [sys.executable, "-O", "-c", STRIPPED, str(book.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "line 1 of" in done.stderr and "is damaged" in done.stderr


SEGMENT = {"run": "a", "kind": "segment", "start": 0, "nonce": None, "queries": {}}
SEGMENT |= {"statement": None}
CHARGE = {"run": "a", "kind": "charge", "stop": 3, "event": {"type": "NoOpDpEvent"}}
UNKNOWN = {
    "a charge without a segment": [CHARGE],
    "an unknown event": [SEGMENT, CHARGE | {"event": {"type": "FutureDpEvent"}}],
    "no event": [SEGMENT, CHARGE | {"event": {"type": "List", "x": 1}}],
    "an event of other fields": [SEGMENT, CHARGE | {"event": {"type": "NoOpDpEvent", "x": 1}}],
    "a stop that is none": [SEGMENT, CHARGE | {"stop": "three"}],
    "no run": [{"kind": "note"}],
    "another kind": [SEGMENT | {"kind": "note"}],
    "queries that are none": [SEGMENT | {"queries": 3}],
    "another statement": [SEGMENT | {"statement": {"epsilon": 1}}],
    "another nonce": [SEGMENT | {"nonce": "words"}],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_whole_lines_of_another_version_are_refused(kind, tmp_path):
    lines = [_journal._line({"number": n} | own) for n, own in enumerate(UNKNOWN[kind])]
    (tmp_path / ledger.FILE).write_bytes(b"".join(lines))
    message = f"line {len(lines)} of .* what this version of jdp does not know"
    for read_only in (True, False):
        with pytest.raises(ValueError, match=message):
            Ledger(tmp_path, read_only=read_only)


JUNK = [
    b"[]",
    b"null",
    b"",
    b"\xff",
    b"{}",
    b'"check"',
    b'{"check": 1}',
    b"[" * 100_000,
    b"1" * 5_000,
]


def test_what_is_no_ledger_is_refused(tmp_path):
    for text in JUNK:
        (tmp_path / ledger.FILE).write_bytes(text + b"\n")
        with pytest.raises(ValueError, match="line 1 of .* is damaged"):
            Ledger(tmp_path)
    (tmp_path / ledger.FILE).unlink()
    os.mkfifo(tmp_path / ledger.FILE)
    for read_only in (True, False):
        with pytest.raises(OSError, match="it is no regular file"):
            Ledger(tmp_path, read_only=read_only)


@pytest.mark.parametrize(
    "method, change, error",
    [
        ("open_segment", {"nonce": 3}, ValueError),
        ("open_segment", {"nonce": "ab"}, ValueError),
        ("open_segment", {"nonce": (1.5,)}, ValueError),
        ("open_segment", {"nonce": (-1,)}, ValueError),
        ("open_segment", {"nonce": (2**32,)}, ValueError),
        ("open_segment", {"nonce": ()}, ValueError),
        ("open_segment", {"start": 21}, ValueError),
        ("open_segment", {"start": 10**400}, ValueError),
        ("open_segment", {"start": 10**5_000}, ValueError),
        ("open_segment", {"plan": None, "start": 10**5_000}, ValueError),
        ("charge", {"run": ["a"]}, TypeError),
        ("charge", {"run": "b"}, ValueError),
        ("charge", {"stop": 10**5_000}, ValueError),
        ("segments", {"run": ["a"]}, TypeError),
        ("spent", {"run": ["a"]}, ValueError),
        ("spent", {"delta": "a"}, TypeError),
        ("spent", {"delta": 10**400}, ValueError),
        ("spent", {"delta": 0}, ValueError),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(method, change, error, book, plan):
    before = book.path.read_bytes()
    own = {
        "open_segment": {"run": "b", "plan": plan, "queries": QUERIES},
        "charge": {"run": "a", "plan": plan, "stop": 6},
    }.get(method, {})
    with pytest.raises(error, match=f"`{list(change)[-1]}` must be .*, but got .*") as caught:
        getattr(book, method)(**(own | change))
    assert type(caught.value) is error and book.path.read_bytes() == before


def test_a_folder_must_be_a_path_that_can_be(tmp_path):
    for folder in ("\0", "\ud800"):
        with pytest.raises(ValueError, match="`folder` must be a path of characters"):
            Ledger(folder)
    for folder in (b"x", 3, ""):
        with pytest.raises(TypeError, match="`folder` must be a path"):
            Ledger(folder)


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    own = {"num_examples": np.int64(1_000), "batch_size": np.int64(100), "steps": np.int64(20)}
    plan = jdp.plan(**own, delta=np.float32(1e-5), noise_multiplier=np.float32(2))
    with Ledger(tmp_path) as book:
        book.open_segment("a", plan, QUERIES, start=np.int64(0), nonce=(np.uint32(3),))
        book.charge("a", plan, stop=np.int64(20))
        assert book.spent("a").epsilon == plan.epsilon
        before = book.segments("a")
    with Ledger(tmp_path, read_only=True) as again:
        assert again.segments("a") == before
    assert json.loads(plan.to_json())["steps"] == 20


HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused(tmp_path):
    (tmp_path / ledger.FILE).touch()
    command = [sys.executable, "-c", HOLD, str(tmp_path / ledger.FILE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match="another process is at work"):
            Ledger(tmp_path)
        other.communicate()
    with Ledger(tmp_path) as book, pytest.raises(BlockingIOError, match="another process"):
        Ledger(book.folder)
    Ledger(tmp_path).close()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_an_error_before_anything_is_released(call, book, plan, monkeypatch):
    before = book.path.read_bytes()
    write = os.write

    def full(file, *rest):
        if call == "write" and len(rest[0]) > 10:
            return write(file, rest[0][:10])  # a part still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match=r"nothing was released: No space left.*Free some space"):
            book.charge("a", plan, stop=10)
    assert book.path.read_bytes() == before
    with pytest.raises(ValueError, match="closed or read-only"):
        book.charge("a", plan, stop=10)  # nobody goes on after an error
    with Ledger(book.folder) as again:
        again.charge("a", plan, stop=10)
        assert again.segments("a")[-1].charged == 10


def test_a_folder_that_cannot_be_written(tmp_path, plan):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", "/proc/jdp"):
        with pytest.raises(OSError, match="cannot open the ledger .* Choose another folder"):
            Ledger(folder)
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "nowhere", read_only=True)
    with Ledger(tmp_path) as book:
        book.open_segment("a", plan, QUERIES)
    with pytest.raises(ValueError, match="closed or read-only"):
        Ledger(tmp_path, read_only=True).charge("a", plan, stop=1)
