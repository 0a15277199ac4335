"""The benchmarks' HTTP client: the product's own to its engines, which costs the least of what we have.

Whatever the client costs is part of both sides of a comparison, and on two cores it is taken from the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from outrider.engines.http.connections import Connections, Response

HEADERS = {"Content-Type": "application/json"}


class Client:
    """Posts to any number of servers, each over connections that are kept."""

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
