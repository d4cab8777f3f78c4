"""The parameter tree of CFL: clusters, how they came apart, and the way of a new peer to a leaf.

F. Sattler, K.-R. Müller, W. Samek, "Clustered federated learning", 2019, section V-C, algorithm 4.
Leaves are the clusters of now. A node that was split keeps its stationary model theta_v*, and the
edge to each child keeps the updates of the child's members from theta_v*, by which others are sent
the same way.

Models are held as cumulated updates: theta_v = w_0 + u_v. Where peers permute their updates, so are
u_v and the edges; the tree needs no model in order, and must not have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from peer.learning.learner import Vector

Halves = tuple[frozenset[int], frozenset[int]]

ROOT = 0


@dataclass
class Edge:
    """Why the members of a child went there: their updates before the split, [m, trainable]."""

    members: tuple[int, ...]
    updates: npt.NDArray[np.float32]

    def likeness(self, update: Vector) -> float:
        """Return the largest cosine of `update` [trainable] with one of the edge; 0 has none."""
        # One at a time: a float64 copy of all of them would double the tree's memory.
        own = update.astype(np.float64)
        best = -1.0
        for cached in self.updates:
            other = cached.astype(np.float64)
            scale = np.linalg.norm(own) * np.linalg.norm(other)
            best = max(best, float(own @ other / scale) if scale > 0 else 0.0)
        return best


@dataclass
class Node:
    """A cluster.

    Attributes:
        update: u_v [e]; of a leaf that of the last round, of any other node its stationary one.
        t: the last round before the node came to be; 0 for the root.
        largest: the largest norm of a mean update seen, here or before the splits above.
        parent, edge: what the node came from; None for the root.
        children: None for a leaf.
        proposals: the last cuts that were found and await confirmation, in order.
    """

    update: Vector
    t: int = 0
    largest: float = 0.0
    parent: int | None = None
    edge: Edge | None = None
    children: tuple[int, int] | None = None
    proposals: list[Halves] = field(default_factory=list)


@dataclass
class ParameterTree:
    """Nodes by number (0 is the root, children come after parents) and the node of every peer.

    A peer's place is a leaf, or, until it is routed, the node where it was when that was split.
    """

    trainable: int
    nodes: list[Node]
    places: dict[int, int] = field(default_factory=dict)

    @classmethod
    def planted(cls, size: int, trainable: int) -> ParameterTree:
        """Return a tree of one cluster, nobody in it, at w_0."""
        return cls(trainable, [Node(np.zeros(size, dtype=np.float32))])

    @property
    def leaves(self) -> list[int]:
        """The numbers of the leaves, the clusters of now, in order."""
        return [v for v, node in enumerate(self.nodes) if node.children is None]

    def admit(self, peer: int) -> int:
        """Return the place of `peer`: the root for one that the tree does not know."""
        return self.places.setdefault(peer, ROOT)

    def at_leaf(self, peer: int) -> bool:
        """Tell whether `peer` has a cluster. Raises KeyError for one that was not admitted."""
        return self.nodes[self.places[peer]].children is None

    def members(self, v: int) -> list[int]:
        """Return the peers whose place is node v, sorted."""
        return sorted(peer for peer, place in self.places.items() if place == v)

    def split(self, v: int, t: int, halves: Sequence[Mapping[int, Vector]]) -> tuple[int, int]:
        """Split leaf v after round t into two children; return their numbers.

        `halves` are the members' updates from theta_v, each [e], by peer. The children start at
        theta_v. Members of v that are in neither half stay there, to be routed when they return.
        Raises ValueError when v is no leaf, or a half is empty or has peers of elsewhere.
        """
        node = self.nodes[v]
        if node.children is not None:
            raise ValueError(f"node {v} is split already")
        if any(not half or any(self.places.get(i) != v for i in half) for half in halves):
            raise ValueError(f"the halves are not of members of node {v}")
        first, second = (self._grow(v, t, half) for half in halves)
        node.children, node.proposals = (first, second), []
        return first, second

    def _grow(self, v: int, t: int, half: Mapping[int, Vector]) -> int:
        members = tuple(sorted(half))
        edge = Edge(members, np.stack([half[i][: self.trainable] for i in members]))
        parent = self.nodes[v]
        self.nodes.append(Node(parent.update, t=t, largest=parent.largest, parent=v, edge=edge))
        self.places |= dict.fromkeys(members, len(self.nodes) - 1)
        return len(self.nodes) - 1

    def route(self, peer: int, update: Vector) -> int:
        """Move `peer` one step down by its update [e] from its place's model; return its new place.

        It goes to the child with the larger of the maximum cosines; of equals, to the second, as
        in the paper. Raises KeyError for a peer that was not admitted, ValueError when its place
        is a leaf.
        """
        children = self.nodes[self.places[peer]].children
        if children is None:
            raise ValueError(f"peer {peer} is at a leaf")
        likeness = [self._edge(child).likeness(update[: self.trainable]) for child in children]
        self.places[peer] = children[0] if likeness[0] > likeness[1] else children[1]
        return self.places[peer]

    def _edge(self, v: int) -> Edge:
        edge = self.nodes[v].edge
        if edge is None:
            raise ValueError("the root has no edge")
        return edge
