"""Delivery over HTTP: consumers and their acknowledgements, events after a lost connection, dead letters, removal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from outrider.client import client as client_module
from outrider.client.client import AsyncClient
from outrider.errors import Conflict, InvalidField, NotFound, ServiceError
from outrider.schemas import GroupView
from support.service import running_service

TASK = {
    "instruction": "say hello",
    "harness": {"agent": "tools"},
    "runtime": {"kind": "memory"},
    "evaluator": {"kind": "command", "run": "true"},
}
ODD_NAMES = ("", ".", "..", "a/b", "a b", "é", "a\n", "x" * 129, "-x", "%00", "a?b")


async def run(client: AsyncClient, count: int) -> list[str]:
    """Run `count` groups until they are done. Returns their ids in the order of their cursors."""
    groups = [await client.submit({"task": TASK}) for _ in range(count)]
    done = await client.wait([group.id for group in groups])
    return [group.id for group in sorted(done, key=lambda group: group.cursor or 0)]


def names(groups: tuple[GroupView, ...]) -> list[str]:
    return [group.id for group in groups]


async def test_a_consumer_goes_on_where_it_has_acknowledged(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        ids = await run(client, 3)
        assert names((await client.results(consumer="trainer")).groups) == ids
        assert names((await client.results(consumer="trainer")).groups) == ids  # nothing was acknowledged
        moved = await client.ack("trainer", 2)
        assert (moved.name, moved.cursor, moved.lag) == ("trainer", 2, 1)
        assert names((await client.results(consumer="trainer")).groups) == ids[2:]
        # `after` reads earlier groups again.
        assert names((await client.results(consumer="trainer", after=0, limit=1)).groups) == ids[:1]
        assert (await client.ack("trainer", 1)).cursor == 2
        assert (await client.ack("trainer", 1, rewind=True)).cursor == 1
        assert names((await client.results(consumer="logger", after=2)).groups) == ids[2:]
        assert [(each.name, each.cursor) for each in await client.consumers()] == [("logger", 2), ("trainer", 1)]
        assert [each.name for each in await client.remove_consumer("logger")] == ["trainer"]
        with pytest.raises(NotFound, match="no consumer 'logger'"):
            await client.ack("logger", 1)


async def test_what_is_followed_is_acknowledged_when_the_next_is_asked_for(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        ids = await run(client, 3)
        seen: list[str] = []
        for crash_at in (1, 3):  # the loop is left during its second group, which is therefore delivered again
            async for group in client.follow(consumer="trainer"):
                seen.append(group.id)
                if len(seen) == crash_at + 1:
                    break
        assert seen == [ids[0], ids[1], ids[1], ids[2]]
        assert [(each.cursor, each.lag) for each in await client.consumers()] == [(2, 1)]


async def test_consumers_that_read_and_crash_get_each_group_once(tmp_path: Path) -> None:
    """A consumer that saves its cursor with its work, as documented, processes each group exactly once."""

    class Crash(Exception):
        pass

    async def consume(client: AsyncClient, name: str, committed: list[int], crashes: int) -> None:
        while len(committed) < 8:
            try:
                page = await client.results(consumer=name, wait=5, limit=3)
                for group in page.groups:
                    if group.cursor is not None and group.cursor > (committed or [0])[-1]:
                        committed.append(group.cursor)
                    if crashes:
                        crashes -= 1
                        raise Crash
                    await client.ack(name, committed[-1])
            except Crash:
                continue

    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client, asyncio.timeout(60):
        work: dict[str, list[int]] = {"trainer": [], "logger": [], "curve": []}
        async with asyncio.TaskGroup() as tasks:
            for crashes, (name, committed) in enumerate(work.items()):
                tasks.create_task(consume(client, name, committed, crashes * 2))
            await run(client, 8)
        assert list(work.values()) == [list(range(1, 9))] * 3


@pytest.mark.parametrize("cursor", [4, (1 << 63) - 1])
async def test_nobody_acknowledges_what_does_not_exist(tmp_path: Path, cursor: int) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        await client.results(consumer="trainer")
        with pytest.raises(Conflict, match="the newest is 0"):
            await client.ack("trainer", cursor, rewind=True)
        with pytest.raises(Conflict, match="the newest is 0"):
            await client.results(consumer="new", after=cursor)
        assert [each.name for each in await client.consumers()] == ["trainer"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"cursor": -1}', b'{"cursor": 9223372036854775808}', b'{"cursor": "1"}', b'{"cursor": 1.5}'],
)
async def test_a_wrong_acknowledgement_names_its_field(tmp_path: Path, body: bytes) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/consumers/trainer/ack", data=body) as reply,
    ):
        assert (reply.status, (await reply.json())["field"]) == (422, "cursor")


async def test_odd_names_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        for name in ODD_NAMES:
            with pytest.raises(InvalidField) as caught:
                await client.results(consumer=name)
            assert caught.value.field == "consumer", name
            for ask in (client.ack(name, 0), client.remove_consumer(name)):
                with pytest.raises((InvalidField, NotFound)):
                    await ask
        for name in ("trainer", "a" * 128, "run-7@host:1", "v1.2_x"):
            await client.results(consumer=name)
            await client.ack(name, 0)
        assert len(await client.consumers()) == 4


async def test_events_go_on_after_the_last_one_that_was_received(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        await run(client, 1)
        async with aiohttp.ClientSession(url) as http:
            headers = {"Last-Event-ID": "3"}
            async with http.get("/v1/events?after=1", headers=headers) as reply:  # as an EventSource reconnects
                assert await reply.content.readline() == b"retry: 1000\n"
                assert await reply.content.readline() == b"\n"
                assert await reply.content.readline() == b"id: 4\n"


@pytest.mark.parametrize("header", ["x", "-1", "1.5", "", str(1 << 63), "9" * 300, "é", "0x1", "1;2"])
async def test_a_bad_last_event_id_is_refused_by_name(tmp_path: Path, header: str) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        aiohttp.ClientSession(url) as http,
        http.get("/v1/events", headers={"Last-Event-ID": header}) as reply,
    ):
        assert (reply.status, (await reply.json())["field"]) == (422, "Last-Event-ID")


async def test_an_event_that_never_was_is_told_from_one_that_is_to_come(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        await run(client, 1)
        newest = await service.store.last_event()
        with pytest.raises(Conflict, match=f"the newest is {newest}"):
            async for _ in client.events(after=newest + 1):
                pass
        await client.gc(days=0)
        async with aiohttp.ClientSession(url) as http:
            for given, status in ((newest, 200), (newest + 1, 409)):
                async with http.get("/v1/events", headers={"Last-Event-ID": str(given)}) as reply:
                    assert reply.status == status


async def test_a_reader_learns_that_the_service_has_lost_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next groups would get cursors that the reader has passed already, and be skipped."""
    monkeypatch.setattr(client_module, "LONG_POLL", 0.1)
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client, asyncio.timeout(60):
        await run(client, 1)
        groups = client.follow(after=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(groups)
        with pytest.raises(ServiceError, match="no group has the cursor 7: the newest is 1"):
            await anext(client.follow(after=7))


class Cutting:
    """Passes a service's events on, and ends each connection after one event. The first requests get the
    statuses in `statuses`; a status other than 200 comes with an error page of a proxy."""

    def __init__(self, url: str, statuses: Iterable[int]) -> None:
        self.target = url
        self.url = ""
        self._statuses = iter(statuses)
        self.asked: list[str] = []

    async def __aenter__(self) -> Cutting:
        app = web.Application()
        app.router.add_get("/v1/events", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if (status := next(self._statuses, 200)) != 200:
            return web.Response(status=status, text="<html>no upstream</html>")
        self.asked.append(request.query["after"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        async with aiohttp.ClientSession() as http, http.get(f"{self.target}{request.path_qs}") as reply:
            async for line in reply.content:
                await answer.write(line)
                if line.startswith(b"data: "):
                    break
        if len(self.asked) % 2 and request.transport is not None:
            request.transport.abort()
        return answer


async def test_the_client_connects_again_and_misses_nothing(tmp_path: Path) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        AsyncClient(url) as direct,
        Cutting(url, [503, 200, 502, 503, 200, 504]) as between,
        AsyncClient(between.url) as client,
        asyncio.timeout(60),
    ):
        await run(direct, 1)
        with pytest.raises(ServiceError, match="answered 503"):
            await anext(client.events())
        seen = []
        async for event in client.events():
            seen.append(event.cursor)
            if event.kind == "group.done":
                break
        assert seen == list(range(1, len(seen) + 1))
        assert between.asked == [str(number) for number in range(len(seen))]


async def test_events_of_a_service_that_is_not_there_are_an_error_at_once() -> None:
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(ServiceError, match="cannot reach"):
            async for _ in client.events():
                pass


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 99\r\n\r\nhalf of it", "cannot reach"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 7\r\n\r\n<html>\n", "text/html"),
    ],
)
async def test_an_answer_that_is_no_stream_of_events_is_an_error(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, error: str
) -> None:
    """A proxy sends half of its error page and falls silent, or another program answers each request with a page."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()

    monkeypatch.setattr(client_module, "SILENCE", 0.3)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url) as client, asyncio.timeout(60):
        with pytest.raises(ServiceError, match=error):
            await anext(client.events())


async def test_old_groups_are_removed_on_request(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        ids = await run(client, 2)
        await client.results(consumer="trainer")
        await client.ack("trainer", 1)
        with pytest.raises(InvalidField) as caught:
            await client.gc()
        assert caught.value.field == "days"
        planned = await client.gc(days=0, dry_run=True)
        done = await client.gc(days=0)
        assert (planned.groups, planned.unacknowledged, done.groups) == (1, 1, 1)
        assert names((await client.results()).groups) == ids[1:]
        with pytest.raises(NotFound):
            await client.group(ids[0])
        with pytest.raises(NotFound):
            await client.artifacts(f"s-{ids[0][2:]}-0")
        status = await client.status()
        assert (status.sessions["done"], status.cursor) == (1, 2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"days": -1}', "days"),
        (b'{"days": "7"}', "days"),
        (b'{"days": 1e400}', None),
        (b'{"size_mb": 1.5}', "size_mb"),
        (b'{"size_mb": 9223372036854775807}', "size_mb"),
        (b'{"age": 7}', "age"),
        (b"", "days"),
    ],
)
async def test_a_wrong_bound_names_its_field(tmp_path: Path, body: bytes, field: str | None) -> None:
    async with (
        running_service(tmp_path=tmp_path) as (_, url),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/gc", data=body) as reply,
    ):
        assert 400 <= reply.status < 500
        error: Any = await reply.json()
        assert field is None or error["field"] == field


async def test_dead_letters_are_listed_and_redelivered(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        secretive = "http://user:password@127.0.0.1:9/done?token=secret"
        group = await client.submit({"task": TASK, "callback_url": secretive})
        await client.wait([group.id])
        await service.store.give_up_delivery(group.id, fault="it answered 410 Gone")
        [letter] = await client.dead_callbacks()
        assert (letter.group_id, letter.url) == (group.id, "http://127.0.0.1:9/done")
        assert await client.redeliver(group.id) == 1
        assert await client.dead_callbacks() == ()
        with pytest.raises(NotFound, match="no such delivery"):
            await client.redeliver(group.id)
        await service.store.give_up_delivery(group.id, fault="again")
        assert await client.redeliver() == 1
        await service.store.give_up_delivery(group.id, fault="again")
        assert await client.discard_callback(group.id) == ()
        assert await client.redeliver() == 0
