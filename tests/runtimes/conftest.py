"""Fixtures of the runtime tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.namespace.plan import make_skeleton
from outrider.sandbox.runtimes.node_host import Host

from . import clusters, engines
from .world import E2B, World


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a Unix socket's is at most 107 bytes long. It has this process's number, by which `Traces` knows
    the mounts of its own tests."""
    with tempfile.TemporaryDirectory(prefix=f"or-{os.getpid()}-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the roots of all namespace sandboxes of these tests: a node takes half a second to make its own on a slow
    disk, and nothing can write to it."""
    made = tmp_path_factory.mktemp("skeleton") / "root"
    make_skeleton(made)
    return made


@pytest.fixture
async def world(folder: Path, skeleton: Path) -> AsyncIterator[World]:
    (folder / "skeleton").symlink_to(skeleton)
    async with Host(folder) as host:
        here = World(host)
        yield here
        for runtime in here.made:
            await runtime.stop()
    here.environment.undo()


@pytest.fixture(scope="session", autouse=True)
def images() -> Iterator[None]:
    """Those that were made for container engines are removed at the end, and the E2B server ends."""
    yield
    engines.remove_images()
    E2B.stop()
    clusters.close()
