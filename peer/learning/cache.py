"""The user's cache folder: files derived from others, written once and mapped by every process."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path | None:
    """Return $PANMESH_CACHE or ~/.cache/panmesh; None for a user without a home."""
    if configured := os.environ.get("PANMESH_CACHE"):
        return Path(configured)
    try:
        return Path.home() / ".cache" / "panmesh"
    except RuntimeError:
        return None


def derived_file(
    sources: Sequence[Path], kind: str, write: Callable[[BinaryIO], None]
) -> Path | None:
    """Return a cached file of what `write` makes of `sources`, making it if it is not there.

    `kind` names the format that `write` writes. The key holds path, size and modification time of
    every source, so that a changed source is read anew. Many processes may ask at once: each
    writes a file of its own and renames it when whole. Returns None when the cache cannot be
    written; an error that is no OSError leaves `write` as it is.
    """
    folder = cache_folder()
    if folder is None:
        return None
    stats = [(path, path.stat()) for path in sources]
    stamps = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]
    target = folder / "derived" / f"{key}.{kind}"
    if target.exists():
        return target
    try:
        _write_whole(target, write)
    except OSError:
        return None
    return target


def _write_whole(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write `target` so that it is seen whole or not at all; the first of many writers wins."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        # All processes should map one and the same file, or they would not share its pages.
        if not target.exists():
            Path(name).rename(target)
    finally:
        Path(name).unlink(missing_ok=True)
