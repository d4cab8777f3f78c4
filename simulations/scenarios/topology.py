"""Who can reach whom: the kinds of graphs a scenario can name, each a small table of its own.

A graph is undirected, has the vertices 0 to n - 1, and is the same for a seed. Peers hear of, and
may talk to, their neighbours in it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import networkx as nx
from pydantic import Field

from simulations.scenarios.lines import MistakeError
from simulations.scenarios.tables import Table

MAX_FILE = 64 * 2**20
"""Bytes of a file of edges that are read at most."""

Probability = Annotated[float, Field(ge=0, le=1)]


class Shape(Table):
    """What all kinds have in common."""

    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="of the draw of the graph; the plan's if not given",
    )
    components: Literal["one", "any"] = Field(
        default="one", description="whether a graph that falls into several parts is a mistake"
    )

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """Return the graph of n peers. Raises MistakeError at ("topology", ...)."""
        raise NotImplementedError


class Complete(Shape):
    """Everybody reaches everybody."""

    kind: Literal["complete"] = "complete"

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """K_n."""
        return _bare(nx.complete_graph(n))


class Ring(Shape):
    """Each peer has the one before and the one after it."""

    kind: Literal["ring"]

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """C_n."""
        return _bare(nx.cycle_graph(n))


class Star(Shape):
    """All reach peer 0, and nobody else."""

    kind: Literal["star"]

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """K_{1,n-1}."""
        return _bare(nx.star_graph(n - 1))


class KRegular(Shape):
    """A random graph whose peers all have `degree` neighbours."""

    kind: Literal["k-regular"]
    degree: int = Field(ge=1, description="neighbours of each peer")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """Uniform over such graphs, asymptotically."""
        _check_degree(self.degree, n)
        if n * self.degree % 2:
            raise MistakeError(
                ("topology", "degree"),
                f"{n} peers cannot have {self.degree} links each: n times degree must be even",
            )
        return _bare(nx.random_regular_graph(self.degree, n, seed=seed))


class ErdosRenyi(Shape):
    """Each two peers are linked with `probability`."""

    kind: Literal["erdos-renyi"]
    probability: Probability = Field(description="of each link")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """G(n, p)."""
        return _bare(nx.fast_gnp_random_graph(n, self.probability, seed=seed))


class WattsStrogatz(Shape):
    """A small world: a ring of `degree` nearest neighbours, each link moved with `probability`."""

    kind: Literal["watts-strogatz"]
    degree: int = Field(ge=2, description="neighbours on the ring, even")
    probability: Probability = Field(description="of a link being moved elsewhere")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """Watts and Strogatz, 1998."""
        _check_degree(self.degree, n)
        if self.degree % 2:
            raise MistakeError(
                ("topology", "degree"), f"{self.degree} is odd; half are on either side"
            )
        return _bare(nx.watts_strogatz_graph(n, self.degree, self.probability, seed=seed))


class BarabasiAlbert(Shape):
    """Few peers have many links: each newcomer links to `links` others, by how many they have."""

    kind: Literal["barabasi-albert"]
    links: int = Field(ge=1, description="links of each newcomer")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """Barabasi and Albert, 1999."""
        if self.links >= n:
            raise MistakeError(("topology", "links"), f"{self.links} are too many for {n} peers")
        return _bare(nx.barabasi_albert_graph(n, self.links, seed=seed))


class Geometric(Shape):
    """Peers at random places of a unit square reach those within `radius`."""

    kind: Literal["geometric"]
    radius: float = Field(gt=0, le=1.5, description="distance that a link spans at most")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """Vertices keep their place as `pos`."""
        return _bare(nx.random_geometric_graph(n, self.radius, seed=seed))


class Clustered(Shape):
    """Sites of neighbouring indices: links are likely inside a site and rare between them."""

    kind: Literal["clustered"]
    sites: int = Field(ge=1, description="number of sites, of about equal size")
    inside: Probability = Field(default=1.0, description="probability of a link inside a site")
    between: Probability = Field(description="probability of a link between sites")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:
        """The planted partition model; peer i is of site i * sites // n, so that sites and the true
        clusters (i mod K) cross."""
        if self.sites > n:
            raise MistakeError(("topology", "sites"), f"{self.sites} are too many for {n} peers")
        sizes = [0] * self.sites
        for i in range(n):
            sizes[i * self.sites // n] += 1
        rates = [
            [self.inside if a == b else self.between for b in range(self.sites)]
            for a in range(self.sites)
        ]
        graph = nx.stochastic_block_model(sizes, rates, seed=seed)
        return _bare(graph)


class Hierarchical(Shape):
    """A tree from peer 0 down: each peer reaches the one above it, those below, its siblings."""

    kind: Literal["hierarchical"]
    branching: int = Field(ge=1, description="peers below each")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """Parent of i: (i - 1) // branching."""
        above = [(i - 1) // self.branching for i in range(n)]
        graph: nx.Graph[int] = nx.empty_graph(n)
        graph.add_edges_from((i, above[i]) for i in range(1, n))
        graph.add_edges_from(
            (i, j)
            for i in range(1, n)
            for j in range(i + 1, min(n, i + self.branching))
            if above[i] == above[j]
        )
        return graph


class Edges(Shape):
    """The links themselves, here or in a file of lines `i j`."""

    kind: Literal["edges"]
    edges: list[tuple[int, int]] | None = Field(default=None, description="pairs of peers")
    file: Path | None = Field(default=None, description="text file, a pair of peers a line")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """Exactly these."""
        if (self.edges is None) == (self.file is None):
            raise MistakeError(("topology",), "edges needs either edges = [[0, 1], ...] or a file")
        key = "file" if self.edges is None else "edges"
        edges = self.edges if self.file is None else _read_edges(self.file)
        graph: nx.Graph[int] = nx.empty_graph(n)
        graph.add_edges_from(edges or [])
        _check_vertices(graph, n, key)
        return graph


class GraphML(Shape):
    """A graph of a GraphML file; its vertices are peers 0, 1, ... by name if those are the
    indices, else in the file's order."""

    kind: Literal["graphml"]
    file: Path = Field(description="GraphML file")

    def edges_of(self, n: int, seed: int) -> nx.Graph[int]:  # noqa: ARG002
        """Directions and parallel links are dropped."""
        key = ("topology", "file")
        try:
            _check_size(self.file)
            read = nx.read_graphml(self.file)
        except MistakeError:
            raise
        except Exception as error:  # the parser raises whatever its parts raise
            raise MistakeError(key, f"cannot read {self.file} as GraphML: {error}") from None
        names = list(map(str, read.nodes))
        if len(names) != n:
            raise MistakeError(key, f"{self.file} has {len(names)} vertices for {n} peers")
        if set(names) == set(map(str, range(n))):
            number = {name: int(name) for name in names}
        else:
            number = {name: place for place, name in enumerate(names)}
        graph: nx.Graph[int] = nx.empty_graph(n)
        graph.add_edges_from((number[str(a)], number[str(b)]) for a, b, *_ in read.edges)
        _check_vertices(graph, n, "file")
        return graph


Topology = Annotated[
    Complete
    | Ring
    | Star
    | KRegular
    | ErdosRenyi
    | WattsStrogatz
    | BarabasiAlbert
    | Geometric
    | Clustered
    | Hierarchical
    | Edges
    | GraphML,
    Field(discriminator="kind"),
]

KINDS: tuple[type[Shape], ...] = (
    Complete, Ring, Star, KRegular, ErdosRenyi, WattsStrogatz, BarabasiAlbert, Geometric, Clustered,
    Hierarchical, Edges, GraphML,
)  # fmt: skip


def build_graph(topology: Shape, n: int, seed: int) -> nx.Graph[int]:
    """Return the graph of a topology, sure to be connected unless `components` says otherwise.

    `seed` counts where the topology has none of its own. Raises MistakeError.
    """
    graph = topology.edges_of(n, seed if topology.seed is None else topology.seed)
    parts = sorted(map(len, nx.connected_components(graph)), reverse=True)
    if len(parts) > 1 and topology.components == "one":
        alone = parts.count(1)
        raise MistakeError(
            ("topology",),
            f"the graph falls into {len(parts)} parts of {_some(parts)} peers"
            + (f"; {alone} can reach nobody" if alone else ""),
            'give it more links or another seed, or say components = "any"',
        )
    return graph


def describe_graph(graph: nx.Graph[int]) -> str:
    """Return one line about a graph: links, degrees, whether it is connected."""
    degrees = [degree for _, degree in graph.degree]
    parts = nx.number_connected_components(graph)
    return (
        f"{len(graph)} peers, {graph.number_of_edges()} links, "
        f"{min(degrees)} to {max(degrees)} a peer, "
        + ("connected" if parts == 1 else f"in {parts} parts")
    )


def _some(sizes: list[int]) -> str:
    shown = ", ".join(map(str, sizes[:4]))
    return shown + (", ..." if len(sizes) > 4 else "")


def _bare(graph: nx.Graph[Any]) -> nx.Graph[int]:
    """Return a generated graph with nothing beside its links but places, where it has them."""
    bare: nx.Graph[int] = nx.Graph()
    bare.add_nodes_from(
        (int(i), {k: v for k, v in data.items() if k == "pos"})
        for i, data in graph.nodes(data=True)
    )
    bare.add_edges_from(graph.edges)
    return bare


def _check_degree(degree: int, n: int) -> None:
    if degree >= n:
        raise MistakeError(
            ("topology", "degree"), f"{degree} is too many: {n} peers have {n - 1} others"
        )


def _check_vertices(graph: nx.Graph[int], n: int, key: str) -> None:
    for vertex in graph:
        if not 0 <= vertex < n:
            raise MistakeError(("topology", key), f"there is no peer {vertex}: the last is {n - 1}")
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))


def _check_size(file: Path) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise MistakeError(("topology", "file"), f"cannot read {file}: {error.strerror}") from None
    if size > MAX_FILE:
        raise MistakeError(("topology", "file"), f"{file} has {size} bytes, more than {MAX_FILE}")


def _read_edges(file: Path) -> list[tuple[int, int]]:
    _check_size(file)
    edges = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) < 2 or not (words[0].isdecimal() and words[1].isdecimal()):
            raise MistakeError(
                ("topology", "file"), f"{file} line {number} is not a pair of peers: {line[:40]!r}"
            )
        edges.append((int(words[0]), int(words[1])))
    return edges
