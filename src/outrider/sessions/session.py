"""One attempt of a session, from an init slot to a result, as one coroutine over three lanes.

    init slot → sandbox started and prepared → READY → run slot (then the init slot goes back)
    → harness runs → eval slot (then the run slot goes back) → verdict → teardown

To cancel the session is to cancel this coroutine. It knows no scheduler and no HTTP. Invariant: whatever happens,
the sandbox is stopped exactly once and every slot is given back.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from outrider.errors import ContextOverflow, ErrorRecord, EvaluatorError, HarnessError, OutriderError, record_of
from outrider.evaluators.base import Evaluator, Outcome
from outrider.harnesses.base import Endpoint, Harness, HarnessContext, HarnessOutcome
from outrider.lifecycle import SessionState, StopReason
from outrider.runtimes.base import LOG_TAIL, Runtime
from outrider.sessions.clock import Budget, Stopwatch
from outrider.sessions.conversation import Conversation, LimitReached
from outrider.sessions.lanes import Lanes
from outrider.sessions.model_client import ConversationClient
from outrider.sessions.prepare import prepare
from outrider.sessions.transcript import transcript
from outrider.spec import TaskSpec
from outrider.trajectory import StageSeconds, Turn, Verdict

log = logging.getLogger("outrider.session")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt is made of, built by its node. `teardown` runs the given work to its end."""

    task: TaskSpec
    priority: int
    key: str
    model: str
    files: Path
    conversation: Conversation
    runtime: Runtime
    harness: Harness
    evaluator: Evaluator
    lanes: Lanes
    enter: Callable[[SessionState], Awaitable[None]]
    turns: Callable[[], Awaitable[list[Turn]]]
    teardown: Callable[[Runtime], Awaitable[None]]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    reason: StopReason
    verdict: Verdict | None
    error: ErrorRecord | None
    seconds: StageSeconds


