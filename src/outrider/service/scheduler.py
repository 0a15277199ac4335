"""The scheduler: takes queued sessions by priority and age, places them on nodes, and settles how they ended.

It knows no sandbox and no token. Invariant: every attempt it starts ends in exactly one of finish and requeue,
unless this process dies; then the lease runs out and `recover` requeues it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from outrider.errors import Boundary, Conflict, ErrorRecord, NotFound
from outrider.lifecycle import GroupState, StopReason
from outrider.service.insist import insist
from outrider.service.interrupted import interrupted_result
from outrider.sessions.node import Assignment, Node
from outrider.spec import GroupSpec, TaskSpec
from outrider.store.base import SessionRow, Store
from outrider.trajectory import SessionResult
from outrider.wire import NodeStats

log = logging.getLogger("outrider.scheduler")

LEASE_SECONDS = 30.0
"""How long a session may go without its lease renewed before another attempt is made."""


@dataclass(eq=False)
class _Attempt:
    """An attempt under way. `task` is there while its node has it: only then does a cancel interrupt it."""

    node: Node
    session: SessionRow
    assignment: Assignment
    task: asyncio.Task[None] | None = None
    cancelled: bool = False


class Scheduler:
    """`run` it in a task group; `wake` it when something was queued; `cancel` a session that it runs."""

    def __init__(self, store: Store, nodes: Sequence[Node], *, on_done: Callable[[], None]) -> None:
        self._store = store
        self._nodes = nodes
        self._on_done = on_done
        self._work = asyncio.Event()
        self._attempts: dict[str, _Attempt] = {}
        self._placed: dict[str, int] = {node.name: 0 for node in nodes}
        self._tasks: dict[str, TaskSpec] = {}

    async def run(self) -> None:
        """Place sessions until cancelled; running attempts are then requeued, to be run by the next service."""
        await insist(self._resume)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(), name="renew leases")
            while True:
                self._work.clear()
                await insist(lambda: self._place_all(group))
                await self._work.wait()

    def wake(self) -> None:
        self._work.set()

    def stats(self) -> list[NodeStats]:
        return [node.stats() for node in self._nodes]

    async def cancel(self, sessions: Sequence[SessionRow]) -> None:
        """End sessions of a cancelled group: attempts are told to stop, once; queued ones are finished here."""
        for session in sessions:
            attempt = self._attempts.get(session.id)
            if attempt is None:
                task = await self._task_of(session)
                result = interrupted_result(session, StopReason.CANCELLED, [], labels=task.labels)
                await self._finish(session.id, session.attempt, result)
            elif not attempt.cancelled:
                attempt.cancelled = True
                if attempt.task is not None:
                    attempt.task.cancel()

    async def _resume(self) -> None:
        """Take over what an earlier service left: requeue its attempts, and end what was already cancelled."""
        await self._store.recover(now=float("inf"))
        for group in await self._store.groups(state=GroupState.ACTIVE, limit=sys.maxsize):
            if group.cancelled:
                await self.cancel(await self._store.cancel_group(group.id))

    async def _place_all(self, group: asyncio.TaskGroup) -> None:
        while (node := self._roomiest()) is not None:
            room = node.stats().capacity - self._placed[node.name]
            queued = await self._store.queued(room)
            if not queued:
                return
            for session in queued:
                await self._start(group, node, session)

    def _roomiest(self) -> Node | None:
        node = max(self._nodes, key=lambda node: node.stats().capacity - self._placed[node.name])
        return node if node.stats().capacity > self._placed[node.name] else None

    async def _start(self, group: asyncio.TaskGroup, node: Node, session: SessionRow) -> None:
        task = await self._task_of(session)
        try:
            number = await self._store.start_attempt(
                session.id, node=node.name, lease_until=time.time() + LEASE_SECONDS
            )
        except Conflict:  # its group was cancelled in between
            self._tasks.pop(session.group_id, None)
            return
        assignment = Assignment(
            session_id=session.id,
            group_id=session.group_id,
            sample_index=session.sample_index,
            attempt=number,
            priority=session.priority,
            task=task,
        )
        attempt = _Attempt(node, msgspec.structs.replace(session, attempt=number), assignment)
        self._placed[node.name] += 1
        self._attempts[session.id] = attempt
        group.create_task(self._run(attempt), name=f"session {session.id}")

    async def _task_of(self, session: SessionRow) -> TaskSpec:
        task = self._tasks.get(session.group_id)
        if task is None:
            group = await self._store.group(session.group_id)
            task = self._tasks[group.id] = GroupSpec.model_validate_json(group.spec).task
        return task

    async def _run(self, attempt: _Attempt) -> None:
        session = attempt.session
        started = time.monotonic()
        try:
            result = await self._outcome(attempt)
            await insist(lambda: self._settle(attempt, result))
            log.info(
                "session %s attempt %d: %s in %.2f s",
                session.id,
                session.attempt,
                result.stop_reason.value,
                time.monotonic() - started,
            )
        finally:
            self._placed[attempt.node.name] -= 1
            if self._attempts.get(session.id) is attempt:
                del self._attempts[session.id]
            self._work.set()

    async def _outcome(self, attempt: _Attempt) -> SessionResult:
        """How the attempt ended. A cancel may have come before its first step; after its last it stops nothing."""
        try:
            if not attempt.cancelled:
                attempt.task = asyncio.current_task()
                return await attempt.node.run(attempt.assignment)
        except asyncio.CancelledError:
            if not attempt.cancelled:
                raise
        finally:
            attempt.task = None
        return await insist(lambda: self._cancelled_result(attempt))

    async def _cancelled_result(self, attempt: _Attempt) -> SessionResult:
        turns = await self._store.turns(attempt.session.id, attempt.session.attempt)
        labels = attempt.assignment.task.labels
        return interrupted_result(attempt.session, StopReason.CANCELLED, turns, labels=labels)

    async def _settle(self, attempt: _Attempt, result: SessionResult) -> None:
        """Retry what policy allows, else end the session. A cancel that comes meanwhile ends it too."""
        session, error = attempt.session, result.error
        if error is None or not _worth_another(error, attempt.assignment):
            await self._finish(session.id, session.attempt, result)
            return
        log.warning("session %s attempt %d failed: %s", session.id, session.attempt, error.message)
        try:
            await self._store.requeue(session.id, session.attempt, error)
        except Conflict as conflict:
            log.warning("session %s attempt %d was settled elsewhere: %s", session.id, session.attempt, conflict)
            return
        if attempt.cancelled:
            await self._finish(session.id, session.attempt, await self._cancelled_result(attempt))

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


def _worth_another(error: ErrorRecord, assignment: Assignment) -> bool:
    """A failed evaluation was tried again where it failed: the agent's work is not done anew for it."""
    return (
        error.retryable
        and error.boundary is not Boundary.EVALUATOR
        and assignment.attempt < assignment.task.max_attempts
    )
