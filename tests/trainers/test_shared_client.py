"""The client that all rollouts of an event loop share, against a live service."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.client.client import AsyncClient
from outrider.errors import InvalidField, ServiceError, Unauthorized
from outrider.lifecycle import GroupState, StopReason
from outrider.trainers.shared_client import SharedClient, SharedClientLimits, shared_client
from outrider.trainers.shared_settings import checked_url
from support.answering import answering
from support.coin import coin_task
from support.service import running_service, say


def body(number: int, *, seconds: float = 0.0) -> dict[str, Any]:
    task = coin_task(number, teaches=False, seconds=seconds)
    return {"task": task, "idempotency_key": f"shared/{number}"}


def open_clients() -> dict[tuple[str, str | None], SharedClient]:
    return SharedClient._open.get(asyncio.get_running_loop(), {})


async def submitted(watcher: AsyncClient, count: int) -> None:
    """Wait until the service has `count` groups."""
    seen = 0
    async for event in watcher.events():
        seen += event.kind == "group.created"
        if seen == count:
            return


@pytest.mark.deep
async def test_rollouts_that_run_at_once_share_one_client_and_each_gets_its_own_group(tmp_path: Path) -> None:
    seen: set[int] = set()

    async def roll(url: str, number: int) -> str:
        async with shared_client(url, None) as client:
            seen.add(id(client))
            group = await client.run(body(number))
            assert list(open_clients()) == [(url, None)]
        assert group.state is GroupState.DONE
        assert group.samples
        assert group.samples[0].reward == 1.0
        return group.id

    async with running_service(tmp_path=tmp_path, replies=[say("yes")] * 64) as (_, url):
        groups = await asyncio.gather(*(roll(url, number) for number in range(24)))
        assert len(set(groups)) == 24
        assert len(seen) == 1
        assert open_clients() == {}
        # Submitting the same key again gives the finished group, which is not in later pages of results.
        assert await roll(url, 0) == groups[0]


async def test_a_rollout_that_is_cancelled_cancels_its_group_and_no_other(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, replies=[say("yes")] * 8) as (_, url), AsyncClient(url) as watcher:

        async def roll(number: int, seconds: float) -> None:
            async with shared_client(url, None) as client:
                await client.run(body(number, seconds=seconds))

        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(roll(1, 60.0))  # the first rollout follows the results for all rollouts
            await submitted(watcher, 1)
            short = tasks.create_task(roll(2, 0.3))
            await submitted(watcher, 2)
            long.cancel()
            await short
        assert long.cancelled()
        groups = await watcher.groups()
        assert sorted(group.cancelled for group in groups) == [False, True]
        [stopped] = [group for group in groups if group.cancelled]
        done = (await watcher.wait([stopped.id]))[0]
        assert done.sessions[0].result.stop_reason is StopReason.CANCELLED
        assert open_clients() == {}


async def test_what_the_service_refuses_is_raised_and_the_client_is_closed(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url):
        broken = body(1)
        broken["task"]["harness"] = {"preset": "none such"}
        async with shared_client(url, None) as client:
            with pytest.raises(InvalidField, match="unknown preset"):
                await client.run(broken)
        assert open_clients() == {}


async def test_a_wrong_token_is_named(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, token="right") as (_, url):
        for token, message in ((None, "requires a token"), ("wrong", "is not a token of this service")):
            async with shared_client(url, token) as client:
                with pytest.raises(Unauthorized, match=message) as caught:
                    await client.run(body(1))
            assert "set OUTRIDER_TOKEN" in (caught.value.hint or "")
        with pytest.raises(InvalidField, match="the token has a line break"):
            async with shared_client(url, "right\n"):
                pass
    assert open_clients() == {}


@pytest.mark.deep
async def test_a_service_that_is_restarted_goes_on_with_the_rollout(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with shared_client(f"http://127.0.0.1:{port}", None) as client:
        async with running_service(tmp_path=tmp_path, port=port) as (_, url), AsyncClient(url) as watcher:
            roll = asyncio.create_task(client.run(body(1, seconds=1.0)))
            async for event in watcher.events():
                if event.data.get("state") == "running":
                    break
        async with running_service(tmp_path=tmp_path, port=port):
            group = await asyncio.wait_for(roll, 40)
    assert [session.attempt for session in group.sessions] == [2]
    assert group.samples


async def test_a_service_that_is_not_there_is_named() -> None:
    async with shared_client("http://127.0.0.1:9", None, limits=SharedClientLimits(first_patience=0.0)) as client:
        with pytest.raises(ServiceError, match=r"http://127\.0\.0\.1:9: Connection refused"):
            await client.run(body(1))


async def test_a_service_that_is_not_there_is_waited_for_once() -> None:
    """All rollouts share one attempt. Otherwise a thousand rollouts would fail one after the other, for hours."""
    tries = 0

    async def unavailable(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(text="Bad Gateway", status=502)

    limits = SharedClientLimits(first_patience=0.0)
    async with answering(unavailable) as url, shared_client(url, None, limits=limits) as client:
        found = await asyncio.gather(*(client.run(body(number)) for number in range(20)), return_exceptions=True)
        assert {type(error) for error in found} == {ServiceError}
        assert tries == 1
        with pytest.raises(ServiceError):  # a rollout that begins later tries again
            await client.run(body(20))
    assert tries == 2


@pytest.mark.deep
async def test_a_service_that_has_lost_its_data_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    roll = None
    limits = SharedClientLimits(long_poll=0.2)
    async with shared_client(f"http://127.0.0.1:{port}", None, limits=limits) as client:
        async with running_service(tmp_path=tmp_path, port=port) as (_, url), AsyncClient(url) as watcher:
            roll = asyncio.create_task(client.run(body(1, seconds=60.0)))
            await submitted(watcher, 1)
        async with running_service(tmp_path=tmp_path, port=port, data=tmp_path / "other"):
            with pytest.raises(ServiceError, match=r"does not know group g\S+ any more") as caught:
                await asyncio.wait_for(roll, 20)
    assert "restore its data folder" in (caught.value.hint or "")


@pytest.mark.deep
async def test_a_rollout_after_the_service_has_lost_its_data_gets_its_result(tmp_path: Path) -> None:
    """The cursors of the new data begin anew, below the cursor that the client has reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = SharedClientLimits(long_poll=0.2)
    replies = [say("yes")] * 8
    async with shared_client(f"http://127.0.0.1:{port}", None, limits=limits) as client:
        async with running_service(tmp_path=tmp_path, port=port, replies=replies):
            await client.run_all([body(1), body(2), body(3)])
        async with running_service(tmp_path=tmp_path, port=port, replies=replies, data=tmp_path / "other"):
            group = await asyncio.wait_for(client.run(body(4, seconds=1.0)), 20)
    assert group.samples


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8700", "https://rollouts.example", "http://[::1]:8700", "http://node7"]
)
def test_an_address_stays_as_it_is(url: str) -> None:
    assert checked_url(url, "OUTRIDER_URL") == checked_url(f"{url}/", "OUTRIDER_URL") == url


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("127.0.0.1:8700", "OUTRIDER_URL is '127.0.0.1:8700', which is no http address", "OUTRIDER_URL=http://127.0"),
        ("node7", "which is no http address", "write OUTRIDER_URL=http://node7"),
        ("ftp://node7:1", "which is no http address", "write http://HOST:PORT"),
        ("http://localhost", "names no port", "OUTRIDER_URL=http://localhost:8700"),
        ("http://node7:87000", "no address: Port out of range", None),
        ("http://node7:8700/v1", "must end after the host and port", "OUTRIDER_URL=http://node7:8700"),
    ],
)
def test_a_wrong_address_is_named_with_where_it_was_set(url: str, message: str, hint: str | None) -> None:
    with pytest.raises(InvalidField) as raised:
        checked_url(url, "OUTRIDER_URL")
    assert message in raised.value.message
    assert raised.value.field == "OUTRIDER_URL"
    assert (hint or "") in (raised.value.hint or "")
