"""Limits the open files and connections of this process, and divides its file descriptors among groups of clients.

Invariant: all clients together can use only part of the descriptors. The rest is for the service itself: its store,
engines and sandboxes. So a client that opens as many connections as it can does not block other clients.
"""

from __future__ import annotations

import resource

import msgspec

from outrider.errors import ServiceError

WANTED = 65_536
"""Number of open files that a service allows itself, unless the system's hard limit is lower."""
LEAST = 4096
"""Number of file descriptors that a node needs when all its sessions run. A session holds about six descriptors, and
each of its model calls two more."""
FEWEST = 64
"""The fewest file descriptors that are enough for a process to open its event loop and its store."""
SESSIONS = 8
"""One session may use 1/SESSIONS of the connections of sandboxes, so SESSIONS sessions can together use all of these
connections. In the same way, one access token may use 1/SESSIONS of the connections for the control API."""
EACH_LEAST, EACH_MOST = 8, 256
"""A session may have its share of the connections at a time, but at least EACH_LEAST and at most EACH_MOST connections.
An access token may have its share, but at least EACH_LEAST connections."""


class ConnectionQuotas(msgspec.Struct, frozen=True):
    """Maximum numbers of connections.

    `sandboxes`: all sandboxes together, on the node's Unix socket.
    `control`: all other clients together.
    `network_proxies`: all sandboxes together, to the proxies of their networks. For each of these connections, a proxy
        may open another connection to a server.
    `session`: concurrent model calls of one session.
    `token`: concurrent calls of the control API with one token.
    """

    sandboxes: int
    control: int
    network_proxies: int
    session: int
    token: int


def raise_limit() -> int:
    """Raise the soft limit of open files, usually 1024, to WANTED or the hard limit, whichever is lower. Returns the
    new limit."""
    soft, hard = (WANTED if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if soft < (wanted := min(hard, WANTED)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
    return max(soft, wanted)


def check_enough() -> None:
    """Raise ServiceError if this process may open too few files to start a service."""
    if (descriptors := available()) < FEWEST:
        raise ServiceError(
            f"this process may have only {descriptors} files open", hint=f"allow it {LEAST} or more: ulimit -n {WANTED}"
        )


def shares(descriptors: int) -> ConnectionQuotas:
    """Divide descriptors: a quarter for sandboxes, an eighth for their networks (two for each connection), an eighth
    for other clients, and the rest for the service itself."""
    sandboxes, control = descriptors // 4, descriptors // 8
    session = min(EACH_MOST, max(EACH_LEAST, sandboxes // SESSIONS))
    token = max(EACH_LEAST, control // SESSIONS)
    return ConnectionQuotas(
        sandboxes=sandboxes, control=control, network_proxies=descriptors // 16, session=session, token=token
    )


def available() -> int:
    """Return the number of file descriptors that a service started by this process may have."""
    hard = _limits()[1]
    return WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
