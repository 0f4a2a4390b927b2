"""Smaller parts of `experiments.relu_regression`: stalling, the paper's setting, slopes."""

import itertools
from typing import Any

import jax
import numpy as np

import jdp
from experiments import _run
from experiments._relu_data import bound, draw, eigenvalues, excess_risk
from jdp.glmtron import Gradient
from jdp.relu_regression import (
    Descent,
    DisjointBlocks,
    FixedThreshold,
    PrivateThreshold,
    PublicThreshold,
    fit,
    plan_blocks,
    unprotected_glmtron,
    unprotected_sgd,
)

STALL_SIZES, STALL_STEPS, STALL_DRAWS = (10_000, 100_000), 100, 12
STALL_RUNS = 20  # at least
STALL_GRID = tuple(itertools.product((2.5, 5.0, 10.0, 20.0, 40.0), (0.025, 0.05, 0.1, 0.2, 0.4)))
GRADIENTS: tuple[Gradient, ...] = ("true", "surrogate", "switch")


def stall(folder: _run.Folder, seeds: int, seed: int, delta: float) -> dict[str, Any]:
    """Where the true gradient stalls, and where noise sets it free; noiseless Bernoulli labels."""
    result: dict[str, Any] = {}
    for name, part in (("from_zero", _from_zero), ("private", _from_random)):
        for n in STALL_SIZES if part is _from_random else STALL_SIZES[:1]:
            config = {"n": n, "seeds": seeds, "seed": seed, "delta": delta, "grid": STALL_GRID}
            piece = f"stall/{name}/n{n}"
            found = folder.get(piece, config)
            if found is None:
                found = folder.put(piece, config, part(n, seeds, seed, delta))
            result |= found if part is _from_zero else {f"{k}_n{n}": v for k, v in found.items()}
    return result


def _make(n: int, d: int):
    return jax.jit(lambda key: draw("bernoulli-1", key, n, d, noise=0.0))


