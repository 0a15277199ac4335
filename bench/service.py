"""The work of a service besides rollouts: accepting groups, returning results, and restarting after `kill -9`.

The service is a separate process and is used over HTTP. Each store is measured in turn, and already has many finished
sessions. All sessions are copies of one that really ran: a model call of a scripted engine, then an agent that waits.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
from tests.support.postgresql import postgresql_server, programs

from bench.corpus import Corpus
from bench.processes import Process, service_process
from outrider.client.client import AsyncClient
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.spec import GroupSpec
from outrider.store.postgresql import postgresql_store
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.store.task_key import KEY_FILE, KeyFile
from outrider.trajectory import SessionResult, Turn

DATABASE = "outrider.sqlite3"
GROUP_SIZE = 8
CLIENTS = 8
PAGE = 100
FILLED_AT_ONCE = 64
LOOK_SECONDS = 0.05


class Plan(msgspec.Struct, frozen=True):
    """Numbers of finished sessions and of sessions under way (both multiples of the group size), of groups submitted,
    and of pages of results read."""

    finished: int
    live: int
    submitted: int
    pages: int


FULL = Plan(finished=100_000, live=10_000, submitted=2_000, pages=20)
QUICK = Plan(finished=2_000, live=200, submitted=200, pages=2)


STALL_PLANS = {False: (5_000, 2_000), True: (200, 200)}
"""Numbers of live sessions, and of sessions that run and end at the same time, for the measurement of the longest stall
of the event loop. The key is `quick`."""


class OneCall:
    """Calls its model once. With the option `wait` the agent then waits until it is cancelled."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._wait = bool(options.get("wait"))

    async def init(self, context: HarnessContext) -> None:
        """Do nothing: there is nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await context.model.chat([Message(role=Role.USER, content=context.task.instruction)])
        if self._wait:
            await asyncio.get_running_loop().create_future()
        return HarnessOutcome()


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL) | {"stalls": await stalls(*STALL_PLANS[quick])}


async def stalls(live: int, beside: int) -> dict[str, Any]:
    """Measure the longest stall of the event loop of one process with `live` sessions, while others run and end: with
    Python's own garbage collector, and with Outrider's (`concurrency/garbage.py`)."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as name:
        corpus = await asyncio.to_thread(Corpus.make, Path(name))
        found = {which: await _stalls(corpus, Path(name, which), which, live, beside) for which in ("python", "ours")}
    return {"live": live, "beside": beside, **found}


