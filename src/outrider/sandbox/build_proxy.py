"""The HTTP proxy through which the RUN steps of a build reach the hosts that the operator allows.

The sandbox of a build has no network. A program in the sandbox reaches this proxy at the sandbox's endpoint. The proxy
connects to an allowed host directly, or through the operator's own proxy, which this process's variables name.
Invariants: a connection is made only to an allowed host and port; each connection carries one request, whose head has
one meaning for strict and for lenient servers; the address and the password of the operator's own proxy are not passed
into the sandbox.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from outrider.environment import variables
from outrider.errors import InvalidField

MAX_HEAD = 64 << 10
HEAD_SECONDS = 60.0
CONNECT_SECONDS = 30.0
CHUNK = 64 << 10
MAX_REFUSED = 32
"""Maximum number of refused hosts kept for the hint."""
PORTS = (80, 443)
"""The allowed ports of a host given without a port."""
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?(:[0-9]{1,5})?")
REQUEST_LINE = re.compile(r"([A-Z-]+) ([\x21-\x7e\x80-\xff]+) (HTTP/1\.[01])")
FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
"""A header line: no space before the colon, no continuation of an earlier line, and no bare CR or LF."""
NOT_PASSED = ("host", "connection", "proxy-connection", "keep-alive", "proxy-authorization")
"""Headers that the proxy removes or replaces."""
INDEXES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX"),
    *("NPM_CONFIG_REGISTRY", "npm_config_registry", "GOPROXY", "CARGO_REGISTRIES_CRATES_IO_INDEX"),
)
"""Variables with the URL of a package index. RUN gets each of them whose value in this process has an allowed host."""
LOCAL = "localhost,127.0.0.1,::1"


def checked_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return the hosts (`name` or `name:port`) in lower case. Raises InvalidField for any other text."""
    found = frozenset(host.lower() for host in hosts)
    for host in sorted(found):
        if not HOST.fullmatch(host):
            raise InvalidField(
                f"{host!r} is no host",
                field="allow_host",
                hint="give a name without https:// and without a path, such as mirror.lan:3141",
            )
    return found


def proxy_variables(endpoint: str) -> dict[str, str]:
    """Return the variables that make programs in a sandbox use the proxy at the sandbox's endpoint."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, endpoint), "no_proxy": LOCAL, "NO_PROXY": LOCAL}


def index_variables(hosts: frozenset[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `environ` (by default this process's) with the URL of an index on one of the hosts. A URL
    with a user name or a password is left out, because the author of a Dockerfile must not read the operator's
    passwords."""
    environ = variables() if environ is None else environ
    found = {}
    for name in INDEXES:
        with suppress(ValueError):  # the value is no URL, or its port is no number
            url = urlsplit(environ.get(name, ""))
            port = url.port or (443 if url.scheme == "https" else 80)
            if url.hostname and url.username is None and allowed(hosts, url.hostname, port):
                found[name] = environ[name]
    return found


def allowed(hosts: frozenset[str], host: str, port: int) -> bool:
    host = host.lower().rstrip(".")
    return f"{host}:{port}" in hosts or (host in hosts and port in PORTS)


