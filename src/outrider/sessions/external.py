"""Hosts sessions whose agents run elsewhere, for example on another cluster, on a laptop, or under another scheduler.

Such a session has models, a credential and clocks, but no sandbox and no slot of a lane. It accepts model calls from
the start of its attempt, and ends when a client completes it with a report. The report is stored before the client gets
the reply. If the service is lost, the next attempt takes over the stored turns and accepts the same credential.

Invariants: a session that nobody completes ends with an error, never with a reward; a credential gives access only to
the model calls of one session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Protocol, Self

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.events import Broadcast, wait_for_event
from outrider.concurrency.watchdog import Watchdog, Witness
from outrider.counts import NodeCounts
from outrider.engines.pool.waits import Overdue
from outrider.errors import (
    Conflict,
    ContextOverflow,
    ErrorRecord,
    HarnessError,
    InvalidField,
    NotFound,
    OutriderError,
    RuntimeFailure,
    ServiceError,
    Unauthorized,
    record_of,
)
from outrider.lifecycle import SessionState, StopReason
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import NodeStats, ResourceStats
from outrider.sessions.agent_service_calls import RemoteRunFailed
from outrider.sessions.agent_services import AgentServices, FollowedRun, RunStore
from outrider.sessions.attempt import (
    Attempt,
    AttemptStore,
    Node,
    NodeLost,
    continues_turns,
    session_result,
    without_secrets,
)
from outrider.sessions.blame import HARMFUL_SECONDS, Cause, End, Facts, Stage, decide
from outrider.sessions.calls.call import FrozenModel, ModelBackend
from outrider.sessions.clock import Budget, Stopwatch
from outrider.sessions.conversation import Conversation, FailedCall, RunEnded, overdue_error, stall_error
from outrider.sessions.filters import EndedAgentRun, filtered
from outrider.sessions.models import SessionModels
from outrider.sessions.remote_runs import archive_of
from outrider.sessions.reports import check_report, verdict_of
from outrider.sessions.timelines import Timelines, noting_stored
from outrider.spec import REPORTED, ReportSpec, RuntimeSpec, SamplingSpec, TaskSpec
from outrider.store.rows import SessionRow
from outrider.timeline import Timeline
from outrider.trajectory import BranchPolicy, SessionResult, StageSeconds, Turn, Verdict

log = logging.getLogger("outrider.session")

EXTERNAL = "external"
"""Name of the node that hosts external sessions, as shown in sessions, events and lists."""
MOST_SESSIONS = 10_000
"""Maximum number of external sessions that run at once. Further sessions wait in the queue."""


FIRST_ENTRY = 1 << 20
"""Number of the first timeline entry that this module adds for an external session. The node that grades the session
numbers its own entries from 0."""


class SessionNotRunning(ServiceError):
    """A model call with a valid credential arrived before its session runs, for example right after a restart."""

    code = "session_not_running"
    http_status = 503


class AgentFailed(HarnessError):
    """The agent of an external session was reported as failed, or nobody completed the session in time."""

    code = "agent_failed"
    retryable = False


class ExternalStore(AttemptStore, RunStore, Protocol):
    """The store's methods for external sessions."""

    async def drop_turns(self, session_id: str, attempt: int) -> None: ...
    async def drop_earlier_turns(self, session_id: str, attempt: int) -> None: ...
    async def keep_failed_calls(
        self, session_id: str, attempt: int, calls: bytes, *, model: str | None = None
    ) -> None: ...
    async def failed_calls(self, session_id: str) -> dict[str | None, bytes]: ...
    async def report(self, session_id: str) -> bytes | None: ...
    async def session(self, session_id: str) -> SessionRow: ...
    async def add_report(self, session_id: str, report: bytes) -> None: ...
    async def turns(self, session_id: str, attempt: int | None = None, *, images: bool = False) -> list[Turn]: ...
    def session_of_credential(self, credential: str) -> str | None: ...


