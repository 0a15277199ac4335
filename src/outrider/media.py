"""Prepares images and other files for a model. A document becomes its pages, as pictures or texts. If a tool returns a
file that the model cannot read, the model sees a text in place of the file.

Invariant: what the model sees depends only on the file, its media type and its address. So a history that a client
sends again looks the same to the model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from outrider.errors import RequestError
from outrider.messages import (
    Attachment,
    Document,
    DocumentPages,
    Image,
    Message,
    Part,
    Role,
    Text,
    WireMessages,
    image_from_bytes,
    images_in,
    message_of_parts,
    with_images,
)

Grids = Mapping[str, tuple[int, int, int] | str]
PagesOf = Callable[[str], DocumentPages | str | None]
"""A function that returns the pages of the document with the given digest. It returns a text with the reason if the
document cannot be read, and None if the document has not been read yet."""
PDF = "application/pdf"

MAX_USER_RUN = 64
"""How many messages `carried_by_tool` looks back from a user message to find a tool's result."""
MAX_ADDRESS = 200
"""Maximum length of a file's address after `https://`, in characters. Longer addresses are left out of the text that
replaces the file."""
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,32}/[\w.+-]{1,64}", re.ASCII)
_ADDRESS = re.compile(rf"https?://[!-;=?-Z_a-z~]{{1,{MAX_ADDRESS}}}", re.ASCII)
_MAX_SEGMENTS = 256
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the JPEG segments that contain the image's size."""


def carried_by_tool(messages: WireMessages, index: int) -> bool:
    """Return True if the files in message `index` come from a tool and not from the user.

    This holds for a tool's result, and for a user message that follows a tool's result without a reply in between. Some
    APIs allow only text in a tool's result, and programs that use these APIs send the tool's files in such a user
    message.
    """
    for at in range(index, max(-1, index - MAX_USER_RUN - 1), -1):
        role = messages.role(at)
        if role in (Role.TOOL, Role.ASSISTANT):
            return role is Role.TOOL
    return False


def check_attachments(parts: Sequence[Part], messages: WireMessages, index: int) -> None:
    """Raise RequestError if message `index` has an unreadable file (`Attachment`) that does not come from a tool.
    `parts` are the parts of this message. Documents are checked by `ReadableMessages` instead."""
    for part in parts:
        if isinstance(part, Attachment) and not isinstance(part, Document) and not carried_by_tool(messages, index):
            raise RequestError(f"{part.field}: {part.reason}", field=part.field)


def attachment(
    media_type: str | None, field: str, reason: str, *, size: int | None = None, address: str | None = None
) -> Attachment:
    """Return the attachment for a file of a type that no model here reads. `size` is in bytes, None if unknown."""
    known = _printable_type(media_type) or "file"
    details = [known] if size is None else [known, f"{size:,} bytes"]
    if address is not None and _ADDRESS.fullmatch(address):
        details.append(address)
    return Attachment(f"[{', '.join(details)}: this model does not read such files]", known, field, reason)


def document(data: bytes, field: str, reason: str, *, head: str = "") -> Document:
    """Return the message part for a PDF document. `Attachment` explains `field` and `reason`, and `Document` explains
    `head`."""
    text = f"[{PDF}, {len(data):,} bytes: this model does not read such files]"
    return Document(text, PDF, field, reason, hashlib.sha256(data).hexdigest(), data, head)


def shown(document: Document, pages: DocumentPages) -> list[Part]:
    """Return the message parts that replace a document for the model: its pages, as pictures or texts, between tags."""
    parts: list[Part] = [Text("<document>\n")]
    if document.head:
        parts.append(Text(f"{document.head}\n"))
    for number, page in enumerate(pages.pages, 1):
        parts.append(Text(f'<page number="{number}">\n'))
        parts.append(image_from_bytes("image/png", page) if isinstance(page, bytes) else Text(page))
        parts.append(Text("\n</page>\n"))
    return [*parts, Text("</document>\n")]


def broken_image(media_type: str, field: str, reason: str) -> Attachment:
    """Return the attachment for an image whose data cannot be read."""
    known = _printable_type(media_type) or "image"
    return Attachment(unreadable_note(known), known, field, reason)


def unreadable_note(media_type: str | None) -> str:
    """Return the text that replaces an image that cannot be decoded."""
    return f"[{_printable_type(media_type) or 'image'}: the image cannot be read]"


def encoded_size(data: str) -> int:
    """Return the number of bytes that a base64 text encodes. The text is not checked."""
    return len(data.rstrip("=")) * 3 // 4


def note_of_image(image: Image) -> str:
    """Return the text that replaces an image for a model that reads no images."""
    if image.url is not None:
        address = f", {image.url}" if _ADDRESS.fullmatch(image.url) else ""
        return f"[image{address}: this model reads no images]"
    size = pixel_size(image.data)
    pixels = f", {size[0]}x{size[1]}" if size is not None else ""
    return f"[{_printable_type(image.media_type) or 'image'}{pixels}, {image.size:,} bytes: this model reads no images]"


def pixel_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height of a PNG, JPEG or GIF; None if they cannot be read from the data."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    if data.startswith((b"GIF87a", b"GIF89a")) and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if not data.startswith(b"\xff\xd8"):
        return None
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if len(data) < at + 9 or data[at] != 0xFF:
            return None
        if data[at + 1] in _FRAMES:
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


