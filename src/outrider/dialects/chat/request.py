"""A Chat Completions request body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: what is not asked for is not parsed, so the cost of reading
a request is one scan of its bytes plus its tools; each message is decoded by `ChatMessages.parse` alone.

A tool that is not declared as a function is hosted: nobody runs it here, so the model is not shown it, and the request
notes it.

Source: OpenAI API reference, "Create chat completion"; `reasoning` in messages and `return_token_ids` as vLLM has them,
`reasoning` and `thinking` of the request as OpenRouter and Z.ai have them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from outrider.dialects.base import AskedSampling, ModelRequest
from outrider.dialects.field_policy import CHAT, TOOL, BodyReader, bounded
from outrider.dialects.images import image_of_address, kept_parts, text_of
from outrider.dialects.json import decode, depth_exceeds, refuse, shown
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
from outrider.messages import Message, Part, Role, Text, ToolCall, ToolSpec

MAX_TOKENS = 1 << 24
"""An output limit above this means no limit; clients do send such."""
MAX_TOOL_DEPTH = 64
"""How deep a tool's schema may nest: chat templates print it recursively."""

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_TOOL_CHOICES = frozenset({"none", "auto", "required"})
_CLIENT_RUN = frozenset({"function", "custom"})
"""Kinds of tools that the client runs; of all others it expects that a server does. (`custom` has no schema.)"""

_REASONING = frozenset({"effort", "enabled", "max_tokens", "exclude", "summary"})

_StopString = Annotated[str, Meta(min_length=1)]
_OutputLimit = Annotated[int, Meta(ge=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(Extras, kw_only=True):
    model: str
    messages: list[Raw]
    tools: Raw = Raw()
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: _OutputLimit | None = None
    max_completion_tokens: _OutputLimit | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=64)] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | float | None = None
    reasoning: Object | None = None
    thinking: Object | None = None


class _ImageUrl(msgspec.Struct, gc=False):
    url: str


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | str | None = None


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
_TOOLS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def parse_request(body: bytes) -> ModelRequest:
    """The request in `body`. Raises RequestError; a malformed message is found when it is parsed."""
    read = _BODY.read(body)
    wire = read.wire
    if not wire.messages:
        refuse("messages", "must not be empty")
    asked = _asked_tools(wire)
    thought = _thought(wire)
    return ModelRequest(
        model=wire.model,
        messages=ChatMessages(wire.messages),
        tools=asked.tools,
        tools_raw=asked.raw,
        sampling=_asked_sampling(wire, thought),
        ignored=bounded([*read.notes, *asked.notes, *thought.notes]),
        stream=bool(wire.stream),
        include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
        logprobs=bool(wire.logprobs),
        return_token_ids=bool(wire.return_token_ids),
    )


class ChatMessages:
    """`WireMessages` over the raw JSON of each message."""

    __slots__ = ("_raws",)

    def __init__(self, raws: list[Raw]) -> None:
        self._raws = raws

    def __len__(self) -> int:
        return len(self._raws)

    def raw(self, index: int) -> bytes:
        return bytes(self._raws[index])

    def head(self, count: int) -> bytes:
        return b"\0".join(self._raws[:count])

    def size(self, index: int) -> int:
        return len(self._raws[index])

    def parse(self, index: int) -> Message:
        return parse_message(self._raws[index], f"messages[{index}]")


def parse_message(raw: Raw | bytes, where: str) -> Message:
    """One message; `where` names it in errors, as in `messages[3]`. Raises RequestError."""
    wire = decode(_MESSAGE, raw, where)
    role = _ROLES.get(wire.role)
    if role is None:
        refuse(f"{where}.role", f"unknown role {shown(wire.role)}; known: {', '.join(_ROLES)}")
    parts = _parts(wire.content, f"{where}.content")
    content = text_of(parts)
    if role is not Role.ASSISTANT:
        if wire.content is UNSET:
            refuse(f"{where}.content", f"is missing from a message of role {shown(wire.role)}")
        if wire.tool_calls:
            refuse(f"{where}.tool_calls", "only an assistant message has tool calls")
        return Message(
            role=role,
            content=content,
            tool_call_id=wire.tool_call_id,
            name=wire.name,
            parts=kept_parts(parts),
        )
    return Message(
        role=role,
        content=content,
        reasoning=wire.reasoning_content or wire.reasoning or None,
        tool_calls=_tool_calls(wire, where),
        name=wire.name,
    )


def _parts(content: str | list[_Part] | UnsetType | None, where: str) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)]
    if content is None or content is UNSET:
        return []
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


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
        return image_of_address(url, f"{where}.image_url")
    return refuse(where, f"a part of type {shown(part.type)} is not supported: the model reads text and images")


def _tool_calls(wire: _Message, where: str) -> tuple[ToolCall, ...]:
    if wire.function_call is not None and not wire.tool_calls:
        return (ToolCall("", wire.function_call.name, _arguments(wire.function_call, f"{where}.function_call")),)
    calls = []
    for index, call in enumerate(wire.tool_calls or ()):
        at = f"{where}.tool_calls[{index}]"
        if call.type not in (None, "", "function"):
            refuse(f"{at}.type", f"only 'function' is supported, not {shown(call.type)}")
        calls.append(ToolCall(call.id or "", call.function.name, _arguments(call.function, f"{at}.function")))
    return tuple(calls)


