"""JSON from a client decoded into a type, with every failure a `RequestError` that names the field.

It knows no dialect. Invariant: whatever the bytes are, nothing but `RequestError` leaves this module. A key
given twice counts once, the last time; fields that nobody declared are checked for JSON syntax and skipped.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from outrider.errors import RequestError

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw, where: str = "") -> T:
    """The value of `data`; `where` is its place in the request, as in `messages[3]`."""
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        refuse(where, f"not valid UTF-8: {error.reason}", error)
    except RecursionError as error:
        refuse(where, "nested too deeply", error)
    except msgspec.DecodeError as error:
        _refuse_decode_error(error, data, where)


def refuse(field: str, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise RequestError about `field` ("" for the body as a whole)."""
    raise RequestError(f"{field or 'request body'}: {reason}", field=field or None) from cause


def shown(text: str) -> str:
    """Client text as an error may quote it: short and printable."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects nest more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _refuse_decode_error(error: msgspec.DecodeError, data: bytes | msgspec.Raw, where: str) -> NoReturn:
    text = str(error)
    path = ""
    if located := _PATH.search(text):
        text, path = text[: located.start()], located[1]
    if missing := _MISSING.search(text):
        path = f"{path}.{missing[1]}"
    elif (surrogate := _surrogate_path(bytes(data))) is not None:
        text, path = "an unpaired surrogate escape (\\ud800 to \\udfff) is not valid Unicode", surrogate
    refuse((where + path).lstrip("."), text[:1].lower() + text[1:], error)


def _surrogate_path(data: bytes) -> str | None:
    """Where the first string with an unpaired surrogate is. The decoder says at which byte, a person wants a field."""
    if _SURROGATE_ESCAPE.search(data) is None:
        return None
    try:
        return _find_surrogate(json.loads(data), "")
    except (ValueError, RecursionError):
        return None


def _find_surrogate(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    if isinstance(value, list):
        inner = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        inner = ((f"{path}.{key.encode('ascii', 'backslashreplace').decode()}", item) for key, item in value.items())
    else:
        return None
    return next((found for at, item in inner if (found := _find_surrogate(item, at)) is not None), None)
