"""Parses an Anthropic Messages request body into a `ModelRequest`.

This module parses the settings and the tools, and `content.py` the messages. Invariant: one scan of the body finds each
message and its fields. Only `MessagesHistory.parse` decodes messages.

Tools that Anthropic's servers run are not passed to the model; their types are added to the request's notes. Some tools
that the client runs are declared only by their type, because Anthropic's models were trained on their schemas. If such
a tool is in `CLIENT_TOOLS` or is a computer, the model sees a function with the parameters from Anthropic's
documentation. Any other tool declared by type is treated like a tool of Anthropic's servers.

Source: Anthropic API reference, "Create a Message" and "Count tokens in a Message".
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from outrider.computer_tools import anthropic_tool
from outrider.constraint import ToolChoice
from outrider.dialects.base import Caller, Memory, ModelRequest, WireCall, opencode_caller
from outrider.dialects.field_policy import MESSAGES
from outrider.dialects.messages.content import Content, MessagesHistory, WireMessage
from outrider.dialects.reading import (
    HISTORY,
    NOTHING,
    TOOL,
    BodyReader,
    DeclaredTools,
    JsonObject,
    OutputLimit,
    SamplingFields,
    StopStrings,
    bounded_notes,
    cached_tools,
    check_depth,
    decode,
    note_unknown,
    quoted,
    read_sampling,
    read_thinking,
    refuse,
    response_format,
    tool_choice,
)
from outrider.messages import ToolSpec

COUNT_TOKENS = "/v1/messages/count_tokens"
_TOOL_CHOICES = frozenset({"none", "auto", "any", "tool"})
_TEXT = {"type": "string"}
CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash": {
        "description": "Run a command in a bash shell that keeps its state between calls.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "description": "The command to run. Required unless the shell is restarted."},
                "restart": {"type": "boolean", "description": "Whether to restart the shell."},
            },
        },
    },
    "text_editor": {
        "description": "View, create and edit text files.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_TEXT, "enum": ["view", "create", "str_replace", "insert"]},
                "path": {**_TEXT, "description": "Path of the file or, to view it, the folder."},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "For view: the first and the last line, counted from 1; -1 is the end of the file.",
                },
                "file_text": {**_TEXT, "description": "For create: the content of the file."},
                "old_str": {**_TEXT, "description": "For str_replace: the text to replace, which must occur once."},
                "new_str": {**_TEXT, "description": "For str_replace: the text to put there."},
                "insert_line": {"type": "integer", "description": "For insert: the line after which, 0 for the start."},
                "insert_text": {**_TEXT, "description": "For insert: the text."},
            },
            "required": ["command", "path"],
        },
    },
}
"""Tools that the client runs and declares by type. A key is the type without its date: `bash` for `bash_20250124`. All
versions of a tool get these parameters, although older text editors also have the command `undo_edit`. Source:
Anthropic documentation, "Bash tool" and "Text editor tool"."""
_COMPUTER = "computer"
"""The type, without its date, of the tool that controls a desktop. `computer_tools.py` makes its function, which
depends on the client's declaration."""


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Body(SamplingFields, kw_only=True):
    model: str
    messages: list[WireMessage]
    system: Content | None = None
    tools: Raw = Raw()
    tool_choice: _ToolChoice | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None
    stream: bool | None = None
    max_tokens: OutputLimit | None = None
    stop_sequences: StopStrings | None = None


class _Tool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None
    enable_zoom: bool | None = None


_BODY = BodyReader(_Body, MESSAGES)
_TOOLS: msgspec.json.Decoder[list[_Tool] | None] = msgspec.json.Decoder(list[_Tool] | None)


