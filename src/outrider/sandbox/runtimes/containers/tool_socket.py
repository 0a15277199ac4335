"""The start command of a tool server in a container, and the socket over which the server connects to the host.

The server connects back through a mounted folder, so no call goes through the daemon. Invariant: the server's socket is
in the folder only until the server has connected, because any program in the container could connect.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from outrider.errors import RuntimeFailure
from outrider.sandbox.pythons.portable import portable_command
from outrider.sandbox.runtimes.tool_server.bundle import BOOT, FLAGS, confined, delivery
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import START_SECONDS, ToolServerSetup, configure
from outrider.sandbox.runtimes.tool_server.shared_folder import SOCKET, Runs, SharedFolder

TOOLS_AT = "/run/outrider/tools"
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
"""Program that connects the server to the host: the first connection is for calls, the second for its standard
error."""


def command(file_bytes: int, memory: int) -> list[str]:
    """Return a container's command, which needs the portable interpreter and the shared folder mounted. `memory` is
    `ToolServerSetup.memory`.

    No file written in the container can exceed `file_bytes`: the rlimit replaces a bound on the container's file
    system, which not every daemon supports."""
    limits = [f"RLIMIT_FSIZE={file_bytes}", *([f"RLIMIT_DATA={memory}"] if memory else [])]
    return [*portable_command(), *FLAGS, "-c", CONNECT + BOOT, f"memory={memory}", *limits]


class LogTail(asyncio.Protocol):
    """Keeps the last LOG_TAIL bytes received."""

    def __init__(self) -> None:
        self._kept = b""
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-LOG_TAIL:]

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


class ToolSocket:
    """The host's end of the socket. The socket listens from the creation of this object on, so start the container
    afterwards. Always call `close`, but not while `connect` or `meet` runs."""

    def __init__(self, folder: Path, gateway: Path) -> None:
        """`folder` is to be mounted at TOOLS_AT. Raises OSError."""
        self.folder = folder
        self._shared = SharedFolder(folder, gateway)
        self._tools: ToolClient | None = None
        self._log = LogTail()

    async def connect(self, bytecode: bytes, setup: ToolServerSetup, runs: Runs) -> ToolClient:
        """Wait for the server in the container, and configure it. `runs` returns whether the container still runs.
        Raises RuntimeFailure when the container has stopped, and when the server does not connect within
        START_SECONDS."""
        try:
            async with asyncio.timeout(START_SECONDS):
                self._tools = tools = ToolClient(await self._accept(runs), self._log.text)
                complaints = await self._accept(runs)
        except TimeoutError as error:
            raise RuntimeFailure(f"the container's tool server did not connect in {START_SECONDS:.0f} s") from error
        finally:
            self._shared.stop_listening()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self._log, complaints)
        await tools.open()
        tools.send_raw(delivery(confined(CONFINEMENT, bytecode)))
        await configure(tools, setup)
        return tools

    async def meet(self, secret: str, runs: Runs) -> ToolClient:
        """Wait for the server of a container that has outlived its node. Raises RuntimeFailure."""
        self._tools = await self._shared.meet(secret, runs)
        return self._tools

    async def _accept(self, runs: Runs) -> socket.socket:
        try:
            return await self._shared.accept(runs)
        except RuntimeFailure as error:
            hint = "give it more memory; gVisor needs --host-uds=open in the daemon's runtimeArgs for runsc"
            raise error.replace(hint=hint) from error.__cause__

    async def close(self) -> None:
        """Close the socket and the connections. Idempotent."""
        self._shared.stop_listening()
        if self._tools is not None:
            await self._tools.close()
        if self._log.transport is not None:
            self._log.transport.close()
