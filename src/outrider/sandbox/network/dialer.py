"""Opens the proxy's connections to servers, directly or through the operator's own HTTP proxy.

Invariants: a direct connection resolves its host name once, checks all addresses of the host, and goes to one of the
checked addresses. A sandbox never learns the address or the password of the operator's HTTP proxy.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import cast
from urllib.parse import unquote, urlsplit

import msgspec

from outrider.destinations import is_address
from outrider.environment import variables
from outrider.sandbox.network.addresses import Address, embedded_addresses, is_own, is_public, is_sensitive, plain
from outrider.sandbox.network.requests import MAX_HEAD, NotAllowed, Unreachable, place_of

CONNECT_SECONDS = 30.0
"""Maximum seconds to look up a server's name and to connect to it."""

Resolve = Callable[[str, int, bool], Awaitable[Sequence[Address]]]
"""A function that resolves a host name to addresses. Its arguments are the host's name, the port, and
`ProxiedServer.named`. Raises OSError."""


class ProxiedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server to connect to.

    `internal`: True if the operator has named this host and port, for example in network.internal or as a package
        index. The server may then have a private address.
    `named`: True if the task or the operator names exactly this host. A program in the sandbox may have invented any
        other host.
    `proxy`: the URL of the HTTP proxy to use. None means the proxy in this process's environment variables, and ""
        means a direct connection.
    """

    host: str
    port: int
    tls: bool = False
    internal: bool = False
    named: bool = False
    proxy: str | None = None

    @property
    def place(self) -> str:
        return place_of(self.host, self.port)


class ServerConnection(msgspec.Struct, frozen=True):
    """An open connection.

    `absolute`: True for an HTTP proxy, whose requests contain whole URLs.
    `header`: additional header lines for an HTTP proxy.
    `beneath`: the writer below TLS. It is kept here, because asyncio closes the connection of a writer without
        references.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    absolute: bool = False
    header: tuple[str, ...] = ()
    beneath: asyncio.StreamWriter | None = None

    def unsent(self) -> int:
        """Return how many bytes wait in this process to be sent. With TLS, both writers have a buffer."""
        writers = [self.writer] if self.beneath is None else [self.writer, self.beneath]
        return sum(writer.transport.get_write_buffer_size() for writer in writers)

    def drop(self) -> None:
        """Close the connection at once. Bytes that the server has not taken yet are discarded. A normal close would
        keep the connection open until the server has taken them, and so for ever if the server reads nothing."""
        abort(self.beneath or self.writer)


