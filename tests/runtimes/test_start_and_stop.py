"""The start and the stop of a sandbox whose launch is slow, is cut off, or cannot be undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.tool_server.launch import RunningServer, undone
from outrider.spec import RuntimeSpec

from .world import KindOf, World


class SlowLaunch:
    """A launch that waits in its middle. Undoing it waits for `undo`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.undoing = asyncio.Event()
        self.undo = asyncio.Event()
        self.ended = False

    @asynccontextmanager
    async def __call__(self, spec: RuntimeSpec, context: SandboxContext) -> AsyncIterator[RunningServer]:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(undone, context.directory.name, self._undo)
            self.begun.set()
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
            yield  # type: ignore[unreachable]  # makes it a generator

    async def _undo(self) -> None:
        self.undoing.set()
        await self.undo.wait()
        self.ended = True


async def test_a_stop_never_raises(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """One part cannot be undone because of an unexpected error. The other parts are undone."""
    steps: list[str] = []

    async def odd() -> None:
        int("no number")

    async def plain() -> None:
        steps.append("undone")

    @asynccontextmanager
    async def launch(spec: RuntimeSpec, context: SandboxContext) -> AsyncIterator[RunningServer]:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(undone, context.directory.name, plain)
            undo.push_async_callback(undone, context.directory.name, odd)
            raise RuntimeFailure("not today")
            yield  # type: ignore[unreachable]  # makes it a generator

    sandbox = world.create_with(KindOf(launch))
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeFailure, match="not today"):
            await sandbox.start()
        await sandbox.stop()
    assert steps == ["undone"]
    assert "s0 is not stopped in full: invalid literal" in caplog.text


async def test_a_stop_cuts_a_start_off_and_waits_until_it_is_undone(world: World) -> None:
    slow = SlowLaunch()
    sandbox = world.create_with(KindOf(slow))

    async def fails() -> None:
        with pytest.raises(RuntimeFailure, match="stopped while it started"):
            await sandbox.start()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        starting = group.create_task(fails())
        await slow.begun.wait()
        stops = [group.create_task(sandbox.stop()) for _ in range(2)]
        await slow.undoing.wait()
        assert not any(task.done() for task in (starting, *stops))
        slow.undo.set()
    assert slow.ended
    with pytest.raises(RuntimeFailure, match="starts once"):
        await sandbox.start()


async def test_a_start_that_is_cancelled_again_and_again_is_undone(world: World) -> None:
    slow = SlowLaunch()
    sandbox = world.create_with(KindOf(slow))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        starting = group.create_task(sandbox.start())
        await slow.begun.wait()
        starting.cancel()
        await slow.undoing.wait()
        for _ in range(3):
            starting.cancel()
            await asyncio.sleep(0)
        assert not starting.done()
        slow.undo.set()
    assert starting.cancelled()
    assert slow.ended
