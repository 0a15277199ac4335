"""Decodes JSON objects that Google's clients send. Their keys are in camelCase or snake_case, and a list of one item
may be sent as the bare item.

The conversion of keys needs no list of field names. It leaves nested objects unchanged. Invariant: both spellings of a
key have the same result.

Source: the ProtoJSON format ("parsers accept both the lowerCamelCase name and the original proto field name").
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.field_policy import camel_case
from outrider.dialects.reading import decode, is_absent

T = TypeVar("T")
Fields = dict[str, Raw]

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_RAWS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


def fields(raw: bytes | Raw, where: str = "") -> Fields:
    """Return the object's fields by camelCase name, without fields that are null. Raises RequestError."""
    return {camel_case(key): value for key, value in decode(_FIELDS, raw, where).items() if not is_absent(value)}


def decode_object(decoder: msgspec.json.Decoder[T], raw: bytes | Raw, where: str = "") -> T:
    """Decode the object in `raw` with a decoder that expects camelCase keys. Raises RequestError."""
    data = bytes(raw)
    # Converting keys takes a second pass, so it is done only if the data may have a snake_case key.
    if b"_" in data or has_escaped_letters(data):
        named = decode(_FIELDS, raw, where)
        if any("_" in key for key in named):
            raw = msgspec.json.encode({camel_case(key): value for key, value in named.items()})
    return decode(decoder, raw, where)


def items(raw: bytes | Raw, where: str = "") -> list[Raw]:
    """Return the items of a list. Null has no items, and any other value is returned as a single item. Raises
    RequestError."""
    if is_absent(raw):
        return []
    if bytes(memoryview(raw)[:1]) == b"[":
        return decode(_RAWS, raw, where)
    return [raw if isinstance(raw, Raw) else Raw(raw)]


def has_escaped_letters(data: bytes) -> bool:
    """Return True if letters or underscores may be written as escapes. A search of the bytes for a key can then miss
    the key."""
    return b"\\u00" in data and _ESCAPED_LETTER.search(data) is not None


def is_text(raw: bytes | Raw) -> bool:
    """Return True for a string value."""
    return bytes(memoryview(raw)[:1]) == b'"'
