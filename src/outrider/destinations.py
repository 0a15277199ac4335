"""The network destinations that a sandbox may reach: patterns of hosts and ports, and named mirrors of package
registries.

A destination is written as `HOST`, `HOST:PORT`, `HOST:*` or `mirror:NAME`. HOST is a name, `*.NAME` for every name
below NAME, an IP address (IPv6 in brackets), or `*` for every host. A HOST without a port stands for ports 80 and 443.
Invariant: if destination A covers destination B, then A matches every host and port that B matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, StringConstraints

PORTS = frozenset({80, 443})
"""The ports of a destination that is written without a port."""
MIRROR = "mirror:"
MIRRORS = ("pip", "npm", "apt")
"""The names of the mirrors of package registries."""
NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""Matches a number. If the last label of a host name is a number, some resolvers read the name as an IPv4 address, for
example 127.1 or 0x7f000001."""
MAX_NAME = 253


class Phase(StrEnum):
    """The phases of a sandbox: the prepare steps, the agent's run, and the grading. Each can have its own
    destinations."""

    PREPARE = "prepare"
    AGENT = "agent"
    VERIFIER = "verifier"


class Destination(NamedTuple):
    """A parsed destination.

    host: "*" for every host, "*.NAME" for every name below NAME, else one host, in lower case. Empty for a mirror.
    ports: the ports; empty for every port.
    mirror: the name of the mirror; empty for a host."""

    host: str
    ports: frozenset[int] = PORTS
    mirror: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a destination. Raises ValueError if the text is not a destination."""
        lower = text.lower()
        if lower.startswith(MIRROR):
            mirror = lower.removeprefix(MIRROR)
            if mirror not in MIRRORS:
                raise ValueError(f"there is no mirror {mirror!r}: mirrors are {', '.join(MIRRORS)}")
            return cls("", frozenset(), mirror)
        host, port = split_port(lower)
        base = host.removeprefix("*.")
        if host != "*" and host_name(base) != base:
            raise ValueError(
                f"{text!r} is no destination: write HOST, HOST:PORT, *.HOST, *, or {MIRROR}NAME, without https://"
            )
        if base != host and is_address(base):
            raise ValueError(f"{text!r} is no destination: no name is below an address")
        if port is None:
            return cls(host)
        if port == "*":
            return cls(host, frozenset())
        if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} has no port from 1 to 65535")
        return cls(host, frozenset({int(port)}))

    @property
    def exact(self) -> bool:
        """True if the destination is a single host or a mirror."""
        return bool(self.mirror) or not self.host.startswith("*")

    def matches(self, host: str, port: int) -> bool:
        """Return True if the destination includes this host at this port. `host` must be in the form that `host_name`
        returns."""
        if self.mirror or (self.ports and port not in self.ports):
            return False
        return self.host in ("*", host) or (self.host[:2] == "*." and host.endswith(self.host[1:]))

    def covers(self, other: Destination) -> bool:
        """Return True if this destination matches everything that `other` matches."""
        if self.mirror or other.mirror:
            return self.mirror == other.mirror
        if self.ports and not (other.ports and other.ports <= self.ports):
            return False
        return self.host in ("*", other.host) or (self.host[:2] == "*." and other.host.endswith(self.host[1:]))


def split_port(text: str) -> tuple[str, str | None]:
    """Split `HOST:PORT`. Return the host without brackets, and the port or None. An IPv6 address must be in
    brackets."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return "", None
        return host, rest[1:] if rest else None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def host_name(text: str) -> str | None:
    """Return the normal form of a host name or IP address: lower case, no dot at the end, an address as the standard
    library writes it. Returns None for anything else, such as an IPv6 zone, a number that resolvers read as an IPv4
    address, or invalid characters."""
    text = text.lower()
    try:
        if "%" not in text:
            return str(ip_address(text))
    except ValueError:
        pass
    text = text.removesuffix(".")
    if len(text) > MAX_NAME or not NAME.fullmatch(text) or NUMBER.fullmatch(text.rpartition(".")[2]):
        return None
    return text


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def not_covered(asked: Iterable[str], allowed: Iterable[str]) -> list[int]:
    """Return the indexes of the destinations in `asked` that `allowed` does not cover. Raises ValueError if a text is
    not a destination."""
    may = [Destination.read(text) for text in allowed]
    wanted = [Destination.read(text) for text in asked]
    return [
        number
        for number, one in enumerate(wanted)
        if not any(each.covers(one) for each in may) and not _ports_covered(one, may)
    ]


def _ports_covered(one: Destination, may: Iterable[Destination]) -> bool:
    """Return True if the destinations in `may` together cover every port of `one`."""
    parts = [one._replace(ports=frozenset({port})) for port in one.ports]
    return not one.mirror and bool(parts) and all(any(each.covers(part) for each in may) for part in parts)


def checked(value: str) -> str:
    Destination.read(value)
    return value


DestinationText = Annotated[str, StringConstraints(min_length=1, max_length=300), AfterValidator(checked)]


def checked_place(value: str) -> str:
    """Return `value` unchanged if it names one host and one port. Raises ValueError otherwise."""
    found = Destination.read(value)
    if found.mirror or not found.exact or len(found.ports) != 1:
        raise ValueError(f"{value!r} is not one host with one port, such as files.lan:8080")
    return value


PlaceText = Annotated[str, StringConstraints(min_length=1, max_length=300), AfterValidator(checked_place)]


def checked_host(value: str) -> str:
    """Normalise a host name or IP address (see `host_name`). Raises ValueError for any other text."""
    host = host_name(value)
    if host is None:
        raise ValueError(f"{value!r} is not one host, such as packages.lan")
    return host


HostText = Annotated[str, StringConstraints(min_length=1, max_length=300), AfterValidator(checked_host)]
