"""The examples of SDK agents, unchanged and with the tasks of docs/sdk-agents.md, are token-exact, and every sampled
token trains."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.pages import page
from outrider.cli import main
from outrider.environment import cache_home
from outrider.harnesses.build_in_place import BuildInputs, build_in_place
from outrider.harnesses.install import install, installation
from outrider.harnesses.presets import load_preset

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parents[2] / "examples" / "sdk_agents"
PAGE = page("docs/sdk-agents.md")
[PYTHON_TASK] = [
    block.text for block in PAGE.blocks if "with_openai_agents.py" in block.text and "[harness]" in block.text
]
[NODE_TASK] = [block.text for block in PAGE.blocks if "with_ai_sdk.mjs" in block.text and "[harness]" in block.text]
[INSTALL] = [block.text for block in PAGE.blocks if "uv pip install" in block.text]
PACKAGES = tuple(re.findall(r"[\w\[\]-]+==[\d.]+", INSTALL))
NODE_PACKAGES = tuple(re.findall(r"[\w@/-]+@\d[\d.]*", INSTALL))
DIALECTS = {"google_adk": "gemini"}
PYTHON_AGENTS = ("openai_agents", "pydantic_ai", "langgraph", "deepagents", "google_adk")
ROWS = ("reasoning", "json-spacing", "unicode", "whitespace", "parallel-calls", "tool-error")


@pytest.fixture(scope="module")
def venv() -> Path:
    """One environment for all SDKs in Python, kept in $OUTRIDER_HOME."""
    made = cache_home().absolute() / "harnesses" / "sdk-agents"

    def build() -> None:
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, made], check=True)
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", made / "bin/python", *PACKAGES], check=True)

    build_in_place(made, BuildInputs(PACKAGES), build)
    return made


def checked(task: str, folder: Path, rows: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Certify the task's agent with these rows. Returns their verdicts."""
    file = folder / "agent.toml"
    file.write_text(task)
    named = [word for row in rows for word in ("--row", row)]
    code = main(
        ["harness", "check", "--task", str(file), "--runtime", "namespace", "--seconds", "120", "--json", *named]
    )
    made = json.loads(capsys.readouterr().out)
    assert code == 0, [(row["row"], row["verdict"], row["reason"], row["log_tail"]) for row in made["rows"]]
    verdicts: list[dict[str, Any]] = made["rows"]
    assert [row["row"] for row in verdicts] == list(rows)
    return verdicts


def assert_all_trains(row: dict[str, Any]) -> None:
    assert (row["verdict"], row["drift_tokens"], row["forks"]) == ("holds", 0, {}), row
    assert 0 < row["sampled_tokens"] == row["trained_tokens"]


@pytest.mark.parametrize("name", PYTHON_AGENTS)
@pytest.mark.parametrize("rows", [("three-turns",), pytest.param(ROWS, marks=pytest.mark.nightly)], ids=["one", "all"])
def test_an_agent_in_python(
    name: str, rows: tuple[str, ...], venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = PYTHON_TASK.replace("/srv/agents/venv", str(venv)).replace("/srv/agents", str(EXAMPLES))
    for row in checked(task.replace("openai_agents", name), tmp_path, rows, capsys):
        assert_all_trains(row)


@pytest.mark.parametrize("rows", [("three-turns",), pytest.param(ROWS, marks=pytest.mark.nightly)], ids=["one", "all"])
def test_the_agent_in_javascript(rows: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent runs on the Node.js that is installed for presets."""
    install("kimi-code")
    found = installation(load_preset("kimi-code"))
    assert found is not None
    node = found.node
    assert node is not None
    folder = cache_home().absolute() / "harnesses" / "ai-sdk"
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"

    def build() -> None:
        (folder / "package.json").write_text('{"private": true}\n')
        flags = ["--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run([node, npm, "install", *flags, *NODE_PACKAGES], cwd=folder, check=True)

    build_in_place(folder, BuildInputs(NODE_PACKAGES), build)
    shutil.copy(EXAMPLES / "with_ai_sdk.mjs", folder)
    task = NODE_TASK.replace("/opt/node", str(node.parents[1])).replace("/srv/agents", str(folder))
    for row in checked(task, tmp_path, rows, capsys):
        assert_all_trains(row)
