"""The data of a store that metrics use: the backlog, the durations of commits, and the feed of stored turns."""

from __future__ import annotations

import pytest

from outrider.counts import SECONDS
from outrider.errors import Conflict
from outrider.lifecycle import SessionState
from outrider.store.rows import Backlog
from outrider.store.store import AddedTurn, Store

from .world import group_row, result, start, submit, turn


async def test_what_waits_is_counted(store: Store) -> None:
    assert await store.backlog() == Backlog(None, 0, 0, 0)
    for name, created in (("a", 300.0), ("b", 200.0), ("c", 100.0)):
        await submit(store, group_row(name, 1, created=created, callback_url="http://c/"))
    await start(store, "c.0")
    assert (await store.backlog()).oldest_waiting == 200.0
    for name in "abc":
        await store.finish(f"{name}.0", int(name == "c"), result(f"{name}.0", int(name == "c")))
    await store.give_up_delivery("a", fault="nobody listens")
    backlog = await store.backlog()
    assert (backlog.oldest_waiting, backlog.pending_callbacks, backlog.given_up_callbacks) == (None, 2, 1)
    assert backlog.stored_bytes > 0
    assert (await store.counts())[SessionState.DONE] == 3


async def test_each_committed_write_is_timed(store: Store) -> None:
    before = sum(store.commit_seconds().counts)
    await submit(store, group_row("a", 1))
    with pytest.raises(Conflict):
        await start(store, "a.0") and await start(store, "a.0")
    found = store.commit_seconds()
    assert len(found.counts) == len(SECONDS) + 1
    assert sum(found.counts) == before + 2
    assert found.total > 0.0


async def test_a_turn_is_published_once_it_is_stored(store: Store) -> None:
    added: list[AddedTurn] = []
    store.turns_added.subscribe(added.append)
    await submit(store, group_row("a", 1))
    attempt = await start(store, "a.0")
    said = turn(0)
    await store.add_turn("a.0", attempt, said)
    await store.add_turn("a.0", attempt, said, model="judge")
    with pytest.raises(Conflict):
        await store.add_turn("a.0", attempt, said)
    assert added == [AddedTurn("a.0", attempt, said, None), AddedTurn("a.0", attempt, said, "judge")]
