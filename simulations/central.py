"""The population of a central method: the same rows as peers among themselves, by a coordinator.

The rules are those of `bootstrap.coordination`; here is only the loop around them, with nothing
lost on the way. It works on any `Crew`: learners one after another, or the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bootstrap.coordination import fedavg, ifca
from bootstrap.coordination.rounds import Exchange, ModelRounds, drive
from peer.cluster_models import best_model, idle, initial_models
from peer.errors import UserError
from peer.learning.learner import Learner, Manifest, Scores, Vector
from peer.merit import precision, recall
from peer.network.vectors import WIDTH
from peer.plan import Plan
from simulations.population import Models, Row, arrive, offered

if TYPE_CHECKING:
    from simulations.attacks import Threat
    from simulations.engine.workers import Engine


class Crew(Protocol):
    """Whoever trains and judges models at all n peers."""

    @property
    def manifest(self) -> Manifest:
        """The layout of the model."""
        ...

    @property
    def initial(self) -> Vector:
        """w_0 [e]."""
        ...

    @property
    def samples(self) -> Sequence[int]:
        """Number of training samples of every peer [n]."""
        ...

    def fit(self, models: Models, peers: Sequence[int], t: int) -> Models:
        """Return of every peer i `models`[i] after its local training.

        Those of others than `peers` mean nothing, and all are lost when the crew trains again.
        """
        ...

    def losses(self, models: Sequence[Vector], peers: Sequence[int], t: int) -> list[list[float]]:
        """Return, for each of `peers`, the loss of each model on its own training data."""
        ...

    def evaluate(self, models: Models) -> list[Scores]:
        """Return every peer's scores of `models`[i] on its own test set."""
        ...


class LearnerCrew:
    """Learners, one after another."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self._learners = learners
        self.manifest = learners[0].manifest
        self.initial = learners[0].initial()
        self.samples = [learner.samples for learner in learners]

    def fit(self, models: Models, peers: Sequence[int], t: int) -> Models:
        """Return what the learners of `peers` make of their models; others stay as they are."""
        trained = list(models)
        for i in peers:
            trained[i] = self._learners[i].fit(models[i], t)
        return trained

    def losses(self, models: Sequence[Vector], peers: Sequence[int], t: int) -> list[list[float]]:
        """Return the losses [peers][models]."""
        return [self._learners[i].train_losses(list(models), t) for i in peers]

    def evaluate(self, models: Models) -> list[Scores]:
        """Return every learner's scores of its model."""
        return [
            learner.evaluate(model) for learner, model in zip(self._learners, models, strict=True)
        ]


class EngineCrew:
    """The engine, all peers at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.manifest = engine.manifest
        self.initial = engine.initial.copy()
        self.samples = engine.samples

    def fit(self, models: Models, peers: Sequence[int], t: int) -> Models:
        """Train `peers`, side by side; what the others trained before stays where it was."""
        self._engine.reset(models)
        self._engine.train(t, peers)
        return list(self._engine.trained)

    def losses(self, models: Sequence[Vector], peers: Sequence[int], t: int) -> list[list[float]]:
        """Return the losses [peers][models], by stacked products where the engine has them."""
        c = len(models)
        if not (self._engine.stacked and self._engine.workers):
            return [self._engine.losses_of(i, list(models), t) for i in peers]
        # The engine judges what peers have trained: the first c rows of that are free here, for
        # every round's training comes after its losses.
        self._engine.trained[:c] = models
        found = self._engine.losses(t, [(i, j) for i in peers for j in range(c)])
        return [found[start : start + c] for start in range(0, len(found), c)]

    def evaluate(self, models: Models) -> list[Scores]:
        """Return every peer's scores of its model."""
        self._engine.reset(models)
        return self._engine.evaluate()


class HostileCrew:
    """A crew of whom some send the coordinator what a threat has them send."""

    def __init__(self, crew: Crew, plan: Plan, threat: Threat) -> None:
        """Take over a crew that has the threat's poisoned data already."""
        self._crew, self._plan, self._threat = crew, plan, threat
        self.manifest = crew.manifest
        self.initial = crew.initial
        self.samples = crew.samples

    def fit(self, models: Models, peers: Sequence[int], t: int) -> Models:
        """Return what peers send: what they trained, or what attackers make of that."""
        sent = list(self._crew.fit(models, peers, t))
        forged = self._threat.forge(self._plan, t, models, sent, present=peers)
        for i, w in forged.items():
            sent[i] = w
        return sent

    def losses(self, models: Sequence[Vector], peers: Sequence[int], t: int) -> list[list[float]]:
        """Return the losses [peers][models]."""
        return self._crew.losses(models, peers, t)

    def evaluate(self, models: Models) -> list[Scores]:
        """Return every peer's scores of its model."""
        return self._crew.evaluate(models)


