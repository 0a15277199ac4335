"""Tasks in files: templates for rows, and files of tasks; `outrider task list`, `show` and `import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.task_sources import examples_in
from outrider.errors import InvalidField
from outrider.evaluators.base import Outcome
from outrider.tasks.examples import Gold
from test_datasets import harbor_task

from .world import Cli, write_task

TEMPLATE = """
instruction = "{row.question} Write the answer into answer.txt."
evaluator = { kind = "callable", path = "cli.test_task_sources:grade", options = { answer = "{row.answer}" } }
runtime = { kind = "memory", prepare = [{ upload = "hint.txt", to = "hint.txt" }] }

[rows]
file = "rows.jsonl"
id = "name"

[gold]
run = "echo {row.answer} > answer.txt"
"""
ROWS = [{"name": "six", "question": "6 times 7?", "answer": 42}, {"name": "two", "question": "2 plus 2?", "answer": 4}]


async def grade(outcome: Outcome) -> float:
    try:
        text = await outcome.runtime.read("answer.txt")
    except FileNotFoundError:
        return 0.0
    return float(text.decode().strip() == str(outcome.task.evaluator.options["answer"]))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A template with two rows."""
    (tmp_path / "sums.toml").write_text(TEMPLATE)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "hint.txt").write_text("count")
    return tmp_path / "sums.toml"


def tasks(source: Path, limit: int | None = None) -> Any:
    return examples_in(str(source), limit=limit, image=None)


def test_a_template_is_a_task_for_each_row(sums: Path) -> None:
    six, two = tasks(sums)
    assert (six.id, two.id) == ("six", "two")
    assert six.task["instruction"] == "6 times 7? Write the answer into answer.txt."
    assert six.task["runtime"]["prepare"][0]["to"] == "hint.txt"
    assert six.gold == Gold(run="echo 42 > answer.txt")
    assert two.task["evaluator"]["options"] == {"answer": 4}
    assert tasks(sums, limit=1) == [six]
    assert [one.id for one in tasks(sums.parent)] == ["six", "two"]


async def test_its_tasks_are_good(cli: Cli, sums: Path) -> None:
    ran = await cli("task", "check", sums, "--json")
    assert ran.document == {"tasks": 2, "ok": 2, "bad": []}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('file = "rows.jsonl"', 'files = "rows.jsonl"', r"\[rows\]"),
        ('file = "rows.jsonl"', 'file = "none.jsonl"', "there is no .*none.jsonl"),
        ('id = "name"', 'id = "nosuch"', "no column 'nosuch'"),
        ("{row.answer} >", "{row.result} >", "row six of .* has no column 'result'"),
        ("[gold]\nrun", "[gold]\nruns", r"\[gold\]"),
    ],
)
def test_a_template_that_is_wrong_is_named(sums: Path, old: str, new: str, says: str) -> None:
    sums.write_text(TEMPLATE.replace(old, new))
    with pytest.raises(InvalidField, match=says):
        tasks(sums)


def test_a_source_that_is_not_there_is_answered_with_the_kinds_of_sources(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"cannot read .*questions") as refused:
        tasks(tmp_path / "questions")
    assert "KIND:FILE" in (refused.value.hint or "")


