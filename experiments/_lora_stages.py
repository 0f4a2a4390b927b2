"""The public stages: features, the diffusion model, and the hypernetwork for adapters."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import _diffusion, _hypernet_sets, _lora_features, _run, _unet
from experiments._lora_baselines import Problem
from experiments._lora_config import Config
from jdp import hypernet, lora

CHECKPOINT_EVERY = 50  # steps


class Sets(NamedTuple):
    """What the stages share; rows point into `images`.

    Attributes:
      images: the public and the private part.
      public_features: of each public image.
      private_features: of each private image.
      public_sets: (m, N) rows of public images: each public image's nearest neighbours.
      private_sets: (sets, N) rows of private images.
      accuracy: of the classifier behind the features, on private images; None for others.
      features: from images to features.
    """

    images: _hypernet_sets.Images
    public_features: np.ndarray
    private_features: np.ndarray
    public_sets: np.ndarray
    private_sets: np.ndarray
    accuracy: float | None
    features: _lora_features.Features


def save(path: pathlib.Path, tree: Any):
    """Write a pytree of arrays so that a reader sees all of it or nothing."""
    partial = path.with_suffix(".tmp")
    partial.write_bytes(flax.serialization.to_bytes(tree))
    partial.replace(path)


def load(path: pathlib.Path, like: Any) -> Any:
    """Read a pytree of arrays that has the structure of `like`."""
    return flax.serialization.from_bytes(like, path.read_bytes())


def find_sets(config: Config, folder: _run.Folder, options: dict[str, Any]) -> Sets:
    """Stage `features`: the network behind the features, and the nearest-neighbour sets."""
    data = {name: options[name] for name in ("features", "seed")}
    own = config.part("dataset", "num_public", "num_private", "set_size", "classifier_steps")
    own |= config.part("candidates") | data | {"size": config.unet.size, "sets": options["sets"]}
    images = _hypernet_sets.load(
        config.dataset, config.unet.size, config.num_public, config.num_private, options["data_dir"]
    )
    own["public_digest"] = images.public_digest
    path = folder.path / "features.msgpack"
    done = folder.get("features", own)
    key = jax.random.fold_in(jax.random.key(options["seed"]), 1)
    if data["features"] == "classifier":
        if done is None:
            labelled, steps = (images.public, images.public_labels), config.classifier_steps
            with _run.progress("classifier", steps) as advance:
                save(path, _lora_features.train(*labelled, key, steps=steps, advance=advance))
        params = load(path, None)
        features = _lora_features.of_classifier(params)
    else:
        params, features = None, _lora_features.given(data["features"])
    found = folder.path / "sets.npz"
    if done is None:
        arrays = _sets_of(config, images, features, options)
        store: Any = np.savez
        store(found, **arrays)
        accuracy = None
        if params is not None:
            accuracy = _lora_features.accuracy(params, images.private, images.private_labels)
        done = folder.put("features", own, {"accuracy": accuracy, "source": images.source})
    with np.load(found) as stored:
        arrays = {name: stored[name] for name in stored}
    return Sets(images, **arrays, accuracy=done["accuracy"], features=features)


def _sets_of(config, images, features, options) -> dict[str, np.ndarray]:
    with _run.progress("neighbours", 4) as advance:
        public, private = features(images.public), features(images.private)
        advance(1)
        public_sets = _hypernet_sets.neighbours(public, public, config.set_size)
        advance(1)
        rng = np.random.default_rng(options["seed"])
        chosen = rng.permutation(len(private))[: config.candidates]
        candidates = _hypernet_sets.neighbours(private[chosen], private, config.set_size)
        advance(1)
        kept = _hypernet_sets.little_overlap(candidates, options["sets"])
        advance(1)
    return {
        "public_features": public,
        "private_features": private,
        "public_sets": public_sets,
        "private_sets": candidates[kept],
    }


def pretrain(config: Config, folder: _run.Folder, options: dict[str, Any], sets: Sets) -> Any:
    """Stage `pretrain`: the diffusion model, trained on the public images, or read from a file."""
    own = config.part("unet", "levels", "pretrain_steps", "pretrain_batch", "pretrain_rate")
    own |= {"seed": options["seed"], "checkpoint": options["checkpoint"]}
    path = folder.path / "base.msgpack"
    key = jax.random.fold_in(jax.random.key(options["seed"]), 2)
    init = lambda: _unet.init(config.unet, key)  # noqa: E731
    if folder.get("pretrain", own):
        return load(path, jax.eval_shape(init))
    if options["checkpoint"]:
        params = _unet.from_torch(config.unet, _tensors(pathlib.Path(options["checkpoint"])))
        save(path, params)
        folder.put("pretrain", own, {"losses": None})
        return params
    diffusion = _diffusion.build(config.unet, config.levels)
    steps = config.pretrain_steps
    tx = optax.adam(hypernet.warmup_cosine(config.pretrain_rate, steps))

    @jax.jit
    def step(carry, index, images):
        def loss(params):
            drawn = _diffusion.draw(diffusion, jax.random.fold_in(key, index), images)
            return _diffusion.losses(diffusion, params, *drawn).mean()

        params, state, mean = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        share = jnp.maximum(0.001, 9.0 / (10.0 + jnp.asarray(index, jnp.float32)))
        return (params, state, optax.incremental_update(params, mean, share)), value

    params = init()
    rows = lambda rng: rng.integers(0, len(sets.images.public), config.pretrain_batch)  # noqa: E731
    batch = lambda rng: sets.images.public[rows(rng)]  # noqa: E731
    start = params, tx.init(params), params
    carry, losses = _train("pretrain", folder, own, steps, start, step, batch, options["seed"])
    save(path, carry[2])
    folder.put("pretrain", own, {"losses": losses})
    return carry[2]


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a PyTorch state dict."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _run.UsageError("--checkpoint needs PyTorch: pip install torch") from error
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def _train(name, folder, own, steps, carry, step, batch, seed) -> tuple[Any, list[float]]:
    """Take steps, with a checkpoint now and then; return the carry and the mean losses between."""
    partial, begin = folder.path / f"{name}.partial.msgpack", 0
    if folder.get(f"{name}/begun", own) is None:  # refuses to take up another configuration
        folder.put(f"{name}/begun", own, {})
        partial.unlink(missing_ok=True)
    curve: list[float] = []
    if partial.exists():
        carry, begin, found = load(partial, (carry, 0, None))
        curve = found.tolist()
    losses: list[Any] = []
    with _run.progress(name, steps) as advance:
        advance(begin)
        for index in range(begin, steps):
            rng = np.random.default_rng([seed, index])
            carry, loss = step(carry, index, batch(rng))
            losses.append(loss)
            if (index + 1) % CHECKPOINT_EVERY == 0 or index + 1 == steps:
                curve, losses = [*curve, float(np.mean(jax.device_get(losses)))], []
                save(partial, (carry, index + 1, np.array(curve)))
            advance(1)
    partial.unlink()
    return carry, curve


def problem(config: Config, base: Any, sets: Sets, seed: int) -> Problem:
    """What all methods adapt: the base model and the adapters' usual start."""
    diffusion = _diffusion.build(config.unet, config.levels)
    key = jax.random.fold_in(jax.random.key(seed), 3)
    start = lora.init(key, base, config.patterns, rank=config.rank)
    return Problem(diffusion, base, start, sets.images.public, config.first_level)