class NotPassedOn(Exception):
    """A request that the proxy does not pass on. `status` is the reply's status code with its reason phrase."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Request(msgspec.Struct, frozen=True):
    """The head of a request. `fields` are the header lines to pass on, `length` is the size of the body in bytes."""

    method: str
    target: str
    version: str
    fields: list[str]
    length: int

    @property
    def tunnel(self) -> bool:
        return self.method == "CONNECT"


class BuildProxy:
    """The proxy of one build. The variables `environ`, by default this process's, may name the operator's own proxy
    (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and the hosts that do not need it (NO_PROXY)."""

    def __init__(self, hosts: frozenset[str], environ: Mapping[str, str] | None = None) -> None:
        self._hosts = hosts
        self._environ = variables() if environ is None else environ
        self._refused: set[str] = set()

    @property
    def refused(self) -> frozenset[str]:
        """The hosts to which the proxy has refused connections, at most MAX_REFUSED, each with its port unless the port
        is one of PORTS."""
        return frozenset(self._refused)

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        """Serve at a Unix socket. All connections are closed when the block ends."""
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._serve(reader, writer)
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_unix_server(accept, path, limit=MAX_HEAD)
        try:
            yield
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        try:
            request = read_request(head)
            server_reader, server_writer, first = await self._reached(request)
        except (NotPassedOn, ValueError) as error:
            status = error.status if isinstance(error, NotPassedOn) else "400 Bad Request"
            body = f"outrider image build: {error}\n".encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
            with suppress(OSError):
                await writer.drain()
            return
        try:
            if request.tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            server_writer.write(first)
            async with asyncio.TaskGroup() as group:
                group.create_task(relay(reader, server_writer, None if request.tunnel else request.length))
                group.create_task(relay(server_reader, writer))
        finally:
            server_writer.close()

    async def _reached(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Connect to the host of a request. Returns the connection, and the bytes to send first. Raises NotPassedOn,
        and ValueError for a malformed target."""
        tunnel = request.tunnel
        url = urlsplit(f"//{request.target}" if tunnel else request.target)
        if not tunnel and url.scheme != "http":
            raise NotPassedOn("400 Bad Request", f"{request.target[:200]} is no http:// address")
        host, port = (url.hostname or "").rstrip("."), url.port or (443 if tunnel else 80)
        if not allowed(self._hosts, host, port):
            shown = host if port in PORTS else f"{host}:{port}"
            if HOST.fullmatch(shown) and len(self._refused) < MAX_REFUSED:
                self._refused.add(shown)
            raise NotPassedOn("403 Forbidden", f"no --allow-host names {shown[:300]}")
        upstream = self._upstream(tunnel, host)
        origin = host if port == 80 else f"{host}:{port}"
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if upstream is None:
                    connection = await asyncio.open_connection(host, port)
                    return *connection, b"" if tunnel else one_request(request, path, origin)
                reader, writer = await asyncio.open_connection(upstream[0], upstream[1])
                if not tunnel:
                    # The target is written anew, because the operator's proxy may read the client's text differently.
                    return reader, writer, one_request(request, f"http://{origin}{path}", origin, upstream[2])
                try:
                    writer.write(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{upstream[2]}\r\n".encode())
                    status = (
                        (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1").partition(" ")[2]
                    )
                    if not status.startswith("200"):
                        raise NotPassedOn(
                            "502 Bad Gateway", f"this machine's proxy does not reach {host}:{port}: {status[:200]}"
                        )
                except BaseException:
                    writer.close()
                    raise
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise NotPassedOn(
                "502 Bad Gateway", f"cannot reach {host}:{port}: {error or type(error).__name__}"
            ) from error
        return reader, writer, b""

    def _upstream(self, tunnel: bool, host: str) -> tuple[str, int, str] | None:
        """Return the operator's own proxy for a host (its name, its port, and the header line with its password, or
        ""), or None for a direct connection. Raises NotPassedOn for a proxy that is not an HTTP proxy."""
        exempt = self._environ.get("no_proxy") or self._environ.get("NO_PROXY") or ""
        for name in filter(None, (part.strip().lstrip(".").lower() for part in exempt.split(","))):
            if name == "*" or host == name or host.endswith(f".{name}"):
                return None
        scheme = "https" if tunnel else "http"
        for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY"):
            if value := self._environ.get(name):
                url = urlsplit(value if "://" in value else f"http://{value}")
                if url.scheme != "http" or not url.hostname:
                    raise NotPassedOn(
                        "502 Bad Gateway", f"the variable {name} of this machine is no http:// address of a proxy"
                    )
                word = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
                header = f"Proxy-Authorization: Basic {b64encode(word.encode()).decode()}\r\n" if url.username else ""
                return url.hostname, url.port or 80, header
        return None


def read_request(head: bytes) -> Request:
    """Read the head of a request. Raises NotPassedOn if a lenient server may find the end of the head or of the body
    elsewhere: for a malformed line, a bare CR or LF, and a length of the body that is unclear."""
    first, *fields = head[:-4].decode("latin-1").split("\r\n")
    line = REQUEST_LINE.fullmatch(first)
    if line is None:
        raise NotPassedOn("400 Bad Request", f"{first[:200]!r} is no request of HTTP/1.1")
    for field in fields:
        if not FIELD.fullmatch(field):
            raise NotPassedOn("400 Bad Request", f"{field[:200]!r} is no header line")
    named = [(name.lower(), value.strip(" \t")) for name, _, value in (field.partition(":") for field in fields)]
    if any(name == "transfer-encoding" for name, _ in named):
        raise NotPassedOn("411 Length Required", "a body needs a Content-Length; Transfer-Encoding is not supported")
    lengths = [value for name, value in named if name == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,18}", length) for length in lengths):
        raise NotPassedOn("400 Bad Request", "Content-Length is not one number")
    kept = [field for field, (name, _) in zip(fields, named, strict=True) if name not in NOT_PASSED]
    return Request(line[1], line[2], line[3], kept, int(lengths[0]) if lengths else 0)


def one_request(request: Request, target: str, origin: str, header: str = "") -> bytes:
    """Return the head of a request to `target` at the host `origin`, with the line `header`, and with `Connection:
    close`."""
    lines = [f"{request.method} {target} {request.version}", f"Host: {origin}", *request.fields, "Connection: close"]
    return ("\r\n".join(lines) + f"\r\n{header}\r\n").encode("latin-1")


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None = None) -> None:
    """Copy the bytes of one direction to its end, and then end the other side's input. Bytes beyond `limit` are
    dropped."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            if limit is not None:
                data = data[:limit]
                limit -= len(data)
            writer.write(data)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
