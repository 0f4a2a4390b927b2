"""Attack every mechanism of jdp, and every broken twin: claimed epsilon against audited.

For each mechanism, its release is run many times on two neighbouring data sets that differ as much
as they may. Half of the runs choose a score and an event (likely with the record, unlikely without,
or the reverse); the other half bound its probabilities, and with them epsilon and mu from below. A
bound above the claim would refute it. All bounds of the table together hold with 99% confidence.

Parts, all by default:

  mechanisms  every mechanism of the library, on the raw release; none may exceed its claim
  twins       mechanisms that are broken on purpose (tests/twins.py); each must exceed its claim
  training    ONE run of training with thousands of canaries, each in the data by a coin

How to read a row: `epsilon` is bounded for any mechanism, at --delta; `mu` for claims that are one
Gaussian, where it is much sharper, and its epsilon at 1e-5 is given too. Power is how often a new
audit would refute the claim of a broken twin, at least.

Results go to a folder (summary.json, report.txt, audit.png); a run that was interrupted is taken up
where it stopped. The last line on standard output is the summary as one JSON object.

  python -m experiments.audit
  python -m experiments.audit --parts mechanisms --only gep "dp-sgd, scan"
  python -m experiments.audit --smoke
"""

import dataclasses
import pathlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments import _audit_tables, _audit_training, _audit_twins, _options, _run
from experiments._audit_cases import MECHANISMS, PENDING
from experiments._audit_frame import Case, Claim, gaussian
from jdp import auditing
from jdp.auditing import first_half, lower_confidence

PARTS = ("mechanisms", "twins", "training")
FAILURE = 0.01  # with at most this probability any bound of the whole table is wrong
USUAL_DELTA = 1e-5  # at which mu is translated to epsilon
ONE_RUN_DELTA = 1e-7  # one run pays canaries times delta
CHUNK = 2**15
NAMES = (*MECHANISMS, *_audit_twins.TWINS, *_audit_training.TRAININGS)
# Two bounds a case, of epsilon and of mu. A fixed number, with room for further rows: the others
# then need not be run again.
STATEMENTS = 240
SIGNIFICANCE = FAILURE / STATEMENTS


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    parts: tuple[str, ...] = PARTS
    """Parts of the audit: mechanisms, twins, training."""
    only: tuple[str, ...] = ()
    """Names of single rows; all by default."""
    draws: int = 2**18
    """Runs of each mechanism on each of the two data sets; half of them choose the event."""
    delta: float = 0.01
    """Delta at which epsilon is bounded for any mechanism. Small ones need more draws."""
    canaries: int = 4_000
    """Canaries in a training run."""
    repeats: int = 20
    """Training runs of each kind; the first is the audit, all of them show its power."""
    seed: int = 0
    """Seed of everything. The data are synthetic or public, so the runs need not be private."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/audit."""
    smoke: bool = False
    """Only check that everything works: some rows, few draws, where not given."""


SMOKE: dict[str, Any] = {"draws": 2_000, "canaries": 200, "repeats": 2}
SMOKE |= {"only": ("dp-sgd", "pate, labels", "half the noise", "one run, dp-sgd")}


