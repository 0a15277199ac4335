"""A tool server of ours as a running thing: its process, its connection, and its verified death.

It does not know which isolation its command line sets up. Invariant: after `stop`, or after a `start` that raised,
every process that was ever below the server is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure
from outrider.runtimes.bundle import delivery
from outrider.runtimes.child import Child, readable
from outrider.runtimes.marks import VARIABLE, kill_marked
from outrider.runtimes.toolclient import Done, ToolClient

START_SECONDS = 30.0
STOP_SECONDS = 5.0
INFO_FD = 3


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool server is told first. `files` are written, `folders` made, before anything else runs. `mark` is in
    the environment of everything that runs there (see marks.py)."""

    env: dict[str, str]
    workdir: str
    files: dict[str, bytes] = {}
    folders: list[str] = []
    bridge_port: int = 0
    bridge_socket: str = ""
    subreaper: bool = False
    mark: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))

    def marking(self) -> dict[str, str]:
        """The environment that says whose a process is, before any call."""
        return {VARIABLE: f"{self.mark}:0"}


class BubblewrapInfo(msgspec.Struct, frozen=True):
    child: int = msgspec.field(name="child-pid")


class HostedServer:
    """Started by `start`; `tools` is its connection."""

    def __init__(self, child: Child, tools: ToolClient, mark: str, info: int) -> None:
        self.tools = tools
        self._child = child
        self._mark = mark
        self._info = info
        self._init = -1

    @classmethod
    async def start(cls, command: Sequence[str], bytecode: bytes, setup: Setup, *, namespace: bool) -> HostedServer:
        """Spawn `command` and wait until the server has done its `setup`.

        With `namespace` the command is a bwrap that writes its info to INFO_FD, and the server is the first process
        of a pid namespace: its death is that of all. Raises RuntimeFailure, leaving nothing.
        """
        try:
            server = cls._spawn(command, setup, namespace=namespace)
            try:
                await server.tools.open()
                await server._boot(bytecode, setup)
            except BaseException:
                await shielded(server.stop)
                raise
            return server
        except OSError as error:
            raise RuntimeFailure(f"the sandbox cannot be started: {error}") from error

    @classmethod
    def _spawn(cls, command: Sequence[str], setup: Setup, *, namespace: bool) -> HostedServer:
        """The info goes into memory and not into a pipe: bwrap would die of a pipe whose reader, we, had died, and
        leave its inner half asleep for ever, waiting for the word to go on."""
        with contextlib.ExitStack() as undo:
            info = -1
            if namespace:
                info = os.memfd_create("info")
                undo.callback(os.close, info)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                child = Child.spawn(command, setup.marking(), theirs, {INFO_FD: info} if namespace else {})
            undo.pop_all()
        return cls(child, ToolClient(ours, child.log_tail), setup.mark, info)

    async def _boot(self, bytecode: bytes, setup: Setup) -> None:
        self.tools.send_raw(delivery(bytecode))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.tools.call("configure", msgspec.to_builtins(setup, builtin_types=(bytes,)), Done)
        except TimeoutError as error:
            raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
        except OSError as error:
            raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error
        self._find_init()

    def _find_init(self) -> None:
        """Hold the first process inside, if bwrap has come so far as to tell its number and it is alive."""
        if self._info < 0 or self._init >= 0:
            return
        with contextlib.suppress(msgspec.MsgspecError, OSError):
            told = msgspec.json.decode(os.pread(self._info, 4096, 0), type=BubblewrapInfo)
            held = os.pidfd_open(told.child)
            if parent_of(told.child) == self._child.pid:  # and not another of the same number
                self._init = held
            else:
                os.close(held)

    async def stop(self) -> None:
        """Kill all processes and wait for their end. Call once; not cancel-safe by itself."""
        self._find_init()
        if self._init >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            await readable(self._init)
            os.close(self._init)
            await self.tools.close()
            await self._ends_in_time()  # bwrap reaps its inner half, and so hands on what it has used
        elif self._info >= 0:
            await self._stop_unborn()
        else:
            await self._stop_politely()
        if self._info >= 0:
            os.close(self._info)
        self._child.close()

    async def _stop_unborn(self) -> None:
        """A bwrap that has not told of its inner half is left to come to its end by itself: the server then finds its
        connection closed. Killed in between, it would leave that half asleep."""
        await self.tools.close()
        if not await self._ends_in_time():
            await asyncio.to_thread(kill_marked, f"{self._mark}:")

    async def _stop_politely(self) -> None:
        """Without a pid namespace the server itself kills what is below it; if it died, we do."""
        self.tools.fail_all("the sandbox was stopped")
        answered = False
        with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
            async with asyncio.timeout(STOP_SECONDS):
                await self.tools.call("stop", {}, Done)
                answered = True
        await self.tools.close()
        in_time = await self._ends_in_time()
        if not (answered and in_time):
            await asyncio.to_thread(kill_marked, f"{self._mark}:")

    async def _ends_in_time(self) -> bool:
        """Wait for the child's end, which comes by force when it does not come by itself."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await readable(self._child.pidfd)
        except TimeoutError:
            self._child.kill()
            await self._child.gone()
            return False
        await self._child.gone()
        return True


def parent_of(pid: int) -> int:
    """0 when there is no such process, or it is not told."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


async def shielded(teardown: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run `teardown` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(teardown())
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def clean_environment(env: Mapping[str, str], workdir: str) -> dict[str, str]:
    """The clean environment of a sandbox, the spec's own on top."""
    clean = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": workdir,
        "LANG": "C.UTF-8",
        "USER": "root",
    }
    return {**clean, **env}
