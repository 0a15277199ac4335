"""The dialect seam: a wire format read into one request, and one reply written back in it.

Pure: bytes in, bytes out; no clock, no I/O, no token. Unknown request fields are tolerated; a field that is
understood and wrong raises `RequestError` naming it. Invariant: what a stream says and what the one-piece
reply says are the same message.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from outrider.errors import OutriderError
from outrider.messages import Delta, Message, ToolSpec, WireMessages
from outrider.trajectory import FinishReason, Ids, Logprobs


class AskedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked for about sampling; None where it left the choice."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model call in no dialect. `tools_raw` is the bytes that determine `tools` ("" for none)."""

    model: str
    messages: WireMessages
    tools: tuple[ToolSpec, ...] = ()
    tools_raw: bytes = b""
    sampling: AskedSampling = AskedSampling()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model call. `created` is in whole seconds since the epoch; `pieces` are the decoded sampled
    tokens one by one, given when the request asked for logprobs."""

    id: str
    created: int
    model: str
    reply: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    prompt_ids: Ids | None = None
    output_ids: Ids | None = None
    logprobs: Logprobs | None = None
    pieces: tuple[bytes, ...] = ()


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a stream begins."""

    id: str
    created: int
    model: str
    prompt_ids: Ids | None = None


class StreamWriter(Protocol):
    """Writes one streamed reply. Call `open`, then `delta` any number of times, then `close` or `error`.

    Each returns the bytes to send, possibly none. `delta` is given `pieces`, the decoded new tokens, when the
    request asked for logprobs.
    """

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...
    def ping(self) -> bytes: ...


class Dialect(Protocol):
    """One wire format. `error` gives the HTTP status and the body in this dialect's own error shape."""

    name: str
    stream_content_type: str

    def parse(self, body: bytes) -> ModelRequest: ...
    def reply(self, request: ModelRequest, completion: Completion) -> bytes: ...
    def stream(self, request: ModelRequest) -> StreamWriter: ...
    def error(self, error: OutriderError) -> tuple[int, bytes]: ...
    def models(self, names: list[str], context_tokens: int | None) -> bytes: ...
