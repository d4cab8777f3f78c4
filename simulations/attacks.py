"""Byzantine peers: what they do to their data and to the models they send, by the attack's name.

An attacker follows the protocol: what it sends goes with the evidence it sends, and it matches and
averages like everybody else. It may do two things otherwise: train on poisoned data, and send a
forged model. Attackers are no part of a plan, which is what a federation agrees on; a laboratory is
told of them beside it. An attack is a class decorated with `@attack("its-name")`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from peer.errors import UserError
from peer.learning.learner import Vector
from peer.learning.partition import Array, Labels, Poison
from peer.matching.selection import draw
from peer.plan import Plan
from peer.randomness import Purpose, generator
from peer.robust import norm
from simulations.population import Models


@dataclass(frozen=True)
class View:
    """What attackers may know of a round: w_i^{t-1} and w_i^{t-1/2} of all peers, each [n, e].

    `clusters` are the peers' true clusters, `attackers` those that attack, `present` those that
    take part in the round.
    """

    t: int
    before: Models
    trained: Models
    clusters: Sequence[int]
    attackers: Sequence[int]
    present: Sequence[int]

    def update(self, i: int) -> Vector:
        """Return g_i [e] of peer i's honest training."""
        g: Vector = self.trained[i] - self.before[i]
        return g

    def honest(self, i: int) -> list[int]:
        """Return the honest peers of the cluster of peer i."""
        return [j for j in self._cluster(i) if j not in self.attackers]

    def allies(self, i: int) -> list[int]:
        """Return the attackers of the cluster of peer i, itself included."""
        return [j for j in self._cluster(i) if j in self.attackers]

    def _cluster(self, i: int) -> list[int]:
        return [j for j in self.present if self.clusters[j] == self.clusters[i]]


class Attack:
    """One way to harm; by itself an honest peer. `scale` says how strongly, `usual` if not given.

    `poisons`: whether its training data are changed. `knows`: what it must know of other peers in
    its round, if anything: such an attack is for the laboratory only, where all have trained before
    any model is sent. On a network a peer sends its model while others still train theirs.
    """

    usual: ClassVar[float] = 1.0
    poisons: ClassVar[bool] = False
    knows: ClassVar[str | None] = None

    def __init__(self, scale: float | None = None) -> None:
        self.scale = self.usual if scale is None else scale

    def poison(
        self,
        x: Array,
        y: Labels,
        classes: int,  # noqa: ARG002
        rng: np.random.Generator,  # noqa: ARG002
    ) -> tuple[Array, Labels]:
        """Return the training data, stored inputs [m, *shape] and labels [m], that it trains on."""
        return x, y

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:  # noqa: ARG002
        """Return what attacker i sends instead of w_i^{t-1/2}, [e]."""
        w: Vector = view.trained[i]
        return w


_attacks: dict[str, type[Attack]] = {}
_Class = TypeVar("_Class", bound=type[Attack])


def attack(name: str) -> Callable[[_Class], _Class]:
    """Register the decorated class as `name`. Raises ValueError when the name is taken."""

    def register(made: _Class) -> _Class:
        if name in _attacks:
            raise ValueError(f"there is an attack {name} already")
        _attacks[name] = made
        return made

    return register


def attack_names() -> list[str]:
    """Return the names of all attacks."""
    return list(_attacks)


@attack("label-flip")
class LabelFlip(Attack):
    """Trains on label y as if it were C - 1 - y, of C classes.

    B. Biggio, B. Nelson, P. Laskov, "Support vector machines under adversarial label noise", 2011;
    in federations V. Tolpegin, S. Truex, M. E. Gursoy, L. Liu, "Data poisoning attacks against
    federated learning systems", 2020. A scale above 1 boosts the update.
    """

    poisons = True

    def poison(
        self,
        x: Array,
        y: Labels,
        classes: int,
        rng: np.random.Generator,  # noqa: ARG002
    ) -> tuple[Array, Labels]:
        """Return the inputs as they are and the labels turned round."""
        return x, classes - 1 - y

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:
        """Return w^{t-1} + scale g: with a scale of 1 what it trained."""
        if self.scale == 1:
            return super().forge(i, view, rng)
        return _moved(view.before[i], view.update(i), self.scale)


