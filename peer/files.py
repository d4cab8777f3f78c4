"""Writing files that survive a crash at any moment, in directories that one process holds."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from peer.errors import StateError


def hold_directory(path: Path) -> IO[str]:
    """Make a state directory and hold it for this process until the returned file is closed.

    What an earlier process had not finished writing there is removed. Raises StateError when
    another process holds it, or when it cannot be used.
    """
    try:
        with ExitStack() as opened:
            path.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((path / "lock").open("a", encoding="ascii"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_unfinished(path)
            opened.pop_all()
    except BlockingIOError:
        raise StateError(
            f"the state directory {path} is in use by another process",
            "every process has its own --state",
        ) from None
    except OSError as error:
        raise StateError(f"cannot use the state directory {path}: {error.strerror}") from None
    return lock


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o644) -> None:
    """Replace `path` by `content` (text as UTF-8): after a crash the old or the new file is there.

    The bytes are on the disk before the new name is, and the name before this returns. Raises
    OSError that names `path`.
    """
    raw = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # A full disk has no name by itself, and the temporary one says nothing to a person.
        error.filename, error.filename2 = os.fspath(path), None
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_unfinished(directory: Path) -> None:
    """Remove what a process that was killed had not finished writing in `directory`.

    Only for a directory in which nobody else writes. Raises OSError.
    """
    for file in directory.glob(".*.new"):
        file.unlink(missing_ok=True)
