"""JSON objects as Google's clients write them: keys in camelCase or snake_case, lists that may be a single item.

It knows no field by name. Invariant: a key is read the same in both spellings, at one level of one object; what lies
deeper is left as it was sent.

Source: the ProtoJSON format ("parsers accept both the lowerCamelCase name and the original proto field name").
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.json import camel_case, decode, is_absent

T = TypeVar("T")
Fields = dict[str, Raw]

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_RAWS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


def fields(raw: bytes | Raw, where: str = "") -> Fields:
    """The object's fields by their camelCase names; null ones are left out. Raises RequestError."""
    return {camel_case(key): value for key, value in decode(_FIELDS, raw, where).items() if not is_absent(value)}


def decode_object(decoder: msgspec.json.Decoder[T], raw: bytes | Raw, where: str = "") -> T:
    """The object in `raw` by a decoder of camelCase keys. Raises RequestError."""
    data = bytes(raw)
    # Spelling keys anew costs a second pass: only for data that may have a key in snake_case.
    if b"_" in data or has_escaped_letters(data):
        named = decode(_FIELDS, raw, where)
        if any("_" in key for key in named):
            raw = msgspec.json.encode({camel_case(key): value for key, value in named.items()})
    return decode(decoder, raw, where)


def items(raw: bytes | Raw, where: str = "") -> list[Raw]:
    """The items of a list; something that is no list is its only item; null has none. Raises RequestError."""
    if is_absent(raw):
        return []
    if bytes(memoryview(raw)[:1]) == b"[":
        return decode(_RAWS, raw, where)
    return [raw if isinstance(raw, Raw) else Raw(raw)]


def has_escaped_letters(data: bytes) -> bool:
    """Whether letters or underscores, perhaps of keys, are written as escapes: the bytes then do not show the keys."""
    return b"\\u00" in data and _ESCAPED_LETTER.search(data) is not None


def is_text(raw: bytes | Raw) -> bool:
    """Whether the value is a string."""
    return bytes(memoryview(raw)[:1]) == b'"'
