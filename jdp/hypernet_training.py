"""Learning a hypernetwork on PUBLIC sets, with the noise that private ones will get."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jdp import _check
from jdp._typing import Key, PyTree
from jdp.hypernet_model import Hypernet, HypernetParams

TaskLoss: TypeAlias = Callable[[PyTree, PyTree], Float[Array, ""]]
"""`loss(target, examples) -> scalar`: how bad generated parameters are for ONE public set."""

_CENTRE_MOMENTUM = 0.9  # of the running mean embedding of public records


def warmup_cosine(peak: float, steps: int) -> optax.Schedule:
    """Learning rates: up from zero in the first tenth of the steps, then down to zero as a cosine.

    >>> schedule = warmup_cosine(1e-3, 100)
    >>> [round(float(schedule(step)), 5) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.0005, 0.001, 0.0005, 0.0]
    """
    _check.number("peak", peak, above=0, remedy="It is the largest learning rate, such as 1e-3.")
    _check.integer("steps", steps, at_least=1, remedy="Count optimizer steps.")
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), max(2, steps))


class Tasks(NamedTuple):
    """A batch of M PUBLIC sets to learn from; every leaf has the sets on its leading axis.

    Attributes:
      records: (M, n, ...) what the encoder sees.
      examples: what `loss` sees of each set: a few of its examples, with their keys.
      mask: (M, n) booleans, or None.
    """

    records: PyTree
    examples: PyTree
    mask: Array | None = None


class TrainState(NamedTuple):
    """The state of training on public sets.

    Attributes:
      params: of the hypernetwork.
      optimizer: the optimizer's state.
      key: of the training noise; public, for no private record is here.
      step: how many steps were taken.
    """

    params: HypernetParams
    optimizer: optax.OptState
    key: Key
    step: Int[Array, ""]


def init_training(
    net: Hypernet, optimizer: optax.GradientTransformation, key: Key, public_records: PyTree
) -> TrainState:
    """The state before the first step; arguments as in `Hypernet.init` and `train_step`."""
    _check.typed_key("key", key)
    init_key, noise_key = jax.random.split(key)
    params = net.init(init_key, public_records)
    state = optimizer.init((params.encoder, params.decoder))
    return TrainState(params, state, noise_key, jnp.zeros((), jnp.int32))


def train_step(
    net: Hypernet, loss: TaskLoss, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Tasks], tuple[TrainState, Float[Array, " sets"]]]:
    r"""Make one step of learning on public sets: pure, to be jitted, scanned, or mapped over seeds.

    Minimises the mean over sets of `loss(generate(params, records, key), examples)`, with fresh
    noise of the private run's own multiplier for every set and step: trained without it, or with
    other noise, the decoder takes private embeddings for what they are not. The centre follows the
    mean embedding of the sets with momentum 0.9.

    Args:
      net: the hypernetwork.
      loss: `loss(target, examples) -> scalar` for ONE set; its mean over many sets with a few
        examples each learns faster than few sets with many.
      optimizer: an optax transformation, such as `optax.adam(warmup_cosine(1e-3, steps))`.

    Returns:
      `step(state, tasks) -> (state, losses)`, the losses of each set before the step.
    """
    if not callable(loss):
        remedy = "Write it for ONE public set; it returns one floating scalar."
        _check.fail("loss", "a function of (target, examples)", loss, remedy, TypeError)

    def objective(networks, centre, tasks: Tasks, keys):
        def one(records, examples, key, mask=None):
            target = net.generate(
                HypernetParams(networks[0], networks[1], centre), records, key, mask
            )
            return loss(target, examples)

        parts = (tasks.records, tasks.examples, keys)
        mapped: Any = jax.vmap(one)
        losses = mapped(*parts if tasks.mask is None else (*parts, tasks.mask))
        return jnp.mean(losses), losses

    def step(state: TrainState, tasks: Tasks):
        networks, centre = (state.params.encoder, state.params.decoder), state.params.centre
        sets = jax.tree.leaves(tasks.records)[0].shape[0]
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), sets)
        gradient = jax.grad(objective, has_aux=True)
        gradients, losses = gradient(networks, centre, tasks, keys)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, networks)
        moved: Any = optax.apply_updates(networks, updates)
        pool = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])  # noqa: E731
        mean = net.mean_embedding(networks[0], *jax.tree.map(pool, (tasks.records, tasks.mask)))
        centre = _CENTRE_MOMENTUM * centre + (1 - _CENTRE_MOMENTUM) * mean
        params = HypernetParams(moved[0], moved[1], centre)
        return TrainState(params, optimizer_state, state.key, state.step + 1), losses

    return step
