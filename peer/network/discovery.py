"""Discovery over MQTT: a federation that meets at a broker, and needs no bootstrap node at all.

What peers say there are retained messages, one a topic, each signed by whom its topic names:

    panmesh/<federation>/plan          what is run, signed by the federation's root
    panmesh/<federation>/claims/<id>   which index that peer claims (`peer.network.claims`)
    panmesh/<federation>/peers/<id>    that it is present, and where; cleared by its last will
    panmesh/<federation>/metrics/<id>  its last finished round, for those who watch

Models never travel over MQTT, nor does anything that a round waits for: with the broker gone,
training goes on, and peers that have met find each other again by gossip.

The broker and its other users are not trusted with more than being there. A message that is not
signed by whom its topic names, of another federation or plan, too large, or too old is counted,
logged once a topic and dropped. A topic that was cleared proves nothing, since nobody signs that:
the peer is then probed, and judged by its answer. Whoever may write to others' topics can hide
peers until these have answered by writing them again; the broker's access control list can forbid
it (docs/mqtt.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field

from peer.errors import ProtocolError, UserError, first_failure
from peer.network.claims import Claim, Claims, Stamp
from peer.network.identity import IdentityKey, Purpose, Signed
from peer.network.messages import MAX_PLAN, Digest, Index, State, Update
from peer.network.mqtt import Broker, Login
from peer.plan import Plan
from peer.rundir import MetricRow

if TYPE_CHECKING:
    import numpy as np

    from peer.network.swarm import Swarm

log = logging.getLogger(__name__)

MAX_RECORD = 4096
"""Bytes of a record of a peer's, its signature included."""
MAX_SIGNED_PLAN = MAX_PLAN + 512
RENEW = 20.0
"""Seconds after which a peer says again that it is there, and what it claims."""
TTL = 3 * RENEW
"""Seconds for which others believe that."""
MAX_TTL = 3600.0
MAX_SKEW = 60.0
"""Seconds by which the clocks of two peers may differ."""
STEP = 0.1
"""Seconds between two looks at a claim that is not settled."""
FAREWELL = 1.0
"""Seconds for which one that goes waits for the broker."""
PATIENCE = 15.0
"""Seconds between two lines of the log about what is waited for."""

Blame = Callable[[str, str], None]
"""Counts a fault, and logs it unless one of the same topic was logged before: (topic, detail)."""


class _Record(BaseModel):
    """What a message says; `plan` is the digest of its writer's plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: Digest


class Presence(_Record):
    """A peer is there; believed for `ttl` seconds from `time`, Unix seconds."""

    update: Update
    time: float
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL)]


class Register(_Record):
    """A peer's claim to an index; the fields of `Stamp` say which of several is the newest."""

    index: Index | None
    held: bool
    incarnation: Annotated[int, Field(ge=0, lt=2**53)]
    number: Annotated[int, Field(ge=0, lt=2**53)]


class Measured(_Record):
    """A peer's last finished round."""

    row: MetricRow


