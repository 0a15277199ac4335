"""An empty store in memory, in an SQLite file, and in PostgreSQL. Tests with these fixtures run once for each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.store.database import Database
from outrider.store.postgresql import PostgresqlDatabase
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from support.postgresql import PostgresqlServer

NOW = 1000.0


POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.deep)  # deep, because SQLite runs the same statements


@pytest_asyncio.fixture(params=["memory", "file", POSTGRESQL])
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database without tables that is not open."""
    return SqliteDatabase(None) if request.param == "memory" else await _kept(request, tmp_path)


@pytest_asyncio.fixture(params=["file", POSTGRESQL])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database as in `empty`, but only of the kinds whose content survives closing."""
    return await _kept(request, tmp_path)


async def _kept(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "file":
        return SqliteDatabase(tmp_path / "outrider.db")
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return PostgresqlDatabase(await server.new_database(), sole=True)


@pytest_asyncio.fixture
async def store(empty: Database) -> AsyncIterator[Store]:
    async with Store(empty, clock=lambda: NOW) as opened:
        yield opened
