"""Examples: the rows of a dataset as tasks, with known solutions and with the rows' faults."""

from __future__ import annotations

from typing import Any

import msgspec


class Gold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known solution of a task.

    patch: a diff of the working directory.
    run, env: a command for the sandbox, and its environment variables.
    files: prepare steps that write files before the command runs.
    reply: the agent's last reply.
    then: the solutions of the task's later steps."""

    patch: str | None = None
    run: str | None = None
    reply: str | None = None
    files: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = {}
    then: tuple[Gold, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """Why a row cannot become a task.

    column: the faulty column, or the option that would replace it.
    problem: the rest of a sentence that begins with the column's name, such as `is missing`.
    remedy: advice for the user, or ""."""

    column: str
    problem: str
    remedy: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a dataset as a task.

    id: unique in the dataset.
    task: the task of a group, or the part of it that comes from the dataset.
    row: the columns from which `task` was made.
    gold: the known solution, used only by `outrider task check` and never given to an agent.
    faults: why the row cannot become a task. Such an example is listed, but cannot be run.
    notes: conditions that may make the task impossible to solve or to grade."""

    id: str
    task: dict[str, Any]
    row: dict[str, Any] = {}
    gold: Gold | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
