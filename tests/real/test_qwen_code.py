"""Qwen Code in each of its dialects: the certification's rows, its sub-agent in the background among them."""

from __future__ import annotations

import pytest

from .certified import assert_passed, certified

pytestmark = pytest.mark.real


@pytest.mark.parametrize("dialect", ["chat", "messages", "gemini"])
async def test_qwen_code_is_certified(dialect: str) -> None:
    rows = await certified("qwen-code", dialect=dialect, without=("tool-error", "whitespace"))
    for name, row in rows.items():
        assert_passed(row)
        assert row.forks == {}, f"{name}: what it sends back is what the model said"
        assert row.branches == ({"main": 1, "subagent": 1} if name == "sub-agent" else {"main": 1})
    assert rows["three-turns"].turns == 3
