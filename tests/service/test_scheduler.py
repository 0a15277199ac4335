"""The scheduler on a store with hooks after its operations, and on a node that only records its attempts."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from outrider.concurrency.retries import RetryPolicy
from outrider.counts import NodeCounts
from outrider.errors import Boundary, ErrorRecord, ServiceError
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import NodeStats, ResourceStats
from outrider.service.scheduler import ENDED_AT_ONCE, LIMITS, LeaseLimits, Scheduler
from outrider.sessions.attempt import Attempt, NodeLost
from outrider.spec import RuntimeSpec, StoredGroupSpec
from outrider.store.rows import SessionRow
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from outrider.trajectory import HarnessExit, SessionResult, Turn
from store.world import turn

from .world import put

FAILURE = ErrorRecord(boundary=Boundary.RUNTIME, code="runtime_failure", message="gone", retryable=True)


RESOURCES = ResourceStats(cpus=2.0, memory_mb=1024)
AT_ONCE = RetryPolicy(first=0.0, longest=0.0)


class Moments(Store):
    """A store that calls a hook when an operation is done, before its caller goes on."""

    def __init__(self) -> None:
        super().__init__(SqliteDatabase(None))
        self.started: Callable[[], None] = lambda: None
        self.requeued: Callable[[], None] = lambda: None
        self.finished: Callable[[], None] = lambda: None
        self.looked: Callable[[], Awaitable[None]] | None = None
        self.read: Callable[[], Awaitable[None]] | None = None

    async def queued(self, limit: int, *, now: float = math.inf, **which: Any) -> list[SessionRow]:
        looked = self.looked
        found = await super().queued(limit, now=now, **which)
        if looked is not None:
            await looked()
        return found

    async def turns(
        self, session_id: str, attempt: int | None = None, *, images: bool = False, tenant: str | None = None
    ) -> list[Turn]:
        found = await super().turns(session_id, attempt, images=images, tenant=tenant)
        if self.read is not None:
            await self.read()
        return found

    async def start_attempt(self, session_id: str, **how: Any) -> int:
        number = await super().start_attempt(session_id, **how)
        self.started()
        return number

    async def requeue(self, session_id: str, attempt: int, error: ErrorRecord, *, due: float = 0.0) -> None:
        await super().requeue(session_id, attempt, error, due=due)
        self.requeued()

    async def finish(self, session_id: str, attempt: int, result: SessionResult, **how: Any) -> bool:
        group_done = await super().finish(session_id, attempt, result, **how)
        self.finished()
        return group_done


class FakeNode:
    """A node that ends every session with `error` or `reason`: at once, or when `hold` is set."""

    def __init__(self, name: str = "fake", resources: ResourceStats = RESOURCES) -> None:
        self.name = self.machine = name
        self.resources = resources
        self.ran: list[tuple[str, int]] = []
        self.error: ErrorRecord | None = None
        self.reason = StopReason.COMPLETED
        self.run_reason: StopReason | None = None
        self.exit: HarnessExit | None = None
        self.dies = 0
        """Number of the next attempts that are lost at their end."""
        self.started, self.hold = asyncio.Event(), asyncio.Event()
        self.hold.set()

    def stats(self) -> NodeStats:
        return NodeStats(name=self.name, sessions=0, capacity=4, lanes=(), resources=self.resources)

    def counts(self) -> NodeCounts:
        return NodeCounts()

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return True

    async def pull_image(self, reference: str, name: str) -> RootImage:
        raise NotImplementedError

    async def run(self, attempt: Attempt) -> SessionResult:
        self.ran.append((attempt.session.id, attempt.session.attempt))
        self.started.set()
        try:
            await self.hold.wait()
        finally:
            if self.dies:
                self.dies -= 1
                raise NodeLost("it died")
        return SessionResult(
            session_id=attempt.session.id,
            group_id=attempt.session.group_id,
            sample_index=attempt.session.sample_index,
            attempt=attempt.session.attempt,
            stop_reason=StopReason.ERROR if self.error else self.reason,
            error=self.error,
            run_reason=self.run_reason,
            harness_exit=self.exit,
        )


@asynccontextmanager
async def scheduling(
    pauses: RetryPolicy = AT_ONCE,
    limits: LeaseLimits = LIMITS,
) -> AsyncIterator[tuple[Scheduler, Moments, FakeNode, asyncio.TaskGroup, asyncio.Event]]:
    done = asyncio.Event()
    node = FakeNode()
    async with asyncio.timeout(10), Moments() as store, asyncio.TaskGroup() as tasks:
        scheduler = Scheduler(store, [node], on_done=done.set, pauses=pauses, limits=limits)
        running = tasks.create_task(scheduler.run())
        yield scheduler, store, node, tasks, done
        running.cancel()


@pytest.mark.parametrize(("ran", "attempts"), [(None, 2), (StopReason.COMPLETED, 1)])
async def test_a_failed_evaluator_is_tried_again_only_before_the_agent_ran(
    ran: StopReason | None, attempts: int
) -> None:
    """A node without a grader's key refuses a session at once. Another node may have the key, so the session is tried
    again. Otherwise one such node would fail the whole queue."""
    async with scheduling() as (scheduler, store, node, _, done):
        node.error = msgspec.structs.replace(FAILURE, boundary=Boundary.EVALUATOR, code="evaluator_error")
        node.run_reason = ran
        await put(store, "g", "s", max_attempts=2)
        scheduler.wake()
        await done.wait()
        assert len(node.ran) == attempts


async def test_what_becomes_due_while_it_looks_is_not_forgotten() -> None:
    async with scheduling(RetryPolicy(first=0.1, longest=0.1)) as (scheduler, store, node, _, done):
        node.error = FAILURE
        await put(store, "g", "s")

        def recover() -> None:
            node.error = None
            store.looked = until_due

        async def until_due() -> None:
            await asyncio.sleep((await store.session("s")).due - time.time() + 0.001)

        store.requeued = recover
        scheduler.wake()
        await done.wait()
        assert node.ran == [("s", 1), ("s", 2)]


async def test_a_session_whose_lease_lapses_is_taken_again() -> None:
    """The start of such a session may have been stored while the connection to the database broke, so this service has
    no record of the attempt."""
    async with scheduling(limits=LeaseLimits(seconds=0.03)) as (_, store, node, _, done):
        await put(store, "g", "s", "t")
        await store.start_attempt("s", node="fake", lease_until=time.time() + 0.1)
        await store.start_attempt("t", node="gone", lease_until=time.time())
        await done.wait()
        assert sorted(node.ran) == [("s", 2), ("t", 2)]
        assert [row.recovered for row in await store.sessions("g")] == [1, 1]


async def test_what_runs_here_is_never_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running session is not taken again although its lease has expired, for example because the clock was set
    forward."""
    async with scheduling() as (scheduler, store, node, _, done):
        node.hold.clear()
        await put(store, "g", "s")
        scheduler.wake()
        await node.started.wait()
        await store.renew_leases({"s": 1}, 0.0)
        monkeypatch.setattr(store, "renew_leases", AsyncMock())
        await scheduler._renew_and_retake()
        assert (await store.session("s")).attempt == 1
        node.hold.set()
        await done.wait()
        assert node.ran == [("s", 1)]


