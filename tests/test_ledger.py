"""The ledger never says too little, whatever happens to the process, the disk or the file."""

import errno
import json
import os
import subprocess
import sys

import dp_accounting as dpa
import pytest

import jdp
from jdp import accounting, ledger
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
    for end in range(len(whole), len(torn)):
        book.path.write_bytes(torn[:end])
        assert Ledger(tmp_path, read_only=True).segments("a")[-1].charged == 0
    with Ledger(tmp_path) as book:
        assert book.path.read_bytes() == whole
        book.charge("a", plan, stop=5)
    assert Ledger(tmp_path, read_only=True).segments("a")[-1].charged == 5


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
