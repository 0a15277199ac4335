"""Runs one attempt of a session, from the wait for resources to the result. The attempt is one coroutine that takes a
slot of each lane in turn.

    resources set aside → ready slot → init slot → sandbox started and prepared (then the init slot is released)
    → READY → run slot (then the ready slot is released) → harness runs → artifacts collected
    → eval slot (then the run slot is released) → verdict → teardown → result

The steps of a task run one after another in the same sandbox. All steps except the last are graded while the attempt
holds its run slot. An attempt that only grades an earlier run again starts no agent, and takes only resources and an
eval slot.

A session is cancelled by cancelling this coroutine. Invariant: whatever happens, the sandbox is stopped exactly once,
every slot is released, and the resources are released last.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import cast

import msgspec

from outrider.concurrency.watchdog import Watchdog
from outrider.destinations import Phase
from outrider.engines.pool.waits import Overdue
from outrider.errors import (
    ContextOverflow,
    ErrorRecord,
    EvaluatorError,
    HarnessError,
    InvalidField,
    OutriderError,
    RuntimeFailure,
    record_of,
    storable,
)
from outrider.evaluators.base import Evaluator, FrozenReply, NothingKept, OffTheClock, Outcome
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.base import Harness, HarnessContext, HarnessOutcome, ModelEndpoint, ModelRefused, ProgramExit
from outrider.harnesses.factory import make_harness, mcp_tool_names
from outrider.harnesses.venv import FIELD as VENV
from outrider.lifecycle import SessionState, StopReason
from outrider.messages import Message
from outrider.plugins import plugin_code, resolve
from outrider.sandbox.network.record import NetworkRecord, record_file
from outrider.sandbox.runtimes.base import QueuesStarts, Runtime, RuntimeKind
from outrider.sandbox.sandbox import CommandFailed, Sandbox, Sandboxes, check_carry, collect, prepare, unavailable_here
from outrider.sandbox.warm_pool import WarmPool
from outrider.schemas import ArtifactList
from outrider.sessions.artifacts import ArtifactCollector, GradingLog, KeptFiles, make_folders
from outrider.sessions.attempt import Attempt, AttemptStore, session_result
from outrider.sessions.blame import HARMFUL_SECONDS, Blame, Cause, End, Facts, Stage, decide, end_of
from outrider.sessions.calls.call import FrozenModel, ModelBackend
from outrider.sessions.calls.limits import LimitReached
from outrider.sessions.clock import Budget, Cutoff, Stopwatch
from outrider.sessions.conversation import Conversation, overdue_error, stall_error
from outrider.sessions.filters import EndedAgentRun, filtered
from outrider.sessions.grading import Grade, Grading, came_from_inside
from outrider.sessions.lanes import HeldSlot, Lanes
from outrider.sessions.models import InProcessClient, SessionModels, completed
from outrider.sessions.resources import NodeResources, session_needs
from outrider.sessions.step_verdicts import verdict_on_steps
from outrider.sessions.timelines import Timelines, noting_stored
from outrider.sessions.transcript import transcript
from outrider.spec import Limits, SamplingSpec, fields_of_step, runtimes_of, step_field, steps_of
from outrider.store.artifacts import FOR_GRADERS
from outrider.timeline import EntryKind, Timeline
from outrider.tokens.samples import model_calls, policy_of
from outrider.trajectory import BranchPolicy, HarnessExit, SessionResult, StageSeconds, Turn, Verdict

log = logging.getLogger("outrider.session")

AGENT = "agent"
"""In the timeline, the name of the sandbox in which the agent runs."""

USED_UP = frozenset({StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.AGENT_EXCESS})
"""If a step ends for one of these reasons, the next step does not begin."""


class NodeServices(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that all rollouts of a node share."""

    model: ModelBackend
    frozen: tuple[FrozenModel, ...] = ()
    store: AttemptStore
    artifacts: ArtifactCollector
    lanes: Lanes
    resources: NodeResources
    sandboxes: Sandboxes
    warm_pool: WarmPool
    timelines: Timelines
    watchdog: Watchdog
    endpoints: Endpoints
    service_silence: Callable[[], float] = lambda: 0.0
    """Returns for how many seconds a service in another process has been silent until now, or 0 if it is not stalled.
    Stalls that are over count in `watchdog` (see `LocalNode.note_stall`)."""

    def stalled_seconds(self) -> float:
        """Return the total seconds so far during which no session could make progress, because the event loop was
        blocked, the service was stalled or the policy was paused. Overlapping periods count twice, in favour of the
        sessions."""
        return self.watchdog.stalled_seconds() + self.service_silence() + self.model.pool.policy.gate.paused_seconds()


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an agent's run. `failure` is set only for AGENT_EXCESS. The failure came from inside the agent's
    sandbox. The grading must still confirm that the agent caused it."""

    reason: StopReason
    outcome: HarnessOutcome
    failure: OutriderError | None = None

    @property
    def failed_exit(self) -> HarnessExit | None:
        code, log_tail = self.outcome.exit_code, storable(self.outcome.log_tail)
        return HarnessExit(code=code, log_tail=log_tail) if code else None


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt: the stop reason, and the verdict or the error if there is one. For `run_reason` see
    `SessionResult`, and for `patch` see `Grade`."""

    reason: StopReason
    verdict: Verdict | None = None
    error: ErrorRecord | None = None
    harness_exit: HarnessExit | None = None
    run_reason: StopReason | None = None
    patch: bytes | None = None


