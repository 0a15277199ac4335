"""Carries the input and output of a command in a pod between the API server's WebSocket and a socket of this process.

Each message of the WebSocket begins with the number of its channel. Invariants:

- Data from the network is read only as fast as the reader of the socket takes it, so a slow reader slows the command.
- A connection without any message for too long (`ClusterWaits.silence`) is treated as broken.
- When the context of an `ExecStream` has ended, both ends are closed and no task is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Self

import aiohttp
import msgspec

from outrider.concurrency.chores import Chores
from outrider.errors import LOG_TAIL
from outrider.sandbox.runtimes.kubernetes.api import CLOSE_SECONDS, WAITS, ClusterWaits, StatusReply

STDIN, STDOUT, STDERR, ERROR = range(4)
"""The numbers of the channels. At the end of the command, the channel ERROR carries one `Status` object."""
LAST = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
"""Types of messages that end a WebSocket."""
PIECE = 1 << 16
"""Maximum bytes of one message. Proxies in front of API servers refuse larger ones."""
EXITED = "NonZeroExitCode"
"""The `reason` in the `Status` of a command that exited with an error. Any other reason means that the cluster
failed."""


class ExecStream:
    """The host's end of one running command: `async with ExecStream(socket, theirs, chores)`. `theirs` is one end of a
    pair of Unix sockets, and is closed by this object. Whoever holds the other end writes the command's standard input
    there, and reads the command's standard output. The stream's tasks belong to `chores`."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        theirs: socket.socket,
        chores: Chores,
        *,
        waits: ClusterWaits = WAITS,
    ) -> None:
        self.exited = False
        """True once the API server has reported that the command has exited, by itself or by a signal."""
        self._socket = socket
        self._theirs = theirs
        self._chores = chores
        self._waits = waits
        self._log = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None

    def log_tail(self) -> str:
        """Return the last lines of the command's standard error."""
        return self._log.decode(errors="replace").strip()

    async def __aenter__(self) -> Self:
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._theirs)
        except BaseException:  # BaseException includes CancelledError
            self._theirs.close()
            await self._socket.close()
            raise
        self._tasks = [
            self._chores.create_task(work, name="stream of a pod")
            for work in (self._send(reader), self._receive(self._writer), self._ping())
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end()
        # aiohttp waits for the reply to its close frame, and begins this wait anew with each message of the server.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while data := await reader.read(PIECE):
                await self._socket.send_bytes(bytes([STDIN]) + data)
            await self._socket.close()

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        """Forward the output until the WebSocket ends, and then close the Unix socket."""
        try:
            while (message := await self._next()).type not in LAST:
                if message.type is aiohttp.WSMsgType.PING:
                    await self._socket.pong(message.data)
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    continue
                channel, data = message.data[0], message.data[1:]
                if channel == STDOUT:
                    writer.write(data)
                    await writer.drain()
                elif channel == STDERR:
                    self._log = (self._log + data)[-LOG_TAIL:]
                elif channel == ERROR:
                    self._note_end(data)
        except (aiohttp.ClientError, OSError):
            return
        finally:
            self._end()

    async def _next(self) -> aiohttp.WSMessage:
        """Return the next message. Raises TimeoutError after a silence that is too long."""
        seconds = self._waits.silence
        try:
            async with asyncio.timeout(seconds):
                return await self._socket.receive()
        except TimeoutError:
            self._add_to_log(f"the connection to the pod has been silent for {seconds:.0f} s")
            raise

    def _note_end(self, data: bytes) -> None:
        try:
            end = msgspec.json.decode(data, type=StatusReply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            end = StatusReply(message=data[:LOG_TAIL].decode(errors="replace"))
        self.exited = end.status == "Success" or end.reason == EXITED
        if end.message:
            self._add_to_log(end.message)

    def _add_to_log(self, text: str) -> None:
        self._log = (self._log + b"\n" + text.encode())[-LOG_TAIL:]

    async def _ping(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while True:
                await asyncio.sleep(self._waits.ping)
                await self._socket.ping()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
