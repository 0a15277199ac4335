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
from outrider.runtimes.toolclient import Done, ToolClient

START_SECONDS = 30.0
STOP_SECONDS = 5.0
INFO_FD = 3


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool server is told first. `files` are written, `folders` made, before anything else runs."""

    env: dict[str, str]
    workdir: str
    files: dict[str, bytes] = {}
    folders: list[str] = []
    bridge_port: int = 0
    bridge_socket: str = ""
    subreaper: bool = False
    mark: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class BubblewrapInfo(msgspec.Struct, frozen=True):
    child: int = msgspec.field(name="child-pid")


class HostedServer:
    """Started by `start`; `tools` is its connection."""

    def __init__(self, child: Child, tools: ToolClient, mark: str) -> None:
        self.tools = tools
        self._child = child
        self._mark = mark
        self._init = -1

    @classmethod
    async def start(cls, command: Sequence[str], bytecode: bytes, setup: Setup, *, namespace: bool) -> HostedServer:
        """Spawn `command` and wait until the server has done its `setup`.

        With `namespace` the command is a bwrap that writes its info to INFO_FD, and the server is the first process
        of a pid namespace: its death is that of all. Raises RuntimeFailure, leaving nothing.
        """
        info: list[int] = []
        try:
            info += os.pipe() if namespace else ()
            server = cls._spawn(command, {INFO_FD: info[1]} if info else {}, setup.mark)
            try:
                if info:
                    os.close(info.pop())  # so that the other end ends with bwrap
                await server.tools.open()
                await server._boot(bytecode, setup, info[0] if info else -1)
            except BaseException:
                await shielded(server.stop)
                raise
            return server
        except OSError as error:
            raise RuntimeFailure(f"the sandbox cannot be started: {error}") from error
        finally:
            for fd in info:
                os.close(fd)

    @classmethod
    def _spawn(cls, command: Sequence[str], extra: Mapping[int, int], mark: str) -> HostedServer:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = Child.spawn(command, {}, theirs, extra)
            except BaseException:
                ours.close()
                raise
        return cls(child, ToolClient(ours, child.log_tail), mark)

    async def _boot(self, bytecode: bytes, setup: Setup, info: int) -> None:
        self.tools.send_raw(delivery(bytecode))
        try:
            async with asyncio.timeout(START_SECONDS):
                if info >= 0:
                    await self._find_init(info)
                await self.tools.call("configure", msgspec.to_builtins(setup, builtin_types=(bytes,)), Done)
        except TimeoutError as error:
            raise RuntimeFailure(f"the sandbox did not start within {START_SECONDS:.0f} s") from error
        except OSError as error:
            raise RuntimeFailure(f"the sandbox cannot be set up: {error}") from error

    async def _find_init(self, info: int) -> None:
        await readable(info)  # at its end, too, when bwrap could not even start
        with contextlib.suppress(msgspec.MsgspecError, ProcessLookupError):
            # An unreadable or dead child-pid means that bwrap failed: configure says why, with its log.
            told = msgspec.json.decode(os.read(info, 4096), type=BubblewrapInfo)
            self._init = os.pidfd_open(told.child)

    async def stop(self) -> None:
        """Kill all processes and wait for their end. Call once; not cancel-safe by itself."""
        if self._init >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            await readable(self._init)
            os.close(self._init)
            await self.tools.close()
            self._child.kill()
            await self._child.gone()
        else:
            await self._stop_politely()
        self._child.close()

    async def _stop_politely(self) -> None:
        """Without a pid namespace the server itself kills what is below it; if it died, we do."""
        self.tools.fail_all("the sandbox was stopped")
        answered = False
        with contextlib.suppress(TimeoutError, RuntimeFailure, OSError):
            async with asyncio.timeout(STOP_SECONDS):
                await self.tools.call("stop", {}, Done)
                answered = True
        await self.tools.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await readable(self._child.pidfd)
        except TimeoutError:
            self._child.kill()
        await self._child.gone()
        if not answered:
            await asyncio.to_thread(kill_marked, self._mark)


def kill_marked(mark: str) -> None:
    """SIGKILL every process whose environment carries `mark`, until none is found."""
    needle = f"OUTRIDER_CALL={mark}:".encode()
    while found := [pid for pid in _pids() if needle in _environ(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> bytes:
    """Empty for what is dead, a zombie, or not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


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