async def test_what_is_imported_is_the_same_without_what_it_came_from(cli: Cli, sums: Path, tmp_path: Path) -> None:
    harbor_task(tmp_path / "harbor" / "a")
    before = [*tasks(sums), *tasks(tmp_path / "harbor")]
    out = tmp_path / "all.jsonl"
    ran = await cli("task", "import", sums, tmp_path / "harbor", "--out", out)
    assert (ran.code, ran.out) == (0, f"3 tasks are in {out}\n")
    for file in ("sums.toml", "rows.jsonl", "hint.txt"):
        (tmp_path / file).unlink()
    assert [(one.id, one.task, one.gold) for one in tasks(out)] == [(one.id, one.task, one.gold) for one in before]
    again = await cli("task", "import", out, "--out", out, "--json")
    assert again.document == {"tasks": 3, "file": str(out)}
    checked = await cli("task", "check", out, "--limit", "2", "--json")
    assert checked.document == {"tasks": 2, "ok": 2, "bad": []}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "x"}', "task 1 of .* template"),
        ('{"id": "a", "task": {}}\n{"id": "a", "task": {}}', "two tasks .* the id 'a'"),
        ('{"id": "a", "task": {}, "gold": {"runs": 1}}', "task 1 of .*gold"),
        ("[1]", "line 1 of"),
        ("", "has no tasks"),
    ],
)
async def test_a_broken_file_of_tasks_is_named(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    ran = await cli("task", "list", tmp_path / "tasks.jsonl")
    assert ran.code == 2
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(ran.err.replace("\n", " "))


async def test_what_cannot_be_imported_leaves_the_file_as_it_was(cli: Cli, sums: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    ran = await cli("task", "import", sums, sums, "--out", out)
    assert ran.code == 2
    assert "two of the tasks have the id 'six'" in ran.err
    ran = await cli("task", "import", sums, "--out", tmp_path / "out.toml")
    assert "does not end in .jsonl" in ran.err
    ran = await cli("task", "import", sums, "--out", out / "out.jsonl")
    assert "cannot write" in ran.err
    assert out.read_text() == "old"
    assert not list(tmp_path.glob(".*.draft"))  # noqa: ASYNC240


async def test_tasks_are_listed(cli: Cli, sums: Path) -> None:
    ran = await cli("task", "list", sums, "--json")
    assert ran.document[0] == {
        "id": "six",
        "evaluator": "callable",
        "gold": True,
        "instruction": "6 times 7? Write the answer into answer.txt.",
    }
    lines = (await cli("task", "list", sums)).out.splitlines()
    assert lines[0].split() == ["task", "evaluator", "solution", "instruction"]
    assert lines[-1].split()[:4] == ["two", "callable", "yes", "2"]


async def test_a_list_of_tasks_is_80_columns_wide(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(f'instruction = "{"x" * 99}"\nevaluator = {{ kind = "callable" }}')
    line = (await cli("task", "list", tmp_path / "long.toml")).out.splitlines()[-1]
    assert line.endswith("xxx...")
    assert len(line) == 80
    bad = [{"prompt": "?", "data_source": "x" * 9, "reward_model": {}}]
    (tmp_path / "rows.json").write_text(json.dumps(bad))
    ran = await cli("task", "list", f"swebench:{tmp_path}/rows.json")
    [row] = [line for line in ran.out.splitlines() if line.endswith("...")]
    assert len(row.split(maxsplit=2)[2]) == 80 - 8 - 32 - 2 * 2


async def test_a_task_is_shown(cli: Cli, sums: Path) -> None:
    shown = (await cli("task", "show", sums, "two")).out
    assert shown.startswith("two\n2 plus 2? Write the answer into answer.txt.\n")
    rows = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in shown.splitlines()[3:] if " " in line}
    assert rows["evaluator.options.answer"] == "4"
    assert rows["runtime.prepare.0.to"] == "hint.txt"
    assert rows["gold.run"] == "echo 4 > answer.txt"
    whole = await cli("task", "show", sums, "--json")
    assert whole.document["id"] == "six"
    assert whole.document["task"]["runtime"]["kind"] == "memory"
    ran = await cli("task", "show", sums, "three")
    assert ran.code == 2
    assert "has no task 'three'" in ran.err
    assert "such as 'six'" in ran.err


async def test_what_a_task_says_does_not_control_the_terminal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('instruction = "a\\u001b[2J\\nb"\nevaluator = { kind = "\\u001bx" }')
    for command in ("list", "show"):
        ran = await cli("task", command, tmp_path / "bad.toml")
        assert ran.code == 0
        assert "\x1b" not in ran.out


@pytest.mark.parametrize(
    "words", [("run",), ("eval",), ("task", "list"), ("task", "check"), ("task", "import", "--out", "x.jsonl")]
)
@pytest.mark.parametrize("limit", ["-1", "0"])
def test_a_limit_below_one_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], limit: str
) -> None:
    """A limit of -1 left out the last task, without a word."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_task(tmp_path, name=f"{name}.toml")
    ran = cli.run(*words, tmp_path, "--limit", limit)
    assert ran.code == 2
    assert ran.err.startswith("error: Invalid value for '--limit'")
