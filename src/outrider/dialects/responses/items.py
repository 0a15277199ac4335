"""Parses the items of a Responses conversation into our `Message`.

Invariants:

- One scan of the body finds the relevant fields of each item. Only `ResponsesHistory.parse` decodes messages.
- A message's bytes (`raw`) contain the ids that connect a call with its output, but no other ids of items, and no
  states of items.
- No content for the model is left out silently. An unsupported item or part is refused with status 400. Only items of
  the types in HOSTED_ITEMS are left out, and their types are added to the request's notes.

An item is smaller than a message: the reasoning, the text and each call of a reply are separate items. Adjacent items
of the assistant become one message, and their texts are joined without a separator.

Source: OpenAI API reference, "Create a model response", input items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from outrider.computer_tools import OPENAI_NAME
from outrider.dialects.reading import (
    arguments_from_text,
    decode,
    file_from_address,
    image_from_address,
    optional,
    quoted,
    refuse,
    string,
)
from outrider.dialects.responses.round_trip import (
    CustomCall,
    arguments_of_action,
    arguments_of_custom_call,
    flat_name,
    id_of_custom_call,
    unseal,
)
from outrider.media import attachment, check_attachments, encoded_size
from outrider.messages import Attachment, Image, Message, Part, Role, Text, ToolCall, joined_text, message_of_parts

STORED = -1
"""The `position` of an item that comes from a stored response and not from `input`."""

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_ASSISTANT_ITEMS = frozenset({"reasoning", "function_call", "custom_tool_call", "computer_call", "local_shell_call"})
_SHELL = "local_shell"
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
"""Types of items that the model does not see, because they belong to tools on OpenAI's servers. A history that began at
OpenAI's service can contain such items."""


class Item(msgspec.Struct, gc=False):
    """One item. A field that the request does not have is empty. `type` is optional for messages and references."""

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
    actions: Raw = Raw()
    tools: Raw = Raw()

    def kind(self) -> str:
        return self.type or ("item_reference" if self.role is None else "message")

    def pieces(self) -> tuple[bytes | Raw, ...]:
        """Return the JSON values that determine how the item is parsed: its type, then the relevant fields. All items
        of one type have the same number of values."""
        kind = self.kind()
        bytes_of = _BYTES_OF.get(kind)
        return (msgspec.json.encode(kind),) if bytes_of is None else bytes_of(self)

    def copy(self) -> Item:
        """Return a copy with its own bytes, so that the request body can be freed."""
        fields = msgspec.structs.asdict(self).items()
        own: dict[str, Any] = {name: value.copy() if isinstance(value, Raw) else value for name, value in fields}
        return Item(**own)


_BYTES_OF: dict[str, Callable[[Item], tuple[bytes | Raw, ...]]] = {
    "message": lambda item: (b'"message"', msgspec.json.encode(item.role), item.content),
    "agent_message": lambda item: (b'"agent_message"', item.content),
    "reasoning": lambda item: (b'"reasoning"', item.content, item.summary, item.encrypted_content),
    "function_call": lambda item: (b'"function_call"', item.call_id, item.namespace, item.name, item.arguments),
    "custom_tool_call": lambda item: (b'"custom_tool_call"', item.call_id, item.namespace, item.name, item.input),
    "computer_call": lambda item: (b'"computer_call"', item.call_id, item.action, item.actions),
    "local_shell_call": lambda item: (b'"local_shell_call"', item.call_id, item.id, item.action),
    "function_call_output": lambda item: (b'"function_call_output"', item.call_id, item.output),
    "custom_tool_call_output": lambda item: (b'"custom_tool_call_output"', item.call_id, item.output),
    "computer_call_output": lambda item: (b'"computer_call_output"', item.call_id, item.output),
    "local_shell_call_output": lambda item: (b'"local_shell_call_output"', item.call_id, item.id, item.output),
    "additional_tools": lambda item: (b'"additional_tools"', item.tools),
}
"""For each type of item, the JSON values that determine how the item is parsed (`Item.pieces`). Items of all types
become messages, except `additional_tools`."""


class PlacedItem(msgspec.Struct, frozen=True, gc=False):
    """An item, its kind, and its position in `input`. An item from a stored response has the position STORED."""

    item: Item
    kind: str
    position: int

    @property
    def where(self) -> str:
        return "previous_response_id" if self.position == STORED else f"input[{self.position}]"


class _Audio(msgspec.Struct, gc=False):
    data: str
    format: str


