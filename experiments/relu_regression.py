"""Compare private ReLU regressions: GLMtron, DP-SGD, mini-batches, trees, under one budget.

Parts of the study, all by default but for the long ones:

  stall   noiseless SGD from w = 0 stays there, GLMtron does not; how long DP-SGD takes to leave;
          private true gradient against private surrogate on symmetric Bernoulli data
  risk    exact excess risk of all methods over designs, dimensions, sizes and epsilons; every
          method tuned with sixteen settings on separate synthetic data sets of the same design
  paper   the published setting of Ding et al. 2025 (learning rates 0.01 and 0.05, batch 32, "500
          epochs"), with the noise that 500 epochs honestly need
  tables  test error on real tables, with settings tuned on synthetic records made from public rows

Results go to a folder (summary.json, report.txt, risk.png); a run that was interrupted is taken up
where it stopped. The last line on standard output is the summary as one JSON object.

  python -m experiments.relu_regression
  python -m experiments.relu_regression --parts risk --designs bernoulli-2 --sizes 100000
  python -m experiments.relu_regression --smoke
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _relu_data, _run
from experiments._relu_data import DESIGNS, TABLES, draw, excess_risk
from experiments._relu_methods import METHODS, NUM_PUBLIC, Data, Setting, refused, run
from experiments._relu_parts import paper, slopes, stall
from experiments._relu_report import draw_picture, report
from experiments._run import UsageError

PARTS = ("stall", "risk", "paper", "tables")
MOST_SINGLE = 20_000  # records, above which methods with one record a step take too long


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    parts: tuple[str, ...] = ("stall", "risk")
    """Parts of the study: stall, risk, paper, tables."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods to compare."""
    designs: tuple[str, ...] = ("gaussian", "bernoulli-1")
    """Synthetic designs: gaussian, bernoulli-1, bernoulli-2, bernoulli-3, noisy-teacher."""
    dimensions: tuple[int, ...] = (10,)
    """Numbers of features d."""
    sizes: tuple[int, ...] = (1_000, 10_000)
    """Numbers of private records N."""
    epsilons: tuple[float, ...] = (0.2, 1.0)
    """Privacy budgets of each single run."""
    delta: float = 1e-5
    """Probability with which each privacy bound may fail."""
    seeds: int = 5
    """Independent data sets (and noise) for every number; the summary has mean and spread."""
    tuning_draws: int = 2
    """Separate data sets on which each method's sixteen settings are tried."""
    tables: tuple[str, ...] = ()
    """Real tables; by default those that are there, or scikit-learn's diabetes data."""
    data_dir: pathlib.Path | None = None
    """Folder of the tables."""
    paper_size: int = 1_000
    """Records in the part `paper`."""
    seed: int = 0
    """Seed of data and noise. The data are synthetic or public, so the runs need not be private."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/relu_regression."""
    smoke: bool = False
    """Only check that everything works: one design, 300 records, 2 data sets, one epsilon."""


