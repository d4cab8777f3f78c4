"""CFL: clusters that come apart where their members' updates say that they disagree.

F. Sattler, K.-R. Müller, W. Samek, "Clustered federated learning: model-agnostic distributed
multitask optimization under privacy constraints", 2019, algorithm 3. Every round the members of a
cluster c send d_i = SGD(theta_c, D_i) - theta_c, and theta_c moves by their mean. Where the mean
has become small but the d_i have not, c is cut in two by the cosines of the d_i, if the cut is
sound. Which cuts are sound is told by one of two rules.

`paper` is the papers' gate: gamma_max < sqrt((1 - alpha_cross_max) / 2). Its guarantee assumes that
gamma_max bounds every member's relative error. A bound that is guessed too small lets it peel a
cluster of one distribution apart, member by member; one above 1 keeps it shut.

`contrast`, the default, is ours. A cut is sound when one half is coherent and the other somewhat
so, and when some cuts running are sound and agree. A half of m members is coherent when its mean
cosine inside exceeds that across by contrast / sqrt(m), and by more than a t test gives to chance.
It assumes that members of one distribution differ by chance: then a few may be alike, but the more
they are, the less their mean cosine exceeds that with the others. It never cuts off a single
member, whose likeness to its own half cannot be judged. Where large models have only a little in
common, contrasts are small and yet certain: halves that are *both* more alike inside than across,
with next to no chance, need no more contrast.
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
    strays,
)
from bootstrap.coordination.tree import Node, ParameterTree
from peer.learning.learner import Vector
from peer.plan import UNDEFENDED, CflPlan, DefencePlan

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the optimal cut of a cluster looks like.

    Attributes:
        halves: its halves' peers. strays: who has no say in the cut, and goes with a half all the
            same: for each half, its peers. cross_max: alpha_cross_max.
        gap: the separation gap g(alpha), where true clusters are known.
        gamma_max: the error bound, given or estimated. gate: whether it opens the papers' gate.
        within: mean cosine inside each half; across: between the halves.
        p: for each half, the chance of being so much more alike inside.
    """

    halves: tuple[Members, Members]
    strays: tuple[Members, Members] = ((), ())
    cross_max: float
    gap: float | None
    gamma_max: float
    gate: bool
    within: tuple[float, float]
    across: float
    p: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one round said of splitting one cluster.

    Attributes:
        t, node, members: the round, the cluster's node in the tree, and who sent an update.
        mean_norm, max_norm: norms of the mean update and of the largest; largest: the largest
            mean_norm of this cluster so far.
        eps1, eps2: what they are compared with.
        evidence: of the cut; None when none was sought.
        agreeing: how many sound cuts running, up to this one, agree with it.
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
    agreeing: int
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
        *,
        defence: DefencePlan = UNDEFENDED,
    ) -> None:
        """Go on from `tree`. `true_clusters`, by peer, serve the diagnostics alone.

        `defence` says what clusters move by instead of their mean update. With one, members whose
        updates resemble nobody's have no say in a cut: their noise would be the best half.
        """
        self.settings = settings
        self.tree = tree
        self._true_clusters = true_clusters
        self._defence = defence

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
        # [choice] a cut is judged by the updates as they came, and by their mean: what Krum makes
        # of them never is small.
        attempt = self._judge(v, t, updates, mean)
        if attempt.children is None or attempt.evidence is None:
            acts = self._defence.acts
            node.update = node.update + (self._pooled(updates, weights) if acts else mean)
            return attempt
        found = attempt.evidence
        halves = [
            {i: updates[i] for i in sorted((*half, *astray))}
            for half, astray in zip(found.halves, found.strays, strict=True)
        ]
        # [choice] this round's updates are not lost: each half starts with those of its own.
        for child, half in zip(self.tree.split(v, t, halves), halves, strict=True):
            self.tree.nodes[child].update = node.update + self._pooled(half, weights)
        return attempt

    def _pooled(self, updates: Mapping[int, Vector], weights: Mapping[int, float] | None) -> Vector:
        """Return what the defence makes of updates, [e]; their mean without one."""
        return fedavg.aggregate(_nothing(updates), updates, weights, self._defence)

    def _judge(self, v: int, t: int, updates: Mapping[int, Vector], mean: Vector) -> Attempt:
        """Return what is to be said of splitting cluster v, and remember what was found."""
        node, members = self.tree.nodes[v], tuple(updates)
        trained = [update[: self.tree.trainable] for update in updates.values()]
        mean_norm, max_norm = _norm(mean[: self.tree.trainable]), max(map(_norm, trained))
        # [choice] children inherit the largest norm: they begin near a stationary point, where
        # their own mean update never is as large as one of the first rounds.
        node.largest = max(node.largest, mean_norm)
        eps1, eps2 = thresholds(self.settings, node.largest, max_norm)
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
        sound = evidence.halves if evidence and not why_not else None
        agreeing = _confirm(node, sound, self.settings)
        if sound and self.settings.rule == "contrast" and agreeing < self.settings.patience:
            why_not = "the cut awaits confirmation"
        count = len(self.tree.nodes)
        return Attempt(
            t=t, node=v, members=members, mean_norm=mean_norm, max_norm=max_norm,
            largest=node.largest, eps1=eps1, eps2=eps2, evidence=evidence, agreeing=agreeing,
            children=None if why_not else (count, count + 1), why_not=why_not,
        )  # fmt: skip

    def _evidence(self, members: Members, updates: Sequence[Vector]) -> Evidence:
        """Return the optimal cut of `members` and what their updates say of it."""
        alpha = cosines(gram(updates))
        # [choice] in a defended cluster strays have no say: the papers' optimal cut would part one
        # of them from all others, round after round.
        astray = strays(alpha, len(updates[0])) if self._defence.acts else []
        heard = [place for place in range(len(members)) if place not in astray]
        among = alpha[np.ix_(heard, heard)]
        cut = bipartition(among)
        found = contrast(among, cut)
        gamma_max = self.settings.gamma
        if gamma_max is None:
            gamma_max = float(estimate_gammas(among).max())
        gap = None
        if self._true_clusters is not None:
            gap = separation_gap(among, cut, [self._true_clusters[members[k]] for k in heard])
        halves = [[heard[k] for k in half] for half in (cut.first, cut.second)]
        along: tuple[list[int], list[int]] = ([], [])
        for place in astray:
            likeness = [float(alpha[place, half].mean()) for half in halves]
            along[int(likeness[1] > likeness[0])].append(place)
        first, second, *lost = (tuple(members[k] for k in part) for part in (*halves, *along))
        return Evidence(
            halves=(first, second), strays=(lost[0], lost[1]), cross_max=cut.cross_max, gap=gap,
            gamma_max=gamma_max, gate=theory.gate(cut.cross_max, gamma_max), within=found.within,
            across=found.across, p=found.p,
        )  # fmt: skip


