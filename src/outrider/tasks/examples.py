"""An example is a row of a dataset as a task. It may have a known solution, and may have faults."""

from __future__ import annotations

from typing import Any

import msgspec


class Gold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known solution of a task.

    patch: a diff of the working directory.
    run: a command for the sandbox.
    env: the environment variables of this command.
    files: prepare steps that write files before the command runs.
    reply: the agent's last reply.
    then: the solutions of the later steps of the task."""

    patch: str | None = None
    run: str | None = None
    reply: str | None = None
    files: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = {}
    then: tuple[Gold, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """A reason why a row cannot become a task.

    column: the faulty column, or the option that would replace it.
    problem: the rest of a sentence that begins with the column's name, such as `is missing`.
    remedy: advice for the user, or "" if there is none."""

    column: str
    problem: str
    remedy: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a dataset as a task.

    id: unique in the dataset.
    task: the task of a group of sessions, or the part of it that comes from the dataset.
    row: the columns from which `task` was made.
    gold: the known solution. Only `outrider task check` uses it, and no agent gets it.
    faults: why the row cannot become a task. Such an example is listed, but cannot be run.
    notes: conditions that may make the task impossible to solve or to grade."""

    id: str
    task: dict[str, Any]
    row: dict[str, Any] = {}
    gold: Gold | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
