"""The evaluator `completed`: the reward is 1 if the agent ended by itself, else 0. It does not use the sandbox.

Invariant: if the infrastructure fails, this evaluator is not called, so such a failure never becomes a reward.
"""

from __future__ import annotations

from outrider.evaluators.base import Outcome
from outrider.evaluators.options import read_options
from outrider.lifecycle import StopReason
from outrider.spec import EvaluatorSpec, Spec
from outrider.trajectory import Verdict


class CompletedOptions(Spec):
    """Kind `completed` has no options."""


class CompletedEvaluator:
    """Gives 1 if the stop reason of the session is `completed`, and 0 otherwise. The verdict's reason names the stop
    reason."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        read_options(CompletedOptions, spec)

    async def evaluate(self, outcome: Outcome) -> Verdict:
        ended = outcome.stop_reason is StopReason.COMPLETED
        return Verdict(reward=float(ended), reason=outcome.stop_reason.value)
