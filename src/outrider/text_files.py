"""Reads untrusted text and TOML files, within limits. Any problem with a file is reported as InvalidField.

Invariant: `read_text_file` and `read_toml_file` read at most one byte more than their limit, and raise only
InvalidField.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField

MAX_TOML = 32 << 20
"""Maximum bytes of a TOML file, the same as for a request."""
MAX_DEPTH = 64
"""Maximum depth of nested tables and lists, the same as in requests. A much greater depth overflows the stack of
recursive code."""
BASIC = r"\"(?:[^\"\\\n]++|\\[^\n])*+"
WORD = rf"(?:[A-Za-z0-9_-]++|{BASIC}\"|'[^'\n]*+')"
LONG_KEY = re.compile(
    rf"(?P<key>(?<![\w.-]){WORD}(?:[ \t]*+\.[ \t]*+{WORD}){{{MAX_DEPTH}}})"
    r'|"""(?:[^"\\]++|\\[\s\S]|"(?!""))*+"{0,5}'
    r"|'''(?:[^']++|'(?!''))*+'{0,5}"
    rf"|{BASIC}\"?|'[^'\n]*+'?|#[^\n]*+"
)
"""Matches a key of more than MAX_DEPTH parts (`a.b.c` has three). Such keys are refused, because tomllib takes
quadratic time in the number of parts. Strings and comments are matched as a whole. So a text inside a string or comment
is skipped, even if the text looks like a long key. A string without an end is also matched, so that the search takes
linear time."""

TOML_HEADER = re.compile(r"[ \t]*(\[\[?)([^\[\]]+)\]")
TOML_KEY = re.compile(r"[ \t]*([\w\"'.-]+(?:[ \t]*\.[ \t]*[\w\"'-]+)*)[ \t]*=")


def read_text_file(path: Path, *, field: str, limit: int, what: str = "") -> str:
    """Read a text file. Raises InvalidField if the file cannot be read, is not UTF-8, or has more than `limit` bytes.
    `what` is the name of the file in the error message, such as "config file"."""
    named = f"{what} {path}".strip()
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise InvalidField(f"cannot read {named}: {getattr(error, 'strerror', None) or error}", field=field) from error
    if len(data) > limit:
        raise InvalidField(f"{named} has more than {limit >> 10} KiB", field=field, hint="is it the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField(f"{named} is not text in UTF-8: {error}", field=field) from error


def read_toml_file(path: Path, *, field: str, limit: int = MAX_TOML, what: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises InvalidField if `read_text_file` does, or if the TOML is invalid or nested too
    deeply."""
    try:
        return parse_toml(read_text_file(path, field=field, limit=limit, what=what))
    except ValueError as error:
        raise InvalidField(f"{f'{what} {path}'.strip()} is not a TOML file: {error}", field=field) from error


def toml_line(text: str, field: str) -> int | None:
    """Return the number of the line that sets `field` in valid TOML, directly or within an inline table. Lines are
    numbered from 1. If no line sets the field, returns the line of the header of the field's table, or None if there is
    no such header. `field` is a dotted path. In the path, the tables of a list are numbered from 0, as in
    `models.0.name`."""
    counts: dict[str, int] = {}
    table, found = "", None
    for number, line in enumerate(text.split("\n"), 1):
        if header := TOML_HEADER.match(line):
            name = ".".join(part.strip(" \t\"'") for part in header[2].split("."))
            above = max((one for one in counts if name.startswith(f"{one}.")), key=len, default=None)
            name = name if above is None else f"{above}.{counts[above]}{name.removeprefix(above)}"
            if header[1] == "[[":
                found = found or (number if name == field else None)
                counts[name] = counts.get(name, -1) + 1
                name = f"{name}.{counts[name]}"
            table = name
            if field == table or field.startswith(f"{table}."):
                found = number
        elif key := TOML_KEY.match(line):
            path = ".".join(filter(None, (table, *(part.strip(" \t\"'") for part in key[1].split(".")))))
            if path == field:
                return number
            if field.startswith(f"{path}."):
                found = number
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError with a description of the problem and, if possible, the number of the line."""
    if found := next((found for found in LONG_KEY.finditer(text) if found["key"]), None):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key of more than {MAX_DEPTH} parts (at line {line})")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    check_depth(table)
    return table


def check_depth(value: Any, deepest: int = MAX_DEPTH) -> None:
    """Raise ValueError for lists and tables that are nested deeper than `deepest`. The check is not recursive, so it
    cannot overflow the stack."""
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