async def test_the_sessions_of_a_node_that_died_are_taken_again_at_once() -> None:
    async with scheduling() as (scheduler, store, node, _, done):
        node.dies = 1
        await put(store, "g", "s")
        scheduler.wake()
        await done.wait()
        assert node.ran == [("s", 1), ("s", 2)]
        session = await store.session("s")
        assert session.recovered == 1
        assert session.result is not None
        assert session.result.stop_reason is StopReason.COMPLETED


async def test_a_session_that_was_to_end_ends_with_its_node() -> None:
    async with scheduling() as (scheduler, store, node, _, done):
        node.hold.clear()
        await put(store, "g", "s")
        scheduler.wake()
        await node.started.wait()
        node.dies = 1
        await scheduler.end(await store.cancel_group("g"))
        await done.wait()
        result = (await store.session("s")).result
        assert result is not None
        assert result.stop_reason is StopReason.CANCELLED
        assert node.ran == [("s", 1)]


async def test_a_session_that_kills_every_node_is_given_up() -> None:
    async with scheduling(limits=LeaseLimits(recovered=2)) as (scheduler, store, node, _, done):
        node.dies = 10
        await put(store, "g", "s")
        scheduler.wake()
        await done.wait()
        assert [attempt for _, attempt in node.ran] == [1, 2, 3]
        result = (await store.session("s")).result
        assert result is not None
        assert result.error is not None
        assert (result.stop_reason, result.error.code) == (StopReason.ERROR, "lease_expired")


