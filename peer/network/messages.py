"""The messages of panmesh and the one decoder that every byte from outside passes.

A message on the wire is a multipart ZeroMQ message `[header, chunk, chunk, ...]`. The header is a
MessagePack map of at most `MAX_HEADER` bytes that is validated into one of the classes below:
unknown fields, wrong types and numbers out of range are errors. Chunks are raw bytes (sketches,
models) that this module never looks into; `peer.network.vectors` decodes them.

Every request carries an `id` that its reply repeats, the sender's peer id, and the digest of the
sender's plan ("" from one that has no plan yet).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from peer.errors import ProtocolError, VersionError
from peer.plan import MAX_PEERS

PROTOCOL: Final = 1
"""Version of everything on this page; a message of another version is an error."""

MAX_HEADER = 64 * 1024
"""Bytes of a header, checked before it is decoded (8 MB of empty maps would become 554 MB)."""

MAX_PLAN = 32 * 1024
"""Bytes of a plan's TOML text."""

MAX_UPDATES = 128
"""Records that one message carries at most; see `fitting`."""

CHUNK = 1024 * 1024
"""Bytes of a chunk at most, so that no single frame is large."""

PeerId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
Address = Annotated[str, Field(pattern=r"^tcp://([0-9a-f]{64}@)?[A-Za-z0-9._-]{1,253}:[0-9]{1,5}$")]
Index = Annotated[int, Field(ge=0, lt=MAX_PEERS)]
Round = Annotated[int, Field(ge=0, le=10**9)]


class Reason(StrEnum):
    """Why a request was refused."""

    VERSION = "version"
    NOT_ADMITTED = "not-admitted"
    PLAN_MISMATCH = "plan-mismatch"
    MODEL_MISMATCH = "model-mismatch"
    PERMUTATION_MISMATCH = "permutation-mismatch"
    BEHIND = "behind"
    INDEX_CLASH = "index-clash"
    INDEX_HELD = "index-held"
    FULL = "full"
    BUSY = "busy"
    NOT_YET = "not-yet"
    GONE = "gone"
    BAD_REQUEST = "bad-request"
    UNREACHABLE = "unreachable"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PeerRecord(_Part):
    """Who a peer is and where it listens; a higher incarnation replaces a lower one.

    `model` is the digest of its model's layout and w_0; `first_round` the round from which it takes
    part (1 for those present at the start). `proof` is the peer's public key and its signature of
    all else, in a federation with keys; "" otherwise.
    """

    peer: PeerId
    index: Index
    control: Address
    data: Address
    incarnation: Annotated[int, Field(ge=0, lt=2**53)]
    first_round: Round
    model: Digest
    proof: Annotated[str, Field(pattern=r"^([0-9a-f]{192})?$")] = ""


class State(StrEnum):
    """What membership believes of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class Status(_Part):
    """How far a peer is: the round of its newest snapshot, the last round it finished, and whether
    that was its last; `accuracy` is of its own model on its own test set, for those who watch."""

    published: Round = 0
    finished: Round = 0
    done: bool = False
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def reached(self) -> int:
        """The latest round that is published or finished; 0 before the first."""
        return max(self.published, self.finished)


class Update(_Part):
    """A piece of gossip: what the sender believes of one peer."""

    record: PeerRecord
    state: Annotated[State, Field(strict=False)]
    status: Status


Updates = Annotated[tuple[Update, ...], Field(max_length=MAX_UPDATES, strict=False)]


class Work(StrEnum):
    """What a central coordinator can ask of a peer.

    draw: say which of the initial models of a draw is the best on your data. choose: the same of
    the models of a version. train: train one of them, and keep the result to be fetched. close: the
    round is over, take over your model.
    """

    DRAW = "draw"
    CHOOSE = "choose"
    TRAIN = "train"
    CLOSE = "close"


ModelNumber = Annotated[int, Field(ge=0, lt=2 * MAX_PEERS)]
"""Number of a coordinator's model: of a node of the tree (cfl), of one of c models (ifca), or 0."""


class Task(_Part):
    """What a peer is to do in `round`, with the models that the coordinator has after round
    `version`: with `model`, or with all where it is None.

    A model that nobody has trained yet is not sent: it is the initial one of the `draw`, which all
    peers can compute.
    """

    work: Annotated[Work, Field(strict=False)]
    round: Round
    version: Round
    model: ModelNumber | None = None
    draw: Annotated[int, Field(ge=0, le=10_000)] = 0


