"""Private linear regression by one noisy mean (DP-DeepSets), against gradients and moments.

The case study of Nishikawa et al. (2026): x uniform on the sphere of radius sqrt(d), weights that
decay as i^-gamma, y = w.x + N(0, 1), N = d^(1 + zeta) private records. Errors are excess risks
relative to that of w = 0. Methods, all under one (epsilon, delta), zero-out adjacency:

  learned       DP-DeepSets trained on synthetic public regressions (no setting is tuned)
  closed-form   k coordinates of the clipped mean of y x, which is an untrained DP-DeepSets
  bayes-mean    the clipped mean in all coordinates, shrunk by the public prior
  dp-gd dp-sgd  clipped gradients: full batches, and Poisson samples of a quarter
  adassp        noisy second and first moments, then a ridge

All but `learned` are tuned for every number with 24 settings on separate synthetic data sets.
Parts of the study:

  dimension     error against d, for gammas and zetas
  epsilon       error against epsilon, at d = 64 and zeta = 1/2
  size          error against N, at d = 64
  coordinates   closed form: error against k, and how the best k grows with epsilon N

Results go to a folder (summary.json, report.txt, regression.png); a run that was interrupted is
taken up where it stopped. The last line on standard output is the summary as one JSON object.

  python -m experiments.hypernet_regression              everything, 20 minutes on one busy core
  python -m experiments.hypernet_regression --parts coordinates
  python -m experiments.hypernet_regression --smoke      seconds: only to see that it works
"""

import dataclasses
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from experiments import _hypernet_coordinates, _hypernet_learned, _hypernet_rivals, _options, _run
from experiments._hypernet_data import DELTA, rate_slope, relative, sgd_lower_bound, size_of
from experiments._hypernet_report import draw_picture, group, report
from experiments._hypernet_rivals import METHODS
from experiments._run import UsageError

PARTS = ("dimension", "epsilon", "size", "coordinates")
ALL = ("learned", *METHODS)
DIMENSION = 64  # of the parts epsilon and size
SMOKE: dict[str, Any] = {"dimensions": (8, 16), "gammas": (1.0,), "zetas": (0.5,)}
SMOKE |= {"epsilons": (1.0,), "sizes": (64,), "steps": 100, "seeds": 4, "tuning_draws": 2}
MOST_FOR_MOMENTS = 256  # features, above which eigenvalues take longer than all the rest


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    parts: tuple[str, ...] = PARTS
    """Parts of the study: dimension, epsilon, size, coordinates."""
    methods: tuple[str, ...] = ALL
    """Methods to compare."""
    dimensions: tuple[int, ...] = (16, 64, 256, 1024)
    """Numbers of features d, of the part dimension."""
    gammas: tuple[float, ...] = (1.0, 1.5)
    """Decays of the weights, above 1/2; all but the first with the last zeta only."""
    zetas: tuple[float, ...] = (0.0, 0.25, 0.5)
    """N = d^(1 + zeta), in the part dimension."""
    epsilons: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    """Privacy budgets of the part epsilon; all other parts but coordinates have 1."""
    sizes: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    """Numbers of private records N, of the part size."""
    seeds: int = 24
    """Private data sets for every number, apart from those that settings are tuned on."""
    tuning_draws: int = 12
    """Separate data sets on which each method's 24 settings are tried."""
    steps: int = 1_000
    """Training steps of each DP-DeepSets up to 64 features, and in proportion to them above."""
    most_trained: int = 300_000
    """N d above which no DP-DeepSets is trained; the closed form goes on alone."""
    most_measured: int = 8_000_000
    """N d above which nothing is measured."""
    seed: int = 0
    """Seed of data and noise. The data are synthetic, so the runs need not be private."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/hypernet_regression, or runs/hypernet_regression-smoke."""
    smoke: bool = False
    """Only check that everything works: d of 8 and 16, few data sets and steps, where not given."""


