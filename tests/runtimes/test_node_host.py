"""The parts that a node's sandboxes share. Each is opened once, independently of the others, and they are closed in
reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.node_host import Host


class Parts:
    """Two kinds of parts, and a record of what is opened and closed. `slow` opens after `may` is set."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.may = asyncio.Event()
        self.fails = 0

    @asynccontextmanager
    async def slow(self, host: Host) -> AsyncIterator[str]:
        await self.may.wait()
        if self.fails:
            self.fails -= 1
            raise RuntimeFailure("no daemon")
        async with self.quick(host, "slow") as name:
            yield name

    @asynccontextmanager
    async def quick(self, host: Host, name: str = "quick") -> AsyncIterator[str]:
        self.told.append(f"+{name}")
        yield name
        self.told.append(f"-{name}")


async def test_a_part_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    parts = Parts()
    async with asyncio.timeout(10), Host(tmp_path) as host, asyncio.TaskGroup() as group:
        hung = [group.create_task(host.part(parts.slow)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await host.part(parts.quick) == "quick"
        assert not any(task.done() for task in hung)
        parts.may.set()
    assert [task.result() for task in hung] == ["slow"] * 3
    assert parts.told == ["+quick", "+slow", "-slow", "-quick"]


async def test_a_part_that_does_not_open_is_tried_again_by_the_next(tmp_path: Path) -> None:
    parts = Parts()
    parts.may.set()
    parts.fails = 2

    async def failing() -> None:
        with pytest.raises(RuntimeFailure, match="no daemon"):
            await host.part(parts.slow)

    async with Host(tmp_path) as host:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(failing())
        assert await host.part(parts.slow) == await host.part(parts.slow) == "slow"
        await host.part(parts.quick)
    assert parts.told == ["+slow", "+quick", "-quick", "-slow"]