def main(args: Args) -> dict[str, Any]:
    """Run the parts and return the summary."""
    if args.smoke:
        small: dict[str, Any] = {"designs": ("gaussian",), "sizes": (300,), "epsilons": (2.0,)}
        methods = tuple(m for m in args.methods if not METHODS[m].steps_are_small)
        args = dataclasses.replace(args, methods=methods, seeds=2, tuning_draws=1, **small)
    check(args)
    folder = _run.Folder(args.out or pathlib.Path("runs", "relu_regression"))
    summary: dict[str, Any] = {
        "experiment": "relu_regression",
        "delta": args.delta,
        "seeds": args.seeds,
        "tuning_draws": args.tuning_draws,
    }
    if "stall" in args.parts:
        summary["stall"] = stall(folder, args.seeds, args.seed, args.delta)
    if "risk" in args.parts:
        summary["risk"] = risk(args, folder)
        summary["slopes"] = slopes(summary["risk"])
    if "paper" in args.parts:
        options = (args.paper_size, args.epsilons, args.delta, args.seeds, args.seed)
        summary["paper"] = paper(folder, *options)
    if "tables" in args.parts:
        summary["tables"] = real(args, folder)
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = report(summary)
    (folder.path / "report.txt").write_text(text)
    if "risk" in args.parts:
        draw_picture(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    brief = {k: v for k, v in summary.items() if k not in ("provenance", "risk", "tables")}
    kept = ("design", "table", "d", "n", "method", "epsilon", "mean", "standard_error")
    for part in ("risk", "tables"):
        rows = summary.get(part, [])
        brief[part] = [{k: v for k, v in row.items() if k in kept} for row in rows]
    return brief


def check(args: Args):
    """Refuse what can be refused before any work."""
    known = {"parts": PARTS, "methods": METHODS, "designs": DESIGNS, "tables": TABLES}
    for key, names in known.items():
        given = getattr(args, key)
        unknown = [name for name in given if name not in names]
        if unknown or len(set(given)) < len(given) or (key != "tables" and not given):
            got = " ".join(unknown or given) or "nothing"
            raise UsageError(f"--{key} must be different ones of {' '.join(names)}, but got {got}")
    least = {"dimensions": 1, "sizes": 100, "seeds": 1, "tuning_draws": 1, "paper_size": 100}
    for key, low in (least | {"epsilons": 1e-3, "seed": 0}).items():
        value = getattr(args, key)
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(v >= low and np.isfinite(v) for v in values):
            raise UsageError(f"--{key.replace('_', '-')} must be at least {low}, but got {value}")
    if not 0 < args.delta <= 1 / max(args.sizes):
        bound = f"above 0 and at most 1 / {max(args.sizes):,} records"
        raise UsageError(f"--delta must be {bound}, but got {args.delta}")


def data_sets(design: str, n: int, d: int, count: int, key) -> tuple[list[Data], np.ndarray]:
    """Data sets with their public rows, and the true weights (count, d)."""
    sets, truths = [], []
    for part in jax.random.split(key, count):
        x, y, truth = _drawn(design, part, n + NUM_PUBLIC, d)
        public = x[:NUM_PUBLIC], y[:NUM_PUBLIC]
        sets.append(Data(x[NUM_PUBLIC:], y[NUM_PUBLIC:], jnp.zeros(d), *public))
        truths.append(np.asarray(truth))
    return sets, np.stack(truths)


_drawn = jax.jit(draw, static_argnums=(0, 2, 3))


def moved(sets: list[Data], key) -> list[Data]:
    """The same with a small random first iterate, without which noiseless SGD does not move."""
    keys = jax.random.split(key, len(sets))
    start = lambda k, d: 0.1 * jax.random.normal(k, (d,)) / d**0.5  # noqa: E731
    pairs = zip(keys, sets, strict=True)
    return [data._replace(start=start(k, len(data.start))) for k, data in pairs]


def risk(args: Args, folder: _run.Folder) -> list[dict[str, Any]]:
    """Tuned excess risk of every method in every cell."""
    cells = [(g, d, n) for n in args.sizes for d in args.dimensions for g in args.designs]
    free = [m for m in args.methods if not METHODS[m].private]
    tasks = [(cell, m, None) for cell in cells for m in free]
    tasks += [
        (c, m, e) for c in cells for m in args.methods if METHODS[m].private for e in args.epsilons
    ]
    tasks = [t for t in tasks if t[0][2] <= MOST_SINGLE or not METHODS[t[1]].steps_are_small]
    tasks.sort(key=lambda task: cells.index(task[0]))
    rows: list[dict[str, Any]] = []
    held: tuple[Any, Any] = (None, ())
    with _run.progress("risk", len(tasks)) as advance:
        for (design, d, n), method, epsilon in tasks:
            config = {"design": design, "d": d, "n": n, "method": method, "epsilon": epsilon}
            config |= {"delta": args.delta, "seeds": args.seeds, "seed": args.seed}
            config |= {"tuning_draws": args.tuning_draws, "grid": METHODS[method].grid()}
            piece = f"{design}/d{d}/n{n}/{method}" + ("" if epsilon is None else f"/eps{epsilon:g}")
            result = folder.get(piece, config)
            if result is None:
                if held[0] != (design, d, n):
                    key = jax.random.fold_in(jax.random.key(args.seed), DESIGNS.index(design))
                    keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, d), n), 3)
                    tune = data_sets(design, n, d, args.tuning_draws, keys[0])
                    held = (
                        (design, d, n),
                        (tune, data_sets(design, n, d, args.seeds, keys[1]), keys[2]),
                    )
                result = folder.put(
                    piece, config, cell(method, epsilon, args.delta, design, *held[1])
                )
            row = {k: config[k] for k in ("design", "d", "n", "method", "epsilon")} | result
            row.pop("tuning", None)  # stays in results.json
            rows.append(row)
            advance(1)
    return rows


def cell(method, epsilon, delta, design, tune, final, key) -> dict[str, Any]:
    """Tune one method on the tuning sets, and measure it on the others."""
    begin, bound = time.perf_counter(), _relu_data.bound(design)
    sets, truths = tune
    score = lambda weights: excess_risk(design, weights, truths)  # noqa: E731
    best, tuning, reason = tuned(method, epsilon, delta, sets, bound, score, key)
    if best is None:
        return {"refused": reason, "risks": [], "mean": None, "seconds": 0.0}
    sets, truths = final
    keys = jax.random.split(key, 4)
    sets = moved(sets, keys[2]) if method == "sgd" else sets
    weights = run(method, [best], keys[3], sets, epsilon, delta, bound)[0]
    risks = excess_risk(design, weights, truths)
    return {
        "setting": best._asdict(),
        "tuning": tuning,
        "risks": risks.tolist(),
        "mean": float(risks.mean()),
        "standard_error": float(risks.std(ddof=1) / len(risks) ** 0.5) if len(risks) > 1 else 0.0,
        "seconds": time.perf_counter() - begin,
    }


