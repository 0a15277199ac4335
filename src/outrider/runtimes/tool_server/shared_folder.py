"""The folder shared by a sandbox and its node: the model gateway's socket, and a socket to which a tool server
connects.

The folder itself is mounted, so its content can be replaced while the sandbox runs: after a node was killed, the next
node puts its own sockets there. This module does not depend on the maker of the sandbox. Invariant: the socket for
tool servers exists only while a server is expected, because any program in the sandbox could connect.
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
"""Returns whether the sandbox still runs."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a tool server that has outlived its node (see guest/next_host.py)."""

    secret: str


class SharedFolder:
    """The shared folder, created if missing, with the gateway's socket in it. It listens until `stop_listening`."""

    def __init__(self, path: Path, gateway: Path) -> None:
        """Raises OSError."""
        self.path = path
        path.mkdir(mode=0o711, exist_ok=True)
        with contextlib.suppress(PermissionError):  # root inside may be another user
            gateway.chmod(0o666)
        # A second name of the same socket: a mount of the socket itself would forever refer to this node's socket.
        (path / GATEWAY).unlink(missing_ok=True)
        (path / GATEWAY).hardlink_to(gateway)
        self._listener = _listening(path)

    def stop_listening(self) -> None:
        """Idempotent."""
        self._listener.close()
        (self.path / SOCKET).unlink(missing_ok=True)

    async def accept(self, runs: Runs) -> socket.socket:
        """Return the next connection. Raises RuntimeFailure when the sandbox no longer runs."""
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
        """Wait for the tool server that has the secret, and return a client for it. Raises RuntimeFailure."""
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
                    end.close()  # another program of the sandbox
        except TimeoutError as error:
            raise RuntimeFailure(f"the sandbox's tool server did not connect in {START_SECONDS:.0f} s") from error
        finally:
            self.stop_listening()
        tools = ToolClient(end, lambda: "", newest_call=newest_call)
        await tools.open()
        return tools


async def _greeted(end: socket.socket, secret: str) -> int | None:
    """Return the number of the newest call received by the tool server at the other end; None if the other end does
    not send the secret."""
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
    """Return a socket in `folder` to which any user of the sandbox may connect. The folder is shown only to the
    sandbox.

    The socket is bound through the folder's descriptor, because the path of a socket is limited to 107 bytes."""
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        (folder / SOCKET).unlink(missing_ok=True)  # left by a node that was killed while it listened
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
