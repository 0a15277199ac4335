"""Makes the evaluator of a task: once when the task is submitted, before anything is stored, and then once per
session."""

from __future__ import annotations

from outrider.errors import InvalidField
from outrider.evaluators.base import Evaluator
from outrider.evaluators.endpoints import Endpoints
from outrider.plugins import resolve
from outrider.spec import EvaluatorSpec


def make_evaluator(spec: EvaluatorSpec, endpoints: Endpoints | None = None) -> Evaluator:
    """Make the evaluator that the spec names. A class with a true attribute `takes_endpoints` also gets `endpoints`.
    Raises InvalidField."""
    kind = resolve("evaluator", spec.kind, field="task.evaluator.kind")
    if not callable(getattr(kind, "evaluate", None)):
        raise InvalidField(f"{spec.kind!r} is not an evaluator class", field="task.evaluator.kind")
    try:
        more = (endpoints or Endpoints(),) if getattr(kind, "takes_endpoints", False) else ()
        evaluator: Evaluator = kind(spec, *more)
    except InvalidField:
        raise
    except Exception as error:  # code of users may raise anything
        message = f"{spec.kind!r} refuses its spec: {type(error).__name__}: {error}"
        raise InvalidField(message, field="task.evaluator") from error
    return evaluator
