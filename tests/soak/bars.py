"""The bars that membership must clear, each measured on real processes that are really killed."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from ground import START, Ground, partition, seconds_until

from peer.rundir import MetricRow
from simulations.processes import Worker

PATIENCE = 120.0
"""Seconds after which what has not happened never will."""


@dataclass(frozen=True)
class Outcome:
    """What a bar asks for, what was measured, and whether that is enough: None where nothing was
    measured, which is not enough either."""

    bar: str
    limit: str
    measured: str
    met: bool | None


Bar = Callable[[Path, float], list[Outcome]]
"""Measures in a directory, for about so many minutes where the bar has any say in that."""


def within(bar: str, seconds: float, limit: float) -> Outcome:
    """Return the outcome of a bar that a time must clear."""
    return Outcome(bar, f"{limit:g} s", f"{seconds:.1f} s", seconds <= limit)


def start(directory: Path, minutes: float) -> list[Outcome]:
    """20 peers started at once are one component."""
    with Ground(directory, 20) as ground:
        took = seconds_until(lambda: ground.united(range(20)), START)
    return [Outcome("20 started at once", "one component", f"{took:.0f} s", took < START)]


def _noticed(ground: Ground, victim: int, since: float) -> list[float]:
    """Return the seconds after which each of the others declared a peer dead."""
    others = [number for number in range(ground.n) if number != victim]

    def times(number: int) -> list[float]:
        return [seconds for index, seconds in ground.deaths(number, since) if index == victim]

    seconds_until(lambda: all(map(times, others)), PATIENCE)
    return [min(times(number), default=float("inf")) for number in others]


def failures(directory: Path, minutes: float) -> list[Outcome]:
    """One of 10 that is killed, stopped or blocked is noticed; at a new port it is back soon."""
    misfortunes: dict[str, Callable[[Worker], None]] = {
        "kill -9": Worker.kill,
        "stopped": lambda worker: worker.send(signal.SIGSTOP),
        "loop blocked": lambda worker: worker.send(signal.SIGUSR1),
    }
    outcomes = []
    with Ground(directory, 10) as ground:
        assert seconds_until(lambda: ground.united(range(10)), START) < START
        for victim, (name, strike) in enumerate(misfortunes.items(), start=1):
            since = time.time()
            strike(ground.peers[victim])
            noticed = _noticed(ground, victim, since)
            median, most = statistics.median(noticed), max(noticed)
            told = f"{median:.1f} s, {most:.1f} s"
            met = median <= 10 and most <= 25
            outcomes.append(Outcome(f"1 of 10 {name}: noticed", "10 s median, 25 s", told, met))
            ground.peers[victim].kill()
            outcomes.append(_comes_back(ground, victim))
    return outcomes


def _comes_back(ground: Ground, number: int) -> Outcome:
    """Start a peer again at another port; it is back when all know it.

    How long its process takes to start, until its first health file, is the machine's affair, and
    told apart.
    """
    killed = time.time()
    ground.restart_elsewhere(number)
    started = seconds_until(lambda: ground.health(number).get("time", 0.0) > killed, PATIENCE)
    up = time.time()
    took = seconds_until(lambda: ground.united(range(ground.n), up), PATIENCE)
    return Outcome(
        "  started again at a new port: known to all",
        "15 s from its first health file",
        f"{took:.1f} s (its start took {started:.1f} s)",
        took <= 15,
    )


@contextmanager
def _pinned(victim: Worker) -> Iterator[None]:
    """Let a peer share one core with three processes that do nothing but compute."""
    assert victim.process is not None
    psutil.Process(victim.process.pid).cpu_affinity([0])
    with ExitStack() as stack:
        for number in range(3):
            burner = Worker(
                name=f"burner {number}",
                command=[sys.executable, "-c", "while True: pass"],
                directory=victim.directory.with_name(f"burner-{number}"),
            )
            burner.start()
            stack.callback(burner.kill)
            assert burner.process is not None
            psutil.Process(burner.process.pid).cpu_affinity([0])
        yield


def healthy(directory: Path, minutes: float) -> list[Outcome]:
    """Nobody is declared dead who lives, though one peer hardly gets the processor."""
    with Ground(directory, 10) as ground:
        assert seconds_until(lambda: ground.united(range(10)), START) < START
        since = time.time()
        with _pinned(ground.peers[0]):
            time.sleep(60 * minutes)
        ended = time.time()
        alive = seconds_until(lambda: ground.united(range(10), ended), PATIENCE) < PATIENCE
        false = [death for number in range(10) for death in ground.deaths(number, since)]
    bar = f"{minutes:g} healthy minutes of 10, one's core pinned: false deaths"
    return [Outcome(bar, "0", str(len(false)), alive and not false)]


def losses(directory: Path, minutes: float) -> list[Outcome]:
    """Without the bootstrap node rounds go on and peers still meet; half of 20 may die."""
    everyone, survivors = range(20), range(0, 20, 2)
    with Ground(directory, 20) as ground:
        assert seconds_until(lambda: ground.united(everyone), START) < START
        ground.bootstrap.kill()
        before = [ground.finished(number) for number in everyone]
        went_on = seconds_until(
            lambda: all(ground.finished(i) >= before[i] + 3 for i in everyone), PATIENCE
        )
        told = f"{went_on:.1f} s"
        rounds = Outcome("bootstrap node killed", "3 more rounds", told, went_on < PATIENCE)
        for number in (1, 2):
            ground.peers[number].kill()
        back = time.time()
        for number in (1, 2):
            ground.restart_elsewhere(number)
        met = seconds_until(lambda: ground.united(everyone, back), PATIENCE)
        meeting = Outcome(
            "  two that start again at new ports meet", "they do", f"{met:.1f} s", met < PATIENCE
        )
        since = time.time()
        for number in set(everyone) - set(survivors):
            ground.peers[number].kill()
        took = seconds_until(lambda: ground.united(survivors, since), PATIENCE)
    return [rounds, meeting, within("half of 20 killed: survivors one component", took, 30)]


def split(directory: Path, minutes: float) -> list[Outcome]:
    """Two halves that were cut off from each other are one component again soon."""
    cut_for = min(5.0, minutes)
    bar = f"{cut_for:g} minutes of a 50/50 partition: one component again"
    if os.geteuid() != 0:
        return [Outcome(bar, "60 s", "nothing: namespaces need root", None)]
    halves = range(0, 10, 2), range(1, 10, 2)
    with partition() as cable, Ground(directory, 10, cable.sides) as ground:
        assert seconds_until(lambda: ground.united(range(10)), START) < START
        # The harder case: nobody is left at whom the halves could meet.
        ground.bootstrap.kill()
        cable.cut()
        apart = seconds_until(lambda: all(map(ground.united, halves)), PATIENCE)
        assert apart < PATIENCE, "the halves never noticed"
        time.sleep(max(0.0, 60 * cut_for - apart))
        healed = time.time()
        cable.heal()
        took = seconds_until(lambda: ground.united(range(10), healed), PATIENCE)
    return [within(bar, took, 60)]


CHURN = 2
"""Peers of 20 that are killed a minute: a tenth."""
SPARED = range(5)
"""Those that live from the first to the last minute, and would show a leak."""
LEAST = 1.0
"""Exchanges a second of each of 20 that make a measurement: a sixth of what idle cores allow."""


def exchanged(rows: Collection[MetricRow], minutes: float) -> Outcome:
    """Return how many exchanges succeeded in so many minutes of 20 peers."""
    exchanges, missing = sum(row.exchanges for row in rows), sum(row.missing for row in rows)
    share, least = 1 - missing / max(1, exchanges), round(LEAST * 20 * 60 * minutes)
    return Outcome(
        f"{minutes:g} minutes of 20 peers, 10 % churn a minute: exchanges that succeed",
        f"95 % of at least {least}",
        f"{share:.1%} of {exchanges}",
        share >= 0.95 and exchanges >= least,
    )


def churn(directory: Path, minutes: float) -> list[Outcome]:
    """20 peers, of which a tenth is killed and comes back every minute."""
    rng = random.Random(0)
    with Ground(directory, 20) as ground:
        assert seconds_until(lambda: ground.united(range(20)), START) < START
        began, down = time.time(), dict[int, float]()
        settling = min(5.0, minutes / 2)
        due, settled = began, began + 60 * settling
        first: list[dict[str, float]] = []
        while (now := time.time()) < began + 60 * minutes:
            if now >= due:
                due += 60 / CHURN
                alive = [i for i in range(20) if i not in SPARED and i not in down]
                victim = rng.choice(alive)
                ground.peers[victim].kill()
                down[victim] = now + rng.uniform(5, 25)
            for number in [i for i, back in down.items() if now >= back]:
                del down[number]
                ground.restart_elsewhere(number)
            if not first and now >= settled:
                first = [ground.health(number) for number in SPARED]
            time.sleep(0.2)
        ended = time.time()
        last = [ground.health(number) for number in SPARED]
        assert min(said["time"] for said in last) > ended - 60, "one that was spared is silent"
        rows = [row for number in range(20) for row in ground.rows(number, began, ended)]
    outcomes = [exchanged(rows, minutes)]
    for what, unit, slack in (("tasks", 1, 15), ("open_files", 1, 15), ("memory", 2**20, 8)):
        before, after = (
            statistics.fmean(said[what] for said in them) / unit for them in (first, last)
        )
        shown = f"{before:.0f}, then {after:.0f}" + (" MB" if what == "memory" else "")
        moments = f"at minute {settling:g} and at the end"
        bar = f"  {what.replace('_', ' ')} of those never killed, {moments}"
        outcomes.append(Outcome(bar, f"no more than {slack} more", shown, after <= before + slack))
    return outcomes


BARS: dict[str, Bar] = {
    "start": start,
    "failures": failures,
    "healthy": healthy,
    "losses": losses,
    "split": split,
    "churn": churn,
}
