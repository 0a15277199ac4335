"""OpenCode in each of its dialects: the certification's rows, each with the call that asks for a title beside it."""

from __future__ import annotations

import pytest

from .certified import assert_passed, certified

pytestmark = pytest.mark.real


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])
async def test_opencode_is_certified(dialect: str) -> None:
    rows = await certified("opencode", dialect=dialect, without=("tool-error", "whitespace", "unknown-tool"))
    for name, row in rows.items():
        assert_passed(row)
        assert row.forks == {}, f"{name}: what it sends back is what the model said"
        helpers = {"subagent": 1} if name == "sub-agent" else {}
        assert row.branches == {"main": 1, "auxiliary": 1, **helpers}, name
    assert rows["three-turns"].turns == 4, "three of the task, and the title"


async def test_a_call_of_a_tool_it_does_not_have_comes_back_as_another_call() -> None:
    others = ("three-turns", "streaming", "reasoning", "json-spacing", "unicode", "whitespace", "long-output")
    more = ("parallel-calls", "tool-error", "malformed-call", "sub-agent")
    [row] = (await certified("opencode", without=(*others, *more))).values()
    assert_passed(row)
    assert row.forks == {"history_rewritten": 1}
