"""Helpers: a door that resolves invented names, and servers on this machine behind the door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from outrider.config import Config
from outrider.destinations import Phase
from outrider.sandbox.network.addresses import Address
from outrider.sandbox.network.dialer import CONNECT_SECONDS, Dialer, Resolve
from outrider.sandbox.network.door import Door, limits_of
from outrider.sandbox.network.proxy import WAITS, ConnectionPool, ProxyWaits
from outrider.sandbox.network.rules import NetworkRules
from outrider.spec import NetworkSpec

ENDPOINT = "http://127.0.0.1:61080"
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Any]


class Server:
    """A server that replies to each connection with `reply`, or calls `answer` instead. `heard` lists the request heads
    that it received."""

    def __init__(self, reply: bytes, answer: Answer | None) -> None:
        self.heard: list[bytes] = []
        self._reply = reply
        self._answer = answer
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heard.append(head := await reader.readuntil(b"\r\n\r\n"))
            if self._answer is not None:
                await self._answer(reader, writer, head)
            else:
                writer.write(self._reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def a_server(reply: bytes = HELLO, answer: Answer | None = None) -> AsyncIterator[Server]:
    made = Server(reply, answer)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    async with server:
        made.port = server.sockets[0].getsockname()[1]
        yield made


class FakeNames:
    """Resolves names by a table, which lists for each name the addresses of its look-ups in order. The last addresses
    are repeated. `asked` lists the names that were looked up."""

    def __init__(self, table: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._table = {name: list(answers) for name, answers in table.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int, named: bool) -> Sequence[Address]:
        self.asked.append(host)
        answers = self._table.get(host)
        if not answers:
            raise OSError(-2, "Name or service not known")
        return [ip_address(address) for address in (answers.pop(0) if len(answers) > 1 else answers[0])]


@asynccontextmanager
async def a_door(
    folder: Path,
    *allow: str,
    names: Mapping[str, Sequence[Sequence[str]]] = {},
    phase: Phase | None = Phase.AGENT,
    spec: Mapping[str, Any] = {},
    name: str = "door",
    environ: Mapping[str, str] = {},
    port: int = 8700,
    connections: ConnectionPool | None = None,
    waits: ProxyWaits = WAITS,
    resolve: Resolve | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    **settings: Any,
) -> AsyncIterator[tuple[Door, FakeNames]]:
    """Open a door at `folder / name`. The operator allows all destinations of the task. `resolve` replaces look-ups in
    the table `names`. `settings` are further settings of the section `network`."""
    spec = {"allow": list(allow), **spec}
    asked = [text for value in spec.values() if isinstance(value, list) for text in value]
    config = Config.model_validate({"port": port, "network": {"allow": asked, **settings}})
    rules, fake = NetworkRules(config), FakeNames(names)
    network = NetworkSpec.model_validate(spec)
    door = Door(
        rules.allowed(network),
        Dialer(resolve or fake.resolve, environ=environ, own=rules.own, seconds=connect_seconds),
        gateway=folder / "gateway",
        endpoint=ENDPOINT,
        limits=limits_of(rules),
        connections=connections,
        record=network.record,
        replay=None if network.replay is None else folder / network.replay,
        waits=waits,
    )
    await door.open(folder / name)
    try:
        await door.enter(phase)
        yield door, fake
    finally:
        await door.close()


async def said(folder: Path, text: str | bytes, *, then: bytes = b"", name: str = "door", seconds: float = 10) -> str:
    """Send `text` to the door, and return its reply up to the end of the connection. `then` is sent after the first
    head of the reply. If the connection is reset, the result ends with "[reset]"."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_unix_connection(folder / name)
        try:
            writer.write(text.encode("latin-1") if isinstance(text, str) else text)
            first = b""
            if then:
                first = await reader.readuntil(b"\r\n\r\n")
                writer.write(then)
            try:
                return (first + await reader.read()).decode("latin-1")
            except ConnectionResetError:
                return f"{first.decode('latin-1')}[reset]"
        finally:
            writer.close()


def get(url: str, *fields: str) -> str:
    return "\r\n".join([f"GET {url} HTTP/1.1", *fields]) + "\r\n\r\n"


def connect(place: str) -> str:
    return f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n"


def chunks(text: str) -> str:
    """Return the text of a chunked body."""
    found, rest = "", text
    while size := int((line := rest.partition("\r\n"))[0], 16):
        found, rest = found + line[2][:size], line[2][size + 2 :]
    return found
