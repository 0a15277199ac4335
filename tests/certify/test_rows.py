"""The table of rows is consistent: names, documentation, steps, and the word for the streaming row."""

from __future__ import annotations

import re

from docs.pages import code, page
from outrider.lab.certify.rows import FIRST_WORD, ROWS, row_named
from outrider.lab.certify.run import MODEL


def test_rows_are_named_once_and_found_by_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert re.fullmatch("[a-z-]+", row.name)
        assert row_named(row.name) is row
    assert row_named("none") is None


def test_the_documentation_has_every_row() -> None:
    [table] = page("docs/harnesses.md").tables("Row")
    rows = [(code(name), what) for name, what in table.rows]
    assert rows[0][0] == "version"
    assert rows[1:] == [(row.name, row.what) for row in ROWS]


def test_every_row_writes_its_file_first_and_can_end() -> None:
    for row in ROWS:
        assert any("out.txt" in action.command and action.write is not None for action in row.steps[0].actions)
        assert not row.steps[-1].actions, "the last step is said again and again: it must end the run"


def test_only_the_streaming_row_says_the_first_word_and_it_begins_with_it() -> None:
    [step] = [step for row in ROWS for step in row.steps if step.stall]
    assert step.text.startswith(FIRST_WORD)
    steps = [step for row in ROWS for step in row.steps]
    said = [text for step in steps for text in (step.text, step.think, *(action.command for action in step.actions))]
    said += [row.what for row in ROWS]
    assert sum(FIRST_WORD in text for text in said) == 1
    assert FIRST_WORD not in MODEL


def test_every_act_can_be_done_without_a_shell() -> None:
    for row in ROWS:
        for action in (action for step in row.steps for action in step.actions):
            assert action.write or action.read or action.look or action.note, f"{row.name}: {action.command}"
