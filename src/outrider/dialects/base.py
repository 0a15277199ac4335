"""The interface of a dialect. A dialect parses requests in one wire format, and writes replies in the same format.

An unknown field has no effect and is listed in `ModelRequest.ignored`. A known field with a wrong value raises
`RequestError` with the field's name.

Invariants:

- A streamed reply and a whole reply carry the same message.
- The data of a server-sent event is on one line, even for clients that split lines at Unicode line separators.

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
"""State that a dialect keeps between the requests of one session. Each session has one dictionary per dialect."""


BRANCH_HEADER = b"x-outrider-branch"
"""The header in which a client declares the branch of a call, as KIND or KIND/LABEL. The branch is the main
conversation or a side conversation, such as a sub-agent's. A client that cannot set headers appends the branch to the
model's name: `MODEL@subagent/reviewer`."""
DECLARABLE = (BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.COMPACTION, BranchKind.AUXILIARY)
"""The kinds of branches that a client can declare. The other kinds are not known when the call is made. For example, a
branch is ABORTED if the client later cuts off the branch's last reply."""
MAX_LABEL = 64
"""Maximum number of characters of a branch's LABEL."""

_BRANCH = re.compile(rf"({'|'.join(DECLARABLE)})(?:/([\w.-]{{1,{MAX_LABEL}}}))?", re.ASCII)


class Action(Enum):
    """The operation that a client requests by the method and path of a call."""

    GENERATE = auto()
    COUNT_TOKENS = auto()
    MODELS = auto()  # the list of models
    MODEL = auto()  # one model, by name


class WireCall(msgspec.Struct, frozen=True):
    """Method, path, query and headers of one HTTP request. `path` is percent-decoded, without the session key. Header
    names are in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header with this name, or None. The name must be in lower case."""
        for key, value in self.headers:
            if key == name:  # decoding never fails, because latin-1 has a character for each byte
                return value.decode("latin-1")
        return None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The agent that made a call, as named by the client, and the branch that the client declares for the call. A field
    that the request does not set is None. An unset label is ""."""

    agent_id: str | None = None
    parent_id: str | None = None
    purpose: str | None = None
    declared: BranchKind | None = None
    declared_label: str = ""


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that the client sent. A parameter that the client did not send is None or empty."""

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
    """A parsed request for a model call, in a form that is the same for all dialects.

    - `tools_raw`: bytes that differ whenever `tools` differ; b"" for no tools.
    - `tool_choice`: restricts the reply's tool calls; None for no restriction.
    - `ignored`: the names of the request's fields and tools that have no effect (`reading.bounded_notes`).
    - `needs_images`: True if the agent cannot work without the images that its tools return. The value matters only if
      a tool has returned an image and the model cannot read images. If True, the request is then refused. If False, the
      model sees a text instead of the image.
    - `reply_context`: the dialect's own data for writing the reply.
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

    `created` is in whole seconds since the epoch. `pieces` has the text of each sampled token, decoded separately.
    `pieces` is empty unless the request asks for log-probabilities. `stop_match` is the stop token or stop string that
    ended the reply, if the engine reports it.
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
    """The facts about a reply that are known when its stream begins."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    prompt_ids: Ids | None = None


class StreamWriter(Protocol):
    """Writer of one streamed reply. Call `open`, then `delta` any number of times, then either `close` or `error`.
    After that, no method may be called. `error` may also be called without `open`.

    Each method returns the bytes to send, which may be empty. `pieces` has the text of each new token, decoded
    separately. `pieces` is empty unless the request asks for log-probabilities. `ping` has the bytes that keep an idle
    connection open. These bytes may be sent before the first result of a method and between two results.
    """

    content_type: str
    ping: bytes

    def open(self, opening: Opening) -> bytes: ...
    def delta(self, delta: Delta, pieces: tuple[bytes, ...] = ()) -> bytes: ...
    def close(self, completion: Completion) -> bytes: ...
    def error(self, error: OutriderError) -> bytes: ...


class Route(msgspec.Struct, frozen=True):
    """Maps calls to an operation. `calls` is a regular expression that must match the whole "METHOD /path", such as
    "POST /v1/messages". If `header` is set, the call must also have a header of this name. `action` is None for a part
    of the vendor's API that is not served. For such a part, `hint` is added to the error reply."""

    calls: str
    action: Action | None = None
    header: bytes | None = None
    hint: str = ""


def _uncounted(tokens: int) -> dict[str, Any]:
    raise NotFound("this dialect has no route that counts tokens")


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One wire format. A dialect has no state of its own: its state for a session is in that session's `Memory`.

    - `routes` are tried in order. The first route that matches a call determines the operation.
    - `model` returns the name of the requested model without parsing the rest of the request. It returns None if the
      request names no model or cannot be read; the error is left to `parse`.
    - `parse` parses the body of a GENERATE or COUNT_TOKENS call. Raises RequestError with the name of the wrong field.
    - `reply` writes a whole reply, and `stream` makes the writer of a streamed reply.
    - `models` writes the reply to a MODELS or MODEL call. Its second argument maps each model's name to the size of its
      context in tokens, or None. Raises NotFound for a model missing from the mapping.
    - `error` returns the JSON object of an error in the vendor's format.
    - `count` returns the JSON object of the reply to a COUNT_TOKENS call, if the dialect has a route for it.
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
    """Finds the dialect that serves a call. If several dialects have a matching route, the first of them serves it."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._routes = [
            (re.compile(route.calls, re.DOTALL).fullmatch, route.header, Routed(dialect, route.action, route.hint))
            for dialect in dialects
            for route in dialect.routes
        ]
        # Most routes are plain strings, so look them up in a dictionary. The dictionary does not have a route whose
        # calls an earlier route may serve.
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
"""A comment in a stream of server-sent events. Clients skip comments."""

_encode = msgspec.json.Encoder().encode


def event(fields: Any, name: bytes | None = None) -> bytes:
    """Write one server-sent event with JSON data. `name` is the event's type; None means the default type,
    "message"."""
    return b"data: %b\n\n" % line(fields) if name is None else b"event: %b\ndata: %b\n\n" % (name, line(fields))


def line(value: Any) -> bytes:
    """Encode the value as JSON, with U+0085, U+2028 and U+2029 escaped. In server-sent events, these characters do not
    end a line. But some clients split streams with Python's str.splitlines, which splits at these characters."""
    data = _encode(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def opencode_caller(call: WireCall) -> Caller:
    """Return the caller from the headers that OpenCode sends in every dialect: the session ids of a sub-agent and of
    its parent. The main agent sends no parent's id. For the main agent, the `Caller` has neither id."""
    parent = call.header(b"x-parent-session-id")
    return Caller(agent_id=call.header(b"x-session-id"), parent_id=parent) if parent else Caller()


def with_declaration(call: WireCall, request: ModelRequest) -> ModelRequest:
    """Return the request with the branch that the client declares in the header or else in the model's name. Without a
    declaration, returns the same request. Raises RequestError for a malformed header. A malformed suffix of the model's
    name raises no error, because it may be a part of the name."""
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
    """Return the model's name without an appended branch."""
    name, at, branch = (model or "").rpartition("@")
    return name if at and _BRANCH.fullmatch(branch) else model
