"""Makes an example from one row with an adapter, and collects the row's faults.

Invariant: a broken row gives an example with faults, and no exception other than InvalidField.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidField
from outrider.tasks.dataset_rows import Adapter, Additions, Columns
from outrider.tasks.datasets import filled, merged, with_texts
from outrider.tasks.examples import Example, Fault


def example_of(adapter: Adapter, row: Mapping[str, Any], given: Additions, where: str, number: int = 0) -> Example:
    """Return the example of a row, with its faults. Placeholders in the user's own fields are replaced by the row's
    columns. The user's fields override the adapter's fields, but the adapter's prepare steps follow the user's prepare
    steps."""
    columns = Columns(row, number)
    draft = adapter(columns, given)
    task, steps = draft.task, draft.task.get("runtime", {}).get("prepare", [])
    try:
        task = with_texts(merged(task, filled(dict(given.own), row, where)), where)
        if steps and isinstance(own := given.own.get("runtime"), Mapping) and isinstance(own.get("prepare"), list):
            task["runtime"]["prepare"] += steps
    except InvalidField as error:
        columns.fault(error.field or "template", f"cannot be filled in: {error.message}", error.hint or "")
    faults = {fault.column: fault for fault in reversed(columns.faults)}  # only the first fault of each column is kept
    return Example(id=draft.id, task=task, row=dict(row), gold=draft.gold, faults=tuple(reversed([*faults.values()])))


def whole(example: Example, where: str) -> Example:
    """Return the example if it has no faults. Otherwise raise InvalidField for its first fault."""
    for fault in example.faults:
        raise InvalidField(sentence(fault, where), field=fault.column, hint=fault.remedy or None)
    return example


def sentence(fault: Fault, where: str) -> str:
    if fault.problem == "is missing":
        return f"{where} has no column {fault.column!r}"
    return f"the column {fault.column!r} of {where} {fault.problem}"
