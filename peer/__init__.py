"""Everything a device runs: the peer, and the algorithms by which it finds whom to learn with.

    from peer import Plan, run
    results = run(Plan(n=4, rounds=10))

The rooms: `peer.learning` (models, data, training), `peer.matching` (whom to learn with),
`peer.aggregation` (how models are mixed), `peer.network` (messages, transport, membership); they
meet in `peer.node` only. Names of this page are imported when they are first used, so that a
command that needs no torch does not load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peer.export import export_model, load_model
    from peer.hosting import run
    from peer.node import Peer
    from peer.plan import Plan
    from peer.rounds import Result
    from peer.settings import PeerSettings

_HOMES = {
    "Peer": "peer.node",
    "PeerSettings": "peer.settings",
    "Plan": "peer.plan",
    "Result": "peer.rounds",
    "export_model": "peer.export",
    "load_model": "peer.export",
    "run": "peer.hosting",
}

__all__ = ["Peer", "PeerSettings", "Plan", "Result", "export_model", "load_model", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