def _arguments(function: _Function, where: str) -> str:
    """The call's arguments as JSON text: a string as it is, an object compactly and otherwise untouched."""
    raw = bytes(function.arguments)
    if raw in (b"", b"null"):
        return "{}"
    value = decode(_ANY, raw, f"{where}.arguments")
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse(f"{where}.arguments", "must be a string of JSON")
    return msgspec.json.format(raw, indent=-1).decode()


class _Tools(msgspec.Struct, frozen=True):
    """The tools the model is told of, the bytes that determine them, and what of them has no effect."""

    tools: tuple[ToolSpec, ...] = ()
    raw: bytes = b""
    notes: tuple[str, ...] = ()


def _asked_tools(wire: _Body) -> _Tools:
    raw = bytes(wire.tools)
    specs = (decode(_TOOLS, raw, "tools") if raw else None) or []
    kinds = [_kind(spec, f"tools[{at}]") for at, spec in enumerate(specs)]
    told = [(at, spec) for at, spec in enumerate(specs) if kinds[at] in _CLIENT_RUN]
    tools = tuple([_tool_spec(spec, f"tools[{at}]") for at, spec in told])
    notes = [TOOL + kind for kind in kinds if kind not in _CLIENT_RUN]
    if wire.tool_choice not in (None, "none", "auto"):
        _check_choice(wire.tool_choice, tools)
        notes.append("tool_choice")
    hidden = not tools or wire.tool_choice == "none"
    return _Tools((), b"", tuple(notes)) if hidden else _Tools(tools, raw, tuple(notes))


def _kind(spec: dict[str, Any], where: str) -> str:
    kind = spec.get("type", "function")
    if not isinstance(kind, str) or not kind:
        refuse(f"{where}.type", "must be a non-empty string")
    return kind


def _check_choice(choice: str | dict[str, Any] | None, tools: tuple[ToolSpec, ...]) -> None:
    """Raise RequestError for a choice that does not exist. Any other than `none` is a wish: what the model samples is
    not constrained."""
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            refuse("tool_choice", f"unknown choice {shown(choice)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
        return
    kind, named = (choice or {}).get("type", "function"), (choice or {}).get("function")
    if kind == "allowed_tools":
        return
    name = named.get("name") if isinstance(named, dict) else None
    if kind != "function" or name not in [spec["function"]["name"] for spec in tools]:
        refuse("tool_choice", "must name one of the functions among the tools: no other tool is run")


def _tool_spec(spec: dict[str, Any], where: str) -> ToolSpec:
    """`spec` in OpenAI form with its keys in the client's order; a bare function is wrapped."""
    if spec.get("type", "function") != "function":
        refuse(f"{where}.type", f"{shown(str(spec['type']))} is not supported: declare a function")
    if depth_exceeds(spec, MAX_TOOL_DEPTH):
        refuse(where, f"nests more than {MAX_TOOL_DEPTH} levels deep")
    if "function" not in spec:
        function = {key: value for key, value in spec.items() if key != "type"}
        _check_function(function, where)
        return {"type": "function", "function": function}
    _check_function(spec["function"], f"{where}.function")
    return spec if "type" in spec else {"type": "function", **spec}


def _check_function(function: Any, where: str) -> None:
    if not isinstance(function, dict):
        refuse(where, "must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        refuse(f"{where}.name", "must be a non-empty string")
    if not isinstance(function.get("description"), str | None):
        refuse(f"{where}.description", "must be a string")
    if not isinstance(function.get("parameters"), dict | None):
        refuse(f"{where}.parameters", "must be an object")


def _thought(wire: _Body) -> Thought:
    """What the client says about thinking, in whichever of the words for it."""
    template, thinking = template_thinking(wire), words_for_thinking("thinking", wire.thinking)
    on = template.on if thinking.on is None else thinking.on
    notes = [*template.notes, *thinking.notes, *unknown_in("reasoning", wire.reasoning, _REASONING)]
    reasoning = wire.reasoning or {}
    for effort, name in ((wire.reasoning_effort, "reasoning_effort"), (reasoning.get("effort"), "reasoning.effort")):
        if effort == "none":
            on = False
        elif effort is not None:
            notes.append(name)
    if reasoning.get("max_tokens") is not None:
        notes.append("reasoning.max_tokens")
    enabled = reasoning.get("enabled")
    return Thought(enabled if isinstance(enabled, bool) else on, tuple(notes))


def _asked_sampling(wire: _Body, thought: Thought) -> AskedSampling:
    limit = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    stop = wire.stop or ()
    own = AskedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        max_tokens=None if limit is None else min(limit, MAX_TOKENS),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        thinking=thought.on,
    )
    return sampled_as(wire, own, asked_form(wire, response_format(wire.response_format, "response_format")))