def records(images: np.ndarray, features: np.ndarray, public: np.ndarray) -> np.ndarray:
    """What the encoder sees of each image: features, standardised by public ones, and pixels."""
    standard = (features - public.mean(0)) / (public.std(0) + 1e-6)
    pixels = images.reshape(len(images), -1) if images[0].size <= 1_024 else images[:, :0, 0, 0]
    return np.concatenate([standard, pixels], 1).astype(np.float32)


def make_hypernet(config: Config, start: Any, noise_multiplier: Any, adjacency: Any):
    """The hypernetwork: its tokens are a change of the adapters from their usual start."""
    length = lora.token_length(start)
    count = lora.num_tokens(start, length)

    def detokenise(tokens):
        change = lora.detokenise(config.token_scale * tokens, start)
        return jax.tree.map(jnp.add, start, change)

    width = config.decoder_width
    decoder: Any = hypernet.LinearDecoder(count, length)
    if not config.linear:
        layers: dict[str, Any] = {"mlp_width": 4 * width, "layers": config.decoder_layers}
        decoder = hypernet.TransformerDecoder(count, length, width=width, **layers)
    return hypernet.Hypernet(
        hypernet.MLPEncoder(config.encoder),
        decoder,
        detokenise,
        num_records=config.set_size,
        noise_multiplier=noise_multiplier,
        adjacency=adjacency,
    )


