"""Measure how fast models and pings travel over loopback, with and without keys.

    python tests/peer/network/throughput.py [--megabytes 10] [--pulls 20] [--pings 1000]

The two sides are two processes. Prints a line each: MB/s of models that are pulled one after the
other, the median time of a ping, and the processor time of both sides for all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from peer.network.federation import Credentials, found
from peer.network.identity import IdentityKey
from peer.network.limits import Allowance
from peer.network.messages import CHUNK, Model, Ping, Pong, Pull, Reply, Request
from peer.network.traffic import Traffic
from peer.network.transport import Buffer, Transport


def opened(size: int, file: Path | None) -> Transport:
    """Return a transport that answers pulls by `size` bytes."""
    chunks = [bytes(min(CHUNK, size - start)) for start in range(0, size, CHUNK)]

    async def handler(request: Request) -> tuple[Reply, Sequence[Buffer]]:
        if isinstance(request, Pull):
            return Model(round=1, model_bytes=size, samples=1), chunks
        return Pong(updates=()), ()

    credentials = None if file is None else Credentials(IdentityKey.generate(), file)
    transport = Transport(
        listen="127.0.0.1:0", handler=handler, traffic=Traffic(), credentials=credentials
    )
    transport.allow(Allowance(*[math.inf] * 4))
    return transport


def seconds_used() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(size: int, file: Path | None, pipe: Connection) -> None:
    """Answer until told to end; tell the addresses, then the processor time."""

    async def work() -> None:
        async with opened(size, file) as transport:
            pipe.send((transport.control, transport.data))
            began = seconds_used()
            await asyncio.to_thread(pipe.recv)
            pipe.send(seconds_used() - began)

    asyncio.run(work())


async def ask(
    size: int, file: Path | None, addresses: tuple[str, str], pulls: int, pings: int
) -> tuple[float, float]:
    """Return seconds for all pulls, and the median of a ping's."""
    control, data = addresses
    pull, times = Pull(round=1, staleness=0, wait=0), []
    async with opened(size, file) as transport:
        await transport.request(data, pull, timeout=60, max_payload=size)
        began = time.perf_counter()
        for _ in range(pulls):
            await transport.request(data, pull, timeout=60, max_payload=size)
        taken = time.perf_counter() - began
        for _ in range(pings):
            began = time.perf_counter()
            await transport.request(control, Ping(updates=()), timeout=60)
            times.append(time.perf_counter() - began)
    return taken, statistics.median(times)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--pulls", type=int, default=20)
    parser.add_argument("--pings", type=int, default=1000)
    given = parser.parse_args()
    size = int(given.megabytes * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "federation.toml"
        found(path, path.parent, token=True)
        for name, file in (("without keys", None), ("with keys", path)):
            here, there = multiprocessing.get_context("spawn").Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=serve, args=(size, file, there), daemon=True
            )
            process.start()
            addresses = here.recv()
            before = seconds_used()
            taken, ping = asyncio.run(ask(size, file, addresses, given.pulls, given.pings))
            here.send(None)
            used = seconds_used() - before + here.recv()
            process.join()
            print(
                f"{name}: {given.pulls * size / taken / 1e6:.0f} MB/s, ping {ping * 1e6:.0f} us, "
                f"{used:.2f} s of processor time in all"
            )


if __name__ == "__main__":
    main()
