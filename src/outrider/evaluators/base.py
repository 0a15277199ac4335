"""The contract of an evaluator: it turns the outcome of a session into a verdict, or raises.

An evaluator gets neither log-probabilities nor other sessions. Invariant: a failure to grade is an EvaluatorError,
never a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NoReturn, Protocol, runtime_checkable

import msgspec

from outrider.errors import EvaluatorError
from outrider.harnesses.base import HarnessOutcome, SessionFolders, SessionIds, folders_in
from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import Resources, TaskSpec
from outrider.trajectory import GradedTurn, Verdict

OffTheClock = Callable[[], AbstractAsyncContextManager[None]]
"""Type of `Outcome.off_the_clock`."""


class FrozenReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a frozen model, with the numbers of prompt tokens and completion tokens of the call."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class CallFrozen(Protocol):
    """Calls a frozen model (a model that the service offers but never trains) by its name. The call is not part of the
    agent's conversation. Raises EngineError, ContextOverflow or RequestError."""

    async def __call__(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> FrozenReply: ...


async def no_model(model: str, *_: object, **__: object) -> FrozenReply:
    raise EvaluatorError(f"there is no frozen model {model!r} here")


class OpenSandbox(Protocol):
    """Opens another sandbox with the given `resources`, or, if `resources` is None, with those of its runtime spec."""

    def __call__(self, resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]: ...


def no_sandbox(resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]:
    raise EvaluatorError("there is no second sandbox here")


def not_kept(output: bytes) -> None:
    """Discard a part of the log of the grading."""


class NothingKept:
    """Stands in for the sandbox if a session is graded again and none of its files were kept. Every operation except
    `broken_inside` raises EvaluatorError."""

    async def broken_inside(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise EvaluatorError(
            "no files of this session were kept: it can be regraded only by the agent's replies",
            hint="tasks with `evaluator.carry` and `evaluator.keep = true` keep what a grader needs",
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session, which an evaluator grades.

    transcript: the main branch as messages, with the last reply.
    turns, calls: the number of model calls, and the calls in the order in which they ended.
    runtime: the sandbox to grade, or a `NothingKept` if the session is graded again and no files were kept.
    folders: paths of the session's folders in the agent's sandbox. A new sandbox does not have these folders.
    patch: the agent's change to a repository in the format of `git diff`, if the task carries a diff.
    beside: opens another sandbox of the task's runtime, or of the evaluator's own runtime, until the end of the block.
        The new sandbox is prepared and reserves no resources. Agents have not used it, and programs in `runtime` cannot
        reach it. `beside(resources)` gives it other limits. Raises RuntimeFailure.
    host: the host of the node, whose parts all evaluators share.
    bucket: the session's bucket in the queue (see store/queue.py). In queues of checks, tenants take turns, and so do
        the buckets of each tenant.
    off_the_clock: for long waits in such queues. During this block, the evaluation holds no eval slot, and its time
        limit does not run.
    log: adds the output of a grader to the log of the session's grading, which is kept as an artifact.
    """

    task: TaskSpec
    runtime: Runtime
    stop_reason: StopReason
    harness: HarnessOutcome
    transcript: tuple[Message, ...]
    turns: int
    calls: tuple[GradedTurn, ...] = ()
    ids: SessionIds = SessionIds()
    patch: bytes | None = None
    beside: OpenSandbox = no_sandbox
    call_frozen: CallFrozen = no_model
    host: Host | None = None
    bucket: str = ""
    off_the_clock: OffTheClock = nullcontext
    log: Callable[[bytes], None] = not_kept

    @property
    def folders(self) -> SessionFolders:
        return folders_in(self.runtime)


class Evaluator(Protocol):
    """Grades one outcome. `evaluate` raises EvaluatorError when grading fails. Its caller cancels it after
    `task.evaluator.seconds`."""

    async def evaluate(self, outcome: Outcome) -> Verdict: ...


@runtime_checkable
class DecidesEarly(Protocol):
    """An evaluator that can decide some outcomes without a sandbox."""

    def decide(self, outcome: Outcome) -> Verdict | None:
        """Return the verdict that `evaluate` would return, or None if finding the verdict needs a sandbox.
        `outcome.patch` is set, and is empty if the agent changed nothing. `outcome.runtime` cannot be used. Raises
        EvaluatorError."""
        ...


@runtime_checkable
class ChecksSpec(Protocol):
    """An evaluator that checks its spec in ways that are too slow for the constructor."""

    async def check_spec(self, host: Host) -> None:
        """Check the spec. Called once, when the task is submitted, with the service's `host`. Raises InvalidField."""
        ...
