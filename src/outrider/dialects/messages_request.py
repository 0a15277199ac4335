"""An Anthropic Messages request body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: one scan of the body finds where each message and each of its fields
is; a message is decoded by `MessagesHistory.parse` alone, and a marker that moves does not change its bytes.

One message on the wire is not always one of ours: the tool results of a user message are messages of their own, in
their order among what else it says, and assistant messages that follow each other are one reply.

Source: Anthropic API reference, "Create a Message" and "Count tokens in a Message".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from outrider.dialects.base import AskedSampling, Caller, Memory, ModelRequest, WireCall
from outrider.dialects.decode import decode, depth_exceeds, refuse, shown
from outrider.dialects.messages_content import (
    Block,
    Content,
    Placed,
    assistant_message,
    placed,
    system_text,
    text_block,
    tool_message,
    user_message,
)
from outrider.messages import Message, Role, ToolSpec

MAX_TOKENS = 1 << 24
"""An output limit above this means no limit; clients do send such."""
MAX_TOOL_DEPTH = 64
"""How deep a tool's schema may nest: chat templates print it recursively."""

_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_TOOL_CHOICES = frozenset({"none", "auto", "any", "tool"})
_TOOLS_KEY = "tools"


class _Wire(msgspec.Struct, gc=False):
    role: str
    content: Content


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Wire]
    system: Content | None = None
    tools: Raw = Raw()
    tool_choice: _ToolChoice | None = None
    mcp_servers: Raw = Raw()
    stream: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=64)] | None = None


class _Tool(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Tools(msgspec.Struct, frozen=True):
    """Tools as read, and the bytes they were read from."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""


class _Span(msgspec.Struct, gc=False):
    """Where one of our messages is on the wire: messages [first, last), and of a user message the blocks
    [start, stop)."""

    role: Role
    first: int
    last: int
    start: int = 0
    stop: int | None = None


_BODY = msgspec.json.Decoder(_Body)
_TOOLS: msgspec.json.Decoder[list[_Tool] | None] = msgspec.json.Decoder(list[_Tool] | None)


def parse_request(call: WireCall, body: bytes, memory: Memory, *, generate: bool = True) -> ModelRequest:
    """The request in `body`. Raises RequestError; most of what is wrong in a message is found when it is parsed.
    `memory` keeps the last tools, so that a session's unchanged ones are read once."""
    wire = decode(_BODY, body)
    if not wire.messages:
        refuse("messages", "must not be empty")
    if bytes(wire.mcp_servers) not in (b"", b"null", b"[]"):
        refuse("mcp_servers", "is not supported: servers are reached by the client, which offers their tools")
    if generate and wire.messages[-1].role == "assistant":
        refuse("messages", "must not end with an assistant message: the beginning of a reply cannot be given")
    tools = _asked_tools(wire, memory)
    return ModelRequest(
        model=wire.model,
        messages=MessagesHistory(wire.system, wire.messages),
        tools=tools.specs,
        tools_raw=tools.raw,
        sampling=_asked_sampling(wire),
        stream=bool(wire.stream),
        caller=_caller(call),
    )


class MessagesHistory:
    """`WireMessages` over the blocks of each message."""

    __slots__ = ("_has_system", "_spans", "_wire")

    def __init__(self, system: Content | None, wire: list[_Wire]) -> None:
        told = system_text(placed(system, "system"))
        self._has_system = bool(told)
        self._wire = [_Wire("system", told), *wire] if told else wire
        self._spans: list[_Span] = []
        for index, message in enumerate(self._wire):
            self._add(index, message)

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, index: int) -> bytes:
        span = self._spans[index]
        pieces: list[bytes | Raw] = [span.role.encode()]
        for message in self._wire[span.first : span.last]:
            content = message.content
            for block in [text_block(content)] if isinstance(content, str) else content[span.start : span.stop]:
                pieces += block.pieces()
        return b"\n".join(pieces)

    def head(self, count: int) -> bytes:
        return b"\0".join(map(self.raw, range(count)))

    def size(self, index: int) -> int:
        return len(self.raw(index))

    def parse(self, index: int) -> Message:
        span = self._spans[index]
        blocks = [at for number in range(span.first, span.last) for at in self._placed(number, span)]
        match span.role:
            case Role.SYSTEM:
                return Message(role=Role.SYSTEM, content=system_text(blocks))
            case Role.USER:
                return user_message(blocks)
            case Role.ASSISTANT:
                return assistant_message(blocks)
            case Role.TOOL:
                return tool_message(blocks[0])

    def _placed(self, number: int, span: _Span) -> list[Placed]:
        where = number - self._has_system
        name = f"messages[{where}].content" if where >= 0 else "system"
        return placed(self._wire[number].content, name, span.start, span.stop)

    def _add(self, index: int, message: _Wire) -> None:
        role = _ROLES.get(message.role)
        if role is None:
            where = f"messages[{index - self._has_system}].role"
            refuse(where, f"unknown role {shown(message.role)}; known: {', '.join(_ROLES)}")
        last = self._spans[-1] if self._spans else None
        if role is Role.ASSISTANT and last is not None and last.role is Role.ASSISTANT:
            last.last = index + 1
        elif role is Role.USER and not isinstance(message.content, str):
            self._spans += _split(index, message.content)
        else:
            self._spans.append(_Span(role, index, index + 1))


