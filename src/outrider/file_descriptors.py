"""How many files and connections this process may have open, and how they are divided among their users.

It knows no server and no sandbox. Invariant: clients outside and clients in sandboxes together can use only part of the
descriptors; the rest is left for what the service itself opens (store, engines, sandboxes). So a client that opens all
the connections it can does not stop anybody else.
"""

from __future__ import annotations

import resource

import msgspec

from outrider.errors import ServiceError

WANTED = 65_536
"""Descriptors that a service takes if the hard limit allows so many."""
LEAST = 4096
"""With fewer, a full node runs short of connections: a session holds about six descriptors, and each of its model calls
two more."""
FEWEST = 64
"""With fewer, the event loop or the store cannot be opened."""
SESSIONS = 8
"""How many sessions, or tokens, can use their maximum of connections at once before the others find none."""
EACH_LEAST, EACH_MOST = 8, 256
"""Bounds of the maximum of one session, or of one token."""


class Shares(msgspec.Struct, frozen=True):
    """Maximum connections of all `sandboxes` together (on the node's Unix socket) and of all other clients (`control`),
    and maximum model calls of one `session`, and calls of the control API with one `token`, at once."""

    sandboxes: int
    control: int
    session: int
    token: int


def raise_limit() -> int:
    """Raise the soft limit, usually 1024, to WANTED or to the hard limit; the number of descriptors there are then."""
    soft, hard = (WANTED if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if soft < (wanted := min(hard, WANTED)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
    return max(soft, wanted)


def check_enough() -> None:
    """Raises ServiceError where a service could not even start."""
    if (descriptors := available()) < FEWEST:
        raise ServiceError(
            f"this process may have only {descriptors} files open", hint=f"allow it {LEAST} or more: ulimit -n {WANTED}"
        )


def shares(descriptors: int) -> Shares:
    """Divide descriptors: a quarter for sandboxes, an eighth for other clients, the rest for the service itself."""
    sandboxes, control = descriptors // 4, descriptors // 8
    session = min(EACH_MOST, max(EACH_LEAST, sandboxes // SESSIONS))
    token = max(EACH_LEAST, control // SESSIONS)
    return Shares(sandboxes=sandboxes, control=control, session=session, token=token)


def available() -> int:
    """How many descriptors a service started here would have."""
    hard = _limits()[1]
    return WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