class Proclaimed(BaseModel):
    """The plan's TOML text, and when it was signed, Unix seconds: of two plans the newer counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    toml: Annotated[str, Field(max_length=MAX_PLAN)]
    time: float


Content = TypeVar("Content", bound=BaseModel)


class Topics:
    """The topics of a federation."""

    def __init__(self, federation: str) -> None:
        self.root = f"panmesh/{federation}"
        self.plan = f"{self.root}/plan"

    def of(self, kind: str, peer: str = "+") -> str:
        """Return the topic of a peer's claims, peers or metrics; the filter of all peers'."""
        return f"{self.root}/{kind}/{peer}"

    def split(self, topic: str) -> tuple[str, str]:
        """Return the kind of a topic of this federation, and the id of its peer if it has one."""
        kind, _, peer = topic.removeprefix(f"{self.root}/").partition("/")
        return kind, peer


def seal(key: IdentityKey, purpose: Purpose, content: BaseModel, context: bytes) -> bytes:
    """Return the message that says `content`, signed by a key, good only in one context."""
    packed: bytes = msgpack.packb(content.model_dump(mode="json", exclude_defaults=True))
    signed = key.sign(purpose, context + packed)
    return signed._replace(payload=packed).pack()


def unseal(
    message: bytes, purpose: Purpose, form: type[Content], context: bytes, limit: int = MAX_RECORD
) -> tuple[Content, str]:
    """Return what a message says and the id of who has signed it in that context.

    Raises ProtocolError, and nothing else, for any bytes that are not exactly that.
    """
    signed = Signed.unpack(message, limit=limit)
    packed = signed.payload
    signed._replace(payload=context + packed).verify(purpose)
    try:
        fields = msgpack.unpackb(packed, max_str_len=limit, max_map_len=64, max_array_len=64)
        return form.model_validate(fields), signed.signer
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise ProtocolError(f"no valid {purpose}") from None


class Discovery:
    """One peer's part in a federation that meets at a broker; an async context manager.

        async with Discovery(
            login, key=key, incarnation=incarnation, blame=blame, rng=rng
        ) as discovery:
            plan = await discovery.plan()
            index = await discovery.claim(plan, wanted=None)
            discovery.join(swarm)

    Leaving clears what the broker holds of this peer: its presence, and if it was `done` its claim.

    Args:
        login: of the broker.
        key: signs what this peer says.
        incarnation: of this life of the peer's, above those of all lives before.
        root: public key of the federation's root; None where the plan is known from elsewhere.
        context: what all members of the federation know, and sign with everything.
        admits: whether a peer, given its id, may be a member.
        blame: told of what is dropped.
        rng: of the pauses between attempts to connect.

    Entering raises UserError when the CA file cannot be used; the block is ended by a UserError
    when the broker refuses this peer from the beginning.
    """

    def __init__(
        self,
        login: Login,
        *,
        key: IdentityKey,
        incarnation: int,
        root: bytes | None = None,
        context: bytes = b"",
        admits: Callable[[str], bool] = lambda _: True,
        blame: Blame,
        rng: np.random.Generator,
    ) -> None:
        self._key = key
        self._incarnation = incarnation
        self._numbers = count()
        self._root = root
        self._context = context
        self._admits = admits
        self._blame = blame
        self._federation = login.federation
        self._topics = Topics(login.federation)
        self._broker = Broker(
            login,
            client=key.peer,
            will=self._topics.of("peers", key.peer),
            on_message=self._hear,
            rng=rng,
        )
        self._place = login.place
        self._plan: Plan | None = None
        self._signed_at = 0.0
        self._plan_heard = asyncio.Event()
        self._claims: Claims | None = None
        self._swarm: Swarm | None = None
        self._handlers: dict[str, Callable[[str, bytes], None]] = {
            "plan": self._hear_plan,
            "claims": self._hear_claim,
            "peers": self._hear_presence,
        }

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._running = [
            self._tasks.create_task(self._broker.run(), name="mqtt"),
            self._tasks.create_task(self._renew(), name="mqtt-renew"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._say_goodbye()
        finally:
            for task in self._running:
                task.cancel()
            try:
                # The error of the block goes on as it is; a cancellation may be the group's own.
                cancelled = isinstance(error, asyncio.CancelledError)
                outcome = (kind, error, traceback) if cancelled else (None, None, None)
                await self._tasks.__aexit__(*outcome)
            except BaseExceptionGroup as failures:
                raise first_failure(failures) from None

    # What the owner asks and tells.

    async def plan(self) -> Plan:
        """Return the plan that the root of the federation has signed, as soon as it is there.

        Raises UserError where the root is not known.
        """
        if self._root is None:
            raise UserError(
                "who may say what this federation runs is not known",
                "give --federation FILE, which names its root, or --plan FILE",
            )
        self._broker.follow(self._topics.plan)
        while self._plan is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await self._plan_heard.wait()
                    break
            log.info("waiting for the plan at %s, %s", self._place, self._topics.plan)
        assert self._plan is not None
        return self._plan

    async def claim(
        self, plan: Plan, wanted: int | None, *, strict: bool = False, settled: bool = False
    ) -> int:
        """Return an index that this peer now holds: the `wanted` one if it can be had.

        With `strict` no other will do; `settled` says that the peer holds it from before. Raises
        UserError when all that would do are held by peers that are there.
        """
        if plan.name != self._federation:
            raise UserError(
                f"the plan is that of the federation {plan.name}, the broker's URL says "
                f"{self._federation}",
                f"write {self._place}/{plan.name}",
            )
        self._plan = plan
        now = asyncio.get_running_loop().time
        claims = Claims(
            self._key.peer, n=plan.n, wanted=wanted, strict=strict, settled=settled, now=now()
        )
        self._claims = claims
        self._broker.follow(self._topics.of("claims"))
        self._say_claim()
        while claims.held is None:
            await asyncio.sleep(STEP)
            if not self._broker.settled:
                claims.lost_sight(now())
            elif claims.tick(now()):
                self._say_claim()
            elif claims.hopeless(now()):
                what = f"index {wanted} is" if strict else f"all {plan.n} indices are"
                raise UserError(
                    f"{what} held by others at {self._place}, federation {plan.name}",
                    "give this peer its own --state of before, or another federation",
                )
        log.info("this peer has index %d", claims.held)
        return claims.held

    def join(self, swarm: Swarm) -> None:
        """Be present from now on, and tell the swarm who else is."""
        self._swarm = swarm
        self._broker.follow(self._topics.of("peers"))
        self._say_presence()

    def report(self, plan: Plan, row: MetricRow) -> None:
        """Show a finished round to those who watch."""
        slim = row.model_copy(update={"notes": {}})
        if plan.privacy.acts:
            slim = slim.impersonal()
        measured = Measured(plan=plan.digest, row=slim)
        topic = self._topics.of("metrics", self._key.peer)
        self._broker.hold(topic, self._seal(Purpose.METRICS, measured))

    # What it says.

    def _seal(self, purpose: Purpose, content: BaseModel) -> bytes:
        return seal(self._key, purpose, content, self._context)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW)
            if self._claims is not None:
                self._say_claim()
            if self._swarm is not None:
                self._say_presence()

    def _say_claim(self) -> None:
        assert self._claims is not None
        assert self._plan is not None
        claim = self._claims.claim
        register = Register(
            plan=self._plan.digest,
            index=claim.index,
            held=claim.held,
            incarnation=self._incarnation,
            number=next(self._numbers),
        )
        topic = self._topics.of("claims", self._key.peer)
        self._broker.hold(topic, self._seal(Purpose.CLAIM, register))

    def _say_presence(self) -> None:
        assert self._swarm is not None
        assert self._plan is not None
        presence = Presence(
            plan=self._plan.digest, update=self._swarm.own, time=time.time(), ttl=TTL
        )
        topic = self._topics.of("peers", self._key.peer)
        self._broker.hold(topic, self._seal(Purpose.PRESENCE, presence))

    async def _say_goodbye(self) -> None:
        """Clear what is no longer so: after an orderly disconnection the last will is not used."""
        for task in self._running[1:]:
            task.cancel()
        if self._swarm is not None:
            self._broker.hold(self._topics.of("peers", self._key.peer), b"")
            if self._swarm.own.status.done:
                # It never comes back, and its index is free for whoever runs the plan again.
                self._broker.hold(self._topics.of("claims", self._key.peer), b"")
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self._broker.wait_settled()

    # What it hears.

    def _hear(self, topic: str, message: bytes) -> None:
        """Take in a message; nothing that it may hold raises anything."""
        kind, peer = self._topics.split(topic)
        handler = self._handlers.get(kind)
        if handler is None or peer == self._key.peer:
            return
        try:
            if peer and not self._admits(peer):
                raise ProtocolError("no member of this federation")
            handler(peer, message)
        except ProtocolError as error:
            self._blame(ascii(topic)[:120], str(error))

    def _open(self, peer: str, message: bytes, purpose: Purpose, form: type[Content]) -> Content:
        """Return what a peer says. Raises ProtocolError unless it is that peer who says it."""
        content, signer = unseal(message, purpose, form, self._context)
        if signer != peer:
            raise ProtocolError(f"signed by {signer}")
        if self._plan is not None and getattr(content, "plan", "") != self._plan.digest:
            raise ProtocolError("of another plan")
        return content

    def _hear_plan(self, _: str, message: bytes) -> None:
        """Take the plan that the root has signed; later ones are others' affair.

        A broker that lost the plan is given it again by whoever has it, unless it has a newer one.
        """
        if not message:
            return
        plan, signed_at = open_plan(message, self._root, self._federation)
        if self._plan is None:
            self._plan, self._signed_at = plan, signed_at
            self._broker.hold(self._topics.plan, message)
            self._plan_heard.set()
        elif signed_at > self._signed_at:
            log.warning("the federation's root has signed a newer plan; this peer keeps its own")
            self._broker.release(self._topics.plan)

    def _hear_claim(self, peer: str, message: bytes) -> None:
        assert self._claims is not None
        if not message:
            self._claims.forget(peer)
            return
        said = self._open(peer, message, Purpose.CLAIM, Register)
        now = asyncio.get_running_loop().time()
        stamp = Stamp(said.incarnation, said.number)
        self._claims.hear(peer, Claim(said.index, said.held), stamp, now)

    def _hear_presence(self, peer: str, message: bytes) -> None:
        assert self._swarm is not None
        if not message:
            if (index := self._swarm.index_of(peer)) is not None:
                self._swarm.unreachable(index)
            return
        said = self._open(peer, message, Purpose.PRESENCE, Presence)
        if said.update.record.peer != peer or said.update.state is not State.ALIVE:
            raise ProtocolError("it speaks of another")
        age = time.time() - said.time
        if not -MAX_SKEW <= age <= said.ttl + MAX_SKEW:
            raise ProtocolError(f"said {age:.0f} s ago by its writer's clock")
        self._swarm.hear([said.update], peer)


def open_plan(message: bytes, root: bytes | None, federation: str) -> tuple[Plan, float]:
    """Return the plan of a federation, and when it was signed, Unix seconds.

    Raises ProtocolError unless its root has signed it.
    """
    signed = Signed.unpack(message, limit=MAX_SIGNED_PLAN)
    if signed.public_key != root:
        raise ProtocolError("not signed by the root of this federation")
    said, _ = unseal(message, Purpose.PLAN, Proclaimed, b"", MAX_SIGNED_PLAN)
    try:
        plan = Plan.from_toml(said.toml)
    except UserError as error:
        raise ProtocolError(f"a plan that is of no use here: {error}") from None
    if plan.name != federation:
        raise ProtocolError(f"the plan of another federation, {plan.name}")
    return plan, said.time


def sign_plan(root: IdentityKey, plan: Plan) -> bytes:
    """Return the message by which the root of a federation says what is run. Raises UserError."""
    toml = plan.to_toml()
    if len(toml.encode()) > MAX_PLAN:
        raise UserError(f"the plan is longer than {MAX_PLAN} bytes")
    return seal(root, Purpose.PLAN, Proclaimed(toml=toml, time=time.time()), b"")


def open_metrics(message: bytes, peer: str, plan: Plan, context: bytes) -> MetricRow:
    """Return the last round of a peer. Raises ProtocolError unless that peer says it, of that
    plan."""
    said, signer = unseal(message, Purpose.METRICS, Measured, context)
    row = said.row
    sane = row.index < plan.n and row.t <= plan.rounds and 0 <= (row.accuracy or 0.0) <= 1
    if signer != peer or said.plan != plan.digest or not sane:
        raise ProtocolError("not of this peer and plan")
    return row
