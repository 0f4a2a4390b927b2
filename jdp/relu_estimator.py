"""The scikit-learn front of private ReLU regression; needs scikit-learn."""

import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from jdp import _check, planning
from jdp.glmtron import Descent
from jdp.noise import secure_key
from jdp.one_visit import plan_blocks
from jdp.planning import TrainingPlan
from jdp.relu_fit import check_threshold, fit
from jdp.thresholds import FixedThreshold, Grid, PrivateThreshold, Threshold

Method: TypeAlias = Literal[
    "dp-gd-glmtron", "dp-gd-switch", "dp-sgd", "dp-mbglmtron", "dp-taglmtron", "dp-pgd"
]


_MOST_STEPS = 10**7
_ONE_PASS = ("dp-taglmtron", "dp-mbglmtron")
_fit = jax.jit(fit, static_argnames=("plan", "threshold", "descent"))  # again without compiling


def _numbers(name: str, value: Any, all_finite: Any = False) -> np.ndarray:
    """The table or column in float64, refused by its type and shape alone: values are private."""
    frame = hasattr(value, "columns")
    dtypes: list[Any] = list(value.dtypes) if frame else [getattr(value, "dtype", None)]
    if not hasattr(value, "shape") or not all(hasattr(dtype, "kind") for dtype in dtypes):
        value = _check.as_array(
            name, value, "of real numbers"
        )  # a list, or what becomes an array in its own way
        dtypes = [value.dtype]
    for dtype in dtypes:
        if dtype.kind not in "biuf":
            got = _check.Words(f"dtype {dtype.type.__name__}")  # no lengths, no categories
            error = ValueError if dtype.kind == "c" else TypeError  # as scikit-learn has it
            remedy = "Convert all of it to floats first. Complex data not supported."
            _check.fail(name, "of real numbers", got, remedy, error)
    if name == "X" and len(value.shape) != 2:
        remedy = "Reshape your data: a row for each record, a column for each feature."
        _check.fail(name, "a table of 2 dimensions", _check.Words(f"shape {value.shape}"), remedy)
    options: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": all_finite}
    return check_array(value, ensure_2d=name == "X", input_name=name, **options)


