"""Network rules: which destinations a sandbox may reach. A task asks for destinations, and the operator's settings must
allow them. Results depend only on the arguments and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from outrider.config import Config, NetworkConfig
from outrider.destinations import Destination, Phase, not_covered
from outrider.errors import InvalidField
from outrider.sandbox.network.dialer import ProxiedServer
from outrider.sandbox.network.proxy import ProxyRoute
from outrider.sandbox.network.requests import NotAllowed, RequestHead, place_of
from outrider.spec import RUNTIME, NetworkSpec

READS = frozenset({"GET", "HEAD"})
"""The HTTP methods that a package mirror accepts. Packages can be downloaded but not published."""
MIRROR_SETTINGS = {"pip": "pip_index", "npm": "npm_registry", "apt": "apt_hosts"}
"""For each package mirror, the setting in section [network] that names its servers. If the setting is empty, the mirror
is not available."""
INSIDE = "{}.mirror.internal"
"""The host name of a package mirror inside a sandbox. Only the proxy understands this name."""
HINT = (
    "the operator allows destinations with the setting network.allow, or network.tenants for one tenant; a Harbor task"
    " runs without its network with --offline, or environment_overrides network_mode no-network"
)


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """A mirror of a package index. Sandboxes reach it by host names that only the proxy understands.

    `servers`: the servers of the index and of its files, by host name in the sandbox.
    `replaced`: the addresses to replace in pages; see `ProxyRoute.replaced`.
    `variables`: the environment variables that make package managers use the mirror.
    """

    servers: Mapping[str, ProxiedServer]
    replaced: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]

    def route(self, host: str) -> ProxyRoute:
        return ProxyRoute(server=self.servers[host], replaced=self.replaced, methods=READS)


class Allowed(msgspec.Struct, frozen=True):
    """The destinations that one sandbox may reach in one phase."""

    destinations: tuple[Destination, ...]
    mirrors: tuple[tuple[str, Mirror], ...]
    apt: bool
    settings: NetworkConfig

    def route(self, request: RequestHead) -> ProxyRoute:
        """Return the server for a request. Raises NotAllowed if the request's destination is not allowed."""
        host, port = request.host, request.port
        if not request.tunnel and port == 80:
            for _, mirror in self.mirrors:
                if host in mirror.servers:
                    return mirror.route(host)
            if self.apt and host in self.settings.apt_hosts:
                server = server_of(f"http://{host}", self.settings, proxy=self.settings.apt_cache)
                return ProxyRoute(server=server, methods=READS)
        matching = [one for one in self.destinations if one.matches(host, port)]
        if not matching:
            raise NotAllowed(f"task.runtime.network does not allow {request.place} in this phase")
        internal, named = is_internal(host, port, self.settings), any(one.exact for one in matching)
        return ProxyRoute(server=ProxiedServer(host=host, port=port, internal=internal, named=named))


