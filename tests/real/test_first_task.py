"""Agent programs, each in a sandbox without network, with the gateway and the scripted engine: a first task with
streamed text, the program's environment, and a model whose reply breaks off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.errors import Boundary
from outrider.harnesses.endpoint_variables import ENDPOINT_VARIABLES
from outrider.harnesses.install import check, install
from outrider.harnesses.presets import load_preset
from outrider.trajectory import BranchKind

from .rollout import END, a_world, assert_saw_only_its_session, call

pytestmark = pytest.mark.real

SECRET = "the-services-own"
TITLE: dict[str, Any] = {"when": "Generate a title for this conversation", "reply": "A file that says hello" + END}
"""The reply to the request for a title, which OpenCode sends beside its first call."""


class Program(NamedTuple):
    """A preset, its version, its dialect, its shell tool, the name of the tool's argument, and the pattern of a text
    delta on the wire."""

    preset: str
    version: str
    dialect: str
    shell: str
    argument: str
    delta: str

    def run(self, command: str) -> str:
        """Return a call of the shell tool."""
        return call(self.shell, **{self.argument: command})


PROGRAMS = (
    Program("claude-code", "2.1.329", "messages", "Bash", "command", r'"text_delta","text":"([^"]*)"'),
    Program("codex", "0.169.0", "responses", "exec_command", "cmd", r'"delta":"([^"]*)"'),
    Program("gemini-cli", "0.61.0", "gemini", "run_shell_command", "command", r'"text":"([^"]*)"'),
    Program("opencode", "1.18.33", "chat", "bash", "command", r'"content":"([^"]*)"'),
)


@pytest.fixture(scope="module", params=PROGRAMS, ids=[program.preset for program in PROGRAMS])
def program(request: pytest.FixtureRequest) -> Program:
    """An installed program. It is in $OUTRIDER_HOME if that is set, so that later runs are quick."""
    found: Program = request.param
    install(found.preset)
    return found


def test_the_pinned_version_is_installed(program: Program) -> None:
    recipe = load_preset(program.preset).install
    assert recipe is not None
    assert check(program.preset) == recipe.version == program.version


async def test_it_does_a_task_and_shows_text_as_it_is_sampled(
    program: Program, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.setenv(name, SECRET)
    replies: list[str | dict[str, Any]] = [
        TITLE,
        "<think>\nFirst write, then look.\n</think>\n\nWriting it now." + program.run("echo hello > out.txt") + END,
        program.run("cat out.txt; env") + END,
        {"reply": "The file is written and says hello." + END, "stall": 8},
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        rollout = await world.run_through_a_stall(program.preset, "The file", program.delta)
        turns = [turn for turn in rollout.turns if turn.kind != BranchKind.AUXILIARY]
        first, second, third = (turn.index for turn in turns)
        assert [(turn.join, turn.parent) for turn in turns] == [("root", None), ("append", first), ("append", second)]
        assert rollout.kinds() == [(BranchKind.MAIN, (first, second, third))]
        assert {turn.dialect for turn in rollout.turns} == {program.dialect}
        assert_saw_only_its_session(turns[-1].context, world.wire, SECRET)


async def test_a_model_that_breaks_off_is_asked_once(program: Program, policy_folder: Path, tmp_path: Path) -> None:
    """Retries are the gateway's task, so the program makes none. The session ends with the engine's error."""
    replies: list[str | dict[str, Any]] = [
        TITLE,
        {"reply": "Some words and more of them." + END, "fail": "rejected", "after": 3},
    ]
    async with a_world(tmp_path, policy_folder, replies) as world:
        group = await world.group(program.preset)
        turns = await world.client.turns(group.sessions[0].id)
        result = group.sessions[0].result
        assert result is not None
        assert result.error is not None
        assert result.error.boundary is Boundary.ENGINE
        assert [turn.finish for turn in turns if turn.label != "title"] == ["abort"]
