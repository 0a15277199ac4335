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
    """Calls a frozen model of the service by name, once, in a conversation separate from the agent's. Raises the errors
    of a model call: EngineError, ContextOverflow, RequestError."""

    async def __call__(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> FrozenReply: ...


async def no_model(model: str, *_: object, **__: object) -> FrozenReply:
    raise EvaluatorError(f"there is no frozen model {model!r} here")


class OpenSandbox(Protocol):
    """Opens another sandbox, with the limits `resources`, or with the limits of its runtime if `resources` is None."""

    def __call__(self, resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]: ...


def no_sandbox(resources: Resources | None = None) -> AbstractAsyncContextManager[Runtime]:
    raise EvaluatorError("there is no second sandbox here")


def not_kept(output: bytes) -> None:
    """Discard a part of the grading's log."""


class NothingKept:
    """The runtime of a regraded outcome without kept files. Every operation except `broken_inside` raises
    EvaluatorError."""

    async def broken_inside(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise EvaluatorError(
            "no files of this session were kept: it can be regraded only by the agent's replies",
            hint="tasks with `evaluator.carry` and `evaluator.keep = true` keep what a grader needs",
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a session to grade. `transcript` is the main branch as messages, with the last reply. `turns` is
    the number of model calls. `calls` are the model calls in the order in which they ended. `ids` are the ids of the
    attempt. `folders` are the session's folders in the agent's sandbox; a new sandbox does not have them.

    `runtime` is the graded sandbox. For a regraded outcome without kept files, `runtime` is a `NothingKept`. `patch` is
    the agent's change to a repository in the format of `git diff`, if the task carries a diff.

    `beside()` opens another sandbox of the task's runtime, or of the evaluator's own runtime, for the duration of the
    block. The new sandbox is prepared, untouched by agents, unreachable for programs in `runtime`, and reserves no
    resources. `beside(resources)` gives the new sandbox these limits in place of the runtime's. Raises RuntimeFailure.
    `call_frozen` calls a frozen model. `host` is the host of the node, whose parts are shared by evaluators.

    `bucket` is the session's bucket in the queue (see store/queue.py). In queues of evaluations, tenants take turns,
    and the buckets of each tenant take turns as well. `off_the_clock()` is for long waits in such queues: during the
    block, the evaluation holds no eval slot, and the time does not count towards the evaluation's time limit.

    `log(output)` adds the output of a grader to the log of the session's grading, which is kept as an artifact.
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
    """Grades one outcome. `evaluate` raises EvaluatorError when grading fails. The caller bounds the call by the time
    limit `task.evaluator.seconds`."""

    async def evaluate(self, outcome: Outcome) -> Verdict: ...


@runtime_checkable
class DecidesEarly(Protocol):
    """An evaluator that can decide some outcomes without a sandbox."""

    def decide(self, outcome: Outcome) -> Verdict | None:
        """Return the verdict that `evaluate` would return for the outcome, or None if a sandbox is needed to find the
        verdict. `outcome.patch` is set; it is empty for an agent that changed nothing. `outcome.runtime` cannot be
        used. Raises EvaluatorError."""
        ...


@runtime_checkable
class ChecksSpec(Protocol):
    """An evaluator whose spec needs checks that are too slow for the constructor."""

    async def check_spec(self, host: Host) -> None:
        """Check the spec. Called once, when the task is submitted, with the service's `host`. Raises InvalidField."""
        ...