class UnpreparedImages(Exception):
    """Raised for a message whose `images` have no known grids (sizes in patches) yet."""

    def __init__(self, images: Sequence[Image]) -> None:
        super().__init__(f"{len(images)} images")
        self.images = images


class UnpreparedDocuments(Exception):
    """Raised for a message whose `documents` have not been read yet."""

    def __init__(self, documents: Sequence[Document]) -> None:
        super().__init__(f"{len(documents)} documents")
        self.documents = documents


class ReadableMessages:
    """`WireMessages` in which texts replace the files that the model does not read.

    - An attachment becomes a text.
    - If `images` is False, an image in a tool's result also becomes a text. The user's images stay, because without
      them the task would be a different task.
    - `grids` maps the digest of an image to its grid (its size in patches), or to the reason why the image cannot be
      decoded. An image with a grid stays, because the model reads it. A tool's image that cannot be decoded becomes a
      text.
    - `pages` returns the pages of a document, and these pages replace the document. If `pages` is None, or if a
      document cannot be read, there are no pages: a tool's document becomes a text, and a user's document is refused.
    - `described` maps the index of a parsed message to the media types of its replaced files.
    """

    __slots__ = ("_grids", "_images", "_messages", "_pages", "described")

    def __init__(
        self, messages: WireMessages, *, images: bool, grids: Grids | None = None, pages: PagesOf | None = None
    ) -> None:
        self._messages = messages
        self._images = images
        self._grids = grids
        self._pages = pages
        self.described: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def raw(self, index: int) -> bytes:
        return self._messages.raw(index)

    def head(self, count: int) -> bytes:
        return self._messages.head(count)

    def role(self, index: int) -> Role:
        return self._messages.role(index)

    def size(self, index: int) -> int:
        return self._messages.size(index)

    def parse(self, index: int) -> Message:
        message = self._messages.parse(index)
        if any(isinstance(part, Document) for part in message.parts):
            message = self._with_pages(message, index)
        if not message.parts:
            return message
        if self._grids is not None:
            unknown = [image for image in images_in(message) if image.url is None and image.digest not in self._grids]
            if unknown:
                raise UnpreparedImages(unknown)
            message = self._with_grids(message, self._grids, index)
        described: list[str] = []
        parts: list[Part] = []
        after_note = False
        for part in message.parts:
            note = self._note(part, index)
            if note is None:
                if after_note and isinstance(part, Text) and not part.text.startswith("\n"):
                    parts.append(Text("\n"))
                parts.append(part)
            else:
                # each text that replaces a file has its own line
                if parts and isinstance(before := parts[-1], Text) and not before.text.endswith("\n"):
                    parts.append(Text("\n"))
                parts.append(Text(note))
                described.append(_media_type(part))
            after_note = note is not None
        if not described:
            return message
        self.described[index] = described
        return message_of_parts(message.role, parts, tool_call_id=message.tool_call_id, name=message.name)

    def _note(self, part: Part, index: int) -> str | None:
        """Return the text that replaces a part of message `index`. Returns None if the model reads the part, or if the
        part is an image from the user."""
        if isinstance(part, Attachment):
            return part.text
        if not isinstance(part, Image) or self._images or part.grid is not None:
            return None
        if carried_by_tool(self._messages, index):
            fault = self._grids.get(part.digest) if self._grids is not None else None
            return note_of_image(part) if fault is None else unreadable_note(part.media_type)
        return None

    def _with_pages(self, message: Message, index: int) -> Message:
        """Replace the documents of message `index` by their pages. Raises UnpreparedDocuments if a document has not
        been read yet, and RequestError for an unreadable document from the user."""
        by_tool, unknown = carried_by_tool(self._messages, index), []
        parts: list[Part] = []
        for part in message.parts:
            if not isinstance(part, Document):
                parts.append(part)
                continue
            pages = part.reason if self._pages is None else self._pages(part.digest)
            if pages is None:
                unknown.append(part)
            elif isinstance(pages, DocumentPages):
                parts += shown(part, pages)
            elif not by_tool:
                raise RequestError(f"{part.field}: {pages}", field=part.field)
            else:
                note = part.text if self._pages is None else f"[{PDF}: the document cannot be read]"
                parts.append(Attachment(note, PDF, part.field, pages))
        if unknown:
            raise UnpreparedDocuments(unknown)
        return message_of_parts(message.role, parts, tool_call_id=message.tool_call_id, name=message.name)

    def _with_grids(self, message: Message, grids: Grids, index: int) -> Message:
        by_tool = carried_by_tool(self._messages, index)

        def placed(image: Image) -> Image:
            grid = grids.get(image.digest)
            if isinstance(grid, tuple):
                return msgspec.structs.replace(image, grid=grid)
            if not by_tool:
                raise RequestError(
                    grid or "the image is given by its address, which the service does not fetch",
                    field="messages",
                    hint="send the image's data, in base64",
                )
            return image

        return with_images(message, placed)


def _media_type(part: Part) -> str:
    if isinstance(part, Text):
        return part.media_type if isinstance(part, Attachment) else "text"
    return _printable_type(part.media_type) or "image"


def _printable_type(media_type: str | None) -> str | None:
    """Return a media type without its parameters; None for a text that is not a media type."""
    kind = (media_type or "").partition(";")[0].strip().lower()
    return kind if _MEDIA_TYPE.fullmatch(kind) else None
