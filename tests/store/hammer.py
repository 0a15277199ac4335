"""A program that uses a store like a small service, until a test kills it: `python -m store.hammer DATABASE SEED
[drain]`.

DATABASE is an SQLite file or the URL of a PostgreSQL database. The program prints one line for each write that the
store has acknowledged: `group ID`, `turn SESSION ATTEMPT INDEX` or `done GROUP`. With `drain`, it submits no groups and
exits when every group is done.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import Conflict
from outrider.store.postgresql import postgresql_store
from outrider.store.rows import SessionRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from outrider.store.task_key import TaskKey

from .world import FAILURE, group_row, result, start, submit, turn

WORKERS = 8
MAX_GROUP = 5


class Hammer:
    def __init__(self, store: Store, seed: int, drain: bool) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._seed = seed
        self._drain = drain

    async def run(self) -> None:
        await self._recover()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(self._work())
            if not self._drain:
                tasks.create_task(self._submit())

    async def _recover(self) -> None:
        """Queue again the sessions that were running, and end those that were to end, as a service does first."""
        await self._store.recover(now=math.inf)
        await self._end(await self._store.to_end())

    async def _submit(self) -> None:
        for number in range(1_000_000):
            group = group_row(
                f"g{self._seed}-{number}",
                self._random.randint(1, MAX_GROUP),
                key=f"k{self._seed}-{number}",
                callback_url="http://trainer/",
                min_usable=self._random.choice([None, None, 1]),
            )
            await submit(self._store, group)
            acknowledge("group", group.id)

    async def _work(self) -> None:
        while (waiting := await self._store.queued(WORKERS)) or not self._drain:
            if not waiting:
                continue
            try:
                await self._attempt(self._random.choice(waiting))
            except Conflict:
                continue  # another worker was faster, or the group was cancelled

    async def _attempt(self, row: SessionRow) -> None:
        attempt = await start(self._store, row.id)
        for index in range(self._random.randint(0, 3)):
            await self._store.add_turn(row.id, attempt, turn(index))
            acknowledge("turn", row.id, attempt, index)
        chance = self._random.random()
        if chance < 0.1:
            await self._cancel(row.group_id)
        elif chance < 0.3:
            await self._store.requeue(row.id, attempt, FAILURE)
        elif chance < 0.35:
            await self._end([await self._store.cancel_session(row.id)])
        elif await self._store.finish(row.id, attempt, result(row.id, attempt)):
            acknowledge("done", row.group_id)
        else:
            await self._end(await self._store.to_end(row.group_id))

    async def _cancel(self, group_id: str) -> None:
        await self._end(await self._store.cancel_group(group_id))

    async def _end(self, rows: Sequence[SessionRow]) -> None:
        for row in rows:
            assert row.ending is not None
            ended = result(row.id, row.attempt, reason=row.ending, reward=None)
            try:
                last = await self._store.finish(row.id, row.attempt, ended)
            except Conflict:
                continue  # its worker was faster
            if last:
                acknowledge("done", row.group_id)


def acknowledge(*words: object) -> None:
    print(*words, flush=True)


async def main() -> None:
    database, seed = sys.argv[1], int(sys.argv[2])
    async with (
        postgresql_store(database, key=TaskKey(bytes(32)))
        if "://" in database
        else sqlite_store(Path(database)) as store
    ):
        await Hammer(store, seed, drain=sys.argv[3:] == ["drain"]).run()


if __name__ == "__main__":
    asyncio.run(main())
