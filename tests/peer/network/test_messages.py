"""The decoder: whatever the bytes, a valid message or ProtocolError."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolError
from peer.network.messages import (
    MAX_HEADER,
    MAX_UPDATES,
    Assignment,
    Await,
    Enrol,
    Enrolled,
    Fetch,
    Message,
    Model,
    Parcel,
    PeerRecord,
    Ping,
    Pong,
    Pull,
    Reason,
    Refused,
    Report,
    State,
    Status,
    Task,
    Update,
    Work,
    decode,
    encode,
    fitting,
)

RECORD = PeerRecord(
    peer="0" * 32,
    index=1,
    control="tcp://127.0.0.1:7000",
    data="tcp://127.0.0.1:7001",
    incarnation=3,
    first_round=1,
    model="a" * 32,
)
UPDATE = Update(record=RECORD, state=State.SUSPECT, status=Status(finished=3, accuracy=0.5))
TASK = Task(work=Work.CHOOSE, round=2, version=1, draw=3)
MESSAGES: list[Message] = [
    Enrol(index=3, sender="b" * 32),
    Enrolled(index=0, toml="n = 2"),
    Ping(id=7, updates=(UPDATE, UPDATE), plan="c" * 32),
    Pong(updates=()),
    Pull(round=1, staleness=None, wait=0.5, gradient=True),
    Await(round=1, wait=3),
    Model(round=1, model_bytes=4, samples=1),
    Refused(reason=Reason.BUSY, detail="later"),
    Report(update=UPDATE, size=9, trainable=8, samples=1, done=TASK, choice=1, wait=0.5),
    Report(update=UPDATE, size=9, trainable=8, samples=1, fingerprint="0" * 16, failed=True),
    Assignment(data_port=7701, task=TASK.model_copy(update={"work": Work.TRAIN, "model": 5})),
    Assignment(data_port=1),
    Fetch(round=3, number=0),
    Parcel(round=3, number=0, size=0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


def packed(**changes: Any) -> bytes:
    fields = {**MESSAGES[4].model_dump(mode="json"), **changes}
    header: bytes = msgpack.packb(fields)
    return header


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": None},
        {"kind": "no-such-kind"},
        {"kind": ["pull"]},
        {"more": 1},
        {"id": -1},
        {"id": 2**32},
        {"id": True},
        {"id": "1"},
        {"sender": "x"},
        {"sender": "0" * 33},
        {"plan": "0" * 31},
        {"round": 10**9 + 1},
        {"round": 1.0},
        {"staleness": -1},
        {"wait": float("nan")},
        {"wait": float("inf")},
        {"wait": -0.1},
        {"gradient": 1},
        {"gradient": None},
    ],
    ids=str,
)
def test_field_out_of_range_is_an_error(changes: dict[str, Any]) -> None:
    assert isinstance(decode(packed()), Pull)
    with pytest.raises(ProtocolError):
        decode(packed(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"size": 2**40 + 1},
        {"trainable": 0},
        {"samples": -1},
        {"fingerprint": "0" * 15},
        {"fingerprint": "G" * 16},
        {"choice": -1},
        {"choice": 200_000},
        {"failed": 1},
        {"wait": 61},
        {"done": {}},
        {"done": {**TASK.model_dump(mode="json"), "work": "run"}},
        {"done": {**TASK.model_dump(mode="json"), "model": 1.5}},
        {"done": {**TASK.model_dump(mode="json"), "draw": 10_001}},
        {"done": {**TASK.model_dump(mode="json"), "code": "x"}},
        {"update": None},
    ],
    ids=str,
)
def test_report_out_of_range_is_an_error(changes: dict[str, Any]) -> None:
    report = next(message for message in MESSAGES if isinstance(message, Report))
    fields = report.model_dump(mode="json")
    assert decode(msgpack.packb(fields)) == report
    with pytest.raises(ProtocolError):
        decode(msgpack.packb({**fields, **changes}))


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/x",
        "tcp://a",
        "tcp://:1",
        "tcp://a b:1",
        "tcp://ä:1",
        "tcp://a:1\n",
        "tcp://a@b:1",
    ],
)
def test_address_that_is_none_is_an_error(address: str) -> None:
    fields = Ping(updates=(UPDATE,)).model_dump(mode="json")
    fields["updates"][0]["record"]["control"] = address
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(fields))


def test_sizes_are_bounded_before_decoding() -> None:
    with pytest.raises(ProtocolError, match="header of"):
        decode(bytes(MAX_HEADER + 1))
    with pytest.raises(ProtocolError):
        decode(packed(more=1)[:-1] + b"\x91" * 2000 + b"\xc0")
    with pytest.raises(ProtocolError):
        decode(b"\xdc\xff\xff" + b"\x80" * 60_000)
    many = Ping(updates=()).model_dump(mode="json")
    many["updates"] = [UPDATE.model_dump(mode="json")] * (MAX_UPDATES + 1)
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(many))


def test_longest_updates_fit_one_header() -> None:
    longest = Update(
        record=RECORD.model_copy(
            update={
                "control": f"tcp://{'a' * 253}:65535",
                "data": f"tcp://{'b' * 253}:65535",
                "index": 99_999,
                "incarnation": 2**53 - 1,
                "first_round": 10**9,
            }
        ),
        state=State.SUSPECT,
        status=Status(published=10**9, finished=10**9, done=True, accuracy=1 / 3),
    )
    chosen = fitting([longest] * 500)
    assert 60 < len(chosen) < MAX_UPDATES
    assert len(encode(Ping(updates=chosen, sender="b" * 32, plan="c" * 32))) <= MAX_HEADER
    assert len(fitting([UPDATE] * 500)) == MAX_UPDATES
    assert fitting([UPDATE] * 3) == (UPDATE,) * 3


@given(st.binary(max_size=500))
def test_any_bytes(header: bytes) -> None:
    only_protocol_errors(header)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
TREES = st.recursive(
    LEAVES | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_any_field_replaced(message: Message, data: st.DataObject) -> None:
    fields = message.model_dump(mode="json")
    fields[data.draw(st.sampled_from([*fields, "more"]))] = data.draw(TREES)
    only_protocol_errors(msgpack.packb(fields))


@given(st.sampled_from(MESSAGES), st.data())
def test_any_bytes_changed(message: Message, data: st.DataObject) -> None:
    header = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    only_protocol_errors(bytes(header[: data.draw(st.integers(0, len(header)))]))
    only_protocol_errors(bytes(header) + data.draw(st.binary(max_size=3)))


def only_protocol_errors(header: bytes) -> None:
    try:
        message = decode(header)
    except ProtocolError as error:
        assert len(str(error)) < 200
    else:
        assert decode(encode(message)) == message
