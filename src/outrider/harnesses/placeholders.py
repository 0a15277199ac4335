"""Fills in the {placeholders} of a preset's or a task's texts. The module is pure.

Invariant: only the given names are replaced, and each text is scanned once, so that values are never scanned, and other
braces, such as in JSON, are unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Literal


def _in_json_string(value: str) -> str:
    """Escape a value for a JSON string. The escapes are also valid in a basic string of TOML."""
    return json.dumps(value, ensure_ascii=False)[1:-1]


_ESCAPES: dict[str, Callable[[str], str]] = {".json": _in_json_string, ".toml": _in_json_string}


def fill(text: str, words: Mapping[str, str], *, escape: Callable[[str], str] = str) -> str:
    """Return `text` with `{word}` replaced by its escaped value, for every word of `words`."""
    if not words:
        return text
    pattern = "|".join(re.escape(word) for word in words)
    return re.sub(rf"\{{({pattern})\}}", lambda match: escape(words[match[1]]), text)


def fill_file(path: str, text: str, words: Mapping[str, str]) -> str:
    """Fill in the text of a file. Values are escaped for a string of the file's format, which is determined by the
    suffix of `path`."""
    return fill(text, words, escape=_ESCAPES.get(PurePosixPath(path).suffix, str))


def filled_size(path: str, text: str, words: Mapping[str, str]) -> int:
    """Return an upper bound of the length of `fill_file`'s result, without computing the result."""
    escape = _ESCAPES.get(PurePosixPath(path).suffix, str)
    return len(text) + sum(text.count(f"{{{word}}}") * len(escape(value)) for word, value in words.items())


def names_in(texts: Iterable[str], kind: Literal["option", "dialect"]) -> frozenset[str]:
    """Return every name x in a placeholder `{option.x}` or `{dialect.x}`, depending on `kind`."""
    return frozenset(name for text in texts for name in re.findall(rf"\{{{kind}\.([A-Za-z0-9_.-]+)\}}", text))
