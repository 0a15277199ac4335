"""Schedules sessions: takes them from the queue in order, places them on nodes, and stores how each attempt ended.

`store/queue.py` defines the order. `placing.py` chooses the node of a session, or leaves the session in the queue until
a node has room.

Invariant: every started attempt ends with exactly one call of `Store.finish` or `Store.requeue`. If the node or this
process is killed, the attempt's lease expires instead, and `Store.recover` puts the session back into the queue.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.events import Broadcast, Feed, wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.errors import (
    Boundary,
    Conflict,
    ErrorRecord,
    NotFound,
    ServiceError,
    UnreadableTask,
    described,
    may_come_from_machine,
    record_of,
)
from outrider.lifecycle import SessionState, StopReason
from outrider.service.admission import stored_group
from outrider.service.placing import NodePlacement
from outrider.service.retention import removed_run
from outrider.service.retry_store import retry_store
from outrider.sessions.attempt import Attempt, Node, NodeLost, continues_turns, session_result
from outrider.spec import StoredGroupSpec, TaskSpec
from outrider.store.queue import QueueKind
from outrider.store.rows import SessionRow
from outrider.store.store import MoreTurns, Store
from outrider.trajectory import SessionResult

log = logging.getLogger("outrider.scheduler")

PAUSES = RetryPolicy(first=1.0, longest=60.0)
"""How long a failed session waits before it is tried again."""

EXPIRED = ErrorRecord(
    boundary=Boundary.SERVICE,
    code="expired",
    message="the session has waited in the queue for longer than its expires_seconds",
    hint="serve with more lanes or nodes, or submit it again with more time or a higher priority",
)

EXTERNAL_AT_ONCE = 32
"""Maximum number of external sessions that are started before other sessions are considered."""

ENDED_AT_ONCE = 100
"""Number of queued sessions that are ended concurrently. The store puts their ends into one commit. One commit for each
session would take minutes if a whole queue expires, and meanwhile no session of any tenant would be started."""

LOOK_SECONDS = 30.0
"""Maximum seconds between two reads of the queue, even without an event. There is a maximum because the system clock
may be changed during a wait, and this clock decides when sessions are due."""


class LeaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the leases of attempts.

    - `seconds`: lifetime of the lease of a running attempt. The scheduler renews the lease three times in this period.
      If the lease expires, the session goes back into the queue.
    - `recovered`: maximum number of new attempts that a session gets because its node was lost. The loss of a node does
      not count as a failure of the session, but there is a limit, because the session may have caused the loss.
    """

    seconds: float = 30.0
    recovered: int = 10


LIMITS = LeaseLimits()


@dataclass(eq=False)
class _RunningAttempt:
    """An attempt on a node. `task` is set while the node runs the attempt. Only then can the attempt be interrupted."""

    node: Node
    attempt: Attempt
    give_back: Callable[[], None]
    """Gives the attempt's slot and resources back. It is called when the attempt has ended."""
    regrades: str | None = None
    """Id of the earlier session whose run this attempt grades again. None for an attempt that runs the agent."""
    task: asyncio.Task[None] | None = None
    ending: StopReason | None = None
    """Why the session must end before its agent has finished, for example because it was cancelled. Otherwise None."""


class SessionEnd(NamedTuple):
    """A session that is done and stored. `group_done` is True for the last session of a group. `n` is the number of the
    group's sessions, or None if its task was not read."""

    session: SessionRow
    result: SessionResult
    group_done: bool
    n: int | None