class _Message(_Part):
    v: Literal[1] = PROTOCOL
    id: Annotated[int, Field(ge=0, lt=2**32)] = 0
    sender: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    plan: Digest = ""


class Enrol(_Message):
    """To the bootstrap node: give me the plan and an index (the one I had, if I say it)."""

    kind: Literal["enrol"] = "enrol"
    index: Index | None = None


class Enrolled(_Message):
    """The plan as TOML and the index that is now the sender's."""

    kind: Literal["enrolled"] = "enrolled"
    index: Index
    toml: Annotated[str, Field(max_length=MAX_PLAN)]


class Announce(_Message):
    """To the bootstrap node, now and then: I am here, so far."""

    kind: Literal["announce"] = "announce"
    update: Update


class Members(_Message):
    """Ask for those the receiver knows."""

    kind: Literal["members"] = "members"


class Known(_Message):
    """Those the sender knows: all, or a random draw where they do not fit."""

    kind: Literal["known"] = "known"
    updates: Updates


class Ping(_Message):
    """Are you there? `updates` piggybacks gossip; the first is the sender's own."""

    kind: Literal["ping"] = "ping"
    updates: Updates


class Pong(_Message):
    """I am here; `updates` piggybacks gossip; the first is the sender's own."""

    kind: Literal["pong"] = "pong"
    updates: Updates


class PingRequest(_Message):
    """Ping `target` for me; answered by its Pong, or refused as unreachable."""

    kind: Literal["ping-request"] = "ping-request"
    target: Address


class Leave(_Message):
    """I am going on purpose: do not suspect me."""

    kind: Literal["leave"] = "leave"
    update: Update


class Probe(_Message):
    """Send the sketches of g and h of your snapshot of `round`.

    `staleness` None takes the newest snapshot; s one of rounds `round - s` to `round` or newer; the
    answer may wait up to `wait` seconds for it to be published.
    """

    kind: Literal["probe"] = "probe"
    round: Round
    staleness: Annotated[int, Field(ge=0, le=1000)] | None
    wait: Annotated[float, Field(ge=0, le=60)]


class Sketches(_Message):
    """Reply to `Probe`: one chunk, the float32 sketches of g and of h, one after the other."""

    kind: Literal["sketches"] = "sketches"
    round: Round
    buckets: Annotated[int, Field(ge=1, le=65_536)]


class Pull(_Message):
    """Send your snapshot of `round`: the model, and the local update g with it if asked for."""

    kind: Literal["pull"] = "pull"
    round: Round
    staleness: Annotated[int, Field(ge=0, le=1000)] | None
    wait: Annotated[float, Field(ge=0, le=60)]
    gradient: bool = False


class Model(_Message):
    """Reply to `Pull`: chunks that hold the model's `model_bytes`, then g's `gradient_bytes`.

    `samples` is the sender's number of training samples, for averages weighted by it.
    """

    kind: Literal["model"] = "model"
    round: Round
    model_bytes: Annotated[int, Field(ge=1, le=2**40)]
    gradient_bytes: Annotated[int, Field(ge=0, le=2**40)] = 0
    samples: Annotated[int, Field(ge=1, le=2**40)]


class Await(_Message):
    """Answer when you have finished `round` (or after `wait` seconds, however far you are)."""

    kind: Literal["await"] = "await"
    round: Round
    wait: Annotated[float, Field(ge=0, le=60)]


class Reached(_Message):
    """Reply to `Await`: how far the sender is."""

    kind: Literal["reached"] = "reached"
    status: Status


class Report(_Message):
    """To the coordinator: I am here, have done this, and want to know what to do next.

    `size` and `trainable` are the values of the sender's model, `samples` its training samples;
    `fingerprint` is that of its permutation, "" without one. `done` is the last task that is
    finished: `choice` is what it chose; with `failed` there is nothing to fetch. The answer may
    wait up to `wait` seconds for something to do.
    """

    kind: Literal["report"] = "report"
    update: Update
    size: Annotated[int, Field(ge=1, le=2**40)]
    trainable: Annotated[int, Field(ge=1, le=2**40)]
    samples: Annotated[int, Field(ge=1, le=2**40)]
    fingerprint: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    done: Task | None = None
    choice: ModelNumber | None = None
    failed: bool = False
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0


