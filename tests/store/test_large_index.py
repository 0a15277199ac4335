"""Lists stay fast with 100,000 stored sessions."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from outrider.lifecycle import StopReason
from outrider.store import rows
from outrider.store.database import Connection
from outrider.store.run_index import lists
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.lists import SessionFilter
from outrider.store.run_index.queries import Queries
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store

from .world import FAILURE, group_row, result, submit

GROUPS, N = 12_500, 8
PAGE_SECONDS = 0.1


async def store_many(store: Store) -> None:
    """Store one group by a normal submission, and 100,000 done sessions by SQL, with ten different results."""
    await submit(store, group_row("first", 1))
    packed = []
    for kind in range(10):
        made = result("g.0", 1, reward=None if kind == 0 else kind / 10)
        error = msgspec.structs.replace(FAILURE, message=f"sandbox {kind} was lost " + "in a long text " * 15)
        if kind == 0:
            made = msgspec.structs.replace(made, stop_reason=StopReason.ERROR, error=error)
        packed.append(rows.pack(made))

    async def body(tx: Connection) -> None:
        [[spec]] = await tx.fetch("SELECT spec FROM groups")
        await tx.execute_many(
            """INSERT INTO groups (id, spec, n, priority, state, cancelled, open_sessions, created, labels, bytes,
                tenant, harness) VALUES (?, ?, 8, 0, 'done', 0, 0, ?, ?, 0, ?, 'tools')""",
            (
                (f"g-{g:08d}", spec, 1000.0 + g, f'{{"run":"r{g % 50}","task":"t{g % 500}"}}', f"tenant{g % 3}")
                for g in range(GROUPS)
            ),
        )
        await tx.execute_many(
            """INSERT INTO sessions (id, group_id, sample_index, state, attempt, priority, created, updated, waiting,
                bucket, result) VALUES (?, ?, ?, 'done', 1, 0, ?, 2000, 0, '', ?)""",
            (
                (f"s-{g:08d}-{i}", f"g-{g:08d}", i, 1000.0 + g, packed[(g * N + i) % 10])
                for g in range(GROUPS)
                for i in range(N)
            ),
        )

    await store._db.write(body)


@pytest.mark.deep
@pytest.mark.timeout(300)
async def test_a_page_of_100_000_sessions_takes_a_tenth_of_a_second(tmp_path: Path) -> None:
    filters = (
        SessionFilter(),
        SessionFilter(states=("done",), labels={"run": "r7"}),
        SessionFilter(labels={"run": "none"}),
        SessionFilter(min_reward=0.95),
        SessionFilter(stop_reason="error", error="runtime_failure"),
        SessionFilter(error="unknown"),
        SessionFilter(harness="other"),
        SessionFilter(text="SANDBOX 0 was"),
        SessionFilter(text="in no text"),
        SessionFilter(since=13_000.0, until=13_100.0),
    )
    async with sqlite_store(tmp_path / "store") as store:
        await store_many(store)
        async with RunIndex(store, tmp_path / "runs.sqlite3") as index:
            began = time.perf_counter()
            await index.chore()
            print(
                f"made in {time.perf_counter() - began:.1f} s, {(tmp_path / 'runs.sqlite3').stat().st_size >> 20} MiB"
            )
            for wanted in filters:
                for tenant in (None, "tenant1"):
                    for after in (None, "s-00006000-3" if tenant is None else "s-00006001-3"):
                        seconds = []
                        for find in (lists.find_sessions, lists.find_groups):
                            # The fastest of three attempts counts, because other programs use the machine, too.
                            for attempt in range(3):
                                began = time.perf_counter()
                                await index.catch_up()
                                ask = partial(find, wanted=wanted, tenant=tenant, after=after, limit=100)
                                ids = await index.read(ask)
                                if find is lists.find_sessions:
                                    assert len(await store.runs.sessions(ids)) == len(ids)
                                seconds.append((time.perf_counter() - began, attempt))
                            fastest = min(seconds)[0]
                            assert fastest < PAGE_SECONDS, (wanted, tenant, after, fastest)
                            seconds.clear()
            began = time.perf_counter()
            sql = "SELECT labels->>'run', stop_reason, count(*), avg(reward) FROM sessions GROUP BY 1, 2"
            reply = msgspec.json.decode(await Queries(index).run(sql, None))
            print(f"a query over all sessions: {time.perf_counter() - began:.2f} s")
            assert sum(row[2] for row in reply["rows"]) == GROUPS * N + 1
