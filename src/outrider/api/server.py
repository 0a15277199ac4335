"""Serves the application: everything on a TCP address, and only the model gateway on the node's Unix socket.

Invariant: sandboxes reach only the Unix socket, so no program in them can call the control API.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn

from outrider.api.app import create_app, is_local
from outrider.api.gateway import Gateway
from outrider.errors import InvalidField, ServiceError
from outrider.file_descriptors import raise_limit, shares
from outrider.http_server import Application, Receive, Scope, Send, server_settings
from outrider.service.service import Service


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the program that runs the service decides what a signal means.

    `ready` is set once it listens. When it shuts down, it cuts off the requests that it is answering.
    """

    def __init__(self, app: Application, connections: int) -> None:
        async def until_cut_off(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self.should_exit:
                    raise

        super().__init__(server_settings(until_cut_off, connections=connections))
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        if cut_off := tuple(self.server_state.tasks):
            for task in cut_off:
                task.cancel()
            await asyncio.wait(cut_off)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def check_address(host: str, token: str | None) -> None:
    """Raises InvalidField for an address that other machines can reach, if there is no token."""
    if not is_local(host) and not token:
        raise InvalidField(
            f"{host} can be reached from other machines, and no token is set",
            field="token",
            hint="set one with --token or OUTRIDER_TOKEN, or serve on 127.0.0.1",
        )


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    """Serve a service and run its sessions; yields its base URL, such as http://127.0.0.1:8700.

    Raises InvalidField for a public address without a token, and ServiceError if the address is in use.
    """
    config = service.config
    check_address(config.host, config.token)
    with _listener(config.host, config.port) as outside, socket.socket(socket.AF_UNIX) as inside:
        inside.bind(str(service.node.gateway_socket))
        host, port = outside.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        share = shares(raise_limit())
        servers = [
            (_Server(create_app(service, calls=share.session), share.control), outside),
            (_Server(Gateway(service.node, calls=share.session), share.sandboxes), inside),
        ]
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            for server, bound in servers:
                group.create_task(server.serve(sockets=[bound]), name="http server")
            for server, _ in servers:
                await server.ready.wait()
            try:
                with service.node.gateway_at(url):
                    async with service.running():
                        yield url
            except Exception as error:  # an error of the caller's block: the task group would wrap it in a group
                failure = error
            finally:
                for server, _ in servers:
                    server.should_exit = server.force_exit = True
        if failure is not None:
            raise failure


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol spelt out, asyncio turns off Nagle's algorithm, which would delay streamed replies.
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
