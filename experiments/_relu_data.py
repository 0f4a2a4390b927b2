"""Data for ReLU regression: synthetic designs whose risk is known exactly, and real tables.

Synthetic labels are ReLU(w*.x) + noise with |w*| = 1; every design has trace(H) = 1:

  gaussian        x ~ N(0, I/d), Gaussian label noise 0.1
  bernoulli-k     x = e_i or -e_i with probabilities proportional to i^-k, k = 1, 2, 3 (Wu et al.
                  2023), Gaussian label noise 0.1
  noisy-teacher   x ~ N(0, H) with eigenvalues proportional to 1/i, label noise 0.1 times Student's
                  t with 3 degrees of freedom

Tables are scaled by 1,000 rows that count as public and leave the private part.
"""

import dataclasses
import hashlib
import lzma
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments._options import UNREADABLE
from experiments._run import UsageError
from jdp.relu_regression import predict

DESIGNS = ("gaussian", "bernoulli-1", "bernoulli-2", "bernoulli-3", "noisy-teacher")
BOUNDS = {"gaussian": 1.25, "noisy-teacher": 2.0}  # of |x|, public; 1 for the others
NOISE = 0.1
NUM_PUBLIC = 1_000
SHARED = pathlib.Path(__file__).parents[2] / "shared" / "data" / "tables"
TABLES = {  # file, target, columns left out
    "gas-turbine": ("gas_turbine_2011_2015.csv.xz", "TEY", ("CO", "NOX", "year")),
    "california": ("california_housing.csv.xz", "median_house_value", ("ocean_proximity",)),
    "power-plant": ("power_plant_ccpp.csv.xz", None, ()),
    "appliances": ("appliances_energy.csv.xz", "Appliances", ("date", "rv1", "rv2")),
    "blog-feedback": ("blog_feedback.npz", None, ()),
    "diabetes": ("", None, ()),
}


def bound(design: str) -> float:
    """The public bound R on |x|."""
    return BOUNDS.get(design, 1.0)


def eigenvalues(design: str, d: int) -> np.ndarray:
    """Eigenvalues of the second moment matrix, which is diagonal."""
    powers = {"gaussian": 0, "bernoulli-1": 1, "bernoulli-2": 2, "bernoulli-3": 3}
    power = powers.get(design, 1)
    values = 1.0 / np.arange(1.0, d + 1) ** power
    return values / values.sum()


def draw(design: str, key: jax.Array, n: int, d: int, noise: float = NOISE):
    """One data set: x (n, d), y (n,) and w* (d,)."""
    teacher, features, signs, labels = jax.random.split(key, 4)
    w = jax.random.normal(teacher, (d,))
    w = w / jnp.linalg.norm(w)
    values = jnp.asarray(eigenvalues(design, d), jnp.float32)
    if design.startswith("bernoulli"):
        which = jax.random.choice(features, d, (n,), p=values)
        x = jax.nn.one_hot(which, d) * jax.random.rademacher(signs, (n, 1), jnp.float32)
    else:
        x = jax.random.normal(features, (n, d)) * jnp.sqrt(values)
    tail = jax.random.t(labels, 3.0, (n,)) if design == "noisy-teacher" else None
    error = jax.random.normal(labels, (n,)) if tail is None else tail
    return x, predict(w, x) + noise * error, w


def excess_risk(design: str, w: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """E (ReLU(w.x) - ReLU(w*.x))^2, exactly, over the last axis, in float64."""
    w, truth = np.asarray(w, np.float64), np.asarray(truth, np.float64)
    values = eigenvalues(design, w.shape[-1])
    relu = lambda v: np.maximum(v, 0)  # noqa: E731
    if design.startswith("bernoulli"):
        sides = ((relu(s * w) - relu(s * truth)) ** 2 for s in (1, -1))
        return (values / 2 * sum(sides)).sum(-1)
    a, b = w * np.sqrt(values), truth * np.sqrt(values)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    angle = np.arccos(np.clip((a * b).sum(-1) / np.maximum(norms, 1e-300), -1, 1))
    kernel = norms / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * np.cos(angle))
    return ((a * a).sum(-1) + (b * b).sum(-1)) / 2 - 2 * kernel


