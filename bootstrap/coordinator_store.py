"""What a coordinator keeps across restarts: the models, and who stands where.

`coordinator.json` is written before the first round, so that it is missed when it is gone, and
replaced after every round. Of IFCA and FedAvg it names the models, which lie beside it; of CFL the
tree is written after it, and what the tree says counts: a crash between the two leaves the round
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bootstrap.coordination.rounds import ClusterRounds, Method, ModelRounds
from bootstrap.coordination.tensor_files import TensorDigest, TensorFiles
from bootstrap.coordination.tree_store import TREE, TreeStore
from peer.errors import StateError
from peer.network.messages import Digest, Index, ModelNumber, PeerId, Round
from peer.plan import Plan
from peer.rundir import holds_rows
from peer.sealed import Sealed
from peer.standing import Standing

FILE = "coordinator.json"
MODELS = "cluster-models"

_Size = Annotated[int, Field(ge=1, le=2**40)]


class Layout(BaseModel):
    """What the peers of a federation must agree on: the digest of the model, its values and how
    many of them are trained, and the fingerprint of the permutation, "" without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Digest
    size: _Size
    trainable: _Size
    fingerprint: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]


class _Saved(Sealed):
    """What the file holds."""

    plan: Digest
    t: Round
    layout: Layout
    draw: Annotated[int, Field(ge=0)]
    owners: dict[Index, PeerId]
    places: dict[Index, ModelNumber]
    trained: dict[Index, ModelNumber]
    present: tuple[Index, ...]
    models: tuple[TensorDigest | None, ...]


@dataclass(frozen=True)
class Saved:
    """A coordinator after its last finished round: `method.version`.

    `owners` are the peers' ids by index; `present` who was there when the round ended.
    """

    layout: Layout
    method: Method
    owners: dict[int, str]
    standing: Standing
    present: tuple[int, ...]


class CoordinatorStore:
    """Keeps the coordinator of `plan` in a state directory, which must be there."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._directory = directory
        self._plan = plan
        self._tensors = TensorFiles(directory / MODELS)
        self._tree = TreeStore(directory / TREE, plan.digest)

    def save(self, saved: Saved) -> None:
        """Write all of it. Raises StateError when that cannot be done."""
        method = saved.method
        try:
            models: tuple[str | None, ...] = ()
            if isinstance(method, ModelRounds):
                (self._directory / MODELS).mkdir(exist_ok=True)
                models = tuple(
                    None if model is None else self._tensors.write(model) for model in method.own
                )
            record = _Saved(
                plan=self._plan.digest, t=method.version, layout=saved.layout, draw=method.draw,
                owners=saved.owners, places=dict(saved.standing.places),
                trained=dict(saved.standing.trained), present=saved.present, models=models,
            )  # fmt: skip
            record.write(self._directory / FILE)
            if isinstance(method, ClusterRounds):
                self._tree.save(method.server.tree, method.version)
            else:
                self._tensors.keep({digest for digest in models if digest is not None})
        except OSError as error:
            raise StateError(f"cannot write to {self._directory}: {error.strerror}") from None

    def load(self) -> Saved | None:
        """Return what was saved; None where no round has been finished.

        Raises StateError when it is damaged, lost, or of another plan.
        """
        path = self._directory / FILE
        try:
            record = _Saved.load(path)
        except FileNotFoundError:
            if self._learned():
                raise StateError(
                    f"{self._directory} holds a run but no {FILE}",
                    "restore it from a copy, or begin anew, every node with another --state",
                ) from None
            return None
        if record.plan != self._plan.digest:
            raise StateError(f"{path} belongs to a federation of another plan")
        if record.t == 0:
            return None
        standing = Standing(record.places, record.trained)
        if self._plan.method != "cfl":
            return self._saved(record, self._models(record), standing)
        loaded = self._tree.load(record.layout.size, record.layout.trainable)
        if loaded is None or loaded[1] not in (record.t, record.t - 1):
            raise StateError(f"the tree beside {path} is lost, or of another round")
        tree, t = loaded
        if t == 0:
            return None
        if t < record.t:
            standing = Standing(dict(tree.places))
        return self._saved(record, ClusterRounds(self._plan, tree, t), standing)

    def _learned(self) -> bool:
        """Return whether there is what is only written once the file is there."""
        return (
            (self._directory / TREE).exists()
            or any((self._directory / MODELS).glob("*.safetensors"))
            or holds_rows(self._directory)
        )

    def _models(self, record: _Saved) -> Method:
        method = ModelRounds(self._plan)
        if len(record.models) != method.c:
            raise StateError(f"{self._directory / FILE} does not hold {method.c} models")
        shape = (record.layout.size,)
        models = [None if d is None else self._tensors.read(d, shape) for d in record.models]
        method.restore(record.t, record.draw, record.places, models)
        return method

    @staticmethod
    def _saved(record: _Saved, method: Method, standing: Standing) -> Saved:
        return Saved(record.layout, method, dict(record.owners), standing, record.present)
