"""Turns an engine into an ASGI application, and serves ASGI applications over HTTP.

Invariant: if a route raises EngineError, the client gets an error in the format of the server's protocol.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import uvicorn

from outrider.engines.base import Engine
from outrider.errors import EngineError
from outrider.lab.fakes.engine_servers.asgi import NOT_FOUND, HttpCall, Served, ServerDied, ServeSettings
from outrider.lab.fakes.engine_servers.sglang import ServedSGLang
from outrider.lab.fakes.engine_servers.vllm import ServedVLLM
from outrider.wire.http_server import BACKLOG, Application, Receive, Scope, Send, server_settings

EngineProtocol = Literal["vllm", "sglang"]

PROTOCOLS: dict[EngineProtocol, Callable[[Engine, ServeSettings], Served]] = {
    "vllm": ServedVLLM,
    "sglang": ServedSGLang,
}
DEFAULT_SETTINGS = ServeSettings()
TURNS_OF_ACCEPT = 4
"""Number of event loop iterations that asyncio needs to create the transport of an accepted connection."""


def engine_app(
    engine: Engine, protocol: EngineProtocol = "vllm", settings: ServeSettings = DEFAULT_SETTINGS
) -> Application:
    """Return the engine as an ASGI application. The caller starts and closes the engine."""
    served = PROTOCOLS[protocol](engine, settings)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = HttpCall(scope, receive, send)
        route = served.routes.get((call.method, call.path))
        if served.dead:
            await call.cut()
        elif route is None:
            await call.answer(404, NOT_FOUND)
        else:
            try:
                await route(call)
            except ServerDied:
                served.dead = True
                await call.cut()
            except EngineError as error:
                await call.answer(error.http_status, served.error_body(error.message, error.http_status))

    return app


@asynccontextmanager
async def serving(
    app: Application, *, host: str = "127.0.0.1", port: int = 0, websockets: int = 0
) -> AsyncGenerator[str, None]:
    """Serve the application in this event loop during the block. Yields the base URL. Port 0 selects a free port.
    `websockets` is the maximum size in bytes of a WebSocket message; 0 disables WebSockets.

    At the end, open connections are closed at once.
    """
    config = server_settings(app, websockets=websockets)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # asyncio disables Nagle's algorithm only for a socket with an explicit protocol, so the socket is created here.
    # With Nagle's algorithm, every streamed response would wait 40 ms for an acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    await server.startup(sockets=[listener])
    listener.listen(BACKLOG)
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        await asyncio.shield(_stop(server, listener))


async def _stop(server: uvicorn.Server, listener: socket.socket) -> None:
    """Shut the server down as uvicorn does, but without waiting: open connections are closed at once."""
    # When asyncio closes a server, it loses accepted connections that have no transport yet. So stop accepting
    # connections first. Then wait a few loop iterations, until every accepted connection has a transport.
    asyncio.get_running_loop().remove_reader(listener)
    for _ in range(TURNS_OF_ACCEPT):
        await asyncio.sleep(0)
    for listening in server.servers:
        listening.close()
    listener.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
        if (transport := getattr(connection, "transport", None)) is not None:
            transport.abort()
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
