"""`python -m service.collect DATABASE ARTIFACTS`: remove all finished groups. The test kills the process meanwhile.

Prints `begun` whenever groups have been hidden.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.config import RetentionConfig
from outrider.service.retention import Retention
from outrider.spec import GcSpec
from outrider.store.artifacts import ArtifactStore
from outrider.store.removals import Removals
from outrider.store.sqlite import SqliteDatabase
from outrider.store.store import Store


class Telling(Removals):
    async def hide(self, group_ids: Sequence[str], *, force: bool) -> list[str]:
        hidden = await super().hide(group_ids[:5], force=force)  # few at a time: many steps at which a kill may come
        print("begun", flush=True)
        return hidden


async def main() -> None:
    path, folder = map(Path, sys.argv[1:])
    database = SqliteDatabase(path)
    store = Store(database)
    store.removals = Telling(database)
    async with store:
        await Retention(store, ArtifactStore(folder), RetentionConfig()).collect(GcSpec(days=0))


if __name__ == "__main__":
    asyncio.run(main())
