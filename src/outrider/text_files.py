"""Text and TOML files that somebody else wrote, read into bounds: whatever is in them, one error says so.

It knows no setting and no task. Invariant: no more of a file is read than its limit, and nothing but InvalidField is
raised.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField

MAX_TOML = 32 << 20
"""Maximum bytes of a TOML file: a request may have as many."""
MAX_DEPTH = 64
"""Maximum nesting of tables and lists, as of requests: what is deeper overflows the stack of whoever goes through."""
WORD = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
LONG_KEY = re.compile(rf"(?<![\w.-]){WORD}(?:[ \t]*\.[ \t]*{WORD}){{{MAX_DEPTH}}}")
"""A key of so many parts, for which tomllib takes time that is quadratic in their number."""


def read_text_file(path: Path, *, field: str, limit: int, what: str = "") -> str:
    """Raises InvalidField, which says `what` the file is, for one that cannot be read, is no UTF-8 or has more than
    `limit` bytes."""
    named = f"{what} {path}".strip()
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidField(f"cannot read {named}: {getattr(error, 'strerror', None) or error}", field=field) from error
    if len(data) > limit:
        raise InvalidField(f"{named} has more than {limit >> 10} KiB", field=field, hint="is it the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(f"{named} is not text in UTF-8: {error}", field=field) from error


def read_toml_file(path: Path, *, field: str, limit: int = MAX_TOML, what: str = "") -> dict[str, Any]:
    """The table in a file. Raises InvalidField as `read_text_file`, and for what is no TOML that can be used."""
    try:
        return parse_toml(read_text_file(path, field=field, limit=limit, what=what))
    except ValueError as error:
        raise InvalidField(f"{f'{what} {path}'.strip()} is not a TOML file: {error}", field=field) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError that says what is wrong and, if it can, in which line."""
    if found := LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key of more than {MAX_DEPTH} parts (at line {line})")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    check_depth(table)
    return table


def check_depth(value: Any, deepest: int = MAX_DEPTH) -> None:
    """Raises ValueError for lists and tables that are nested deeper. Level by level, so that nothing overflows."""
    level = [value]
    for _ in range(deepest + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
        if not below:
            return
        level = below
    raise ValueError(f"it is nested deeper than {deepest} levels")
