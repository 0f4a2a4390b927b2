"""The networks that `experiments.speed` times, each with losses for ONE example and for a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments import models

WIDTH, HEADS, POSITIONS, VOCABULARY, LORA_RANK = 128, 4, 64, 8_192, 8


class Row(NamedTuple):
    """A network, its data and its losses.

    Attributes:
      title: what it is, for people.
      batch_size: examples a step.
      init: `init(key) -> params`.
      examples: `examples(key, n) -> batch`, synthetic.
      loss: of ONE example; what every private method gets.
      mean_loss: of a batch, in its ordinary fast form; what the non-private step gets.
      trainable: `trainable(params) -> booleans`, or None where everything is.
    """

    title: str
    batch_size: int
    init: Callable[[jax.Array], Any]
    examples: Callable[[jax.Array, int], Any]
    loss: Callable[[Any, Any], jax.Array]
    mean_loss: Callable[[Any, Any], jax.Array]
    trainable: Callable[[Any], Any] | None = None


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], axis=-1)[..., 0]


def _labelled(shape: tuple[int, ...]) -> Callable[[jax.Array, int], Any]:
    def examples(key, n):
        one, two = jax.random.split(key)
        return jax.random.normal(one, (n, *shape)), jax.random.randint(two, (n,), 0, 10)

    return examples


def _tokens(key, n):
    one, two = jax.random.split(key)
    tokens = jax.random.randint(one, (n, POSITIONS), 0, VOCABULARY)
    return tokens, jax.random.randint(two, (n,), 0, 10)


def _batched(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """The mean over a batch: what vmap makes of matrix products is the ordinary batched form."""
    return lambda params, batch: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(params, batch))


def _dense(key, rows: int, columns: int) -> dict[str, jax.Array]:
    kernel = jax.random.normal(key, (rows, columns)) / rows**0.5
    return {"bias": jnp.zeros(columns), "kernel": kernel}


def _apply(layer, x):
    y = x @ layer["kernel"] + layer["bias"]
    return y + (x @ layer["down"]) @ layer["up"] if "down" in layer else y


def mlp(widths: tuple[int, ...], batch_size: int) -> Row:
    """A network of dense layers with relu between them."""

    def init(key):
        keys = jax.random.split(key, len(widths) - 1)
        return [_dense(k, *sizes) for k, *sizes in zip(keys, widths, widths[1:], strict=False)]

    def loss(params, example):
        x, label = example
        for layer in params[:-1]:
            x = jax.nn.relu(_apply(layer, x))
        return _cross_entropy(_apply(params[-1], x), label)

    title = f"MLP {'-'.join(map(str, widths))}"
    return Row(title, batch_size, init, _labelled(widths[:1]), loss, _batched(loss))


def _image_row(title: str, batch_size: int, shape: tuple[int, ...], module: nn.Module) -> Row:
    def logits(params, images):
        outputs = module.apply({"params": params}, images)
        assert isinstance(outputs, jax.Array)
        return outputs

    return Row(
        title,
        batch_size,
        lambda key: module.init(key, jnp.zeros((1, *shape)))["params"],
        _labelled(shape),
        lambda params, example: _cross_entropy(logits(params, example[0][None])[0], example[1]),
        lambda params, batch: jnp.mean(_cross_entropy(logits(params, batch[0]), batch[1])),
    )


class ConvCNN(nn.Module):
    """`models.MnistCNN` with `nn.Conv` where that one has products over patches."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """(batch, 28, 28, 1) to (batch, 10)."""
        x = nn.tanh(nn.Conv(16, (8, 8), 2, name="conv1")(images))
        x = nn.tanh(nn.Conv(32, (4, 4), 2, "VALID", name="conv2")(models._max_pool(x)))
        x = models._max_pool(x)
        x = nn.tanh(nn.Dense(32, name="dense1")(x.reshape(x.shape[0], -1)))
        return nn.Dense(10, name="dense2")(x)


def _norm(layer, x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    return x * layer["scale"] + layer["bias"]


def _attention(block, x):
    split = lambda y: y.reshape(-1, HEADS, WIDTH // HEADS)  # noqa: E731
    queries, keys, values = (split(_apply(block[name], x)) for name in ("query", "key", "value"))
    scores = jnp.einsum("thd,shd->hts", queries, keys) / (WIDTH // HEADS) ** 0.5
    mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), values)
    return _apply(block["mix"], mixed.reshape(-1, WIDTH))


def _transformer_init(key) -> dict[str, Any]:
    def norm():
        return {"bias": jnp.zeros(WIDTH), "scale": jnp.ones(WIDTH)}

    def block(key):
        keys = jax.random.split(key, 6)
        sizes = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "mix")}
        sizes |= {"wide": (WIDTH, 4 * WIDTH), "narrow": (4 * WIDTH, WIDTH)}
        layers = {name: _dense(k, *sizes[name]) for k, name in zip(keys, sizes, strict=True)}
        return layers | {"norm1": norm(), "norm2": norm()}

    one, two, three, four = jax.random.split(key, 4)
    place = 0.02 * jax.random.normal(four, (POSITIONS, WIDTH))
    output = _dense(three, WIDTH, 10)
    return {"blocks": [block(one), block(two)], "norm": norm(), "output": output, "place": place}


def _transformer_loss(params, example):
    x, label = example
    x = x + params["place"]
    for block in params["blocks"]:
        x = x + _attention(block, _norm(block["norm1"], x))
        hidden = jax.nn.gelu(_apply(block["wide"], _norm(block["norm2"], x)))
        x = x + _apply(block["narrow"], hidden)
    pooled = jnp.mean(_norm(params["norm"], x), axis=0)
    return _cross_entropy(_apply(params["output"], pooled), label)


def _transformer(batch_size: int) -> Row:
    title = f"transformer, 2 layers, T={POSITIONS}, d={WIDTH}"
    examples = _labelled((POSITIONS, WIDTH))
    loss = _batched(_transformer_loss)
    return Row(title, batch_size, _transformer_init, examples, _transformer_loss, loss)


def _text(batch_size: int) -> Row:
    def init(key):
        one, two = jax.random.split(key)
        table = jax.random.normal(one, (VOCABULARY, WIDTH))
        return {"embedding": table, "rest": _transformer_init(two)}

    def loss(params, example):
        tokens, label = example
        return _transformer_loss(params["rest"], (params["embedding"][tokens], label))

    title = f"text: embedding of {VOCABULARY:,} words, then the transformer"
    return Row(title, batch_size, init, _tokens, loss, _batched(loss))


def _lora(batch_size: int) -> Row:
    """The transformer, frozen, with low-rank additions to the queries and values (Hu et al.)."""
    adapted = ("query", "value")

    def init(key):
        base, added = _transformer_init(key), []
        for number, _ in enumerate(base["blocks"]):
            keys = jax.random.split(jax.random.fold_in(key, number), 2 * len(adapted))
            down = [jax.random.normal(k, (WIDTH, LORA_RANK)) / WIDTH**0.5 for k in keys[::2]]
            up = [0.01 * jax.random.normal(k, (LORA_RANK, WIDTH)) for k in keys[1::2]]
            both = zip(adapted, down, up, strict=True)
            added.append({name: {"down": d, "up": u} for name, d, u in both})
        return {"base": base, "lora": added}

    def loss(params, example):
        blocks = [
            block | {name: block[name] | own[name] for name in adapted}
            for block, own in zip(params["base"]["blocks"], params["lora"], strict=True)
        ]
        return _transformer_loss(params["base"] | {"blocks": blocks}, example)

    def trainable(params):
        return {name: jax.tree.map(lambda _, n=name: n == "lora", params[name]) for name in params}

    title = f"LoRA of rank {LORA_RANK} on the transformer"
    examples = _labelled((POSITIONS, WIDTH))
    return Row(title, batch_size, init, examples, loss, _batched(loss), trainable)


def rows(smoke: bool = False) -> dict[str, Row]:
    """The rows by name; with `smoke`, of 8 examples and the MLP small."""
    big, small = (8, 8) if smoke else (256, 64)
    patches = models.MnistCNN(10, nn.tanh)
    digits = "MNIST CNN, 26,010 parameters"
    return {
        "mlp": mlp((16, 8, 8, 10) if smoke else (784, 512, 512, 10), big),
        "cnn": _image_row(f"{digits}, nn.Conv", big, (28, 28, 1), ConvCNN()),
        "cnn-patches": _image_row(f"{digits}, products over patches", big, (28, 28, 1), patches),
        "transformer": _transformer(small),
        "text": _text(small),
        "lora": _lora(small),
        "resnet20": _image_row(
            "ResNet20 with GroupNorm, 268,346 parameters", small, (32, 32, 3), models.ResNet20(10)
        ),
    }
