"""The contract of an evaluator: it turns the outcome of a session into a verdict, or raises.

It sees neither log-probabilities nor other sessions. Invariant: a failure to grade is an EvaluatorError, never a
reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NoReturn, Protocol, runtime_checkable

import msgspec

from outrider.errors import EvaluatorError
from outrider.harnesses.base import HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message
from outrider.runtimes.base import Runtime
from outrider.runtimes.node_host import Host
from outrider.spec import TaskSpec
from outrider.trajectory import ModelCall, Verdict

Aside = Callable[[], AbstractAsyncContextManager[None]]
"""See `Outcome.aside`."""


class FrozenReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a frozen model replied, and how many tokens went in and came out."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class AskFrozen(Protocol):
    """Calls a frozen model of the service by its name, once, apart from whatever the agent has asked it. Raises what a
    model call raises: EngineError, ContextOverflow, RequestError."""

    async def __call__(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> FrozenReply: ...


async def no_model(model: str, *_: object, **__: object) -> FrozenReply:
    raise EvaluatorError(f"there is no frozen model {model!r} here")


def no_sandbox() -> AbstractAsyncContextManager[Runtime]:
    raise EvaluatorError("there is no second sandbox here")


class NothingKept:
    """The runtime of an outcome that is graded again and of which no files were kept: an evaluator that asks anything
    of it fails."""

    async def broken_inside(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise EvaluatorError(
            "no files of this session were kept: it can be graded again only by what its agent said",
            hint="tasks with `evaluator.carry` and `evaluator.keep = true` keep what a grader needs",
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What is graded. `transcript` is the main branch as messages, with the last reply; `turns` the number of model
    calls, and `calls` these, in the order in which they ended.

    `runtime` is the sandbox that is graded. Of an outcome that was kept without files it refuses everything
    (`NothingKept`). `patch` is what the agent changed in a repository, as `git diff` says it, if that is carried.

    `beside()` is another sandbox of the task's runtime, or of the evaluator's own, for as long as its block runs: it is
    prepared, no agent has touched it, and nothing that runs in `runtime` can reach it. It sets no resources aside.
    Raises RuntimeFailure. `ask_frozen` calls a frozen model. `host` is the node's: evaluators share its parts.

    `bucket` is the one of the queue that the session is of (see store/queue.py): where evaluations wait for each other,
    tenants take turns, and the buckets of each. `aside()` is for a long wait of that kind: as long as its block runs,
    the evaluation holds no eval slot, and its time limit stands still.
    """

    task: TaskSpec
    runtime: Runtime
    stop_reason: StopReason
    harness: HarnessOutcome
    transcript: tuple[Message, ...]
    turns: int
    calls: tuple[ModelCall, ...] = ()
    patch: bytes | None = None
    beside: Callable[[], AbstractAsyncContextManager[Runtime]] = no_sandbox
    ask_frozen: AskFrozen = no_model
    host: Host | None = None
    bucket: str = ""
    aside: Aside = nullcontext


class Evaluator(Protocol):
    """Grades one outcome. `evaluate` raises EvaluatorError when it cannot. The caller sets the time limit."""

    async def evaluate(self, outcome: Outcome) -> Verdict: ...


@runtime_checkable
class ChecksSpec(Protocol):
    """An evaluator that has more to check of its spec than its constructor can, which must not wait for long."""

    async def check_spec(self, host: Host) -> None:
        """Called once, when the task is submitted; `host` is the service's. Raises InvalidField."""
        ...