def main(args: Args) -> dict[str, Any]:
    """Run the parts and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    check(args)
    name = "hypernet_regression"
    default = pathlib.Path("runs", f"{name}-smoke" if args.smoke else name)
    folder = _run.Folder(args.out or default, name)
    rest = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("out", "smoke")}
    summary: dict[str, Any] = {"experiment": "hypernet_regression", "delta": DELTA} | rest
    wanted = cells(args)
    unique = list(dict.fromkeys(cell for own in wanted.values() for cell in own))
    rows = {}
    tasks = runs(args, unique)
    with _run.progress("methods", len(tasks)) as advance:
        for cell, method in tasks:
            rows[cell, method] = measured(cell, method, args, folder)
            advance(1)
    for part, own in wanted.items():
        summary[part] = [rows[c, m] for c in own for m in args.methods if (c, m) in rows]
    if "dimension" in wanted:
        summary["slopes"] = slopes(summary["dimension"])
    if "coordinates" in args.parts:
        scale = 4 if args.smoke else 1
        options = ((2048 // scale, 8192 // scale), args.gammas, (0.0625, 0.125, 0.25, 0.5, 1, 2, 4))
        options = (*options, args.seeds, args.seed)
        summary["coordinates"] = _hypernet_coordinates.part(folder, *options)
    spent = [row["seconds"] for row in rows.values()]
    spent += [cell["seconds"] for cell in summary.get("coordinates", {}).get("cells", [])]
    summary["seconds"] = sum(spent)  # also of pieces that an earlier, interrupted run finished
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = report(summary)
    (folder.path / "report.txt").write_text(text)
    draw_picture(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    return brief(summary)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One size of problem."""

    gamma: float
    d: int
    n: int
    epsilon: float


def cells(args: Args) -> dict[str, list[Cell]]:
    """The cells of each part."""
    found: dict[str, list[Cell]] = {}
    gamma = args.gammas[0]
    if "dimension" in args.parts:
        every = itertools.product(args.gammas[:1], args.zetas, args.dimensions)
        every = (*every, *itertools.product(args.gammas[1:], args.zetas[-1:], args.dimensions))
        own = [Cell(g, d, size_of(d, zeta), 1.0) for g, zeta, d in every]
        found["dimension"] = [cell for cell in own if cell.n * cell.d <= args.most_measured]
    d = min(DIMENSION, max(args.dimensions))
    if "epsilon" in args.parts:
        n = size_of(d, 0.5)
        found["epsilon"] = [Cell(gamma, d, n, epsilon) for epsilon in args.epsilons]
    if "size" in args.parts:
        found["size"] = [Cell(gamma, d, n, 1.0) for n in args.sizes]
    return found


def runs(args: Args, among: list[Cell]) -> list[tuple[Cell, str]]:
    """Every cell with every method that is not too dear for it."""
    found = [(cell, method) for cell in among for method in args.methods]
    found = [r for r in found if r[1] != "learned" or r[0].n * r[0].d <= args.most_trained]
    return [r for r in found if r[1] != "adassp" or r[0].d <= MOST_FOR_MOMENTS]


def check(args: Args):
    """Refuse what can be refused before any work."""
    _options.check_names(args, {"parts": PARTS, "methods": ALL})
    least: dict[str, float] = {"dimensions": 4, "gammas": 0.51, "zetas": 0, "epsilons": 1e-2}
    least |= {"sizes": 16, "seeds": 1, "tuning_draws": 1, "steps": 100}
    _options.check_least(args, least | {"most_trained": 0, "most_measured": 1})
    _options.check_seed(args.seed)
    if args.steps % _hypernet_learned.CHUNK:
        chunk = _hypernet_learned.CHUNK
        raise UsageError(f"--steps must be a multiple of {chunk}, but got {args.steps}")
    for part, own in cells(args).items():
        if not runs(args, own):
            raise UsageError(
                f"--parts {part} has nothing to measure: all of it exceeds --most-measured "
                f"{args.most_measured}, or for learned --most-trained {args.most_trained}, or for "
                f"adassp {MOST_FOR_MOMENTS} dimensions"
            )


