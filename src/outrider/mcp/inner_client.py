"""The client that the MCP tools at `/mcp` use. It calls the control API inside the service's own process, on behalf of
the program that has called a tool.

Invariant: each call carries the caller's token and address, so access control treats it like a call over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self
from urllib.parse import unquote

from outrider.client.client import AsyncClient
from outrider.wire.http_connections import Buffer, Connections, Response
from outrider.wire.http_server import Application, Message, Scope

KEPT = (b"authorization", b"host", b"origin")
"""The headers that are copied from the caller's request to the tools' own calls, because access control reads them."""


class InnerClient(AsyncClient):
    """Calls an application in this process, on behalf of the client that sent the request `scope`. When the service is
    busy, a call is not repeated."""

    def __init__(self, app: Application, scope: Scope) -> None:
        super().__init__(patience=0)
        self._app = app
        self._scope = scope

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._connections = _InnerConnections(self._app, self._scope)
        return self


class _InnerConnections(Connections):
    def __init__(self, app: Application, scope: Scope) -> None:
        self._app = app
        self._scope = scope

    async def request(
        self,
        method: str,
        path: str,
        body: Sequence[Buffer] = (),
        headers: Mapping[str, str] | None = None,
        *,
        opened: Callable[[Response], None] | None = None,
        repeatable: bool = False,
    ) -> Response:
        where, _, query = path.partition("?")
        own = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        sent = b"".join(body)
        scope = {
            **{name: self._scope[name] for name in ("type", "asgi", "http_version", "scheme", "client", "server")},
            "method": method,
            "path": unquote(where),  # as a server decodes it
            "raw_path": where.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                *((name, value) for name, value in self._scope["headers"] if name in KEPT),
                *own,
                (b"content-length", b"%d" % len(sent)),
            ],
        }
        reply = _InnerResponse()
        await self._app(scope, _received(sent).__anext__, reply.take)
        return reply

    def close(self) -> None:
        pass


class _InnerResponse(Response):
    """The complete response of an application in this process."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._body.append(bytes(message.get("body", b"")))

    @property
    def status(self) -> int:
        return self._status

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    async def whole(self, most: int | None = None) -> bytes:
        return b"".join(self._body)[:most]

    def close(self) -> None:
        pass


async def _received(body: bytes) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "http.request", "body": body, "more_body": False}
    # this waits forever; if the caller disconnects, the outer request is cancelled, and so is this wait
    await asyncio.get_running_loop().create_future()
