"""How many coordinates the closed form should keep: error against k, and the best k's growth.

The best k is where noise meets bias. Its slope in epsilon N depends on how the clip norm grows with
k, and it is only a matter of noise where that outweighs the sampling error of a mean; cells where
it does not are shown, and left out of the fit.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _run
from experiments._hypernet_data import DELTA, best_k_slope, draw
from jdp.set_embedding import plan_embedding, private_embedding

DIMENSION = 128
RULES = ("k", "3 sqrt(k)")
NOISE_OVER_SAMPLING = 1.0  # of the variance, from which on a cell is in the fit


def grid_of_k(d: int) -> list[int]:
    """About thirty values of k, evenly spaced in log k."""
    return sorted({round(k) for k in np.geomspace(1, d, 32)})


def clip_norm(rule: str, k):
    """C."""
    return k if rule == "k" else 3 * jnp.sqrt(k)


@functools.cache
def _program(n: int, d: int):
    ks = jnp.array(grid_of_k(d), jnp.float32)

    def one(key, gamma, zs):
        data_key, noise_key = jax.random.split(key)
        x, y, w = draw(data_key, n, d, gamma)

        def at(k, rule):
            kept = jnp.arange(d) < k

            def release(z):
                encode = lambda record: jnp.where(kept, record[1] * record[0], 0.0)  # noqa: E731
                e = private_embedding(
                    jax.random.fold_in(noise_key, k.astype(jnp.int32)),
                    encode,
                    (x, y),
                    clip_norm=clip_norm(rule, k),
                    noise_multiplier=z,
                    num_records=n,
                    adjacency="zero-out",
                )
                return jnp.sum((jnp.where(kept, e, 0.0) - w) ** 2)

            return jax.vmap(release)(zs)

        curves = [jax.lax.map(functools.partial(at, rule=rule), ks) for rule in RULES]
        return jnp.stack(curves), jnp.sum(w**2)

    return jax.jit(lambda keys, gamma, zs: jax.lax.map(lambda key: one(key, gamma, zs), keys))


def measure(keys, n: int, gamma: float, epsilons, d: int = DIMENSION) -> dict[str, Any]:
    """Mean relative errors by rule, epsilon and k."""
    begin = time.perf_counter()
    plans = [plan_embedding(n, epsilon=e, delta=DELTA) for e in epsilons]
    zs = jnp.array([float(plan.noise_multiplier) for plan in plans])
    found, norms = map(np.asarray, _program(n, d)(keys, jnp.float32(gamma), zs))
    means = found.mean(0) / norms.mean()  # (rules, k, epsilons)
    return {
        "n": n,
        "gamma": gamma,
        "d": d,
        "epsilons": list(epsilons),
        "noise_multipliers": zs.tolist(),
        "k": grid_of_k(d),
        "errors": {rule: means[i].T.tolist() for i, rule in enumerate(RULES)},
        "mean_square": float(norms.mean()),
        "seconds": time.perf_counter() - begin,
    }


def best(cell: dict[str, Any], rule: str, index: int) -> dict[str, Any]:
    """The best k of one curve, by a parabola in log k about the least value."""
    ks, errors = np.array(cell["k"]), np.array(cell["errors"][rule][index])
    low = int(errors.argmin())
    near = np.abs(np.log(ks / ks[low])) < np.log(2.5)
    k = float(ks[low])
    if 0 < low < len(ks) - 1 and near.sum() >= 4:
        a, b, _ = np.polyfit(np.log(ks[near]), np.log(errors[near]), 2)
        if a > 0:
            k = float(np.exp(np.clip(-b / (2 * a), np.log(ks[near].min()), np.log(ks[near].max()))))
    n, z = cell["n"], cell["noise_multipliers"][index]
    noise = (z * float(clip_norm(rule, k)) / n) ** 2
    ratio = noise / ((1 + cell["mean_square"]) / n)
    inside = 1.5 < k < cell["d"] / 1.5 and ratio > NOISE_OVER_SAMPLING
    epsilon = cell["epsilons"][index]
    return {
        "gamma": cell["gamma"],
        "rule": rule,
        "n": n,
        "epsilon": epsilon,
        "epsilon_n": epsilon * n,
        "k": k,
        "error": float(errors[low]),
        "noise_over_sampling": float(ratio),
        "in_fit": bool(inside),
    }


def slopes(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-log slopes of the best k in epsilon N, by gamma and rule."""
    found = []
    for gamma, rule in dict.fromkeys((p["gamma"], p["rule"]) for p in points):
        own = [p for p in points if (p["gamma"], p["rule"]) == (gamma, rule)]
        fit = [p for p in own if p["in_fit"]]
        row = {"gamma": gamma, "rule": rule, "cells": len(fit), "of": len(own), "slope": None}
        row["predicted"] = best_k_slope(gamma, "k" if rule == "k" else "sqrt")
        row["paper"] = best_k_slope(gamma, "k")
        if len(fit) >= 4 and len({p["epsilon_n"] for p in fit}) >= 3:
            x, y = (np.log([p[name] for p in fit]) for name in ("epsilon_n", "k"))
            (slope, at), covariance = np.polyfit(x, y, 1, cov=True)
            row |= {"slope": float(slope), "standard_error": float(covariance[0, 0] ** 0.5)}
            row["k_over_rate"] = float(np.exp(at + slope * x.mean() - row["predicted"] * x.mean()))
        found.append(row)
    return found


def part(folder: _run.Folder, sizes, gammas, epsilons, seeds: int, seed: int) -> dict[str, Any]:
    """Measure all cells; returns them, the best k of each curve, and the slopes."""
    cells = []
    with _run.progress("coordinates", len(sizes) * len(gammas)) as advance:
        for gamma in gammas:
            for n in sizes:
                config = {"seeds": seeds, "seed": seed, "epsilons": list(epsilons), "d": DIMENSION}
                config |= {"delta": DELTA, "k": grid_of_k(DIMENSION), "rules": list(RULES)}
                piece = f"coordinates/gamma{gamma:g}/n{n}"
                result = folder.get(piece, config)
                if result is None:
                    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 3), seeds)
                    result = folder.put(piece, config, measure(keys, n, gamma, epsilons))
                cells.append(result)
                advance(1)
    points = [
        best(cell, rule, i)
        for cell in cells
        for rule in RULES
        for i in range(len(cell["epsilons"]))
    ]
    return {"cells": cells, "best": points, "slopes": slopes(points)}
