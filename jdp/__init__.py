"""Differentially private learning for JAX: clipped sums, one Gaussian draw, optax transformations.

See `README.md` for a first run, and each function's docstring for its guarantee.
"""

import importlib.metadata

from jdp import accounting as accounting
from jdp import auditing as auditing
from jdp import checkpoints as checkpoints
from jdp import ledger as ledger
from jdp import lora as lora
from jdp import pate as pate
from jdp import public_data as public_data
from jdp import relu_regression as relu_regression
from jdp import sampling as sampling
from jdp import subspace as subspace
from jdp.adam import scale_by_adam_corrected as scale_by_adam_corrected
from jdp.adaptive import dp_aggregate_adaptive as dp_aggregate_adaptive
from jdp.aggregate import dp_aggregate as dp_aggregate
from jdp.aggregate import privatize as privatize
from jdp.anchors import random_label_gradients as random_label_gradients
from jdp.checkpoints import ResumableRun as ResumableRun
from jdp.clipping import ClippedSum as ClippedSum
from jdp.clipping import clip_automatic as clip_automatic
from jdp.clipping import clip_by_group as clip_by_group
from jdp.clipping import clip_by_norm as clip_by_norm
from jdp.embedding import biased_gep as biased_gep
from jdp.embedding import clip_in_subspace as clip_in_subspace
from jdp.embedding import gep as gep
from jdp.gradients import clipped_grad as clipped_grad
from jdp.gradients import per_example_grad as per_example_grad
from jdp.gradients import unprotected_gradient_norms as unprotected_gradient_norms
from jdp.ledger import Ledger as Ledger
from jdp.noise import add_noise as add_noise
from jdp.noise import secure_key as secure_key
from jdp.planning import TrainingPlan as TrainingPlan
from jdp.planning import plan as plan
from jdp.planning import steps_for_epochs as steps_for_epochs
from jdp.subspace import allocate_rank as allocate_rank
from jdp.subspace import group_leaves as group_leaves
from jdp.subspace import power_iteration as power_iteration

__version__ = importlib.metadata.version("jdp")
