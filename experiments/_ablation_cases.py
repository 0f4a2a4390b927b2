"""The cases of `experiments.gep_ablation`: one thing changed at a time around a default."""

import dataclasses
from typing import Any

GEP, BOTH = ("gep",), ("gep", "b-gep")
RANKS = (10, 50, 150, 400)


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting in one panel.

    Attributes:
      line: the row of the part's table, a line in its panel.
      value: the column, a place on the horizontal axis.
      method: as in `experiments.gep`.
      change: what differs from the method's default: fields of `Setting`, and `anchors` or
        `num_anchors`.
    """

    line: str
    value: str
    method: str
    change: dict[str, Any]

    @property
    def name(self) -> str:
        """The same for the same runs, in whichever part: these are then done once."""
        return " ".join([self.method, *(f"{k}={v}" for k, v in sorted(self.change.items()))])


def _cases(methods, changes: dict[str, dict[str, Any]], note: str = "") -> list[Case]:
    return [
        Case(f"{method}{note}", value, method, change)
        for method in methods
        for value, change in changes.items()
    ]


def _ranks(change: dict[str, Any], note: str) -> list[Case]:
    changes = {f"{k}": change | ({"rank": k} if k != 150 else {}) for k in RANKS}
    return _cases(BOTH, changes, note)


def _anchors() -> list[Case]:
    few = {f"{m}": {"rank": 50} | ({"num_anchors": m} if m < 500 else {}) for m in (50, 150, 500)}
    natural = {f"{m}": {"anchors": "tiny-imagenet", "num_anchors": m} for m in (500, 2_000)}
    return _cases(BOTH, few, ", rank 50") + _cases(GEP, natural, ", natural images, rank 150")


def _power() -> list[Case]:
    counts = (1, 2, 4)
    more = {n: {"power_iterations": n} if n > 1 else {} for n in counts}
    warm = {f"{n}": more[n] for n in counts}
    cold = {f"{n}": more[n] | {"warm_start": False} for n in counts}
    return _cases(GEP, warm, ", warm start") + _cases(GEP, cold, ", Gaussian start")


def _refresh() -> list[Case]:
    every = {n: {"refresh_every": n} if n != 10 else {} for n in (1, 10, 50)}
    warm = {f"{n}": change for n, change in every.items()}
    cold = {f"{n}": change | {"warm_start": False} for n, change in every.items()}
    return _cases(GEP, warm, ", warm start") + _cases(GEP, cold, ", Gaussian start")


def _levers() -> list[Case]:
    all_of_them = {"augmentations": 4, "average": 0.9, "batch_size": 512}
    shared = {"none": {"average": 0.0}, "4 views": {"augmentations": 4, "average": 0.0}}
    shared |= {"average 0.9": {"average": 0.9}, "batch 512": {"batch_size": 512, "average": 0.0}}
    shared |= {"all three": all_of_them}
    own = {"dp-sgd": 0.0, "gep": 0.9}  # the average that is a method's default
    return [
        Case(method, value, method, {k: v for k, v in change.items() if (k, v) != ("average", had)})
        for method, had in own.items()
        for value, change in shared.items()
    ]


SOURCES: dict[str, dict[str, Any]] = {
    "random labels": {},
    "true labels": {"subspace": "true-labels"},
    "natural images": {"anchors": "tiny-imagenet", "num_anchors": 500},
    "other digits": {"anchors": "digits", "num_anchors": 500},
    "Gaussian": {"subspace": "gaussian"},
}
NOISE: dict[str, dict[str, Any]] = {
    "equal split": {},
    "optimal split": {"noise_split": "optimal"},
    "joint clip": {"joint_clip": True},
}
GROUPS: dict[str, dict[str, Any]] = {"1": {}, "2": {"groups": 2}, "4": {"groups": 4}}
CASES: dict[str, list[Case]] = {
    "rank": _ranks({}, "") + _ranks({"whitening": 0.0}, ", no whitening"),
    "anchors": _anchors(),
    "source": _cases(BOTH, SOURCES),
    "power": _power(),
    "refresh": _refresh(),
    "noise": _cases(GEP, NOISE),
    "groups": _cases(GEP, GROUPS),
    "levers": _levers(),
}
TITLES = {
    "rank": "rank k",
    "anchors": "number of anchors m",
    "source": "what spans the subspace",
    "power": "power iterations, every 10 steps",
    "refresh": "steps between two subspaces",
    "noise": "budget between the two parts",
    "groups": "parameter groups",
    "levers": "what made dp-sgd strong since 2021",
}