def parse_request(call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
    """Parse a request that generates a reply or counts tokens. Raises RequestError. Most errors in a message are raised
    only when that message is parsed."""
    notes: list[str] = []
    wire = _BODY.read(body, notes)
    if not wire.messages:
        refuse("messages", "must not be empty")
    if call.path != COUNT_TOKENS and wire.messages[-1].role == "assistant":
        refuse("messages", "must not end with an assistant message: a reply cannot be prefilled")
    tools = cached_tools(memory, bytes(wire.tools), lambda: _read_tools(bytes(wire.tools)))
    notes += [TOOL + kind for kind in tools.hosted]
    choice = _read_tool_choice(wire.tool_choice, tools.specs, notes)
    config = wire.output_config or {}
    if config.get("effort") not in NOTHING:
        notes.append("output_config.effort")
    note_unknown("output_config", config, ("effort", "format"), notes)
    history = MessagesHistory(wire.system, wire.messages)
    notes += [HISTORY + kind for kind in history.hosted]
    constraint = response_format(wire.output_format, "output_format")
    if constraint is None:
        constraint = response_format(config.get("format"), "output_config.format")
    sampling = read_sampling(
        wire,
        max_tokens=wire.max_tokens,
        stop=wire.stop_sequences,
        thinking=read_thinking(wire, wire.thinking, notes),
        constraint=constraint,
    )
    offered = tools.specs and (wire.tool_choice is None or wire.tool_choice.type != "none")
    caller = opencode_caller(call)
    if own := call.header(b"x-claude-code-agent-id"):
        caller = Caller(agent_id=own, parent_id=caller.parent_id)
    return ModelRequest(
        model=wire.model,
        messages=history,
        tools=tools.specs if offered else (),
        tools_raw=tools.raw if offered else b"",
        tool_choice=choice,
        sampling=sampling,
        ignored=bounded_notes(notes),
        stream=bool(wire.stream),
        caller=caller,
    )


def _read_tools(raw: bytes) -> DeclaredTools:
    specs: list[ToolSpec] = []
    hosted: list[str] = []
    read = decode(_TOOLS, raw, "tools") if raw else None
    for index, tool in enumerate(read or []):
        where, family = f"tools[{index}]", (tool.type or "").rpartition("_")[0]
        documented = CLIENT_TOOLS.get(family)
        if documented is None and family != _COMPUTER and tool.type not in (None, "custom"):
            hosted.append(tool.type or "")
            continue
        if not tool.name:
            refuse(f"{where}.name", "must be a non-empty string")
        if family == _COMPUTER:
            zoom = bool(tool.enable_zoom)
            specs.append(anthropic_tool(tool.name, tool.display_width_px, tool.display_height_px, zoom=zoom))
            continue
        if documented is not None:
            specs.append({"type": "function", "function": {"name": tool.name, **documented}})
            continue
        if tool.input_schema is None:
            refuse(f"{where}.input_schema", "is missing")
        check_depth(tool.input_schema, f"{where}.input_schema")
        described = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **described, "parameters": tool.input_schema}
        specs.append({"type": "function", "function": function})
    return DeclaredTools(tuple(specs), raw, tuple(hosted))


def _read_tool_choice(choice: _ToolChoice | None, tools: tuple[ToolSpec, ...], notes: list[str]) -> ToolChoice | None:
    """Return the choice of tools that restricts the reply; None for `auto` and `none`. Raises RequestError for an
    unknown choice. `disable_parallel_tool_use` is enforced only if the choice forces a call. Otherwise it is added to
    `notes`."""
    if choice is None:
        return None
    if choice.type not in _TOOL_CHOICES:
        refuse("tool_choice.type", f"unknown choice {quoted(choice.type)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
    single = bool(choice.disable_parallel_tool_use)
    if choice.type == "any":
        return tool_choice(None, tools, required=True, single=single, field="tool_choice")
    if choice.type == "tool":
        if choice.name is None or choice.name not in [spec["function"]["name"] for spec in tools]:
            refuse("tool_choice.name", "must be the name of one of the tools that the client runs")
        return tool_choice([choice.name], tools, required=True, single=True, field="tool_choice")
    if single:
        notes.append("tool_choice.disable_parallel_tool_use")
    return None
