"""The certification of programs without a test module of their own, in each of their dialects."""

from __future__ import annotations

import pytest

from .certified import OTHER_DIALECT, STREAMED, SUB_AGENT, assert_exact, assert_one_conversation, certified

pytestmark = pytest.mark.real

BRIEF = ("streaming", "reasoning", "unicode", SUB_AGENT)
"""Rows to test at every change. The other rows are tested nightly."""


@pytest.mark.parametrize("preset", ["copilot", "kimi-code"])
async def test_the_program_is_certified(preset: str) -> None:
    for row in (await certified(preset, BRIEF)).values():
        assert_one_conversation(row)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "dialect", "rows"),
    [
        ("copilot", "chat", STREAMED),
        ("copilot", "responses", (*OTHER_DIALECT, SUB_AGENT)),
        ("copilot", "messages", OTHER_DIALECT),
        ("kimi-code", "chat", STREAMED),
        ("kimi-code", "responses", OTHER_DIALECT),
        ("kimi-code", "messages", OTHER_DIALECT),
        ("kimi-code", "gemini", OTHER_DIALECT),
        ("hermes", "chat", (*STREAMED, SUB_AGENT)),
        ("hermes", "messages", OTHER_DIALECT),
        ("mistral-vibe", "chat", STREAMED),
        ("cline", "chat", (*STREAMED, SUB_AGENT)),
    ],
)
async def test_the_program_is_certified_in_each_dialect(preset: str, dialect: str, rows: tuple[str, ...]) -> None:
    for row in (await certified(preset, rows, dialect=dialect)).values():
        assert_one_conversation(row, typed=preset != "hermes")


@pytest.mark.nightly
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
async def test_openclaw_is_certified(dialect: str) -> None:
    """OpenClaw moves a note to the end of the history in each turn, so each turn becomes a separate training row. In
    the dialect `responses`, the history stays unchanged."""
    rewritten = set() if dialect == "responses" else {"history_rewritten"}
    for row in (await certified("openclaw", OTHER_DIALECT, dialect=dialect)).values():
        assert_exact(row)
        assert set(row.forks) == rewritten
