"""JSON objects as Google's clients write them: keys in camelCase or snake_case, lists that may be a single item.

It knows no field by name. Invariant: a key is read the same in both spellings, at one level of one object; what lies
deeper is left as it was sent.

Source: the ProtoJSON format ("parsers accept both the lowerCamelCase name and the original proto field name").
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from outrider.dialects.json import decode

T = TypeVar("T")
Fields = dict[str, Raw]

ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_RAWS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_UNDERSCORE = re.compile(r"_([a-z])")
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_ABSENT = frozenset({b"", b"null"})


def fields(raw: bytes | Raw, where: str = "") -> Fields:
    """The object's fields by their camelCase names; null ones are left out. Raises RequestError."""
    return {camel(key): value for key, value in decode(_FIELDS, raw, where).items() if not absent(value)}


def decode_object(decoder: msgspec.json.Decoder[T], raw: bytes | Raw, where: str = "") -> T:
    """The object in `raw` by a decoder of camelCase keys. Raises RequestError."""
    data = bytes(raw)
    if b"_" in data or has_escaped_letters(data):
        named = decode(_FIELDS, raw, where)
        if any("_" in key for key in named):
            raw = msgspec.json.encode({camel(key): value for key, value in named.items()})
    return decode(decoder, raw, where)


def items(raw: bytes | Raw, where: str = "") -> list[Raw]:
    """The items of a list; of one that is not in a list, itself; of null, none."""
    if absent(raw):
        return []
    return decode(_RAWS, raw, where) if is_list(raw) else [raw if isinstance(raw, Raw) else Raw(raw)]


def has_escaped_letters(data: bytes) -> bool:
    """Whether letters or underscores, of keys perhaps, are written as escapes: the bytes then do not show the keys."""
    return b"\\u00" in data and _ESCAPED_LETTER.search(data) is not None


def absent(raw: bytes | Raw) -> bool:
    return len(view := memoryview(raw)) <= 4 and bytes(view) in _ABSENT


def is_list(raw: bytes | Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


def is_text(raw: bytes | Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b'"'


def camel(key: str) -> str:
    return _UNDERSCORE.sub(lambda found: found[1].upper(), key) if "_" in key else key
