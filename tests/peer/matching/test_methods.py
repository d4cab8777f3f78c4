"""What holds for every method: the contract of `Matcher`, and names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import UserError
from peer.matching.base import Evidence, Matcher, MatcherSettings
from peer.matching.registry import create_matcher, method, method_names

NAMES = ["fixed", "local", "oracle", "panm-grad", "panm-loss", "pens", "random"]
N = 12
CLUSTERS = tuple(j % 3 for j in range(N))


def settings(**changes: Any) -> MatcherSettings:
    numbers = {"index": 4, "n": N, "seed": 7, "l": 4, "k": 2, "t1": 4, "tau": 2}
    return MatcherSettings(**{**numbers, "clusters": CLUSTERS, **changes})


Played = list[tuple[list[int], list[int], list[int]]]


def play(matcher: Matcher, seed: int, rounds: range) -> Played:
    """Run rounds with random known peers, similarities and silences; return what was chosen."""
    played = []
    for t in rounds:
        rng = np.random.default_rng([seed, t])
        known = [j for j in range(N) if j != 4 and rng.random() < 0.8]
        asked = matcher.candidates(t, known, rng)
        heard = {j: float(rng.integers(5)) / 4 for j in asked if rng.random() < 0.8}
        neighbours = matcher.settle(t, known, heard, rng)
        assert set(asked) <= set(known)
        assert len(set(asked)) == len(asked)
        assert set(neighbours) <= set(known)
        assert neighbours == sorted(set(neighbours))
        assert len(neighbours) <= 2
        assert 4 not in matcher.bag
        json.dumps(matcher.notes)
        played.append((asked, neighbours, sorted(matcher.bag)))
    return played


def test_the_methods_are_there() -> None:
    assert method_names() == NAMES
    evidence = {name: create_matcher(name, settings()).evidence for name in NAMES}
    assert evidence["panm-grad"] is Evidence.GRADIENT
    assert evidence["panm-loss"] is evidence["pens"] is Evidence.LOSS
    assert {evidence[name] for name in ("fixed", "local", "oracle", "random")} == {Evidence.NONE}


def test_an_unknown_method_is_told_which_there_are() -> None:
    with pytest.raises(UserError, match="no method magic") as error:
        create_matcher("magic", settings())
    assert all(name in error.value.hint for name in NAMES)


@pytest.mark.parametrize("name", ["fedavg", "ifca"])
def test_a_central_method_is_refused_by_peers(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is central") as error:
        create_matcher(name, settings())
    assert "bootstrap --plan" in error.value.hint


def test_a_name_is_given_once() -> None:
    method_names()
    with pytest.raises(ValueError, match="already"):
        method("local")(type("Other", (), {}))


@pytest.mark.parametrize(
    "changes",
    [{"l": 0}, {"k": 0}, {"t1": 0}, {"tau": 0}, {"index": N}, {"index": -1}, {"clusters": (0, 1)}],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        create_matcher("random", settings(**changes))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), stop=st.integers(1, 14))
def test_a_restored_matcher_goes_on_as_if_nothing_happened(name: str, seed: int, stop: int) -> None:
    whole = create_matcher(name, settings())
    first = create_matcher(name, settings())
    expected = play(whole, seed, range(1, 15))
    before = play(first, seed, range(1, stop))
    second = create_matcher(name, settings())
    second.restore(json.loads(json.dumps(first.state())))
    assert second.bag == first.bag
    assert before + play(second, seed, range(stop, 15)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_rounds_that_cannot_be_are_refused(name: str) -> None:
    matcher, rng = create_matcher(name, settings()), np.random.default_rng(0)
    for t, known in ((0, [1, 2]), (1, [4]), (1, [N])):
        with pytest.raises(ValueError):
            matcher.candidates(t, known, rng)
        with pytest.raises(ValueError):
            matcher.settle(t, known, {}, rng)
    with pytest.raises(ValueError):
        matcher.settle(1, [1, 2], {3: 0.5}, rng)


@pytest.mark.parametrize("name", NAMES)
def test_nobody_known_and_nobody_heard_end_well(name: str) -> None:
    matcher, rng = create_matcher(name, settings()), np.random.default_rng(0)
    for t in range(1, 9):
        assert matcher.candidates(t, [], rng) == []
        assert matcher.settle(t, [], {}, rng) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 14) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
counts = st.lists(st.lists(st.integers(-1, 13), min_size=2, max_size=4), max_size=4)
peers = st.lists(st.integers(-1, 13), max_size=4)
states = st.dictionaries(st.text(max_size=5), json_values, max_size=2) | st.fixed_dictionaries(
    {"neighbours": peers | json_values, "searches": st.integers(-1, 5) | json_values},
    optional={"bag": st.none() | peers | json_values, "counts": counts | json_values},
)


@pytest.mark.parametrize("name", NAMES)
@given(state=states)
def test_only_what_could_have_been_stored_is_restored(name: str, state: dict[str, Any]) -> None:
    matcher = create_matcher(name, settings())
    untouched = matcher.state()
    try:
        matcher.restore(state)
    except ValueError:
        assert matcher.state() == untouched
    else:
        again = create_matcher(name, settings())
        again.restore(json.loads(json.dumps(matcher.state())))
        assert again.state() == matcher.state()
        play(matcher, 0, range(1, 8))
