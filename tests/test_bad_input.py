"""Wrong calls: every public function names what is wrong in a call, and leaves nothing behind.

What is private comes as tracers (`calls.py`), so that no error can depend on its values.
"""

import ast
import dataclasses
import inspect
import operator
import re

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    CALLS,
    CLIPPER,
    GRADIENTS,
    KEY,
    MASK,
    MISSING,
    PARAMS,
    RELEASES,
    SCORES,
    X,
    call,
    clipped,
    loss,
    plan,
    sparse,
)

import jdp
from jdp import relu_regression
from jdp.adaptive import clip_and_count

INF, NAN = float("inf"), float("nan")
T, V = TypeError, ValueError
ONE = jnp.ones(())
# The call, what is wrong in it, the error, and what its message must say (the name first).
ROWS = [
    ("add_noise", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("add_noise", {"key": jax.random.PRNGKey(0)}, T, "`key` must be one typed PRNG key (shape ())"),
    ("add_noise", {"clipped_sum": GRADIENTS}, T, "`clipped_sum` must be a ClippedSum"),
    ("add_noise", {"noise_multiplier": -1.0}, V, "`noise_multiplier` must be a finite number >= 0"),
    ("add_noise", {"noise_multiplier": 10**400}, V, "`noise_multiplier` must be a finite number"),
    ("add_noise", {"noise_multiplier": ONE}, V, "`adjacency` must be given when noise_multiplier"),
    ("add_noise", {"adjacency": "neighbours"}, V, "`adjacency` must be one of ['add-remove',"),
    ("secure_key", {}, RuntimeError, "`jdp.secure_key()` must be called outside jit"),
    ("clip_by_norm", {"clip_norm": 0.0}, V, "`clip_norm` must be a number > 0"),
    ("clip_by_norm", {"clip_norm": -INF}, V, "`clip_norm` must be a number > 0"),
    ("clip_by_norm", {"clip_norm": NAN}, V, "`clip_norm` must be a number > 0"),
    ("clip_by_norm", {"clip_norm": 1e-20}, V, "`clip_norm` must be between 1e-12 and 1e+12, or"),
    ("clip_by_norm", {"clip_norm": jnp.ones(2)}, T, "`clip_norm` must be a number > 0 or a"),
    ("clip_by_norm", {"clip_norm": jnp.ones((), jnp.bfloat16)}, T, "`clip_norm` must be a number"),
    ("clip_by_norm()", {"per_example": {}}, V, "`per_example` must be a pytree with at least one"),
    (
        "clip_by_norm()",
        {"per_example": GRADIENTS | {"b": jnp.ones((5, 3))}},
        V,
        "`per_example['b']` must be of",
    ),
    (
        "clip_by_norm()",
        {"per_example": GRADIENTS | {"b": jnp.ones((4, 3), int)}},
        T,
        "`per_example['b']` must be a",
    ),
    ("clip_by_norm()", {"mask": [True] * 4}, T, "`mask` must be a boolean array of shape (n,)"),
    ("clip_by_norm()", {"mask": jnp.ones(4)}, T, "`mask` must be an array of booleans"),
    ("clip_by_group", {"clip_norms": ()}, T, "`clip_norms` must be a non-empty sequence of"),
    ("clip_by_group", {"clip_norms": (1.0, -1.0)}, V, "`clip_norms[1]` must be a number > 0"),
    ("clip_by_group()", {"clip_norms": (1.0,)}, V, "`clip_norms` must be one for each of the 2"),
    ("clip_by_group()", {"groups": {"b": 0}}, V, "`groups` must be a pytree of integers with"),
    ("clip_by_group()", {"groups": {"b": 0, "w": 2}}, V, "`groups` must be labels 0, 1, ...,"),
    ("clip_automatic", {"clip_norm": INF}, V, "`clip_norm` must be a finite number > 0"),
    ("clip_automatic", {"stabilizer": 0.0}, V, "`stabilizer` must be a finite number > 0"),
    ("clip_in_subspace", {"bases": jnp.ones((2, 3))}, T, "`bases` must be jdp.subspace.Bases"),
    ("clip_in_subspace", {"clip_norms": [1.0, 0.2]}, T, "`clip_norms` must be a pair (S1, S2)"),
    ("clip_in_subspace", {"noise_split": "half"}, V, "`noise_split` must be one of ['equal',"),
    ("clip_in_subspace", {"joint_clip": 1}, T, "`joint_clip` must be True or False"),
    (
        "clip_in_subspace()",
        {"per_example": {"w": GRADIENTS["w"]}},
        V,
        "`per_example['b']` must be of",
    ),
    (
        "clip_in_subspace()",
        {"per_example": GRADIENTS | {"b": jnp.ones((4, 2))}},
        V,
        "`per_example['b']` must be of",
    ),
    ("ClippedSum.merge", {"other": GRADIENTS}, T, "`other` must be a ClippedSum"),
    (
        "ClippedSum.merge",
        {"other": CLIPPER({"b": jnp.ones((4, 3))}, MASK)},
        V,
        "`other` must be a sum with",
    ),
    (
        "ClippedSum.merge",
        {"other": jdp.clip_by_norm(2.0)(GRADIENTS, MASK)},
        V,
        "`other` must be a sum with",
    ),
    ("per_example_grad", {"loss": "mse"}, T, "`loss` must be a function of (params, example)"),
    ("per_example_grad()", {"batch": ()}, V, "`batch` must be a pytree of arrays with the"),
    (
        "per_example_grad()",
        {"batch": (jnp.ones((4, 2)), jnp.zeros(5, int))},
        V,
        "`batch` must be a pytree of",
    ),
    ("per_example_grad()", {"params": {"batch_stats": jnp.ones(3)}}, V, "`params` must be free of"),
    (
        "per_example_grad()",
        {"params": {"b": "zero", "w": PARAMS["w"]}},
        T,
        "`params['b']` must be a",
    ),
    (
        "per_example_grad()",
        {"params": {"b": jnp.zeros(3, int), "w": PARAMS["w"]}},
        T,
        "`params['b']` must be a",
    ),
    (
        "per_example_grad()",
        {"trainable": {"b": False, "w": False}},
        V,
        "`trainable` must be such that",
    ),
    ("per_example_grad()", {"trainable": {"b": 1, "w": 0}}, V, "`trainable` must be a pytree of"),
    (
        "per_example_grad()",
        {"loss": lambda params, example: params["b"]},
        T,
        "`loss` must be a function of",
    ),
    (
        "per_example_grad()",
        {"loss": lambda params, example: (loss(params, example), 1)},
        T,
        "`loss` must be a function of",
    ),
    ("unprotected_gradient_norms", {"loss": None}, T, "`loss` must be a function of (params,"),
    ("unprotected_gradient_norms", {"params": {}}, V, "`params` must be such that some parameter"),
    ("clipped_grad", {"clipper": 1.0}, T, "`clipper` must be a clipper"),
    ("clipped_grad", {"microbatch_size": 0}, V, "`microbatch_size` must be an integer >= 1"),
    ("clipped_grad", {"microbatch_size": 2.0}, T, "`microbatch_size` must be an integer >= 1"),
    ("clipped_grad", {"strategy": "ghost"}, V, "`strategy` must be one of ['auto',"),
    (
        "clipped_grad",
        {"clipper": lambda *_: None, "strategy": "book-keeping"},
        V,
        "`strategy` must be 'auto',",
    ),
    ("clipped_grad()", {"mask": jnp.ones(3, bool)}, V, "`batch` must be of shape (n, ...) with"),
    ("clipped_grad()", {"mask": None}, T, "`mask` must be a boolean array of shape (n,)"),
    ("clipped_grad()", {"mask": MISSING}, T, "missing 1 required keyword-only argument: 'mask'"),
    ("dp_aggregate()", {"mask": MISSING, "maks": MASK}, T, "missing 1 required keyword-only"),
    ("privatize", {"key": MISSING}, T, "missing 1 required keyword-only argument: 'key'"),
    ("gep", {"rnak": 3}, T, "unexpected keyword argument 'rnak'"),
    ("plan", {"delta": MISSING}, T, "missing 1 required keyword-only argument: 'delta'"),
    ("privatize", {"batch_size": 10**400}, V, "`batch_size` must be a finite number > 0"),
    ("privatize", {"batch_size": "all"}, T, "`batch_size` must be a finite number > 0"),
    ("privatize()", {"updates": GRADIENTS}, T, "`updates` must be a ClippedSum"),
    ("privatize()", {"params": None}, V, "`params` must be given"),
    ("privatize()", {"params": {"w": PARAMS["w"]}}, V, "`updates` must be an update with the"),
    ("dp_aggregate", {"clipper": jdp.clip_by_norm(INF)}, V, "`clip_norm` must be finite when"),
    ("dp_aggregate", {"adjacency": "zero_out"}, V, "`adjacency` must be one of ['add-remove',"),
    ("dp_aggregate()", {"updates": clipped()}, T, "`updates` must be per-example gradients"),
    ("dp_aggregate()", {"updates": PARAMS}, V, "`updates['b']` must be of shape ('n', 3)"),
    ("dp_aggregate_adaptive", {"initial_clip_norm": NAN}, V, "`initial_clip_norm` must be a"),
    ("dp_aggregate_adaptive", {"count_noise_std": 0.5}, V, "`count_noise_std` must be a finite"),
    ("dp_aggregate_adaptive()", {"params": None}, V, "`params` must be given"),
    ("gep", {"rank": True}, T, "`rank` must be an integer >= 1"),
    ("gep", {"warm_start": 1}, T, "`warm_start` must be True or False"),
    ("gep", {"trainable": {"b": True, "w": False}}, V, "`loss` must be given with"),
    ("gep", {"microbatch_size": 2}, V, "`loss` must be given with microbatch_size or trainable"),
    ("gep()", {"updates": {"w": GRADIENTS["w"]}}, V, "`updates` must be per-example gradients"),
    ("gep()", {"public_gradients": lambda params, key: PARAMS}, V, "`public_gradients(params,"),
    ("gep(loss)", {"trainable": {"b": False, "w": True}}, V, "`trainable['b']` must be True, as"),
    (
        "gep(loss)",
        {"public_gradients": lambda params, key: {"b": None, "w": GRADIENTS["w"]}},
        V,
        "`trainable['b']` must be",
    ),
    ("gep(loss)", {"params": {"w": PARAMS["w"]}}, V, "`params` must be with a leaf at ['b'], as"),
    ("biased_gep", {"clip_norm": None}, T, "`clip_norm` must be a number > 0"),
    ("biased_gep", {"clip_norm": 0.0}, V, "`clip_norm` must be a number > 0"),
    ("biased_gep()", {"mask": jnp.ones(4)}, T, "`mask` must be an array of booleans"),
    ("random_label_gradients", {"images": [[1.0]]}, T, "`images` must be an array"),
    ("random_label_gradients", {"num_classes": 2**31}, V, "`num_classes` must be an integer >= 2"),
    ("random_label_gradients", {"microbatch_size": 0}, V, "`microbatch_size` must be an integer"),
    ("random_label_gradients()", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("scale_by_adam_corrected", {"noise_std": "s"}, T, "`noise_std` must be a finite number > 0"),
    ("scale_by_adam_corrected", {"b1": -0.1}, V, "`b1` must be a finite number >= 0 and < 1"),
    ("scale_by_adam_corrected()", {"updates": GRADIENTS}, V, "`updates['b']` must be of shape"),
    ("plan", {"num_examples": 0}, V, "`num_examples` must be an integer >= 1"),
    ("plan", {"num_examples": 2**31}, V, "`num_examples` must be an integer >= 1 and <="),
    ("plan", {"batch_size": 101}, V, "`batch_size` must be an integer >= 1 and <= 100"),
    ("plan", {"batch_size": 10.0}, T, "`batch_size` must be an integer >= 1 and <= 100"),
    ("plan", {"steps": 0}, V, "`steps` must be an integer >= 1"),
    ("plan", {"delta": 0}, V, "`delta` must be a finite number > 0 and < 1"),
    ("plan", {"delta": "1e-5"}, T, "`delta` must be a finite number > 0 and < 1"),
    ("plan", {"epsilon": 1.0}, V, "`epsilon` must be given if and only if noise_multiplier is not"),
    ("plan", {"noise_multiplier": None, "epsilon": INF}, V, "`epsilon` must be a finite number >"),
    (
        "plan",
        {"noise_multiplier": jdp.accounting.under_adjacency(1.0, "replace-one")},
        V,
        "`adjacency` must be",
    ),
    ("plan", {"sampling": "weighted"}, V, "`sampling` must be one of ['fixed-batches',"),
    ("plan", {"sampling": "fixed-batches", "capacity": 20}, V, "`capacity` must be left out for"),
    (
        "plan",
        {"sampling": "without-replacement", "adjacency": "add-remove"},
        V,
        "`adjacency` must be",
    ),
    ("plan", {"sampling": "without-replacement"}, V, "`event` must be one that 'pld' bounds"),
    ("plan", {"capacity": 0}, V, "`capacity` must be an integer >= 1 and <= 100"),
    ("plan", {"accountant": "gdp"}, V, "`accountant` must be one of ['pld', 'rdp']"),
    ("steps_for_epochs", {"epochs": 1.5}, T, "`epochs` must be an integer >= 1"),
    ("steps_for_epochs", {"batch_size": 0}, V, "`batch_size` must be an integer >= 1"),
    ("TrainingPlan.batch", {"step": 6}, V, "`step` must be an integer >= 0 and <= 5"),
    ("TrainingPlan.batch", {"step": -1}, V, "`step` must be an integer >= 0 and <= 5"),
    ("TrainingPlan.batch", {"key": 1}, T, "`key` must be one typed PRNG key (shape ())"),
    ("TrainingPlan.host_batch", {"step": 6}, V, "`step` must be an integer >= 0 and <= 5"),
    ("TrainingPlan.to_dict", {"epsilon": 0.1}, V, "`facts` must be none of ['accountant',"),
    ("TrainingPlan.to_json", {"delta": 0.1}, V, "`facts` must be none of ['accountant',"),
    ("TrainingPlan.report", {"steps": 7}, V, "`facts` must be none of ['accountant',"),
    ("Ledger", {"folder": 5}, T, "`folder` must be a path"),
    ("Ledger", {"folder": ""}, T, "`folder` must be a path"),
    ("Ledger", {"folder": "/dev/null/ledger"}, NotADirectoryError, "cannot open the ledger"),
    ("Ledger", {"read_only": True}, FileNotFoundError, "cannot read the ledger"),
    ("Ledger", {"read_only": 1}, T, "`read_only` must be True or False"),
    ("Ledger.open_segment", {"run": "../run"}, V, '`run` must be letters, digits, and "-", "_"'),
    ("Ledger.open_segment", {"plan": 1.0}, T, "`plan` must be a jdp.TrainingPlan, or None"),
    ("Ledger.open_segment", {"queries": ["rate"]}, T, "`queries` must be a dictionary of strings"),
    ("Ledger.open_segment", {"queries": {"rate": 0.1}}, T, "`queries` must be a dictionary of"),
    ("Ledger.open_segment", {"start": -1}, V, "`start` must be an integer >= 0"),
    ("Ledger.charge", {"plan": None}, T, "`plan` must be a jdp.TrainingPlan"),
    ("Ledger.charge", {"run": "another"}, V, "`run` must be one of ('run',) that has a plan"),
    ("Ledger.charge", {"stop": 7}, V, "`stop` must be an integer >= 0 and <= 6"),
    ("Ledger.spent", {"run": "another"}, V, "`run` must be one of ('run',)"),
    ("Ledger.spent", {"delta": 2.0}, V, "`delta` must be a finite number > 0 and < 1"),
    ("ResumableRun", {"ledger": "folder"}, T, "`ledger` must be a jdp.Ledger"),
    ("ResumableRun", {"plan": 1.0}, T, "`plan` must be a jdp.TrainingPlan or None"),
    ("ResumableRun", {"state": (jnp.zeros(2), KEY)}, V, "`state` must be a pytree with two keys"),
    ("ResumableRun", {"program": 1}, T, "`program` must be a function (step, state) -> state, or"),
    ("ResumableRun", {"config": ["rate"]}, T, "`config` must be a dictionary"),
    ("ResumableRun", {"config": {"loss": loss}}, T, "`config['loss']` must be numbers, strings,"),
    ("ResumableRun", {"data": ""}, T, "`data` must be the public name and version of the data"),
    ("ResumableRun", {"name": "a/b"}, V, '`name` must be letters, digits, and "-", "_" or "."'),
    ("ResumableRun", {"save_every": NAN}, V, "`save_every` must be a finite number >= 0"),
    ("ResumableRun", {"keep": 0}, V, "`keep` must be an integer >= 1"),
    ("ResumableRun.chunks", {"every": 0}, V, "`every` must be an integer >= 1"),
    ("checkpoints.discard", {"folder": None}, T, "`folder` must be a path"),
    ("checkpoints.discard", {"name": ".."}, V, '`name` must be letters, digits, and "-", "_" or'),
    ("ledger.check_name", {"run": ""}, V, '`run` must be letters, digits, and "-", "_" or "."'),
    (
        "accounting.combine_noise_multipliers",
        {"one": MISSING, "two": MISSING},
        V,
        "`noise_multipliers` must be at least one",
    ),
    ("accounting.combine_noise_multipliers", {"two": -1.0}, V, "`noise_multiplier` must be a"),
    ("accounting.dp_sgd_event", {"steps": 2.5}, T, "`steps` must be an integer >= 0"),
    ("accounting.dp_sgd_event", {"sampling_rate": 0.0}, V, "`sampling_rate` must be a finite"),
    ("accounting.privacy_spent", {"event": "gaussian"}, V, "`event` must be one that 'pld'"),
    ("accounting.privacy_spent", {"event": dpa.LaplaceDpEvent(1.0)}, V, "`event` must be one that"),
    ("accounting.privacy_spent", {"delta": 1.0}, V, "`delta` must be a finite number > 0 and < 1"),
    ("accounting.epsilon", {"steps": -1}, V, "`steps` must be an integer >= 0"),
    ("accounting.epsilon", {"sampling_rate": 1.5}, V, "`sampling_rate` must be a finite number >"),
    ("accounting.epsilon", {"adjacency": "replace-one"}, V, "`event` must be one that 'rdp'"),
    ("accounting.under_adjacency", {"adjacency": "replace"}, V, "`adjacency` must be one of"),
    ("accounting.calibrate_noise_multiplier", {"epsilon": 0.0}, V, "`epsilon` must be a finite"),
    ("accounting.calibrate_noise_multiplier", {"steps": 0}, V, "`steps` must be an integer >= 1"),
    (
        "accounting.calibrate_event",
        {"make_event": dpa.GaussianDpEvent(1.0)},
        T,
        "`make_event` must be a",
    ),
    ("accounting.calibrate_event", {"epsilon": NAN}, V, "`epsilon` must be a finite number > 0"),
    ("auditing.epsilon_many_runs", {"present": SCORES[:3]}, V, "`present` must be a vector, of"),
    ("auditing.epsilon_many_runs", {"absent": np.full(20, NAN)}, V, "`absent` must be free of NaN"),
    ("auditing.epsilon_many_runs", {"delta": 1.0}, V, "`delta` must be a finite number >= 0 and"),
    ("auditing.mu_many_runs", {"present": ["a"] * 20}, T, "`present` must be a vector of numbers"),
    ("auditing.mu_many_runs", {"significance": 0.0}, V, "`significance` must be a finite number"),
    ("auditing.Audit.power", {"claimed": -1.0}, V, "`claimed` must be a finite number >= 0"),
    ("auditing.epsilon_one_run", {"included": SCORES}, T, "`included` must be booleans of shape"),
    ("auditing.epsilon_one_run", {"guesses": 3}, V, "`guesses` must be even"),
    ("auditing.epsilon_one_run", {"scores": SCORES * NAN}, V, "`scores` must be free of NaN"),
    ("auditing.one_run_p_value", {"correct": 5}, V, "`correct` must be an integer >= 0 and <= 4"),
    ("auditing.one_run_p_value", {"canaries": 0}, V, "`canaries` must be an integer >= 1"),
    ("auditing.gaussian_score", {"absent": RELEASES[:, :1]}, V, "`absent` must be of shape (m,"),
    (
        "auditing.gaussian_score",
        {"present": RELEASES[:3], "absent": RELEASES[:3]},
        V,
        "`present` must be at least 4",
    ),
    ("auditing.lower_confidence", {"successes": 11}, V, "`successes` must be from 0 to trials"),
    ("auditing.lower_confidence", {"trials": 10.0}, T, "`trials` must be an integer, or an array"),
    ("auditing.upper_confidence", {"significance": 1.0}, V, "`significance` must be a finite"),
    ("auditing.first_half", {"draws": None}, T, "`draws` must be an array with a draw a row"),
    ("auditing.second_half", {"draws": 1.0}, T, "`draws` must be an array with a draw a row"),
    ("pate.plan_votes", {"threshold": NAN, "answers": 3}, V, "`threshold` must be a finite"),
    ("pate.plan_votes", {"epsilon": 0.0}, V, "`epsilon` must be a finite number > 0"),
    ("pate.votes_event", {"vote_noise_multiplier": NAN}, V, "`vote_noise_multiplier` must be a"),
    ("pate.votes_event", {"threshold_noise_multiplier": None}, T, "`threshold_noise_multiplier`"),
    ("pate.votes_event", {"answers": -1}, V, "`answers` must be an integer >= 0"),
    ("pate.teacher_votes", {"train": None}, T, "`train` must be a function (key, shard) ->"),
    ("pate.teacher_votes", {"plan": plan()}, T, "`plan` must be a VotePlan"),
    ("pate.teacher_votes", {"teachers": "all"}, V, "`teachers` must be numbers of teachers, of"),
    (
        "pate.teacher_votes",
        {"data": (jnp.ones(100), jnp.ones(99))},
        V,
        "`data` must be a pytree of",
    ),
    ("pate.noisy_labels", {"votes": [[0] * 4] * 10}, T, "`votes` must be an array of integers"),
    ("pate.noisy_labels", {"num_classes": 2.0}, T, "`num_classes` must be an integer >= 2"),
    ("pate.vote_sum", {"votes": jnp.zeros((10, 4))}, T, "`votes` must be an array of integers"),
    ("pate.most_votes", {"votes": jnp.zeros(10, int)}, V, "`votes` must be a matrix with a row a"),
    (
        "pate.unprotected_epsilon",
        {"ballots": jnp.zeros((9, 4), int)},
        V,
        "`votes` must be of shape (10,",
    ),
    (
        "pate.unprotected_epsilon",
        {"votes": jnp.zeros((10, 4), int)},
        T,
        "`votes` must be an array that is not traced",
    ),
    ("public_data.mean_gradient", {"loss": None}, T, "`loss` must be a function of (params,"),
    (
        "public_data.mean_gradient",
        {"examples": (jnp.ones((0, 2)), jnp.zeros(0, int))},
        V,
        "`examples` must be one or more",
    ),
    ("public_data.mean_gradient", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("public_data.mix_public", {"mixing": NAN}, V, "`mixing` must be a finite number >= 0 and <="),
    ("public_data.mix_public", {"mixing": "cosine"}, T, "`mixing` must be a finite number >= 0"),
    ("public_data.mix_public", {"mixing": jnp.ones(3)}, T, "`mixing` must be a finite number >="),
    ("public_data.mix_public", {"mixing": lambda step: "half"}, T, "`mixing(step)` must be a num"),
    ("public_data.mix_public", {"mixing": lambda step: None}, T, "`mixing(step)` must be a number"),
    ("public_data.mix_public", {"mixing": lambda step: jnp.ones(3)}, V, "`mixing(step)` must be a"),
    ("public_data.mix_public()", {"mixing": lambda _: jnp.ones(1)}, V, "`mixing(step)` must be a"),
    ("public_data.mix_public()", {"updates": GRADIENTS}, V, "`updates['b']` must be of shape (3,)"),
    ("public_data.cosine_mixing", {"steps": 2.0}, T, "`steps` must be an integer >= 1"),
    ("public_data.project_updates", {"refresh_every": -1}, V, "`refresh_every` must be an"),
    ("public_data.project_updates()", {"params": None}, V, "`params` must be given"),
    ("public_data.clip_sparsified", {"kept": {"w": True}}, V, "`kept` must be a pytree with"),
    ("public_data.clip_sparsified", {"kept": None}, V, "`kept` must be a pytree with structure"),
    (
        "public_data.clip_sparsified",
        {"kept": None, "per_example": GRADIENTS["w"]},
        T,
        "`kept` must be an array, but got None",
    ),
    (
        "public_data.clip_sparsified",
        {"kept": {"b": "all", "w": True}},
        T,
        "`kept['b']` must be an array",
    ),
    (
        "public_data.clip_sparsified",
        {"clipper": lambda per_example, mask: per_example},
        T,
        "`clipper` must be one that returns a ClippedSum",
    ),
    (
        "public_data.clip_sparsified",
        {"clipper": clip_and_count(1.0, gradient_scale=2.0, count_scale=2.0)},
        V,
        "`clipper` must be one that estimates a sum of shapes",
    ),
    ("public_data.clip_sparsified(merge)", {"other": clipped()}, T, "`other` must be a SparseSum"),
    (
        "public_data.clip_sparsified(merge)",
        {"other": sparse(True, {"b": GRADIENTS["b"]})},
        V,
        "`other` must be a sum with parts",
    ),
    (
        "public_data.clip_sparsified(merge)",
        {"other": dataclasses.replace(sparse(True), kept={"b": jnp.ones(3, bool), "w": None})},
        V,
        "`other` must be a sum of which is kept",
    ),
    (
        "public_data.clip_preconditioned",
        {"preconditioner": None, "per_example": GRADIENTS["w"]},
        T,
        "`preconditioner` must be an array, but got None",
    ),
    (
        "public_data.clip_preconditioned",
        {"preconditioner": {"b": None, "w": PARAMS["w"]}},
        T,
        "`preconditioner['b']` must be an array",
    ),
    (
        "public_data.clip_preconditioned",
        {"preconditioner": GRADIENTS},
        V,
        "`preconditioner['b']` must be",
    ),
    ("public_data.random_coordinates", {"rate": NAN}, V, "`rate` must be a finite number >= 0"),
    ("public_data.inverse_root", {"floor": "small"}, T, "`floor` must be a finite number > 0"),
    (
        "public_data.inverse_root",
        {"second_moments": {"w": "v"}},
        T,
        "`second_moments['w']` must be",
    ),
    (
        "public_data.inverse_root",
        {"second_moments": {"w": jnp.ones(3, int)}},
        T,
        "`second_moments['w']` must be a floating array",
    ),
    (
        "public_data.inverse_root",
        {"second_moments": (jnp.ones(2), jnp.array([1.0, -1.0]))},
        V,
        "`second_moments[1]` must be at least 0 everywhere",
    ),
    ("relu_regression.fit", {"x": X.astype(int)}, T, "`x` must be a floating array"),
    ("relu_regression.fit", {"y": jnp.ones(39)}, V, "`y` must be of shape (40,), as the plan has"),
    ("relu_regression.fit", {"plan": None}, T, "`plan` must be a TrainingPlan"),
    ("relu_regression.fit", {"threshold": 0.1}, T, "`threshold` must be a FixedThreshold,"),
    ("relu_regression.fit", {"descent": 0.1}, T, "`descent` must be a Descent"),
    (
        "relu_regression.fit",
        {"descent": relu_regression.Descent(jnp.ones(2))},
        T,
        "`learning_rate` must be a",
    ),
    ("relu_regression.Descent", {"radius": "far"}, T, "`radius` must be a number > 0"),
    ("relu_regression.fit", {"start": jnp.ones(3)}, V, "`start` must be of shape (2,), as x has"),
    ("relu_regression.plan_blocks", {"adjacency": "add-remove"}, V, "`adjacency` must be"),
    (
        "relu_regression.plan_blocks",
        {"release": "tree", "steps": 3},
        V,
        "`steps` must be one pass (1)",
    ),
    ("relu_regression.plan_blocks", {"sparse_vector": True}, V, "`sparse_vector` must be False"),
    ("relu_regression.DisjointBlocks", {"threshold_rows": 99}, V, "`batch_size` must be at most"),
    ("relu_regression.DisjointBlocks", {"release": "once"}, V, "`release` must be one of"),
    ("relu_regression.DisjointBlocks.batch", {"key": None}, T, "`key` must be one typed PRNG key"),
    (
        "relu_regression.DisjointBlocks.host_batch",
        {"step": -1},
        V,
        "`step` must be an integer >= 0",
    ),
    ("relu_regression.one_visit_event", {"passes": 0.5}, T, "`passes` must be an integer >= 0"),
    (
        "relu_regression.tree_event",
        {"node_noise_multiplier": -1.0},
        V,
        "`node_noise_multiplier` must",
    ),
    ("relu_regression.tree_height", {"leaves": 0}, V, "`leaves` must be an integer >= 1"),
    ("relu_regression.Descent", {"learning_rate": 0.0}, V, "`learning_rate` must be a finite"),
    ("relu_regression.Descent", {"gradient": "false"}, V, "`gradient` must be one of"),
    ("relu_regression.predict", {"w": jnp.ones(3)}, V, "`w` must be of shape (2,)"),
    ("relu_regression.records", {"y": jnp.ones(3)}, V, "`y` must be of shape (40,)"),
    ("relu_regression.records", {"descent": None}, T, "`descent` must be a Descent"),
    ("relu_regression.unprotected_glmtron", {"x": [[1.0]]}, T, "`x` must be a floating array"),
    ("relu_regression.unprotected_glmtron", {"steps": 0}, V, "`steps` must be an integer >= 1"),
    ("relu_regression.unprotected_sgd", {"batch_size": 0}, V, "`batch_size` must be an integer"),
    ("relu_regression.unprotected_sgd", {"passes": 0}, V, "`passes` must be an integer >= 1"),
    ("relu_regression.calibrate_shuffled", {"epsilon": -1.0}, V, "`epsilon` must be a finite"),
    ("relu_regression.shuffled_epsilon", {"num_examples": 0}, V, "`num_examples` must be an"),
    ("relu_regression.Grid", {"floor": 0.0}, V, "`floor` must be a finite number >= 1e-09 and <="),
    ("relu_regression.Grid", {"levels": 61}, V, "`levels` must be an integer >= 1 and <= 60"),
    ("relu_regression.FixedThreshold", {"value": -1.0}, V, "`value` must be a number > 0"),
    (
        "relu_regression.PublicThreshold",
        {"rows": jnp.ones((0, 2))},
        T,
        "`x` must be a floating array",
    ),
    ("relu_regression.PublicThreshold", {"quantile": 1.5}, V, "`quantile` must be a finite"),
    ("relu_regression.PrivateThreshold", {"share": 1.0}, V, "`share` must be a finite number >="),
    ("relu_regression.PrivateThreshold", {"mechanism": "laplace"}, V, "`mechanism` must be one of"),
    ("relu_regression.PrivateThreshold", {"grid": (0.01, 8)}, T, "`grid` must be a Grid"),
    ("relu_regression.PrivateReLURegressor", {"method": "sgd"}, V, "`method` must be one of"),
    ("relu_regression.PrivateReLURegressor", {"epsilon": NAN}, V, "`epsilon` must be a finite"),
    ("relu_regression.PrivateReLURegressor", {"random_state": -1}, V, "`random_state` must be an"),
    ("relu_regression.PrivateReLURegressor", {"clip": "small"}, T, "`clip` must be a finite"),
    ("relu_regression.PrivateReLURegressor.fit", {"labels": None}, V, "requires y to be passed"),
    (
        "relu_regression.PrivateReLURegressor.predict",
        {"table": np.ones((40, 3))},
        V,
        "X has 3 features",
    ),
    ("relu_regression.DisjointBlocks.partition", {"key": 0}, T, "`key` must be one typed PRNG"),
    ("sampling.PoissonSampling", {"sampling_rate": 1e-12}, V, "`sampling_rate` must be a finite"),
    ("sampling.PoissonSampling", {"capacity": 101}, V, "`capacity` must be an integer >= 1 and"),
    ("sampling.WithoutReplacement", {"batch_size": 101}, V, "`batch_size` must be an integer >="),
    ("sampling.FixedBatches", {"num_examples": -5}, V, "`num_examples` must be an integer >= 1"),
    (
        "sampling.PoissonSampling.batch",
        {"key": jax.random.split(KEY)},
        T,
        "`key` must be one typed PRNG",
    ),
    ("sampling.PoissonSampling.host_batch", {"step": 0.5}, T, "`step` must be an integer >= 0"),
    (
        "sampling.PoissonSampling.event",
        {"noise_multiplier": NAN},
        V,
        "`noise_multiplier` must be a",
    ),
    ("sampling.WithoutReplacement.batch", {"step": -1}, V, "`step` must be an integer >= 0"),
    ("sampling.WithoutReplacement.host_batch", {"key": None}, T, "`key` must be one typed PRNG"),
    ("sampling.WithoutReplacement.event", {"steps": -1}, V, "`steps` must be an integer >= 0"),
    ("sampling.FixedBatches.batch", {"key": "key"}, T, "`key` must be one typed PRNG key (shape"),
    ("sampling.FixedBatches.host_batch", {"step": -1}, V, "`step` must be an integer >= 0"),
    ("sampling.FixedBatches.event", {"steps": 1.0}, T, "`steps` must be an integer >= 0"),
    ("sampling.capacity_for", {"sampling_rate": 0.0}, V, "`sampling_rate` must be a finite"),
    ("sampling.capacity_for", {"overflow_probability": NAN}, V, "`overflow_probability` must be"),
    ("allocate_rank", {"rank": 1}, V, "`rank` must be an integer >= 2"),
    ("allocate_rank", {"group_sizes": ()}, T, "`group_sizes` must be a non-empty sequence of"),
    ("allocate_rank", {"num_anchors": 0}, V, "`num_anchors` must be an integer >= 1"),
    ("group_leaves", {"params": {}}, V, "`params` must be a pytree with at least one array"),
    ("group_leaves", {"num_groups": 3}, V, "`num_groups` must be an integer >= 1 and <= 2"),
    ("power_iteration", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("power_iteration", {"anchors": jnp.ones(3)}, V, "`anchors` must be of shape (m, p)"),
    ("power_iteration", {"anchors": jnp.ones((4, 3), int)}, T, "`anchors` must be a floating"),
    ("power_iteration", {"rank": 4}, V, "`rank` must be an integer >= 1 and <= 3"),
    ("power_iteration", {"start": jnp.ones((1, 3))}, V, "`start` must be of shape (2, 3)"),
    ("subspace.public_bases", {"ranks": (1,)}, T, "`ranks` must be one rank for each of the 2"),
    ("subspace.public_bases", {"groups": (0, 2)}, V, "`groups` must be labels 0, 1, ..., one for"),
    ("subspace.public_bases", {"whitening": 2.0}, V, "`whitening` must be a finite number >= 0"),
    (
        "subspace.bases_from_rows",
        {"rows": [jnp.ones((2, 8))]},
        V,
        "`rows` must be floating matrices",
    ),
    ("subspace.bases_from_rows", {"groups": (0,)}, V, "`groups` must be labels 0, 1, ..., one"),
    ("subspace.orthonormalize", {"rows": jnp.ones((4, 3))}, V, "`rows` must be of shape (k, p),"),
    ("subspace.principal_axes", {"anchors": jnp.ones((4, 2))}, V, "`anchors` must be of shape"),
    (
        "subspace.project",
        {"per_example": {"b": GRADIENTS["b"]}},
        V,
        "`per_example['w']` must be of",
    ),
    ("subspace.lift", {"coordinates": [jnp.ones((4, 3))]}, V, "`coordinates` must be for each"),
    ("lora.init", {"key": 0}, T, "`key` must be one typed PRNG key"),
    ("lora.init", {"patterns": "v"}, V, "`patterns` must be such that each matches"),
    ("lora.init", {"patterns": 1}, T, "`patterns` must be one shell pattern or more"),
    ("lora.init", {"rank": 3}, V, "`rank` must be at most 2"),
    ("lora.merge", {"adapters": {"w": 1}}, T, "`adapters` must be of the form"),
    ("lora.merge", {"params": {"v": jnp.ones((2, 3))}}, V, "`adapters` must be factors (r, n) and"),
    ("lora.unmerge", {"scale": NAN}, V, "`scale` must be a finite number"),
    ("lora.token_length", {"adapters": {}}, V, "`adapters` must be a pytree of vectors"),
    ("lora.tokenise", {"length": 0}, V, "`length` must be an integer >= 1"),
    ("lora.num_tokens", {"adapters": {"w": 1}}, V, "`adapters` must be a pytree of vectors"),
    ("lora.detokenise", {"tokens": jnp.zeros((4, 2))}, V, "`tokens` must be 3 tokens of length 2"),
    ("hypernet.plan_embedding", {"releases": 0}, V, "`releases` must be an integer >= 1"),
    ("hypernet.plan_embedding", {"num_records": 0}, V, "`num_records` must be an integer >= 1"),
    ("hypernet.EmbeddingPlan.std", {"clip_norm": -1.0}, V, "`clip_norm` must be a finite number"),
    (
        "hypernet.private_embedding",
        {"encode": lambda record: record[None]},
        V,
        "`encode` must be a function",
    ),
    ("hypernet.private_embedding", {"encode": lambda record: 1}, T, "`encode` must be a function"),
    ("hypernet.private_embedding", {"num_records": 5}, V, "`records` must be a pytree of arrays"),
    ("hypernet.private_embedding", {"mask": jnp.ones(5, bool)}, V, "`mask` must be of shape (4,),"),
    ("hypernet.private_embedding", {"centre": jnp.ones(2)}, V, "`centre` must be of shape (3,),"),
    ("hypernet.private_embedding", {"records": jnp.ones(())}, V, "`records` must be a pytree of"),
    ("hypernet.flat_tokens", {"like": {"w": jnp.zeros(3, int)}}, T, "`like` must be a pytree of"),
    ("hypernet.flat_tokens", {"token_size": 0}, V, "`token_size` must be an integer >= 1"),
    ("hypernet.flat_tokens()", {"tokens": jnp.zeros((3, 4))}, V, "`tokens` must be of shape (2,"),
    ("hypernet.Hypernet", {"encoder": lambda record: record}, T, "`encoder` must be a flax.linen"),
    ("hypernet.Hypernet", {"adjacency": "none"}, V, "`adjacency` must be one of ['add-remove',"),
    ("hypernet.Hypernet", {"detokenise": None}, T, "`detokenise` must be a function from (t, d)"),
    ("hypernet.Hypernet.init", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("hypernet.Hypernet.embed", {"key": None}, T, "`key` must be one typed PRNG key (shape ())"),
    (
        "hypernet.Hypernet.generate",
        {"records": jnp.ones((3, 3))},
        V,
        "`records` must be a pytree of",
    ),
    (
        "hypernet.Hypernet.decode",
        {"embedding": jnp.ones(7)},
        V,
        "`embedding` must be of shape (8,)",
    ),
    (
        "hypernet.Hypernet.mean_embedding",
        {"mask": jnp.ones(3, bool)},
        V,
        "`mask` must be of shape (4,),",
    ),
    ("hypernet.MLPEncoder", {"widths": ()}, T, "`widths` must be a non-empty sequence of integers"),
    ("hypernet.LinearDecoder", {"num_tokens": 0}, V, "`num_tokens` must be an integer >= 1"),
    ("hypernet.TransformerDecoder", {"heads": 3}, V, "`heads` must be a divisor of the width, 4"),
    ("hypernet.init_training", {"net": None}, T, "`net` must be a Hypernet"),
    ("hypernet.init_training", {"key": 0}, T, "`key` must be one typed PRNG key (shape ())"),
    ("hypernet.train_step", {"loss": None}, T, "`loss` must be a function of (target, examples)"),
    ("hypernet.train_step", {"optimizer": 0.1}, T, "`optimizer` must be an optax transformation"),
    ("hypernet.warmup_cosine", {"peak": 0.0}, V, "`peak` must be a finite number > 0"),
    ("hypernet.warmup_cosine", {"steps": 1.0}, T, "`steps` must be an integer >= 1"),
]


# Public, but without an argument that could be wrong, or called only with what others checked.
EXCUSED = {
    "a record that functions return": (
        "ClippedSum", "TrainingPlan", "accounting.PrivacySpent", "auditing.Audit",
        "auditing.OneRunAudit", "ledger.Segment", "pate.NoisyLabels", "pate.VotePlan",
        "relu_regression.Fit", "hypernet.EmbeddingPlan", "hypernet.HypernetParams",
        "hypernet.TrainState", "subspace.Bases",
    ),
    "a plain pair or triple, checked where it is used": ("hypernet.Tasks",),
    "made by a function of its module": ("pate.VoteSum", "pate.MostVotes"),
    "called by the library on what it made itself": (
        "ClippedSum.combine", "subspace.Bases.weigh", "pate.gnmax_divergences", "ledger.cost",
        "ledger.Segment.differences", "relu_regression.clipped_sum",
        "relu_regression.Descent.rates", "relu_regression.Descent.is_true",
        "relu_regression.Descent.shares", "relu_regression.Grid.above",
        "relu_regression.PublicThreshold.choose", "relu_regression.PrivateThreshold.choose",
        "relu_regression.PrivateThreshold.count", "relu_regression.PrivateThreshold.slack",
        "relu_regression.PrivateThreshold.check", "pate.MostVotes.merge",
    ),
    "facts for a report, any of them": (
        "pate.VotePlan.to_dict", "pate.VotePlan.report", "hypernet.EmbeddingPlan.to_dict",
        "hypernet.EmbeddingPlan.report",
    ),
    "a name, of which nothing may be known": ("Ledger.segments",),
}  # fmt: skip
MODULES = ("", "accounting", "auditing", "checkpoints", "ledger", "pate", "public_data")
MODULES += ("relu_regression", "sampling", "subspace", "hypernet", "lora")


def _resolve(name):
    return operator.attrgetter(re.sub(r"\(.*\)", "", name))(jdp)


def _names(module):
    """What a module defines or, by `import X as X`, offers."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
    yield from ("PrivateReLURegressor",) if module is relu_regression else ()


def _public():
    """All public callables by name; of classes also the methods that take arguments."""
    for module in MODULES:
        place = operator.attrgetter(module)(jdp) if module else jdp
        for name in _names(place):
            value = getattr(place, name)
            if name.startswith("_") or not callable(value):
                continue
            yield f"{module}.{name}".lstrip("."), value
            for part, method in vars(value).items() if isinstance(value, type) else ():
                own = inspect.isfunction(method) and method.__qualname__ == f"{name}.{part}"
                takes = own and len(inspect.signature(method).parameters) > 1
                if takes and not part.startswith("_"):
                    yield f"{module}.{name}.{part}".lstrip("."), method


def _id(row):
    return f"{row[0]} {', '.join(row[1])}"


@pytest.mark.parametrize("name", [name for name in CALLS if name != "secure_key"])
def test_the_call_itself_works(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(name, {})


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_a_wrong_call_is_named_before_private_data_is_touched(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, change, error, words = row
    with pytest.raises(error) as raised:
        call(name, change)
    assert type(raised.value) is error
    text = str(raised.value)
    assert words in text, text
    others = "required keyword-only argument|unexpected keyword argument|Choose another folder"
    others += "|requires y to be passed|is expecting 2 features"  # by scikit-learn
    assert re.search(others, text) or re.match(
        r"`[^`]+` must be .+, but got .+\. .+", text, re.DOTALL
    ), text
    assert not list(tmp_path.iterdir())


def test_messages_do_not_show_what_arrays_hold():
    secret = {"a": [jnp.array(12345.0)], "b": np.array([12345.0])}
    with pytest.raises(TypeError, match="array of shape") as raised:
        jdp.add_noise(KEY, clipped().merge(secret), 1.0)
    assert "12345" not in str(raised.value)


def test_the_table_is_as_long_as_promised():
    assert len(ROWS) >= 120


def test_every_public_callable_has_a_row_or_an_excuse():
    rows = {id(_resolve(row[0])) for row in ROWS}
    excused = {id(_resolve(name)) for names in EXCUSED.values() for name in names}
    missing = [name for name, value in _public() if id(value) not in rows | excused]
    assert not missing
