"""The permutation P: what hides the order of an update's values from the coordinator.

All peers of a federation derive the same P from a secret that they share out of band and that the
coordinator does not have. They permute an update before they send it, and undo P on what comes
back. Cosines and norms stay as they are, so the coordinator clusters as it would without P. CFL
(F. Sattler, K.-R. Müller, W. Samek, 2019), section V-B.

P hides which value belongs to which weight. It does not hide norms, the values themselves without
their order, or who resembles whom. It is lost when a permuted vector is seen beside the same vector
in order: so peers never send models, whose start w_0 the coordinator knows, but updates alone.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning.learner import Manifest, Vector
from peer.secret_files import MAX_SECRET

MIN_SECRET = 16
"""Bytes of a secret. Fewer could be guessed: whoever guesses it can check it on one update."""


class Permutation:
    """P of one federation and one layout of models.

    Trainable values are permuted among themselves and buffers among themselves: the coordinator
    takes cosines of the first alone.
    """

    def __init__(self, secret: bytes, context: str, manifest: Manifest) -> None:
        """Derive P from the secret; `context` (the plan's digest) tells federations apart.

        Raises UserError when the secret is too short or too long.
        """
        if not MIN_SECRET <= len(secret) <= MAX_SECRET:
            raise UserError(
                f"the secret has {len(secret)} bytes; {MIN_SECRET} to {MAX_SECRET} are needed",
                "(umask 077; head -c 32 /dev/urandom | base64 > secret.txt) makes one",
            )
        # [choice] a sort by the output of SHAKE-256: unlike a numpy generator it is one-way, and
        # the same for every version of every library.
        keys = np.frombuffer(_derive(secret, context, "order", 8 * manifest.size), dtype="<u8")
        parts = np.split(keys, [manifest.trainable])
        order = [np.argsort(part, kind="stable") for part in parts]
        self._order: npt.NDArray[np.intp] = np.concatenate(
            [order[0], order[1] + manifest.trainable]
        )
        self.fingerprint = _derive(secret, context, "fingerprint", 8).hex()
        """16 hex digits that peers of one secret share and that do not lead back to it."""

    def apply(self, update: Vector) -> Vector:
        """Return P(update) [e], a copy. Raises ValueError on another size."""
        self._check(update)
        return update[self._order]

    def undo(self, permuted: Vector) -> Vector:
        """Return the update [e] that `apply` made `permuted` of. Raises ValueError on another size.

        P is linear: what the coordinator averages or sums of permuted updates is undone alike.
        """
        self._check(permuted)
        update = np.empty_like(permuted)
        update[self._order] = permuted
        return update

    def _check(self, vector: Vector) -> None:
        if vector.shape != self._order.shape:
            raise ValueError(f"P permutes {self._order.size} values, not {vector.shape}")


def _derive(secret: bytes, context: str, label: str, size: int) -> bytes:
    """Return `size` bytes that only the secret leads to; other labels give independent ones."""
    shake = hashlib.shake_256()
    for part in (b"panmesh permutation 1", label.encode(), context.encode(), secret):
        shake.update(len(part).to_bytes(4, "big") + part)
    return shake.digest(size)
