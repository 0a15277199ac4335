"""The syntax of the small shell: text into tokens, tokens into a list of pipelines.

Pure. It knows quoting, `$NAME`, `${NAME}`, `$?`, comments, redirections, `|`, `&&`, `||` and `;`, and no more: no
substitution, no globs, no loops. Invariant: expansion happens at run time, so a word keeps how each part was quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

CONNECTORS = ("&&", "||", ";")
OPERATOR = re.compile(r"&&|\|\||\||;|\n|(?:[12]?>>|[12]?>&[12]|[12]?>|<)")
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*)|(\?))")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class ShellSyntaxError(ValueError):
    """The text is no command; the argument is what bash would say."""


class Part(msgspec.Struct, frozen=True):
    text: str
    expands: bool
    quoted: bool


class Word(msgspec.Struct, frozen=True):
    parts: tuple[Part, ...]

    @property
    def assigns(self) -> bool:
        return not self.parts[0].quoted and ASSIGNMENT.match(self.parts[0].text) is not None

    def value(self, variables: Mapping[str, str]) -> str:
        return "".join(_expanded(part.text, variables) if part.expands else part.text for part in self.parts)

    def vanishes(self, variables: Mapping[str, str]) -> bool:
        """An unquoted word that expands to nothing is no argument."""
        return not any(part.quoted for part in self.parts) and not self.value(variables)


class Simple(msgspec.Struct, frozen=True):
    """One command: its words, and its redirections as (operator, target) in order."""

    words: tuple[Word, ...]
    redirects: tuple[tuple[str, Word | None], ...]


class Pipeline(msgspec.Struct, frozen=True):
    """Run after the one before it if `connector` says so."""

    connector: str
    commands: tuple[Simple, ...]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1] or found[2] or found[3], ""), text)


def tokens(text: str) -> list[str | Word]:
    """Operators as text, words as Word. Raises ShellSyntaxError for an open quote."""
    found: list[str | Word] = []
    at = 0
    while at < len(text):
        operator = OPERATOR.match(text, at)
        if operator:
            found.append(";" if operator[0] == "\n" else operator[0])
            at = operator.end()
        elif text[at] in " \t\r":
            at += 1
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            word, at = _word(text, at)
            found.append(word)
    return found


def _word(text: str, at: int) -> tuple[Word, int]:
    parts: list[Part] = []
    while at < len(text) and text[at] not in " \t\r\n;|<>" and not text.startswith("&&", at):
        char = text[at]
        if char == "'":
            end = _closing(text, at, "'")
            parts.append(Part(text[at + 1 : end], expands=False, quoted=True))
            at = end + 1
        elif char == '"':
            end = _closing(text, at, '"')
            parts += _double(text[at + 1 : end])
            at = end + 1
        elif char == "\\":
            parts.append(Part(text[at + 1 : at + 2].replace("\n", ""), expands=False, quoted=True))
            at += 2
        else:
            end = at + 1
            while end < len(text) and text[end] not in " \t\r\n;|<>'\"\\&":
                end += 1
            parts.append(Part(text[at:end], expands=True, quoted=False))
            at = end
    return Word(tuple(parts)), at


def _closing(text: str, at: int, quote: str) -> int:
    end = at + 1
    while end < len(text) and text[end] != quote:
        end += 2 if quote == '"' and text[end] == "\\" else 1
    if end >= len(text):
        raise ShellSyntaxError(f"unexpected EOF while looking for matching `{quote}'")
    return end


def _double(text: str) -> list[Part]:
    pieces = re.split(r'\\(["\\$`])', text)
    return [
        Part(piece, expands=index % 2 == 0, quoted=True) for index, piece in enumerate(pieces) if piece or index == 0
    ]


def parse(text: str) -> list[Pipeline]:
    """Raises ShellSyntaxError with the text bash would print."""
    pipelines: list[Pipeline] = []
    connector = ";"
    commands: list[Simple] = []
    current: list[str | Word] = []
    for token in [*tokens(text), ";"]:
        if token == "|" or token in CONNECTORS:
            if current:
                commands.append(_simple(current))
            elif commands or token != ";" or connector != ";":
                raise ShellSyntaxError(f"syntax error near unexpected token `{token}'")
            current = []
            if token != "|" and commands:
                pipelines.append(Pipeline(connector, tuple(commands)))
                commands = []
                connector = str(token)
        else:
            current.append(token)
    return pipelines


def _simple(items: list[str | Word]) -> Simple:
    words: list[Word] = []
    redirects: list[tuple[str, Word | None]] = []
    rest = iter(items)
    for item in rest:
        if isinstance(item, Word):
            words.append(item)
        elif "&" in item:
            redirects.append((item, None))
        else:
            target = next(rest, None)
            if not isinstance(target, Word):
                raise ShellSyntaxError("syntax error near unexpected token `newline'")
            redirects.append((item, target))
    return Simple(tuple(words), tuple(redirects))
