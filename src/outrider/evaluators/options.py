"""Reads the options of an evaluator kind, for the first time when a task is submitted.

Invariant: a misspelt option or a wrong type raises an InvalidField that names the option.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from outrider.errors import InvalidField
from outrider.spec import EvaluatorSpec, Spec, complaints, fault_text

S = TypeVar("S", bound=Spec)


def read_options(kind: type[S], spec: EvaluatorSpec) -> S:
    """Return `task.evaluator.options` as a `kind`. Raises InvalidField, also for `run` and `path`, which kinds with
    options do not accept."""
    for name in ("run", "path"):
        if getattr(spec, name) is not None:
            raise InvalidField(f"evaluator kind {spec.kind!r} does not take it", field=f"task.evaluator.{name}")
    try:
        return kind.model_validate(spec.options)
    except ValidationError as error:
        first = complaints(error)[0]
        field = ".".join(("task.evaluator.options", *map(str, first["loc"])))
        raise InvalidField(
            fault_text(first),
            field=field,
            hint=f"the options of kind {spec.kind!r} are {', '.join(kind.model_fields)}",
        ) from error
