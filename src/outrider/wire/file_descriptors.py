"""Limits the open files and connections of this process, and divides the file descriptors among groups of clients.

Invariant: all clients together, inside and outside of sandboxes, can use only part of the descriptors; the rest is for
the service itself (store, engines, sandboxes). So a client that opens as many connections as possible does not block
other clients.
"""

from __future__ import annotations

import resource

import msgspec

from outrider.errors import ServiceError

WANTED = 65_536
"""The limit of open file descriptors that a service sets for itself, unless the hard limit is lower."""
LEAST = 4096
"""Number of file descriptors that a full node needs for its connections: a session holds about six descriptors, and
each of its model calls two more."""
FEWEST = 64
"""Minimum number of file descriptors with which a process can open its event loop and the store."""
SESSIONS = 8
"""One session may use 1/SESSIONS of the sandboxes' connections, so this number of sessions can together use all of
them. One access token may use the same share of the connections for the control API."""
EACH_LEAST, EACH_MOST = 8, 256
"""Lower and upper bound of the share of one session. The lower bound also applies to the share of one token."""


class ConnectionQuotas(msgspec.Struct, frozen=True):
    """Maximum numbers of connections.

    `sandboxes`: connections of all sandboxes together, on the node's Unix socket.
    `control`: connections of all other clients together.
    `doors`: connections of all sandboxes to the proxies of their networks. A proxy may open another connection for each
        of them, to a server.
    `session`: concurrent model calls of one session.
    `token`: concurrent calls of the control API with one token.
    """

    sandboxes: int
    control: int
    doors: int
    session: int
    token: int


def raise_limit() -> int:
    """Raise the soft limit, usually 1024, to WANTED or to the hard limit. Returns the new number of descriptors."""
    soft, hard = (WANTED if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if soft < (wanted := min(hard, WANTED)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
    return max(soft, wanted)


def check_enough() -> None:
    """Raise ServiceError if there are too few descriptors to start a service."""
    if (descriptors := available()) < FEWEST:
        raise ServiceError(
            f"this process may have only {descriptors} files open", hint=f"allow it {LEAST} or more: ulimit -n {WANTED}"
        )


def shares(descriptors: int) -> ConnectionQuotas:
    """Divide descriptors: a quarter for sandboxes, an eighth each for other clients and for the networks of sandboxes,
    the rest for the service itself."""
    sandboxes, control = descriptors // 4, descriptors // 8
    session = min(EACH_MOST, max(EACH_LEAST, sandboxes // SESSIONS))
    token = max(EACH_LEAST, control // SESSIONS)
    return ConnectionQuotas(sandboxes=sandboxes, control=control, doors=descriptors // 16, session=session, token=token)


def available() -> int:
    """Return the number of descriptors that a service started by this process may have."""
    hard = _limits()[1]
    return WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
