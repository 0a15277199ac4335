"""Reads the options of an evaluator. This already happens when a task is submitted.

Invariant: a misspelt option or a wrong type raises an InvalidField that names the option.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.spec import EvaluatorSpec, Spec

S = TypeVar("S", bound=Spec)


def read_options(kind: type[S], spec: EvaluatorSpec) -> S:
    """Return `task.evaluator.options` as an object of the class `kind`. Raises InvalidField for an invalid option, and
    for `run` and `path`, which evaluators with options do not accept."""
    for name in ("run", "path"):
        if getattr(spec, name) is not None:
            raise InvalidField(f"evaluator kind {spec.kind!r} does not take it", field=f"task.evaluator.{name}")
    try:
        return kind.model_validate(spec.options)
    except ValidationError as error:
        hint = f"the options of kind {spec.kind!r} are {', '.join(kind.model_fields)}"
        raise first_fault(error, kind, below="task.evaluator.options", hint=hint) from error
