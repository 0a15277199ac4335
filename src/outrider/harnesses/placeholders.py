"""Fills in the {placeholders} of a preset's or a task's texts. The module is pure.

Invariant: only the given names are replaced. Each text is scanned once, so that values are never scanned. Other braces,
such as in JSON, are unchanged.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal


class Verbatim(str):
    """A value that is never escaped, because it is already a piece of JSON."""


def _in_json_string(value: str) -> str:
    """Escape a value for a JSON string. The escapes are also valid in a basic string of TOML."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


def yaml_string(value: str) -> Verbatim:
    """Return a value as a double-quoted string of YAML. Characters that YAML might refuse or take for a line break are
    escaped."""

    def escaped(char: str) -> str:
        if char in '"\\':
            return f"\\{char}"
        return char if char.isprintable() else f"\\U{ord(char):08x}"

    return Verbatim('"{}"'.format("".join(map(escaped, value))))


_ESCAPES: dict[str, Callable[[str], str]] = {".json": _in_json_string, ".toml": _in_json_string}


def fill(text: str, words: Mapping[str, str], *, escape: Callable[[str], str] = str) -> str:
    """Return `text` with `{word}` replaced by its escaped value, for every word of `words`."""
    if not words:
        return text
    pattern = "|".join(re.escape(word) for word in words)

    def value_of(match: re.Match[str]) -> str:
        value = words[match[1]]
        return value if isinstance(value, Verbatim) else escape(value)

    return re.sub(rf"\{{({pattern})\}}", value_of, text)


def fill_file(path: str, text: str, words: Mapping[str, str]) -> str:
    """Fill in the text of a file. The suffix of `path` determines the file's format. Values are escaped for a string in
    this format."""
    return fill(text, words, escape=_ESCAPES.get(PurePosixPath(path).suffix, str))


def merged(path: str, text: str, added: Iterable[str]) -> str:
    """Return the text of a file with the texts in `added` merged into it. All placeholders have already been filled in.
    If `added` is empty, the text is unchanged.

    In a .json file, objects and lists are joined at every depth, and a later text overrides other values. Lines added
    to a .toml file come first, so that they are not part of a table. Any other text is appended.
    """
    added = tuple(added)
    if not added:
        return text
    match PurePosixPath(path).suffix:
        case ".json":
            whole = functools.reduce(_merge, map(json.loads, (text or "{}", *added)))
            return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
        case ".toml":
            return "\n".join((*added, text))
        case _:
            return "\n".join((text, *added)) if text else "\n".join(added)


def _merge(base: Any, more: Any) -> Any:
    if isinstance(base, list) and isinstance(more, list):
        return base + more
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return base | {key: _merge(base[key], value) if key in base else value for key, value in more.items()}


def filled_size(path: str, text: str, words: Mapping[str, str]) -> int:
    """Return an upper bound of the length of `fill_file`'s result, without building the result."""
    escape = _ESCAPES.get(PurePosixPath(path).suffix, str)
    return len(text) + sum(text.count(f"{{{word}}}") * len(escape(value)) for word, value in words.items())


def names_in(texts: Iterable[str], kind: Literal["option", "dialect"]) -> frozenset[str]:
    """Return every name x in placeholders `{option.x}` or `{dialect.x}`. `kind` chooses one of the two forms."""
    return frozenset(name for text in texts for name in re.findall(rf"\{{{kind}\.([A-Za-z0-9_.-]+)\}}", text))
