"""One empty store, in memory and in a file: both keep every promise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store

NOW = 1000.0


@pytest_asyncio.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    path = None if request.param == "memory" else tmp_path / "outrider.db"
    async with Store(SqliteDatabase(path), clock=lambda: NOW) as opened:
        yield opened
