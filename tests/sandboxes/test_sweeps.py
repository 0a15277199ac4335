"""Living nodes repeatedly remove the remains of killed nodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from outrider.concurrency.chores import Chores
from outrider.sandbox.node_folder import NodeFolder, sweep
from outrider.sandbox.runtimes.node_host import Host
from support.node_folders import dead_folder, temporary

__all__ = ["temporary"]


class Part:
    """A part of a host. Each call of `sweep` calls the next of `sweeps`. The event `swept` is set when none is left."""

    def __init__(self, *sweeps: Callable[[], int | None]) -> None:
        self._sweeps = list(sweeps)
        self.swept = asyncio.Event()

    async def sweep(self) -> int | None:
        if not self._sweeps:
            self.swept.set()
            return None
        return self._sweeps.pop(0)()


class Still:
    """A part without a method `sweep`."""


class Stuck:
    async def sweep(self) -> None:
        await asyncio.Event().wait()


def fails() -> int:
    raise ValueError("no such daemon")


async def shared(host: Host, *parts: object) -> None:
    for part in parts:
        await host.part(lambda _, part=part: nullcontext(part))  # type: ignore[misc]  # mypy cannot infer a lambda with a default


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
            again = await sweep(host)
            assert not again.keys() & {"NodeFolder", "Part"}  # other tests may leave control groups
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
        assert "sweep of Stuck: failed, and is tried again: TimeoutError" in caplog.text
        # The first `Part` failed, but the second one has succeeded under the same name.
        assert [each.name for each in host.failures.failing()] == ["sweep of Stuck"]
        assert await host.sweep(seconds=0.01) == {"Part": 1}


async def test_sweeps_go_on(temporary: Path) -> None:
    async with asyncio.timeout(20), Host(temporary) as host, Chores(host.failures) as chores:
        part = Part(lambda: 1, fails, lambda: 2)
        await shared(host, part)
        chores.begin("sweeps", partial(sweep, host))
        await part.swept.wait()
