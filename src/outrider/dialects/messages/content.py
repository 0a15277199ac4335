"""Parses the messages of an Anthropic request, block by block, into our `Message`.

Only the relevant fields of each block are read, as raw JSON. The other fields (`cache_control`, `signature`,
`citations`) are not part of the bytes that identify a message (`raw`), so a message stays the same if the client moves
its cache marker.

Invariant: no content for the model is left out silently. A block of an unsupported type is refused with status 400.
Only blocks of the types in HOSTED_BLOCKS are left out, and their types are added to the request's notes.

Each tool result in a user message becomes a separate message, in the order of the blocks. Adjacent assistant messages
become one message.

How the model sees the content:

- The text blocks of one message are joined without a separator, those of a system prompt with line breaks.
- A document is shown as its text between `<document>` tags.
- A tool result with `is_error` ends with the extra line TOOL_ERROR.
- Redacted thinking is not shown, because no model that is served here wrote it.

Source: Anthropic API reference, "Create a Message".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import Raw

from outrider.dialects.reading import (
    INVALID_JSON,
    decode,
    file_from_base64,
    image_from_base64,
    is_absent,
    is_invalid_json_object,
    optional,
    quoted,
    refuse,
    string,
)
from outrider.media import attachment, check_attachments, encoded_size
from outrider.messages import Message, Part, Role, Text, ToolCall, image_from_url, joined_text, message_of_parts

TOOL_ERROR = "[tool error]"
"""The line that the model sees at the end of a tool result with `is_error`."""
BILLING = "x-anthropic-billing-header:"
"""The beginning of a billing line that Claude Code puts before its system prompt. The line is removed, because it
differs between agents: with this line, no two agents would have equal system prompts."""

_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
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
"""Types of blocks that the model does not see. Tools on Anthropic's servers wrote them, or they hold files for these
tools. A history that began at Anthropic's service can contain such blocks."""


class Block(msgspec.Struct, gc=False):
    """One content block. A field that the request does not have is empty."""

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


Content = str | list[Block]


class WireMessage(msgspec.Struct, gc=False):
    role: str
    content: Content


class _PlacedBlock(msgspec.Struct, frozen=True, gc=False):
    """A content block and its path in the request. Error messages name the path."""

    block: Block
    where: str


class _Source(msgspec.Struct):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Content | None = None


class _Span(msgspec.Struct, gc=False):
    """The part of the request from which one `Message` is made: the request's messages [first, last), or only the
    blocks [start, stop) of a single user message."""

    role: Role
    first: int
    last: int
    start: int = 0
    stop: int | None = None


_BYTES_OF: dict[str, Callable[[Block], tuple[bytes | Raw, ...]]] = {
    "text": lambda block: (b'"text"', block.text),
    "thinking": lambda block: (b'"thinking"', block.thinking),
    "tool_use": lambda block: (b'"tool_use"', block.id, block.name, block.input),
    "tool_result": lambda block: (b'"tool_result"', block.tool_use_id, block.is_error, block.content),
    "image": lambda block: (b'"image"', block.source),
    "document": lambda block: (b'"document"', block.source, block.title, block.context),
    "tool_reference": lambda block: (b'"tool_reference"', block.tool_name),
}
"""For each type of block, the bytes that determine how the block is parsed: its type as JSON, then the raw JSON of the
relevant fields. All blocks of one type have the same number of values."""

