"""The door of one sandbox: the Unix socket through which all its network traffic passes.

A CONNECT request, or a request for an absolute URL, goes through the proxy, by the rules of the sandbox's current phase
(prepare, agent or verifier). All other requests go to the model gateway, and the door reads only their heads.

Invariants: between two phases, no connection to another machine is open; no sandbox exceeds the limits of the settings;
the recorded replies are bounded in size.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.destinations import Phase
from outrider.sandbox.network.dialer import Dialer
from outrider.sandbox.network.proxy import (
    CHUNK,
    WAITS,
    ConnectionPool,
    LimitExceeded,
    Proxy,
    ProxyRoute,
    ProxyServer,
    ProxyWaits,
    put,
)
from outrider.sandbox.network.record import NetworkRecord, NetworkReplay
from outrider.sandbox.network.requests import MAX_HEAD, NotAllowed, NotPassedOn, RequestHead, body_length
from outrider.sandbox.network.rules import Allowed, NetworkRules
from outrider.sandbox.network.shared import LEAST_PAUSE, SANDBOX_RATE, BytePace
from outrider.spec import MEBIBYTE

CONNECTIONS = 32
"""Maximum number of simultaneous connections from one sandbox to other machines."""
MAX_CLIENTS = 256 + CONNECTIONS
"""Maximum number of simultaneous connections to one door: 256 for the model gateway, and CONNECTIONS for other
machines."""
MAX_PLACES = 256
"""Maximum number of servers with their own `ServerUse` in each phase. All further servers share one `ServerUse`,
because a program may request any number of host names."""
OTHERS = "other servers"
NOTE_SECONDS = 5.0
"""Minimum seconds between two reports on the same server. `Door.follow` sets the function that receives the reports."""


class ServerUse(msgspec.Struct, kw_only=True):
    """Statistics of a sandbox's requests to one server in one phase. Times are seconds since the epoch. Requests are
    numbered from 1.

    `server`: the server as `host:port`.
    `sent`, `received`: numbers of bytes.
    `refusal`, `failure`: the reasons of the last refusal and of the last failure.
    `last_failed`: the number of the last request that failed, or 0. Failures that a program in the sandbox can have
        caused do not count. The number stays 0 for a server that neither the task nor the operator names exactly.
    `last_reached`: the number of the last request that the server answered, or 0. After `Door.forget_failures`, it is
        the number of the next request.
    """

    phase: Phase
    server: str
    start: float
    end: float
    requests: int = 0
    sent: int = 0
    received: int = 0
    refused: int = 0
    failed: int = 0
    refusal: str = ""
    failure: str = ""
    last_failed: int = 0
    last_reached: int = 0

    @property
    def broken(self) -> bool:
        return 0 < self.last_failed >= self.last_reached


class NetworkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for the traffic of one sandbox with other machines: bytes received, bytes sent, and number of requests.
    Traffic with the model gateway does not count."""

    received: int
    sent: int
    requests: int


