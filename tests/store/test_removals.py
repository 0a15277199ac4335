"""Removal of groups from the store: a removed group leaves nothing behind, and a group that is still needed stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import GroupState, SessionState
from outrider.store.database import Database
from outrider.store.sqlite import SPARE, sqlite_store
from outrider.store.store import Store

from .test_images import CAT, DOG, showing
from .world import FAILURE, group_row, result, start, submit, turn

TABLES = ("groups", "sessions", "turns", "frozen_turns", "events", "outbox", "images", "image_uses")


class Ticking:
    """A clock that advances by one second with each call."""

    def __init__(self) -> None:
        self._times: Iterator[int] = iter(range(1000, 1_000_000))

    def __call__(self) -> float:
        return float(next(self._times))


@pytest_asyncio.fixture
async def store(empty: Database) -> AsyncIterator[Store]:
    async with Store(empty, clock=Ticking()) as opened:
        yield opened


async def finish(store: Store, name: str, *, n: int = 1, callback_url: str | None = None) -> None:
    """Store a done group. Each of its sessions has two turns, one of them with an image, and a turn of a frozen
    model."""
    await submit(store, group_row(name, n=n, callback_url=callback_url, key=f"key of {name}"))
    for index in range(n):
        id = f"{name}.{index}"
        await start(store, id)
        await store.add_turn(id, 1, turn(0))
        await store.add_turn(id, 1, showing(1, CAT))
        await store.add_turn(id, 1, turn(0), model="judge")
        await store.finish(id, 1, result(id, 1))


async def removable(store: Store, *, force: bool = False) -> list[str]:
    return [one.id for one in await store.removals.candidates(force=force, limit=100)]


async def remove(store: Store, *names: str, force: bool = False, rows: int = 100) -> list[str]:
    hidden = await store.removals.hide(names, force=force)
    while await store.removals.erase(rows):
        pass
    return hidden


async def rows_of(store: Store) -> dict[str, int]:
    """Return the number of rows of each table."""
    database = store._db
    return {
        table: (await database.read(lambda tx, table=table: tx.fetch(f"SELECT COUNT(*) FROM {table}")))[0][0]  # type: ignore[misc]
        for table in TABLES
    }


async def test_a_removed_group_leaves_nothing_behind(store: Store) -> None:
    empty = await rows_of(store)
    await finish(store, "a", n=3)
    await finish(store, "b")
    before = await rows_of(store)
    assert await remove(store, "a") == ["a"]
    await finish(store, "a2", n=3)
    assert await rows_of(store) == before
    await remove(store, "b", "a2")
    assert await rows_of(store) == empty
    assert await store.removals.size() == 0


@pytest.mark.parametrize("rows", [1, 2, 7])
async def test_it_is_erased_in_small_steps(store: Store, rows: int) -> None:
    empty = await rows_of(store)
    await finish(store, "a", n=4)
    await store.removals.hide(["a"], force=False)
    steps = 1
    while await store.removals.erase(rows):
        steps += 1
    assert steps >= 4 * 3 // rows
    assert await rows_of(store) == empty


async def test_a_run_leaves_no_row_in_the_queue(store: Store) -> None:
    """The row of a bucket goes with the last group of its run, unless a session of another group still needs it."""

    async def put(name: str, run: str, n: int = 1) -> None:
        await submit(store, msgspec.structs.replace(group_row(name, n=n), labels={"run": run}))

    async def shares() -> int:
        return len(await store._db.read(lambda tx: tx.fetch("SELECT 1 FROM queue_shares")))

    for number in range(3):
        await put(f"g{number}", f"run {number}")
    await put("running", "run 1")
    await store.pauses.pause({"run": "run 2"}, None, tenant=None, who="test")
    await put("held", "run 2")
    attempt = await start(store, "running.0")
    for number in range(3):
        await store.cancel_session(f"g{number}.0")
        await store.finish(f"g{number}.0", 0, result(f"g{number}.0", 0))
    await remove(store, "g0", "g1", "g2")
    assert await shares() == 2
    await store.requeue("running.0", attempt, FAILURE)
    await store.pauses.resume({"run": "run 2"}, None, tenant=None)
    assert {session.group_id for session in await store.queued(9)} == {"running", "held"}


async def test_it_vanishes_before_it_is_erased(store: Store) -> None:
    await finish(store, "a")
    await finish(store, "b")
    await store.removals.hide(["a"], force=False)
    for ask in (store.group("a"), store.spec("a"), store.sessions("a"), store.session("a.0"), store.turns("a.0")):
        with pytest.raises(NotFound):
            await ask
    assert [group.id for group in await store.groups()] == ["b"]
    assert [group.id for group in await store.results(after=0, limit=10)] == ["b"]
    assert await store.removals.hidden_sessions() == ["a.0"]
    assert await removable(store) == ["b"]
    assert (await store.counts())[SessionState.DONE] == 1
    for attempt in (store.cancel_group("a"), store.finish("a.0", 1, result("a.0", 1))):
        with pytest.raises(NotFound):
            await attempt


async def test_what_was_begun_is_finished_by_the_next_service(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        empty = await rows_of(store)
        await finish(store, "a", n=3)
        await store.removals.hide(["a"], force=False)
        await store.removals.erase(4)
    async with sqlite_store(path) as store:
        assert await store.recover(now=1e12) == []
        assert await store.removals.hidden_sessions() == ["a.1", "a.2"]
        while await store.removals.erase(4):
            pass
        assert await rows_of(store) == empty


async def test_cursors_never_repeat(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        await finish(store, "a")
        await finish(store, "b")
        last_event = await store.last_event()
        await remove(store, "b", "a")
        assert await store.last_cursor() == 2
        assert await store.last_event() == last_event
    async with sqlite_store(path) as store:
        await finish(store, "c")
        assert [(group.id, group.cursor) for group in await store.results(after=0, limit=9)] == [("c", 3)]
        assert (await store.events(after=0, limit=1))[0].cursor == last_event + 1


async def test_only_what_is_done_delivered_and_acknowledged_is_removed(store: Store) -> None:
    await finish(store, "a")
    await finish(store, "pushed", callback_url="http://c/")
    await finish(store, "c")
    await submit(store, group_row("active"))
    await store.consumers.enter("fast", at=3)
    await store.consumers.enter("slow", at=2)
    assert await removable(store) == ["a"]
    assert await removable(store, force=True) == ["a", "c"]
    held = await store.removals.held(force=False)
    assert (held.unacknowledged, held.undelivered) == (1, 1)
    # `hide` checks the conditions itself: they may have changed since `candidates` was called.
    assert await store.removals.hide(["a", "pushed", "c", "active", "none"], force=False) == ["a"]
    await store.delivered("pushed")
    await store.consumers.remove("slow")
    assert await store.removals.hide(["pushed", "c", "active", "a"], force=False) == ["pushed", "c"]
    assert (await store.group("active")).state is GroupState.ACTIVE


async def test_a_dead_letter_keeps_its_group_until_it_is_discarded(store: Store) -> None:
    await finish(store, "a", callback_url="http://c/")
    await store.give_up_delivery("a", fault="gone")
    assert await removable(store, force=True) == []
    await store.discard_delivery("a")
    assert await removable(store) == ["a"]


async def test_a_consumer_that_goes_back_keeps_what_is_left(store: Store) -> None:
    for name in "abc":
        await finish(store, name)
    await store.consumers.enter("trainer", at=3)
    await remove(store, "a")
    back = await store.consumers.acknowledge("trainer", 0, rewind=True)
    assert (back.cursor, back.lag) == (0, 2)
    assert await removable(store) == []


async def test_an_image_stays_as_long_as_somebody_shows_it(store: Store) -> None:
    await finish(store, "a")
    await finish(store, "b")
    await submit(store, group_row("active", n=1))
    await start(store, "active.0")
    await store.add_turn("active.0", 1, showing(0, DOG))
    await remove(store, "a")
    assert await store.image(CAT.digest) == CAT
    assert await store.turns("b.0", images=True) == [turn(0), showing(1, CAT)]
    await remove(store, "b")
    with pytest.raises(NotFound):
        await store.image(CAT.digest)
    assert await store.image(DOG.digest) == DOG


async def test_an_image_counts_with_the_last_group_that_uses_it(store: Store) -> None:
    assert not await store.removals.has_images()
    await finish(store, "a", n=2)
    await finish(store, "b")
    await submit(store, group_row("active", n=1))
    await start(store, "active.0")
    await store.add_turn("active.0", 1, showing(0, DOG))
    assert await store.removals.has_images()
    uses: dict[str, int] = {}
    assert await store.removals.image_bytes("a", uses) == 0
    assert uses == {CAT.digest: 1}
    assert await store.removals.image_bytes("b", uses) == CAT.size
    assert (await store.removals.image_bytes("a", {}), await store.removals.image_bytes("none", {})) == (0, 0)
    await remove(store, "b")
    assert await store.removals.image_bytes("a", {}) == CAT.size
    assert await store.removals.image_bytes("active", {}) == DOG.size


async def test_removals_run_beside_submissions_and_ends(store: Store) -> None:
    """In any order of these calls, a removed group leaves no rows, and the totals stay right."""
    for number in range(20):
        await finish(store, f"old{number}")

    async def erase() -> None:
        while names := await removable(store):
            await remove(store, *names[:3], rows=5)

    await asyncio.gather(erase(), erase(), *(finish(store, f"new{number}") for number in range(10)))
    await erase()
    assert await store.removals.size() == 0
    assert (await store.counts())[SessionState.DONE] == 0
    assert set((await rows_of(store)).values()) == {0}
    assert await store.last_cursor() == 30


async def test_a_key_is_free_again_once_its_group_is_removed(store: Store) -> None:
    await finish(store, "a")
    with pytest.raises(Conflict):
        await submit(store, group_row("a2", n=1, key="key of a"), b'{"other": 1}')
    await remove(store, "a")
    assert (await submit(store, group_row("a2", n=1, key="key of a"), b'{"other": 1}')).id == "a2"


async def test_the_file_gets_smaller(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        for name in "abcdef":
            await submit(store, group_row(name, n=1))
            await start(store, f"{name}.0")
            for index in range(40):
                await store.add_turn(f"{name}.0", 1, turn(index, text="x" * 50_000))
            await store.finish(f"{name}.0", 1, result(f"{name}.0", 1))
        assert await store.removals.size() > 6 * 40 * 50_000
        await remove(store, *"abcdef")
        steps = 1
        while await store.removals.shrink():
            steps += 1
        assert steps > 5
    assert path.stat().st_size < 12_000_000 / SPARE + 300_000
