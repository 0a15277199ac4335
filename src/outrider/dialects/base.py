"""The dialect seam: a wire format read into one request, and one reply written back in it.

Pure: bytes in, bytes out; no clock, no I/O, no token. Unknown request fields are tolerated and noted (`settings.py`
has all that are known); a field that is understood and wrong raises `RequestError` naming it.
Invariant: what a stream says and what the one-piece reply says are the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from outrider.constraint import Constraint
from outrider.errors import OutriderError
from outrider.messages import Delta, Message, ToolSpec, WireMessages
from outrider.trajectory import FinishReason, Ids, Logprobs

Memory = dict[str, Any]
"""What a dialect keeps for one session between its requests: one dictionary a session and dialect."""


class Action(Enum):
    """What a route asks for."""

    GENERATE = auto()
    COUNT_TOKENS = auto()
    MODELS = auto()  # the list
    MODEL = auto()  # one of them, by name


class WireCall(msgspec.Struct, frozen=True):
    """The head of one HTTP request. `path` is the dialect's own, without the session's key and percent-decoded;
    header names are in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What the client says about which of its agents is calling; None where it says nothing."""

    agent_id: str | None = None
    parent_id: str | None = None
    purpose: str | None = None


class AskedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What the client asked for about sampling; None where it left the choice."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    constraint: Constraint | None = None
    thinking: bool | None = None


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model call in no dialect. `tools_raw` is the bytes that determine `tools` ("" for none); `ignored` names what
    the client asked for that has no effect (`settings.bounded`); `private` is what the dialect that read it wants to
    find again when it writes the reply."""

    model: str
    messages: WireMessages
    tools: tuple[ToolSpec, ...] = ()
    tools_raw: bytes = b""
    sampling: AskedSampling = AskedSampling()
    ignored: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    caller: Caller = Caller()
    private: Any = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model call. `created` is in whole seconds since the epoch; `pieces` are the decoded sampled
    tokens one by one, given when the request asked for logprobs; `stop_match` is the stop token or stop string that
    ended the reply, where the engine tells."""

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
    stop_match: int | str | None = None


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a stream begins."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    prompt_ids: Ids | None = None


class StreamWriter(Protocol):
    """Writes one streamed reply. Call `open`, then `delta` any number of times, then `close` or `error`.

    Each returns the bytes to send, possibly none. `delta` is given `pieces`, the decoded new tokens, when the
    request asked for logprobs. `ping` is asked for after a long silence, at any time before the end.
    """

    content_type: str

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...
    def ping(self) -> bytes: ...


class Dialect(Protocol):
    """One wire format.

    `action` says what a call asks for: None when it is none of this dialect's, and NotFound is raised for a route that
    the dialect's API could have but that is not served here. `parse` is called for GENERATE and COUNT_TOKENS, and
    `count` writes the answer of the latter. `error` gives the HTTP status and the body in the dialect's own error
    shape. `models` answers MODELS and MODEL; it raises NotFound for a model that is not among `names`.
    """

    name: str

    def action(self, call: WireCall) -> Action | None: ...
    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest: ...
    def reply(self, request: ModelRequest, completion: Completion) -> bytes: ...
    def stream(self, request: ModelRequest) -> StreamWriter: ...
    def count(self, request: ModelRequest, tokens: int) -> bytes: ...
    def error(self, error: OutriderError) -> tuple[int, bytes]: ...
    def models(self, call: WireCall, names: list[str], context_tokens: int | None) -> bytes: ...
