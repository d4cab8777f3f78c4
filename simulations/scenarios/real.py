"""A scenario on real peer processes: the launcher's federation, and its script carried out.

The processes share this machine's loopback, or each is in a namespace or a container of its own.

Time begins when all who are there at the beginning are about to train for round 1. Every round of a
peer begins on the director's word, so that what the script has for that round happens first, as on
the virtual network. Killing is SIGKILL.
"""

from __future__ import annotations

import math
import selectors
import socket
import subprocess
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer.merit import precision, recall
from peer.rundir import MetricRow, TopologyRow
from simulations.processes import PLAN, Federation, OnRow
from simulations.runs import START_SECONDS
from simulations.scenarios.clock import Clock
from simulations.scenarios.containers import Containers
from simulations.scenarios.cues import Begin, Degraded, Go, Network, Word
from simulations.scenarios.director import Director
from simulations.scenarios.emulation import Aspect
from simulations.scenarios.links import Conditions
from simulations.scenarios.namespaces import Namespaces
from simulations.scenarios.runs import SCENARIO
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.script import Degrade
from simulations.scenarios.tables import select

FAREWELL_SECONDS = 15.0
"""How long a peer that has taken its leave may take to end before it is started again."""
READ_BYTES = 65_536


@dataclass
class Role:
    """What a peer is at the moment, and its line: `said` is what came in of an unfinished one."""

    cluster: int
    attack: str | None
    slowness: float = 1.0
    line: socket.socket | None = None
    said: bytes = b""
    overrun: float = 0.0