class Door:
    """The door of one sandbox. `open(path)` starts to accept connections, and `close()` stops."""

    def __init__(
        self,
        allowed: Mapping[Phase, Allowed],
        dialer: Dialer,
        *,
        gateway: Path,
        endpoint: str,
        limits: NetworkLimits,
        pace: BytePace | None = None,
        connections: ConnectionPool | None = None,
        record: bool = False,
        replay: Path | None = None,
        waits: ProxyWaits = WAITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a closed door. Blocks while `replay` is read. Raises RuntimeUnavailable if it cannot be read.

        `gateway`: the path of the model gateway's socket.
        `endpoint`: the gateway's URL inside the sandbox.
        `pace`, `connections`: limits that all sandboxes of the node share.
        `record`: whether to record the replies of servers.
        `replay`: a file of recorded replies. If it is given, the door contacts no server.
        """
        self._allowed = allowed
        self._gateway = gateway
        self._endpoint = endpoint
        self._limits = limits
        self._clock = clock
        self.record = NetworkRecord(lambda: self._phase) if record else None
        archive = self.record if replay is None else NetworkReplay.read(replay, lambda: self._phase)
        self._proxy = Proxy(self, dialer, archive=archive, waits=waits)
        self._server = ProxyServer(self._serve, most=MAX_CLIENTS, pool=connections, head_seconds=waits.head)
        self._path: Path | None = None
        self._held = AsyncExitStack()
        self._phase: Phase | None = None
        self._open: set[asyncio.Task[None]] = set()
        """The tasks of connections to other machines."""
        self._passages: set[DoorPassage] = set()
        self._paces = [BytePace(SANDBOX_RATE), *([pace] if pace is not None else [])]
        self._totals = {"received": 0, "sent": 0, "requests": 0}
        self.uses: dict[tuple[Phase, str], ServerUse] = {}
        self._noted: dict[tuple[Phase, str], float] = {}
        self._note: Callable[[ServerUse], None] = lambda use: None

    async def open(self, path: Path) -> None:
        """Start to accept connections at a Unix socket."""
        self._path = path
        # A socket's path has at most 107 bytes. /proc/self/fd gives a short path to the socket's folder.
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await self._held.enter_async_context(self._server.at(f"/proc/self/fd/{folder}/{path.name}"))
        finally:
            os.close(folder)

    async def close(self) -> None:
        """Close all connections and remove the socket. May be called more than once."""
        self._phase = None
        try:
            await shielded(self._held.aclose)
        finally:
            if self._path is not None:
                with suppress(OSError):
                    os.unlink(self._path)

    async def enter(self, phase: Phase | None) -> None:
        """Begin a phase, and close the connections of the previous phase. With None, the sandbox has no network until
        the next phase."""
        if phase is self._phase:
            return
        self._phase = phase
        current = asyncio.current_task()
        tasks = [task for task in self._open if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def follow(self, note: Callable[[ServerUse], None]) -> Callable[[], None]:
        """Call `note` with the statistics of each server, now and after each change. Returns a function that calls
        `note` one last time for each server and then ends the calls."""
        for use in self.uses.values():
            note(use)
        self._note = note

        def unfollow() -> None:
            self._note = lambda use: None
            for use in self.uses.values():
                note(use)

        return unfollow

    def broken(self, *phases: Phase) -> str | None:
        """Return why a server is broken in one of the phases, or None. A server is broken if the last request to it has
        failed or has waited too long. A server that only a pattern (`*.example.com`) allows is never broken, because a
        program may have invented its name."""
        for passage in self._passages:
            passage.judge()
        return next((use.failure for use in self.uses.values() if use.broken and use.phase in phases), None)

    def forget_failures(self) -> None:
        """Forget the failed requests of the grading, because the grading starts again. A request that is still running
        cannot mark its server as broken any more."""
        for use in self.uses.values():
            if use.phase is Phase.VERIFIER:
                use.last_failed, use.last_reached = 0, use.requests + 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        if (own := self._gateways_head(head)) is not None:
            other = await self._to_gateway(reader, writer, own)
            if other is None:
                return
            head = other
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._proxy.serve(reader, writer, head)
        finally:
            self._open.discard(task)

    def _gateways_head(self, head: bytes) -> bytes | None:
        """Return the head to send to the model gateway, or None if the request is for another server. Some clients
        ignore NO_PROXY, and request even the gateway by its absolute URL or with CONNECT. For CONNECT, the returned
        head is empty, because the gateway gets no CONNECT request."""
        method, _, rest = head.partition(b" ")
        url = f"{self._endpoint}/".encode()
        if method == b"CONNECT":
            return b"" if rest.startswith(url.removeprefix(b"http://").removesuffix(b"/") + b" ") else None
        if rest.startswith(url):
            return method + b" " + rest[len(url) - 1 :]
        return head if rest.startswith(b"/") else None

    async def _to_gateway(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> bytes | None:
        """Send `head` to the model gateway, and then forward the connection. An empty `head` means a CONNECT request
        for the gateway. Returns the head of the first request for another server, or None.

        The gateway and the proxy have the same address, so a client such as Bun may use one connection for both. Such a
        client requests another server only after it has received all replies of the gateway.
        """
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(self._gateway, limit=MAX_HEAD)
        except OSError:
            return None
        try:
            async with asyncio.TaskGroup() as group:
                replies = group.create_task(relay(server_reader, writer))
                other = await self._send_requests(reader, writer, server_writer, head)
                if other is not None:
                    replies.cancel()
        finally:
            server_writer.close()
        return other

    async def _send_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: asyncio.StreamWriter, head: bytes
    ) -> bytes | None:
        """Send the requests of a connection to the model gateway, and return the same as `_to_gateway`. After a CONNECT
        request, or a head that does not show where its request ends, all further bytes go to the gateway unchecked."""
        try:
            while head:
                await put(server, head)
                left = body_length(head)
                if left is None:
                    break
                while left and (data := await reader.read(min(CHUNK, left))):
                    left -= len(data)
                    await put(server, data)
                try:
                    following = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError as error:
                    await put(server, error.partial)
                    break
                except asyncio.LimitOverrunError:
                    break
                own = self._gateways_head(following)
                if own is None:
                    return following
                head = own
            else:
                await put(writer, b"HTTP/1.1 200 Connection established\r\n\r\n")
        except OSError:
            end_input(server)
        else:
            await relay(reader, server)
        return None

    def admit(self, request: RequestHead) -> DoorPassage:
        """See `ProxyGate`."""
        phase = self._phase
        if phase is None:
            raise NotAllowed("the sandbox has no network now: it has one only while it is prepared, runs or grades")
        use = self._use(phase, request.place)
        use.end = self._clock()
        try:
            if len(self._open) > CONNECTIONS:
                raise NotPassedOn("429 Too Many Requests", f"a sandbox has at most {CONNECTIONS} connections at once")
            route = self._allowed[phase].route(request)
            for name, total in self._totals.items():
                if total >= getattr(self._limits, name):
                    raise NotPassedOn("429 Too Many Requests", self._exceeded(name))
        except NotPassedOn as error:
            self._refused(use, str(error))
            raise
        self._totals["requests"] += 1
        use.requests += 1
        passage = DoorPassage(self, use, route)
        self._passages.add(passage)
        self._changed(use)
        return passage

    def refuse(self, request: RequestHead, reason: str) -> None:
        """See `ProxyGate`."""
        if self._phase is not None:
            self._refused(self._use(self._phase, request.place), reason)

    def count(self, use: ServerUse, name: str, number: int) -> None:
        """Add `number` bytes to two totals: that of the server and that of the sandbox. `name` is "sent" or "received".
        Raises LimitExceeded if the sandbox's total then exceeds its limit."""
        self._totals[name] += number
        setattr(use, name, getattr(use, name) + number)
        use.end = self._clock()
        if self._totals[name] > getattr(self._limits, name):
            self._refused(use, self._exceeded(name))
            raise LimitExceeded
        if use.end - self._noted.get((use.phase, use.server), 0.0) > NOTE_SECONDS:
            self._changed(use)

    async def pause(self, number: int) -> None:
        seconds = max(pace.pause(number) for pace in self._paces)
        if seconds > LEAST_PAUSE:
            await asyncio.sleep(seconds)

    def ended(self, passage: DoorPassage) -> None:
        self._passages.discard(passage)
        passage.use.end = self._clock()
        self._changed(passage.use, soon=False)

    def _exceeded(self, name: str) -> str:
        most = getattr(self._limits, name)
        if name == "requests":
            return f"the sandbox has used up its {most} requests: the operator's setting is network.requests"
        setting = "download_mb" if name == "received" else "upload_mb"
        return f"the sandbox has {name} its {most // MEBIBYTE} MiB: the operator's setting is network.{setting}"

    def _refused(self, use: ServerUse, reason: str) -> None:
        use.refused += 1
        use.refusal = reason
        self._changed(use, soon=use.refused == 1)

    def _use(self, phase: Phase, server: str) -> ServerUse:
        key = phase, server
        if key not in self.uses and sum(one is phase for one, _ in self.uses) >= MAX_PLACES:
            key = phase, OTHERS
        if key not in self.uses:
            now = self._clock()
            self.uses[key] = ServerUse(phase=phase, server=key[1], start=now, end=now)
        return self.uses[key]

    def _changed(self, use: ServerUse, *, soon: bool = True) -> None:
        """Report a server's statistics to the function of `follow`, at most once in NOTE_SECONDS for each server. If
        `soon` is true, the first request or refusal is reported at once."""
        key = use.phase, use.server
        now = self._clock()
        last = self._noted.get(key)
        if last is None or now - last > NOTE_SECONDS or (soon and use.requests + use.refused == 1):
            self._noted[key] = now
            self._note(use)


class DoorPassage:
    """See `Passage`."""

    def __init__(self, door: Door, use: ServerUse, route: ProxyRoute) -> None:
        self.route = route
        self.use = use
        self._door = door
        self._number = use.requests
        self._wait: ServerWait | None = None

    def sent(self, number: int) -> None:
        self._door.count(self.use, "sent", number)

    def received(self, number: int) -> None:
        self._door.count(self.use, "received", number)

    async def pause(self, number: int) -> None:
        await self._door.pause(number)

    def failed(self, reason: str, *, blameless: bool) -> None:
        self.use.failed += 1
        self.use.failure = reason[:300]
        if blameless and self.route.server.named:
            self.use.last_failed = max(self.use.last_failed, self._number)

    def reached(self) -> None:
        self.use.last_reached = max(self.use.last_reached, self._number)

    def set_wait(self, reason: str | None, *, blameless: bool = False, patience: float = 0.0) -> None:
        self._wait = None if reason is None else ServerWait(reason, blameless, time.monotonic() + patience)

    def judge(self) -> None:
        if (wait := self._wait) is not None and time.monotonic() >= wait.until:
            self._wait = None
            self.failed(wait.reason, blameless=wait.blameless)

    def close(self) -> None:
        self.judge()
        self._door.ended(self)


class ServerWait(msgspec.Struct, frozen=True):
    """A request that waits for its server. If it still waits at the time `until` of the monotonic clock, the server has
    failed. `reason` describes this failure, and `blameless` is True if no program in the sandbox can have caused it."""

    reason: str
    blameless: bool
    until: float


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy all bytes from `reader` to `writer`. At the end, the receiver gets an end of file."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            await put(writer, data)
    end_input(writer)


def end_input(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()


def limits_of(rules: NetworkRules) -> NetworkLimits:
    settings = rules.settings
    return NetworkLimits(
        received=settings.download_mb * MEBIBYTE, sent=settings.upload_mb * MEBIBYTE, requests=settings.requests
    )
