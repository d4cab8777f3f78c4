"""Log lines and views: what a person, or a program that reads logs, gets to see."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator, Sequence

import pytest

from peer.display import (
    FederationView,
    PeerView,
    RoundLog,
    configure_logging,
    human_bytes,
    log_fields,
    round_line,
)
from peer.plan import Plan
from peer.rundir import MetricRow

PLAN = Plan(n=2, rounds=3, name="house")
ROW = MetricRow(
    t=2, index=1, cluster=1, accuracy=0.8125, bag_size=3, precision=1.0,
    wire_sent=1234, wire_received=56_000_000,
)  # fmt: skip


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger; the root logger is put back as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("peer.test")
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_json_line_has_its_fields_and_those_of_its_task(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", stream=stream)

    async def one(index: int) -> None:
        with log_fields(peer="ab", index=index):
            await asyncio.sleep(0)
            logger.warning("heard of %d peers", 3, extra={"t": 7})

    async def both() -> None:
        await asyncio.gather(one(0), one(1))

    asyncio.run(both())
    logger.info("done")
    first, second, last = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["index"], second["index"]) == (0, 1)
    assert first | {"time": ""} == {
        "time": "",
        "level": "warning",
        "logger": "peer.test",
        "message": "heard of 3 peers",
        "peer": "ab",
        "index": 0,
        "t": 7,
    }
    assert first["time"].endswith("+00:00")
    assert "index" not in last


def test_a_json_line_tells_of_the_exception(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", stream=stream)
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_a_text_line_ends_with_its_fields(logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("text", stream=stream)
    logger.info("joined", extra={"index": 4})
    assert stream.getvalue().endswith("INFO    joined  index=4\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9951, "10 kB"),
     (999_499, "999 kB"), (999_501, "1.0 MB"), (2.5e12, "2.5 TB")],
)  # fmt: skip
def test_bytes_are_written_for_people(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_a_peer_on_a_terminal_is_one_line() -> None:
    stream = Terminal()
    with PeerView(stream=stream) as view:
        view.update(PLAN, ROW)
    for part in ("peer 1", "round 2/3", "81.2 %", "bag 3", "precision 1.00", "1.2 kB", "56 MB"):
        assert part in round_line(PLAN, ROW)
    assert "peer 1  round 2/3" in stream.getvalue()


@pytest.mark.parametrize(
    ("rounds", "seconds", "told"),
    [
        (3, 0.1, [1, 2, 3]),
        (25, 0.1, [*range(2, 25, 2), 25]),
        (1000, 1.0, range(10, 1001, 10)),
        (100, 12.0, range(1, 101)),
    ],
)
def test_a_service_tells_of_some_rounds(
    rounds: int, seconds: float, told: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan(n=2, rounds=rounds)
    now = 0.0
    rounds_log = RoundLog(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        for t in range(1, rounds + 1):
            now = t * seconds
            rounds_log.update(plan, ROW.model_copy(update={"t": t}))
    found = [int(line.partition("round ")[2].partition("/")[0]) for line in caplog.messages]
    assert found == list(told)


def test_a_federation_without_a_terminal_prints_its_start_and_end() -> None:
    stream = io.StringIO()
    with FederationView(PLAN, stream=stream) as view:
        view.update(ROW)
        view.update(ROW.model_copy(update={"index": 0, "t": 3, "accuracy": 0.9}))
    start, end = stream.getvalue().splitlines()
    assert start == "starting 2 peers: panm-grad on digits, 3 rounds"
    assert end == "1 of 2 peers finished: accuracy 85.6 %, precision 1.00, 2.5 kB sent"


def test_a_terminal_gets_a_table_of_all_peers() -> None:
    stream = Terminal()
    with FederationView(PLAN, stream=stream) as view:
        view.update(ROW)
        view.state(0, "killed")
    text = stream.getvalue()
    for part in ("accuracy", "precision", "81.2 %", "killed", "56 MB"):
        assert part in text
