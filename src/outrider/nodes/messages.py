"""The messages between a service and a node in another process, as MessagePack maps.

Each side can call the other (see `calls.py`). Each call has its own class. The class's tag is the name of the call, its
fields are the request, and the parameter of its base class is the type of the reply. Messages that are not calls get no
reply.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec

from outrider.counts import NodeCounts
from outrider.engines.base import ChatChunk, ChatRequest, Chunk, SamplingParams
from outrider.engines.gates import GateReport
from outrider.engines.pool.placement import EngineUse, PoolState
from outrider.errors import ErrorRecord, ServiceError
from outrider.lifecycle import SessionState
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import ArtifactList, NodeStats
from outrider.sessions.attempt import RESERVED_PRIORITY
from outrider.sessions.resources import Capacity, ResourceAmount
from outrider.store.rows import SessionRow
from outrider.timeline import MOST_PARTS, TimelinePart
from outrider.trajectory import SessionResult, Turn
from outrider.wire.decoding import SMALL, check_cost
from outrider.wire.link_protocol import Beat, Nonsense, encode

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAMING = "a node's name has letters, digits, dots, dashes and underscores"

MAX_MESSAGE = 1 << 30
"""Maximum bytes of a message to any node, and of a message from a node on the service's machine. The limit is high,
because a task with inline files, or the turns of a session with images, may have many megabytes. A longer message can
only be a mistake."""
MAX_FROM_NODE = 64 << 20
"""Maximum bytes of a message from a node on another machine. The longest messages are artifacts, turns, and calls that
contain a request body. Each of these may have 32 MiB."""
MAX_HELLO = 64 << 10
"""Maximum bytes of a `NodeHello`, the first message of a joining node."""

# Bounds for values in the messages of a node, listed in docs/nodes.md. The decoder refuses values outside of them.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""The name of an engine or a model, or the id of a session."""
ModelName = Name | None


class NodeSetup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """The service's first message to a node: the node's settings.

    `config`: the settings as JSON, without secrets.
    `path`: Python's module search path.
    `capacity`: the machine's capacity for all its nodes.
    `level`: the log level.
    `json_log`: True if log lines are JSON.
    `file`: the path of the settings file on the node's machine, or "".
    `service_url`: the URL at which a node on another machine has reached the service.
    `folders`: for a node on another machine, the contents of the tokenizers' files, by folder and file name.
    """

    name: str
    config: bytes
    path: tuple[str, ...] = ()
    capacity: Capacity
    level: int
    json_log: bool = False
    file: str = ""
    service_url: str | None = None
    folders: dict[str, dict[str, bytes]] = {}


class Join(msgspec.Struct, tag="join", frozen=True, kw_only=True):
    """Sent to a new process instead of `NodeSetup`: the process must join the service at `url`, on another machine.
    `own` has the settings of the process's own machine. `machine` is a random name of the program that started the
    process."""

    url: str
    token: str | None
    ca: str | None
    machine: str
    own: NodeSetup


class LeaveService(msgspec.Struct, tag="leave", frozen=True):
    """Sent to a process that has joined a service: the process must take no new sessions, and exit when its running
    sessions have ended."""


