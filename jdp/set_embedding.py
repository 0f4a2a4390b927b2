r"""A private data set as ONE noisy mean of embeddings, $e = \frac1N (\sum_n u_n + \xi)$.

| adjacency | neighbours | L2 sensitivity of the mean |
| --- | --- | --- |
| "zero-out" | one record becomes a null record that contributes zero | C / N |
| "replace-one" | one record becomes any other | 2 C / N |

N is a public number, and the divisor whatever the mask says. There is no sampling, so a release is
one Gaussian, accounted for exactly (Balle and Wang 2018) at every epsilon. Whatever is made of e,
any number of models and of samples from them, is post-processing; a SECOND mean of the same records
composes: plan for it with `releases`.

The guarantee is for the N records given. How they were chosen out of a larger pool is outside it,
and so is the encoder: it must not have been trained on them.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jdp import _check, _tree
from jdp._typing import Adjacency, Key, Mask, PyTree, Scalar
from jdp._uses import equations
from jdp.clipping import ClippedSum, clip_by_norm
from jdp.noise import add_noise
from jdp.one_visit import plan_blocks
from jdp.planning import TrainingPlan

Encode: TypeAlias = Callable[[PyTree], Float[Array, " features"]]
"""`encode(record) -> (features,)`, a public function of ONE record."""

_CLIP = "It bounds the length of each record's embedding; 1.0 is usual."
_STACK = "Stack the records; every leaf has one row a record."
_MECHANISM = "mean of clipped embeddings of the records plus Gaussian noise (DP-DeepSets)"


@dataclasses.dataclass(frozen=True)
class EmbeddingPlan(TrainingPlan):
    """What `plan_embedding` returns; `batch_size` is the public number of records."""

    def std(self, clip_norm: float) -> float:
        """The noise's standard deviation on each coordinate of the mean.

        >>> plan = plan_embedding(128, epsilon=1.0, delta=1e-5, adjacency="replace-one")
        >>> round(plan.std(clip_norm=1.0), 4)
        0.0583
        """
        _check.number("clip_norm", clip_norm, above=0, remedy=_CLIP)
        factor = ClippedSum.replace_one_factor if self.adjacency == "replace-one" else 1.0
        return factor * float(self.noise_multiplier) * clip_norm / self.batch_size

    def to_dict(self, **facts: Any) -> dict[str, Any]:
        """As `TrainingPlan.to_dict`."""
        return super().to_dict(**({"mechanism": _MECHANISM, "unit": "one record"} | facts))

    def report(self, **facts: Any) -> str:
        """As `TrainingPlan.report`."""
        count = "one noisy mean" if self.steps == 1 else f"{self.steps} noisy means"
        rows = {
            "unit": "one record of the set; which records are in it is not protected",
            "mechanism": _MECHANISM,
            "Releases": f"{count}; what is made of {'it' if self.steps == 1 else 'them'} is free",
            "Steps": f"none on private data; {self.steps} planned release(s)",
            "Sampling": "none: every record is in every release",
        }
        return super().report(**(rows | facts))


def plan_embedding(
    num_records: int,
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    releases: int = 1,
    adjacency: Adjacency = "zero-out",
) -> EmbeddingPlan:
    r"""Plan the release of noisy mean embeddings of one set of records.

    **Guarantee.** k releases are one Gaussian of multiplier $z / \sqrt k$, event
    `SelfComposed(Gaussian(z), k)`; epsilon is exact (Balle and Wang 2018), never the formula
    $\sqrt{2 \ln(1.25/\delta)} / \varepsilon$, which is proved below epsilon 1 only and too small
    above 8.4 at delta 1e-5.

    Args:
      num_records: N, public, and the divisor of the mean.
      delta: in (0, 1); below 1 / num_records.
      epsilon: the budget of all releases together. Give this or `noise_multiplier`.
      noise_multiplier: std / L2 sensitivity of each release; 0 for no privacy.
      releases: k, how many means of these very records are released.
      adjacency: "zero-out" or "replace-one".

    Returns:
      A plan whose `noise_multiplier` and `batch_size` go to `private_embedding` or a `Hypernet`.

    Raises:
      ValueError: an argument is out of range.
      TypeError: an argument has the wrong type.

    >>> plan = plan_embedding(128, epsilon=16.0, delta=1e-5, adjacency="replace-one")
    >>> round(plan.std(clip_norm=1.0), 5), plan.spent.accountant
    (0.00538, 'exact')
    """
    remedy = "It is the public number of records in the set."
    _check.integer("num_records", num_records, at_least=1, remedy=remedy)
    remedy = "Count the noisy means that are made of the same records; models made of one are free."
    _check.integer("releases", releases, at_least=1, remedy=remedy)
    options: dict[str, Any] = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
    options |= {"delta": delta, "adjacency": adjacency}
    plan = plan_blocks(num_records, num_records, releases, **options)
    return EmbeddingPlan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})


def private_embedding(
    key: Key,
    encode: Encode,
    records: PyTree,
    mask: Mask | None = None,
    *,
    clip_norm: Scalar,
    noise_multiplier: Scalar,
    num_records: int,
    centre: Float[Array, " features"] | None = None,
    adjacency: Adjacency | None = None,
) -> Float[Array, " features"]:
    r"""Release the noisy mean embedding of a private set (Nishikawa et al. 2026, DP-DeepSets).

    $$ e = \frac1N \Bigl( \sum_n u_n + z\,a\,C\,N(0, I) \Bigr), \quad
       u_n = h_n \min(1, C / \lVert h_n \rVert_2), \quad h_n = \phi_1(p_n) - c $$

    **Guarantee.** Each $u_n$ depends on one record and has norm at most C, so the mean has L2
    sensitivity C/N under zero-out and 2C/N under replace-one (a = 1 and 2; N is public): ONE
    Gaussian of multiplier z, event `GaussianDpEvent(z)`. A record whose embedding is not finite
    contributes zero. The clip and the sum are float32 or wider.

    Args:
      key: one typed PRNG key, secret, never used before.
      encode: $\phi_1$, a function of ONE record to a vector; public, and pure. It is mapped over
        the records; what could see two at once (an axis name, a callback, a batching rule of its
        own) is refused.
      records: a pytree of arrays with the records on the leading axis.
      mask: (n,) booleans, False for padding; by default all are records, and must be N.
      clip_norm: C, finite. May be traced.
      noise_multiplier: z >= 0, usually `plan.noise_multiplier`. May be traced.
      num_records: N, usually `plan.batch_size`.
      centre: c, a PUBLIC vector, such as the mean embedding of public records. What all records
        have in common would otherwise use up the clip norm.
      adjacency: as in `jdp.add_noise`.

    Returns:
      e, at most C long before noise.

    Raises:
      TypeError: an argument has another type.
      ValueError: a shape or number does not fit, or `encode` communicates between records.

    >>> records = jnp.array([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 0.0]])
    >>> options = {"clip_norm": 1.0, "noise_multiplier": 0.0, "num_records": 3}
    >>> e = private_embedding(jax.random.key(0), lambda p: p, records, **options)
    >>> [round(float(x), 2) for x in e]
    [0.3, 0.4]
    """
    _check.typed_key("key", key)
    remedy = "It is the public number of records in the set; take plan.batch_size."
    _check.integer("num_records", num_records, at_least=1, remedy=remedy)
    rows = num_rows(records)
    if mask is None and rows != num_records:
        expected = (
            f"a pytree of arrays with num_records ({num_records}) rows where mask is left out"
        )
        remedy = "Plan for the number of records that there are, or pad them and pass a mask."
        _check.fail("records", expected, _check.Words(f"{rows} rows"), remedy)
    mask = jnp.ones(rows, bool) if mask is None else mask
    total = embedding_sum(encode, records, mask, clip_norm, centre)
    return add_noise(key, total, noise_multiplier, adjacency=adjacency) / num_records


def embedding_sum(
    encode: Encode,
    records: PyTree,
    mask: Mask,
    clip_norm: Scalar,
    centre: Float[Array, " features"] | None = None,
) -> ClippedSum:
    """The sum of clipped embeddings, not yet private; arguments as in `private_embedding`."""
    _check.number("clip_norm", clip_norm, above=0, traced=True, remedy=_CLIP)
    rows = num_rows(records)
    if getattr(mask, "shape", (rows,)) != (rows,):
        remedy = "It tells for each record whether it is one, or padding."
        _check.fail("mask", f"of shape ({rows},), like the records", mask, remedy)
    size = features(encode, one_record(records))
    if centre is not None and jnp.shape(centre) != (size,):
        remedy = "It is the mean embedding of public records."
        _check.fail("centre", f"of shape ({size},), like an embedding", centre, remedy)
    if centre is not None and not isinstance(centre, jax.core.Tracer):
        if not np.isfinite(np.asarray(centre, np.float64)).all():
            remedy = "With it no record would contribute; take the mean of finite embeddings."
            _check.fail("centre", "finite", _check.Words("one that is not"), remedy)
    # Padding may hold anything, whose derivative times zero need not be zero.
    records = jax.tree.map(lambda leaf: _where(mask, leaf), records)
    embeddings = _tree.wide(jax.vmap(encode)(records))
    if centre is not None:
        embeddings = embeddings - jnp.asarray(centre, embeddings.dtype)[None]
    return clip_by_norm(clip_norm)(embeddings, mask)


def _where(mask: Mask, leaf: Array) -> Array:
    return jnp.where(jnp.reshape(jnp.asarray(mask), (-1,) + (1,) * (jnp.ndim(leaf) - 1)), leaf, 0)


_ONE = "a function of ONE record"
_PURE = "Write a pure function of one record, without axis names, callbacks or printing."
# Mapped over the records, these are given all of them at once, and have no effects to be seen by.
_BATCHED = {"pure_callback", "buffer_callback", "ffi_call", "custom_vmap_call"}
_BATCHED |= {"call_hi_primitive"}


@functools.cache
def _of_jax(primitive: Any) -> bool:
    """Whether one of JAX's modules holds an operation, so that its batching rule is JAX's too."""
    modules = [own for name, own in list(sys.modules.items()) if name.split(".")[0] == "jax"]
    return any(primitive is value for own in modules for value in list(vars(own).values()))


def _sees_others(equation: Any) -> bool:
    """Whether an operation, mapped over records, may be given several of them at once."""
    communicates = equation.params.get("axis_name") is not None
    known = _of_jax(equation.primitive) and equation.primitive.name not in _BATCHED
    return communicates or not known


@contextlib.contextmanager
def refusing_axis_names(name: str) -> Iterator[None]:
    """Turn JAX's error for an axis that is not there into one that says what is wrong."""
    try:
        yield
    except NameError as error:
        if "axis name" in str(error):
            _check.fail(name, _ONE, _check.Words(str(error).splitlines()[0]), _PURE)
        raise


