"""Sources of tasks on the command line: names and paths.

A source is a TOML file with a task (the `task` object of `POST /v1/groups`), a TOML file whose task is a template for
rows, a JSON Lines file of tasks as `outrider task import` writes it, a folder of TOML files or of Harbor tasks, a file
of rows with the name of their kind in front (`tasks/adapters.py`), or the name of a dataset. This module runs nothing
and calls no service. Invariant: an `upload` step of a file or folder beside a TOML file becomes `write` steps of the
same bytes to the same path, so that the service needs no copy of the file.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outrider.client.sample_files import whole_file
from outrider.errors import InvalidField, TooLarge
from outrider.service.admission import validate_group
from outrider.spec import MAX_INLINE_FILE, GroupSpec
from outrider.tasks.adapters import ADAPTERS, adapted_examples, usable
from outrider.tasks.columns import Additions
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
from outrider.tasks.harbor.tasks import TASK_TOML
from outrider.tasks.miniwob.tasks import miniwob_examples
from outrider.text_files import read_toml_file

Step = dict[str, Any]

HUMAN_EVAL = "human-eval"
REASONING_GYM = "reasoning-gym"
MINIWOB = "miniwob"
RELEASE_PAIRS = "release-pairs"
ENTRIES = 4
"""Default number of entries of one reasoning-gym dataset, and of seeds of one MiniWoB page."""
TASK_LINES = (".jsonl", ".jsonl.gz")
ROWS = "rows"
"""The table of a TOML file that names the rows for which the file's task is a template."""


class RowsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `rows` of a TOML file. `file` is relative to the TOML file, in a format that `datasets.read_rows`
    reads. `id` is the column of the rows' ids. If it is None, the rows are numbered. With a `kind` the tasks are made
    by its adapter, with its `image` and `test_command`, and the file's fields go over them."""

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
    test_command: str | None = None,
    faults: bool = False,
) -> list[Example]:
    """Return the tasks of a source, given as a name or a path. `offline`: run Harbor tasks without the network that
    they request. `test_command`: how the tests of rows run. `faults`: also return rows that lack something. Raises
    InvalidField."""
    given = Additions(image=image, test_command=test_command)
    examples = _examples_in(source, limit, given, offline=offline)
    if not examples:
        raise InvalidField(f"{source} has no tasks", field="source", hint="name a source with at least one row or task")
    return examples if faults else usable(examples, source)


def _examples_in(source: str, limit: int | None, given: Additions, *, offline: bool) -> list[Example]:
    kind, _, rows = source.partition(":")
    if source == HUMAN_EVAL:
        return human_eval_examples(limit=limit)
    if source == REASONING_GYM:
        return one_of_each_reasoning_gym_set(size=limit)
    if kind == REASONING_GYM:
        return reasoning_gym_examples(rows, size=limit or ENTRIES)
    if source == MINIWOB:
        return miniwob_examples(size=limit)
    if kind == MINIWOB:
        return miniwob_examples(rows, size=limit or ENTRIES)
    if source == RELEASE_PAIRS:
        # Imported here, because the module loads the sandbox code, which is slow.
        from outrider.tasks.release_pairs import release_pair_examples

        return release_pair_examples(limit=limit)
    if kind in ADAPTERS and rows:
        path = Path(rows)
        return adapted_examples(kind, path, msgspec.structs.replace(given, folder=path.parent), limit=limit)
    path = Path(source)
    if rows and not path.exists() and Path(rows).exists():
        return adapted_examples(kind, Path(rows), given)  # which names the kinds
    if not path.is_dir():
        return examples_in_file(path)[:limit]
    files = sorted(path.glob("*.toml"))
    if files and path / TASK_TOML not in files:
        return [example for file in files for example in examples_in_file(file)][:limit]
    if not any(path.rglob(TASK_TOML)):
        raise InvalidField(f"{path} has neither Harbor tasks nor TOML files", field="source")
    return harbor_examples(path, limit=limit, image=given.image, offline=offline)


def examples_in_file(path: Path) -> list[Example]:
    """Return the task of a TOML file, the tasks of its rows if it is a template, or the tasks of a file of tasks."""
    if path.name.endswith(TASK_LINES):
        return read_tasks(path)
    table = load_table(path)
    if ROWS not in table:
        return [load_example(path)]
    return filled_examples(path, table)


def is_one_task(path: Path) -> bool:
    """Return True if a source is a TOML file with one task, and not a template for rows. A TOML file that is missing
    counts as one task."""
    if path.suffix != ".toml" or path.is_dir():
        return False
    return not path.exists() or ROWS not in read_toml_file(path, field="task")


