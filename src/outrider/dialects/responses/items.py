"""The items of a Responses conversation read into our messages.

It knows nothing of the request around them, of tools offered or of replies. Invariant: one scan of the body finds
the fields of each item that count; a message is decoded by `ResponsesHistory.parse` alone, and ids and states that
clients and servers give to items do not change its bytes.

Items are smaller than messages: the reasoning, text and calls of a reply are items of their own. Those that follow
each other without anything else between them are one assistant message, in which text follows text directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from outrider.dialects.images import text_of
from outrider.dialects.json import decode, refuse, shown
from outrider.dialects.responses.content import WireContent, parts_of, spoken
from outrider.dialects.responses.echo import CustomCall, custom_arguments, custom_call_id, flat_name, unseal
from outrider.messages import Image, Message, Role, ToolCall

STORED = -1
"""The position of an item that an earlier response has stored."""

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


class Item(msgspec.Struct, gc=False):
    """One item; a field that its client left out is empty. `type` may be left out of messages and references."""

    type: str | None = None
    role: str | None = None
    id: Raw = Raw()
    content: Raw = Raw()
    summary: Raw = Raw()
    encrypted_content: Raw = Raw()
    call_id: Raw = Raw()
    namespace: Raw = Raw()
    name: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()
    action: Raw = Raw()
    tools: Raw = Raw()

    def kind(self) -> str:
        return self.type or ("item_reference" if self.role is None else "message")

    def raw(self) -> bytes:
        """Bytes that determine what the item is read as."""
        kind = self.kind()
        fields = _READ.get(kind)
        head = msgspec.json.encode([kind, self.role])
        return head if fields is None else b",".join([head, *fields(self)])

    def copy(self) -> Item:
        """The same, without holding on to the body it was read from."""
        fields = msgspec.structs.asdict(self).items()
        own: dict[str, Any] = {name: value.copy() if isinstance(value, Raw) else value for name, value in fields}
        return Item(**own)


class Placed(msgspec.Struct, frozen=True, gc=False):
    """An item and its position in `input`, STORED for one of an earlier response."""

    item: Item
    position: int

    @property
    def where(self) -> str:
        return "previous_response_id" if self.position == STORED else f"input[{self.position}]"


class _Text(msgspec.Struct):
    text: str


class _Action(msgspec.Struct):
    """What a shell call does; what is not declared here is no part of it."""

    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


_READ: dict[str, Callable[[Item], Iterable[Raw]]] = {
    "message": lambda item: (item.content,),
    "agent_message": lambda item: (item.content,),
    "reasoning": lambda item: (item.content, item.summary, item.encrypted_content),
    "function_call": lambda item: (item.call_id, item.namespace, item.name, item.arguments),
    "custom_tool_call": lambda item: (item.call_id, item.namespace, item.name, item.input),
    "local_shell_call": lambda item: (item.call_id, item.id, item.action),
    "function_call_output": lambda item: (item.call_id, item.output),
    "custom_tool_call_output": lambda item: (item.call_id, item.output),
    "local_shell_call_output": lambda item: (item.call_id, item.id, item.output),
    "additional_tools": lambda item: (item.tools,),
}
"""The fields that are read of each kind of item. All but additional tools are (part of) messages."""

HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
    }
)
"""What tools of OpenAI's own servers did: no message of ours, and never made here."""

_SPOKEN_BY_ASSISTANT = frozenset({"reasoning", "function_call", "custom_tool_call", "local_shell_call"})
_SHELL = "local_shell"

_STRING = msgspec.json.Decoder(str)
_NULLABLE = msgspec.json.Decoder(str | None)
_CONTENT: msgspec.json.Decoder[WireContent | None] = msgspec.json.Decoder(WireContent | None)
_TEXTS: msgspec.json.Decoder[list[_Text] | None] = msgspec.json.Decoder(list[_Text] | None)
_ACTION = msgspec.json.Decoder(_Action)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class _Span(msgspec.Struct, gc=False):
    """One of our messages: items [first, last)."""

    role: Role
    first: int
    last: int


class ResponsesHistory:
    """`WireMessages` over the items of a conversation, the instructions first. Additional tools, and what hosted tools
    did, are not among them.
    Raises RequestError for an item of an unknown kind or role."""

    __slots__ = ("_instructions", "_items", "_spans")

    def __init__(self, instructions: str | None, items: Sequence[Placed]) -> None:
        self._instructions = instructions
        self._items = items
        self._spans: list[_Span] = [_Span(Role.SYSTEM, 0, 0)] if instructions else []
        last: _Span | None = None
        for index, at in enumerate(items):
            role = _role(at)
            if role is Role.ASSISTANT and last is not None and last.role is Role.ASSISTANT:
                last.last = index + 1
            else:
                last = _Span(role, index, index + 1)
                self._spans.append(last)

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, index: int) -> bytes:
        span = self._spans[index]
        if span.first == span.last:
            return msgspec.json.encode(self._instructions)
        return b"\n".join([at.item.raw() for at in self._items[span.first : span.last]])

    def head(self, count: int) -> bytes:
        return b"\0".join(map(self.raw, range(count)))

    def size(self, index: int) -> int:
        return len(self.raw(index))

    def parse(self, index: int) -> Message:
        span = self._spans[index]
        if span.first == span.last:
            return Message(role=Role.SYSTEM, content=self._instructions or "")
        at = self._items[span.first]
        match span.role:
            case Role.ASSISTANT:
                return _assistant_message(self._items[span.first : span.last])
            case Role.TOOL:
                return _tool_message(at)
            case role:
                return spoken(role, _content(at.item.content, f"{at.where}.content"), f"{at.where}.content")


