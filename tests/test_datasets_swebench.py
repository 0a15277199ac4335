"""Rows and task repositories of SWE-bench as tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.task_sources import examples_in
from outrider.errors import InvalidField
from outrider.evaluators.factory import make_evaluator
from outrider.evaluators.swebench.options import files_of
from outrider.lab.certify.task_check import check_tasks
from outrider.spec import EvaluatorSpec
from outrider.tasks.datasets import Gold
from outrider.tasks.swebench import ACTIVATE, swebench_example, swebench_examples

from evaluators.swe_world import BASE, COMMAND, FAULT, FIELDS, FIX, GIT, PATCH, ROW, SCRIPT, TEST  # isort: skip

SOURCE = "src/shop/prices.py"
HUNK = f"@@ -1,2 +1,2 @@\n def total(prices):\n-{FAULT.splitlines()[1]}\n+{FIX.splitlines()[1]}\n"
GOLD = f"--- a/{SOURCE}\n+++ b/{SOURCE}\n{HUNK}"
OLD: dict[str, Any] = {
    "instance_id": "shop__shop-1",
    "repo": "pallets/flask",
    "version": "2.3",
    "problem_statement": "The sum leaves one out.",
    "patch": GOLD,
    "test_patch": PATCH,
    "FAIL_TO_PASS": json.dumps(ROW["fail_to_pass"]),
    "PASS_TO_PASS": json.dumps(ROW["pass_to_pass"]),
}
NEW = {
    **OLD,
    "FAIL_TO_PASS": ROW["fail_to_pass"],
    "PASS_TO_PASS": ROW["pass_to_pass"],
    "image": "swebench/shop:latest",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
    "eval_script": SCRIPT,
}
RUNTIME: dict[str, Any] = {
    **{name: FIELDS[name] for name in ("workdir", "env", "resources")},
    "mounts": [{"source": str(path)} for path in FIELDS["mounts"]],
    "prepare": [*({"write": text, "to": path} for path, text in BASE.items()), {"run": GIT}],
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def repository(folder: Path, row: dict[str, Any]) -> Path:
    """Write a task repository of SWE-bench 5.x with one task. Returns its folder."""
    made = folder / "repository"
    place = made / "tasks" / row["instance_id"]
    place.mkdir(parents=True)
    (made / "sweb.yaml").write_text("datasets: [shop/shop]\n")
    short = {name: row[name] for name in ("instance_id", "repo", "version", "image", "log_parser", "eval_type")}
    (place / "task.yaml").write_text("".join(f"{name}: '{value}'\n" for name, value in short.items()))
    (place / "tests.json").write_text(json.dumps({name: row[name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}))
    names = {"patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh"}
    for column, name in {**names, "problem_statement": "problem_statement.md"}.items():
        (place / name).write_bytes(row[column].encode())
    return made


def test_rows_of_4x_are_told_how_their_tests_run(tmp_path: Path) -> None:
    file = written(tmp_path, OLD)
    [example] = swebench_examples(file, test_command="pytest {tests} -x", image="swe-{row.version}")
    evaluator = example.task["evaluator"]
    assert evaluator["options"] == {
        **{name: OLD[name] for name in ("instance_id", "repo", "version", "test_patch")},
        "fail_to_pass": ROW["fail_to_pass"],
        "pass_to_pass": ROW["pass_to_pass"],
        "test_command": f"{ACTIVATE}pytest {TEST} -x",
    }
    make_evaluator(EvaluatorSpec.model_validate(evaluator))
    assert example.task["runtime"] == {"image": "swe-2.3", "workdir": "/testbed"}
    assert OLD["problem_statement"] in example.task["instruction"]
    assert (example.id, example.gold) == ("shop__shop-1", Gold(patch=GOLD))
    with pytest.raises(InvalidField, match="row 0 has no column 'test_command'") as error:
        swebench_examples(written(tmp_path, {**OLD, "repo": "shop/shop"}))
    assert error.value.field == "test_command"
    assert "--test-command" in str(error.value.hint)


@pytest.mark.parametrize(
    ("repo", "version", "command"),
    [
        ("pallets/flask", "2.3", f"pytest -rA {TEST}"),
        ("django/django", "4.2", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_prices"),
        ("django/django", "1.9", "./tests/runtests.py --verbosity 2 test_prices"),
        ("astropy/astropy", "1.3", f"pytest -rA -vv -o console_output_style=classic --tb=no {TEST}"),
        ("astropy/astropy", "5.1", f"pytest -rA {TEST}"),
    ],
)
def test_the_commands_of_swe_benchs_repositories_are_known(repo: str, version: str, command: str) -> None:
    options = swebench_example({**OLD, "repo": repo, "version": version}).task["evaluator"]["options"]
    assert options["test_command"] == ACTIVATE + command


def test_tox_hides_the_second_witness_from_pytest() -> None:
    options = swebench_example({**OLD, "repo": "sphinx-doc/sphinx"}).task["evaluator"]["options"]
    assert options["test_command"].endswith(f"tox --current-env -epy39 -v -- {TEST}")
    assert options["pytest"] is False
    make_evaluator(EvaluatorSpec(kind="swebench", options=options, carry=["."]))


@pytest.mark.parametrize(
    ("template", "image"),
    [
        (
            "swebench/sweb.eval.x86_64.{instance_id/__/_1776_}:latest",
            "swebench/sweb.eval.x86_64.shop_1776_shop-1:latest",
        ),
        ("Host:5000/Shop-{row.version}:V{row.version}", "host:5000/shop-2.3:V2.3"),
        ("Shop-{instance_id}", "Shop-shop__shop-1"),
    ],
)
def test_names_of_images_are_made_of_columns(template: str, image: str) -> None:
    assert swebench_example(OLD, image=template).task["runtime"]["image"] == image
    with pytest.raises(InvalidField, match="the row has no column 'nosuch'"):
        swebench_example(OLD, image="a/{nosuch}")


def test_rows_of_5x_and_a_task_repository_are_the_same_tasks(tmp_path: Path) -> None:
    row = {**NEW, "patch": GOLD.replace("\n", "\r\n")}
    [by_file] = swebench_examples(written(tmp_path, row))
    [by_folder] = examples_in(f"swebench:{repository(tmp_path, row)}", limit=None, image=None)
    assert by_file.task == by_folder.task
    assert by_file.gold == by_folder.gold
    options = by_file.task["evaluator"]["options"]
    assert options["eval_script"] == SCRIPT
    assert "test_command" not in options
    assert options["test_patch"] == PATCH
    assert by_file.task["runtime"] == {"image": NEW["image"], "workdir": "/testbed"}
    make_evaluator(EvaluatorSpec.model_validate(by_file.task["evaluator"]))


def test_a_template_goes_over_the_task(tmp_path: Path) -> None:
    template = {"runtime": {"env": {"V": "{row.version}"}}, "evaluator": {"carry": ["src"]}, "limits": {"turns": 3}}
    [example] = swebench_examples(written(tmp_path, NEW), template=template)
    assert example.task["runtime"] == {"image": NEW["image"], "workdir": "/testbed", "env": {"V": "2.3"}}
    assert example.task["evaluator"]["carry"] == ["src"]
    assert example.task["evaluator"]["options"]["instance_id"] == "shop__shop-1"
    assert example.task["limits"] == {"turns": 3}


def test_some_tasks_are_chosen(tmp_path: Path) -> None:
    file = written(tmp_path, *({**NEW, "instance_id": f"a__a-{number}"} for number in range(4)))
    assert [example.id for example in swebench_examples(file, limit=2)] == ["a__a-0", "a__a-1"]
    assert [example.id for example in swebench_examples(file, tasks=["a__a-3", "a__a-1"])] == ["a__a-3", "a__a-1"]
    with pytest.raises(InvalidField, match="no task 'a__a-9'"):
        swebench_examples(file, tasks=["a__a-9"])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**NEW, "FAIL_TO_PASS": None}, "row 0 has no column 'FAIL_TO_PASS'"),
        (
            {**NEW, "test_command": "pytest", "test_patch": "--- a/x\n+++ b/x\n@@ -1,9 +1 @@\n"},
            "the column 'test_patch' of row 0 is no diff that can be applied",
        ),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(says)):
        swebench_examples(written(tmp_path, row))


@pytest.mark.parametrize(("name", "text"), [("task.yaml", "a: [\n"), ("tests.json", "{"), ("task.yaml", "5")])
def test_a_broken_task_repository_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = repository(tmp_path, NEW)
    (folder / "tasks" / "shop__shop-1" / name).write_text(text)
    with pytest.raises(InvalidField, match=r"cannot read the task in .*shop__shop-1"):
        swebench_examples(folder)


def test_data_files_of_a_test_patch_are_not_run() -> None:
    names = "diff --git a/tests/a.sql b/tests/a.sql\nnew file mode 100644\n--- /dev/null\n+++ b/tests/a.sql\n"
    data = f"{names}@@ -0,0 +1 @@\n+x\n"
    example = swebench_example({**OLD, "test_patch": PATCH + data}, test_command="run {tests}")
    assert example.task["evaluator"]["options"]["test_command"] == f"{ACTIVATE}run {TEST}"


def test_a_script_may_apply_what_is_no_diff_here() -> None:
    options = swebench_example({**NEW, "test_patch": f"{PATCH}@@ -1,9 +1 @@\n"}).task["evaluator"]["options"]
    assert options["eval_script"] == SCRIPT
    assert "test_patch" not in options


def test_binary_files_of_a_test_patch_are_restored() -> None:
    binary = "diff --git a/tests/a.png b/tests/a.png\nindex 1..2 100644\nGIT binary patch\nliteral 0\n"
    options = swebench_example({**NEW, "test_patch": PATCH + binary}).task["evaluator"]["options"]
    assert "tests/a.png" in files_of(options["test_patch"])


@pytest.mark.deep
async def test_the_gold_patch_is_worth_1_and_nothing_is_worth_0(tmp_path: Path) -> None:
    pytest.importorskip("swebench", reason="swebench is not installed: pip install --no-deps swebench unidiff")
    template = {"runtime": {**RUNTIME, "image": None}, "evaluator": {"seconds": 120}}
    [script] = swebench_examples(repository(tmp_path, NEW), template=template)
    [command] = swebench_examples(
        written(tmp_path, {**OLD, "instance_id": "shop__shop-2"}), template=template, test_command=COMMAND
    )
    assert script.task["evaluator"]["carry"] == ["."]
    reports = await check_tasks([script, command], folder=tmp_path, at_once=2)
    assert [report.problems for report in reports] == [(), ()]
