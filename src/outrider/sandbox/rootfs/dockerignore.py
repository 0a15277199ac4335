"""Finds the files of a build context that .dockerignore excludes from an image.

The rules are those of Docker:

- Each line is a pattern, or a comment if it starts with `#`.
- A pattern after `!` includes files again.
- The last pattern that matches a path decides.
- A pattern that matches a folder matches everything in it.

All functions except `read_ignore` are pure.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from outrider.errors import InvalidField
from outrider.text_files import read_text_file

MAX_FILE = 1 << 20
MAX_PATTERNS = 1024
IGNORE_FILES = ("Dockerfile.dockerignore", ".dockerignore")
"""Possible names of the file with the patterns. Only the first one that exists is read."""


class Pattern(msgspec.Struct, frozen=True):
    """A line of .dockerignore. `names` has one regular expression for each part of the pattern between slashes. None
    stands for `**`, which matches any number of folders. `takes_back` is True if the pattern starts with `!`."""

    names: tuple[re.Pattern[str] | None, ...]
    takes_back: bool

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the path or one of the folders above it."""
        reached = self._beyond({0})
        for name in path.split("/"):
            reached = self._beyond({next for at in reached for next in self._after(at, name)})
            if len(self.names) in reached:
                return True
        return False

    def _after(self, at: int, name: str) -> Iterator[int]:
        if at < len(self.names):
            expression = self.names[at]
            if expression is None:
                yield at
            elif expression.fullmatch(name):
                yield at + 1

    def _beyond(self, reached: set[int]) -> set[int]:
        for at, expression in enumerate(self.names):
            if expression is None and at in reached:
                reached.add(at + 1)
        return reached


class Ignore(msgspec.Struct, frozen=True):
    """The patterns for a build context. `file` is the file that contains them."""

    file: Path
    patterns: tuple[Pattern, ...] = ()

    @property
    def takes_back(self) -> bool:
        return any(pattern.takes_back for pattern in self.patterns)

    def leaves_out(self, path: str) -> bool:
        """Return whether the patterns exclude a file or folder. `path` is relative to the build context, with
        slashes."""
        found = False
        for pattern in self.patterns:
            if pattern.takes_back is found and pattern.matches(path):
                found = not pattern.takes_back
        return found


def read_ignore(context: Path) -> Ignore:
    """Read the patterns for a build context. The result is empty if no file of IGNORE_FILES exists. Raises InvalidField
    for an invalid line."""
    for name in IGNORE_FILES:
        if (file := context / name).exists():
            text = read_text_file(file, field="dockerfile", limit=MAX_FILE)
            return Ignore(file, tuple(patterns(text.split("\n"), file)))
    return Ignore(context / IGNORE_FILES[-1])


def patterns(lines: Iterable[str], file: Path) -> Iterator[Pattern]:
    count = 0
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if line.startswith("#") or not bare:
            continue
        takes_back = bare.startswith("!")
        path = posixpath.normpath("/" + bare.removeprefix("!").strip()).lstrip("/")
        if not path:
            if takes_back or bare == "/":
                continue
            path = "**"  # the pattern `.` matches the whole context
        count += 1
        try:
            if count > MAX_PATTERNS:
                raise ValueError(f"more than {MAX_PATTERNS} patterns")
            yield Pattern(tuple(map(expression, path.split("/"))), takes_back)
        except (ValueError, re.error) as error:
            raise InvalidField(
                f"{file}, line {number}: {bare[:100]!r} is no pattern: {error}",
                field="dockerfile",
                hint="correct the line, or remove it",
            ) from error


def expression(name: str) -> re.Pattern[str] | None:
    """Convert one part of a pattern to a regular expression, or to None for `**`. Raises ValueError for a `[` without a
    `]`, and for a backslash at the end."""
    if name == "**":
        return None
    shell, at = "", 0
    while at < len(name):
        char = name[at]
        at += 1
        if char == "\\":
            if at == len(name):
                raise ValueError("it ends with a backslash")
            shell += f"[{name[at]}]"
            at += 1
        elif char == "[":
            end = name.find("]", at)
            if end < 0:
                raise ValueError("[ has no ]")
            inside = name[at:end]
            shell += f"[!{inside[1:]}]" if inside.startswith("^") else f"[{inside}]"
            at = end + 1
        else:
            shell += char
    return re.compile(fnmatch.translate(shell))  # matching takes at most quadratic time
