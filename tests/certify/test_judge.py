"""Verdicts on rows, and certificates made of verdicts, from evidence written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.harnesses.presets import Certify
from outrider.lab.certify.judge import RowEvidence, RowVerdict, Word, holds, judge
from outrider.lab.certify.rows import ScriptedStep, row_named
from outrider.lab.certify.scripted_model import PromptState, ScriptedCall
from outrider.lab.certify.subagent_trial import KNOWN, STARTS
from outrider.lifecycle import StopReason
from outrider.schemas import TurnView
from outrider.trajectory import BranchKind, SessionResult, TurnTimings, Verdict


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


BASH, TASK = tool("bash", "command"), tool("task", "prompt")


def call(*, subagent: bool, tools: Sequence[dict[str, Any]]) -> ScriptedCall:
    state = PromptState(row="sub-agent", subagent=subagent, tools=tuple(tools))
    return ScriptedCall(
        session_key="s-1", state=state, step=ScriptedStep(), prompt=np.array([1], dtype=np.int32), output=[]
    )


def turn(index: int, kind: str) -> TurnView:
    return TurnView(
        index=index,
        parent=None,
        join="root",
        cause=None,
        forked_from=None,
        kind=kind,
        prompt_tokens=1,
        output_tokens=0,
        context="",
        sampled="",
        finish="stop",
        mode="tokens",
        dialect="chat",
        engine="script",
        tool_calls=0,
        malformed_calls=0,
        cached_tokens=None,
        drift_tokens=0,
        versions=(),
        sampling={},
        timings=TurnTimings(received=0.0, first_token=None, finished=0.0),
    )


DONE = SessionResult(
    session_id="s",
    group_id="g",
    sample_index=0,
    attempt=1,
    stop_reason=StopReason.COMPLETED,
    verdict=Verdict(reward=1.0),
)


@pytest.mark.parametrize(
    ("tools", "subagent", "kind", "expected"),
    [
        ([BASH, TASK], True, BranchKind.SUBAGENT, ("holds", f"{STARTS}: task; {KNOWN}: bash", "yes")),
        ([BASH], False, BranchKind.MAIN, ("not tried", f"no tool started a sub-agent; {KNOWN}: bash", "not tried")),
        ([BASH, TASK], False, BranchKind.MAIN, ("does not hold", "no sub-agent asked the model", None)),
        (
            [BASH, TASK],
            True,
            BranchKind.AUXILIARY,
            ("does not hold", "its sub-agent's calls were taken for auxiliary, main", None),
        ),
    ],
)
def test_the_sub_agents_row(
    tools: Any, subagent: bool, kind: BranchKind, expected: tuple[str, str, str | None]
) -> None:
    row = row_named("sub-agent")
    assert row is not None
    evidence = RowEvidence(
        result=DONE,
        samples=[],
        turns=[turn(0, "main"), turn(1, kind.value)],
        calls=[call(subagent=False, tools=tools), call(subagent=subagent, tools=tools)],
        streams=False,
        in_time=False,
        tried={"bash": KNOWN, **({"task": STARTS} if TASK in tools else {})},
    )
    verdict = judge(row, evidence, hint=Certify(), dialect="chat")
    assert (verdict.verdict, verdict.reason, verdict.found) == expected
    assert verdict.tools == evidence.tried


def test_files_that_the_model_could_not_read_are_named() -> None:
    row = row_named("three-turns")
    assert row is not None
    ignored = {"thinking": 3, "results.image/png": 2}
    result = msgspec.structs.replace(DONE, ignored=ignored)
    evidence = RowEvidence(result=result, samples=[], turns=[turn(0, "main")], calls=[], streams=False, in_time=False)
    verdict = judge(row, evidence, hint=Certify(), dialect="chat")
    assert (verdict.verdict, verdict.ignored) == ("holds", ignored)
    assert verdict.reason == "not read by the model (turns): results.image/png (2)"


@pytest.mark.parametrize(
    ("tools", "ignored", "found"),
    [
        ([BASH, tool("view_image", "path")], {"results.image/png": 1}, "yes"),
        ([BASH, tool("view_image", "path")], {"thinking": 1}, "no"),
        ([BASH], {}, "not tried"),
    ],
)
def test_what_the_row_for_images_finds(tools: Any, ignored: dict[str, int], found: str) -> None:
    image = row_named("image")
    assert image is not None
    evidence = RowEvidence(
        result=msgspec.structs.replace(DONE, ignored=ignored),
        samples=[],
        turns=[turn(0, "main")],
        calls=[call(subagent=False, tools=tools)],
        streams=False,
        in_time=False,
    )
    assert judge(image, evidence, hint=Certify(), dialect="chat").found == found


def row(verdict: Word, *, required: bool = True) -> RowVerdict:
    return RowVerdict(row="r", what="w", verdict=verdict, required=required)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("holds")], True),
        ([row("holds"), row("not tried", required=False)], True),
        ([row("holds"), row("not tried")], False),
        ([row("holds"), row("does not hold", required=False)], False),
        ([row("not tried", required=False)], False),
        ([], False),
    ],
)
def test_a_certificate_holds_only_if_all_that_is_required_was_tried(rows: list[RowVerdict], expected: bool) -> None:
    assert holds(rows) is expected
