"""The command that starts a tool server in a container, and the socket by which the server connects to the host.

The socket is in a mounted folder, so calls bypass the container daemon. Invariant: the socket is removed from the
folder as soon as the server has connected, because any program in the container could otherwise connect to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from outrider.errors import LOG_TAIL, RuntimeFailure
from outrider.sandbox.pythons.portable import portable_command
from outrider.sandbox.runtimes.kernel.child import readable
from outrider.sandbox.runtimes.tool_server.bundle import BOOT, FLAGS, confined, delivery
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from outrider.sandbox.runtimes.tool_server.launch import START_SECONDS, ToolServerSetup, configure, share_gateway

TOOLS_AT = "/run/outrider/tools"
SOCKET = "sock"
LOOK_SECONDS = 1.0
BACKLOG = 16

Runs = Callable[[], Awaitable[bool]]
"""A function that returns whether a container still runs. It may raise RuntimeFailure."""

CONFINEMENT = ("isolation.syscalls", "isolation.seccomp", "isolation.container_entry")
CONNECT = (
    "import _socket,posix\n"
    "for fds in ((0,1),(2,)):\n"
    " end=_socket.socket(_socket.AF_UNIX,_socket.SOCK_STREAM)\n"
    f" end.connect('{TOOLS_AT}/{SOCKET}')\n"
    " for fd in fds: posix.dup2(end.fileno(),fd)\n"
    " end.close()\n"
)
"""A Python program that connects the server to the host. The first connection is for calls, the second for the server's
standard error."""


def command(file_bytes: int, memory: int) -> list[str]:
    """Return the container's command. The portable interpreter and the folder with the socket must be mounted. `memory`
    is the value of `ToolServerSetup.memory`.

    The command sets an rlimit, so that no file in the container can exceed `file_bytes`, even if the daemon cannot
    limit the container's file system."""
    limits = [f"RLIMIT_FSIZE={file_bytes}", *([f"RLIMIT_DATA={memory}"] if memory else [])]
    return [*portable_command(), *FLAGS, "-c", CONNECT + BOOT, f"memory={memory}", *limits]


class LogTail(asyncio.Protocol):
    """Keeps the last LOG_TAIL bytes of a log that it receives."""

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
    """The host's end of the socket to which a container's tool server connects. The socket listens as soon as this
    object exists, so create the object before you start the container. Always call `close`, but not while `connect`
    runs."""

    def __init__(self, folder: Path, gateway: Path) -> None:
        """Create `folder` with this socket and the gateway's socket. The caller mounts the folder at TOOLS_AT. Raises
        OSError."""
        self.folder = folder
        share_gateway(gateway, folder)
        self._listener = _listening(folder)
        self._tools: ToolClient | None = None
        self._log = LogTail()

    async def connect(self, bytecode: bytes, setup: ToolServerSetup, runs: Runs) -> ToolClient:
        """Wait until the container's tool server connects, and configure it. Raises RuntimeFailure if the container
        stops first, or if the server does not connect within START_SECONDS."""
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

    async def _accept(self, runs: Runs) -> socket.socket:
        """Return the next connection. Raises RuntimeFailure when the container no longer runs."""
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
                    "the sandbox ended before its tool server had connected",
                    hint="give the sandbox more memory; gVisor needs --host-uds=open in the daemon's runtimeArgs of"
                    " runsc",
                )

    def _stop_listening(self) -> None:
        """Close and remove the socket. Idempotent."""
        self._listener.close()
        (self.folder / SOCKET).unlink(missing_ok=True)

    async def close(self) -> None:
        """Close the socket and the connections. Idempotent."""
        self._stop_listening()
        if self._tools is not None:
            await self._tools.close()
        if self._log.transport is not None:
            self._log.transport.close()


def _listening(folder: Path) -> socket.socket:
    """Return a listening socket in `folder`. Any user in the container may connect to it, but no other container sees
    the folder.

    The socket is bound through the folder's descriptor, because a socket's path may have at most 107 bytes."""
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"/proc/self/fd/{held}/{SOCKET}")
        (folder / SOCKET).chmod(0o666)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(held)
    return listener