@dataclasses.dataclass(frozen=True)
class Table:
    """A real table in units in which |x| and y are about 1.

    Attributes:
      x: (n, d) private features, with `y`.
      y: (n,) private labels.
      public_x: features of the public rows, with `public_y`.
      public_y: their labels.
      test_x: features of the test rows, with `test_y`.
      test_y: their labels.
      scale: one unit of y, in the table's own.
      source: where it came from, and how it was scaled.
      digest: of the data as they were read (which are public), so that a run that is taken up again
        knows them.
    """

    x: np.ndarray
    y: np.ndarray
    public_x: np.ndarray
    public_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    scale: float
    source: str
    digest: str


def table(name: str, folder: pathlib.Path | None = None) -> Table | None:
    """Load a table, or return None where its file is absent.

    A fixed shuffle splits it: public rows (1,000, at most a tenth), then 80% private, 20% test.
    Features are centred and scaled by mean and standard deviation of the PUBLIC rows, cut to 5
    standard deviations, a constant is appended, and all are divided by sqrt(d). Labels are divided
    by the largest public one, and cut to 0..1.
    """
    file, target, drop = TABLES[name]
    path = (folder or SHARED) / file
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = map(np.asarray, load_diabetes(return_X_y=True))
    elif not path.exists():
        return None
    else:
        try:
            x, y = _npz(path) if path.suffix == ".npz" else _csv(path, target, drop)
        except UNREADABLE as error:
            raise UsageError(
                f"{path} is not the table {name}; bring it back, or leave it out of --tables"
            ) from error
    digest = hashlib.sha256(np.column_stack([x, y]).tobytes()).hexdigest()
    order = np.random.RandomState(0).permutation(len(y))
    x, y = x[order], y[order]
    public = min(NUM_PUBLIC, len(y) // 10)
    centre, spread, top = x[:public].mean(0), x[:public].std(0), y[:public].max()
    z = np.clip((x - centre) / np.where(spread > 1e-9, spread, 1.0), -5, 5)
    z = np.concatenate([z, np.ones((len(z), 1))], 1) / np.sqrt(z.shape[1] + 1)
    z, y = z.astype(np.float32), np.clip(y / top, 0, 1).astype(np.float32)
    end = public + (len(y) - public) * 4 // 5
    source = f"{name}: {end - public:,} private, {public:,} public, {len(y) - end:,} test rows, "
    source += f"{z.shape[1]} features with the constant; scaled by the public rows; label unit "
    source += f"{top:g}" + (", logarithms of counts" if path.suffix == ".npz" else "")
    private, test = slice(public, end), slice(end, None)
    parts = (z[private], y[private], z[:public], y[:public], z[test], y[test])
    return Table(*parts, scale=float(top), source=source, digest=digest)


def _npz(path: pathlib.Path):
    with path.open("rb") as file, np.load(file) as parts:
        rows = np.concatenate([parts["train"], parts["test"]])
    return np.sign(rows[:, :-1]) * np.log1p(np.abs(rows[:, :-1])), np.log1p(rows[:, -1])


def _csv(path: pathlib.Path, target: str | None, drop: tuple[str, ...]):
    with lzma.open(path, "rt") as lines:
        header = [word.strip().strip('"') for word in next(lines).split(",")]
        cells = [[word.strip().strip('"').strip() for word in line.split(",")] for line in lines]
    target = target or header[-1]
    if target not in header:
        raise UsageError(f"{path} has no column {target}; give the folder of the tables again")
    keep = [i for i, name in enumerate(header) if name not in (target, *drop)]
    missing = {"", "?"}
    x = np.array([[np.nan if r[i] in missing else float(r[i]) for i in keep] for r in cells])
    y = np.array([float(row[header.index(target)]) for row in cells])
    return np.where(np.isnan(x), 0.0, x), y
