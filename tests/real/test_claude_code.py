"""Claude Code, the real program, in a sandbox without network, against the gateway and the scripted engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.trajectory import BranchKind

from .certified import IMAGE, STREAMED, SUB_AGENT, assert_one_conversation, certified
from .rollout import END, Row, Wire, a_world, call

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installed")]

PRESET = "claude-code"
COMPACTING_TOKENS = 100_000
"""Context size with which Claude Code compacts during the test. Claude Code keeps 29 thousand tokens free, and counts
the tokens of its last call. With the policy's tokenizer, the first request takes 52 thousand tokens, and the output
that follows takes 33 thousand."""


def shell(command: str) -> str:
    return call("Bash", command=command)


def agent(**arguments: Any) -> str:
    return call("Agent", description="write the file", prompt="Write hello into out.txt.", **arguments)


def agents_of(wire: Wire) -> set[str]:
    """Return the program's ids of its sub-agents."""
    return {found.decode() for found in re.findall(rb"(?im)^x-claude-code-agent-id: *(\S+)", bytes(wire.sent))}


async def test_a_subagent_is_a_conversation_of_its_own(policy_folder: Path, tmp_path: Path) -> None:
    replies = [
        "I delegate." + agent(subagent_type="general-purpose", run_in_background=False) + END,
        shell("echo hello > out.txt") + END,
        "Written." + END,
        "All done." + END,
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run(PRESET)
        assert rollout.shape() == [("root", None), ("root", None), ("append", 1), ("append", 0)]
        assert rollout.rows() == [
            Row(BranchKind.MAIN, (0, 3), None, 0, "", rollout.said(0, 3)),
            Row(BranchKind.SUBAGENT, (1, 2), 0, 1, "general-purpose", rollout.said(1, 2)),
        ]
        assert agents_of(world.wire)


async def test_a_subagent_in_the_background_runs_beside_its_parent(policy_folder: Path, tmp_path: Path) -> None:
    """A sub-agent runs in the background by default. After its start, the order of the calls of parent and sub-agent
    varies."""
    replies: list[str | dict[str, Any]] = [
        {"when": "[SYSTEM NOTIFICATION", "reply": "All done." + END},
        {"when": "Async agent launched", "reply": "I wait for it." + END},
        {"when": "so they run concurrently.<|im_end|>", "reply": "Written." + END},
        "I delegate." + agent() + END,
        shell("echo hello > out.txt") + END,
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run(PRESET)
        assert sorted(turn.join for turn in rollout.turns) == ["append", "append", "append", "root", "root"]
        main, helper = rollout.rows()
        assert (main.kind, len(main.turns), main.parent, main.depth, main.label) == (BranchKind.MAIN, 3, None, 0, "")
        assert (helper.kind, len(helper.turns), helper.parent, helper.depth) == (BranchKind.SUBAGENT, 2, 0, 1)
        assert agents_of(world.wire) == {helper.label}, "it asked for no sort of agent: the client's name for it"


async def test_a_compaction_begins_a_conversation_anew(policy_folder: Path, tmp_path: Path) -> None:
    """Claude Code requests a summary of everything before its last call, as a sibling of that call, and continues from
    the summary and that call."""
    replies = [
        "Counting." + shell("seq 1 6000") + END,
        shell("wc -l /dev/null") + END,
        "<analysis>\nNumbers.\n</analysis>\n<summary>\nAll is counted; the file is still to be written.\n</summary>"
        + END,
        shell("echo hello > out.txt") + END,
        "All done." + END,
    ]
    harness = {"preset": PRESET, "options": {"context_tokens": COMPACTING_TOKENS}}
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run(PRESET, harness=harness)
        assert rollout.shape() == [
            ("root", None),
            ("append", 0),
            ("fork", 0),
            ("root", None),
            ("append", 3),
        ]
        assert rollout.turns[2].cause == "sibling"
        assert "All is counted; the file is still to be written." in rollout.turns[3].context
        assert rollout.rows() == [
            Row(BranchKind.MAIN, (0, 1), None, 0, "", rollout.said(0, 1)),
            Row(BranchKind.COMPACTION, (0, 2), 0, 1, "summary", rollout.said(2)),
            Row(BranchKind.COMPACTION, (3, 4), 2, 1, "continued", rollout.said(3, 4)),
        ]


async def test_claude_code_is_certified() -> None:
    for row in (await certified(PRESET, (*STREAMED, "unknown-tool", "long-output", IMAGE, SUB_AGENT))).values():
        assert_one_conversation(row)
