"""`/readyz` reports whether the store can write, and concurrent requests share one check of the store."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from outrider.errors import ServiceError, StoreUnavailable
from outrider.service.readiness import StoreReadiness
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from support.postgresql import PostgresqlServer
from support.service import running_service

DATABASE = Path("data") / "outrider.sqlite3"


async def readiness(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as reply:
        return reply.status, await reply.text()


async def until_ready(url: str, *, ready: bool) -> str:
    """Wait until the service's readiness is `ready`, and return the reply."""
    while True:
        status, text = await readiness(url)
        assert status in (200, 503)
        if (status == 200) == ready:
            return text
        await asyncio.sleep(0.05)


@pytest.mark.deep
async def test_it_is_not_ready_without_its_file(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path) as (service, url):
        assert await readiness(url) == (200, "ok\n")
        (tmp_path / DATABASE).rename(tmp_path / "elsewhere")
        assert "store_unavailable" in await until_ready(url, ready=False)
        # SQLite itself would go on writing into the renamed file.
        with pytest.raises(ServiceError, match="No such file"):
            await service.store.keep_policy(1, None)
        (tmp_path / "elsewhere").rename(tmp_path / DATABASE)
        await until_ready(url, ready=True)
        (tmp_path / DATABASE).rename(tmp_path / "elsewhere")
        (tmp_path / DATABASE).write_bytes(b"")
        assert "is another file now" in await until_ready(url, ready=False)
        (tmp_path / "elsewhere").rename(tmp_path / DATABASE)
        await until_ready(url, ready=True)


async def test_a_store_that_hangs_is_told_in_time(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "file") as store:
        with closing(sqlite3.connect(tmp_path / "file", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match=r"does not answer within 0.1 s"):
                await StoreReadiness(store, seconds=0.1).check()
            other.execute("ROLLBACK")
        await StoreReadiness(store).check()


async def test_a_flood_reaches_the_store_once(tmp_path: Path) -> None:
    times: list[float] = []

    def clock() -> float:
        times.append(time.time())
        return times[-1]

    async with Store(SqliteDatabase(tmp_path / "file"), clock=clock) as store:
        times.clear()
        readiness = StoreReadiness(store, fresh=3600.0)
        await asyncio.gather(*(readiness.check() for _ in range(500)))
        assert len(times) == 1
        readiness = StoreReadiness(store, fresh=0.0)
        for _ in range(3):
            await readiness.check()
        assert len(times) == 4


async def test_one_who_hangs_up_takes_no_answer_from_the_others(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "file") as store:
        readiness = StoreReadiness(store)
        with closing(sqlite3.connect(tmp_path / "file", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first, second = (asyncio.ensure_future(readiness.check()) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            other.execute("ROLLBACK")
        await second


@pytest.mark.deep
async def test_it_is_not_ready_without_its_server(tmp_path: Path, postgresql: PostgresqlServer) -> None:
    database = await postgresql.new_database()
    async with running_service(tmp_path=tmp_path, store=database) as (_, url):
        assert await readiness(url) == (200, "ok\n")
        postgresql.kill()
        try:
            assert "store_unavailable" in await until_ready(url, ready=False)
        finally:
            postgresql.start()
        await until_ready(url, ready=True)
