"""Shared code of the runtimes with sandboxes on other machines: the labels of sandboxes, the pace of starts, and
the tunnel to the model gateway.

The module does not depend on a particular service that runs sandboxes. Invariants:

- A sandbox is an orphan only if the process of its node has certainly ended.
- The session's time limits do not count the time that a start waits in the queue.
- Through the tunnel, programs in a sandbox reach the gateway of their node and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

from outrider.concurrency.chores import Chores
from outrider.environment import host_id
from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.guest.bridge import MAX_PAIRS
from outrider.sandbox.runtimes.guest.tunnel import CLOSED, DATA, ENDED, OPENED, READY
from outrider.sandbox.runtimes.node_host import Host, lives
from outrider.sandbox.runtimes.tool_server.client import Done, ToolClient
from outrider.sandbox.runtimes.tool_server.launch import BRIDGE_PORT, START_SECONDS, RunningServer
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import RuntimeSpec

NODE_LABEL = "outrider.node"
SESSION_LABEL = "outrider.session"
ATTEMPT_LABEL = "outrider.attempt"
"""Names of the labels of every sandbox. The labels hold the node that started the sandbox, the session, and the
attempt."""

MACHINE_CHARACTERS = 8
HEAD = 5
"""Number of bytes before the data of a message in the tunnel: one byte for the message's kind, four for the client's
number."""
MOST_WAITING = 64 << 20
"""Maximum bytes that may wait in one buffer until they are sent to the gateway or the tool server."""
UNBOUNDED = 1 << 62


def node_label(host: Host) -> str:
    """Return the value of NODE_LABEL for the sandboxes of a node. It has at most 63 letters, digits, dashes and
    underscores. The last character is a letter or digit, as Kubernetes requires."""
    label = f"{_machine()}-{host.name}"
    return label if label[-1].isalnum() else f"{label}0"


def labels_of(context: SandboxContext) -> dict[str, str]:
    """Return the labels of a sandbox."""
    return {
        NODE_LABEL: node_label(context.host),
        SESSION_LABEL: context.session_id,
        ATTEMPT_LABEL: str(context.attempt),
    }


def is_orphan(label: str) -> bool:
    """Return whether the node with this label has ended.

    Returns False if this machine cannot determine whether the node has ended. This is the case if the node runs on
    another machine, ran on this machine before the last boot, or runs in another pid namespace. The sandboxes of such a
    node end by themselves, because each has a time limit at its service."""
    machine, _, name = label.partition("-")
    return machine == _machine() and not lives(name)


def _machine() -> str:
    """Return a name for this machine. The name changes with each boot. Other machines that use the same service have
    other names, even if their process ids and namespaces are the same."""
    boot = host_id().partition(" ")[0]
    return hashlib.sha256(boot.encode()).hexdigest()[:MACHINE_CHARACTERS]


class StartQueue:
    """The queue in which starts of a node's sandboxes wait for one service: first in, first out, and at most
    `per_second` of them in each second."""

    def __init__(self, per_second: float) -> None:
        self._pause = 1 / per_second
        self._next = 0.0
        self._turns = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until the next start may be requested. A cancelled wait does not use up a turn."""
        clock = asyncio.get_running_loop().time
        async with self._turns:
            while (wait := self._next - clock()) > 0:  # noqa: ASYNC110  # `hold` may move `_next` meanwhile
                await asyncio.sleep(wait)
            self._next = clock() + self._pause

    def hold(self, seconds: float) -> None:
        """Hold back all starts for `seconds`, because the service has no room."""
        self._next = max(self._next, asyncio.get_running_loop().time() + seconds)


