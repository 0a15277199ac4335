"""A node's connection to a service on another machine. When the connection breaks, the node opens a new one.

Invariant: if the node cannot reach the service for PATIENCE_SECONDS, the node ends its socket, because after this time
the service has given the node up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote
from uuid import uuid4

import aiohttp

from outrider.concurrency.cancellation import shielded
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.relay.messages import MAX_TO_WORKER
from outrider.environment import host_id, installed_version
from outrider.errors import UNREADABLE, Conflict, EngineMisbehaved, Forbidden, NotFound, OutriderError, Unauthorized
from outrider.nodes.messages import MAX_MESSAGE, WELCOME, Join, NodeHello
from outrider.nodes.remote_node import WAITS
from outrider.wire.client_socket import ClientSocket, dialled
from outrider.wire.link import Disconnected
from outrider.wire.link_protocol import PROXY_STATUSES, Close, encode
from outrider.wire.resumable import ResumableSocket
from outrider.wire.tls import trusting

log = logging.getLogger("outrider.node")

DIALLING = RetryPolicy(first=0.5, longest=5.0)
CONNECT_SECONDS = 10.0
QUIET_SECONDS = 10.0
"""If nothing arrives on a connection for this many seconds, the connection counts as dead. The service sends ten
messages a second."""
PATIENCE_SECONDS = WAITS.silence + QUIET_SECONDS

REFUSALS: dict[int, tuple[type[OutriderError], str]] = {
    Close.NONSENSE: (EngineMisbehaved, "is this an Outrider service, of the same version as the node?"),
    Close.PROTOCOL: (Conflict, "install the same version of Outrider on both machines"),
    401: (Unauthorized, "give the service's token: OUTRIDER_TOKEN, or --token"),
    403: (Forbidden, "give a token with the role node: outrider token create --role node"),
    404: (NotFound, "is this an Outrider service, of the same version as the node?"),
}
"""Refusals that a retry would not change. Maps a close code or an HTTP status to the error to raise and its hint."""

FINAL = frozenset({*REFUSALS, Close.LEFT, Close.REMOVED, Close.CONFLICT}) - PROXY_STATUSES
"""Close codes and HTTP statuses which mean that the service has given the node up."""


class Dialled:
    """The node's end of its connection to the service. `socket` stays the same object when the node opens a new
    connection."""

    def __init__(self, join: Join) -> None:
        self.socket = ResumableSocket(MAX_MESSAGE)
        self.url = f"{join.url.rstrip('/')}/v1/nodes/{quote(join.own.name, safe='')}/join"
        self._join = join
        self._instance = uuid4().hex
        self._clock = asyncio.get_running_loop().time

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Stay connected while the block runs. The block begins once the service has accepted the node. If the service
        refuses the node for good, raises Unauthorized, Forbidden, NotFound, Conflict or EngineMisbehaved."""
        connector = aiohttp.TCPConnector(ssl=trusting(self._join.ca) or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            tasks = asyncio.TaskGroup()
            await tasks.__aenter__()
            taken_up = asyncio.Event()
            keeping = tasks.create_task(self._keep(session, taken_up), name="connection to the service")
            first = tasks.create_task(taken_up.wait())
            try:
                await asyncio.wait([keeping, first], return_when=asyncio.FIRST_COMPLETED)
                if not taken_up.is_set() and (refusal := keeping.result()) is not None:
                    raise refusal
                yield
            finally:
                first.cancel()
                keeping.cancel()
                # An error of the block is not passed to the task group, because the task group would wrap the error in
                # an exception group.
                await shielded(lambda: tasks.__aexit__(None, None, None))

    async def _keep(self, session: aiohttp.ClientSession, taken_up: asyncio.Event) -> OutriderError | None:
        """Keep the node connected. If the service has not accepted the node yet and refuses it for good (see REFUSALS),
        return the refusal as an error. If the service has accepted the node before, and gives the node up or cannot be
        reached for PATIENCE_SECONDS, end the socket and return None."""
        failed = 0
        while True:
            before = self.socket.last_arrival
            end = await self._one_connection(session, taken_up)
            failed = 0 if self.socket.last_arrival > before else failed + 1
            if not taken_up.is_set():
                if (refusal := REFUSALS.get(end.code)) is not None:
                    kind, hint = refusal
                    return kind(f"{self.url} refuses this node: {end.reason or end}", hint=hint)
            elif end.code in FINAL or self._clock() - self.socket.last_arrival >= PATIENCE_SECONDS:
                self.socket.end(end)
                return None
            log.warning("no connection to %s: %s", self.url, end)
            await asyncio.sleep(DIALLING.wait(failed))

    async def _one_connection(self, session: aiohttp.ClientSession, taken_up: asyncio.Event) -> Disconnected:
        """Open one connection and use it until it ends. Returns the reason for its end, or the reason why it could not
        be opened."""
        join = self._join
        try:
            async with dialled(
                session, self.url, join.token, seconds=CONNECT_SECONDS, max_bytes=MAX_TO_WORKER
            ) as socket:
                replaced = self.socket.take_over()
                hello = NodeHello(
                    version=installed_version("outrider"),
                    instance=self._instance,
                    machine=join.machine,
                    host=host_id(),
                    capacity=join.own.capacity,
                    received=self.socket.received,
                )
                async with asyncio.timeout(CONNECT_SECONDS):
                    await socket.send(encode(hello))
                    welcome = WELCOME.decode(await socket.receive())
                taken_up.set()
                self.socket.last_arrival = self._clock()
                return await self._carry(socket, welcome.received, replaced)
        except Disconnected as end:
            return end
        except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
            return Disconnected(getattr(error, "status", 1006), str(error) or "it does not answer")

    async def _carry(self, socket: ClientSocket, arrived: int, replaced: asyncio.Event) -> Disconnected:
        """Send and receive over a connection until it ends, or until nothing has arrived for QUIET_SECONDS."""
        async with asyncio.TaskGroup() as tasks:
            carrying = tasks.create_task(self.socket.carry(socket, arrived, replaced))
            while (quiet := self._clock() - self.socket.last_arrival) < QUIET_SECONDS:
                await asyncio.wait([carrying], timeout=QUIET_SECONDS - quiet)
                if carrying.done():
                    return carrying.result()
            carrying.cancel()
        return Disconnected(Close.SILENT, f"nothing came for {quiet:.0f} s")
