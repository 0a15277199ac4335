"""Forwards model calls from other systems' routes to the model gateway."""

from __future__ import annotations

from starlette.responses import Response

from outrider.api.gateway import Gateway
from outrider.wire.http_server import Message, Receive, Scope, Send


class GatewayCall(Response):
    """A reply that comes from the model gateway. The gateway handles the call as if the client had sent it to `path`.
    `body` is the call's body, if the route has already read it."""

    def __init__(self, gateway: Gateway, path: str, body: bytes | None) -> None:
        super().__init__()
        self._gateway = gateway
        self._path = path
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = self._body

        async def again() -> Message:
            nonlocal read
            if read is None:
                return await receive()
            body, read = read, None
            return {"type": "http.request", "body": body, "more_body": False}

        length = b"content-length"
        headers = list(scope["headers"])
        if read is not None:
            headers = [(name, value) for name, value in headers if name != length]
            headers.append((length, str(len(read)).encode()))
        called = {**scope, "path": self._path, "raw_path": self._path.encode(), "headers": headers}
        await self._gateway(called, again, send)
