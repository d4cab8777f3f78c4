"""P is a bijection that keeps cosines, norms and blocks, and follows from the secret alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peer.defence import pool
from peer.errors import UserError
from peer.learning.learner import Entry, Manifest
from peer.permutation import MAX_SECRET, Permutation
from peer.plan import DefencePlan

SECRET = b"sixteen or more bytes"
MANIFEST = Manifest((Entry("w", (30, 20)), Entry("mean", (40,), trainable=False)))


def updates(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, MANIFEST.size)).astype(np.float32)


def cosines(vectors: np.ndarray) -> np.ndarray:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    products: np.ndarray = units @ units.T
    return products


def test_undo_is_the_inverse() -> None:
    p, (update,) = Permutation(SECRET, "plan", MANIFEST), updates(1)
    permuted = p.apply(update)
    assert not np.array_equal(permuted, update)
    assert np.array_equal(p.undo(permuted), update)
    assert np.array_equal(p.apply(p.undo(update)), update)


def test_trainable_values_and_buffers_stay_apart() -> None:
    p, m = Permutation(SECRET, "plan", MANIFEST), MANIFEST.trainable
    places = p.apply(np.arange(MANIFEST.size, dtype=np.float32))
    assert sorted(places[:m]) == list(range(m))
    assert sorted(places[m:]) == list(range(m, MANIFEST.size))


def test_cosines_and_norms_are_those_without_p() -> None:
    p, m, plain = Permutation(SECRET, "plan", MANIFEST), MANIFEST.trainable, updates(8)
    hidden = np.stack([p.apply(update) for update in plain])
    np.testing.assert_allclose(cosines(hidden[:, :m]), cosines(plain[:, :m]), rtol=0, atol=1e-6)
    norms = np.linalg.norm(plain, axis=1)
    np.testing.assert_allclose(np.linalg.norm(hidden, axis=1), norms, rtol=1e-6)


def test_p_of_a_sum_is_undone_bit_by_bit() -> None:
    p, (a, b) = Permutation(SECRET, "plan", MANIFEST), updates(2)
    assert np.array_equal(p.undo(p.apply(a) + p.apply(b)), a + b)


@pytest.mark.parametrize(
    "keys",
    [
        {"rule": "median"},
        {"rule": "trimmed-mean", "byzantine": 2},
        {"rule": "krum"},
        {"rule": "multi-krum"},
        {"rule": "centred-clipping"},
        {"clip": 1.0},
    ],
)
def test_a_defended_coordinator_makes_of_permuted_updates_what_it_would_without_p(
    keys: dict[str, Any],
) -> None:
    p, plain = Permutation(SECRET, "plan", MANIFEST), [*updates(7)]
    plain[3] *= 50
    zero, defence = np.zeros(MANIFEST.size, dtype=np.float32), DefencePlan.model_validate(keys)
    made = pool(defence, zero, [p.apply(update) for update in plain], None)
    # Norms are sums in another order.
    np.testing.assert_allclose(p.undo(made), pool(defence, zero, plain, None), rtol=0, atol=1e-5)


def test_the_secret_and_the_context_decide() -> None:
    (update,) = updates(1)
    same, again, other, elsewhere = (
        Permutation(secret, context, MANIFEST)
        for secret, context in (
            (SECRET, "plan"), (SECRET, "plan"), (SECRET + b"!", "plan"), (SECRET, "another"),
        )
    )  # fmt: skip
    assert same.fingerprint == again.fingerprint
    assert np.array_equal(same.apply(update), again.apply(update))
    assert len({same.fingerprint, other.fingerprint, elsewhere.fingerprint}) == 3
    assert not np.array_equal(same.apply(update), other.apply(update))
    assert not np.array_equal(same.apply(update), elsewhere.apply(update))


def test_every_place_is_about_equally_likely() -> None:
    manifest = Manifest((Entry("w", (4,)),))
    start = np.arange(4, dtype=np.float32)
    counts = np.zeros((4, 4))
    for trial in range(2000):
        value = Permutation(SECRET, str(trial), manifest).apply(start).astype(int)
        counts[np.arange(4), value] += 1
    assert abs(counts - 500).max() < 100  # five standard deviations


def test_the_permutation_of_a_secret_never_changes() -> None:
    manifest = Manifest((Entry("w", (6,)), Entry("b", (2,), trainable=False)))
    p = Permutation(SECRET, "plan", manifest)
    assert p.apply(np.arange(8, dtype=np.float32)).tolist() == [2, 3, 5, 4, 0, 1, 6, 7]
    assert p.fingerprint == "d377eba0e01fbcf3"


def test_wrong_sizes_are_refused() -> None:
    p = Permutation(SECRET, "plan", MANIFEST)
    with pytest.raises(ValueError, match="640 values"):
        p.apply(np.zeros(639, dtype=np.float32))
    with pytest.raises(ValueError, match="640 values"):
        p.undo(np.zeros((1, 640), dtype=np.float32))


@pytest.mark.parametrize("size", [0, 15, MAX_SECRET + 1])
def test_secrets_of_other_lengths_are_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"{size} bytes"):
        Permutation(b"x" * size, "plan", MANIFEST)
