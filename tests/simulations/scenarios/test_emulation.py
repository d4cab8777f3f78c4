"""Emulated links in a loop whose time is virtual, against the virtual network's wire."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.scenarios.clock import Clock
from simulations.scenarios.emulation import Aspect, EmulatedLinks
from simulations.scenarios.scenario import Scenario
from simulations.scenarios.wire import Wire

N = 4
ALL = frozenset(Aspect)


class _NoSelector(selectors.SelectSelector):
    """Waits for nothing, and says for how long it would have."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.passed += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping costs no time."""

    def __init__(self) -> None:
        self._still = _NoSelector()
        super().__init__(self._still)

    def time(self) -> float:
        return self._still.passed


def live(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def make_scenario(**tables: Any) -> Scenario:
    return Scenario.model_validate({"plan": {"n": N, "method": "random"}, **tables})


def emulate(scenario: Scenario, aspects: frozenset[Aspect] = ALL) -> list[EmulatedLinks]:
    """Return the links of every peer; a peer's id is its index."""
    conditions = scenario.conditions()
    made = [EmulatedLinks(i, conditions, aspects) for i in range(N)]
    for links in made:
        links.introduce(lambda who: int(who) if who.isdecimal() else None)
    return made


Message = tuple[int, int, int, int]
"""When it is sent (in ticks), from whom, how far round to whom, bytes."""
TICK = math.pi / 64
"""Seconds. No sum of ticks, stalls and transfers is another: which of two that arrive at the same
time is first, only rounding would say."""

MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, N - 1), st.integers(1, N - 1), st.integers(0, 99_999)
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda own: own[0],
)
NETWORKS = [
    {"links": {"latency": 0.1, "bandwidth": 1}},
    {
        "links": {"latency": {"uniform": [0.01, 0.5]}, "jitter": {"uniform": [0, 0.2]}},
        "peers": {"upload": 0.5, "classes": [{"name": "fast", "peers": [0], "download": 4}]},
    },
    {"links": {"latency": 0.05, "bandwidth": 2, "loss": 0.1}},
]


@pytest.mark.parametrize("tables", NETWORKS)
@given(messages=MESSAGES)
@settings(max_examples=40, deadline=None)
def test_messages_take_as_long_as_on_the_virtual_network(
    tables: dict[str, Any], messages: list[Message]
) -> None:
    scenario = make_scenario(**tables)
    expected, found = [0.0] * len(messages), [0.0] * len(messages)
    clock = Clock()
    wire = Wire(clock, scenario.conditions(), N, scenario.plan.seed)

    def note(number: int) -> None:
        expected[number] = clock.now

    for number, (when, i, way, size) in enumerate(messages):
        clock.at(when * TICK, wire.carry, i, (i + way) % N, size, note, number)
    while clock.step():
        pass

    async def travel(links: list[EmulatedLinks], number: int, message: Message) -> None:
        when, i, way, size = message
        j = (i + way) % N
        await asyncio.sleep(when * TICK)
        assert await links[i].leave(str(j), size)
        assert await links[j].arrive(str(i), size)
        found[number] = asyncio.get_running_loop().time()

    async def all_travel() -> None:
        links = emulate(scenario)
        await asyncio.gather(*(travel(links, *item) for item in enumerate(messages)))

    live(all_travel())
    # Without payload nothing queues here, while the wire lets it wait its turn.
    both = zip(messages, found, expected, strict=True)
    assert [f for m, f, _ in both if m[3]] == pytest.approx(
        [e for m, e in zip(messages, expected, strict=True) if m[3]], abs=1e-6
    )


def test_a_partition_loses_what_is_sent_and_what_is_under_way() -> None:
    scenario = make_scenario(links={"latency": 1.0, "bandwidth": 8})

    async def check() -> None:
        links = emulate(scenario)
        under_way = asyncio.create_task(links[0].leave("1", 0))
        arriving = asyncio.create_task(links[2].arrive("0", 1_000_000))
        within = asyncio.create_task(links[0].leave("3", 0))
        await asyncio.sleep(0.5)
        for own in links:
            own.sides = (0, 1, 1, 0)
        started = asyncio.get_running_loop().time()
        assert not await links[0].leave("2", 0)
        assert asyncio.get_running_loop().time() == started
        assert [await under_way, await arriving, await within] == [False, False, True]
        # Whoever is no peer, the bootstrap node, is where peer 0 is.
        assert await links[3].leave("bootstrap", 0)
        assert not await links[1].leave("bootstrap", 0)
        for own in links:
            own.sides = (0,) * N
        assert await links[0].leave("2", 0)

    live(check())


def test_what_others_see_to_is_not_emulated() -> None:
    scenario = make_scenario(links={"latency": 1.0, "bandwidth": 8})

    async def check() -> None:
        loop = asyncio.get_running_loop()
        (sender, receiver, *_) = emulate(scenario, frozenset({Aspect.LATENCY}))
        sender.sides = (0, 1, 1, 1)
        assert await sender.leave("1", 1_000_000)
        assert await receiver.arrive("0", 1_000_000)
        assert loop.time() == pytest.approx(1.0)

    live(check())
