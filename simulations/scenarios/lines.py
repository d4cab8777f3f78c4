"""Where in a TOML text a key is, so that a message can name the line.

tomllib tells lines of syntax errors only; what is wrong with a value comes to light later, by the
value's path in the parsed table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer.errors import UserError

Key = tuple[str | int, ...]
"""A path into a parsed TOML table: keys, and places in arrays of tables."""

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*([\w\"'.-]+(?:\s*\.\s*[\w\"'-]+)*)\s*=")
_FENCES = ('"""', "'''")


class MistakeError(Exception):
    """Something wrong with the value at `key` of a scenario; `hint` says what to do about it."""

    def __init__(self, key: Key, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.message = message
        self.hint = hint

    def located(self, source: Path | str, text: str) -> UserError:
        """Return the error that tells a person of it: file, line, key, and what is wrong."""
        line = line_of(text, self.key)
        name = name_of(self.key)
        return UserError(
            f"{source}, line {line}: {name}: {self.message}" if name
            else f"{source}: {self.message}",
            self.hint or "docs/scenarios.md lists every key",
        )  # fmt: skip


def name_of(key: Key) -> str:
    """Return a key as people write it: script[2].peers, the first of an array being 1."""
    name = ""
    for part in key:
        if isinstance(part, int):
            name += f"[{part + 1}]"
        else:
            name += f".{part}" if name else part
    return name


def line_of(text: str, key: Key) -> int:
    """Return the line (1-based) of a key in a TOML text, or of the nearest table that holds it.

    Finds table headers, arrays of tables and `key = value` lines, dotted ones too; what lies inside
    a value is found as the line where that value begins.
    """
    best, depth = 1, 0
    for line, found in _definitions(text):
        common = _common(found, key)
        if common == len(found) and common > depth:
            best, depth = line, common
    return best


def _definitions(text: str) -> Iterator[tuple[int, Key]]:
    """Yield (line, path) of every table header and every assignment of a TOML text."""
    table: Key = ()
    counts: dict[Key, int] = {}
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            fence = "" if fence in line else fence
            continue
        if header := _HEADER.match(line):
            table = _enter(_parts(header[2]), counts, array=header[1] == "[[")
            yield number, table
        elif assignment := _ASSIGNMENT.match(line):
            yield number, (*table, *_parts(assignment[1]))
            fence = next((mark for mark in _FENCES if line.count(mark) == 1), "")


def _enter(parts: Sequence[str], counts: dict[Key, int], *, array: bool) -> Key:
    """Return the path of a table header; tables inside an array are of its last member."""
    path: Key = ()
    for place, part in enumerate(parts):
        path = (*path, part)
        if array and place == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _common(found: Key, key: Key) -> int:
    """Return how many parts two paths share at their beginning."""
    count = 0
    for a, b in zip(found, key, strict=False):
        if a != b:
            break
        count += 1
    return count
