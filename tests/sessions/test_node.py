"""The start and end of a node, its sweeps, and the failures that it reports."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.config import Config
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.node_host import PREFIX
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import Capacity, NodeResources
from support.node_folders import dead_folder, temporary
from support.threads import cancelled_late

__all__ = ["temporary"]


def a_node(files: Path) -> LocalNode:
    nothing = cast(Any, None)
    return LocalNode(
        "node",
        Config(),
        backend=nothing,
        store=nothing,
        artifacts=nothing,
        resources=NodeResources(Capacity(cpus=1.0, memory_mb=64)),
        paths=HostPaths.of(files),
    )


def traces() -> tuple[set[str], int]:
    """Return the ids of this process's child processes, and the number of its file descriptors."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for path in tasks for pid in path.read_text().split()}, len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_node_whose_start_is_cancelled_leaves_nothing(temporary: Path, number: int) -> None:
    """The start is cancelled while the node's folder is made, or during one of the sweeps that follow."""
    before = traces()
    node = a_node(temporary)
    assert await cancelled_late(node.__aenter__(), number=number)
    assert os.listdir(temporary) == []
    assert traces() == before
    async with node:
        assert len(os.listdir(temporary)) == 1
    assert os.listdir(temporary) == []


async def test_a_node_begins_with_a_sweep_whatever_it_is_to_run(temporary: Path) -> None:
    if not (parents := set(cgroups.find().folders.values())):
        pytest.skip("this process can make no control groups")
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    left = [parent / f"{PREFIX}{namespace}-1-0-{temporary.name}" for parent in parents]  # no process has start time 0
    for folder in left:
        (folder / "s-1-1").mkdir(parents=True)
    dead_folder(temporary, "outrider-one")
    async with a_node(temporary):
        assert [folder for folder in left if folder.exists()] == []
        assert not (temporary / "outrider-one").exists()


async def test_a_node_reports_failures_of_what_its_sandboxes_share(temporary: Path) -> None:
    async with a_node(temporary) as node:
        node.host.failures.note("watch pods", OSError("no route to the cluster"))
        [failing] = node.stats().failing
        assert (failing.name, failing.node) == ("watch pods", "node")


async def test_a_node_sweeps_for_as_long_as_it_lives(temporary: Path) -> None:
    def sweeping() -> bool:
        return any(task.get_name() == "sweeps" for task in asyncio.all_tasks())

    node = a_node(temporary)
    async with node:
        assert sweeping()
    assert not sweeping()
    assert os.listdir(temporary) == []
