"""The recorder of a timeline: what it keeps, bounds and returns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from outrider.errors import ServiceError
from outrider.sessions.attempt import AttemptStore
from outrider.sessions.timelines import BATCH_BYTES, Timelines
from outrider.timeline import MOST_CHARACTERS, MOST_ENTRIES, Entry, EntryKind, Timeline, TimelinePart


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def entries(part: TimelinePart | None) -> list[Entry]:
    assert part is not None
    return msgspec.msgpack.decode(part.entries, type=list[Entry])


def test_each_change_is_taken_once() -> None:
    timeline = Timeline("s-1", 2, clock=Clock())
    assert timeline.take() is None
    number = timeline.begin(EntryKind.SANDBOX, "process", sandbox="agent")
    first = timeline.take()
    assert first is not None
    assert (first.session_id, first.attempt, first.part) == ("s-1", 2, 0)
    assert entries(first) == [Entry(number, EntryKind.SANDBOX, "process", 101.0, None, {"sandbox": "agent"})]
    assert timeline.take() is None
    timeline.end(number, warm=True)
    timeline.end(number, warm=False)  # no effect: the entry has ended
    timeline.rename(number, "another")
    second = timeline.take()
    assert second is not None
    assert second.part == 1
    about = {"sandbox": "agent", "warm": True}
    assert entries(second) == [Entry(number, EntryKind.SANDBOX, "process", 101.0, 102.0, about)]


def test_an_entry_that_goes_on_may_be_renamed() -> None:
    timeline = Timeline("s-1", 1, clock=Clock())
    number = timeline.add(EntryKind.PROCESS, "sh", 5.0, None, pid=7)
    timeline.rename(number, "python3 run.py")
    timeline.end(number, at=9.0, exit_code=1)
    assert entries(timeline.take()) == [
        Entry(number, EntryKind.PROCESS, "python3 run.py", 5.0, 9.0, {"pid": 7, "exit_code": 1})
    ]


def test_the_entries_of_a_kind_are_bounded_and_the_rest_is_counted() -> None:
    timeline = Timeline("s-1", 1, clock=Clock())
    for number in range(MOST_ENTRIES + 5):
        timeline.add(EntryKind.PROCESS, f"p{number}", 1.0, 2.0)
    late = timeline.begin(EntryKind.PROCESS, "late")
    timeline.end(late)
    timeline.add(EntryKind.STAGE, "run", 1.0, 2.0)  # other kinds still have room
    found = entries(timeline.take())
    assert [entry.kind for entry in found] == [EntryKind.PROCESS] * MOST_ENTRIES + [EntryKind.STAGE, EntryKind.LEFT_OUT]
    assert found[-1].data == {"process": 6}
    assert timeline.take() is None


def test_texts_are_short_storable_and_without_secrets() -> None:
    timeline = Timeline("s-1", 1, secrets=["hunter22"], clock=Clock())
    key = "outrider_s_" + "k" * 40
    timeline.add(EntryKind.COMMAND, f"login hunter22 {key} \udcff" + "x" * 1000, 1.0, 2.0)
    (entry,) = entries(timeline.take())
    assert entry.name.startswith("login [redacted] [redacted] \\udcff")
    assert len(entry.name) == MOST_CHARACTERS


def test_times_of_stored_turns() -> None:
    timeline = Timeline("s-1", 1, clock=Clock())
    timeline.note_stored(0, None)
    timeline.note_stored(0, "judge")
    (entry,) = entries(timeline.take())
    assert (entry.kind, entry.data) == (EntryKind.STORED, {"/0": 101.0, "judge/0": 102.0})


class Store:
    """The part of a node's store that stores timelines."""

    def __init__(self) -> None:
        self.batches: list[list[TimelinePart]] = []
        self.failing = False

    async def add_timeline(self, parts: Sequence[TimelinePart]) -> None:
        if self.failing:
            raise ServiceError("the store is gone")
        await asyncio.sleep(0)
        self.batches.append(list(parts))


def a_large_timeline(name: str) -> Timeline:
    timeline = Timeline(name, 1, clock=Clock())
    for number in range(MOST_ENTRIES):
        timeline.add(EntryKind.PROCESS, "x" * MOST_CHARACTERS, 1.0, 2.0, pid=number)
    return timeline


async def test_batches_are_bounded_in_bytes_and_parts_wait_for_the_store() -> None:
    store = Store()
    timelines = Timelines(cast(AttemptStore, store))
    store.failing = True
    for number in range(20):
        with timelines.keeping(a_large_timeline(f"s-{number}")):
            pass
        with pytest.raises(ServiceError):
            await timelines.store()
    store.failing = False
    await timelines.store()
    assert [part.session_id for batch in store.batches for part in batch] == [f"s-{number}" for number in range(20)]
    assert len(store.batches) > 1
    assert all(len(batch) == 1 or sum(len(part.entries) for part in batch) <= BATCH_BYTES for batch in store.batches)
    await timelines.store()
    assert sum(map(len, store.batches)) == 20


async def test_while_the_store_fails_the_newest_parts_are_kept() -> None:
    store = Store()
    timelines = Timelines(cast(AttemptStore, store), most_unstored=1 << 20)
    store.failing = True
    for number in range(20):
        with timelines.keeping(a_large_timeline(f"s-{number}")):
            pass
        with pytest.raises(ServiceError):
            await timelines.store()
    store.failing = False
    await timelines.store()
    kept = [part.session_id for batch in store.batches for part in batch]
    assert 0 < len(kept) < 20
    assert kept == [f"s-{number}" for number in range(20)][-len(kept) :]


async def test_a_node_that_ends_while_entries_are_stored_stores_each_once() -> None:
    store = Store()
    timelines = Timelines(cast(AttemptStore, store))
    for number in range(10):
        with timelines.keeping(a_large_timeline(f"s-{number}")):
            pass
    await asyncio.gather(timelines.store(), timelines.store())
    assert [part.session_id for batch in store.batches for part in batch] == [f"s-{number}" for number in range(10)]


def test_failed_calls_are_bounded_and_have_no_secret() -> None:
    timeline = Timeline("s-1", 1, secrets=["s3cret-of-the-task"], clock=Clock(), first=7)
    for _ in range(MOST_ENTRIES + 5):
        error = ServiceError("no s3cret-of-the-task" + "x" * MOST_CHARACTERS)
        timeline.note_failed_call(error, 90.0, action="generate", dialect="chat", status=500)
    part = timeline.take()
    assert part is not None
    assert part.part == 7
    *found, left = entries(part)
    assert (found[0].number, found[0].kind, found[0].name) == (7, EntryKind.FAILED_CALL, "service_error")
    assert (found[0].start, found[0].end) == (90.0, 101.0)
    assert len(found) == MOST_ENTRIES
    assert left.data == {"failed_call": 5}
    assert "s3cret" not in found[0].data["message"]
    assert len(found[0].data["message"]) == MOST_CHARACTERS
