"""Parses a Chat Completions request body into a `ModelRequest`.

Invariant: the body is scanned once, and only needed data is decoded. `ChatMessages.parse` decodes messages later.

A tool of the type `custom` is refused, because a Chat reply cannot call it. A tool of any other type than `function` is
a hosted tool, which OpenAI's servers would run. It is listed in `ModelRequest.ignored`, and the model does not see it.

Source: OpenAI API reference, "Create chat completion"; vLLM for the messages' field `reasoning` and for
`return_token_ids`; OpenRouter and Z.ai for the request's fields `reasoning` and `thinking`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from outrider.constraint import ToolChoice
from outrider.dialects.base import Memory, ModelRequest, WireCall, opencode_caller
from outrider.dialects.field_policy import CHAT
from outrider.dialects.reading import (
    NOTHING,
    TOOL,
    BodyReader,
    DeclaredTools,
    JsonObject,
    OutputLimit,
    SamplingFields,
    StopString,
    StopStrings,
    arguments_from_text,
    bounded_notes,
    cached_tools,
    check_depth,
    check_function,
    decode,
    file_from_address,
    image_from_address,
    note_unknown,
    quoted,
    read_sampling,
    read_thinking,
    refuse,
    response_format,
    tool_choice,
)
from outrider.media import attachment, check_attachments, encoded_size
from outrider.messages import Message, Part, Role, Text, ToolCall, ToolSpec, joined_text, message_of_parts


class _StreamOptions(msgspec.Struct):
    """The options of a stream. Only `include_usage` has an effect; the others do not concern the contents of the
    reply."""

    include_usage: bool | None = None
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None


class _Body(SamplingFields, kw_only=True):
    model: str
    messages: list[Raw]
    tools: Raw = Raw()
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: OutputLimit | None = None
    max_completion_tokens: OutputLimit | None = None
    stop: StopString | StopStrings | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    reasoning: JsonObject | None = None
    thinking: JsonObject | None = None


class _ImageUrl(msgspec.Struct, gc=False):
    url: str


class _File(msgspec.Struct, gc=False):
    """A file in a message. The contents are in `file_data` or `data`. Both are missing if the client uploaded the file
    earlier. `format` is the second part of an audio file's media type: `wav` for `audio/wav`."""

    file_data: str | None = None
    data: str | None = None
    format: str | None = None


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | str | None = None
    file: _File | None = None
    input_audio: _File | None = None
    video_url: _ImageUrl | str | None = None
    audio_url: _ImageUrl | str | None = None


class _Head(msgspec.Struct, gc=False):
    role: str


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: Raw = Raw()


class _Call(msgspec.Struct, gc=False):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[_Part] | UnsetType | None = UNSET
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    name: str | None = None


_BODY = BodyReader(_Body, CHAT)
_MESSAGE = msgspec.json.Decoder(_Message)
_HEAD = msgspec.json.Decoder(_Head)
_TOOLS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)

