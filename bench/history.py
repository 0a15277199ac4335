"""The effect of a million finished sessions on the store: the durations of operations on an empty store and on a store
with this history.

The history is written with SQL, because a million sessions through the store's own methods would take hours: groups
of eight, each session with a result, a turn and six events. Durations are milliseconds; the databases are files in
the system's temporary folder. Operations on the two stores alternate, so that the machine's other load affects both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from bench.store import _group, _turn
from outrider.lifecycle import GroupState, StopReason
from outrider.service.retention import SESSIONS_AT_ONCE, STEP_ROWS
from outrider.store.database import Connection
from outrider.store.rows import pack
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store
from outrider.trajectory import SessionResult, Verdict

GROUP_SIZE = 8
EVENTS_EACH = 6
QUEUED_GROUPS = 20
AT_ONCE = 50_000
"""Number of finished sessions that are written in one transaction."""

Operation = Callable[[], Awaitable[object]]


class Plan(msgspec.Struct, frozen=True):
    """The number of finished sessions, and the number of times that each operation is timed."""

    sessions: int
    rounds: int


FULL = Plan(sessions=1_000_000, rounds=200)
QUICK = Plan(sessions=100_000, rounds=50)


async def run(quick: bool = False) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        empty, full = (SqliteDatabase(Path(folder) / f"{name}.sqlite3") for name in ("empty", "full"))
        async with Store(empty) as short, Store(full) as long:
            begun = time.perf_counter()
            for start in range(0, plan.sessions, AT_ONCE):
                await full.write(_history(start, min(AT_ONCE, plan.sessions - start)))
            filled = time.perf_counter() - begun
            size = (Path(folder) / "full.sqlite3").stat().st_size
            stores = {"empty": await _operations(short), "full": await _operations(long)}
            spent: dict[str, dict[str, list[float]]] = {
                name: {which: [] for which in stores} for name in stores["empty"]
            }
            for number in range(plan.rounds):
                for which, operations in list(stores.items())[:: 1 if number % 2 else -1]:
                    for name, operation in operations.items():
                        begun = time.perf_counter()
                        await operation()
                        spent[name][which].append((time.perf_counter() - begun) * 1000)
            removal = await _removal(long)
    return {
        "sessions": plan.sessions,
        "file_bytes": size,
        "filled_seconds": filled,
        "operations": {
            name: {f"{which}_p50_ms": statistics.median(times) for which, times in by_store.items()}
            for name, by_store in spent.items()
        },
        "removal": removal,
    }


def _history(start: int, sessions: int) -> Callable[[Connection], Any]:
    groups = sessions // GROUP_SIZE
    first = start // GROUP_SIZE
    result = pack(
        SessionResult(
            session_id="s",
            group_id="g",
            sample_index=0,
            attempt=1,
            stop_reason=StopReason.COMPLETED,
            verdict=Verdict(reward=1.0),
            turns=1,
        )
    )
    numbers = "WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?)"

    async def body(tx: Connection) -> None:
        await tx.execute(
            f"""{numbers} INSERT INTO groups (id, spec, n, priority, state, cancelled, open_sessions, created, finished,
                    cursor, rewarded, reward_total, bytes, labels, tenant)
                SELECT printf('g%09d', ? + n), zeroblob(2000), {GROUP_SIZE}, 0, 'done', 0, 0, ? + n, ? + n, ? + n + 1,
                    {GROUP_SIZE}, {GROUP_SIZE}, 10000, '{{}}', 'operator' FROM numbers""",
            (groups, first, first, first, first),
        )
        await tx.execute(
            f"""{numbers} INSERT INTO sessions (id, group_id, sample_index, state, attempt, node, priority, created,
                    updated, waiting, bucket, result)
                SELECT printf('s%09d', ? + n), printf('g%09d', (? + n) / {GROUP_SIZE}), (? + n) % {GROUP_SIZE}, 'done',
                    1, 'local', 0, ? + n, ? + n, 0, '', ? FROM numbers""",
            (sessions, start, start, start, first, first, result),
        )
        await tx.execute(
            f"{numbers} INSERT INTO turns SELECT printf('s%09d', ? + n), 1, 0, zeroblob(500) FROM numbers",
            (sessions, start),
        )
        await tx.execute(
            f"""{numbers} INSERT INTO events (at, kind, group_id, session_id, data, tenant)
                SELECT 0, 'session.state', printf('g%09d', (? + n / {EVENTS_EACH}) / {GROUP_SIZE}),
                    printf('s%09d', ? + n / {EVENTS_EACH}), '{{"state":"running","attempt":1}}', 'operator'
                FROM numbers""",
            (sessions * EVENTS_EACH, start, start),
        )
        await tx.execute(
            "UPDATE totals SET cursor = cursor + ?, sessions = sessions + ?, bytes = bytes + ?",
            (groups, sessions, groups * 10_000),
        )

    return body


async def _operations(store: Store) -> Mapping[str, Operation]:
    """Return the operations that a service does all the time, for a store with queued sessions and one session under
    way."""
    for number in range(QUEUED_GROUPS):
        await _group(store, f"queued-{number}", GROUP_SIZE, priority=0)
    await _group(store, "under-way", 1, priority=9)
    attempt = await store.start_attempt("under-way.0", node="bench", lease_until=inf)
    await store.consumers.enter("bench")
    numbers = count()
    newest = await store.last_cursor()

    async def submit() -> None:
        await _group(store, f"new-{next(numbers)}", GROUP_SIZE, priority=-1)

    async def finish() -> None:
        name = f"ended-{next(numbers)}"
        await _group(store, name, 1, priority=-2)
        result = SessionResult(
            session_id=f"{name}.0", group_id=name, sample_index=0, attempt=0, stop_reason=StopReason.CANCELLED
        )
        await store.finish(f"{name}.0", 0, result)

    async def status() -> None:
        await store.counts()
        await store.last_cursor()

    return {
        "submit a group of 8": submit,
        "submit and finish a session": finish,
        "add a turn": lambda: store.add_turn("under-way.0", attempt, _turn(next(numbers))),
        "read the queue": lambda: store.queued(64),
        "status": status,
        "newest groups": lambda: store.groups(limit=20),
        "active groups": lambda: store.groups(state=GroupState.ACTIVE, limit=20),
        "next results": lambda: store.results(after=newest, limit=100),
        "next events": lambda: store.events(after=1 << 40, limit=500),
        "consumers": store.consumers.listed,
        "due callbacks": lambda: store.deliveries(now=inf, limit=1000),
        "lapsed leases": lambda: store.recover(now=0.0),
    }


async def _removal(store: Store) -> dict[str, float]:
    """Measure the rate at which the oldest groups are removed, and the time for which the longest transaction holds the
    writer."""
    await store.consumers.remove("bench")
    candidates = await store.removals.candidates(force=False, limit=SESSIONS_AT_ONCE // GROUP_SIZE)
    spent: list[float] = []
    begun = time.perf_counter()
    await store.removals.hide([one.id for one in candidates], force=False)
    spent.append(time.perf_counter() - begun)
    more = True
    while more:
        step = time.perf_counter()
        more = await store.removals.erase(STEP_ROWS)
        spent.append(time.perf_counter() - step)
    seconds = time.perf_counter() - begun
    return {"sessions_per_second": len(candidates) * GROUP_SIZE / seconds, "longest_step_ms": max(spent) * 1000}
