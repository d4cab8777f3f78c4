"""Files that hold secrets: keys, federation files, passwords. Who may read them, and how.

A secret that other users of the machine can read is none, so that its file is refused: one rule for
all of them. It has an exception. What a container's runtime mounts as a secret is often readable by
all (mode 0444, of root), and mounted read-only; those others are the container's own processes, and
nobody inside can change the mode. [choice] On a read-only mount the mode does not count.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from peer.errors import UserError
from peer.files import write_atomically

MAX_SECRET = 65_536
"""Bytes of a file with a secret that a person wrote."""


def read_secret_file(path: Path, limit: int) -> bytes:
    """Return what a file of at most `limit` bytes holds.

    Raises UserError when it cannot be read, is longer, or others than its owner may read it.
    """
    try:
        with path.open("rb") as file:
            exposed = _is_exposed(file)
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if exposed:
        raise UserError(f"{path} holds a secret that others can read", f"chmod 600 {path}")
    if len(content) > limit:
        raise UserError(f"{path} is longer than {limit} bytes")
    return content


def _is_exposed(file: IO[bytes]) -> bool:
    """Return whether others than its owner may use a file, and its owner could forbid it."""
    if not os.fstat(file.fileno()).st_mode & 0o077:
        return False
    return not os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY


def read_secret(path: Path) -> bytes:
    """Return the secret that a person wrote, without the newline that editors put at its end.

    Raises UserError as `read_secret_file` does.
    """
    return read_secret_file(path, MAX_SECRET).rstrip(b"\r\n")


def write_secret_file(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600. Raises UserError when it exists or cannot be written."""
    if path.exists():
        raise UserError(f"{path} exists", "a key that is lost is lost: move it away first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=0o600)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
