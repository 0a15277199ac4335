"""The content blocks of Anthropic Messages read into our `Message`.

It knows no request around them and no reply. A block is cut into the raw JSON of the fields that count, so that what
counts for nothing (`cache_control`, `signature`, `citations`) is neither parsed nor compared. Invariant: nothing that
the model would have seen is left out silently; a kind of block that cannot be shown is a 400 that names it, but for
HOSTED_BLOCKS, which the request notes.

What the model sees: text blocks of one message without anything between them; those of a system prompt on lines of
their own; a document as its text between `<document>` tags; a tool result that is an error as it is, with
`TOOL_ERROR` on a line of its own at the end. It does not see redacted thinking, which no model of ours wrote.

Source: Anthropic API reference, "Create a Message".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Raw

from outrider.dialects.images import image_of_base64, kept_parts, text_of
from outrider.dialects.json import decode, refuse, shown
from outrider.messages import Image, Message, Part, Role, Text, ToolCall, image_from_url

TOOL_ERROR = "[tool error]"
"""Ends what the model reads of a tool result with `is_error`."""
INVALID_JSON = "INVALID_JSON"
"""The one key of the `input` that stands for arguments that are no JSON object; their text is its value."""
BILLING = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt: accounting, which differs between its agents."""

_IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


class Block(msgspec.Struct, gc=False):
    """One content block; a field that its client left out is empty."""

    type: str
    text: Raw = Raw()
    thinking: Raw = Raw()
    id: Raw = Raw()
    name: Raw = Raw()
    input: Raw = Raw()
    tool_use_id: Raw = Raw()
    is_error: Raw = Raw()
    content: Raw = Raw()
    source: Raw = Raw()
    title: Raw = Raw()
    context: Raw = Raw()
    tool_name: Raw = Raw()

    def pieces(self) -> Iterable[bytes | Raw]:
        """JSON values that determine what the block is read as: its kind, then as many as that kind has."""
        fields = _READ.get(self.type)
        return (msgspec.json.encode(self.type), *fields(self)) if fields else (msgspec.json.encode(self.type),)


Content = str | list[Block]


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A block and its place in the request, as errors name it."""

    block: Block
    where: str


class _Source(msgspec.Struct):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Content | None = None


_READ: dict[str, Callable[[Block], Iterable[Raw]]] = {
    "text": lambda block: (block.text,),
    "thinking": lambda block: (block.thinking,),
    "tool_use": lambda block: (block.id, block.name, block.input),
    "tool_result": lambda block: (block.tool_use_id, block.is_error, block.content),
    "image": lambda block: (block.source,),
    "document": lambda block: (block.source, block.title, block.context),
    "tool_reference": lambda block: (block.tool_name,),
}
"""The fields that are read of each kind of block."""

HOSTED_BLOCKS = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    }
)
"""What tools of Anthropic's servers did, and files for them: never made here, and not shown to the model."""

_STRING = msgspec.json.Decoder(str)
_NULLABLE = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)
_CONTENT: msgspec.json.Decoder[Content | None] = msgspec.json.Decoder(Content | None)
_SOURCE = msgspec.json.Decoder(_Source)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def text_block(text: str) -> Block:
    """The block that says the same as `text` alone."""
    return Block("text", text=Raw(msgspec.json.encode(text)))


def placed(content: Content | None, where: str, start: int = 0, stop: int | None = None) -> list[Placed]:
    """The blocks [start, stop) of a content, which may be a string or left out."""
    if content is None:
        return []
    if isinstance(content, str):
        return [Placed(text_block(content), where)]
    return [Placed(block, f"{where}[{index}]") for index, block in enumerate(content[start:stop], start)]


def system_text(blocks: Sequence[Placed]) -> str:
    """A system prompt without its billing line. Raises RequestError."""
    texts = []
    for at in blocks:
        if at.block.type != "text":
            _refuse_kind(at, "a system prompt is text")
        texts.append(_unbilled(_string(at.block.text, f"{at.where}.text")))
    return "\n".join(filter(None, texts))


def user_message(blocks: Sequence[Placed]) -> Message:
    """What a user says between tool results. Raises RequestError."""
    return _spoken(Role.USER, _parts(blocks), None)


def tool_message(at: Placed) -> Message:
    """One `tool_result`. Raises RequestError."""
    block = at.block
    parts = _parts(placed(_optional(_CONTENT, block.content, f"{at.where}.content"), f"{at.where}.content"))
    if _optional(_FLAG, block.is_error, f"{at.where}.is_error"):
        said = "".join(part.text for part in parts if isinstance(part, Text))
        parts.append(Text(TOOL_ERROR if not said or said.endswith("\n") else f"\n{TOOL_ERROR}"))
    return _spoken(Role.TOOL, parts, _string(block.tool_use_id, f"{at.where}.tool_use_id"))