def features(encode: Encode, record: PyTree) -> int:
    """Trace `encode` on the shapes of one record; return the size of its embedding.

    Raises:
      TypeError: it does not return a floating array.
      ValueError: the array is not a vector, or `encode` may see other records: it prints, calls
        back, has a batching rule of its own, or communicates over an axis of a surrounding map.
    """
    if not callable(encode):
        _check.fail("encode", _ONE, encode, _PURE, TypeError)
    with refusing_axis_names("encode"):
        traced, found = jax.make_jaxpr(encode, return_shape=True)(record)
    if traced.effects:
        effects = _check.Words(f"one with effects {sorted(map(str, traced.effects))}")
        _check.fail("encode", f"{_ONE}, free of effects", effects, _PURE)
    if batched := {e.primitive.name for e in equations(traced.jaxpr) if _sees_others(e)}:
        seen = _check.Words(f"one with {', '.join(sorted(batched))}, which sees the whole batch")
        _check.fail("encode", _ONE, seen, _PURE)
    remedy = "Return the embedding of ONE record as a vector; flatten it."
    if not hasattr(found, "dtype") or not jnp.issubdtype(found.dtype, jnp.floating):
        _check.fail("encode", "a function that returns a floating vector", found, remedy, TypeError)
    if len(found.shape) != 1 or not found.shape[0]:
        _check.fail("encode", "a function that returns a vector", found, remedy)
    return math.prod(found.shape)


def one_record(records: PyTree) -> PyTree:
    """The shapes and dtypes of one record."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), records)


def num_rows(records: PyTree, name: str = "records") -> int:
    """How many records there are."""
    return _check.rows(name, records, "records", _STACK)
