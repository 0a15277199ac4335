"""The examples: each is a valid task, and its evaluator tells right from wrong in a real sandbox."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.world import Cli, write_task
from evaluators.grader_server import a_grader
from outrider.cli.task_file import load_group
from outrider.config import GraderConfig
from outrider.doctor import diagnose
from support.service import call, running_service, say

ROMAN = """\
def to_roman(number):
    if not 0 < number < 4000: raise ValueError(number)
    values, numeral = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), ""
    for value, letters in zip(values, "M CM D CD C XC L XL X IX V IV I".split()):
        numeral += number // value * letters
        number %= value
    return numeral
"""
EXPLAINED = "It divides by its second argument, which is 0. Check that first."
EXAMPLES = Path(__file__).parents[2] / "examples"
RIGHT = {
    "count_words": "wc -w < harbour.txt > answer.txt",
    "mini_swe_agent": r"sed -i 's|return .*|n = len(ordered); return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2|' "
    "median.py",
    "reservoir": "echo 24/7 > answer.txt",
    "roman_numerals": f"cat > solution.py <<'END'\n{ROMAN}END\n",
    "explain_a_failure": "bash share.sh 7 0",
    "graded_outside": "grep -c v harbour.txt",
    "pi": """echo 'tr A-Z a-z | sed -E "s/[^a-z0-9]+/-/g; s/^-|-$//g"' > slug.sh""",
}
WORDS = {"explain_a_failure": EXPLAINED, "graded_outside": "1"}
"""What the agent says in the end where that is what is graded."""
GRADERS = {"explain_a_failure": "judge", "graded_outside": "sums"}
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


def outside(body: dict[str, Any]) -> Any:
    """A judge, and a grader of our own contract: each knows the right words of its example."""
    if "messages" not in body:
        return {"reward": float(body["answer"] == body["options"]["wanted"])}
    right = EXPLAINED in body["messages"][1]["content"]
    [mark] = set(re.findall(r"GRADE (\w+)", body["messages"][0]["content"]))
    grades = ("MET", "MET", "UNMET") if right else ("UNMET",) * 3
    said = "\n".join(f"GRADE {mark} {number}: {grade}" for number, grade in enumerate(grades, 1))
    return {"choices": [{"message": {"content": said}}]}


@needs_namespaces
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("reward", [1.0, 0.0])
async def test_its_evaluator_tells_right_from_wrong(cli: Cli, tmp_path: Path, name: str, reward: float) -> None:
    if name == "reservoir":
        pytest.importorskip("math_verify", reason="math-verify is not installed")
    command = json.dumps(RIGHT[name])[1:-1] if reward else "true"
    replies = [call(command), say(WORDS.get(name, "Done.") if reward else "Done.")]
    async with a_grader(outside) as grader:
        graders = tuple(GraderConfig(name=one, url=grader.url) for one in GRADERS.values())
        async with running_service(tmp_path=tmp_path, replies=replies, graders=graders) as (_, url):
            ran = await cli("run", with_built_in_agent(tmp_path, name), "--url", url, "--json")
    [session] = ran.document["sessions"]
    assert session["result"]["error"] is None
    assert session["result"]["verdict"]["reward"] == reward
