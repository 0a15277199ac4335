"""Stored timings of a trainer's phases, in each kind of database."""

from __future__ import annotations

import itertools

from outrider.store.database import Database
from outrider.store.store import Store
from outrider.store.training_timings import TrainingTimings


async def test_records_are_of_a_tenant_and_of_a_step(store: Store) -> None:
    timings = store.training_timings
    await timings.keep("a", 0, 2, b"{2}")
    await timings.keep("a", 0, 1, b"{1}")
    await timings.keep("a", 0, 1, b"{one}")
    await timings.keep("b", 0, 1, b"{b}")
    assert await timings.all("a") == [b"{one}", b"{2}"]
    assert await timings.find("b", 0, 1) == b"{b}"
    assert await timings.find("b", 0, 2) is None


async def test_the_first_records_make_room(empty: Database) -> None:
    async with Store(empty):
        timings = TrainingTimings(empty, itertools.count(1000.0).__next__, most_timings=3)
        for step in (5, 4, 3, 2, 1):
            await timings.keep("a", 0, step, b"%d" % step)
        await timings.keep("b", 0, 9, b"9")
        assert await timings.all("a") == [b"1", b"2", b"3"]
        assert await timings.all("b") == [b"9"]