# `developer` is OpenAI's newer name for the role `system`. `function` is the older name for `tool`.
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of text parts. `input_text` and `output_text` belong to the Responses API, but clients of both APIs send them
in Chat requests, too."""
_TOOL_CHOICES = frozenset({"none", "auto", "required"})
_REASONING_KEYS = frozenset({"effort", "enabled", "max_tokens", "exclude", "summary"})


def parse_request(call: WireCall, body: bytes, memory: Memory) -> ModelRequest:
    """Parse the request in `body`. Raises RequestError. A malformed message raises RequestError only later, when that
    message is parsed."""
    notes: list[str] = []
    wire = _BODY.read(body, notes)
    if not wire.messages:
        refuse("messages", "must not be empty")
    tools = cached_tools(memory, bytes(wire.tools), lambda: _read_tools(bytes(wire.tools)))
    notes += [TOOL + kind for kind in tools.hosted]
    choice = _read_tool_choice(wire, tools.specs, notes)
    offered = tools.specs and wire.tool_choice != "none"
    # A request can turn thinking on or off in several fields. If the fields disagree, the first of these is used:
    # `reasoning.enabled`, the effort `none`, `thinking`, the variables of the chat template.
    thinking = read_thinking(wire, wire.thinking, notes)
    reasoning = wire.reasoning or {}
    note_unknown("reasoning", reasoning, _REASONING_KEYS, notes)
    for effort, name in ((wire.reasoning_effort, "reasoning_effort"), (reasoning.get("effort"), "reasoning.effort")):
        if effort == "none":
            thinking = False
        elif effort not in NOTHING:
            notes.append(name)
    if reasoning.get("max_tokens") not in NOTHING:
        notes.append("reasoning.max_tokens")
    if isinstance(enabled := reasoning.get("enabled"), bool):
        thinking = enabled
    # `max_tokens` is deprecated. If a client sends both fields, `max_completion_tokens` takes precedence.
    limit = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    sampling = read_sampling(
        wire,
        max_tokens=limit,
        stop=wire.stop,
        thinking=thinking,
        constraint=response_format(wire.response_format, "response_format"),
    )
    return ModelRequest(
        model=wire.model,
        messages=ChatMessages(wire.messages),
        tools=tools.specs if offered else (),
        tools_raw=tools.raw if offered else b"",
        tool_choice=choice,
        sampling=sampling,
        ignored=bounded_notes(notes),
        stream=bool(wire.stream),
        include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
        logprobs=bool(wire.logprobs),
        return_token_ids=bool(wire.return_token_ids),
        caller=opencode_caller(call),
    )


def _read_tools(raw: bytes) -> DeclaredTools:
    """Parse the tools into OpenAI's form, with the keys in the client's order. A bare function is put into the wrapper
    `{"type": "function", "function": …}`."""
    specs: list[ToolSpec] = []
    hosted: list[str] = []
    sent = decode(_TOOLS, raw, "tools") if raw else None
    for index, spec in enumerate(sent or []):
        where, kind = f"tools[{index}]", spec.get("type", "function")
        if not isinstance(kind, str) or not kind:
            refuse(f"{where}.type", "must be a non-empty string")
        if kind == "custom":  # a custom tool has no schema, and a Chat reply could not call it
            refuse(f"{where}.type", "'custom' is not supported: declare a function")
        if kind != "function":
            hosted.append(kind)
            continue
        check_depth(spec, where)
        if "function" in spec:
            check_function(spec["function"], f"{where}.function")
            specs.append(spec if "type" in spec else {"type": "function", **spec})
        else:
            function = {key: value for key, value in spec.items() if key != "type"}
            check_function(function, where)
            specs.append({"type": "function", "function": function})
    return DeclaredTools(tuple(specs), raw, tuple(hosted))


def _read_tool_choice(wire: _Body, tools: tuple[ToolSpec, ...], notes: list[str]) -> ToolChoice | None:
    """Return the choice of tools that restricts the reply; None for `auto` and `none`. Raises RequestError for an
    unknown choice. `parallel_tool_calls: false` is enforced only if such a choice is returned. Otherwise it is added
    to `notes`."""
    choice, single = wire.tool_choice, wire.parallel_tool_calls is False
    chosen = None
    if choice == "required":
        chosen = tool_choice(None, tools, required=True, single=single, field="tool_choice")
    elif isinstance(choice, dict):
        chosen = _read_named_tools(choice, tools, single=single)
    elif choice not in (None, "none", "auto"):
        refuse("tool_choice", f"unknown choice {quoted(choice)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
    if single and (chosen is None or not chosen.single):
        notes.append("parallel_tool_calls")
    return chosen


def _read_named_tools(choice: dict[str, Any], tools: tuple[ToolSpec, ...], *, single: bool) -> ToolChoice | None:
    """Read a tool choice that names one function or lists the allowed functions. Raises RequestError."""
    known = {spec["function"]["name"] for spec in tools}
    if choice.get("type") == "allowed_tools":
        at, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
        if not isinstance(allowed, dict):
            refuse(at, "must be an object")
        mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
        if mode not in ("auto", "required"):
            refuse(f"{at}.mode", "must be 'auto' or 'required'")
        if not isinstance(listed, list):
            refuse(f"{at}.tools", "must be a list of tools")
        names = [_function_name(entry) for entry in listed]
        for index, name in enumerate(names):
            if name not in known:
                refuse(f"{at}.tools[{index}]", "must name one of the functions among the tools")
        return tool_choice(
            [name for name in names if name is not None], tools, required=mode == "required", single=single, field=at
        )
    name = _function_name(choice)
    if name is None or name not in known:
        refuse("tool_choice", "must name one of the functions among the tools")
    return tool_choice([name], tools, required=True, single=True, field="tool_choice")


def _function_name(entry: Any) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": …}}`; None for anything else."""
    if not isinstance(entry, dict) or entry.get("type", "function") != "function":
        return None
    function = entry.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


