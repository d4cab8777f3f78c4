"""Writing files that survive a crash at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o644) -> None:
    """Replace `path` by `content` (text as UTF-8): after a crash the old or the new file is there.

    The bytes are on the disk before the new name is, and the name before this returns. Raises
    OSError.
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
    except OSError:
        temporary.unlink(missing_ok=True)
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