class NetworkRules:
    """The operator's network rules for all sandboxes of a node. `service_url` is the URL at which the node reaches the
    service, or None on the service's own machine."""

    def __init__(self, config: Config | None = None, *, service_url: str | None = None) -> None:
        self.settings = NetworkConfig() if config is None else config.network
        self.own = frozenset() if config is None else own_places(config, service_url)

    def may_ask(self, tenant: str | None) -> list[str]:
        """Return the destinations that a tenant's tasks may ask for. If `tenant` is None, return the destinations of
        all tenants together."""
        found = list(self.settings.allow)
        for one in self.settings.tenants:
            if tenant is None or one.tenant == tenant:
                found += one.allow
        return found

    def check(self, spec: NetworkSpec | None, *, tenant: str | None, whose: str | None, field: str) -> None:
        """Raise InvalidField for a destination that the tenant's tasks may not reach. `whose` names the tenant in the
        error message. If `whose` is None, the message does not list the allowed destinations."""
        if spec is None:
            return
        may = self.may_ask(tenant)
        for name, asked in spec.lists():
            if refused := not_covered(asked, may):
                allowed = f"only {', '.join(may)}" if may else "nothing"
                if whose is None:  # any tenant may get this message: do not list what others may reach
                    why = "is allowed to no task any more"
                else:
                    why = f"is not allowed: the operator allows {whose} {allowed}"
                raise InvalidField(
                    f"{asked[refused[0]]!r} {why}",
                    field=f"{field}.network.{name}.{refused[0]}",
                    hint=HINT,
                )
            for index, text in enumerate(asked):
                setting = MIRROR_SETTINGS.get(Destination.read(text).mirror)
                if setting is not None and not getattr(self.settings, setting):
                    raise InvalidField(
                        f"{text!r} has no server here",
                        field=f"{field}.network.{name}.{index}",
                        hint=f"the operator names one with the setting network.{setting}",
                    )

    def allowed(self, spec: NetworkSpec) -> dict[Phase, Allowed]:
        """Return the allowed destinations of each phase. Raises InvalidField for a destination that the settings do not
        allow to any tenant, for example because the settings have changed."""
        self.check(spec, tenant=None, whose=None, field=RUNTIME)
        return {phase: self._allowed(spec.of(phase)) for phase in Phase}

    def _allowed(self, asked: Sequence[str]) -> Allowed:
        found = [Destination.read(text) for text in asked]
        names = {one.mirror for one in found if one.mirror}
        mirrors = tuple((name, self.mirror(name)) for name in sorted(names - {"apt"}))
        return Allowed(tuple(one for one in found if not one.mirror), mirrors, "apt" in names, self.settings)

    def mirror(self, name: str) -> Mirror:
        """Return the package mirror `pip` or `npm`, with the servers from the settings."""
        url = urlsplit(getattr(self.settings, MIRROR_SETTINGS[name]))
        inside = INSIDE.format(name)
        urls = {inside: url}
        if name == "pip" and self.settings.pip_files is not None:
            urls[f"files.{inside}"] = urlsplit(self.settings.pip_files)
        servers = {alias: server_of(one.geturl(), self.settings, internal=True) for alias, one in urls.items()}
        replaced = [(f"{one.scheme}://{one.netloc}", f"http://{alias}") for alias, one in urls.items()]
        at = f"http://{inside}{url.path or '/'}"
        hosts = " ".join(servers)
        variables = {
            "pip": {
                "PIP_INDEX_URL": at,
                "PIP_TRUSTED_HOST": hosts,
                "UV_DEFAULT_INDEX": at,
                "UV_INSECURE_HOST": hosts,
            },
            "npm": {"NPM_CONFIG_REGISTRY": at, "npm_config_registry": at, "YARN_NPM_REGISTRY_SERVER": at},
        }
        return Mirror(servers=servers, replaced=tuple(replaced), variables=variables[name])

    def variables(self, spec: NetworkSpec) -> dict[str, str]:
        """Return the environment variables of all package mirrors that a task uses."""
        found: dict[str, str] = {}
        for name in sorted(spec.mirrors - {"apt"}):
            found |= self.mirror(name).variables
        return found


def is_internal(host: str, port: int, settings: NetworkConfig) -> bool:
    """Return whether the setting network.internal lists exactly this host and port."""
    return place_of(host, port) in {place.lower() for place in settings.internal}


def server_of(url: str, settings: NetworkConfig, *, internal: bool = False, proxy: str | None = None) -> ProxiedServer:
    """Return the server of an http:// or https:// URL that the operator has configured."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    internal = internal or is_internal(host, port, settings)
    return ProxiedServer(host=host, port=port, tls=tls, internal=internal, named=True, proxy=proxy)


def own_places(config: Config, service_url: str | None = None) -> frozenset[str]:
    """Return the service's own addresses and host names as `host:port`. The host `*` stands for every address of this
    machine."""
    urls = [urlsplit(url) for url in (*config.advertised_urls.values(), *([service_url] if service_url else []))]
    places = {place_of(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)) for url in urls}
    return frozenset({f"*:{config.port}", *places})
