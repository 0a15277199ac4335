"""Files that are carried between the host and a sandbox while the caller is cancelled at the worst moment."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.sandbox.runtimes.base import Runtime, SandboxContext
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import RunningServer
from outrider.spec import RuntimeSpec
from support.threads import cancelled_late

from .test_leaks import Traces
from .world import KindOf, World

Use = Callable[[Runtime, Path], Coroutine[Any, Any, None]]


@pytest.mark.parametrize(
    ("use", "number"),
    [
        (lambda sandbox, folder: sandbox.upload(folder / "file", "/x"), 2),
        (lambda sandbox, folder: sandbox.restore(folder / "file", ["/x"]), 1),
        (lambda sandbox, folder: sandbox.snapshot(["/x"], folder / "new"), 1),
    ],
    ids=["upload", "restore", "snapshot"],
)
async def test_a_file_that_was_opened_for_nobody_is_closed(world: World, tmp_path: Path, use: Use, number: int) -> None:
    (tmp_path / "file").write_bytes(b"x")
    ours, theirs = socket.socketpair()
    client = ToolClient(ours, lambda: "")
    await client.open()

    @asynccontextmanager
    async def launch(spec: RuntimeSpec, context: SandboxContext) -> AsyncIterator[RunningServer]:
        yield RunningServer(tools=client)

    sandbox = world.create_with(KindOf(launch))
    await sandbox.start()
    before = Traces()
    assert await cancelled_late(use(sandbox, tmp_path), number=number)
    assert before.left() == (set(), False, set())
    assert os.listdir(tmp_path) == ["file"]
    await client.close()
    theirs.close()