class Dialer:
    """Opens connections for one proxy.

    `environ` may name the operator's HTTP proxy (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and the hosts to reach without it
    (NO_PROXY). The default is this process's environment. `own` has the service's own addresses as `host:port`. The
    dialer never connects to them. Each `host` is an address, a name, or `*` for every address of this machine. A
    connection must be open within `seconds`.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        environ: Mapping[str, str] | None = None,
        own: Collection[str] = frozenset(),
        seconds: float = CONNECT_SECONDS,
    ) -> None:
        self._resolve = resolve
        self._environ = variables() if environ is None else environ
        self._own = frozenset(own)
        self._seconds = seconds
        self._tls: ssl.SSLContext | None = None

    async def connect(self, server: ProxiedServer, *, tunnel: bool) -> ServerConnection:
        """Connect to a server. Raises NotAllowed if one of its addresses is not allowed, and Unreachable if the
        connection fails."""
        try:
            async with asyncio.timeout(self._seconds):
                proxy = self._proxy(server, tunnel=tunnel)
                if proxy is None:
                    return await self._direct(server)
                return await self._through(proxy, server, tunnel=tunnel)
        except TimeoutError as error:
            raise Unreachable(f"cannot reach {server.place} within {self._seconds:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise Unreachable(f"cannot reach {server.place}: {_reason(error)}") from error

    async def _direct(self, server: ProxiedServer) -> ServerConnection:
        failure: OSError = OSError("the name has no address")
        clock = asyncio.get_running_loop().time
        end = clock() + self._seconds
        addresses = await self._checked(server)
        for number, address in enumerate(addresses):
            try:
                # Each address gets its share of the time, so that one that does not answer does not hide the others.
                async with asyncio.timeout((end - clock()) / (len(addresses) - number)):
                    connection = await self._open(str(address), server.port)
                    return await self._secured(connection, server.host) if server.tls else connection
            except OSError as error:  # TimeoutError is an OSError
                failure = error
        raise failure

    async def _checked(self, server: ProxiedServer) -> Sequence[Address]:
        """Return the addresses of a server. Raises NotAllowed if a connection to one of them is not allowed. Raises
        OSError if the host name cannot be resolved."""
        if server.place in self._own:
            raise NotAllowed(f"{server.place} is the service's own")
        if is_address(server.host):
            found: Sequence[Address] = [ip_address(server.host)]
        else:
            found = await self._resolve(server.host, server.port, server.named)
        services = await self._services(server.port)
        for address in found:
            if plain(address) in services or not self._may_reach(address, server):
                raise NotAllowed(f"{server.host} has an address that is private or this machine's own")
        return found

    async def _services(self, port: int) -> frozenset[Address]:
        """Return the addresses behind the service's own host names at this port. Names that cannot be resolved are
        ignored."""
        found: set[Address] = set()
        for host, _, own in (place.rpartition(":") for place in self._own):
            if own == str(port) and host != "*" and not host.startswith("[") and not is_address(host):
                with suppress(OSError):
                    found |= set(map(plain, await self._resolve(host, port, True)))
        return frozenset(found)

    def _may_reach(self, address: Address, server: ProxiedServer) -> bool:
        """Return whether the proxy may connect to this address of the server. Even for a server that the operator names
        (`internal`), a sensitive address is allowed only if the operator lists the address itself, because the owner of
        a name can let it resolve to any address."""
        at = plain(address)
        if any(place_of(str(one), server.port) in self._own for one in embedded_addresses(at)) or (
            f"*:{server.port}" in self._own and any(map(is_own, embedded_addresses(at)))
        ):
            return False
        if server.internal:
            return is_address(server.host) or not is_sensitive(at)
        return is_public(at)

    async def _through(self, proxy: str, server: ProxiedServer, *, tunnel: bool) -> ServerConnection:
        """Connect through an HTTP proxy, which resolves the host name itself. The server's addresses are checked only
        if this machine can resolve the name, too."""
        with suppress(OSError):  # many machines behind an HTTP proxy cannot resolve names
            await self._checked(server)
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        word = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
        header = (f"Proxy-Authorization: Basic {b64encode(word.encode()).decode()}",) if url.username else ()
        assert url.hostname is not None
        connection = await self._open(url.hostname, url.port or 80)
        if not tunnel and not server.tls:
            return ServerConnection(connection.reader, connection.writer, absolute=True, header=header)
        reader, writer = connection.reader, connection.writer
        try:
            lines = [f"CONNECT {server.place} HTTP/1.1", f"Host: {server.place}", *header]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            first = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1")
            status = first.partition(" ")[2]
            if not status.startswith("200"):
                raise Unreachable(f"this machine's proxy does not reach {server.place}: {status[:200]}")
        except BaseException:  # CancelledError is a BaseException
            writer.close()
            raise
        return await self._secured(connection, server.host) if server.tls else connection

    async def _open(self, host: str, port: int) -> ServerConnection:
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD)
        return ServerConnection(reader, writer)

    async def _secured(self, connection: ServerConnection, name: str) -> ServerConnection:
        """Add TLS to a connection. asyncio's implementation is used, because uvloop 0.23 loses the end of a reply if
        the reply is longer than the reader's buffer and the server then closes the connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(MAX_HEAD)
        writers: list[asyncio.StreamWriter] = []
        protocol = asyncio.StreamReaderProtocol(reader, lambda _, writer: writers.append(writer))
        begun = loop.create_future()
        try:
            secure = SSLProtocol(loop, protocol, await self._tls_context(), begun, server_hostname=name)
            transport = cast(asyncio.Transport, connection.writer.transport)
            transport.pause_reading()
            transport.set_protocol(secure)
            secure.connection_made(transport)
            transport.resume_reading()
            await begun
        except BaseException:  # CancelledError is a BaseException
            connection.writer.close()
            raise
        return ServerConnection(reader, writers[0], beneath=connection.writer)

    async def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS context that verifies servers' certificates. A thread creates it, because loading all root
        certificates takes some milliseconds."""
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls

    def _proxy(self, server: ProxiedServer, *, tunnel: bool) -> str | None:
        """Return the URL of the HTTP proxy for a server, or None for a direct connection. Raises Unreachable if a proxy
        variable of this machine is not an http:// address."""
        if server.proxy is not None:
            return server.proxy or None
        exempt = self._environ.get("no_proxy") or self._environ.get("NO_PROXY") or ""
        for name in filter(None, (part.strip().lstrip(".").lower() for part in exempt.split(","))):
            if name == "*" or server.host == name or server.host.endswith(f".{name}"):
                return None
        scheme = "https" if tunnel or server.tls else "http"
        for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"):
            if value := self._environ.get(name):
                url = urlsplit(value if "://" in value else f"http://{value}")
                if url.scheme != "http" or not url.hostname:
                    raise Unreachable(f"the variable {name} of this machine is no http:// address of a proxy")
                return value
        return None


def abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once, and discard the bytes that the other end has not taken yet. The connection may have
    ended already."""
    with suppress(AttributeError):  # asyncio raises it if the connection has ended by a normal close
        writer.transport.abort()


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
