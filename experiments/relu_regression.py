"""Compare private ReLU regressions: GLMtron, DP-SGD, mini-batches, trees, under one budget.

Parts of the study, all by default but for the long ones:

  stall   noiseless SGD from w = 0 stays there, GLMtron does not; how long DP-SGD takes to leave;
          private true gradient against private surrogate on symmetric Bernoulli data
  risk    exact excess risk of all methods over designs, dimensions, sizes and epsilons; every
          method tuned with 30 settings on separate synthetic data sets of the same design
  paper   the published setting of Ding et al. 2025 (learning rates 0.01 and 0.05, batch 32, "500
          epochs"), with the noise that 500 epochs honestly need
  tables  test error on real tables, with settings tuned on synthetic records made from public rows

Results go to a folder (summary.json, report.txt, risk-d10.png); a run that was interrupted is taken
up where it stopped. The last line on standard output is the summary as one JSON object.

  python -m experiments.relu_regression
  python -m experiments.relu_regression --parts risk --designs bernoulli-2 --sizes 100000
  python -m experiments.relu_regression --smoke
"""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _options, _relu_data, _run
from experiments._relu_data import DESIGNS, TABLES, draw, excess_risk
from experiments._relu_methods import METHODS, NUM_PUBLIC, Data, refused, run
from experiments._relu_parts import STALL_SIZES, paper, slopes, stall
from experiments._relu_report import MANY, draw_pictures, report
from experiments._run import UsageError

PARTS = ("stall", "risk", "paper", "tables")
SMOKE: dict[str, Any] = {"designs": ("gaussian",), "sizes": (300,), "epsilons": (2.0,)}
SMOKE |= {"seeds": 2, "tuning_draws": 1}
SMOKE |= {"methods": tuple(m for m, own in METHODS.items() if not own.steps_are_small)}
FEW = 2_000  # records, up to which compiling takes longer than running


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
    tuning_draws: int = 4
    """Separate data sets on which each method's settings are tried; half as many where they are
    large."""
    most_single: int = 1_000_000
    """Most numbers (records times features) for which methods with one record a step are run."""
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
    """Only check that everything works: one design, 300 records, 2 data sets, one epsilon, where
    not given."""


