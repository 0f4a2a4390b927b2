"""Private ReLU regression: what users need of it, by one name.

`fit` runs a plan (`plan_blocks`, or `jdp.plan` for DP-SGD) with a threshold and a `Descent`;
`PrivateReLURegressor` is the same behind scikit-learn's interface, and needs scikit-learn. Which
method to use, with the numbers behind it, is in README.md.
"""

from typing import Any

from jdp.glmtron import Descent as Descent
from jdp.glmtron import clipped_sum as clipped_sum
from jdp.glmtron import predict as predict
from jdp.glmtron import records as records
from jdp.one_visit import DisjointBlocks as DisjointBlocks
from jdp.one_visit import one_visit_event as one_visit_event
from jdp.one_visit import plan_blocks as plan_blocks
from jdp.one_visit import tree_event as tree_event
from jdp.one_visit import tree_height as tree_height
from jdp.relu_fit import Fit as Fit
from jdp.relu_fit import fit as fit
from jdp.relu_fit import unprotected_glmtron as unprotected_glmtron
from jdp.relu_fit import unprotected_sgd as unprotected_sgd
from jdp.shuffling import calibrate_shuffled as calibrate_shuffled
from jdp.shuffling import shuffled_epsilon as shuffled_epsilon
from jdp.thresholds import FixedThreshold as FixedThreshold
from jdp.thresholds import Grid as Grid
from jdp.thresholds import PrivateThreshold as PrivateThreshold
from jdp.thresholds import PublicThreshold as PublicThreshold


def __getattr__(name: str) -> Any:  # only who asks for the estimator needs scikit-learn
    if name == "PrivateReLURegressor":
        from jdp.relu_estimator import PrivateReLURegressor

        return PrivateReLURegressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
