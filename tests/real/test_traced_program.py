"""The trace of a real program's session with a sub-agent and a compaction, received over OTLP."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.trace_collector import attribute, collecting, connected

from .rollout import END, a_world
from .test_claude_code import COMPACTING_TOKENS, agent, shell

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installed")]

PRESET = "claude-code"
PAUSE = "sleep 1.25"
"""Part of the model's commands, so that their processes last long enough to be recorded: after a change, the sandbox is
scanned for processes at growing intervals of at most two seconds."""
REPLIES = [
    "I delegate." + agent(subagent_type="general-purpose", run_in_background=False) + END,
    shell(f"echo hello > out.txt && {PAUSE}") + END,
    "Written." + END,
    "Counting." + shell(f"{PAUSE} && seq 1 6000") + END,
    shell(f"{PAUSE} && wc -l /dev/null") + END,
    "<analysis>\nNumbers.\n</analysis>\n<summary>\nAll is counted and written.\n</summary>" + END,
    shell(f"cat out.txt && {PAUSE}") + END,
    "All done." + END,
]
BRANCHES = ["main", "subagent", "subagent", "main", "main", "compaction", "compaction", "compaction"]
LABELS = {1: "general-purpose", 2: "general-purpose", 5: "summary", 6: "continued", 7: "continued"}


async def test_a_programs_session_is_a_complete_trace(policy_folder: Path, tmp_path: Path) -> None:
    harness = {"preset": PRESET, "options": {"context_tokens": COMPACTING_TOKENS}}
    with collecting() as (collector, url):
        async with a_world(tmp_path, policy_folder, REPLIES, traces_to=url) as world:
            rollout = await world.run(PRESET, harness=harness)
            spans = await collector.trace()
            timeline = await world.client.timeline(rollout.session.id)  # its last entries are stored by now
    root = connected(spans)
    assert root.name == f"invoke_agent {PRESET}"
    assert attribute(root, "gen_ai.conversation.id") == rollout.session.id
    assert attribute(root, "outrider.turns") == len(rollout.turns) == len(REPLIES)

    chats = sorted(
        (span for span in spans if attribute(span, "gen_ai.operation.name") == "chat"),
        key=lambda span: attribute(span, "outrider.turn"),
    )
    assert [attribute(span, "outrider.turn") for span in chats] == [turn.index for turn in rollout.turns]
    for name, counted in (("input", "prompt_tokens"), ("output", "output_tokens")):
        found = [attribute(span, f"gen_ai.usage.{name}_tokens") for span in chats]
        assert found == [getattr(turn, counted) for turn in rollout.turns]
    assert [attribute(span, "outrider.branch") for span in chats] == BRANCHES
    assert {at: label for at, span in enumerate(chats) if (label := attribute(span, "outrider.branch_label"))} == LABELS
    names = {span.span_id: span.name for span in spans}
    (subagent,) = (span for span in spans if span.name.startswith("invoke_agent ") and span is not root)
    parents = [names[span.parent_span_id] for span in chats]
    assert parents == [subagent.name if branch == "subagent" else "run" for branch in BRANCHES]
    assert names[subagent.parent_span_id] == "run"

    noted = Counter(span.kind for span in timeline.spans)
    assert timeline.left_out == {}
    tools = [span for span in spans if attribute(span, "gen_ai.operation.name") == "execute_tool"]
    assert len(tools) == noted["command"] > 1, "the program and the grader at least"
    assert [attribute(span, "process.exit.code") for span in tools] == [0] * len(tools)
    processes = [span for span in spans if span.name.startswith("process ")]
    assert len(processes) == noted["process"]
    asked = "".join(REPLIES).count(PAUSE)
    assert [names[span.parent_span_id] for span in processes if span.name == "process sleep"] == ["run"] * asked
