"""An Anthropic Messages request body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: one scan of the body finds where each message and each of its fields
is; a message is decoded by `MessagesHistory.parse` alone, and a marker that moves does not change its bytes.

One message on the wire is not always one of ours: the tool results of a user message are messages of their own, in
their order among what else it says, and assistant messages that follow each other are one reply.

Tools that Anthropic's servers run, and what they once did, are not shown to the model, and noted. Of the tools whose
schema only its own models know, those in `CLIENT_TOOLS` are told by the parameters that the client's side is documented
to take; the others are left out and noted.

Source: Anthropic API reference, "Create a Message" and "Count tokens in a Message".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from outrider.dialects.base import AskedSampling, Caller, Memory, ModelRequest, WireCall
from outrider.dialects.field_policy import HISTORY, MESSAGES, TOOL, BodyReader, bounded
from outrider.dialects.json import decode, depth_exceeds, refuse, shown
from outrider.dialects.messages.content import (
    HOSTED_BLOCKS,
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
from outrider.dialects.messages.tools import CLIENT_TOOLS
from outrider.dialects.server_extensions import (
    Extras,
    Object,
    Thought,
    asked_form,
    response_format,
    sampled_as,
    template_thinking,
    unknown_in,
    words_for_thinking,
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
    disable_parallel_tool_use: bool | None = None


class _Body(Extras, kw_only=True):
    model: str
    messages: list[_Wire]
    system: Content | None = None
    tools: Raw = Raw()
    tool_choice: _ToolChoice | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None
    stream: bool | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=64)] | None = None


class _Tool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Tools(msgspec.Struct, frozen=True):
    """Tools as read, the bytes they were read from, and the kinds of those that the model is not told of."""

    specs: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    hosted: tuple[str, ...] = ()


class _Span(msgspec.Struct, gc=False):
    """Where one of our messages is on the wire: messages [first, last), and of a user message the blocks
    [start, stop)."""

    role: Role
    first: int
    last: int
    start: int = 0
    stop: int | None = None


_BODY = BodyReader(_Body, MESSAGES)
_TOOLS: msgspec.json.Decoder[list[_Tool] | None] = msgspec.json.Decoder(list[_Tool] | None)


def parse_request(call: WireCall, body: bytes, memory: Memory, *, generate: bool = True) -> ModelRequest:
    """The request in `body`. Raises RequestError; most of what is wrong in a message is found when it is parsed.
    `memory` keeps the last tools, so that a session's unchanged ones are read once."""
    read = _BODY.read(body)
    wire = read.wire
    if not wire.messages:
        refuse("messages", "must not be empty")
    if generate and wire.messages[-1].role == "assistant":
        refuse("messages", "must not end with an assistant message: the beginning of a reply cannot be given")
    tools = _asked_tools(wire, memory)
    thought = _thought(wire)
    history = MessagesHistory(wire.system, wire.messages)
    hidden = not tools.specs or (wire.tool_choice is not None and wire.tool_choice.type == "none")
    return ModelRequest(
        model=wire.model,
        messages=history,
        tools=() if hidden else tools.specs,
        tools_raw=b"" if hidden else tools.raw,
        sampling=_asked_sampling(wire, thought),
        ignored=bounded([*read.notes, *_notes(wire, tools), *history.notes, *thought.notes]),
        stream=bool(wire.stream),
        caller=_caller(call),
    )


