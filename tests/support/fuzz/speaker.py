"""The fuzzer's interface to a dialect: how a client writes requests, reads replies, and continues a conversation.

Independent of the gateway and of tokens. Invariant: a reply that the dialect does not allow raises `Violation`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from support.fuzz.grammar import Grammar, Writer

Body = dict[str, Any]
_STRICT = msgspec.json.Decoder()
_LINE_ENDS = ("\x85".encode(), "\u2028".encode(), "\u2029".encode())


class Violation(Exception):
    """An invariant is violated."""


def check(condition: object, problem: str) -> None:
    if not condition:
        raise Violation(problem)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request. `pieces` are the parts in which the body arrives."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    pieces: tuple[bytes, ...] = (b"",)


class Manner(msgspec.Struct, frozen=True):
    """How a body is sent. `form` is one of the dialect's forms; "count" requests only the number of tokens. `stream` is
    True if the reply is a stream."""

    stream: bool = False
    form: str = ""


class Called(msgspec.Struct, frozen=True):
    """A tool call that the client received. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply as a client reads it.

    - `items`: the parts of the reply that the client keeps, in the dialect's form.
    - `reasoning`: None if the reply may lack the reasoning, for example because the request did not ask for it.
    - `cut`: the reply ended at the token limit.
    - `failure`: the error with which a stream ended.
    """

    text: str
    reasoning: str | None
    calls: tuple[Called, ...] = ()
    cut: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    id: str = ""
    items: Any = None
    failure: str | None = None


class Echo(StrEnum):
    """How a client changes a reply before it sends the reply back. In spite of these changes, the gateway must use the
    recorded ids."""

    EXACT = "exact"
    NO_REASONING = "no_reasoning"
    RESPELLED = "respelled"
    TRIMMED = "trimmed"


class Speaker(Protocol):
    """One dialect. `history` is the key of the conversation in a body.

    - `manner`: how the next body is sent.
    - `dressed`: an equivalent form of a body.
    - `request`: the HTTP request with an encoded body.
    - `asides`: a request that generates nothing.
    - `go_on`: the body of the next request, with the reply, the results of its tool calls, and new content.
    - `read`, `read_count`, `read_error`: read a response. They raise Violation if the dialect does not allow the
      response.
    """

    name: str
    grammar: Grammar
    history: str

    def manner(self, writer: Writer) -> Manner: ...
    def dressed(self, writer: Writer, body: Body) -> Body: ...
    def request(self, manner: Manner, payload: bytes) -> Request: ...
    def asides(self, writer: Writer) -> Request: ...
    def go_on(self, writer: Writer, body: Body, said: Said, echo: Echo) -> Body: ...
    def read(self, payload: bytes, manner: Manner) -> Said: ...
    def read_count(self, payload: bytes) -> int: ...
    def read_error(self, status: int, payload: bytes) -> None: ...


class Event(msgspec.Struct, frozen=True):
    name: str | None
    data: bytes


def decoded(payload: bytes) -> Any:
    """Parse JSON as the strictest client does. Raises Violation."""
    try:
        return _STRICT.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Violation(f"not JSON: {error}") from error


def decoded_object(payload: bytes) -> dict[str, Any]:
    value: dict[str, Any] = one_of(decoded(payload), dict, "the body")
    return value


def events_of(payload: bytes) -> list[Event]:
    """Return the server-sent events of a stream, without its comments."""
    check(payload.endswith(b"\n\n"), "an event stream does not end with an empty line")
    check(not any(end in payload for end in _LINE_ENDS), "an event has a line end that some clients split at")
    found = []
    for block in payload.split(b"\n\n"):
        name: str | None = None
        data: list[bytes] = []
        for line in block.split(b"\n"):
            if line.startswith(b"data: "):
                data.append(line[6:])
            elif line.startswith(b"event: "):
                name = line[7:].decode()
            else:
                check(not line or line.startswith(b":"), f"a strange line in an event stream: {line[:80]!r}")
        if data:
            check(len(data) == 1, "an event's data has several lines")
            found.append(Event(name, data[0]))
    return found


def respelled(arguments: str) -> str:
    """Return the arguments of a call as another JSON library writes them. Text that is not a JSON object is returned
    unchanged."""
    try:
        value = json.loads(arguments)
        written = json.dumps(value, indent=1, sort_keys=True)
        written.encode()
        return written if isinstance(value, dict) and json.loads(written) == value else arguments
    except (ValueError, RecursionError):
        return arguments


def without(body: Body, *keys: str) -> Body:
    return {key: value for key, value in body.items() if key not in keys}


def one_of(value: Any, kinds: type | tuple[type, ...], name: str) -> Any:
    check(isinstance(value, kinds), f"{name} is {value!r}")
    return value


def same_keys(value: dict[str, Any], keys: Sequence[str], name: str) -> None:
    check(sorted(value) == sorted(keys), f"{name} has the keys {sorted(value)}")
