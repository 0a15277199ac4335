"""The messages between a service and the workers of a relay engine, as MessagePack maps. docs/relay.md describes them.

Invariant: ids are int32 and log-probabilities float64, packed little-endian, so that every bit arrives unchanged.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from outrider.constraint import ConstraintKind
from outrider.engines.base import Chunk, EngineHealth, PauseMode, SamplingParams
from outrider.errors import ErrorRecord
from outrider.trajectory import FinishReason, LogprobKind, VersionSpan
from outrider.wire.link_protocol import Beat, Nonsense

PROTOCOL = 1
"""The version of the protocol. It is incremented after any change that could make one side misread the other, such as a
new field of `SamplingParams`, which an older worker would silently ignore."""

MAX_TO_SERVICE = 8 << 20
"""Maximum bytes of a message from a worker. This is enough for a chunk of half a million tokens. Unmasking a WebSocket
frame of this size blocks the event loop for 20 ms."""
MAX_HELLO = 256 << 10
"""Maximum bytes of a worker's first message."""
MAX_HOLDS = 16_384
"""Maximum number of generations that a worker may list in its first message."""
MAX_DETAIL = 1000
"""Maximum characters of the `detail` in a worker's health report. The rest is cut off."""
MAX_TO_WORKER = 64 << 20
"""Maximum bytes of a message to a worker. This is enough for a prompt of 16 million tokens."""
MAX_VERSION = (1 << 31) - 1


WorkerAction = Literal["pause", "resume", "set_version", "update_weights", "health", "tokenize"]


class WorkerHello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """A worker's first message.

    `instance`: a random name of this worker object, the same on every connection.
    `holds`: the generations that the worker still keeps, because the service has not acknowledged their end.
    `loads`: True if the worker can load weights.
    `paused`: True if a service, perhaps an earlier one, has paused the worker and not resumed it."""

    protocol: int
    instance: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    name: Annotated[str, msgspec.Meta(max_length=100)]
    model: Annotated[str, msgspec.Meta(max_length=1000)] | None
    context_tokens: Annotated[int, msgspec.Meta(gt=0, le=MAX_VERSION)] | None
    logprob_kind: LogprobKind
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    constraints: Annotated[tuple[ConstraintKind, ...], msgspec.Meta(max_length=16)] = ()
    tokenizes: bool = False
    loads: bool = False
    paused: bool = False
    holds: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_HOLDS)] = ()


class WorkerWelcome(msgspec.Struct, tag="welcome", frozen=True, kw_only=True):
    """The service's first message. `resumed` has the generations that continue, each with the number of the last
    message that the service has received. The worker drops its other generations. Times are in seconds, windows in
    chunks."""

    protocol: int
    resumed: dict[int, int]
    heartbeat: float
    silence: float
    resume: float
    window: int
    total_window: int


class StartGeneration(msgspec.Struct, tag="generate", frozen=True, kw_only=True):
    generation: int
    request_id: str
    session_key: str
    input_ids: bytes
    sampling: SamplingParams


class AbortGeneration(msgspec.Struct, tag="abort", frozen=True):
    """The service no longer needs this generation. The worker must end and drop it."""

    generation: int


class Acknowledge(msgspec.Struct, tag="acknowledge", frozen=True):
    """The service has read all messages of a generation up to `number`."""

    generation: int
    number: int


class WorkerCall(msgspec.Struct, tag="call", frozen=True, kw_only=True):
    """An order to the worker. The worker carries out the action and sends one reply. If the worker receives the same
    call again, it only sends the reply again."""

    call: int
    action: WorkerAction
    mode: PauseMode = "finish"
    version: int = 0
    weights: str = ""
    text: str = ""


class WorkerTokens(msgspec.Struct, tag="tokens", frozen=True, kw_only=True, omit_defaults=True):
    """A `Chunk` as a message. `number` counts the messages of its generation, from 1."""

    generation: int
    number: int
    ids: bytes = b""
    logprobs: bytes = b""
    finish: FinishReason | None = None
    stop_match: int | str | None = None
    versions: Annotated[tuple[VersionSpan, ...], msgspec.Meta(max_length=4096)] = ()
    cached_tokens: int | None = None
    prompt_ids: bytes | None = None
    prompt_tokens: int | None = None


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """The last message of a generation that has failed. It is numbered like `WorkerTokens`."""

    generation: int
    number: int
    error: ErrorRecord


class WorkerReply(msgspec.Struct, tag="answer", frozen=True, kw_only=True, omit_defaults=True):
    call: int
    error: ErrorRecord | None = None
    health: EngineHealth | None = None
    ids: bytes | None = None


class Version(msgspec.Struct, tag="version", frozen=True):
    """The worker now serves this policy version, because something other than the service has changed its weights."""

    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


ToWorker = WorkerWelcome | StartGeneration | AbortGeneration | Acknowledge | WorkerCall | Beat
ToService = WorkerHello | WorkerTokens | Failed | WorkerReply | Version | Beat

TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
TO_SERVICE: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)


def pack_ids(ids: object) -> bytes:
    """Pack ids as int32, little-endian. Raises OverflowError for an id that does not fit, and ValueError or TypeError
    for values that are not ids."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack the ids of `pack_ids`. Raises Nonsense if the number of bytes is not a multiple of 4."""
    if len(data) % 4:
        raise Nonsense(f"{len(data)} bytes are no int32 ids")
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids


def tokens_of(generation: int, number: int, chunk: Chunk) -> WorkerTokens:
    """Convert a chunk to message `number` of its generation. Raises the errors of `pack_ids`."""
    return WorkerTokens(
        generation=generation,
        number=number,
        ids=pack_ids(chunk.ids),
        logprobs=np.asarray(chunk.logprobs, dtype="<f8").tobytes(),
        finish=chunk.finish,
        stop_match=chunk.stop_match,
        versions=chunk.versions,
        cached_tokens=chunk.cached_tokens,
        prompt_ids=None if chunk.prompt_ids is None else pack_ids(chunk.prompt_ids),
        prompt_tokens=chunk.prompt_tokens,
    )


def chunk_of(tokens: WorkerTokens) -> Chunk:
    """Convert a message to a chunk. Raises Nonsense if a chunk that is not the last has no tokens, or if there is not
    exactly one log-probability for each id."""
    if len(tokens.logprobs) != 2 * len(tokens.ids):
        raise Nonsense(f"{len(tokens.logprobs)} bytes of log-probabilities for {len(tokens.ids)} bytes of ids")
    if not tokens.ids and tokens.finish is None:
        raise Nonsense("a chunk without tokens that is not the last")
    return Chunk(
        ids=unpack_ids(tokens.ids),
        logprobs=np.frombuffer(tokens.logprobs, dtype="<f8").tolist(),
        finish=tokens.finish,
        stop_match=tokens.stop_match,
        versions=tokens.versions,
        cached_tokens=tokens.cached_tokens,
        prompt_ids=None if tokens.prompt_ids is None else unpack_ids(tokens.prompt_ids),
        prompt_tokens=tokens.prompt_tokens,
    )
