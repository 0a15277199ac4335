"""Filling {words} into a preset's or a task's texts. Pure.

Only the exact words it is given are replaced, each text is scanned once, and what was filled in is never
scanned again: other braces, such as JSON's, pass unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

_OPTION = re.compile(r"\{option\.([A-Za-z0-9_.-]+)\}")
_DIALECT = re.compile(r"\{dialect\.([A-Za-z0-9_.-]+)\}")


def _verbatim(value: str) -> str:
    return value


def _in_json_string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


_ESCAPES: dict[str, Callable[[str], str]] = {".json": _in_json_string, ".toml": _in_json_string}


def fill(text: str, words: Mapping[str, str], *, escape: Callable[[str], str] = _verbatim) -> str:
    """`text` with every `{word}` of `words` replaced by its escaped value."""
    if not words:
        return text
    pattern = "|".join(re.escape(word) for word in words)
    return re.sub(rf"\{{({pattern})\}}", lambda match: escape(words[match[1]]), text)


def fill_file(path: str, text: str, words: Mapping[str, str]) -> str:
    """`fill` for the text of a file: values are escaped as its format (by suffix) wants them in a string."""
    return fill(text, words, escape=_ESCAPES.get(PurePosixPath(path).suffix, _verbatim))


def filled_size(path: str, text: str, words: Mapping[str, str]) -> int:
    """How long `fill_file` would make it, at the most, without doing it."""
    escape = _ESCAPES.get(PurePosixPath(path).suffix, _verbatim)
    return len(text) + sum(text.count(f"{{{word}}}") * len(escape(value)) for word, value in words.items())


def options_in(texts: Iterable[str]) -> frozenset[str]:
    """The names x of every `{option.x}` in the texts."""
    return frozenset(name for text in texts for name in _OPTION.findall(text))


def dialect_words_in(texts: Iterable[str]) -> frozenset[str]:
    """The names x of every `{dialect.x}` in the texts."""
    return frozenset(name for text in texts for name in _DIALECT.findall(text))
