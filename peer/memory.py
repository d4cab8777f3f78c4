"""Keeping the memory of a device's process small: twenty of them may share one machine."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

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
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, MAPPED)


_FOR_TRACING_ONLY = ("torch._meta_registrations", "torch.distributed._meta_registrations")


@contextmanager
def torch_without_tracing() -> Iterator[None]:
    """Import torch in this block without what only tracing (torch.export, torch.compile) needs.

    Torch registers thousands of shape rules written in Python on import: 18 MB of private memory,
    an eighth of the whole import (torch 2.13), and a device that trains a built-in model never uses
    one. Has no effect where torch has been imported already, or has no such modules; afterwards
    they can still be imported.
    """
    hidden = [] if "torch" in sys.modules else [*_FOR_TRACING_ONLY]
    for name in hidden:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)
