"""Programs from registries, without presets: one with a task that `outrider harness record` drafted, and one with the
example without tools in docs/bring-your-own-agent.md. Each solves its task in a group of four, token-exact."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from docs.pages import page
from outrider.cli import main
from outrider.environment import cache_home
from outrider.harnesses.build_in_place import BuildInputs, build_in_place
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView

from .rollout import END, ROLLOUT_SECONDS, a_world, call

pytestmark = pytest.mark.real

UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|dns error|client error \(Connect\)")
CONTINUE = ("@continuedev/cli@1.5.47",)
AIDER = ("aider-chat==0.86.2",)
SETTINGS = """\
name: mine
version: 0.0.1
schema: v1
models:
  - name: policy
    provider: openai
    model: "{model}"
    apiBase: "{base_url}/v1"
    apiKey: "{api_key}"
    roles: [chat]
"""
WORK = {"write": "def add(a, b):\n    return a - b\n", "to": "calc.py"}
CHECK = 'python3 -c "from calc import add; assert add(2, 3) == 5" || exit 1'
INSTRUCTION = "Fix the function add in calc.py."
PAGE = page("docs/bring-your-own-agent.md")
[AIDER_TASK] = [block.text for block in PAGE.blocks if 'command = ["aider"' in block.text]
[AIDER_SCRIPT] = [block.text for block in PAGE.blocks if block.info == "json script"]


def install(packages: Sequence[str], folder: Path, *commands: Sequence[str | Path]) -> Path:
    """Install packages into a folder of $OUTRIDER_HOME. Skips if their registry is not reachable."""

    def build() -> None:
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            if done.returncode and UNREACHABLE.search(said):
                pytest.skip(f"the registry of {', '.join(packages)} is not reachable: {said[-300:]}")
            assert done.returncode == 0, said

    build_in_place(folder, BuildInputs(tuple(packages)), build)
    return folder


def folder_of(name: str) -> Path:
    folder = cache_home().absolute() / "harnesses" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def group_of(task: dict[str, Any], replies: Sequence[str], folder: Path, policy: Path, allow: Path) -> GroupView:
    async def run() -> GroupView:
        async with a_world(folder, policy, replies, allow=[allow]) as world:
            submitted = await world.client.submit({"task": task, "n": 4})
            async with asyncio.timeout(ROLLOUT_SECONDS):
                async for done in world.client.follow(samples=True):
                    if done.id == submitted.id:
                        return done
        raise AssertionError("the results ended")

    return asyncio.run(run())


def assert_solved(group: GroupView, turns: int) -> None:
    assert len(group.sessions) == 4
    for session in group.sessions:
        result = session.result
        assert result is not None
        assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
        assert result.verdict is not None
        assert (result.verdict.reward, result.turns, result.failed_calls) == (1.0, turns, {})
        tokens = result.tokens
        assert tokens.drift == 0
        assert tokens.sampled == tokens.trained + tokens.masked + tokens.dropped
        assert tokens.trained > 0


def test_a_program_of_npm_is_recorded_and_its_draft_solves_a_task(
    tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is the Continue CLI. The test completes the draft with the evaluator's command, the kind of sandbox
    and the file to mend."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or not Path(node).resolve().is_relative_to("/usr"):
        pytest.skip("there is no Node.js with npm in /usr")
    folder = folder_of("continue-cli")
    (folder / "package.json").write_text('{"private": true}\n')
    installed = install(CONTINUE, folder, [npm, "install", "--no-audit", "--no-fund", *CONTINUE])
    home = tmp_path / "settings"
    (home / ".continue").mkdir(parents=True)
    (home / ".continue" / "config.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    program = installed / "node_modules" / ".bin" / "cn"
    record = ["harness", "record", "--name", "mine", "--home", str(home), "--json", "--"]
    assert main([*record, "node", str(program), "--auto", "-p", INSTRUCTION]) == 0
    task = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert task["instruction"] == INSTRUCTION
    assert task["runtime"] == {"mounts": [{"source": str(installed / "node_modules")}]}
    task["evaluator"]["run"] = CHECK
    task["runtime"] |= {"kind": "namespace", "prepare": [WORK]}
    fix = call("Bash", command="sed -i 's/a - b/a + b/' calc.py")
    assert_solved(group_of(task, [f"I fix it. {fix}{END}", f"Done.{END}"], tmp_path / "data", policy_folder, folder), 2)


@pytest.mark.nightly
def test_the_example_without_tools_solves_its_task(tmp_path: Path, policy_folder: Path) -> None:
    """aider sets up git itself, and makes a model call for the message of each commit."""
    uv = [sys.executable, "-m", "uv"]
    made = folder_of("aider") / "venv"
    made.mkdir(exist_ok=True)
    venv = ["venv", "--quiet", "--allow-existing", "--python", sys.executable, str(made)]
    packages = ["pip", "install", "--quiet", "--python", str(made / "bin/python"), *AIDER]
    install(AIDER, made, [*uv, *venv], [*uv, *packages])
    task = tomllib.loads(AIDER_TASK.replace("/srv/agents/aider", str(made)))
    task["runtime"]["kind"] = "namespace"
    replies = json.loads(AIDER_SCRIPT)["replies"]
    group = group_of(task, replies, tmp_path / "data", policy_folder, made.parent)
    assert_solved(group, 3)
