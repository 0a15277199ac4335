"""A pool follows a router's list of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from engines.routers import SOON
from engines.test_pool import IDS, engine_of, request
from engines.upstream import Answer, upstream
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import AnyEngine
from outrider.engines.pool.pool import EnginePool
from outrider.errors import Conflict, EngineRejected, EngineUnavailable, InvalidField, ModelMismatch, NotFound
from outrider.lab.fakes.engine_servers import engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from support.waiting import until

Pages = dict[str, Any]


@asynccontextmanager
async def fleet(
    *workers: ScriptedEngine, check: Callable[[AnyEngine], Any] | None = None
) -> AsyncGenerator[tuple[EnginePool, str, Pages, list[str]], None]:
    """A pool, the URL of a router, its replies to GETs, and the URLs of the workers, all of which it lists."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine_app(worker))) for worker in workers]
        pages: Pages = {}
        show(pages, *urls)
        url, _ = await stack.enter_async_context(upstream(Answer(), pages=pages))
        pool = EnginePool(check=check, probing=RetryPolicy(first=SOON, longest=SOON), look_seconds=SOON)
        yield await stack.enter_async_context(pool), url, pages, urls


def show(pages: Pages, *urls: str, **fields: Any) -> None:
    pages["/workers"] = {"workers": [{"url": url, **fields} for url in urls]}


def spec(url: str, **fields: Any) -> EngineSpec:
    return EngineSpec(kind="vllm-router", name="fleet", url=url, **fields)


def rows(pool: EnginePool) -> dict[str, EngineStatus]:
    return {status.name: status for status in pool.status()}


def name_of(url: str) -> str:
    return "fleet-" + url.removeprefix("http://")


async def test_workers_are_engines_with_the_routers_options() -> None:
    async with fleet(engine_of("a"), engine_of("b")) as (pool, url, _, urls):
        status = await pool.add(spec(url, options={"logprobs_mode": "processed_logprobs"}))
        assert (status.kind, status.url, status.ok, status.detail) == ("vllm-router", url, True, "")
        assert list(rows(pool)) == ["fleet", *map(name_of, urls)]
        assert {row.kind for row in pool.status()} == {"vllm-router", "vllm"}
        assert {engine.name for engine in pool.policy.status().engines} == set(map(name_of, urls))
        assert (await pool.calls.select("s")).logprob_kind == "sampling"
        with pytest.raises(Conflict):
            await pool.add(spec(url))
        assert "fleet" in pool
        await pool.remove("fleet")
        assert "fleet" not in pool
        await pool.add(spec(url))
        assert list(rows(pool)) == ["fleet", *map(name_of, urls)]


async def test_the_ranks_of_a_server_are_one_engine() -> None:
    async with fleet(engine_of("a")) as (pool, url, pages, urls):
        show(pages, f"{urls[0]}@0", f"{urls[0]}@1")
        await pool.add(spec(url))
        assert list(rows(pool)) == ["fleet", name_of(urls[0])]


async def test_a_worker_that_is_refused_is_tried_again() -> None:
    refused = True

    async def check(engine: AnyEngine) -> None:
        if refused and engine.name == name_of(urls[1]):
            raise ModelMismatch("another model")

    async with fleet(engine_of("a"), engine_of("b"), check=check) as (pool, url, _, urls):
        status = await pool.add(spec(url))
        assert status.ok
        assert status.detail == f"{urls[1]}: another model"
        refused = False
        await until(lambda: len(pool.status()) == 3)
        assert rows(pool)["fleet"].detail == ""


async def test_a_router_none_of_whose_workers_can_join_is_refused() -> None:
    async def check(engine: AnyEngine) -> None:
        raise ModelMismatch("another model")

    async with fleet(engine_of("a"), check=check) as (pool, url, _, _):
        with pytest.raises(ModelMismatch):
            await pool.add(spec(url))
        with pytest.raises(InvalidField, match="logprobs"):
            await pool.add(spec(url, options={"logprobs": True}))
        assert pool.status() == []


async def test_a_router_may_begin_without_workers() -> None:
    async with fleet(engine_of("a")) as (pool, url, pages, urls):
        show(pages)
        status = await pool.add(spec(url))
        assert (status.ok, status.detail) == (False, "it lists no engine")
        show(pages, *urls)
        await until(lambda: rows(pool)["fleet"].ok)


async def test_a_worker_in_the_pool_is_not_added_twice() -> None:
    async with fleet(engine_of("a")) as (pool, url, _, urls):
        await pool.add(EngineSpec(kind="vllm", name="own", url=urls[0]))
        await pool.add(spec(url))
        assert list(rows(pool)) == ["fleet", "own"]