_ROLE_BYTES = {role: role.encode() for role in Role}
_NULLABLE = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)
_CONTENT: msgspec.json.Decoder[Content | None] = msgspec.json.Decoder(Content | None)
_SOURCE = msgspec.json.Decoder(_Source)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class MessagesHistory:
    """Implements `WireMessages` for the request's messages, with the system prompt as first message. `hosted` has the
    types of the blocks that were left out (HOSTED_BLOCKS). Raises RequestError for an unknown role, and for a system
    prompt that is not text."""

    __slots__ = ("_has_system", "_spans", "_wire", "hosted")

    def __init__(self, system: Content | None, wire: list[WireMessage]) -> None:
        prompt = _system_text(_placed(system, "system"))
        self._has_system = bool(prompt)
        self._wire = [WireMessage("system", prompt), *wire] if prompt else wire
        self._spans: list[_Span] = []
        self.hosted: list[str] = []
        for index, message in enumerate(self._wire):
            if not isinstance(message.content, str):
                hosted = [block.type for block in message.content if block.type in HOSTED_BLOCKS]
                if hosted:
                    self.hosted += hosted
                    message.content = [block for block in message.content if block.type not in HOSTED_BLOCKS]
            role = _ROLES.get(message.role)
            if role is None:
                where = f"messages[{index - self._has_system}].role"
                refuse(where, f"unknown role {quoted(message.role)}; known: {', '.join(_ROLES)}")
            last = self._spans[-1] if self._spans else None
            if role is Role.ASSISTANT and last is not None and last.role is Role.ASSISTANT:
                last.last = index + 1
            elif role is Role.USER and not isinstance(message.content, str):
                self._spans += _spans_of_user(index, message.content)
            else:
                self._spans.append(_Span(role, index, index + 1))

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, index: int) -> bytes:
        return b"\n".join(self._pieces(self._spans[index]))

    def head(self, count: int) -> bytes:
        # All pieces are joined at once, because this method runs over the whole history for each model call.
        return b"\n".join([piece for span in self._spans[:count] for piece in self._pieces(span)])

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
        blocks: list[_PlacedBlock] = []
        for number in range(span.first, span.last):
            where = f"messages[{number - self._has_system}].content" if number >= self._has_system else "system"
            blocks += _placed(self._wire[number].content, where, span.start, span.stop)
        match span.role:
            case Role.SYSTEM:
                return Message(role=Role.SYSTEM, content=_system_text(blocks))
            case Role.USER:
                return message_of_parts(Role.USER, [_part(at) for at in blocks])
            case Role.ASSISTANT:
                return _assistant_message(blocks)
            case Role.TOOL:
                return _tool_message(blocks[0])

    def _pieces(self, span: _Span) -> list[bytes | Raw]:
        """Return the bytes that determine a message: its role, then JSON values. The role is not valid JSON, so it
        marks where a message begins in the joined pieces of several messages."""
        pieces: list[bytes | Raw] = [_ROLE_BYTES[span.role]]
        for message in self._wire[span.first : span.last]:
            content = message.content
            # a string gets the same bytes as a list of one text block, because clients switch between the two
            if isinstance(content, str):
                pieces += (b'"text"', msgspec.json.encode(content))
                continue
            for block in content[span.start : span.stop]:
                bytes_of = _BYTES_OF.get(block.type)
                pieces += (msgspec.json.encode(block.type),) if bytes_of is None else bytes_of(block)
        return pieces


def _spans_of_user(index: int, content: list[Block]) -> Iterator[_Span]:
    """Split a user message into spans: one for each tool result, and one for each run of other blocks."""
    start = 0
    for at, block in enumerate(content):
        if block.type == "tool_result":
            if start < at:
                yield _Span(Role.USER, index, index + 1, start, at)
            yield _Span(Role.TOOL, index, index + 1, at, at + 1)
            start = at + 1
    if start < len(content) or not content:
        yield _Span(Role.USER, index, index + 1, start, len(content))


def _placed(content: Content | None, where: str, start: int = 0, stop: int | None = None) -> list[_PlacedBlock]:
    """Return the blocks [start, stop) of a content with their paths. `where` is the content's path. A string is one
    text block."""
    if content is None:
        return []
    if isinstance(content, str):
        return [_PlacedBlock(Block("text", text=Raw(msgspec.json.encode(content))), where)]
    return [_PlacedBlock(block, f"{where}[{index}]") for index, block in enumerate(content[start:stop], start)]


def _system_text(blocks: Sequence[_PlacedBlock]) -> str:
    """Return the text of a system prompt, without the billing line (BILLING). Raises RequestError for a block that is
    not text."""
    texts = []
    for at in blocks:
        if at.block.type != "text":
            _refuse_block(at, "a system prompt is text")
        text = string(at.block.text, f"{at.where}.text")
        texts.append(text.partition("\n")[2] if text.startswith(BILLING) else text)
    return "\n".join(filter(None, texts))


