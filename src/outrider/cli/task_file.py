"""Reads tasks that the command line names; of a TOML file the `task` object of `POST /v1/groups`, with the files beside
it included.

It knows no service. Invariant: an `upload` step of a file or folder beside the task becomes `write` steps that put the
same bytes in the same place, so that the service needs no copy of it.
"""

from __future__ import annotations

import base64
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from outrider.datasets import harbor_examples, human_eval_examples, reasoning_gym_examples
from outrider.datasets_swebench import swebench_examples
from outrider.errors import InvalidField, TooLarge
from outrider.examples import Example, Gold
from outrider.harbor.tasks import TASK_TOML
from outrider.service.admission import validate_group
from outrider.spec import MAX_INLINE_FILE, GroupSpec

Step = dict[str, Any]

HUMAN_EVAL = "human-eval"
REASONING_GYM = "reasoning-gym:"
RELEASE_PAIRS = "release-pairs"
SWEBENCH = "swebench:"
ENTRIES = 4
"""Of a data set of reasoning-gym, where nothing is said."""


def load_group(path: Path, *, n: int, priority: int) -> GroupSpec:
    """A group of `n` sessions of the task in file `path`. Raises InvalidField that names the field, TooLarge for files
    that are too big to send with the task."""
    return validate_group({"task": load_example(path).task, "n": n, "priority": priority})


def load_example(path: Path) -> Example:
    """The task in file `path`, not validated, with the solution in its table `gold`. Raises as `load_group`."""
    try:
        task = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidField(f"cannot read {path}: {error.strerror}", field="task") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"{path} is not a TOML file: {error}", field="task") from error
    runtime = task.get("runtime")
    if isinstance(runtime, dict) and isinstance(steps := runtime.get("prepare"), list):
        runtime["prepare"] = [sent for number, step in enumerate(steps) for sent in _inlined(step, number, path.parent)]
    gold = task.pop("gold", None)
    try:
        return Example(id=path.stem, task=task, gold=None if gold is None else msgspec.convert(gold, Gold))
    except msgspec.ValidationError as error:
        raise InvalidField(
            f"[gold] in {path}: {error}", field="gold", hint="give it `run`, `reply`, or both"
        ) from error


def examples_in(source: str, *, limit: int | None, image: str | None) -> list[Example]:
    """The tasks of a source, by name or path. Raises InvalidField."""
    if source == HUMAN_EVAL:
        return human_eval_examples(limit=limit)
    if source.startswith(REASONING_GYM):
        return reasoning_gym_examples(source.removeprefix(REASONING_GYM), size=limit or ENTRIES)
    if source == RELEASE_PAIRS:
        from outrider.certify.release_pairs import release_pair_examples  # it can run sandboxes: much to import

        return release_pair_examples(limit=limit)
    if source.startswith(SWEBENCH):
        return swebench_examples(Path(source.removeprefix(SWEBENCH)), limit=limit, image=image)
    path = Path(source)
    if not path.is_dir():
        return [load_example(path)]
    files = sorted(path.glob("*.toml"))
    if files and path / TASK_TOML not in files:
        return [load_example(file) for file in files[:limit]]
    if not any(path.rglob(TASK_TOML)):
        raise InvalidField(f"{path} has neither Harbor tasks nor TOML files", field="source")
    return harbor_examples(path, limit=limit, image=image)


def _inlined(step: Any, number: int, folder: Path) -> Iterator[Step]:
    """The steps to send for one step: `write` steps where it uploads something in `folder`, else the step itself."""
    if not isinstance(step, dict) or step.keys() != {"upload", "to"}:
        yield step
        return
    upload, target = step["upload"], step["to"]
    # It is left to the service to refuse what is no text, and paths that leave the folder.
    local = isinstance(upload, str) and isinstance(target, str) and not Path(upload).is_absolute()
    if not local or ".." in Path(upload).parts or not (folder / upload).exists():
        yield step
        return
    source = folder / upload
    field = f"task.runtime.prepare.{number}.upload"
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
    text = base64.b64encode(data).decode()  # a JSON text cannot hold arbitrary bytes
    if len(text) > MAX_INLINE_FILE:
        raise TooLarge(
            f"{source} has {len(data)} bytes, too many to send with the task",
            field=field,
            hint="put it into the service's files folder (outrider serve --files DIR), not beside the task",
        )
    executable = bool(source.stat().st_mode & 0o100)
    return {"write": text, "to": target, "encoding": "base64", "executable": executable}
