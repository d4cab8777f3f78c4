"""What the tables of a scenario file are made of: a base, distributions, and ways to name peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from scipy.special import ndtri

from simulations.scenarios.lines import Key, MistakeError

Values = npt.NDArray[np.float64]


class Table(BaseModel):
    """A table of a scenario: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Distribution(NamedTuple):
    """What values are drawn from.

    `constant`: a. `uniform`: from a to b. `normal`: of mean a and standard deviation b, [choice]
    values below 0 taken as 0. `lognormal`: of median a, b the standard deviation of the logarithm.
    """

    kind: Literal["constant", "uniform", "normal", "lognormal"]
    a: float
    b: float = 0.0

    def quantiles(self, u: Values | float) -> Values:
        """Return the values below which shares u (in (0, 1)) of all draws lie."""
        u = np.asarray(u, dtype=np.float64)
        match self.kind:
            case "constant":
                return np.full(u.shape, self.a)
            case "uniform":
                return self.a + (self.b - self.a) * u
        z = ndtri(u)
        if self.kind == "normal":
            z = np.maximum(0.0, self.a + self.b * z)
        else:
            z = self.a * np.exp(self.b * z)
        return np.asarray(z, dtype=np.float64)

    def draw(self, rng: np.random.Generator) -> float:
        """Return one value."""
        if self.kind == "constant":
            return self.a
        return float(self.quantiles(rng.uniform(1e-12, 1.0)))


def _read(value: Any) -> Distribution:
    """Return the distribution of a number or of { uniform = [a, b] } and its like."""
    if isinstance(value, Distribution):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _checked(Distribution("constant", float(value)))
    kinds = ("uniform", "normal", "lognormal")
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in kinds:
        kind, pair = next(iter(value.items()))
        if (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair)
        ):
            return _checked(Distribution(kind, float(pair[0]), float(pair[1])))
    raise ValueError(
        "write a number, { uniform = [low, high] }, { normal = [mean, sd] } or "
        "{ lognormal = [median, sigma] }"
    )


def _checked(found: Distribution) -> Distribution:
    if not np.isfinite((found.a, found.b)).all():
        raise ValueError("the numbers must be finite")
    if found.a < 0 or found.b < 0:
        raise ValueError(f"{min(found.a, found.b):g} is negative")
    if found.kind == "uniform" and found.b < found.a:
        raise ValueError(f"from {found.a:g} to {found.b:g} is no range")
    return found


def _write(found: Distribution) -> Any:
    return found.a if found.kind == "constant" else {found.kind: [found.a, found.b]}


Spread = Annotated[Distribution, BeforeValidator(_read), PlainSerializer(_write)]
"""A number that may be drawn: a constant, or one of the distributions."""

Selector = Annotated[int, Field(ge=0)] | str
"""Some peers: an index, "a-b", "cluster C", "class NAME", "every M" (0, M, 2M, ...) or "all"."""

Peers = Annotated[list[Selector], Field(min_length=1)]


class Population(NamedTuple):
    """Whom selectors choose from: n peers, their true clusters [n], their device classes [n]."""

    n: int
    clusters: Sequence[int]
    classes: Sequence[str]


_RANGE = re.compile(r"^(\d+)\s*-\s*(\d+)$")
_WORD = re.compile(r"^(cluster|class|every)\s+(\S+)$")


def select(selectors: Sequence[int | str], people: Population, key: Key) -> list[int]:
    """Return the sorted indices that any of the selectors names.

    Raises MistakeError at `key` for what cannot be read, and for peers that there are not.
    """
    chosen: set[int] = set()
    for selector in selectors:
        found = _selected(selector, people, key)
        if not found:
            raise MistakeError(key, f"{selector!r} names no peer")
        chosen.update(found)
    return sorted(chosen)


def _selected(selector: int | str, people: Population, key: Key) -> Sequence[int]:
    if isinstance(selector, int):
        return _existing(selector, selector, people.n, key)
    if selector == "all":
        return range(people.n)
    if span := _RANGE.match(selector):
        return _existing(int(span[1]), int(span[2]), people.n, key)
    match word[1] if (word := _WORD.match(selector)) else None:
        case "class":
            assert word is not None
            return [i for i in range(people.n) if people.classes[i] == word[2]]
        case "cluster" if word is not None and word[2].isdecimal():
            return [i for i in range(people.n) if people.clusters[i] == int(word[2])]
        case "every" if word is not None and word[2].isdecimal() and int(word[2]):
            return range(0, people.n, int(word[2]))
    raise MistakeError(
        key,
        f"{selector!r} names no peers",
        'peers are named as 3, "0-9", "cluster 1", "class NAME", "every 2" or "all"',
    )


def _existing(first: int, last: int, n: int, key: Key) -> range:
    if last >= n:
        raise MistakeError(key, f"there is no peer {last}: with n = {n} the last is {n - 1}")
    return range(first, last + 1)
