"""A Chat Completions request body read into a `ModelRequest`.

It knows nothing of replies or tokens. Invariant: what is not asked for is not parsed, so the cost of reading
a request is one scan of its bytes plus its tools; each message is decoded by `ChatMessages.parse` alone.

Source: OpenAI API reference, "Create chat completion"; `top_k`, `min_p`, `reasoning` and `return_token_ids` as
vLLM has them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from outrider.dialects.base import AskedSampling, ModelRequest
from outrider.dialects.decode import decode, depth_exceeds, refuse, shown
from outrider.dialects.images import image_of_address, kept_parts, text_of
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

_StopString = Annotated[str, Meta(min_length=1)]
_OutputLimit = Annotated[int, Meta(ge=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[Raw]
    tools: Raw = Raw()
    tool_choice: str | dict[str, Any] | None = None
    functions: Raw = Raw()
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    max_tokens: _OutputLimit | None = None
    max_completion_tokens: _OutputLimit | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=64)] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


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


_BODY = msgspec.json.Decoder(_Body)
_MESSAGE = msgspec.json.Decoder(_Message)
_TOOLS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def parse_request(body: bytes) -> ModelRequest:
    """The request in `body`. Raises RequestError; a malformed message is found when it is parsed."""
    wire = decode(_BODY, body)
    if not wire.messages:
        refuse("messages", "must not be empty")
    if wire.n not in (None, 1):
        refuse("n", "only 1 is supported: one model call is one turn")
    if bytes(wire.functions) not in (b"", b"null", b"[]"):
        refuse("functions", "is not supported: send tools")
    tools, tools_raw = _asked_tools(wire)
    return ModelRequest(
        model=wire.model,
        messages=ChatMessages(wire.messages),
        tools=tools,
        tools_raw=tools_raw,
        sampling=_asked_sampling(wire),
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


def _asked_tools(wire: _Body) -> tuple[tuple[ToolSpec, ...], bytes]:
    """The tools the model is told of, and the bytes that determine them."""
    if isinstance(wire.tool_choice, str) and wire.tool_choice not in _TOOL_CHOICES:
        refuse("tool_choice", f"unknown choice {shown(wire.tool_choice)}; known: {', '.join(sorted(_TOOL_CHOICES))}")
    raw = bytes(wire.tools)
    specs = decode(_TOOLS, raw, "tools") if raw else None
    if not specs:
        return (), b""
    tools = tuple([_tool_spec(spec, f"tools[{index}]") for index, spec in enumerate(specs)])
    return ((), b"") if wire.tool_choice == "none" else (tools, raw)


def _tool_spec(spec: dict[str, Any], where: str) -> ToolSpec:
    """`spec` in OpenAI form with its keys in the client's order; a bare function is wrapped."""
    if spec.get("type", "function") != "function":
        refuse(f"{where}.type", f"only 'function' is supported, not {shown(str(spec['type']))}")
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


def _asked_sampling(wire: _Body) -> AskedSampling:
    limit = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    stop = wire.stop or ()
    return AskedSampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=-1 if wire.top_k == 0 else wire.top_k,
        min_p=wire.min_p,
        max_tokens=None if limit is None else min(limit, MAX_TOKENS),
        seed=wire.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
