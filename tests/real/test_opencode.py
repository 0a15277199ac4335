"""The certification of OpenCode in each of its dialects, and the call in which OpenCode requests a title."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.trajectory import BranchKind

from .certified import OTHER_DIALECT, STREAMED, SUB_AGENT, assert_exact, certified
from .rollout import END, Row, a_world, call

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installed")]

PRESET = "opencode"
DELTA = r'"content":"([^"]*)"'


@pytest.mark.parametrize("policy", ["drop", pytest.param("mask", marks=pytest.mark.nightly)])
async def test_its_title_is_a_side_call_that_goes_where_the_task_says(
    policy: str, policy_folder: Path, tmp_path: Path
) -> None:
    """By default, the title's tokens are dropped."""
    replies: list[str | dict[str, Any]] = [
        {"when": "Generate a title for this conversation", "reply": "A file that says hello" + END},
        "Writing it now." + call("bash", command="echo hello > out.txt", description="write") + END,
        {"reply": "The file is written and says hello." + END, "stall": 8},
    ]
    task: dict[str, Any] = {} if policy == "drop" else {"branches": {"auxiliary": policy}}
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run_through_a_stall(PRESET, "The file", DELTA, **task)
    [title] = [turn for turn in rollout.turns if turn.kind == "auxiliary"]
    main = tuple(turn.index for turn in rollout.turns if turn is not title)
    assert (title.label, title.depth, title.join) == ("title", 1, "root")
    tokens = title.output_tokens
    asked_by = next((turn for turn in reversed(main) if turn < title.index), None)
    row = Row(BranchKind.AUXILIARY, (title.index,), asked_by, 1, "title", 0)
    assert rollout.rows() == [
        Row(BranchKind.MAIN, main, None, 0, "", rollout.said(*main)),
        *([] if policy == "drop" else [row]),
    ]
    result = rollout.session.result
    assert result is not None
    counted = (result.tokens.dropped, result.tokens.masked)
    assert counted == ((tokens, 0) if policy == "drop" else (0, tokens))


@pytest.mark.parametrize(
    ("dialect", "rows"),
    [
        ("chat", (*STREAMED, SUB_AGENT)),
        pytest.param("responses", OTHER_DIALECT, marks=pytest.mark.nightly),
        pytest.param("messages", OTHER_DIALECT, marks=pytest.mark.nightly),
        pytest.param("gemini", OTHER_DIALECT, marks=pytest.mark.nightly),
    ],
)
async def test_opencode_is_certified(dialect: str, rows: tuple[str, ...]) -> None:
    for name, row in (await certified(PRESET, rows, dialect=dialect)).items():
        assert_exact(row)
        assert row.forks == {}, f"{name}: what it sends back is what the model said"
        helper = name == SUB_AGENT
        assert row.branches == {"main": 1, "auxiliary": 1, **({"subagent": 1} if helper else {})}, name
        assert row.labels == (("general", "title") if helper else ("title",)), name


async def test_a_call_of_a_tool_it_does_not_have_comes_back_as_another_call() -> None:
    [row] = (await certified(PRESET, ["unknown-tool"])).values()
    assert_exact(row)
    assert row.forks == {"history_rewritten": 1}
