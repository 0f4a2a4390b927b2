"""The plan of a private run: sampler, noise multiplier and event in one object, so that they agree.

A plan is made before training from public numbers only, and states what the run will have cost.
"""

import dataclasses
import importlib.metadata
import json
import math
import platform
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from jdp import _check, accounting
from jdp._typing import Adjacency, Key, NoiseMultiplier
from jdp.accounting import Accountant, Event, PrivacySpent
from jdp.sampling import (
    Batch,
    FixedBatches,
    HostBatch,
    PoissonSampling,
    Sampler,
    WithoutReplacement,
    capacity_for,
)

Sampling: TypeAlias = Literal["poisson", "without-replacement", "fixed-batches"]

_OVERFLOW_SHARE = 0.001  # of delta, for a Poisson batch to overflow in any step of the run

_UNITS = {
    "zero-out": "one example replaced by a null record that contributes zero; N is public",
    "add-remove": "one example added or removed",
    "replace-one": "one example replaced by any other; N is public",
}
_FACTS = {  # defaults of what only the run knows
    "setting": "central: a trusted curator runs the training and releases its result",
    "unit": "one training example",
    "mechanism": "clipped per-example contributions, summed, plus Gaussian noise",
    "sampler_used": "not stated",
    "steps_taken": "not stated",
    "clip_norms": "not stated",
    "key_source": "not stated",
    "public_data": "not stated",
    "hyperparameter_search": "not stated",
}


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What `plan` returns. The run is private only if it is run as planned.

    Attributes:
      sampler: draws the batches; `plan.batch(key, step)` also refuses steps past the end.
      noise_multiplier: std / joint L2 sensitivity of ONE Gaussian a step, whatever the number of
        parts it is released in; it remembers the adjacency.
      steps: number of steps, the last one excluded.
      batch_size: the divisor of every clipped sum: a public constant, the expected batch size.
      event: the dp-accounting event of the whole run, in `jdp.accounting`'s convention.
      spent: epsilon, delta, adjacency and method of the whole run.
      target_epsilon: the budget asked for, or None where the noise multiplier was given.
    """

    sampler: Sampler
    noise_multiplier: NoiseMultiplier
    steps: int
    batch_size: int
    event: Event
    spent: PrivacySpent
    target_epsilon: float | None = None

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole run, at most the target."""
        return self.spent.epsilon

    @property
    def delta(self) -> float:
        """Delta of the whole run."""
        return self.spent.delta

    @property
    def adjacency(self) -> Adjacency:
        """Which data sets count as neighbours."""
        return self.spent.adjacency

    def batch(self, key: Key, step: int | jax.Array) -> Batch:
        """The sampler's batch, under `jit` or not; a step number known to be outside is refused."""
        self._check_step(step)
        return self.sampler.batch(key, step)

    def host_batch(self, key: Key, step: int) -> HostBatch:
        """The sampler's NumPy batch; a step number outside the plan is refused."""
        self._check_step(step)
        return self.sampler.host_batch(key, step)

    def _check_step(self, step) -> None:
        remedy = f"The plan pays for {self.steps} steps; plan more of them before training."
        _check.step(step, at_most=self.steps - 1, remedy=remedy)

    def to_dict(self, **facts: Any) -> dict[str, Any]:
        """The privacy statement as plain values, after the list of Ponomareva et al. (2023).

        Args:
          **facts: what only the run knows: `sampler_used`, `steps_taken`, `clip_norms`,
            `key_source`, `public_data` and `hyperparameter_search` (each "not stated" where left
            out), `setting`, `unit`, `mechanism`, and anything else worth recording.

        Returns:
          A dictionary of strings, numbers, None, lists and dictionaries.

        Raises:
          ValueError: a fact contradicts what the plan computed.
        """
        sampler = dataclasses.asdict(self.sampler)
        computed = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "adjacency": self.adjacency,
            "noise_multiplier": float(self.noise_multiplier),
            "steps": self.steps,
            "batch_size": self.batch_size,
            "sampler": {"name": type(self.sampler).__name__, **sampler},
            "sampling": self.sampler.statement,
            "accountant": self.spent.accountant,
            "accounting_method": self.spent.method,
            "mu": self.spent.mu,
            "curve": self._curve(),
            "event": str(self.event),
            "versions": _versions(),
        }
        if clash := computed.keys() & facts.keys():
            remedy = "The plan computes these; leave them out."
            _check.fail("facts", f"none of {sorted(computed)}", sorted(clash), remedy)
        return {
            **_plain(computed),
            **_FACTS,
            **{name: _plain(value) for name, value in facts.items()},
        }

    def to_json(self, **facts: Any) -> str:
        """`to_dict` as JSON; an infinite epsilon becomes the string "inf"."""
        return json.dumps(_finite(self.to_dict(**facts)), indent=2, allow_nan=False)

    def report(self, **facts: Any) -> str:
        """The privacy statement for people; arguments as in `to_dict`.

        Returns:
          A text of several lines, without a final newline.
        """
        d = self.to_dict(**facts)
        curve = ", ".join(f"({point['epsilon']:.4g}, {point['delta']:.1e})" for point in d["curve"])
        target = f" (target {d['target_epsilon']:g})" if d["target_epsilon"] is not None else ""
        rows = {
            "Guarantee": f"({d['epsilon']:.6g}, {d['delta']:g})-differential privacy{target}",
            "Setting": d["setting"],
            "Unit": d["unit"],
            "Adjacency": f"{d['adjacency']}: {_UNITS[d['adjacency']]}",
            "Mechanism": d["mechanism"],
            "Releases": "ONE Gaussian a step, of the joint noise multiplier, whatever the number "
            "of parts (gradient, embedding and residual, counts)",
            "Noise multiplier": f"{d['noise_multiplier']:.6g} (std / joint L2 sensitivity)",
            "Clip norms": d["clip_norms"],
            "Sampling": f"{d['sampling']} {_fields(d['sampler'])}",
            "Sampler used": d["sampler_used"],
            "Steps": f"{d['steps']} planned; taken: {d['steps_taken']}",
            "Divisor": f"{d['batch_size']}, public, never the number of records present",
            "Accountant": f"{d['accountant']}: {d['accounting_method']}",
            "Curve": f"(epsilon, delta): {curve}",
            "Gaussian DP": "no closed form" if d["mu"] is None else f"mu = {d['mu']:.6g}, exact",
            "Randomness": d["key_source"],
            "Public data": f"{d['public_data']}; whatever is treated as public is not protected",
            "Hyper-parameters": f"{d['hyperparameter_search']}; a search on the private data is "
            "NOT paid for in the guarantee",
            "Versions": " ".join(f"{name} {version}" for name, version in d["versions"].items()),
        }
        rows |= {name: d[name] for name in facts if name not in _FACTS}
        width = max(map(len, rows)) + 1
        return "\n".join(["Privacy statement"] + [f"  {k:<{width}} {v}" for k, v in rows.items()])

    def _curve(self) -> list[dict[str, float]]:
        deltas = [delta for delta in (self.delta * 10.0**-k for k in range(-1, 3)) if delta < 1]
        accountant: Accountant = "rdp" if self.spent.accountant == "rdp" else "pld"
        spent = (
            accounting.privacy_spent(
                self.event, delta=delta, accountant=accountant, adjacency=self.adjacency
            )
            for delta in deltas
        )
        return [{"epsilon": point.epsilon, "delta": point.delta} for point in spent]


