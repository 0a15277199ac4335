"""Writes values as JSON in many spellings, common and uncommon, and damages values and the bytes of requests.

Independent of the dialect. Invariant: without fragments, `spell` returns JSON of the same value. The results of
`damaged` and `mutated` may be invalid.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from support.fuzz.grammar import ODD

SEPARATORS = ((", ", ": "), (",", ":"), (" , ", " : "), (",\n", ":\t"), (" \r\n,\t", "\n:"))
_MARK = re.compile(r'"@fragment(\d+)@"')
_LETTER = re.compile(r"[A-Za-z/](?=[A-Za-z ])")

JUNK = (
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x00",
    b'"',
    b"\\",
    b"\\u12",
    rb"\ud800",
    b"[" * 50,
    b'{"":' * 50,
    b"1e999",
    b"-",
    b"NaN",
    b"Infinity",
    b"9" * 5000,
    b"0.1e-99999",
    b",",
    b"}",
    b"]",
    b"//x\n",
    b"\xef\xbb\xbf",
    b"'",
    b"null",
    b"",
)
FRAGMENTS = ("NaN", "-Infinity", "1e999", "9" * 5000, "-0", "1E+2", "01", '"\\ud800"', '"\\u0000"', "[" * 90 + "]" * 90)
WHOLE_BODIES = (
    b"",
    b" ",
    b"null",
    b"[]",
    b"{}",
    b"7",
    b'"x"',
    b"not json",
    b"\xff\xfe",
    b"\x00" * 8,
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"[" * 900 + b"]" * 900,
    b"a=1&b=2",
    b"<xml/>",
    b"\x1f\x8b\x08\x00",
    b"--x\r\ncontent-disposition: form-data\r\n\r\n",
)


class Fragment:
    """Text that is inserted into the JSON of a value unchanged. It may be invalid JSON."""

    def __init__(self, written: str) -> None:
        self.written = written


def spell(value: Any, dice: random.Random) -> bytes:
    """Return the value as JSON, in one of many spellings."""
    fragments: list[str] = []

    def mark(fragment: Fragment) -> str:
        fragments.append(fragment.written)
        return f"@fragment{len(fragments) - 1}@"

    spelled = json.dumps(
        value,
        default=mark,
        ensure_ascii=dice.random() < 0.4,
        separators=SEPARATORS[0] if dice.random() < 0.5 else dice.choice(SEPARATORS),
        indent=None if dice.random() < 0.9 else dice.choice((0, 1, 4)),
    )
    if fragments:
        spelled = _MARK.sub(lambda found: fragments[int(found[1])], spelled)
    if dice.random() < 0.05:
        spelled = _escaped(spelled, dice)
    if dice.random() < 0.05:
        spelled = f"\n\t {spelled} \r\n"
    return spelled.encode("utf-8", "surrogatepass")


def _escaped(spelled: str, dice: random.Random) -> str:
    """Replace some letters in strings, keys included, by their escapes."""

    def escape(found: re.Match[str]) -> str:
        return f"\\u{ord(found[0]):04x}" if dice.random() < 0.05 else found[0]

    parts = re.split(r'("(?:[^"\\]|\\.)*")', spelled)
    return "".join(_LETTER.sub(escape, part) if part[:1] == '"' and "\\" not in part else part for part in parts)


def mutated(value: Any, dice: random.Random) -> Any:
    """Return a copy with one to four errors at random paths."""
    places = list(_places(value, ()))
    if not places:
        return dice.choice(ODD)
    spoiled = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        _spoil(spoiled, dice.choice(places), dice)
    return spoiled


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    """Yield the paths of all values inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _spoil(value: Any, path: tuple[Any, ...], dice: random.Random) -> None:
    """Make one change at `path`, unless an earlier change has removed the path."""
    try:
        for key in path[:-1]:
            value = value[key]
        old = value[path[-1]]
    except (KeyError, IndexError, TypeError):
        return
    key = path[-1]
    if not isinstance(value, dict | list):
        return
    match dice.randrange(9):
        case 0 | 1 | 2:
            value[key] = copy.deepcopy(dice.choice(ODD))
        case 3:
            del value[key]
        case 4:
            value[key] = [old]
        case 5:
            value[key] = Fragment(dice.choice(FRAGMENTS))
        case 6:
            value[key] = {"type": old} if dice.random() < 0.5 else {"text": old}
        case 7:
            value[key] = _nested(old, dice.choice((10, 70, 150)))
        case _ if isinstance(value, dict):
            value[dice.choice((str(key).upper(), f"{key}\u0000", f" {key}", str(key)[:-1]))] = value.pop(key)
        case _ if isinstance(value, list):
            value.insert(dice.randrange(len(value) + 1), old)


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"a": value} if depth % 2 else [value]
    return value


def damaged(body: bytes, dice: random.Random) -> bytes:
    """Return the bytes of a body with damage, or other bytes in their place."""
    if not body:
        return dice.choice(JUNK)
    at = dice.randrange(len(body))
    match dice.randrange(8):
        case 0 | 1 | 2:
            return body[:at] + dice.choice(JUNK) + body[at + dice.choice((0, 0, 1, 2)) :]
        case 3:
            return body[:at]
        case 4:
            return body + dice.choice((body, b"}", b",", b"\x00", b"[]"))
        case 5:
            return _doubled_keys(body, dice)
        case 6:
            return body.decode("utf-8", "replace").encode(dice.choice(("utf-16", "utf-32", "utf-8-sig")))
        case _:
            return dice.choice(WHOLE_BODIES)


def _doubled_keys(body: bytes, dice: random.Random) -> bytes:
    """Insert a key of an object a second time, with another value."""
    keys = list(re.finditer(rb'"[A-Za-z_]+"\s*:', body))
    if not keys:
        return body
    key = dice.choice(keys)
    return (
        body[: key.start()] + key[0] + dice.choice((b"null", b"1", b'"x"', b"[]", b"{}")) + b"," + body[key.start() :]
    )


def in_pieces(body: bytes, dice: random.Random) -> list[bytes]:
    """Split a body into the parts in which it arrives: in most cases one, otherwise several, which may be empty."""
    if dice.random() < 0.8 or not body:
        return [body]
    cuts = sorted(dice.randrange(len(body) + 1) for _ in range(dice.choice((1, 2, 5, 20))))
    return [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
