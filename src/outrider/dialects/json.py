"""Decoding of a client's JSON into a type. Every failure is a `RequestError` with the name of the field.

Invariant: `decode` raises nothing but `RequestError` for any bytes. The last value of a repeated key counts. Fields
that the type does not declare are checked for JSON syntax and skipped.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Raw

from outrider.errors import RequestError

T = TypeVar("T")

MAX_DEPTH = 64
"""Maximum nesting of a schema. Chat templates print schemas recursively and engines compile them recursively, so deep
nesting could exceed a recursion limit."""


class _NamedModel(msgspec.Struct):
    model: str | None = None


_NAMED_MODEL = msgspec.json.Decoder(_NamedModel)

# msgspec reports the path of a wrong value only within its message, so the path is taken from there.
_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ABSENT = frozenset({b"", b"null"})
_UNDERSCORE_LETTER = re.compile(r"_([a-z])")


def decode(decoder: msgspec.json.Decoder[T], data: bytes | Raw, where: str = "") -> T:
    """Decode `data`. `where` is its path in the request, such as `messages[3]`. Raises RequestError."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        refuse(where, f"not valid UTF-8: {error.reason}", error)
    except RecursionError as error:
        refuse(where, "nested too deeply", error)
    except msgspec.DecodeError as error:
        text, path = str(error), ""
        if located := _PATH.search(text):
            text, path = text[: located.start()], located[1]
        if missing := _MISSING.search(text):
            path = f"{path}.{missing[1]}"
        elif _SURROGATE_ESCAPE.search(bytes(data)) is not None:
            # The decoder reports a byte offset only, but a person needs the field, so it is searched for.
            with suppress(ValueError, RecursionError):
                surrogate = _find_surrogate(json.loads(bytes(data)), "")
                if surrogate is not None:
                    text, path = "an unpaired surrogate escape (\\ud800 to \\udfff) is not valid Unicode", surrogate
        refuse((where + path).lstrip("."), text[:1].lower() + text[1:], error)


def named_model(body: bytes) -> str | None:
    """The `model` field of a request; None if it is missing or unreadable."""
    try:
        return _NAMED_MODEL.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def refuse(field: str, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise RequestError about `field` ("" for the body as a whole)."""
    raise RequestError(f"{field or 'request body'}: {reason}", field=field or None) from cause


def check_depth(value: Any, where: str) -> None:
    """Raise RequestError if lists and objects nest more than MAX_DEPTH deep. The check itself does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    refuse(where, f"nests more than {MAX_DEPTH} levels deep")


def quoted(text: str) -> str:
    """Client text for an error message: short and printable."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def is_absent(raw: bytes | Raw) -> bool:
    """Return True for a field that is missing or null."""
    return len(view := memoryview(raw)) <= 4 and bytes(view) in _ABSENT


def camel_case(key: str) -> str:
    """A snake_case key in Google's spelling; any other key unchanged."""
    return _UNDERSCORE_LETTER.sub(lambda found: found[1].upper(), key) if "_" in key else key


def _find_surrogate(value: Any, path: str) -> str | None:
    """The path of the first string with an unpaired surrogate."""
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    if isinstance(value, list):
        inner = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        inner = ((f"{path}.{key.encode('ascii', 'backslashreplace').decode()}", item) for key, item in value.items())
    else:
        return None
    return next((found for at, item in inner if (found := _find_surrogate(item, at)) is not None), None)
