"""Blocks and trees: samplers, events and plans."""

import math

import dp_accounting as dpa
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from jdp import Ledger, accounting
from jdp.accounting import combine_noise_multipliers, privacy_spent
from jdp.one_visit import (
    DisjointBlocks,
    one_visit_event,
    plan_blocks,
    pure_event,
    tree_event,
    tree_height,
)

DELTA = 1e-5


def _hockey_stick(losses, masses, epsilon):
    return float(np.sum(masses * np.maximum(0, -np.expm1(epsilon - losses))))


def _paths(z_count, z_gradient, reaction):
    """Brute force: privacy losses of an adaptive two-step run, for a record in either block.

    The first block releases o_1 = c + z_count N; the second, whose sensitivity is the function s of
    o_1, releases o_2 = g + s(o_1) z_gradient N. Densities on a grid of (o_1, o_2).
    """
    first = np.linspace(-9 * z_count, 9 * z_count + 1, 501)
    unit = np.linspace(-9 * z_gradient, 9 * z_gradient + 1, 501)
    scales = reaction(first)[:, None]
    second = unit[None, :] * scales
    spread = scales * z_gradient
    density_1 = {c: stats.norm.pdf(first, c, z_count) for c in (0.0, 1.0)}
    density_2 = {g: stats.norm.pdf(second, g * scales, spread) for g in (0.0, 1.0)}
    cell = (first[1] - first[0]) * (unit[1] - unit[0]) * scales
    base = density_1[0.0][:, None] * density_2[0.0]
    for other in (
        density_1[1.0][:, None] * density_2[0.0],
        density_1[0.0][:, None] * density_2[1.0],
    ):
        yield np.log(base / other), base * cell


@pytest.mark.parametrize("z_count, z_gradient", [(1.5, 1.5), (1.0, 2.0), (3.0, 0.8)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 4.0])
def test_max_rule_is_that_of_brute_force_over_both_paths(z_count, z_gradient, epsilon):
    worst = max(
        _hockey_stick(*path, epsilon)
        for path in _paths(z_count, z_gradient, lambda o: 0.1 + np.exp(-(o**2)))
    )
    mu = 1 / min(z_count, z_gradient)
    exact = math.exp(accounting._accountants.gaussian_log_delta(epsilon, mu))
    assert worst == pytest.approx(exact, rel=2e-3, abs=1e-12)
    # And by dp-accounting, which composes each path for itself.
    by_pld = []
    for z in (z_count, z_gradient):
        accountant = PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL, 1e-4)
        by_pld.append(accountant.compose(dpa.GaussianDpEvent(z)).get_delta(epsilon))
    assert max(by_pld) == pytest.approx(exact, rel=1e-3, abs=1e-9)
    assert one_visit_event(z_count, z_gradient).event.noise_multiplier == min(z_count, z_gradient)


@pytest.mark.parametrize(
    "epsilon, once, ten, many",
    [(0.05, 57.8, 183, 1292), (0.5, 7.03, 22.2, 157), (2, 1.99, 6.3, 44.6)],
)
def test_one_visit_costs_one_gaussian_and_passes_compose(epsilon, once, ten, many):
    for passes, expected in ((1, once), (10, ten), (500, many)):
        plan = plan_blocks(3_200, 32, 100 * passes, epsilon=epsilon, delta=DELTA)
        assert plan.noise_multiplier == pytest.approx(expected, rel=5e-3)
        assert 0.999 * epsilon < plan.epsilon <= epsilon
        same = privacy_spent(one_visit_event(plan.noise_multiplier, passes=passes), delta=DELTA)
        assert same.epsilon == plan.epsilon
        assert plan.spent.mu == pytest.approx(passes**0.5 / plan.noise_multiplier)


def test_same_rows_cost_the_harmonic_mean_and_trees_one_node_a_level():
    same = DisjointBlocks(100, 10, release="same-rows")
    assert same.releases == 2
    each = 3.0 * same.releases**0.5
    assert combine_noise_multipliers(each, each) == pytest.approx(3.0)
    tree = DisjointBlocks(10_000, 100, release="tree")
    assert (tree.steps_per_epoch, tree.releases) == (100, tree_height(100) == 7 and 7)
    node = 3.0 * tree.releases**0.5
    assert tree_event(node, 100).noise_multiplier == pytest.approx(3.0)
    # No looser than dp-accounting's own event for the same tree, which only RDP takes.
    z = node = 1.99 * tree_height(100) ** 0.5
    relation = dpa.NeighboringRelation.REPLACE_SPECIAL
    theirs = RdpAccountant(neighboring_relation=relation)
    theirs.compose(dpa.SingleEpochTreeAggregationDpEvent(z, 100))
    ours = privacy_spent(tree_event(node, 100), delta=DELTA).epsilon
    assert ours <= theirs.get_epsilon(DELTA) < 1.2 * ours