def train_hypernet(
    config: Config,
    folder: _run.Folder,
    options: dict[str, Any],
    sets: Sets,
    task: Problem,
    multipliers: list[float],
) -> hypernet.HypernetParams:
    """Stage `hypernet`: ONE hypernetwork for all epsilons, a random one's noise at each step."""
    names = [
        f.name for f in dataclasses.fields(config) if f.name.startswith(("hyper_", "decoder_"))
    ]
    own = config.part("encoder", "linear", "token_scale", "patterns", "rank", *names)
    own |= {"first_level": config.first_level}
    own |= {key: options[key] for key in ("seed", "epsilons", "delta", "adjacency")}
    path = folder.path / "hypernet.msgpack"
    key = jax.random.fold_in(jax.random.key(options["seed"]), 4)
    steps = config.hyper_steps
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(hypernet.warmup_cosine(config.hyper_rate, steps))
    )
    public = records(sets.images.public, sets.public_features, sets.public_features)
    first = make_hypernet(config, task.start, multipliers[0], options["adjacency"])
    initial = hypernet.init_training(first, tx, key, public[:1_000])
    if folder.get("hypernet", own):
        return load(path, initial.params)

    @jax.jit
    def step(carry, index, batch):
        noise_multiplier, *arrays = batch
        net = make_hypernet(config, task.start, noise_multiplier, options["adjacency"])
        state = initial._replace(params=carry[0], optimizer=carry[1], step=index)

        def loss(adapters, examples):
            params = lora.merge(task.base, adapters)
            return _diffusion.losses(task.diffusion, params, *examples).mean()

        examples = _draw(task, jax.random.fold_in(key, index), arrays[1])
        tasks = hypernet.Tasks(arrays[0], examples)
        state, losses = hypernet.train_step(net, loss, tx)(state, tasks)
        return (state.params, state.optimizer), losses.mean()

    def batch(rng):
        rows = sets.public_sets[rng.integers(0, len(sets.public_sets), config.hyper_sets)]
        seen = np.stack([rng.choice(row, config.hyper_records, replace=False) for row in rows])
        multiplier = np.float32(rng.choice(multipliers))
        return multiplier, public[rows], sets.images.public[seen]

    carry = initial.params, initial.optimizer
    (params, _), curve = _train("hypernet", folder, own, steps, carry, step, batch, options["seed"])
    save(path, params)
    folder.put("hypernet", own, {"losses": curve})
    return params


def _draw(task: Problem, key: jax.Array, images: jax.Array):
    return _diffusion.draw(task.diffusion, key, images, task.first_level)


Generate = Callable[[np.ndarray, jax.Array], Any]
"""`generate(rows, key) -> adapters` of one private set."""


def generator(config: Config, options, sets: Sets, task: Problem, params, z) -> Generate:
    """Make `generate`: ONE private release a call (none where z is 0)."""
    net = make_hypernet(config, task.start, z, options["adjacency"])
    private = records(sets.images.private, sets.private_features, sets.public_features)
    call = jax.jit(net.generate)
    return lambda rows, key: call(params, private[rows], key)
