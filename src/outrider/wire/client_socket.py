"""The worker's or node's end of a WebSocket to the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp

from outrider.concurrency.cancellation import shielded
from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import Close

CLOSE_SECONDS = 2.0


@asynccontextmanager
async def dialled(
    http: aiohttp.ClientSession, url: str, token: str | None, *, seconds: float, max_bytes: int
) -> AsyncIterator[ClientSocket]:
    """Open a WebSocket within `seconds`, and close it at the end of the block. Messages may have up to `max_bytes`
    bytes. The close code is LEFT if the caller was cancelled. Otherwise the code is SILENT: the service should expect a
    new connection. Raises aiohttp.ClientError, OSError and TimeoutError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    closing = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)
    async with asyncio.timeout(seconds):
        websocket = await http.ws_connect(url, headers=headers, max_msg_size=max_bytes, timeout=closing)
    socket, code = ClientSocket(websocket), Close.SILENT
    try:
        yield socket
    except asyncio.CancelledError:
        code = Close.LEFT
        raise
    finally:
        await shielded(partial(socket.close, code, ""))


class ClientSocket(Socket):
    """A `Socket` over an open WebSocket of aiohttp."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket

    async def send(self, frame: bytes) -> None:
        try:
            await self._websocket.send_bytes(frame)
        except (aiohttp.ClientError, OSError) as error:
            raise Disconnected(1006, str(error)) from error

    async def receive(self) -> bytes:
        message = await self._websocket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type is aiohttp.WSMsgType.CLOSE:
            raise Disconnected(message.data or 1005, message.extra or "")
        if message.type is aiohttp.WSMsgType.TEXT:
            raise Disconnected(1003, "the service sent text")
        raise Disconnected(self._websocket.close_code or 1006, "" if message.data is None else str(message.data))

    async def close(self, code: int, reason: str) -> None:
        """Close the connection if it is still open."""
        with suppress(aiohttp.ClientError, OSError):
            await self._websocket.close(code=code, message=reason.encode())
