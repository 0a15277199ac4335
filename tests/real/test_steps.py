"""A task of several steps with real agent programs: each step starts the program anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.harnesses.install import install
from outrider.trajectory import BranchKind

from .rollout import a_world
from .test_rollouts import END, call

pytestmark = pytest.mark.real

LAST = {"mini-swe-agent": call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), "pi": "All done." + END}
THEN = [
    {
        "instruction": "more.txt has come. Append what is in it to out.txt.",
        "prepare": [{"write": "world\n", "to": "more.txt"}],
        "evaluator": {"run": "printf 'hello\\nworld\\n' | cmp - out.txt"},
        "needs": {"reward": 1},
    }
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", LAST)
async def test_a_real_agent_takes_one_step_after_the_other(preset: str, tmp_path: Path, policy_folder: Path) -> None:
    await asyncio.to_thread(install, preset)
    said = [call("echo hello > out.txt"), LAST[preset], call("cat more.txt >> out.txt"), call("ls"), LAST[preset]]
    async with a_world(tmp_path, policy_folder, said) as world:
        rollout = await world.run(preset, then=THEN, steps_reward="final")
    verdict = rollout.group.sessions[0].result.verdict
    assert verdict is not None
    assert verdict.metrics == {"step1.reward": 1.0, "step2.reward": 1.0}
    assert [turn.step for turn in rollout.turns] == [0, 0, 1, 1, 1]
    assert rollout.shape()[2] == ("root", None)
    assert rollout.kinds() == [(BranchKind.MAIN, (0, 1)), (BranchKind.MAIN, (2, 3, 4))]
    assert [row.trained for row in rollout.rows()] == [rollout.said(0, 1), rollout.said(2, 3, 4)]
