"""The mechanisms that `experiments.audit` attacks: one release each, and the worst neighbours.

Every case is small on purpose: what is audited is the release, not the model. The record in
question (the canary) is last in its data set and pushes every part of the release as far as a
record can; the others are ordinary, and public to the auditor.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jdp
from experiments._audit_doors import (
    adaptive,
    aggregate,
    anchors,
    followed_by,
    gep,
    linear,
    replace_one,
    strategy,
)
from experiments._audit_frame import FRAME, GROUPS, HUGE, SIZE, Case, tree_of
from experiments._audit_runs import (
    blocks,
    level_counts,
    pate_labels,
    pate_votes,
    poisson_run,
    private_embedding,
    private_threshold,
    relu,
    relu_poisson,
    sparse_vector,
)
from jdp import public_data
from jdp.relu_regression import Grid, PublicThreshold

WEIGHTS = tree_of(np.geomspace(0.1, 30, SIZE))
KEPT_AT = np.arange(SIZE) % 3 > 0
KEPT = jax.tree.map(lambda leaf: leaf > 0, tree_of(KEPT_AT))

MECHANISMS: dict[str, Callable[[], Case]] = {
    "dp-sgd": lambda: aggregate(jdp.clip_by_norm(1.0)),
    "dp-sgd, replace-one": replace_one,
    "dp-sgd, vmap": lambda: strategy(strategy="vmap"),
    "dp-sgd, scan": lambda: strategy(strategy="scan", microbatch_size=2),
    "dp-sgd, book-keeping": lambda: strategy(strategy="book-keeping"),
    "dp-sgd, book-keeping in microbatches": lambda: strategy(microbatch_size=4),
    "dp-sgd, Poisson run of 4 steps": poisson_run,
    "per-group clipping": lambda: aggregate(
        jdp.clip_by_group((1.0, 0.3), GROUPS), HUGE * np.ones(SIZE, np.float32)
    ),
    "automatic clipping": lambda: aggregate(jdp.clip_automatic(1.0)),
    "adaptive clipping": adaptive,
    "gep": gep,
    "gep, through the loss": lambda: gep(loss=linear, microbatch_size=2),
    "gep, optimal split": lambda: gep(noise_split="optimal"),
    "gep, joint clip": lambda: gep(HUGE * FRAME[2], joint_clip=True),
    "gep, whitened": lambda: gep(whitening=1.0),
    "b-gep": lambda: gep(HUGE * FRAME[0], jdp.biased_gep, clip_norm=1.0),
    "projected dp-sgd": lambda: followed_by(
        lambda key: public_data.project_updates(rank=2, public_gradients=anchors, key=key),
        HUGE * FRAME[0],
    ),
    "AdaDPS": lambda: aggregate(
        public_data.clip_preconditioned(jdp.clip_by_norm(1.0), WEIGHTS),
    ),
    "PDA-DPMD": lambda: followed_by(
        lambda key: public_data.mix_public(
            0.25, lambda params, key: jax.tree.map(jnp.ones_like, params), key=key
        ),
        HUGE * FRAME[0],
    ),
    "random sparsification": lambda: aggregate(
        public_data.clip_sparsified(jdp.clip_by_norm(1.0), KEPT), HUGE * KEPT_AT
    ),
    "private embedding": private_embedding,
    "private embedding, replace-one": lambda: private_embedding("replace-one"),
    "pate, votes": pate_votes,
    "pate, labels": lambda: pate_labels(queries=1),
    "pate, confident": lambda: pate_labels(queries=2, threshold=11.0, answers=1),
    "dp-pgd": lambda: relu(blocks(4, 4, 3, z=3**0.5), whole_path=True, gradient="true"),
    "dp-gd-glmtron": lambda: relu(blocks(4, 4, 3, z=3**0.5), whole_path=True),
    "relu dp-sgd, Poisson run of 2 steps": relu_poisson,
    "dp-glmtron": lambda: relu(
        blocks(4, 1), PublicThreshold(jnp.eye(2), jnp.array([0.1, 0.3]), Grid(0.1, 4))
    ),
    "dp-mbglmtron": lambda: relu(blocks(16, 8, threshold_rows=8), private_threshold(), place=0),
    "dp-mbglmtron, same rows": lambda: relu(
        blocks(16, 8, release="same-rows"), private_threshold(), far=4
    ),
    "dp-taglmtron": lambda: relu(blocks(8, 2, release="tree"), place=0, whole_path=True),
    "threshold, histogram": lambda: level_counts("histogram"),
    "threshold, counts": lambda: level_counts("counts"),
    "threshold, sparse vector": sparse_vector,
}
PENDING: tuple[str, ...] = ()  # in the library, but not attacked yet