def filled_examples(path: Path, table: dict[str, Any]) -> list[Example]:
    """Return one example per row of the file that the table `rows` names: the task and the table `gold` of the TOML
    file, filled with the row's values. If the table names a kind, the fields of the TOML file go over the task that
    the kind's adapter makes."""
    try:
        rows_table = msgspec.convert(table.pop(ROWS), RowsTable)
    except msgspec.ValidationError as error:
        raise InvalidField(f"[rows] in {path}: {error}", field=ROWS, hint='give it `file = "ROWS.jsonl"`') from error
    gold = table.pop("gold", None)
    source = path.parent / rows_table.file
    if rows_table.kind is not None:
        given = Additions(image=rows_table.image, test_command=rows_table.test_command, folder=source.parent, own=table)
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
    """Return the tasks of a file that `write_tasks` wrote. Raises InvalidField, which names the number of a broken
    task."""
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
    """Write a file of tasks, one per line. The file is replaced atomically. Raises InvalidField for two tasks with the
    same id, and for a task that cannot be written as JSON."""
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
    """Return a group of `n` sessions of the task in file `path`. Raises InvalidField, which names the field, and
    TooLarge for files that are too big to send with the task."""
    return validate_group({"task": load_example(path).task, "n": n, "priority": priority})


def load_example(path: Path) -> Example:
    """Return the task in file `path`, not validated, with the solution in the file's table `gold`. Raises InvalidField
    and TooLarge as `load_group` does."""
    task = load_table(path)
    if ROWS in task:
        raise InvalidField(
            f"{path} is a template for the tasks of its rows, and here one task is wanted",
            field="task",
            hint=f"`outrider run {path} -n 4` rolls out all of them, `outrider eval` evaluates the policy on them",
        )
    gold = task.pop("gold", None)
    return Example(id=path.stem, task=task, gold=None if gold is None else gold_of(gold, path))


def load_table(path: Path) -> dict[str, Any]:
    """Return the content of a task's TOML file, with `upload` steps of files beside it replaced by `write` steps."""
    task = read_toml_file(path, field="task")
    places = [("task.runtime", task.get("runtime"))]
    graded = [("task.evaluator", task.get("evaluator"))]
    if isinstance(later := task.get("then"), list):
        places += [(f"task.then.{number}", step) for number, step in enumerate(later)]
        graded += [
            (f"{field}.evaluator", step.get("evaluator")) for field, step in places[1:] if isinstance(step, dict)
        ]
    places += [(f"{field}.runtime", each.get("runtime")) for field, each in graded if isinstance(each, dict)]
    for field, place in places:
        if isinstance(place, dict) and isinstance(steps := place.get("prepare"), list):
            place["prepare"] = [
                sent
                for number, step in enumerate(steps)
                for sent in _inlined(step, f"{field}.prepare.{number}.upload", path.parent)
            ]
    return task


def gold_of(table: Any, path: Path) -> Gold:
    """Parse the table `gold` of the file `path`."""
    try:
        return msgspec.convert(table, Gold)
    except msgspec.ValidationError as error:
        raise InvalidField(
            f"[gold] in {path}: {error}", field="gold", hint="give it `patch`, `run` or `reply`"
        ) from error


def _inlined(step: Any, field: str, folder: Path) -> Iterator[Step]:
    """Yield the steps to send for one step: `write` steps for an upload from `folder`, else the step itself."""
    if not isinstance(step, dict) or step.keys() != {"upload", "to"}:
        yield step
        return
    upload, target = step["upload"], step["to"]
    # Values that are not text, and paths that leave the folder, are sent unchanged, because the service refuses them.
    local = isinstance(upload, str) and isinstance(target, str) and not Path(upload).is_absolute()
    if not local or ".." in Path(upload).parts or not (folder / upload).exists():
        yield step
        return
    source = folder / upload
    if source.is_file():
        yield _write_file(source, target, folder, field)
        return
    entries = sorted(source.rglob("*"))
    for entry in entries:
        place = f"{target.rstrip('/')}/{entry.relative_to(source).as_posix()}"
        if entry.is_file():
            yield _write_file(entry, place, folder, field)
        elif not entry.is_dir() or entry.is_symlink():
            raise InvalidField(f"{entry} is neither a file nor a folder, and cannot be sent with the task", field=field)
        elif not any(entry.iterdir()):
            yield {"run": f"mkdir -p {shlex.quote(place)}"}
    if not entries:
        yield {"run": f"mkdir -p {shlex.quote(target)}"}


def _write_file(source: Path, target: str, root: Path, field: str) -> Step:
    if not source.resolve().is_relative_to(root.resolve()):
        raise InvalidField(f"{source} is a link that leaves the task's folder", field=field)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise InvalidField(f"cannot read {source}: {error.strerror}", field=field) from error
    text = base64.b64encode(data).decode()  # a JSON string cannot hold arbitrary bytes
    if len(text) > MAX_INLINE_FILE:
        raise TooLarge(
            f"{source} has {len(data)} bytes, too many to send with the task",
            field=field,
            hint="put it into the service's files folder (outrider serve --files DIR), not beside the task",
        )
    executable = bool(source.stat().st_mode & 0o100)
    return {"write": text, "to": target, "encoding": "base64", "executable": executable}