class CentralPopulation:
    """The peers of `plan` and their coordinator, by `method`: fedavg or ifca.

    `cluster_models` are one for fedavg and c for ifca; `identities` say which is each peer's: the
    best on its training data when it last compared them. `t` is the last finished round.

    [choice] Where a round is evaluated, every peer compares the models anew, whether it took part
    or not, and is judged by its best: as it would when it came to use one.
    """

    def __init__(self, plan: Plan, method: str, crew: Crew) -> None:
        """Draw the initial models. Raises UserError when there are more models than peers."""
        self.plan = plan
        self.method = method
        self.crew = crew
        self.c = plan.c if method == "ifca" else 1
        if self.c > plan.n:
            raise UserError(
                f"{self.c} models are too many for {plan.n} peers", "set central.clusters"
            )
        self._initials = [crew.initial]
        # As live coordinators, it does not know a model that nobody has trained yet.
        self._known: list[Vector | None] = [None] * self.c
        self.identities = [0] * plan.n
        self.t = 0
        self._true_clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self._draws = 0
        if self.c > 1:
            self._draw_models()

    @property
    def cluster_models(self) -> list[Vector]:
        """The model of every cluster, each [e]."""
        return [
            initial if known is None else known
            for initial, known in zip(self._initials, self._known, strict=True)
        ]

    @property
    def models(self) -> Models:
        """The model of every peer's cluster, as it arrives there."""
        return self._dealt(self._arriving(self.cluster_models))

    def run(self, *, evaluate_every: int = 1) -> Iterator[list[Row]]:
        """Yield the rows of every round that is left, as each is finished.

        Accuracy and loss are None except in every `evaluate_every`-th round and the last.
        """
        while self.t < self.plan.rounds:
            due = (self.t + 1) % evaluate_every == 0 or self.t + 1 == self.plan.rounds
            yield self.step(evaluate=due)

    def step(self, *, evaluate: bool = True) -> list[Row]:
        """Run the next round and return every peer's row, by index."""
        self.t += 1
        plan, t = self.plan, self.t
        taking_part = fedavg.participants(range(plan.n), plan.central.fraction, plan.seed, t)
        offered = self._arriving(self.cluster_models)
        if self.c > 1 and t > 1:  # in round 1 by the initial models, which all have seen
            self._identify(taking_part, offered)
        sent = self.crew.fit(self._dealt(offered), taking_part, t)
        received = {i: w for i in taking_part if (w := arrive(sent[i], plan)) is not None}
        weights = None
        if plan.matching.weighting == "samples":
            weights = dict(enumerate(self.crew.samples))
        identities = dict(enumerate(self.identities))
        moved = ifca.aggregate(self._known, received, identities, weights, plan.defence)
        self._known = list(moved)
        scores: Sequence[Scores | None] = [None] * plan.n
        if evaluate:
            if self.c > 1:
                self._identify(range(plan.n), self._arriving(self.cluster_models))
            scores = self.crew.evaluate(self.models)
        trained = {i: identities[i] for i in taking_part}
        trained_by, used_by = _groups(trained), _groups(dict(enumerate(self.identities)))
        return [
            self._row(i, used_by[self.identities[i]], trained.get(i), trained_by, scores[i])
            for i in range(plan.n)
        ]

    def _identify(self, peers: Sequence[int], models: Sequence[Vector]) -> None:
        """Let `peers` choose the model that has the least loss on their training data."""
        losses = self.crew.losses(models, peers, self.t)
        for i, own in zip(peers, losses, strict=True):
            self.identities[i] = best_model(own)

    def _draw_models(self) -> None:
        """Draw the initial models, everybody being asked of each draw."""
        plan, crew, everyone = self.plan, self.crew, list(range(self.plan.n))
        rounds = ModelRounds(plan.model_copy(update={"method": self.method}))

        def drawn(draw: int) -> list[Vector]:
            return initial_models(crew.initial, crew.manifest, self.c, plan.seed, draw)

        def choose(exchange: Exchange) -> dict[int, int]:
            self._draws += 1
            draw = exchange.tasks[0].draw
            losses = crew.losses(self._arriving(drawn(draw)), everyone, 1)
            return dict(enumerate(map(best_model, losses)))

        drive(rounds.draw_models(everyone), choose)
        self._initials = drawn(rounds.draw)
        self.identities = [rounds.places[i] for i in everyone]

    def _arriving(self, models: Sequence[Vector]) -> list[Vector]:
        """Return models as they arrive at peers."""
        return [offered(model, self.plan) for model in models]

    def _dealt(self, models: Sequence[Vector]) -> Models:
        """Return each peer's model by its identity."""
        return [models[c] for c in self.identities]

    def _row(
        self,
        i: int,
        same: Sequence[int],
        trained: int | None,
        trained_by: Mapping[int, Sequence[int]],
        scores: Scores | None,
    ) -> Row:
        """Return the row of peer i; its bag is whoever has the `same` model.

        `trained` is the model that it trained, None when it took no part.
        """
        bag = frozenset(same) - {i}
        part = trained is not None
        together = [] if trained is None else [j for j in trained_by[trained] if j != i]
        model = self.crew.manifest.size * WIDTH[self.plan.network.precision]
        down = self.c * part
        if self.t == 1 and self.c > 1:
            down = self.c * self._draws  # the last draw is what the round begins with
        notes: dict[str, Any] = {"model": self.identities[i], "took_part": part}
        if self.c > 1:
            notes["idle"] = idle(trained_by, self.c)
        return {
            "t": self.t,
            "index": i,
            "cluster": self._true_clusters[i],
            "accuracy": scores.accuracy if scores else None,
            "loss": scores.loss if scores else None,
            "bag": sorted(bag),
            "neighbours": together,
            "precision": precision(bag, i, self._true_clusters),
            "recall": recall(bag, i, self._true_clusters),
            "payload_received": down * model,
            "payload_sent": part * model,
            "notes": notes,
        }


def _groups(identities: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the peers of each model, from the model of each peer."""
    groups: dict[int, list[int]] = {}
    for i, model in identities.items():
        groups.setdefault(model, []).append(i)
    return groups