async def _stalls(corpus: Corpus, data: Path, pauses: str, live: int, beside: int) -> dict[str, float]:
    async with (
        service_process(corpus.folder, data, live + GROUP_SIZE, "", pauses=pauses) as process,
        AsyncClient(process.urls[0]) as client,
    ):
        await _start_live(client, live)
        before = process.memory_mib()
        for _ in range(beside // GROUP_SIZE):
            group = await client.submit(one_call(GROUP_SIZE, wait=False))
            await client.wait([group.id])
        stalls = (await client.status()).nodes[0].stalls
        return {
            "longest_ms": 1e3 * stalls.longest,
            "longest_processor_ms": 1e3 * stalls.held,
            "count": stalls.count,
            "grown_kib_per_session": 1024 * (process.memory_mib() - before) / beside,
        }


async def measure(plan: Plan) -> dict[str, Any]:
    """Measure each store that is available."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as name:
        folder = Path(name)
        corpus = await asyncio.to_thread(Corpus.make, folder)
        stores = {"SQLite": await _measured(plan, corpus, folder / "sqlite", "")}
        if programs() is not None:
            # No settings, so that commits are durable, unlike in the tests' server.
            with postgresql_server({}) as server:
                url = await server.new_database()
                stores["PostgreSQL"] = await _measured(plan, corpus, folder / "postgresql", url)
    return {"finished": plan.finished, "live": plan.live, "clients": CLIENTS, "stores": stores}


async def _measured(plan: Plan, corpus: Corpus, data: Path, url: str) -> dict[str, Any]:
    """Measure with the store at `url`. If `url` is empty, the store is a file in the service's data folder."""

    def serving() -> AbstractAsyncContextManager[Process]:
        return service_process(corpus.folder, data, plan.live, url)

    async with serving() as process:
        copied = await one_finished(process)
        empty = process.memory_mib()
    async with postgresql_store(url, key=KeyFile(data / KEY_FILE)) if url else sqlite_store(data / DATABASE) as store:
        filling = await copies(store, plan.finished, copied)
    begun = time.perf_counter()
    async with serving() as process, AsyncClient(process.urls[0]) as client:
        ready = time.perf_counter() - begun
        filled = process.memory_mib()
        results = {
            "without_samples": await _read_results(client, plan.pages, samples=False),
            "with_samples": await _read_results(client, plan.pages, samples=True),
        }
        before = process.memory_mib()
        await _start_live(client, plan.live)
        live = process.memory_mib()
        accepted = await _submit(client, plan.submitted)
        process.kill()
    begun = time.perf_counter()
    async with serving() as process, AsyncClient(process.urls[0]) as client:
        ready_again = time.perf_counter() - begun
        await _under_way(client, plan.live)
        running_again = time.perf_counter() - begun
    return {
        "filled_per_second": filling,
        "ready_seconds": ready,
        "results_per_second": results,
        "accepted_groups_per_second": accepted,
        "memory_mib": {"empty": empty, "with_finished": filled, "with_live": live},
        "kib_per_live_session": 1024 * (live - before) / plan.live,
        "after_kill": {"ready_seconds": ready_again, "running_seconds": running_again},
    }


async def one_finished(process: Process) -> SessionResult:
    """Run a real session and return its result."""
    async with AsyncClient(process.urls[0]) as client:
        group = await client.submit(one_call(1, wait=False))
        [done] = await client.wait([group.id])
    result = done.sessions[0].result
    if result is None or result.error is not None or result.turns != 1:
        raise RuntimeError(f"the session to copy failed: {result}")
    return result


async def copies(store: Store, sessions: int, copied: SessionResult) -> float:
    """Store copies of a finished session, in groups. Returns sessions per second."""
    spec = await store.spec(copied.group_id)
    (turn,) = await store.turns(copied.session_id)
    numbers = iter(range(sessions // GROUP_SIZE))

    async def fill() -> None:
        for number in numbers:
            await _store_group(store, f"g-filled-{number:08}", spec, copied, turn)

    begun = time.perf_counter()
    await asyncio.gather(*(fill() for _ in range(FILLED_AT_ONCE)))
    return sessions / (time.perf_counter() - begun)


async def _store_group(store: Store, id: str, spec: bytes, copied: SessionResult, turn: Turn) -> None:
    group = GroupRow(
        id=id,
        n=GROUP_SIZE,
        priority=0,
        created=time.time(),
    )
    ids = [f"s-{id[2:]}-{index}" for index in range(GROUP_SIZE)]
    await store.create_group(group, spec, ids)
    for index, session_id in enumerate(ids):
        attempt = await store.start_attempt(session_id, node="local", lease_until=time.time() + 3600)
        await store.add_turn(session_id, attempt, turn)
        result = msgspec.structs.replace(copied, session_id=session_id, group_id=id, sample_index=index)
        await store.finish(session_id, attempt, result)


async def _read_results(client: AsyncClient, pages: int, *, samples: bool) -> float:
    """Read pages of results one after another as a consumer does. Returns the groups per second."""
    begun, groups, after = time.perf_counter(), 0, 0
    for _ in range(pages):
        page = await client.results(after=after, limit=PAGE, samples=samples)
        groups, after = groups + len(page.groups), page.cursor
    return groups / (time.perf_counter() - begun)


async def _start_live(client: AsyncClient, sessions: int) -> None:
    for _ in range(sessions // GROUP_SIZE):
        await client.submit(one_call(GROUP_SIZE, wait=True))
    await _under_way(client, sessions)


async def _under_way(client: AsyncClient, sessions: int) -> None:
    """Wait until this number of sessions runs and the model call of each session has ended."""
    while True:
        status = await client.status()
        if status.sessions["running"] >= sessions and sum(e.sessions for e in status.engines) >= sessions:
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _submit(client: AsyncClient, groups: int) -> float:
    """Submit groups from several clients at once. Returns the accepted groups per second. No group starts, because no
    slot is free."""
    numbers = iter(range(groups))

    async def submit() -> None:
        for _ in numbers:
            await client.submit(one_call(GROUP_SIZE, wait=True))

    begun = time.perf_counter()
    await asyncio.gather(*(submit() for _ in range(CLIENTS)))
    return groups / (time.perf_counter() - begun)


def one_call(n: int, *, wait: bool) -> GroupSpec:
    """Return a group of `n` sessions of `OneCall`."""
    task = {
        "instruction": "Answer once.",
        "harness": {"agent": "bench.service:OneCall", "options": {"wait": wait}},
        "runtime": {"kind": "memory", "resources": {"memory_mb": 16}},
        "evaluator": {"kind": "callable", "path": "bench.service:grade"},
        "limits": {"agent_seconds": 86_400, "session_seconds": 86_400},
    }
    return GroupSpec.model_validate({"task": task, "n": n})


def grade(outcome: Outcome) -> float:
    """Grade the session that is copied."""
    return 1.0
