"""Topologies: exact counts of links, what is refused, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from pydantic import TypeAdapter

from simulations.scenarios.lines import MistakeError
from simulations.scenarios.topology import Shape, Topology, build_graph, describe_graph

READ: TypeAdapter[Shape] = TypeAdapter(Topology)


def graph(n: int = 20, seed: int = 1, **table: Any) -> nx.Graph[int]:
    return build_graph(READ.validate_python(table), n, seed)


@pytest.mark.parametrize(
    ("table", "links", "degrees"),
    [
        ({"kind": "complete"}, 190, {19}),
        ({"kind": "ring"}, 20, {2}),
        ({"kind": "star"}, 19, {1, 19}),
        ({"kind": "k-regular", "degree": 4}, 40, {4}),
        ({"kind": "watts-strogatz", "degree": 4, "probability": 0}, 40, {4}),
        ({"kind": "barabasi-albert", "links": 3}, 51, None),
        ({"kind": "erdos-renyi", "probability": 1}, 190, {19}),
        ({"kind": "geometric", "radius": 1.5}, 190, {19}),
        ({"kind": "clustered", "sites": 4, "between": 0, "components": "any"}, 40, {4}),
        ({"kind": "clustered", "sites": 4, "between": 1}, 190, {19}),
        # Twenty peers, three below each: 19 upward links, and 3 in each of 6 full broods, 0 in one
        # of a single peer.
        ({"kind": "hierarchical", "branching": 3}, 19 + 6 * 3, None),
        ({"kind": "edges", "edges": [[i, i + 1] for i in range(19)]}, 19, {1, 2}),
    ],
)
def test_links(table: dict[str, Any], links: int, degrees: set[int] | None) -> None:
    found = graph(**table)
    assert sorted(found) == list(range(20))
    assert found.number_of_edges() == links
    if degrees is not None:
        assert {degree for _, degree in found.degree} == degrees


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "k-regular", "degree": 4},
        {"kind": "erdos-renyi", "probability": 0.4},
        {"kind": "watts-strogatz", "degree": 4, "probability": 0.3},
        {"kind": "barabasi-albert", "links": 2},
        {"kind": "geometric", "radius": 0.6},
        {"kind": "clustered", "sites": 2, "between": 0.3},
    ],
)
def test_a_seed_makes_a_graph(table: dict[str, Any]) -> None:
    one, two, other = graph(seed=1, **table), graph(seed=1, **table), graph(seed=2, **table)
    assert set(one.edges) == set(two.edges) != set(other.edges)
    own = build_graph(READ.validate_python({**table, "seed": 1}), 20, 7)
    assert set(own.edges) == set(one.edges)


def test_sites_cross_clusters() -> None:
    found = graph(kind="clustered", sites=4, between=0, components="any")
    assert sorted(found.neighbors(6)) == [5, 7, 8, 9]


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ({"kind": "k-regular", "degree": 20}, "degree", "20 is too many"),
        ({"kind": "watts-strogatz", "degree": 3, "probability": 0}, "degree", "3 is odd"),
        ({"kind": "barabasi-albert", "links": 20}, "links", "too many"),
        ({"kind": "clustered", "sites": 21, "between": 0}, "sites", "too many"),
        ({"kind": "edges"}, "topology", "either edges"),
        ({"kind": "erdos-renyi", "probability": 0}, "topology", "falls into 20 parts"),
    ],
)
def test_what_cannot_be(table: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(MistakeError, match=message) as raised:
        graph(**table)
    assert raised.value.key[-1] == key


def test_an_odd_number_of_ends() -> None:
    with pytest.raises(MistakeError, match="must be even"):
        graph(n=5, kind="k-regular", degree=3)


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "links.txt"
    lines.write_text("# a path\n0 1\n1,2  # and on\n\n2 3\n3 3\n")
    found = graph(n=4, kind="edges", file=lines)
    assert sorted(found.edges) == [(0, 1), (1, 2), (2, 3)]
    lines.write_text("0 1\n1 x\n")
    with pytest.raises(MistakeError, match="line 2 is not a pair of peers"):
        graph(n=4, kind="edges", file=lines)
    nx.write_graphml(nx.path_graph(["a", "b", "c"]), tmp_path / "named.graphml")
    assert sorted(graph(n=3, kind="graphml", file=tmp_path / "named.graphml").edges) == [
        (0, 1),
        (1, 2),
    ]
    numbered = nx.Graph([("2", "0"), ("0", "1")])
    nx.write_graphml(numbered, tmp_path / "numbered.graphml")
    assert sorted(graph(n=3, kind="graphml", file=tmp_path / "numbered.graphml").edges) == [
        (0, 1),
        (0, 2),
    ]
    with pytest.raises(MistakeError, match="has 3 vertices for 4 peers"):
        graph(n=4, kind="graphml", file=tmp_path / "named.graphml")
    (tmp_path / "broken.graphml").write_text("<graphml><graph>")
    with pytest.raises(MistakeError, match="as GraphML"):
        graph(n=4, kind="graphml", file=tmp_path / "broken.graphml")


def test_what_is_said_of_a_graph() -> None:
    assert describe_graph(graph(kind="ring")) == "20 peers, 20 links, 2 to 2 a peer, connected"
    parted = graph(kind="clustered", sites=4, between=0, components="any")
    assert describe_graph(parted).endswith("in 4 parts")
