"""Filters of a task: which runs they match, and how a match changes the reward and the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from outrider.evaluators.verdict import MAX_REASON
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role, ToolCall
from outrider.service.admission import validate_group
from outrider.sessions.filters import EndedAgentRun, filtered
from outrider.spec import EvaluatorSpec, Filter, RegradeSpec
from outrider.trajectory import BranchPolicy, FinishReason, Turn, Verdict, pack_ids
from store.world import turn

from .conftest import MakeWorld
from .program import program
from .test_excess import call_markup
from .test_patches import RUNTIME
from .world import group, result_of

GOOD = Verdict(reward=1.0, metrics={"m": 2.0}, reason="well done", turns={0: 0.5}, rows={0: 1.0})


def run(*turns: Turn, reason: StopReason = StopReason.COMPLETED, patch: bytes | None = None) -> EndedAgentRun:
    return EndedAgentRun(reason, turns or (turn(),), patch)


def calling(*calls: tuple[str, str]) -> Turn:
    made = tuple(ToolCall(id=str(number), name=name, arguments=given) for number, (name, given) in enumerate(calls))
    return msgspec.structs.replace(turn(), reply=Message(role=Role.ASSISTANT, content="", tool_calls=made))


LONG = msgspec.structs.replace(turn(), output_ids=pack_ids(range(6)))
SAME = ("bash", '{"command": "ls"}')
OTHER = ("bash", '{"command": "pwd"}')
CUT = msgspec.structs.replace(turn(), finish=FinishReason.LENGTH)
MATCHING = [
    ({"when": "not_completed"}, run(reason=StopReason.NONZERO_EXIT), run()),
    ({"when": "truncated"}, run(reason=StopReason.MAX_TURNS), run(reason=StopReason.NONZERO_EXIT)),
    ({"when": "truncated"}, run(turn(), CUT), run(CUT, turn())),
    ({"when": "over_long", "limit": 11}, run(LONG, LONG), run(LONG)),
    ({"when": "over_long", "limit": 11}, run(LONG, LONG), run(LONG, msgspec.structs.replace(LONG, output_ids=b""))),
    ({"when": "repeated_calls"}, run(*[calling(SAME)] * 4), run(*[calling(SAME)] * 3, calling(OTHER), calling(SAME))),
    ({"when": "repeated_calls", "limit": 2}, run(calling(SAME, SAME)), run(calling(SAME, OTHER), calling(SAME))),
    ({"when": "malformed_calls"}, run(msgspec.structs.replace(turn(), malformed_calls=1)), run()),
    ({"when": "no_patch"}, run(patch=b""), run(patch=b"diff")),
]


@pytest.mark.parametrize(("given", "matching", "other"), MATCHING)
def test_what_a_filter_finds(given: dict[str, Any], matching: EndedAgentRun, other: EndedAgentRun) -> None:
    each = Filter.model_validate({**given, "then": "zero"})
    verdict, fate = filtered(matching, GOOD, [each])
    assert (verdict.reward, verdict.turns, verdict.rows, fate) == (0.0, {}, {}, BranchPolicy.TRAIN)
    assert verdict.metrics == {"m": 2.0, f"filter_{each.when}": 1.0}
    assert verdict.reason == f"filtered: {each.when}; well done"
    assert filtered(other, GOOD, [each]) == (GOOD, BranchPolicy.TRAIN)


def test_the_reason_of_a_filtered_verdict_is_bounded() -> None:
    """The service would refuse a longer reason, and cut off the node that sends it."""
    verdict = msgspec.structs.replace(GOOD, reason="x" * MAX_REASON)
    filter_ = Filter.model_validate({"when": "not_completed", "then": "mask"})
    reason = filtered(run(reason=StopReason.NONZERO_EXIT), verdict, [filter_])[0].reason or ""
    assert (len(reason), reason[:26]) == (MAX_REASON, "filtered: not_completed; x")


def test_the_strictest_of_several_counts_and_no_reward_is_raised() -> None:
    bad = Verdict(reward=-1.0)
    kinds = [("truncated", "mask"), ("not_completed", "drop"), ("malformed_calls", "zero"), ("truncated", "zero")]
    filters = [Filter.model_validate({"when": when, "then": then}) for when, then in kinds]
    verdict, fate = filtered(run(reason=StopReason.MAX_TOKENS), bad, filters)
    assert (verdict.reward, fate) == (-1.0, BranchPolicy.DROP)
    assert verdict.reason == "filtered: truncated, not_completed"
    assert filtered(run(reason=StopReason.MAX_TOKENS), GOOD, filters[:1]) == (
        msgspec.structs.replace(
            GOOD, metrics={"m": 2.0, "filter_truncated": 1.0}, reason="filtered: truncated; well done"
        ),
        BranchPolicy.MASK,
    )


@pytest.mark.parametrize(("then", "rows"), [("zero", [(0.0, True)]), ("mask", [(None, False)]), ("drop", [])])
async def test_what_becomes_of_the_rows(world: MakeWorld, then: str, rows: list[Any]) -> None:
    async with world() as w:
        filters = [{"when": "truncated", "then": then}]
        session = await w.run("ask", "ask", "ask", limits={"turns": 2}, filters=filters)
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.MAX_TURNS, None)
        assert result.verdict is not None
        assert (result.verdict.reward, result.verdict.metrics) == (1.0 * (then != "zero"), {"filter_truncated": 1.0})
        samples = await w.service.reader.samples(session.id)
        assert [(sample.reward, any(sample.loss_mask)) for sample in samples] == rows
        assert result.samples == len(rows)
        kept = await w.run("ask", "ask", filters=filters)
        assert result_of(kept).verdict == Verdict(reward=1.0)


async def test_a_loop_of_calls_and_one_that_cannot_be_read(world: MakeWorld) -> None:
    loop = call_markup("bash", "ls")
    filters = [{"when": when, "then": "zero"} for when in ("repeated_calls", "malformed_calls")]
    async with world([loop, loop, loop, loop, "done<|im_end|>"]) as w:
        session = await w.run(harness={"agent": "tools"}, runtime={"kind": "memory"}, filters=filters)
        verdict = result_of(session).verdict
        assert verdict is not None
        assert (verdict.reward, verdict.metrics) == (0.0, {"filter_repeated_calls": 1.0})
    async with world(["<tool_call>\n{nonsense\n</tool_call><|im_end|>", "done<|im_end|>"]) as w:
        session = await w.run(harness={"agent": "tools"}, runtime={"kind": "memory"}, filters=filters)
        verdict = result_of(session).verdict
        assert verdict is not None
        assert (verdict.reward, verdict.metrics) == (0.0, {"filter_malformed_calls": 1.0})


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_a_run_that_changed_nothing_also_when_it_is_graded_again(world: MakeWorld, temporary: Path) -> None:
    evaluator = {"run": "true", "carry": {"diff": "repo"}}
    given: dict[str, Any] = {"runtime": RUNTIME, "evaluator": evaluator}
    filters = [{"when": "no_patch", "then": "zero"}]
    async with world(http=True) as w:
        idle = await w.run(harness=program("true"), filters=filters, **given)
        busy = await w.run(harness=program("echo x > repo/x"), filters=filters, **given)
        assert [result_of(each).verdict.reward for each in (idle, busy)] == [0.0, 1.0]
        for session, reward in ((idle, 0.0), (busy, 1.0)):
            again = await w.service.regrade_session(session.id, RegradeSpec(evaluator=EvaluatorSpec(run="true")))
            verdict = result_of((await w.done(again.id)).sessions[0]).verdict
            assert verdict is not None
            assert verdict.reward == reward


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"when": "over_long"}, "needs a 'limit'"),
        ({"when": "truncated", "limit": 3}, "takes no 'limit'"),
        ({"when": "repeated_calls", "limit": 1}, "greater than or equal to 2"),
        ({"when": "lazy"}, "not_completed"),
    ],
)
def test_what_is_no_filter(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Filter.model_validate({**given, "then": "zero"})


def test_no_patch_needs_one() -> None:
    with pytest.raises(Exception, match=r"needs evaluator\.carry with 'diff'"):
        group(filters=[{"when": "no_patch", "then": "drop"}])
    body = json.loads(group(filters=[{"when": "truncated", "then": "drop"}]).model_dump_json())
    assert validate_group(body).task.filters[0].limit is None
