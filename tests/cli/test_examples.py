"""The examples: each is a valid task, and its evaluator tells right from wrong in a real sandbox."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.world import Cli, write_task
from outrider.cli.task_file import load_group
from outrider.doctor import diagnose
from support.service import call, running_service, say

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = {
    "count_words": "wc -w < harbour.txt > answer.txt",
    "mini_swe_agent": r"sed -i 's|return .*|n = len(ordered); return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2|' "
    "median.py",
    "reservoir": "echo 24/7 > answer.txt",
    "pi": """echo 'tr A-Z a-z | sed -E "s/[^a-z0-9]+/-/g; s/^-|-$//g"' > slug.sh""",
}
AGENT = '[harness]\nagent = "tools"\noptions = {tools = ["bash"]}\n'

needs_namespaces = pytest.mark.skipif(
    not next(found.ok for found in diagnose().runtimes if found.name == "namespace"),
    reason="user namespaces do not work on this machine",
)


def with_built_in_agent(folder: Path, name: str) -> Path:
    """The example as it is, but for the harness, which would have to be installed."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    start = text.index("[harness]")
    shutil.copytree(EXAMPLES / "files", folder / "files", dirs_exist_ok=True)
    return write_task(folder, text[:start] + AGENT + text[text.index("[runtime]") :])


def test_every_example_is_tried_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == RIGHT.keys()


@pytest.mark.parametrize("name", RIGHT)
def test_an_example_is_a_task(name: str) -> None:
    task = load_group(EXAMPLES / f"{name}.toml", n=8, priority=0).task
    assert task.labels == {"example": name}


@needs_namespaces
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("reward", [1.0, 0.0])
async def test_its_evaluator_tells_right_from_wrong(cli: Cli, tmp_path: Path, name: str, reward: float) -> None:
    if name == "reservoir":
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    command = json.dumps(RIGHT[name])[1:-1] if reward else "true"
    async with running_service(tmp_path=tmp_path, replies=[call(command), say("Done.")]) as (_, url):
        ran = await cli("run", with_built_in_agent(tmp_path, name), "--url", url, "--json")
    [session] = ran.document["sessions"]
    assert session["result"]["error"] is None
    assert session["result"]["verdict"]["reward"] == reward
