"""Carries out the script of a scenario, on the virtual network or on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simulations.scenarios.clock import Clock
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.script import (
    BecomeMalicious,
    Degrade,
    Drift,
    Happening,
    Heal,
    Join,
    Kill,
    Leave,
    Partition,
    Restart,
    Slow,
)
from simulations.scenarios.tables import select


class Stage(Protocol):
    """A federation to which things happen."""

    def has(self, i: int) -> bool:
        """Tell whether the process of peer i runs."""
        ...

    def part(self, sides: Sequence[int]) -> None:
        """Peers of different sides [n + 1], the last the coordinator's, no longer reach each
        other."""
        ...

    def heal(self) -> None:
        """All who are there reach each other again."""
        ...

    def degrade(
        self, peers: Sequence[int], *, latency: float, bandwidth: float, loss: float | None
    ) -> None:
        """Links get worse, see `simulations.scenarios.links.Conditions.degrade`."""
        ...

    def stop_peer(self, i: int, *, farewell: bool) -> None:
        """End a peer's process; it has its last finished round, and no more."""
        ...

    def start_peer(self, i: int) -> None:
        """Start a peer's process, for the first time or after its last finished round."""
        ...

    def slow(self, i: int, factor: float) -> None:
        """Training takes so many times as long as the scenario says."""
        ...

    def become(self, i: int, *, cluster: int | None = None, attack: str | None = None) -> None:
        """A peer's data become those of another cluster, or it begins to lie."""
        ...


class Director:
    """Knows what of the script is still to come, and makes it happen.

    `restarts` tells whether anybody will need its last finished round again.
    """

    def __init__(self, scenario: Scenario, stage: Stage, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        self._people = scenario.people
        self._front = 0
        self._by_round: dict[int, list[Happening]] = {}
        self._met: dict[int, list[tuple[int, Happening]]] = {}
        self._timed: list[Happening] = []
        for event in scenario.script:
            if event.round is None:
                self._timed.append(event)
            elif event.individual:
                for i in self._peers(event):
                    self._met.setdefault(i, []).append((event.round, event))
            else:
                self._by_round.setdefault(event.round, []).append(event)
        for events in self._met.values():
            events.sort(key=lambda item: item[0])
        self.restarts = any(isinstance(event, Restart) for event in scenario.script)
        self._arrivals = sum(isinstance(event, Join | Restart) for event in self._timed)

    @property
    def awaits(self) -> bool:
        """Whether somebody is to come at some second, for whom the clock must go on."""
        return self._arrivals > 0

    def begin(self) -> None:
        """Plan what happens at some second."""
        for event in self._timed:
            self._clock.at(event.second or 0.0, self._at_second, event)

    def reach(self, t: int) -> None:
        """Some peer begins round t: what concerns the network happens when the first one does."""
        while self._front < t:
            self._front += 1
            for event in self._by_round.get(self._front, ()):
                self._befall(event)

    def meet(self, i: int, t: int) -> bool:
        """Peer i begins round t: what befalls it happens. Return whether it is still there."""
        events = self._met.get(i)
        while events and events[0][0] <= t:
            _, event = events.pop(0)
            self._befall_peer(event, i)
        return self._stage.has(i)

    def _at_second(self, event: Happening) -> None:
        self._befall(event)
        self._arrivals -= isinstance(event, Join | Restart)

    def _befall(self, event: Happening) -> None:
        match event:
            case Partition():
                self._stage.part(event.sides(self._people, ()))
            case Heal():
                self._stage.heal()
            case Degrade():
                self._stage.degrade(
                    self._peers(event),
                    latency=event.latency,
                    bandwidth=event.bandwidth,
                    loss=event.loss,
                )
            case _:
                for i in self._peers(event):
                    self._befall_peer(event, i)

    def _befall_peer(self, event: Happening, i: int) -> None:
        match event:
            case Kill() | Leave():
                self._stage.stop_peer(i, farewell=isinstance(event, Leave))
            case Restart() | Join():
                self._stage.start_peer(i)
            case Slow():
                self._stage.slow(i, event.factor)
            case Drift():
                self._stage.become(i, cluster=event.cluster)
            case BecomeMalicious():
                self._stage.become(i, attack=event.attack)

    def _peers(self, event: Happening) -> Sequence[int]:
        return select(getattr(event, "peers", ()), self._people, ())