async def test_workers_stay_while_the_router_is_away_or_has_just_restarted() -> None:
    async with fleet(engine_of("a")) as (pool, url, pages, urls):
        await pool.add(spec(url))
        del pages["/workers"]
        await until(lambda: "not a router" in rows(pool)["fleet"].detail)
        assert not rows(pool)["fleet"].ok
        show(pages)
        await until(lambda: rows(pool)["fleet"].detail == "it lists no engine")
        show(pages, *urls)
        await until(lambda: rows(pool)["fleet"].ok)
        async with aclosing(pool.calls.generate(request("s"))) as chunks:
            assert [token for chunk in [chunk async for chunk in chunks] for token in chunk.ids] == IDS


async def test_generations_on_a_worker_that_left_end_by_themselves() -> None:
    stalled, other = engine_of("a", stall=2), engine_of("b")
    async with fleet(stalled, other) as (pool, url, pages, urls):
        await pool.add(spec(url))
        pool.drain(name_of(urls[1]))
        chunks = pool.calls.generate(request("s"))
        begun = await anext(chunks)
        show(pages, urls[1])
        await until(lambda: rows(pool)[name_of(urls[0])].draining)
        stalled.release()
        assert begun.ids + [token for chunk in [chunk async for chunk in chunks] for token in chunk.ids] == IDS
        await until(lambda: name_of(urls[0]) not in rows(pool))


async def test_the_pool_closes_without_waiting_for_workers_that_left() -> None:
    async with asyncio.timeout(10):
        async with fleet(engine_of("a", stall=2)) as (pool, url, pages, urls):
            await pool.add(spec(url))
            chunks = pool.calls.generate(request("s"))
            await anext(chunks)
            show(pages)
            await until(lambda: rows(pool)[name_of(urls[0])].draining)
        with pytest.raises(EngineUnavailable):
            await anext(chunks)


async def test_a_worker_taken_out_by_hand_stays_out_while_it_is_listed() -> None:
    async with fleet(engine_of("a"), engine_of("b")) as (pool, url, pages, urls):
        await pool.add(spec(url))
        await pool.remove(name_of(urls[0]))
        show(pages, *urls, "http://127.0.0.1:9")  # shown in the detail after the list has been read again
        await until(lambda: "127.0.0.1:9" in rows(pool)["fleet"].detail)
        assert list(rows(pool)) == ["fleet", name_of(urls[1])]


async def test_draining_and_removing_a_router_concern_all_its_workers() -> None:
    async with fleet(engine_of("a"), engine_of("b")) as (pool, url, _, _):
        await pool.add(spec(url))
        assert pool.drain("fleet").draining
        assert all(row.draining for row in pool.status())
        await pool.remove("fleet")
        assert pool.status() == []
        with pytest.raises(NotFound):
            await pool.remove("fleet")
        await pool.add(spec(url))
        assert len(pool.status()) == 3


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_router_that_hides_its_list_is_not_taken_for_a_server(kind: str) -> None:
    class Hidden:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            status = 401 if scope["path"] == "/workers" else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    async with serving(Hidden()) as url, EnginePool() as pool:
        with pytest.raises(EngineUnavailable, match="401"):
            await pool.add(EngineSpec(kind=kind, url=url))
        with pytest.raises(EngineRejected, match="401"):
            await pool.add(EngineSpec(kind=f"{kind}-router", url=url))


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:50051"])
async def test_a_worker_without_http_is_refused(url: str) -> None:
    async with fleet(engine_of("a")) as (pool, router, pages, urls):
        show(pages, *urls, url)
        status = await pool.add(spec(router))
        assert status.ok
        assert url in status.detail
        pages["/health"] = {}
        with pytest.raises(EngineUnavailable, match="cannot be told to pause"):
            await pool.add(EngineSpec(kind="vllm", url=router))


async def test_a_router_of_several_models_is_refused() -> None:
    async with AsyncExitStack() as stack:
        workers = [
            (await stack.enter_async_context(upstream(Answer(), pages={"/v1/models": {"data": [{"id": name}]}})))[0]
            for name in ("one", "two")
        ]
        pages: Pages = {"/health": {}}
        show(pages, *workers)
        url, _ = await stack.enter_async_context(upstream(Answer(), pages=pages))
        async with EnginePool() as pool:
            with pytest.raises(EngineUnavailable, match="several models: one, two"):
                await pool.add(EngineSpec(kind="vllm", url=url))
            with pytest.raises(EngineUnavailable, match="does not serve 'one'"):
                await pool.add(EngineSpec(kind="vllm", url=url, model="one"))
