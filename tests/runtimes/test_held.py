"""A sandbox of which a part cannot be undone."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Availability
from outrider.runtimes.sandbox_life import RootedRuntime
from outrider.runtimes.tool_server.client import ToolClient
from outrider.spec import RuntimeSpec

from .world import World


class Odd(RootedRuntime):
    """One part is not undone, for a reason that nobody has thought of."""

    endpoint = ""
    undone = False

    @classmethod
    def available(cls) -> Availability:
        return Availability(ok=True, detail="")

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None: ...

    async def _start(self) -> ToolClient:
        self._held.callback(setattr, self, "undone", True)
        self._held.callback(int, "no number")
        raise RuntimeFailure("not today")


async def test_a_stop_never_raises(world: World, caplog: pytest.LogCaptureFixture) -> None:
    sandbox = world.create_with(Odd)
    assert isinstance(sandbox, Odd)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeFailure, match="not today"):
            await sandbox.start()
        await sandbox.stop()
    assert sandbox.undone
    assert "s0 is not stopped in full: invalid literal" in caplog.text
