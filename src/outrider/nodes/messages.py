"""The messages between a service and a node in another process, as MessagePack maps.

Each call of a node, such as storing a turn or setting resources aside, gets one `CallReply` with the same number,
unless the node withdraws the call first (`GiveBack`). No other message gets a `CallReply`.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from outrider.engines.base import ChatChunk, ChatRequest, Chunk, SamplingParams
from outrider.engines.pool.leader import PoolState
from outrider.engines.pool.policy import GateReport
from outrider.engines.pool.record import EngineUse
from outrider.errors import ErrorRecord, ServiceError
from outrider.lifecycle import SessionState
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import ArtifactList, NodeStats
from outrider.sessions.attempt import RESERVED_PRIORITY
from outrider.sessions.resources import Capacity, ResourceAmount
from outrider.store.rows import SessionRow
from outrider.trajectory import SessionResult, StoredRun, Turn
from outrider.wire.decoding import SMALL, check_cost
from outrider.wire.frames import Beat, Nonsense, encode

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAMING = "a node's name has letters, digits, dots, dashes and underscores"

MAX_MESSAGE = 1 << 30
"""Maximum bytes of a message to a node, and of a message between processes of one machine. A task with inline files, or
the turns of a session with images, may take many megabytes; a longer message is a mistake."""
MAX_FROM_NODE = 64 << 20
"""Maximum bytes of a message from a node on another machine. The longest messages are a turn or a call with a whole
request body, and an artifact; each may take 32 MiB."""
MAX_HELLO = 64 << 10
"""Maximum bytes of a hello."""

# Bounds of a node's messages. Decoding refuses values beyond the bounds; docs/nodes.md lists them.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""The name of an engine or a model, or the id of a session."""
ModelName = Name | None


class NodeSetup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """The service's first message: the node's settings. `config` is the JSON of the settings, without secrets; `path`
    is Python's module search path; `capacity` is the machine's capacity for all its nodes; `level` is the log level.
    `file` is the path of the settings file on the node's machine, "" for none. `folders` are the contents of the
    folders that the settings name and a node on another machine needs: the bytes by folder and file name."""

    name: str
    config: bytes
    path: tuple[str, ...] = ()
    capacity: Capacity
    level: int
    file: str = ""
    folders: dict[str, dict[str, bytes]] = {}


class Join(msgspec.Struct, tag="join", frozen=True, kw_only=True):
    """The order to a process, in place of `NodeSetup`, to join a service on another machine, at the address `url`.
    `own` are this machine's settings. `machine` is a random name of the process's starter."""

    url: str
    token: str | None
    ca: str | None
    machine: str
    own: NodeSetup


class LeaveService(msgspec.Struct, tag="leave", frozen=True):
    """The order to a process that has joined to take no new sessions, and to exit when the present sessions have
    ended."""


class NodeHello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The first message on each connection of a joining node. `version` is Outrider's version; `instance` is a random
    name of the node's process, `machine` of the process's starter; `host` identifies the machine and its network
    (`host_id`); `capacity` is the machine's capacity for all its nodes; `received` is the number of pieces received
    over earlier connections."""

    version: Annotated[str, msgspec.Meta(max_length=64)]
    instance: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    machine: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    capacity: Capacity
    received: Annotated[int, msgspec.Meta(ge=0)]


class NodeWelcome(msgspec.Struct, tag="welcome", frozen=True):
    """The service's reply to `NodeHello`. On the first connection the `NodeSetup` follows. `received` is as in
    `NodeHello`."""

    received: Annotated[int, msgspec.Meta(ge=0)]


class Follow(msgspec.Struct, tag="follow", frozen=True, kw_only=True):
    """The state of a model's engine pool. `model` is None for the policy, as in all messages."""

    model: str | None
    state: PoolState


class Loads(msgspec.Struct, tag="loads", frozen=True, kw_only=True):
    """The load that other processes put on each engine of a model."""

    model: str | None
    loads: dict[str, float]


class RunAttempt(msgspec.Struct, tag="run", frozen=True, kw_only=True):
    """Run an attempt. `attempt` is a number by which `Cancel` and `Ran` name this run. `task` is the JSON of the
    TaskSpec. The node sends `Ran` at the end, also after a cancellation."""

    attempt: int
    session: SessionRow
    task: bytes
    reserved: bool
    stored: StoredRun | None = None
    goes_on: bool = False


class EndOutlived(msgspec.Struct, tag="end_outlived", frozen=True):
    """A request for `Node.end_outlived`."""

    session_id: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    attempt: int


class Pull(msgspec.Struct, tag="pull", frozen=True, kw_only=True):
    """Get an image from a registry. The node sends `Pulled` at the end."""

    pull: int
    reference: str
    name: str


class CallReply(msgspec.Struct, tag="answer", frozen=True, kw_only=True, omit_defaults=True):
    """The reply to a call: the raised `error`, or the returned value in the field for this kind of call."""

    call: int
    error: ErrorRecord | None = None
    turns: tuple[Turn, ...] = ()
    digest: str = ""
    frozen: dict[str, tuple[Turn, ...]] = {}
    data: bytes = b""
    gpus: tuple[str, ...] = ()


