"""Gemini CLI, the real program, in a sandbox without network, against the gateway and the scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import Boundary
from outrider.harnesses.command import ENDPOINT_VARIABLES
from outrider.harnesses.install import check, install
from outrider.harnesses.presets import load_preset

from .certified import ECHOES, SUB_AGENT, assert_one_conversation, certified
from .rollout import END, a_world, assert_saw_only_its_session, call, one_row

pytestmark = pytest.mark.real

PRESET = "gemini-cli"
DELTA = r'"text":"([^"]*)"'
SECRET = "the-services-own"


def shell(command: str) -> str:
    return call("run_shell_command", command=command)


@pytest.fixture(scope="module", autouse=True)
def program() -> None:
    """Installed once; in $OUTRIDER_HOME, where it is set, so that later runs are quick."""
    install(PRESET)


def test_the_pinned_version_is_installed() -> None:
    recipe = load_preset(PRESET).install
    assert recipe is not None
    assert check(PRESET) == recipe.version == "0.61.0"


async def test_it_does_a_task_and_shows_text_as_it_is_sampled(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.setenv(name, SECRET)
    replies: list[str | dict[str, Any]] = [
        "<think>\nFirst write, then look.\n</think>\n\nWriting it now." + shell("echo hello > out.txt") + END,
        shell("cat out.txt; env") + END,
        {"reply": "The file is written and says hello." + END, "stall": 8},
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run_through_a_stall(PRESET, "The file", DELTA)
        assert (rollout.shape(), rollout.kinds()) == one_row()
        assert {turn.dialect for turn in rollout.turns} == {"gemini"}
        assert_saw_only_its_session(rollout.turns[2].context, world.wire, SECRET)


async def test_a_model_that_breaks_off_is_asked_once(policy_folder: Path, tmp_path: Path) -> None:
    """Retries are the gateway's: the program ends, and the failure is the engine's."""
    replies: list[str | dict[str, Any]] = [
        {"reply": "Some words and more of them." + END, "fail": "rejected", "after": 3}
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        group = await world.group(PRESET)
        result = group.sessions[0].result
        assert result is not None
        assert result.error is not None
        assert result.error.boundary is Boundary.ENGINE
        assert len(world.engine.requests) == 1


async def test_gemini_cli_is_certified() -> None:
    for row in (await certified(PRESET, (*ECHOES, SUB_AGENT))).values():
        assert_one_conversation(row, label="generalist")
