"""The certification of Qwen Code in each of its dialects, including its sub-agent in the background."""

from __future__ import annotations

import pytest

from .certified import OTHER_DIALECT, STREAMED, SUB_AGENT, assert_one_conversation, certified

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("dialect", "rows"),
    [
        ("chat", (*STREAMED, SUB_AGENT)),
        pytest.param("messages", OTHER_DIALECT, marks=pytest.mark.nightly),
        pytest.param("gemini", OTHER_DIALECT, marks=pytest.mark.nightly),
    ],
)
async def test_qwen_code_is_certified(dialect: str, rows: tuple[str, ...]) -> None:
    for row in (await certified("qwen-code", rows, dialect=dialect)).values():
        assert_one_conversation(row)
