"""How alike the models are that a run has left in its `models/`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from peer.rundir import MODELS
from simulations.curves import Values

MAX_BYTES = 1 << 29
"""Models of more bytes in all are not compared."""


def model_cosines(run: Path) -> tuple[list[int], Values] | None:
    """Return the peers, and the cosines [m, m] of the ways w_i - mean(w) of their final models.

    None where fewer than two models are there, they are too large together, or all are the same.
    [choice] From the mean of all, not from w_0 as h is: what is common to all is common to both
    members of every pair, and w_0 is not among the files of a run.
    """
    files = sorted((run / MODELS).glob("peer-*.safetensors"))
    if len(files) < 2 or sum(file.stat().st_size for file in files) > MAX_BYTES:
        return None
    models = [load_file(file) for file in files]
    names = sorted(models[0])
    w = np.stack([np.concatenate([own[name].ravel() for name in names]) for own in models])
    ways = w.astype(np.float64) - w.mean(axis=0, dtype=np.float64)
    norms = np.linalg.norm(ways, axis=1)
    if not norms.all():
        return None
    ways /= norms[:, None]
    return [int(file.stem.removeprefix("peer-")) for file in files], ways @ ways.T
