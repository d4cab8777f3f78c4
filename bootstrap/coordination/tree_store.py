"""A parameter tree on the disk: tensors as safetensors, everything else in one JSON file.

Tensors lie in `TensorFiles`; `tree.json` names them and is replaced last. So at any moment, after a
crash too, the directory holds the whole tree of one round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from bootstrap.coordination.tensor_files import TensorDigest, TensorFiles
from bootstrap.coordination.tree import Edge, Node, ParameterTree
from peer.errors import StateError
from peer.plan import MAX_PEERS
from peer.sealed import Sealed

TREE = "tree"
"""Where a run directory holds its parameter tree."""
INDEX = "tree.json"
MAX_INDEX = 256 * 2**20
"""Bytes of the largest index that is read."""

_Peer = Annotated[int, Field(ge=0, lt=MAX_PEERS)]
_Place = Annotated[int, Field(ge=0, lt=2 * MAX_PEERS)]
_Count = Annotated[int, Field(ge=0)]
_Norm = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _EdgeRecord(_Record):
    members: tuple[_Peer, ...] = Field(min_length=1)
    updates: TensorDigest


class NodeRecord(_Record):
    """A node as `tree.json` has it: tensors by their checksums."""

    t: _Count
    largest: _Norm
    parent: _Place | None
    edge: _EdgeRecord | None
    children: tuple[_Place, _Place] | None
    proposals: tuple[tuple[tuple[_Peer, ...], tuple[_Peer, ...]], ...]
    update: TensorDigest


class TreeRecord(Sealed):
    """A tree as `tree.json` has it, after round `t`."""

    version: Literal[1] = 1
    plan: str
    t: _Count
    size: _Count
    trainable: _Count
    places: dict[_Peer, _Place]
    nodes: tuple[NodeRecord, ...] = Field(min_length=1)


class TreeStore:
    """The directory of one tree of one federation, whose plan has the digest `plan`."""

    def __init__(self, directory: Path, plan: str) -> None:
        self.directory = directory
        self._plan = plan
        self._tensors = TensorFiles(directory)
        self._edges: dict[int, str] = {}  # an edge never changes: what it holds is hashed once

    def save(self, tree: ParameterTree, t: int) -> None:
        """Write `tree` as it is after round t. Raises StateError when that cannot be done."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            record = TreeRecord(
                plan=self._plan,
                t=t,
                size=tree.nodes[0].update.size,
                trainable=tree.trainable,
                places=tree.places,
                nodes=tuple(self._write_node(v, node) for v, node in enumerate(tree.nodes)),
            )
            record.write(self.directory / INDEX)
            self._tensors.keep(
                {node.update for node in record.nodes}
                | {node.edge.updates for node in record.nodes if node.edge}
            )
        except OSError as error:
            raise StateError(f"cannot write the tree {self.directory}: {error.strerror}") from None

    def load(self, size: int, trainable: int) -> tuple[ParameterTree, int] | None:
        """Return the tree and the round after which it was saved; None where there is none.

        Raises StateError when it is damaged, of another plan, or not of models of `size` values.
        """
        path = self.directory / INDEX
        if not path.exists():
            return None
        record = read_index(path)
        if (record.plan, record.size, record.trainable) != (self._plan, size, trainable):
            raise StateError(f"the tree {path} is of another plan or model")
        tree = ParameterTree(
            trainable, [self._read_node(node, size, trainable) for node in record.nodes]
        )
        tree.places = dict(record.places)
        self._edges = {v: node.edge.updates for v, node in enumerate(record.nodes) if node.edge}
        return tree, record.t

    def _write_node(self, v: int, node: Node) -> NodeRecord:
        edge = None
        if node.edge is not None:
            if v not in self._edges:
                self._edges[v] = self._tensors.write(node.edge.updates)
            edge = _EdgeRecord(members=node.edge.members, updates=self._edges[v])
        return NodeRecord(
            t=node.t,
            largest=node.largest,
            parent=node.parent,
            edge=edge,
            children=node.children,
            proposals=tuple(
                (tuple(sorted(first)), tuple(sorted(second))) for first, second in node.proposals
            ),
            update=self._tensors.write(node.update),
        )

    def _read_node(self, record: NodeRecord, size: int, trainable: int) -> Node:
        edge = None
        if record.edge is not None:
            shape = (len(record.edge.members), trainable)
            edge = Edge(record.edge.members, self._tensors.read(record.edge.updates, shape))
        return Node(
            update=self._tensors.read(record.update, (size,)),
            t=record.t,
            largest=record.largest,
            parent=record.parent,
            edge=edge,
            children=record.children,
            proposals=[(frozenset(first), frozenset(second)) for first, second in record.proposals],
        )


def read_index(path: Path) -> TreeRecord:
    """Return what `tree.json` says of a tree, its shape checked. Raises StateError."""
    try:
        if path.stat().st_size > MAX_INDEX:
            raise StateError(f"{path} is too large to be a tree")
        record = TreeRecord.load(path)
    except OSError:
        raise StateError(f"{path} is missing") from None
    count = len(record.nodes)
    joined = [(child, v) for v, node in enumerate(record.nodes) for child in node.children or ()]
    # Every node but the root is the child of exactly its parent, which comes before it.
    if (
        sorted(joined) != [(v, node.parent) for v, node in enumerate(record.nodes) if v > 0]
        or any(parent >= child for child, parent in joined)
        or any((node.parent is None) != (v == 0) for v, node in enumerate(record.nodes))
        or any((node.edge is None) != (v == 0) for v, node in enumerate(record.nodes))
        or any(place >= count for place in record.places.values())
        or record.trainable > record.size
    ):
        raise StateError(f"{path} is not a tree")
    return record
