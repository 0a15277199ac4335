"""The folder that a sandbox and its host share: the model gateway's socket, and one at which a tool server connects.

It is mounted as a folder, so that what is in it can be replaced while the sandbox runs: after the host has died, the
next one puts its own sockets there. It does not know what made the sandbox. Invariant: the socket for tool servers is
there only while one is waited for, because any program in the sandbox could connect to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure
from outrider.runtimes.kernel.child import readable
from outrider.runtimes.tool_server.client import UNREADABLE, ToolClient
from outrider.runtimes.tool_server.launch import START_SECONDS

SOCKET = "sock"
GATEWAY = "gateway"
LOOK_SECONDS = 1.0
GREETING_SECONDS = 2.0
GREETING_MAX = 1 << 10
BACKLOG = 16

Runs = Callable[[], Awaitable[bool]]
"""Tells whether the sandbox still runs."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a tool server that has outlived its host (see guest/next_host.py)."""

    secret: str


class SharedFolder:
    """Made unless it is there, with the gateway's socket in it. It listens until `stop_listening`."""

    def __init__(self, path: Path, gateway: Path) -> None:
        """Raises OSError."""
        self.path = path
        path.mkdir(mode=0o711, exist_ok=True)
        with contextlib.suppress(PermissionError):  # root inside may be another user
            gateway.chmod(0o666)
        # A second name of the same socket: a mount of the socket itself would be that of this host for ever.
        (path / GATEWAY).unlink(missing_ok=True)
        (path / GATEWAY).hardlink_to(gateway)
        self._listener = _listening(path)

    def stop_listening(self) -> None:
        """Idempotent."""
        self._listener.close()
        (self.path / SOCKET).unlink(missing_ok=True)

    async def accept(self, runs: Runs) -> socket.socket:
        """The next connection. Raises RuntimeFailure when the sandbox does not run any more."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await readable(self._listener.fileno())
            with contextlib.suppress(BlockingIOError):
                end, _ = self._listener.accept()
                end.setblocking(False)
                return end
            if not await runs():
                raise RuntimeFailure("the sandbox ended before its tool server had connected")

    async def meet(self, secret: str, runs: Runs) -> ToolClient:
        """The tool server that knows the secret, when it has connected. Raises RuntimeFailure."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    end = await self.accept(runs)
                    try:
                        newest_call = await _greeted(end, secret)
                    except BaseException:  # also a cancellation
                        end.close()
                        raise
                    if newest_call is not None:
                        break
                    end.close()  # some program of the sandbox
        except TimeoutError as error:
            raise RuntimeFailure(f"the sandbox's tool server did not connect in {START_SECONDS:.0f} s") from error
        finally:
            self.stop_listening()
        tools = ToolClient(end, lambda: "", newest_call=newest_call)
        await tools.open()
        return tools


async def _greeted(end: socket.socket, secret: str) -> int | None:
    """The number of the newest call that the tool server at the other end has had; None if it is not the one that knows
    the secret."""
    loop, received = asyncio.get_running_loop(), b""
    with contextlib.suppress(TimeoutError, OSError, *UNREADABLE):
        async with asyncio.timeout(GREETING_SECONDS):
            while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
                piece = await loop.sock_recv(end, GREETING_MAX)
                if not piece or len(received) > GREETING_MAX:
                    return None
                received += piece
        newest_call, _, greeting = msgspec.msgpack.decode(received[4:], type=tuple[int, str, Greeting])
        if hmac.compare_digest(greeting.secret.encode(), secret.encode()) and newest_call >= 0:
            return newest_call
    return None


def _listening(folder: Path) -> socket.socket:
    """A socket in `folder` to which any user of the sandbox may connect. Nobody else is shown the folder.

    It is bound by the folder's descriptor, because the path of a socket may have no more than 107 bytes."""
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        (folder / SOCKET).unlink(missing_ok=True)  # of a host that was killed while it listened
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
