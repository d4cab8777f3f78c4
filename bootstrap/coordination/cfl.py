"""CFL: clusters that come apart where their members' updates say that they disagree.

F. Sattler, K.-R. Müller, W. Samek, "Clustered federated learning: model-agnostic distributed
multitask optimization under privacy constraints", 2019, algorithm 3. Every round the members of a
cluster c send d_i = SGD(theta_c, D_i) - theta_c, and theta_c moves by their mean. Where the mean
has become small but the d_i have not, c is cut in two by the cosines of the d_i, if the cut is
sound. Which cuts are sound is told by one of two rules.

`paper` is the papers' gate: gamma_max < sqrt((1 - alpha_cross_max) / 2). Its guarantee assumes that
gamma_max bounds every member's relative error. A bound that is guessed too small lets it peel a
cluster of one distribution apart, member by member; one above 1 keeps it shut.

`contrast`, the default, is ours. It compares the cosines inside each half with those across by a t
test, and wants to find the same cut several times. It assumes that where all members share one
distribution the cosines of different pairs are exchangeable, so that no cut has a contrast beyond
chance. It never cuts off a single member, whose likeness to its own half cannot be judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bootstrap.coordination import fedavg, theory
from bootstrap.coordination.bipartition import (
    bipartition,
    contrast,
    cosines,
    estimate_gammas,
    gram,
    separation_gap,
)
from bootstrap.coordination.tree import Halves, Node, ParameterTree, Proposal
from peer.learning.learner import Vector
from peer.plan import CflPlan

Members = tuple[int, ...]

MAX_PROPOSALS = 16
"""Cuts that await confirmation; the one found longest ago gives way to a new one."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the optimal cut of a cluster looks like.

    Attributes:
        halves: its halves' peers. cross_max: alpha_cross_max.
        gap: the separation gap g(alpha), where true clusters are known.
        gamma_max: the error bound, given or estimated. gate: whether it opens the papers' gate.
        within: mean cosine inside each half; across: between the halves.
        t_statistic, p: the contrast of the cut, and the chance of it within one distribution.
    """

    halves: tuple[Members, Members]
    cross_max: float
    gap: float | None
    gamma_max: float
    gate: bool
    within: tuple[float, float]
    across: float
    t_statistic: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one round said of splitting one cluster.

    Attributes:
        t, node, members: the round, the cluster's node in the tree, and who sent an update.
        mean_norm, max_norm: norms of the mean update and of the largest; largest: the largest
            mean_norm of this cluster so far.
        eps1, eps2: what they are compared with.
        evidence: of the cut; None when none was sought.
        found: how many rounds have found this sound cut, since the last that found none.
        children: the nodes that it was split into; None when it was not: `why_not` says why.
    """

    t: int
    node: int
    members: Members
    mean_norm: float
    max_norm: float
    largest: float
    eps1: float
    eps2: float
    evidence: Evidence | None
    found: int
    children: tuple[int, int] | None
    why_not: str | None

    def to_json(self) -> dict[str, Any]:
        """Return a line of the metrics, evidence spread out; null is what is not finite."""
        line = asdict(self)
        line |= line.pop("evidence") or {}
        return {name: _finite(value) for name, value in line.items()}


