"""The messages between a service and a node in another process, as MessagePack maps.

It knows no connection. A `Call` of a node, to store a turn or to set resources aside, is answered by one `Answer` with
its number, unless it is given back first. Everything else is said once and needs no answer.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from outrider.engines.base import ChatChunk, ChatRequest, Chunk, SamplingParams
from outrider.engines.pool.affinity import EngineUse
from outrider.engines.pool.sharing import GateReport, PoolState
from outrider.engines.relay.decoding import SMALL, check_cost
from outrider.engines.relay.messages import Beat, Nonsense, encode
from outrider.errors import ErrorRecord, ServiceError
from outrider.lifecycle import SessionState
from outrider.rootfs.store import Image
from outrider.schemas import ArtifactList, NodeStats
from outrider.sessions.attempt import RESERVED_PRIORITY
from outrider.sessions.resources import Capacity, ResourceAmount
from outrider.store.rows import SessionRow
from outrider.trajectory import SessionResult, StoredRun, Turn

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
NAMING = "a node's name has letters, digits, dots, dashes and underscores"

MAX_MESSAGE = 1 << 30
"""Bytes of a message to a node, or of one between processes of this machine. A task with inline files, or the turns of
a session with images, may have many megabytes; a longer message is a mistake."""
MAX_FROM_NODE = 64 << 20
"""Maximum bytes of a message from a node on another machine. The longest is a turn or a call with all of a request's
body, which has 32 MiB, or an artifact, which has as many."""
MAX_HELLO = 64 << 10
"""Maximum bytes of a hello."""

# The bounds of what a node says. Decoding refuses what is beyond them; docs/nodes.md lists them.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""Of an engine, a model or a session."""
ModelName = Name | None


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """The service's first message: what the node is. `config` is the JSON of its settings, without secrets; `path` is
    where Python looks for modules; `capacity` is what the machine has for all its nodes; `level` is that of its log.
    `file` is where the settings of the node's own machine are, "" for nowhere. `folders` has what a node on another
    machine needs of the folders that the settings name: the files' bytes by name."""

    name: str
    config: bytes
    path: tuple[str, ...] = ()
    capacity: Capacity
    level: int
    file: str = ""
    folders: dict[str, dict[str, bytes]] = {}


class Join(msgspec.Struct, tag="join", frozen=True, kw_only=True):
    """To a process that is to join a service on another machine, in place of `Setup`: how it is reached, and what
    `own` says of this machine. `machine` is a random name of the program that has started it."""

    url: str
    token: str | None
    ca: str | None
    machine: str
    own: Setup


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """To a process that has joined: take no new sessions, and end when the present ones have."""


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The first message on each connection of a node that joins. `instance` is a random name of its process,
    `machine` of the program that has started it; `host` says on which machine and network it is (`host_id`);
    `capacity` is what that machine has for all its nodes; `version` is that of Outrider; `received` counts the pieces
    that came over earlier connections."""

    version: Annotated[str, msgspec.Meta(max_length=64)]
    instance: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    machine: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    capacity: Capacity
    received: Annotated[int, msgspec.Meta(ge=0)]


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Its answer; the `Setup` follows on the first connection. `received` is as in `Hello`."""

    received: Annotated[int, msgspec.Meta(ge=0)]


class Follow(msgspec.Struct, tag="follow", frozen=True, kw_only=True):
    """How the engine pool of a model stands. `model` is None for the policy, as everywhere below."""

    model: str | None
    state: PoolState


class Loads(msgspec.Struct, tag="loads", frozen=True, kw_only=True):
    """How much load each engine of a model has from other processes."""

    model: str | None
    loads: dict[str, float]


class Run(msgspec.Struct, tag="run", frozen=True, kw_only=True):
    """Run an attempt; `task` is the JSON of its TaskSpec. Answered by `Ran`, also when it is cancelled."""

    attempt: int
    session: SessionRow
    task: bytes
    reserved: bool
    stored: StoredRun | None = None
    goes_on: bool = False


class EndOutlived(msgspec.Struct, tag="end_outlived", frozen=True):
    """`Node.end_outlived`."""

    session_id: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    attempt: int


class Pull(msgspec.Struct, tag="pull", frozen=True, kw_only=True):
    """Get an image from a registry. Answered by `Pulled`."""

    pull: int
    reference: str
    name: str


class Answer(msgspec.Struct, tag="answer", frozen=True, kw_only=True, omit_defaults=True):
    """To a call. `error`: what it raised. The rest is what it returned, by the kind of the call."""

    call: int
    error: ErrorRecord | None = None
    turns: tuple[Turn, ...] = ()
    digest: str = ""
    frozen: dict[str, tuple[Turn, ...]] = {}
    data: bytes = b""
    gpus: tuple[str, ...] = ()


