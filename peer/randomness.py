"""Where every random draw comes from: (seed, peer index, round, purpose).

No generator lives longer than one use, so nothing about randomness has to be stored: a peer that
was killed and started again draws what it would have drawn, and a simulated peer draws what the
live one draws.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

FEDERATION = -1
"""The peer index of draws that the whole federation shares (initial weights, partition, sketch)."""


class Purpose(IntEnum):
    """What a draw is for. The numbers enter the seed: never reuse or renumber one."""

    INITIAL_WEIGHTS = 1
    PARTITION = 2
    TEST_SPLIT = 3
    SKETCH = 4
    CANDIDATES = 5
    SETTLE = 6
    BATCHES = 7
    DROPOUT = 8
    LOSS_SAMPLES = 9
    LATE_JOIN = 10
    TOPOLOGY = 11
    ESTIMATOR = 12
    SKEW = 13
    PARTICIPANTS = 14
    CLUSTER_MODELS = 15
    LABELS = 16
    LINKS = 20
    DEVICES = 21
    ATTACK = 22
    ATTACKERS = 23
    HELD_OUT = 24
    PRIVACY = 30


def generator(
    seed: int, purpose: Purpose, *, index: int = FEDERATION, t: int = 0
) -> np.random.Generator:
    """Return the generator of one purpose, at peer `index`, in round `t`.

    Raises ValueError when `seed` or `t` is negative or `index` is below -1.
    """
    entropy = (seed, index + 1, t, int(purpose))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def integer_seed(seed: int, purpose: Purpose, *, index: int = FEDERATION, t: int = 0) -> int:
    """Return a seed in [0, 2^31) for libraries with a generator of their own (torch, sklearn)."""
    return int(generator(seed, purpose, index=index, t=t).integers(2**31))