class MessagesHistory:
    """`WireMessages` over the blocks of each message. `notes` name the kinds of blocks that are left out."""

    __slots__ = ("_has_system", "_spans", "_wire", "notes")

    def __init__(self, system: Content | None, wire: list[_Wire]) -> None:
        told = system_text(placed(system, "system"))
        self._has_system = bool(told)
        self._wire = [_Wire("system", told), *wire] if told else wire
        self._spans: list[_Span] = []
        self.notes: list[str] = []
        for index, message in enumerate(self._wire):
            self._leave_out(message)
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

    def _leave_out(self, message: _Wire) -> None:
        """Take what hosted tools did out of a message."""
        if isinstance(message.content, str):
            return
        hosted = [block.type for block in message.content if block.type in HOSTED_BLOCKS]
        if hosted:
            self.notes += [HISTORY + kind for kind in hosted]
            message.content = [block for block in message.content if block.type not in HOSTED_BLOCKS]

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
    """The tools that are told, also where the client forbids their use. Raises RequestError for a choice that does not
    exist; any other than `none` is a wish: what the model samples is not constrained."""
    tools = memory.get(_TOOLS_KEY)
    if not isinstance(tools, _Tools) or tools.raw != bytes(wire.tools):
        tools = memory[_TOOLS_KEY] = _read_tools(bytes(wire.tools))
    choice = wire.tool_choice
    if choice is None:
        return tools
    if choice.type not in _TOOL_CHOICES:
        refuse("tool_choice.type", f"unknown choice {shown(choice.type)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
    if choice.type == "tool" and choice.name not in [spec["function"]["name"] for spec in tools.specs]:
        refuse("tool_choice.name", "must be the name of one of the tools that the client runs: no other is run")
    return tools


def _read_tools(raw: bytes) -> _Tools:
    read = (decode(_TOOLS, raw, "tools") if raw else None) or []
    specs = [_tool_spec(tool, f"tools[{index}]") for index, tool in enumerate(read) if _is_told(tool)]
    return _Tools(tuple(specs), raw, tuple([tool.type or "" for tool in read if not _is_told(tool)]))


def _is_told(tool: _Tool) -> bool:
    return tool.type in (None, "custom") or _client_tool(tool) is not None


def _client_tool(tool: _Tool) -> ToolSpec | None:
    """What is documented of a client's tool, by its type without its date."""
    family = (tool.type or "").rpartition("_")[0]
    return CLIENT_TOOLS.get(family)


def _tool_spec(tool: _Tool, where: str) -> ToolSpec:
    """The tool in OpenAI form."""
    if not tool.name:
        refuse(f"{where}.name", "must be a non-empty string")
    if (documented := _client_tool(tool)) is not None:
        return {"type": "function", "function": {"name": tool.name, **documented}}
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", "is missing")
    if depth_exceeds(tool.input_schema, MAX_TOOL_DEPTH):
        refuse(f"{where}.input_schema", f"nests more than {MAX_TOOL_DEPTH} levels deep")
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _notes(wire: _Body, tools: _Tools) -> list[str]:
    """What has no effect of the fields that are read here."""
    notes = [TOOL + kind for kind in tools.hosted]
    if wire.tool_choice is not None:
        if wire.tool_choice.type not in ("none", "auto"):
            notes.append("tool_choice")
        if wire.tool_choice.disable_parallel_tool_use:
            notes.append("tool_choice.disable_parallel_tool_use")
    if wire.output_config is not None and wire.output_config.get("effort") is not None:
        notes.append("output_config.effort")
    return notes + unknown_in("output_config", wire.output_config, ("effort", "format"))


def _thought(wire: _Body) -> Thought:
    told, thinking = template_thinking(wire), words_for_thinking("thinking", wire.thinking)
    return Thought(told.on if thinking.on is None else thinking.on, told.notes + thinking.notes)


def _asked_sampling(wire: _Body, thought: Thought) -> AskedSampling:
    own = AskedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=None if wire.max_tokens is None else min(wire.max_tokens, MAX_TOKENS),
        stop=tuple(wire.stop_sequences or ()),
        thinking=thought.on,
    )
    form = response_format(wire.output_format, "output_format")
    if form is None and wire.output_config is not None:
        form = response_format(wire.output_config.get("format"), "output_config.format")
    return sampled_as(wire, own, asked_form(wire, form))


def _caller(call: WireCall) -> Caller:
    """What Claude Code and OpenCode say about their sub-agents."""
    parent = call.header(b"x-parent-session-id")
    own = call.header(b"x-session-id") if parent is not None else None
    return Caller(agent_id=call.header(b"x-claude-code-agent-id") or own, parent_id=parent)