class Rollout:
    """Runs one attempt: call `await Rollout(attempt, key, node).run()` once. `key` is the credential for the agent's
    model calls."""

    def __init__(self, attempt: Attempt, key: str, node: NodeServices) -> None:
        self._attempt = attempt
        self._session = attempt.session
        self._task = attempt.task
        self._key = key
        self._node = node
        self._overdue = Overdue()
        self._queued: list[QueuesStarts] = []
        """Runtimes on another service that may queue their start."""
        # local names, because the lambda must not refer to this rollout (see `on_limit` below)
        overdue, queued = self._overdue, self._queued
        self._stalled_seconds: Callable[[], float] = lambda: (
            node.stalled_seconds() + overdue.seconds() + sum(one.queued_seconds() for one in queued)
        )
        """Returns the total seconds, up to now, that no clock of the session counts."""
        self._budget = Budget(attempt.task.limits.session_seconds, self._stalled_seconds)
        logged = attempt.logged
        self._timeline = Timeline(attempt.session.id, attempt.session.attempt, secrets=logged.secrets)
        self._stopwatch = Stopwatch(self._timeline)
        self._cutoff = Cutoff()
        self._artifacts = ArtifactList(
            session_id=attempt.session.id, attempt=attempt.session.attempt, artifacts=(), left_out=()
        )
        self._kept_files = KeptFiles()
        self._grading_log = GradingLog()
        self._graded: AgentRun | None = None
        """The agent's run, set when its grading begins."""
        self._gpus: tuple[str, ...] = ()
        """Names of the GPUs set aside for the session."""
        self._gradings = count()
        self._grading_sandboxes = count()
        self._records: list[NetworkRecord] = []
        """The network records of the session's sandboxes."""
        self._steps = steps_of(attempt.task)
        self._step = self._steps[0]
        """The current step, as a task that has only this step."""
        self._verdicts: list[Verdict] = []
        """Verdicts on the steps before `_step`."""
        self.conversation = Conversation(
            node.model,
            session_key=attempt.name,
            sample_index=attempt.session.sample_index,
            limits=attempt.task.limits,
            sampling=attempt.task.sampling,
            history=attempt.task.history,
            record=noting_stored(
                self._timeline, partial(node.store.add_turn, attempt.session.id, attempt.session.attempt)
            ),
            # The callbacks refer to the cutoff instead of this rollout. Otherwise there would be a reference cycle, and
            # only the garbage collector would free the token tree, which may take megabytes.
            on_limit=self._cutoff.cut,
            on_broken=self._cutoff.cut,
            overdue=overdue,
        )
        self.models = SessionModels(
            self.conversation,
            {
                model.backend.model: _frozen_conversation(
                    model, attempt, node.store, overdue, self._cutoff, self._timeline
                )
                for model in node.frozen
            },
            logged=logged,
            timeline=self._timeline,
        )

    async def run(self) -> SessionResult:
        """Run the attempt and return its result. Raises CancelledError, and the store's error if the stored turns
        cannot be read. All other errors are part of the result."""
        with self._node.timelines.keeping(self._timeline):
            return await self._run()

    async def _run(self) -> SessionResult:
        try:
            with plugin_code():
                ending = await self._stages()
        except Exception as failed:  # a plugin may raise anything; only this session fails
            if not isinstance(failed, OutriderError):
                log.exception("session %s failed unexpectedly", self._attempt.name)
            ending = Ending(reason=StopReason.ERROR, error=record_of(failed))
            if (run := self._graded) is not None and run.failure is None:
                ending = msgspec.structs.replace(ending, run_reason=run.reason, harness_exit=run.failed_exit)
        keeper = self._node.artifacts
        self._artifacts = await keeper.keep_log(self._grading_log, self._artifacts)
        if self._records:  # in a thread, because encoding megabytes takes a while
            record = await asyncio.to_thread(record_file, self._records)
            self._artifacts = await keeper.keep_record(record, self._artifacts)
        self._stopwatch.lap("stop")
        session, store, stored = self._session, self._node.store, self._attempt.stored
        turns, verdict, at_most = await self._turns(), ending.verdict, BranchPolicy.TRAIN
        if verdict is not None and ending.reason is not StopReason.AGENT_EXCESS:
            verdict, at_most = filtered(EndedAgentRun(ending.reason, turns, ending.patch), verdict, self._task.filters)
        forks = {cause.value: number for cause, number in self.conversation.tree.forks.items()}
        build = partial(
            session_result,
            session,
            ending.reason,
            turns,
            task=self._task,
            verdict=verdict,
            at_most=at_most,
            error=ending.error,
            harness_exit=ending.harness_exit,
            forks=forks if stored is None else stored.forks,
            failed_calls=self.models.failed_calls.counted if stored is None else stored.failed_calls,
            frozen=await store.frozen_turns(session.id, session.attempt) if self._node.frozen else {},
            seconds=StageSeconds(**self._stopwatch.seconds),
            artifact_bytes=sum(artifact.size for artifact in self._artifacts.artifacts),
            answer=None if self._graded is None else storable(self._graded.outcome.answer),
            carried=any(artifact.path in FOR_GRADERS for artifact in self._artifacts.artifacts),
            run_reason=ending.run_reason,
            regrades=self._attempt.regrades,
        )
        # in a thread, because counting the tokens of a long session takes a while
        return await self._node.model.offload.run(build)

    async def _stages(self) -> Ending:
        """Run the stages of the attempt in order. Sandboxes, slots and resources are always released in reverse
        order."""
        lanes, line = self._node.lanes, (self._attempt.priority, self._attempt.tenant)
        # In a thread, because this may take long: options may have megabytes, and some harnesses must build the folder
        # that the sandbox mounts.
        harness, mounts, evaluators = await asyncio.to_thread(self._made)
        *earlier, grading = [self._grading_of(number, made, mounts) for number, made in enumerate(evaluators)]
        # The session holds no slot and no resource yet, and none of its budgets is being spent. So the wait for an
        # image delays no other session, and is not charged to this session.
        for runtime, field in runtimes_of(self._task):
            await self._node.sandboxes.pulls.want(runtime, field=field)
        if self._attempt.stored is not None:
            return await self._grade_again(grading, self._attempt.stored)
        await self._check_later_needs()
        async with AsyncExitStack() as held:
            share = await self._node.resources.take(session_needs(self._task), *line)
            await held.enter_async_context(share)
            self._gpus = share.gpus
            ready = await held.enter_async_context(await lanes.ready.take(*line))
            init = await held.enter_async_context(await lanes.init.take(*line))
            self._stopwatch.lap("queued")
            preparing = Budget(self._task.limits.prepare_seconds, self._stalled_seconds)
            try:
                async with self._budget.spend(), preparing.spend():
                    names = mcp_tool_names(self._task.harness)
                    started = self._timeline.begin(
                        EntryKind.SANDBOX,
                        self._task.runtime.kind or "",
                        sandbox=AGENT,
                        **({"mcp_tools": names} if names else {}),
                    )
                    sandbox = await self._sandbox(mounts)
                    held.push_async_callback(sandbox.stop)
                    self._records += sandbox.records
                    held.enter_context(self._node.timelines.sandbox(self._timeline, sandbox, AGENT))
                    # model calls must end before the agent's sandbox is stopped
                    held.push_async_callback(self.models.close)
                    warm = sandbox.started
                    if not warm and isinstance(sandbox.runtime, QueuesStarts):
                        self._queued.append(sandbox.runtime)
                    await sandbox.ready()
                    self._timeline.end(started, warm=warm)
                    context = await self._ready(sandbox, harness)
            except TimeoutError:
                return self._timed_out(Stage.PREPARE, preparing)
            init.release()
            self._stopwatch.lap("init")

            await self._enter(SessionState.READY)
            # From here on, the next slot is taken before the previous one is released, so that the slots limit the
            # number of running sandboxes.
            run = await held.enter_async_context(await lanes.run.take(*line))
            ready.release()
            self._stopwatch.lap("ready")

            await self._enter(SessionState.RUNNING)
            for before, after in pairwise((*earlier, grading)):
                if (ending := await self._run_step(before, sandbox, harness, context)) is not None:
                    return ending
                if (ending := await self._begin_step(after, sandbox, harness, context)) is not None:
                    return ending
            await held.enter_async_context(grading)
            grading.start_ahead()
            ended = await self._run_and_collect(sandbox, harness, context)
            if ended.reason is StopReason.SESSION_TIMEOUT:  # without grading, because no time is left
                return Ending(reason=ended.reason)

            place = await held.enter_async_context(HeldSlot(lanes.eval, *line))
            run.release()
            self._stopwatch.lap("eval_wait")

            await self._enter(SessionState.EVALUATING)
            return self._with_all_steps(await self._grade(grading, sandbox, ended, place.off_the_clock))

    def _made(self) -> tuple[Harness, tuple[Path, ...], list[Evaluator]]:
        """Create the harness, and the evaluator of each step. Returns the harness, the host paths that the harness's
        programs need, and the evaluators. Raises InvalidField if the task names a host path that tasks must not use.
        Raises RuntimeUnavailable if an evaluator needs something that the task's kind of sandbox cannot provide, and
        EvaluatorError if an evaluator cannot be made on this machine."""
        for number, step in enumerate(self._steps):
            if step.evaluator.carry == "all":
                kind: RuntimeKind = resolve("runtime", self._task.runtime.sandbox_kind)
                with fields_of_step(number), unavailable_here():
                    check_carry(step, kind)
        harness = make_harness(self._task.harness)
        mounts = harness.mounts()
        if (venv := self._task.harness.venv) is not None:
            self._node.sandboxes.paths.check_venv(venv, mounts, field=VENV)
        evaluators = []
        for number, step in enumerate(self._steps):
            with fields_of_step(number), ungradable_here():
                evaluators.append(make_evaluator(step.evaluator, self._node.endpoints))
        return harness, mounts, evaluators

    async def _check_later_needs(self) -> None:
        """Raise RuntimeFailure if this machine lacks something that the session needs only after the agent's first run.
        Checks what the graders' own sandboxes need, and which files later steps upload."""
        sandboxes = self._node.sandboxes
        (agent, _), *graders = runtimes_of(self._task)
        for runtime, field in graders:
            await sandboxes.check(runtime, field=field, agent=agent)
        for number, later in enumerate(self._task.then):
            await sandboxes.check_uploads(later.prepare, field=f"{step_field(number + 1)}.prepare")

    def _grading_of(self, number: int, evaluator: Evaluator, mounts: tuple[Path, ...]) -> Grading:
        step = self._steps[number]
        return Grading(
            msgspec.structs.replace(self._attempt, task=step),
            evaluator,
            sandboxes=self._node.sandboxes,
            lanes=self._node.lanes,
            resources=self._node.resources,
            mounts=mounts,
            stopwatch=self._stopwatch,
            timeline=self._timeline,
            timelines=self._node.timelines,
            keep=self._keep_carried,
            log=self._grading_log,
            numbers=self._grading_sandboxes,
            field=f"{step_field(number)}.evaluator",
            goes_on=number + 1 < len(self._steps),
            records=self._records,
        )

    async def _run_step(
        self, grading: Grading, sandbox: Sandbox, harness: Harness, context: HarnessContext
    ) -> Ending | None:
        """Run and grade a step that is not the last. Returns None if the next step may begin, or else the ending of the
        session."""
        async with grading:
            grading.start_ahead()
            ended = await self._run_and_collect(sandbox, harness, context)
            if ended.reason is StopReason.SESSION_TIMEOUT:
                return Ending(reason=ended.reason)
            ending = await self._grade(grading, sandbox, ended)
        verdict = ending.verdict
        assert verdict is not None
        needs = self._task.then[len(self._verdicts)].needs
        earned = {"reward": verdict.reward, **verdict.metrics}
        enough = all(earned.get(name, -math.inf) >= least for name, least in needs.items())
        if ending.reason in USED_UP or not enough:
            return self._with_all_steps(ending)
        self._verdicts.append(verdict)
        return None

    async def _begin_step(
        self, grading: Grading, sandbox: Sandbox, harness: Harness, context: HarnessContext
    ) -> Ending | None:
        """Prepare the sandbox and the agent for the next step. Returns None if the step can begin. Returns the ending
        of the session if the time has run out, or if the agent is to blame for a failure. Any other failure is raised.

        The agent is to blame if a prepare command fails in this sandbox, in which the agent has worked, but succeeds in
        a new sandbox.
        """
        before = len(self._verdicts) - 1  # index of the new step in `then`, which does not contain the first step
        self._step = self._steps[before + 1]
        prepared, paths = self._task.then[before].prepare, self._node.sandboxes.paths
        try:
            async with self._budget.spend():
                async with sandbox.network(Phase.PREPARE):
                    await prepare(sandbox.runtime, prepared, paths=paths, field=f"task.then.{before}.prepare")
                await harness.install(msgspec.structs.replace(context, task=self._step))
        except TimeoutError:
            return self._timed_out(Stage.NEXT_STEP)
        except (RuntimeFailure, HarnessError) as failure:
            # The failure of a command counts as a failure from inside the sandbox. The grading then runs the same
            # command in a new sandbox. It blames the agent only if the command succeeds there.
            inside = isinstance(failure, CommandFailed) or await came_from_inside(sandbox.runtime, failure)
            replied = self.conversation.replies > 0
            facts = Facts(stage=Stage.NEXT_STEP, end=end_of(failure), inside=inside, replied=replied)
            if decide(facts).blame is not Blame.AGENT:
                raise
            outcome = HarnessOutcome(log_tail=failure.log_tail or "")
            ended = AgentRun(reason=StopReason.AGENT_EXCESS, outcome=outcome, failure=failure)
            async with grading:
                return await self._grade(grading, sandbox, ended)
        finally:
            self._stopwatch.lap("init")
        self.models.begin_step()
        return None

    def _with_all_steps(self, ending: Ending) -> Ending:
        """Return `ending`, the ending of the last graded step, with one verdict on all steps."""
        if len(self._steps) == 1 or ending.reason is StopReason.AGENT_EXCESS or ending.verdict is None:
            return ending
        verdict = verdict_on_steps([*self._verdicts, ending.verdict], self._task.steps_reward)
        return msgspec.structs.replace(ending, verdict=verdict)

    async def _sandbox(self, mounts: tuple[Path, ...]) -> Sandbox:
        """Take a sandbox from the warm pool, or make a new one."""
        return await self._node.warm_pool.take(self._task.runtime, mounts) or await self._node.sandboxes.make(
            self._task.runtime,
            self._session.id,
            self._session.attempt,
            mounts=mounts,
            gpus=self._gpus[: self._task.runtime.resources.gpus],
        )

    async def _ready(self, sandbox: Sandbox, harness: Harness) -> HarnessContext:
        """Install the harness in the started sandbox, and return the context in which it runs."""
        runtime, model = sandbox.runtime, self._node.model.model
        await make_folders(runtime)
        context = HarnessContext(
            task=self._task,
            runtime=runtime,
            endpoint=ModelEndpoint(base_url=f"{runtime.endpoint}/s/{self._key}", api_key=self._key, model=model),
            model=InProcessClient(self.models),
            ids=self._attempt.ids,
        )
        await harness.install(context)
        return context

    async def _run_and_collect(self, sandbox: Sandbox, harness: Harness, context: HarnessContext) -> AgentRun:
        """Run the agent and collect its artifacts. Artifacts are also collected after a failure, because they may show
        the cause of the failure.

        Raises an error if `blame.decide` rules that the attempt has failed and the agent is not to blame.
        """
        models, conversation = self.models, self.conversation
        self._overdue.begin_run()
        with self._node.watchdog.witness() as stalls:
            end, error, outcome = await self._run_agent(sandbox, harness, context)
            # Read these values before `_collect` ends the running calls. The turns of those calls do not count, because
            # the agent's program received no reply to them.
            called, failure, unanswered = conversation.step_turns > 0, models.failure, conversation.failure
            try:
                await self._collect(sandbox)
            except Exception as failed:  # a plugin may raise anything
                if error is not None:
                    log.warning(
                        "session %s: its run had ended before with %s: %s",
                        self._attempt.name,
                        type(error).__name__,
                        error,
                    )
                # The agent's run has ended, so neither the agent's program nor a clock can be the cause of this error.
                # Only a failure of the sandbox may still come from the agent.
                end = end_of(failed) if isinstance(failed, RuntimeFailure | EvaluatorError) else End.ERROR
                error = failed
        failure = models.failure or failure  # `_collect` ends running calls, which may fail as well
        longest = max(stalls.longest, self._node.service_silence())
        limit = error.reason if isinstance(error, LimitReached) else conversation.limit
        facts = Facts(
            stage=Stage.RUN,
            end=end,
            unrecorded=models.broken is not None,
            engine_failed=failure is not None,
            stalled=longest >= HARMFUL_SECONDS,
            overdue=self._overdue.in_run() >= HARMFUL_SECONDS,
            hung_up=models.hung_up,
            limit=limit is not None,
            overflow=isinstance(unanswered, ContextOverflow) and limit is None,
            called=called,
            replied=conversation.replies > 0,
        )
        in_vain = None if facts.explained else await self._fault_of_waits()
        facts = msgspec.structs.replace(facts, in_vain=in_vain is not None)
        errors = {
            Cause.RAISED: error,
            Cause.UNRECORDED: models.broken,
            Cause.ENGINE: failure,
            Cause.STALL: stall_error(longest),
            Cause.OVERDUE: overdue_error(self._overdue.in_run(), self._overdue.what),
            Cause.IN_VAIN: in_vain,
            Cause.OWN_TIMEOUT: timed_out_by_itself(),
            Cause.NO_REPLY: HarnessError(
                "the agent's time ran out before the first reply of its model",
                hint="see whether an engine was available, and whether the harness made a model call",
            ),
            Cause.NO_CALL: HarnessError(
                "the harness ended without a single model call" + models.failed_calls.summary(),
                hint="check its base URL, key and model settings in the log",
            ),
        }
        final = None
        try:
            decision = decide(facts)
            if decision.cause is None:
                reason = decision.reason or limit
                assert reason is not None
                return AgentRun(reason=reason, outcome=outcome)
            final = errors[decision.cause]
            if isinstance(final, OutriderError):
                if final.log_tail is None and decision.cause is not Cause.RAISED:
                    final = final.replace(log_tail=outcome.log_tail)
                if decision.maybe_agent and await came_from_inside(sandbox.runtime, final):
                    assert decide(msgspec.structs.replace(facts, inside=True)).blame is Blame.AGENT
                    outcome = HarnessOutcome(log_tail=final.log_tail or "")
                    # without the traceback, which would keep the run in memory
                    failure_of_agent = final.with_traceback(None)
                    return AgentRun(reason=StopReason.AGENT_EXCESS, outcome=outcome, failure=failure_of_agent)
            assert final is not None
            raise final
        finally:
            # An error's traceback refers to this frame. Without the deletion, this reference cycle would keep the
            # session's tokens, perhaps megabytes, until the next garbage collection.
            del error, failure, unanswered, in_vain, final
            errors.clear()

    async def _run_agent(
        self, sandbox: Sandbox, harness: Harness, context: HarnessContext
    ) -> tuple[End, Exception | None, HarnessOutcome]:
        """Run the harness until it ends or fails, or until a clock or a limit ends it. Returns the cause of the end,
        the exception if one was raised, and the outcome."""
        clock = Budget(self._step.limits.agent_seconds, self._stalled_seconds)
        try:
            async with self._budget.spend(), clock.spend(), self._cutoff.block(), sandbox.network(Phase.AGENT):
                outcome = await harness.run(msgspec.structs.replace(context, task=self._step))
        except TimeoutError as timeout:
            if clock.exhausted:
                await self.models.close()  # records the running calls, so that they count as turns
                return End.AGENT_CLOCK, timeout, HarnessOutcome()
            end = End.SESSION_CLOCK if self._budget.exhausted else End.TIMEOUT
            return end, timeout, HarnessOutcome()
        except ModelRefused as refused:
            return End.REFUSED, refused, HarnessOutcome(log_tail=refused.message, exit_code=1)
        except OutriderError as error:
            code = error.exit_code if isinstance(error, ProgramExit) else 0
            return end_of(error), error, HarnessOutcome(log_tail=error.log_tail or "", exit_code=code)
        except Exception as error:  # a plugin may raise anything
            return end_of(error), error, HarnessOutcome()
        return End.RETURNED, None, outcome

    def _timed_out(self, stage: Stage, *others: Budget) -> Ending:
        """Return the ending for a TimeoutError that was raised outside of the agent's run. `others` are the budgets
        that limited the work, besides the session's budget. If no budget is exhausted, a plugin has raised the
        TimeoutError, and HarnessError is raised."""
        exhausted = any(budget.exhausted for budget in (self._budget, *others))
        decision = decide(Facts(stage=stage, end=End.SESSION_CLOCK if exhausted else End.TIMEOUT))
        if decision.reason is None:
            raise timed_out_by_itself() from None
        return Ending(reason=decision.reason)

    async def _fault_of_waits(self) -> OutriderError | None:
        """Check the calls that the agent gave up. If an engine, the store or a pause of the policy was the reason,
        return an error that says so, else None. The calls are also checked after a run without errors, because an agent
        that gave up a call may still end normally."""
        try:
            for pending in self._overdue.pending_checks:
                await pending()
        except OutriderError as error:
            return error
        self._overdue.pending_checks.clear()
        return None

    async def _collect(self, sandbox: Sandbox) -> None:
        """End the agent's model calls, run the task's commands that collect the outcome, and keep the artifacts."""
        await self.models.close()
        self._stopwatch.lap("run")
        await self._node.timelines.list_processes_of(sandbox.runtime)
        await collect(sandbox.runtime, self._step.collect)
        session, keep = self._session, self._node.artifacts.collect
        self._artifacts = await keep(sandbox.runtime, self._task, session.id, session.attempt, self._kept_files)
        self._stopwatch.lap("stop")

    async def _keep_carried(self, file: Path, name: str) -> None:
        self._artifacts = await self._node.artifacts.keep_carried(file, name, self._artifacts)

    async def _grade(
        self,
        grading: Grading,
        sandbox: Sandbox,
        ended: AgentRun,
        off_the_clock: OffTheClock = nullcontext,
    ) -> Ending:
        self._graded = ended
        outcome = await self._outcome(sandbox.runtime, ended, off_the_clock)
        grade = await grading.grade(
            sandbox,
            outcome,
            failure=ended.failure,
            model_replied=self.conversation.replies > 0,
            gpus=self._gpus,
        )
        if grade.verdict.reward <= 0 and not grade.excess:
            self._check_network(sandbox, ended)
        return _graded(ended, grade)

    def _check_network(self, sandbox: Sandbox, ended: AgentRun) -> None:
        """Raise RuntimeFailure if the agent could not reach a server that the task names. If so, the network may be the
        cause of a bad reward, and not the agent."""
        if sandbox.door is not None and (failure := sandbox.door.broken(Phase.AGENT)) is not None:
            raise RuntimeFailure(
                f"the network failed while the agent ran, and the reward is not positive: {failure}",
                hint="see the spans of kind network in the session's timeline, and docs/network.md",
                log_tail=ended.outcome.log_tail,
            )

    async def _grade_again(self, grading: Grading, stored: SessionResult) -> Ending:
        """Grade an earlier session's run again, once resources and an eval slot are free. If the stored verdict blames
        the agent, it is returned unchanged without grading."""
        code, log_tail = 0, ""
        if stored.harness_exit is not None:
            code, log_tail = stored.harness_exit.code, stored.harness_exit.log_tail
        left = HarnessOutcome(log_tail=log_tail, answer=stored.answer, exit_code=code)
        assert stored.run_ending is not None
        ended = AgentRun(reason=stored.run_ending, outcome=left)
        if stored.verdict is not None and stored.stop_reason is StopReason.AGENT_EXCESS:
            return _graded(ended, Grade(verdict=stored.verdict, excess=True))
        fetch = partial(self._node.artifacts.fetch_carried, stored.session_id, stored.attempt)
        line = self._attempt.priority, self._attempt.tenant
        async with AsyncExitStack() as held:
            share = await self._node.resources.take(session_needs(self._task), *line)
            await held.enter_async_context(share)
            place = await held.enter_async_context(HeldSlot(self._node.lanes.eval, *line))
            self._stopwatch.lap("queued")
            await self._enter(SessionState.EVALUATING)
            await held.enter_async_context(grading)
            self._graded = ended
            outcome = await self._outcome(cast(Runtime, NothingKept()), ended, place.off_the_clock)
            carried = fetch if stored.carried else None
            return _graded(ended, await grading.grade_again(outcome, carried, gpus=share.gpus))

    async def _outcome(self, runtime: Runtime, ended: AgentRun, off_the_clock: OffTheClock) -> Outcome:
        turns = await self._turns(images=True)
        policy = policy_of(self._task.branches)
        messages, calls = await self._node.model.offload.run(lambda: (transcript(turns), model_calls(turns, policy)))
        return Outcome(
            task=self._step,
            runtime=runtime,
            stop_reason=ended.reason,
            harness=ended.outcome,
            transcript=messages,
            turns=len(turns),
            calls=calls,
            ids=self._attempt.ids,
            call_frozen=self._call_frozen,
            host=self._node.sandboxes.host,
            bucket=self._session.bucket,
            off_the_clock=off_the_clock,
            stalled_seconds=self._node.watchdog.stalled_seconds,
        )

    async def _call_frozen(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int | None
    ) -> FrozenReply:
        """Call a frozen model for an evaluator (see `evaluators.base.CallFrozen`). Each call is a separate
        conversation, which is not stored. Special tokens are removed from the messages, so that the graded text cannot
        begin or end a turn."""
        [frozen] = [one for one in self._node.frozen if one.backend.model == model]

        async def forget(turn: Turn) -> None:
            """Store nothing, because the verdict contains what is needed of the reply."""

        conversation = Conversation(
            frozen.backend,
            session_key=f"{self._attempt.name}-{model}-grading-{next(self._gradings)}",
            limits=Limits(turns=1, response_tokens=max_tokens),
            sampling=SamplingSpec(temperature=temperature, seed=seed),
            history="recorded",
            record=forget,
            frozen=model,
        )
        plain = frozen.backend.renderer.tokenizer.without_special
        texts = [msgspec.structs.replace(message, content=plain(message.content)) for message in messages]
        try:
            completion = await completed(conversation, texts, max_tokens=max_tokens)
        finally:
            await conversation.close()
        return FrozenReply(
            text=completion.reply.content,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
        )

    async def _enter(self, state: SessionState) -> None:
        await self._node.store.set_state(self._session.id, self._session.attempt, state)

    async def _turns(self, *, images: bool = False) -> list[Turn]:
        return await self._node.store.turns(self._session.id, self._session.attempt, images=images)


