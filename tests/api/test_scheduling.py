"""A full queue, nodes and expired sessions over HTTP, from the client's side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.client.client import AsyncClient, patiently
from outrider.config import LanesConfig, QueueConfig
from outrider.errors import Busy, NotFound, QueueFull
from outrider.lifecycle import StopReason
from support.coin import coin_task
from support.service import running_service

NARROW = LanesConfig(init=1, ready=1, run=1, eval=1)
PLACES = 3
"""Number of sessions that fit in the lanes of NARROW."""
LONG = {"task": coin_task(0, seconds=3600, reward=1.0), "n": PLACES}


async def fill(client: AsyncClient, waiting: int) -> str:
    """Fill the lanes with a group that does not end, and queue `waiting` more groups. Returns the id of the group in
    the lanes."""
    first = await client.submit(LONG)
    while (await client.status()).sessions["queued"]:
        pass
    for _ in range(waiting):
        await client.submit({"task": coin_task(1, reward=1.0)})
    return first.id


async def test_a_full_queue_refuses_and_says_when_to_come_back(tmp_path: Path) -> None:
    queue = QueueConfig(sessions=2)
    async with (
        running_service(tmp_path=tmp_path, lanes=NARROW, queue=queue) as (_, url),
        AsyncClient(url) as client,
        aiohttp.ClientSession(url) as http,
    ):
        keyed = {"task": coin_task(1, reward=1.0), "idempotency_key": "k"}
        lanes = await fill(client, 1)
        accepted = await client.submit(keyed)
        async with http.post("/v1/groups", json={"task": coin_task(2, reward=1.0)}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "60")
            refusal = await reply.json()
            assert (refusal["code"], refusal["boundary"], refusal["retryable"]) == ("queue_full", "service", True)
            assert "queue.sessions" in refusal["hint"]
        assert (await client.submit(keyed)).id == accepted.id
        with pytest.raises(QueueFull) as full:
            await client.submit({"task": coin_task(2, reward=1.0)}, patience=0)
        assert full.value.retry_after == 60
        async with http.get("/openapi.json") as reply:
            described = (await reply.json())["paths"]["/v1/groups"]["post"]["responses"]["429"]
            assert "Retry-After" in described["headers"]
        await client.cancel(lanes)


async def test_who_has_waited_for_a_full_queue_does_not_wait_again() -> None:
    calls = 0

    async def submit() -> str:
        nonlocal calls
        calls += 1
        raise QueueFull("full", retry_after=60)

    with pytest.raises(QueueFull):
        await patiently(submit, patience=1.0)
    assert calls == 1


async def test_a_busy_service_is_called_again_after_the_wait_that_it_requests() -> None:
    replies: list[Busy | str] = [Busy("busy", retry_after=0.01), Busy("busy", retry_after=0.01), "done"]

    async def call() -> str:
        match replies.pop(0):
            case Busy() as busy:
                raise busy
            case str(reply):
                return reply

    assert await patiently(call, patience=60.0) == "done"


async def test_a_client_waits_until_the_queue_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_service(tmp_path=tmp_path, lanes=NARROW, queue=QueueConfig(sessions=1)) as (_, url),
        AsyncClient(url) as client,
    ):
        lanes = await fill(client, 1)
        waits: list[float] = []
        sleep = asyncio.sleep

        async def come_back(seconds: float, *rest: Any) -> None:
            if seconds >= 60:
                waits.append(seconds)
                await client.cancel(lanes)
                while (await client.status()).sessions["queued"]:
                    await sleep(0)
                await sleep(0.6)  # the service counts a full queue twice a second
                return
            await sleep(seconds, *rest)

        monkeypatch.setattr(asyncio, "sleep", come_back)
        group = await client.submit({"task": coin_task(2, reward=1.0)})
        monkeypatch.undo()
        assert len(waits) == 1
        assert 60 <= waits[0] <= 75
        [done] = await client.wait([group.id])
        assert done.sessions[0].result is not None


@pytest.mark.parametrize("where", ["group", "settings"])
async def test_a_group_that_is_not_started_in_time_expires(tmp_path: Path, where: str) -> None:
    queue = QueueConfig(expires_seconds=0.2 if where == "settings" else None)
    async with (
        running_service(tmp_path=tmp_path, lanes=NARROW, queue=queue) as (_, url),
        AsyncClient(url) as client,
    ):
        lanes = await client.submit({**LONG, "expires_seconds": 3600})
        while (await client.status()).sessions["queued"]:
            pass
        own = {"expires_seconds": 0.2} if where == "group" else {}
        late = await client.submit({"task": coin_task(1, reward=1.0), **own})
        page = await client.results(wait=20, samples=True)
        assert [group.id for group in page.groups] == [late.id]
        [session] = page.groups[0].sessions
        assert session.result is not None
        assert session.result.error is not None
        assert (session.result.stop_reason, session.result.error.code) == (StopReason.EXPIRED, "expired")
        assert (session.result.verdict, page.groups[0].samples) == (None, ())
        assert (await client.groups())[0].errors == 1
        await client.cancel(lanes.id)


async def test_a_node_is_drained_and_taken_back(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        assert [(node.name, node.drained) for node in await client.nodes()] == [("local", False)]
        assert (await client.drain_node("local"))[0].drained
        assert (await client.drain_node("local"))[0].drained
        group = await client.submit({"task": coin_task(1, reward=1.0)})
        assert (await client.group(group.id, wait=0.2)).sessions[0].attempt == 0
        with pytest.raises(NotFound, match="no node 'elsewhere'"):
            await client.drain_node("elsewhere")
        assert not (await client.resume_node("local"))[0].drained
        [done] = await client.wait([group.id])
        assert done.sessions[0].result is not None
