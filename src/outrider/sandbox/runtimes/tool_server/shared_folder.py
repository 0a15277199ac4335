"""The folder shared by a sandbox and its node, with the model gateway's socket, and a socket to which a tool server
connects.

The folder itself is mounted, so its content can be replaced while the sandbox runs: after a node was killed, the next
node puts its own sockets there. Invariant: the socket for tool servers exists only while a server is expected, because
any program in the sandbox could connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import select
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.kernel.child import readable
from outrider.sandbox.runtimes.tool_server.client import UNREADABLE, ToolClient
from outrider.sandbox.runtimes.tool_server.launch import START_SECONDS

SOCKET = "sock"
GATEWAY = "gateway"
LOOK_SECONDS = 1.0
GREETING_MAX = 1 << 10
MAX_STRANGERS = 64
"""Maximum number of connections whose greeting is awaited."""
BACKLOG = 16

Runs = Callable[[], Awaitable[bool]]
"""A function that returns whether the sandbox still runs."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a tool server that has outlived its node (see guest/next_host.py)."""

    secret: str


class SharedFolder:
    """The shared folder, created if missing. The gateway's socket is in the folder. A second socket accepts connections
    until `stop_listening`."""

    def __init__(self, path: Path, gateway: Path) -> None:
        """Raises OSError."""
        self.path = path
        path.mkdir(mode=0o711, exist_ok=True)
        # The sandbox's root may be another user than the node, and must be able to connect to the gateway.
        with contextlib.suppress(PermissionError):
            gateway.chmod(0o666)
        # The gateway's socket gets a second name in the folder. A mount of the socket itself would refer to this node's
        # socket forever.
        (path / GATEWAY).unlink(missing_ok=True)
        (path / GATEWAY).hardlink_to(gateway)
        self._listener = _listening(path)

    def stop_listening(self) -> None:
        """Close and remove the socket for tool servers. Idempotent."""
        self._listener.close()
        (self.path / SOCKET).unlink(missing_ok=True)

    async def accept(self, runs: Runs) -> socket.socket:
        """Return the next connection. Raises RuntimeFailure when the sandbox no longer runs."""
        while True:
            await _ready(self._listener.fileno(), runs)
            if (end := self._accept_now()) is not None:
                return end

    def _accept_now(self) -> socket.socket | None:
        with contextlib.suppress(BlockingIOError):
            end, _ = self._listener.accept()
            end.setblocking(False)
            return end
        return None

    async def meet(self, secret: str, runs: Runs) -> ToolClient:
        """Wait for the tool server that has the secret, and return a client for this server. Raises RuntimeFailure."""
        try:
            async with asyncio.timeout(START_SECONDS):
                end, newest_call = await self._greeted(secret, runs)
        except TimeoutError as error:
            raise RuntimeFailure(f"the sandbox's tool server did not connect in {START_SECONDS:.0f} s") from error
        finally:
            self.stop_listening()
        tools = ToolClient(end, lambda: "", newest_call=newest_call)
        await tools.open()
        return tools

    async def _greeted(self, secret: str, runs: Runs) -> tuple[socket.socket, int]:
        """Return the first connection whose greeting has the secret, and the number in the greeting (see
        `_newest_call`).

        Any program of the sandbox may connect and stay silent, so all connections are read concurrently. If there are
        more than MAX_STRANGERS, the oldest is closed. No tool server is shut out: a tool server sends its greeting at
        once, and connects again if its connection was closed."""
        strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        poll = select.epoll()
        try:
            poll.register(self._listener, select.EPOLLIN)
            while True:
                await _ready(poll.fileno(), runs)
                for fd, _ in poll.poll(0):
                    if fd in strangers:
                        end, received = strangers[fd]
                        if _read(end, received):
                            continue
                        del strangers[fd]
                        if (newest_call := _newest_call(received, secret)) is not None:
                            return end, newest_call
                        end.close()
                    elif fd == self._listener.fileno() and (new := self._accept_now()) is not None:
                        strangers[new.fileno()] = (new, bytearray())
                        poll.register(new, select.EPOLLIN)
                        if len(strangers) > MAX_STRANGERS:
                            strangers.pop(next(iter(strangers)))[0].close()
        finally:
            poll.close()
            for end, _ in strangers.values():
                end.close()


async def _ready(fd: int, runs: Runs) -> None:
    """Wait until `fd` is readable. Raises RuntimeFailure when the sandbox no longer runs."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await readable(fd)
                return
        if not await runs():
            raise RuntimeFailure("the sandbox ended before its tool server had connected")


def _read(end: socket.socket, received: bytearray) -> bool:
    """Read the bytes that have come on a connection. Returns whether the rest of a greeting may follow."""
    try:
        piece = end.recv(GREETING_MAX)
    except BlockingIOError:
        return True
    except OSError:
        return False
    received += piece
    size = 4 + int.from_bytes(received[:4], "big")
    return bool(piece) and len(received) < min(size, GREETING_MAX)


def _newest_call(received: bytearray, secret: str) -> int | None:
    """Return the number in a greeting, which is the number of the newest call that the tool server has received.
    Returns None for anything but a greeting with the secret."""
    with contextlib.suppress(*UNREADABLE):
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
