"""The tool server in a container: how it is started there, and how it and the host find each other.

It does not know what made the container. Invariant: the folder that container and host share holds one socket, until
the server has connected to it; after that, nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from outrider.errors import RuntimeFailure
from outrider.pythons.portable import portable_command
from outrider.runtimes.kernel.child import readable
from outrider.runtimes.tool_server.bundle import BOOT, FLAGS, confined, delivery
from outrider.runtimes.tool_server.client import ToolClient
from outrider.runtimes.tool_server.launch import START_SECONDS, Setup, configure

TOOLS_AT = "/run/outrider/tools"
SOCKET = "sock"
LOOK_SECONDS = 1.0
LOG_TAIL = 4096

CONFINEMENT = ("isolation.syscalls", "isolation.seccomp", "isolation.container_entry")
CONNECT = (
    "import _socket,posix\n"
    "for fds in ((0,1),(2,)):\n"
    " end=_socket.socket(_socket.AF_UNIX,_socket.SOCK_STREAM)\n"
    f" end.connect('{TOOLS_AT}/{SOCKET}')\n"
    " for fd in fds: posix.dup2(end.fileno(),fd)\n"
    " end.close()\n"
)
"""The first connection is for calls, the second takes what the server complains of."""


def command(file_bytes: int, memory: int) -> list[str]:
    """What a container runs, where the portable interpreter and the shared folder are mounted. No file that is written
    in it can be larger than `file_bytes`: a limit that every kernel keeps, and that not every daemon passes on.
    `memory` is what `Setup.memory` says."""
    limits = [f"RLIMIT_FSIZE={file_bytes}", "RLIMIT_CORE=0", *([f"RLIMIT_DATA={memory}"] if memory else [])]
    return [*portable_command(), *FLAGS, "-c", CONNECT + BOOT, f"memory={memory}", *limits]


class LogTail(asyncio.Protocol):
    """Keeps the end of what comes."""

    def __init__(self) -> None:
        self._kept = b""
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-LOG_TAIL:]

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


class ContainedServer:
    """Listens from the beginning, so that the container can be started then. `close` is called in any case, not while
    `connect` runs."""

    def __init__(self, folder: Path) -> None:
        """`folder` does not exist yet; it is what must be mounted at TOOLS_AT."""
        self.folder = folder
        self._tools: ToolClient | None = None
        self._log = LogTail()
        folder.mkdir(mode=0o711)
        self._listener = listening(folder)

    async def connect(self, bytecode: bytes, setup: Setup, runs: Callable[[], Awaitable[bool]]) -> ToolClient:
        """Wait for the server in there, and make it ready. Raises RuntimeFailure, also when the container, whose state
        `runs` tells, has ended."""
        try:
            async with asyncio.timeout(START_SECONDS):
                self._tools = tools = ToolClient(await self._accept(runs), self._log.text)
                complaints = await self._accept(runs)
        except TimeoutError as error:
            raise RuntimeFailure(f"the container's tool server did not connect in {START_SECONDS:.0f} s") from error
        finally:
            self._stop_listening()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._log, complaints)
        await tools.open()
        tools.send_raw(delivery(confined(CONFINEMENT, bytecode)))
        await configure(tools, setup)
        return tools

    async def _accept(self, runs: Callable[[], Awaitable[bool]]) -> socket.socket:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await readable(self._listener.fileno())
            with contextlib.suppress(BlockingIOError):
                end, _ = self._listener.accept()
                end.setblocking(False)
                return end
            if not await runs():
                raise RuntimeFailure(
                    "the container ended before its tool server had connected",
                    hint="give it more memory; gVisor needs --host-uds=open in the daemon's runtimeArgs for runsc",
                )

    def _stop_listening(self) -> None:
        self._listener.close()
        (self.folder / SOCKET).unlink(missing_ok=True)

    async def close(self) -> None:
        """Idempotent."""
        self._stop_listening()
        if self._tools is not None:
            await self._tools.close()
        if self._log.transport is not None:
            self._log.transport.close()


def listening(folder: Path) -> socket.socket:
    """A socket in `folder`, which any user of the container may connect to; only the container has the folder. By its
    descriptor, because the path of a socket may be 107 bytes long."""
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"/proc/self/fd/{held}/{SOCKET}")
        (folder / SOCKET).chmod(0o666)
        listener.listen(2)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(held)
    return listener