class Generated(msgspec.Struct, tag="generated", frozen=True, kw_only=True, omit_defaults=True):
    """A part of a forwarded generation; without any chunk, its end."""

    generation: int
    chunk: Chunk | None = None
    chat: ChatChunk | None = None
    error: ErrorRecord | None = None


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The node runs what it is given from now on; or it cannot, because of an error. `outlived` is as in `Node`."""

    error: ErrorRecord | None = None
    outlived: Annotated[dict[Name, Number], msgspec.Meta(max_length=4096)] = {}


class Report(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """How the node is. `uses`: what it has on the engines, by model and engine. `images`: the names of those that it
    has, if it is on another machine."""

    stats: NodeStats
    uses: Annotated[tuple[ModelUses, ...], msgspec.Meta(max_length=256)]
    images: (
        Annotated[frozenset[Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=10_000)] | None
    ) = None


class ModelUses(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName
    engines: Annotated[dict[Name, EngineUse], msgspec.Meta(max_length=4096)]


class Gate(msgspec.Struct, tag="gate", frozen=True, kw_only=True):
    """How the gate of a model's pool stands at the node."""

    model: ModelName
    report: GateReport


class Doubt(msgspec.Struct, tag="doubt", frozen=True, kw_only=True):
    """An engine failed at the node."""

    model: ModelName
    engine: Name


class Ran(msgspec.Struct, tag="ran", frozen=True, kw_only=True):
    """The attempt has ended, and all that it had was given back. `result` is None if it was cancelled, or is lost."""

    attempt: Number
    result: SessionResult | None


class Pulled(msgspec.Struct, tag="pulled", frozen=True, kw_only=True):
    """The image is there, or why it is not."""

    pull: Number
    image: Image | None = None
    error: ErrorRecord | None = None


class SetState(msgspec.Struct, tag="set_state", frozen=True, kw_only=True):
    """Of the calls: `Store.set_state`."""

    call: Number
    session_id: Name
    attempt: Number
    state: SessionState


class AddTurn(msgspec.Struct, tag="add_turn", frozen=True, kw_only=True):
    """`Store.add_turn`."""

    call: Number
    session_id: Name
    attempt: Number
    turn: Turn
    model: ModelName


class ReadTurns(msgspec.Struct, tag="read_turns", frozen=True, kw_only=True):
    """`Store.turns`, or `Store.frozen_turns`."""

    call: Number
    session_id: Name
    attempt: Number
    images: bool = False
    frozen: bool = False


class KeepArtifact(msgspec.Struct, tag="keep_artifact", frozen=True, kw_only=True):
    """`ArtifactStore.put`, of a node on another machine."""

    call: Number
    session_id: Name
    attempt: Number
    data: bytes


class KeepIndex(msgspec.Struct, tag="keep_index", frozen=True, kw_only=True):
    """`ArtifactStore.index`."""

    call: Number
    session_id: Name
    attempt: Number
    listed: ArtifactList


class ReadCarried(msgspec.Struct, tag="read_carried", frozen=True, kw_only=True):
    """`ArtifactStore.carried`, of a run that is graded again on this node."""

    call: Number
    session_id: Name
    attempt: Number


class Take(msgspec.Struct, tag="take", frozen=True, kw_only=True):
    """Set resources aside, when it is their turn. They are held until they are given back, or the node is gone."""

    call: Number
    amount: ResourceAmount
    priority: Annotated[int, msgspec.Meta(ge=-RESERVED_PRIORITY, le=RESERVED_PRIORITY)]
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""


class GiveBack(msgspec.Struct, tag="give_back", frozen=True):
    """What a `Take` of that number was given, or waits for."""

    call: Number


class Leaving(msgspec.Struct, tag="leaving", frozen=True):
    """The node takes no new attempts. The connection is closed when the present ones have ended."""


class Generate(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    """Generate on an engine that only the service has; `input_ids` are int32. One of `sampling`, with ids, and `chat`
    is there."""

    generation: Number
    model: ModelName
    engine: Name
    request_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    session_key: Annotated[str, msgspec.Meta(max_length=256)] = ""
    input_ids: bytes = b""
    sampling: SamplingParams | None = None
    chat: ChatRequest | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """The node wants no more of a generation."""

    generation: Number


def framed(message: msgspec.Struct, *, elsewhere: bool = False) -> bytes:
    """The message as it is sent; `elsewhere`: by a node to a service on another machine. Raises ServiceError for one
    that cannot be: with values that MessagePack does not have, too long, or with more values than the service takes."""
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
"""Calls for an attempt, which the node must have."""

Call = OfAttempt | ReadCarried | Take
ToNode = Setup | Follow | Loads | Run | EndOutlived | Cancel | Pull | Answer | Generated | Beat
ToService = (
    Ready
    | Report
    | Gate
    | Doubt
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
    | Generate
    | Abort
    | Beat
)
TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
TO_SERVICE: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
TO_PROCESS: msgspec.msgpack.Decoder[Setup | Join | Leave] = msgspec.msgpack.Decoder(Setup | Join | Leave)
TO_STARTER = msgspec.msgpack.Decoder(Ready)
HELLO = msgspec.msgpack.Decoder(Hello)
WELCOME = msgspec.msgpack.Decoder(Welcome)