def plan(
    num_examples: int,
    batch_size: int,
    steps: int,
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    sampling: Sampling = "poisson",
    adjacency: Adjacency = "zero-out",
    accountant: Accountant = "pld",
    capacity: int | None = None,
) -> TrainingPlan:
    """Plan a private run: the sampler, the noise and the account that belong together.

    Args:
      num_examples: public number of records.
      batch_size: expected number of records a step, and the divisor of every clipped sum.
      steps: number of optimizer steps (see `steps_for_epochs`).
      delta: in (0, 1); below 1 / num_examples.
      epsilon: the budget, for which the least noise is found. Give this or `noise_multiplier`.
      noise_multiplier: std / joint L2 sensitivity of a step, 0 for a run without privacy.
      sampling: "poisson", "without-replacement" (needs accountant "rdp" and adjacency
        "replace-one") or "fixed-batches" (no amplification). Weighted sampling has no accountant.
      adjacency: "zero-out", "add-remove" or "replace-one".
      accountant: "pld" or "rdp".
      capacity: rows of a Poisson batch. By default the batches of the whole run overflow with
        probability at most delta / 1000. A smaller one saves memory and costs epsilon, exactly
        accounted for.

    Returns:
      A `TrainingPlan`; its epsilon is at most the target.

    Raises:
      ValueError: an argument is out of range, or the sampling cannot be accounted for.
      TypeError: an argument has the wrong type.

    >>> p = plan(num_examples=60_000, batch_size=1_000, steps=3_000, epsilon=2.0, delta=1e-5)
    >>> round(p.noise_multiplier, 2), p.epsilon <= 2.0, p.sampler.capacity
    (1.98, True, 1224)
    """
    delta = _check.delta(delta)
    size_remedy = "It is a public number of records, known without looking at the data."
    _check.integer("num_examples", num_examples, at_least=1, remedy=size_remedy)
    _check.integer("batch_size", batch_size, at_least=1, at_most=num_examples, remedy=size_remedy)
    _check.integer("steps", steps, at_least=1, remedy="Count optimizer steps as an integer.")
    if sampling not in get_args(Sampling):
        remedy = "Only these have an accountant; reweight the loss instead of the sampling."
        _check.fail("sampling", f"one of {sorted(get_args(Sampling))}", sampling, remedy)
    if (epsilon is None) == (noise_multiplier is None):
        given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
        _check.fail("epsilon", "given if and only if noise_multiplier is not", given, "Give one.")
    if sampling != "poisson" and adjacency == "add-remove":
        remedy = "Use 'zero-out', which keeps num_examples public, or sampling='poisson'."
        _check.fail("adjacency", f"'zero-out' or 'replace-one' for {sampling}", adjacency, remedy)
    if sampling != "poisson" and capacity is not None:
        remedy = "These batches always have batch_size rows."
        _check.fail("capacity", f"left out for {sampling}", capacity, remedy)

    if sampling == "poisson":
        rate = batch_size / num_examples
        overflow = _OVERFLOW_SHARE * delta / steps
        if capacity is None:
            capacity = capacity_for(num_examples, rate, overflow)
        sampler = PoissonSampling(num_examples, rate, capacity)
    else:
        kind = FixedBatches if sampling == "fixed-batches" else WithoutReplacement
        sampler = kind(num_examples, batch_size)

    if noise_multiplier is None:
        assert epsilon is not None
        z = accounting.calibrate_event(
            lambda z: sampler.event(z, steps),
            epsilon,
            delta=delta,
            accountant=accountant,
            adjacency=adjacency,
        )
    else:
        z = accounting.under_adjacency(noise_multiplier, adjacency)
    event = sampler.event(float(z), steps)
    spent = accounting.privacy_spent(event, delta=delta, accountant=accountant, adjacency=adjacency)
    return TrainingPlan(sampler, z, steps, batch_size, event, spent, epsilon)


def steps_for_epochs(epochs: int, num_examples: int, batch_size: int) -> int:
    """Steps after which a record has been seen `epochs` times on average, rounded up.

    In integers: in floats, `90 // 0.04` is 2249.

    >>> steps_for_epochs(90, 100, 4)
    2250
    """
    remedy = "Count in whole numbers."
    for name, value in (
        ("epochs", epochs),
        ("num_examples", num_examples),
        ("batch_size", batch_size),
    ):
        _check.integer(name, value, at_least=1, remedy=remedy)
    return -(-epochs * num_examples // batch_size)


def _fields(sampler: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{k} {v}" for k, v in sampler.items() if k != "name") + ")"


def _plain(value: Any) -> Any:
    """The value with arrays and NumPy numbers as Python's."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, jax.Array | np.ndarray | np.generic) else value


def _finite(value: Any) -> Any:
    """The value with infinities, which JSON lacks, as strings."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    names = ("jdp", "jax", "jaxlib", "optax", "dp-accounting", "numpy")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}
