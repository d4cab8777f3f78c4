"""A federation of real processes on this machine: one `bootstrap` and n `peer` processes.

The launcher owns them: whatever ends the `with` block, an error or Ctrl-C included, ends them
too. Processes are numbered in the order of their start; which index a peer got from the bootstrap
node is in its rows.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bootstrap.coordination.tree_store import TREE
from peer.errors import FederationError, UserError
from peer.files import write_atomically
from peer.plan import Plan
from peer.rundir import (
    METRICS,
    MetricRow,
    RowReader,
    TopologyRow,
    find_runs,
    merge,
    read_metrics,
)

POLL_SECONDS = 0.2
MEMORY_SECONDS = 3.0
TAIL_LINES = 15
PLAN = "plan.toml"
"""The file of a federation's directory that holds its plan."""

OnRow = Callable[[int, MetricRow], None]


@dataclass
class Memory:
    """Peak memory of one process, bytes: its proportional share (PSS) and what is its own (USS)."""

    pss: int = 0
    uss: int = 0

    def sample(self, pid: int) -> int:
        """Look at a process and return its PSS now; 0 for one that is gone."""
        try:
            info = psutil.Process(pid).memory_full_info()
        except psutil.Error:
            return 0
        pss: int = getattr(info, "pss", info.uss)
        self.uss = max(self.uss, info.uss)
        self.pss = max(self.pss, pss)
        return pss