def main(args: Args) -> dict[str, Any]:
    """Run the parts and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    loaded = real_tables(args) if "tables" in args.parts else {}
    check_delta(args, {name: len(table.y) for name, table in loaded.items()})
    default = pathlib.Path("runs", "relu_regression")
    folder = _run.Folder(args.out or default, "relu_regression")
    summary: dict[str, Any] = {
        "experiment": "relu_regression",
        "delta": args.delta,
        "seeds": args.seeds,
        "tuning_draws": args.tuning_draws,
        "settings": {method: len(METHODS[method].grid()) for method in args.methods},
    }
    if "stall" in args.parts:
        summary["stall"] = stall(folder, args.seeds, args.seed, args.delta)
    if "risk" in args.parts:
        summary |= risk(args, folder)
        summary["slopes"] = slopes(summary["risk"])
    if "paper" in args.parts:
        options = (args.paper_size, args.epsilons, args.delta, args.seeds, args.seed)
        summary["paper"] = paper(folder, *options)
    if "tables" in args.parts:
        summary["tables"] = real(args, folder, loaded)
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = report(summary)
    (folder.path / "report.txt").write_text(text)
    if "risk" in args.parts:
        draw_pictures(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    kept_out = ("provenance", "risk", "tables")
    brief = {k: v for k, v in summary.items() if k not in kept_out}
    kept = ("design", "table", "d", "n", "method", "epsilon", "mean", "standard_error")
    for part in ("risk", "tables"):
        rows = summary.get(part, [])
        brief[part] = [{k: v for k, v in row.items() if k in kept} for row in rows]
    return brief


def check(args: Args):
    """Refuse what can be refused before any work."""
    known = {"parts": PARTS, "methods": METHODS, "designs": DESIGNS, "tables": TABLES}
    _options.check_names(args, known, none=("tables",))
    least = {"dimensions": 1, "sizes": 100, "seeds": 1, "tuning_draws": 1, "paper_size": 100}
    _options.check_least(args, least | {"most_single": 0, "epsilons": 1e-3})
    _options.check_seed(args.seed)
    for name in ("epsilons", "sizes", "dimensions"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise UsageError(f"{_options.option(name)} must be different numbers, but got {values}")
    sizes = {"stall": STALL_SIZES, "risk": args.sizes, "paper": (args.paper_size,)}
    check_delta(args, {part: max(sizes[part]) for part in args.parts if part in sizes})


def check_delta(args: Args, records: Mapping[str, int]):
    """Refuse a delta that is too large for one of these numbers of records, or no probability."""
    _options.check_delta(args.delta)
    for where, n in records.items():
        if args.delta > 1 / n:
            bound = f"at most 1 / {n:,} records (of {where})"
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


def tuning_draws(args: Args, n: int) -> int:
    """On how many data sets of n records settings are tried."""
    return args.tuning_draws if n <= MANY else -(-args.tuning_draws // 2)


def moved(sets: list[Data], key) -> list[Data]:
    """The same with a small random first iterate, without which noiseless SGD does not move."""
    keys = jax.random.split(key, len(sets))
    start = lambda k, d: 0.1 * jax.random.normal(k, (d,)) / d**0.5  # noqa: E731
    pairs = zip(keys, sets, strict=True)
    return [data._replace(start=start(k, len(data.start))) for k, data in pairs]


def risk(args: Args, folder: _run.Folder) -> dict[str, Any]:
    """Tuned excess risk of every method in every cell, and the time that each method took."""
    cells = [(g, d, n) for n in args.sizes for d in args.dimensions for g in args.designs]
    tasks = [(cell, m) for cell in cells for m in args.methods]
    most = args.most_single
    tasks = [
        ((design, d, n), m)
        for (design, d, n), m in tasks
        if d * n <= most or not METHODS[m].steps_are_small
    ]
    rows: list[dict[str, Any]] = []
    seconds = dict.fromkeys(args.methods, 0.0)
    held: tuple[Any, Any] = (None, ())
    with _run.progress("risk", len(tasks)) as advance:
        for (design, d, n), method in tasks:
            epsilons = args.epsilons if METHODS[method].private else (None,)
            config = {"design": design, "d": d, "n": n, "method": method, "epsilons": epsilons}
            config |= {"delta": args.delta, "seeds": args.seeds, "seed": args.seed}
            config |= {"tuning_draws": args.tuning_draws, "grid": METHODS[method].grid()}
            piece = f"{design}/d{d}/n{n}/{method}"
            result = folder.get(piece, config)
            if result is None:
                if held[0] != (design, d, n):
                    key = jax.random.fold_in(jax.random.key(args.seed), DESIGNS.index(design))
                    keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, d), n), 3)
                    tune = data_sets(design, n, d, tuning_draws(args, n), keys[0])
                    final = data_sets(design, n, d, args.seeds, keys[1])
                    held = (design, d, n), (tune, final, keys[2])
                begin = time.process_time()
                found = cell(method, epsilons, args.delta, design, *held[1])
                result = {"rows": found, "seconds": time.process_time() - begin}
                result = folder.put(piece, config, result)
            cell_of = {"design": design, "d": d, "n": n, "method": method}
            rows += [cell_of | row for row in result["rows"]]
            seconds[method] += result["seconds"]
            advance(1)
    return {"risk": rows, "seconds_of_processor": seconds}


def cell(method, epsilons, delta, design, tune, final, key) -> list[dict[str, Any]]:
    """Tune one method on the tuning sets, and measure it on the others; one row an epsilon."""
    bound, own = _relu_data.bound(design), METHODS[method]
    keys = jax.random.split(key, 4)
    (tuning_sets, tuning_truths), (sets, truths) = tune, final
    if method == "sgd":
        tuning_sets, sets = moved(tuning_sets, keys[0]), moved(sets, keys[2])
    score = lambda weights: excess_risk(design, weights, tuning_truths)  # noqa: E731
    best, reason = tuned(method, epsilons, delta, tuning_sets, bound, score, keys[1])
    columns = [(setting, epsilon) for epsilon, setting in best.items() if setting is not None]
    few = len(sets[0].y) <= FEW or own.one_pass
    width = len(own.grid()) // len(own.sizes) * len(epsilons) if few else len(epsilons)
    risks = {}
    if columns:
        weights = run(method, columns, keys[3], sets, delta, bound, width)
        found = excess_risk(design, weights, truths)
        risks = {epsilon: found[i] for i, (_, epsilon) in enumerate(columns)}
    return [_row(epsilon, best[epsilon], risks.get(epsilon), reason) for epsilon in epsilons]


def _row(epsilon, setting, risks, reason) -> dict[str, Any]:
    if setting is None:
        return {"epsilon": epsilon, "refused": reason, "risks": [], "mean": None}
    error = risks.std(ddof=1) / len(risks) ** 0.5 if len(risks) > 1 else 0.0
    return {
        "epsilon": epsilon,
        "setting": setting._asdict(),
        "risks": [float(f"{risk:.4g}") for risk in risks],
        "mean": float(risks.mean()),
        "standard_error": float(error),
    }


def tuned(method, epsilons, delta, sets, bound, score, key):
    """For each epsilon the best setting of the grid, if any is allowed; and why one was refused."""
    own, n = METHODS[method], len(sets[0].y)
    columns, reason = [], None
    for epsilon in epsilons:
        for setting in own.grid():
            why = None if epsilon is None else refused(method, n, epsilon, delta, setting)
            reason = reason or why
            columns += [] if why else [(setting, epsilon)]
    best: dict[float | None, Any] = dict.fromkeys(epsilons)
    if columns:
        with np.errstate(all="ignore"):  # too large a learning rate diverges
            risks = score(run(method, columns, key, sets, delta, bound))
        means = np.nan_to_num(risks, nan=1e30, posinf=1e30).clip(max=1e30).mean(1)
        for i in np.argsort(-means):
            best[columns[i][1]] = columns[i][0]
    return best, reason


def real_tables(args: Args) -> dict[str, Any]:
    """The tables that are there."""
    names = args.tables or tuple(name for name in TABLES if name != "diabetes")
    loaded = {name: _relu_data.table(name, args.data_dir) for name in names}
    for name in [name for name, table in loaded.items() if table is None]:
        print(f"{name} is left out: there is no {TABLES[name][0]} (--data-dir)")
        del loaded[name]
    if not loaded:
        print("no table is there: using scikit-learn's diabetes data")
        loaded = {"diabetes": _relu_data.table("diabetes")}
    return loaded


def real(args: Args, folder: _run.Folder, loaded: dict[str, Any]) -> list[dict[str, Any]]:
    """Test error on the tables, with settings tuned on imitations of their public rows."""
    rows, bound = [], _relu_data.bound("gaussian")
    methods = [m for m in args.methods if not METHODS[m].steps_are_small]
    tasks = [(name, m) for name in loaded for m in methods]
    with _run.progress("tables", len(tasks)) as advance:
        for name, method in tasks:
            table = loaded[name]
            assert table is not None
            epsilons = args.epsilons if METHODS[method].private else (None,)
            config = {"table": table.source, "digest": table.digest, "method": method}
            config |= {"epsilons": epsilons}
            config |= {"delta": args.delta, "seeds": args.seeds, "seed": args.seed}
            config |= {"tuning_draws": args.tuning_draws, "grid": METHODS[method].grid()}
            piece = f"table/{name}/{method}"
            result = folder.get(piece, config)
            if result is None:
                key = jax.random.fold_in(jax.random.key(args.seed), 1_000)
                sets = imitations(table, tuning_draws(args, len(table.y)), args.seed)
                found = on_table(method, epsilons, args, table, sets, bound, key)
                result = folder.put(piece, config, {"rows": found})
            table_of = {"table": name, "source": table.source, "method": method}
            rows += [table_of | row for row in result["rows"]]
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


def on_table(method, epsilons, args: Args, table, sets, bound, key) -> list[dict[str, Any]]:
    """Tune on synthetic data, train on the table with several keys, and test."""

    def score(weights):
        return ((table.public_y - np.maximum(weights @ table.public_x.T, 0)) ** 2).mean(-1)

    keys = jax.random.split(key)
    best, reason = tuned(method, epsilons, args.delta, sets, bound, score, keys[0])
    columns = [(setting, epsilon) for epsilon, setting in best.items() if setting is not None]
    parts = (table.x, table.y, np.zeros(table.x.shape[1], np.float32))
    public = (table.public_x[:NUM_PUBLIC], table.public_y[:NUM_PUBLIC])
    data = Data(*map(jnp.asarray, (*parts, *public)))
    repeats = [data] * (args.seeds if METHODS[method].private else 1)
    weights = run(method, columns, keys[1], repeats, args.delta, bound) if columns else ()
    constant = float(np.sqrt(np.mean((table.test_y - table.public_y.mean()) ** 2)))
    found = {}
    for (setting, epsilon), own in zip(columns, weights, strict=True):
        errors = table.test_y - np.maximum(own @ table.test_x.T, 0)
        rmse = np.sqrt((errors**2).mean(1))
        found[epsilon] = {
            "setting": setting._asdict(),
            "mean": float(rmse.mean()),
            "standard_deviation": float(rmse.std(ddof=1)) if len(rmse) > 1 else 0.0,
            "public_mean": constant,
            "unit": table.scale,
        }
    nothing = {"refused": reason, "mean": None}
    return [{"epsilon": epsilon} | found.get(epsilon, nothing) for epsilon in epsilons]


if __name__ == "__main__":
    _run.command_line(Args, main)
