"""How a peer is, for those who look after it: its health file, and what its process tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from peer.network.messages import Status
from peer.rundir import HEALTH, MetricRow
from peer.state import StateDirectory

HEALTH_INTERVAL = 2.0
"""Seconds between two health files, and so the grain of what they say of the event loop."""


@dataclass(frozen=True)
class Vitals:
    """A peer at one moment.

    Attributes:
        known: indices of the others that it believes to be there. left_out: those that it leaves
            out of exchanges.
        row: its last finished round of this life, without what tells of private samples.
        traffic: `peer.network.traffic.Traffic.snapshot`.
    """

    index: int
    known: list[int]
    left_out: list[int]
    status: Status
    row: MetricRow | None
    traffic: dict[str, Any]

    @property
    def ready(self) -> bool:
        """Whether it has found anybody to learn with."""
        return bool(self.known)


async def report_health(state: StateDirectory, look: Callable[[], Vitals]) -> None:
    """Keep a health file fresh: its age tells whether the event loop runs, and what is in it
    whether anything grows that should not."""
    process = psutil.Process()
    while True:
        seen = look()
        report = {
            "time": time.time(),
            "ready": seen.ready,
            "known": seen.known,
            "left_out": seen.left_out,
            "status": seen.status.model_dump(),
            "tasks": len(asyncio.all_tasks()),
            "open_files": process.num_fds(),
            "memory": process.memory_info().rss,
        }
        # A slow disk must not delay answers to pings.
        await asyncio.to_thread(state.write_json, HEALTH, report)
        await asyncio.sleep(HEALTH_INTERVAL)