@pytest.mark.parametrize(
    "blocks",
    [
        DisjointBlocks(100, 10),
        DisjointBlocks(103, 10, threshold_rows=7),
        DisjointBlocks(103, 10, threshold_rows=7, threshold_every=3),
        DisjointBlocks(103, 5, release="tree"),
        DisjointBlocks(50, 50),
        DisjointBlocks(7, 1),
    ],
)
def test_no_record_has_two_roles(blocks):
    thresholds, gradients = map(np.asarray, blocks.partition(jax.random.key(0), 1))
    assert gradients.shape == (blocks.steps_per_epoch, blocks.batch_size)
    assert len(thresholds) == -(-blocks.steps_per_epoch // blocks.threshold_every)
    used = np.concatenate([thresholds.ravel(), gradients.ravel()])
    assert len(set(used.tolist())) == len(used) <= blocks.num_examples
    assert blocks.num_examples - len(used) < blocks.batch_size + blocks.threshold_rows
    assert used.min() >= 0 and used.max() < blocks.num_examples
    step = blocks.steps_per_epoch + blocks.steps_per_epoch // 2
    rows, mask = blocks.host_batch(jax.random.key(0), step)
    np.testing.assert_array_equal(rows, gradients[blocks.steps_per_epoch // 2])
    assert mask.all()
    if blocks.batch_size < blocks.num_examples:
        other = np.asarray(blocks.partition(jax.random.key(0), 2)[1])
        assert not np.array_equal(other, gradients)  # every pass has an order of its own


def test_the_report_says_how_records_are_visited():
    plan = plan_blocks(10_000, 900, epsilon=0.5, delta=DELTA, threshold_rows=100)
    text = plan.report(mechanism="DP-MBGLMtron")
    assert "one visit a pass" in text and "threshold_rows 100" in text
    assert "exact curve" in text and "900, public" in text
    assert "release tree" in plan_blocks(99, 9, epsilon=1, delta=DELTA, release="tree").report()
    sparse = plan_blocks(
        10_000, 900, epsilon=0.5, delta=DELTA, threshold_rows=100, sparse_vector=True
    )
    assert sparse.epsilon == 0.5 and "sparse vector" in sparse.report()
    assert sparse.spent.mu is None and len(sparse.to_dict()["curve"]) == 1


ONE = {"epsilon": 1.0, "delta": DELTA}
SECRET_ORDER = {"adjacency": "replace-one", "shuffling": True}
EVERY_KIND = {
    "full batches": (4_000, 4_000, 7, {}),
    "one pass": (4_000, 500, None, {}),
    "passes": (4_000, 500, 24, {"adjacency": "replace-one"}),
    "private threshold": (4_000, 500, None, {"threshold_rows": 500}),
    "same rows": (4_000, 500, None, {"release": "same-rows"}),
    "tree": (4_000, 500, None, {"release": "tree"}),
    "shuffled": (4_000, 1, None, SECRET_ORDER),
    "sparse vector": (4_000, 500, None, {"threshold_rows": 500, "sparse_vector": True}),
    "sparse vector, many blocks": (4_000, 50, None, {"threshold_rows": 50, "sparse_vector": True}),
}


def pure_curve(epsilon, delta):
    """Of the worst mechanism that is (epsilon, 0)-DP, the epsilon at this delta."""
    return math.log(max(1.0, math.exp(epsilon) - delta * (1 + math.exp(epsilon))))


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 8.0])
def test_a_ledger_never_says_less_than_the_plan(kind, epsilon, tmp_path):
    *sizes, options = EVERY_KIND[kind]
    plan = plan_blocks(*sizes, epsilon=epsilon, delta=DELTA, **options)
    with Ledger(tmp_path) as ledger:
        ledger.open_segment("mine", plan, {})
        ledger.charge("mine", plan, stop=1)
        ledger.charge("mine", plan, stop=plan.steps)
        own = ledger.spent("mine")
        spent = {delta: ledger.spent(delta=delta).epsilon for delta in (1e-9, DELTA, 1e-3, 0.1)}
    assert own.delta == DELTA and own.epsilon >= plan.epsilon * (1 - 1e-12)
    assert spent[1e-9] > spent[DELTA] >= plan.epsilon * (1 - 1e-12)
    if "sparse" in kind:
        for delta, found in spent.items():
            gaussian = privacy_spent(one_visit_event(plan.noise_multiplier), delta=delta)
            assert found >= max(pure_curve(epsilon, delta), gaussian.epsilon)


@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 1.0, 5.0, 30.0])
def test_a_pure_mechanism_is_dominated_by_its_event(epsilon):
    mu = 1 / pure_event(epsilon).noise_multiplier
    worst = 0.0
    for other in np.linspace(0, epsilon, 200, endpoint=False):
        pure = -math.expm1(other - epsilon) / (1 + math.exp(-epsilon))
        ratio = math.exp(accounting._accountants.gaussian_log_delta(other, mu)) / pure
        assert ratio >= 1 - 1e-12
        worst = max(worst, 1 / ratio)
    assert worst == pytest.approx(1)  # they meet at 0: no larger multiplier would do


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((100, 60, None, ONE | {"threshold_rows": 41}), "batch_size"),
        ((100, 101, None, ONE), "batch_size"),
        ((100, 10, 0, ONE), "steps"),
        ((100, 10, 11, ONE | {"release": "tree"}), "one pass"),
        ((100, 10, None, ONE | {"adjacency": "add-remove"}), "zero-out' or 'replace-one"),
        ((100, 10, None, ONE | {"threshold_rows": -1}), "threshold_rows"),
        ((100, 10, None, ONE | {"threshold_every": 0}), "threshold_every"),
        ((100, 10, None, ONE | {"release": "line"}), "release"),
        ((100, 10, None, ONE | {"release": "same-rows", "threshold_rows": 5}), "threshold_rows"),
        ((100, 10, None, {"delta": DELTA}), "epsilon"),
        ((100, 10, None, ONE | {"sparse_vector": True}), "sparse_vector"),
        ((100, 10, 99, ONE | {"sparse_vector": True, "threshold_rows": 10}), "sparse_vector"),
    ],
)
def test_bad_plans_are_refused(arguments, message):
    *sizes, options = arguments
    with pytest.raises(ValueError, match=message):
        plan_blocks(*sizes, **options)


def test_bad_numbers_are_refused():
    for bad in (lambda: one_visit_event(), lambda: tree_height(0), lambda: one_visit_event(-1.0)):
        with pytest.raises(ValueError):
            bad()
