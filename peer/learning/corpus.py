"""Text as samples of a next-word model: words, a vocabulary, and windows of words.

A text file holds one item a line. A CSV file (by its ending) holds one a row: one column is the
item's topic, all others are its text. Words are maximal runs of letters and digits in lower case,
apostrophes inside included; everything else only separates them.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from peer.errors import UserError

UNKNOWN = "<unk>"
"""Token 0: every word that the vocabulary lacks. It is no target."""
WORDS = 2000
WINDOW = 10
MAX_WINDOW = 256
MAX_BYTES = 1 << 26
"""Of a text file: what is made of it is some ten times as large."""
MAX_VALUES = 1 << 28
"""Tokens of all windows together."""

_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")


class Items(NamedTuple):
    """The words of every item, and its topic, where the file tells it."""

    words: list[list[str]]
    topics: list[str] | None


class Windows(NamedTuple):
    """Samples: token ids int32 [m, L], the next word int64 [m], and the item [m] it is of."""

    x: npt.NDArray[np.int32]
    y: npt.NDArray[np.int64]
    item: npt.NDArray[np.int64]


def tokenise(text: str) -> list[str]:
    """Return the words of a text."""
    return _WORD.findall(text.lower())


def read_items(path: Path, topic: int = 1) -> Items:
    """Read a text file, or a CSV file whose column `topic` (from 1) is the topic.

    [choice] A first row whose topic no other row has is the header. Raises UserError.
    """
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UserError(
                f"{path} has {size >> 20} MiB, more than {MAX_BYTES >> 20}", "give a part of it"
            )
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix.lower() != ".csv":
                return Items([tokenise(line) for line in file if line.strip()], None)
            rows = list(_rows(file, topic, path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {str(path)!r} as text: {error}") from None
    if len(rows) > 1 and all(name != rows[0][0] for name, _ in rows[1:]):
        del rows[0]
    return Items([words for _, words in rows], [name for name, _ in rows])


def _rows(file: IO[str], topic: int, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the topic and the words of every row of a CSV file."""
    rows = csv.reader(file)
    for row in filter(None, rows):
        if len(row) < max(2, topic):
            raise UserError(
                f"{path}, line {rows.line_num}: {len(row)} cells are no topic and text",
                "topic=N says which column is the topic; plain text must not end in .csv",
            )
        name = row.pop(topic - 1).strip()
        yield name, tokenise(" ".join(row))


def most_frequent(items: Iterable[Sequence[str]], count: int) -> tuple[str, ...]:
    """Return the vocabulary of the `count` most frequent words, by token id; ties by spelling."""
    counts = Counter(word for words in items for word in words)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return (UNKNOWN, *ordered[:count])


def read_vocabulary(path: Path, most: int) -> tuple[str, ...]:
    """Read the vocabulary of a file with one word a line, by token id.

    Raises UserError for what is no word, twice there, or more than `most` words.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"the vocabulary {path} is too large")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {str(path)!r}: {error}") from None
    words = [line.strip() for line in lines if line.strip()]
    if not 1 <= len(words) <= most:
        raise UserError(f"the vocabulary {path} has {len(words)} words, not 1 to {most}")
    for word, times in Counter(words).items():
        if tokenise(word) != [word] or times > 1:
            why = f"{times} times there" if times > 1 else "no word in lower case"
            raise UserError(f"the vocabulary {path}: {word[:40]!r} is {why}", "one word a line")
    return (UNKNOWN, *words)


def encode(words: Sequence[str], numbers: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """Return the token ids of words, given those of the vocabulary; 0 for others."""
    return np.array([numbers.get(word, 0) for word in words], dtype=np.int32)


def windows(items: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> Windows:
    """Return a sample for every word of the vocabulary that `length` words of its item precede.

    Raises UserError when there is none, or too many.
    """
    targets = sum(max(0, len(words) - length) for words in items)
    if targets * length > MAX_VALUES:
        raise UserError(
            f"{targets} windows of {length} words are too many", "give less text, or window=N"
        )
    numbers = {word: number for number, word in enumerate(vocabulary)}
    parts = []
    for item, words in enumerate(items):
        if len(words) > length:
            ids = encode(words, numbers)
            view = np.lib.stride_tricks.sliding_window_view(ids, length + 1)
            known = view[view[:, -1] != 0]
            parts.append((known, np.full(len(known), item)))
    if not sum(len(known) for known, _ in parts):
        raise UserError(f"no item has {length} words and one of the vocabulary after them")
    table = np.concatenate([known for known, _ in parts])
    return Windows(
        np.ascontiguousarray(table[:, :-1]),
        table[:, -1].astype(np.int64),
        np.concatenate([item for _, item in parts]),
    )


def prompt(text: str, numbers: Mapping[str, int], length: int) -> npt.NDArray[np.int32]:
    """Return the last `length` words of a text as token ids [length], given those of all words.

    [choice] A shorter text is filled up in front with unknown words.
    """
    ids = encode(tokenise(text)[-length:], numbers)
    return np.pad(ids, (length - len(ids), 0))
