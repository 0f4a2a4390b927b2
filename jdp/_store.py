"""Checkpoints on disk, by Orbax: written in the background, atomically, the last few kept.

They hold secret keys, and lie in folders of mode 0700.
"""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import _check, _system
from jdp._typing import PyTree


class Store:
    """The checkpoints in one folder, numbered as they are saved.

    Args:
      folder: is created where missing.
      keep: how many to keep.
    """

    def __init__(self, folder: pathlib.Path, keep: int):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError(
                "checkpoints need orbax-checkpoint: pip install 'jdp[checkpoints]'"
            ) from error
        self._ocp = ocp
        self.folder = folder.absolute()
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.parent.chmod(0o700)
            _restrict(self.folder)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(
                        post_finalization_callback=lambda: _restrict(self.folder)
                    ),
                ),
            )
        self._number = max(self._manager.all_steps(), default=-1) + 1

    def save(self, state: PyTree, about: dict[str, Any]) -> None:
        """Begin to write a checkpoint; at once only what lies on devices is copied."""
        leaves = {}
        names = []
        for path, leaf in jax.tree.leaves_with_path(state):
            value = jax.random.key_data(leaf) if _is_key(leaf) else leaf
            host = np.array(value)  # a copy: the state may be donated next
            names.append([jax.tree_util.keystr(path), list(host.shape), str(_dtype(leaf))])
            if host.size:
                leaves[str(len(names) - 1)] = host
        about = _plain(about | {"leaves": names})  # a copy: the caller may go on with its notes
        about["check"] = _check_sum(about)
        args = self._ocp.args
        with self._writing():
            self._manager.save(
                self._number,
                args=args.Composite(state=args.StandardSave(leaves), about=args.JsonSave(about)),
            )
        self._number += 1

    def wait(self) -> None:
        """Return when the last checkpoint is complete."""
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            _restrict(self.folder)

    def newest(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """The newest checkpoint that can be read, or None where there is none at all.

        Raises:
          OSError: there are some, and none of them can be read.
        """
        reason = None
        args = self._ocp.args
        both = args.Composite(state=args.StandardRestore(), about=args.JsonRestore())
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._manager.restore(number, args=both)
                about, leaves = found["about"], found["state"]
                if about.pop("check", None) != _check_sum(about):
                    raise ValueError("what it says of itself fails its check sum")
                return about, leaves
            except Exception as error:  # Orbax and tensorstore have errors of many kinds
                reason = reason or error
                where = self.folder / str(number)
                text = f"checkpoint {where} cannot be read ({_first_line(error)}); taking the last"
                warnings.warn(f"{text} one before it", stacklevel=2)
        if reason is None:
            return None
        raise OSError(
            f"none of the checkpoints in {self.folder} can be read ({_first_line(reason)}). Bring "
            "them back from a copy; or delete that folder, and resume as new: all steps are then "
            "charged again"
        ) from reason

    def close(self) -> None:
        """Wait for what is being written, and stop."""
        with self._writing():
            self._manager.close()

    def delete(self) -> None:
        """Delete all checkpoints, and with them the keys."""
        with contextlib.suppress(OSError):  # of what is deleted next
            self.close()
        delete(self.folder)

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except Exception as error:
            full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
            raise OSError(
                f"cannot write a checkpoint to {self.folder}: "
                f"{'disk full' if full else _first_line(error)}. Earlier ones and the ledger are "
                f"intact: make room{'' if full else ', or change permissions'}, and resume"
            ) from error


def delete(folder: pathlib.Path) -> None:
    """Delete a folder of checkpoints, and its parent when that has no other.

    Raises:
      OSError: some of it, and maybe a key, is still there.
    """
    shutil.rmtree(folder, ignore_errors=True)  # all that can be
    try:
        while _exists(folder):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot delete {error.filename or folder}: {error.strerror or error}. {folder} still "
            "has the secret keys of its run: change permissions, or delete it by hand",
        ) from error
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _exists(path: pathlib.Path) -> bool:
    """As `path.exists()`; but what cannot be known raises."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def fit(leaves: dict[str, np.ndarray], names: list[Any], like: PyTree) -> PyTree:
    """Put leaves that were read into the structure, and onto the devices, of a state.

    Raises:
      ValueError: the structure, a shape or a dtype is another.
    """
    paths, structure = jax.tree.flatten_with_path(like)
    remedy = "It was saved by another program: begin a new run in another folder."
    if len(paths) != len(names):
        got = _check.Words(f"{len(paths)}")
        _check.fail("state", f"of {len(names)} leaves, as in the checkpoint", got, remedy)
    filled = []
    for number, ((path, leaf), (name, shape, dtype)) in enumerate(zip(paths, names, strict=True)):
        expected = np.shape(jax.random.key_data(leaf)) if _is_key(leaf) else np.shape(leaf)
        now = (jax.tree_util.keystr(path), list(expected), str(_dtype(leaf)))
        if now != (name, shape, dtype):
            expected = f"as in the checkpoint, {name} of shape {shape} and dtype {dtype}"
            got = _check.Words(f"{now[0]} of shape {now[1]} and dtype {now[2]}")
            _check.fail("state", expected, got, remedy)
        filled.append(_like(leaves.get(str(number)), leaf))
    return jax.tree.unflatten(structure, filled)


def fold(state: PyTree, nonce: tuple[int, ...] | None) -> PyTree:
    """Fold a nonce into every key of a state."""

    def own(leaf):
        flat = leaf.reshape(-1)
        for word in nonce or ():
            flat = jax.vmap(jax.random.fold_in, (0, None))(flat, jnp.uint32(word))
        return flat.reshape(leaf.shape)

    return jax.tree.map(lambda leaf: own(leaf) if _is_key(leaf) else leaf, state)


def distinct_keys(state: PyTree) -> int:
    """How many different keys a state has."""
    keys = [leaf for leaf in jax.tree.leaves(state) if _is_key(leaf)]
    return len({np.asarray(jax.random.key_data(key)).tobytes() for key in keys})


def has_system_noise(state: PyTree) -> bool:
    """Whether a key of the state asks for noise that no key can repeat."""
    return any(_is_key(leaf) and _system.is_asked_by(leaf) for leaf in jax.tree.leaves(state))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _like(value: np.ndarray | None, leaf: Any) -> Any:
    if value is None:
        return leaf  # of size 0
    if isinstance(leaf, jax.Array):
        array: Any = jnp.array(value)  # a copy: it may be donated
        if _is_key(leaf):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(array, leaf.sharding) if leaf.committed else array
    return value if isinstance(leaf, np.ndarray | np.generic) else value.item()


def _restrict(folder: pathlib.Path) -> None:
    """Nobody but the owner may read what lies here."""
    folder.chmod(0o700)
    for root, folders, files in os.walk(folder):
        for name in folders:
            with contextlib.suppress(FileNotFoundError):  # an old one, on its way out
                os.chmod(os.path.join(root, name), 0o700)
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(os.path.join(root, name), 0o600)


def _plain(about: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(about))
    except (TypeError, ValueError, RecursionError):
        remedy = "Turn arrays into lists, and their scalars into numbers, with .tolist()."
        _check.fail("run.notes", "plain values, as JSON has them", about.get("notes"), remedy)
        raise


def _check_sum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _first_line(error: BaseException) -> str:
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line if len(line) <= 200 else line[:197] + "..."