def _role(at: Placed) -> Role:
    """Whose message an item is (part of). Raises RequestError for an item that cannot be shown to a model."""
    item, kind = at.item, at.item.kind()
    if kind == "message":
        role = _ROLES.get(item.role or "")
        if role is None:
            refuse(f"{at.where}.role", f"unknown role {shown(item.role or '')}; known: {', '.join(_ROLES)}")
        return role
    if kind in _SPOKEN_BY_ASSISTANT:
        return Role.ASSISTANT
    if kind == "agent_message":  # from another of the client's agents, which its text names
        return Role.USER
    if kind in _READ:
        return Role.TOOL
    return refuse(f"{at.where}.type", f"an item of type {shown(kind)} is not supported; known: {', '.join(_READ)}")


def _assistant_message(items: Iterable[Placed]) -> Message:
    """A reply as a client sends it back."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at in items:
        match at.item.kind():
            case "message":
                texts.append(_said(at))
            case "reasoning":
                thoughts.append(_reasoning(at))
            case _:
                calls.append(_call(at))
    return Message(
        role=Role.ASSISTANT,
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _said(at: Placed) -> str:
    where = f"{at.where}.content"
    parts = parts_of(_content(at.item.content, where), where)
    if any(isinstance(part, Image) for part in parts):
        refuse(where, "an assistant message holds text only")
    return text_of(parts)


def _reasoning(at: Placed) -> str:
    """An item's thinking: what was sealed here, else its text, else its summary. What another provider encrypted
    is left out: no model here has seen it."""
    item, where = at.item, at.where
    sealed = _optional(_NULLABLE, item.encrypted_content, f"{where}.encrypted_content")
    if sealed is not None and (own := unseal(sealed)) is not None:
        return own
    content: list[_Text] | None = _optional(_TEXTS, item.content, f"{where}.content")
    if content:
        return "".join(part.text for part in content)
    summary: list[_Text] | None = _optional(_TEXTS, item.summary, f"{where}.summary")
    return "\n\n".join(part.text for part in summary or ())


def _call(at: Placed) -> ToolCall:
    item, where = at.item, at.where
    if item.kind() == "local_shell_call":
        if not item.action:
            refuse(f"{where}.action", "is missing")
        action = decode(_ACTION, item.action, f"{where}.action")
        asked = {name: value for name, value in msgspec.structs.asdict(action).items() if value is not None}
        return ToolCall(_shell_id(at), _SHELL, msgspec.json.encode(asked).decode())
    call_id = _string(item.call_id, f"{where}.call_id")
    namespace = _optional(_NULLABLE, item.namespace, f"{where}.namespace")
    name = flat_name(namespace, _string(item.name, f"{where}.name"))
    if item.kind() == "function_call":
        return ToolCall(call_id, name, _arguments(item.arguments, f"{where}.arguments"))
    sent = CustomCall(call_id, _string(item.input, f"{where}.input"))
    return ToolCall(custom_call_id(call_id), name, custom_arguments(sent))


def _arguments(raw: Raw, where: str) -> str:
    """The call's arguments as JSON text: a string as it is, an object compactly and otherwise untouched."""
    if bytes(raw) in (b"", b"null"):
        return "{}"
    value = decode(_ANY, raw, where)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        refuse(where, "must be a string of JSON")
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def _tool_message(at: Placed) -> Message:
    item, where = at.item, at.where
    match item.kind():
        case "local_shell_call_output":
            call_id = _shell_id(at)
        case "custom_tool_call_output":
            call_id = custom_call_id(_string(item.call_id, f"{where}.call_id"))
        case _:
            call_id = _string(item.call_id, f"{where}.call_id")
    return spoken(Role.TOOL, _content(item.output, f"{where}.output"), f"{where}.output", call_id)


def _shell_id(at: Placed) -> str:
    """Calls of the shell carry their call's id as `call_id`, their outputs may carry it as `id`."""
    call_id = _optional(_NULLABLE, at.item.call_id, f"{at.where}.call_id")
    return call_id if call_id is not None else _string(at.item.id, f"{at.where}.id")


def _content(raw: Raw, where: str) -> WireContent | None:
    if not raw:
        refuse(where, "is missing")
    return decode(_CONTENT, raw, where)


def _string(raw: Raw, where: str) -> str:
    if not raw:
        refuse(where, "is missing")
    return decode(_STRING, raw, where)


def _optional(decoder: msgspec.json.Decoder[Any], raw: Raw, where: str) -> Any:
    return decode(decoder, raw, where) if raw else None
