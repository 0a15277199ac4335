"""The examples: each is a valid task, and its evaluator distinguishes right from wrong in a real sandbox."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.world import Cli, write_task
from evaluators.grader_server import a_grader
from outrider.cli.task_file import load_example
from outrider.cli.task_sources import load_group
from outrider.config import GraderConfig
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from support.service import call, running_service, say

EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = {path.stem: load_example(path).gold for path in sorted(EXAMPLES.glob("*.toml"))}
GRADERS = {"explain_a_failure": "judge", "graded_outside": "sums"}
MATHS = ("discharge", "lattice_points", "reservoir")
AGENT = '[harness]\nagent = "tools"\noptions = {tools = ["bash"]}\n'

needs_namespaces = pytest.mark.skipif(
    not NamespaceRuntime.available().ok, reason="user namespaces do not work on this machine"
)


def with_built_in_agent(folder: Path, name: str) -> Path:
    """Return the example with the built-in agent in place of its own harness, which would have to be installed."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    start = text.index("[harness]")
    shutil.copytree(EXAMPLES / "files", folder / "files", dirs_exist_ok=True)
    return write_task(folder, text[:start] + AGENT + text[text.index("[runtime]") :])


@pytest.mark.parametrize("name", RIGHT)
def test_an_example_is_a_task(name: str) -> None:
    task = load_group(EXAMPLES / f"{name}.toml", n=8, priority=0).task
    assert task.labels == {"example": name}


def outside(body: dict[str, Any]) -> Any:
    """Reply as the judge or the grader of an example. Each accepts only the example's right answer."""
    if "messages" not in body:
        return {"reward": float(body["answer"] == body["options"]["wanted"])}
    right = str(RIGHT["explain_a_failure"].reply) in body["messages"][1]["content"]
    [mark] = set(re.findall(r"GRADE (\w+)", body["messages"][0]["content"]))
    grades = ("MET", "MET", "UNMET") if right else ("UNMET",) * 3
    said = "\n".join(f"GRADE {mark} {number}: {grade}" for number, grade in enumerate(grades, 1))
    return {"choices": [{"message": {"content": said}}]}


@pytest.mark.deep
@needs_namespaces
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("reward", [1.0, 0.0])
async def test_its_evaluator_tells_right_from_wrong(cli: Cli, tmp_path: Path, name: str, reward: float) -> None:
    if name in MATHS:
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    gold = RIGHT[name]
    command = json.dumps(gold.run)[1:-1] if reward else "true"
    replies = [call(command), say((gold.reply if reward else None) or "Done.")]
    async with a_grader(outside) as grader:
        graders = tuple(GraderConfig(name=one, url=grader.url) for one in GRADERS.values())
        async with running_service(tmp_path=tmp_path, replies=replies, graders=graders) as (_, url):
            ran = await cli("run", with_built_in_agent(tmp_path, name), "--url", url, "--json")
    [session] = ran.document["sessions"]
    assert session["result"]["error"] is None
    assert session["result"]["verdict"]["reward"] == reward
