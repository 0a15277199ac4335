"""`outrider task check`: known solutions must earn 1, doing nothing must earn 0, and a task's faults are reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli.test_examples import GRADERS, needs_namespaces, outside
from evaluators.grader_server import a_grader
from outrider.evaluators.base import Outcome
from outrider.lab.certify.task_check import NO_SOLUTION
from test_datasets import harbor_task

from .world import Cli

HEAD = """
instruction = "Write hi into out.txt."
harness = { preset = "mini-swe-agent" }
runtime = { kind = "memory" }
"""
GRADE = """
[evaluator]
kind = "callable"
path = "cli.world:grade"
"""
HI = """
[gold]
run = "echo hi > out.txt"
"""


async def says_what_it_heard(outcome: Outcome) -> float:
    return float("forty-two" in outcome.transcript[-1].content)


_TRIES = {True: iter(range(1000)), False: iter(range(1000))}


async def fickle(outcome: Outcome) -> float:
    # Rewards alternate among the runs with the solution, and separately among the runs without it.
    solved = outcome.task.harness.options["steps"][0].get("run") is not None
    return float(next(_TRIES[solved]) % 2)


def callable_(name: str) -> str:
    return GRADE.replace("cli.world:grade", f"cli.test_task_check:{name}")


TASKS: dict[str, tuple[str, str]] = {
    "good": (HEAD + GRADE + HI, ""),
    "said": (HEAD + callable_("says_what_it_heard") + "[gold]\nreply = 'It is forty-two.'", ""),
    "cheap": (HEAD + "[evaluator]\nrun = 'true'" + HI, "doing nothing earns 1, not 0"),
    "hard": (HEAD + "[evaluator]\nrun = 'false'" + HI, "the gold solution earns 0, not 1"),
    "broken": (HEAD + GRADE + "[gold]\nrun = 'nosuch'", "the gold solution is not graded: .* exited with code 127"),
    "ungradable": (HEAD + "[evaluator]\nrun = 'exit 3'" + HI, "doing nothing is not graded: .* code 3; exit 0 or 1"),
    "fickle": (HEAD + callable_("fickle") + HI, "earns one thing and then another"),
    "without": (HEAD + GRADE, re.escape(NO_SOLUTION)),
    "refused": (HEAD + GRADE.replace("grade", "nosuch") + HI, "it is refused: .* \\(task.evaluator.path\\)"),
}


@pytest.mark.deep
async def test_what_is_wrong_with_a_task_is_told(cli: Cli, tmp_path: Path) -> None:
    for name, (text, _) in TASKS.items():
        (tmp_path / f"{name}.toml").write_text(text)
    ran = await cli("task", "check", tmp_path, "--json")
    assert ran.code == 1
    assert (ran.document["tasks"], ran.document["ok"]) == (len(TASKS), 2)
    bad = {one["id"]: "\n".join(one["problems"]) for one in ran.document["bad"]}
    assert bad.keys() == {name for name, (_, problem) in TASKS.items() if problem}
    for name, problems in bad.items():
        with pytest.raises(AssertionError, match=TASKS[name][1]):
            raise AssertionError(problems)
    good = await cli("task", "check", tmp_path / "good.toml")
    assert (good.code, good.out) == (0, "1 of 1 tasks are good\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + GRADE + "[gold]\nruns = 'x'", "gold"),
        ("x =", "is not a TOML file"),
    ],
)
async def test_a_file_that_cannot_be_read(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "task.toml").write_text(text)
    ran = await cli("task", "check", tmp_path / "task.toml")
    assert ran.code != 0
    assert says in ran.err


async def test_a_folder_without_tasks(cli: Cli, tmp_path: Path) -> None:
    ran = await cli("task", "check", tmp_path)
    assert ran.code != 0
    assert "neither Harbor tasks nor TOML files" in ran.err


async def test_a_folder_of_both_kinds_is_one_of_its_own_files(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(TASKS["good"][0])
    harbor_task(tmp_path / "harbor" / "a")
    ran = await cli("task", "check", tmp_path, "--json")
    assert ran.document == {"tasks": 1, "ok": 1, "bad": []}


@pytest.mark.deep
@needs_namespaces
async def test_a_harbor_folder(cli: Cli, tmp_path: Path) -> None:
    test = "if [ -e made ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    folder = harbor_task(tmp_path / "a", test=test)
    (folder / "solution").mkdir()
    (folder / "solution" / "what.txt").write_text("made")
    (folder / "solution" / "solve.sh").write_text('touch "$(cat /solution/what.txt)"\n')
    harbor_task(tmp_path / "b")
    ran = await cli("task", "check", tmp_path, "--json")
    assert ran.document == {
        "tasks": 2,
        "ok": 1,
        "bad": [{"id": "b", "problems": [NO_SOLUTION]}],
    }


@needs_namespaces
async def test_the_network_is_that_of_the_settings(cli: Cli, tmp_path: Path) -> None:
    test = '[ -n "$PIP_INDEX_URL" ] && [ -e made ]; echo $((1 - $?)) > /logs/verifier/reward.txt'
    folder = harbor_task(tmp_path / "tasks" / "a", "[environment]\ncpus = 1\n", test=test)
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text("touch made\n")
    settings = tmp_path / "outrider.toml"
    settings.write_text('[network]\nallow = ["mirror:pip"]\npip_index = "http://127.0.0.1:9/simple/"\n')
    command = ("task", "check", tmp_path / "tasks", "--network", "mirror:pip", "--json")
    refused = (await cli(*command)).document
    assert "'mirror:pip' is not allowed" in refused["bad"][0]["problems"][0]
    assert (await cli(*command, "--config", settings)).document == {"tasks": 1, "ok": 1, "bad": []}


@pytest.mark.deep
@needs_namespaces
async def test_all_examples_are_good(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    async with a_grader(outside) as grader:
        settings = tmp_path / "outrider.toml"
        settings.write_text(
            "".join(f'[[graders]]\nname = "{name}"\nurl = "{grader.url}"\n' for name in GRADERS.values())
        )
        examples = Path(__file__).parents[2] / "examples"
        ran = await cli("task", "check", examples, "--config", settings, "--json")
    found: dict[str, Any] = ran.document
    assert (ran.code, found["bad"]) == (0, [])
    assert found["tasks"] == len(list(examples.glob("*.toml")))
