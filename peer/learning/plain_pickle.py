"""Reads the pickles that hold nothing but plain values, without running them.

A pickle is a program, and `pickle.load` runs it. CIFAR-10's Python batches were written by Python 2
(protocol 2) and need only a few instructions: build dicts, lists, numbers and strings, and an array
of bytes. This is an interpreter of just those; the functions a pickle may name are a fixed table of
ours, and anything else is refused. Instructions are decoded by the standard `pickletools`, which
runs nothing.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


class RefusedPickleError(ValueError):
    """The bytes are no pickle, or one that needs more than plain values."""


@dataclass
class _Array:
    """An array that the pickle has announced (REDUCE) and will fill later (BUILD)."""

    value: npt.NDArray[np.uint8] | None = None

    def fill(self, state: Any) -> None:
        _version, shape, dtype, fortran, data = state
        raw = _to_bytes(data)
        if not isinstance(dtype, _ByteType) or fortran:
            raise RefusedPickleError("an array that is not of unsigned bytes in C order")
        if len(shape) > 4 or not all(type(axis) is int for axis in shape):
            raise RefusedPickleError("an array of more than 4 axes")
        if math.prod(shape) != len(raw):
            raise RefusedPickleError("an array whose shape and bytes disagree")
        self.value = np.frombuffer(raw, dtype=np.uint8).reshape(shape)


class _ByteType:
    """numpy's dtype of unsigned bytes, the only one allowed; its later state says nothing new."""

    def fill(self, state: Any) -> None:
        pass


class _Named:
    """Something that is only ever an argument: the class `numpy.ndarray`."""


def _to_bytes(value: Any) -> bytes:
    # pickletools decodes Python 2's byte strings as latin-1, which maps every byte to itself.
    return value if isinstance(value, bytes) else str.encode(value, "latin-1")


def _array(*_: Any) -> _Array:
    return _Array()


def _dtype(code: Any, *_: Any) -> _ByteType:
    if code not in ("u1", b"u1"):
        raise RefusedPickleError("an array that is not of unsigned bytes")
    return _ByteType()


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RefusedPickleError("a byte string that is not in latin1")
    return text.encode("latin-1")


_GLOBALS: dict[str, Callable[..., Any] | _Named] = {
    "numpy.core.multiarray _reconstruct": _array,
    "numpy._core.multiarray _reconstruct": _array,
    "numpy ndarray": _Named(),
    "numpy dtype": _dtype,
    "_codecs encode": _encode,  # how Python 3 writes bytes in protocol 2
}

_PUSH_ARGUMENT = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_PUSH_NEW: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_MARK = object()
_MOST_INSTRUCTIONS = 1_000_000
"""A CIFAR-10 batch needs about 50,000; one byte can make an object of 64."""


class _Machine:
    """The stack machine; `pickletools` documents what each instruction does."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _position) in enumerate(pickletools.genops(data)):
            if count == _MOST_INSTRUCTIONS:
                raise RefusedPickleError(f"more than {_MOST_INSTRUCTIONS} instructions")
            name = opcode.name
            if name in _PUSH_ARGUMENT:
                self.stack.append(argument)
            elif name in _PUSH_NEW:
                self.stack.append(_PUSH_NEW[name]())
            elif name != "STOP":
                if name not in _STEPS:
                    raise RefusedPickleError(f"the instruction {name}")
                _STEPS[name](self, argument)
        (result,) = self.stack
        return result

    def _to_mark(self) -> list[Any]:
        start = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _pop(self, count: int) -> tuple[Any, ...]:
        items = tuple(self.stack[-count:])
        if len(items) != count or any(item is _MARK for item in items):
            raise RefusedPickleError("too few values on its stack")
        del self.stack[-count:]
        return items

    def protocol(self, version: int) -> None:
        if version > 3:
            raise RefusedPickleError(f"protocol {version}")

    def mark(self, _: None) -> None:
        self.stack.append(_MARK)

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def tuple_to_mark(self, _: None) -> None:
        self.stack.append(tuple(self._to_mark()))

    def tuple_1(self, _: None) -> None:
        self.stack.append(self._pop(1))

    def tuple_2(self, _: None) -> None:
        self.stack.append(self._pop(2))

    def tuple_3(self, _: None) -> None:
        self.stack.append(self._pop(3))

    def append(self, _: None) -> None:
        (item,) = self._pop(1)
        list.append(self.stack[-1], item)

    def appends(self, _: None) -> None:
        items = self._to_mark()
        list.extend(self.stack[-1], items)

    def set_item(self, _: None) -> None:
        self._set(self._pop(2))

    def set_items(self, _: None) -> None:
        self._set(self._to_mark())

    def _set(self, items: Sequence[Any]) -> None:
        # Hashing a deep tuple would overflow the stack, so keys are texts.
        if not all(isinstance(key, str | bytes) for key in items[::2]):
            raise RefusedPickleError("a key that is not a text")
        dict.update(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def named(self, name: str) -> None:
        if name not in _GLOBALS:
            raise RefusedPickleError(f"the name {name.replace(' ', '.')}")
        self.stack.append(_GLOBALS[name])

    def reduce(self, _: None) -> None:
        function, arguments = self._pop(2)
        # Only `named` puts anything callable on the stack, and only from the table.
        if not callable(function):
            raise RefusedPickleError("a call of something that is no function")
        self.stack.append(function(*arguments))

    def build(self, _: None) -> None:
        (state,) = self._pop(1)
        if not isinstance(self.stack[-1], _Array | _ByteType):
            raise RefusedPickleError("an object with a state of its own")
        self.stack[-1].fill(state)


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "MARK": _Machine.mark,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": _Machine.tuple_to_mark,
    "TUPLE1": _Machine.tuple_1,
    "TUPLE2": _Machine.tuple_2,
    "TUPLE3": _Machine.tuple_3,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.named,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


def read_plain_pickle(data: bytes) -> dict[str, Any]:
    """Return the dict that `data` pickles: keys as str; arrays of bytes, lists, numbers, strings.

    Never runs or imports anything that the pickle names. Raises RefusedPickleError when `data` is
    no pickle of such a dict.
    """
    try:
        result = _Machine().run(data)
        items = dict.items(result)
        return {
            key.decode("latin-1") if isinstance(key, bytes) else key: (
                value.value if isinstance(value, _Array) else value
            )
            for key, value in items
        }
    except RefusedPickleError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise RefusedPickleError(f"no pickle of plain values ({error})") from None
