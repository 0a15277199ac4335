"""Images as clients send them, by address or as data, and the contents they stand in.

It knows no dialect and fetches nothing. Invariant: what is not an image's address or data is refused, by the name of
its field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.concurrency.base64_pieces import base64_bytes
from outrider.dialects.json import refuse, shown
from outrider.messages import Image, Part, Text, image_from_bytes, image_from_url

_DATA_URL = re.compile(r"data:(image/[\w.+-]+)(?:;[^,;]*)*;base64,", re.ASCII)


def image_of_address(url: str, where: str) -> Image:
    """An http(s) address, which the engine is to fetch, or a data URL."""
    if url.startswith(("http://", "https://")):
        return image_from_url(url)
    if (head := _DATA_URL.match(url)) is None:
        refuse(where, "must be an http or https address, or a data URL of an image in base64")
    return image_of_base64(head[1], url[head.end() :], where)


def image_of_base64(media_type: str, data: str, where: str) -> Image:
    if not media_type.startswith("image/"):
        refuse(where, f"is of media type {shown(media_type)}: the model reads text and images")
    try:
        decoded = base64_bytes(data)
    except ValueError as error:
        refuse(where, "is not valid base64", error)
    if not decoded:
        refuse(where, "has no data")
    return image_from_bytes(media_type, decoded)


def text_of(parts: Sequence[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Text)])


def kept_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """What a message keeps as `parts`: nothing without an image; otherwise everything in order, texts that follow
    each other as one and empty ones left out."""
    if all(isinstance(part, Text) for part in parts):
        return ()
    kept: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and kept and isinstance(kept[-1], Text):
            kept[-1] = Text(kept[-1].text + part.text)
        elif part != Text(""):
            kept.append(part)
    return tuple(kept)