class Scheduler:
    """Runs queued sessions on nodes. Start `run` in a task group, and call `wake` when sessions were queued.

    on_done: called when a group is done.
    evaluation_share: see `NodePlacement`.
    external: runs the sessions whose agents run elsewhere.
    policy_version: returns the policy version that is stored for a group when its first session starts."""

    def __init__(
        self,
        store: Store,
        nodes: Sequence[Node],
        *,
        on_done: Callable[[], None],
        policy_version: Callable[[], int] = lambda: 0,
        pauses: RetryPolicy = PAUSES,
        evaluation_share: float = 0.0,
        external: Node | None = None,
        failures: Failures | None = None,
        limits: LeaseLimits = LIMITS,
    ) -> None:
        self._store = store
        self._limits = limits
        self._failures = failures or Failures()
        self.places = NodePlacement(nodes, evaluation_share=evaluation_share)
        self._external = external
        self._open_external: set[str] = set()
        """Ids of the running external sessions."""
        self._on_done = on_done
        self.sessions_done = Feed[SessionEnd]()
        """Publishes a SessionEnd when a session is done."""
        self.attempts_failed = Feed[ErrorRecord]()
        """Publishes the error of a failed attempt whose session was put back into the queue."""
        self._policy_version = policy_version
        self._pauses = pauses
        self._work = asyncio.Event()
        self._node_added = Broadcast()
        self._ended = asyncio.Event()
        """Set whenever an attempt has ended."""
        self.stopping = False
        """True once `run_dry` was called."""
        self._placements: dict[str, _RunningAttempt] = {}
        self._under_way: Counter[str] = Counter()
        """Number of running attempts of each bucket of the queue."""
        self._specs: dict[str, StoredGroupSpec] = {}
        """Parsed specs of groups by group id, because all sessions of a group need the same spec."""

    async def run(self) -> None:
        """Place sessions until cancelled. Attempts that are still running at that time go back into the queue when the
        next service starts.

        A missing resource (disk, descriptors, memory, threads, database) only delays placement. Any other error is a
        bug in the bookkeeping, after which a session might run twice or never. Such an error ends the service, and the
        next service rebuilds the bookkeeping from the store.
        """
        async with Chores(self._failures, fatal=_is_bug) as chores:
            await chores.until_done("scheduler", self._take_up)
            chores.begin("leases", self._renew_and_retake, every=self._limits.seconds / 3)
            await chores.begin("scheduler", partial(self._place, chores))

    async def _take_up(self) -> None:
        """Read which nodes are drained. Put the sessions that an earlier service process left running back into the
        queue."""
        await retry_store(self._read_drained, self._failures)
        await retry_store(partial(self._retake, float("inf")), self._failures)

    async def _place(self, chores: Chores) -> None:
        """Place the queued sessions, then wait until more sessions may be ready to start."""
        self._work.clear()  # cleared before the queue is read, so that a `wake` during the read ends the wait below
        due = await retry_store(lambda: self._place_all(chores), self._failures)
        wait = LOOK_SECONDS if due is None else min(LOOK_SECONDS, max(0.0, due - time.time()))
        await wait_for_event(self._work, wait)

    def wake(self) -> None:
        self._work.set()

    @property
    def under_way(self) -> int:
        """Number of running attempts. External sessions are not counted, because the next service process continues
        them."""
        return len(self._placements) - len(self._open_external)

    async def run_dry(self) -> None:
        """Start no more sessions, and return when only external sessions are running. Queued sessions stay in the
        queue."""
        self.stopping = True
        while self.under_way:
            self._ended.clear()
            await self._ended.wait()

    def add_node(self, node: Node) -> None:
        """Add a node on which sessions are placed. An earlier node with the same name must have been removed."""
        self.places.add(node)
        self._node_added.send()
        self._work.set()

    async def drain(self, name: str, drained: bool = True) -> None:
        """Stop placing sessions on a node, or start again if `drained` is False. Its running sessions continue. Raises
        NotFound for an unknown node."""
        self.places.check_known(name)
        await self._store.set_drained(name, drained)
        await self._read_drained()
        self._work.set()

    async def _read_drained(self) -> None:
        self.places.drained = await self._store.drained_nodes()

    async def end(self, sessions: Sequence[SessionRow]) -> None:
        """End the given sessions that have `ending` set. Queued sessions are finished. Running attempts are
        interrupted, each only once."""
        for start in range(0, len(sessions), ENDED_AT_ONCE):
            queued: list[tuple[SessionRow, TaskSpec | None]] = []
            for session in sessions[start : start + ENDED_AT_ONCE]:
                if session.state is SessionState.DONE or session.ending is None:
                    continue
                placement = self._placements.get(session.id)
                if placement is None:
                    queued.append((session, await self._task_of(session)))
                elif placement.ending is None:
                    placement.ending = session.ending
                    if placement.task is not None:
                        placement.task.cancel()
            ended = await asyncio.gather(
                *(self._end_queued(session, task) for session, task in queued), return_exceptions=True
            )
            for error in ended:
                if error is not None:
                    raise error

    async def _end_queued(self, session: SessionRow, task: TaskSpec | None) -> None:
        assert session.ending is not None
        error = EXPIRED if session.ending is StopReason.EXPIRED else None
        await self._end_with_turns(session, session.ending, task=task, error=error)

    async def _retake(self, now: float, *, wait: float = 0.0) -> None:
        """Put sessions whose lease ended before `now` back into the queue, unless this scheduler runs them. They may
        start again after `wait` seconds. A session that has lost its node too often, or that has `ending` set, is
        finished instead."""
        due = time.time() + wait if wait else 0.0
        recovered = await self._store.recover(now=now, held=frozenset(self._placements), due=due)
        for session in recovered:
            if session.recovered > self._limits.recovered and session.ending is None:
                task = await self._task_of(session)
                if task is not None and task.harness.elsewhere is not None:
                    continue  # a session without a sandbox cannot be the cause of a lost node
                await self._end_with_turns(session, StopReason.ERROR, task=task, error=session.last_error)
        await self.end(await self._store.to_end())
        if recovered:
            self._work.set()

    async def _place_all(self, chores: Chores) -> float | None:
        """Start queued sessions while nodes have free slots. Returns the next time at which a session becomes due or
        expires, or None."""
        looked = time.time()
        if await self._store.expire(now=looked):
            await self.end(await self._store.to_end())
        self.places.look_again()
        # External sessions come first, because they need no slots. Then come evaluations, up to their share of the
        # slots, and then all sessions.
        passes: tuple[tuple[QueueKind | None, Callable[[], int]], ...] = (
            (QueueKind.EXTERNAL, self._free_external),
            (QueueKind.EVALUATION, self.places.free_share),
            (None, self.places.free_slots),
        )
        for kind, free in passes:
            passed: set[str] = set()  # buckets of the queue whose next session fits on no node now
            started = 0
            while not self.stopping and (slots := free()):
                if kind is QueueKind.EXTERNAL and (slots := min(slots, EXTERNAL_AT_ONCE - started)) <= 0:
                    self._work.set()  # more external sessions are started in the next call
                    break
                now = time.time()
                queued = await self._store.queued(
                    slots,
                    now=now,
                    latest=now + self._pauses.longest,
                    under_way=self._under_way,
                    skip=passed,
                    kind=kind,
                )
                if not queued:
                    break
                for session in queued:
                    if self.stopping or session.bucket in passed:
                        continue
                    started += 1
                    if not await self._start(chores, session, reserved=kind is QueueKind.EVALUATION):
                        passed.add(session.bucket)
        # Nothing calls `wake` when a session becomes due, so the caller must read the queue again at the returned time.
        return await self._store.next_due(after=looked)

    async def _start(self, chores: Chores, session: SessionRow, *, reserved: bool) -> bool:
        """Start a session. If the session's task cannot be read, the session is finished instead. If the session was
        cancelled after it was read from the queue, it is not started. Returns False if the session must wait because no
        node has room for it."""
        try:
            task = await self._read_task(session)
        except UnreadableTask as error:
            await self._end_with_turns(session, StopReason.ERROR, task=None, error=error.record())
            return True
        graded = self._specs[session.group_id].regrades
        external = task.harness.elsewhere is not None and not graded
        node = self._external if external else self.places.find(task)
        if node is None:
            return False
        # The slot on the node is taken before the database is written, because the node may leave during the write.
        give_back = _take_nothing() if external else self.places.take(node, task, reserved=reserved)
        try:
            number = await self._store.start_attempt(
                session.id,
                node=node.name,
                lease_until=time.time() + self._limits.seconds,
                policy_version=None if graded else self._policy_version(),
                continues_turns=external and continues_turns(session, task),
            )
        except BaseException as error:
            give_back()
            if not isinstance(error, Conflict):
                raise
            self._specs.pop(session.group_id, None)
            return True
        started = msgspec.structs.replace(session, attempt=number)
        attempt = Attempt(session=started, task=task, reserved=reserved)
        placement = _RunningAttempt(node, attempt, give_back, graded[session.sample_index] if graded else None)
        # External sessions do not count in `_under_way`, because they take no slot and must not delay the tenant's
        # other sessions.
        if external:
            self._open_external.add(session.id)
        else:
            self._under_way[session.bucket] += 1
        self._placements[session.id] = placement
        chores.create_task(self._run(placement), name=f"session {session.id}", chore="settle sessions")
        return True

    def _free_external(self) -> int:
        return 0 if self._external is None else self._external.stats().capacity - len(self._open_external)

    async def grader(self, task: TaskSpec) -> Node:
        """Return the node that grades an external session. Waits while there is no node. No slot is taken, because the
        node has its own queue for grading."""
        while True:
            added = self._node_added.next()
            if (node := self.places.grader(task)) is not None:
                return node
            await added.wait()

    async def _task_of(self, session: SessionRow) -> TaskSpec | None:
        """Return the session's task, or None if it cannot be read."""
        try:
            return await self._read_task(session)
        except UnreadableTask:
            return None

    async def _read_task(self, session: SessionRow) -> TaskSpec:
        """Return the session's task. Raises UnreadableTask, as `stored_group` does."""
        if session.group_id not in self._specs:
            self._specs[session.group_id] = await stored_group(self._store, session.group_id)
        return self._specs[session.group_id].task

    async def _run(self, placement: _RunningAttempt) -> None:
        session = placement.attempt.session
        started = time.monotonic()
        lost = False
        try:
            outcome = await self._outcome(placement)
            result = await retry_store(lambda: self._settle(placement, outcome), self._failures)
            log.info(
                "session %s attempt %d: %s in %.2f s",
                session.id,
                session.attempt,
                result.stop_reason.value,
                time.monotonic() - started,
            )
        except NodeLost as error:
            log.warning("session %s attempt %d is lost: %s", session.id, session.attempt, error)
            lost = True
        finally:
            placement.give_back()
            self._under_way[session.bucket] -= session.id not in self._open_external
            # entries with 0 are deleted, because the number of buckets is unlimited
            if not self._under_way[session.bucket]:
                del self._under_way[session.bucket]
            # The session may already run again as another attempt, which must stay in these tables.
            if self._placements.get(session.id) is placement:
                del self._placements[session.id]
                self._open_external.discard(session.id)
            self._work.set()
            self._ended.set()
        if lost:
            # A session that lost its node for the first time may start again at once. After later losses there is a
            # pause, because the session may be the cause.
            wait = self._pauses.wait(session.recovered - 1) if session.recovered else 0.0
            await retry_store(lambda: self._store.renew_leases({session.id: session.attempt}, 0.0), self._failures)
            await retry_store(partial(self._retake, time.time(), wait=wait), self._failures)

    async def _outcome(self, placement: _RunningAttempt) -> SessionResult | None:
        """Run the attempt on its node and return the result. Returns None if the attempt was interrupted for the reason
        in `ending`, possibly before the node received the attempt. Raises NodeLost."""
        try:
            if placement.ending is None:
                placement.task = asyncio.current_task()
                attempt = placement.attempt
                if (of := placement.regrades) is not None:
                    id, number = attempt.session.id, attempt.session.attempt
                    try:
                        graded = await retry_store(lambda: self._store.adopt_turns(id, number, of), self._failures)
                    except NotFound as error:
                        raise removed_run(of) from error
                    if graded.result is None or graded.result.run_ending is None:
                        raise Conflict(f"the run of session {of} did not end by itself: there is nothing to grade")
                    attempt = msgspec.structs.replace(attempt, stored=graded.result)
                result = await placement.node.run(attempt)
                if self.stopping and _may_be_killed(result):
                    raise NodeLost("the service is stopping, and the same signal may have ended the agent")
                return result
        except asyncio.CancelledError:
            if placement.ending is None:
                raise
        except NodeLost:
            raise
        except Exception as error:
            if isinstance(error, Conflict | NotFound):  # the earlier run cannot be graded again
                record = error.record()
            elif _is_bug(error):
                raise
            else:  # the attempt could not be sent to the node, so only this attempt fails
                record = ServiceError(described(error)).record()
            session, task = placement.attempt.session, placement.attempt.task
            return session_result(session, StopReason.ERROR, [], task=task, error=record)
        finally:
            placement.task = None
        return None

    async def _settle(self, placement: _RunningAttempt, outcome: SessionResult | None) -> SessionResult:
        """Put the session back into the queue, or finish it. Returns the stored result."""
        session, task = placement.attempt.session, placement.attempt.task
        try:
            if outcome is None:
                assert placement.ending is not None
                return await self._end_with_turns(session, placement.ending, task=task, under_way=True)
            await self._requeue_or_finish(placement, outcome)
            return outcome
        except ServiceError:  # the database failed; the caller repeats this call
            raise
        except Exception as error:
            # Because of a bug, the result cannot be stored. The bug must end only this session, not the service.
            log.exception("the result of session %s cannot be stored", session.id)
            record = msgspec.structs.replace(record_of(error), retryable=False)
            failed = outcome or session_result(session, StopReason.ERROR, [], task=task)
            failed = msgspec.structs.replace(failed, stop_reason=StopReason.ERROR, verdict=None, error=record)
            await self._finish(session, failed, under_way=True)
            return failed

    async def _end_with_turns(
        self,
        session: SessionRow,
        reason: StopReason,
        *,
        task: TaskSpec | None,
        error: ErrorRecord | None = None,
        under_way: bool = False,
    ) -> SessionResult:
        """Finish a queued or interrupted session with the stored turns of its last attempt. Returns the result."""
        while True:
            stored = await self._store.count_turns(session.id, session.attempt)
            turns = await self._store.turns(session.id, session.attempt)
            frozen = await self._store.frozen_turns(session.id, session.attempt)
            result = session_result(session, reason, turns, task=task, error=error, frozen=frozen)
            # MoreTurns: a lost node has stored another turn since the turns were read, so all turns are read again.
            with suppress(MoreTurns):
                await self._finish(session, result, under_way=under_way, of_turns=stored)
                return result

    async def _requeue_or_finish(self, placement: _RunningAttempt, result: SessionResult) -> None:
        """Put the session back into the queue if another attempt may succeed and is allowed. Otherwise finish it."""
        session, error = placement.attempt.session, result.error
        # losses of the node are not failures of the session
        failures = session.attempt - session.recovered
        if (
            error is None
            or not error.retryable
            # The node has already repeated the evaluation, and running the agent again would not help. But if the agent
            # has not run, because this node cannot make the evaluator, another node may be able to make it.
            or (error.boundary is Boundary.EVALUATOR and result.run_ending is not None)
            or failures >= placement.attempt.task.max_attempts
        ):
            await self._finish(session, result, under_way=True)
            return
        log.warning("session %s attempt %d failed: %s", session.id, session.attempt, error.message)
        try:
            due = time.time() + self._pauses.wait(failures - 1)
            await self._store.requeue(session.id, session.attempt, error, due=due)
            self.attempts_failed.publish(error)
        except Conflict as conflict:
            log.warning("session %s attempt %d was settled elsewhere: %s", session.id, session.attempt, conflict)
            return
        # `ending` was set while the attempt was running, so `end` has not finished the session.
        if placement.ending is not None:
            await self._end_with_turns(session, placement.ending, task=placement.attempt.task)

    async def _finish(
        self, session: SessionRow, result: SessionResult, *, under_way: bool = False, of_turns: int | None = None
    ) -> None:
        """Store the end of a session with `Store.finish`. If the session was already finished, put back into the queue
        or removed, a warning is logged instead."""
        try:
            group_done = await self._store.finish(
                session.id, session.attempt, result, under_way=under_way, of_turns=of_turns
            )
        except (Conflict, NotFound) as error:
            log.warning("session %s attempt %d was settled elsewhere: %s", session.id, session.attempt, error)
            # Proceed as if the group were done: an earlier call may have stored the group's end, although the reply was
            # lost.
            self._specs.pop(result.group_id, None)
            self._on_done()
            return
        # None if `_start` has removed the spec because a session was cancelled before its start
        spec = self._specs.get(result.group_id)
        self.sessions_done.publish(SessionEnd(session, result, group_done, None if spec is None else spec.n))
        if group_done:
            self._specs.pop(result.group_id, None)
            self._on_done()
        elif result.verdict is not None and (spec is None or spec.min_usable is not None):
            # With this verdict, the group may have enough usable sessions. If so, the group's other sessions are ended.
            await self.end(await self._store.to_end(result.group_id))

    async def _renew_and_retake(self) -> None:
        """Renew the leases of the running attempts. Put sessions whose lease has expired back into the queue. Such a
        session has lost its node, or the start of its attempt was stored although the database reported a failure."""
        held = {id: placement.attempt.session.attempt for id, placement in self._placements.items()}
        await self._store.renew_leases(held, time.time() + self._limits.seconds)
        await self._retake(time.time())


def _take_nothing() -> Callable[[], None]:
    """Return a function that does nothing, because an external session has no slot to give back."""
    return lambda: None


def _may_be_killed(result: SessionResult) -> bool:
    """Return True if a signal may have ended the agent's program or broken the agent's sandbox. When systemd, Slurm or
    a shutdown stops a service, all its processes get the signal, including those in sandboxes."""
    left = result.harness_exit
    by_signal = left is not None and 128 < left.code <= 128 + signal.SIGRTMAX
    return by_signal or result.stop_reason is StopReason.AGENT_EXCESS


def _is_bug(error: Exception) -> bool:
    return not may_come_from_machine(error)
