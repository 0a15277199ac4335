"""Reads the files of a Harbor task folder. The instruction becomes a text, and other files become prepare steps that
write them.

Invariants: links never make this module read files outside of the task's folder; links never give an agent the tests or
the solution.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from outrider.errors import InvalidField, TooLarge
from outrider.spec import MAX_INLINE_FILE, MAX_TEXT
from outrider.text_files import read_text_file

MAX_FILES = 16 << 20
"""Maximum total size of a folder's files that are sent with a task, in bytes. A whole request may have 32 MiB."""
MAX_NUMBER = 1024
HIDDEN = ("tests", "solution", "steps/*/tests", "steps/*/solution")
CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""Matches a canary: a line that some data sets put at the beginning of instructions, to be recognisable in training
data. Such lines are removed."""
IGNORED_BY = ".harborignore"


def inside(path: Path, task: Path) -> Path:
    """Return the path. Raises InvalidField if it is a link that leads out of the task's folder."""
    if not path.resolve().is_relative_to(task.resolve()):
        raise InvalidField(
            f"{path} is a link that leaves the task's folder", field="source", hint="put its files in its place"
        )
    return path


def hidden_folders(task: Path) -> list[Path]:
    """Return the folders that agents must not see: those with tests and solutions of the task and of its steps."""
    return [path.resolve() for pattern in HIDDEN for path in task.glob(pattern)]


def shown(path: Path, task: Path, hidden: Sequence[Path]) -> Path:
    """Return the path of files that an agent will see. Raises InvalidField if links lead from it to a folder in
    `hidden`, to a parent of such a folder, or out of the task's folder."""
    real = inside(path, task).resolve()
    for folder in hidden:
        if real.is_relative_to(folder) or folder.is_relative_to(real):
            raise InvalidField(
                f"{path} is or contains {folder}, so it would show the agent the tests or the solution",
                field="source",
                hint=f"replace the link by a copy, and put only files that the agent may see into {path}",
            )
    return path


def instruction_in(folder: Path, task: Path) -> str:
    """Return the instruction in a folder, without canaries (see CANARY). Raises InvalidField."""
    path = inside(folder / "instruction.md", task)
    lines = read_text_file(path, field="source", limit=MAX_TEXT).split("\n")
    while lines and CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def written(folder: Path, task: Path, to: str, *, hidden: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Return prepare steps that write the files of a folder of the task to the path `to`. If the folder does not exist,
    there are none.

    Links within the task are followed. Raises InvalidField for a link that leaves the task, leads in a circle, or leads
    into a folder in `hidden`. Raises TooLarge for too many files or bytes.
    """
    steps: list[dict[str, Any]] = []
    total = 0
    for path, name in files_below(folder, task):
        # The size is checked before the file is read, because the file may be huge.
        total += shown(path, task, hidden).stat().st_size
        if total > MAX_FILES or len(steps) == MAX_NUMBER:
            raise TooLarge(
                f"{folder} has more than {MAX_NUMBER} files or {MAX_FILES >> 20} MiB",
                field="source",
                hint="put large files into the task's image",
            )
        steps.append(write_step(path.read_bytes(), f"{to}/{name}", executable=os.access(path, os.X_OK)))
    return steps


def write_step(data: bytes, to: str, *, executable: bool) -> dict[str, Any]:
    try:
        content = {"write": data.decode()}
    except UnicodeDecodeError:
        content = {"write": base64.b64encode(data).decode(), "encoding": "base64"}
    if len(content["write"]) > MAX_INLINE_FILE:
        raise TooLarge(f"{to} has {len(data)} bytes, too many to send with the task", field="source")
    return {**content, "to": to, **({"executable": True} if executable else {})}


def check_links(folders: Iterable[Path], task: Path) -> None:
    """Check the links below folders without reading files. Raises InvalidField (see `files_below`). This function is
    used for tests that are not sent with the task. They are not sent if the verifier's own image contains them."""
    for folder in folders:
        for _ in files_below(folder, task) if folder.exists() else ():
            pass


def files_below(folder: Path, task: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the files below a folder, sorted, each with its path relative to the folder. Raises InvalidField for a link
    that leaves the task or leads in a circle, for a .harborignore, and for a special file such as a pipe."""
    todo: list[tuple[Path, PurePosixPath, tuple[Path, ...]]] = [(folder, PurePosixPath(), ())]
    while todo:
        path, name, above = todo.pop()
        real = inside(path, task).resolve()
        if real in above:
            raise InvalidField(f"{path} is a link to a folder that it is in", field="source")
        if real.is_dir():
            children = sorted(path.iterdir(), reverse=True)
            todo += [(child, name / child.name, (*above, real)) for child in children]
        elif real.is_file():
            if path.name == IGNORED_BY:
                raise InvalidField(f"{path}: files that Harbor leaves out are not told apart here", field="source")
            yield path, name
        elif path.is_symlink() or real.exists():
            raise InvalidField(f"{path} is neither a file nor a folder", field="source")
