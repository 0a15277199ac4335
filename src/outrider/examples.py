"""An example: a row of a dataset as a task, with what is known of its solution. It knows no source of examples."""

from __future__ import annotations

from typing import Any

import msgspec


class Gold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A known solution of a task: `patch` is a diff of its working directory, `run` a command for its sandbox, `reply`
    what the agent says in the end. `files`, in the form of prepare steps that write, are there and `env` is set when
    the command runs. `then` are the solutions of the task's later steps."""

    patch: str | None = None
    run: str | None = None
    reply: str | None = None
    files: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = {}
    then: tuple[Gold, ...] = ()


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a dataset. `id` is unique in it. `task` is the task of a group, or the part of it that is the row's own.
    `row` has the columns that it was made from. `gold` is for `outrider task check`: no agent is given it."""

    id: str
    task: dict[str, Any]
    row: dict[str, Any] = {}
    gold: Gold | None = None
