"""CountSketch: a short linear summary of a long vector that keeps inner products, in expectation.

M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", ICALP 2002. Here
with one row: the estimate of a cosine has a standard error of about 1 / sqrt(buckets) at most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peer.randomness import Purpose, generator

MAX_BUCKETS = 1 << 16


class CountSketch:
    """The linear map of a federation: value i goes to bucket hash(i) with a random sign.

    Every peer of the same seed and sizes has the same map, so sketches of different peers can be
    compared. It keeps 3 bytes for each of the `size` values.
    """

    def __init__(self, size: int, buckets: int, seed: int) -> None:
        """Draw the hashes and signs. Raises ValueError unless size >= 1, 1 <= buckets <= 65536."""
        if size < 1 or not 1 <= buckets <= MAX_BUCKETS:
            raise ValueError(f"no sketch of {size} values in {buckets} buckets")
        rng = generator(seed, Purpose.SKETCH)
        self.buckets = buckets
        self._hashes = rng.integers(buckets, size=size, dtype=np.uint16)
        self._signs = rng.integers(2, size=size, dtype=np.int8) * np.int8(2) - np.int8(1)

    def apply(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sketch [buckets] of `vector` [size]. Raises ValueError on another size."""
        if vector.shape != self._hashes.shape:
            raise ValueError(f"this sketch is of {self._hashes.size} values, not {vector.shape}")
        signed = np.multiply(vector, self._signs, dtype=np.float64)
        return np.bincount(self._hashes, signed, self.buckets).astype(np.float32)
