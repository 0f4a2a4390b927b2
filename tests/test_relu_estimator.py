"""The scikit-learn front: its estimator checks, its guarantee, its methods."""

import pickle
import warnings
from typing import get_args

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator

import jdp.relu_regression
from jdp.relu_estimator import Method
from jdp.relu_regression import PrivateReLURegressor

# Checks that privacy makes fail, with the reason.
EXPECTED = {
    "check_supervised_y_no_nan": "whether something raises must not depend on private labels",
    "check_dtype_object": "nor on which objects there are: a message would quote one",
}


def data(n=2000, d=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return x, np.maximum(0, x @ [1.0, -1.0, 0.5]) + 0.05 * rng.normal(size=n)


def checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A few steps: each data shape is compiled anew.
        yield from estimator_checks_generator(PrivateReLURegressor(steps=2))


@pytest.mark.parametrize("estimator, check", list(checks()))
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_estimator_checks(estimator, check):
    if check.func.__name__ in EXPECTED:
        with pytest.raises((AssertionError, TypeError)):
            check(estimator)
    else:
        check(estimator)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_fits_and_reports(method):
    x, y = data()
    model = PrivateReLURegressor(2.0, method=method, label_bound=2.0, random_state=0).fit(x, y)
    assert 1.98 < model.plan_.epsilon <= 2.0 and model.plan_.delta == 1e-5
    assert model.score(x, y) > 0.5
    report = model.report()
    assert method in report and "NOT private" in report and "differential privacy" in report
    assert np.all(model.predict(x) >= 0)


def test_keys_are_fresh_unless_seeded():
    x, y = data(200)
    fits = [
        PrivateReLURegressor(steps=2, random_state=s).fit(x, y).coef_ for s in (None, None, 3, 3)
    ]
    assert not np.array_equal(fits[0], fits[1])
    np.testing.assert_array_equal(fits[2], fits[3])
    assert "operating system" in PrivateReLURegressor(steps=2).fit(x, y).report()


def test_bad_records_change_nothing_and_show_nothing():
    x, y = data(200)
    spoilt, labels = x.copy(), y.copy()
    spoilt[:3] = [[np.nan, 0, 0], [np.inf, 0, 0], [0, 0, 0]]
    labels[2] = np.nan
    fits = []
    for features in (spoilt, np.where(np.arange(200)[:, None] < 2, 1e300, spoilt)):
        fits.append(PrivateReLURegressor(steps=2, random_state=0).fit(features, labels).coef_)
    assert np.all(np.isfinite(fits[0]))
    np.testing.assert_allclose(fits[0], fits[1], rtol=1e-6)


def test_it_pickles_clones_and_sits_in_a_pipeline():
    x, y = data(300)
    scale = FunctionTransformer(lambda x: x / 2)
    pipeline = make_pipeline(scale, PrivateReLURegressor(epsilon=3.0, steps=2, random_state=0))
    assert pipeline.fit(x, y).predict(x).shape == (300,)
    model = PrivateReLURegressor(epsilon=3.0, steps=2, random_state=0)
    assert clone(model).get_params() == model.get_params()
    again = pickle.loads(pickle.dumps(model.fit(x, y)))
    np.testing.assert_array_equal(again.predict(x), model.predict(x))
    bare = PrivateReLURegressor(steps=2, fit_intercept=False, random_state=0).fit(x, y)
    assert bare.intercept_ == 0 and bare.coef_.shape == (3,)


@pytest.mark.parametrize(
    "change, error, name",
    [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"epsilon": None}, TypeError, "epsilon"),
        ({"epsilon": "1"}, TypeError, "epsilon"),
        ({"fit_intercept": "no"}, TypeError, "fit_intercept"),
        ({"random_state": np.random.default_rng(0)}, TypeError, "random_state"),
        ({"delta": 2.0}, ValueError, "delta"),
        ({"delta": 1 / 200}, ValueError, "delta.*less than 1 / 200"),
        ({"steps": 10**10}, ValueError, "steps"),
        ({"steps": 201, "method": "dp-taglmtron"}, ValueError, "steps.*<= 200"),
        ({"steps": 10**400}, ValueError, "steps"),
        ({"method": "sgd"}, ValueError, "method"),
        ({"clip": -1.0}, ValueError, "clip"),
        ({"label_bound": np.inf}, ValueError, "label_bound"),
        ({"feature_bound": "1"}, TypeError, "feature_bound"),
        ({"steps": 2.5}, TypeError, "steps"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"),
        ({"random_state": -1}, ValueError, "random_state"),
        ({"method": "dp-mbglmtron", "epsilon": 0.05}, ValueError, "threshold_rows"),
    ],
)
def test_bad_parameters_are_named(change, error, name):
    with pytest.raises(error, match=name):
        PrivateReLURegressor(**change).fit(*data(200))


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_numbers():
    x, y = data(200)
    options = {"epsilon": np.float32(1), "steps": np.int64(2), "fit_intercept": np.bool_(True)}
    model = PrivateReLURegressor(**options, random_state=0).fit(x, y)
    assert model.plan_.epsilon == pytest.approx(1)


