"""Carries out the script of a scenario in a virtual federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from simulations.scenarios.federation import Federation, Member


class Director:
    """Knows what of the script is still to come, and makes it happen.

    `restarts` tells whether anybody will need its last finished round again.
    """

    def __init__(self, federation: Federation[Any]) -> None:
        self._federation = federation
        self._people = federation.scenario.people
        self._front = 0
        self._by_round: dict[int, list[Happening]] = {}
        self._met: dict[int, list[tuple[int, Happening]]] = {}
        self._timed: list[Happening] = []
        for event in federation.scenario.script:
            if event.round is None:
                self._timed.append(event)
            elif event.individual:
                for i in self._peers(event):
                    self._met.setdefault(i, []).append((event.round, event))
            else:
                self._by_round.setdefault(event.round, []).append(event)
        for events in self._met.values():
            events.sort(key=lambda item: item[0])
        self.restarts = any(isinstance(event, Restart) for event in federation.scenario.script)
        self._arrivals = sum(isinstance(event, Join | Restart) for event in self._timed)

    @property
    def awaits(self) -> bool:
        """Whether somebody is to come at some second, for whom the clock must go on."""
        return self._arrivals > 0

    def begin(self) -> None:
        """Plan what happens at some second."""
        for event in self._timed:
            self._federation.clock.at(event.second or 0.0, self._at_second, event)

    def reach(self, t: int) -> None:
        """Some peer begins round t: what concerns the network happens when the first one does."""
        while self._front < t:
            self._front += 1
            for event in self._by_round.get(self._front, ()):
                self._befall(event)

    def meet(self, peer: Member, t: int) -> bool:
        """A peer begins round t: what befalls it happens. Return whether it is still there."""
        events = self._met.get(peer.index)
        while events and events[0][0] <= t:
            _, event = events.pop(0)
            self._befall_peer(event, peer)
        return self._federation.world.alive[peer.index]

    def _at_second(self, event: Happening) -> None:
        self._befall(event)
        self._arrivals -= isinstance(event, Join | Restart)

    def _befall(self, event: Happening) -> None:
        federation = self._federation
        match event:
            case Partition():
                federation.world.part(event.sides(self._people, ()))
            case Heal():
                federation.world.heal()
            case Degrade():
                federation.conditions.degrade(
                    self._peers(event),
                    latency=event.latency,
                    bandwidth=event.bandwidth,
                    loss=event.loss,
                )
            case _:
                for i in self._peers(event):
                    self._befall_peer(event, federation.peers[i])

    def _befall_peer(self, event: Happening, peer: Member) -> None:
        federation = self._federation
        match event:
            case Kill() | Leave():
                federation.stop(peer, farewell=isinstance(event, Leave))
            case Restart() | Join():
                federation.start(peer)
            case Slow():
                peer.slowness = event.factor
            case Drift():
                federation.become(peer, cluster=event.cluster)
            case BecomeMalicious():
                federation.become(peer, attack=event.attack)

    def _peers(self, event: Happening) -> Sequence[int]:
        return select(getattr(event, "peers", ()), self._people, ())
