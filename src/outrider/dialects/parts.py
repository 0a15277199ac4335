"""Texts and images in client requests, and the messages built from them.

Nothing is fetched here. Invariant: an image is an http(s) address or decoded data. Anything else is refused with the
name of its field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.concurrency.base64_pieces import decode_base64
from outrider.dialects.json import quoted, refuse
from outrider.messages import Image, Message, Part, Role, Text, image_from_bytes, image_from_url

# A data URL may have parameters between its media type and `base64`, such as a charset or a file's name.
_DATA_URL = re.compile(r"data:(image/[\w.+-]+)(?:;[^,;]*)*;base64,", re.ASCII)


def image_from_address(url: str, where: str) -> Image:
    """The image at an http(s) address, which the engine fetches, or in a data URL. Raises RequestError."""
    if url.startswith(("http://", "https://")):
        return image_from_url(url)
    if (head := _DATA_URL.match(url)) is None:
        refuse(where, "must be an http or https address, or a data URL of an image in base64")
    return image_from_base64(head[1], url[head.end() :], where)


def image_from_base64(media_type: str, data: str, where: str) -> Image:
    """The image in base64 `data`. Raises RequestError for data that is empty or not base64, and for other media than
    images."""
    if not media_type.startswith("image/"):
        refuse(where, f"is of media type {quoted(media_type)}: the model reads text and images")
    try:
        decoded = decode_base64(data)
    except ValueError as error:
        refuse(where, "is not valid base64", error)
    if not decoded:
        refuse(where, "has no data")
    return image_from_bytes(media_type, decoded)


def joined_text(parts: Sequence[Part]) -> str:
    """Concatenate the texts of the parts."""
    return "".join([part.text for part in parts if isinstance(part, Text)])


def message_of_parts(
    role: Role, parts: Sequence[Part], *, tool_call_id: str | None = None, name: str | None = None
) -> Message:
    """Build a message from texts and images. The message has `parts` only if there is an image. Adjacent texts are then
    joined and empty texts dropped, so the message does not depend on how the client splits the text."""
    text = joined_text(parts)
    kept: list[Part] = []
    if any(isinstance(part, Image) for part in parts):
        for part in parts:
            if isinstance(part, Text) and kept and isinstance(kept[-1], Text):
                kept[-1] = Text(kept[-1].text + part.text)
            elif part != Text(""):
                kept.append(part)
    return Message(role=role, content=text, tool_call_id=tool_call_id, name=name, parts=tuple(kept))
