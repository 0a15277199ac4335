"""What is broken in a run, and when: drawn from its seed, so that the same seed breaks the same at the same points.

The point of a fault is a share of the run's progress and not a time of day: a slow machine meets the same faults. Which
sessions a fault then hits is up to the machine.
"""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """`seconds` and `share` are those of the Fault."""

    SERVICE_KILLED = "service killed"
    SERVICE_STOPPED = "service stopped in order"
    ENGINE_KILLED = "engine killed"
    ENGINE_HUNG = "engine hung"  # for so many seconds; where the share is below a half it is killed then
    AGENTS_KILLED = "agents killed"  # so large a share of all processes in sandboxes
    READER_KILLED = "reader killed"
    DISK_FULL = "disk full"  # for so many seconds
    DISK_SLOW = "disk slow"  # for so many seconds, each commit waits for 0.2 seconds times the share
    CLOCK_JUMPED = "clock jumped"  # by hours, backwards where the share is below a half; back after the seconds
    LEASES_LAPSED = "leases lapsed"


class Fault(msgspec.Struct, frozen=True, order=True):
    """`at` is the share of the run's progress at which it happens."""

    at: float
    kind: FaultKind
    seconds: float
    share: float


DRAWN = 6
"""Faults of any kind in a run, beside those that every run has."""


def draw_faults(rng: random.Random) -> list[Fault]:
    """In order. In every run the service is killed while groups are submitted, and once more later, the engine is
    killed, and leases lapse."""
    kinds = rng.choices(tuple(FaultKind), k=DRAWN)
    points = [
        (FaultKind.SERVICE_KILLED, rng.uniform(0.02, 0.2)),
        (FaultKind.SERVICE_KILLED, rng.uniform(0.2, 0.95)),
        (FaultKind.ENGINE_KILLED, rng.uniform(0.2, 0.9)),
        (FaultKind.LEASES_LAPSED, rng.uniform(0.3, 0.8)),
    ]
    points += [(kind, rng.uniform(0.05, 0.95)) for kind in kinds]
    return sorted(Fault(at, kind, rng.uniform(0.3, 1.5), rng.random()) for kind, at in points)
