"""Keeping the memory of a long-lived process small."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
MAPPED = 128 * 1024
"""Bytes from which an allocation gets pages of its own, which go back when it is freed."""


def return_freed_memory() -> None:
    """Tell glibc's allocator to give freed models back to the system, whichever thread freed them.

    By default every thread gets an arena of its own and each keeps the buffers of models that came
    and went. Call before threads are started. Does nothing where the C library has no `mallopt`.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, 2)
    mallopt(_M_MMAP_THRESHOLD, MAPPED)
