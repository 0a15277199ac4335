"""The interface of a dialect: a wire format is read into one request, and one reply is written back in it.

Pure: bytes in, bytes out; no clock, no I/O, no tokenizer. Unknown request fields are tolerated and noted
(`field_policy.py` lists the known ones); a field that is understood and wrong raises `RequestError` naming it.
Invariant: a streamed reply and a whole reply say the same message.
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
"""What a dialect keeps between the requests of one session. Each session has one dictionary per dialect."""


class Action(Enum):
    """What a route asks for."""

    GENERATE = auto()
    COUNT_TOKENS = auto()
    MODELS = auto()  # the list
    MODEL = auto()  # one of them, by name


class WireCall(msgspec.Struct, frozen=True):
    """Method, path, query and headers of one HTTP request. `path` is percent-decoded and has no session key; header
    names are in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()

    def header(self, name: bytes) -> str | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:  # any byte is a character of latin-1: a header never fails to decode
                return value.decode("latin-1")
        return None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Which of its agents the client says is calling; None where it says nothing."""

    agent_id: str | None = None
    parent_id: str | None = None
    purpose: str | None = None


class AskedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling that the client asked for; None where it left the choice."""

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
    """A model call, whatever its dialect.

    `tools_raw` is any bytes that determine `tools` (b"" for none); `ignored` names what the client asked for that has
    no effect (`field_policy.bounded_notes`); `reply_context` is what the dialect needs again when it writes the reply.
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

    `created` is in whole seconds since the epoch. `pieces` are the sampled tokens decoded one by one, given when the
    request asked for logprobs. `stop_match` is the stop token or stop string that ended the reply, where the engine
    says so.
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
    """What is known when a stream begins."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    prompt_ids: Ids | None = None


class StreamWriter(Protocol):
    """Writes one streamed reply. Call `open`, then `delta` any number of times, then `close` or `error`.

    Each returns the bytes to send, possibly none. `delta` is given `pieces`, the decoded new tokens, when the request
    asked for logprobs. `ping` may be called at any time before the end, and is after a long silence. `error` may be
    called without `open`. After `close` or `error` every method returns b"".
    """

    content_type: str

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...
    def ping(self) -> bytes: ...


class Dialect(Protocol):
    """One wire format. A dialect has no state: what it keeps for a session is in that session's `Memory`.

    - `action` says what a call asks for. It is None for a route of no concern to this dialect, and raises NotFound for
      a route that the dialect's API has but that is not served here.
    - `model` gives the name of the model that such a call asks for, without reading the rest; None where it is not told
      or the body cannot be read, which `parse` then refuses.
    - `parse` reads the body of a GENERATE or COUNT_TOKENS call, and raises RequestError naming the wrong field.
    - `reply` writes a whole reply, `stream` makes the writer of a streamed one, `count` answers COUNT_TOKENS.
    - `error` gives the HTTP status and the body in the dialect's own error shape.
    - `models` answers MODELS and MODEL; it raises NotFound for a model that is not among `contexts`: the sizes of the
      models' contexts in tokens by their names, None where one is not known.
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


def error_text(error: OutriderError) -> str:
    """What went wrong, and what to do about it where that is known. It can be encoded as UTF-8."""
    return storable(error.message if error.hint is None else f"{error.message} ({error.hint})")
