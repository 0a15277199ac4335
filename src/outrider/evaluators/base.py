"""The contract of an evaluator: it turns the outcome of a session into a verdict, or raises.

It sees neither log-probabilities nor other sessions. Invariant: a failure to grade is an EvaluatorError, never a
reward.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.runtimes.base import Runtime
from outrider.runtimes.node_host import Host
from outrider.spec import TaskSpec
from outrider.trajectory import ModelCall, Verdict


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is graded. `transcript` is the main branch as messages, with the last reply; `turns` the number of model
    calls, and `calls` these, in the order in which they ended. `host` is the node's: evaluators share its parts."""

    task: TaskSpec
    runtime: Runtime
    stop_reason: StopReason
    harness: HarnessOutcome
    transcript: tuple[Message, ...]
    turns: int
    calls: tuple[ModelCall, ...] = ()
    host: Host | None = None


class Evaluator(Protocol):
    """Grades one outcome. `evaluate` raises EvaluatorError when it cannot. The caller sets the time limit."""

    async def evaluate(self, outcome: Outcome) -> Verdict: ...


@runtime_checkable
class ChecksSpec(Protocol):
    """An evaluator that has more to check of its spec than its constructor can, which must not wait for long."""

    async def check_spec(self, host: Host) -> None:
        """Called once, when the task is submitted; `host` is the service's. Raises InvalidField."""
        ...
