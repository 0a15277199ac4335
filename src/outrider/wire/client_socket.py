"""The worker's or node's end of an open WebSocket to the service."""

from __future__ import annotations

from contextlib import suppress

import aiohttp

from outrider.wire.link import Disconnected


class ClientSocket:
    """`wire.link.Socket` over aiohttp's WebSocket."""

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
        """Close the connection, unless it is already closed."""
        with suppress(aiohttp.ClientError, OSError):
            await self._websocket.close(code=code, message=reason.encode())
