"""Makes tasks from SWE-bench's rows, in files of rows or in the task repositories of swebench 5.x.

The module runs and downloads nothing. `evaluators/swebench` grades the tasks, with the row's columns as options. The
row's gold patch is the known solution. Invariant: no agent sees the gold patch, the test patch, or the names of the
tests.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import InvalidField
from outrider.evaluators.swebench.options import files_of, is_test
from outrider.tasks.datasets import Example, Gold, filled, known_columns, merged, read_rows
from outrider.text_files import check_depth

ASK = """\
{statement}

Change the code in the working directory so that this is solved. Hidden tests will check it; changes to the tests and
to their configuration are not kept.
"""
FILES = {
    "patch": "gold.patch",
    "test_patch": "test.patch",
    "eval_script": "eval.sh",
    "problem_statement": "problem_statement.md",
}
"""Columns that a task repository has as separate files."""
COLUMNS = ("instance_id", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS")
FOLDER = "/testbed"
"""The repository's folder in the images of SWE-bench."""
TESTS = "{tests}"
NOT_RUN = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
SECONDS = 1800
"""Time limit of an evaluation in seconds, the same as swebench's limit for a test run."""


def swebench_examples(
    source: Path,
    *,
    image: str | None = None,
    template: Mapping[str, Any] | None = None,
    test_command: str | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Example]:
    """Return the tasks of a task repository, or of a file with rows of swebench 4.x or 5.x, in the order of the source.

    `image` is the name of every task's image. `{row.NAME}` in it is replaced by the row's column NAME. If `image` is
    None, the row's column `image` is used. `template` is a partial task that overrides the task made here, such as its
    prepare steps or carried paths. `test_command` is the test command for rows of 4.x, which have none. `{tests}` in it
    is replaced by the test files of the test patch. `tasks` chooses rows by `instance_id`. Raises InvalidField.
    """
    rows = list(task_repository(source) if (source / "tasks").is_dir() else read_rows(source))
    by_id = {str(row.get("instance_id")): row for row in rows}
    if tasks is not None:
        for name in tasks:
            if name not in by_id:
                raise InvalidField(f"there is no task {name!r} in {source}", field="tasks")
        rows = [by_id[name] for name in tasks]
    return [
        swebench_example(row, image=image, template=template, test_command=test_command, where=f"row {number}")
        for number, row in enumerate(rows[:limit])
    ]


def swebench_example(
    row: Mapping[str, Any],
    *,
    image: str | None = None,
    template: Mapping[str, Any] | None = None,
    test_command: str | None = None,
    where: str = "the row",
) -> Example:
    """Return the task of one row. Raises InvalidField, with `where` as the name of the row."""
    for column in COLUMNS:
        if row.get(column) is None:
            raise InvalidField(f"{where} has no column {column!r}", field=column, hint=known_columns(row))
    options = {
        name: row[name] for name in ("instance_id", "log_parser", "repo", "version", "eval_type") if row.get(name)
    }
    options |= {"fail_to_pass": row["FAIL_TO_PASS"], "pass_to_pass": row.get("PASS_TO_PASS") or []}
    command = test_command or row.get("test_command")
    try:
        changed = files_of(row["test_patch"])
    except ValueError as error:
        if command is not None:
            raise InvalidField(f"the test patch of {where} cannot be applied: {error}", field="test_patch") from error
        changed = set()
    options |= {"test_patch": row["test_patch"]} if changed else {}
    if command is not None:
        run = sorted(file for file in changed if is_test(file) and not file.endswith(NOT_RUN))
        run = [file for file in run if file.endswith(".py")] or run  # data files of Python tests are left out
        options |= {"test_command": command.replace(TESTS, shlex.join(run)), "test_patch": row["test_patch"]}
    elif row.get("eval_script"):
        options["eval_script"] = row["eval_script"]
    else:
        raise InvalidField(
            f"{where} does not say how its tests run",
            field="test_command",
            hint='give test_command, such as "python -m pytest -rA {tests}"',
        )
    image = image or row.get("image")
    made: dict[str, Any] = {
        "instruction": ASK.format(statement=str(row["problem_statement"]).strip()),
        "runtime": {"image": image, "workdir": FOLDER} if image else {},
        "evaluator": {"kind": "swebench", "options": options, "carry": ["."], "seconds": SECONDS},
        "labels": {"swebench": str(row["instance_id"])},
    }
    made["runtime"] = filled(made["runtime"], row, where)
    task = merged(made, filled(dict(template or {}), row, where))
    return Example(id=str(row["instance_id"]), task=task, row=dict(row), gold=Gold(patch=row["patch"]))


def task_repository(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task repository, in the order of the tasks' names. Raises InvalidField for a broken
    repository."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise InvalidField("task repositories need PyYAML", field="source", hint="pip install pyyaml") from error
    for place in sorted(found.parent for found in folder.glob("tasks/*/task.yaml")):
        try:
            row = dict(yaml.safe_load((place / "task.yaml").read_text("utf-8")))
            for column, name in FILES.items():
                # The file is read as bytes, because text mode would change the line endings of a patch.
                row[column] = (place / name).read_bytes().decode("utf-8")
            row |= json.loads((place / "tests.json").read_text("utf-8"))
            check_depth(row)
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise InvalidField(f"cannot read the task in {place}: {error}", field="source") from error
        yield row
