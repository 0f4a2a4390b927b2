"""The trusted core, second half: the only place in jdp where noise is drawn."""

import itertools
import os

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int

from jdp import _check, _normal, _system, _tree
from jdp._typing import Adjacency, Key, PyTree, Scalar
from jdp.clipping import ClippedSum


def secure_key(*, system_noise: bool = False) -> Key:
    """Return a PRNG key made from the operating system's entropy.

    `jax.random.key(seed)` keeps 32 bits of an integer seed, few enough to try them all. This key
    has all the bits that the implementation holds (64 for threefry), drawn from `os.urandom`.
    Draw one for the noise and ANOTHER for sampling: amplification fails if the sample is known.

    Several processes (`jax.distributed`) get ONE key, that of process 0, and must all call this:
    under a key of its own each would noise the same sum differently, and their mean, or two of
    their models, would be less private than the plan says.

    Args:
      system_noise: whether `jdp.add_noise`, and whatever uses it, takes noise from the operating
        system's cryptographic generator instead of the key: each value the sum of four float64
        draws (Holohan and Braghin 2021), added to the sum in float64 on the host, and the result
        rounded to a millionth of the noise, so that last bits tell nothing. About 40 times as slow
        as other noise on a CPU, and never repeated: a run with such a key cannot be resumed, only
        begun again. For one process. All else that is drawn with the key (labels and sketches of
        GEP) is derived from it as usual.

    Returns:
      A typed key, shape (), of JAX's default implementation, or of a kind of jdp's.

    Raises:
      ValueError: `system_noise` with several processes.
      RuntimeError: called while JAX traces a function: the key would be a constant of the compiled
        program, and every call of it would repeat the noise.

    >>> import jdp
    >>> jdp.secure_key().shape
    ()
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "`jdp.secure_key()` must be called outside jit, but got called while JAX traces a "
            "function, which would repeat the key in every call. Pass the key in as an argument."
        )
    _check.boolean("system_noise", system_noise)
    if system_noise and jax.process_count() > 1:
        remedy = "Each process would add noise of its own to the same sum."
        _check.fail("system_noise", "False with several processes", system_noise, remedy)
    kind = {"impl": _system.KIND} if system_noise else {}
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, **kind)))
    entropy = np.frombuffer(os.urandom(4 * data.size), np.uint32).reshape(data.shape)
    if jax.process_count() > 1:
        entropy = multihost_utils.broadcast_one_to_all(entropy)
    return jax.random.wrap_key_data(jnp.asarray(entropy), **kind)


_LARGE = 2**16  # entries of a leaf that gets a stream of its own


def _gaussian(key: Key, leaves: list[Array]) -> list[Array]:
    """Return standard normal noise like each leaf, float32 or wider.

    The noise of a large leaf is computed where it is added. Small leaves share one stream: one
    call for all compiles much faster than one a leaf.
    """
    dtype = max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)
    small = [i for i, leaf in enumerate(leaves) if leaf.size < _LARGE]
    ends = list(itertools.accumulate(leaves[i].size for i in small))
    noise: dict[int, Array] = {}
    if small:
        shared = _normal.sum_of_two(key, 0, ends[-1], dtype)
        noise.update(zip(small, jnp.split(shared, ends[:-1]), strict=True))
    for i, leaf in enumerate(leaves):
        if i not in noise:
            noise[i] = _normal.sum_of_two(key, len(noise) + 1, leaf.size, dtype)
    return [noise[i].reshape(leaf.shape) for i, leaf in enumerate(leaves)]


def _std(noise_multiplier: Scalar, scale: Scalar, dtype: jnp.dtype) -> Array:
    # Zero times an infinite scale (an unclipped sum) means no noise. Anything else that is not
    # finite stays so: NaN noise destroys the release, which is safe.
    return jnp.where(noise_multiplier == 0, 0, noise_multiplier * scale).astype(dtype)


_GRID = 2.0**-10  # of the noise's standard deviation


@jax.custom_jvp
def _on_grid(noised: Array, std: Array) -> Array:
    """Round to multiples of about a thousandth of the noise; to derivatives it is the identity.

    The last bits of a float32 sum tell what was added to the noise (Mironov 2012). A cell this
    coarse holds thousands of float32 values where the sum is of the size of the noise, and 16 where
    it is 1,000 times that; and up to 8 standard deviations from the sum every cell can be drawn.
    """
    dtype = jnp.finfo(noised.dtype)
    power_of_two = jax.lax.reduce_precision(std, dtype.nexp, 0)
    grid = jnp.maximum(power_of_two * _GRID, dtype.tiny).astype(noised.dtype)
    cells = noised * (1 / grid)  # exact
    coarser = (std > 0) & (jnp.abs(cells) < 2.0**dtype.nmant)
    return jnp.where(coarser, jnp.round(cells) * grid, noised)


@_on_grid.defjvp
def _of_the_identity(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple:
    return _on_grid(*primals), tangents[0]


_TAGS = {"noise": 0x6E6F6973, "labels": 0x6C61626C, "sketch": 0x736B6574}
_TAGS |= {"start": 0x73746172}


def step_key(key: Key, purpose: str, step: Int[Array, ""]) -> Key:
    """Return a transformation's key for one purpose at one step.

    Tagged by purpose, so that no two uses of one key, nor small numbers folded in elsewhere, meet.
    """
    return jax.random.fold_in(jax.random.fold_in(key, _TAGS[purpose]), step)


def add_noise(
    key: Key,
    clipped_sum: ClippedSum,
    noise_multiplier: Scalar,
    *,
    adjacency: Adjacency | None = None,
) -> PyTree:
    r"""Release a clipped sum through the Gaussian mechanism: part i plus $z\,a\,s_i\,N(0, I)$.

    **Guarantee.** With the sum's noise scales $s_i$ the release is ONE Gaussian mechanism of noise
    multiplier z (standard deviation over joint L2 sensitivity) under the declared adjacency: event
    `GaussianDpEvent(z)`, whatever the number of parts. The factor a is 1 for zero-out and
    add-or-remove; under replace-one it is 2 (sqrt 2 for one-hot votes). What is returned is
    post-processing of the noised parts (Dwork et al. 2006; Balle and Wang 2018 for the exact
    curve). Use each key once. Noise is float32 (or wider), independent over leaves and parts, each
    value the sum of two draws; its standard deviation includes the sum's rounding margin. What is
    released are multiples of about a thousandth of the noise (a power of two), since finer bits
    would tell the sum. The guarantee is for real arithmetic up to that.

    Args:
      key: one typed PRNG key, secret (`jdp.secure_key()`), never used before.
      clipped_sum: what a clipper returned.
      noise_multiplier: z >= 0, usually `plan.noise_multiplier`; 0 adds nothing and is not private.
        May be traced.
      adjacency: "zero-out", "add-remove" or "replace-one". By default that of
        `noise_multiplier`, if a plan or calibration made it, else "zero-out". Required when
        `noise_multiplier` is an array, which remembers nothing.

    Returns:
      The estimate of the sum, shaped like one contribution. Not divided by anything.

    Raises:
      TypeError: `key` is no typed key, `clipped_sum` no ClippedSum, or a number has another type.
      ValueError: z is negative or NaN, z > 0 with an infinite clip norm, or `adjacency` is unknown
        or differs from the one that `noise_multiplier` was calibrated for, or is missing where
        `noise_multiplier` is an array.

    >>> import jax, jax.numpy as jnp, jdp
    >>> clipped = jdp.clip_by_norm(1.0)(jnp.ones((3, 2)), jnp.array([True, True, False]))
    >>> print(jdp.add_noise(jax.random.key(0), clipped, 0.0).round(3))
    [1.414 1.414]
    """
    _check.typed_key("key", key)
    if not isinstance(clipped_sum, ClippedSum):
        _check.fail(
            "clipped_sum",
            "a ClippedSum",
            _check.Words(type(clipped_sum).__name__),
            "Make one with a clipper, e.g. jdp.clipped_grad(loss, jdp.clip_by_norm(1.0)), or use "
            "jdp.dp_aggregate, which takes per-example gradients.",
            TypeError,
        )
    noise_multiplier = _check.noise_multiplier(noise_multiplier)
    replace_one = adjacency_of(noise_multiplier, adjacency) == "replace-one"
    factor = clipped_sum.replace_one_factor if replace_one else 1.0
    factor *= 1 + clipped_sum.rounding
    known = _check.is_static_number
    for scale in clipped_sum.noise_scales:
        if known(scale) and np.isinf(scale) and known(noise_multiplier) and noise_multiplier > 0:
            _check.fail(
                "clip_norm",
                "finite when noise_multiplier > 0",
                scale,
                "Noise is proportional to the clip norm; choose a finite one.",
            )
    scales = [
        factor * scale
        for part, scale in zip(clipped_sum.parts, clipped_sum.noise_scales, strict=True)
        for _ in jax.tree.leaves(part)
    ]
    leaves, structure = jax.tree.flatten(clipped_sum.parts)
    leaves = [_tree.wide(leaf) for leaf in leaves]
    stds = [
        _std(noise_multiplier, scale, leaf.dtype)
        for leaf, scale in zip(leaves, scales, strict=True)
    ]
    if _system.is_asked_by(key):
        noised = _system.add(key, leaves, stds)
    else:
        draws = zip(leaves, _gaussian(key, leaves), stds, strict=True)
        noised = [
            _on_grid(leaf + noise * std.astype(noise.dtype), std) for leaf, noise, std in draws
        ]
    return clipped_sum.combine(jax.tree.unflatten(structure, noised))


def adjacency_of(noise_multiplier: Scalar, adjacency: Adjacency | None) -> Adjacency:
    """Return the adjacency to use, given the one asked for and the one the multiplier carries.

    Raises:
      ValueError: they differ, the one asked for is unknown, or an array comes without any.
    """
    carried = getattr(noise_multiplier, "adjacency", None)
    if adjacency is None and not _check.is_static_number(noise_multiplier):
        _check.fail(
            "adjacency",
            "given when noise_multiplier is an array",
            adjacency,
            "An array forgets what it was calibrated for; pass adjacency=plan.adjacency, or "
            '"zero-out" if no plan made it.',
        )
    if adjacency is None:
        return carried or "zero-out"
    _check.choice("adjacency", adjacency, ("zero-out", "add-remove", "replace-one"))
    if carried not in (None, adjacency):
        _check.fail(
            "adjacency",
            f"{carried!r}, which noise_multiplier was calibrated for",
            adjacency,
            "Leave it out, or calibrate for the adjacency that you want.",
        )
    return adjacency


def _exponential(key: Key, shape: tuple[int, ...]) -> Array:
    """Standard exponential draws from 32 bits each: the tail reaches to 22, not to 16."""
    bits = jax.random.bits(key, shape, jnp.uint32).astype(jnp.float32)
    return -jnp.log((bits + 1) * 2.0**-32)


def sparse_vector(
    key: Key, counts: Float[Array, " k"], bound: Scalar, epsilon: Scalar
) -> Int[Array, ""]:
    r"""Release the first count that is at most `bound`, up to noise (AboveThreshold).

    The first i with $c_i + \mathrm{Lap}(2/\varepsilon) \le b + \mathrm{Lap}(2/\varepsilon)$, the
    noise on b drawn once.

    **Guarantee.** $(\varepsilon, 0)$-differentially private, whatever the number of counts, if one
    record changes each by at most 1 and all in the SAME direction: half of epsilon for the bound,
    half for the counts (Lyu, Su and Li 2017, theorem 4, the monotone case). Only the index is
    released. Real arithmetic; 32 random bits a draw.

    Args:
      key: one typed PRNG key, secret, never used before.
      counts: not yet private; how many records lie above each level, say.
      bound: public.
      epsilon: > 0, may be traced.

    Returns:
      An index, k - 1 where no count came out small enough.

    Raises:
      TypeError: `key` is no typed key.

    >>> import jax, jax.numpy as jnp
    >>> print(sparse_vector(jax.random.key(0), jnp.array([900.0, 30.0, 0.0]), 100.0, 1.0))
    1
    """
    _check.typed_key("key", key)
    if _system.is_asked_by(key):
        got = _check.Words("one with it")
        _check.fail("key", "without system_noise for Laplace noise", got, "Take another key.")
    plus, minus = _exponential(key, (2, counts.shape[0] + 1)) * (2 / epsilon)
    noise = plus - minus
    below = counts + noise[1:] <= bound + noise[0]
    return jnp.where(jnp.any(below), jnp.argmax(below), counts.shape[0] - 1)