def training_steps(args: Args, d: int) -> int:
    """Steps of one training; at 256 features a quarter of them leave it behind the closed form."""
    return args.steps * max(1, d // DIMENSION)


def measured(cell: Cell, method: str, args: Args, folder: _run.Folder) -> dict[str, Any]:
    """One method in one cell: tuned or trained apart, and measured on the private data sets."""
    config: dict[str, Any] = dataclasses.asdict(cell) | {"method": method, "delta": DELTA}
    config |= {"seeds": args.seeds, "seed": args.seed}
    if method == "learned":
        config |= {
            "steps": training_steps(args, cell.d),
            "learning_rate": _hypernet_learned.LEARNING_RATE,
        }
        config |= {"width": _hypernet_learned.WIDTH, "records": _hypernet_learned.RECORDS}
    else:
        config |= {"tuning_draws": args.tuning_draws, "grid": METHODS[method].grid()}
    piece = f"{method}/gamma{cell.gamma:g}/d{cell.d}/n{cell.n}/eps{cell.epsilon:g}"
    result = folder.get(piece, config)
    if result is None:
        result = folder.put(piece, config, measure(cell, method, args, piece))
    return dataclasses.asdict(cell) | {"method": method} | result


def measure(cell: Cell, method: str, args: Args, label: str) -> dict[str, Any]:
    """As `measured`, without the folder."""
    begin = time.perf_counter()
    size = (cell.n, cell.d, cell.gamma, cell.epsilon)
    tune, final, train = jax.random.split(jax.random.key(args.seed), 3)
    final = jax.random.split(final, args.seeds)
    extra: dict[str, Any] = {}
    if method == "learned":
        params, losses = _hypernet_learned.train(
            train[None], *size, training_steps(args, cell.d), label
        )
        errors, norms = _hypernet_learned.errors(params, final, *size)
        errors, extra = errors[0], {"public_loss": float(losses[0])}
    else:
        keys = jax.random.split(tune, args.tuning_draws)
        best, tuning = _hypernet_rivals.tuned(method, keys, *size)
        errors, norms = _hypernet_rivals.errors(method, [best], final, *size)
        errors, extra = errors[0], {"setting": best._asdict(), "tuning": tuning}
    mean, standard_error = relative(errors, norms)
    result = {"mean": mean, "standard_error": standard_error, "errors": errors.tolist()}
    result |= {"norms": norms.tolist(), "seconds": time.perf_counter() - begin}
    return result | extra


def slopes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-log slopes of the error in d, from d = 64 on, beside the paper's rate."""
    found = []
    for (gamma, zeta, method), own in group(rows, "gamma", "zeta", "method").items():
        own = [r for r in own if r["d"] >= 64] or own
        if len(own) < 2:
            continue
        x, y = (np.log([r[name] for r in own]) for name in ("d", "mean"))
        row = {"gamma": gamma, "zeta": zeta, "method": method}
        row |= {"slope": float(np.polyfit(x, y, 1)[0]), "paper": (1 + zeta) * rate_slope(gamma)}
        bounds = np.log([sgd_lower_bound(r["d"], r["n"], r["epsilon"]) for r in own])
        row["sgd_lower_bound"] = float(np.polyfit(x, bounds, 1)[0])
        found.append(row)
    return found


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without long lists, for the last line."""
    kept = ("gamma", "d", "n", "epsilon", "method", "mean", "standard_error")
    result = {k: v for k, v in summary.items() if k not in (*PARTS, "provenance")}
    for part in PARTS[:-1]:
        if part in summary:
            result[part] = [{k: row[k] for k in kept} for row in summary[part]]
    if "coordinates" in summary:
        result["coordinates"] = summary["coordinates"]["slopes"]
    return result


if __name__ == "__main__":
    _run.command_line(Args, main)