class NodeHello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The first message of a joining node on each of its connections.

    `version`: Outrider's version.
    `instance`: a random name of the node's process.
    `machine`: a random name of the program that started this process.
    `host`: identifies the machine and its network (`host_id`).
    `capacity`: the machine's capacity for all its nodes.
    `received`: the number of message pieces that the node has received over earlier connections.
    """

    version: Annotated[str, msgspec.Meta(max_length=64)]
    instance: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    machine: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    capacity: Capacity
    received: Annotated[int, msgspec.Meta(ge=0)]


class NodeWelcome(msgspec.Struct, tag="welcome", frozen=True):
    """The service's reply to `NodeHello`. On the first connection, the next message is the `NodeSetup`. `received` is
    the number of message pieces that the service has received over earlier connections."""

    received: Annotated[int, msgspec.Meta(ge=0)]


class Follow(msgspec.Struct, tag="follow", frozen=True, kw_only=True):
    """The state of the service's engine pool for a model. The node's pool copies this state. In all messages, `model`
    is None for the policy."""

    model: str | None
    state: PoolState


class Loads(msgspec.Struct, tag="loads", frozen=True, kw_only=True):
    """The load that other processes put on each engine of a model."""

    model: str | None
    loads: dict[str, float]


R = TypeVar("R")
C = TypeVar("C")


class NodeCall(msgspec.Struct, Generic[R], frozen=True):
    """A call to the other side, whose reply has type R."""


class NodeStream(NodeCall[R], frozen=True):
    """A call that gets any number of replies of type R. Only streams can be cancelled."""


class RunAttempt(NodeStream[SessionResult], tag="run", frozen=True, kw_only=True):
    """Run an attempt. `task` is the TaskSpec as JSON. `reserved` and `stored` are explained in `Attempt`. The only
    reply is the result, sent once the attempt holds no more resources. If the attempt is cancelled or lost, the call
    ends without a result."""

    session: SessionRow
    task: bytes
    reserved: bool
    stored: SessionResult | None = None


class PullImage(NodeCall[RootImage], tag="pull", frozen=True):
    """Pull an image from a registry. `reference` names the image in the registry; `name` is its name in tasks."""

    reference: str
    name: str


class CallRequest(msgspec.Struct, Generic[C], tag="call", frozen=True):
    """A message that makes a call. `call` is the number of the call; each side numbers its own calls in ascending
    order."""

    call: Number
    request: C


class CallReply(msgspec.Struct, tag="reply", frozen=True, omit_defaults=True):
    """A reply to a call: a value in MessagePack, or an error. If `more` is True, another reply to the call follows. The
    last reply of a `NodeStream` has no value."""

    call: Number
    value: msgspec.Raw = msgspec.Raw()
    error: ErrorRecord | None = None
    more: bool = False


class CancelCall(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel the call with this number."""

    call: Number


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The node is ready to run attempts, or cannot run any because of `error`."""

    error: ErrorRecord | None = None


class Report(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """The current state of a node.

    `uses`: the node's use of the engines, by model and engine.
    `images`: the names of the images on the node's machine, or None for a node on the service's machine.
    `counts`: what the node has counted since its start."""

    stats: NodeStats
    uses: Annotated[tuple[ModelUses, ...], msgspec.Meta(max_length=256)]
    images: (
        Annotated[frozenset[Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=10_000)] | None
    ) = None
    counts: NodeCounts = NodeCounts()


class ModelUses(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName
    engines: Annotated[dict[Name, EngineUse], msgspec.Meta(max_length=4096)]


class Gate(msgspec.Struct, tag="gate", frozen=True, kw_only=True):
    """The state of the node's `PolicyGate` for a model. This gate holds back the model's generations while the policy
    is paused."""

    model: ModelName
    report: GateReport


class CheckEngine(msgspec.Struct, tag="check_engine", frozen=True, kw_only=True):
    """An engine has failed for the node. The service then checks the engine."""

    model: ModelName
    engine: Name


class AttemptCall(NodeCall[R], frozen=True):
    """A call that concerns an attempt. The attempt must be running on the node."""

    session_id: Name
    attempt: Number


class SetState(AttemptCall[None], tag="set_state", frozen=True):
    """Calls the service's `Store.set_state`."""

    state: SessionState


class AddTurn(AttemptCall[None], tag="add_turn", frozen=True):
    """Calls the service's `Store.add_turn`."""

    turn: Turn
    model: ModelName


class ReadTurns(AttemptCall[list[Turn]], tag="read_turns", frozen=True):
    """Calls the service's `Store.turns`."""

    images: bool


class ReadFrozenTurns(AttemptCall[dict[str, list[Turn]]], tag="read_frozen_turns", frozen=True):
    """Calls the service's `Store.frozen_turns`."""


