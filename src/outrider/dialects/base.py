"""The interface of a dialect: a parser of requests in one wire format, and a writer of replies in the same format.

A dialect is pure: it converts bytes to bytes, without a clock, I/O or a tokenizer. Unknown request fields are tolerated
and noted (`field_policy.py` lists the known fields). A known field with a wrong value raises `RequestError` with the
field's name. Invariants: a streamed reply and a whole reply carry the same message; the data of a server-sent event is
on one line, even for clients that split lines at Unicode line separators.

Source: WHATWG HTML, section 9.2 "Server-sent events".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from outrider.constraint import Constraint, ToolChoice
from outrider.errors import NotFound, OutriderError, RequestError
from outrider.messages import Delta, Message, ToolSpec, WireMessages
from outrider.trajectory import BranchKind, FinishReason, Ids, Logprobs

Memory = dict[str, Any]
"""A dialect's state between the requests of one session. Each session has one dictionary per dialect."""


BRANCH_HEADER = b"x-outrider-branch"
"""The header in which a client declares the branch of a call, as KIND or KIND/LABEL. A client that can set no headers
declares the branch in the model's name, as in `MODEL@subagent/reviewer`."""
DECLARABLE = (BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.COMPACTION, BranchKind.AUXILIARY)
"""The kinds that a client can declare. The other kinds depend on what becomes of a reply."""
MAX_LABEL = 64
"""Maximum number of characters of a declared label."""

_BRANCH = re.compile(rf"({'|'.join(DECLARABLE)})(?:/([\w.-]{{1,{MAX_LABEL}}}))?", re.ASCII)


class Action(Enum):
    """The operation that a client requests by the method and path of a call."""

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
        """Return the value of the first header with this name, which must be in lower case; None without such a
        header."""
        for key, value in self.headers:
            if key == name:  # decoding never fails, because latin-1 has a character for each byte
                return value.decode("latin-1")
        return None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The calling agent, as the client names it, and the branch that the client declares for the call. A field is None
    if the request does not have it."""

    agent_id: str | None = None
    parent_id: str | None = None
    purpose: str | None = None
    declared: BranchKind | None = None
    declared_label: str = ""


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters in the client's request. A parameter is None, or empty, if the request does not set
    it."""

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

    `tools_raw` are bytes that determine `tools`, in any encoding (b"" for no tools). `tool_choice` restricts the calls
    of the reply; None if the reply may call any tool or none. `ignored` names the request's fields and tools that have
    no effect (`reading.bounded_notes`). `reply_context` is the dialect's own data for the writer of the reply.
    `needs_images` is True if the agent cannot work without the images that its tools return. A model that reads no
    images then refuses these images, too.
    """

    model: str
    messages: WireMessages
    tools: tuple[ToolSpec, ...] = ()
    tools_raw: bytes = b""
    tool_choice: ToolChoice | None = None
    sampling: RequestedSampling = RequestedSampling()
    ignored: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    caller: Caller = Caller()
    needs_images: bool = False
    reply_context: Any = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished model call.

    `created` is in whole seconds since the epoch. `pieces` are the sampled tokens, each decoded separately; they are
    set only if the request asks for log-probabilities. `stop_match` is the stop token or stop string that ended the
    reply, if the engine reports it.
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
    """Writer of one streamed reply. Call `open`, then `delta` any number of times, then `close` or `error`, and nothing
    afterwards. `error` may be called without `open`.

    Each method returns the bytes to send, possibly none. `pieces` are the new tokens, each decoded separately; they are
    set only if the request asks for log-probabilities. `ping` are bytes that keep an idle connection open. They may be
    sent before the first result of a method, and between two results.
    """

    content_type: str
    ping: bytes

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...


class Route(msgspec.Struct, frozen=True):
    """One kind of calls of a dialect. `calls` is a regular expression for a call's whole method and path, such as "POST
    /v1/messages". If `header` is set, only calls with a header of this name match. `action` is None for calls of the
    dialect's API that are not served here; `hint` is then added to the error."""

    calls: str
    action: Action | None = None
    header: bytes | None = None
    hint: str = ""


