"""Callbacks are pushed until the receiver replies with a 2xx. They have a key by which a receiver can drop repeats."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from outrider.callbacks import verify
from outrider.concurrency.cancellation import OffloadThread
from outrider.config import CallbacksConfig, Config
from outrider.errors import NotFound
from outrider.lifecycle import SessionState, StopReason
from outrider.schemas import GroupView, JsonGroupView
from outrider.service.allow_lists import AllowLists
from outrider.service.delivery import (
    LONGEST_PAUSE,
    LOOK_AHEAD,
    MAX_DESCRIPTION,
    MAX_FAILING,
    MAX_PUSHES,
    MAX_PUSHES_EACH,
    MAX_PUSHES_OF_TENANT,
    MIN_TRIES,
    Deliverer,
    _wait_asked,
)
from outrider.service.views import ViewReader, callback_view
from outrider.spec import OPERATOR_TENANT
from outrider.store.rows import Delivery, EventKind, GroupRow
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from outrider.store.task_key import TaskKey
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import SessionResult

from .conftest import MakeWorld
from .world import HASTY, put


class Receiver:
    """A receiver that replies with the given statuses in turn, then with 200, and records the requests."""

    def __init__(self, statuses: list[int]) -> None:
        self.url = ""
        self.keys: list[str] = []
        self.views: list[GroupView] = []
        self.accepted = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.retry_after = "0"
        self._statuses = statuses

    async def handle(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Idempotency-Key"])
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.read())
        self.views.append(msgspec.json.decode(self.bodies[-1], type=JsonGroupView).view())
        await self.answering.wait()
        status = self._statuses.pop(0) if self._statuses else 200
        if status == 200:
            self.accepted.set()
        return web.Response(status=status, headers={"Retry-After": self.retry_after})


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
        receiver.answering.set()
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
            store,
            ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()),
            allow_lists=AllowLists(Config()),
            pauses=HASTY,
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
        allow_lists = AllowLists(Config(host="0.0.0.0", callbacks=CallbacksConfig(allow=("localhost",))))
        deliverer = Deliverer(
            store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), allow_lists=allow_lists, pauses=HASTY
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
            store,
            ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()),
            allow_lists=AllowLists(Config()),
            pauses=HASTY,
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            await receiver.accepted.wait()
            while [due.group_id for due in await store.deliveries(now=1e12, limit=9)] != ["bad"]:
                await store.counts()
            running.cancel()
        assert receiver.keys == ["good"]


class Moments(Store):
    """A store whose second call of `deliveries` sets `read` when it has read its rows, and returns them after `gate` is
    set. `pushed` has the groups that were read for a push. `done` is set after each delivery."""

    def __init__(self) -> None:
        super().__init__(SqliteDatabase(None))
        self.looks = 0
        self.read = asyncio.Event()
        self.gate = asyncio.Event()
        self.done = asyncio.Event()
        self.pushed: list[str] = []

    async def deliveries(self, **asked: Any) -> list[Delivery]:
        self.looks += 1
        second = self.looks == 2
        found = await super().deliveries(**asked)
        if second:
            self.read.set()
            await self.gate.wait()
        return found

    async def group(self, group_id: str, *, tenant: str | None = None) -> GroupRow:
        self.pushed.append(group_id)
        return await super().group(group_id, tenant=tenant)

    async def delivered(self, group_id: str) -> None:
        await super().delivered(group_id)
        self.done.set()


async def test_what_is_delivered_while_the_next_are_looked_for_is_not_pushed_again(tokenizer: Path) -> None:
    async with receiving() as receiver, Moments() as store, asyncio.timeout(20):
        await finished_group(store, "first", receiver.url)
        deliverer = Deliverer(
            store,
            ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()),
            allow_lists=AllowLists(Config()),
            pauses=HASTY,
        )
        receiver.answering.clear()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(deliverer.run())
            await store.read.wait()  # the first push is under way, and its row is read as still due
            receiver.answering.set()
            await store.done.wait()
            await finished_group(store, "second", receiver.url)
            store.done.clear()
            store.gate.set()
            await store.done.wait()
            running.cancel()
        assert store.pushed == receiver.keys == ["first", "second"]


async def deliver(store: Store, tokenizer: Path, until: Callable[[], Awaitable[bool]], **settings: Any) -> None:
    """Run a deliverer until `until` returns True."""
    reader = ViewReader(store, Tokenizer.load(tokenizer), OffloadThread())
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            Deliverer(store, reader, allow_lists=AllowLists(Config()), pauses=HASTY, **settings).run()
        )
        while not await until():
            await store.counts()
        running.cancel()


@pytest.mark.parametrize("status", [301, 400, 404, 410, 418])
async def test_what_is_refused_becomes_a_dead_letter(tokenizer: Path, status: int) -> None:
    async with receiving(*[status] * MIN_TRIES) as receiver, in_memory() as store:
        await finished_group(store, "g", f"{receiver.url}?token=secret")

        async def dead() -> bool:
            return bool(await store.dead_deliveries(limit=1))

        await deliver(store, tokenizer, dead)
        assert await store.deliveries(now=1e12, limit=1) == []
        [letter] = await store.dead_deliveries(limit=9)
        assert (letter.group_id, letter.tries) == ("g", MIN_TRIES)
        assert f"the receiver answered {status}" in (letter.fault or "")
        view = callback_view(letter)
        assert (view.url, view.given_up) == (receiver.url, letter.given_up)
        event = (await store.events(after=0, limit=100))[-1]
        assert (event.kind, event.group_id) == (EventKind.CALLBACK_DEAD, "g")
        assert event.data == {"tries": MIN_TRIES, "fault": letter.fault}
        assert receiver.keys == ["g"] * MIN_TRIES

        await store.redeliver("g")
        await deliver(store, tokenizer, nothing_left(store))
        assert receiver.keys == ["g"] * (MIN_TRIES + 1)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
async def test_what_is_put_off_is_tried_for_longer(tokenizer: Path, status: int) -> None:
    async with receiving(*[status] * (MIN_TRIES + 3)) as receiver, in_memory() as store:
        await finished_group(store, "g", receiver.url)
        await deliver(store, tokenizer, nothing_left(store))
        assert len(receiver.keys) == MIN_TRIES + 4
        assert await store.dead_deliveries(limit=9) == []


async def test_it_is_given_up_when_its_time_is_over(tokenizer: Path) -> None:
    async with receiving(*[500] * 100) as receiver, in_memory() as store:
        await finished_group(store, "g", receiver.url)

        async def dead() -> bool:
            return bool(await store.dead_deliveries(limit=1))

        await deliver(store, tokenizer, dead, patience=0.0)
        assert len(receiver.keys) == MIN_TRIES


async def test_dead_letters_are_redelivered_together_or_discarded() -> None:
    async with in_memory() as store:
        for name in "abcd":
            await finished_group(store, name, "http://c/")
        for name in "abc":
            await store.give_up_delivery(name, fault="gone")
        await store.discard_delivery("a")
        assert [await store.redeliver_some(1) for _ in range(3)] == [1, 1, 0]
        due = await store.deliveries(now=1e12, limit=9)
        assert {each.group_id: (each.tries, each.given_up) for each in due} == dict.fromkeys("bcd", (0, None))
        for refused in (store.discard_delivery("d"), store.redeliver("d"), store.redeliver("none")):
            with pytest.raises(NotFound, match="no such delivery"):
                await refused


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0, 0),
        ("9" * 400, LONGEST_PAUSE, LONGEST_PAUSE),
        ("-5", 0, 0),
        ("soon", 0, 0),
        ("", 0, 0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0, 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_PAUSE, LONGEST_PAUSE),
        ("Fri, 31 Dec 99999 23:59:59 GMT", 0, 0),
        ("\u0663", 0, 3),
    ],
)
def test_the_pause_that_a_receiver_asks_for(header: str, least: float, most: float) -> None:
    assert least <= _wait_asked(header) <= most


async def test_a_receiver_is_left_alone_for_as_long_as_it_asks(tokenizer: Path) -> None:
    async with receiving(503) as receiver, in_memory() as store:
        receiver.retry_after = "1000"
        begun = time.time()
        await finished_group(store, "g", receiver.url)

        async def put_off() -> bool:
            return (await store.deliveries(now=1e12, limit=1))[0].tries == 1

        await deliver(store, tokenizer, put_off)
        [due] = await store.deliveries(now=1e12, limit=1)
        assert begun + 1000 <= due.next_try <= time.time() + 1000


async def test_a_clock_that_is_set_back_puts_nothing_off(tokenizer: Path) -> None:
    async with receiving() as receiver, in_memory() as store:
        await finished_group(store, "g", receiver.url)
        await store.delivery_failed("g", next_try=time.time() + 86400)
        await deliver(store, tokenizer, nothing_left(store))
        assert receiver.keys == ["g"]


@pytest.mark.deep
async def test_a_receiver_that_hangs_holds_up_nobody_else(tokenizer: Path) -> None:
    """The other receiver gets its push, even if the hanging receiver has more rows due than are read at a time."""
    async with receiving() as hanging, receiving() as other, in_memory() as store:
        hanging.answering.clear()
        many = LOOK_AHEAD + MAX_PUSHES
        await asyncio.gather(*(finished_group(store, f"h{number:04}", hanging.url) for number in range(many)))
        await finished_group(store, "z", other.url)

        async def accepted() -> bool:
            return other.accepted.is_set()

        await deliver(store, tokenizer, accepted)
        assert other.keys == ["z"]
        assert len(hanging.keys) <= MAX_PUSHES_EACH


async def test_a_tenant_with_many_slow_receivers_delays_no_other_tenant(tokenizer: Path) -> None:
    """Four receivers that hang suffice for MAX_PUSHES, and a tenant can name any number of them."""
    async with AsyncExitStack() as stack, in_memory() as store:
        hanging = [await stack.enter_async_context(receiving()) for _ in range(MAX_PUSHES // MAX_PUSHES_EACH)]
        other = await stack.enter_async_context(receiving())
        for receiver in hanging:
            receiver.answering.clear()
            for number in range(MAX_PUSHES_EACH + 1):
                await finished_group(store, f"a{hanging.index(receiver)}.{number}", receiver.url, tenant="a")
        await finished_group(store, "z", other.url, tenant="b")

        async def accepted() -> bool:
            return other.accepted.is_set()

        await deliver(store, tokenizer, accepted)
        assert other.keys == ["z"]
        assert sum(len(receiver.keys) for receiver in hanging) <= MAX_PUSHES_OF_TENANT


async def test_names_without_an_answer_delay_no_other_work(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant names many hosts whose name server does not answer, so each lookup occupies a thread."""
    hung: list[str] = []
    answered = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, *rest: Any, **options: Any) -> Any:
        if not str(host).endswith(".example"):
            return look_up(host, *rest, **options)
        hung.append(host)
        answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    threads = ThreadPoolExecutor(2)
    asyncio.get_running_loop().set_default_executor(threads)
    async with in_memory() as store:
        for number in range(4):
            await finished_group(store, f"g{number}", f"http://host{number}.example/")

        async def hanging() -> bool:
            if len(hung) < 2:
                return False
            await asyncio.to_thread(bool)
            return True

        try:
            await deliver(store, tokenizer, hanging)
        finally:
            answered.set()


