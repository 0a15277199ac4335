"""Examples: the rows of a dataset as tasks, each with its known solution if there is one, and with the row's faults."""

from __future__ import annotations

from typing import Any

import msgspec


class Gold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known solution of a task.

    patch: a diff of the working directory.
    run, env: a command for the sandbox, and its environment variables.
    files: prepare steps that write files before `run`.
    reply: the agent's last reply.
    then: the solutions of the task's later steps."""

    patch: str | None = None
    run: str | None = None
    reply: str | None = None
    files: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = {}
    then: tuple[Gold, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """A fault that keeps a row from being a task. `column` is the faulty column, or the option that would replace it.
    `problem` is the end of a sentence that begins with the column. `remedy` is the advice to the user."""

    column: str
    problem: str
    remedy: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a dataset. `id` is unique in the dataset. `task` is a group's task, or the part of a task that comes
    from the dataset. `row` has the columns from which `task` was made. `gold` is the known solution, used only by
    `outrider task check` and never given to an agent. An example with `faults` is listed, but cannot be run. `notes`
    name conditions that may keep the task from being solved or graded."""

    id: str
    task: dict[str, Any]
    row: dict[str, Any] = {}
    gold: Gold | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
