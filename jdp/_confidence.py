"""What the audits share: exact confidence bounds on a probability, and validators."""

from typing import Any

import numpy as np
from scipy import stats

from jdp import _check

MORE = "Run the mechanism more often: thousands of draws are usual."


def upper_confidence(successes: Any, trials: Any, significance: float) -> Any:
    """Clopper and Pearson's upper confidence bound on a probability, exact for every law.

    >>> round(float(upper_confidence(0, 300, 0.05)), 4)  # the rule of three
    0.0099
    """
    successes = _counted(successes, trials, significance)
    found = stats.beta.isf(significance, successes + 1, np.maximum(trials - successes, 1))
    return np.where(successes < trials, found, 1.0)


def lower_confidence(successes: Any, trials: Any, significance: float) -> Any:
    """The lower bound, `1 - upper_confidence(trials - successes, ...)`, exact for small ones.

    >>> float(lower_confidence(0, 300, 0.05)), round(float(lower_confidence(300, 300, 0.05)), 4)
    (0.0, 0.9901)
    """
    successes = _counted(successes, trials, significance)
    found = stats.beta.ppf(significance, np.maximum(successes, 1), trials - successes + 1)
    return np.where(successes > 0, found, 0.0)


def _counted(successes: Any, trials: Any, significance: Any) -> np.ndarray:
    check_significance(significance)
    remedy = "Count draws, and how often the event happened among them."
    expected = "an integer, or an array of them"
    for name, value in (("trials", trials), ("successes", successes)):
        if not np.issubdtype(_check.as_array(name, value, expected).dtype, np.integer):
            _check.fail(name, expected, value, remedy, TypeError)
    if not np.all((0 <= np.asarray(successes)) & (np.asarray(successes) <= trials)):
        _check.fail("successes", "from 0 to trials", successes, remedy)
    return np.asarray(successes)


LEAST = 1e-50  # significance; from 1e-100 on SciPy's quantiles are NaN


def check_significance(value: float, least: float = LEAST) -> None:
    """Refuse a significance that is not below 1 and at least `least`."""
    remedy = "It is the probability of a wrong bound; divide it by the number of bounds you state."
    _check.number("significance", value, at_least=least, below=1, remedy=remedy)


def floats(name: str, value: Any, ndim: int, at_least: int) -> np.ndarray:
    """The value as float64, if it is an array of numbers with enough rows."""
    shape = "a vector" if ndim == 1 else "a matrix with one release a row"
    value = _check.as_array(name, value, f"{shape} of numbers")
    numbers = np.issubdtype(value.dtype, np.floating) or np.issubdtype(value.dtype, np.integer)
    if not numbers:
        _check.fail(name, f"{shape} of numbers", value, "Convert it to floats.", TypeError)
    if value.ndim != ndim or len(value) < at_least:
        expected = f"{shape}, of at least {at_least} draws"
        _check.fail(name, expected, _check.Words(f"shape {value.shape}"), MORE)
    return value.astype(np.float64)
