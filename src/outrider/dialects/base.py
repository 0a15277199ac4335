"""The interface of a dialect: a parser of requests in one wire format, and a writer of replies in the same format.

A dialect is pure: it turns bytes into bytes, without a clock, I/O or a tokenizer. Unknown request fields are tolerated
and noted (`field_policy.py` lists the known fields). A known field with a wrong value raises `RequestError` with the
field's name. Invariant: a streamed reply and a whole reply carry the same message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from outrider.constraint import Constraint
from outrider.errors import OutriderError, storable
from outrider.messages import Delta, Message, ToolSpec, WireMessages
from outrider.trajectory import FinishReason, Ids, Logprobs

Memory = dict[str, Any]
"""A dialect's state between the requests of one session. Each session has one dictionary per dialect."""


class Action(Enum):
    """The operation of a route."""

    GENERATE = auto()
    COUNT_TOKENS = auto()
    MODELS = auto()  # the list of models
    MODEL = auto()  # one model, by name


class WireCall(msgspec.Struct, frozen=True):
    """Method, path, query and headers of one HTTP request. `path` is percent-decoded and has no session key. Header
    names are in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header with the (lower-case) name."""
        for key, value in self.headers:
            if key == name:  # any byte is a character of latin-1, so decoding a header never fails
                return value.decode("latin-1")
        return None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The calling agent as named by the client; None for a field missing from the request."""

    agent_id: str | None = None
    parent_id: str | None = None
    purpose: str | None = None


class AskedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters in the client's request; None for a parameter left open."""

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
    """A model call, independent of its dialect.

    `tools_raw` is any bytes that determine `tools` (b"" for none). `ignored` names the request's fields and tools that
    have no effect (`field_policy.bounded_notes`). `reply_context` is data for the writer of the reply.
    """

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
    reply_context: Any = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model call.

    `created` is in whole seconds since the epoch. `pieces` are the sampled tokens decoded one by one, set when the
    request has logprobs on. `stop_match` is the stop token or stop string that ended the reply, if the engine reports
    it.
    """

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
    """The data available when a stream begins."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    prompt_ids: Ids | None = None


class StreamWriter(Protocol):
    """Writer of one streamed reply. Call `open`, then `delta` any number of times, then `close` or `error`.

    Each method returns the bytes to send, possibly none. `delta` receives `pieces`, the decoded new tokens, when the
    request has logprobs on. `ping` may be called at any time before the end; the gateway calls it after a long
    silence. `error` may be called without `open`. After `close` or `error`, all methods but `open` return b"".
    """

    content_type: str

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...
    def ping(self) -> bytes: ...


class Dialect(Protocol):
    """One wire format. A dialect is stateless: its state for a session is in that session's `Memory`.

    - `action` returns the operation of a call. It returns None for a route outside this dialect, and raises NotFound
      for a route of the dialect's API that is not served here.
    - `model` returns the name of the requested model without parsing the rest of the call. It returns None if the call
      names no model or the body is unreadable; `parse` then refuses the body.
    - `parse` reads the body of a GENERATE or COUNT_TOKENS call, and raises RequestError with the name of the wrong
      field.
    - `reply` writes a whole reply, `stream` makes the writer of a streamed reply, `count` writes the reply to
      COUNT_TOKENS.
    - `error` returns the HTTP status and the body in the dialect's own error shape.
    - `models` writes the reply to MODELS and MODEL. `contexts` maps the name of each model to its context in tokens,
      None where the size is unknown. Raises NotFound for a model missing from `contexts`.
    """

    name: str

    def action(self, call: WireCall) -> Action | None: ...
    def model(self, call: WireCall, body: bytes) -> str | None: ...
    def parse(self, call: WireCall, body: bytes, memory: Memory) -> ModelRequest: ...
    def reply(self, request: ModelRequest, completion: Completion) -> bytes: ...
    def stream(self, request: ModelRequest) -> StreamWriter: ...
    def count(self, request: ModelRequest, tokens: int) -> bytes: ...
    def error(self, error: OutriderError) -> tuple[int, bytes]: ...
    def models(self, call: WireCall, contexts: Mapping[str, int | None]) -> bytes: ...


def opencode_caller(call: WireCall) -> Caller:
    """The caller in the headers that OpenCode sends in each dialect: a sub-agent's session and its parent's session.
    A session without a parent is the main agent's, so the caller has no name."""
    parent = call.header(b"x-parent-session-id")
    return Caller(agent_id=call.header(b"x-session-id"), parent_id=parent) if parent else Caller()


def error_text(error: OutriderError) -> str:
    """The error's message, with its hint if there is one. The text can be encoded as UTF-8."""
    return storable(error.message if error.hint is None else f"{error.message} ({error.hint})")
