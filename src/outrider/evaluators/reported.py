"""The evaluator of external sessions whose agent reports the reward itself, when it completes the session.

`sessions/external.py` makes the verdict from this report and does not call this evaluator. Invariant: without a
reported reward, a session gets no verdict.
"""

from __future__ import annotations

from outrider.errors import EvaluatorError, InvalidField
from outrider.evaluators.base import Outcome
from outrider.spec import EvaluatorSpec
from outrider.trajectory import Verdict


class ReportedEvaluator:
    """Accepts no settings. `evaluate` is called if a session is graded again, and always raises EvaluatorError, because
    there is nothing to evaluate."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        plain = EvaluatorSpec(kind=spec.kind)
        for name in EvaluatorSpec.model_fields:
            if getattr(spec, name) != getattr(plain, name):
                raise InvalidField("evaluator kind 'reported' takes no settings", field=f"task.evaluator.{name}")

    async def evaluate(self, outcome: Outcome) -> Verdict:
        raise EvaluatorError(
            "the reward of this session was reported by its agent, and cannot be computed again",
            hint="give another evaluator",
        )
