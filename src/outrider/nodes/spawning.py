"""Starts the processes of nodes, ends them, and replaces a process that has exited.

Invariant: when `NodeProcess.end` returns, the process is gone, and so is everything that plugins have started in its
process group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.environment import variables
from outrider.errors import described
from outrider.nodes.messages import MAX_MESSAGE
from outrider.wire.pipe import Pipe

log = logging.getLogger("outrider.node")

PROGRAM = "outrider.cli.node_process"
PREFIX = "OUTRIDER_"
HOME = "OUTRIDER_HOME"

END_SECONDS = 10.0
"""A node process has this many seconds to end its sandboxes and exit. Then it is killed."""

RESTARTS = RetryPolicy(first=0.1, longest=30.0)
STEADY_SECONDS = 60.0
"""If a process ran for at least this many seconds, the next process is started after the shortest wait of RESTARTS."""


class NodeProcess:
    """A process that runs a node. It reads its settings from a socket, and exits when the socket is closed."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: Pipe) -> None:
        self.pipe = pipe
        self._process = process
        self._ending = asyncio.Lock()
        self._ended = False

    @classmethod
    async def start(cls) -> Self:
        ours, theirs = socket.socketpair()
        pipe = await Pipe.over(ours, MAX_MESSAGE)
        # Environment variables with PREFIX configure the service. A node gets its settings over the socket instead,
        # without secrets.
        kept = {name: text for name, text in variables().items() if not name.startswith(PREFIX) or name == HOME}
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    # -P keeps the working folder out of the module search path. Otherwise a file there could replace a
                    # module of Python.
                    *(sys.executable, "-P", "-m", PROGRAM),
                    stdin=theirs.fileno(),
                    start_new_session=True,
                    env=kept,
                )
        except BaseException:
            pipe.abort()
            raise
        return cls(process, pipe)

    async def end(self) -> None:
        """End the process, and kill it if it has not exited after END_SECONDS. Then kill everything that its plugins
        have left in its process group. If another call is already ending the process, wait for that call."""
        async with self._ending:
            if self._ended:
                return
            self.pipe.abort()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            with suppress(ProcessLookupError):
                # The process leads its group, so its pid is also the id of the group.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended = True

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode


async def one_after_another(
    name: str,
    live: Callable[[NodeProcess], Awaitable[None]],
    ended: Callable[[str], bool],
    book: Failures | None = None,
) -> None:
    """Run one process after another for the node `name`. `live` is awaited for each process. When `live` returns, the
    process is ended, and `ended` is called with a description of the end. If `ended` returns True, another process is
    started. Failures are recorded in `book`."""
    book = book or Failures()
    chore = f"process of node {name}"
    clock = asyncio.get_running_loop().time
    failures = 0
    while True:
        began = clock()
        try:
            process = await NodeProcess.start()
            book.note_success(chore)
            try:
                await live(process)
            finally:
                await shielded(process.end)
            how = f"ended with {process.exit_code}"
        except Exception as error:  # a failed start or a bug must not end the other nodes
            book.note(chore, error)
            how = f"failed: {described(error)}"
        if not ended(how):
            return
        log.warning("the process of node %s %s: another one is started", name, how)
        failures = 0 if clock() - began >= STEADY_SECONDS else failures + 1
        await asyncio.sleep(RESTARTS.wait(failures))
