"""The reader of plain pickles: what it reads, and that it runs nothing."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.learning.plain_pickle import RefusedPickleError, read_plain_pickle


def python_2_batch(images: bytes, rows: int, columns: int, labels: list[int]) -> bytes:
    """Return what Python 2's cPickle, protocol 2, writes for {data: uint8 array, labels: list}."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    dtype = (
        b"cnumpy\ndtype\nq\x06" + text(b"u1") + b"K\x00K\x01\x87Rq\x07"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02"
        b"cnumpy\nndarray\nq\x03K\x00\x85" + text(b"b") + b"\x87Rq\x05"
        b"(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
        + dtype + b"\x89T" + struct.pack("<i", len(images)) + images + b"tb"
    )  # fmt: skip
    numbers = b"]q\x09(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return (
        b"\x80\x02}q\x01(" + text(b"data") + array + text(b"labels") + numbers
        + text(b"batch_label") + text(b"training batch 1 of 5") + b"u."
    )  # fmt: skip


def test_what_python_2_wrote() -> None:
    images = bytes(range(256)) * 2
    data = python_2_batch(images, 2, 256, [3, 9])
    expected = pickle.loads(data, encoding="latin1")
    got = read_plain_pickle(data)
    assert got["labels"] == expected["labels"] == [3, 9]
    assert got["batch_label"] == expected["batch_label"]
    np.testing.assert_array_equal(got["data"], expected["data"])
    assert got["data"].tobytes() == images


@pytest.mark.parametrize("protocol", [2, 3])
def test_what_python_3_writes(protocol: int) -> None:
    value: dict[Any, Any] = {
        b"data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        b"labels": [1, 0, 70_000],
        "mixed": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), None, True, False, -5, 1.5, 2**40],
        "nested": {"a": {}, "b": [[]]},
    }
    got = read_plain_pickle(pickle.dumps(value, protocol=protocol))
    np.testing.assert_array_equal(got.pop("data"), value.pop(b"data"))
    assert got == {"labels": value[b"labels"], "mixed": value["mixed"], "nested": value["nested"]}


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def test_runs_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for function, argument in (
        (os.system, f"touch {touched}"),
        (eval, f"open({str(touched)!r}, 'w')"),
        (exec, f"open({str(touched)!r}, 'w')"),
        (__import__, "antigravity"),
        (np.fromfile, str(touched)),
    ):
        for value in (Calls(function, argument), {"data": Calls(function, argument)}):
            for protocol in range(6):
                with pytest.raises(RefusedPickleError):
                    read_plain_pickle(pickle.dumps(value, protocol=protocol))
    assert not touched.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02}}.",
        b"\x80\x02]q\x00.",  # a list, not a dict
        b"\x80\x02K\x01R.",
        b"\x80\x02U\x01aU\x01bR.",  # calls a string
        b"\x80\x02(R.",
        b"\x80\x02h\x07.",  # a memo that is not there
        b"\x80\x02}U\x01as.",
        b"\x80\x02}(U\x01au.",  # a key without a value
        b"\x80\x02}(]K\x01u.",  # a list as key
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02cnumpy\ndtype\n}b.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
        b"\x80\x02c_codecs\nencode\n)R.",
        b"\x80\x02}U\x01aT\xff\xff\xff\x7f.",  # claims 2 GB
        b"\x80\x09}.",
        b"\x80\x02" + b"}" * 1_100_000 + b".",
        b"\x80\x02})" + b"\x85" * 500_000 + b"K\x01s.",  # a tuple 500,000 deep as key
    ],
)
def test_refuses(data: bytes) -> None:
    with pytest.raises(RefusedPickleError):
        read_plain_pickle(data)


def test_refuses_arrays_that_lie() -> None:
    bomb = python_2_batch(bytes(512), 2, 256, []).replace(b"M\x02\x00", b"U\x01a")
    with pytest.raises(RefusedPickleError, match="axes"):
        read_plain_pickle(bomb)
    for rows, columns in ((2, 255), (3, 256), (0, 0)):
        with pytest.raises(RefusedPickleError):
            read_plain_pickle(python_2_batch(bytes(512), rows, columns, []))
    for array in (np.zeros(3), np.array([None]), np.zeros((2, 2), dtype=np.uint8, order="F")):
        with pytest.raises(RefusedPickleError):
            read_plain_pickle(pickle.dumps({"data": array}, protocol=2))


OPCODES = st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])


@settings(max_examples=300)
@given(st.lists(st.one_of(OPCODES, st.binary(max_size=4)), max_size=30).map(b"".join))
def test_only_its_own_error_leaves_it(body: bytes) -> None:
    try:
        result = read_plain_pickle(b"\x80\x02}" + body + b".")
    except RefusedPickleError:
        return
    assert isinstance(result, dict)


@settings(max_examples=200)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_damaged_batches(position: int, damage: bytes) -> None:
    data = bytearray(python_2_batch(bytes(16), 2, 8, [1, 2]))
    data[position : position + len(damage)] = damage
    try:
        read_plain_pickle(bytes(data))
    except RefusedPickleError:
        return
