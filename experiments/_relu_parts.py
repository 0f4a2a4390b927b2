"""Smaller parts of `experiments.relu_regression`: stalling, the paper's setting, slopes."""

import itertools
from typing import Any

import jax
import numpy as np

import jdp
from experiments import _run
from experiments._relu_data import bound, draw, eigenvalues, excess_risk
from jdp.relu_regression import (
    Descent,
    FixedThreshold,
    PrivateThreshold,
    PublicThreshold,
    fit,
    plan_blocks,
    unprotected_glmtron,
    unprotected_sgd,
)

STALL_SIZE, STALL_DIMENSION, STALL_STEPS = 10_000, 10, 100


def stall(folder: _run.Folder, seeds: int, seed: int, delta: float) -> dict[str, Any]:
    """Where the true gradient stalls, and where noise sets it free."""
    config = {"n": STALL_SIZE, "d": STALL_DIMENSION, "seeds": seeds, "seed": seed, "delta": delta}
    done = folder.get("stall", config)
    if done is not None:
        return done
    n, d, design = STALL_SIZE, STALL_DIMENSION, "bernoulli-1"
    make = jax.jit(lambda key: draw(design, key, n, d, noise=0.0))
    sgd = jax.jit(lambda key, x, y: unprotected_sgd(key, x, y, learning_rate=0.5).path)
    glm = jax.jit(lambda x, y: unprotected_glmtron(x, y, steps=100, learning_rate=5.0).weights)
    poisson = jdp.plan(n, n // 10, 100, epsilon=1.0, delta=delta)
    private_sgd = jax.jit(
        lambda key, x, y: (
            fit(
                key,
                x,
                y,
                poisson,
                threshold=FixedThreshold(0.1),
                descent=Descent(5.0, gradient="true"),
            ).path
        )
    )
    full = plan_blocks(n, n, STALL_STEPS, epsilon=1.0, delta=delta)
    grid = tuple(itertools.product((5.0, 10.0, 20.0, 40.0), (0.05, 0.1, 0.2)))
    program = {
        gradient: jax.jit(
            lambda key, x, y, start, rate, clip, gradient=gradient: (
                fit(
                    key,
                    x,
                    y,
                    full,
                    threshold=FixedThreshold(clip),
                    descent=Descent(rate, gradient=gradient),
                    start=start,
                ).weights
            )
        )
        for gradient in ("true", "surrogate", "switch")
    }
    root = jax.random.split(jax.random.key(seed + 1), 2)
    found: dict[str, list[float]] = {}
    best: dict[str, tuple[float, float]] = {}
    for part, keys in (("tuning", root[:1]), ("final", root[1:])):
        risks: dict[Any, list[float]] = {}
        for key in jax.random.split(keys[0], 2 if part == "tuning" else seeds):
            data, noise, first, order = jax.random.split(key, 4)
            x, y, truth = make(data)
            start = jax.random.normal(first, (d,)) / d**0.5
            for gradient, run in program.items():
                for choice in grid if part == "tuning" else (best[gradient],):
                    value = excess_risk(design, run(noise, x, y, start, *choice), truth)
                    risks.setdefault((gradient, choice), []).append(float(value))
            if part == "tuning":
                continue
            zero = excess_risk(design, np.zeros(d), truth)
            path = np.asarray(private_sgd(noise, x, y))
            below = excess_risk(design, path, truth) < zero / 2
            values = {
                "sgd_from_zero_largest_weight": np.abs(np.asarray(sgd(order, x, y))).max(),
                "glmtron_from_zero_share_of_risk_left": excess_risk(design, glm(x, y), truth)
                / zero,
                "dp_sgd_first_step_that_moves": 1 + np.argmax(np.any(path != 0, axis=1)),
                "dp_sgd_steps_to_half_the_risk": 1 + np.argmax(below) if below.any() else np.inf,
            }
            for name, value in values.items():
                found.setdefault(name, []).append(float(value))
        for gradient in program:
            own = {c: float(np.mean(r)) for (g, c), r in risks.items() if g == gradient}
            best[gradient] = min(own, key=own.__getitem__)
            if part == "final":
                found[f"private_{gradient}_risk"] = risks[gradient, best[gradient]]
    result: dict[str, Any] = {name: float(np.mean(values)) for name, values in found.items()}
    ratio = result["private_true_risk"] / result["private_surrogate_risk"]
    result |= {"private_true_over_surrogate": ratio, "runs": found, "settings": best}
    return folder.put("stall", config, result)


def paper(folder: _run.Folder, n: int, epsilons, delta: float, seeds: int, seed: int):
    """Published learning rates and batch, for one pass and for 500, on the Gaussian design."""
    d, design, batch, rows = 10, "gaussian", 32, []
    fixed = FixedThreshold(0.4)
    methods = {
        "dp-sgd": (0.01, 500, "true"),
        "dp-mbglmtron": (0.01, 500, "surrogate"),
        "dp-mbglmtron, one pass": (0.01, 1, "surrogate"),
        "dp-glmtron, one pass": (0.05, 1, "surrogate"),
    }
    make = jax.jit(lambda key: draw(design, key, n + 100, d))
    with _run.progress("paper", len(methods) * len(epsilons)) as advance:
        for (name, (rate, passes, gradient)), epsilon in itertools.product(
            methods.items(), epsilons
        ):
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
                    "private_threshold": _refusal(n, batch, epsilon, delta),
                }
                result = folder.put(f"paper/{name}/eps{epsilon:g}", config, result)
            rows.append({"method": name, "epsilon": epsilon} | result)
            advance(1)
    return rows


def _refusal(n, batch, epsilon, delta) -> str:
    """What the library says to a private threshold of the paper's batch."""
    plan = plan_blocks(n, batch, epsilon=epsilon, delta=delta, threshold_rows=batch)
    try:
        threshold = PrivateThreshold()
        threshold.check(batch, float(plan.noise_multiplier), plan.adjacency)
    except ValueError as error:
        return str(error)
    return "accepted"


def slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Least squares slopes of log risk against log N, where privacy and where statistics dominate.

    Privacy dominates where the risk is at least four times that of the same program without noise
    (`glmtron`), and below half of that of w = 0; statistics where it is at most twice the former.
    """
    free = {(r["design"], r["d"], r["n"]): r["mean"] for r in rows if r["method"] == "glmtron"}
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row["epsilon"] is not None and row["mean"] is not None:
            key = (row["design"], row["d"], row["method"], row["epsilon"])
            groups.setdefault(key, []).append(row)
    found = []
    for (design, d, method, epsilon), own in groups.items():
        zero = float(eigenvalues(design, d).sum() / (2 * d))
        ratio = {r["n"]: r["mean"] / free.get((design, d, r["n"]), np.nan) for r in own}
        for regime, chosen in (
            ("privacy", [r for r in own if ratio[r["n"]] >= 4 and r["mean"] < zero / 2]),
            ("statistics", [r for r in own if ratio[r["n"]] <= 2]),
        ):
            if len(chosen) >= 2:
                x, y = (np.log([r[k] for r in chosen]) for k in ("n", "mean"))
                entry = {"design": design, "d": d, "method": method, "epsilon": epsilon}
                entry |= {"regime": regime, "sizes": [r["n"] for r in chosen]}
                found.append(entry | {"slope": float(np.polyfit(x, y, 1)[0])})
    return found
