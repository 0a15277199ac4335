"""Reads tasks from the sources that a command line names. A source is one of these:

- a TOML file with a task, in the form of the object `task` of `POST /v1/groups`
- a TOML file with a template that makes a task of each row of a data set
- a JSON Lines file of tasks, written by `outrider task import`
- a folder of TOML files or of Harbor tasks
- KIND:FILE, a file of rows and the kind of its data set (see `tasks/adapters.py`)
- the name of a dataset, such as `human-eval`

This module runs no task and calls no service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from outrider.cli.task_file import ROWS, gold_of, load_example, load_table
from outrider.client.sample_files import whole_file
from outrider.errors import InvalidField
from outrider.service.admission import validate_group
from outrider.spec import GroupSpec
from outrider.tasks.adapters import ADAPTERS, adapted_examples, usable
from outrider.tasks.dataset_rows import Additions
from outrider.tasks.datasets import (
    filled,
    harbor_examples,
    human_eval_examples,
    one_of_each_reasoning_gym_set,
    read_rows,
    reasoning_gym_examples,
    template_examples,
)
from outrider.tasks.examples import Example, Gold
from outrider.tasks.harbor.task_network import PUBLIC
from outrider.tasks.harbor.tasks import TASK_TOML
from outrider.tasks.miniwob.tasks import SCREENSHOT, miniwob_examples

HUMAN_EVAL = "human-eval"
REASONING_GYM = "reasoning-gym"
MINIWOB = "miniwob"
RELEASE_PAIRS = "release-pairs"
ENTRIES = 4
"""Default number of tasks from one reasoning-gym dataset or one MiniWoB page."""
SOURCES = (
    "name a TOML file with a task or a template, a folder of tasks, KIND:FILE with rows of a data set "
    f"({', '.join(sorted(ADAPTERS))}), or {HUMAN_EVAL}, {REASONING_GYM}, {MINIWOB}, {RELEASE_PAIRS}"
)
TASK_LINES = (".jsonl", ".jsonl.gz")
ROWS_FIELDS = 'it has `file = "ROWS.jsonl"`, and may have `id`, `kind`, `image` and `test_command`'


class RowsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `rows` of a TOML file with a template.

    file: the file with the rows, relative to the TOML file, in a format that `datasets.read_rows` reads.
    id: the column with the rows' ids. If it is None, the rows are numbered.
    kind: chooses the adapter that makes tasks from rows. Fields of the TOML file override the adapter's fields.
    image, test_command: arguments of the adapter.
    """

    file: str
    id: str | None = None
    kind: str | None = None
    image: str | None = None
    test_command: str | None = None


class TaskLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a JSON Lines file of tasks."""

    id: str
    task: dict[str, Any]
    gold: Gold | None = None


def examples_in(
    source: str,
    *,
    limit: int | None,
    image: str | None,
    offline: bool = False,
    network: Sequence[str] | None = None,
    test_command: str | None = None,
    faults: bool = False,
) -> list[Example]:
    """Return the tasks of a source. `source` is a name or a path. Raises InvalidField.

    image: the image of Harbor tasks that name none, and of the rows of a data set.
    test_command: the command that runs the tests of the rows of a data set.
    offline: run Harbor tasks without the network that they request.
    network: what a Harbor task can reach if it requests a public network.
    faults: also return rows that lack something to become tasks. Otherwise, such a row raises InvalidField.
    """
    given = Additions(image=image, test_command=test_command)
    examples = _examples_in(source, limit, given, offline=offline, network=network or PUBLIC)
    if not examples:
        raise InvalidField(f"{source} has no tasks", field="source", hint="name a source with at least one row or task")
    return examples if faults else usable(examples, source)


def _examples_in(
    source: str, limit: int | None, given: Additions, *, offline: bool, network: Sequence[str]
) -> list[Example]:
    kind, _, rows = source.partition(":")
    if source == HUMAN_EVAL:
        return human_eval_examples(limit=limit)
    if source == REASONING_GYM:
        return one_of_each_reasoning_gym_set(size=limit)
    if kind == REASONING_GYM:
        return reasoning_gym_examples(rows, size=limit or ENTRIES)
    if kind == MINIWOB:
        page, _, observation = rows.partition(":")
        size = (limit or ENTRIES) if page else limit
        return miniwob_examples(page or None, size=size, observation=observation or SCREENSHOT)
    if source == RELEASE_PAIRS:
        # Imported here, because the module loads the code of sandboxes, which is slow.
        from outrider.tasks.release_pairs import release_pair_examples

        return release_pair_examples(limit=limit)
    if kind in ADAPTERS and rows:
        path = Path(rows)
        return adapted_examples(kind, path, msgspec.structs.replace(given, folder=path.parent), limit=limit)
    path = Path(source)
    if rows and not path.exists() and Path(rows).exists():
        return adapted_examples(kind, Path(rows), given)  # raises InvalidField, which lists the known kinds
    if not path.is_dir():
        return examples_in_file(path, given)[:limit]
    files = sorted(path.glob("*.toml"))
    if files and path / TASK_TOML not in files:
        return [example for file in files for example in examples_in_file(file, given)][:limit]
    if not any(path.rglob(TASK_TOML)):
        raise InvalidField(f"{path} has neither Harbor tasks nor TOML files", field="source")
    return harbor_examples(path, limit=limit, image=given.image, offline=offline, network=network)


def examples_in_file(path: Path, given: Additions) -> list[Example]:
    """Return the tasks in a file. A JSON Lines file has many tasks. A TOML file has one task or a template, which gives
    a task for each row. `given` is for the rows of a data set."""
    if not path.exists():
        raise InvalidField(f"cannot read {path}: there is no such file", field="source", hint=SOURCES)
    if path.name.endswith(TASK_LINES):
        return read_tasks(path)
    table = load_table(path)
    if ROWS not in table:
        return [load_example(path)]
    return filled_examples(path, table, given)


def filled_examples(path: Path, table: dict[str, Any], given: Additions) -> list[Example]:
    """Return one example for each row of the file that `table["rows"]` names. The row's values fill the template and
    the solution in its table `gold`. If `rows` names a kind, the kind's adapter makes the tasks, and fields of the TOML
    file override the adapter's fields. `given.image` and `given.test_command`, if not None, override those of `rows`.
    """
    try:
        rows_table = msgspec.convert(table.pop(ROWS), RowsTable)
    except msgspec.ValidationError as error:
        raise InvalidField(f"[rows] in {path}: {error}", field=ROWS, hint=ROWS_FIELDS) from error
    gold = table.pop("gold", None)
    source = path.parent / rows_table.file
    if not source.exists():
        raise InvalidField(
            f"there is no {source}",
            field=ROWS,
            hint=f"`file` in [rows] of {path} is relative to the folder of that file",
        )
    if rows_table.kind is not None:
        given = Additions(
            image=rows_table.image if given.image is None else given.image,
            test_command=rows_table.test_command if given.test_command is None else given.test_command,
            folder=source.parent,
            own=table,
        )
        examples = adapted_examples(rows_table.kind, source, given)
    else:
        rows = list(read_rows(source))
        examples = template_examples(rows, table, id_column=rows_table.id, source=str(source))
    if gold is None:
        return examples
    return [
        example
        if example.faults
        else msgspec.structs.replace(
            example, gold=gold_of(filled(gold, example.row, f"row {example.id} of {source}"), path)
        )
        for example in examples
    ]


def read_tasks(path: Path) -> list[Example]:
    """Return the tasks in a file that `write_tasks` wrote. Raises InvalidField, whose message has the number of the
    first broken task, or the id that two tasks share."""
    examples: dict[str, Example] = {}
    for number, row in enumerate(read_rows(path), 1):
        try:
            line = msgspec.convert(row, TaskLine)
        except msgspec.ValidationError as error:
            raise InvalidField(
                f"task {number} of {path}: {error}",
                field="source",
                hint="rows of data need a TOML file with their template: its table [rows] names this file",
            ) from error
        if line.id in examples:
            raise InvalidField(f"two tasks of {path} have the id {line.id!r}", field="source")
        examples[line.id] = Example(id=line.id, task=line.task, gold=line.gold)
    return list(examples.values())


def write_tasks(examples: Sequence[Example], path: Path) -> None:
    """Write tasks to a JSON Lines file, one per line. The file is replaced atomically. Raises InvalidField if two tasks
    have the same id, or if a task cannot be written as JSON."""
    lines = []
    known: set[str] = set()
    for example in examples:
        if example.id in known:
            raise InvalidField(f"two of the tasks have the id {example.id!r}", field="source")
        known.add(example.id)
        try:
            lines.append(msgspec.json.encode(TaskLine(example.id, example.task, example.gold)))
        except TypeError as error:
            raise InvalidField(f"task {example.id!r} cannot be written as JSON: {error}", field="source") from error
    with whole_file(path, field="out") as file:
        file.writelines(line + b"\n" for line in lines)


def load_group(path: Path, *, n: int, priority: int) -> GroupSpec:
    """Return a group of `n` sessions of the first task in a file. Raises InvalidField, which names the wrong field, and
    TooLarge if files are too big to send with the task."""
    examples = examples_in_file(path, Additions())
    if not examples:
        raise InvalidField(f"{path} has no task", field="task")
    return validate_group({"task": examples[0].task, "n": n, "priority": priority})
