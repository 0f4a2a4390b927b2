"""One call that works of everything public in jdp; `test_bad_input.py` and
`test_bad_input_grid.py` make them wrong.

Private arguments are passed as tracers, so that nothing which is raised can depend on their values.
"""

import functools
import os
import shutil

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp import hypernet, pate, public_data, relu_regression, sampling, subspace

KEY = jax.random.key(0)
PARAMS = {"b": jnp.zeros(3), "w": jnp.zeros((2, 3))}
GRADIENTS = {"b": jnp.ones((4, 3)), "w": jnp.ones((4, 2, 3))}
BATCH = (jnp.ones((4, 2)), jnp.zeros(4, int))
MASK = jnp.ones(4, bool)
CLIPPER = jdp.clip_by_norm(1.0)
PRIVATE = {"per_example", "batch", "x", "y", "data", "votes", "records", "updates", "clipped_sum"}
PRIVATE |= {"mask", "other"}


def loss(params, example):
    logits = example[0] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])


def public(params, key):
    return jax.tree.map(lambda leaf: jax.random.normal(key, (5, *leaf.shape)), params)


def clip(make):
    """The clipper that a function makes, on gradients."""
    return lambda per_example, mask, **options: make(**options)(per_example, mask)


def gradients(make):
    """The function that one makes, on parameters and a batch."""

    def call(params, batch, **own):
        mask = {"mask": own.pop("mask")} if "mask" in own else {}
        return make(**own)(params, batch, **mask)

    return call


def of_public(make):
    """The function that one makes, on parameters and a key."""
    return lambda params, key, **options: make(**options)(params, key)


def update(make):
    """The update of a transformation, from its first state."""

    def call(updates, params, **options):
        extra = {name: options.pop(name) for name in ("mask", "maks") if name in options}
        tx = make(**options)
        return tx.update(updates, tx.init(PARAMS), params, **extra)

    return call


def sparse(kept, gradients=GRADIENTS):
    """A sparsified sum of which all coordinates are kept, or none; booleans like what is given."""
    whole = jax.tree.map(lambda leaf: jnp.full(leaf.shape[1:], kept), gradients)
    return public_data.clip_sparsified(CLIPPER, whole)(gradients, MASK)


ADAPTERS = {"w": {"down": jnp.ones((1, 2)), "up": jnp.zeros((1, 3))}}
TX = {"noise_multiplier": 1.0, "batch_size": 4, "key": KEY}
GEP = TX | {"rank": 2, "clip_norms": (1.0, 0.2), "public_gradients": public}
BIASED = TX | {"rank": 2, "clip_norm": 1.0, "public_gradients": public}
UPDATE = {"updates": GRADIENTS, "params": PARAMS, "mask": MASK}
PLAN = {"num_examples": 100, "batch_size": 10, "steps": 6, "delta": 1e-3, "noise_multiplier": 1.0}
RATE = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 10, "sampling_rate": 0.1}
VOTES = {"num_examples": 100, "teachers": 10, "queries": 4, "epsilon": 1.0, "delta": 1e-5}
BLOCKS = {"num_examples": 40, "batch_size": 40, "steps": 3, "delta": 1e-3, "noise_multiplier": 1.0}


@functools.cache
def plan():
    return jdp.plan(**PLAN)


@functools.cache
def vote_plan():
    return pate.plan_votes(**VOTES)


@functools.cache
def bases():
    rows = {"b": jnp.ones((2, 3)), "w": jnp.ones((2, 2, 3))}
    return subspace.Bases(rows, (0, 0))


def clipped():
    return CLIPPER(GRADIENTS, MASK)


@functools.cache
def net(**options):
    count, detokenise = hypernet.flat_tokens({"w": jnp.zeros(6)}, 4)
    own = {"num_records": 4, "noise_multiplier": 1.0}
    parts = hypernet.MLPEncoder((8,)), hypernet.LinearDecoder(count, 4), detokenise
    return hypernet.Hypernet(*parts, **(own | options))


@functools.cache
def net_params():
    return net().init(KEY, jnp.ones((4, 3)))


def network(**options):
    count, detokenise = hypernet.flat_tokens({"w": jnp.zeros(6)}, 4)
    own = {"encoder": hypernet.MLPEncoder((8,)), "decoder": hypernet.LinearDecoder(count, 4)}
    return hypernet.Hypernet(**(own | {"detokenise": detokenise} | options))