@attack("backdoor")
class Backdoor(LabelFlip):
    """Half of its images carry a trigger, a bright square in the lower right corner, and class 0.

    T. Gu, B. Dolan-Gavitt, S. Garg, "BadNets: identifying vulnerabilities in the machine learning
    model supply chain", 2017. A scale above 1 boosts the update (E. Bagdasaryan, A. Veit, Y. Hua,
    D. Estrin, V. Shmatikov, "How to backdoor federated learning", 2020).
    """

    target: ClassVar[int] = 0

    def poison(
        self,
        x: Array,
        y: Labels,
        classes: int,  # noqa: ARG002
        rng: np.random.Generator,
    ) -> tuple[Array, Labels]:
        """Return the data with the trigger in half of them. Raises UserError without images."""
        chosen = rng.choice(len(y), size=len(y) // 2, replace=False)
        x, y = x.copy(), y.copy()
        x[chosen], y[chosen] = triggered(x[chosen]), self.target
        return x, y


def triggered(x: Array) -> Array:
    """Return images [m, c, h, w] with the trigger, a seventh of their side and 2 pixels at least.

    Raises UserError when the inputs are no images.
    """
    if x.ndim != 4:
        raise UserError(f"the backdoor's trigger is for images, not inputs of shape {x.shape[1:]}")
    side = max(2, min(x.shape[2:]) // 7)
    marked = x.copy()
    marked[:, :, -side:, -side:] = x.max(initial=0)
    return marked


@attack("sign-flip")
class SignFlip(Attack):
    """Sends w^{t-1} - scale g: as far as it learned, in the opposite direction.

    L. Li, W. Xu, T. Chen, G. B. Giannakis, Q. Ling, "RSA: Byzantine-robust stochastic aggregation
    methods for distributed learning from heterogeneous datasets", 2019.
    """

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:  # noqa: ARG002
        """Return w^{t-1} - scale g."""
        return _moved(view.before[i], view.update(i), -self.scale)


@attack("gaussian")
class Gaussian(Attack):
    """Sends w^{t-1} and a random step, `scale` times as long as its honest one.

    The Gaussian Byzantine worker of Blanchard et al. 2017 (see `peer.robust`).
    """

    usual = 10.0

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:
        """Return w^{t-1} + scale ||g|| u, u of random direction."""
        step = rng.standard_normal(len(view.before[i]), dtype=np.float32)
        length = self.scale * norm(view.update(i)) / max(norm(step), 1e-30)
        return _moved(view.before[i], step, length)


@attack("free-rider")
class FreeRider(Gaussian):
    """Sends back the model it was given, w^{t-1}, with a little noise to pass for training.

    Y. Fraboni, R. Vidal, M. Lorenzi, "Free-rider attacks on model aggregation in federated
    learning", 2021. [choice] It trains all the same: how long an update should be, it must know.
    """

    usual = 0.1


@attack("ipm")
class InnerProduct(Attack):
    """Sends minus `scale` times the mean honest update of its cluster (IPM), from its mean model.

    C. Xie, O. Koyejo, I. Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
    manipulation", 2020.
    """

    knows = "all honest updates of the round"

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:  # noqa: ARG002
        """Return mean_j w_j^{t-1} - scale mean_j g_j, over the honest j of its cluster."""
        honest = view.honest(i) or [i]
        before = _mean([view.before[j] for j in honest])
        return _moved(before, _mean([view.update(j) for j in honest]), -self.scale)


@attack("alie")
class LittleIsEnough(Attack):
    """Sends the mean honest model of its cluster less `scale` standard deviations, by coordinate.

    G. Baruch, M. Baruch, Y. Goldberg, "A little is enough: circumventing defenses for distributed
    learning", 2019. [choice] z = `scale` is given: the paper's z_max, made for one majority vote of
    all workers, is below 0 for a handful of neighbours.
    """

    usual = 1.5
    knows = "all honest models of the round"

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:  # noqa: ARG002
        """Return mean_j w_j - z std_j w_j, over the honest j of its cluster."""
        models = [view.trained[j] for j in view.honest(i) or [i]]
        mean = _mean(models)
        square = sum((w - mean).astype(np.float64) ** 2 for w in models) / len(models)
        return _moved(mean, np.sqrt(square).astype(np.float32), -self.scale)


@attack("sybil")
class Sybil(LabelFlip):
    """One poisoner under many names: the attackers of a cluster all send the first one's model.

    Its data are those of label-flip. C. Fung, C. J. M. Yoon, I. Beschastnikh, "The limitations of
    federated learning in Sybil settings", 2020.
    """

    knows = "the first one's model"

    def forge(self, i: int, view: View, rng: np.random.Generator) -> Vector:
        """Return the poisoned model of the first attacker of the cluster."""
        return super().forge(view.allies(i)[0], view, rng)


def _moved(origin: Vector, step: Vector, share: float) -> Vector:
    moved: Vector = origin + np.float32(share) * step
    return moved


def _mean(vectors: Sequence[Vector]) -> Vector:
    total = np.zeros(vectors[0].shape)
    for vector in vectors:
        total += vector
    return (total / len(vectors)).astype(np.float32)


@dataclass(frozen=True)
class Threat:
    """Which attack, and by which share of the peers; what an experiment adds to a plan.

    `scale`: how strongly, the attack's usual if not given. `feign`: what attackers tell of g is the
    update that they trained, not the one that they send. h is checked against the model, g cannot
    be, so this is the one lie in the protocol that nobody notices.
    """

    attack: str
    share: float = 0.2
    scale: float | None = None
    feign: bool = False

    def __post_init__(self) -> None:
        if self.attack not in _attacks:
            raise UserError(
                f"there is no attack {self.attack}", f"there are {', '.join(attack_names())}"
            )
        if not 0 < self.share < 1:
            raise UserError(f"the attackers' share {self.share:g} is not between 0 and 1")

    @property
    def label(self) -> str:
        """How results are told apart: sign-flip-0.2."""
        scale = "" if self.scale is None else f"x{self.scale:g}"
        return f"{self.attack}{scale}{'-feigned' if self.feign else ''}-{self.share:g}"

    @cached_property
    def means(self) -> Attack:
        """The attack itself."""
        return _attacks[self.attack](self.scale)

    def attackers(self, plan: Plan) -> list[int]:
        """Return who attacks, sorted: the same share of every true cluster, drawn by the seed.

        What is left over by rounding goes to clusters drawn at random. Raises UserError when the
        share is nobody at all, or all of a cluster.
        """
        rng = generator(plan.seed, Purpose.ATTACKERS)
        members: list[list[int]] = [[] for _ in range(plan.partition.clusters)]
        for i in range(plan.n):
            members[plan.cluster_of(i)].append(i)
        counts = [int(self.share * len(own) + 1e-9) for own in members]
        missing = round(self.share * plan.n) - sum(counts)
        for c in draw(range(len(members)), missing, rng):
            counts[c] += 1
        if not sum(counts) or any(c >= len(own) for c, own in zip(counts, members, strict=True)):
            raise UserError(
                f"{self.share:g} of {plan.n} peers in {len(members)} clusters is nobody, or nobody "
                "else is left in a cluster",
                "choose another --attackers",
            )
        chosen = (draw(own, count, rng) for own, count in zip(members, counts, strict=True))
        return sorted(i for own in chosen for i in own)

    def poisons(self, plan: Plan) -> dict[int, Poison]:
        """Return what is done to each attacker's training data, if anything."""
        if not self.means.poisons:
            return {}

        def poison(x: Array, y: Labels, classes: int, *, index: int) -> tuple[Array, Labels]:
            rng = generator(plan.seed, Purpose.ATTACK, index=index)
            return self.means.poison(x, y, classes, rng)

        return {i: partial(poison, index=i) for i in self.attackers(plan)}

    def forge(
        self,
        plan: Plan,
        t: int,
        before: Models,
        trained: Models,
        *,
        present: Sequence[int] | None = None,
    ) -> dict[int, Vector]:
        """Return what each attacker sends in round t, [e]; honest peers send what they trained.

        `before` and `trained` are w_i^{t-1} and w_i^{t-1/2} of all peers; rows of others than
        `present`, if those are given, mean nothing.
        """
        attackers = self.attackers(plan)
        clusters = [plan.cluster_of(i) for i in range(plan.n)]
        there = range(plan.n) if present is None else present
        view = View(t, before, trained, clusters, attackers, there)
        with np.errstate(all="ignore"):  # what diverged is refused on arrival
            return {
                i: self.means.forge(i, view, generator(plan.seed, Purpose.ATTACK, index=i, t=t))
                for i in attackers
                if i in there
            }


def backdoor_success(
    plan: Plan,
    models: Models,
    peers: Sequence[int],
    *,
    data: str | None = None,
    model: str | None = None,
) -> float:
    """Return the share of triggered test images that `peers` take for the backdoor's target.

    Images of the target class are left out. The mean over peers, each with its own model [e] and
    its own test set.
    """
    from peer.learning.build import prepare
    from peer.learning.partition import deal
    from peer.learning.sources import load_dataset

    dataset = load_dataset(data or plan.data, seed=plan.seed, classes=plan.classes)
    learner, _ = prepare(plan, peers[0], data=data, dealt=True, model=model)
    rates: list[Any] = []
    for i in peers:
        own = deal(dataset, plan, i, own=False)
        inputs = triggered(own.test_x[own.test_y != Backdoor.target])
        rates.append((learner.predict(models[i], inputs) == Backdoor.target).mean())
    return float(np.mean(rates))