def test_the_name_is_in_the_room():
    assert jdp.relu_regression.PrivateReLURegressor is PrivateReLURegressor
    with pytest.raises(AttributeError):
        jdp.relu_regression.Nothing  # noqa: B018


def test_the_report_is_of_the_fit_and_not_of_later_parameters():
    model = PrivateReLURegressor(method="dp-sgd", steps=2, random_state=3).fit(*data(200))
    report = model.report()
    model.set_params(method="dp-pgd", random_state=None, epsilon=0.1, delta=1e-9)
    assert model.report() == report and "dp-sgd" in report and "seed 3: NOT private" in report
    assert pickle.loads(pickle.dumps(model)).report() == report


@pytest.mark.parametrize("method", ["dp-taglmtron", "dp-mbglmtron"])
def test_one_pass_methods_take_the_blocks_that_are_asked_for(method):
    model = PrivateReLURegressor(50.0, method=method, steps=6, random_state=0).fit(*data(200))
    assert model.plan_.steps == 6  # 33 records a block; 200 // 33 is 6
    model = PrivateReLURegressor(2.0, method="dp-taglmtron", steps=60).fit(*data(200))
    assert model.plan_.steps == 60 and model.plan_.event.count == 1


def test_a_refused_fit_leaves_no_trace():
    x, y = data(200)
    model = PrivateReLURegressor(steps=2, random_state=0).fit(x, y)
    before, values = model.predict(x), vars(model).copy()
    for change, columns in (({"epsilon": -1.0}, 2), ({"delta": 0.5}, 2), ({"steps": 0}, 2)):
        with pytest.raises(ValueError):
            model.set_params(**change).fit(x[:, :columns], y)
        model.set_params(**{name: values[name] for name in change})
    np.testing.assert_array_equal(model.predict(x), before)
    assert vars(model).keys() == values.keys() and model.n_features_in_ == 3
    fresh = PrivateReLURegressor(-1.0)
    with pytest.raises(ValueError, match="epsilon"):
        fresh.fit(x, y)
    assert not hasattr(fresh, "n_features_in_")


SECRET = "HIV+"


def spoilt(kind):
    """(x, y) with one private value that is no number, in several containers."""
    x, y = data(20)
    objects, labels = x.astype(object), y.astype(object)
    objects[3, 1] = labels[5] = SECRET
    frame = pytest.importorskip("pandas").DataFrame
    return {
        "objects": (objects, y),
        "labels": (x, labels),
        "numbers in objects": (x.astype(object), y),
        "lists": (objects.tolist(), y),
        "lists of labels": (x, labels.tolist()),
        "strings": (x.astype(str), y),
        "bytes": (x.astype(bytes), y),
        "frame": (frame(objects), y),
        "one column of a frame": (frame(x).assign(a=[SECRET] * 20), y),
        "series": (x, frame({"y": labels})["y"]),
        "dates": (x.astype("datetime64[s]"), y),
    }[kind]


KINDS = ["objects", "labels", "numbers in objects", "lists", "lists of labels", "strings", "bytes"]
KINDS += ["frame", "one column of a frame", "series", "dates"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_private_value_decides_or_is_quoted(kind):
    x, y = spoilt(kind)
    model = PrivateReLURegressor(steps=2, random_state=0).fit(*data(200))
    calls = [lambda: PrivateReLURegressor().fit(x, y)]
    calls += [] if kind in ("labels", "lists of labels", "series") else [lambda: model.predict(x)]
    for call in calls:
        with pytest.raises(TypeError, match="of real numbers, but got dtype") as caught:
            call()
        error = caught.value
        while error is not None:
            assert SECRET not in str(error)
            error = error.__cause__ or error.__context__


@pytest.mark.parametrize("bad", [np.full(20, 7.125), np.full((20, 2), 7.125 + 1j)])
def test_shapes_and_complex_numbers_are_refused_without_values(bad):
    with pytest.raises(ValueError, match="`X` must be") as error:
        PrivateReLURegressor().fit(bad, np.ones(20))
    assert "7.125" not in str(error.value)