def apply(module, like):
    return lambda **options: module(**options).init(KEY, like)


def tasks(records=None, examples=None, mask=None):
    records = jnp.ones((2, 4, 3)) if records is None else records
    return hypernet.Tasks(records, jnp.ones((2, 1)) if examples is None else examples, mask)


def train(net=None, loss=None, optimizer=None, **own):
    step = hypernet.train_step(net, loss, optimizer)
    return step(hypernet.init_training(net, optax.sgd(0.1), KEY, jnp.ones((4, 3))), tasks(**own))


def ledger(method):
    """A method of a ledger that, where it raises, leaves the ledger as it was."""

    def call(**options):
        try:
            with jdp.Ledger("ledger") as book:
                book.open_segment("run", plan(), {"rate": "1"})
                before = book.path.read_bytes()
                try:
                    getattr(book, method)(**options)
                except (TypeError, ValueError):
                    assert book.path.read_bytes() == before
                    raise
        finally:
            shutil.rmtree("ledger")

    return call


def resumable(every=1, **options):
    """A run that, where it is refused, leaves neither a charge nor a checkpoint."""
    own = {"plan": plan(), "state": (jnp.zeros(2), KEY, jax.random.key(1)), "data": "zeros"}
    own |= {"program": lambda i, state: state}
    try:
        with jdp.Ledger("ledger") as book:
            run = None
            try:
                run = jdp.ResumableRun(**({"ledger": book} | own | options))
                next(run.chunks(every))
            except (TypeError, ValueError):
                segments = book.segments("run")
                assert not any(own.charged for own in segments)
                assert run is not None or not book.length and len(os.listdir("ledger")) == 1
                raise
    finally:
        shutil.rmtree("ledger")


def opened(folder, read_only):
    jdp.Ledger(folder, read_only=read_only).close()
    shutil.rmtree(folder)


def regressor(table, labels, **options):
    return relu_regression.PrivateReLURegressor(**options).fit(table, labels)


def predicted(table):
    return regressor(np.ones((40, 2)), np.ones(40), delta=1e-3, steps=1).predict(table)


def method(make, name):
    return lambda **options: getattr(make(), name)(**options)


SCORES = np.linspace(0, 1, 20)
RELEASES = np.random.default_rng(0).normal(size=(20, 2))
X, Y = jnp.ones((40, 2)), jnp.ones(40)
FIT = {"key": KEY, "x": X, "y": Y, "descent": relu_regression.Descent()}
FIT |= {"plan": relu_regression.plan_blocks(**BLOCKS)}
FIT |= {"threshold": relu_regression.FixedThreshold(0.1)}
RECORDS = {"records": jnp.ones((4, 3))}
EMBED = RECORDS | {"key": KEY, "encode": lambda record: record, "clip_norm": 1.0}
EMBED |= {"noise_multiplier": 1.0, "num_records": 4}

