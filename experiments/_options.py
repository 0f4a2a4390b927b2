"""What the options of all experiments have in common: how they are checked, and `--smoke`."""

import dataclasses
import lzma
import math
import zipfile
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Args = TypeVar("Args")

# What reading a file that is torn, or of another kind, may raise.
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, LookupError, EOFError)
UNREADABLE += (zipfile.BadZipFile, lzma.LZMAError)


class UsageError(Exception):
    """What the user asked for cannot be done; the message says what to do instead."""


def option(name: str) -> str:
    """A field's name as it is typed."""
    return f"--{name.replace('_', '-')}"


def check_names(args: Any, known: Mapping[str, Collection[str]], *, none: Collection[str] = ()):
    """Refuse names that are not known, given twice, or missing (but for the options in `none`)."""
    for key, names in known.items():
        given = getattr(args, key)
        unknown = [name for name in given if name not in names]
        if unknown or len(set(given)) < len(given) or not (given or key in none):
            got = ", ".join(unknown or given) or "nothing"
            allowed = (", " if any(" " in name for name in names) else " ").join(names)
            raise UsageError(f"{option(key)} must be different ones of {allowed}, but got {got}")


def check_least(args: Any, least: Mapping[str, float]):
    """Refuse numbers, or sequences with one, that are not finite or below these."""
    for key, low in least.items():
        value = getattr(args, key)
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(low <= v < math.inf for v in values):
            raise UsageError(f"{option(key)} must be at least {low}, but got {value}")


def check_different(args: Any, *names: str):
    """Refuse values that are printed alike, since results go by the printed ones."""
    for key in names:
        values = getattr(args, key)
        if len({v if isinstance(v, int) else f"{v:g}" for v in values}) < len(values):
            wanted = "must be different, in their first six digits"
            raise UsageError(f"{option(key)} {wanted}, but got {values}")


def check_seed(seed: int | None):
    """Refuse what is no seed of `jax.random.key`."""
    if seed is not None and not 0 <= seed < 2**32:
        raise UsageError(f"--seed must be at least 0 and below {2**32}, but got {seed}")


def check_delta(delta: float):
    """Refuse what is no probability."""
    if not 0 < delta < 1:
        raise UsageError(f"--delta must lie between 0 and 1, but got {delta}")


def smaller(args: Args, small: Mapping[str, Any]) -> Args:
    """Options for `--smoke`: these values, but for what was given."""
    own: Any = args
    return dataclasses.replace(own, **{k: v for k, v in small.items() if _is_default(args, k)})


def check_smoke(args: Any, small: Mapping[str, Any], words: list[str]):
    """Refuse an option whose default is asked for by name, where `--smoke` has another value."""
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word[:2] == "--"}
    for name in sorted(given & small.keys()):
        if _is_default(args, name) and getattr(args, name) != small[name]:
            raise UsageError(
                f"{option(name)} must be other than its default {getattr(args, name)} beside "
                f"--smoke, which has {small[name]} instead; leave out one of the two"
            )


def _is_default(args: Any, name: str) -> bool:
    (default,) = (field.default for field in dataclasses.fields(args) if field.name == name)
    return getattr(args, name) == default
