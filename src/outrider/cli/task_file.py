"""Reads a task from a TOML file.

This module does not validate the task, because the service does that. So it need not import the classes of tasks and
the readers of data sets, which load slowly. Invariant: an `upload` step of a file or folder beside the TOML file is
replaced by `write` steps that write the same bytes to the same paths. So the service needs no copy of the file.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidField, TooLarge
from outrider.schemas import MAX_INLINE_FILE
from outrider.tasks.examples import Example, Gold
from outrider.text_files import read_toml_file

Step = dict[str, Any]

ROWS = "rows"
"""Name of the table that makes a TOML file a template. The table names a file of rows, and each row fills the
template."""


def is_one_task(path: Path) -> bool:
    """Return True if `path` is a TOML file with one task, and not with a template for rows. Also returns True for a
    missing TOML file, so that the caller reads it and raises the error."""
    if path.suffix != ".toml" or path.is_dir():
        return False
    return not path.exists() or ROWS not in read_toml_file(path, field="task")


def load_example(path: Path) -> Example:
    """Return the task in a TOML file, and the solution from the file's table `gold`. The task is not validated. Raises
    InvalidField. Raises TooLarge if a file beside the TOML file is too big to send."""
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
    """Return the content of a task's TOML file. `upload` steps of files and folders beside the TOML file become `write`
    steps with the files' content."""
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
    """Parse the table `gold` of the file `path`, which has the known solution."""
    try:
        return msgspec.convert(table, Gold)
    except msgspec.ValidationError as error:
        raise InvalidField(
            f"[gold] in {path}: {error}", field="gold", hint="give it `patch`, `run` or `reply`"
        ) from error


def _inlined(step: Any, field: str, folder: Path) -> Iterator[Step]:
    """Yield the steps that are sent to the service in place of `step`. A step that uploads files from `folder` becomes
    `write` steps, and `run` steps that make empty folders. Any other step is sent unchanged."""
    if not isinstance(step, dict) or step.keys() != {"upload", "to"}:
        yield step
        return
    upload, target = step["upload"], step["to"]
    # Values that are not text, and paths that lead out of the folder, are sent unchanged. The service refuses them.
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
    text = base64.b64encode(data).decode()  # base64, because a JSON string cannot hold arbitrary bytes
    if len(text) > MAX_INLINE_FILE:
        raise TooLarge(
            f"{source} has {len(data)} bytes, too many to send with the task",
            field=field,
            hint="put it into the service's files folder (outrider serve --files DIR), not beside the task",
        )
    executable = bool(source.stat().st_mode & 0o100)
    return {"write": text, "to": target, "encoding": "base64", "executable": executable}
