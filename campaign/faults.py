"""The faults of a run and their points, drawn from the run's seed: the same seed breaks the same things at the same
points.

The point of a fault is a fraction of the run's progress and not a time of day, so that a slow machine meets the same
faults. Which sessions a fault then hits depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    """The kind of a fault. `seconds` and `share` in the comments are the fields of `Fault`."""

    SERVICE_KILLED = "service killed"
    SERVICE_STOPPED = "service stopped in order"
    ENGINE_KILLED = "engine killed"
    ENGINE_HUNG = "engine hung"  # for its `seconds`; then killed, if its `share` is below a half
    ENGINE_FROZEN = "engine frozen"  # SIGSTOP for 9 to 45 seconds, then SIGCONT
    # For 9 to 45 seconds the model generates nothing, while its server responds.
    ENGINE_SILENT = "engine silent"
    ENGINE_DRIPS = "engine drips"  # for 9 to 45 seconds the engine sends a chunk every few seconds
    # Open connections to the engine forward nothing more and stay open; new connections work.
    ENGINE_LOST = "engine lost"
    ENGINE_ODD = "engine odd"  # for its `seconds`, a proxy replies in the engine's place: 200, with a page of HTML
    STORE_SILENT = "store silent"  # a commit, or the database server, freezes for five to thirty seconds, or 120
    STORE_AWAY = (
        "store away"  # SIGKILL of the database server, which is started again after five to thirty seconds, or 120
    )
    NODE_KILLED = "node killed"  # one of the processes that run sessions; only in runs that have several
    MACHINE_KILLED = "machine killed"  # all processes of a machine that has joined; it is started again
    MACHINE_STOPPED = "machine stopped in order"
    MACHINE_ENDED = "machine ended"  # SIGTERM for all its processes at once, including those in sandboxes
    CONNECTION_CUT = "connection cut"  # the connection of a machine, up to five times
    CONNECTION_SLOW = "connection slow"  # nothing is forwarded for eight times its `seconds`, and then everything
    # Like CONNECTION_SLOW, but for so long that the service declares the machine lost.
    CONNECTION_SILENT = "connection silent"
    AGENTS_KILLED = "agents killed"  # on each node one process in a sandbox, and `share` / 4 of all of them
    READER_KILLED = "reader killed"
    POWER_LOST = "power lost"  # the service is killed, and all that it had not synced to its disk is lost
    DISK_FULL = "disk full"  # for its `seconds`
    DISK_SLOW = "disk slow"  # for its `seconds`: each commit waits 0.2 seconds times the `share`
    CLOCK_JUMPED = "clock jumped"  # by hours, backwards if the `share` is below a half; corrected after its `seconds`
    LEASES_LAPSED = "leases lapsed"
    DATABASE_KILLED = "database killed"
    DATABASE_STOPPED = "database restarted"


ON_FILES = frozenset({FaultKind.POWER_LOST, FaultKind.DISK_FULL, FaultKind.DISK_SLOW})
ON_SERVERS = frozenset({FaultKind.DATABASE_KILLED, FaultKind.DATABASE_STOPPED, FaultKind.STORE_AWAY})
SILENCES = (
    FaultKind.ENGINE_FROZEN,
    FaultKind.ENGINE_SILENT,
    FaultKind.ENGINE_DRIPS,
    FaultKind.ENGINE_LOST,
    FaultKind.ENGINE_ODD,
    FaultKind.STORE_SILENT,
    FaultKind.STORE_AWAY,
)
"""Faults that take long. Every run has a fixed number of them; all other faults of the run are of other kinds."""
ON_NODES = frozenset({FaultKind.NODE_KILLED})
ON_MACHINES = (
    FaultKind.MACHINE_KILLED,
    FaultKind.MACHINE_STOPPED,
    FaultKind.MACHINE_ENDED,
    FaultKind.CONNECTION_CUT,
    FaultKind.CONNECTION_SLOW,
    FaultKind.CONNECTION_SILENT,
)
"""Faults of machines that join. The `share` selects the machine and, for a slow or silent connection, the direction."""
_SOMETIMES = ON_SERVERS.union(ON_NODES, ON_MACHINES)
ON_SQLITE = tuple(kind for kind in FaultKind if kind not in _SOMETIMES)
ON_POSTGRESQL = tuple(kind for kind in FaultKind if kind not in _SOMETIMES - ON_SERVERS | ON_FILES)


class Fault(msgspec.Struct, frozen=True, order=True):
    """One fault. `at` is the fraction of the run's progress at which it happens."""

    at: float
    kind: FaultKind
    seconds: float
    share: float

    @property
    def long(self) -> float:
        """Duration of a fault that takes long, in seconds: 9 to 45."""
        return 30.0 * self.seconds

    @property
    def outage(self) -> float:
        """Seconds for which a store is silent or away: 5 to 30, and 120 in one case of ten."""
        return 120.0 if self.share < 0.1 else 5.0 + 25.0 * (self.share - 0.1) / 0.9


DRAWN = 6
"""Number of faults of kinds outside SILENCES in a run, besides the faults that every run has."""
SILENT = 2
DRAWN_ON_MACHINES = 3
"""Number of further faults of machines that join, in runs that have machines."""


def draw_faults(rng: random.Random, kinds: Sequence[FaultKind] = ON_SQLITE) -> list[Fault]:
    """Draw faults of these kinds, in order.

    In every run the service is killed while groups are submitted, and once more later; the engine is killed; leases
    expire; and SILENT of the faults that take long occur. If `kinds` has the fault, power is lost, or the database
    server is killed. Runs with nodes kill two nodes. Runs with machines kill one machine and cut one connection.
    """
    drawn = rng.choices([kind for kind in kinds if kind not in SILENCES], k=DRAWN)
    drawn += rng.sample([kind for kind in SILENCES if kind in kinds], k=SILENT)
    points = [
        (FaultKind.SERVICE_KILLED, rng.uniform(0.02, 0.2)),
        (FaultKind.SERVICE_KILLED, rng.uniform(0.2, 0.95)),
        (FaultKind.ENGINE_KILLED, rng.uniform(0.2, 0.9)),
        (FaultKind.LEASES_LAPSED, rng.uniform(0.25, 0.6)),
    ]
    if FaultKind.POWER_LOST in kinds:
        points.append((FaultKind.POWER_LOST, rng.uniform(0.1, 0.95)))
    if FaultKind.DATABASE_KILLED in kinds:
        points.append((FaultKind.DATABASE_KILLED, rng.uniform(0.1, 0.9)))
    if FaultKind.NODE_KILLED in kinds:
        points += [(FaultKind.NODE_KILLED, rng.uniform(0.1, 0.9)) for _ in range(2)]
    if FaultKind.MACHINE_KILLED in kinds:
        drawn += [FaultKind.MACHINE_KILLED, FaultKind.CONNECTION_CUT, *rng.choices(ON_MACHINES, k=DRAWN_ON_MACHINES)]
    points += [(kind, rng.uniform(0.05, 0.95)) for kind in drawn]
    return sorted(Fault(at, kind, rng.uniform(0.3, 1.5), rng.random()) for kind, at in points)
