"""The HTTP client of the engine adapters: retries, connections, the key, replies that are not JSON, and URLs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import orjson
import pytest

from engines.upstream import Answer, upstream
from engines.worlds import HASTY
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.adapters.options import server_url
from outrider.engines.base import EngineOptions
from outrider.engines.http.client import HttpClient
from outrider.engines.http.failures import StatusFailure
from outrider.errors import EngineError, EngineUnavailable, InvalidField

PATIENT = RetryPolicy(first=0.0, longest=0.0, attempts=3)


async def payloads(url: str, retry: RetryPolicy = PATIENT) -> list[bytes]:
    client = HttpClient("e", url, retry=retry)
    await client.start()
    try:
        async with aclosing(client.events("/x", lambda attempt: (orjson.dumps({"attempt": attempt}),))) as found:
            return [payload async for payloads in found for payload in payloads]
    finally:
        await client.close()


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_transient_statuses_are_tried_again(status: int) -> None:
    async with upstream(Answer(status), Answer(status), Answer(events=[1, 2])) as (url, server):
        assert await payloads(url) == [b"1", b"2"]
    assert [body["attempt"] for _, body in server.posts] == [0, 1, 2]


async def test_refusals_are_not_tried_again() -> None:
    async with upstream(Answer(400), Answer(events=[1])) as (url, server):
        with pytest.raises(StatusFailure) as refused:
            await payloads(url)
    assert refused.value.status == 400
    assert len(server.posts) == 1


async def test_attempts_are_bounded() -> None:
    async with upstream(Answer(503)) as (url, server):
        with pytest.raises(StatusFailure):
            await payloads(url)
    assert len(server.posts) == PATIENT.attempts


async def test_a_connection_cut_before_the_first_event_is_tried_again() -> None:
    async with upstream(Answer(cut=True), Answer(events=[1])) as (url, server):
        assert await payloads(url) == [b"1"]
    assert len(server.posts) == 2


async def test_a_connection_cut_after_the_first_event_is_not() -> None:
    async with upstream(Answer(events=[1], cut=True), Answer(events=[1])) as (url, server):
        with pytest.raises(EngineUnavailable):
            await payloads(url)
    assert len(server.posts) == 1


async def test_no_server_is_unavailable() -> None:
    async with upstream(Answer()) as (url, _):
        pass
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1"):
        await payloads(url)


async def test_retry_after_is_honoured_up_to_the_longest_wait() -> None:
    policy = RetryPolicy(first=0.0, longest=5.0, attempts=2)
    assert policy.wait(0, 3.0) == 3.0
    assert policy.wait(0, 3600.0) == 5.0
    async with upstream(Answer(429, headers={"Retry-After": "0"}), Answer(events=[1])) as (url, _):
        slow = RetryPolicy(first=1e6, longest=1e6, attempts=2)
        async with asyncio.timeout(30):
            assert await payloads(url, slow) == [b"1"]


async def test_a_finished_stream_gives_its_connection_back() -> None:
    async with upstream(Answer(events=[1])) as (url, server):
        client = HttpClient("e", url, retry=HASTY)
        await client.start()
        for _ in range(3):
            assert [batch async for batch in client.events("/x", lambda _: [b"{}"])] == [[b"1"]]
        await client.close()
    assert len(server.posts) == 3
    assert len(set(server.clients)) == 1


async def test_closing_ends_streams_in_flight() -> None:
    async with upstream(Answer(events=[1], cut=True)) as (url, _):
        client = HttpClient("e", url, retry=HASTY)
        with pytest.raises(EngineUnavailable, match="not started"):
            await client.get("/x")
        await client.start()
        stream = client.events("/x", lambda _: [b"{}"])
        assert await anext(stream) == [b"1"]
        await client.close()
        with pytest.raises(EngineUnavailable):
            await anext(stream)


async def test_the_key_is_sent() -> None:
    async with upstream(Answer(events=[])) as (url, server):
        client = HttpClient("e", url, api_key="secret", retry=HASTY)
        await client.start()
        assert [batch async for batch in client.events("/x", lambda _: [b"{}"])] == []
        await client.close()
    assert server.headers[0][b"authorization"] == b"Bearer secret"


async def test_answers_that_are_not_json_are_typed() -> None:
    async with upstream(Answer(events=[b"not json"])) as (url, _):
        client = HttpClient("e", url, retry=HASTY)
        await client.start()
        with pytest.raises(EngineError, match="not JSON"):
            await client.post("/x", {})
        await client.close()


@pytest.mark.parametrize("url", [None, "", "localhost:8000", "ftp://host", "http://"])
def test_urls_are_checked(url: str | None) -> None:
    with pytest.raises(InvalidField) as refused:
        server_url(EngineOptions(name="e", url=url))
    assert refused.value.field == "url"


def test_urls_are_normalised() -> None:
    assert server_url(EngineOptions(name="e", url="http://host:1/v1/")) == "http://host:1"
