"""The scheduler: takes queued sessions by priority and age, places them on nodes, and settles how they ended.

It knows no sandbox and no token. Invariant: every attempt it starts ends in exactly one of finish and requeue,
unless this process dies; then the lease runs out and `recover` requeues it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from pydantic import ValidationError

from outrider.concurrency.backoff import Backoff
from outrider.errors import Boundary, Conflict, ErrorRecord, NotFound, ServiceError, record_of
from outrider.lifecycle import StopReason
from outrider.schemas import NodeStats
from outrider.service.retry_store import insist
from outrider.sessions.attempt import Attempt, Node, session_result
from outrider.sessions.resources import asked, left_of, whole_of
from outrider.spec import GroupSpec, TaskSpec
from outrider.store.base import SessionRow, Store
from outrider.trajectory import SessionResult

log = logging.getLogger("outrider.scheduler")

LEASE_SECONDS = 30.0
"""How long a session may go without its lease renewed before another attempt is made."""

MAX_RECOVERED = 10
"""How often a session may lose its node under it, which is not its failure, and be tried again: not for ever, for it
may be what kills the node."""

PAUSES = Backoff(first=1.0, longest=60.0)
"""Between a session's failed attempts."""

UNREADABLE = ErrorRecord(
    boundary=Boundary.SERVICE,
    code="unreadable_task",
    message="the stored task cannot be read by this version of Outrider",
    hint="the service's log says which field; submit the task again",
)


@dataclass(eq=False)
class _Placement:
    """An attempt on a node. `task` is there while the node runs it: only then does a cancel interrupt it."""

    node: Node
    attempt: Attempt
    task: asyncio.Task[None] | None = None
    cancelled: bool = False