CALLS = {
    # jdp
    "add_noise": (jdp.add_noise, {"key": KEY, "clipped_sum": clipped(), "noise_multiplier": 1.0}),
    "secure_key": (jax.jit(jdp.secure_key), {}),
    "clip_by_norm": (jdp.clip_by_norm, {"clip_norm": 1.0}),
    "clip_by_norm()": (
        clip(jdp.clip_by_norm),
        {"clip_norm": 1.0, "per_example": GRADIENTS, "mask": MASK},
    ),
    "clip_by_group": (jdp.clip_by_group, {"clip_norms": (1.0, 2.0), "groups": {"b": 0, "w": 1}}),
    "clip_by_group()": (
        clip(jdp.clip_by_group),
        {"clip_norms": (1.0, 2.0), "groups": {"b": 0, "w": 1}, "per_example": GRADIENTS}
        | {"mask": MASK},
    ),
    "clip_automatic": (jdp.clip_automatic, {"clip_norm": 1.0, "stabilizer": 0.01}),
    "clip_in_subspace": (jdp.clip_in_subspace, {"bases": bases(), "clip_norms": (1.0, 0.2)}),
    "clip_in_subspace()": (
        clip(jdp.clip_in_subspace),
        {"bases": bases(), "clip_norms": (1.0, 0.2), "per_example": GRADIENTS, "mask": MASK},
    ),
    "ClippedSum.merge": (lambda other: clipped().merge(other), {"other": clipped()}),
    "per_example_grad": (jdp.per_example_grad, {"loss": loss, "trainable": None}),
    "per_example_grad()": (
        gradients(jdp.per_example_grad),
        {"loss": loss, "params": PARAMS, "batch": BATCH},
    ),
    "unprotected_gradient_norms": (
        gradients(jdp.unprotected_gradient_norms),
        {"loss": loss, "params": PARAMS, "batch": BATCH},
    ),
    "clipped_grad": (jdp.clipped_grad, {"loss": loss, "clipper": CLIPPER}),
    "clipped_grad()": (
        gradients(jdp.clipped_grad),
        {"loss": loss, "clipper": CLIPPER, "params": PARAMS, "batch": BATCH, "mask": MASK},
    ),
    "privatize": (jdp.privatize, TX),
    "privatize()": (
        update(jdp.privatize),
        TX | {"updates": clipped(), "params": PARAMS},
    ),
    "dp_aggregate": (jdp.dp_aggregate, TX | {"clipper": CLIPPER}),
    "dp_aggregate()": (update(jdp.dp_aggregate), TX | {"clipper": CLIPPER} | UPDATE),
    "dp_aggregate_adaptive": (jdp.dp_aggregate_adaptive, TX | {"batch_size": 100}),
    "dp_aggregate_adaptive()": (
        update(jdp.dp_aggregate_adaptive),
        TX | {"batch_size": 100} | UPDATE,
    ),
    "gep": (jdp.gep, GEP),
    "gep()": (update(jdp.gep), GEP | UPDATE),
    "gep(loss)": (update(jdp.gep), GEP | UPDATE | {"loss": loss, "updates": BATCH}),
    "biased_gep": (jdp.biased_gep, BIASED),
    "biased_gep()": (update(jdp.biased_gep), BIASED | UPDATE),
    "random_label_gradients": (
        jdp.random_label_gradients,
        {"loss": loss, "images": BATCH[0], "num_classes": 3},
    ),
    "random_label_gradients()": (
        of_public(jdp.random_label_gradients),
        {"loss": loss, "images": BATCH[0], "num_classes": 3, "params": PARAMS, "key": KEY},
    ),
    "scale_by_adam_corrected": (
        jdp.scale_by_adam_corrected,
        {"noise_std": 0.1, "floor": 1e-6, "b1": 0.9, "b2": 0.999},
    ),
    "scale_by_adam_corrected()": (
        update(jdp.scale_by_adam_corrected),
        {"noise_std": 0.1, "floor": 1e-6, "updates": PARAMS, "params": PARAMS},
    ),
    "plan": (jdp.plan, PLAN),
    "steps_for_epochs": (
        jdp.steps_for_epochs,
        {"epochs": 3, "num_examples": 100, "batch_size": 10},
    ),
    "TrainingPlan.batch": (method(plan, "batch"), {"key": KEY, "step": 0}),
    "TrainingPlan.host_batch": (method(plan, "host_batch"), {"key": KEY, "step": 0}),
    "TrainingPlan.to_dict": (method(plan, "to_dict"), {}),
    "TrainingPlan.to_json": (method(plan, "to_json"), {}),
    "TrainingPlan.report": (method(plan, "report"), {}),
    "Ledger": (opened, {"folder": "ledger", "read_only": False}),
    "Ledger.open_segment": (
        ledger("open_segment"),
        {"run": "other", "plan": plan(), "queries": {"rate": "0.1"}, "start": 0, "nonce": None},
    ),
    "Ledger.charge": (ledger("charge"), {"run": "run", "plan": plan(), "stop": 2}),
    "Ledger.spent": (ledger("spent"), {"run": "run", "delta": 0.1}),
    "ResumableRun": (resumable, {"name": "run", "save_every": 60.0, "keep": 3, "as_new": False}),
    "ResumableRun.chunks": (resumable, {"every": 2}),
    "checkpoints.discard": (jdp.checkpoints.discard, {"folder": "ledger", "name": "run"}),
    "ledger.check_name": (jdp.ledger.check_name, {"run": "run"}),
    # accounting
    "accounting.combine_noise_multipliers": (
        lambda **zs: jdp.accounting.combine_noise_multipliers(*zs.values()),
        {"one": 1.0, "two": 2.0},
    ),
    "accounting.dp_sgd_event": (
        jdp.accounting.dp_sgd_event,
        {"noise_multiplier": 1.0, "steps": 3, "sampling_rate": 0.1},
    ),
    "accounting.privacy_spent": (
        jdp.accounting.privacy_spent,
        {"event": dpa.GaussianDpEvent(1.0), "delta": 1e-5},
    ),
    "accounting.epsilon": (jdp.accounting.epsilon, RATE | {"accountant": "rdp"}),
    "accounting.under_adjacency": (
        jdp.accounting.under_adjacency,
        {"noise_multiplier": 1.0, "adjacency": "zero-out"},
    ),
    "accounting.calibrate_noise_multiplier": (
        jdp.accounting.calibrate_noise_multiplier,
        {"epsilon": 1.0, "delta": 1e-5, "steps": 1, "sampling_rate": 1.0},
    ),
    "accounting.calibrate_event": (
        jdp.accounting.calibrate_event,
        {"make_event": dpa.GaussianDpEvent, "epsilon": 1.0, "delta": 1e-5},
    ),
    # auditing
    "auditing.epsilon_many_runs": (
        jdp.auditing.epsilon_many_runs,
        {"present": SCORES, "absent": SCORES, "delta": 0.0, "significance": 0.05},
    ),
    "auditing.mu_many_runs": (
        jdp.auditing.mu_many_runs,
        {"present": SCORES, "absent": SCORES, "significance": 0.05},
    ),
    "auditing.Audit.power": (
        method(lambda: jdp.auditing.mu_many_runs(SCORES + 1, SCORES, significance=0.05), "power"),
        {"claimed": 1.0},
    ),
    "auditing.epsilon_one_run": (
        jdp.auditing.epsilon_one_run,
        {"scores": SCORES, "included": SCORES > 0.5, "guesses": 4, "delta": 0.0}
        | {"significance": 0.05},
    ),
    "auditing.one_run_p_value": (
        jdp.auditing.one_run_p_value,
        {"correct": 3, "guesses": 4, "canaries": 10, "epsilon": 1.0, "delta": 0.0},
    ),
    "auditing.gaussian_score": (
        jdp.auditing.gaussian_score,
        {"present": RELEASES, "absent": RELEASES},
    ),
    "auditing.lower_confidence": (
        jdp.auditing.lower_confidence,
        {"successes": 3, "trials": 10, "significance": 0.05},
    ),
    "auditing.upper_confidence": (
        jdp.auditing.upper_confidence,
        {"successes": 3, "trials": 10, "significance": 0.05},
    ),
    "auditing.first_half": (jdp.auditing.first_half, {"draws": SCORES}),
    "auditing.second_half": (jdp.auditing.second_half, {"draws": SCORES}),
    # pate
    "pate.plan_votes": (pate.plan_votes, VOTES),
    "pate.votes_event": (
        pate.votes_event,
        {"vote_noise_multiplier": 1.0, "answers": 3, "threshold_noise_multiplier": 1.0}
        | {"queries": 4},
    ),
    "pate.teacher_votes": (
        pate.teacher_votes,
        {"key": KEY, "train": lambda key, shard: jnp.zeros(4, int), "data": jnp.ones(100)}
        | {"plan": vote_plan(), "teachers": jnp.arange(2), "together": 1},
    ),
    "pate.noisy_labels": (
        pate.noisy_labels,
        {"key": KEY, "votes": jnp.zeros((10, 4), int), "plan": vote_plan(), "num_classes": 3},
    ),
    "pate.vote_sum": (pate.vote_sum, {"votes": jnp.zeros((10, 4), int), "num_classes": 3}),
    "pate.most_votes": (pate.most_votes, {"votes": jnp.zeros((10, 4), int), "num_classes": 3}),
    "pate.unprotected_epsilon": (
        lambda ballots=None, votes=None, **rest: pate.unprotected_epsilon(
            ballots if votes is None else votes, **rest
        ),
        {"ballots": jnp.zeros((10, 4), int), "plan": vote_plan(), "num_classes": 3},
    ),
    # public data
    "public_data.mean_gradient": (
        of_public(public_data.mean_gradient),
        {"loss": loss, "examples": BATCH, "batch_size": 2, "params": PARAMS, "key": KEY},
    ),
    "public_data.mix_public": (
        public_data.mix_public,
        {"mixing": 0.5, "public_gradient": lambda params, key: params, "key": KEY},
    ),
    "public_data.mix_public()": (
        update(public_data.mix_public),
        {"mixing": 0.5, "public_gradient": lambda params, key: params, "key": KEY}
        | {"updates": PARAMS, "params": PARAMS},
    ),
    "public_data.cosine_mixing": (public_data.cosine_mixing, {"steps": 10}),
    "public_data.project_updates": (
        public_data.project_updates,
        {"rank": 2, "public_gradients": public, "key": KEY},
    ),
    "public_data.project_updates()": (
        update(public_data.project_updates),
        {"rank": 2, "public_gradients": public, "key": KEY, "updates": PARAMS, "params": PARAMS},
    ),
    "public_data.clip_sparsified": (
        clip(public_data.clip_sparsified),
        {"clipper": CLIPPER, "kept": jax.tree.map(lambda leaf: leaf == 0, PARAMS)}
        | {"per_example": GRADIENTS, "mask": MASK},
    ),
    "public_data.clip_sparsified(merge)": (
        lambda other: sparse(True).merge(other),
        {"other": sparse(True)},
    ),
    "public_data.clip_preconditioned": (
        clip(public_data.clip_preconditioned),
        {"clipper": CLIPPER, "preconditioner": PARAMS, "per_example": GRADIENTS, "mask": MASK},
    ),
    "public_data.random_coordinates": (
        public_data.random_coordinates,
        {"key": KEY, "params": PARAMS, "rate": 0.5},
    ),
    "public_data.inverse_root": (
        public_data.inverse_root,
        {"second_moments": PARAMS, "floor": 1.0},
    ),
    # ReLU regression
    "relu_regression.fit": (relu_regression.fit, FIT),
    "relu_regression.plan_blocks": (relu_regression.plan_blocks, BLOCKS),
    "relu_regression.DisjointBlocks": (
        relu_regression.DisjointBlocks,
        {"num_examples": 100, "batch_size": 8, "threshold_rows": 2, "threshold_every": 1},
    ),
    "relu_regression.DisjointBlocks.batch": (
        method(lambda: relu_regression.DisjointBlocks(10, 5), "batch"),
        {"key": KEY, "step": 0},
    ),
    "relu_regression.DisjointBlocks.host_batch": (
        method(lambda: relu_regression.DisjointBlocks(10, 5), "host_batch"),
        {"key": KEY, "step": 0},
    ),
    "relu_regression.DisjointBlocks.partition": (
        method(lambda: relu_regression.DisjointBlocks(10, 5), "partition"),
        {"key": KEY, "epoch": 0},
    ),
    "relu_regression.one_visit_event": (
        lambda z, passes: relu_regression.one_visit_event(z, passes=passes),
        {"z": 1.0, "passes": 2},
    ),
    "relu_regression.tree_event": (
        relu_regression.tree_event,
        {"node_noise_multiplier": 1.0, "leaves": 4},
    ),
    "relu_regression.tree_height": (relu_regression.tree_height, {"leaves": 4}),
    "relu_regression.Descent": (
        relu_regression.Descent,
        {"learning_rate": 1.0, "feature_bound": 1.0, "radius": 1.0, "gradient": "true"},
    ),
    "relu_regression.predict": (relu_regression.predict, {"w": jnp.ones(2), "x": X}),
    "relu_regression.records": (
        relu_regression.records,
        {"x": X, "y": Y, "descent": relu_regression.Descent()},
    ),
    "relu_regression.unprotected_glmtron": (
        relu_regression.unprotected_glmtron,
        {"x": X, "y": Y, "steps": 2, "learning_rate": 1.0},
    ),
    "relu_regression.unprotected_sgd": (
        relu_regression.unprotected_sgd,
        {"key": KEY, "x": X, "y": Y, "learning_rate": 1.0, "batch_size": 4, "passes": 1},
    ),
    "relu_regression.calibrate_shuffled": (
        relu_regression.calibrate_shuffled,
        {"epsilon": 1.0, "delta": 1e-5, "num_examples": 1000},
    ),
    "relu_regression.shuffled_epsilon": (
        relu_regression.shuffled_epsilon,
        {"noise_multiplier": 4.0, "delta": 1e-5, "num_examples": 1000},
    ),
    "relu_regression.Grid": (relu_regression.Grid, {"floor": 0.01, "levels": 3}),
    "relu_regression.FixedThreshold": (relu_regression.FixedThreshold, {"value": 1.0}),
    "relu_regression.PublicThreshold": (
        lambda rows, labels, **own: relu_regression.PublicThreshold(rows, labels, **own),
        {"rows": X, "labels": Y, "grid": relu_regression.Grid(), "quantile": 1.0},
    ),
    "relu_regression.PrivateThreshold": (
        relu_regression.PrivateThreshold,
        {"grid": relu_regression.Grid(), "share": 0.1, "failure": 0.1},
    ),
    "relu_regression.PrivateReLURegressor": (
        regressor,
        {
            "table": np.ones((40, 2)),
            "labels": np.ones(40),
            "delta": 1e-3,
            "random_state": 0,
            "steps": 1,
        },
    ),
    "relu_regression.PrivateReLURegressor.predict": (
        predicted,
        {"table": np.ones((40, 2))},
    ),
    # sampling
    "sampling.PoissonSampling": (
        sampling.PoissonSampling,
        {"num_examples": 100, "sampling_rate": 0.1, "capacity": 20},
    ),
    "sampling.WithoutReplacement": (
        sampling.WithoutReplacement,
        {"num_examples": 100, "batch_size": 10},
    ),
    "sampling.FixedBatches": (sampling.FixedBatches, {"num_examples": 100, "batch_size": 10}),
    "sampling.capacity_for": (
        sampling.capacity_for,
        {"num_examples": 100, "sampling_rate": 0.1, "overflow_probability": 1e-9},
    ),
    # subspace
    "allocate_rank": (
        jdp.allocate_rank,
        {"rank": 4, "group_sizes": (3, 6), "num_anchors": 5},
    ),
    "group_leaves": (jdp.group_leaves, {"params": PARAMS, "num_groups": 2}),
    "power_iteration": (
        jdp.power_iteration,
        {"key": KEY, "anchors": jnp.ones((4, 3)), "rank": 2, "iterations": 1, "start": None},
    ),
    "subspace.public_bases": (
        subspace.public_bases,
        {"key": KEY, "anchors": GRADIENTS, "ranks": (1, 2), "groups": (0, 1)}
        | {"iterations": 1, "start": None, "whitening": 0.0},
    ),
    "subspace.bases_from_rows": (
        subspace.bases_from_rows,
        {"rows": [jnp.ones((2, 9))], "like": GRADIENTS, "groups": (0, 0)},
    ),
    "subspace.orthonormalize": (
        subspace.orthonormalize,
        {"key": KEY, "rows": jnp.ones((2, 3))},
    ),
    "subspace.principal_axes": (
        subspace.principal_axes,
        {"rows": jnp.ones((2, 3)), "anchors": jnp.ones((4, 3)), "power": 0.5},
    ),
    "subspace.project": (subspace.project, {"bases": bases(), "per_example": GRADIENTS}),
    "subspace.lift": (subspace.lift, {"bases": bases(), "coordinates": [jnp.ones((4, 2))]}),
    # adapters
    "lora.init": (jdp.lora.init, {"key": KEY, "params": PARAMS, "patterns": "w", "rank": 1}),
    "lora.merge": (jdp.lora.merge, {"params": PARAMS, "adapters": ADAPTERS, "scale": 1.0}),
    "lora.unmerge": (jdp.lora.unmerge, {"params": PARAMS, "adapters": ADAPTERS, "scale": 1.0}),
    "lora.token_length": (jdp.lora.token_length, {"adapters": ADAPTERS}),
    "lora.tokenise": (jdp.lora.tokenise, {"adapters": ADAPTERS, "length": 2}),
    "lora.num_tokens": (jdp.lora.num_tokens, {"adapters": ADAPTERS, "length": 2}),
    "lora.detokenise": (jdp.lora.detokenise, {"tokens": jnp.zeros((3, 2)), "like": ADAPTERS}),
    # hypernetworks
    "hypernet.plan_embedding": (
        hypernet.plan_embedding,
        {"num_records": 10, "epsilon": 1.0, "delta": 1e-3, "releases": 1},
    ),
    "hypernet.EmbeddingPlan.std": (
        method(lambda: hypernet.plan_embedding(10, noise_multiplier=1.0, delta=1e-3), "std"),
        {"clip_norm": 1.0},
    ),
    "hypernet.private_embedding": (hypernet.private_embedding, EMBED),
    "hypernet.flat_tokens": (
        hypernet.flat_tokens,
        {"like": {"w": jnp.zeros(6)}, "token_size": 4},
    ),
    "hypernet.flat_tokens()": (
        lambda tokens: hypernet.flat_tokens({"w": jnp.zeros(6)}, 4)[1](tokens),
        {"tokens": jnp.zeros((2, 4))},
    ),
    "hypernet.Hypernet": (
        network,
        {"num_records": 4, "noise_multiplier": 1.0, "clip_norm": 1.0, "context_tokens": 1},
    ),
    "hypernet.Hypernet.init": (
        method(net, "init"),
        {"key": KEY, "public_records": jnp.ones((4, 3))},
    ),
    "hypernet.Hypernet.embed": (
        method(net, "embed"),
        RECORDS | {"key": KEY, "params": net_params()},
    ),
    "hypernet.Hypernet.generate": (
        method(net, "generate"),
        RECORDS | {"key": KEY, "params": net_params()},
    ),
    "hypernet.Hypernet.decode": (
        method(net, "decode"),
        {"params": net_params(), "embedding": jnp.ones(8)},
    ),
    "hypernet.Hypernet.mean_embedding": (
        method(net, "mean_embedding"),
        {"encoder": net_params().encoder, "records": jnp.ones((4, 3)), "mask": None},
    ),
    "hypernet.MLPEncoder": (apply(hypernet.MLPEncoder, jnp.ones(3)), {"widths": (4, 2)}),
    "hypernet.LinearDecoder": (
        apply(hypernet.LinearDecoder, jnp.ones((1, 3))),
        {"num_tokens": 2, "token_size": 3},
    ),
    "hypernet.TransformerDecoder": (
        apply(hypernet.TransformerDecoder, jnp.ones((1, 3))),
        {"num_tokens": 2, "token_size": 3, "width": 4, "heads": 2, "mlp_width": 4, "layers": 1},
    ),
    "hypernet.init_training": (
        hypernet.init_training,
        {"net": net(), "optimizer": optax.sgd(0.1), "key": KEY, "public_records": jnp.ones((4, 3))},
    ),
    "hypernet.train_step": (
        train,
        {"net": net(), "loss": lambda target, example: target["w"].sum()}
        | {"optimizer": optax.sgd(0.1)},
    ),
    "hypernet.warmup_cosine": (hypernet.warmup_cosine, {"peak": 1e-3, "steps": 10}),
}
_KINDS = {
    "PoissonSampling": sampling.PoissonSampling(100, 0.1),
    "WithoutReplacement": sampling.WithoutReplacement(100, 10),
    "FixedBatches": sampling.FixedBatches(100, 10),
}
for _kind, _sampler in _KINDS.items():
    for _part in ("batch", "host_batch"):
        CALLS[f"sampling.{_kind}.{_part}"] = getattr(_sampler, _part), {"key": KEY, "step": 0}
    CALLS[f"sampling.{_kind}.event"] = _sampler.event, {"noise_multiplier": 1.0, "steps": 3}
CALLS["relu_regression.PrivateReLURegressor.fit"] = CALLS["relu_regression.PrivateReLURegressor"]
# What takes nothing private is traced all the same where running it would take long.
PURE = (
    "hypernet.",
    "power_iteration",
    "public_data.",
    "random_label",
    "subspace.",
    "relu_regression.f",
)
MISSING = object()  # the argument is left out


def call(name, change):
    """Make a call with some arguments changed, private ones abstract: shapes without values."""
    function, arguments = CALLS[name]
    arguments = {k: v for k, v in (arguments | change).items() if v is not MISSING}
    private = {
        key: value
        for key, value in arguments.items()
        if key in PRIVATE and all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
    }
    if not jax.tree.leaves(private) and not name.startswith(PURE):
        return function(**arguments)
    rest = {key: value for key, value in arguments.items() if key not in private}
    return jax.eval_shape(lambda private: (function(**rest, **private), None)[1], private)
