"""Makes an example from one row, using an adapter, and collects the row's faults.

Invariant: a broken row becomes an example with faults. Only InvalidField is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidField
from outrider.tasks.dataset_rows import Adapter, Additions, Columns
from outrider.tasks.datasets import filled, merged, with_texts
from outrider.tasks.examples import Example, Fault


def example_of(adapter: Adapter, row: Mapping[str, Any], given: Additions, where: str, number: int = 0) -> Example:
    """Return the example of a row, with the row's faults. Placeholders in the user's own fields are replaced by the
    row's columns. The user's fields override the fields of the adapter's task. Prepare steps are the exception: the
    user's steps and the adapter's steps are both kept, and the user's come first."""
    columns = Columns(row, number)
    draft = adapter(columns, given)
    task, steps = draft.task, draft.task.get("runtime", {}).get("prepare", [])
    try:
        task = with_texts(merged(task, filled(dict(given.own), row, where)), where)
        if steps and isinstance(own := given.own.get("runtime"), Mapping) and isinstance(own.get("prepare"), list):
            task["runtime"]["prepare"] += steps
    except InvalidField as error:
        columns.fault(error.field or "template", f"cannot be filled in: {error.message}", error.hint or "")
    faults = {fault.column: fault for fault in reversed(columns.faults)}  # of each column, only the first fault is kept
    return Example(id=draft.id, task=task, row=dict(row), gold=draft.gold, faults=tuple(reversed([*faults.values()])))


def whole(example: Example, where: str) -> Example:
    """Return the example if it has no faults. Otherwise, raise InvalidField for the first one."""
    for fault in example.faults:
        raise InvalidField(sentence(fault, where), field=fault.column, hint=fault.remedy or None)
    return example


def sentence(fault: Fault, where: str) -> str:
    if fault.problem == "is missing":
        return f"{where} has no column {fault.column!r}"
    return f"the column {fault.column!r} of {where} {fault.problem}"
