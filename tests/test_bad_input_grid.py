"""Every public argument of every call, given values of every kind, answers by a designed error.

`test_bad_input.py` has the errors that were thought of; this is the grid of those that were not.
"""

import re
import traceback

import numpy as np
import pytest
from calls import CALLS, PRIVATE, call

# What no argument may be given, but for the excuses below.
NOTHINGS = {
    "object": object(),
    "bytes": b"\x01",
    "complex": 1j,
    "set": {1},
    "NaN": float("nan"),
    "tuple of NaN": (float("nan"),),
    "array of text": np.array(["a"]),
    "array of objects": np.array([None]),
}
# What some arguments take.
ODD = {
    "negative": -1,
    "NumPy negative": np.int64(-3),
    "half": 0.5,
    "huge": 10**400,
    "infinity": float("inf"),
    "boolean": False,
    "None": None,
    "text": "x",
    "null character": "\0",
    "NumPy text": np.str_("zz"),
    "no list": [],
    "ragged": [[1], [2, 3]],
    "no dict": {},
    "matrix": np.ones((2, 2), np.float32),
    "no rows": np.zeros(0, np.float32),
    "class": int,
}
DESIGNED = re.compile(r"`[^`]+` must be .+, but got .+\. .+", re.DOTALL)
# Arguments that are read only when what was made is called, with what they must fit; or by the
# function of the user's own; or are pytrees, which JAX makes of anything.
LATER = {
    ("clip_by_group", "groups"): "must be like the gradients",
    ("per_example_grad", "trainable"): "must be like the parameters",
    ("per_example_grad()", "params"): "a float or an array is a pytree of parameters",
    ("unprotected_gradient_norms", "params"): "a float or an array is a pytree of parameters",
    ("clipped_grad()", "params"): "a float or an array is a pytree of parameters",
    ("random_label_gradients()", "params"): "a float or an array is a pytree of parameters",
    ("public_data.mean_gradient", "params"): "a float or an array is a pytree of parameters",
    ("auditing.first_half", "draws"): "any array can be cut in halves",
    ("auditing.second_half", "draws"): "any array can be cut in halves",
    ("relu_regression.Descent", "learning_rate"): "checked by fit",
    ("relu_regression.Descent", "feature_bound"): "checked by fit",
    ("relu_regression.Descent", "radius"): "checked by fit",
    ("relu_regression.FixedThreshold", "value"): "checked by fit",
}
FUNCTIONS = {"loss", "clipper", "public_gradients", "public_gradient", "encode", "train"}
FUNCTIONS |= {"make_event", "mixing"}


def _is_by_others(error):
    """Whether the loss of `calls.py`, which takes any parameters, or scikit-learn raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = any(frame.name == "loss" and frame.filename.endswith("calls.py") for frame in frames)
    return own or "sklearn" in frames[-1].filename or "requires y to be passed" in str(error)


def _wrong(name):
    """What a call answered wrongly, by argument and value."""
    for argument in CALLS[name][1].keys() - PRIVATE:
        for label, value in (NOTHINGS | ODD).items():
            if label == "class" and argument in FUNCTIONS:
                continue  # a function like any other, until it is called
            if (name, argument, label) == (
                "hypernet.Hypernet.mean_embedding",
                "encoder",
                "no dict",
            ):
                continue  # what parameters it has the encoder itself must say
            try:
                call(name, {argument: value})
            except Exception as error:
                designed = type(error) in (TypeError, ValueError) and DESIGNED.match(str(error))
                if not designed and not _is_by_others(error):
                    yield f"{argument}={label}: {error!r:.200}"
            else:
                if label in NOTHINGS and (name, argument) not in LATER:
                    yield f"{argument}={label}: accepted"


NAMES = sorted(CALLS.keys() - {"relu_regression.PrivateReLURegressor"})  # as its fit


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_an_argument_ends_in_a_raw_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = sorted(_wrong(name))
    assert not wrong, "\n".join(wrong)
