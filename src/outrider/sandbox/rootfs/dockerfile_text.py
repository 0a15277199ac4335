"""Splits a Dockerfile into instructions, and an instruction into words. It reads no files and builds nothing.

Invariant: only a newline ends a line, and the line number of an instruction is that of its first line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

import msgspec

DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
HERE_DOCUMENT = re.compile(r"\d*<<(-?)([\"']?)([A-Za-z0-9_.]+)\2")
WITH_DOCUMENTS = frozenset({"RUN", "COPY", "ADD"})
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^{}]*))?\})")
MAX_VALUES = 128 << 10
"""Maximum characters of all variables of one kind together (ARG before FROM, other ARG, ENV), and of all values filled
into one instruction. Linux does not support longer variables. The limit also stops a series of variables that each
contain the previous one twice, and so double in length."""
LITERAL = "\0"
"""The placeholder for a literal $ until the variables have been filled in."""


class BadText(ValueError):
    """A Dockerfile has invalid syntax. `line` is the number of the first invalid line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class HereDocument(msgspec.Struct, frozen=True):
    """A here-document of an instruction.

    `word`: the word that starts it, such as `<<-"EOF"`.
    `name`: its delimiter, such as `EOF`.
    `raw`: True if the delimiter is quoted. Variables in the text are then not replaced.
    `body`: the text, without leading tabs if `word` contains a dash.
    `text`: all lines as written, including the line with the delimiter.
    """

    word: str
    name: str
    raw: bool
    body: str
    text: str


class Instruction(msgspec.Struct, frozen=True):
    line: int
    name: str
    text: str
    documents: tuple[HereDocument, ...] = ()


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. Lines that end with a backslash are joined with the next line, and
    comments are removed. Raises BadText."""
    parts: list[str] = []
    begin = 0
    directives = True
    lines = enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    for number, line in lines:
        bare = line.strip()
        if directives and (directive := DIRECTIVE.fullmatch(bare)):
            if directive[1].lower() == "escape" and directive[2] != "\\":
                raise BadText(number, "another escape character is not supported here")
            continue
        directives = False
        if not bare or bare.startswith("#"):
            continue
        begin = begin or number
        if bare.endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        name, *rest = "".join((*parts, line)).split(maxsplit=1)
        name, rest_text = name.upper(), rest[0].strip() if rest else ""
        documents = tuple(_documents(rest_text, lines, begin)) if name in WITH_DOCUMENTS else ()
        yield Instruction(begin, name, rest_text, documents)
        parts, begin = [], 0
    if parts:
        raise BadText(begin, "the last line ends with a backslash, but no line follows")


def _documents(text: str, lines: Iterator[tuple[int, str]], begin: int) -> Iterator[HereDocument]:
    """Yield the here-documents that an instruction starts. Their lines are taken from `lines`."""
    if "<<" not in text or json_list(text):
        return
    words = shlex.shlex(text, posix=False)
    words.whitespace_split, words.commenters = True, ""
    try:
        opened = list(words)
    except ValueError:  # unbalanced quotes; the shell in the sandbox will report them
        opened = text.split()
    for word in opened:
        if not (match := HERE_DOCUMENT.fullmatch(word)):
            continue
        written, body = [], []
        for _, line in lines:
            written.append(line)
            line = line.removesuffix("\r")
            line = line.lstrip("\t") if match[1] else line
            if line == match[3]:
                break
            body.append(f"{line}\n")
        else:
            raise BadText(begin, f"the here-document {match[3]} has no end")
        yield HereDocument(word, match[3], bool(match[2]), "".join(body), "\n".join(written))


def split(text: str) -> list[str]:
    """Split a text into words, as a shell does. A $ in single quotes or after a backslash becomes LITERAL. Raises
    ValueError."""
    if LITERAL in text:
        raise ValueError("the text has a NUL")
    text = re.sub(r"\\\$", LITERAL, text)
    text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("$", LITERAL), text)
    return shlex.split(text)


def filled_words(words: Iterable[str], variables: Mapping[str, str]) -> list[str]:
    """Replace variables by their values. The supported forms are $NAME, ${NAME}, ${NAME:-WORD}, ${NAME:+WORD},
    ${NAME-WORD} and ${NAME+WORD}. An unset variable is empty. Raises ValueError for any other form, and if the values
    together have more than MAX_VALUES characters."""
    room = MAX_VALUES

    def value(match: re.Match[str]) -> str:
        nonlocal room
        known, operator, word = variables.get(match[1] or match[2]), match[3] or "", match[4]
        is_set = bool(known) if ":" in operator else known is not None
        if "+" in operator:
            found = word if is_set else ""
        elif "-" in operator and not is_set:
            found = word
        else:
            found = known or ""
        room -= len(found)
        if room < 0:  # checked here, before the long text is assembled
            raise ValueError(f"its variables have more than {MAX_VALUES} characters")
        return found

    words = list(words)
    for word in words:
        if (rest := VARIABLE.sub("", word)).find("${") >= 0:
            raise ValueError(
                f"{rest[rest.find('${') :][:60]!r} is not of the forms ${{NAME}}, ${{NAME:-TEXT}}, ${{NAME:+TEXT}}"
            )
    return [VARIABLE.sub(value, word).replace(LITERAL, "$") for word in words]


def json_list(text: str) -> tuple[str, ...] | None:
    """Return the items of a JSON list of strings, or None for anything else and for an empty list."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...]) or None
    except msgspec.DecodeError:
        return None