class PrivateReLURegressor(RegressorMixin, BaseEstimator):
    r"""Differentially private regression with $\hat y = Y\,\mathrm{ReLU}(w \cdot (x, b))$.

    **Guarantee.** After `fit`, `coef_`, `intercept_` and predictions are
    (`epsilon`, `delta`)-differentially private under zero-out adjacency; `report()` states it. Each
    call of `fit` is a release of its own. The number of records, the number of features and all
    parameters of the estimator are public; whatever was chosen by looking at the data is not paid
    for. Records that are not finite contribute nothing, and nothing shows which.

    Features are scaled by `feature_bound` and labels by `label_bound`, both public: longer records
    are shortened, larger labels give at most `clip` in a step. Scale features to comparable ranges
    by public knowledge first; there is no private standardisation.

    Args:
      epsilon: the budget of one fit, > 0.
      delta: in (0, 1), below 1 / number of records.
      method: see README.md, where the default had the lowest risk on average. It descends by
        GLMtron's gradient first, then by the true one, which has half the variance on continuous
        features; "dp-gd-glmtron" stays with the first, for small budgets.
      feature_bound: R, public bound on |x|; by default the square root of the number of features,
        which suits standardised ones.
      label_bound: Y > 0, public: the unit in which labels are about 1.
      clip: residuals are cut to this, in units of `label_bound`; about the label noise is best.
      steps: steps, or blocks for the one-pass methods (at most one a record); a default for each
        method.
      learning_rate: in units where |x| is 1; by default 5, or the number of features if smaller.
      fit_intercept: whether to add a constant feature of size `feature_bound / sqrt(d)`.
      random_state: None for a private run, whose key comes from the operating system; an integer
        makes the run reproducible and NOT private against whoever knows it.

    Attributes:
      coef_: (d,) weights.
      intercept_: a float.
      plan_: the `TrainingPlan`.
      threshold_: the threshold of residuals, in units of `label_bound`.
      n_features_in_: d.

    Raises:
      ValueError: (from `fit`) a parameter is out of range, or too few records for the method.
      TypeError: (from `fit`) features or labels are of a type that holds other than real numbers.
        Which ones they are has no part in it, and none is shown.

    >>> import numpy as np
    >>> x = np.random.RandomState(0).normal(size=(2000, 3))
    >>> y = np.maximum(0, x @ [1.0, -1.0, 0.5])
    >>> model = PrivateReLURegressor(epsilon=2.0, label_bound=2.0, random_state=0).fit(x, y)
    >>> bool(model.score(x, y) > 0.9), round(model.plan_.epsilon, 2)
    (True, 2.0)
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        method: Method = "dp-gd-switch",
        *,
        feature_bound: float | None = None,
        label_bound: float = 1.0,
        clip: float = 0.2,
        steps: int | None = None,
        learning_rate: float | None = None,
        fit_intercept: bool = True,
        random_state: int | None = None,
    ):
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.feature_bound = feature_bound
        self.label_bound = label_bound
        self.clip = clip
        self.steps = steps
        self.learning_rate = learning_rate
        self.fit_intercept = fit_intercept
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "PrivateReLURegressor":  # noqa: N803
        """Fit on (n, d) features and (n,) labels; every call spends `epsilon` again."""
        given = X
        if y is None:
            raise ValueError(
                "PrivateReLURegressor requires y to be passed, but the target y is None"
            )
        X, y = _numbers("X", X), column_or_1d(_numbers("y", y), warn=True)  # noqa: N806
        check_consistent_length(X, y)
        n, d = X.shape
        self._check(n)
        columns = d + bool(self.fit_intercept)
        bound = math.sqrt(d) if self.feature_bound is None else self.feature_bound
        unit = bound * math.sqrt(columns / d)  # with the constant feature of size bound / sqrt(d)
        plan, threshold, descent = self._recipe(n, columns)
        validate_data(self, given, skip_check_array=True)  # what is refused leaves no trace
        with np.errstate(over="ignore", invalid="ignore"):
            constant = np.full((n, columns - d), bound / math.sqrt(d))
            x = np.concatenate([X, constant], 1) / unit
            x, y = x.astype(np.float32), (y / self.label_bound).astype(np.float32)
        key, source = self._key()
        options = {"plan": plan, "threshold": threshold, "descent": descent}
        w = np.asarray(_fit(key, jnp.asarray(x), jnp.asarray(y), **options).weights, np.float64)
        w = w * self.label_bound / unit
        self.plan_, self.threshold_ = plan, threshold
        self._facts = {"mechanism": self.method, "key_source": source}  # of this fit, for `report`
        self.coef_ = w[:d]
        self.intercept_ = float(w[d] * bound / math.sqrt(d)) if self.fit_intercept else 0.0
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predict (n,) labels for (n, d) features."""
        check_is_fitted(self)
        given, X = X, _numbers("X", X, "allow-nan")  # noqa: N806
        validate_data(self, given, reset=False, skip_check_array=True)
        return np.maximum(X @ self.coef_ + self.intercept_, 0.0)

    def report(self) -> str:
        """The privacy statement of the last `fit`."""
        check_is_fitted(self)
        return self.plan_.report(
            **self._facts,
            sampler_used="yes",
            steps_taken=self.plan_.steps,
            clip_norms=f"features at norm 1; {self.threshold_}, both in units of their bounds",
            public_data="number of records and features, bounds and parameters",
        )

    def __sklearn_tags__(self):
        """NaN may come in fit (and counts nothing); noise makes small samples useless."""
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        tags.input_tags.allow_nan = True
        tags.regressor_tags.poor_score = True  # pyright: ignore
        return tags

    def _key(self):
        """The key of a fit, and where it comes from."""
        seed = self.random_state
        if seed is None:
            return secure_key(), "the operating system's entropy"
        if isinstance(seed, np.random.RandomState):  # scikit-learn's convention
            seed = int(seed.randint(2**31 - 1))
        remedy = "Use None for a private run."
        seed = _check.integer("random_state", seed, at_least=0, at_most=2**32 - 1, remedy=remedy)
        return jax.random.key(seed), f"seed {seed}: NOT private against whoever knows it"

    def _check(self, n: int) -> None:
        _check.choice("method", self.method, get_args(Method))
        if not isinstance(self.fit_intercept, bool | np.bool_):
            remedy = "Pass a boolean."
            _check.fail("fit_intercept", "True or False", self.fit_intercept, remedy, TypeError)
        _check.number("epsilon", self.epsilon, above=0, remedy="It is the budget of one fit.")
        remedy = f"It is the probability of a privacy failure; use less than 1 / {n} records."
        _check.number("delta", self.delta, above=0, below=1 / n, remedy=remedy)
        remedy = "Choose it by public knowledge, without looking at the data."
        for name in ("feature_bound", "label_bound", "clip", "learning_rate"):
            value = getattr(self, name)
            if value is not None:
                _check.number(name, value, at_least=1e-9, at_most=1e9, remedy=remedy)
        if self.steps is not None:
            remedy = "Leave it out."
            most = min(n, _MOST_STEPS) if self.method in _ONE_PASS else _MOST_STEPS
            _check.integer("steps", self.steps, at_least=1, at_most=most, remedy=remedy)

    def _recipe(self, n: int, d: int) -> tuple[TrainingPlan, Threshold, Descent]:
        """Plan, threshold and descent, from public numbers only."""
        budget: dict[str, Any] = {"epsilon": float(self.epsilon), "delta": self.delta}
        rate = min(5.0, d) if self.learning_rate is None else self.learning_rate
        threshold: Threshold = FixedThreshold(self.clip)
        gradient, radius = "surrogate", math.inf
        if self.method in ("dp-gd-glmtron", "dp-gd-switch"):
            gradient = "switch" if self.method == "dp-gd-switch" else gradient
            plan = plan_blocks(n, n, self.steps or 100, **budget)
        elif self.method == "dp-pgd":
            radius = 2.0
            threshold = FixedThreshold(radius + 1.0)  # |w| |x| and |y|, at most 1
            plan = plan_blocks(n, n, self.steps or 100, **budget)
        elif self.method == "dp-sgd":
            plan = planning.plan(n, max(1, n // 10), self.steps or 100, **budget)
            gradient = "true"
        elif self.method == "dp-taglmtron":
            steps = self.steps or min(n, 16)
            plan = plan_blocks(n, n // steps, steps, **budget, release="tree")
            rate = rate / 4 if self.learning_rate is None else rate
        else:
            steps = self.steps or 10
            block = max(2, n // steps)
            threshold = PrivateThreshold(Grid(self.clip / 8, 8), share=0.1)
            z = plan_blocks(n, 1, **budget).noise_multiplier
            rows = min(
                block // 2, max(block // 10, math.ceil(1.5 * threshold.slack(float(z), "zero-out")))
            )
            steps = min(steps, n // block)
            plan = plan_blocks(n, block - rows, steps, **budget, threshold_rows=rows)
        check_threshold(plan, threshold)
        return plan, threshold, Descent(rate, 1.0, radius, gradient=gradient)
