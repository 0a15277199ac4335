"""Replaces the {placeholders} in texts of a preset or a task. The module is pure.

Invariant: only the given names are replaced. Each text is scanned once, so placeholders within values stay. Other
braces, such as those of JSON, also stay.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal


class Verbatim(str):
    """A value that is inserted without escapes, because it is already JSON or YAML."""


def _in_json_string(value: str) -> str:
    """Return a value with the escapes of a JSON string. They are also valid in a basic string of TOML, which requires
    that DEL is escaped, too."""
    return json.dumps(value, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def yaml_string(value: str) -> Verbatim:
    """Return a value as a double-quoted YAML string. Characters that YAML might refuse or treat as a line break are
    escaped."""

    def escaped(char: str) -> str:
        if char in '"\\':
            return f"\\{char}"
        return char if char.isprintable() else f"\\U{ord(char):08x}"

    return Verbatim('"{}"'.format("".join(map(escaped, value))))


_ESCAPES: dict[str, Callable[[str], str]] = {".json": _in_json_string, ".toml": _in_json_string}


def fill(text: str, words: Mapping[str, str], *, escape: Callable[[str], str] = str) -> str:
    """Return `text` with every `{word}` replaced by the escaped value of that word in `words`."""
    if not words:
        return text
    pattern = "|".join(re.escape(word) for word in words)

    def value_of(match: re.Match[str]) -> str:
        value = words[match[1]]
        return value if isinstance(value, Verbatim) else escape(value)

    return re.sub(rf"\{{({pattern})\}}", value_of, text)


def fill_file(path: str, text: str, words: Mapping[str, str]) -> str:
    """Replace the placeholders in the text of a file. Values are escaped for a string in the file's format. The suffix
    of `path` determines the format."""
    return fill(text, words, escape=_ESCAPES.get(PurePosixPath(path).suffix, str))


def merged(path: str, text: str, added: Iterable[str]) -> str:
    """Return the text of a file with the texts in `added` merged into it. All placeholders have already been replaced.

    In a .json file, objects and lists are joined at every depth, and any other value is overridden by later texts. In a
    .toml file, added lines come first, so that they do not become part of a table. In any other file, added lines come
    last.
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
    """Return an upper bound for the length of what `fill_file` would return, without building it."""
    escape = _ESCAPES.get(PurePosixPath(path).suffix, str)
    return len(text) + sum(text.count(f"{{{word}}}") * len(escape(value)) for word, value in words.items())


def names_in(texts: Iterable[str], kind: Literal["option", "dialect"]) -> frozenset[str]:
    """Return the names x in all placeholders `{option.x}` or, if `kind` is "dialect", `{dialect.x}`."""
    return frozenset(name for text in texts for name in re.findall(rf"\{{{kind}\.([A-Za-z0-9_.-]+)\}}", text))
