"""Tables in a terminal of 80 columns: no cell is cut."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from outrider.cli.tables import STAGES, table

NAMES = ("session", "state", "reward>", "turns>", "tokens>", *STAGES, "error")


def printed(shown: RenderableType, width: int) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=width, highlight=False).print(shown)
    return written.getvalue().splitlines()


@pytest.mark.parametrize("state", ["completed", "context_overflow"])
def test_a_session_fits_80_columns(state: str) -> None:
    row = ("s-6614d9882bddc6aa-0", state, 0.25, 10, 88, 0.06, 1.03, 12.4, 0.29, "")
    lines = printed(table(NAMES, [row]), 80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    for cell in ("s-6614d9882bddc6aa-0", state, "0.25", "12.40", "0.29"):
        assert cell in " ".join(lines)


def test_a_long_error_is_wrapped_and_whole() -> None:
    error = "engine_unavailable: no engine answered in time, and each of the four attempts ended so"
    row = ("s-6614d9882bddc6aa-0", "error", None, 10, 88, 0.06, 1.03, 12.4, 0.29, error)
    shown = " ".join(" ".join(printed(table(NAMES, [row]), 80)).split())
    assert error in shown


def test_a_file_has_one_line_for_each_row() -> None:
    error = "engine_unavailable: " + "no engine answered in time " * 3
    header, _, *rows = printed(table(NAMES, [("s-0", "error", None, 1, 2, 0.1, 0.2, 0.3, 0.4, error)] * 3), 240)
    assert header.split()[:5] == ["session", "state", "reward", "turns", "tokens"]
    assert len(rows) == 3


@given(
    st.lists(st.tuples(st.text("abc", max_size=60), st.integers(0, 10**9), st.text("xyz", max_size=90)), max_size=3),
    st.integers(30, 120),
)
def test_no_cell_is_cut(rows: list[tuple[str, int, str]], width: int) -> None:
    lines = printed(table(("first", "second count>", "third"), rows), width)
    assert all(len(line) <= width for line in lines)
    shown = re.sub(r"[^a-z0-9]", "", "".join(lines))
    for first, count, third in rows:
        assert all(shown.count(letter) >= first.count(letter) for letter in "abc")
        assert str(count) in " ".join(lines)
        assert all(shown.count(letter) >= third.count(letter) for letter in "xyz")


def test_tabs_and_line_breaks_leave_the_columns_aligned() -> None:
    lines = printed(table(("name", "n>", "what"), [("a\tb", 1, "x"), ("two\nlines", 22, "y\tz"), ("c", 3, "")]), 80)
    assert [line.rstrip() for line in lines if "─" not in line] == [
        "name        n  what",
        "a       b   1  x",
        "two        22  y       z",
        "lines",
        "c           3",
    ]
