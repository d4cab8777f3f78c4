"""The population of CFL: peers, the server that clusters them, and the tree that it grows.

The rules are those of `bootstrap.coordination`; here is only the loop around them, with nothing
lost on the way. It works on any `Crew`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bootstrap.coordination import fedavg
from bootstrap.coordination.cfl import Attempt
from bootstrap.coordination.rounds import ClusterRounds, Exchange, drive
from bootstrap.coordination.tree import ParameterTree
from peer.learning.learner import Scores, Vector
from peer.merit import precision, recall
from peer.network.vectors import WIDTH
from peer.permutation import Permutation
from peer.plan import Plan
from simulations.central import Crew
from simulations.population import Models, Row, arrive, offered


class ClusteredPopulation:
    """The peers of `plan` and their coordinator, by CFL.

    `server` holds the tree. A peer's accuracy is that of the model of its place in the tree. With a
    `secret`, peers permute what they send, as live ones do when the plan says so. `t` is the last
    finished round.
    """

    def __init__(self, plan: Plan, crew: Crew, *, secret: bytes | None = None) -> None:
        """Start with one cluster. Raises UserError when the secret is too short."""
        self.plan = plan
        self.crew = crew
        self.t = 0
        self._true_clusters = [plan.cluster_of(i) for i in range(plan.n)]
        self._p = None if secret is None else Permutation(secret, plan.digest, crew.manifest)
        tree = ParameterTree.planted(crew.manifest.size, crew.manifest.trainable)
        self._rounds = ClusterRounds(plan, tree)
        self.server = self._rounds.server
        for i in range(plan.n):
            tree.admit(i)

    @property
    def models(self) -> Models:
        """The model of every peer's place."""
        models = {v: self._model(v) for v in set(self.server.tree.places.values())}
        return [models[self.server.tree.places[i]] for i in range(self.plan.n)]

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
        plan, tree = self.plan, self.server.tree
        taking_part = fedavg.participants(range(plan.n), plan.central.fraction, plan.seed, self.t)
        exchanges = self.route(taking_part)
        updates = self._updates([i for i in taking_part if tree.at_leaf(i)])
        weights = None
        if plan.matching.weighting == "samples":
            weights = dict(enumerate(self.crew.samples))
        attempts = self.server.step(self.t, updates, weights)
        told = {attempt.members[0]: attempt for attempt in attempts}
        scores = self.crew.evaluate(self.models) if evaluate else [None] * plan.n
        exchanges = {i: exchanges[i] + 1 for i in taking_part}
        members = {v: tree.members(v) for v in set(tree.places.values())}
        return [
            self._row(i, exchanges.get(i, 0), members[tree.places[i]], told.get(i), scores[i])
            for i in range(plan.n)
        ]

    def route(self, peers: Sequence[int]) -> dict[int, int]:
        """Bring `peers` to leaves, each by its updates; return how many updates each one sent.

        One whose update does not arrive stays where it is.
        """
        sent = dict.fromkeys(peers, 0)

        def train(exchange: Exchange) -> dict[int, Vector]:
            updates = self._updates(list(exchange.tasks))
            for i in updates:
                sent[i] += 1
            return updates

        drive(self._rounds.route(self.t, peers), train)
        return sent

    def _model(self, v: int) -> Vector:
        """Return the model of node v [e] as peers have it: w_0 + u_v, as that arrives."""
        update = offered(self.server.tree.nodes[v].update, self.plan)
        if self._p is not None:
            update = self._p.undo(update)
        return self.crew.initial + update

    def _updates(self, peers: Sequence[int]) -> dict[int, Vector]:
        """Return what arrives of d_i [e] of `peers`, each from the model of its place."""
        before = self.models
        trained = self.crew.fit(before, peers, self.t)
        updates = {}
        for i in peers:
            update = trained[i] - before[i]
            sent = arrive(update if self._p is None else self._p.apply(update), self.plan)
            if sent is not None:
                updates[i] = sent
        return updates

    def _row(
        self,
        i: int,
        exchanges: int,
        members: Sequence[int],
        attempt: Attempt | None,
        scores: Scores | None,
    ) -> Row:
        """Return the row of peer i; its bag is whoever the coordinator has in the same cluster.

        The attempt to split a cluster is told in the row of the first who took part.
        """
        bag = frozenset(members) - {i}
        model = self.crew.manifest.size * WIDTH[self.plan.network.precision]
        notes: dict[str, Any] = {"node": self.server.tree.places[i], "took_part": exchanges > 0}
        if attempt is not None:
            notes["attempt"] = attempt.to_json()
        return {
            "t": self.t,
            "index": i,
            "cluster": self._true_clusters[i],
            "accuracy": scores.accuracy if scores else None,
            "loss": scores.loss if scores else None,
            "bag": sorted(bag),
            "neighbours": sorted(bag) if exchanges else [],
            "precision": precision(bag, i, self._true_clusters),
            "recall": recall(bag, i, self._true_clusters),
            "payload_received": exchanges * model,
            "payload_sent": exchanges * model,
            "notes": notes,
        }
