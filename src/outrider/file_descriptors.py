"""Open files and connections: how many this process may have, and what part of them is whose.

It knows no server and no sandbox. Invariant: what clients can take, those outside and those in sandboxes, leaves the
rest for what only the service opens: its store, engines, sandboxes. So whoever opens all the connections that there
are for him stops nobody else.
"""

from __future__ import annotations

import resource

import msgspec

WANTED = 65_536
LEAST = 4096
"""With fewer, a full node has no connections to spare: a session holds half a dozen descriptors, and each of its model
calls two more."""
SESSIONS = 8
"""So many can each have all that one may, before the others have none."""
EACH_LEAST, EACH_MOST = 8, 256


class Shares(msgspec.Struct, frozen=True):
    """Connections: of all sandboxes, through the socket that is theirs; of all others; and model calls that one
    session may have under way at once."""

    sandboxes: int
    control: int
    session: int


def raise_limit() -> int:
    """Take what the hard limit allows; the usual soft one is 1024. How many descriptors there are then."""
    soft, hard = (WANTED if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if soft < (wanted := min(hard, WANTED)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
    return max(soft, wanted)


def shares(descriptors: int) -> Shares:
    sandboxes = descriptors // 4
    session = min(EACH_MOST, max(EACH_LEAST, sandboxes // SESSIONS))
    return Shares(sandboxes=sandboxes, control=descriptors // 8, session=session)


def available() -> int:
    """Descriptors that a service started here would have."""
    hard = _limits()[1]
    return WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
