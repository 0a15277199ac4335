"""A model call that fails for good is not repeated by the program, and the session ends with the engine's error, even
if the program exits with 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.errors import EngineUnavailable
from outrider.harnesses.install import install

from .rollout import a_world, call

pytestmark = [pytest.mark.real, pytest.mark.nightly]

SHELL = {
    "hermes": call("terminal", command="echo hello > out.txt"),  # exits with 0
    "mini-swe-agent": call("bash", command="echo hello > out.txt"),  # exits with 1
    "mistral-vibe": call("bash", command="echo hello > out.txt"),  # exits with 2
}


@pytest.mark.parametrize("preset", SHELL)
async def test_a_failed_call_is_made_once_and_is_the_sessions_error(
    preset: str, tmp_path: Path, policy_folder: Path
) -> None:
    """There is no verdict, although the program has solved the task before the failure."""
    await asyncio.to_thread(install, preset)
    async with a_world(tmp_path, policy_folder, [SHELL[preset], {"fail": "unavailable"}]) as world:
        done = await world.group(preset)
        result = done.sessions[0].result
    assert result.error is not None
    assert (result.error.code, result.verdict) == (EngineUnavailable.code, None)
    assert result.failed_calls[EngineUnavailable.code] == 1