async def test_cancelled_between_its_lease_and_its_first_step() -> None:
    async with scheduling() as (scheduler, store, node, tasks, done):
        await put(store, "g", "s")

        session = msgspec.structs.replace(await store.session("s"), ending=StopReason.CANCELLED)

        def cancel() -> None:
            tasks.create_task(scheduler.end([session]))

        store.started = cancel
        scheduler.wake()
        await done.wait()
        result = (await store.session("s")).result
        assert result is not None
        assert (result.stop_reason, result.attempt, node.ran) == (StopReason.CANCELLED, 1, [])


async def test_a_turn_that_is_stored_while_an_interrupted_attempt_ends_is_counted() -> None:
    async with scheduling() as (scheduler, store, node, _, done):
        node.hold.clear()
        await put(store, "g", "s")
        scheduler.wake()
        await node.started.wait()
        await store.add_turn("s", 1, turn(0))

        async def add_another() -> None:
            store.read = None
            await store.add_turn("s", 1, turn(1))

        store.read = add_another
        await scheduler.end(await store.cancel_group("g"))
        await done.wait()
        ended = (await store.session("s")).result
        assert ended is not None
        assert (ended.stop_reason, ended.turns) == (StopReason.CANCELLED, 2)
        assert ended.tokens.sampled == sum(len(one.output_ids) // 4 for one in await store.turns("s"))


async def test_a_group_whose_last_commit_was_not_answered_leaves_nothing_in_memory() -> None:
    def lose_the_answer() -> None:
        store.finished = lambda: None
        raise ServiceError("the connection is gone")

    async with scheduling() as (scheduler, store, _, _, done):
        store.finished = lose_the_answer
        labels = {"run": "unanswered"}  # other tests have left parsed tasks, too
        await put(store, "g", "s", labels=labels)
        scheduler.wake()
        await done.wait()
        result = (await store.session("s")).result
        assert result is not None
        assert result.stop_reason is StopReason.COMPLETED
        await scheduler.run_dry()
        gc.collect()
        # `isinstance` would read the class of each object, which makes objects of torch emit a warning.
        specs = [one for one in gc.get_objects() if type(one) is StoredGroupSpec]
        assert not [one for one in specs if one.task.labels == labels]


@pytest.mark.parametrize(
    ("reason", "code", "stops", "state"),
    [
        (StopReason.NONZERO_EXIT, 143, True, SessionState.QUEUED),
        (StopReason.AGENT_EXCESS, 0, True, SessionState.QUEUED),
        (StopReason.NONZERO_EXIT, 1, True, SessionState.DONE),
        (StopReason.NONZERO_EXIT, 255, True, SessionState.DONE),
        (StopReason.AGENT_TIMEOUT, 0, True, SessionState.DONE),
        (StopReason.COMPLETED, 0, True, SessionState.DONE),
        (StopReason.NONZERO_EXIT, 143, False, SessionState.DONE),
        (StopReason.AGENT_EXCESS, 0, False, SessionState.DONE),
    ],
)
async def test_what_a_signal_ends_while_the_service_stops_runs_again(
    reason: StopReason, code: int, stops: bool, state: SessionState
) -> None:
    """The signal that stops the service may have reached the sandbox, too, which is no failure of the session."""
    async with scheduling() as (scheduler, store, node, tasks, _):
        node.reason, node.exit = reason, HarnessExit(code=code, log_tail="") if code else None
        node.hold.clear()
        await put(store, "g", "s")
        scheduler.wake()
        await node.started.wait()
        if stops:
            stopping = tasks.create_task(scheduler.run_dry())
            while not scheduler.stopping:  # noqa: ASYNC110
                await asyncio.sleep(0)
        node.hold.set()
        if stops:
            await stopping
        while (session := await store.session("s")).state is SessionState.INITIALIZING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (session.state, session.recovered) == (state, int(state is SessionState.QUEUED))
        assert len(node.ran) == 1


async def test_cancelled_while_its_failed_attempt_goes_back_to_the_queue() -> None:
    async with scheduling() as (scheduler, store, node, tasks, done):
        node.error = FAILURE
        await put(store, "g", "s")

        def cancel() -> None:
            tasks.create_task(cancelling())

        async def cancelling() -> None:
            await scheduler.end(await store.cancel_group("g"))

        store.requeued = cancel
        scheduler.wake()
        await done.wait()
        result = (await store.session("s")).result
        assert result is not None
        assert result.stop_reason is StopReason.CANCELLED


async def test_a_failure_worth_it_is_tried_again_until_the_task_has_had_enough() -> None:
    async with scheduling() as (scheduler, store, node, _, done):
        node.error = FAILURE
        await put(store, "g", "s", max_attempts=4)
        scheduler.wake()
        await done.wait()
        session = await store.session("s")
        assert node.ran == [("s", 1), ("s", 2), ("s", 3), ("s", 4)]
        assert session.last_error == FAILURE
        assert session.result is not None
        assert (session.result.stop_reason, session.result.error) == (StopReason.ERROR, FAILURE)


async def test_a_queue_that_expires_is_ended_in_few_commits(tmp_path: Path) -> None:
    """While the scheduler ends these sessions, it starts none, and a commit may take long on a slow disk."""
    async with sqlite_store(tmp_path / "db") as store, asyncio.timeout(60):
        for name in "ab":
            await put(store, name, *(f"{name}{number}" for number in range(ENDED_AT_ONCE)))
            await store.cancel_group(name)
        before = sum(store.commit_seconds().counts)
        scheduler = Scheduler(store, [], on_done=lambda: None)
        await scheduler.end(await store.to_end())
        assert [group.state for group in await store.groups()] == [GroupState.DONE] * 2
        assert sum(store.commit_seconds().counts) - before < ENDED_AT_ONCE / 4


async def test_a_session_goes_where_there_is_room_for_what_it_needs() -> None:
    nodes = [
        FakeNode("small", ResourceStats(cpus=2.0, memory_mb=1024)),
        FakeNode("full", ResourceStats(cpus=8.0, cpus_set_aside=8.0, memory_mb=1024)),
        FakeNode("large", ResourceStats(cpus=4.0, memory_mb=1024)),
    ]
    done = asyncio.Event()
    async with asyncio.timeout(10), Moments() as store, asyncio.TaskGroup() as tasks:
        scheduler = Scheduler(store, nodes, on_done=done.set)
        await put(store, "g4", "s4", runtime={"resources": {"cpus": 4}})
        await put(store, "g8", "s8", runtime={"resources": {"cpus": 8}})
        running = tasks.create_task(scheduler.run())
        for group_id in ("g4", "g8"):
            while (await store.group(group_id)).state is GroupState.ACTIVE:
                await store.counts()
        running.cancel()
    assert [[session for session, _ in node.ran] for node in nodes] == [[], ["s8"], ["s4"]]