@contextmanager
def ungradable_here() -> Iterator[None]:
    """Within the block, an InvalidField is raised as EvaluatorError. The service has accepted the task, so the fields
    are valid. The cause must be that this machine lacks something, such as a module or the key of a grader."""
    try:
        yield
    except InvalidField as error:
        message = f"this machine cannot make the evaluator: {error.message}"
        raise EvaluatorError(message, field=error.field, hint=error.hint) from error


def timed_out_by_itself() -> HarnessError:
    return HarnessError("a step of the session timed out by itself")


def _graded(ended: AgentRun, grade: Grade) -> Ending:
    return Ending(
        reason=StopReason.AGENT_EXCESS if grade.excess else ended.reason,
        verdict=grade.verdict,
        harness_exit=ended.failed_exit,
        patch=grade.patch,
    )


def _frozen_conversation(
    model: FrozenModel,
    attempt: Attempt,
    store: AttemptStore,
    overdue: Overdue,
    cutoff: Cutoff,
    timeline: Timeline,
) -> Conversation:
    """Create an attempt's conversation with a frozen model. Calls use the sampling parameters that the agent sends,
    because the task's sampling parameters are only for the policy."""
    session, name = attempt.session, model.backend.model
    return Conversation(
        model.backend,
        session_key=f"{attempt.name}-{name}",
        sample_index=session.sample_index,
        limits=model.limits,
        sampling=SamplingSpec(),
        history=attempt.task.history,
        record=noting_stored(timeline, partial(store.add_turn, session.id, session.attempt, model=name), name),
        frozen=name,
        on_broken=cutoff.cut,
        overdue=overdue,
    )
