"""What the command line writes: text for people, one JSON document for programs, and each error in one line.

It knows no service. Invariant: with `json` set, standard output holds exactly one JSON document; everything else goes
to standard error.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from outrider.errors import ErrorRecord

WIDTH_OF_A_FILE = 240
"""Columns where the output is not a terminal: wide enough that no table is cut."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """`out` is standard output, `err` standard error. Colours are used only on terminals."""

    def __init__(self) -> None:
        self.json = False
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr, stderr=True)

    def note(self, text: str) -> None:
        """Write a line for people to standard error."""
        self.err.print(Text(printable(text)), soft_wrap=True)

    def write_json(self, value: Any) -> None:
        """Write the one JSON document: any value that msgspec can encode."""
        self.out.file.write(msgspec.json.encode(value).decode() + "\n")
        self.out.file.flush()

    def error(self, record: ErrorRecord) -> None:
        """Write a line `error: ...` that names the field, a line `hint: ...`, and with --json a JSON document."""
        named = f"{record.field}: " if record.field and record.field not in record.message else ""
        self._line("error", f"{named}{record.message}", "bold red")
        if record.hint:
            self._line("hint", record.hint, "cyan")
        if record.log_tail:
            self.note(record.log_tail.rstrip())
        if self.json:
            self.write_json({"error": record})

    def _line(self, word: str, text: str, style: str) -> None:
        # In one line, so that scripts can take the first line of standard error for the whole message.
        line = Text(f"{word}: ", style=style) + Text(printable(text).replace("\n", " "), style="default")
        self.err.print(line, soft_wrap=True)


def terminal_of(ctx: typer.Context) -> Terminal:
    """The Terminal that `main` made for this command."""
    terminal = ctx.find_object(Terminal)
    assert terminal is not None
    return terminal


def printable(text: str) -> str:
    """The text with its control characters, all but tab and newline, written as \\xNN. What a program in a sandbox
    printed could otherwise control the user's terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    width = None if stream.isatty() else WIDTH_OF_A_FILE
    # Without markup: tasks and programs print text in [brackets], which rich would take for styles.
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