class RealFederation(Federation):
    """Runs a scenario as one bootstrap process and n peer processes under `directory`.

    Used as a `Federation` is. Process i is peer i. With `grounds`, namespaces or containers which
    must have been entered, each lives in one of its own; `emulated` is what of the network they do
    not do.
    """

    def __init__(
        self, scenario: Scenario, directory: Path, grounds: Namespaces | Containers | None = None
    ) -> None:
        directory = directory.resolve()
        file = directory / SCENARIO
        self.emulated = left_to_emulation(scenario, grounds)
        flags = ["--scenario", str(file), "--emulate", ",".join(sorted(self.emulated))]
        super().__init__(
            scenario.plan,
            directory,
            module="simulations.scenarios.actor",
            peer_flags=flags,
            one_peer_flags={i: ["--index", str(i)] for i in range(scenario.plan.n)},
            # Namespaces and containers are reached by nobody but those in them.
            bootstrap_flags=[] if grounds is None else ["--insecure"],
            host="127.0.0.1" if grounds is None else grounds.host,
        )
        self._grounds = grounds
        self._conditions = scenario.conditions()
        file.write_text(scenario.to_toml(), encoding="utf-8")
        match grounds:
            case Namespaces():
                self._enter_namespaces(grounds)
            case Containers():
                graph = getattr(scenario.topology, "file", None)
                self._enter_containers(grounds, [file] if graph is None else [file, graph])
        self.scenario = scenario
        self.clock = Clock()
        self._director = Director(scenario, self, self.clock)
        self._roles = [
            Role(scenario.plan.cluster_of(i), own.attack)
            for i, own in enumerate(scenario.equipment)
        ]
        self._awaited = set(range(scenario.plan.n)) - scenario.absent
        self._held: list[tuple[int, Begin]] = []
        self._network = Network(sides=(0,) * scenario.plan.n)
        self._selector = selectors.DefaultSelector()
        self._zero = self._zero_unix = 0.0
        self._heard = 0
        self.speeds: list[float] = []
        """How fast this machine has trained: samples a second, of every training but the last."""
        clusters = tuple(role.cluster for role in self._roles)
        self._epochs = [(0.0, clusters)]
        """From when on (Unix seconds) which true clusters [n] hold."""
        self._attacks: list[tuple[float, int, str]] = [
            (0.0, i, own.attack)
            for i, own in enumerate(scenario.equipment)
            if own.attack is not None
        ]

    def _enter_namespaces(self, namespaces: Namespaces) -> None:
        self.bootstrap.command = namespaces.command(None, self.bootstrap.command)
        for i, worker in enumerate(self.peers):
            listen = ["--listen", f"{namespaces.addresses[i]}:0"]
            worker.command = namespaces.command(i, [*worker.command, *listen])

    def _enter_containers(self, containers: Containers, readable: Sequence[Path]) -> None:
        # Nobody can listen at a name, and a container's addresses change with its networks.
        port = self.address.rpartition(":")[2]
        self.bootstrap.command += ["--listen", f"0.0.0.0:{port}"]
        plan = self.directory / PLAN
        self.bootstrap = containers.house(self.bootstrap, containers.host, readable=[plan])
        for i, (worker, name) in enumerate(zip(self.peers, containers.names, strict=True)):
            worker.command += ["--listen", "0.0.0.0:0", "--advertise", name]
            self.peers[i] = containers.house(worker, name, readable=readable)

    # The federation

    def start(self) -> None:
        """Start the bootstrap node and every peer that is there at the beginning."""
        self._limit()
        self._started, self._ended = time.monotonic(), 0.0
        self.bootstrap.start()
        for i in sorted(self._awaited):
            self.start_peer(i)

    def play(self, on_row: OnRow | None = None) -> None:
        """Wait until the scenario is over. Raises FederationError when a process fails, or when for
        very long no peer has begun a round and nothing of the script is to come."""
        patience = START_SECONDS + self.plan.network.round_timeout

        def moved() -> bool:
            return self.over or self._heard > heard

        while not self.over:
            heard = self._heard
            pause = self.clock.due - self.clock.now if self._director.awaits else 0.0
            self.wait_for(moved, patience + pause, on_row)
        self.wait(patience, on_row)

    @property
    def over(self) -> bool:
        """Whether no peer runs any more and nobody is to come."""
        return super().over and not self._director.awaits

    def rest(self, seconds: float) -> None:
        """Let time pass, in which peers are answered and the script goes on."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if self._zero:
                self.clock.catch_up(now - self._zero)
            if now >= until:
                return
            pause = min(until, self._zero + self.clock.due if self._zero else until) - now
            for key, _ in self._selector.select(max(0.0, pause)):
                self._hear(key.data)

    def told(self) -> dict[str, Any]:
        """Return what this adds to the summary: the scenario's name, and `overrun_s`, by how many
        seconds the trainings of one peer, the worst, took longer than its device's; what of the
        network was emulated."""
        return {
            "scenario": self.scenario.name,
            "overrun_s": round(max(role.overrun for role in self._roles), 3),
            "emulated": sorted(self.emulated),
        }

    def revise(self, row: MetricRow, choice: TopologyRow) -> tuple[MetricRow, TopologyRow]:
        """Return a peer's rows with seconds since the beginning as their time, judged by the true
        clusters that held then, and with a note where the peer lied."""
        place = bisect_right(self._epochs, row.time, key=lambda epoch: epoch[0]) - 1
        clusters = self._epochs[place][1]
        judged = frozenset(choice.bag or choice.neighbours)
        lies = [attack for when, i, attack in self._attacks if i == row.index and when <= row.time]
        notes = row.notes | ({"attack": lies[-1]} if lies else {})
        cluster = clusters[row.index]
        return row.model_copy(
            update={
                "time": row.time - self._zero_unix,
                "cluster": cluster,
                "precision": precision(judged, row.index, clusters),
                "recall": recall(judged, row.index, clusters),
                "notes": notes,
            }
        ), choice.model_copy(update={"cluster": cluster})

    def _kill_all(self) -> None:
        super()._kill_all()
        for role in self._roles:
            self._hang_up(role)

    # What the script does

    def has(self, i: int) -> bool:
        """Tell whether a peer's process runs, and is not about to end."""
        return self._roles[i].line is not None

    def part(self, sides: Sequence[int]) -> None:
        """Peers of different sides no longer reach each other: the first n, no coordinator runs."""
        own = tuple(sides[: self.plan.n])
        if self._grounds is not None:
            self._grounds.part(own)
        self._change(self._network.model_copy(update={"sides": own}))

    def heal(self) -> None:
        """All who are there reach each other again."""
        self.part((0,) * self.plan.n)

    def degrade(
        self, peers: Sequence[int], *, latency: float, bandwidth: float, loss: float | None
    ) -> None:
        """Links get worse."""
        worse = Degraded(peers=tuple(peers), latency=latency, bandwidth=bandwidth, loss=loss)
        degraded = (*self._network.degraded, worse)
        self._conditions.degrade(peers, latency=latency, bandwidth=bandwidth, loss=loss)
        self._limit()
        self._change(self._network.model_copy(update={"degraded": degraded}))

    def slow(self, i: int, factor: float) -> None:
        """Training takes so many times as long as the scenario says."""
        self._roles[i].slowness = factor

    def become(self, i: int, *, cluster: int | None = None, attack: str | None = None) -> None:
        """A peer's data become those of another cluster, or it begins to lie."""
        role, now = self._roles[i], time.time()
        if cluster is not None:
            role.cluster = cluster
            self._epochs.append((now, tuple(own.cluster for own in self._roles)))
        if attack is not None:
            role.attack = attack
            self._attacks.append((now, i, attack))

    def stop_peer(self, i: int, *, farewell: bool) -> None:
        """End a peer's process: at once, or, by its line's end, when it has told the others."""
        if not farewell:
            self.peers[i].kill()
        self._hang_up(self._roles[i])

    def start_peer(self, i: int) -> None:
        """Start a peer's process, with whatever state it left."""
        worker, role = self.peers[i], self._roles[i]
        if worker.running and role.line is not None:
            return
        if worker.process is not None:
            try:
                worker.process.wait(FAREWELL_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
        self._hang_up(role)  # the end of a process that ended by itself may not have been heard yet
        here, there = socket.socketpair()
        with there:
            worker.start(line=there.fileno())
        here.setblocking(False)
        role.line, role.said = here, b""
        self._selector.register(here, selectors.EVENT_READ, i)
        self._say(i, Word(network=self._network))

    # Lines

    def _hear(self, i: int) -> None:
        """Take in what a peer says; its line ends with it."""
        role = self._roles[i]
        assert role.line is not None
        try:
            said = role.line.recv(READ_BYTES)
        except OSError:
            said = b""
        if not said:
            self._hang_up(role)
            return
        *lines, role.said = (role.said + said).split(b"\n")
        for line in lines:
            self._begins(i, Begin.model_validate_json(line))

    def _begins(self, i: int, begin: Begin) -> None:
        """A peer is about to begin a round: what the script has for it happens."""
        role = self._roles[i]
        self._heard += 1
        self._note_training(i, begin)
        if not self._zero:
            self._awaited.discard(i)
            self._held.append((i, begin))
            if not self._awaited:
                self._open()
            return
        self.clock.catch_up(time.monotonic() - self._zero)
        self._director.reach(begin.t)
        if self._director.meet(i, begin.t):
            go = Go(cluster=role.cluster, attack=role.attack, slowness=role.slowness)
            self._say(i, Word(go=go))

    def _note_training(self, i: int, begin: Begin) -> None:
        if begin.samples:
            role = self._roles[i]
            due = begin.samples / self.scenario.equipment[i].speed * role.slowness
            role.overrun += max(0.0, begin.seconds - due)
            self.speeds.append(begin.samples / max(begin.seconds, 1e-9))

    def _open(self) -> None:
        """Time begins."""
        self._zero, self._zero_unix = time.monotonic(), time.time()
        self._director.begin()
        for i, begin in self._held:
            self._begins(i, begin)

    def _limit(self) -> None:
        """Give every namespace its rates, where they are not emulated."""
        if not isinstance(self._grounds, Namespaces) or Aspect.BANDWIDTH in self.emulated:
            return
        for i in range(self.plan.n):
            up, down = access_rates(self._conditions, self.scenario, i)
            self._grounds.limit(i, min(up, default=math.inf), min(down, default=math.inf))

    def _change(self, network: Network) -> None:
        self._network = network
        for i in range(self.plan.n):
            self._say(i, Word(network=network))

    def _say(self, i: int, word: Word) -> None:
        line = self._roles[i].line
        if line is not None:
            with suppress(OSError):  # a peer that is gone is found out by its end of the line
                line.sendall(word.model_dump_json().encode() + b"\n")

    def _hang_up(self, role: Role) -> None:
        if role.line is not None:
            self._selector.unregister(role.line)
            role.line.close()
            role.line = None


def left_to_emulation(
    scenario: Scenario, grounds: Namespaces | Containers | None
) -> frozenset[Aspect]:
    """Return what of a scenario's network the grounds of its peers do not do."""
    match grounds:
        case None:
            return frozenset(Aspect)
        case Namespaces() if has_access_rates(scenario):
            return frozenset({Aspect.LATENCY})
        case _:
            return frozenset({Aspect.LATENCY, Aspect.BANDWIDTH})


def access_rates(
    conditions: Conditions, scenario: Scenario, i: int
) -> tuple[set[float], set[float]]:
    """Return the different rates, bytes a second, at which peer i sends to its neighbours, and
    those at which it receives from them."""
    neighbours = [*scenario.graph.neighbors(i)]
    return (
        {conditions.link(i, j).up for j in neighbours},
        {conditions.link(j, i).down for j in neighbours},
    )


def has_access_rates(scenario: Scenario) -> bool:
    """Tell whether at every moment all links of a peer share one rate in each direction, so that
    its one connection to the network can have it."""
    return all(
        len(rates) <= 1
        for conditions in _course(scenario)
        for i in range(scenario.plan.n)
        for rates in access_rates(conditions, scenario, i)
    )


def _course(scenario: Scenario) -> Iterator[Conditions]:
    """Yield what the links are like at first, and after each change that the script has for them.

    [choice] The changes in the order of the file: which of a round and a second comes first nobody
    knows before.
    """
    conditions = scenario.conditions()
    yield conditions
    for event in scenario.script:
        if isinstance(event, Degrade):
            conditions.degrade(
                select(event.peers, scenario.people, ()),
                latency=event.latency,
                bandwidth=event.bandwidth,
                loss=event.loss,
            )
            yield conditions
