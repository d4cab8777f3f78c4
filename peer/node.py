"""The life of one peer: the only place where learning, matching, aggregation and network meet.

A peer opens its sockets, gets a plan and an index, builds its learner, finds the others, and then
runs the rounds of PANM's Algorithm 1 (train, match, aggregate) until the plan's last. What it
learned is on the disk after every round; what it found out about the others is in its swarm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import zmq.asyncio

from peer.coordinated import Coordinated
from peer.errors import PanmeshError, RefusedError, StateError, UserError, first_failure
from peer.learning.budget import Budget
from peer.learning.learner import Learner
from peer.matching.registry import CENTRAL
from peer.memory import torch_without_tracing
from peer.network.address import dial_address, facing, key_of
from peer.network.messages import PeerRecord, Reason, Reply, Request
from peer.network.swarm import Swarm, enrol
from peer.network.traffic import Fault, Traffic
from peer.network.transport import Buffer, Transport
from peer.permutation import Permutation
from peer.plan import Plan
from peer.plan_check import check_privacy
from peer.randomness import Purpose, generator
from peer.rounds import Result, Rounds
from peer.rundir import PLAN, MetricRow
from peer.settings import PeerSettings
from peer.state import MODEL_CARD, Checkpoint, Identity, StateDirectory
from peer.surroundings import Surroundings
from peer.vitals import Vitals, report_health

if TYPE_CHECKING:
    from peer.network.discovery import Discovery
    from peer.network.federation import Credentials
    from peer.network.identity import IdentityKey

log = logging.getLogger(__name__)

REMEMBER_INTERVAL = 0.5
"""Seconds between two looks for new peers to remember, at least."""

LearnerFactory = Callable[[Plan, int], Learner]
Item = TypeVar("Item")


class Peer:
    """One peer of a federation, from its first message to its last round.

    `await run()` returns the `Result`. Cancelling it ends the peer cleanly: the others are told,
    and the state directory holds the last finished round. `plan` replaces the settings' plan file,
    `make_learner` the learner that plan and settings name (for data or models that live in
    memory). `on_listening` is called with the peer's address, `on_round` with the plan and the
    metrics of every finished round. Without `traces` torch is imported without what only tracing
    needs, if it is this peer that imports it. `surroundings` are an experiment's.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        plan: Plan | None = None,
        make_learner: LearnerFactory | None = None,
        on_listening: Callable[[str], None] | None = None,
        on_round: Callable[[Plan, MetricRow], None] | None = None,
        traces: bool = True,
        worker: ThreadPoolExecutor | None = None,
        context: zmq.asyncio.Context | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._on_listening = on_listening
        self._make_learner = make_learner
        self._on_round = on_round
        self._traces = traces
        self._worker = worker or ThreadPoolExecutor(1, thread_name_prefix="train")
        self._context = context
        self._surroundings = surroundings
        self._shaper = None if surroundings is None else surroundings.shaper
        self._traffic = Traffic()
        self._rounds: Rounds | Coordinated | None = None
        self._row: MetricRow | None = None

    async def run(self) -> Result:
        """Join, learn to the last round, serve on until the others are done, and leave.

        Raises UserError or StateError when a person must act: an address that cannot be bound, a
        plan or model that does not fit, a state directory that cannot be trusted.
        """
        with StateDirectory(self._settings.state) as state:
            credentials = self._prove(state)
            settings = self._settings
            key = credentials.key if credentials is not None else None
            if key is None and settings.mqtt is not None:
                key = state.key()
            identity = state.identity(None if key is None else key.peer)
            checkpoint = state.newest()
            async with (
                Transport(
                    listen=settings.listen,
                    advertise=self._advertised(),
                    handler=self._handle,
                    traffic=self._traffic,
                    ports=identity.ports,
                    context=self._context,
                    shaper=self._shaper,
                    credentials=credentials,
                    insecure=settings.insecure,
                ) as transport,
                self._discovery(key, credentials, identity, transport) as discovery,
            ):
                if self._on_listening is not None:
                    self._on_listening(transport.control)
                plan, index = await self._enrol(transport, discovery, identity, checkpoint)
                self._check(plan, index, checkpoint)
                identity = identity.model_copy(update={"index": index, "ports": transport.ports})
                state.keep_identity(identity)
                budget = Budget(plan.privacy, state.spent()) if plan.privacy.acts else None
                learner = await self._in_worker(self._learner, plan, index, state, budget)
                record = PeerRecord(
                    peer=identity.peer,
                    index=index,
                    control=transport.control,
                    data=transport.data,
                    incarnation=identity.incarnation,
                    first_round=1,
                    model=learner.manifest.digest(learner.initial()),
                )
                swarm = self._swarm(transport, plan, record, state, credentials)
                if discovery is not None:
                    discovery.join(swarm)
                self._rounds = self._make_rounds(
                    plan=plan,
                    index=index,
                    learner=learner,
                    budget=budget,
                    state=state,
                    swarm=swarm,
                    transport=transport,
                    discovery=discovery,
                    credentials=credentials,
                )
                return await self._live(swarm, self._rounds, state, checkpoint)

    def vitals(self) -> Vitals | None:
        """Return how this peer is, None before it has a plan and an index."""
        return None if self._rounds is None else self._vitals(self._rounds)

    def _vitals(self, rounds: Rounds | Coordinated) -> Vitals:
        row = self._row
        return Vitals(
            index=rounds.index,
            known=rounds.swarm.known(rounds.plan.rounds),
            left_out=rounds.swarm.left_out(),
            status=rounds.status,
            row=row.impersonal() if row is not None and rounds.plan.privacy.acts else row,
            traffic=self._traffic.snapshot(),
        )

    def _prove(self, state: StateDirectory) -> Credentials | None:
        """Return this peer's credentials in its federation, and let the addresses to dial name the
        keys of those who must be there; None in a federation without keys.

        Raises UserError when key, federation file and addresses do not fit.
        """
        settings = self._settings
        for address in settings.peer:
            if (key_of(address) is None) is not (settings.federation is None):
                raise UserError(
                    f"--peer {address} and --federation go together",
                    "with a federation file write KEY@HOST:PORT; peer keys show prints the KEY",
                )
        if settings.federation is None:
            for address in settings.bootstrap:
                if key_of(address) is not None:
                    raise UserError(
                        f"--bootstrap {address} names a key, and --federation is missing",
                        "with a key go only members: give the federation's file as well",
                    )
            return None
        from peer.network.federation import Credentials

        credentials = Credentials(state.key(), settings.federation)
        bootstrap = [credentials.federation.at(address) for address in settings.bootstrap]
        self._settings = settings.model_copy(update={"bootstrap": bootstrap})
        return credentials

    def _make_rounds(
        self,
        *,
        plan: Plan,
        index: int,
        learner: Learner,
        budget: Budget | None,
        state: StateDirectory,
        swarm: Swarm,
        transport: Transport,
        discovery: Discovery | None,
        credentials: Credentials | None,
    ) -> Rounds | Coordinated:
        """Return the rounds of the plan's method. Raises UserError for a secret of no use."""

        def on_round(plan: Plan, row: MetricRow) -> None:
            self._row = row
            if self._on_round is not None:
                self._on_round(plan, row)
            if discovery is not None:
                discovery.report(plan, row)

        common: dict[str, Any] = {
            "plan": plan,
            "index": index,
            "learner": learner,
            "budget": budget,
            "state": state,
            "swarm": swarm,
            "transport": transport,
            "traffic": self._traffic,
            "in_worker": self._in_worker,
            "on_round": on_round,
        }
        if plan.method not in CENTRAL:
            return Rounds(**common, surroundings=self._surroundings)
        permutation, secret = None, self._settings.shared_secret()
        if plan.permutes and secret is not None:
            permutation = Permutation(secret, plan.digest, learner.manifest)
        return Coordinated(
            **common,
            coordinator=dial_address(self._settings.bootstrap[0]),
            coordinator_peer=None if credentials is None else credentials.federation.bootstrap.peer,
            permutation=permutation,
        )

    def _swarm(
        self,
        transport: Transport,
        plan: Plan,
        own: PeerRecord,
        state: StateDirectory,
        credentials: Credentials | None,
    ) -> Swarm:
        """Return what knows the others. Raises UserError when one's model is not the plan's."""
        if plan.model_digest not in (None, own.model):
            raise UserError(
                f"this peer's model has the digest {own.model}, the plan says {plan.model_digest}",
                "model, input shape and number of classes must be the same at every peer",
            )
        swarm = Swarm(
            transport=transport,
            plan_digest=plan.digest,
            own=own,
            n=plan.n,
            rounds=plan.rounds,
            settings=plan.network,
            bootstrap=self._settings.bootstrap,
            peers=self._settings.peer,
            remembered=state.remembered(),
            credentials=credentials,
            rng=generator(own.incarnation, Purpose.TOPOLOGY, index=own.index),
            reach=None if self._surroundings is None else self._surroundings.reach,
        )
        if self._shaper is not None:
            self._shaper.introduce(swarm.index_of)
        return swarm

    def _check(self, plan: Plan, index: int, checkpoint: Checkpoint | None) -> None:
        """Raise UserError or StateError when the plan, whoever sent it, is not for this peer."""
        self._check_central(plan)
        if plan.privacy.acts:
            check_privacy(plan)
        if checkpoint is not None:
            _check_checkpoint(checkpoint, plan, index, self._settings.state)
            if checkpoint.t >= plan.rounds:
                log.info("already finished: round %d of %d", checkpoint.t, plan.rounds)

    def _check_central(self, plan: Plan) -> None:
        """Raise UserError when a central method lacks its coordinator or its secret here."""
        if plan.method in CENTRAL and len(self._settings.bootstrap) != 1:
            raise UserError(
                f"the method {plan.method} has one coordinator",
                "start bootstrap --plan FILE, and every peer with its --bootstrap HOST:PORT alone",
            )
        if plan.permutes and self._settings.shared_secret() is None:
            raise UserError(
                "the plan permutes updates by a secret, which this peer has not been given",
                "give every peer, and never the coordinator, the same --secret FILE",
            )

    async def _live(
        self,
        swarm: Swarm,
        rounds: Rounds | Coordinated,
        state: StateDirectory,
        checkpoint: Checkpoint | None,
    ) -> Result:
        """Run the rounds beside the tasks that keep the peer reachable; end them with it."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(swarm.run(), name="swarm"),
                    group.create_task(
                        report_health(state, lambda: self._vitals(rounds)), name="health"
                    ),
                    group.create_task(_remember(state, swarm), name="remember"),
                ]
                try:
                    return await rounds.run(checkpoint)
                finally:
                    # Tell the others while the sockets are still there, but not for long.
                    with suppress(TimeoutError, PanmeshError):
                        async with asyncio.timeout(2):
                            await swarm.leave()
                    for task in background:
                        task.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    def _advertised(self) -> str | None:
        """Return what others are told to dial; `auto` finds the interface facing the others."""
        if self._settings.advertise != "auto":
            return self._settings.advertise
        others = [*self._settings.bootstrap, *self._settings.peer]
        if (login := self._settings.broker()) is not None:
            others.append(f"{login.host}:{login.port}")
        if not others:
            raise UserError("--advertise auto needs a --bootstrap, --peer or --mqtt to face")
        return facing(others[0])

    def _discovery(
        self,
        key: IdentityKey | None,
        credentials: Credentials | None,
        identity: Identity,
        transport: Transport,
    ) -> AbstractAsyncContextManager[Discovery | None]:
        """Return what this peer says and hears at a broker, if it has one. Raises UserError."""
        login = self._settings.broker()
        if login is None or key is None:
            return nullcontext()
        from peer.network.discovery import Discovery

        members: dict[str, Any] = {}
        if credentials is not None:
            members = {
                "root": bytes.fromhex(credentials.federation.root),
                "context": credentials.federation.context,
                "admits": credentials.is_member,
            }
        return Discovery(
            login,
            key=key,
            incarnation=identity.incarnation,
            **members,
            blame=lambda topic, detail: transport.blame(
                Fault.CONTENT, topic, f"{login.place} {topic}: {detail}"
            ),
            rng=generator(identity.incarnation, Purpose.TOPOLOGY),
        )

    async def _enrol(
        self,
        transport: Transport,
        discovery: Discovery | None,
        identity: Identity,
        checkpoint: Checkpoint | None,
    ) -> tuple[Plan, int]:
        """Return the plan and this peer's index: from files, the bootstrap node, or the broker."""
        settings = self._settings
        index = settings.index
        plan = self._plan
        if plan is None and settings.plan is not None:
            plan = Plan.load(settings.plan)
        if plan is not None and index is not None:
            if index >= plan.n:
                raise UserError(f"--index {index} is not in 0..{plan.n - 1}")
        else:
            joined = settings.state / PLAN
            remembered = Plan.load(joined) if joined.exists() else None
            if checkpoint is not None and remembered is not None:
                # It knows all that others could tell, and they may wait for it.
                plan, index = remembered, checkpoint.index
            elif settings.bootstrap or discovery is None:
                plan, index = await self._enrol_at_bootstrap(transport, identity, remembered)
            else:
                plan = plan or remembered or await discovery.plan()
        if discovery is None:
            assert index is not None
            return plan, index
        return plan, await discovery.claim(
            plan,
            identity.index if index is None else index,
            strict=index is not None,
            settled=checkpoint is not None or bool(settings.bootstrap),
        )

    async def _enrol_at_bootstrap(
        self, transport: Transport, identity: Identity, remembered: Plan | None
    ) -> tuple[Plan, int]:
        index = identity.index if identity.index is not None else self._settings.index
        enrolled = await enrol(
            transport,
            self._settings.bootstrap,
            index=index,
            peer_id=identity.peer,
            # A peer that has joined before can go on without the bootstrap node.
            patience=None if remembered is None or index is None else 5.0,
        )
        if enrolled is not None:
            return Plan.from_toml(enrolled.toml, source="the bootstrap node's plan"), enrolled.index
        assert remembered is not None
        assert index is not None
        log.info("no bootstrap node answers; going on with the plan that it gave before")
        return remembered, index

    def _learner(
        self, plan: Plan, index: int, state: StateDirectory, budget: Budget | None
    ) -> Learner:
        """Return the learner, leaving in the state directory how to build its model again."""
        if self._make_learner is not None:
            if budget is not None:
                raise UserError(
                    "privacy: what a learner of your own spends of epsilon cannot be counted",
                    "leave out make_learner, or the plan's [privacy]",
                )
            return self._make_learner(plan, index)
        from peer.learning.build import prepare

        settings = self._settings
        # A person's own model may use anything of torch's.
        lean = not self._traces and settings.model is None
        with torch_without_tracing() if lean else nullcontext():
            learner, card = prepare(
                plan,
                index,
                data=settings.data,
                model=settings.model,
                device=settings.device,
                threads=settings.threads,
                budget=budget,
            )
        state.write_json(MODEL_CARD, asdict(card))
        return learner

    async def _in_worker(self, work: Callable[..., Item], *arguments: Any) -> Item:
        """Run long work off the event loop, so that pings are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    async def _handle(self, request: Request) -> tuple[Reply, Sequence[Buffer]]:
        """Answer one request. Raises RefusedError."""
        if self._rounds is None:
            raise RefusedError(Reason.NOT_YET, "starting")
        return await self._rounds.handle(request)


async def _remember(state: StateDirectory, swarm: Swarm) -> None:
    """Keep a file of the others, whom to look for after a restart."""
    written = {record.index: record for record in state.remembered()}
    while True:
        # Those of an earlier life that were not met again yet may be there all the same.
        records = written | {m.record.index: m.record for m in swarm.members()}
        if records != written:
            state.remember(list(records.values()))
            written = records
        await swarm.changed(60.0)
        await asyncio.sleep(REMEMBER_INTERVAL)


def _check_checkpoint(checkpoint: Checkpoint, plan: Plan, index: int, path: Path) -> None:
    if checkpoint.plan != plan.digest:
        raise StateError(
            f"{path} belongs to a run of another plan ({checkpoint.plan})",
            "give another --state, or remove this one",
        )
    if checkpoint.index != index:
        raise StateError(f"{path} belongs to peer {checkpoint.index}, this is {index}")
