"""What happens to files: their process is killed before a file operation, or they are damaged."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
"""Of these the interpreter tells before they are done (PEP 578)."""


def kill_before(operation: int, directory: str, *, name: str = "", times: int = 0) -> None:
    """From now on count the file operations of this process in a directory, and kill it just before
    the one of that number, from 0; with `times` from when it has opened a file there so often whose
    path holds `name`."""
    left, unopened = operation, times

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left, unopened
        if event in OPERATIONS and directory in str(arguments[0]):
            if unopened:
                unopened -= event == "open" and name in str(arguments[0])
                return
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def killed(operation: int, directory: Path, work: Callable[[], object]) -> bool:
    """Do some work in a child process that is killed before a file operation in a directory; return
    whether it was: it may have ended before. Fail if it ended by an error."""
    child = os.fork()
    if child == 0:
        try:
            kill_before(operation, str(directory))
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


KINDS = ("deleted", "emptied", "truncated", "flipped", "overwritten", "zeroed", "lengthened")


@strategies.composite
def damages(draw: strategies.DrawFn) -> tuple[str, int, bytes]:
    """Draw a kind of damage, a place in the file, and bytes."""
    kind = draw(strategies.sampled_from(KINDS))
    place = draw(strategies.integers(0, 1 << 20))
    return kind, place, draw(strategies.binary(min_size=1, max_size=40))


def damage(path: Path, kind: str, place: int, content: bytes) -> None:
    """Do to a file what `damages` has drawn."""
    if kind == "deleted":
        path.unlink()
        return
    whole = path.read_bytes()
    place %= max(1, len(whole))
    changed = {
        "emptied": b"",
        "truncated": whole[:place],
        "flipped": whole[:place] + bytes([whole[place] ^ (1 << content[0] % 8)] if whole else b"")
        + whole[place + 1 :],
        "overwritten": content,
        "zeroed": whole[:place] + bytes(len(whole) - place),
        "lengthened": whole + content,
    }  # fmt: skip
    path.write_bytes(changed[kind])


def copied(source: Path, target: Path) -> Path:
    """Make `target` a copy of a directory, whatever it was before; return it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
