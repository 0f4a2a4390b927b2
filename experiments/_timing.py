"""Time several ways to do one thing side by side, and compare them: no JAX in here."""

import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

LEAST_SECONDS = 0.03  # a shorter call is repeated within one measurement
LEAST_REPEATS = 5


def race(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    budget: float,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float | None]]:
    """Time every call once a round, in an order that changes from round to round.

    What drifts (other work on the machine, its clock) then meets all alike. A call that has used up
    `budget` seconds and has five measurements sits out the other rounds.

    Args:
      calls: each does its work and waits for the end of it.
      repeats: the number of rounds.
      budget: seconds for one call.
      advance: called with how many of the `repeats * len(calls)` measurements are done.

    Returns:
      For each call, seconds in each round; None where it sat out.
    """
    times: dict[str, list[float | None]] = {name: [] for name in calls}
    spent, inner = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 1)
    for name, call in calls.items():  # warm up
        seconds = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            if seconds > 1:
                break
        inner[name] = max(1, round(LEAST_SECONDS / max(seconds, 1e-6)))
    order = np.random.default_rng(0)
    for number in range(repeats):
        for name in order.permutation(list(calls)):
            if spent[name] > budget and number >= LEAST_REPEATS:
                times[name].append(None)
            else:
                begin = time.perf_counter()
                for _ in range(inner[name]):
                    calls[name]()
                seconds = time.perf_counter() - begin
                spent[name] += seconds
                times[name].append(seconds / inner[name])
            advance(1)
    return times


def median(times: Sequence[float | None]) -> float:
    """The median of the rounds that took place."""
    return float(np.median([seconds for seconds in times if seconds is not None]))


def ratio(times: Sequence[float | None], base: Sequence[float | None]) -> dict[str, float]:
    """The median over rounds of `times / base`, and its 95% bootstrap interval."""
    both = [a / b for a, b in zip(times, base, strict=True) if a is not None and b is not None]
    rounds = np.array(both)
    samples = np.random.default_rng(0).choice(rounds, (2_000, len(rounds)))
    low, high = np.percentile(np.median(samples, axis=1), (2.5, 97.5))
    return {"ratio": float(np.median(rounds)), "low": float(low), "high": float(high)}


def machine() -> str:
    """The processor and how many cores of it can be used."""
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = {
        key: re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
        for key in ("model name", "cpu family", "model")
    }
    name, family, model = (match.group(1) if match else "" for match in found.values())
    name = re.sub(r"\((R|TM)\)", "", name) or platform.processor() or platform.machine()
    detail = f" (family {family}, model {model})" if family and model else ""
    return f"{name}{detail}, {len(os.sched_getaffinity(0))} cores"
