"""Tasks for a live service, and helpers that run commands and capture their output."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.cli import main
from outrider.evaluators.base import Outcome
from outrider.trajectory import Verdict
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
kind = "callable"
path = "cli.world:grade"
[labels]
name = "hi"
"""


STALLED: dict[str, Any] = {"reply": say("never"), "stall": 1}
PROGRAM = (sys.executable, "-c", "import sys; from outrider.cli import main; sys.exit(main())")


async def grade(outcome: Outcome) -> Verdict:
    """Give 1.0 if the text of out.txt is the line "hi", and otherwise 0.0."""
    try:
        text = await outcome.runtime.read("out.txt")
    except FileNotFoundError:
        return Verdict(reward=0.0, reason="nothing was written")
    return Verdict(reward=float(text == b"hi\n"), metrics={"bytes": float(len(text))})


class Ran(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)


class Cli:
    """Runs commands in a thread of this process, because the service that they call is on this process's event loop."""

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


async def program(*words: str | Path, **options: Any) -> asyncio.subprocess.Process:
    """Start the command line in a process of its own, with both outputs piped."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*PROGRAM, *map(str, words), stdout=pipe, stderr=pipe, **options)
