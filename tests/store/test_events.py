"""Events and deliveries in the store."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import SessionState
from outrider.store.rows import Delivery, EventKind
from outrider.store.store import Store

from .conftest import NOW
from .world import FAILURE, LEASE, group_row, kinds, result, start, submit


async def test_every_change_is_an_event_in_order(store: Store) -> None:
    await submit(store, group_row(n=1, priority=3))
    await start(store, "g.0", node="n1")
    await store.requeue("g.0", 1, FAILURE)
    await start(store, "g.0", node="n2")
    await store.set_state("g.0", 2, SessionState.READY)
    await store.finish("g.0", 2, result("g.0", 2, reward=0.25))
    events = await store.events(after=0, limit=100)
    started = {"state": "initializing", "attempt": 1, "node": "n1"}
    assert [(event.kind, event.session_id, event.data) for event in events] == [
        (EventKind.GROUP_CREATED, None, {"n": 1, "priority": 3}),
        (EventKind.SESSION_STATE, "g.0", started),
        (EventKind.SESSION_RETRY, "g.0", {"attempt": 1, "error": msgspec.to_builtins(FAILURE)}),
        (EventKind.SESSION_STATE, "g.0", started | {"attempt": 2, "node": "n2"}),
        (EventKind.SESSION_STATE, "g.0", {"state": "ready", "attempt": 2}),
        (
            EventKind.SESSION_DONE,
            "g.0",
            {"attempt": 2, "stop_reason": "completed", "reward": 0.25, "error": None},
        ),
        (EventKind.GROUP_DONE, None, {"cursor": 1, "cancelled": False}),
    ]
    cursors = [event.cursor for event in events]
    assert cursors == sorted(set(cursors))
    assert {(event.group_id, event.at) for event in events} == {("g", NOW)}
    assert await store.events(after=cursors[2], limit=2) == events[3:5]
    assert await store.events(after=cursors[-1], limit=2) == []


async def test_a_refused_change_leaves_no_event(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    before = await kinds(store)
    with pytest.raises(Conflict):
        await start(store, "g.0")
    with pytest.raises(Conflict):
        await store.set_state("g.0", 1, SessionState.RUNNING)
    assert await kinds(store) == before


async def test_deliveries_come_due_are_put_off_and_end(store: Store) -> None:
    for name in "ab":
        await submit(store, group_row(name, n=1, callback_url=f"http://{name}/"))
        await store.finish(f"{name}.0", 0, result(f"{name}.0", 0))
    assert await store.deliveries(now=NOW - 1, limit=10) == []
    assert [row.group_id for row in await store.deliveries(now=NOW, limit=10)] == ["a", "b"]
    assert [row.group_id for row in await store.deliveries(now=NOW, limit=1)] == ["a"]
    await store.delivery_failed("a", next_try=NOW + 5)
    assert [row.group_id for row in await store.deliveries(now=NOW, limit=10)] == ["b"]
    await store.delivered("b")
    put_off = Delivery(group_id="a", url="http://a/", receiver="a", tries=1, next_try=NOW + 5, since=NOW)
    assert await store.deliveries(now=LEASE, limit=10) == [put_off]
    with pytest.raises(NotFound):
        await store.delivered("b")