@dataclass
class Worker:
    """One process of a federation, over all its restarts."""

    name: str
    command: list[str]
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    killed: bool = False
    memory: Memory = field(default_factory=Memory)

    @property
    def log(self) -> Path:
        """Where its standard output and error go."""
        return self.directory.with_suffix(".log")

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """The id of the process whose memory counts, None where there is none."""
        return self.process.pid if self.process is not None else None

    def start(self, line: int | None = None) -> None:
        """Start the process, or start it again with the same state. `line`: a descriptor for its
        standard input and output; without one it has no input, and its output goes to the log.
        """
        if self.running:
            raise FederationError(f"{self.name} is running already")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL if line is None else line,
                stdout=log if line is None else line,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # A group of its own: Ctrl-C reaches the launcher only, which then ends all.
                process_group=0,
            )
        self.killed = False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it has started, if it lives."""
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End the process at once, as a crash does, and wait until it is gone."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.killed = True

    def tail(self) -> str:
        """Return the last lines of its log."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Federation:
    """Runs a plan as one bootstrap process and n peer processes under `directory`.

    Use as a context manager: entering starts all, leaving ends all.

        with Federation(plan, Path("runs/mine")) as federation:
            federation.wait(timeout=120, on_row=lambda number, row: print(row))
            summary = federation.collect(Path("runs/mine"))

    Args:
        plan: what to run.
        directory: where logs and state go: `bootstrap/`, `peer-0/`, ... and a .log beside each.
        peers: number of peer processes, the plan's n if not given.
        data: each peer's `--data`; the plan's data set if not given.
        peer_flags: more flags of every peer.
        one_peer_flags: more flags of single peers, by process number.
        bootstrap_flags: more flags of the bootstrap node.
        module: what is run as a peer.
        host: where the bootstrap node listens.

    Peers of a plan that permutes get a secret, made for this run.

    Raises UserError when `directory` holds the state of another run.
    """

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        peers: int | None = None,
        data: str | None = None,
        peer_flags: Sequence[str] = (),
        one_peer_flags: Mapping[int, Sequence[str]] | None = None,
        bootstrap_flags: Sequence[str] = (),
        module: str = "peer",
        host: str = "127.0.0.1",
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.address = f"{host}:{free_port()}"
        if (directory / PLAN).exists():
            raise UserError(f"{directory} holds an earlier federation", "name another directory")
        directory.mkdir(parents=True, exist_ok=True)
        plan_file = directory / PLAN
        plan_file.write_text(plan.to_toml(), encoding="utf-8")
        self.bootstrap = self._worker(
            "bootstrap",
            ["bootstrap", "--plan", str(plan_file), "--listen", self.address, *bootstrap_flags],
        )
        common = [module, "--bootstrap", self.address, *(["--data", data] if data else [])]
        if plan.permutes:
            secret = directory / "secret.txt"
            write_atomically(secret, secrets.token_hex(32), mode=0o600)
            common += ["--secret", str(secret)]
        single = one_peer_flags or {}
        self.peers = [
            self._worker(f"peer-{number}", [*common, *peer_flags, *single.get(number, ())])
            for number in range(plan.n if peers is None else peers)
        ]
        self._readers = [RowReader(worker.directory / "metrics.jsonl") for worker in self.peers]
        self._started = self._ended = self._last_memory = 0.0
        self._peak_total = 0

    def _worker(self, name: str, module: list[str]) -> Worker:
        state = self.directory / name
        command = [sys.executable, "-m", *module, "--state", str(state)]
        return Worker(name=name, command=command, directory=state)

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first process until `wait` returned, or until now."""
        return (self._ended or time.monotonic()) - self._started

    def start(self) -> None:
        """Start the bootstrap node and every peer."""
        self._started, self._ended = time.monotonic(), 0.0
        self.bootstrap.start()
        for worker in self.peers:
            worker.start()

    def kill(self, number: int) -> None:
        """Kill peer process `number` as a crash would (SIGKILL)."""
        self.peers[number].kill()

    def restart(self, number: int) -> None:
        """Start peer process `number` again, with the state it left."""
        self.peers[number].start()

    def kill_bootstrap(self) -> None:
        """Kill the bootstrap node as a crash would (SIGKILL)."""
        self.bootstrap.kill()

    def restart_bootstrap(self) -> None:
        """Start the bootstrap node again, with the state it left, at the same address."""
        self.bootstrap.start()

    def poll(self, on_row: OnRow | None = None) -> None:
        """Read new rows, sample memory, and look after the processes.

        Raises FederationError, with the tail of its log, when one has failed that was not killed.
        """
        for number, reader in enumerate(self._readers):
            for row in reader.poll():
                if on_row is not None:
                    on_row(number, row)
        if time.monotonic() - self._last_memory >= MEMORY_SECONDS:
            self._last_memory = time.monotonic()
            self._sample_memory()
        for worker in (self.bootstrap, *self.peers):
            code = worker.process.poll() if worker.process is not None else None
            if code not in (None, 0) and not worker.killed:
                raise FederationError(
                    f"{worker.name} ended with {code}; the end of {worker.log}:\n{worker.tail()}"
                )

    def wait(self, timeout: float, on_row: OnRow | None = None) -> None:
        """Wait until every peer process that was not killed has ended well.

        Raises FederationError when one fails or `timeout` seconds pass.
        """
        self.wait_for(lambda: self.over, timeout, on_row)
        self.poll(on_row)
        self._ended = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether no peer process runs any more."""
        return not any(worker.running for worker in self.peers)

    def rest(self, seconds: float) -> None:
        """Let time pass until the processes are looked at again."""
        time.sleep(seconds)

    def wait_for(
        self, condition: Callable[[], bool], timeout: float, on_row: OnRow | None = None
    ) -> None:
        """Poll until `condition()` holds. Raises FederationError as `wait` does."""
        deadline = time.monotonic() + timeout
        while True:
            self.poll(on_row)
            if condition():
                return
            if time.monotonic() > deadline:
                raise FederationError(f"not done after {timeout:.0f} s\n{self._unfinished()}")
            self.rest(POLL_SECONDS)

    def collect(self, target: Path) -> dict[str, Any]:
        """Merge the peers' state into the run directory `target` and return the summary.

        Adds `memory_pss_mb` and `memory_uss_mb`, each peer's peak in order of start, and
        `memory_total_mb`, the peak of all processes' PSS at one time, the bootstrap node included.
        What a coordinator kept, the tree and its attempts to split, comes along. Raises
        FederationError when no peer has finished a round.
        """
        written = [own.directory for own in self.peers if any(own.directory.rglob(METRICS))]
        runs = [run for directory in written for run in find_runs(directory)]
        if not runs:
            raise FederationError("no peer has finished a round")
        memory = {
            "memory_total_mb": round(self._peak_total / 1e6, 1),
            "memory_pss_mb": [round(worker.memory.pss / 1e6, 1) for worker in self.peers],
            "memory_uss_mb": [round(worker.memory.uss / 1e6, 1) for worker in self.peers],
        }
        summary = merge(
            runs,
            target,
            wall_s=self.wall_s,
            extra=memory | self.told(),
            attempts=self._attempts(),
            revise=self.revise,
        )
        tree = self.bootstrap.directory / TREE
        if tree.exists():
            shutil.copytree(tree, target / TREE, dirs_exist_ok=True)
        return summary

    def told(self) -> dict[str, Any]:
        """Return what a kind of federation adds to the summary."""
        return {}

    def revise(self, row: MetricRow, choice: TopologyRow) -> tuple[MetricRow, TopologyRow]:
        """Return the rows of a round as the federation knows better than the peer did."""
        return row, choice

    def _attempts(self) -> list[dict[str, Any]]:
        """Return what a coordinator wrote of its attempts to split clusters."""
        if not (self.bootstrap.directory / METRICS).exists():
            return []
        told = read_metrics(self.bootstrap.directory)
        return [row.notes["attempt"] for row in told if "attempt" in row.notes]

    def terminate(self, grace: float = 12.0) -> None:
        """End every process: SIGTERM, then SIGKILL to those still there after `grace` seconds."""
        workers = [self.bootstrap, *self.peers]
        for worker in workers:
            if worker.running:
                worker.killed = True
                worker.send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        for worker in workers:
            if worker.process is None:
                continue
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # After an error nobody needs the peers to say goodbye.
            self.terminate(grace=12.0 if error is None else 2.0)
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        for worker in (self.bootstrap, *self.peers):
            if worker.running:
                worker.kill()

    def _sample_memory(self) -> None:
        total = sum(
            worker.memory.sample(pid)
            for worker in (self.bootstrap, *self.peers)
            if worker.running and (pid := worker.pid) is not None
        )
        self._peak_total = max(self._peak_total, total)

    def _unfinished(self) -> str:
        waiting = [worker for worker in self.peers if worker.running]
        names = ", ".join(worker.name for worker in waiting)
        tail = f"; the end of {waiting[0].log}:\n{waiting[0].tail()}" if waiting else ""
        return f"still running: {names}{tail}"


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now, as is the one after it.

    A node listens on two: control, and data on the next.
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
