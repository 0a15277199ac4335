"""The service's end of a WebSocket to a worker or a node."""

from __future__ import annotations

from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect

from outrider.wire.link import Disconnected, Socket


class AsgiSocket(Socket):
    """A `Socket` over a WebSocket that an ASGI server has accepted."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def send(self, frame: bytes) -> None:
        try:
            await self._websocket.send_bytes(frame)
        except (WebSocketDisconnect, OSError, RuntimeError) as error:  # RuntimeError: uvicorn has closed it just now
            raise Disconnected(1006) from error

    async def receive(self) -> bytes:
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Disconnected(message.get("code", 1006), message.get("reason") or "")
        # Outrider's protocols use no text frames. If a text frame arrives, its bytes are returned, and the decoder of
        # messages refuses these bytes.
        return message.get("bytes") or (message.get("text") or "").encode()

    async def close(self, code: int, reason: str) -> None:
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, OSError, RuntimeError):  # the connection is closed already
            return