class QueueClock:
    """A stopwatch for one start of a sandbox. It measures the time in the queue, and the wait until the service has
    room."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._since: float | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._waited = self.seconds()
            self._since = None

    def seconds(self) -> float:
        return self._waited + (0.0 if self._since is None else time.monotonic() - self._since)


RemoteLaunch = Callable[[RuntimeSpec, SandboxContext, QueueClock], AbstractAsyncContextManager[RunningServer]]


class RemoteSandbox(ToolServerSandbox):
    """A sandbox on another machine, with a tool server. The function `launch` also gets a `QueueClock`, to measure how
    long the start waits."""

    def __init__(self, launch: RemoteLaunch, spec: RuntimeSpec, context: SandboxContext, **options: Any) -> None:
        self._queued = QueueClock()
        super().__init__(lambda spec, context: launch(spec, context, self._queued), spec, context, **options)

    def queued_seconds(self) -> float:
        """See `QueuesStarts`."""
        return self._queued.seconds()


@asynccontextmanager
async def gateway_tunnel(
    tools: ToolClient, gateway: Path, chores: Chores, *, port: int = BRIDGE_PORT, seconds: float
) -> AsyncIterator[None]:
    """While the block runs, forward the connections that programs in the sandbox open to 127.0.0.1:port. They are
    forwarded to `gateway`, a Unix socket of this machine. The tunnel ends after `seconds` at the latest. The tunnel's
    tasks belong to `chores`. Raises RuntimeFailure if the tunnel cannot be opened.

    The tunnel uses the connection to the tool server. So the sandbox needs no network, and the node needs no address
    that other machines can reach."""
    tunnel = _GatewayTunnel(tools, gateway, chores)
    served = chores.create_task(tunnel.serve(port, seconds), name="gateway tunnel")
    try:
        try:
            async with asyncio.timeout(START_SECONDS):
                await tunnel.opened.wait()
        except TimeoutError as error:
            raise RuntimeFailure(f"the way to the model was not open within {START_SECONDS:.0f} s") from error
        if tunnel.failure is not None:
            raise RuntimeFailure(f"the way to the model cannot be opened: {tunnel.failure}") from tunnel.failure
        yield
    finally:
        served.cancel()
        tunnel.close()


class _GatewayTunnel:
    """The host's end of a tunnel. guest/tunnel.py has the sandbox's end. `opened` is set when the sandbox's end
    listens, or has failed to listen."""

    def __init__(self, tools: ToolClient, gateway: Path, chores: Chores) -> None:
        self.opened = asyncio.Event()
        self.failure: Exception | None = None
        self._tools = tools
        self._gateway = gateway
        self._chores = chores
        self._streams: dict[int, _GatewayStream] = {}

    async def serve(self, port: int, seconds: float) -> None:
        try:
            await self._tools.call("tunnel", {"port": port}, Done, seconds=seconds, on_part=self._take, room=UNBOUNDED)
        except (RuntimeFailure, OSError) as error:  # the sandbox no longer exists, or its port is in use
            self.failure = error
        finally:
            self.opened.set()

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.abort()

    def _take(self, part: bytes) -> None:
        """Handle a message from the sandbox's end of the tunnel. Any program in the sandbox may have forged it. Raises
        ValueError for a message that the tool server never sends. The client of the tool server then drops the
        connection."""
        if len(part) < HEAD:
            raise ValueError("a part of the tunnel without a number")
        # each message may cause a reply, and replies pile up here if the tool server does not read them
        if self._tools.backlog() > MOST_WAITING:
            raise ValueError("a tool server that sends and does not read")
        kind, number, data = part[0], int.from_bytes(part[1:HEAD], "big"), part[HEAD:]
        stream = self._streams.get(number)
        if kind == READY:
            self.opened.set()
        elif kind == OPENED and stream is None:
            if len(self._streams) >= MAX_PAIRS:
                self._tools.send("tunnel_drop", {"client": number})
                return
            self._streams[number] = stream = _GatewayStream(self._tools, number, self._streams.pop)
            self._chores.create_task(stream.connect(self._gateway), name="gateway tunnel")
        elif stream is not None and kind == DATA:
            stream.send(data)
        elif stream is not None and kind == ENDED:
            stream.send_end()
        elif stream is not None and kind == CLOSED:
            stream.abort()


class _GatewayStream(asyncio.Protocol):
    """A connection to the gateway, for one client in the sandbox. Bytes from the client are kept until the connection
    is open. When the connection is lost, `closed` is called with the client's number."""

    def __init__(self, tools: ToolClient, number: int, closed: Callable[[int, None], object]) -> None:
        self._tools = tools
        self._number = number
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()
        self._ended = False
        self._lost = False

    async def connect(self, gateway: Path) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, str(gateway))
        except OSError:  # the gateway no longer listens
            self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a cast, because uvloop's transport is not a subclass of asyncio's
        self._transport = opened = cast(asyncio.Transport, transport)
        if self._lost:
            opened.abort()
            return
        opened.write(bytes(self._early))
        if self._ended:
            opened.write_eof()

    def send(self, data: bytes) -> None:
        transport = self._transport
        waiting = len(self._early) if transport is None else transport.get_write_buffer_size()
        if waiting + len(data) > MOST_WAITING:
            self.abort()
        elif transport is None:
            self._early += data
        else:
            transport.write(data)

    def send_end(self) -> None:
        self._ended = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        self._tools.send("tunnel_data", {"client": self._number, "data": data})

    def eof_received(self) -> bool:
        self._tools.send("tunnel_data", {"client": self._number, "data": b""})
        return True  # the connection stays open, because the client may still send

    def connection_lost(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._closed(self._number, None)
            self._tools.send("tunnel_drop", {"client": self._number})
