"""CFL on peers whose optimum is known: the right splits, then none; and why not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.coordination.bipartition import Cut, contrast, cosines, gram
from bootstrap.coordination.cfl import (
    Attempt,
    ClusteredServer,
    Evidence,
    _confirm,
    objection,
    thresholds,
)
from bootstrap.coordination.tree import Node, ParameterTree
from bootstrap.coordination.tree_store import TreeStore
from peer.defence import pool
from peer.errors import UserError
from peer.learning.learner import Entry, Manifest
from peer.permutation import Permutation
from peer.plan import CflPlan, DefencePlan, Plan

SIZE = 200
MANIFEST = Manifest((Entry("w", (SIZE,)), Entry("mean", (3,), trainable=False)))


class Peers:
    """Every peer goes a fifth of the way to its cluster's optimum, with noise of its own data.

    The noise of a peer is the same in every round but for a tenth of it.
    """

    def __init__(self, clusters: int, n: int, noise: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.labels = [i % clusters for i in range(n)]
        optima = rng.normal(size=(clusters, SIZE)) * (clusters > 1)
        self.targets = optima[self.labels] + noise * rng.normal(size=(n, SIZE)) + 3
        self._noise = noise / 10
        self._seed = seed

    def update(self, i: int, model: np.ndarray, t: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, i, t))
        step = (self.targets[i] - model[:SIZE]) / 5 + self._noise * rng.normal(size=SIZE)
        return np.concatenate([step, [1, 2, 3]]).astype(np.float32)


def server(n: int, labels: list[int] | None = None, **settings: Any) -> ClusteredServer:
    tree = ParameterTree.planted(MANIFEST.size, MANIFEST.trainable)
    for i in range(n):
        tree.admit(i)
    return ClusteredServer(CflPlan(**settings), tree, labels)


@pytest.mark.parametrize("rule", ["median", "krum"])
def test_a_defended_cluster_moves_by_its_rule_and_is_judged_by_plain_updates(rule: str) -> None:
    peers, defence = Peers(1, 7, 1.0), DefencePlan.model_validate({"rule": rule})
    zero = np.zeros(MANIFEST.size, dtype=np.float32)
    updates = {i: peers.update(i, zero, 1) for i in range(7)}
    updates[3] = 40 * updates[3]
    plain, other = server(7), server(7)
    defended = ClusteredServer(other.settings, other.tree, defence=defence)
    assert defended.step(1, updates) == plain.step(1, updates)
    moved = defended.tree.nodes[0].update
    assert np.array_equal(moved, pool(defence, zero, [*updates.values()], None))
    honest = [np.linalg.norm(update) for i, update in updates.items() if i != 3]
    assert np.linalg.norm(moved) <= max(honest) < np.linalg.norm(plain.tree.nodes[0].update)


def advance(
    cfl: ClusteredServer, peers: Peers, t: int, present: Iterable[int] | None = None
) -> list[Attempt]:
    """One round; those who are at no leaf are routed first."""
    tree, updates = cfl.tree, {}
    for i in range(len(peers.labels)) if present is None else present:
        while not tree.at_leaf(i):
            tree.route(i, peers.update(i, tree.nodes[tree.places[i]].update, t))
        updates[i] = peers.update(i, tree.nodes[tree.places[i]].update, t)
    return cfl.step(t, updates)


def run(cfl: ClusteredServer, peers: Peers, rounds: range) -> list[Attempt]:
    """Return the attempts that split."""
    attempts = [attempt for t in rounds for attempt in advance(cfl, peers, t)]
    return [attempt for attempt in attempts if attempt.children]


def found(cfl: ClusteredServer) -> set[frozenset[int]]:
    return {frozenset(cfl.tree.members(v)) for v in cfl.tree.leaves} - {frozenset()}


def truth(labels: list[int]) -> set[frozenset[int]]:
    return {frozenset(i for i, own in enumerate(labels) if own == k) for k in set(labels)}


@pytest.mark.parametrize("clusters", [2, 3, 4, 6])
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_the_true_clusters_come_apart_and_nothing_else(clusters: int, noise: float) -> None:
    peers = Peers(clusters, 5 * clusters, noise)
    cfl = server(5 * clusters, peers.labels)
    splits = run(cfl, peers, range(1, 100))
    assert found(cfl) == truth(peers.labels)
    assert len(splits) == clusters - 1
    for split in splits:
        assert split.evidence is not None
        halves = [{peers.labels[i] for i in half} for half in split.evidence.halves]
        assert not halves[0] & halves[1]


class Disturbed(Peers):
    """Three more peers send noise, far longer than the updates of the others."""

    def __init__(self, clusters: int, n: int, seed: int) -> None:
        super().__init__(clusters, n + 3, 0.1, seed)
        self.noisy = {n, n + 1, n + 2}

    def update(self, i: int, model: np.ndarray, t: int) -> np.ndarray:
        if i not in self.noisy:
            return super().update(i, model, t)
        noise = np.random.default_rng((self._seed, i, t)).normal(size=MANIFEST.size)
        return (10 * noise).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_who_resembles_nobody_has_no_say_in_a_defended_cut(seed: int) -> None:
    peers = Disturbed(3, 15, seed)
    true = {part - peers.noisy for part in truth(peers.labels)}
    plain = server(18)
    defended = ClusteredServer(plain.settings, server(18).tree, defence=DefencePlan(rule="median"))
    splits = run(defended, peers, range(1, 60))
    assert {part - peers.noisy for part in found(defended)} - {frozenset()} == true
    for split in splits:
        assert split.evidence is not None
        assert split.children is not None
        astray = set().union(*split.evidence.strays)
        assert astray == peers.noisy & set(split.members)
        for child, half, along in zip(
            split.children, split.evidence.halves, split.evidence.strays, strict=True
        ):
            born = {i for i in split.members if child in lineage(defended.tree, i)}
            assert born == {*half, *along}
            assert not peers.noisy & {*half}
    run(plain, peers, range(1, 60))
    assert {part - peers.noisy for part in found(plain)} - {frozenset()} != true


def test_one_opponent_does_not_keep_clusters_together_where_there_is_a_defence() -> None:
    peers = Peers(2, 13, 0.1)
    tree = server(13).tree
    defended = ClusteredServer(CflPlan(), tree, defence=DefencePlan(rule="median"))
    plain = server(13)
    for cfl in (defended, plain):
        for t in range(1, 60):
            models = {i: cfl.tree.nodes[cfl.tree.places[i]].update for i in range(13)}
            updates = {i: peers.update(i, models[i], t) for i in range(12)}
            # All that the honest ones want together, turned round.
            updates[12] = -sum(updates.values(), np.zeros(MANIFEST.size, dtype=np.float32))
            cfl.step(t, updates)
    true = {part - {12} for part in truth(peers.labels)}
    assert {part - {12} for part in found(defended)} - {frozenset()} == true
    assert {part - {12} for part in found(plain)} - {frozenset()} != true


def lineage(tree: ParameterTree, i: int) -> set[int]:
    """The nodes from the place of peer i up to the root."""
    place: int | None = tree.places[i]
    nodes = set()
    while place is not None:
        nodes.add(place)
        place = tree.nodes[place].parent
    return nodes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [4, 5, 8, 20, 60])
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_one_distribution_is_never_split(seed: int, n: int, noise: float) -> None:
    peers = Peers(1, n, noise, seed)
    cfl = server(n)
    assert run(cfl, peers, range(1, 80)) == []
    assert cfl.tree.leaves == [0]


def test_the_papers_rule_splits_at_once_with_a_gamma_that_is_true() -> None:
    peers = Peers(2, 10, noise=0.1)
    cfl = server(10, peers.labels, rule="paper", gamma=0.3, eps2=0.2)
    splits = run(cfl, peers, range(1, 60))
    assert found(cfl) == truth(peers.labels)
    (split,) = splits
    assert split.evidence is not None
    assert split.agreeing == 1
    assert split.mean_norm < 0.1 * split.largest == split.eps1
    assert split.max_norm > 0.2 * split.largest == split.eps2
    assert split.evidence.gap is not None
    assert split.evidence.gap > 1
    assert split.evidence.gate


def test_the_papers_rule_with_an_estimated_gamma() -> None:
    for clusters, noise in ((2, 0.1), (1, 1.0)):
        peers = Peers(clusters, 10, noise)
        cfl = server(10, rule="paper", eps2=0.05)
        run(cfl, peers, range(1, 60))
        assert found(cfl) == truth(peers.labels)


def test_the_papers_rule_peels_with_a_gamma_that_is_too_small() -> None:
    """What the default rule is for: the noise is above the signal, and gamma = 0 not true."""
    peers = Peers(1, 20, noise=1.0)
    cfl = server(20, rule="paper", gamma=0.0, eps2=0.05)
    assert len(run(cfl, peers, range(1, 60))) > 3


def test_attempts_say_why_not() -> None:
    peers = Peers(2, 8, noise=0.1)
    cfl = server(8, peers.labels)
    told = [attempt.why_not for t in range(1, 30) for attempt in advance(cfl, peers, t)]
    assert told[0] == "the mean update is not small"
    assert told.count("the cut awaits confirmation") == 2
    assert told.count(None) == 1
    assert told[told.index(None) + 1 :].count("the cut awaits confirmation") == 0
    assert set(told[told.index(None) + 1 :]) <= {
        "no member's update is large", "a half is too small",
        "a half is hardly more alike inside than across", "neither half is coherent",
    }  # fmt: skip
    lone = server(2)
    first, *_ = advance(lone, Peers(1, 1, 0.1), 1)
    assert (first.members, first.why_not) == ((0,), "the mean update is not small")
    shut = server(8, rule="paper", eps2=0.2, gamma=0.99)
    four = Peers(4, 8, noise=0.1)
    reasons = [attempt.why_not for t in range(1, 20) for attempt in advance(shut, four, t)]
    assert reasons[-1] == "the gate is shut: gamma_max is too large for this cut"


def test_attempts_are_lines_of_json() -> None:
    peers = Peers(2, 8, noise=0.1)
    cfl = server(8, peers.labels)
    for t in range(1, 30):
        for attempt in advance(cfl, peers, t):
            line = json.loads(json.dumps(attempt.to_json(), allow_nan=False))
            assert line["t"] == t
            assert ("halves" in line) == (attempt.evidence is not None)
            if attempt.evidence is not None:
                assert line["halves"] == [list(half) for half in attempt.evidence.halves]
                assert line["gap"] == attempt.evidence.gap


def test_children_start_with_the_means_of_their_members() -> None:
    peers = Peers(2, 8, noise=0.1)
    cfl = server(8, rule="paper", eps1=0.5, gamma=0.0)
    t, split = 0, None
    while split is None or split.children is None:
        t += 1
        before = cfl.tree.nodes[0].update.copy()
        updates = {i: peers.update(i, before, t) for i in range(8)}
        (split,) = cfl.step(t, updates)
    assert np.array_equal(cfl.tree.nodes[0].update, before)
    for child in split.children:
        members = cfl.tree.members(child)
        mean = np.mean([updates[i].astype(np.float64) for i in members], axis=0)
        np.testing.assert_array_equal(
            cfl.tree.nodes[child].update, before + mean.astype(np.float32)
        )


def test_weights_enter_the_mean() -> None:
    cfl = server(2)
    updates = {i: np.full(MANIFEST.size, float(i), dtype=np.float32) for i in range(2)}
    (attempt,) = cfl.step(1, updates, {0: 1, 1: 3})
    assert cfl.tree.nodes[0].update.tolist() == [0.75] * MANIFEST.size
    assert attempt.mean_norm == pytest.approx(0.75 * np.sqrt(SIZE))
    assert attempt.max_norm == pytest.approx(np.sqrt(SIZE))


def test_a_cluster_that_sends_nothing_keeps_its_model() -> None:
    peers = Peers(2, 8, noise=0.1)
    cfl = server(8)
    run(cfl, peers, range(1, 20))
    gone = cfl.tree.places[0]
    kept = cfl.tree.nodes[gone].update.copy()
    attempts = [advance(cfl, peers, t, present=[1, 3, 5, 7]) for t in range(20, 25)]
    assert all(len(found) == 1 for found in attempts)
    assert np.array_equal(cfl.tree.nodes[gone].update, kept)


def test_members_that_were_away_and_new_ones_are_routed() -> None:
    peers = Peers(4, 28, noise=0.3)
    cfl = server(24)
    early = [i for i in range(24) if i % 6]
    for t in range(1, 40):
        advance(cfl, peers, t, present=early)
    with pytest.raises(ValueError, match="peer 0 has not been routed"):
        cfl.step(40, {0: peers.update(0, cfl.tree.nodes[0].update, 40)})
    for new in range(24, 28):
        cfl.tree.admit(new)
    advance(cfl, peers, 40)
    assert found(cfl) == truth(peers.labels)


def test_taking_turns_does_not_hinder_the_confirmation() -> None:
    """Those who take part change from round to round, and so do the cuts."""
    peers = Peers(2, 20, noise=0.3)
    cfl = server(20)
    rng = np.random.default_rng(0)
    for t in range(1, 60):
        advance(cfl, peers, t, present=sorted(rng.choice(20, 12, replace=False).tolist()))
    advance(cfl, peers, 60)
    assert found(cfl) == truth(peers.labels)


def test_cuts_that_take_turns_agree_but_not_those_that_misplace_a_member() -> None:
    a, b, c = range(3), range(3, 6), range(6, 9)
    others = {
        "turns": ([*a, *b], [*c]),
        "same": ([*b, *c], [*a]),
        "misplaced": ([*b, *c, 0], [1, 2]),
        "without most": ([0, 1], [3, 4, 7]),
        "of others": ([20, 21], [22, 23]),
    }
    agreeing = {}
    for name, halves in others.items():
        node = Node(np.zeros(1, dtype=np.float32))
        settings = CflPlan()
        assert _confirm(node, (tuple(a), (*b, *c)), settings) == 1
        agreeing[name] = _confirm(node, (tuple(halves[0]), tuple(halves[1])), settings)
        assert _confirm(node, None, settings) == 0
        assert node.proposals == []
    assert agreeing == {
        "turns": 2, "same": 2, "misplaced": 1, "without most": 2, "of others": 1,
    }  # fmt: skip


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_no_more_cuts_are_kept_than_are_needed(patience: int) -> None:
    node = Node(np.zeros(1, dtype=np.float32))
    settings = CflPlan(patience=patience)
    found = [_confirm(node, ((0, 1), (2, 3)), settings) for _ in range(6)]
    assert found == [min(i + 1, patience) for i in range(6)]
    assert len(node.proposals) == patience - 1


def test_a_permutation_changes_no_split() -> None:
    peers = Peers(4, 20, noise=0.5)
    p = Permutation(b"a secret of many bytes", "plan", MANIFEST)
    plain, hidden = server(20), server(20)
    for t in range(1, 50):
        advance(plain, peers, t)
        models = [p.undo(node.update) for node in hidden.tree.nodes]
        places = hidden.tree.places
        hidden.step(t, {i: p.apply(peers.update(i, models[places[i]], t)) for i in range(20)})
        assert hidden.tree.places == plain.tree.places
    assert len(plain.tree.leaves) == 4
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        assert np.array_equal(ours.update, p.undo(theirs.update))


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    peers = Peers(4, 20, noise=0.5)
    whole = server(20)
    run(whole, peers, range(1, 40))
    broken = server(20)
    for t in range(1, 40):
        advance(broken, peers, t)
        TreeStore(tmp_path, "plan").save(broken.tree, t)
        loaded = TreeStore(tmp_path, "plan").load(MANIFEST.size, MANIFEST.trainable)
        assert loaded is not None
        assert loaded[1] == t
        broken = ClusteredServer(CflPlan(), loaded[0])
    assert broken.tree.places == whole.tree.places
    assert len(whole.tree.leaves) == 4
    for ours, theirs in zip(whole.tree.nodes, broken.tree.nodes, strict=True):
        assert np.array_equal(ours.update, theirs.update)


def large(clusters: int, n: int, seed: int) -> Sequence[np.ndarray]:
    """Return updates of many values and little in common, some noisier than others."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(clusters, 5000))
    noise = rng.uniform(2, 8, size=n) if clusters == 1 else np.full(n, 4.0)
    return [common[i % clusters] + noise[i] * rng.normal(size=5000) for i in range(n)]


