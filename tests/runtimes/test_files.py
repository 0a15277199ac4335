"""Files of the host that a sandbox is given or gives, where the caller is cancelled at the worst moment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.sandbox import ServedRuntime
from support.threads import cancelled_late

from .test_leaks import Traces

Use = Callable[[ServedRuntime, Path], Coroutine[Any, Any, None]]


class Small(ServedRuntime):
    def __init__(self, tools: ToolClient) -> None:
        self._tools = tools

    @property
    def tools(self) -> ToolClient:
        return self._tools

    def place(self, path: str) -> str:
        return path

    def member(self, path: str) -> str:
        return path


@pytest.mark.parametrize(
    ("use", "number"),
    [
        (lambda small, folder: small.upload(folder / "file", "/x"), 2),
        (lambda small, folder: small.restore(folder / "file", ["/x"]), 1),
        (lambda small, folder: small.snapshot(["/x"], folder / "new"), 1),
    ],
    ids=["upload", "restore", "snapshot"],
)
async def test_a_file_that_was_opened_for_nobody_is_closed(tmp_path: Path, use: Use, number: int) -> None:
    (tmp_path / "file").write_bytes(b"x")
    ours, theirs = socket.socketpair()
    client = ToolClient(ours, lambda: "")
    await client.open()
    before = Traces()
    assert await cancelled_late(use(Small(client), tmp_path), number=number)
    assert before.left() == (set(), False, 0)
    assert os.listdir(tmp_path) == ["file"]
    await client.close()
    theirs.close()
