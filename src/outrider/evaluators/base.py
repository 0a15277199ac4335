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
"""Type of `Outcome.off_the_clock`, which pauses a time limit."""


class FrozenReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a frozen model, and the number of tokens in the prompt and in the reply."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class CallFrozen(Protocol):
    """Calls the frozen model named `model`: one that the service offers but never trains. The call is not part of the
    agent's conversation. Raises EngineError, ContextOverflow or RequestError."""

    async def __call__(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> FrozenReply: ...


async def no_model(model: str, *_: object, **__: object) -> FrozenReply:
    raise EvaluatorError(f"there is no frozen model {model!r} here")


class OpenSandbox(Protocol):
    """Opens another sandbox. Its resource limits are `resources` or, if that is None, those of its runtime spec."""

    def __call__(self, resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]: ...


def no_sandbox(resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]:
    raise EvaluatorError("there is no second sandbox here")


def not_kept(output: bytes) -> None:
    """Discard the output. This is the default of `Outcome.log`."""


class NothingKept:
    """Takes the place of the sandbox in two cases: a session is graded again but none of its files were kept, or
    `DecidesEarly.decide` is called. Every operation except `broken_inside` raises EvaluatorError."""

    async def broken_inside(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise EvaluatorError(
            "no files of this session were kept: it can be regraded only by the agent's replies",
            hint="tasks with `evaluator.carry` and `evaluator.keep = true` keep what a grader needs",
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session, which an evaluator grades.

    transcript: the main conversation, including the last reply. Side conversations are left out.
    turns: the number of model calls.
    calls: the model calls, in the order in which they ended.
    runtime: the sandbox to grade, or a `NothingKept` if there is no sandbox.
    folders: paths of the session's folders in the agent's sandbox. A new sandbox does not have these folders.
    patch: the agent's change to a repository as `git diff` prints it, or None if the task does not ask for a diff.
    beside: opens another sandbox during an `async with` block, with the runtime spec of the task or of the evaluator.
        The sandbox is prepared, but untouched by agents and unreachable from `runtime`. It reserves no resources.
        `beside(resources)` gives it other limits. Raises RuntimeFailure.
    call_frozen: calls a frozen model.
    host: holds the objects that all evaluators of a node share, such as processes that check answers.
    bucket: the tenant and the label for which the session is queued (see store/queue.py). In queues of checks, tenants
        take turns, and so do the buckets of each tenant.
    off_the_clock: opens an `async with` block for a long wait, such as the wait in a queue of checks. The time limit
        does not run in the block, and other evaluations may start meanwhile.
    stalled_seconds: returns for how many seconds in total the event loop has stood still so far. An evaluator's own
        time limit should not count them.
    log: adds the output of a grader to the log of this grading, which is kept as an artifact.
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
    stalled_seconds: Callable[[], float] = float
    log: Callable[[bytes], None] = not_kept

    @property
    def folders(self) -> SessionFolders:
        return folders_in(self.runtime)


class Evaluator(Protocol):
    """Grades one outcome. `evaluate` raises EvaluatorError if it cannot grade. The caller cancels the call after
    `task.evaluator.seconds`."""

    async def evaluate(self, outcome: Outcome) -> Verdict: ...


@runtime_checkable
class DecidesEarly(Protocol):
    """An evaluator that can grade some outcomes without a sandbox."""

    def decide(self, outcome: Outcome) -> Verdict | None:
        """Return the verdict that `evaluate` would return, or None if grading needs a sandbox. This method must not use
        `outcome.runtime`. The caller sets `outcome.patch`, which is empty if the agent changed nothing. Raises
        EvaluatorError."""
        ...


@runtime_checkable
class ChecksSpec(Protocol):
    """An evaluator whose spec needs checks that are too slow for the constructor."""

    async def check_spec(self, host: Host) -> None:
        """Check the spec. The service calls this once, when the task is submitted. Raises InvalidField."""
        ...