class _Part(msgspec.Struct, gc=False):
    """One part of a message's content or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    encrypted_content: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    input_audio: _Audio | None = None


class _Text(msgspec.Struct):
    text: str


class _Screenshot(msgspec.Struct):
    image_url: str | None = None


class _ShellAction(msgspec.Struct):
    """The action of a shell call. The model does not see any other fields of the action."""

    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class _Span(msgspec.Struct, gc=False):
    """The items [first, last), which become one message. The range is empty for the message with the instructions."""

    role: Role
    first: int
    last: int


_NULLABLE = msgspec.json.Decoder(str | None)
_CONTENT: msgspec.json.Decoder[str | list[_Part] | None] = msgspec.json.Decoder(str | list[_Part] | None)
_TEXTS: msgspec.json.Decoder[list[_Text] | None] = msgspec.json.Decoder(list[_Text] | None)
_OUTPUT = msgspec.json.Decoder(_Screenshot)
_MAYBE_OBJECT: msgspec.json.Decoder[dict[str, Any] | None] = msgspec.json.Decoder(dict[str, Any] | None)
_OBJECTS: msgspec.json.Decoder[list[dict[str, Any]] | None] = msgspec.json.Decoder(list[dict[str, Any]] | None)
_SHELL_ACTION = msgspec.json.Decoder(_ShellAction)


class ResponsesHistory:
    """Implements `WireMessages` for the items of a conversation, with the instructions as first message. `items` must
    not contain items of the types in HOSTED_ITEMS or of the type `additional_tools`. Raises RequestError for an unknown
    type of item or an unknown role."""

    __slots__ = ("_instructions", "_items", "_spans")

    def __init__(self, instructions: str | None, items: Sequence[PlacedItem]) -> None:
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
            # The bytes of an item begin with a JSON string. Without the prefix `i`, the bytes of the instructions would
            # do so, too, and could be taken for an item's.
            return b"i" + msgspec.json.encode(self._instructions)
        return b"\n".join([piece for at in self._items[span.first : span.last] for piece in at.item.pieces()])

    def head(self, count: int) -> bytes:
        if count == 0:
            return b""
        # All pieces are joined at once, because this method runs over the whole history for each model call.
        instructions = [self.raw(0)] if self._instructions else []
        items = self._items[: self._spans[count - 1].last]
        return b"\n".join(instructions + [piece for at in items for piece in at.item.pieces()])

    def role(self, index: int) -> Role:
        return self._spans[index].role

    def size(self, index: int) -> int:
        return len(self.raw(index))

    def parse(self, index: int) -> Message:
        message = self._parse(index)
        check_attachments(message.parts, self, index)
        return message

    def _parse(self, index: int) -> Message:
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
                return message_of_parts(role, _parts(at.item.content, f"{at.where}.content"))


def _role(at: PlacedItem) -> Role:
    """Return the role of the message to which the item belongs. Raises RequestError for an item that cannot be shown to
    the model."""
    kind = at.kind
    if kind == "message":
        role = _ROLES.get(at.item.role or "")
        if role is None:
            refuse(f"{at.where}.role", f"unknown role {quoted(at.item.role or '')}; known: {', '.join(_ROLES)}")
        return role
    if kind in _ASSISTANT_ITEMS:
        return Role.ASSISTANT
    if kind == "agent_message":  # another agent's message, which Codex passes on; its text names that agent
        return Role.USER
    if kind in _BYTES_OF:
        return Role.TOOL
    return refuse(f"{at.where}.type", f"an item of type {quoted(kind)} is not supported; known: {', '.join(_BYTES_OF)}")


def _assistant_message(items: Iterable[PlacedItem]) -> Message:
    """Return the assistant message made of the items of an earlier reply. Raises RequestError."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at in items:
        match at.kind:
            case "message":
                parts = _parts(at.item.content, f"{at.where}.content")
                if any(isinstance(part, Image | Attachment) for part in parts):
                    refuse(f"{at.where}.content", "an assistant message holds text only")
                texts.append(joined_text(parts))
            case "reasoning":
                thoughts.append(_reasoning(at))
            case _:
                calls.append(_tool_call(at))
    return Message(
        role=Role.ASSISTANT,
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _reasoning(at: PlacedItem) -> str:
    """Return an item's reasoning: from `encrypted_content` if Outrider wrote it, else from the item's text, else from
    its summary. Outrider cannot read content that another provider encrypted."""
    item, where = at.item, at.where
    sealed = optional(_NULLABLE, item.encrypted_content, f"{where}.encrypted_content")
    if sealed is not None and (own := unseal(sealed)) is not None:
        return own
    content: list[_Text] | None = optional(_TEXTS, item.content, f"{where}.content")
    if content:
        return "".join(part.text for part in content)
    summary: list[_Text] | None = optional(_TEXTS, item.summary, f"{where}.summary")
    return "\n\n".join(part.text for part in summary or ())


def _tool_call(at: PlacedItem) -> ToolCall:
    item, where = at.item, at.where
    if at.kind == "local_shell_call":
        if not item.action:
            refuse(f"{where}.action", "is missing")
        action = decode(_SHELL_ACTION, item.action, f"{where}.action")
        asked = {name: value for name, value in msgspec.structs.asdict(action).items() if value is not None}
        return ToolCall(_shell_call_id(at), _SHELL, msgspec.json.encode(asked).decode())
    call_id = string(item.call_id, f"{where}.call_id")
    if at.kind == "computer_call":
        return ToolCall(call_id, OPENAI_NAME, arguments_of_action(_computer_action(at)))
    namespace = optional(_NULLABLE, item.namespace, f"{where}.namespace")
    name = flat_name(namespace, string(item.name, f"{where}.name"))
    if at.kind == "function_call":
        return ToolCall(call_id, name, arguments_from_text(item.arguments, f"{where}.arguments"))
    sent = CustomCall(call_id, string(item.input, f"{where}.input"))
    return ToolCall(id_of_custom_call(call_id), name, arguments_of_custom_call(sent))


def _tool_message(at: PlacedItem) -> Message:
    item, where = at.item, at.where
    match at.kind:
        case "local_shell_call_output":
            call_id = _shell_call_id(at)
        case "computer_call_output":
            call_id = string(item.call_id, f"{where}.call_id")
            return message_of_parts(Role.TOOL, [_screenshot(item.output, f"{where}.output")], tool_call_id=call_id)
        case "custom_tool_call_output":
            call_id = id_of_custom_call(string(item.call_id, f"{where}.call_id"))
        case _:
            call_id = string(item.call_id, f"{where}.call_id")
    return message_of_parts(Role.TOOL, _parts(item.output, f"{where}.output"), tool_call_id=call_id)


def _computer_action(at: PlacedItem) -> dict[str, Any]:
    """Return the action of a `computer_call`: the value of `action`, or the only entry of `actions`. Raises
    RequestError."""
    item, where = at.item, at.where
    single: dict[str, Any] | None = optional(_MAYBE_OBJECT, item.action, f"{where}.action")
    if single is not None:
        return single
    several: list[dict[str, Any]] | None = optional(_OBJECTS, item.actions, f"{where}.actions")
    if several is None:
        refuse(f"{where}.action", "is missing")
    if len(several) != 1:
        refuse(f"{where}.actions", "must have one action: each call here has one")
    return several[0]


def _screenshot(raw: Raw, where: str) -> Part:
    """Return the screenshot in the output of a computer call. Raises RequestError."""
    if not raw:
        refuse(where, "is missing")
    output = decode(_OUTPUT, raw, where)
    if output.image_url is None:
        refuse(f"{where}.image_url", "is missing: send images by URL or as data; uploaded files are not supported")
    return image_from_address(output.image_url, f"{where}.image_url")


def _shell_call_id(at: PlacedItem) -> str:
    # A shell call has its id in `call_id`. The output of a shell call has the call's id in `call_id` or in `id`.
    call_id = optional(_NULLABLE, at.item.call_id, f"{at.where}.call_id")
    return call_id if call_id is not None else string(at.item.id, f"{at.where}.id")


def _parts(raw: Raw, where: str) -> list[Part]:
    """Return the text, images and files of a content. The content is a string, a list of parts, or null. Raises
    RequestError."""
    if not raw:
        refuse(where, "is missing")
    content = decode(_CONTENT, raw, where)
    if isinstance(content, str):
        return [Text(content)]
    parts: list[Part] = []
    for index, part in enumerate(content or ()):
        at = f"{where}[{index}]"
        if part.type in _TEXT_PARTS:
            if part.text is None:
                refuse(f"{at}.text", "is missing")
            parts.append(Text(part.text))
        elif part.type == "refusal":
            parts.append(Text(part.refusal or ""))
        elif part.type == "encrypted_content":
            # Codex passes text between agents in this field. OpenAI's servers encrypt the text; this service does not.
            parts.append(Text(part.encrypted_content or ""))
        elif part.type == "input_image":
            if part.image_url is None:
                refuse(f"{at}.image_url", "is missing: send images by URL or as data; uploaded files are not supported")
            parts.append(image_from_address(part.image_url, f"{at}.image_url"))
        else:
            parts.append(_file(part, f"{at}.type"))
    return parts


def _file(part: _Part, where: str) -> Attachment:
    """Return the attachment for a part with a file. Raises RequestError for a part of an unknown type."""
    reason = f"a part of type {quoted(part.type)} is not supported: the model reads text and images"
    if part.type == "input_audio" and part.input_audio is not None:
        audio = part.input_audio
        return attachment(f"audio/{audio.format}", where, reason, size=encoded_size(audio.data))
    if part.type != "input_file":
        refuse(where, reason)
    return file_from_address(part.file_data or part.file_url, None, where, reason)
