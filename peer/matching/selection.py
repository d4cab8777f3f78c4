"""What the methods share: drawing peers, ranking them, and reading back a stored state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from peer.matching.base import MatcherSettings


def draw(pool: Iterable[int], size: int, rng: np.random.Generator) -> list[int]:
    """Return `size` of `pool` drawn uniformly without replacement, sorted; all if fewer.

    The draw depends on which peers are in the pool, not on the order in which they come.
    """
    members = sorted(pool)
    if len(members) <= size:
        return members
    return sorted(members[place] for place in rng.choice(len(members), size, replace=False))


def most_similar(similarities: Mapping[int, float], k: int) -> list[int]:
    """Return the k peers of the largest s_ij, sorted by index.

    [choice] ties go to the lower index; all are taken when there are fewer than k.
    """
    return sorted(sorted(similarities, key=lambda j: (-similarities[j], j))[:k])


def check_round(
    settings: MatcherSettings, t: int, known: Sequence[int], heard: Collection[int] = ()
) -> None:
    """Raise ValueError unless t >= 1, `known` (sorted) are others, and those heard are known."""
    if t < 1:
        raise ValueError(f"rounds are counted from 1, not {t}")
    # Only the ends of a sorted list can lie outside: a laboratory asks this n times a round.
    if known and (settings.index in known or known[0] < 0 or known[-1] >= settings.n):
        raise ValueError(f"peer {settings.index} of {settings.n} cannot know {known}")
    if heard and not set(heard) <= set(known):
        raise ValueError(f"similarities of peers that are not known: {set(heard) - set(known)}")


def check_keys(state: Mapping[str, Any], *keys: str) -> None:
    """Raise ValueError unless a stored state has exactly these keys."""
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ValueError(f"a state of this method has the keys {', '.join(keys) or '(none)'}")


def read_count(value: Any) -> int:
    """Return a stored count. Raises ValueError unless it is an integer, at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def read_peers(value: Any, settings: MatcherSettings) -> list[int]:
    """Return a stored list of other peers. Raises ValueError unless it is one, none repeated."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of peers")
    peers = [read_count(item) for item in value]
    others = set(range(settings.n)) - {settings.index}
    if len(set(peers)) < len(peers) or not others.issuperset(peers):
        raise ValueError(f"{value!r} are not distinct other peers of {settings.n}")
    return peers
