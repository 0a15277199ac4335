"""The benchmarks' HTTP client: the product's own client for engines, which is the cheapest we have.

The client's cost is part of both sides of a comparison, and on two cores it slows the other processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from outrider.wire.http_connections import Connections, Response

HEADERS = {"Content-Type": "application/json"}


class Client:
    """Posts to any number of servers, over kept connections."""

    def __init__(self) -> None:
        self._servers: dict[str, Connections] = {}

    @asynccontextmanager
    async def post(self, url: str, body: bytes) -> AsyncIterator[Response]:
        parts = urlsplit(url)
        server = self._servers.get(parts.netloc)
        if server is None:
            server = self._servers[parts.netloc] = Connections(f"http://{parts.netloc}", HEADERS)
        response = await server.request("POST", parts._replace(scheme="", netloc="").geturl(), (body,))
        try:
            yield response
        finally:
            response.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()
