"""The command line against a live service: tasks to run, and a way to run commands and see what they wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.cli import main
from support.service import call, say

REPLIES = (call("echo hi > out.txt"), say("done"))
TASK = """\
instruction = "Write hi into out.txt."
[harness]
agent = "tools"
options = {tools = ["bash"]}
[runtime]
kind = "memory"
[evaluator]
run = "cat out.txt"
[labels]
name = "hi"
"""


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)


class Cli:
    """Runs commands in a thread of this process: the service they talk to is on its event loop."""

    def __init__(self, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
        self._captured = capsysbinary

    async def __call__(self, *words: str | Path) -> Ran:
        return await asyncio.to_thread(self.run, *words)

    def run(self, *words: str | Path) -> Ran:
        self._captured.readouterr()
        code = main([str(word) for word in words])
        written = self._captured.readouterr()
        return Ran(code, written.out.decode(), written.err.decode())


def write_task(folder: Path, text: str = TASK, name: str = "task.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path