def thresholds(settings: CflPlan, largest: float, max_norm: float) -> tuple[float, float]:
    """Return eps1 and eps2, given the largest norm of a mean update seen, and of one now.

    The paper's eps1 is a tenth of that norm and its eps2 between eps1 and 10 eps1: [choice] 3 eps1.
    [choice] For the rule `contrast` 0.6 and 0.1: with a constant learning rate the mean update
    stays at 0.2 to 0.45 of its largest norm, and the cut is judged by more than these norms. And
    eps1 is 0.4 of the largest of a member at least: where clusters want the opposite, their updates
    cancel to a mean that is a good part of the first rounds' for ever.
    """
    defaults = (0.1, 0.3) if settings.rule == "paper" else (0.6, 0.1)
    eps1 = defaults[0] if settings.eps1 is None else settings.eps1
    eps2 = defaults[1] if settings.eps2 is None else settings.eps2
    scale = largest if settings.scale == "relative" else 1.0
    cancelled = 0.4 * max_norm if settings.eps1 is None and settings.rule == "contrast" else 0.0
    return max(eps1 * scale, cancelled), eps2 * scale


def objection(settings: CflPlan, evidence: Evidence) -> str | None:
    """Return why the plan's rule does not hold a cut for sound; None when it does."""
    if settings.rule == "paper":
        return None if evidence.gate else "the gate is shut: gamma_max is too large for this cut"
    sizes = [len(half) for half in evidence.halves]
    if min(sizes) < settings.min_half:
        return "a half is too small"
    # [choice] both halves: members whose updates are less noisy than the others' are more alike,
    # with each other and with everybody, but what they leave behind is then less alike than that.
    if max(evidence.p) < settings.level_both:
        return None
    # [choice] mean cosines: they tell a right cut from a peel. Both halves are asked, for a few
    # noisy members, unlike everybody, are no more like each other. But one coherent half will do,
    # and of the other a quarter of it: while that still holds several clusters, its mean shows
    # little.
    strength = [
        math.sqrt(size) * (within - evidence.across)
        for size, within in zip(sizes, evidence.within, strict=True)
    ]
    if min(strength) < settings.contrast / 4:
        return "a half is hardly more alike inside than across"
    coherent = (
        own >= settings.contrast and p < settings.level
        for own, p in zip(strength, evidence.p, strict=True)
    )
    return None if any(coherent) else "neither half is coherent"


def _confirm(node: Node, halves: tuple[Members, Members] | None, settings: CflPlan) -> int:
    """Note a sound cut, or that a round found none; return how many sound cuts running agree.

    [choice] Cuts need not be the same to agree: between three or more clusters several are right,
    and they take turns. But what two right cuts make of those that are in both, four groups or
    fewer, are clusters; a group smaller than `min_half` shows a member on the wrong side.
    """
    if halves is None:
        node.proposals = []
        return 0
    cut = (frozenset(halves[0]), frozenset(halves[1]))
    agreeing = 1
    for before in reversed(node.proposals):
        groups = [len(a & b) for a in before for b in cut if a & b]
        if len(groups) < 2 or min(groups) < settings.min_half:
            break
        agreeing += 1
    proposals = [*node.proposals, cut]
    node.proposals = proposals[max(0, len(proposals) + 1 - settings.patience) :]
    return agreeing


def _mean(updates: Mapping[int, Vector], weights: Mapping[int, float] | None) -> Vector:
    return fedavg.aggregate(_nothing(updates), updates, weights)


def _nothing(updates: Mapping[int, Vector]) -> Vector:
    return np.zeros_like(next(iter(updates.values())))


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _finite(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
