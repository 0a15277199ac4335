"""The caller and the conversation that each turn of a session records, and their effect on transcripts, forks, drift
and rows."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from outrider.dialects.base import Caller
from outrider.sessions.transcript import transcript
from outrider.spec import Branches
from outrider.tokens.branches.classify import lineages
from outrider.tokens.samples import POLICY, build_samples, count_session, policy_of
from outrider.trajectory import BranchKind, BranchPolicy, ForkCause, JoinKind

from .test_capture import RESULT, told
from .world import BASH, World, a_world, call_markup, chat_request, echoed

SYSTEM = {"role": "system", "content": "You are a coding agent."}
TASK = {"role": "user", "content": "Fix the failing test."}
TITLE = {"role": "system", "content": "You write titles."}
SUMMARY = "The parser fails on empty input; next, run the tests."


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask_as(world: World, caller: Caller, *messages: dict[str, Any], **fields: Any) -> None:
    request = msgspec.structs.replace(chat_request(*messages, **fields), caller=caller)
    async with aclosing(world.conversation.call(request, dialect="chat")) as steps:
        async for _ in steps:
            pass


async def test_turns_keep_who_asked_and_with_which_tools(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    async with a_world(tmp_path, ["x<|im_end|>"]) as world:
        await ask_as(world, Caller(), SYSTEM, TASK, tools=[BASH])
        await ask_as(world, Caller(agent_id="a1", parent_id="a0", purpose="look"), SYSTEM, TASK, tools=[other])
        await ask_as(world, Caller(), TITLE, TASK)
        first, second, third = world.turns
    assert (second.agent_id, second.parent_agent_id, second.purpose) == ("a1", "a0", "look")
    assert (first.agent_id, first.parent_agent_id, first.purpose) == (None, None, None)
    assert len({first.tools, second.tools, third.tools}) == 3
    assert third.tools == b""


async def test_the_transcript_is_the_main_conversations_whatever_came_first(tmp_path: Path) -> None:
    replies = ["Fixing a test<|im_end|>", call_markup("ls"), f"{SUMMARY}<|im_end|>", "All done.<|im_end|>"]
    async with a_world(tmp_path, replies) as world:
        await world.ask(TITLE, TASK)
        first = await world.ask(SYSTEM, TASK, tools=[BASH])
        result = {"role": "tool", "tool_call_id": first.reply.tool_calls[0].id, "content": "a.txt"}
        assert [message.content for message in transcript(world.turns)] == [SYSTEM["content"], TASK["content"], ""]
        await world.ask(SYSTEM, TASK, echoed(first), result, user("Sum it up."), tools=[BASH])
        opening = user(f"So far: {SUMMARY}")
        await world.ask(SYSTEM, opening, tools=[BASH])
        kinds = [line.kind for line in lineages(world.turns)]
        said = [message.content for message in transcript(world.turns)]
    assert kinds == [BranchKind.AUXILIARY, BranchKind.MAIN, BranchKind.COMPACTION, BranchKind.COMPACTION]
    assert said == [SYSTEM["content"], opening["content"], "All done."]


async def test_an_edit_keeps_the_ids_before_it_and_nothing_drifts(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]) as world:
        first = await world.ask(TASK)
        second = await world.ask(TASK, echoed(first), user("And?"))
        await world.ask(TASK, echoed(first), user("And, edited?"), echoed(second), user("Then?"))
        given = [request.input_ids.tolist() for request in world.engine.requests]
        turns = world.turns
    assert (turns[2].join, turns[2].cause, turns[2].parent) == (JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, 0)
    assert given[2][: turns[0].prompt_length] == given[0]
    counts = count_session(turns)
    assert (counts.forks, counts.tokens.drift, counts.tokens.trained) == (
        {"history_rewritten": 1},
        0,
        counts.tokens.sampled,
    )


async def test_captured_conversations_are_told_apart_and_drift_only_by_themselves(tmp_path: Path) -> None:
    ids: list[tuple[list[int], list[int]]] = [
        ([9, 9, 9], [7]),
        ([1, 2, 3], [7, 8]),
        ([9, 9, 9, 7, 4], [5]),
        ([1, 2, 3, 6, 8, 4], [5]),
    ]
    async with told(tmp_path, *ids) as (world, turns):
        for system in (TITLE, SYSTEM):
            await world.ask(system, TASK)
        for system in (TITLE, SYSTEM):
            await world.ask(system, TASK, {"role": "assistant", "content": "hello"}, user("And?"))
    assert [turn.conversation for turn in turns] == [0, 1, 0, 1]
    assert [turn.join for turn in turns] == [JoinKind.ROOT, JoinKind.ROOT, JoinKind.APPEND, JoinKind.FORK]
    assert [turn.drift_tokens for turn in turns] == [0, 0, 0, 1]
    assert (turns[3].cause, turns[3].forked_from) == (ForkCause.CAPTURE_DRIFT, 1)
    assert [line.depth for line in lineages(turns)] == [1, 0, 1, 0]


async def test_an_engine_without_ids_has_lineages_too(tmp_path: Path) -> None:
    async with told(tmp_path, None, None, None) as (world, turns):
        await world.ask(TITLE, TASK)
        await world.ask(SYSTEM, TASK, tools=[BASH])
        await world.ask(SYSTEM, TASK, {"role": "assistant", "content": "hello"}, user("And?"), tools=[BASH])
    assert [line.kind for line in lineages(turns)] == [BranchKind.AUXILIARY, BranchKind.MAIN, BranchKind.MAIN]
    assert len(transcript(turns)) == 5


async def test_a_tasks_policy_reaches_the_rows(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["Fixing a test<|im_end|>", "Done.<|im_end|>"]) as world:
        await world.ask(TITLE, TASK)
        await world.ask(SYSTEM, TASK, tools=[BASH])
        turns = world.turns
    assert policy_of(Branches()) == POLICY
    assert [sample.label for sample in build_samples(turns, RESULT)] == [""]
    policy = policy_of(Branches(auxiliary="mask"))
    assert policy[BranchKind.AUXILIARY] is BranchPolicy.MASK
    rows = build_samples(turns, msgspec.structs.replace(RESULT, policy=policy))
    assert [(row.kind, row.label, row.parent, row.depth) for row in rows] == [
        (BranchKind.MAIN, "", None, 0),
        (BranchKind.AUXILIARY, "title", None, 1),
    ]
    counts = count_session(turns, policy).tokens
    assert (counts.masked, counts.dropped) == (len(turns[0].output_ids) // 4, 0)


async def test_a_captured_conversation_goes_on_with_other_tools_or_another_system_prompt(tmp_path: Path) -> None:
    """The engine renders the whole prompt anew, but the conversation stays the same."""
    ids = [([1, 2], [3]), ([7, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [8]), ([1, 9, 2, 3, 4, 5, 6, 8, 6], [9])]
    history = [TASK, {"role": "assistant", "content": "hello"}, user("And?")]
    longer = [*history, {"role": "assistant", "content": "hello"}, user("Then?")]
    async with told(tmp_path, *ids) as (world, turns):
        await world.ask(SYSTEM, TASK, tools=[BASH])
        await world.ask(TITLE, *history)
        await world.ask(SYSTEM, *history, tools=[BASH])
        await world.ask(SYSTEM, *longer)
    assert [(turn.join, turn.cause, turn.forked_from) for turn in turns] == [
        (JoinKind.ROOT, None, None),
        (JoinKind.FORK, ForkCause.TOOLS_AND_SYSTEM_CHANGED, 0),
        (JoinKind.APPEND, None, None),
        (JoinKind.FORK, ForkCause.TOOLS_CHANGED, 2),
    ]
    assert [turn.drift_tokens for turn in turns] == [0] * 4
    assert count_session(turns).forks == {"tools_and_system_changed": 1, "tools_changed": 1}