def assistant_message(blocks: Iterable[Placed]) -> Message:
    """A reply as a client sends it back. Raises RequestError."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at in blocks:
        block, where = at.block, at.where
        match block.type:
            case "text":
                texts.append(_string(block.text, f"{where}.text"))
            case "thinking":
                thoughts.append(_string(block.thinking, f"{where}.thinking"))
            case "tool_use":
                calls.append(_call(block, where))
            case "redacted_thinking":
                pass
            case _:
                _refuse_kind(at, "an assistant message holds text, thinking and tool_use")
    return Message(
        role=Role.ASSISTANT,
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _unbilled(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _spoken(role: Role, parts: list[Part], tool_call_id: str | None) -> Message:
    """The message of these parts, which it keeps only where there are images among them."""
    return Message(role=role, content=text_of(parts), tool_call_id=tool_call_id, parts=kept_parts(parts))


def _parts(blocks: Sequence[Placed]) -> list[Part]:
    return [_part(at) for at in blocks]


def _part(at: Placed) -> Part:
    block, where = at.block, at.where
    match block.type:
        case "text":
            return Text(_string(block.text, f"{where}.text"))
        case "image":
            return _image(_source(block, where), f"{where}.source")
        case "document":
            return Text(_document(block, where))
        case "tool_reference":  # a tool that the client's own search found; all of them are offered anyway
            return Text(_string(block.tool_name, f"{where}.tool_name"))
        case _:
            return _refuse_kind(at, "the model reads text, images and documents of text")


def _image(source: _Source, where: str) -> Image:
    if source.type == "base64":
        if source.media_type not in _IMAGE_TYPES:
            refuse(f"{where}.media_type", f"must be one of {', '.join(sorted(_IMAGE_TYPES))}")
        return image_of_base64(source.media_type, source.data or "", f"{where}.data")
    if source.type == "url":
        if source.url is None or not source.url.startswith(("http://", "https://")):
            refuse(f"{where}.url", "must be an http or https address")
        return image_from_url(source.url)
    return _refuse_source(source, where, "base64 and url")


def _document(block: Block, where: str) -> str:
    """A document as the model reads it: title and context where there are, then its text."""
    source, at = _source(block, where), f"{where}.source"
    if source.type == "text":
        if source.data is None:
            refuse(f"{at}.data", "is missing")
        text = source.data
    elif source.type == "content":
        inner = placed(source.content, f"{at}.content")
        for part in inner:
            if part.block.type != "text":
                _refuse_kind(part, "the model reads documents of text only")
        text = "".join(_string(part.block.text, f"{part.where}.text") for part in inner)
    else:
        _refuse_source(source, at, "text and content")
    title = _optional(_NULLABLE, block.title, f"{where}.title")
    context = _optional(_NULLABLE, block.context, f"{where}.context")
    lines = "\n".join(line for line in (title, context, text) if line)
    return f"<document>\n{lines}\n</document>\n"


def _source(block: Block, where: str) -> _Source:
    if not block.source:
        refuse(f"{where}.source", "is missing")
    return decode(_SOURCE, block.source, f"{where}.source")


def _call(block: Block, where: str) -> ToolCall:
    name = _string(block.name, f"{where}.name")
    return ToolCall(_string(block.id, f"{where}.id"), name, _arguments(block.input, f"{where}.input"))


def _arguments(raw: Raw, where: str) -> str:
    """The call's arguments as JSON text, or the text that was given out as an invalid one."""
    if bytes(raw) in (b"", b"null"):
        return "{}"
    value = decode(_ANY, raw, where)
    if not isinstance(value, dict):
        refuse(where, "must be an object")
    if len(value) == 1 and isinstance(invalid := value.get(INVALID_JSON), str):
        return invalid
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def _string(raw: Raw, where: str) -> str:
    if not raw:
        refuse(where, "is missing")
    return decode(_STRING, raw, where)


def _optional(decoder: msgspec.json.Decoder[Any], raw: Raw, where: str) -> Any:
    return decode(decoder, raw, where) if raw else None


def _refuse_kind(at: Placed, known: str) -> NoReturn:
    refuse(f"{at.where}.type", f"a block of type {shown(at.block.type)} is not supported here: {known}")


def _refuse_source(source: _Source, where: str, known: str) -> NoReturn:
    refuse(f"{where}.type", f"a source of type {shown(source.type)} is not supported: {known} are")