class ChatMessages:
    """Implements `WireMessages` over the raw JSON of each message."""

    __slots__ = ("_raws", "_roles")

    def __init__(self, raws: list[Raw]) -> None:
        self._raws = raws
        self._roles: dict[int, Role] = {}

    def __len__(self) -> int:
        return len(self._raws)

    def raw(self, index: int) -> bytes:
        return bytes(self._raws[index])

    def head(self, count: int) -> bytes:
        return b"\0".join(self._raws[:count])

    def role(self, index: int) -> Role:
        if index not in self._roles:
            where = f"messages[{index}]"
            self._roles[index] = _role(decode(_HEAD, self._raws[index], where).role, where)
        return self._roles[index]

    def size(self, index: int) -> int:
        return len(self._raws[index])

    def parse(self, index: int) -> Message:
        message = parse_message(self._raws[index], f"messages[{index}]")
        check_attachments(message.parts, self, index)
        return message


def parse_message(raw: Raw | bytes, where: str) -> Message:
    """Parse one message. `where` is the message's path in the request, such as `messages[3]`. Raises RequestError."""
    wire = decode(_MESSAGE, raw, where)
    role = _role(wire.role, where)
    parts: list[Part] = []
    if isinstance(wire.content, str):
        parts.append(Text(wire.content))
    elif wire.content:
        parts += [_part(part, f"{where}.content[{index}]") for index, part in enumerate(wire.content)]
    if role is not Role.ASSISTANT:
        if wire.content is UNSET:
            refuse(f"{where}.content", f"is missing from a message of role {quoted(wire.role)}")
        if wire.tool_calls:
            refuse(f"{where}.tool_calls", "only an assistant message has tool calls")
        return message_of_parts(role, parts, tool_call_id=wire.tool_call_id, name=wire.name)
    return Message(
        role=role,
        content=joined_text(parts),
        # Clients send earlier reasoning in one of two fields: `reasoning_content`, as in our replies, or vLLM's newer
        # `reasoning`.
        reasoning=wire.reasoning_content or wire.reasoning or None,
        tool_calls=_tool_calls(wire, where),
        name=wire.name,
    )


def _role(name: str, where: str) -> Role:
    role = _ROLES.get(name)
    if role is None:
        refuse(f"{where}.role", f"unknown role {quoted(name)}; known: {', '.join(_ROLES)}")
    return role


def _part(part: _Part, where: str) -> Part:
    if part.type in _TEXT_PARTS:
        if part.text is None:
            refuse(f"{where}.text", "is missing")
        return Text(part.text)
    if part.type == "refusal":
        return Text(part.refusal or "")
    if part.type == "image_url":
        url = part.image_url.url if isinstance(part.image_url, _ImageUrl) else part.image_url
        if url is None:
            refuse(f"{where}.image_url", "is missing")
        return image_from_address(url, f"{where}.image_url")
    reason = f"a part of type {quoted(part.type)} is not supported: the model reads text and images"
    file, linked = part.file or part.input_audio, part.video_url or part.audio_url
    match part.type:
        case "file" if file is not None:
            return file_from_address(file.file_data, None, where, reason)
        case "input_audio" if file is not None:
            return attachment(f"audio/{file.format}", where, reason, size=encoded_size(file.data or ""))
        case "video_url" | "audio_url" if linked is not None:
            url = linked.url if isinstance(linked, _ImageUrl) else linked
            return file_from_address(url, f"{part.type[:5]}/*", where, reason)
        case _:
            return refuse(where, reason)


def _tool_calls(wire: _Message, where: str) -> tuple[ToolCall, ...]:
    # `function_call`, which is older than OpenAI's tools, is a single call without an id.
    if wire.function_call is not None and not wire.tool_calls:
        arguments = arguments_from_text(wire.function_call.arguments, f"{where}.function_call.arguments")
        return (ToolCall("", wire.function_call.name, arguments),)
    calls = []
    for index, call in enumerate(wire.tool_calls or ()):
        at = f"{where}.tool_calls[{index}]"
        if call.type not in (None, "", "function"):
            refuse(f"{at}.type", f"only 'function' is supported, not {quoted(call.type)}")
        arguments = arguments_from_text(call.function.arguments, f"{at}.function.arguments")
        calls.append(ToolCall(call.id or "", call.function.name, arguments))
    return tuple(calls)
