"""How a Byzantine peer falsifies what it publishes, by the name a scenario gives.

An attack replaces w^{t-1/2} by another model before others see any of it, so model and evidence
agree with each other; what the peer itself goes on from stays honest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peer.learning.learner import Vector

Attack = Callable[[Vector, Vector, np.random.Generator], Vector]
"""(w^{t-1} [e], w^{t-1/2} [e], generator) -> what is published instead [e]."""


def sign_flip(before: Vector, after: Vector, _rng: np.random.Generator) -> Vector:
    """Return the model that a step of the same length in the opposite direction leads to."""
    return before - (after - before)


def noise(before: Vector, after: Vector, rng: np.random.Generator) -> Vector:
    """Return the model after a random step of the honest one's length."""
    step = rng.standard_normal(len(after), dtype=np.float32)
    length = np.linalg.norm(after - before) / max(float(np.linalg.norm(step)), 1e-12)
    return before + step * np.float32(length)


ATTACKS: dict[str, Attack] = {"sign-flip": sign_flip, "noise": noise}
"""The attacks that there are."""
