"""The campaign's client of the starter process (`campaign.starter`), and a supervisor that restarts a program as soon
as it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STOP_SECONDS = 30.0
SHORT_LIFE = 1.0
"""Seconds. A program that ends sooner after its start probably cannot start at present, and is restarted after a
pause."""
PAUSE_SECONDS = 0.2


class ProgramStarter:
    """The client of the starter process. `pid` is the starter process; all processes of the campaign's programs descend
    from it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._starting = asyncio.Lock()
        self._started: asyncio.Future[int]
        self._ended: dict[int, asyncio.Future[int]] = {}

    async def start(self, module: str, arguments: Sequence[str], *, log: Path, temporary: Path) -> int:
        """Start a process that runs `main` of a module. Returns its number."""
        request = {"module": module, "arguments": list(arguments), "log": str(log), "temporary": str(temporary)}
        assert self._process.stdin is not None
        async with self._starting:
            self._started = asyncio.get_running_loop().create_future()
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return await self._started

    async def ended(self, pid: int) -> int:
        """Wait until a process has ended, and return its status."""
        return await asyncio.shield(self._ended[pid])

    def alive(self, pid: int) -> bool:
        return not self._ended[pid].done()

    async def listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if (pid := message.get("started")) is not None:
                self._ended[pid] = asyncio.get_running_loop().create_future()
                self._started.set_result(pid)
            elif (pid := message.get("ended")) is not None:
                self._ended[pid].set_result(message["status"])


@asynccontextmanager
async def program_starter(module: str = "campaign.starter") -> AsyncIterator[ProgramStarter]:
    """Run a starter process during the block. At the end, all processes that its programs have left are killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError("the campaign's starter process ended before it was ready")
        starter = ProgramStarter(process)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(starter.listen())
            try:
                yield starter
            finally:
                listening.cancel()
    finally:
        process.stdin.close()
        await process.wait()


class Program:
    """A program that is kept running from `start` to `stop`. `pids` are its processes so far; `statuses` are the exit
    statuses of the processes that have ended."""

    def __init__(
        self, starter: ProgramStarter, module: str, arguments: Sequence[str], *, log: Path, temporary: Path
    ) -> None:
        self.pids: list[int] = []
        self.statuses: list[int] = []
        self._starter = starter
        self._module = module
        self._arguments = arguments
        self._log = log
        self._temporary = temporary
        self._wanted = True
        self._may_start = asyncio.Lock()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self._start()
        tasks.create_task(self._keep(), name=f"keep {self._module}")

    @property
    def pid(self) -> int:
        """The process number of the newest process, even if it has ended."""
        return self.pids[-1]

    @property
    def alive(self) -> bool:
        return self._starter.alive(self.pid)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the running process. Returns False if no process runs."""
        with suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)
                return True
        return False

    async def stop(self) -> bool:
        """Stop the program without a restart. Returns False if the program had to be killed."""
        self._wanted = False
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._starter.ended(self.pid)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._starter.ended(self.pid)
            return False
        return True

    @asynccontextmanager
    async def down(self) -> AsyncIterator[bool]:
        """Kill the program, and restart it only at the end of the block. Yields whether a process was killed."""
        async with self._may_start:
            killed = self.signal(signal.SIGKILL)
            await self._starter.ended(self.pid)
            yield killed

    async def _start(self) -> None:
        self.pids.append(
            await self._starter.start(self._module, self._arguments, log=self._log, temporary=self._temporary)
        )

    async def _keep(self) -> None:
        while True:
            started = time.monotonic()
            self.statuses.append(await self._starter.ended(self.pid))
            if time.monotonic() - started < SHORT_LIFE:
                await asyncio.sleep(PAUSE_SECONDS)
            async with self._may_start:
                if not self._wanted:
                    return
                await self._start()