class ClusteredServer:
    """The server's side of CFL. Pure: updates in, models and diagnostics out.

    A peer that is new, or was away when its cluster was split, is first routed (`tree.route`) by
    updates from the model of its place, until that is a leaf. Then a round is one call of `step`.
    `tree` is the whole state.
    """

    def __init__(
        self,
        settings: CflPlan,
        tree: ParameterTree,
        true_clusters: Sequence[int] | None = None,
    ) -> None:
        """Go on from `tree`. `true_clusters`, by peer, serve the diagnostics alone."""
        self.settings = settings
        self.tree = tree
        self._true_clusters = true_clusters

    def step(
        self, t: int, updates: Mapping[int, Vector], weights: Mapping[int, float] | None = None
    ) -> list[Attempt]:
        """Average the updates of round t in each cluster, and split those that are due.

        `updates` are d_i [e] of peers whose places are leaves, taken from the models of these;
        `weights` are their numbers of samples, where those shall count. A cluster that nobody sent
        anything for keeps its model. Returns an attempt for every other cluster. Raises KeyError
        for a peer that was not admitted, ValueError for one that is not at a leaf.
        """
        groups: dict[int, dict[int, Vector]] = {}
        for i in sorted(updates):
            if not self.tree.at_leaf(i):
                raise ValueError(f"peer {i} has not been routed to a leaf")
            groups.setdefault(self.tree.places[i], {})[i] = updates[i]
        return [self._advance(v, t, groups[v], weights) for v in sorted(groups)]

    def _advance(
        self, v: int, t: int, updates: Mapping[int, Vector], weights: Mapping[int, float] | None
    ) -> Attempt:
        """Move cluster v, or split it and move its halves."""
        node = self.tree.nodes[v]
        mean = _mean(updates, weights)
        attempt = self._judge(v, t, updates, mean)
        if attempt.children is None or attempt.evidence is None:
            node.update = node.update + mean
            return attempt
        halves = [{i: updates[i] for i in half} for half in attempt.evidence.halves]
        # [choice] this round's updates are not lost: each half starts with the mean of its own.
        for child, half in zip(self.tree.split(v, t, halves), halves, strict=True):
            self.tree.nodes[child].update = node.update + _mean(half, weights)
        return attempt

    def _judge(self, v: int, t: int, updates: Mapping[int, Vector], mean: Vector) -> Attempt:
        """Return what is to be said of splitting cluster v, and remember what was found."""
        node, members = self.tree.nodes[v], tuple(updates)
        trained = [update[: self.tree.trainable] for update in updates.values()]
        mean_norm, max_norm = _norm(mean[: self.tree.trainable]), max(map(_norm, trained))
        # [choice] children inherit the largest norm: they begin near a stationary point, where
        # their own mean update never is as large as one of the first rounds.
        node.largest = max(node.largest, mean_norm)
        eps1, eps2 = thresholds(self.settings, node.largest)
        evidence: Evidence | None = None
        why_not: str | None
        if mean_norm >= eps1:
            why_not = "the mean update is not small"
        elif max_norm <= eps2:
            why_not = "no member's update is large"
        elif len(members) < 2:
            why_not = "one member cannot be cut"
        else:
            evidence = self._evidence(members, trained)
            why_not = objection(self.settings, evidence)
        found = _confirm(node, evidence.halves if evidence and not why_not else None)
        if not why_not and self.settings.rule == "contrast" and found < self.settings.patience:
            why_not = "the cut awaits confirmation"
        count = len(self.tree.nodes)
        return Attempt(
            t=t, node=v, members=members, mean_norm=mean_norm, max_norm=max_norm,
            largest=node.largest, eps1=eps1, eps2=eps2, evidence=evidence, found=found,
            children=None if why_not else (count, count + 1), why_not=why_not,
        )  # fmt: skip

    def _evidence(self, members: Members, updates: Sequence[Vector]) -> Evidence:
        """Return the optimal cut of `members` and what their updates say of it."""
        alpha = cosines(gram(updates))
        cut = bipartition(alpha)
        found = contrast(alpha, cut)
        gamma_max = self.settings.gamma
        if gamma_max is None:
            gamma_max = float(estimate_gammas(alpha).max())
        gap = None
        if self._true_clusters is not None:
            gap = separation_gap(alpha, cut, [self._true_clusters[i] for i in members])
        first, second = (tuple(members[i] for i in half) for half in (cut.first, cut.second))
        return Evidence(
            halves=(first, second), cross_max=cut.cross_max, gap=gap, gamma_max=gamma_max,
            gate=theory.gate(cut.cross_max, gamma_max), within=found.within, across=found.across,
            t_statistic=found.t, p=found.p,
        )  # fmt: skip


def thresholds(settings: CflPlan, largest: float) -> tuple[float, float]:
    """Return eps1 and eps2, given the largest norm of a mean update seen.

    The paper's eps1 is a tenth of that norm and its eps2 between eps1 and 10 eps1: [choice] 3 eps1.
    [choice] For the rule `contrast` 0.6 and 0.1: with a constant learning rate the mean update
    stays at 0.2 to 0.45 of its largest norm, and the cut is judged by more than these norms.
    """
    defaults = (0.1, 0.3) if settings.rule == "paper" else (0.6, 0.1)
    eps1 = defaults[0] if settings.eps1 is None else settings.eps1
    eps2 = defaults[1] if settings.eps2 is None else settings.eps2
    scale = largest if settings.scale == "relative" else 1.0
    return eps1 * scale, eps2 * scale


def objection(settings: CflPlan, evidence: Evidence) -> str | None:
    """Return why the plan's rule does not hold a cut for sound; None when it does."""
    if settings.rule == "paper":
        return None if evidence.gate else "the gate is shut: gamma_max is too large for this cut"
    if min(map(len, evidence.halves)) < settings.min_half:
        return "a half is too small"
    # [choice] the chance is that of a fixed cut, not of the best of many; the level is far below
    # usual ones for that reason, and because every round tests anew.
    return None if evidence.p < settings.level else "the contrast of the halves is within chance"


def _confirm(node: Node, halves: tuple[Members, Members] | None) -> int:
    """Note a sound cut, or that a round found none; return how often this one has been found.

    [choice] rounds count from the last that found no sound cut, but need not find the same cut one
    after another: between three or more clusters several cuts are right, and they take turns.
    """
    if halves is None:
        node.proposals = []
        return 0
    cut = (frozenset(halves[0]), frozenset(halves[1]))
    alike = [proposal for proposal in node.proposals if _agree(proposal.halves, cut)]
    others = [proposal for proposal in node.proposals if proposal not in alike]
    found = max((proposal.found for proposal in alike), default=0) + 1
    node.proposals = [*others, Proposal(cut, found)][-MAX_PROPOSALS:]
    return found


def _agree(before: Halves, now: Halves) -> bool:
    """Tell whether two cuts separate those that are in both of them alike, and separate some."""
    both = (before[0] | before[1]) & (now[0] | now[1])
    halves = {half & both for half in now}
    return frozenset() not in halves and halves == {half & both for half in before}


def _mean(updates: Mapping[int, Vector], weights: Mapping[int, float] | None) -> Vector:
    nothing = np.zeros_like(next(iter(updates.values())))
    return fedavg.aggregate(nothing, updates, weights)


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _finite(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
