"""Samples over HTTP in both forms: an Arrow stream for programs that ask for it, and JSON for all others."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pyarrow as pa
import pytest
from aiohttp import web

from outrider import sample_columns
from outrider.client.client import AsyncClient
from outrider.concurrency.cancellation import OffloadThread
from outrider.errors import ServiceError, ServiceUnusable
from outrider.sample_columns import MEDIA_TYPE
from outrider.schemas import GroupView, JsonGroupView
from outrider.service import views
from outrider.trainers.shared_settings import BridgeSettings
from outrider.trainers.trajectories import trajectories_of
from outrider.trajectory import JsonSample, sample_json
from support.answering import answering
from support.samples import changed_sample
from support.scribe import scribe_task
from support.service import running_service, say

TASK = {"instruction": "say hello"} | scribe_task("both forms", rewards=[0.5], rewrites=[1], fails=[2])


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url):
        yield url


async def fetched(url: str, path: str, *accept: str) -> tuple[str, bytes]:
    headers = [("Accept", each) for each in accept]
    async with aiohttp.ClientSession() as http, http.get(f"{url}{path}", headers=headers) as reply:
        assert reply.headers["Vary"] == "Accept"
        return reply.content_type, await reply.read()


async def in_json(url: str, group_id: str) -> GroupView:
    _, body = await fetched(url, f"/v1/groups/{group_id}?samples=true")
    return msgspec.json.decode(body, type=JsonGroupView).view()


async def test_both_forms_hold_the_same_samples(url: str) -> None:
    async with AsyncClient(url) as client:
        submitted = await client.submit({"task": TASK, "n": 3})
        [done] = await client.wait([submitted.id])
        assert done.samples is None
        group = await client.group(done.id, samples=True)
        assert group == await in_json(url, done.id)
        assert group.samples is not None
        assert sorted(sample.sample_index for sample in group.samples) == [0, 1, 1]
        page = await client.results(samples=True)
        assert page.groups == (group,)
        assert (await client.results()).groups == (done,)
        for session in group.sessions:
            own = tuple(sample for sample in group.samples if sample.session_id == session.id)
            assert await client.samples(session.id) == own
            _, body = await fetched(url, f"/v1/sessions/{session.id}/samples")
            rows = json.loads(body)["samples"]
            assert rows == [json.loads(sample_json(sample)) for sample in own]
            assert all({*row} == set(JsonSample.__struct_fields__) for row in rows)
    settings = BridgeSettings()
    through_json = msgspec.structs.replace(group, samples=tuple(map(changed_sample, group.samples)))
    streamed = trajectories_of(group, settings, logprobs=True)
    assert [each.rows for each in streamed] == [
        each.rows for each in trajectories_of(through_json, settings, logprobs=True)
    ]


@pytest.mark.parametrize(
    ("path", "accept", "expected"),
    [
        ("?samples=true", [MEDIA_TYPE], MEDIA_TYPE),
        ("?samples=true", ["*/*", MEDIA_TYPE], MEDIA_TYPE),
        ("?samples=true", [f"{MEDIA_TYPE}, application/json;q=0.5"], MEDIA_TYPE),
        ("?samples=true", ["*/*"], "application/json"),
        ("?samples=true", ["application/json"], "application/json"),
        ("?samples=true", [f"text/html, */*;q=0.1, {MEDIA_TYPE.upper()}; q=0.9"], MEDIA_TYPE),
        ("?samples=true", [f"*/*, application/json;q=0.2, {MEDIA_TYPE};q=0.3"], MEDIA_TYPE),
        ("?samples=true", [f"{MEDIA_TYPE};q=0"], "application/json"),
        ("?samples=true", [f"{MEDIA_TYPE};q=nan, {MEDIA_TYPE}2"], "application/json"),
        ("?samples=true", [f"{MEDIA_TYPE};q=high"], "application/json"),
        ("?samples=true", [f"application/json, {MEDIA_TYPE};q=0.5"], "application/json"),
        ("?samples=true", [f"application/*;q=0.6, {MEDIA_TYPE};q=0.5"], "application/json"),
        ("?samples=true", [f"{MEDIA_TYPE}.other"], "application/json"),
        ("?samples=true", [";;q=,,;q", ""], "application/json"),
        ("", [MEDIA_TYPE], "application/json"),
    ],
)
async def test_the_client_chooses_the_form(url: str, path: str, accept: list[str], expected: str) -> None:
    async with AsyncClient(url) as client:
        submitted = await client.submit({"task": TASK})
        await client.wait([submitted.id])
    for route in (f"/v1/groups/{submitted.id}", "/v1/results"):
        media_type, body = await fetched(url, f"{route}{path}", *accept)
        assert media_type == expected
        if expected == MEDIA_TYPE:
            table = pa.ipc.open_stream(body).read_all()
            assert table.num_rows == 1
            assert b'"samples":[]' in table.schema.metadata[b"outrider.reply"]


@pytest.mark.parametrize("columns", [False, True])
async def test_pages_are_bounded_by_their_bytes(tmp_path: Path, columns: bool) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url), AsyncClient(url) as client:
        ids = [(await client.submit({"task": TASK, "n": 2})).id for _ in range(3)]
        await client.wait(ids)
        whole = await service.results(after=0, wait=0, limit=10, samples=True, columns=columns)
        assert len(whole.groups) == 3
        seen, cursor = [], 0
        for _ in ids:
            page = await service.results(after=cursor, wait=0, limit=10, samples=True, columns=columns, page_bytes=1)
            assert len(page.groups) == 1
            assert page.full
            seen += page.groups
            cursor = page.cursor
    assert (seen, cursor) == (whole.groups, whole.cursor)


async def test_a_group_that_runs_has_no_samples_yet_and_one_without_rows_has_none(url: str) -> None:
    async with AsyncClient(url) as client:
        failed = await client.submit({"task": {"instruction": "say hello"} | scribe_task("none", fails=[0])})
        begun = await client.group(failed.id, samples=True)
        assert begun.samples == ()
        [done] = await client.wait([failed.id])
        assert (await client.group(done.id, samples=True)).samples == (await in_json(url, done.id)).samples


async def test_the_stream_of_a_large_group_does_not_hold_other_computations_up(url: str) -> None:
    async with AsyncClient(url) as client:
        submitted = await client.submit({"task": TASK})
        [done] = await client.wait([submitted.id])
        [row] = (await client.group(done.id, samples=True)).samples or ()
    ids = bytes(row.packed_ids) * (sample_columns.BATCH_BYTES // len(row.packed_ids) + 1)
    rows = [msgspec.structs.replace(row, packed_ids=ids)] * 20
    offload = OffloadThread()
    reader = views.ViewReader(None, None, offload)  # type: ignore[arg-type]  # it reads nothing from the store
    encoding = asyncio.create_task(reader.batches(rows))
    await asyncio.sleep(0)
    await offload.run(lambda: None)
    assert not encoding.done()
    stream = b"".join([sample_columns.head(b"{}"), *await encoding, sample_columns.END])
    assert sample_columns.decode(stream).samples == rows
    await offload.close()


@pytest.mark.parametrize("form", ["gzip", "deflate", "broken"])
async def test_a_proxy_may_compress_a_reply(url: str, form: str) -> None:
    async with AsyncClient(url) as client:
        submitted = await client.submit({"task": TASK})
        [done] = await client.wait([submitted.id])
        group = await client.group(done.id, samples=True)

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "gzip"
        _, body = await fetched(url, str(request.rel_url), MEDIA_TYPE)
        if form == "broken":
            return web.Response(
                body=gzip.compress(body)[:-9], content_type=MEDIA_TYPE, headers={"Content-Encoding": "gzip"}
            )
        reply = web.Response(body=body, content_type=MEDIA_TYPE)
        reply.enable_compression(web.ContentCoding(form))
        return reply

    async with answering(answer, "/v1/groups/{id}") as proxy, AsyncClient(proxy) as client:
        if form == "gzip":
            assert await client.group(done.id, samples=True) == group
            return
        with pytest.raises(ServiceError, match="compressed") as caught:
            await client.group(done.id, samples=True)
        assert caught.value.retryable == (form == "broken")


async def test_a_service_that_knows_only_json_is_named() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"samples": []})

    async with answering(answer, "/v1/sessions/{id}/samples") as url, AsyncClient(url) as client:
        with pytest.raises(ServiceUnusable, match="sent samples as application/json") as caught:
            await client.samples("s-1")
    assert "older" in (caught.value.hint or "")
