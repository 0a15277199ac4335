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

import msgspec

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import GroupState, StopReason
from outrider.service.interrupted import interrupted_result
from outrider.sessions.node import Assignment, Node
from outrider.spec import GroupSpec, TaskSpec
from outrider.store.base import SessionRow, Store
from outrider.trajectory import SessionResult
from outrider.wire import NodeStats

log = logging.getLogger("outrider.scheduler")

LEASE_SECONDS = 30.0
"""How long a session may go without its lease renewed before another attempt is made."""


class Scheduler:
    """`run` it in a task group; `wake` it when something was queued; `cancel` a session that it runs."""

    def __init__(self, store: Store, nodes: Sequence[Node], *, on_done: Callable[[], None]) -> None:
        self._store = store
        self._nodes = nodes
        self._on_done = on_done
        self._work = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._settling: set[str] = set()
        self._cancelled: set[str] = set()
        self._placed: dict[str, int] = {node.name: 0 for node in nodes}
        self._tasks: dict[str, TaskSpec] = {}

    async def run(self) -> None:
        """Place sessions until cancelled; running attempts are then requeued, to be run by the next service."""
        await self._resume()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(), name="renew leases")
            while True:
                self._work.clear()
                await self._place_all(group)
                await self._work.wait()

    def wake(self) -> None:
        self._work.set()

    def stats(self) -> list[NodeStats]:
        return [node.stats() for node in self._nodes]

    async def cancel(self, sessions: Sequence[SessionRow]) -> None:
        """End sessions of a cancelled group: running ones are told to stop, queued ones are finished here."""
        for session in sessions:
            task = self._running.get(session.id)
            if task is None:
                await self._finish(session.id, session.attempt, interrupted_result(session, StopReason.CANCELLED, []))
                continue
            self._cancelled.add(session.id)
            if session.id not in self._settling:
                task.cancel()

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
            attempt = await self._store.start_attempt(
                session.id, node=node.name, lease_until=time.time() + LEASE_SECONDS
            )
        except Conflict:
            return  # its group was cancelled in between
        assignment = Assignment(
            session_id=session.id,
            group_id=session.group_id,
            sample_index=session.sample_index,
            attempt=attempt,
            priority=session.priority,
            task=task,
        )
        self._placed[node.name] += 1
        self._running[session.id] = group.create_task(
            self._attempt(node, session, assignment), name=f"session {session.id}"
        )

    async def _task_of(self, session: SessionRow) -> TaskSpec:
        task = self._tasks.get(session.group_id)
        if task is None:
            group = await self._store.group(session.group_id)
            task = self._tasks[group.id] = GroupSpec.model_validate_json(group.spec).task
        return task

    async def _attempt(self, node: Node, session: SessionRow, assignment: Assignment) -> None:
        started = time.monotonic()
        try:
            result = await self._outcome(node, session, assignment)
            await self._settle(session, assignment, result)
            log.info(
                "session %s attempt %d: %s in %.2f s",
                session.id,
                assignment.attempt,
                result.stop_reason.value,
                time.monotonic() - started,
            )
        finally:
            self._placed[node.name] -= 1
            self._running.pop(session.id, None)
            self._settling.discard(session.id)
            self._cancelled.discard(session.id)
            self._work.set()

    async def _outcome(self, node: Node, session: SessionRow, assignment: Assignment) -> SessionResult:
        """How the attempt ended; from then on a cancel no longer interrupts it."""
        try:
            return await node.run(assignment)
        except asyncio.CancelledError:
            if session.id not in self._cancelled:
                raise
            return await self._cancelled_result(session, assignment)
        finally:
            self._settling.add(session.id)

    async def _cancelled_result(self, session: SessionRow, assignment: Assignment) -> SessionResult:
        turns = await self._store.turns(session.id, assignment.attempt)
        row = msgspec.structs.replace(session, attempt=assignment.attempt)
        return interrupted_result(row, StopReason.CANCELLED, turns, labels=assignment.task.labels)

    async def _settle(self, session: SessionRow, assignment: Assignment, result: SessionResult) -> None:
        """Retry what policy allows, else end the session. A cancel that comes meanwhile ends it too."""
        error = result.error
        if error is None or not error.retryable or assignment.attempt >= assignment.task.max_attempts:
            await self._finish(session.id, assignment.attempt, result)
            return
        log.warning("session %s attempt %d failed: %s", session.id, assignment.attempt, error.message)
        try:
            await self._store.requeue(session.id, assignment.attempt, error)
        except Conflict as conflict:
            log.warning("session %s attempt %d was settled elsewhere: %s", session.id, assignment.attempt, conflict)
            return
        if session.id in self._cancelled:
            await self._finish(session.id, assignment.attempt, await self._cancelled_result(session, assignment))

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
            for node in self._nodes:
                await self._store.renew_leases(node.name, time.time() + LEASE_SECONDS)
