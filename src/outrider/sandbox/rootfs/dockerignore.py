"""The files of a build context that its .dockerignore leaves out.

The rules are Docker's: there is one pattern per line; `#` begins a comment; `!` includes files again; the last matching
pattern decides; a pattern that matches a folder matches everything below it. All functions except `read_ignore` are
pure.
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
"""Names of the file with the patterns; the first that exists is read."""


class Pattern(msgspec.Struct, frozen=True):
    """A pattern. `names` has a regular expression for each name of the path, or None for `**`, which matches any number
    of folders. `takes_back` is True for a pattern that begins with `!`."""

    names: tuple[re.Pattern[str] | None, ...]
    takes_back: bool

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the path, or a folder that the path is in."""
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
    """The patterns of a context, and the file that they come from."""

    file: Path
    patterns: tuple[Pattern, ...] = ()

    @property
    def takes_back(self) -> bool:
        return any(pattern.takes_back for pattern in self.patterns)

    def leaves_out(self, path: str) -> bool:
        """Return whether a file or folder is left out. `path` is relative to the context, in POSIX form."""
        found = False
        for pattern in self.patterns:
            if pattern.takes_back is found and pattern.matches(path):
                found = not pattern.takes_back
        return found


def read_ignore(context: Path) -> Ignore:
    """Return the patterns of a context. If the context has no file of IGNORE_FILES, there are no patterns. Raises
    InvalidField with the file and the line."""
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
            path = "**"  # the pattern `.` stands for the whole context
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
    """Return the expression of one name of a pattern, or None for `**`. Raises ValueError for a `[` without a `]`, and
    for a backslash at the end."""
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
    return re.compile(fnmatch.translate(shell))  # expressions of `translate` take at most quadratic time
