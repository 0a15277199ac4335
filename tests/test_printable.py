"""Foreign text on a terminal and in the log. It does not control the terminal, and forges no lines of the log."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.cli.terminal import Terminal
from outrider.errors import Boundary, ErrorRecord
from outrider.logs import LogFormatter
from outrider.printable import indented, printable, printable_json

HOSTILE = {
    "escape": "\x1b[2J",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "C1": "\x9b31m\x90",
    "NEL": "a\x85b",
    "return": "harmless\rowned",
    "backspace": "\b\b\b",
    "bidi": "\u202egpj.exe\u202c",
    "isolate": "\u2066a\u2069\u2067b\u2069\u2068",
    "marks": "\u200e\u200f\u061c",
    "lines": "a\u2028b\u2029c",
    "unseen": "\u200b\u2060\ufeff\U000e0041",
    "half": "\ud800",
}
KEPT = "a\tb\nc é 漢 \U0001f469\u200d\U0001f4bb שלום ]8;; \\x1b"


def is_safe(text: str) -> bool:
    controls = {"Cc", "Zl", "Zp", "Cs"}
    return not any(
        (unicodedata.category(char) in controls and char not in "\t\n")
        or unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        or char in "\u200e\u200f\u061c"
        for char in text
    )


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_controls_are_written_out(text: str) -> None:
    shown = printable(text)
    assert is_safe(shown)
    assert shown != text


def test_each_is_written_as_python_would() -> None:
    assert printable("\x1b\x9b\u202e\U000e0041\ud800") == r"\x1b\x9b\u202e\U000e0041\ud800"
    assert printable_json('"\u202e\U000e0041"') == r'"\u202e\udb40\udc41"'


def test_what_people_write_stays() -> None:
    assert printable(KEPT) == KEPT
    assert json.loads(printable_json(json.dumps(KEPT, ensure_ascii=False))) == KEPT


@given(st.text())
def test_json_keeps_its_value(text: str) -> None:
    shown = printable_json(json.dumps({"a": text}, ensure_ascii=False))
    assert json.loads(shown) == {"a": text}
    assert is_safe(shown)
    assert is_safe(printable(text))


def shown_by(show: Callable[[Terminal, str], None], text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    show(Terminal(), text)
    return out.getvalue()


def in_table(terminal: Terminal, text: str) -> None:
    table = Table(text, title=text)
    table.add_row(text)
    terminal.out.print(table)


def as_error(terminal: Terminal, text: str) -> None:
    record = ErrorRecord(
        boundary=Boundary.REQUEST, code="x", message=text, retryable=False, field=text, hint=text, log_tail=text
    )
    terminal.error(record)
    terminal.json = True
    terminal.error(record)


WAYS: dict[str, Callable[[Terminal, str], None]] = {
    "text": lambda terminal, text: terminal.out.print(Text(text), text, Text(text, style="bold")),
    "soft": lambda terminal, text: terminal.err.print(text, soft_wrap=True),
    "table": in_table,
    "panel": lambda terminal, text: terminal.out.print(Panel(text, title=text)),
    "note": lambda terminal, text: terminal.note(text),
    "error": as_error,
    "json": lambda terminal, text: terminal.write_json({text: [text]}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "half"])
def test_nothing_that_is_printed_has_controls(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_safe(shown_by(WAYS[way], HOSTILE[name], monkeypatch))


def test_json_on_the_terminal_has_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {name: text for name, text in HOSTILE.items() if name != "half"}
    assert msgspec.json.decode(shown_by(lambda terminal, _: terminal.write_json(value), "", monkeypatch)) == value


def test_a_message_is_one_record_of_the_log() -> None:
    forged = "gone\n2026-11-26 00:00:00,000 INFO    outrider.session: session s is done\r\x1b[2K\u202e"
    try:
        raise ValueError(forged)
    except ValueError:
        caught = sys.exc_info()
    for formatter in (LogFormatter(), LogFormatter("a-secret-token"), LogFormatter(process="node 100%")):
        record = logging.LogRecord("outrider.session", logging.ERROR, "", 0, "%s failed", (forged,), caught)
        first, *others = formatter.format(record).split("\n")
        assert first.endswith("gone")
        assert "outrider.session: session s is done" in others[0]
        assert all(line.startswith("    ") for line in others)
        assert all(map(is_safe, (first, *others)))
    assert indented("a\nb\n") == "a\n    b\n    "
