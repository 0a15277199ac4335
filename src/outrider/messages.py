"""The conversation in one shape: what every dialect is read into and every renderer is given.

It knows no wire format and no token. Tool specs stay in OpenAI form (`{"type": "function", "function":
{"name", "description", "parameters"}}`) with the client's key order, because templates print them verbatim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

ToolSpec = dict[str, Any]

# Structs of which a request may have tens of thousands are made with gc=False, here and in the dialects: they cannot be
# part of a cycle, and the garbage collector stops everything for as long as it looks at them.


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call as the model made it. `arguments` is JSON text, exactly as sampled or as the client sent it."""

    id: str
    name: str
    arguments: str


class Text(msgspec.Struct, frozen=True, tag="text", gc=False):
    """A piece of text between images."""

    text: str


class Image(msgspec.Struct, frozen=True, tag="image", omit_defaults=True, gc=False):
    """An image, known by the digest (SHA-256, hex) of its bytes, or of its address when the client sent only that: it
    then has no media type and no size. `data` is empty once the image has been stored; `size` is how many bytes it has.
    The media type is what the client said."""

    media_type: str
    digest: str
    data: bytes = b""
    url: str | None = None
    size: int = 0


Part = Text | Image


def image_from_bytes(media_type: str, data: bytes) -> Image:
    return Image(media_type, hashlib.sha256(data).hexdigest(), data, size=len(data))


def image_from_url(url: str) -> Image:
    """An image that the engine is to fetch."""
    return Image("", hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest(), url=url)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message. `content` is plain text ("" when absent); `reasoning` is the model's thinking, if any. `parts` is
    empty unless there are images: then it holds all of the content in order, and `content` the text in it."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    parts: tuple[Part, ...] = ()


def images_in(message: Message) -> list[Image]:
    """In their order."""
    return [part for part in message.parts if isinstance(part, Image)]


class WireMessages(Protocol):
    """A request's messages, parsed only when asked for: a long history is compared by its bytes.

    `raw(i)` is any byte string that determines message `i`, and `head(n)` any that determines the first `n`;
    `parse(i)` raises `RequestError` naming the message when it is malformed, and `size(i)` is how many bytes it reads.
    """

    def __len__(self) -> int: ...
    def raw(self, index: int) -> bytes: ...
    def head(self, count: int) -> bytes: ...
    def size(self, index: int) -> int: ...
    def parse(self, index: int) -> Message: ...


class ParsedMessages:
    """`WireMessages` over messages that are already parsed."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def raw(self, index: int) -> bytes:
        return msgspec.msgpack.encode(self._messages[index])

    def head(self, count: int) -> bytes:
        return msgspec.msgpack.encode(self._messages[:count])

    def size(self, index: int) -> int:
        return len(self.raw(index))

    def parse(self, index: int) -> Message:
        return self._messages[index]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a stream adds: visible text, reasoning, and the sampled tokens behind them.

    Tokens arrive with the step that sampled them, text when it can no longer be part of a tool call, so the
    two need not match within a step; over a whole stream they do.
    """

    text: str = ""
    reasoning: str = ""
    ids: list[int] = []
    logprobs: list[float] = []
