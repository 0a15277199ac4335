"""The content parts of Responses items read into text and images.

It knows no items. Invariant: nothing that the model would have seen is left out silently; a kind of part that cannot
be shown is a 400 that names it.

Source: OpenAI API reference, "Create a model response", input items.
"""

from __future__ import annotations

import msgspec

from outrider.dialects.images import image_of_address, kept_parts, text_of
from outrider.dialects.json import refuse, shown
from outrider.messages import Message, Part, Role, Text

_TEXT = frozenset({"input_text", "output_text", "text"})


class WirePart(msgspec.Struct, gc=False):
    """One part of a content, or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    encrypted_content: str | None = None


WireContent = str | list[WirePart]


def spoken(role: Role, content: WireContent | None, where: str, tool_call_id: str | None = None) -> Message:
    """The message of a content; `where` is its place. It keeps parts only where there are images among them."""
    parts = parts_of(content, where)
    return Message(role=role, content=text_of(parts), tool_call_id=tool_call_id, parts=kept_parts(parts))


def parts_of(content: WireContent | None, where: str) -> list[Part]:
    """The parts in order. Raises RequestError for one that a model here cannot read."""
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: WirePart, where: str) -> Part:
    if part.type in _TEXT:
        if part.text is None:
            refuse(f"{where}.text", "is missing")
        return Text(part.text)
    if part.type == "refusal":
        return Text(part.refusal or "")
    if part.type == "encrypted_content":  # between agents: what one of ours wrote, which nobody has encrypted
        return Text(part.encrypted_content or "")
    if part.type == "input_image":
        if part.image_url is None:
            refuse(f"{where}.image_url", "is missing: images are sent by URL or as data, there are no files here")
        return image_of_address(part.image_url, f"{where}.image_url")
    return refuse(
        f"{where}.type", f"a part of type {shown(part.type)} is not supported: the model reads text and images"
    )