class SessionRun:
    """`await SessionRun(parts).run()` once. Only cancellation leaves it as an exception."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._budget = Budget(parts.task.limits.session_seconds)
        self._watch = Stopwatch()
        self._verdict: Verdict | None = None

    async def run(self) -> Ending:
        error: ErrorRecord | None = None
        try:
            reason = await self._stages()
        except Exception as failed:  # plugins run in here: whatever they raise is this session's failure alone
            if not isinstance(failed, OutriderError):
                log.exception("session %s failed in a way it never should", self._parts.conversation.session_key)
            reason, error = StopReason.ERROR, record_of(failed)
        self._watch.lap("stop")
        return Ending(
            reason=reason,
            verdict=self._verdict if error is None else None,
            error=error,
            seconds=StageSeconds(**self._watch.seconds),
        )

    async def _stages(self) -> StopReason:
        parts = self._parts
        async with AsyncExitStack() as held:
            init = await held.enter_async_context(await parts.lanes.init.take(parts.priority))
            self._watch.lap("queued")
            try:
                async with self._budget.spend():
                    await held.enter_async_context(self._sandbox())
                    context = await self._prepared()
            except TimeoutError:
                return self._out_of_time()
            self._watch.lap("init")
            await parts.enter(SessionState.READY)
            run = await held.enter_async_context(await parts.lanes.run.take(parts.priority))
            init.release()
            self._watch.lap("ready")
            await parts.enter(SessionState.RUNNING)
            reason, outcome = await self._run_agent(context)
            await parts.conversation.close()
            self._watch.lap("run")
            if reason is StopReason.SESSION_TIMEOUT:
                return reason
            await held.enter_async_context(await parts.lanes.eval.take(parts.priority))
            run.release()
            self._watch.lap("eval_wait")
            await parts.enter(SessionState.EVALUATING)
            self._verdict = await self._grade(reason, outcome)
            self._watch.lap("eval")
        return reason

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[None]:
        parts = self._parts
        try:
            await parts.runtime.start()
            yield
        finally:
            try:
                await parts.conversation.close()
            finally:
                await parts.teardown(parts.runtime)

    async def _prepared(self) -> HarnessContext:
        parts = self._parts
        await prepare(parts.runtime, parts.task.runtime.prepare, files=parts.files)
        context = HarnessContext(
            task=parts.task,
            runtime=parts.runtime,
            endpoint=Endpoint(base_url=f"{parts.runtime.endpoint}/s/{parts.key}", api_key=parts.key, model=parts.model),
            model=ConversationClient(parts.conversation),
        )
        await parts.harness.install(context)
        return context

    def _out_of_time(self) -> StopReason:
        if not self._budget.exhausted:
            raise HarnessError("a step of the session timed out by itself") from None
        return StopReason.SESSION_TIMEOUT

    def _out_of_session_time(self) -> StopReason:
        """The end of the session, unless it came of an engine that failed its last call."""
        reason, failure = self._out_of_time(), self._parts.conversation.failure
        if failure is not None and not isinstance(failure, ContextOverflow):
            raise failure
        return reason

    async def _run_agent(self, context: HarnessContext) -> tuple[StopReason, HarnessOutcome]:
        """Drive the harness until it ends, its clock or a limit ends it, or it fails."""
        parts = self._parts
        clock = asyncio.timeout(parts.task.limits.agent_seconds)
        limit = asyncio.timeout(None)
        parts.conversation.on_limit = lambda: limit.reschedule(asyncio.get_running_loop().time())
        try:
            async with self._budget.spend(), clock, limit:
                outcome = await parts.harness.run(context)
        except TimeoutError:
            if clock.expired():
                return await self._out_of_agent_time(), HarnessOutcome()
            if parts.conversation.limit is not None:
                return parts.conversation.limit, HarnessOutcome()
            return self._out_of_session_time(), HarnessOutcome()
        except LimitReached as reached:
            return reached.reason, HarnessOutcome()
        except OutriderError as error:
            return self._failed(error), HarnessOutcome(log_tail=error.log_tail or "")
        return self._ended_well(outcome), outcome

    async def _out_of_agent_time(self) -> StopReason:
        """What the agent had done by then is graded, unless its model had failed it or never said a word."""
        conversation = self._parts.conversation
        await conversation.close()
        if conversation.failure is not None or conversation.turns == 0:
            return self._failed(
                HarnessError(
                    "the agent's time ran out before the model had said anything",
                    hint="see whether an engine was there to answer, and whether the harness asked",
                )
            )
        return StopReason.AGENT_TIMEOUT

    def _failed(self, error: OutriderError) -> StopReason:
        """The first true cause of a failed run: a limit or a failed model call outranks the harness's exit."""
        conversation = self._parts.conversation
        if conversation.limit is not None:
            return conversation.limit
        if isinstance(conversation.failure, ContextOverflow):
            return StopReason.CONTEXT_OVERFLOW
        if conversation.failure is not None:
            conversation.failure.log_tail = error.log_tail
            raise conversation.failure
        raise error

    def _ended_well(self, outcome: HarnessOutcome) -> StopReason:
        """A harness that left properly, unless a limit or a failed call had ended it, or it never made one."""
        conversation = self._parts.conversation
        if conversation.limit is not None or conversation.failure is not None:
            return self._failed(HarnessError("", log_tail=outcome.log_tail))
        if conversation.turns == 0:
            raise HarnessError(
                "the harness ended without a single model call",
                hint="check its base URL, key and model settings in the log",
                log_tail=outcome.log_tail,
            )
        return StopReason.COMPLETED

    async def _grade(self, reason: StopReason, harness: HarnessOutcome) -> Verdict:
        """Evaluate, again on failure, up to the task's attempts: the agent's work is not thrown away."""
        parts = self._parts
        outcome = Outcome(
            task=parts.task,
            runtime=parts.runtime,
            stop_reason=reason,
            harness=harness,
            transcript=transcript(await parts.turns()),
            turns=parts.conversation.turns,
        )
        failure = EvaluatorError("not evaluated")
        for _ in range(parts.task.max_attempts):
            try:
                async with asyncio.timeout(parts.task.evaluator.seconds):
                    return await parts.evaluator.evaluate(outcome)
            except TimeoutError:
                failure = EvaluatorError(f"evaluation took longer than {parts.task.evaluator.seconds:g} s")
            except EvaluatorError as error:
                failure = error
            except OutriderError:
                raise
            except Exception as error:  # a plugin may raise anything
                failure = EvaluatorError(
                    f"the evaluator raised {type(error).__name__}: {error}", log_tail=end_of(error)
                )
        raise failure


def end_of(error: BaseException) -> str:
    """The end of an exception's traceback."""
    return "".join(traceback.format_exception(error))[-LOG_TAIL:]
