"""Fair share: which sessions the scheduler starts, and which wait, on a node whose sessions run until the test ends
them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from outrider.counts import NodeCounts
from outrider.errors import Boundary
from outrider.lifecycle import GroupState, StopReason
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import LaneStats, NodeStats, ResourceStats
from outrider.service.scheduler import Scheduler
from outrider.sessions.attempt import RESERVED_PRIORITY, Attempt
from outrider.spec import EVALUATION_LABEL, OPERATOR_TENANT, GroupSpec, RuntimeSpec
from outrider.store.queue import MOST_SKIPPED_BUCKETS
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.trajectory import SessionResult

from .world import group

RUN_LANE = LaneStats(name="run", size=4, in_use=0, waiting=0, served=0, waited_seconds=0.0)


class HeldNode:
    """A node on which each session runs until its event in `running` is set."""

    name = machine = "held"

    def __init__(self, capacity: int = 6) -> None:
        self.capacity = capacity
        self.running: dict[str, tuple[Attempt, asyncio.Event]] = {}
        self.ran: list[str] = []

    def stats(self) -> NodeStats:
        resources = ResourceStats(cpus=4.0, memory_mb=1024)
        return NodeStats(
            name=self.name,
            sessions=len(self.running),
            capacity=self.capacity,
            lanes=(RUN_LANE,),
            resources=resources,
        )

    def counts(self) -> NodeCounts:
        return NodeCounts()

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return True

    async def pull_image(self, reference: str, name: str) -> RootImage:
        raise NotImplementedError

    async def run(self, attempt: Attempt) -> SessionResult:
        session = attempt.session
        over = asyncio.Event()
        self.running[session.id] = attempt, over
        self.ran.append(session.id)
        try:
            await over.wait()
        finally:
            del self.running[session.id]
        return SessionResult(
            session_id=session.id,
            group_id=session.group_id,
            sample_index=session.sample_index,
            attempt=session.attempt,
            stop_reason=StopReason.COMPLETED,
        )

    def runs(self) -> Counter[str]:
        """Return the number of running sessions of each group. A group's name is the part of the session's id before
        the dash."""
        return Counter(id.partition("-")[0] for id in self.running)


class Scheduled:
    """A store, a node, and a scheduler between them."""

    def __init__(self, store: Store, node: HeldNode, scheduler: Scheduler) -> None:
        self.store = store
        self.node = node
        self.scheduler = scheduler

    async def submit(
        self, id: str, spec: GroupSpec, *, expires: float | None = None, tenant: str = OPERATOR_TENANT
    ) -> None:
        row = GroupRow(
            id=id,
            n=spec.n,
            priority=spec.priority,
            created=time.time(),
            labels=spec.task.labels,
            tenant=tenant,
        )
        ids = [f"{id}-{index}" for index in range(spec.n)]
        await self.store.create_group(row, spec.model_dump_json().encode(), ids, expires=expires)
        self.scheduler.wake()

    async def until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self.store.counts()

    async def end(self, *ids: str) -> None:
        for id in ids:
            self.node.running[id][1].set()
        await self.until(lambda: not set(ids) & set(self.node.running))

    async def settled(self) -> None:
        """Wait until the scheduler has made a whole pass."""
        looks = asyncio.Event()
        looked = self.store.next_due

        async def next_due(*, after: float) -> float | None:
            due = await looked(after=after)
            looks.set()
            return due

        self.store.next_due = next_due  # type: ignore[method-assign]  # to notice the call
        for _ in range(2):  # the first pass may have begun before
            looks.clear()
            self.scheduler.wake()
            await looks.wait()
        self.store.next_due = looked  # type: ignore[method-assign]


@asynccontextmanager
async def scheduled(capacity: int = 6, *, share: float = 0.0, store: Store | None = None) -> AsyncIterator[Scheduled]:
    node = HeldNode(capacity)
    async with asyncio.timeout(30), sqlite_store(None) as own, asyncio.TaskGroup() as tasks:
        kept = store or own
        scheduler = Scheduler(kept, [node], on_done=lambda: None, evaluation_share=share)
        running = tasks.create_task(scheduler.run())
        yield Scheduled(kept, node, scheduler)
        running.cancel()


def of_run(name: str, n: int = 1, **fields: Any) -> GroupSpec:
    return group("ask", n=n, labels={"run": name}, **fields)


async def test_runs_share_the_slots_however_much_each_has_queued_and_however_long_it_takes() -> None:
    chance = random.Random(3)
    async with scheduled() as s:
        await s.submit("a", of_run("a", 400))
        await s.until(lambda: s.node.runs()["a"] == 6)
        await s.submit("b", of_run("b", 30))
        await s.submit("c", of_run("c", 12))
        left = {"a": 394, "b": 30, "c": 12}
        while left["b"] or left["c"]:
            # Sessions of `a` take three times as long, so they are chosen less often.
            running = list(s.node.running)
            weights = [1 if id[0] == "a" else 3 for id in running]
            [ended] = chance.choices(running, weights)
            before, ran = s.node.runs(), len(s.node.ran)
            await s.end(ended)
            await s.until(lambda ran=ran: len(s.node.ran) > ran)  # type: ignore[misc]
            [started] = [id[0] for id in s.node.ran[ran:]]
            busy = before - Counter([ended[0]])
            assert busy[started] == min(busy[name] for name, number in left.items() if number)
            left[started] -= 1
        assert left["a"] > 300


async def test_every_run_is_served_though_there_are_more_runs_than_slots() -> None:
    async with scheduled(2) as s:
        for name in "abcde":
            await s.submit(name, of_run(name, 50))
        await s.until(lambda: len(s.node.ran) == 2)
        for _ in range(23):
            ran = len(s.node.ran)
            await s.end(next(iter(s.node.running)))
            await s.until(lambda ran=ran: len(s.node.ran) > ran)  # type: ignore[misc]
        assert Counter(id[0] for id in s.node.ran) == dict.fromkeys("abcde", 5)


async def test_a_tenant_gets_no_more_slots_for_inventing_a_run_for_each_group() -> None:
    async with scheduled() as s:
        for number in range(40):
            await s.submit(f"a{number}", of_run(f"invented {number}"), tenant="a")
        await s.until(lambda: len(s.node.ran) == 6)
        await s.submit("b", of_run("b", 40), tenant="b")
        for _ in range(20):
            ran = len(s.node.ran)
            await s.end(next(iter(s.node.running)))
            await s.until(lambda ran=ran: len(s.node.ran) > ran)  # type: ignore[misc]
        assert s.node.runs()["b"] == 3
        assert len(s.node.running) == 6


async def test_many_runs_that_find_no_room_do_not_hide_another_tenant() -> None:
    async with scheduled(100) as s:
        await s.submit("held", of_run("x", 2, runtime={"resources": {"cpus": 4}}), tenant="a")
        await s.until(lambda: len(s.node.ran) == 2)
        for number in range(MOST_SKIPPED_BUCKETS + 10):
            spec = of_run(f"invented {number}", runtime={"resources": {"cpus": 4}})
            await s.submit(f"a{number}", spec, tenant="a")
        await s.submit("b", of_run("b", 3), tenant="b")
        await s.until(lambda: s.node.runs()["b"] == 3)


async def test_no_priority_of_one_tenant_goes_before_another_tenant() -> None:
    """One tenant's sessions hold all slots and end one after the other. The first free slot goes to the other
    tenant."""
    async with scheduled(3) as s:
        await s.submit("loud", of_run("a", 50, priority=1000), tenant="a")
        await s.until(lambda: len(s.node.ran) == 3)
        await s.submit("new", of_run("b", 2, priority=-1000), tenant="b")
        await s.end("loud-0")
        await s.until(lambda: s.node.runs() == {"loud": 2, "new": 1})
        await s.end("loud-1")
        await s.until(lambda: len(s.node.running) == 3)
        assert s.node.runs() in ({"loud": 2, "new": 1}, {"loud": 1, "new": 2})


async def test_priority_goes_before_fair_share() -> None:
    async with scheduled(2) as s:
        await s.submit("blocker", of_run("x", 2))
        await s.until(lambda: len(s.node.ran) == 2)
        await s.submit("a", of_run("a", 1, priority=-1000))
        await s.submit("b", of_run("x", 2, priority=1000))
        await s.end("blocker-0", "blocker-1")
        await s.until(lambda: len(s.node.ran) == 4)
        assert s.node.runs() == {"b": 2}


async def test_evaluations_get_their_share_and_training_what_they_leave() -> None:
    async with scheduled(share=0.5) as s:  # half of the 4 run slots
        await s.submit("train", of_run("a", 100, priority=5))
        await s.until(lambda: s.node.runs()["train"] == 6)
        await s.submit("eval", group("ask", n=5, labels={EVALUATION_LABEL: "held out"}, priority=-5))
        for ended, most in ((0, 1), (1, 2), (2, 2), (3, 2)):
            await s.end(f"train-{ended}")
            await s.until(lambda: len(s.node.running) == 6)
            assert s.node.runs()["eval"] == most
        attempts = [attempt for attempt, _ in s.node.running.values()]
        assert {attempt.priority for attempt in attempts if attempt.reserved} == {RESERVED_PRIORITY}
        assert {attempt.priority for attempt in attempts if not attempt.reserved} == {5}
        for index in range(3):
            await s.end(f"eval-{index}")
            await s.until(lambda: len(s.node.running) == 6)
        assert s.node.runs() == {"train": 4, "eval": 2}
        await s.end("eval-3", "eval-4")
        await s.until(lambda: s.node.runs() == {"train": 6})


async def test_evaluations_beyond_their_share_wait_like_others() -> None:
    async with scheduled(share=0.25) as s:
        await s.submit("eval", group("ask", n=9, labels={EVALUATION_LABEL: "held out"}))
        await s.until(lambda: s.node.runs()["eval"] == 6)
        assert sum(attempt.reserved for attempt, _ in s.node.running.values()) == 1


async def test_a_large_session_neither_blocks_other_runs_nor_is_starved_by_them() -> None:
    async with scheduled(12) as s:
        needs = {"resources": {"cpus": 1}}
        await s.submit("small", of_run("a", 100, runtime=needs))
        await s.until(lambda: s.node.runs()["small"] == 8)
        await s.submit("large", of_run("b", 2, runtime={"resources": {"cpus": 4}}))
        await s.submit("free", of_run("c", 2))
        await s.until(lambda: s.node.runs()["free"] == 2)
        for index in range(4):
            assert s.node.runs()["large"] == 0
            await s.end(f"small-{index}")
            await s.settled()
        await s.until(lambda: s.node.runs()["large"] == 1)
        assert s.node.runs() == {"small": 4, "large": 1, "free": 2}


async def test_a_session_that_waits_for_too_long_ends_as_an_error_without_reward() -> None:
    async with scheduled(1) as s:
        await s.submit("first", of_run("a"))
        await s.until(lambda: len(s.node.ran) == 1)
        await s.submit("g", of_run("a", 2), expires=time.time() + 0.05)
        while (await s.store.group("g")).state is GroupState.ACTIVE:
            await s.store.counts()
        for session in await s.store.sessions("g"):
            assert session.result is not None
            assert session.result.error is not None
            assert (session.result.stop_reason, session.result.verdict) == (StopReason.EXPIRED, None)
            assert (session.result.error.code, session.result.error.boundary) == ("expired", Boundary.SERVICE)
        assert (await s.store.group("g")).errors == 2
        assert s.node.ran == ["first-0"]


async def test_what_has_started_does_not_expire() -> None:
    async with scheduled(1) as s:
        await s.submit("g", of_run("a"), expires=time.time() + 3600)
        await s.until(lambda: bool(s.node.running))
        assert not await s.store.expire(now=time.time() + 7200)
        await s.settled()
        await s.end("g-0")
        while (await s.store.group("g")).state is GroupState.ACTIVE:
            await s.store.counts()


async def test_a_session_that_expires_while_it_is_placed_is_not_started() -> None:
    async with scheduled(1) as s:
        queued = s.store.queued

        async def late(*args: object, **named: object) -> object:
            found = await queued(*args, **named)  # type: ignore[arg-type]
            if found:
                assert await s.store.expire(now=time.time() + 7200)
            return found

        s.store.queued = late  # type: ignore[method-assign,assignment]
        await s.submit("g", of_run("a"), expires=time.time() + 3600)
        await s.settled()
        [session] = await s.store.sessions("g")
        assert (session.ending, session.attempt, s.node.ran) == (StopReason.EXPIRED, 0, [])


async def test_a_drained_node_starts_nothing_until_it_is_taken_back_and_after_a_restart() -> None:
    async with sqlite_store(None) as store:
        async with scheduled(3, store=store) as s:
            await s.submit("g", of_run("a", 6))
            await s.until(lambda: len(s.node.running) == 3)
            await s.scheduler.drain("held")
            assert s.scheduler.places.stats()[0].drained
            await s.end("g-0")
            await s.settled()
            assert s.node.ran == ["g-0", "g-1", "g-2"]
        async with scheduled(3, store=store) as s:
            await s.settled()
            assert s.node.ran == []
            await s.scheduler.drain("held", False)
            await s.until(lambda: len(s.node.running) == 3)


async def test_a_node_that_is_drained_while_sessions_start_gets_no_more_of_them() -> None:
    async with scheduled(6) as s:
        start = s.store.start_attempt

        async def drained(*args: object, **named: object) -> int:
            number = await start(*args, **named)  # type: ignore[arg-type]
            if number == 1 and not s.node.ran:
                await s.scheduler.drain("held")
            return number

        s.store.start_attempt = drained  # type: ignore[method-assign]
        await s.submit("g", of_run("a", 6))
        await s.until(lambda: bool(s.node.ran))
        await s.settled()
        assert s.node.ran == ["g-0"]
