"""A peer of a scenario as a process of its own: a real peer in the surroundings of its scenario.

`python -m simulations.scenarios.actor` is started by `simulations.scenarios.real` alone. Its
standard input and output are its line to the director (see `simulations.scenarios.cues`), a socket
or what a container has in its place; when the input ends, so does the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.command import end_on_signal, run_command
from peer.display import RoundLog, configure_logging
from peer.errors import first_failure
from peer.learning.build import prepare
from peer.learning.learner import Learner, Manifest, Scores, Vector
from peer.memory import return_freed_memory, torch_without_tracing
from peer.node import Peer
from peer.plan import Plan
from peer.rundir import write_json
from peer.settings import PeerSettings
from peer.state import MODEL_CARD
from peer.surroundings import Surroundings
from simulations.scenarios.cues import Begin, Go, Network, Word
from simulations.scenarios.devices import forged, poison_of
from simulations.scenarios.emulation import Aspect, EmulatedLinks
from simulations.scenarios.links import Conditions
from simulations.scenarios.scenario import Scenario, load


class DirectorLine:
    """The peer's end of the line to its director; `go` is what the last round was begun with."""

    def __init__(self, links: EmulatedLinks, conditions: Conditions) -> None:
        self.go: Go | None = None
        self._links = links
        self._conditions = conditions
        self._answer: Future[Go] = Future()

    async def listen(self) -> None:
        """Follow the director; when it is gone the process ends as after SIGTERM."""
        reader = asyncio.StreamReader()
        input_, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        with closing(input_):
            while text := await reader.readline():
                word = Word.model_validate_json(text)
                if word.network is not None:
                    self._enter(word.network)
                if word.go is not None:
                    self._answer.set_result(word.go)
        signal.raise_signal(signal.SIGTERM)

    def begin(self, begin: Begin) -> Go:
        """Tell the director which round begins, and return its word; called off the event loop."""
        self._answer = Future()
        with suppress(OSError):  # a director that is gone is found out by the end of the input
            os.write(sys.stdout.fileno(), begin.model_dump_json().encode() + b"\n")
        self.go = self._answer.result()
        return self.go

    def _enter(self, network: Network) -> None:
        self._links.sides = network.sides
        for worse in network.degraded:
            self._conditions.degrade(
                worse.peers, latency=worse.latency, bandwidth=worse.bandwidth, loss=worse.loss
            )


class DirectedLearner:
    """A learner that begins each round on the director's word, with the data that it then has, and
    takes as long as the scenario's device would, or longer where this machine is slower."""

    def __init__(self, scenario: Scenario, index: int, line: DirectorLine, state: Path) -> None:
        self._plan: Plan = scenario.plan
        self._index = index
        self._device = scenario.equipment[index]
        self._line = line
        self._begin = Begin(t=0)
        self._role = (scenario.plan.cluster_of(index), self._device.attack)
        self._state = state
        self._learner = self._make()

    def _make(self) -> Learner:
        cluster, attack = self._role
        with torch_without_tracing():
            learner, card = prepare(
                self._plan,
                self._index,
                poison=poison_of(attack, self._plan, self._index),
                cluster=cluster,
                part=self._device.data,
            )
        write_json(self._state / MODEL_CARD, asdict(card))
        return learner

    @property
    def manifest(self) -> Manifest:
        """The layout of the model."""
        return self._learner.manifest

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return self._learner.samples

    def initial(self) -> Vector:
        """Return w_0 [e]."""
        return self._learner.initial()

    def fit(self, model: Vector, t: int) -> Vector:
        """Return w^{t-1/2} [e] when the device would have it."""
        if t > self._begin.t:  # a training that diverged is done again
            self._begin = self._begin.model_copy(update={"t": t})
            go = self._line.begin(self._begin)
            if (go.cluster, go.attack) != self._role:
                self._role = (go.cluster, go.attack)
                self._learner = self._make()
        began = time.monotonic()
        after = self._learner.fit(model, t)
        seconds, samples = time.monotonic() - began, self._plan.training.epochs * self.samples
        self._begin = Begin(t=t, samples=samples, seconds=seconds)
        assert self._line.go is not None
        due = samples / self._device.speed * self._line.go.slowness
        time.sleep(max(0.0, due - seconds))
        return after

    def train_losses(self, models: list[Vector], t: int) -> list[float]:
        """Return F_i of each model."""
        return self._learner.train_losses(models, t)

    def held_losses(self, models: list[Vector]) -> list[float]:
        """Return each model's mean loss on the samples that are held out for the gate."""
        return self._learner.held_losses(models)

    def evaluate(self, model: Vector) -> Scores:
        """Return the scores of `model` on the test set that the peer has now."""
        return self._learner.evaluate(model)

    def predict(self, model: Vector, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input."""
        return self._learner.predict(model, inputs)


async def act(scenario: Scenario, settings: PeerSettings, aspects: frozenset[Aspect]) -> None:
    """Run the peer `settings.index` of a scenario to its last round."""
    plan, index = scenario.plan, settings.index
    assert index is not None
    conditions = scenario.conditions()
    links = EmulatedLinks(index, conditions, aspects)
    line = DirectorLine(links, conditions)

    def forge(t: int, before: Vector, after: Vector) -> Vector:
        attack = None if line.go is None else line.go.attack
        return forged(attack, plan, index, t, before=before, trained=after)

    neighbours = frozenset(scenario.graph.neighbors(index))
    peer = Peer(
        settings,
        make_learner=lambda *_: DirectedLearner(scenario, index, line, settings.state),
        on_round=RoundLog().update,
        traces=False,
        surroundings=Surroundings(
            reach=neighbours,
            quorum=1 + len(neighbours - scenario.absent),
            shaper=links,
            forge=forge,
        ),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(line.listen(), name="listen-to-director")
            await peer.run()
            listening.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


def main() -> None:
    """Run one peer of a scenario."""
    parser = argparse.ArgumentParser(description="One peer of a scenario; started by simulate.")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--scenario", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--advertise")
    parser.add_argument("--emulate", default="")
    given = parser.parse_args()
    configure_logging()
    return_freed_memory()
    settings = PeerSettings.gather(
        config=None,
        bootstrap=[given.bootstrap],
        index=given.index,
        state=given.state,
        listen=given.listen,
        advertise=given.advertise,
        insecure=True,
    )
    aspects = frozenset(Aspect(name) for name in given.emulate.split(",") if name)
    end_on_signal(act(load(given.scenario), settings, aspects))


if __name__ == "__main__":
    run_command(main)