def judged(
    updates: Sequence[np.ndarray], **settings: Any
) -> tuple[set[frozenset[int]], str | None]:
    """Return the halves of the optimal cut, and what is said against it."""
    cfl = server(len(updates), **settings)
    evidence = cfl._evidence(tuple(range(len(updates))), updates)
    return {frozenset(half) for half in evidence.halves}, objection(cfl.settings, evidence)


@pytest.mark.parametrize("seed", range(5))
def test_little_in_common_is_enough_when_both_halves_are_certain(seed: int) -> None:
    updates = large(2, 20, seed)
    halves, against = judged(updates)
    assert halves == {frozenset(range(0, 20, 2)), frozenset(range(1, 20, 2))}
    assert against is None
    assert judged(updates, level_both=0.0)[1] is not None


@pytest.mark.parametrize("n", [20, 60])
def test_those_with_little_noise_are_no_cluster(n: int) -> None:
    """Neither by the optimal cut nor by that of those with little noise from the others."""
    for seed in range(10):
        updates = large(1, n, seed)
        assert judged(updates)[1] is not None
        order = np.argsort([np.linalg.norm(update) for update in updates])
        cut = Cut(tuple(order[: n // 2].tolist()), tuple(order[n // 2 :].tolist()), 0.0)
        quiet, noisy = contrast(cosines(gram(updates)), cut).p
        assert (quiet < 1e-4, noisy > 0.5) == (True, True)


def test_one_certain_half_is_not_enough() -> None:
    def evidence(p: tuple[float, float]) -> Evidence:
        return Evidence(
            halves=((0, 1, 2), (3, 4, 5)), cross_max=0.0, gap=None, gamma_max=9.0, gate=False,
            within=(0.02, 0.03), across=-0.01, p=p,
        )  # fmt: skip

    settings = CflPlan()
    assert objection(settings, evidence((9e-13, 9e-13))) is None
    assert objection(settings, evidence((1e-20, 1e-12))) is not None
    assert objection(settings, evidence((1e-12, 1e-20))) is not None


def test_thresholds() -> None:
    assert thresholds(CflPlan(), 2.0, 2.9) == (1.2, 0.2)
    assert thresholds(CflPlan(), 2.0, 4.0) == (1.6, 0.2)  # the members' updates cancel
    assert thresholds(CflPlan(rule="paper"), 2.0, 4.0) == (0.2, 0.6)
    assert thresholds(CflPlan(eps1=0.3, eps2=0.5), 2.0, 4.0) == (0.6, 1.0)
    assert thresholds(CflPlan(eps1=0.3, eps2=0.5, scale="absolute"), 2.0, 4.0) == (0.3, 0.5)
    with pytest.raises(UserError, match="needs both eps1 and eps2"):
        Plan.from_toml('n = 4\n[cfl]\nscale = "absolute"\neps1 = 0.1')
