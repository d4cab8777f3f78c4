"""How a panmesh command ends: exit codes, one-line errors, and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from peer.errors import StateError, UserError

log = logging.getLogger(__name__)

USER_ERROR = 2
INTERRUPTED = 130


def run_command(command: Callable[[], Any]) -> NoReturn:
    """Run a command and exit: 0, 2 after a person's mistake (one line and a hint), 130 after
    Ctrl-C.

    A file or folder that cannot be used is a person's mistake too, wherever it comes to light.
    """
    try:
        command()
    except (UserError, StateError) as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.filename is None:  # no file that somebody named: sockets, processes, our mistakes
            raise
        print(f"error: cannot use {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def end_on_signal(work: Coroutine[Any, Any, object]) -> None:
    """Run `work`; SIGTERM and SIGINT cancel it, a second one ends the process at once.

    After SIGTERM the process exits with 0, after Ctrl-C with 130, both as soon as `work` has
    cleaned up: a training step that still runs in its thread is not waited for.
    """
    _allow_open_files()
    received: list[int] = []

    async def supervise() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            log.info("stopping")
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        await work

    try:
        asyncio.run(supervise())
    except asyncio.CancelledError:
        if not received:
            raise
    if received:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0 if received[0] == signal.SIGTERM else INTERRUPTED)


def _allow_open_files() -> None:
    """Raise the limit of open files to what the system allows: each connection is one, strangers
    may hold as many as they like, and a peer without any left cannot write its state."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
