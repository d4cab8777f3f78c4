"""A container of Docker's for every peer: a network for each side, real kills and starts.

By the `docker` command, with an engine on this machine: the peers' state is where the run directory
is. Containers and networks are labelled with the process that made them: whoever runs next removes
what a killed one left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from peer.errors import FederationError, UserError
from simulations.processes import Worker

IMAGE = "panmesh"
"""What docker-compose.yml calls the project's image."""
OWNER = "panmesh.owner"
"""Label of all that is made: the id of the process that made it."""
SCRATCH = "/tmp"  # noqa: S108  # of each container, in memory
PARALLEL = 4
"""Calls of the engine at a time; more are no faster, it serves one after the other."""
CALL_SECONDS = 120.0
"""Longest that the engine may take for one call."""


@dataclass(kw_only=True)
class Container(Worker):
    """A worker in a container: its process is the command that is attached to it, which hands
    signals, input and output on."""

    container: str
    first_process: int = 0
    """Its id, 0 until it is known: every question takes the engine's time."""

    @property
    def pid(self) -> int | None:
        """The container's first process, as the engine's machine numbers it."""
        if not self.first_process:
            form = "{{.State.Pid}}"
            with suppress(FederationError):
                self.first_process = int(_docker("inspect", "--format", form, self.container))
        return self.first_process or None

    def start(self, line: int | None = None) -> None:
        """Start the container, or start it again with the same state, on the same networks."""
        self.first_process = 0
        super().start(line)

    def kill(self) -> None:
        """Kill what runs in the container, and wait until it is gone."""
        with suppress(FederationError):  # it has ended in the meantime
            _docker("kill", self.container)
        super().kill()


class Containers:
    """Containers for n peers and their bootstrap node, and the networks between them.

    A context manager that removes them whatever happens. All begin in one network; who is parted
    from peer 0, with which the bootstrap node stays, moves to a network of its side. They find each
    other by name, since an address is a network's. No network leads out of this machine. Raises
    UserError where containers cannot be made.
    """

    def __init__(self, n: int) -> None:
        check_possible()
        self._owner = os.getpid()
        self.host = self._name("bootstrap")
        self.names = [self._name(f"peer-{i}") for i in range(n)]
        self._home = self._name("home")
        self._networks = [self._home] * n
        """The network that each peer is in."""
        self._made = {self._home}

    def house(self, worker: Worker, name: str, *, readable: Collection[Path]) -> Container:
        """Return `worker`, which runs a module of Python, in a new container of that name, which
        reads the files `readable` and has the worker's directory to write in."""
        worker.directory.mkdir(exist_ok=True)
        volumes = [f"{worker.directory}:{worker.directory}"]
        volumes += [f"{file}:{file}:ro" for file in readable]
        _docker(
            "create", "--interactive", "--name", name, "--label", self._label,
            "--network", self._home,
            # The state belongs to whoever runs this, and so must those who write it.
            "--user", f"{os.getuid()}:{os.getgid()}",
            "--read-only", "--tmpfs", SCRATCH, "--workdir", SCRATCH, "--env", f"HOME={SCRATCH}",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            *(part for volume in volumes for part in ("--volume", volume)),
            "--entrypoint", "python3", IMAGE, *worker.command[1:],
        )  # fmt: skip
        return Container(
            name=worker.name,
            command=["docker", "start", "--attach", "--interactive", name],
            directory=worker.directory,
            container=name,
        )

    def part(self, sides: Sequence[int]) -> None:
        """Leave peers on different sides [n] no network in common."""
        wanted = [self._home if side == sides[0] else self._name(f"side-{side}") for side in sides]
        for network in sorted({*wanted} - self._made):
            self._make_network(network)
        moves = [
            (name, old, new)
            for name, old, new in zip(self.names, self._networks, wanted, strict=True)
            if old != new
        ]
        # All leave before anybody arrives: at no moment do sides meet.
        _at_once(lambda name, old, _: _docker("network", "disconnect", old, name), moves)
        _at_once(lambda name, _, new: _docker("network", "connect", new, name), moves)
        self._networks = wanted

    def __enter__(self) -> Self:
        sweep()
        try:
            self._make_network(self._home)
        except BaseException:
            _remove(self._owner)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _remove(self._owner)

    def _make_network(self, name: str) -> None:
        _docker("network", "create", "--internal", "--label", self._label, name)
        self._made.add(name)

    def _name(self, what: str) -> str:
        return f"panmesh-{self._owner}-{what}"

    @property
    def _label(self) -> str:
        return f"{OWNER}={self._owner}"


def check_possible() -> None:
    """Raise UserError unless containers of the image can be made here."""
    if shutil.which("docker") is None:
        raise UserError(
            "--backend docker needs the command docker", "--backend processes needs nothing"
        )
    try:
        _docker("version", "--format", "{{.Server.Version}}")
    except FederationError as error:
        raise UserError(
            f"no Docker engine that one may use: {error}",
            "start it, or join the group docker; DOCKER_HOST names another",
        ) from None
    if not _docker("images", "--quiet", IMAGE).strip():
        raise UserError(
            f"Docker has no image {IMAGE}", f"docker build --tag {IMAGE} . in the repository"
        )


def sweep() -> None:
    """Remove what runs that were killed have left behind."""
    form = f'{{{{.Label "{OWNER}"}}}}'
    listed = _docker("ps", "--all", "--filter", f"label={OWNER}", "--format", form)
    listed += _docker("network", "ls", "--filter", f"label={OWNER}", "--format", form)
    for owner in {int(line) for line in listed.split() if line.isdecimal()}:
        if not psutil.pid_exists(owner):
            _remove(owner)


def _remove(owner: int) -> None:
    """Remove the containers of a run, running or not, and its networks."""
    ours = ("--quiet", "--filter", f"label={OWNER}={owner}")
    if containers := _docker("ps", "--all", *ours).split():
        _docker("rm", "--force", "--volumes", *containers)
    if networks := _docker("network", "ls", *ours).split():
        _docker("network", "rm", *networks)


def _at_once(
    call: Callable[[str, str, str], object], arguments: Sequence[tuple[str, str, str]]
) -> None:
    """Make several calls of the engine side by side; raise what the first that failed raised."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        for _ in pool.map(lambda given: call(*given), arguments):
            pass


def _docker(*arguments: str) -> str:
    """Run a command of Docker's and return what it prints. Raises FederationError that quotes what
    it complains of."""
    command = ["docker", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
            process_group=0,  # Ctrl-C is for us, who remove what was made
        )
    except subprocess.TimeoutExpired:
        raise FederationError(f"docker {arguments[0]}: no answer in {CALL_SECONDS:.0f} s") from None
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise FederationError(f"docker {arguments[0]}: {complaint}")
    return done.stdout
