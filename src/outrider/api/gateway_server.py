"""The HTTP server for all Outrider processes that answer model calls. A node's model gateway has its own server.

This module does not import the control API, because a node process serves only model calls and need not import FastAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn

from outrider.api.gateway import Gateway
from outrider.errors import ServiceError
from outrider.sessions.node import LocalNode
from outrider.wire.file_descriptors import raise_limit, shares
from outrider.wire.http_server import (
    BACKLOG,
    TIMEOUTS,
    Application,
    Receive,
    Scope,
    Send,
    Timeouts,
    noting_refusals,
    server_settings,
)

LAST_REPLIES_SECONDS = 0.1
"""When a server stops, running requests have this many seconds to end before they are aborted."""


@asynccontextmanager
async def serving_gateway(node: LocalNode) -> AsyncIterator[None]:
    """Serve a node's model gateway and nothing else, on its Unix socket and on a free port of this machine."""
    share = shares(raise_limit())
    with socket.socket(socket.AF_UNIX) as inside, listener_at("127.0.0.1", 0) as port:
        inside.bind(str(node.gateway_socket))
        server = HttpServer(Gateway(node, calls=share.session, failures=node.call_failures), share.sandboxes)
        with noting_refusals(node.failures), node.gateway_at(url_of(port, tls=False)):
            async with running(server, inside, port):
                yield


@asynccontextmanager
async def running(server: HttpServer, *sockets: socket.socket) -> AsyncIterator[None]:
    """Run the server on these sockets during the block."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=list(sockets)), name="http server")
        await server.ready.wait()
        try:
            yield
        except Exception as error:  # caught because the task group would wrap an error of the block
            failure = error
        finally:
            server.stop()
    if failure is not None:
        raise failure


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handling. (The program that runs the service handles signals.)

    connections: maximum number of open connections.
    websockets: see `server_settings`.
    ready: set once the server listens.

    At shutdown, running requests have LAST_REPLIES_SECONDS to end.
    """

    def __init__(
        self,
        app: Application,
        connections: int,
        *,
        timeouts: Timeouts = TIMEOUTS,
        websockets: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        async def until_cut_off(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self.should_exit:
                    raise

        super().__init__(
            server_settings(until_cut_off, timeouts, connections=connections, websockets=websockets, tls=tls)
        )
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # again, because asyncio passed a smaller backlog, ACCEPTED_AT_ONCE
        self.ready.set()

    def stop(self) -> None:
        """Make `serve` shut down and return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`. uvicorn's own loop would check `should_exit` ten times a second."""
        while not await self.on_tick(0):  # argument 0 makes uvicorn update the Date header of replies
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), timeout=1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        if under_way := tuple(self.server_state.tasks):
            await asyncio.wait(under_way, timeout=LAST_REPLIES_SECONDS)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        if cut_off := tuple(self.server_state.tasks):
            for task in cut_off:
                task.cancel()
            await asyncio.wait(cut_off)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def url_of(listener: socket.socket, *, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def listener_at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol, asyncio turns off Nagle's algorithm, which would delay streamed replies.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port, or 0 for any"
        ) from error
    return listener
