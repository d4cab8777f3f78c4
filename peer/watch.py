"""Watching a federation from afar: its metrics, as its peers publish them at a broker."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from peer.display import FederationView
from peer.errors import ProtocolError, UserError, first_failure
from peer.network.discovery import Topics, open_metrics, open_plan, sign_plan
from peer.network.mqtt import MAX_QUEUED, Broker, Login
from peer.plan import Plan
from peer.randomness import Purpose, generator

if TYPE_CHECKING:
    from peer.network.federation import Federation
    from peer.network.identity import IdentityKey

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds in which a broker must have taken a plan."""

Messages = asyncio.Queue[tuple[str, bytes]]


class WatchView(FederationView):
    """A live table of a federation that others run."""

    def first_line(self) -> str:
        plan = self._plan
        return f"watching {plan.n} peers: {plan.method} on {plan.data}, {plan.rounds} rounds"


async def watch(
    login: Login, *, plan: Plan | None = None, federation: Federation | None = None
) -> None:
    """Show the federation of a broker until all its peers have finished their last round.

    Without a `plan` the one that the root of the `federation` has signed is waited for. Raises
    UserError when neither is known, or the broker refuses this client.
    """
    if plan is None and federation is None:
        raise UserError(
            "what this federation runs is not known",
            "give --plan FILE, or --federation FILE to take the plan that its root has signed",
        )
    messages: Messages = asyncio.Queue(MAX_QUEUED)

    def hear(topic: str, message: bytes) -> None:
        if not messages.full():
            messages.put_nowait((topic, message))

    broker = Broker(
        login,
        client=f"panmesh-watch-{secrets.token_hex(8)}",
        on_message=hear,
        rng=generator(time.time_ns(), Purpose.TOPOLOGY),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(broker.run(), name="mqtt")
            topics = Topics(login.federation)
            if plan is None:
                broker.follow(topics.plan)
                root = None if federation is None else bytes.fromhex(federation.root)
                plan = await _find_plan(messages, root, login.federation)
            broker.follow(topics.of("metrics"))
            broker.follow(topics.of("peers"))
            await _show(messages, topics, plan, b"" if federation is None else federation.context)
            connection.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def publish(login: Login, plan: Plan, root: IdentityKey) -> None:
    """Leave a plan at a broker, signed by the root of a federation.

    Raises UserError when the plan is not that federation's, or the broker does not take it in
    `PATIENCE` seconds.
    """
    if plan.name != login.federation:
        raise UserError(
            f"the plan is that of the federation {plan.name}, the broker's URL says "
            f"{login.federation}",
            f"write {login.place}/{plan.name}",
        )
    broker = Broker(
        login,
        client=f"panmesh-root-{secrets.token_hex(8)}",
        on_message=lambda *_: None,
        rng=generator(time.time_ns(), Purpose.TOPOLOGY),
    )
    broker.hold(Topics(login.federation).plan, sign_plan(root, plan))
    try:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            connection = tasks.create_task(broker.run(), name="mqtt")
            await broker.wait_settled()
            connection.cancel()
    except TimeoutError:
        raise UserError(f"the broker {login.place} has not taken the plan") from None
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def _find_plan(messages: Messages, root: bytes | None, federation: str) -> Plan:
    log.info("waiting for the plan of the federation %s", federation)
    while True:
        _, message = await messages.get()
        try:
            return open_plan(message, root, federation)[0]
        except ProtocolError as error:
            log.warning("not the plan: %s", error)


async def _show(messages: Messages, topics: Topics, plan: Plan, context: bytes) -> None:
    """Show what is heard until all of the plan's peers have finished.

    That a peer is gone is shown as soon as the broker says it, for what that is worth.
    """
    index_of: dict[str, int] = {}
    finished: set[int] = set()
    with WatchView(plan) as view:
        while len(finished) < plan.n:
            topic, message = await messages.get()
            kind, peer = topics.split(topic)
            if kind == "metrics":
                try:
                    row = open_metrics(message, peer, plan, context)
                except ProtocolError as error:
                    log.debug("%r: %s", topic, error)
                    continue
                if len(index_of) < 4 * plan.n:  # who invents peers cannot fill the memory
                    index_of[peer] = row.index
                view.update(row)
                if row.t >= plan.rounds:
                    finished.add(row.index)
            elif kind == "peers" and index_of.get(peer, -1) not in {-1, *finished}:
                view.state(index_of[peer], "running" if message else "gone")
