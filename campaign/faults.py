"""What is broken in a run, and when: drawn from its seed, so that the same seed breaks the same at the same points.

The point of a fault is a share of the run's progress and not a time of day: a slow machine meets the same faults. Which
sessions a fault then hits is up to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """`seconds` and `share` are those of the Fault."""

    SERVICE_KILLED = "service killed"
    SERVICE_STOPPED = "service stopped in order"
    ENGINE_KILLED = "engine killed"
    ENGINE_HUNG = "engine hung"  # for its `seconds`; then killed, if its `share` is below a half
    NODE_KILLED = "node killed"  # one of the processes that run sessions; only in runs that have several
    AGENTS_KILLED = "agents killed"  # a `share` of all processes in sandboxes
    READER_KILLED = "reader killed"
    DISK_FULL = "disk full"  # for its `seconds`
    DISK_SLOW = "disk slow"  # for its `seconds`: each commit waits 0.2 seconds times the `share`
    CLOCK_JUMPED = "clock jumped"  # by hours, backwards if the `share` is below a half; set right after its `seconds`
    LEASES_LAPSED = "leases lapsed"
    DATABASE_KILLED = "database killed"
    DATABASE_STOPPED = "database restarted"


ON_FILES = frozenset({FaultKind.DISK_FULL, FaultKind.DISK_SLOW})
ON_SERVERS = frozenset({FaultKind.DATABASE_KILLED, FaultKind.DATABASE_STOPPED})
ON_NODES = frozenset({FaultKind.NODE_KILLED})
ON_SQLITE = tuple(kind for kind in FaultKind if kind not in ON_SERVERS | ON_NODES)
ON_POSTGRESQL = tuple(kind for kind in FaultKind if kind not in ON_FILES | ON_NODES)


class Fault(msgspec.Struct, frozen=True, order=True):
    """`at` is the share of the run's progress at which it happens."""

    at: float
    kind: FaultKind
    seconds: float
    share: float


DRAWN = 6
"""Faults of any kind in a run, beside those that every run has."""


def draw_faults(rng: random.Random, kinds: Sequence[FaultKind] = ON_SQLITE) -> list[Fault]:
    """Of these kinds, in order. In every run the service is killed while groups are submitted, and once more later, the
    engine is killed, and leases lapse; and a database server is killed, where there is one, and so are two nodes."""
    drawn = rng.choices(kinds, k=DRAWN)
    points = [
        (FaultKind.SERVICE_KILLED, rng.uniform(0.02, 0.2)),
        (FaultKind.SERVICE_KILLED, rng.uniform(0.2, 0.95)),
        (FaultKind.ENGINE_KILLED, rng.uniform(0.2, 0.9)),
        (FaultKind.LEASES_LAPSED, rng.uniform(0.25, 0.6)),
    ]
    if FaultKind.DATABASE_KILLED in kinds:
        points.append((FaultKind.DATABASE_KILLED, rng.uniform(0.1, 0.9)))
    if FaultKind.NODE_KILLED in kinds:
        points += [(FaultKind.NODE_KILLED, rng.uniform(0.1, 0.9)) for _ in range(2)]
    points += [(kind, rng.uniform(0.05, 0.95)) for kind in drawn]
    return sorted(Fault(at, kind, rng.uniform(0.3, 1.5), rng.random()) for kind, at in points)
