"""A database that fails for a while costs only time: no other session fails, no result is lost, and the service goes
on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.concurrency.cancellation import OffloadThread
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config
from outrider.counts import NodeCounts
from outrider.engines.pool.pool import EnginePool
from outrider.errors import Boundary, ErrorRecord, ServiceError
from outrider.lifecycle import GroupState, StopReason
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.store import RootImage
from outrider.schemas import NodeStats, ResourceStats
from outrider.service.allow_lists import AllowLists
from outrider.service.delivery import Deliverer
from outrider.service.scheduler import Scheduler
from outrider.service.views import ViewReader
from outrider.sessions.attempt import Attempt
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import Capacity, NodeResources
from outrider.spec import RuntimeSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import SessionResult, Turn

from .conftest import MakeWorld
from .stage import a_stage
from .test_delivery import finished_group, receiving
from .world import RENDERER, SAY, engine_of, group, put

GONE = ErrorRecord(boundary=Boundary.RUNTIME, code="runtime_failure", message="gone", retryable=True)
RESOURCES = ResourceStats(cpus=2.0, memory_mb=1024)
METHODS = (
    "recover",
    "queued",
    "start_attempt",
    "turns",
    "requeue",
    "finish",
    "spec",
    "to_end",
    "next_due",
    "expire",
    "drained_nodes",
    "deliveries",
    "delivered",
)


class FailingStore(Store):
    """A store in memory. `faults` has, for a method, the number of its next calls that fail before they do anything."""

    def __init__(self, **faults: int) -> None:
        super().__init__(SqliteDatabase(None))
        self.faults = Counter(faults)

    def __getattribute__(self, name: str) -> Any:
        if name in METHODS and self.faults[name]:
            self.faults[name] -= 1
            return _failing
        return super().__getattribute__(name)


async def _failing(*_: Any, **__: Any) -> None:
    raise ServiceError("the disk is full")


class OnceMore:
    """A node whose first attempt fails."""

    name = machine = "node"

    def stats(self) -> NodeStats:
        return NodeStats(name=self.name, sessions=0, capacity=4, lanes=(), resources=RESOURCES)

    def counts(self) -> NodeCounts:
        return NodeCounts()

    def has_image(self, runtime: RuntimeSpec) -> bool:
        return True

    async def pull_image(self, reference: str, name: str) -> RootImage:
        raise NotImplementedError

    async def run(self, attempt: Attempt) -> SessionResult:
        first = attempt.session.attempt == 1
        return SessionResult(
            session_id=attempt.session.id,
            group_id=attempt.session.group_id,
            sample_index=attempt.session.sample_index,
            attempt=attempt.session.attempt,
            stop_reason=StopReason.ERROR if first else StopReason.COMPLETED,
            error=GONE if first else None,
        )


@pytest.mark.parametrize(
    "method",
    [
        "recover",
        "to_end",
        "spec",
        "queued",
        "next_due",
        "expire",
        "drained_nodes",
        "start_attempt",
        "requeue",
        "finish",
    ],
)
async def test_the_scheduler_gets_over_a_failing(method: str) -> None:
    done = asyncio.Event()
    async with asyncio.timeout(20), FailingStore() as store, asyncio.TaskGroup() as tasks:
        await put(store, "g", "s")
        store.faults[method] = 2
        running = tasks.create_task(
            Scheduler(store, [OnceMore()], on_done=done.set, pauses=RetryPolicy(first=0.01, longest=0.01)).run()
        )
        await done.wait()
        while +store.faults:  # the session may end before the second fault
            await store.session("s")
        running.cancel()
        session = await store.session("s")
        assert (session.attempt, session.result and session.result.stop_reason) == (2, StopReason.COMPLETED)
        assert (await store.group("g")).state is GroupState.DONE


async def test_a_record_that_cannot_be_read_fails_its_session_alone(tmp_path: Path, tokenizer: Path) -> None:
    renderer = make_renderer(Tokenizer.load(tokenizer), RENDERER)
    with a_stage() as stage:
        async with FailingStore(turns=1000) as store, EnginePool() as pool:
            await pool.add_engine(engine_of(tokenizer, [SAY]))
            endpoint = ModelBackend(renderer=renderer, pool=pool, model="policy")
            kept = ArtifactStore(tmp_path)
            async with LocalNode(
                "node",
                Config(),
                backend=endpoint,
                store=store,
                artifacts=kept,
                resources=NodeResources(Capacity(cpus=2.0, memory_mb=1024)),
                paths=HostPaths.of(tmp_path),
            ) as node:
                await put(store, "g", "s")
                await store.start_attempt("s", node="node", lease_until=1e12)
                result = await node.run(Attempt(session=await store.session("s"), task=group("ask").task))
                assert result.error is not None
                assert (result.stop_reason, result.error.code) == (StopReason.ERROR, "service_error")
                assert (result.verdict, result.error.retryable) == (None, True)
                assert node.stats().sessions == 0
        assert stage.ledger.balanced


@pytest.mark.parametrize("method", ["deliveries", "group", "delivered"])
async def test_delivery_gets_over_a_failing(tokenizer: Path, method: str) -> None:
    async with receiving() as receiver, FailingStore() as store, asyncio.timeout(20):
        await finished_group(store, "g", receiver.url)
        store.faults[method] = 2
        await delivered(store, tokenizer)
        assert receiver.keys == ["g"]


async def test_a_redirect_is_no_delivery(tokenizer: Path) -> None:
    async with receiving(302, 304) as receiver, FailingStore() as store, asyncio.timeout(20):
        await finished_group(store, "g", receiver.url)
        await delivered(store, tokenizer)
        assert receiver.keys == ["g", "g", "g"]


async def delivered(store: FailingStore, tokenizer: Path) -> None:
    """Run a deliverer until no delivery is left."""
    deliverer = Deliverer(
        store,
        ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()),
        allow_lists=AllowLists(Config()),
        pauses=RetryPolicy(first=0.01, longest=0.01),
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(deliverer.run())
        while await Store.deliveries(store, now=1e12, limit=1):
            await store.counts()
        running.cancel()


async def test_a_turn_that_is_lost_when_the_agent_has_left_already_fails_the_attempt(world: MakeWorld) -> None:
    async with world([SAY, {"reply": SAY, "stall": 1}] * 2) as w:
        store: Any = w.service.store
        kept, lost = store.add_turn, 0

        async def add_turn(session_id: str, attempt: int, turn: Turn) -> None:
            nonlocal lost
            if (attempt, turn.index) == (1, 1):
                lost += 1
                raise ServiceError("disk full")
            await kept(session_id, attempt, turn)

        store.add_turn = add_turn
        session = await w.run("ask", "leave", max_attempts=2)
        assert (lost, session.attempt, w.stage.count["graded"]) == (1, 2, 1)
        assert session.last_error is not None
        assert session.last_error.message == "disk full"