async def test_a_receiver_that_fails_gets_one_at_a_time(tokenizer: Path) -> None:
    async with receiving(500) as receiver, in_memory() as store:
        for number in range(5):
            await finished_group(store, f"g{number}", receiver.url)
        reader = ViewReader(store, Tokenizer.load(tokenizer), OffloadThread())
        deliverer = Deliverer(store, reader, allow_lists=AllowLists(Config()), pauses=HASTY)
        host = receiver.url.split("/")[2]
        deliverer._note_failed(host)
        due = await store.deliveries(now=1e12, limit=9)
        assert len(deliverer._admit(due)) == 1
        assert await deliverer._due() == []
        del deliverer._failing[host]
        assert len(deliverer._admit(due[1:])) == 4


def test_the_receivers_that_fail_are_remembered_up_to_a_bound(tokenizer: Path) -> None:
    store = sqlite_store(None)
    reader = ViewReader(store, Tokenizer.load(tokenizer), OffloadThread())
    deliverer = Deliverer(store, reader, allow_lists=AllowLists(Config()))
    for number in (*range(MAX_FAILING), 0, MAX_FAILING):
        deliverer._note_failed(f"host-{number}")
    assert len(deliverer._failing) == MAX_FAILING
    assert [deliverer._most(f"host-{number}") for number in (0, 1, 2)] == [1, MAX_PUSHES_EACH, 1]