def tuned(method, epsilon, delta, sets, bound, score, key):
    """The best setting of the grid, all mean risks, and why the first refused one was refused."""
    keys = jax.random.split(key, 4)
    sets = moved(sets, keys[0]) if method == "sgd" else sets
    reasons = {
        s: refused(method, len(sets[0].y), epsilon, delta, s) for s in METHODS[method].grid()
    }
    allowed = [s for s, reason in reasons.items() if reason is None]
    first = next((reason for reason in reasons.values() if reason), None)
    if not allowed:
        return None, [], first
    weights = run(method, allowed, keys[1], sets, epsilon, delta, bound)
    with np.errstate(all="ignore"):  # too large a learning rate diverges
        risks = score(weights)
    risks = np.nan_to_num(risks, nan=1e30, posinf=1e30).clip(max=1e30).mean(1).tolist()
    return (
        allowed[int(np.argmin(risks))],
        [[*s, r] for s, r in zip(allowed, risks, strict=True)],
        first,
    )


def real(args: Args, folder: _run.Folder) -> list[dict[str, Any]]:
    """Test error on the tables, with settings tuned on Gaussian data of the same size."""
    names = args.tables or tuple(name for name in TABLES if name != "diabetes")
    loaded = {name: _relu_data.table(name, args.data_dir) for name in names}
    for name in [name for name, table in loaded.items() if table is None]:
        print(f"{name} is left out: there is no {TABLES[name][0]} (--data-dir)")
        del loaded[name]
    if not loaded:
        print("no table is there: using scikit-learn's diabetes data")
        loaded = {"diabetes": _relu_data.table("diabetes")}
    rows, bound = [], _relu_data.bound("gaussian")
    methods = [m for m in args.methods if not METHODS[m].steps_are_small]
    tasks = [(name, m, e) for name in loaded for m in methods for e in args.epsilons]
    tasks = [t for t in tasks if METHODS[t[1]].private or t[2] == args.epsilons[0]]
    with _run.progress("tables", len(tasks)) as advance:
        for name, method, epsilon in tasks:
            table = loaded[name]
            assert table is not None
            epsilon = epsilon if METHODS[method].private else None
            config = {"table": table.source, "method": method, "epsilon": epsilon}
            config |= {"delta": args.delta, "seeds": args.seeds, "seed": args.seed}
            config |= {"tuning_draws": args.tuning_draws, "grid": METHODS[method].grid()}
            config["tuned_on"] = "imitations of public rows"
            piece = f"table/{name}/{method}" + ("" if epsilon is None else f"/eps{epsilon:g}")
            result = folder.get(piece, config)
            if result is None:
                key = jax.random.fold_in(jax.random.key(args.seed), 1_000)
                keys = jax.random.split(key, 3)
                sets = imitations(table, args.tuning_draws, args.seed)
                result = on_table(method, epsilon, args, table, sets, bound, keys[1:])
                result = folder.put(piece, config, result)
            rows.append({"table": name, "source": table.source, "method": method} | result)
            rows[-1]["epsilon"] = epsilon
            advance(1)
    return rows


def imitations(table: _relu_data.Table, count: int, seed: int) -> list[Data]:
    """Synthetic data sets of the table's size: public rows drawn again, with public residuals."""
    w = np.linalg.lstsq(table.public_x, table.public_y, rcond=None)[0]
    fitted = np.maximum(table.public_x @ w, 0)
    sets = []
    for draw_ in range(count):
        rng = np.random.default_rng([seed, draw_])
        rows, errors = (rng.integers(0, len(fitted), len(table.y)) for _ in range(2))
        x, y = table.public_x[rows], fitted[rows] + (table.public_y - fitted)[errors]
        start = np.zeros(x.shape[1], np.float32)
        public = table.public_x[:NUM_PUBLIC], table.public_y[:NUM_PUBLIC]
        sets.append(Data(*map(jnp.asarray, (x, y.astype(np.float32), start, *public))))
    return sets


def on_table(method, epsilon, args: Args, table, sets, bound, keys) -> dict[str, Any]:
    """Tune on synthetic data, train on the table with several keys, and test."""

    def score(weights):
        return ((table.public_y - np.maximum(weights @ table.public_x.T, 0)) ** 2).mean(-1)

    best, _, reason = tuned(method, epsilon, args.delta, sets, bound, score, keys[0])
    if best is None:
        return {"refused": reason, "mean": None}
    parts = (table.x, table.y, np.zeros(table.x.shape[1], np.float32))
    public = (table.public_x[:NUM_PUBLIC], table.public_y[:NUM_PUBLIC])
    data = Data(*map(jnp.asarray, (*parts, *public)))
    sets = [data] * (args.seeds if METHODS[method].private else 1)
    weights = run(method, [Setting(*best)], keys[1], sets, epsilon, args.delta, bound)[0]
    errors = table.test_y - np.maximum(weights @ table.test_x.T, 0)
    rmse = np.sqrt((errors**2).mean(1))
    constant = float(np.sqrt(np.mean((table.test_y - table.public_y.mean()) ** 2)))
    spread = float(rmse.std(ddof=1)) if len(rmse) > 1 else 0.0
    return {
        "setting": best._asdict(),
        "mean": float(rmse.mean()),
        "standard_deviation": spread,
        "public_mean": constant,
        "unit": table.scale,
    }


if __name__ == "__main__":
    _run.command_line(Args, main)
