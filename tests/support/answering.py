"""A server that stands in for the service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(handler: Handler, path: str = "/{path:.*}") -> AsyncIterator[str]:
    """Run a server that answers all requests to `path` with `handler`. Yields the server's URL."""
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sockets: Any = runner.addresses
        yield f"http://127.0.0.1:{sockets[0][1]}"
    finally:
        await runner.cleanup()
