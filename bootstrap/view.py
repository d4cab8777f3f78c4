"""The live table of a bootstrap node, for terminals; elsewhere its log lines must do."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bootstrap.server import BootstrapNode
from peer.display import percent

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def live_table(node: BootstrapNode) -> Iterator[None]:
    """Show who is there while the block runs, if the output is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    from rich.live import Live

    with Live(get_renderable=lambda: _render(node), refresh_per_second=2):
        yield


def _render(node: BootstrapNode) -> Table:
    from rich.table import Table

    present = sum(guest.present for guest in node.guests.values())
    table = Table(
        "peer", "address", "state", "round", "accuracy", "seen",
        title=f"{node.plan.name} at {node.address}: {present} of {node.plan.n} present",
    )  # fmt: skip
    now = time.monotonic()
    for index, guest in sorted(node.guests.items()):
        status = guest.update.status
        state = "done" if guest.present and status.done else str(guest.update.state)
        table.add_row(
            str(index),
            guest.update.record.control.removeprefix("tcp://"),
            state,
            f"{status.finished}/{node.plan.rounds}",
            percent(status.accuracy),
            f"{now - guest.seen:.0f} s ago",
        )
    return table
