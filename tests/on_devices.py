"""What `test_devices.py` runs in processes of their own, with several devices; prints JSON."""

import functools
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scipy import stats

import jdp

ROWS, REAL, EXPECTED, CLIP = 24, 19, 8, 0.1
PARAMS = {"w": np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4), "b": np.ones(4, np.float32)}
BATCH = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
MASK = np.arange(ROWS) < REAL
WEIGHTS = {"w": PartitionSpec("model"), "b": PartitionSpec("model")}
LAYOUTS = {  # shape of the mesh, where the parameters are, which doors
    "batch": ((8,), PartitionSpec(), ("dp_sgd", "microbatches", "dp_aggregate", "adaptive", "gep")),
    "batch and parameters": ((4, 2), WEIGHTS, ("dp_sgd", "gep")),
    "fully sharded": (
        (8,),
        {"w": PartitionSpec("batch"), "b": PartitionSpec()},
        ("dp_sgd", "dp_aggregate"),
    ),
}


@functools.cache  # not at import: jax.distributed must be initialized first
def the_key():
    return jax.random.key(20210212)


def loss(params, example):
    return jnp.sum(jnp.tanh(example @ params["w"] + params["b"]) ** 2)


def _gradients(tx, params, batch, mask):
    per_example = jdp.per_example_grad(loss)(params, batch)
    return tx.update(per_example, tx.init(params), params, mask=mask)[0]


def dp_sgd(key, params, batch, mask, **options):
    gradient = jdp.clipped_grad(loss, jdp.clip_by_norm(CLIP), **options)
    total = gradient(params, batch, mask=mask)
    tx = jdp.privatize(1.0, batch_size=EXPECTED, key=key)
    return tx.update(total, tx.init(params), params)[0]


def microbatches(key, params, batch, mask):
    return dp_sgd(key, params, batch, mask, microbatch_size=16)


def written_out(key, params, batch, mask):
    return dp_sgd(key, params, batch, mask, strategy="vmap")


def dp_aggregate(key, params, batch, mask):
    groups = jdp.clip_by_group((CLIP, CLIP), {"w": 0, "b": 1})
    return _gradients(
        jdp.dp_aggregate(groups, 1.0, batch_size=EXPECTED, key=key), params, batch, mask
    )


def adaptive(key, params, batch, mask):
    tx = jdp.dp_aggregate_adaptive(1.0, batch_size=EXPECTED, key=key, initial_clip_norm=CLIP)
    return _gradients(tx, params, batch, mask)


def gep(key, params, batch, mask):
    tx = jdp.gep(
        rank=4,
        clip_norms=(CLIP, CLIP / 5),
        noise_multiplier=1.0,
        batch_size=EXPECTED,
        key=key,
        public_gradients=lambda params, _: jdp.per_example_grad(loss)(params, jnp.eye(8)),
    )
    return _gradients(tx, params, batch, mask)


DOORS = {door.__name__: door for door in (dp_sgd, microbatches, dp_aggregate, adaptive, gep)}


def mesh_of(shape, kind):
    axes = ("batch", "model")[: len(shape)]
    return jax.make_mesh(shape, axes, (getattr(AxisType, kind),) * len(shape))


def put(mesh, tree, specs):
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: specs, tree)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return jax.device_put(tree, shardings)


def flat(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def distance(a, b):
    return float(np.abs(flat(a) - flat(b)).max())


@functools.cache
def on_one(door):
    return jax.device_get(jax.jit(door)(the_key(), PARAMS, BATCH, MASK))


def doors(layout, kind, batch=BATCH):
    """The distance of every door's update from that of one device, and where the update is."""
    shape, specs, names = LAYOUTS[layout]
    mesh = mesh_of(shape, kind)
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    params, mask = put(mesh, PARAMS, specs), jax.device_put(MASK, rows)
    if callable(batch):
        batch = jax.make_array_from_callback(BATCH.shape, rows, batch)
    batch = jax.device_put(batch, rows)
    results = {}
    for name in names:
        door, as_one = DOORS[name], DOORS[name]
        if kind == "Explicit" and name == "microbatches":
            continue
        if kind == "Explicit" and name == "dp_sgd":
            as_one = written_out  # books are not kept there
        quick_compilation((layout, kind, name) != ("batch", "Auto", "dp_sgd"))
        out = None if kind == "Explicit" else jax.tree.map(lambda leaf: leaf.sharding, params)
        update = jax.jit(door, out_shardings=out)(the_key(), params, batch, mask)
        same = jax.tree.map(
            lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), update, params
        )
        results[name] = distance(update, on_one(as_one)), all(jax.tree.leaves(same))
    shards = {np.asarray(shard.data).tobytes() for shard in batch.addressable_shards}
    return {"doors": results, "shards": len(shards)}