async def test_an_address_of_a_lost_key_keeps_its_receiver(tmp_path: Path, tokenizer: Path) -> None:
    """Rows that cannot be pushed count for their receiver and hold up no other receiver."""
    async with receiving() as receiver:
        async with sqlite_store(tmp_path / "db") as store:
            for number in range(3):
                await finished_group(store, f"g{number}", "http://me@c:1/done")
        async with sqlite_store(tmp_path / "db", key=TaskKey.new()) as store:
            await finished_group(store, "h", receiver.url)
            deliverer = Deliverer(
                store, ViewReader(store, Tokenizer.load(tokenizer), OffloadThread()), allow_lists=AllowLists(Config())
            )
            deliverer._note_failed("c:1")
            due = await store.deliveries(now=1e12, limit=9)
            assert [(each.url, each.receiver) for each in due[:3]] == [("", "c:1")] * 3
            assert [each.group_id for each in deliverer._admit(due)] == ["g0", "h"]
            assert [each.group_id for each in await deliverer._due()] == ["h"]

            async def dead() -> bool:
                return len(await store.dead_deliveries(limit=9)) == 3

            await deliver(store, tokenizer, dead)
            letters = await store.dead_deliveries(limit=9)
            assert {callback_view(letter).url for letter in letters} == {"c:1"}
            assert receiver.keys == ["h"]


