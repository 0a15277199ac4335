"""`outrider diagnose` on runs of a live service: faults of real sessions on a scripted engine, and a sound run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.world import REPLIES, Cli
from outrider.client.client import AsyncClient
from outrider.errors import EvaluatorError, InvalidField, NotFound
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.trajectory import Verdict
from support.service import call, running_service, say

TOOLS: dict[str, Any] = {"agent": "tools", "options": {"tools": ["bash"]}}
N = 24
"""Number of sessions of a run: a little more than the rules need."""


class Dated:
    """An agent whose system prompt contains a time with the number of its session."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        rules = "\n".join(f"Rule {number}: be careful." for number in range(10))
        prompt = f"You are an agent.\nSession 2026-11-29T10:{context.ids.sample_index:02}.\n{rules}"
        await context.model.chat(
            [Message(role=Role.SYSTEM, content=prompt), Message(role=Role.USER, content=context.task.instruction)]
        )
        return HarnessOutcome(log_tail="")


async def refuse(outcome: Outcome) -> Verdict:
    raise EvaluatorError("the hidden tests are missing")


def task(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "instruction": "Write hi into out.txt.",
        "harness": TOOLS,
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": "cli.world:grade"},
        "labels": {"run": "tuesday"},
        "max_attempts": 1,
    }
    return fields | changes


MISSING = (call("nosuchprogram --all"), call("nosuchprogram"), say("I give up"))
BROKEN = ('<tool_call>\n{"name": "bash", "arguments": {"command\n</tool_call><|im_end|>', say("done"))
FAULTS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "tools that never work": (MISSING, task()),
    "malformed calls": (BROKEN, task()),
    "replies cut off": ((say("a long story without an end " * 10),), task(sampling={"max_tokens": 8})),
    "sessions cut short": (REPLIES, task(limits={"turns": 1})),
    "errors": (REPLIES, task(evaluator={"kind": "callable", "path": "cli.test_diagnose:refuse"})),
    "prompts that differ": ((say("done"),), task(harness={"agent": "cli.test_diagnose:Dated"})),
}
SUBJECTS = {
    "tools that never work": "bash",
    "sessions cut short": "max_turns",
    "errors": "evaluator: evaluator_error",
    "prompts that differ": "date or time",
}
ALSO = {
    "errors": {"tokens without a reward", "cache misses"},
    "tools that never work": {"cache misses"},
}
"""Further findings: consequences of the fault, and cache misses, because the scripted engine keeps no prefixes."""
LATER = {"tools that never work": {"missing programs"}}
"""Findings that only the timelines show, which are stored a moment after the sessions' ends."""


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_of_a_real_run_is_found(cli: Cli, tmp_path: Path, name: str) -> None:
    replies, faulty = FAULTS[name]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": faulty, "n": N})).id])
        found = await client.diagnosis(labels={"run": "tuesday"})
        seen = await cli("diagnose", "run=tuesday", "--url", url)
    [finding] = [finding for finding in found.findings if finding.rule == name]
    rules = {finding.rule for finding in found.findings}
    assert rules - LATER.get(name, set()) == {name} | ALSO.get(name, set())
    assert finding.subject == SUBJECTS.get(name, "")
    assert set(finding.sessions) <= {session.id for session in done.sessions}
    assert len(finding.sessions) == 5
    lines = seen.out.splitlines()
    at = lines.index(f"{finding.severity}: {finding.text}")
    assert lines[at + 1] == f"  see: outrider show {finding.sessions[0]}"
    assert lines[at + 3] == f"  next: {finding.next}"
    assert seen.code == 0


async def test_a_sound_run_has_no_finding(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=REPLIES) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": task(), "n": 12})).id])
        seen = await cli("diagnose", done.id, "--url", url, "--fail-on", "warning")
        recent = await cli("diagnose", "--since", "2h", "--url", url, "--json")
        long_ago = await cli("diagnose", "--since", "2100-01-01", "--url", url, "--json")
    assert seen.code == 0
    first, *others = seen.out.splitlines()
    assert first == "12 sessions in 1 group read · with all turns of 12"
    assert others[0].startswith("time: ")
    assert others[1:] == ["no fault was found"]
    assert (recent.document["sessions"], recent.document["findings"]) == (12, [])
    assert long_ago.document["sessions"] == 0


async def test_the_exit_code_shows_a_finding_only_if_asked(cli: Cli, tmp_path: Path) -> None:
    replies, faulty = FAULTS["tools that never work"]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as client:
        [done] = await client.wait([(await client.submit({"task": faulty, "n": 14})).id])
        codes = [
            (await cli("diagnose", done.id, "--url", url, *words)).code
            for words in ((), ("--fail-on", "warning"), ("--fail-on", "error"), ("--json", "--fail-on", "error"))
        ]
    assert codes == [0, 1, 1, 1]


async def test_wrong_arguments_are_named(cli: Cli, tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        refused = [
            (await cli("diagnose", *words, "--url", url))
            for words in (
                ("--fail-on", "info"),
                ("--since", "yesterday"),
                ("s-1-0",),
                ("=tuesday",),
                ("g-unknown",),
            )
        ]
        with pytest.raises(NotFound):
            await client.diagnosis(groups=["g-unknown"])
        with pytest.raises(InvalidField, match="201 groups are named, and at most 200 can be"):
            await client.diagnosis(groups=[f"g-0019a4e2b6c1f3d{number:03}" for number in range(201)])
        with pytest.raises(InvalidField, match="a label is NAME=VALUE"):
            await client.diagnosis(labels={"": "x"})
    assert [ran.code for ran in refused] == [2] * 5
    assert [ran.err.splitlines()[0] for ran in refused] == [
        "error: --fail-on: 'info' is not a severity to fail on",
        "error: --since: 'yesterday' is no time",
        "error: GROUP: 's-1-0' is a session",
        "error: '=tuesday' is not NAME=VALUE",
        "error: no group 'g-unknown'",
    ]
