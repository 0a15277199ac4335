"""Callbacks: pushed until a 2xx, marked so that a receiver can drop what it has had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from outrider.concurrency.offload import OffloadThread
from outrider.config import CallbacksConfig, Config
from outrider.lifecycle import SessionState, StopReason
from outrider.schemas import GroupView
from outrider.service.delivery import Deliverer
from outrider.service.permits import Permits
from outrider.service.views import ViewReader
from outrider.store.rows import Delivery, GroupRow
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import SessionResult

from .conftest import MakeWorld
from .world import HASTY, put


class Receiver:
    """Answers with the given statuses in turn, then 200; keeps what it was sent."""

    def __init__(self, statuses: list[int]) -> None:
        self.url = ""
        self.keys: list[str] = []
        self.views: list[GroupView] = []
        self.accepted = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()
        self._statuses = statuses

    async def handle(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        self.views.append(msgspec.json.decode(await request.read(), type=GroupView))
        await self.answering.wait()
        status = self._statuses.pop(0) if self._statuses else 200
        if status == 200:
            self.accepted.set()
        return web.Response(status=status)


@asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(statuses))
    app = web.Application()
    app.router.add_post("/done", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/done"
        yield receiver
    finally:
        await runner.cleanup()


async def test_a_finished_group_is_pushed_with_its_samples(world: MakeWorld) -> None:
    async with receiving() as receiver, world() as w, asyncio.timeout(20):
        submitted = await w.submit("ask", n=3, callback_url=receiver.url)
        await receiver.accepted.wait()
        (view,) = receiver.views
        assert receiver.keys == [submitted.id]
        assert view == await w.service.reader.group(submitted.id, samples=True)
        assert len(view.samples or ()) == 3
        while await w.service.store.deliveries(now=1e12, limit=1):
            await w.service.status()


async def test_a_cancelled_group_is_pushed_too(world: MakeWorld) -> None:
    async with receiving() as receiver, world() as w, asyncio.timeout(20):
        submitted = await w.submit("wait forever", callback_url=receiver.url)
        await w.service.cancel(submitted.id)
        await receiver.accepted.wait()
        assert receiver.views[0].cancelled


async def test_it_is_pushed_again_until_it_is_taken(tmp_path: Path, tokenizer: Path) -> None:
    async with receiving(500, 404) as receiver, sqlite_store(tmp_path / "db") as store, asyncio.timeout(20):
        await finished_group(store, "g", receiver.url)
        deliverer = Deliverer(
            store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), Permits(Config()), pauses=HASTY
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            await receiver.accepted.wait()
            while await store.deliveries(now=1e12, limit=1):
                await store.counts()
            running.cancel()
        assert receiver.keys == ["g", "g", "g"]


async def test_a_name_that_leads_to_a_refused_address_is_not_pushed_to(tmp_path: Path, tokenizer: Path) -> None:
    """`localhost` stands for a name whose address was harmless when the group was submitted."""
    async with receiving() as receiver, sqlite_store(tmp_path / "db") as store, asyncio.timeout(20):
        await finished_group(store, "g", receiver.url.replace("127.0.0.1", "localhost"))
        permits = Permits(Config(host="0.0.0.0", callbacks=CallbacksConfig(allow=("localhost",))))
        deliverer = Deliverer(
            store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), permits, pauses=HASTY
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            while (await store.deliveries(now=1e12, limit=1))[0].tries < 2:
                await store.counts()
            running.cancel()
        assert receiver.keys == []


async def test_a_receiver_that_is_not_there_is_no_failure_of_the_service(world: MakeWorld) -> None:
    async with world() as w:
        async with receiving() as receiver:
            gone = receiver.url
        submitted = await w.submit("ask", callback_url=gone)
        await w.done(submitted.id)
        while not (due := await w.service.store.deliveries(now=1e12, limit=1)) or not due[0].tries:
            await w.service.status()
        assert due[0].group_id == submitted.id


async def test_a_url_that_cannot_be_used_costs_nobody_else_theirs(tmp_path: Path, tokenizer: Path) -> None:
    async with receiving() as receiver, sqlite_store(tmp_path / "db") as store, asyncio.timeout(20):
        await finished_group(store, "bad", "http://a..b/")
        await finished_group(store, "good", receiver.url)
        deliverer = Deliverer(
            store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), Permits(Config()), pauses=HASTY
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            await receiver.accepted.wait()
            while [due.group_id for due in await store.deliveries(now=1e12, limit=9)] != ["bad"]:
                await store.counts()
            running.cancel()
        assert receiver.keys == ["good"]


class Moments(Store):
    """A store whose answer to the second look is as old as `gate` lets it be, and that notes what it was asked for and
    what was done."""

    def __init__(self) -> None:
        super().__init__(SqliteDatabase(None))
        self.looks = 0
        self.read = asyncio.Event()
        self.gate = asyncio.Event()
        self.done = asyncio.Event()
        self.pushed: list[str] = []

    async def deliveries(self, *, now: float, limit: int) -> list[Delivery]:
        self.looks += 1
        second = self.looks == 2
        found = await super().deliveries(now=now, limit=limit)
        if second:
            self.read.set()
            await self.gate.wait()
        return found

    async def group(self, group_id: str) -> GroupRow:
        self.pushed.append(group_id)
        return await super().group(group_id)

    async def delivered(self, group_id: str) -> None:
        await super().delivered(group_id)
        self.done.set()


async def test_what_is_delivered_while_the_next_are_looked_for_is_not_pushed_again(tokenizer: Path) -> None:
    async with receiving() as receiver, Moments() as store, asyncio.timeout(20):
        await finished_group(store, "first", receiver.url)
        deliverer = Deliverer(
            store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), Permits(Config()), pauses=HASTY
        )
        receiver.answering.clear()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            await store.read.wait()  # the first is under way, and read as still due
            receiver.answering.set()
            await store.done.wait()
            await finished_group(store, "second", receiver.url)
            store.done.clear()
            store.gate.set()
            await store.done.wait()
            running.cancel()
        assert store.pushed == receiver.keys == ["first", "second"]


async def finished_group(store: Store, id: str, url: str) -> None:
    await put(store, id, f"{id}.0", callback_url=url)
    attempt = await store.start_attempt(f"{id}.0", node="n", lease_until=1e12)
    await store.set_state(f"{id}.0", attempt, SessionState.READY)
    result = SessionResult(
        session_id=f"{id}.0", group_id=id, sample_index=0, attempt=attempt, stop_reason=StopReason.COMPLETED
    )
    assert await store.finish(f"{id}.0", attempt, result)