class AddTimeline(NodeCall[None], tag="add_timeline", frozen=True):
    """Calls the service's `Store.add_timeline`. Each attempt must be running on the node, or have run there
    recently."""

    parts: Annotated[list[TimelinePart], msgspec.Meta(max_length=MOST_PARTS)]


class KeepArtifact(AttemptCall[str], tag="keep_artifact", frozen=True):
    """Calls the service's `ArtifactStore.keep`. Only a node on another machine makes this call."""

    data: bytes


class KeepIndex(AttemptCall[None], tag="keep_index", frozen=True):
    """Calls the service's `ArtifactStore.keep_index`."""

    listed: ArtifactList


class ReadCarried(NodeCall[bytes], tag="read_carried", frozen=True):
    """Calls the service's `ArtifactStore.kept_for_graders` for an earlier run that this node is grading again. The
    service refuses the call for any other run."""

    session_id: Name
    attempt: Number


class Take(NodeStream[tuple[str, ...]], tag="take", frozen=True):
    """Wait for resources of the machine, and hold them until the call is cancelled or the node is gone for good.
    The only reply has the names of the assigned GPUs."""

    amount: ResourceAmount
    priority: Annotated[int, msgspec.Meta(ge=-RESERVED_PRIORITY, le=RESERVED_PRIORITY)]
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""


class GenerateTokens(NodeStream[Chunk], tag="generate", frozen=True):
    """Generate from token ids, on an engine that only the service can reach. `input_ids` are int32 values."""

    model: ModelName
    engine: Name
    request_id: Annotated[str, msgspec.Meta(max_length=256)]
    session_key: Annotated[str, msgspec.Meta(max_length=256)]
    input_ids: bytes
    sampling: SamplingParams


class GenerateChat(NodeStream[ChatChunk], tag="chat", frozen=True):
    """Generate from chat messages, on an engine that only the service can reach."""

    model: ModelName
    engine: Name
    request: ChatRequest


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The node takes no new attempts. When its running attempts have ended, the service closes the connection."""


def framed(message: object, *, elsewhere: bool = False) -> bytes:
    """Encode a message or a value. `elsewhere` is True if the sender is a node on another machine. Raises ServiceError
    if the message is too long, contains values that MessagePack cannot represent, or contains more values than the
    service accepts."""
    kind = type(message.request if isinstance(message, CallRequest) else message).__name__
    try:
        frame = encode(message)
        if elsewhere and len(frame) > SMALL:
            check_cost(frame)
    except (TypeError, ValueError, OverflowError, Nonsense) as error:
        raise ServiceError(f"a {kind} cannot be sent: {error}") from error
    if len(frame) > (MAX_FROM_NODE if elsewhere else MAX_MESSAGE):
        raise ServiceError(f"a {kind} of {len(frame)} bytes is too long to be sent")
    return frame


CallToNode = RunAttempt | PullImage
CallToService = (
    SetState
    | AddTurn
    | AddTimeline
    | ReadTurns
    | ReadFrozenTurns
    | KeepArtifact
    | KeepIndex
    | ReadCarried
    | Take
    | GenerateTokens
    | GenerateChat
)
REPLIES: dict[type[NodeCall[Any]], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(get_args(kind.__orig_bases__[0])[0])
    for kind in (*get_args(CallToNode), *get_args(CallToService))
}
"""Decoders for the values of replies, by class of call."""

CallMessage = CallReply | CancelCall
ToNode = NodeSetup | Follow | Loads | CallRequest[CallToNode] | CallMessage | Beat
ToService = Ready | Report | Gate | CheckEngine | Leaving | CallRequest[CallToService] | CallMessage | Beat
TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
TO_SERVICE: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
TO_PROCESS: msgspec.msgpack.Decoder[NodeSetup | Join | LeaveService] = msgspec.msgpack.Decoder(
    NodeSetup | Join | LeaveService
)
TO_STARTER = msgspec.msgpack.Decoder(Ready)
HELLO = msgspec.msgpack.Decoder(NodeHello)
WELCOME = msgspec.msgpack.Decoder(NodeWelcome)