def _uncounted(tokens: int) -> dict[str, Any]:
    raise NotFound("this dialect has no route that counts tokens")


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One wire format. A dialect is stateless: its state for a session is in that session's `Memory`.

    - `routes` are tried in order; the first route that matches a call determines the operation.
    - `model` returns the name of the requested model without parsing the rest of the call. It returns None if the call
      names no model or the body is unreadable; `parse` then refuses the body.
    - `parse` parses the body of a GENERATE or COUNT_TOKENS call. Raises RequestError with the name of the wrong field.
    - `reply` writes a whole reply, `stream` makes the writer of a streamed reply.
    - `models` writes the reply to MODELS and MODEL. Its second argument maps the name of each model to the size of the
      model's context in tokens, None if the size is unknown. Raises NotFound for a model missing from the mapping.
    - `error` returns the JSON object of an error in the dialect's own shape.
    - `count` returns the JSON object of the reply to COUNT_TOKENS, for a dialect that has such a route.
    """

    name: str
    routes: tuple[Route, ...]
    model: Callable[[WireCall, bytes], str | None]
    parse: Callable[[WireCall, bytes, Memory], ModelRequest]
    reply: Callable[[ModelRequest, Completion], bytes]
    stream: Callable[[ModelRequest], StreamWriter]
    models: Callable[[WireCall, Mapping[str, int | None]], bytes]
    error: Callable[[OutriderError], dict[str, Any]]
    count: Callable[[int], dict[str, Any]] = _uncounted


class Routed(msgspec.Struct, frozen=True):
    """The dialect and the operation of a call. `action` and `hint` are those of the matching `Route`."""

    dialect: Dialect
    action: Action | None
    hint: str


class RouteTable:
    """The routes of several dialects. If a call matches routes of several dialects, the first of these dialects serves
    the call."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._routes = [
            (re.compile(route.calls, re.DOTALL).fullmatch, route.header, Routed(dialect, route.action, route.hint))
            for dialect in dialects
            for route in dialect.routes
        ]
        # Most routes are literal texts, and their calls are found in this dictionary. A route is left out if an earlier
        # route also matches its text, because the earlier route takes precedence.
        self._exact: dict[str, Routed] = {}
        for number, route in enumerate(route for dialect in dialects for route in dialect.routes):
            fits, header, routed = self._routes[number]
            if header is None and fits(route.calls) and not any(one[0](route.calls) for one in self._routes[:number]):
                self._exact[route.calls] = routed

    def find(self, call: WireCall) -> Routed | None:
        """Return the dialect and the operation of a call; None if no dialect has a route for the call."""
        named = f"{call.method} {call.path}"
        if (exact := self._exact.get(named)) is not None:
            return exact
        for fits, header, routed in self._routes:
            if fits(named) and (header is None or call.header(header) is not None):
                return routed
        return None


EVENT_STREAM = "text/event-stream; charset=utf-8"
"""The media type of a stream of server-sent events."""
COMMENT = b": ping\n\n"
"""A comment in a stream of server-sent events, which clients skip."""

_encode = msgspec.json.Encoder().encode


def event(fields: Any, name: bytes | None = None) -> bytes:
    """Write one server-sent event with JSON data. `name` is the event's type; None for the default type, "message"."""
    return b"data: %b\n\n" % line(fields) if name is None else b"event: %b\ndata: %b\n\n" % (name, line(fields))


def line(value: Any) -> bytes:
    """Encode the value as JSON, with U+0085, U+2028 and U+2029 escaped. Some clients split streams with Python's
    str.splitlines, which splits at these characters, although these characters do not end a line in the format."""
    data = _encode(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def opencode_caller(call: WireCall) -> Caller:
    """Return the caller named by the headers that OpenCode sends in each dialect: the ids of a sub-agent's session and
    of its parent's session. A session without a parent belongs to the main agent; the caller's fields are then None."""
    parent = call.header(b"x-parent-session-id")
    return Caller(agent_id=call.header(b"x-session-id"), parent_id=parent) if parent else Caller()


def with_declaration(call: WireCall, request: ModelRequest) -> ModelRequest:
    """Return the request with the branch that the client declares, or unchanged if it declares none. The header takes
    precedence over the model's name. Raises RequestError for a malformed header. A model's name without a declaration
    is only a name."""
    header = call.header(BRANCH_HEADER)
    if header is None:
        _, at, suffix = request.model.rpartition("@")
        declared = _BRANCH.fullmatch(suffix) if at else None
        if declared is None:
            return request
    else:
        declared = _BRANCH.fullmatch(header)
        if declared is None:
            field = BRANCH_HEADER.decode()
            raise RequestError(
                f"{field}: must be KIND or KIND/LABEL. Kinds: {', '.join(DECLARABLE)}. A label has at most {MAX_LABEL} "
                "letters, digits, '.', '-' and '_'",
                field=field,
            )
    kind, label = BranchKind(declared[1]), declared[2] or ""
    caller = msgspec.structs.replace(request.caller, declared=kind, declared_label=label)
    return msgspec.structs.replace(request, caller=caller)


def without_declaration(model: str | None) -> str | None:
    """Return the model's name without a declared branch."""
    name, at, branch = (model or "").rpartition("@")
    return name if at and _BRANCH.fullmatch(branch) else model
