"""The service's end of an open WebSocket to a worker or a node."""

from __future__ import annotations

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from outrider.wire.link import Disconnected, Socket


class AsgiSocket(Socket):
    """An accepted WebSocket of an ASGI server."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def send(self, frame: bytes) -> None:
        try:
            await self._websocket.send_bytes(frame)
        except (WebSocketDisconnect, OSError) as error:
            raise Disconnected(1006) from error

    async def receive(self) -> bytes:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Disconnected(message.get("code", 1006), message.get("reason") or "")
        # The protocol has no text frames. A text frame is passed on as bytes, and the decoder refuses these bytes.
        return message.get("bytes") or (message.get("text") or "").encode()

    async def close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, OSError, RuntimeError):  # the connection is closed already
            return
