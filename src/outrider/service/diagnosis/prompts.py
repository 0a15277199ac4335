"""Compares the beginnings of two conversations line by line, and finds the first line that differs.

If a line near the beginning of a prompt has a date, a folder or an id, the line may differ between the sessions of a
group. The sessions then share the engine's prefix cache only up to that line. Invariant: the time of a comparison is
linear in the length of the texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role
from outrider.redaction import without_keys

HEAD_CHARACTERS = 100_000
"""At most this many characters at the beginning of a conversation are compared."""
SHOWN_CHARACTERS = 160
"""Maximum number of characters of a line that are shown."""
SIMILAR = 0.5
"""Two texts count as versions of the same prompt if at least this share of their lines is equal. If each text has only
one line, the share of equal characters counts. Texts with less in common are taken for prompts of different agents."""

KINDS: Sequence[tuple[str, re.Pattern[str]]] = (
    (
        "date or time",
        re.compile(
            r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
            r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
            r"|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d{1,2}\b",
            re.IGNORECASE,
        ),
    ),
    ("id", re.compile(r"(?<![\w])(?=[0-9a-f-]*\d)[0-9a-f]{6,}(?:-[0-9a-f]{2,})*(?![\w])|\b[gs]-[0-9a-z-]{6,}", re.I)),
    ("path", re.compile(r"(?:~|\.{0,2})/[\w.~-]|[A-Za-z]:\\")),
    ("number", re.compile(r"\d")),
)
"""Kinds of changes, each with a pattern. A change has the first kind whose pattern matches the changed words, or the
kind "text" if no pattern matches."""


class ChangedLine(msgspec.Struct, frozen=True):
    """The first line that differs between two versions of a prompt. `number` counts from 1. `before` and `after` are
    the parts of the line around the difference, without session keys. `kind` is one of KINDS, or "text"."""

    number: int
    before: str
    after: str
    kind: str


def head_of(messages: Sequence[Message]) -> str:
    """Return the beginning of a conversation: the system prompt, and the user messages before the first reply."""
    texts = []
    size = 0
    for message in messages:
        if message.role not in (Role.SYSTEM, Role.USER) or size >= HEAD_CHARACTERS:
            break
        texts.append(message.content)
        size += len(message.content)
    return "\n".join(texts)[:HEAD_CHARACTERS]


def system_of(messages: Sequence[Message]) -> str:
    """Return the system prompt, or "" if there is none."""
    first = messages[0] if messages else None
    return first.content[:HEAD_CHARACTERS] if first is not None and first.role is Role.SYSTEM else ""


def changed_line(before: str, after: str) -> ChangedLine | None:
    """Return the first line that differs between two versions of a prompt. Returns None if the texts are equal, or too
    different to be versions of one prompt (`SIMILAR`)."""
    if before == after:
        return None
    old, new = before.split("\n"), after.split("\n")
    longest = max(len(old), len(new))
    equal = sum(first == second for first, second in zip(old, new, strict=False))
    if len(old) != len(new):  # a line was added or removed, so equal lines are counted from both ends
        start = _common(old, new)
        equal = start + min(_common(old[::-1], new[::-1]), min(len(old), len(new)) - start)
    alike = _alike(before, after) if longest == 1 else equal / longest
    if alike < SIMILAR:
        return None
    at = _common(old, new)
    first, second = old[at] if at < len(old) else "", new[at] if at < len(new) else ""
    shown = _around(without_keys(first), without_keys(second))
    return ChangedLine(at + 1, *shown, _kind(first, second))


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the beginning that two sequences have in common."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


def _alike(first: str, second: str) -> float:
    """Return how similar two lines are: the share of characters that are equal at the beginning and the end."""
    start = _common(first, second)
    end = min(_common(first[::-1], second[::-1]), min(len(first), len(second)) - start)
    return (start + end) / max(len(first), len(second), 1)


def _words(first: str, second: str) -> tuple[str, str, int]:
    """Return the words that differ in each line, and the position at which they begin."""
    start = _common(first, second)
    while start and not first[start - 1].isspace():
        start -= 1
    end = min(_common(first[::-1], second[::-1]), min(len(first), len(second)) - start)
    while end and not first[len(first) - end].isspace():
        end -= 1
    return first[start : len(first) - end], second[start : len(second) - end], start


def _kind(first: str, second: str) -> str:
    old, new, _ = _words(first, second)
    for name, pattern in KINDS:
        if pattern.search(old) or pattern.search(new):
            return name
    return "text"


def _around(first: str, second: str) -> tuple[str, str]:
    """Shorten both lines to the part that is shown. It begins a little before the difference."""
    start = max(0, _words(first, second)[2] - SHOWN_CHARACTERS // 2)
    end = start + SHOWN_CHARACTERS
    mark = "…" if start else ""
    shown, other = (mark + line[start:end] + ("…" if len(line) > end else "") for line in (first, second))
    return shown, other
