"""What the SQLite store costs: the latency and rate of stored turns, alone and beside a queue of 100,000 sessions.

Durations are milliseconds, rates are per second; the database is a file in the system's temporary folder.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from outrider.lifecycle import GroupState
from outrider.messages import Message, Role
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.trajectory import (
    FinishReason,
    JoinKind,
    LogprobKind,
    Turn,
    TurnTimings,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)

PROMPT_TOKENS = 500
OUTPUT_TOKENS = 200
WARM_TURNS = 200
CONCURRENCY = 32
QUEUE_GROUP_SIZE = 1_000
QUEUE_READS = 50
QUEUE_LIMIT = 64


class Plan(msgspec.Struct, frozen=True):
    """Turns stored one after another, turns of each of the concurrent sessions, and groups in the queue."""

    lone_turns: int
    turns_each: int
    queue_groups: int


FULL = Plan(lone_turns=2_000, turns_each=300, queue_groups=100)
QUICK = Plan(lone_turns=500, turns_each=50, queue_groups=20)


async def run(quick: bool = False) -> dict[str, Any]:
    """Latency of add_turn at concurrency 1, its rate at 32, and of queued(64) over 100,000 queued sessions."""
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        async with sqlite_store(Path(folder) / "bench.db") as store:
            return {
                "turn_tokens": PROMPT_TOKENS + OUTPUT_TOKENS,
                "add_turn": await _lone_turns(store, plan.lone_turns),
                "add_turn_concurrent": await _concurrent_turns(store, plan.turns_each),
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
        idempotency_key=None,
        callback_url=None,
        state=GroupState.ACTIVE,
        cancelled=False,
        created=time.time(),
        finished=None,
        cursor=None,
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
