"""The proxy for image builds. Through it, RUN steps reach the hosts that the operator allows.

The sandbox of a build has no other network. The proxy has the address that the model gateway has in other sandboxes
(`Runtime.endpoint`). The proxy connects to an allowed host directly, or through the operator's own HTTP proxy if this
process's environment variables name one.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from outrider.destinations import PORTS, Destination
from outrider.environment import variables
from outrider.errors import InvalidField
from outrider.sandbox.network.addresses import Address
from outrider.sandbox.network.dialer import Dialer, ProxiedServer
from outrider.sandbox.network.proxy import Proxy, ProxyRoute, ProxyServer
from outrider.sandbox.network.requests import NotAllowed, RequestHead

MAX_CONNECTIONS = 256
MAX_REFUSED = 32
"""Maximum number of refused hosts to remember. The hint of a failed build lists them."""
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?(:[0-9]{1,5})?")
INDEXES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX"),
    *("NPM_CONFIG_REGISTRY", "npm_config_registry", "GOPROXY", "CARGO_REGISTRIES_CRATES_IO_INDEX"),
)
"""Environment variables that contain the URL of a package index. If the index's host is allowed, RUN steps get the
variable from this process."""


def checked_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Convert hosts (`name` or `name:port`) to lower case. Raises InvalidField for anything that is not a host."""
    found = frozenset(host.lower() for host in hosts)
    for host in sorted(found):
        try:
            if not HOST.fullmatch(host):
                raise ValueError(host)
            Destination.read(host)
        except ValueError as error:
            raise InvalidField(
                f"{host!r} is no host",
                field="allow_host",
                hint="give a name without https:// and without a path, such as mirror.lan:3141",
            ) from error
    return found


def index_variables(hosts: frozenset[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of INDEXES whose URL is on one of the hosts. By default, `environ` is this process's
    environment. A URL with a user name or password is left out, because the programs of a RUN step must not get the
    operator's passwords."""
    environ = variables() if environ is None else environ
    found = {}
    for name in INDEXES:
        with suppress(ValueError):  # the value may not be a URL, or its port not a number
            url = urlsplit(environ.get(name, ""))
            port = url.port or (443 if url.scheme == "https" else 80)
            if url.hostname and url.username is None and allowed(hosts, url.hostname, port):
                found[name] = environ[name]
    return found


def allowed(hosts: frozenset[str], host: str, port: int) -> bool:
    return any(Destination.read(one).matches(host.lower().rstrip("."), port) for one in hosts)


class BuildProxy:
    """The proxy of one build. `environ` may name the operator's HTTP proxy (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and the
    hosts to reach without it (NO_PROXY). The default is this process's environment."""

    def __init__(self, hosts: frozenset[str], environ: Mapping[str, str] | None = None) -> None:
        self._hosts = hosts
        self._refused: set[str] = set()
        self._proxy = Proxy(self, Dialer(resolve, environ=environ), name="outrider image build")

    @property
    def refused(self) -> frozenset[str]:
        """Up to MAX_REFUSED hosts that the proxy has refused, as `name:port`. The port is left out if it is in
        PORTS."""
        return frozenset(self._refused)

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        """Accept connections at a Unix socket. All connections are closed at the end of the `with` block."""
        async with ProxyServer(self._proxy.serve, most=MAX_CONNECTIONS, name="outrider image build").at(path):
            yield

    def admit(self, request: RequestHead) -> BuildPassage:
        """See `ProxyGate`."""
        if not allowed(self._hosts, request.host, request.port):
            shown = request.host if request.port in PORTS else request.place
            if HOST.fullmatch(shown) and len(self._refused) < MAX_REFUSED:
                self._refused.add(shown)
            raise NotAllowed(f"no --allow-host names {shown}")
        # The operator names every allowed host of a build, so private addresses are allowed.
        return BuildPassage(ProxyRoute(server=ProxiedServer(host=request.host, port=request.port, internal=True)))

    def refuse(self, request: RequestHead, reason: str) -> None:
        """See `ProxyGate`. Does nothing, because `admit` has allowed this request: an `--allow-host` option names its
        host. `refused` lists only hosts that no such option names."""


class BuildPassage:
    """An allowed request of a build. It has no limits."""

    def __init__(self, route: ProxyRoute) -> None:
        self.route = route

    def sent(self, number: int) -> None: ...
    def received(self, number: int) -> None: ...
    async def pause(self, number: int) -> None: ...
    def failed(self, reason: str, *, blameless: bool) -> None: ...
    def reached(self) -> None: ...
    def set_wait(self, reason: str | None, *, blameless: bool = False, patience: float = 0.0) -> None: ...
    def judge(self) -> None: ...
    def close(self) -> None: ...


async def resolve(host: str, port: int, named: bool) -> Sequence[Address]:
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ip_address(address) for address in dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos)]
