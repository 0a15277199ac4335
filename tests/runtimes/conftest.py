"""Fixtures of the runtime tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from outrider.runtimes.host import Host

from . import engines
from .world import World


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's is at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="or-") as name:
        yield Path(name)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    async with Host(folder) as host:
        here = World(host)
        yield here
        for runtime in here.made:
            await runtime.stop()
    here.environment.undo()


@pytest.fixture(scope="session", autouse=True)
def images() -> Iterator[None]:
    """Those that were made for container engines are removed at the end."""
    yield
    engines.remove_images()
