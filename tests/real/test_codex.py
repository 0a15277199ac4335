"""Codex CLI, the real program, in a sandbox without network, against the gateway and the scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.trajectory import BranchKind

from .certified import IMAGE, STREAMED, SUB_AGENT, assert_one_conversation, certified
from .rollout import END, Row, a_world, call

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installed")]

PRESET = "codex"
COMPACTING_TOKENS = 36_000
"""Context size with which Codex compacts during the test. Codex compacts when nine tenths of the context are used. With
the policy's tokenizer, the first request takes 25 thousand tokens, and the output that follows takes 10 thousand."""


def shell(command: str) -> str:
    return call("exec_command", cmd=command)


async def test_a_compaction_begins_a_conversation_anew(policy_folder: Path, tmp_path: Path) -> None:
    """Codex requests a summary of the whole history, without tools, and continues from the instruction and the
    summary."""
    replies = [
        "Counting." + shell("seq 1 3000") + END,
        shell("wc -l /dev/null") + END,
        "All is counted; the file is still to be written." + END,
        shell("echo hello > out.txt") + END,
        "All done." + END,
    ]
    harness = {"preset": PRESET, "options": {"context_tokens": COMPACTING_TOKENS}}
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run(PRESET, harness=harness)
    assert [turn.join for turn in rollout.turns] == ["root", "append", "fork", "fork", "append"]
    assert rollout.rows() == [
        Row(BranchKind.MAIN, (0, 1), None, 0, "", rollout.said(0, 1)),
        Row(BranchKind.COMPACTION, (2,), 1, 1, "summary", rollout.said(2)),
        Row(BranchKind.COMPACTION, (3, 4), 2, 1, "continued", rollout.said(3, 4)),
    ]


async def test_codex_is_certified() -> None:
    """In the row `sub-agent`, Codex's main agent waits for its sub-agent with a special tool."""
    for row in (await certified(PRESET, (*STREAMED, "unknown-tool", "long-output", IMAGE, SUB_AGENT))).values():
        assert_one_conversation(row)
