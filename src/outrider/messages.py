"""The common form of messages. Every dialect (parser of a wire format) converts conversations to this form. Every
renderer makes prompts from it.

Invariant: a message has everything that a chat template may print. Tool specs stay in OpenAI's form (`{"type":
"function", "function": {"name", "description", "parameters"}}`) with the client's key order, because templates print
them verbatim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

ToolSpec = dict[str, Any]

# Some structs here and in the dialects have tens of thousands of instances per request. These structs have gc=False.
# Otherwise the garbage collector would visit every instance, and all threads would stop meanwhile. gc=False is safe,
# because these structs cannot be part of a reference cycle.


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool. `arguments` is JSON text, exactly as the model sampled it or the client sent it."""

    id: str
    name: str
    arguments: str


class Text(msgspec.Struct, frozen=True, tag="text", gc=False):
    """A piece of text in a message with images."""

    text: str


class Attachment(Text, frozen=True, tag="attachment", gc=False):
    """A file in a request that no model here reads, such as a document or a broken image. If the file comes from a
    tool, the model sees `text` instead (`media.py`). Otherwise the request is refused: `field` is the file's path in
    the request, and `reason` says why the file is not accepted."""

    media_type: str
    field: str
    reason: str


class Document(Attachment, frozen=True, tag="document", gc=False):
    """A PDF document. `data` has its bytes, and `digest` is their SHA-256 (hex). `media.py` replaces the document by
    its pages. If the document cannot be read, `media.py` treats it as an attachment. `head` is text that the model sees
    before the pages."""

    digest: str
    data: bytes
    head: str = ""


class DocumentPages(msgspec.Struct, frozen=True):
    """The pages of a document, in order. Each page is its text (`str`) or its picture as PNG (`bytes`)."""

    pages: tuple[str | bytes, ...]


class Image(msgspec.Struct, frozen=True, tag="image", omit_defaults=True, gc=False):
    """An image.

    media_type: the type that the client sent; empty for an image sent as a URL.
    digest: the SHA-256 (hex) of the image's bytes, or of the URL.
    data: the bytes; empty once the image is stored, and for a URL.
    size: the number of bytes; 0 for a URL.
    grid: the numbers of patches along three axes (time, height, width), if the prompt is sent as token ids. Otherwise
        None.
    """

    media_type: str
    digest: str
    data: bytes = b""
    url: str | None = None
    size: int = 0
    grid: tuple[int, int, int] | None = None


Part = Text | Image


def image_from_bytes(media_type: str, data: bytes) -> Image:
    return Image(media_type, hashlib.sha256(data).hexdigest(), data, size=len(data))


def image_from_url(url: str) -> Image:
    """Return an image whose bytes the engine will fetch from the URL."""
    return Image("", hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest(), url=url)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message. `content` is all of its text, "" if there is none. `reasoning` is the model's thinking, if any.
    `parts` has the texts, images and attachments in order; it is empty for a message of text only."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    parts: tuple[Part, ...] = ()


def joined_text(parts: Sequence[Part]) -> str:
    """Concatenate the texts of the parts."""
    return "".join([part.text for part in parts if isinstance(part, Text)])


def message_of_parts(
    role: Role, parts: Sequence[Part], *, tool_call_id: str | None = None, name: str | None = None
) -> Message:
    """Make a message from texts, images and attachments. A message of text only has no `parts`. In `parts`, adjacent
    texts are joined and empty texts are dropped, so that the way in which the client splits the text does not
    matter."""
    text = joined_text(parts)
    kept: list[Part] = []
    if any(isinstance(part, Image | Attachment) for part in parts):
        for part in parts:
            if type(part) is Text and kept and type(kept[-1]) is Text:
                kept[-1] = Text(kept[-1].text + part.text)
            elif part != Text(""):
                kept.append(part)
    return Message(role=role, content=text, tool_call_id=tool_call_id, name=name, parts=tuple(kept))


IMAGE_EXTENSIONS = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/bmp": "bmp",
    "image/tiff": "tiff",
    "image/avif": "avif",
    "image/heic": "heic",
    "image/heif": "heif",
    "image/svg+xml": "svg",
}
"""Maps media types to file extensions. Images of other types get `.bin`."""


def image_file(image: Image) -> str:
    """Return the file name that an image has in an export."""
    return f"{image.digest}.{IMAGE_EXTENSIONS.get(image.media_type, 'bin')}"


class MessageOutline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored `Message` without its text, for readers that need only the role and the images."""

    role: Role
    parts: tuple[Part, ...] = ()


def images_in(message: Message | MessageOutline) -> list[Image]:
    """Return the images of a message, in order."""
    return [part for part in message.parts if isinstance(part, Image)]


def with_images(message: Message, change: Callable[[Image], Image]) -> Message:
    """Return the message with `change` applied to each of its images."""
    if not message.parts:
        return message
    parts = (change(part) if isinstance(part, Image) else part for part in message.parts)
    return msgspec.structs.replace(message, parts=tuple(parts))


class WireMessages(Protocol):
    """The messages of a request. A message is parsed only when it is needed. Often it is not needed, because a long
    history can be compared by its bytes.

    - `raw(i)`: bytes that identify message `i`: different messages of a session have different bytes, even in different
      dialects.
    - `head(n)`: the same for the first `n` messages together.
    - `role(i)`: the role of message `i`, found without parsing the message's content.
    - `size(i)`: about how many bytes `parse(i)` reads, so that callers can divide long work into pieces.
    - `parse(i)`: the parsed message. Raises RequestError, which names the message, if the message is malformed.
    """

    def __len__(self) -> int: ...
    def raw(self, index: int) -> bytes: ...
    def head(self, count: int) -> bytes: ...
    def role(self, index: int) -> Role: ...
    def size(self, index: int) -> int: ...
    def parse(self, index: int) -> Message: ...


class ParsedMessages:
    """`WireMessages` for callers that have parsed messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def raw(self, index: int) -> bytes:
        return msgspec.msgpack.encode(self._messages[index])

    def head(self, count: int) -> bytes:
        return msgspec.msgpack.encode(self._messages[:count])

    def role(self, index: int) -> Role:
        return self._messages[index].role

    def size(self, index: int) -> int:
        return len(self.raw(index))

    def parse(self, index: int) -> Message:
        return self._messages[index]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a reply that one step of a stream adds: visible text, reasoning, and sampled tokens with their
    log-probabilities.

    A token is in the step in which it was sampled. Text is held back while it may still be part of a tool call, so text
    may be in a later step than its tokens. Over the whole stream, text and tokens match.
    """

    text: str = ""
    reasoning: str = ""
    ids: list[int] = []
    logprobs: list[float] = []
