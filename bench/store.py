"""The cost of a store, on SQLite and on PostgreSQL: turns, groups, results, and a queue of 100,000 sessions.

Durations are milliseconds, rates are per second. Both databases are in the system's temporary folder. PostgreSQL runs
with its default settings in a server started for the benchmark, and is reached over a Unix socket.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.support.postgresql import postgresql_server, programs

from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.store.postgresql import postgresql_store
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.trajectory import (
    FinishReason,
    JoinKind,
    LogprobKind,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

PROMPT_TOKENS = 500
OUTPUT_TOKENS = 200
WARM_TURNS = 200
CONCURRENCY = 32
GROUP_SIZE = 8
QUEUE_GROUP_SIZE = 1_000
QUEUE_READS = 50
QUEUE_LIMIT = 64


class Plan(msgspec.Struct, frozen=True):
    """Numbers of turns stored one after another, of turns of each concurrent session, of groups submitted and ended,
    and of groups in the queue."""

    lone_turns: int
    turns_each: int
    groups: int
    queue_groups: int


FULL = Plan(lone_turns=2_000, turns_each=300, groups=1_000, queue_groups=100)
QUICK = Plan(lone_turns=500, turns_each=50, groups=200, queue_groups=20)


async def run(quick: bool = False) -> dict[str, Any]:
    """Return the figures of each store: latency of add_turn at concurrency 1; rates of turns, groups and results at 32;
    latency of queued(64) over 100,000 queued sessions."""
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        stores = {"SQLite": await _measured(sqlite_store(Path(folder) / "bench.db"), plan)}
    if programs() is not None:
        with postgresql_server({}) as server:
            stores["PostgreSQL"] = await _measured(postgresql_store(await server.new_database()), plan)
    return {"turn_tokens": PROMPT_TOKENS + OUTPUT_TOKENS, "group_size": GROUP_SIZE, "stores": stores}


async def _measured(opened: Store, plan: Plan) -> dict[str, dict[str, float]]:
    async with opened as store:
        return {
            "add_turn": await _lone_turns(store, plan.lone_turns),
            "add_turn_concurrent": await _concurrent_turns(store, plan.turns_each),
            "groups": await _groups(store, plan.groups),
            "queue": await _queue(store, plan.queue_groups),
        }


async def _lone_turns(store: Store, number: int) -> dict[str, float]:
    session_id, attempt = await _started(store, "lone")
    for index in range(WARM_TURNS):
        await store.add_turn(session_id, attempt, _turn(index))
    spent = [await _timed(store, session_id, attempt, index) for index in range(WARM_TURNS, WARM_TURNS + number)]
    cuts = statistics.quantiles(spent, n=100)
    return {"p50_ms": cuts[49], "p95_ms": cuts[94], "p99_ms": cuts[98], "per_second": 1000 / statistics.mean(spent)}


async def _concurrent_turns(store: Store, turns_each: int) -> dict[str, float]:
    sessions = [await _started(store, f"busy-{number}") for number in range(CONCURRENCY)]
    spent: list[float] = []

    async def worker(session_id: str, attempt: int) -> None:
        for index in range(turns_each):
            spent.append(await _timed(store, session_id, attempt, index))

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for session_id, attempt in sessions:
            group.create_task(worker(session_id, attempt))
    seconds = time.perf_counter() - begun
    cuts = statistics.quantiles(spent, n=100)
    return {
        "concurrency": CONCURRENCY,
        "per_second": len(spent) / seconds,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
    }


async def _groups(store: Store, number: int) -> dict[str, float]:
    """Measure the rates at which groups are submitted, started, finished and read, by all clients at once."""
    names = [f"group-{index}" for index in range(number)]
    sessions = [f"{name}.{index}" for name in names for index in range(GROUP_SIZE)]

    async def finish(session_id: str) -> None:
        ended = SessionResult(
            session_id=session_id,
            group_id=session_id.partition(".")[0],
            sample_index=int(session_id.partition(".")[2]),
            attempt=1,
            stop_reason=StopReason.COMPLETED,
            verdict=Verdict(reward=1.0),
        )
        await store.finish(session_id, 1, ended)

    async def start(session_id: str) -> None:
        await store.start_attempt(session_id, node="bench", lease_until=time.time() + 3600)

    submitted = await _at_once(names, lambda name: _group(store, name, GROUP_SIZE, priority=0))
    started = await _at_once(sessions, start)
    finished = await _at_once(sessions, finish)
    begun, after, read = time.perf_counter(), 0, 0
    while page := await store.results(after=after, limit=100):
        after, read = page[-1].cursor or after, read + len(page)
    assert read == number
    return {
        "submitted_per_second": number / submitted,
        "sessions_started_per_second": len(sessions) / started,
        "sessions_finished_per_second": len(sessions) / finished,
        "groups_finished_per_second": number / finished,
        "results_read_per_second": number / (time.perf_counter() - begun),
    }


async def _at_once(names: Sequence[str], work: Callable[[str], Awaitable[None]]) -> float:
    """Do the work for each name, CONCURRENCY at once, and return the seconds."""
    left = iter(names)

    async def worker() -> None:
        for name in left:
            await work(name)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(worker())
    return time.perf_counter() - begun


async def _queue(store: Store, groups: int) -> dict[str, float]:
    begun = time.perf_counter()
    for number in range(groups):
        await _group(store, f"queue-{number}", QUEUE_GROUP_SIZE, priority=number % 7)
    filled = time.perf_counter() - begun
    spent: list[float] = []
    for _ in range(QUEUE_READS):
        begun = time.perf_counter()
        await store.queued(QUEUE_LIMIT)
        spent.append((time.perf_counter() - begun) * 1000)
    return {
        "sessions": groups * QUEUE_GROUP_SIZE,
        "submitted_per_second": groups * QUEUE_GROUP_SIZE / filled,
        "read_p50_ms": statistics.median(spent),
    }


async def _timed(store: Store, session_id: str, attempt: int, index: int) -> float:
    turn = _turn(index)
    begun = time.perf_counter()
    await store.add_turn(session_id, attempt, turn)
    return (time.perf_counter() - begun) * 1000


async def _started(store: Store, name: str) -> tuple[str, int]:
    await _group(store, name, 1, priority=0)
    session_id = f"{name}.0"
    return session_id, await store.start_attempt(session_id, node="bench", lease_until=time.time() + 3600)


async def _group(store: Store, name: str, n: int, priority: int) -> None:
    group = GroupRow(
        id=name,
        n=n,
        priority=priority,
        created=time.time(),
    )
    await store.create_group(group, b"{}", [f"{name}.{index}" for index in range(n)])


def _turn(index: int) -> Turn:
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        join=JoinKind.APPEND if index else JoinKind.ROOT,
        prompt_length=PROMPT_TOKENS * (index + 1) + OUTPUT_TOKENS * index,
        prompt_delta=pack_ids(range(PROMPT_TOKENS)),
        output_ids=pack_ids(range(OUTPUT_TOKENS)),
        logprobs=pack_logprobs([-0.5] * OUTPUT_TOKENS),
        logprob_kind=LogprobKind.RAW,
        versions=(VersionSpan(version=1, start=0, end=OUTPUT_TOKENS),),
        finish=FinishReason.STOP,
        dialect="chat",
        engine="bench",
        sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 2048},
        messages=(Message(role=Role.USER, content="x" * (PROMPT_TOKENS * 4)),),
        reply=Message(role=Role.ASSISTANT, content="x" * (OUTPUT_TOKENS * 4)),
        timings=TurnTimings(received=0.0, first_token=0.0, finished=0.0),
    )
