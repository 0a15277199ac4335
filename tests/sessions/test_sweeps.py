"""What nodes that were killed left behind is ended while others live on, again and again."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from outrider.runtimes.kernel import cgroups
from outrider.runtimes.node_host import PREFIX, Host
from outrider.sandboxes.node_folder import LOCK, NodeFolder
from outrider.sandboxes.sweeps import keep_sweeping, sweep
from outrider.sessions.node import LocalNode
from outrider.sessions.resources import Amount, Room
from outrider.sessions.slots import Lanes


class Part:
    """Something that sandboxes share; `sweeps` is what its sweeps do, one after the other."""

    def __init__(self, *sweeps: Callable[[], int | None]) -> None:
        self._sweeps = list(sweeps)
        self.swept = asyncio.Event()

    async def sweep(self) -> int | None:
        if not self._sweeps:
            self.swept.set()
            return None
        return self._sweeps.pop(0)()


class Still:
    """A part with nothing to sweep."""


class Stuck:
    async def sweep(self) -> None:
        await asyncio.Event().wait()


def fails() -> int:
    raise ValueError("no such daemon")


async def shared(host: Host, *parts: object) -> None:
    for part in parts:
        await host.part(lambda _, part=part: nullcontext(part))  # type: ignore[misc]  # mypy cannot infer a lambda with a default


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def dead_folder(temporary: Path, name: str) -> Path:
    """What a killed node leaves: a folder whose lock nobody holds."""
    folder = temporary / name
    (folder / "s-1-1").mkdir(parents=True)
    (folder / LOCK).touch()
    return folder


async def test_folders_and_what_parts_know_of_are_ended_and_told(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = NodeFolder.make()
    async with Host(folder.path) as host:
        await shared(host, Still(), Part(lambda: 3))
        for name in ("outrider-one", "outrider-two"):
            dead_folder(temporary, name)
        with caplog.at_level(logging.INFO, "outrider.node"):
            assert (await sweep(host)).items() >= {"NodeFolder": 2, "Part": 3}.items()
            assert not (await sweep(host)).keys() & {"NodeFolder", "Part"}  # other tests may leave control groups
    assert os.listdir(temporary) == [folder.path.name]
    told = caplog.records[0].message
    assert "NodeFolder 2" in told
    assert "Part 3" in told
    folder.remove()


async def test_a_part_that_fails_keeps_no_other_from_its_turn(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Host(temporary) as host:
        await shared(host, Part(fails, lambda: 1), Stuck(), Part(lambda: 2))
        assert await host.sweep(seconds=0.01) == {"Part": 2}
        assert "Part cannot sweep: no such daemon" in caplog.text
        assert "Stuck cannot sweep: TimeoutError" in caplog.text
        assert await host.sweep(seconds=0.01) == {"Part": 1}


async def test_sweeps_go_on(temporary: Path) -> None:
    async with asyncio.timeout(20), Host(temporary) as host, asyncio.TaskGroup() as tasks:
        part = Part(lambda: 1, fails, lambda: 2)
        await shared(host, part)
        sweeping = tasks.create_task(keep_sweeping(host, seconds=0.0))
        await part.swept.wait()
        sweeping.cancel()


def a_node(files: Path) -> LocalNode:
    lanes = Lanes(init=1, run=1, evaluate=1, room=Room(Amount(cpus=1.0, memory_mb=64)))
    nothing = cast(Any, None)
    return LocalNode("node", endpoint=nothing, store=nothing, artifacts=nothing, lanes=lanes, files=files)


async def test_a_node_begins_with_a_sweep_whatever_it_is_to_run(temporary: Path) -> None:
    if not (parents := set(cgroups.find().folders.values())):
        pytest.skip("this process can make no control groups")
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    left = [parent / f"{PREFIX}{namespace}-1-0-{temporary.name}" for parent in parents]  # no process began at 0
    for folder in left:
        (folder / "s-1-1").mkdir(parents=True)
    dead_folder(temporary, "outrider-one")
    async with a_node(temporary):
        assert [folder for folder in left if folder.exists()] == []
        assert not (temporary / "outrider-one").exists()


async def test_a_node_sweeps_for_as_long_as_it_lives(temporary: Path) -> None:
    def sweeping() -> bool:
        return any(task.get_name() == "sweeps" for task in asyncio.all_tasks())

    node = a_node(temporary)
    async with node:
        assert sweeping()
    assert not sweeping()
    assert os.listdir(temporary) == []