class ExternalSessions:
    """The node that hosts external sessions in the service's own process. `async with` runs its watchdog.

    grader: waits for a node that can grade a session, and returns the node. Not called if the task's evaluator is
        `reported`.
    services: the agent services, which run the agents of tasks with a remote harness.
    paths: resolves the paths of the files that such tasks upload.
    address: returns the base URL at which the agents of such tasks reach this service. The argument is the name of the
        agents' network (see `AgentServices.run_of`).
    """

    def __init__(
        self,
        store: ExternalStore,
        backend: ModelBackend,
        frozen: Sequence[FrozenModel],
        *,
        grader: Callable[[TaskSpec], Awaitable[Node]],
        services: AgentServices,
        paths: HostPaths,
        address: Callable[[str | None], str],
        capacity: int = MOST_SESSIONS,
    ) -> None:
        self.name = self.machine = EXTERNAL
        self._store = store
        self._backend = backend
        self._frozen = tuple(frozen)
        self._grader = grader
        self._services = services
        self._paths = paths
        self._address = address
        self._capacity = capacity
        self._live: dict[str, _LiveSession] = {}
        self._begun = Broadcast()
        self.timelines = Timelines(store)
        """The timelines of the sessions. The owner of this object stores them periodically. The last entries are
        stored at the end of the `async with` block."""
        self._held = AsyncExitStack()
        self._watchdog: Watchdog

    async def __aenter__(self) -> Self:
        self._watchdog = await self._held.enter_async_context(Watchdog())
        self._held.push_async_callback(self.timelines.store_rest)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    def stats(self) -> NodeStats:
        nothing = ResourceStats(cpus=0, memory_mb=0)
        return NodeStats(name=self.name, sessions=len(self._live), capacity=self._capacity, lanes=(), resources=nothing)

    def counts(self) -> NodeCounts:
        return NodeCounts()

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return True

    async def pull_image(self, reference: str, name: str) -> RootImage:
        raise RuntimeFailure("external sessions have no sandboxes, and so no images")

    def models(self, key: str) -> SessionModels | None:
        """Return the models to which a credential gives access now, or None."""
        live = self._live.get(self._store.session_of_credential(key) or "")
        if live is None or live.models is None:
            return None
        live.note_call()
        return live.models

    async def refusal(self, key: str) -> OutriderError:
        """Return the error for a model call whose credential gives access to no model, so that `models` has returned
        None."""
        session_id = self._store.session_of_credential(key)
        if session_id is None:
            return Unauthorized("this session key is unknown, or its run is over")
        try:
            session = await self._store.session(session_id)
            if session.over or await self._store.report(session_id) is not None:
                return RunEnded("this session's run is over")
        except NotFound:
            return Unauthorized("this session was removed")
        return SessionNotRunning("this session does not run at the moment", hint="call again in a few seconds")

    async def running(self, session_id: str, seconds: float) -> bool:
        """Wait for at most `seconds` until the session accepts model calls. Returns True if it does."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            begun = self._begun.next()
            live = self._live.get(session_id)
            left = deadline - asyncio.get_running_loop().time()
            takes_calls = live is not None and live.models is not None
            if takes_calls or left <= 0:
                return takes_calls
            await wait_for_event(begun, left)

    async def check(self, session_id: str, report: ReportSpec, task: TaskSpec) -> None:
        """Raise InvalidField if a report does not fit the session and its task."""
        turns = await self._store.turns(session_id)
        await self._backend.offload.run(lambda: check_report(report, task, turns))

    def note_report(self, session_id: str) -> None:
        """End the session's run, because its report was stored. Does nothing if the session does not run here, because
        its next attempt will read the report."""
        if (live := self._live.get(session_id)) is not None:
            live.ended.set()

    async def reset(self, session_id: str) -> None:
        """Delete the turns of a session, so that its agent can start over with the same credential. Running calls are
        cut off. Raises Conflict if the session does not run or was completed."""
        live = self._live.get(session_id)
        if live is None or live.models is None:
            raise Conflict(f"session {session_id} does not run, so there is nothing to reset")
        await live.reset()

    async def run(self, attempt: Attempt) -> SessionResult:
        """Run an attempt and return its result, which contains any error of the session. Raises CancelledError, and
        NodeLost if the node that grades the session is lost."""
        try:
            return without_secrets(await self._run(attempt), attempt.task)
        except NodeLost:
            raise
        except Exception as error:  # for example, the stored turns cannot be read
            if not isinstance(error, OutriderError):
                log.exception("session %s failed unexpectedly", attempt.name)
            return session_result(attempt.session, StopReason.ERROR, [], task=attempt.task, error=record_of(error))

    async def _run(self, attempt: Attempt) -> SessionResult:
        session, store = attempt.session, self._store
        with self._watchdog.witness() as stalls:
            live = _LiveSession(attempt, store, self._backend, self._frozen, self._stalled_seconds, stalls)
            if session.attempt > 1:
                if continues_turns(session, attempt.task):
                    await live.resume()
                else:
                    await store.drop_earlier_turns(session.id, session.attempt)
            with self.timelines.keeping(live.timeline):
                return await self._run_live(live)

    async def _run_live(self, live: _LiveSession) -> SessionResult:
        session, store = live.attempt.session, self._store
        try:
            run = await self._remote_run(live)
            async with self._cancelled_with_session(run, session.id):
                if run is not None:
                    await run.end_earlier()  # the session must not accept model calls before
                await store.set_state(session.id, session.attempt, SessionState.READY)
                await store.set_state(session.id, session.attempt, SessionState.RUNNING)
                # only now, because every session that accepts calls must be shown as running
                self._live[session.id] = live
                self._begun.send()
                # the session was completed in an earlier attempt, or before this attempt began
                if await store.report(session.id) is not None:
                    live.ended.set()
                failure = await (live.until_ended() if live.ended.is_set() else self._until_ended(live, run))
        except RemoteRunFailed as error:  # an earlier run cannot be ended
            failure = error
        finally:
            self._live.pop(session.id, None)
            await live.close()
        # The report is read only after the run has ended, because it may have been stored at the last moment.
        if (stored := await store.report(session.id)) is not None:
            return await self._ended(live, ReportSpec.model_validate_json(stored))
        assert failure is not None
        return await live.result(StopReason.ERROR, error=record_of(failure))

    async def _remote_run(self, live: _LiveSession) -> FollowedRun | None:
        """Return the run of the remote agent, or None if the task has no such agent or was completed in an earlier
        attempt. The run is not started yet, except by an earlier service process."""
        remote, session = live.attempt.task.harness.remote, live.attempt.session
        if remote is None or await self._store.report(session.id) is not None:
            return None
        return self._services.run_of(
            live.attempt, remote, self._store, model=self._backend.model, address=self._address
        )

    @asynccontextmanager
    async def _cancelled_with_session(self, run: FollowedRun | None, session_id: str) -> AsyncIterator[None]:
        """Cancel the run if the session is cancelled while the block runs."""
        try:
            yield
        except asyncio.CancelledError:
            if run is not None:
                await shielded(partial(self._cancel_unless_stopping, run, session_id))
            raise

    async def _cancel_unless_stopping(self, run: FollowedRun, session_id: str) -> None:
        """Cancel the run, unless only this service process stops. In that case, the session's `ending` is None, the run
        goes on, and the next process follows it."""
        with suppress(OutriderError):  # an error of the store must not hide the cancellation
            if (await self._store.session(session_id)).ending is not None:
                await run.cancel()

    async def _until_ended(self, live: _LiveSession, run: FollowedRun | None) -> OutriderError | None:
        """Run the remote agent, if there is one, and wait until the session is completed. Returns None, or the error
        with which the session ends."""
        if run is None:
            return await live.until_ended()
        try:
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(live.until_ended(), name="session")
                following = group.create_task(self._followed(live, run), name="remote run")
                await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
                if following.done() and following.result() is None:
                    return await waiting
                if not following.done():  # the session's clock has ended the run, or a turn could not be stored
                    following.cancel()  # before `run.cancel`, because a late PUT would start the run again
                    await asyncio.wait({following})
                    await run.cancel()
                    return await waiting
                waiting.cancel()
                return following.result()
        except BaseExceptionGroup as failures:  # the group would hide an error of the store
            raise failures.exceptions[0] from None

    async def _followed(self, live: _LiveSession, run: FollowedRun) -> OutriderError | None:
        """Follow a remote run to its end and store its report. Returns the error if the run failed, else None."""
        session, task = live.attempt.session, live.attempt.task
        try:
            archive = await asyncio.to_thread(archive_of, task, self._paths)
            report = await run.follow(archive)
            await self.check(session.id, report, task)
            await self._store.add_report(session.id, report.model_dump_json().encode())
        except Conflict:  # the session was cancelled, or an earlier attempt has stored another report
            return None
        except InvalidField as error:
            return RemoteRunFailed(f"the report of the run does not fit the session: {error.message}", hint=error.hint)
        except OutriderError as error:
            return error
        # for example, a file of the task cannot be read
        except (OSError, ValueError) as error:
            return RemoteRunFailed(f"the run could not be started: {error}")
        finally:
            if await self._store.report(session.id) is not None:
                live.ended.set()
        return None

    async def _ended(self, live: _LiveSession, report: ReportSpec) -> SessionResult:
        """Return the result of a session that was completed with `report`."""
        task, attempt = live.attempt.task, live.attempt
        if report.error is not None:
            return await live.result(StopReason.ERROR, error=AgentFailed(f"reported: {report.error}").record())
        reason, error = await live.decision(report)
        if error is not None:
            # Only a remote agent can be started again. Any other agent has ended, so another attempt would wait in vain
            # for calls.
            retryable = error.retryable and task.harness.remote is not None
            error = msgspec.structs.replace(error, retryable=retryable)
            return await live.result(StopReason.ERROR, error=error, answer=report.answer)
        if task.evaluator.kind == REPORTED:
            assert report.reward is not None
            return await live.result(reason, verdict=verdict_of(report), answer=report.answer)
        ungraded = await live.result(reason, answer=report.answer)
        ungraded = msgspec.structs.replace(ungraded, run_reason=reason)
        node = await self._grader(task)
        graded = await node.run(msgspec.structs.replace(attempt, stored=ungraded))
        seconds = msgspec.structs.replace(graded.seconds, run=ungraded.seconds.run)
        return msgspec.structs.replace(graded, seconds=seconds)

    def _stalled_seconds(self) -> float:
        return self._watchdog.stalled_seconds() + self._backend.pool.policy.gate.paused_seconds()


class _LiveSession:
    """An external session while its attempt runs. `models` is None during a reset of the session. `calls` is the number
    of model calls that have begun. `ended` is set when the run must end."""

    def __init__(
        self,
        attempt: Attempt,
        store: ExternalStore,
        backend: ModelBackend,
        frozen: Sequence[FrozenModel],
        stalled_seconds: Callable[[], float],
        stalls: Witness,
    ) -> None:
        self.attempt = attempt
        self.calls = 0
        self.ended = asyncio.Event()
        self._store = store
        self._backend = backend
        self._frozen = frozen
        self._stalled_seconds = stalled_seconds
        self._stalls = stalls
        self._failure: OutriderError | None = None
        self._resetting = asyncio.Lock()
        session = attempt.session
        self.timeline = Timeline(session.id, session.attempt, secrets=attempt.logged.secrets, first=FIRST_ENTRY)
        self._stopwatch = Stopwatch(self.timeline)
        self._new_models()

    def _new_models(self) -> None:
        session, task = self.attempt.session, self.attempt.task
        self._overdue = Overdue()
        self._stalls.restart()  # a stall before a reset did not harm the calls after the reset

        def conversation(backend: ModelBackend, frozen: FrozenModel | None) -> Conversation:
            model = None if frozen is None else backend.model
            return Conversation(
                backend,
                session_key=f"{session.id}-{model}" if model else session.id,
                sample_index=session.sample_index,
                limits=task.limits if frozen is None else frozen.limits,
                sampling=task.sampling if frozen is None else SamplingSpec(),
                history=task.history,
                record=noting_stored(
                    self.timeline, partial(self._store.add_turn, session.id, session.attempt, model=model), model
                ),
                keep_failed=partial(self._keep_failed, model),
                frozen=model,
                on_broken=self.ended.set,
                overdue=self._overdue,
            )

        self._policy = conversation(self._backend, None)
        others = {each.backend.model: conversation(each.backend, each) for each in self._frozen}
        self._all = SessionModels(self._policy, others, logged=self.attempt.logged, timeline=self.timeline)
        self.models: SessionModels | None = self._all

    def note_call(self) -> None:
        """Count a model call that begins."""
        self.calls += 1
        if not self._all.under_way and not self._all.hung_up:
            self._stalls.restart()  # an earlier stall harmed no call, because none was under way

    async def resume(self) -> None:
        """Take over the turns and failed calls of the session's earlier attempts."""
        session = self.attempt.session
        stored = await self._store.failed_calls(session.id)
        failed = {model: msgspec.json.decode(calls, type=list[FailedCall]) for model, calls in stored.items()}
        turns = await self._store.turns(session.id, session.attempt, images=True)
        await self._policy.resume(turns, failed.get(None, ()))
        frozen_turns = await self._store.frozen_turns(session.id, session.attempt)
        for name, conversation in self._all.frozen.items():
            await conversation.resume(frozen_turns.get(name, ()), failed.get(name, ()))

    async def _keep_failed(self, model: str | None, failed: list[FailedCall]) -> None:
        session = self.attempt.session
        await self._store.keep_failed_calls(session.id, session.attempt, msgspec.json.encode(failed), model=model)

    async def reset(self) -> None:
        async with self._resetting:
            if self.ended.is_set():
                raise Conflict(f"session {self.attempt.session.id} has ended")
            self.models = None
            try:
                await self._all.close()
                await self._store.drop_turns(self.attempt.session.id, self.attempt.session.attempt)
            except Conflict:  # the session was completed in the meantime
                raise
            except OutriderError as error:
                self._failure = error  # makes the attempt fail, because the closed models refuse all later calls
                self.ended.set()
                raise
            self._new_models()

    async def until_ended(self) -> OutriderError | None:
        """Wait until the session is completed. Returns the error with which the session must end, or None."""
        limits, elsewhere = self.attempt.task.limits, self.attempt.task.harness.elsewhere
        assert elsewhere is not None
        whole = Budget(limits.session_seconds, self._stalled_seconds)
        while True:
            idle, calls = Budget(elsewhere.idle_seconds, self._stalled_seconds), self.calls
            busy = self._all.under_way > 0  # a call is running, so this interval does not count as idle
            try:
                async with whole.spend(), idle.spend():
                    await self.ended.wait()
                return self._failure or self._all.broken
            except TimeoutError:
                if whole.exhausted:
                    return AgentFailed(
                        f"nobody completed the session within its session_seconds, {limits.session_seconds:g} s",
                        hint="complete the session, or raise limits.session_seconds",
                    )
                if calls == self.calls and not busy and not self._all.under_way:
                    return AgentFailed(
                        f"nobody completed the session, and no model call came for {elsewhere.idle_seconds:g} s",
                        hint="complete the session, or raise idle_seconds",
                    )

    async def close(self) -> None:
        """End the run: later calls are refused, and running calls are cut off and recorded."""
        self.ended.set()
        async with self._resetting:
            await self._all.close()
        self._stopwatch.lap("run")

    async def decision(self, report: ReportSpec) -> tuple[StopReason, ErrorRecord | None]:
        """Return the stop reason of the run, and the error if the run must not be graded."""
        policy, models = self._policy, self._all
        in_vain: OutriderError | None = None
        try:
            for pending in self._overdue.pending_checks:
                await pending()
        except OutriderError as error:
            in_vain = error
        failure = models.failure
        facts = Facts(
            stage=Stage.RUN,
            end=End.RETURNED,
            unrecorded=models.broken is not None,
            engine_failed=failure is not None,
            stalled=self._stalls.longest >= HARMFUL_SECONDS,
            overdue=self._overdue.in_run() >= HARMFUL_SECONDS,
            in_vain=in_vain is not None,
            hung_up=models.hung_up,
            limit=policy.limit is not None,
            overflow=isinstance(policy.failure, ContextOverflow) and policy.limit is None,
            called=policy.turns > 0,
            replied=policy.replies > 0,
        )
        errors = {
            Cause.UNRECORDED: models.broken,
            Cause.ENGINE: failure,
            Cause.STALL: stall_error(self._stalls.longest),
            Cause.OVERDUE: overdue_error(self._overdue.in_run(), self._overdue.what),
            Cause.IN_VAIN: in_vain,
            Cause.NO_CALL: AgentFailed(
                "the session was completed without a single model call" + models.failed_calls.summary(),
                hint="check the base URL and key that the agent uses",
            ),
        }
        decided = decide(facts)
        if decided.cause is not None:
            cause = errors[decided.cause]
            assert cause is not None
            return StopReason.ERROR, record_of(cause)
        reported = StopReason(report.stop_reason)
        return (reported if reported is not StopReason.COMPLETED else decided.reason or policy.limit or reported), None

    async def result(
        self,
        reason: StopReason,
        *,
        verdict: Verdict | None = None,
        error: ErrorRecord | None = None,
        answer: str | None = None,
    ) -> SessionResult:
        session, task = self.attempt.session, self.attempt.task
        turns = await self._store.turns(session.id, session.attempt)
        at_most = BranchPolicy.TRAIN
        if verdict is not None:
            verdict, at_most = filtered(EndedAgentRun(reason, turns, None), verdict, task.filters)
        forks = {cause.value: number for cause, number in self._policy.tree.forks.items()}
        build = partial(
            session_result,
            session,
            reason,
            turns,
            task=task,
            verdict=verdict,
            at_most=at_most,
            error=error,
            forks=forks,
            failed_calls=self._all.failed_calls.counted,
            frozen=await self._store.frozen_turns(session.id, session.attempt) if self._frozen else {},
            seconds=StageSeconds(**self._stopwatch.seconds),
            answer=answer,
        )
        # in a thread, because counting the tokens of a long session takes a while
        return await self._backend.offload.run(build)
