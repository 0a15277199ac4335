"""The input of a data set's adapter (the columns of one row, and the user's additions) and its output (the draft of a
task).

`Columns` collects the faults of a row, so that all are reported at once. Invariant: reading a column never raises.
After a fault, the returned value is a substitute, and the task must not be run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from outrider.evaluators.swebench.options import files_of, listed
from outrider.tasks.examples import Fault, Gold
from outrider.tasks.row_values import known_columns, value_at

LEAVE_OUT = "leave the row out, or mend the file"


class Additions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's additions to the tasks of a data set.

    image: a template for the names of the tasks' images (`swebench.image_name`).
    test_command: the command that runs the tests.
    folder: the folder of the file with the rows.
    own: a part of a task. Its fields override the same fields of all tasks."""

    image: str | None = None
    test_command: str | None = None
    folder: Path = Path()
    own: Mapping[str, Any] = {}


class Draft(msgspec.Struct, frozen=True):
    """The task of one row, before the user's own fields override its fields."""

    id: str
    task: dict[str, Any]
    gold: Gold | None = None


class Columns:
    """The columns of one row. `row` has the values by column, and `number` is the row's number in its file. A name with
    dots means a field within a column: `reward_model.ground_truth` (`row_values.value_at`)."""

    def __init__(self, row: Mapping[str, Any], number: int = 0) -> None:
        self.row = row
        self.number = number
        self.faults: list[Fault] = []

    def fault(self, column: str, problem: str, remedy: str = LEAVE_OUT) -> None:
        self.faults.append(Fault(column, problem, remedy))

    def missing(self, column: str, remedy: str = "") -> None:
        self.fault(column, "is missing", remedy or known_columns(self.row, column))

    def get(self, name: str) -> Any:
        """Return the value of a column, or None if the row does not have the column."""
        return value_at(self.row, name)

    def text(self, name: str, *, remedy: str = "") -> str:
        """Return the text in a column. A missing or empty text is a fault of the row."""
        return self.optional_text(name) or self._absent(name, remedy)

    def optional_text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.fault(name, f"is {kind_of(value)} and must be a text")
            return "?"
        return value if value and value.strip() else None

    def patch(self, name: str, *, remedy: str = "") -> str:
        """Return the diff in a column. A missing, empty or invalid diff is a fault of the row."""
        patch = self.text(name, remedy=remedy)
        if not any(fault.column == name for fault in self.faults):
            try:
                files_of(patch)
            except ValueError as error:
                self.fault(name, f"is no diff that can be applied: {error}")
        return patch

    def tests(self, name: str, *, needed: bool = False) -> list[str]:
        """Return the names of the tests in a column. The column has a list, or a list as JSON or Python text. If
        `needed` is true, an empty list is a fault, because without tests every run would count as solved."""
        value = self.get(name)
        if value is None and needed:
            self.missing(name)
        try:
            tests = [] if value is None else names_of(value)
        except ValueError as error:
            self.fault(name, str(error))
            return []
        if not isinstance(tests, list | tuple) or not all(isinstance(test, str) and test for test in tests):
            self.fault(name, "is no list of the names of tests")
            return []
        if needed and value is not None and not tests:
            self.fault(name, "is empty, so that every run would count as solved")
        return list(tests)

    def _absent(self, name: str, remedy: str) -> str:
        if not any(fault.column == name for fault in self.faults):
            if self.get(name) is None:
                self.missing(name, remedy)
            else:
                self.fault(name, "is empty", remedy or LEAVE_OUT)
        return "?"


Adapter = Callable[[Columns, Additions], Draft]


def names_of(value: Any) -> Any:
    """Return the list that a value stands for. The value may be the list itself, the list's JSON text, or the list's
    Python text, as in SWE-bench Pro. A value that is neither a list nor a string is returned unchanged. Raises
    ValueError for any other string."""
    try:
        return listed(value)
    except ValueError:
        if not isinstance(value, str) or not value.lstrip().startswith("["):
            raise
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError("is neither a list nor the text of one") from error


def kind_of(value: Any) -> str:
    """Return a value's type in words for an error message, such as `a list`."""
    words = {dict: "an object", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return words.get(type(value), f"a {type(value).__name__}")
