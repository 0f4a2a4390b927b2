"""A file of JSON lines that is only appended to: locked, checked, and synced to disk. Host code."""

import contextlib
import errno
import json
import os
import pathlib
import time
import warnings
import zlib
from typing import Any


class Journal:
    """The file, locked for as long as it is open.

    Args:
      path: is created where missing, with its folder.
      read_only: neither lock nor write.

    Attributes:
      entries: the lines that it had when it was opened.
      length: how many it has.

    Raises:
      BlockingIOError: another process has the journal open.
      OSError: it cannot be read or written.
      ValueError: it is damaged anywhere but in a torn last line, which was never acknowledged and
        is dropped, with a warning.
    """

    def __init__(self, path: pathlib.Path, *, read_only: bool = False):
        self.path = path
        self._file: int | None = None
        with _explained(f"cannot open the ledger {path}"):
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file")
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if self._file is not None:
                _lock(self._file, path)
                _check_place(self._file, path)  # who had the lock may have moved it
            with _explained(f"cannot read the ledger {path}"):
                text = path.read_bytes()
            self.entries, torn = _parse(text, path)
            self.length = len(self.entries)
            if self._file is not None:
                with _explained(f"cannot repair the ledger {path}"):
                    if torn:
                        os.ftruncate(self._file, len(text) - torn)
                    elif text and not text.endswith(b"\n"):
                        os.write(self._file, b"\n")
                    os.fsync(self._file)  # its writer may have died before
                    _sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the lock back; nothing can be appended after this."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def append(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Append an entry and return it as it reads back, when the disk has it.

        Raises:
          OSError: it could not be written, or lies elsewhere now. The journal is closed then.
          ValueError: the journal is closed, or read-only.
        """
        if self._file is None:
            raise ValueError(
                f"`{self.path}` must be open, but got closed or read-only. Nothing was released; "
                "open it with jdp.Ledger(folder), and resume."
            )
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = _line({"number": self.length, "time": when} | entry)
        try:
            with _explained(f"cannot write to the ledger {self.path}, so nothing was released"):
                _write(self._file, line)
            _check_place(self._file, self.path)
        except BaseException:
            self.close()  # what the disk has is not known: read it again
            raise
        self.length += 1
        return json.loads(line)


def _line(entry: dict[str, Any]) -> bytes:
    """A line, with a check sum of its (public) text."""
    text = json.dumps(entry, sort_keys=True)
    checked = json.loads(text) | {"check": zlib.crc32(text.encode())}
    return json.dumps(checked, sort_keys=True).encode() + b"\n"


def _parse(text: bytes, path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """The entries, and how many bytes of a torn line come after them."""
    entries = []
    for number, line in enumerate(text.splitlines(keepends=True)):
        whole = line.endswith(b"\n")
        entry = _entry(line if whole else line + b"\n", number)
        if entry is None and not whole:
            what = f"line {number + 1} of {path} is torn, was never acted upon, and is dropped"
            warnings.warn(what, stacklevel=4)
            return entries, len(line)
        if entry is None:
            raise ValueError(
                f"line {number + 1} of {path} is damaged, so what was released is not known. "
                "Restore the file from a copy, or take another folder (and add up by hand)."
            )
        entries.append(entry)
    return entries, 0


def _entry(line: bytes, number: int) -> dict[str, Any] | None:
    """What a line says, if it is whole and in its place."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "check" not in entry:
        return None
    del entry["check"]
    return entry if _line(entry) == line and entry.get("number") == number else None


def _write(file: int, line: bytes) -> None:
    """Append a line and sync it, or leave the file as it was."""
    end = os.fstat(file).st_size
    try:
        rest = line
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file, end)
        raise


def _lock(file: int, path: pathlib.Path) -> None:
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            f"another process is at work in {path.parent} and has its ledger locked. Wait for it, "
            "or take another folder",
        ) from None


def _check_place(file: int, path: pathlib.Path) -> None:
    """Refuse a file that is no longer found under its name: nobody would read what it says."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return
    raise OSError(
        errno.ESTALE,
        f"the ledger {path} was removed or replaced while it was open, so nothing was released. "
        "Bring the file back, and resume",
    )


def _sync_folder(folder: pathlib.Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _explained(what: str):
    """Say what an operating-system error meant for the ledger."""
    try:
        yield
    except OSError as error:
        remedy = "Choose another folder, or change its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free some space, and run again"
        text = f"{what}: {error.strerror or error}. {remedy}"
        raise OSError(error.errno, text) from error