def main(args: Args) -> dict[str, Any]:
    """Run the audits and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    folder = _run.Folder(args.out or pathlib.Path("runs", "audit"), "audit")
    tasks = [
        (part, name)
        for part, names in zip(
            PARTS, (MECHANISMS, _audit_twins.TWINS, _audit_training.TRAININGS), strict=True
        )
        for name in names
        if part in args.parts and (not args.only or name in args.only)
    ]
    rows = []
    with _run.progress("audit", len(tasks)) as advance:
        for part, name in tasks:
            rows.append({"part": part, "name": name, **piece(args, folder, part, name)})
            advance(1)
    summary = {
        "experiment": "audit",
        "confidence": 1 - FAILURE,
        "statements": STATEMENTS,
        "delta": args.delta,
        "usual_delta": USUAL_DELTA,
        "one_run_delta": ONE_RUN_DELTA,
        "draws": args.draws,
        "canaries": args.canaries,
        "repeats": args.repeats,
        "seed": args.seed,
        "rows": rows,
        "harmless_twins": _audit_twins.HARMLESS,
        "pending": list(PENDING),
        "provenance": _run.provenance(),
    }
    _run.write_json(folder.path / "summary.json", summary)
    text = _audit_tables.report(summary)
    (folder.path / "report.txt").write_text(text)
    _audit_tables.draw(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    return _audit_tables.brief(summary)


def check(args: Args):
    """Refuse what can be refused before any work."""
    _options.check_names(args, {"parts": PARTS, "only": NAMES}, none=("only",))
    _options.check_least(args, {"draws": 1_000, "canaries": 100, "repeats": 1})
    _options.check_delta(args.delta)
    _options.check_seed(args.seed)


def piece(args: Args, folder: _run.Folder, part: str, name: str) -> dict[str, Any]:
    """One row, from the folder if it is there."""
    config: dict[str, Any] = {"seed": args.seed, "significance": SIGNIFICANCE}
    if part == "training":
        config |= {"canaries": args.canaries, "repeats": args.repeats, "delta": ONE_RUN_DELTA}
    else:
        config |= {"draws": args.draws, "delta": args.delta}
    found = folder.get(name, config)
    if found is None:
        begin = time.process_time()
        key = jax.random.fold_in(jax.random.key(args.seed), zlib.crc32(name.encode()))
        if part == "training":
            found = one_run(args, name, key)
        else:
            made = MECHANISMS[name]() if part == "mechanisms" else _audit_twins.TWINS[name]()
            found = many_runs(args, made, key)
        found["seconds"] = time.process_time() - begin
        found = folder.put(name, config, found)
    return found


def draw(case: Case, key: jax.Array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Releases of so many runs with the record, and of so many without it."""
    run: Callable[..., Any] = jax.jit(jax.vmap(case.release, (0, None)))
    chunk = min(CHUNK, count)
    found = []
    for present, own in zip((True, False), jax.random.split(key), strict=True):
        parts = []
        for start in range(0, count, chunk):
            keys = jax.random.split(jax.random.fold_in(own, start), chunk)
            values, counts = (np.asarray(part) for part in run(keys, jax.numpy.bool_(present)))
            parts.append(values[counts])
        found.append(np.concatenate(parts)[:count])
    return found[0], found[1]


def many_runs(args: Args, case: Case, key: jax.Array) -> dict[str, Any]:
    """Audit one release."""
    releases = draw(case, key, args.draws * case.draws)
    score = case.score
    if score is None:
        score = auditing.gaussian_score(*map(first_half, releases))
    scores = [score(part) for part in releases]
    options: Any = {"significance": SIGNIFICANCE}
    claimed = case.claim.epsilon(args.delta)
    audit = auditing.epsilon_many_runs(*scores, delta=args.delta, **options)
    row: dict[str, Any] = {
        "neighbours": case.neighbours,
        "draws": [len(part) for part in releases],
        "epsilon_claimed": claimed,
        "epsilon_audited": audit.bound,
        "epsilon_event": dataclasses.asdict(audit),
        "exceeds": audit.bound > claimed,
        "power": audit.power(claimed),
        "mu_claimed": case.claim.mu,
    }
    if case.claim.mu is not None:
        sharper = auditing.mu_many_runs(*scores, **options)
        row |= {
            "mu_audited": sharper.bound,
            "mu_event": dataclasses.asdict(sharper),
            "exceeds": row["exceeds"] or sharper.bound > case.claim.mu,
            "power": max(row["power"], sharper.power(case.claim.mu)),
            "usual_epsilon_claimed": case.claim.epsilon(USUAL_DELTA),
            "usual_epsilon_audited": usual(sharper.bound),
        }
    return row


def usual(mu: float) -> float | None:
    """Epsilon of one Gaussian at the usual delta; None where it is too large to mean anything."""
    if mu == 0:
        return 0.0
    return gaussian(mu).epsilon(USUAL_DELTA) if mu < 100 else None


def one_run(args: Args, name: str, key: jax.Array) -> dict[str, Any]:
    """Audit training runs; the first is the audit, all show how often it would exceed the claim."""
    plan = _audit_training.make_plan(args.canaries)
    claim = Claim(plan.event).epsilon(ONE_RUN_DELTA)
    options: Any = {"delta": ONE_RUN_DELTA, "significance": SIGNIFICANCE}
    found = [
        _audit_training.audit(name, own, args.canaries, **options)
        for own in jax.random.split(key, args.repeats)
    ]
    bounds = [audit.bound for audit, _ in found]
    exceeding = sum(bound > claim for bound in bounds)
    first, accuracy = found[0]
    return {
        "neighbours": "a canary, or a null record",
        "broken": _audit_training.TRAININGS[name].broken,
        "epsilon_claimed": claim,
        "epsilon_audited": first.bound,
        "epsilon_event": dataclasses.asdict(first),
        "bounds": bounds,
        "accuracy": accuracy,
        "exceeds": first.bound > claim,
        "exceeding": exceeding,
        "power": float(lower_confidence(exceeding, len(bounds), 0.05)),
    }


if __name__ == "__main__":
    _run.command_line(Args, main)