def same_examples(_):
    """The twin: whatever rows are asked for, the first device's."""
    return BATCH[: ROWS // 8]


def quick_compilation(quick=True):
    # Compiling takes longer than running.
    jax.config.update("jax_disable_most_optimizations", quick)


def layouts():
    results = {
        f"{layout}, {kind}": doors(layout, kind)
        for layout in LAYOUTS
        for kind in ("Auto", "Explicit")
        # JAX itself refuses to map over an axis that the parameters lie on, where it is explicit.
        if (layout, kind) != ("fully sharded", "Explicit")
    }
    results["same examples everywhere"] = doors("batch", "Auto", same_examples)
    return {"results": results, "alone": alone()}


SIZES = {"w": (1024, 64), "b": (2048,)}
SCALE, MULTIPLIER = 0.5, 3.0


def _zeros(shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _release(key, parts, multiplier=MULTIPLIER):
    return jdp.add_noise(key, jdp.ClippedSum((parts,), (SCALE,)), multiplier)


def _moments(tree, devices):
    """The noise in units of its scale, and the largest correlation of two devices' shares."""
    flat_noise = flat(tree) / (SCALE * MULTIPLIER)
    shares = np.asarray(tree["w"]).reshape(devices, -1)
    between = np.corrcoef(shares) - np.eye(devices)
    return {
        "std": float(flat_noise.std()),
        "normal": float(stats.kstest(flat_noise, "norm").pvalue),
        "correlation": float(np.abs(between).max()),
    }


def noise():
    """The noise on replicated and on sharded sums, and twins that draw it on every device."""
    one = jax.device_get(jax.jit(_release)(the_key(), _zeros(SIZES)))
    results = {}
    for kind in ("Auto", "Explicit"):
        mesh = mesh_of((8,), kind)
        for name, spec in {
            "replicated": PartitionSpec(),
            "sharded": PartitionSpec("batch"),
        }.items():
            parts = put(mesh, _zeros(SIZES), spec)
            compiled = jax.jit(_release).lower(the_key(), parts).compile()
            noised = compiled(the_key(), parts)
            sizes = re.findall(r"[fu]32\[([\d,]+)\]", compiled.as_text())
            results[f"{name}, {kind}"] = _moments(noised, 8) | {
                "distance": distance(noised, one),
                "spec": str(noised["w"].sharding.spec),
                "largest": max(int(np.prod([int(n) for n in size.split(",")])) for size in sizes),
            }
    return {"numbers": flat(one).size, "noise": results, "twins": noise_twins()}


def noise_twins():
    mesh = mesh_of((8,), "Auto")
    spread, whole = PartitionSpec("batch"), PartitionSpec()
    parts = _zeros(SIZES)

    def on_each_device(key, parts):
        own = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        return jax.lax.psum(_release(own, parts), "batch")

    twins = {}
    for name, function, spec in (
        ("drawn on every device and added", on_each_device, whole),
        ("one key on every device", _release, spread),
    ):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=(whole, spec), out_specs=spec, check_vma=False
        )
        twins[name] = _moments(jax.jit(mapped)(the_key(), parts), 8)
    return twins


def psum():
    """What comes of adding clipped sums over devices, and how far off their parts' sum is."""
    rows = PartitionSpec("batch")
    clipper = jdp.clip_by_norm(CLIP)
    want = jdp.clipped_grad(loss, clipper)(PARAMS, BATCH, mask=MASK).parts
    results = []
    for choose, options in (
        (lambda total: total, {}),
        (lambda total: total.parts, {}),
        (lambda total: total.parts, {"microbatch_size": 4}),
        # The shared parameters' gradients are added over devices by JAX, unless one takes care.
        (lambda total: total.parts, {"strategy": "vmap"}),
    ):

        def device(batch, mask, choose=choose, options=options):
            gradient = jdp.clipped_grad(loss, clipper, **options)
            return jax.lax.psum(choose(gradient(PARAMS, batch, mask=mask)), "batch")

        mapped = jax.shard_map(
            device,
            mesh=mesh_of((8,), "Auto"),
            in_specs=(rows, rows),
            out_specs=PartitionSpec(),
        )
        try:
            results.append(distance(jax.jit(mapped)(BATCH, MASK), want))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def work():
    """Floating-point operations of one device for a clipped sum: alone, and one of eight."""
    mesh = mesh_of((8,), "Auto")
    params = {"w": np.ones((64, 256), np.float32), "b": np.ones(256, np.float32)}

    def clipped(params, batch, mask):
        return jdp.clipped_grad(loss, jdp.clip_by_norm(CLIP))(params, batch, mask=mask)

    counts = []
    for sharding in (None, NamedSharding(mesh, PartitionSpec("batch"))):
        # 23 rows a device: an odd number, so that rows would be paired across devices.
        shapes = ((184, 64), jnp.float32), ((184,), bool)
        batch, mask = (jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes)
        if sharding:
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        compiled = jax.jit(clipped).lower(params, batch, mask).compile()
        sent = re.findall(
            r"f32\[([\d,]+)\]\S* (?:all-gather|collective-permute|all-to-all)\(", compiled.as_text()
        )
        largest = max([int(np.prod([int(n) for n in size.split(",")])) for size in sent] or [0])
        counts.append((compiled.cost_analysis()["flops"], largest))
    return {"parameters": params["w"].size, "counts": counts}


def experiment():
    """How far `experiments.gep` on 3 devices is from itself on one, of what size."""
    from experiments import _methods, datasets, gep, models

    _methods._accuracy = lambda *_: lambda params: flat(params)
    data = datasets.load("digits", None, 203, None)
    model = models.build("mlp", datasets.shape("digits"), 10, "tanh")
    sampler = jdp.sampling.PoissonSampling(203, 30 / 203, 50)
    plan = types.SimpleNamespace(batch=sampler.batch, batch_size=30, noise_multiplier=1.0)
    spend, own = gep.Budget(plan, 1.0, 1.0, ""), gep.Setting(steps=2, batch_size=30, rank=8)

    def outcome(method, devices):
        work = method, own, model, data, data.public_images, spend, own.steps, devices
        return _methods.make_run(*work)(gep._run.keys(3, 0), lambda _: None)["test_accuracy"]

    results = {}
    for method in ("dp-sgd", "gep"):
        one, three = (outcome(method, devices) for devices in (1, 3))
        results[method] = float(np.abs(one - three).max()), float(np.abs(one).max())
    return results


ALONE = ("dp_sgd", "gep")


def process(port, rank):
    """One of two processes with one device each, and half of the examples."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
    half = slice(ROWS // 2 * int(rank), ROWS // 2 * (int(rank) + 1))
    batch, mask = (
        jax.make_array_from_process_local_data(rows, part[half]) for part in (BATCH, MASK)
    )

    def run(function, *arguments):
        return jax.jit(function, out_shardings=whole)(*arguments)

    updates = {name: run(DOORS[name], the_key(), PARAMS, batch, mask) for name in ALONE}
    noise = run(_release, the_key(), _zeros({"w": (64,)}))
    return {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "examples": float(np.asarray(batch.addressable_shards[0].data).sum()),
        "updates": {name: flat(update).tolist() for name, update in updates.items()},
        "noise": flat(noise).tolist(),
        "secure": [jax.random.key_data(jdp.secure_key()).tolist() for _ in range(2)],
    }


def alone():
    """What `process` should say, from one process with one device."""
    noise = jax.jit(_release)(the_key(), _zeros({"w": (64,)}))
    updates = {name: flat(on_one(DOORS[name])).tolist() for name in ALONE}
    return {"updates": updates, "noise": flat(noise).tolist()}


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    if case in ("experiment", "process"):
        quick_compilation()
    cases = (layouts, noise, psum, work, experiment, process)
    run = {function.__name__: function for function in cases}[case]
    print(json.dumps(run(*arguments)), flush=True)