def _from_zero(n: int, seeds: int, seed: int, delta: float) -> dict[str, Any]:
    """SGD, GLMtron and DP-SGD (epsilon 1) started at w = 0."""
    d, design = 10, "bernoulli-1"
    make = _make(n, d)
    plan = jdp.plan(n, n // 10, STALL_STEPS, epsilon=1.0, delta=delta)
    threshold, descent = FixedThreshold(0.1), Descent(5.0, gradient="true")

    def noisy(key, x, y):
        return fit(key, x, y, plan, threshold=threshold, descent=descent).path

    sgd = jax.jit(lambda key, x, y: unprotected_sgd(key, x, y, learning_rate=0.5).path)
    glm = jax.jit(lambda x, y: unprotected_glmtron(x, y, steps=100, learning_rate=5.0).weights)
    noisy, runs = jax.jit(noisy), []
    for key in jax.random.split(jax.random.key(seed + 1), seeds):
        data, noise, order = jax.random.split(key, 3)
        x, y, truth = make(data)
        zero = excess_risk(design, np.zeros(d), truth)
        path = np.asarray(noisy(noise, x, y))
        below = np.flatnonzero(excess_risk(design, path, truth) < zero / 2)
        runs.append(
            {
                "sgd_from_zero_largest_weight": np.abs(np.asarray(sgd(order, x, y))).max(),
                "glmtron_from_zero_share_of_risk_left": excess_risk(design, glm(x, y), truth)
                / zero,
                "dp_sgd_first_step_that_moves": 1 + np.argmax(np.any(path != 0, axis=1)),
                "dp_sgd_steps_to_half_the_risk": 1 + below[0] if len(below) else np.inf,
            }
        )
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def _from_random(n: int, seeds: int, seed: int, delta: float) -> dict[str, Any]:
    """Full-batch private descent from a random start, epsilon 1, tuned for each gradient.

    Few runs stay stuck, and they make the mean: so there are ten runs for every seed, and medians
    and the share of runs that are stuck beside it.
    """
    d, design, runs = 10, "bernoulli-1", max(STALL_RUNS, 10 * seeds)
    make, plan = _make(n, d), plan_blocks(n, n, STALL_STEPS, epsilon=1.0, delta=delta)

    def program(gradient: Gradient):
        def run(key, x, y, start, rate, clip):
            options: dict[str, Any] = {"threshold": FixedThreshold(clip), "start": start}
            return fit(key, x, y, plan, descent=Descent(rate, gradient=gradient), **options).weights

        return jax.jit(jax.vmap(run, (None, None, None, None, 0, 0)))

    programs = {gradient: program(gradient) for gradient in GRADIENTS}
    tune, final = jax.random.split(jax.random.key(seed + 2))

    def risks(key, choices: dict[Any, Any]) -> dict[Gradient, np.ndarray]:
        data, noise, first = jax.random.split(key, 3)
        x, y, truth = make(data)
        start = jax.random.normal(first, (d,)) / d**0.5
        return {
            g: excess_risk(design, programs[g](noise, x, y, start, *np.transpose(own)), truth)
            for g, own in choices.items()
        }

    tries = [
        risks(key, dict.fromkeys(GRADIENTS, STALL_GRID))
        for key in jax.random.split(tune, STALL_DRAWS)
    ]
    best = {g: STALL_GRID[np.mean([own[g] for own in tries], 0).argmin()] for g in GRADIENTS}
    chosen = {g: [setting] for g, setting in best.items()}
    found = [risks(key, chosen) for key in jax.random.split(final, runs)]
    own = {g: np.array([run[g][0] for run in found]) for g in GRADIENTS}
    result: dict[str, Any] = {"runs": runs}
    for g in GRADIENTS:
        result |= {f"private_{g}": float(own[g].mean()), f"{g}_setting": best[g]}
        result[f"private_{g}_median"] = float(np.median(own[g]))
        stuck = own[g] > 10 * np.median(own["surrogate"])
        result[f"share_of_{g}_runs_stuck"] = float(np.mean(stuck))
        result[f"{g}_runs"] = [float(f"{risk:.3g}") for risk in own[g]]
    true, surrogate = own["true"], own["surrogate"]
    result["true_over_surrogate"] = float(true.mean() / surrogate.mean())
    result["true_over_surrogate_median"] = float(np.median(true) / np.median(surrogate))
    return result


def paper(
    folder: _run.Folder,
    n: int,
    epsilons: tuple[float, ...],
    delta: float,
    seeds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Published learning rates and batch, for one pass and for 500, on the Gaussian design.

    DP-MBGLMtron has a fixed threshold: each row says whether the private one, of `batch` rows and
    at the noise of as many passes, would have been refused.
    """
    d, design, batch, rows = 10, "gaussian", 32, []
    fixed = FixedThreshold(0.4)
    methods: dict[str, tuple[float, int, Gradient]] = {
        "dp-sgd": (0.01, 500, "true"),
        "dp-mbglmtron, threshold 0.4": (0.01, 500, "surrogate"),
        "dp-mbglmtron, threshold 0.4, one pass": (0.01, 1, "surrogate"),
        "dp-glmtron, one pass": (0.05, 1, "surrogate"),
    }
    make = jax.jit(lambda key: draw(design, key, n + 100, d))
    with _run.progress("paper", len(methods) * len(epsilons)) as advance:
        for name, epsilon in ((name, e) for name in methods for e in epsilons):
            rate, passes, gradient = methods[name]
            config = {"n": n, "epsilon": epsilon, "delta": delta, "seeds": seeds, "seed": seed}
            result = folder.get(f"paper/{name}/eps{epsilon:g}", config)
            if result is None:
                size = 1 if name.startswith("dp-glmtron") else batch
                steps = passes * (n // size)
                if name == "dp-sgd":
                    plan = jdp.plan(n, size, steps, epsilon=epsilon, delta=delta)
                else:
                    plan = plan_blocks(n, size, steps, epsilon=epsilon, delta=delta)
                descent = Descent(rate, bound(design), gradient=gradient, average="all")

                def one(key, plan=plan, descent=descent, public=size == 1):
                    data, noise = jax.random.split(key)
                    x, y, truth = make(data)
                    threshold = PublicThreshold(x[:100], y[:100]) if public else fixed
                    options: dict[str, Any] = {"threshold": threshold, "descent": descent}
                    return fit(noise, x[100:], y[100:], plan, **options).weights, truth

                keys = jax.random.split(jax.random.key(seed + 2), seeds)
                weights, truth = jax.jit(jax.vmap(one))(keys)
                risks = excess_risk(design, weights, truth)
                result = {
                    "mean": float(risks.mean()),
                    "standard_error": float(risks.std(ddof=1) / seeds**0.5) if seeds > 1 else 0.0,
                    "at_zero": float(excess_risk(design, 0 * truth, truth).mean()),
                    "noise_multiplier": float(plan.noise_multiplier),
                    "private_threshold": _refusal(n, batch, passes, epsilon, delta),
                }
                result = folder.put(f"paper/{name}/eps{epsilon:g}", config, result)
            rows.append({"method": name, "epsilon": epsilon} | result)
            advance(1)
    return rows


def _refusal(n, batch, passes, epsilon, delta) -> str:
    """What the library says to a private threshold of the paper's batch and passes."""
    steps = passes * DisjointBlocks(n, batch, batch).steps_per_epoch
    plan = plan_blocks(n, batch, steps, epsilon=epsilon, delta=delta, threshold_rows=batch)
    try:
        threshold = PrivateThreshold()
        threshold.check(batch, float(plan.noise_multiplier), plan.adjacency)
    except ValueError as error:
        return str(error)
    return "accepted"


def slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fits of log risk = slope log N + intercept, where privacy and where statistics dominate.

    Privacy dominates where the risk is at least four times that of the same program without noise
    (`glmtron`), and below half of that of w = 0; statistics where it is at most twice the former.
    Least squares, weighted by the standard errors of the risks, whence that of the slope. Only for
    designs with equal eigenvalues that were run at three sizes or more: with small eigenvalues, too
    few steps are what limits the risk. Where a regime holds at two sizes only, the line through
    both is no fit; `sizes` tells.
    """
    free = {(r["design"], r["d"], r["n"]): r["mean"] for r in rows if r["method"] == "glmtron"}
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row["epsilon"] is not None and row["mean"] is not None and row["design"] == "gaussian":
            key = (row["design"], row["d"], row["method"], row["epsilon"])
            groups.setdefault(key, []).append(row)
    found = []
    for (design, d, method, epsilon), own in groups.items():
        if len(own) < 3:
            continue
        zero = float(eigenvalues(design, d).sum() / (2 * d))
        ratio = {r["n"]: r["mean"] / free.get((design, d, r["n"]), np.nan) for r in own}
        for regime, chosen in (
            ("privacy", [r for r in own if ratio[r["n"]] >= 4 and r["mean"] < zero / 2]),
            ("statistics", [r for r in own if ratio[r["n"]] <= 2]),
        ):
            if len(chosen) >= 2:
                entry = {"design": design, "d": d, "method": method, "epsilon": epsilon}
                entry |= {"regime": regime, "sizes": [r["n"] for r in chosen]}
                found.append(entry | _fit(chosen))
    return found


def _fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The line through log risk over log N."""
    x, y = (np.log([r[k] for r in rows]) for k in ("n", "mean"))
    errors = np.array([max(r["standard_error"] / r["mean"], 1e-3) for r in rows])
    design = np.stack([x, np.ones_like(x)], 1) / errors[:, None]
    (slope, intercept), *_ = np.linalg.lstsq(design, y / errors, rcond=None)
    error = float(np.linalg.inv(design.T @ design)[0, 0] ** 0.5)
    return {"slope": float(slope), "standard_error": error, "intercept": float(intercept)}