@asynccontextmanager
async def answering(answer: bytes, *, then: bytes = b"", times: int = 0) -> AsyncIterator[str]:
    """A receiver that reads nothing. It sends `answer`, then `then` for `times` times, at the client's pace."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                writer.write(answer)
                for _ in range(times):
                    writer.write(then)
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/done"


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        (OK + b"Content-Length: 999999999999\r\n\r\n", b"x" * 65536),
        (OK + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (OK + b"Set-Cookie: a=b; Domain=127.0.0.1\r\n\r\n", b""),
    ],
)
async def test_an_answer_is_not_read(tokenizer: Path, answer: bytes, then: bytes) -> None:
    async with answering(answer, then=then, times=1000) as url, in_memory() as store:
        await finished_group(store, "g", url)
        await deliver(store, tokenizer, nothing_left(store))
        assert await store.dead_deliveries(limit=1) == []


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 200 " + b"x" * 100_000, OK + b"A: b\r\n" * 10_000])
async def test_an_answer_that_is_no_http_is_a_failure(tokenizer: Path, answer: bytes) -> None:
    async with answering(answer) as url, in_memory() as store:
        await finished_group(store, "g", f"{url}?token=hidden")

        async def tried() -> bool:
            return (await store.deliveries(now=1e12, limit=1))[0].tries > 1

        await deliver(store, tokenizer, tried)
        [due] = await store.deliveries(now=1e12, limit=1)
        assert due.fault
        assert "hidden" not in due.fault
        assert len(due.fault) <= MAX_DESCRIPTION


async def test_a_push_that_is_discarded_meanwhile_ends_quietly(tokenizer: Path) -> None:
    async with receiving() as receiver, in_memory() as store:
        await finished_group(store, "g", receiver.url)
        receiver.answering.clear()

        async def discarded() -> bool:
            if receiver.keys == ["g"] and not receiver.answering.is_set():
                await store.give_up_delivery("g", fault="x")
                await store.discard_delivery("g")
                await finished_group(store, "h", receiver.url)
                receiver.answering.set()
            return receiver.keys == ["g", "h"]

        await deliver(store, tokenizer, discarded)


async def test_a_push_is_signed(world: MakeWorld) -> None:
    secret = "correct horse battery staple"
    async with receiving(500) as receiver, world(callbacks={"secret": secret}) as w, asyncio.timeout(20):
        submitted = await w.submit("ask", callback_url=receiver.url)
        await receiver.accepted.wait()
        for headers, body in zip(receiver.headers, receiver.bodies, strict=True):
            assert verify(headers, body, secret).id == submitted.id


async def finished_group(store: Store, id: str, url: str, *, tenant: str = OPERATOR_TENANT) -> None:
    await put(store, id, f"{id}.0", callback_url=url, tenant=tenant)
    attempt = await store.start_attempt(f"{id}.0", node="n", lease_until=1e12)
    await store.set_state(f"{id}.0", attempt, SessionState.READY)
    result = SessionResult(
        session_id=f"{id}.0", group_id=id, sample_index=0, attempt=attempt, stop_reason=StopReason.COMPLETED
    )
    assert await store.finish(f"{id}.0", attempt, result)


def in_memory() -> Store:
    return Store(SqliteDatabase(None))


def nothing_left(store: Store) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return not await store.deliveries(now=1e12, limit=1)

    return look
