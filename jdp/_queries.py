"""What determines the queries of a run, by name: its digest. Public things only."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import _check
from jdp._typing import PyTree
from jdp.planning import TrainingPlan

Program = str | Callable[[Any, PyTree], PyTree]

_PACKAGES = ("jdp", "jax", "jaxlib", "numpy")
_SETTINGS = (
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
)
_SETTINGS += ("disable_most_optimizations", "disable_jit")
_KEY_CONSTANT = re.compile(r"\{ *lambda [^;{]*:key<")  # before the ";" come constants
_NOT_QUERIES = ("event", "spent", "target_epsilon")  # of a plan: what it costs, not what it asks


def describe(
    plan: TrainingPlan | None,
    program: Program,
    state: PyTree,
    data: str,
    config: Mapping[str, Any],
) -> dict[str, str]:
    """Name everything that determines the queries; `jdp.ResumableRun` says what the arguments are.

    The program is described by a hash of its jaxpr: every operation, shape and number of loss,
    model, clipper and optimizer, and the value of each scalar that it closes over. The contents of
    larger arrays are no part of that text, for they may be private; nor is what a host callback
    does, which JAX does not see.
    """
    remedy = 'Its public name and version, as "MNIST, tensorflow-datasets 3.0.1".'
    if not isinstance(data, str) or not data:
        _check.fail("data", "the public name and version of the data", data, remedy, TypeError)
    found = {"data": data, "program": _hash(program_text(program, state))}
    found |= {f"config.{name}": _plain(name, value) for name, value in config.items()}
    if plan is not None:
        names = [field.name for field in dataclasses.fields(plan)]
        own = [name for name in names if name not in _NOT_QUERIES]
        found |= {f"plan.{name}": repr(getattr(plan, name)) for name in own}
        found["plan.adjacency"] = plan.adjacency
    return found | _machine()


def program_text(program: Program, state: PyTree) -> str:
    """The jaxpr of one step, as text that is the same in every process.

    Raises:
      ValueError: it has a key that is no part of the state: a resumed run would have another one.
    """
    if isinstance(program, str):
        text, outside = program, _KEY_CONSTANT.search(program) is not None
    else:
        jaxpr = jax.make_jaxpr(program)(0, state)
        constants = list(_constants(jaxpr, set()))
        text = "\n".join([str(jaxpr), *map(_scalar, constants)])
        outside = any(_is_key(constant) for constant in constants)
    if outside:
        remedy = "Put it into the state: a resumed run has no other keys than those of the state."
        got = _check.Words("one that closes over a key")
        _check.fail("program", "a step whose keys are all in its state", got, remedy)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _constants(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    """What a jaxpr and all jaxprs within it close over."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    yield from _constants(part, seen)


def _is_key(constant: Any) -> bool:
    return jnp.issubdtype(getattr(constant, "dtype", np.int32), jax.dtypes.prng_key)


def _scalar(constant: Any) -> str:
    """The value of a constant that is one number; of any other one the text has the shape."""
    if not isinstance(constant, jax.Array | np.ndarray) or constant.shape or _is_key(constant):
        return ""
    value = np.asarray(constant)
    return f"{value.dtype} {value.tobytes().hex()}"


def _machine() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    devices = {"backend": jax.default_backend(), "devices": str(jax.device_count())}
    devices |= {"device kind": _cpu() if devices["backend"] == "cpu" else _kind()}
    settings = {f"jax_{name}": str(getattr(jax.config, f"jax_{name}", None)) for name in _SETTINGS}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return versions | devices | settings | flags


def _kind() -> str:
    return jax.devices()[0].device_kind


def _cpu() -> str:
    """Model and number of cores: both can change how a sum is rounded."""
    information = pathlib.Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count()
    return f"{model.group(1) if model else platform.machine()}, {cores} cores"


def _plain(name: str, value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        remedy = "What is no plain value belongs in the program, or is named by a string."
        expected = "numbers, strings, booleans, None, or lists and dictionaries of them"
        _check.fail(f"config[{name!r}]", expected, value, remedy, TypeError)
        raise


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