class Generated(msgspec.Struct, tag="generated", frozen=True, kw_only=True, omit_defaults=True):
    """A part of a forwarded generation. A part without a chunk is the last part."""

    generation: int
    chunk: Chunk | None = None
    chat: ChatChunk | None = None
    error: ErrorRecord | None = None


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The node is ready to run attempts, or cannot run any because of `error`. `outlived` is as in `Node`."""

    error: ErrorRecord | None = None
    outlived: Annotated[dict[Name, Number], msgspec.Meta(max_length=4096)] = {}


class Report(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """The state of the node. `uses` is the node's use of the engines, by model and engine. `images` are the names of
    the images on the node's machine, or None for a node on the service's machine."""

    stats: NodeStats
    uses: Annotated[tuple[ModelUses, ...], msgspec.Meta(max_length=256)]
    images: (
        Annotated[frozenset[Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=10_000)] | None
    ) = None


class ModelUses(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName
    engines: Annotated[dict[Name, EngineUse], msgspec.Meta(max_length=4096)]


class Gate(msgspec.Struct, tag="gate", frozen=True, kw_only=True):
    """The state of a model's gate at the node."""

    model: ModelName
    report: GateReport


class CheckEngine(msgspec.Struct, tag="doubt", frozen=True, kw_only=True):
    """An engine failed at the node: the service should check the engine."""

    model: ModelName
    engine: Name


class Ran(msgspec.Struct, tag="ran", frozen=True, kw_only=True):
    """The attempt has ended, and all its resources were given back. `result` is None for a cancelled or lost
    attempt."""

    attempt: Number
    result: SessionResult | None


class Pulled(msgspec.Struct, tag="pulled", frozen=True, kw_only=True):
    """The result of a `Pull`: the image, or the error."""

    pull: Number
    image: RootImage | None = None
    error: ErrorRecord | None = None


class SetState(msgspec.Struct, tag="set_state", frozen=True, kw_only=True):
    """A call of `Store.set_state`."""

    call: Number
    session_id: Name
    attempt: Number
    state: SessionState


class AddTurn(msgspec.Struct, tag="add_turn", frozen=True, kw_only=True):
    """A call of `Store.add_turn`."""

    call: Number
    session_id: Name
    attempt: Number
    turn: Turn
    model: ModelName


class ReadTurns(msgspec.Struct, tag="read_turns", frozen=True, kw_only=True):
    """A call of `Store.turns`, or of `Store.frozen_turns`."""

    call: Number
    session_id: Name
    attempt: Number
    images: bool = False
    frozen: bool = False


class KeepArtifact(msgspec.Struct, tag="keep_artifact", frozen=True, kw_only=True):
    """A call of `ArtifactStore.keep`, from a node on another machine."""

    call: Number
    session_id: Name
    attempt: Number
    data: bytes


class KeepIndex(msgspec.Struct, tag="keep_index", frozen=True, kw_only=True):
    """A call of `ArtifactStore.keep_index`."""

    call: Number
    session_id: Name
    attempt: Number
    listed: ArtifactList


class ReadCarried(msgspec.Struct, tag="read_carried", frozen=True, kw_only=True):
    """A call of `ArtifactStore.carried`, for a run that is graded again on this node."""

    call: Number
    session_id: Name
    attempt: Number


class Take(msgspec.Struct, tag="take", frozen=True, kw_only=True):
    """Wait for resources and hold them until `GiveBack`, or until the node is gone."""

    call: Number
    amount: ResourceAmount
    priority: Annotated[int, msgspec.Meta(ge=-RESERVED_PRIORITY, le=RESERVED_PRIORITY)]
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""


class GiveBack(msgspec.Struct, tag="give_back", frozen=True):
    """Return the resources of the `Take` with this number, or withdraw the `Take` while it waits."""

    call: Number


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The node takes no new attempts. The service closes the connection when the present attempts have ended."""


class ForwardGeneration(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """Generate on an engine that only the service can reach. `input_ids` are int32. Either `sampling`, with ids, or
    `chat` is set."""

    generation: Number
    model: ModelName
    engine: Name
    request_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    session_key: Annotated[str, msgspec.Meta(max_length=256)] = ""
    input_ids: bytes = b""
    sampling: SamplingParams | None = None
    chat: ChatRequest | None = None


class AbortForwarded(msgspec.Struct, tag="abort", frozen=True):
    """Stop a forwarded generation."""

    generation: Number


def framed(message: msgspec.Struct, *, elsewhere: bool = False) -> bytes:
    """Encode a message. `elsewhere`: the sender is a node on another machine. Raises ServiceError for a message that is
    too long, has values that MessagePack lacks, or has more values than the service accepts."""
    kind = type(message).__name__
    try:
        frame = encode(message)
        if elsewhere and len(frame) > SMALL:
            check_cost(frame)
    except (TypeError, ValueError, OverflowError, Nonsense) as error:
        raise ServiceError(f"a {kind} message cannot be sent: {error}") from error
    if len(frame) > (MAX_FROM_NODE if elsewhere else MAX_MESSAGE):
        raise ServiceError(f"a {kind} message of {len(frame)} bytes is too long to be sent")
    return frame


OfAttempt = SetState | AddTurn | ReadTurns | KeepArtifact | KeepIndex
"""Calls for an attempt, which must be running on the node."""

Call = OfAttempt | ReadCarried | Take
ToNode = NodeSetup | Follow | Loads | RunAttempt | EndOutlived | Cancel | Pull | CallReply | Generated | Beat
ToService = (
    Ready
    | Report
    | Gate
    | CheckEngine
    | Ran
    | Pulled
    | SetState
    | AddTurn
    | ReadTurns
    | KeepArtifact
    | KeepIndex
    | ReadCarried
    | Take
    | GiveBack
    | Leaving
    | ForwardGeneration
    | AbortForwarded
    | Beat
)
TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
TO_SERVICE: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
TO_PROCESS: msgspec.msgpack.Decoder[NodeSetup | Join | LeaveService] = msgspec.msgpack.Decoder(
    NodeSetup | Join | LeaveService
)
TO_STARTER = msgspec.msgpack.Decoder(Ready)
HELLO = msgspec.msgpack.Decoder(NodeHello)
WELCOME = msgspec.msgpack.Decoder(NodeWelcome)
