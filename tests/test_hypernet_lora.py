"""The study of generated adapters: distances, sets, sampling, stages that resume, messages."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from experiments import (
    _diffusion,
    _hypernet_sets,
    _lora_baselines,
    _lora_evaluate,
    _lora_features,
    _lora_stages,
    _lora_tables,
    _run,
    _unet,
    datasets,
    hypernet_lora,
)
from experiments._lora_config import CONFIGS, SMOKE
from experiments._run import UsageError
from jdp import lora


def test_frechet_distance_is_that_of_two_gaussians():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((50, 4)), rng.standard_normal((40, 4)) @ rng.random((4, 4)) + 1
    ca, cb = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(ca @ cb)
    expected = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(ca + cb - 2 * root).real
    assert _lora_features.frechet(a, b) == pytest.approx(expected, rel=1e-6)
    assert _lora_features.frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_kernel_distance_has_no_bias_and_sees_differences():
    rng = np.random.default_rng(0)
    pairs = [rng.standard_normal((2, 30, 5)) for _ in range(300)]
    same = [_lora_features.kernel_distance(a, b) for a, b in pairs]
    assert abs(np.mean(same)) < 4 * np.std(same) / 300**0.5
    moved = [_lora_features.kernel_distance(a, b + 1) for a, b in pairs[:20]]
    assert np.mean(moved) > 10 * np.std(same)


def test_neighbours_are_exact():
    rng = np.random.default_rng(0)
    points, queries = rng.standard_normal((500, 3)).astype("f4"), rng.standard_normal((300, 3))
    found = _hypernet_sets.neighbours(queries.astype("f4"), points, 7)
    distances = ((queries[:, None] - points) ** 2).sum(-1)
    np.testing.assert_array_equal(np.sort(found), np.sort(np.argsort(distances)[:, :7]))
    assert (_hypernet_sets.neighbours(points, points, 2)[:, 0] == np.arange(500)).all()


def test_chosen_sets_have_little_overlap():
    candidates = np.array([[0, 1, 2], [0, 1, 3], [4, 5, 2], [6, 7, 8]])
    assert _hypernet_sets.little_overlap(candidates, 3).tolist() == [0, 3, 2]
    assert len(set(_hypernet_sets.little_overlap(candidates, 4))) == 4


def test_sampling_with_the_true_noise_gives_the_image():
    config = dataclasses.replace(SMOKE.unet, size=4, patch=1)
    truth = np.random.default_rng(0).uniform(-1, 1, (4, 4, 1)).astype("f4")
    signal = _diffusion.cosine(100)
    assert (np.diff(signal) < 0).all() and signal[0] > 0.999 and signal[-1] < 1e-3

    def predict(params, images, levels):
        kept = jnp.asarray(signal, jnp.float32)[levels][:, None, None, None]
        return (images - jnp.sqrt(kept) * params) / jnp.sqrt(1 - kept)

    sample = _diffusion.sampler(_diffusion.Diffusion(config, signal, predict), 5)
    images = sample(truth, jax.random.key(0), 3)
    np.testing.assert_allclose(images, np.stack([truth] * 3), atol=1e-4)


@pytest.fixture(scope="module")
def task():
    config = SMOKE.unet
    diffusion = _diffusion.build(config, 100)
    shapes, rng = jax.eval_shape(lambda: _unet.init(config, jax.random.key(0))), np.random
    draw = lambda leaf: 0.2 * rng.default_rng(0).standard_normal(leaf.shape).astype("f4")  # noqa: E731
    base = jax.tree.map(draw, shapes)
    start = lora.init(jax.random.key(2), base, SMOKE.patterns, rank=1)
    public = np.random.default_rng(0).uniform(-1, 1, (20, 16, 16, 1)).astype("f4")
    return _lora_baselines.Problem(diffusion, base, start, public, 20)


@pytest.mark.parametrize(
    "method", ["non-private", pytest.param("pda-dpmd", marks=pytest.mark.slow)]
)
def test_training_moves_adapters_and_leaves_the_base(task, method):
    before = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), task.base)
    plan = _lora_baselines.plans(SMOKE.baseline, 16, 4.0, 1e-5, "replace-one")
    assert plan.adjacency == "replace-one" and plan.epsilon <= 4.0
    assert plan.sampler.sampling_rate == SMOKE.baseline.batch_size / 16
    train = _lora_baselines.trainer(task, SMOKE.baseline, method)
    found = train(task.start, task.public[:16], 0.01, jax.random.key(0), plan)
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, task.start)
    # Two steps of Adam, the first of which the warm-up makes nothing of; then only `up` can move.
    assert all(0 < own["up"] < 0.011 for own in change.values())
    assert jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), task.base) == before


def test_one_record_moves_the_generated_adapters_release_by_its_bound(task):
    config = dataclasses.replace(SMOKE, set_size=16)
    net = _lora_stages.make_hypernet(config, task.start, 0.0, "replace-one")
    rng = np.random.default_rng(0)
    records = rng.standard_normal((16, 8)).astype("f4")
    params = net.init(jax.random.key(0), records)
    other = records.copy()
    other[3] = 1e4
    key = jax.random.key(1)
    change = jnp.linalg.norm(net.embed(params, records, key) - net.embed(params, other, key))
    assert 0 < change <= 2 / 16 * (1 + 1e-5)
    adapters = net.generate(params, records, key)
    assert jax.tree.map(jnp.shape, adapters) == jax.tree.map(jnp.shape, task.start)
    # At the beginning it gives nearly the usual start, from which gradients reach both factors.
    distance = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), adapters, task.start)
    assert max(jax.tree.leaves(distance)) < 0.2


def test_noise_scales_are_those_of_the_paper_done_exactly():
    from jdp import hypernet

    published = {1: 0.0583, 2: 0.0311, 4: 0.0169, 8: 0.00938, 16: 0.00538}
    for epsilon, std in published.items():
        plan = hypernet.plan_embedding(128, epsilon=epsilon, delta=1e-5, adjacency="replace-one")
        assert plan.std(1.0) == pytest.approx(std, rel=5e-3)


def test_mismatched_distances_leave_the_own_set_out():
    rng = np.random.default_rng(0)
    real = [rng.standard_normal((40, 3)) + 5 * i for i in range(3)]
    found = _lora_evaluate.distances([r + 0.1 for r in real], real)["frechet"]
    assert max(found["own"]) < 1 and min(found["mismatched"]) > 50


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("lora")
    args = hypernet_lora.Args(smoke=True, out=out, methods=("non-private",))
    return args, hypernet_lora.main(args)


@pytest.mark.slow
def test_smoke_run_leaves_a_report_and_pictures(smoke):
    args, brief = smoke
    assert json.loads(json.dumps(brief))["experiment"] == "hypernet_lora"
    names = {"no adaptation", "non-private", "dp-deepsets", "dp-deepsets-eps4"}
    assert names == brief["methods"].keys()
    files = {path.name for path in args.out.iterdir()}
    assert {"summary.json", "report.txt", "distances.png", "samples.png"} <= files
    assert not [name for name in files if "partial" in name]
    text = (args.out / "report.txt").read_text()
    assert "replace-one" in text and "mismatched" in text and "dp-deepsets" in text
    summary = json.loads((args.out / "summary.json").read_text())
    table = _lora_tables.markdown(summary)
    assert table.count("\n") == 6 and "samples of the other sets" in table and "epsilon 4" in table


@pytest.mark.slow
def test_finished_stages_are_not_run_again(smoke, monkeypatch):
    args, brief = smoke
    for module, name in (
        (_lora_stages, "_train"),
        (_lora_baselines, "trainer"),
        (_diffusion, "sampler"),
    ):
        if name == "sampler":
            monkeypatch.setattr(module, name, lambda *_: lambda *_: pytest.fail("sampled again"))
        else:
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("trained again"))
    assert hypernet_lora.main(args)["methods"] == brief["methods"]
    with pytest.raises(UsageError, match="adjacency was 'replace-one', now 'zero-out'"):
        hypernet_lora.main(dataclasses.replace(args, adjacency="zero-out"))


def _images(public):
    private = np.random.default_rng(1).standard_normal((20, 4, 4, 1)).astype("f4")
    labels = np.zeros(20, np.int32)
    parts = {"public_images": public, "public_labels": labels}
    parts |= {"test_images": private, "test_labels": labels, "num_classes": 1, "source": ""}
    return datasets.Dataset("x", train_images=private, train_labels=labels, **parts)


def test_a_run_is_not_taken_up_with_other_public_images(tmp_path, monkeypatch):
    config = dataclasses.replace(
        SMOKE,
        num_public=20,
        num_private=20,
        set_size=4,
        candidates=6,
        unet=dataclasses.replace(SMOKE.unet, size=4),
    )
    monkeypatch.setattr(_lora_features, "given", lambda _: lambda x: x.reshape(len(x), -1))
    folder, public = _run.Folder(tmp_path, "hypernet_lora"), np.ones((20, 4, 4, 1), "f4")
    options = {"features": "own", "seed": 0, "sets": 2, "data_dir": None}
    monkeypatch.setattr(datasets, "load", lambda *_, **__: _images(public))
    _lora_stages.find_sets(config, folder, options)
    monkeypatch.setattr(_lora_stages, "_sets_of", lambda *_: pytest.fail("ran again"))
    _lora_stages.find_sets(config, folder, options)
    monkeypatch.setattr(datasets, "load", lambda *_, **__: _images(-public))
    with pytest.raises(UsageError, match="public_digest was"):
        _lora_stages.find_sets(config, folder, options)


def test_another_delta_is_named_as_it_was_typed(tmp_path, task, monkeypatch):
    folder, public = _run.Folder(tmp_path, "hypernet_lora"), task.public
    own = _hypernet_sets.Images(public, np.zeros(20), public, np.zeros(20), "", "")
    flat = public.reshape(20, -1)
    rows = np.arange(20)[None]
    sets = _lora_stages.Sets(own, flat, flat, rows, rows, None, np.asarray)
    options = {"seed": 0, "epsilons": (4.0,), "delta": 1e-5, "adjacency": "replace-one"}
    monkeypatch.setattr(_lora_stages, "_train", lambda *args: (args[4], []))
    train = lambda **new: _lora_stages.train_hypernet(  # noqa: E731
        SMOKE, folder, options | new, sets, task, [1.0]
    )
    train()
    with pytest.raises(UsageError, match="delta was 1e-05, now 1e-06"):
        train(delta=1e-6)
    with pytest.raises(UsageError, match=r"epsilons was \[4.0\], now \[4.0, 8.0\]"):
        train(epsilons=(4.0, 8.0))


def test_training_is_taken_up_in_the_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(_lora_stages, "CHECKPOINT_EVERY", 2)
    folder, seen = _run.Folder(tmp_path, "hypernet_lora"), []

    def step(carry, index, batch):
        if index == 3 and len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(index)
        return carry + batch, 0.0

    draw = lambda rng: np.float32(rng.integers(100))  # noqa: E731
    args = ("x", folder, {"steps": 5}, 5, np.float32(0), step, draw, 0)
    with pytest.raises(KeyboardInterrupt):
        _lora_stages._train(*args)
    resumed, _ = _lora_stages._train(*args)
    assert seen == [0, 1, 2, 2, 3, 4] and not list(tmp_path.glob("*.partial.*"))
    whole, _ = _lora_stages._train(*args)
    assert resumed == whole
    with pytest.raises(UsageError, match="steps was 5, now 6"):
        _lora_stages._train("x", folder, {"steps": 6}, *args[3:])


@pytest.mark.parametrize(
    "change, match",
    [
        ({"epsilons": ()}, "--epsilons"),
        ({"methods": ("dpsgd",)}, "--methods must be different ones of non-private dp-sgd"),
        ({"epsilons": (1.0, 1.0)}, "--epsilons must be different"),
        ({"epsilons": (4.0, 4.0000001)}, "--epsilons must be different, in their first six"),
        ({"delta": 0.1}, "--delta must be above 0 and below 1 / 128"),
        ({"sets": 1}, "--sets must be at least 2"),
        ({"samples": 10}, "--samples must be at least"),
        ({"config": "full"}, "--config full needs --checkpoint"),
        ({"checkpoint": "nowhere.pt"}, "there is no nowhere.pt"),
    ],
)
def test_bad_options_are_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        hypernet_lora.main(hypernet_lora.Args(out=tmp_path, **change))


def test_features_of_your_own():
    function = _lora_features.given("numpy:asarray")
    assert function is np.asarray
    with pytest.raises(UsageError, match="--features must be classifier, or module:function"):
        _lora_features.given("inception")


def test_both_sizes_fit_their_unets():
    for config in CONFIGS.values():
        shapes = jax.eval_shape(lambda c=config: _unet.init(c.unet, jax.random.key(0)))
        build = lambda p, c=config: lora.init(jax.random.key(0), p, c.patterns, rank=c.rank)  # noqa: E731
        adapters = jax.eval_shape(build, shapes)
        assert lora.token_length(adapters) >= 32