def _split(index: int, content: list[Block]) -> Iterator[_Span]:
    """The spans of a user message: every tool result, and every run of other blocks."""
    start = 0
    for at, block in enumerate(content):
        if block.type == "tool_result":
            if start < at:
                yield _Span(Role.USER, index, index + 1, start, at)
            yield _Span(Role.TOOL, index, index + 1, at, at + 1)
            start = at + 1
    if start < len(content) or not content:
        yield _Span(Role.USER, index, index + 1, start, len(content))


def _asked_tools(wire: _Body, memory: Memory) -> _Tools:
    """The tools the model is told of; none of them where the client forbids their use."""
    tools = memory.get(_TOOLS_KEY)
    if not isinstance(tools, _Tools) or tools.raw != bytes(wire.tools):
        tools = memory[_TOOLS_KEY] = _read_tools(bytes(wire.tools))
    choice = wire.tool_choice
    if choice is None:
        return tools
    if choice.type not in _TOOL_CHOICES:
        refuse("tool_choice.type", f"unknown choice {shown(choice.type)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
    if choice.type == "tool" and choice.name not in [spec["function"]["name"] for spec in tools.specs]:
        refuse("tool_choice.name", "must be the name of one of the tools")
    return _Tools() if choice.type == "none" else tools


def _read_tools(raw: bytes) -> _Tools:
    read = decode(_TOOLS, raw, "tools") if raw else None
    if not read:
        return _Tools()
    return _Tools(tuple([_tool_spec(tool, f"tools[{index}]") for index, tool in enumerate(read)]), raw)


def _tool_spec(tool: _Tool, where: str) -> ToolSpec:
    """The tool in OpenAI form. One that Anthropic's servers run, or whose schema only its models know, is refused:
    to leave it out would promise the client what nobody does."""
    if tool.type not in (None, "custom"):
        refuse(f"{where}.type", f"{shown(tool.type)} is not supported: only custom tools, with an input_schema, are")
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", "is missing")
    if depth_exceeds(tool.input_schema, MAX_TOOL_DEPTH):
        refuse(f"{where}.input_schema", f"nests more than {MAX_TOOL_DEPTH} levels deep")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _asked_sampling(wire: _Body) -> AskedSampling:
    return AskedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=-1 if wire.top_k == 0 else wire.top_k,
        max_tokens=None if wire.max_tokens is None else min(wire.max_tokens, MAX_TOKENS),
        stop=tuple(wire.stop_sequences or ()),
    )


def _caller(call: WireCall) -> Caller:
    """What Claude Code and OpenCode say about their sub-agents."""
    parent = call.header(b"x-parent-session-id")
    own = call.header(b"x-session-id") if parent is not None else None
    return Caller(agent_id=call.header(b"x-claude-code-agent-id") or own, parent_id=parent)
