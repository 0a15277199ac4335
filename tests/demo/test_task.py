"""The demo's task: its draws, its group specs, and what its grader accepts."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from outrider.lab.demo.dialogue import tool_output
from outrider.lab.demo.task import ITEMS, PHRASINGS, TASK_FILE, ZONES, Episode, file_for, group_spec, make_task, score
from outrider.messages import Message, Role, ToolCall
from outrider.spec import GroupSpec, Write

EPISODE = Episode("maple", "jade", "Where is maple?")


def called(command: str, name: str = "bash") -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=(ToolCall("1", name, json.dumps({"command": command})),))


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


ASKED = Message(role=Role.USER, content=EPISODE.question)
SHOWN = Message(role=Role.TOOL, content="zone: jade", tool_call_id="1")


def test_a_seed_gives_one_episode_and_a_generator_many() -> None:
    assert make_task(3) == make_task(3)
    rng = random.Random(0)
    drawn = [make_task(rng) for _ in range(2000)]
    assert {one.item for one in drawn} == set(ITEMS)
    assert {one.zone for one in drawn} == set(ZONES)
    assert all(one.question in [text.format(item=one.item) for text in PHRASINGS] for one in drawn)
    assert (len(set(ITEMS)), len(set(ZONES)), len(set(ITEMS) & set(ZONES))) == (48, 16, 0)


def test_a_group_spec_is_a_group() -> None:
    group = GroupSpec.model_validate(group_spec(EPISODE, 8, runtime="memory") | {"idempotency_key": "k"})
    assert (group.n, group.idempotency_key, group.task.instruction) == (8, "k", EPISODE.question)
    (step,) = group.task.runtime.prepare
    assert isinstance(step, Write)
    assert (step.to, step.data()) == ("maple", b"zone: jade\n")
    assert group.task.runtime.kind == "memory"


@pytest.mark.parametrize(
    ("turns", "called_right", "answered_right"),
    [
        ([called("cat maple"), SHOWN, said("It is in jade.")], 1, 1),
        ([called("cat elm"), SHOWN, called("cat  maple"), SHOWN, said("It is in jade.\n")], 1, 1),
        ([said("It is in jade.")], 0, 1),
        ([called("cat elm"), SHOWN, said("It is in jade.")], 0, 1),
        ([called("cat maple", name="python"), SHOWN, said("It is in jade.")], 0, 1),
        ([called("cat maple"), SHOWN, said("It is in opal.")], 1, 0),
        ([called("cat maple"), SHOWN, said("It is in jade. Or opal.")], 1, 0),
        ([called("cat maple"), SHOWN], 1, 0),
        ([], 0, 0),
    ],
)
def test_scores(turns: list[Message], called_right: int, answered_right: int) -> None:
    verdict = score([ASKED, *turns], item="maple", zone="jade")
    assert verdict.metrics == {"called_right_file": called_right, "answered_right_zone": answered_right}
    assert verdict.reward == called_right * answered_right


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"command": 3}', "null"])
def test_malformed_arguments_score_nothing(arguments: str) -> None:
    turn = Message(role=Role.ASSISTANT, tool_calls=(ToolCall("1", "bash", arguments),))
    assert score([ASKED, turn, SHOWN, said("It is in jade.")], item="maple", zone="jade").reward == 0


def test_the_made_up_sandbox_answers_as_bash_does(tmp_path: Path) -> None:
    (tmp_path / "maple").write_text(file_for("jade"))
    for command in ("cat maple", "cat elm"):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        shown = done.stdout.removesuffix("\n")
        expected = f"{shown}\n[exit code {done.returncode}]" if done.returncode else shown
        assert tool_output(EPISODE, command) == expected
    assert tool_output(EPISODE, "rm -r /") is None


def test_the_file_that_the_demo_writes_is_the_task_of_the_quick_start() -> None:
    page = Path(__file__).parents[2] / "docs" / "quickstart.md"
    shown = page.read_text().split("```toml task\n")[1].split("```")[0]
    comment, _, task = TASK_FILE.partition("\n")
    assert comment.startswith("#")
    assert task == shown
