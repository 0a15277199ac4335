"""A node's zygote leaves no half-made skeleton if its start fails, and no process if its end is cut off."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.namespace.plan import make_skeleton
from outrider.sandbox.runtimes.namespace.zygote import ZygoteClient
from outrider.sandbox.runtimes.node_host import Host

from .test_leaks import Traces, children


def seen(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_mode for path in (root, *root.rglob("*"))}


async def skeleton(host: Host) -> dict[str, int]:
    """Start the host's zygote. Returns the files and modes of its skeleton as soon as the zygote is ready."""
    zygote = await host.part(ZygoteClient)
    return seen(Path(zygote.host_root.layers[0][0]))


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, int]:
    make_skeleton(tmp_path / "root")
    return seen(tmp_path / "root")


async def test_half_a_skeleton_is_never_used(folder: Path, whole: dict[str, int]) -> None:
    """A limit on the size of files, at which the first large file fails, stops the skeleton half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with Host(folder) as host:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                await host.part(ZygoteClient)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert os.listdir(folder) == ["base"]
        assert await skeleton(host) == whole
        assert sorted(os.listdir(folder)) == ["base", "skeleton"]


async def test_a_skeleton_is_whole_though_its_maker_is_cancelled(folder: Path, whole: dict[str, int]) -> None:
    async with Host(folder) as host:
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(host.part(ZygoteClient))
            while not any(folder.glob("skeleton*")):  # noqa: ASYNC110, ASYNC240  # a thread makes the folder
                await asyncio.sleep(0)
            opening.cancel()
        assert opening.cancelled()
        assert await skeleton(host) == whole
        assert sorted(os.listdir(folder)) == ["base", "skeleton"]


async def test_two_may_make_a_skeleton_at_once(folder: Path, whole: dict[str, int]) -> None:
    async with Host(folder) as one, Host(folder) as other:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(skeleton(host)) for host in (one, other)]
        assert [task.result() for task in tasks] == [whole, whole]
        assert sorted(os.listdir(folder)) == ["base", "skeleton"]


async def test_a_zygote_is_buried_though_its_host_is_cancelled(folder: Path) -> None:
    before = Traces()
    host = Host(folder)
    await host.part(ZygoteClient)
    (zygote,) = children() - before.processes
    os.kill(zygote, signal.SIGSTOP)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        leaving = group.create_task(host.__aexit__(None, None, None))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        os.kill(zygote, signal.SIGCONT)
    assert leaving.cancelled()
    assert before.left() == (set(), False, set())
