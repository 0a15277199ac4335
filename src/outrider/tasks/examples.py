"""Examples: the rows of a dataset as tasks, with known solutions and with the rows' faults."""

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
    """A fault because of which a row cannot become a task. `column` is the faulty column, or the option that would
    replace it. `problem` completes a sentence that begins with the column's name. `remedy` is advice for the user."""

    column: str
    problem: str
    remedy: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a dataset as a task.

    id: unique in the dataset.
    task: a group's task, or the part of a task that comes from the dataset.
    row: the columns from which `task` was made.
    gold: the known solution, used only by `outrider task check` and never given to an agent.
    faults: an example with faults is listed, but cannot be run.
    notes: conditions because of which the task may be impossible to solve or to grade."""

    id: str
    task: dict[str, Any]
    row: dict[str, Any] = {}
    gold: Gold | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