class Assignment(_Message):
    """Reply to `Report`: the receiver's task, None while there is none; `data_port` is where the
    coordinator's models are fetched, on the host that was asked.

    A task to close a round comes with one chunk: for each of the plan's n peers the number of its
    model, and then for each the number of the one that it took part with (int32, little-endian, -1
    for none).
    """

    kind: Literal["assignment"] = "assignment"
    data_port: Annotated[int, Field(ge=1, le=65_535)]
    task: Task | None = None


class Fetch(_Message):
    """To the coordinator: send your model `number` of version `round`. From the coordinator: send
    what you made in `round` of the model `number`."""

    kind: Literal["fetch"] = "fetch"
    round: Round
    number: ModelNumber


class Parcel(_Message):
    """Reply to `Fetch`: chunks that hold the `size` bytes of one vector; none of a model that is
    still the initial one."""

    kind: Literal["parcel"] = "parcel"
    round: Round
    number: ModelNumber
    size: Annotated[int, Field(ge=0, le=2**40)]


class Done(_Message):
    """Reply to `Leave`: noted."""

    kind: Literal["done"] = "done"


class Refused(_Message):
    """The request is not answered, and why; `detail` is printable ASCII, as it ends up in logs."""

    kind: Literal["refused"] = "refused"
    reason: Annotated[Reason, Field(strict=False)]
    detail: Annotated[str, Field(pattern=r"^[ -~]{0,300}$")] = ""


Request = (
    Enrol | Announce | Members | Ping | PingRequest | Leave | Probe | Pull | Await | Report | Fetch
)
Reply = Enrolled | Known | Pong | Sketches | Model | Reached | Assignment | Parcel | Done | Refused
Message = Request | Reply

REPLIES: Final[dict[type[Request], type[Reply]]] = {
    Enrol: Enrolled,
    Announce: Known,
    Members: Known,
    Ping: Pong,
    PingRequest: Pong,
    Leave: Done,
    Probe: Sketches,
    Pull: Model,
    Await: Reached,
    Report: Assignment,
    Fetch: Parcel,
}
"""What answers what, beside a refusal."""

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def fitting(updates: Iterable[Update]) -> tuple[Update, ...]:
    """Return the first of `updates`, as many as one header surely holds."""
    chosen: list[Update] = []
    room = MAX_HEADER - 1024
    for update in updates:
        # All else is at most 340 bytes long.
        record = update.record
        room -= 340 + len(record.control) + len(record.data) + len(record.proof)
        if room < 0 or len(chosen) == MAX_UPDATES:
            break
        chosen.append(update)
    return tuple(chosen)


def encode(message: Message) -> bytes:
    """Return the header of `message`. Raises ValueError when it is longer than `MAX_HEADER`."""
    header: bytes = msgpack.packb(message.model_dump(mode="json"))
    if len(header) > MAX_HEADER:
        raise ValueError(f"a {message.kind} header of {len(header)} bytes is too long to send")
    return header


def decode(header: bytes | memoryview) -> Message:
    """Return the message that a header holds.

    Raises ProtocolError, and nothing else, for any bytes that are not exactly one valid message.
    """
    if len(header) > MAX_HEADER:
        raise ProtocolError(f"header of {len(header)} bytes")
    try:
        fields: Any = msgpack.unpackb(
            header,
            raw=False,
            max_str_len=MAX_HEADER,
            max_bin_len=0,
            max_array_len=MAX_UPDATES,
            max_map_len=32,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not MessagePack: {type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("the header is not a map")
    if fields.get("v") != PROTOCOL:
        raise VersionError(f"protocol version {fields.get('v')!r:.20}, not {PROTOCOL}")
    try:
        return _ADAPTER.validate_python(fields)
    except (ValidationError, RecursionError) as error:
        raise ProtocolError(_summary(error)) from None


def _summary(error: ValidationError | RecursionError) -> str:
    """Return one short line: what a hostile message contains does not belong into a log."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # A place may be a key that the sender made up.
    place = ".".join(ascii(part)[:20] for part in first["loc"][:4])
    return f"{place}: {first['type']}"[:120]