class Scheduler:
    """`run` it in a task group; `wake` it when something was queued; `cancel` a session that it runs."""

    def __init__(
        self,
        store: Store,
        nodes: Sequence[Node],
        *,
        on_done: Callable[[], None],
        pauses: Backoff = PAUSES,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._on_done = on_done
        self._pauses = pauses
        self._work = asyncio.Event()
        self._placements: dict[str, _Placement] = {}
        self._placed: dict[str, int] = {node.name: 0 for node in nodes}
        self._tasks: dict[str, TaskSpec] = {}

    async def run(self) -> None:
        """Place sessions until cancelled; running attempts are then requeued, to be run by the next service."""
        await insist(self._resume)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(), name="renew leases")
            while True:
                self._work.clear()
                looked = time.time()
                await insist(lambda: self._place_all(group))
                await self._rest(looked)

    def wake(self) -> None:
        self._work.set()

    def stats(self) -> list[NodeStats]:
        return [node.stats() for node in self._nodes]

    async def cancel(self, sessions: Sequence[SessionRow]) -> None:
        """End sessions of a cancelled group: attempts are told to stop, once; queued ones are finished here."""
        for session in sessions:
            placement = self._placements.get(session.id)
            if placement is None:
                task = await self._task_of(session)
                result = session_result(session, StopReason.CANCELLED, [], task=task)
                await self._finish(session.id, session.attempt, result)
            elif not placement.cancelled:
                placement.cancelled = True
                if placement.task is not None:
                    placement.task.cancel()

    async def _resume(self) -> None:
        """Take over what an earlier service left: requeue its attempts, and end what was already cancelled, and what
        has lost its node too often."""
        recovered = await self._store.recover(now=float("inf"))
        cancelled = await self._store.cancelled()
        for group_id in cancelled:
            await self.cancel(await self._store.cancel_group(group_id))
        for session in recovered:
            if session.recovered > MAX_RECOVERED and session.group_id not in cancelled:
                await self._give_up(session, await self._task_of(session), session.last_error)

    async def _give_up(self, session: SessionRow, task: TaskSpec | None, error: ErrorRecord | None) -> None:
        """End a queued session as failed."""
        turns = await self._store.turns(session.id, session.attempt)
        result = session_result(session, StopReason.ERROR, turns, task=task, error=error)
        await self._finish(session.id, session.attempt, result)

    async def _place_all(self, group: asyncio.TaskGroup) -> None:
        while slots := sum(map(self._slots, self._nodes)):
            queued = await self._store.queued(slots, now=time.time())
            if not queued:
                return
            for session in queued:
                await self._start(group, session)

    async def _rest(self, looked: float) -> None:
        """Until there is work: when it comes, or when a session that was not due when we looked is."""
        due = await insist(lambda: self._store.next_due(after=looked))
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - time.time())):
                await self._work.wait()
        except TimeoutError:
            return

    def _slots(self, node: Node) -> int:
        """How many more sessions the node takes."""
        return max(0, node.stats().capacity - self._placed[node.name])

    def _node_for(self, task: TaskSpec) -> Node:
        """The one with the most slots, of those that have what the task sets aside: now, else with nothing on them."""
        needs = asked(task.runtime.resources)

        def fit(node: Node) -> tuple[bool, bool, bool, int]:
            slots, room = self._slots(node), node.stats().room
            return slots > 0, needs.within(whole_of(room)), needs.within(left_of(room)), slots

        return max(self._nodes, key=fit)

    async def _start(self, group: asyncio.TaskGroup, session: SessionRow) -> None:
        task = await self._task_of(session)
        if task is None:
            await self._give_up(session, None, UNREADABLE)
            return
        node = self._node_for(task)
        try:
            number = await self._store.start_attempt(
                session.id, node=node.name, lease_until=time.time() + LEASE_SECONDS
            )
        except Conflict:  # its group was cancelled in between
            self._tasks.pop(session.group_id, None)
            return
        started = msgspec.structs.replace(session, attempt=number)
        placement = _Placement(node, Attempt(session=started, task=task))
        self._placed[node.name] += 1
        self._placements[session.id] = placement
        group.create_task(self._run(placement), name=f"session {session.id}")

    async def _task_of(self, session: SessionRow) -> TaskSpec | None:
        """None for one that this version does not understand: another one has stored it."""
        if session.group_id not in self._tasks:
            spec = await self._store.spec(session.group_id)
            try:
                # In a thread, because the files in it are decoded to see whether they can be.
                read = await asyncio.to_thread(GroupSpec.model_validate_json, spec)
                self._tasks[session.group_id] = read.task
            except ValidationError as error:
                log.error("the task of group %s cannot be read: %s", session.group_id, error)
                return None
        return self._tasks[session.group_id]

    async def _run(self, placement: _Placement) -> None:
        session = placement.attempt.session
        started = time.monotonic()
        try:
            result = await self._outcome(placement)
            result = await insist(lambda: self._settled(placement, result))
            log.info(
                "session %s attempt %d: %s in %.2f s",
                session.id,
                session.attempt,
                result.stop_reason.value,
                time.monotonic() - started,
            )
        finally:
            self._placed[placement.node.name] -= 1
            if self._placements.get(session.id) is placement:
                del self._placements[session.id]
            self._work.set()

    async def _outcome(self, placement: _Placement) -> SessionResult:
        """How the attempt ended. A cancel may have come before its first step; after its last it stops nothing."""
        try:
            if not placement.cancelled:
                placement.task = asyncio.current_task()
                return await placement.node.run(placement.attempt)
        except asyncio.CancelledError:
            if not placement.cancelled:
                raise
        finally:
            placement.task = None
        return await insist(lambda: self._cancelled_result(placement))

    async def _cancelled_result(self, placement: _Placement) -> SessionResult:
        turns = await self._store.turns(placement.attempt.session.id, placement.attempt.session.attempt)
        return session_result(placement.attempt.session, StopReason.CANCELLED, turns, task=placement.attempt.task)

    async def _settled(self, placement: _Placement, result: SessionResult) -> SessionResult:
        """What was stored: a result that cannot be is a bug, and ends its own session, not the service."""
        try:
            await self._settle(placement, result)
            return result
        except ServiceError:  # of the database: the same is tried again
            raise
        except Exception as error:  # whatever it is about this result
            log.exception("the result of session %s cannot be stored", placement.attempt.session.id)
            record = msgspec.structs.replace(record_of(error), retryable=False)
            failed = msgspec.structs.replace(result, stop_reason=StopReason.ERROR, verdict=None, error=record)
            await self._finish(placement.attempt.session.id, placement.attempt.session.attempt, failed)
            return failed

    async def _settle(self, placement: _Placement, result: SessionResult) -> None:
        """Retry what policy allows, else end the session. A cancel that comes meanwhile ends it too."""
        session, error = placement.attempt.session, result.error
        if error is None or not _worth_another(error, placement):
            await self._finish(session.id, session.attempt, result)
            return
        log.warning("session %s attempt %d failed: %s", session.id, session.attempt, error.message)
        try:
            due = time.time() + self._pauses.wait(_failures(session) - 1)
            await self._store.requeue(session.id, session.attempt, error, due=due)
        except Conflict as conflict:
            log.warning("session %s attempt %d was settled elsewhere: %s", session.id, session.attempt, conflict)
            return
        if placement.cancelled:
            await self._finish(session.id, session.attempt, await self._cancelled_result(placement))

    async def _finish(self, session_id: str, attempt: int, result: SessionResult) -> None:
        try:
            group_done = await self._store.finish(session_id, attempt, result)
        except (Conflict, NotFound) as error:
            log.warning("session %s attempt %d was settled elsewhere: %s", session_id, attempt, error)
            return
        if group_done:
            self._tasks.pop(result.group_id, None)
            self._on_done()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            for name in self._placed:
                await insist(partial(self._store.renew_leases, name, time.time() + LEASE_SECONDS))


def _failures(session: SessionRow) -> int:
    """How many attempts have failed, this one included: one that ended with its node has not."""
    return session.attempt - session.recovered


def _worth_another(error: ErrorRecord, placement: _Placement) -> bool:
    """A failed evaluation was tried again where it failed: the agent's work is not done anew for it."""
    return (
        error.retryable
        and error.boundary is not Boundary.EVALUATOR
        and _failures(placement.attempt.session) < placement.attempt.task.max_attempts
    )
