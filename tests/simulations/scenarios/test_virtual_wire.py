"""The virtual clock and wire: exact times, and what holds whatever the traffic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.scenarios.clock import Clock
from simulations.scenarios.links import Conditions, Link, Links, stall
from simulations.scenarios.tables import Distribution, Population
from simulations.scenarios.wire import Wire

LIMITLESS = [math.inf] * 4


def make_wire(
    links: dict[str, Any], up: list[float] = LIMITLESS, down: list[float] = LIMITLESS
) -> tuple[Clock, Wire]:
    clock = Clock()
    people = Population(4, [0] * 4, ["usual", "usual", "phone", "phone"])
    conditions = Conditions(Links.model_validate(links), people, up, down, seed=1)
    return clock, Wire(clock, conditions, 4, seed=1)


def arrivals(clock: Clock) -> tuple[dict[str, float], Any]:
    """Return where arrivals are noted, and what notes one."""
    seen: dict[str, float] = {}

    def note(name: str) -> None:
        seen[name] = clock.now

    return seen, note


def run(clock: Clock) -> None:
    while clock.step():
        pass


def test_events_come_by_time_and_then_as_they_were_planned() -> None:
    clock, told = Clock(), []
    for name, time in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.at(time, told.append, name)
    run(clock)
    assert (told, clock.now, clock.events) == (["a", "b", "c", "d"], 2.0, 4)
    for past in (1.9, math.nan):
        with pytest.raises(ValueError, match="is before"):
            clock.at(past, told.append, "e")


def test_a_message_takes_latency_and_bytes_over_bandwidth_once() -> None:
    # 8 Mbit/s are 1,000,000 bytes a second; equal ends overlap but for the latency.
    clock, wire = make_wire({"latency": 0.25, "bandwidth": 8})
    seen, note = arrivals(clock)
    wire.carry(0, 1, 500_000, note, "model")
    wire.tell(0, 1, note, "request")
    run(clock)
    assert seen == {"request": 0.25, "model": 0.75}


def test_the_slower_end_counts() -> None:
    fast, slow = 4e6, 1e6
    for up, down in ((fast, slow), (slow, fast)):
        clock, wire = make_wire({"latency": 0.5}, [up] * 4, [down] * 4)
        seen, note = arrivals(clock)
        wire.carry(0, 1, 2_000_000, note, "model")
        run(clock)
        assert seen == {"model": 2.5}


def test_a_sender_carries_one_message_at_a_time() -> None:
    clock, wire = make_wire({"latency": 0.1, "bandwidth": 8})
    seen, note = arrivals(clock)
    for j in (1, 2, 3):
        wire.carry(0, j, 1_000_000, note, f"to {j}")
    run(clock)
    assert seen == pytest.approx({"to 1": 1.1, "to 2": 2.1, "to 3": 3.1})
    assert wire.up[0].busy == pytest.approx(3.0)


def test_a_receiver_takes_one_message_at_a_time_by_their_coming() -> None:
    # Sent first over the longer link, it comes second and waits for the other to be through.
    links = {"latency": 0.1, "bandwidth": 8, "between": [{"edge": [1, 0], "latency": 0.4}]}
    clock, wire = make_wire(links)
    seen, note = arrivals(clock)
    wire.carry(1, 0, 1_000_000, note, "far")
    wire.carry(2, 0, 1_000_000, note, "near")
    run(clock)
    assert seen == pytest.approx({"near": 1.1, "far": 2.1})


def test_an_idle_moment_at_the_receiver_is_not_made_up() -> None:
    clock, wire = make_wire({"latency": 0.0}, [1e6] * 4, [2e6] * 4)
    seen, note = arrivals(clock)
    wire.carry(0, 1, 1_000_000, note, "a")
    wire.carry(0, 1, 1_000_000, note, "b")
    run(clock)
    assert seen == {"a": 1.0, "b": 2.0}


def test_links_of_classes_and_edges_and_degraded_ones() -> None:
    links = {
        "latency": 0.1,
        "bandwidth": 8,
        "between": [
            {"classes": ["phone", "usual"], "latency": 0.3},
            {"edge": [3, 1], "latency": 0.5, "bandwidth": 4},
        ],
    }
    people = Population(4, [0] * 4, ["usual", "usual", "phone", "phone"])
    conditions = Conditions(Links.model_validate(links), people, LIMITLESS, LIMITLESS, 0)
    assert [conditions.link(0, j).latency for j in (1, 2, 3)] == [0.1, 0.3, 0.3]
    assert conditions.link(1, 3)[::2] == (0.5, 5e5, 0.0)
    conditions.degrade([1], latency=3.0, bandwidth=0.5, loss=None)
    assert conditions.link(3, 1).latency == 1.5
    assert conditions.link(1, 0).up == 5e5
    conditions.degrade([1], latency=1.0, bandwidth=1.0, loss=None)
    assert conditions.link(1, 3)[::2] == (0.5, 5e5, 0.0)


def test_latencies_are_drawn_once_for_each_link_and_as_told() -> None:
    people = Population(300, [0] * 300, ["usual"] * 300)
    links = Links.model_validate({"latency": {"uniform": [0.1, 0.3]}})
    rates = [math.inf] * 300
    one, two = (Conditions(links, people, rates, rates, seed=7) for _ in range(2))
    drawn = [one.link(i, i + 1).latency for i in range(299)]
    assert drawn == [two.link(i + 1, i).latency for i in reversed(range(299))][::-1]
    assert 0.1 <= min(drawn) < 0.11
    assert 0.29 < max(drawn) <= 0.3
    assert np.mean(drawn) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("distribution", "u", "value"),
    [
        (Distribution("constant", 2.0), 0.9, 2.0),
        (Distribution("uniform", 1.0, 3.0), 0.25, 1.5),
        (Distribution("normal", 1.0, 0.5), 0.5, 1.0),
        (Distribution("normal", 1.0, 0.5), 0.8413447460685429, 1.5),
        (Distribution("normal", 1.0, 2.0), 0.01, 0.0),
        (Distribution("lognormal", 2.0, 0.5), 0.5, 2.0),
        (Distribution("lognormal", 2.0, 0.5), 0.8413447460685429, 2.0 * math.exp(0.5)),
    ],
)
def test_quantiles(distribution: Distribution, u: float, value: float) -> None:
    assert float(distribution.quantiles(u)) == pytest.approx(value)


def test_loss_is_felt_as_stalls_and_as_less_throughput() -> None:
    link = Link(0.05, Distribution("constant", 0.0), math.inf, math.inf, 0.25)
    rng = np.random.default_rng(0)
    stalls = np.array([stall(link, rng) for _ in range(20_000)])
    # A time-out is 0.2 s, doubled by each repeat: 0, 0.2, 0.6, 1.4, ... of falling chance.
    assert set(np.round(np.unique(stalls), 9)) <= {0.0, 0.2, 0.6, 1.4, 3.0, 6.2, 12.6}
    assert np.mean(stalls == 0) == pytest.approx(0.75, abs=0.01)
    assert np.mean(np.isclose(stalls, 0.2)) == pytest.approx(0.75 * 0.25, abs=0.01)
    people = Population(2, [0, 0], ["usual"] * 2)
    lossy = Links.model_validate({"latency": 0.05, "loss": 0.01})
    found = Conditions(lossy, people, LIMITLESS, LIMITLESS, 0).link(0, 1)
    assert found.up == pytest.approx(1460 / 0.1 * math.sqrt(1.5) / 0.1)


messages = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.integers(1, 10**6), st.floats(0, 5)
    ).filter(lambda m: m[0] != m[1]),
    min_size=1,
    max_size=40,
)  # fmt: skip


@given(messages, st.floats(0, 2), st.floats(0.1, 100), st.floats(0, 0.3))
def test_whatever_is_sent(
    sent: list[tuple[int, int, int, float]], latency: float, bandwidth: float, loss: float
) -> None:
    """Time never goes back, nothing arrives before it can, nothing is lost or doubled, and no
    connection carries more than its bandwidth."""
    clock, wire = make_wire({"latency": latency, "bandwidth": bandwidth, "loss": loss})
    rate = bandwidth * 125_000
    got: list[tuple[int, float]] = []
    for number, (i, j, size, when) in enumerate(sent):
        clock.at(
            when, wire.carry, i, j, size, lambda number: got.append((number, clock.now)), number
        )
    before = 0.0
    while clock.step():
        assert clock.now >= before
        before = clock.now
    assert sorted(number for number, _ in got) == list(range(len(sent)))
    for number, time in got:
        _, _, size, when = sent[number]
        assert time >= when + latency + size / rate - 1e-9
    for end in range(4):
        for side in (0, 1):
            own = [(time, sent[number]) for number, time in got if sent[number][side] == end]
            if own:
                first = min(when for _, (_, _, _, when) in own)
                busy = sum(size for _, (_, _, size, _) in own) / rate
                assert max(time for time, _ in own) >= first + busy - 1e-9
