"""One attempt of a session, from an init slot to a result, as one coroutine over three lanes.

    room for what it needs → init slot → sandbox started and prepared → READY → run slot (then the init slot goes back)
    → harness runs → eval slot (then the run slot goes back) → verdict → teardown
      (what is graded elsewhere is carried there first, and the agent's sandbox stopped)

To cancel the session is to cancel this coroutine. It knows no scheduler and no HTTP. Invariant: whatever happens,
the sandbox is stopped exactly once and every slot is given back, the room last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from outrider.concurrency.watchdog import Watchdog, Witness
from outrider.errors import ContextOverflow, ErrorRecord, HarnessError, OutriderError, ServiceError, plain, record_of
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import Endpoint, Harness, HarnessContext, HarnessOutcome, ProgramExit
from outrider.lifecycle import SessionState, StopReason
from outrider.messages import Message
from outrider.plugins import contained
from outrider.runtimes.base import Runtime
from outrider.sandboxes.sandbox import Sandbox
from outrider.sessions.blame import blamed
from outrider.sessions.calls.token_allowance import LimitReached
from outrider.sessions.clock import Budget, Stopwatch
from outrider.sessions.conversation import Conversation
from outrider.sessions.grading import Grading
from outrider.sessions.model_client import ConversationClient
from outrider.sessions.resources import asked
from outrider.sessions.slots import Lanes
from outrider.sessions.transcript import transcript
from outrider.spec import TaskSpec
from outrider.trajectory import HarnessExit, StageSeconds, Turn, Verdict

log = logging.getLogger("outrider.session")


HARMFUL_SECONDS = 2.0
"""A stall from which on an agent's client may have given up. Shorter ones are no longer than a slow model call."""
ENDED_BADLY = frozenset({StopReason.AGENT_TIMEOUT, StopReason.SESSION_TIMEOUT, StopReason.NONZERO_EXIT})


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt is made of, built by its node. `sandbox` gives the agent's; `collect` keeps the artifacts that
    are in it."""

    task: TaskSpec
    priority: int
    key: str
    model: str
    conversation: Conversation
    sandbox: Callable[[], Awaitable[Sandbox]]
    harness: Harness
    grading: Grading
    lanes: Lanes
    watchdog: Watchdog
    enter: Callable[[SessionState], Awaitable[None]]
    turns: Callable[[], Awaitable[list[Turn]]]
    collect: Callable[[Runtime], Awaitable[None]]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    reason: StopReason
    verdict: Verdict | None
    error: ErrorRecord | None
    harness_exit: HarnessExit | None
    seconds: StageSeconds


class SessionRun:
    """`await SessionRun(parts).run()` once. Only cancellation leaves it as an exception."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._budget = Budget(parts.task.limits.session_seconds, parts.watchdog.stood_still)
        self._watch = Stopwatch()
        self._verdict: Verdict | None = None
        self._harness_exit: HarnessExit | None = None

    async def run(self) -> Ending:
        error: ErrorRecord | None = None
        try:
            with contained():
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
            harness_exit=self._harness_exit,
            seconds=StageSeconds(**self._watch.seconds),
        )

    async def _stages(self) -> StopReason:
        parts = self._parts
        async with AsyncExitStack() as held:
            needs = asked(parts.task.runtime.resources)
            await held.enter_async_context(await parts.lanes.room.take(needs, parts.priority))
            init = await held.enter_async_context(await parts.lanes.init.take(parts.priority))
            self._watch.lap("queued")
            try:
                async with self._budget.spend():
                    sandbox = await held.enter_async_context(self._sandbox())
                    context = await self._prepared(sandbox)
            except TimeoutError:
                return self._out_of_time()
            self._watch.lap("init")
            await parts.enter(SessionState.READY)
            run = await held.enter_async_context(await parts.lanes.run.take(parts.priority))
            init.release()
            self._watch.lap("ready")
            await parts.enter(SessionState.RUNNING)
            held.push_async_callback(parts.grading.close)
            parts.grading.begin()
            failure: OutriderError | None = None
            try:
                async with blamed(sandbox.runtime):
                    reason, outcome = await self._run_and_collect(context)
            except OutriderError as error:
                if not self._is_the_agents(error):
                    raise
                reason, failure = StopReason.AGENT_EXCESS, error
                outcome = HarnessOutcome(log_tail=error.log_tail or "")
            if reason is StopReason.SESSION_TIMEOUT:
                return reason
            await held.enter_async_context(await parts.lanes.eval.take(parts.priority))
            run.release()
            self._watch.lap("eval_wait")
            await parts.enter(SessionState.EVALUATING)
            return await self._graded(sandbox, await self._outcome(sandbox, reason, outcome), failure)

    async def _graded(self, sandbox: Sandbox, outcome: Outcome, failure: OutriderError | None) -> StopReason:
        """The verdict, and how the session ended: that may turn out now. `failure` is of an agent that seems to have
        broken its sandbox while it ran: what it left is graded, if it can be."""
        grading = self._parts.grading
        verdict: Verdict | None = None
        try:
            if grading.carries:
                async with blamed(sandbox.runtime):
                    await grading.carry(sandbox.runtime)
                self._watch.lap("eval")
                await self._stop(sandbox)
            verdict = await grading.verdict(outcome)
        except OutriderError as error:
            if not self._is_the_agents(error):
                raise
            failure = failure or error
        self._watch.lap("eval")
        if failure is not None:
            await self._stop(sandbox)
            confirmed = await grading.confirm(failure, outcome)
            verdict = verdict or confirmed
            self._watch.lap("eval")
        self._verdict, self._harness_exit = verdict, exit_of(outcome.harness)
        return StopReason.AGENT_EXCESS if failure is not None else outcome.stop_reason

    def _is_the_agents(self, error: OutriderError) -> bool:
        """Whether a failure may be what the agent did: it came from inside the sandbox, and its model has spoken."""
        return error.inside and self._parts.conversation.replies > 0

    async def _stop(self, sandbox: Sandbox) -> None:
        await sandbox.stop()
        self._watch.lap("stop")

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Sandbox]:
        parts = self._parts
        async with AsyncExitStack() as held:
            held.push_async_callback(parts.conversation.close)
            sandbox = await parts.sandbox()
            held.push_async_callback(sandbox.stop)
            held.push_async_callback(parts.conversation.close)
            yield sandbox

    async def _prepared(self, sandbox: Sandbox) -> HarnessContext:
        parts = self._parts
        await sandbox.ready()
        runtime = sandbox.runtime
        context = HarnessContext(
            task=parts.task,
            runtime=runtime,
            endpoint=Endpoint(base_url=f"{runtime.endpoint}/s/{parts.key}", api_key=parts.key, model=parts.model),
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

    async def _run_and_collect(self, context: HarnessContext) -> tuple[StopReason, HarnessOutcome]:
        """The agent's run, and what it left, also when it failed: then it is wanted most. Raises what broke the record
        of its calls, perhaps of one that was cut off at the end."""
        with self._parts.watchdog.witness() as stalls:
            try:
                ended = await self._run_agent(context)
            except Exception as error:  # plugins too: whatever it was is raised again
                await self._collect(context.runtime)
                self._check_harm(stalls, error)
                raise
            await self._collect(context.runtime)
        if (broken := self._parts.conversation.broken) is not None:
            raise broken
        if self._parts.conversation.hung_up or ended[0] in ENDED_BADLY:
            self._check_harm(stalls)
        return ended

    def _check_harm(self, stalls: Witness, error: Exception | None = None) -> None:
        """Raise ServiceError for a run that ended badly after the service itself had stood still: a client may have
        given up waiting for it. What such an agent has done says nothing about the policy."""
        if stalls.longest >= HARMFUL_SECONDS:
            raise ServiceError(
                f"the service stood still for {stalls.longest:.1f} s while the agent ran, which then ended badly",
                hint="see the service's log for what held it, and whether its machine is overloaded",
            ) from error

    async def _collect(self, runtime: Runtime) -> None:
        await self._parts.conversation.close()
        self._watch.lap("run")
        await self._parts.collect(runtime)
        self._watch.lap("stop")

    async def _run_agent(self, context: HarnessContext) -> tuple[StopReason, HarnessOutcome]:
        """Drive the harness until it ends, its clock or a limit ends it, or it fails."""
        parts = self._parts
        clock = Budget(parts.task.limits.agent_seconds, parts.watchdog.stood_still)
        limit = asyncio.timeout(None)
        parts.conversation.on_limit = lambda: limit.reschedule(asyncio.get_running_loop().time())
        try:
            async with self._budget.spend(), clock.spend(), limit:
                outcome = await parts.harness.run(context)
        except TimeoutError:
            if clock.exhausted:
                return await self._out_of_agent_time(), HarnessOutcome()
            if parts.conversation.limit is not None:
                return parts.conversation.limit, HarnessOutcome()
            return self._out_of_session_time(), HarnessOutcome()
        except LimitReached as reached:
            return reached.reason, HarnessOutcome()
        except OutriderError as error:
            code = error.exit_code if isinstance(error, ProgramExit) else 0
            return self._failed(error), HarnessOutcome(log_tail=error.log_tail or "", exit_code=code)
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
        if isinstance(error, ProgramExit) and conversation.replies:
            return StopReason.NONZERO_EXIT
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

    async def _transcript(self) -> tuple[Message, ...]:
        turns = await self._parts.turns()
        return await self._parts.conversation.endpoint.offload.run(lambda: transcript(turns))

    async def _outcome(self, sandbox: Sandbox, reason: StopReason, harness: HarnessOutcome) -> Outcome:
        parts = self._parts
        return Outcome(
            task=parts.task,
            runtime=sandbox.runtime,
            stop_reason=reason,
            harness=harness,
            transcript=await self._transcript(),
            turns=parts.conversation.turns,
        )


def exit_of(outcome: HarnessOutcome) -> HarnessExit | None:
    return HarnessExit(code=outcome.exit_code, log_tail=plain(outcome.log_tail)) if outcome.exit_code else None