def _assistant_message(blocks: Sequence[_PlacedBlock]) -> Message:
    """Return the assistant message made of the blocks of an earlier reply. Raises RequestError."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at in blocks:
        block, where = at.block, at.where
        match block.type:
            case "text":
                texts.append(string(block.text, f"{where}.text"))
            case "thinking":
                thoughts.append(string(block.thinking, f"{where}.thinking"))
            case "tool_use":
                name, call_id = string(block.name, f"{where}.name"), string(block.id, f"{where}.id")
                calls.append(ToolCall(call_id, name, _arguments(block.input, f"{where}.input")))
            case "redacted_thinking":
                pass
            case _:
                _refuse_block(at, "an assistant message holds text, thinking and tool_use")
    return Message(
        role=Role.ASSISTANT,
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _arguments(raw: Raw, where: str) -> str:
    """Return a call's arguments as JSON text. If the reply had put invalid arguments into an object with the key
    INVALID_JSON, returns the text that the model wrote. Raises RequestError."""
    if is_absent(raw):
        return "{}"
    value = decode(_ANY, raw, where)
    if not isinstance(value, dict):
        refuse(where, "must be an object")
    if is_invalid_json_object(value):
        return str(value[INVALID_JSON])
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def _tool_message(at: _PlacedBlock) -> Message:
    """Return the tool message for one `tool_result` block. Raises RequestError."""
    block, where = at.block, at.where
    content = optional(_CONTENT, block.content, f"{where}.content")
    parts = [_part(inner) for inner in _placed(content, f"{where}.content")]
    if optional(_FLAG, block.is_error, f"{where}.is_error"):
        text = joined_text(parts)
        parts.append(Text(TOOL_ERROR if not text or text.endswith("\n") else f"\n{TOOL_ERROR}"))
    return message_of_parts(Role.TOOL, parts, tool_call_id=string(block.tool_use_id, f"{where}.tool_use_id"))


def _part(at: _PlacedBlock) -> Part:
    """Return the text, image or file for a block of a user message or a tool result. Raises RequestError."""
    block, where = at.block, at.where
    match block.type:
        case "text":
            return Text(string(block.text, f"{where}.text"))
        case "image":
            source, at_source = _source(block, where), f"{where}.source"
            if source.type == "base64":
                if source.media_type not in _IMAGE_TYPES:
                    reason = f"must be one of {', '.join(sorted(_IMAGE_TYPES))}"
                    size = encoded_size(source.data or "")
                    return attachment(source.media_type, f"{at_source}.media_type", reason, size=size)
                return image_from_base64(source.media_type, source.data or "", f"{at_source}.data")
            if source.type != "url":
                refuse(
                    f"{at_source}.type",
                    f"a source of type {quoted(source.type)} is not supported; supported: base64, url",
                )
            if source.url is None or not source.url.startswith(("http://", "https://")):
                refuse(f"{at_source}.url", "must be an http or https address")
            return image_from_url(source.url)
        case "document":
            return _document(block, where)
        # A reference to a tool that the client's own tool search found. The tool's name is enough, because the model
        # sees all tools.
        case "tool_reference":
            return Text(string(block.tool_name, f"{where}.tool_name"))
        case _:
            return _refuse_block(at, "the model reads text, images and documents of text")


def _document(block: Block, where: str) -> Text:
    """Return a document as the model sees it. A document of text becomes its title, context and text between
    `<document>` tags. A PDF in base64 becomes a `Document`, and any other file an `Attachment`. Raises RequestError."""
    source, at = _source(block, where), f"{where}.source"
    if source.type == "text":
        if source.data is None:
            refuse(f"{at}.data", "is missing")
        text = source.data
    elif source.type == "content":
        inner = _placed(source.content, f"{at}.content")
        for part in inner:
            if part.block.type != "text":
                _refuse_block(part, "the model reads documents of text only")
        text = "".join(string(part.block.text, f"{part.where}.text") for part in inner)
    else:
        reason = f"a source of type {quoted(source.type)} is not supported; supported: text, content"
        if source.type not in ("base64", "url"):
            refuse(f"{at}.type", reason)
        if source.type == "base64" and source.data is not None:
            head = _document_head(block, where)
            return file_from_base64(source.media_type, source.data, f"{at}.type", reason, head=head)
        return attachment(source.media_type, f"{at}.type", reason, address=source.url)
    lines = "\n".join(line for line in (_document_head(block, where), text) if line)
    return Text(f"<document>\n{lines}\n</document>\n")


def _document_head(block: Block, where: str) -> str:
    title = optional(_NULLABLE, block.title, f"{where}.title")
    context = optional(_NULLABLE, block.context, f"{where}.context")
    return "\n".join(line for line in (title, context) if line)


def _source(block: Block, where: str) -> _Source:
    if not block.source:
        refuse(f"{where}.source", "is missing")
    return decode(_SOURCE, block.source, f"{where}.source")


def _refuse_block(at: _PlacedBlock, known: str) -> NoReturn:
    refuse(f"{at.where}.type", f"a block of type {quoted(at.block.type)} is not supported here: {known}")
