"""The output of commands: text for people or a JSON document for programs, and each error in one line.

The module does not use the service. Invariant: if `json` is set, exactly one JSON document is written to standard
output, and everything else to standard error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import click
import msgspec
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.text import Text

from outrider.errors import ErrorRecord
from outrider.printable import printable as printable
from outrider.printable import printable_json

WIDTH_OF_A_FILE = 240
"""Width in columns of an output that is not a terminal: wide enough that the rows of most tables need one line each."""


class Terminal:
    """The output streams of a command. `out` is standard output, `err` standard error. Colours are used only on
    terminals."""

    def __init__(self) -> None:
        self.json = False
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr, stderr=True)

    def note(self, text: str) -> None:
        """Write a line of text for people to standard error."""
        self.err.print(Text(printable(text)), soft_wrap=True)

    def write_json(self, value: Any) -> None:
        """Write `value` to standard output as the command's JSON document. msgspec must be able to encode it."""
        self.out.file.write(printable_json(msgspec.json.encode(value).decode()) + "\n")
        self.out.file.flush()

    def show(self, value: Any, *shown: RenderableType) -> None:
        """With --json, write `value` as the command's JSON document. Otherwise, print the tables and texts in
        `shown`."""
        if self.json:
            self.write_json(value)
            return
        for each in shown:
            self.out.print(each, soft_wrap=isinstance(each, str))

    def error(self, record: ErrorRecord) -> None:
        """Write a line `error: ...` that names the field, a line `hint: ...` and the end of the log. If the record has
        no field, hint or log, that part is left out. With --json, also write a JSON document."""
        mentioned = record.field and re.search(rf"\b{re.escape(record.field)}\b", record.message)
        named = f"{record.field}: " if record.field and not mentioned else ""
        self._line("error", f"{named}{record.message}", "bold red")
        if record.hint:
            self._line("hint", record.hint, "cyan")
        if record.log_tail:
            self.note(record.log_tail.rstrip())
        if self.json:
            self.write_json({"error": record})

    def _line(self, word: str, text: str, style: str) -> None:
        # Line breaks are replaced, so that scripts find the whole message in the first line of standard error.
        line = Text(f"{word}: ", style=style) + Text(printable(text).replace("\n", " "), style="default")
        self.err.print(line, soft_wrap=True)


def terminal_of(ctx: click.Context) -> Terminal:
    """Return the Terminal that `run_command` made for this command."""
    terminal = ctx.find_object(Terminal)
    assert terminal is not None
    return terminal


class _Printable(RenderHook):
    """Escapes control characters in everything that rich prints, after the layout and before colours are added. Text in
    table columns must already be escaped before the layout, because the escapes change its width."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printed(each) for each in renderables]


class _Printed:
    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for segment in console.render(self._inner, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    width = None if stream.isatty() else WIDTH_OF_A_FILE
    # Without markup, because rich would read text in [brackets] as a style. Tasks and programs print such text.
    console = Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
    console.push_render_hook(_Printable())
    return console
