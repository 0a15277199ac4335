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
    """A folder with a short path, because the path of a Unix socket is at most 107 bytes long. Its name has this
    process's number, by which `Traces` finds the mounts of its own tests."""
    with tempfile.TemporaryDirectory(prefix=f"or-{os.getpid()}-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The skeleton of the roots of all namespace sandboxes of these tests. On a slow disk, a node takes half a second
    to make one. Sandboxes cannot write to it."""
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
    """At the end, remove the images that were made for container engines, and stop the E2B server and the cluster."""
    yield
    engines.remove_images()
    E2B.stop()
    clusters.close()
