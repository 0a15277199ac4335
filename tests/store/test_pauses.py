"""Pauses of the queue: the sessions that they hold and release, and their effect after failures and restarts."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import StopReason
from outrider.store.database import Database
from outrider.store.pauses import MAX_PAUSES
from outrider.store.store import Store

from .conftest import NOW
from .world import FAILURE, group_row, result, session_ids, start, submit


async def put(store: Store, id: str, n: int = 1, *, tenant: str = "operator", harness: str = "", **labels: str) -> None:
    await submit(store, msgspec.structs.replace(group_row(id, n), tenant=tenant, harness=harness, labels=labels))


async def queued(store: Store) -> set[str]:
    return {session.group_id for session in await store.queued(100)}


async def pause(store: Store, harness: str | None = None, tenant: str | None = None, **labels: str) -> int:
    return await store.pauses.pause(labels, harness, tenant=tenant, who="test")


async def resume(store: Store, harness: str | None = None, tenant: str | None = None, **labels: str) -> int:
    return await store.pauses.resume(labels, harness, tenant=tenant)


async def test_a_pause_holds_what_it_names(store: Store) -> None:
    await put(store, "a", 2, run="x", set="s")
    await put(store, "b", run="y", harness="tools")
    await put(store, "c", tenant="carol", run="x")
    assert await pause(store, run="x", tenant="operator") == 2
    assert await queued(store) == {"b", "c"}
    assert await pause(store, run="x", tenant="operator") == 0
    await put(store, "later", run="x")
    assert await queued(store) == {"b", "c"}
    assert await pause(store, harness="tools") == 1
    assert await pause(store) == 1
    assert await queued(store) == set()
    assert await store.pauses.held(tenant=None) == 5
    assert await store.pauses.held(tenant="carol") == 1
    assert [each.tenant for each in await store.pauses.listed(tenant="carol")] == [None, None]
    assert await resume(store) == 1
    assert await queued(store) == {"c"}
    assert await resume(store, run="x", tenant="operator") == 3
    assert await resume(store, harness="tools") == 1
    assert await queued(store) == {"a", "b", "c", "later"}
    with pytest.raises(NotFound, match="no such pause"):
        await resume(store)


async def test_a_session_that_fails_during_a_pause_is_held(store: Store) -> None:
    await put(store, "a", 2, run="x")
    attempt = await start(store, "a.0")
    lost = await store.start_attempt("a.1", node="n", lease_until=50.0)
    assert await pause(store, run="x") == 0
    await store.requeue("a.0", attempt, FAILURE)
    await store.recover(now=60.0)
    assert lost == 1
    assert await queued(store) == set()
    with pytest.raises(Conflict, match="held by a pause"):
        await start(store, "a.0")
    assert await resume(store, run="x") == 2
    assert await start(store, "a.0") == 2


async def test_a_held_session_can_be_cancelled(store: Store) -> None:
    await pause(store)
    await put(store, "a", 2)
    await store.cancel_session("a.0")
    await store.finish("a.0", 0, result("a.0", 0, reason=StopReason.CANCELLED, reward=None))
    assert await store.pauses.held(tenant=None) == 1
    await store.cancel_group("a")
    assert await store.pauses.held(tenant=None) == 0
    assert await resume(store) == 0
    assert await queued(store) == set()


async def test_the_time_of_a_pause_does_not_count_towards_the_wait(store: Store) -> None:
    """A pause that lasts longer than `expires_seconds` does not end the sessions when it ends. Several pauses do not
    extend the wait."""
    created = NOW - 100.0
    group = group_row("a", 1, created=created)
    await pause(store)
    await store.create_group(group, b"{}", session_ids(group), expires=created + 30.0)
    assert not await store.expire(now=NOW)
    assert await resume(store) == 1
    assert not await store.expire(now=NOW + 29.0)
    assert await queued(store) == {"a"}
    assert await pause(store) == 1
    assert not await store.expire(now=NOW + 30.0)
    assert await resume(store) == 1
    assert await store.next_due(after=NOW) == NOW + 30.0
    assert await store.expire(now=NOW + 30.0)


async def test_held_sessions_count_in_the_queue(store: Store) -> None:
    await put(store, "a", 3, run="x")
    await put(store, "b")
    await pause(store, run="x")
    assert (await store.queue_length()).sessions == 4


async def test_pauses_survive_a_restart(kept: Database) -> None:
    async with Store(kept) as store:
        await put(store, "a", run="x")
        await pause(store, run="x")
    async with Store(kept) as store:
        assert await queued(store) == set()
        assert await resume(store, run="x") == 1
        assert await queued(store) == {"a"}


async def test_pauses_have_a_bound(store: Store) -> None:
    for number in range(MAX_PAUSES):
        await pause(store, run=str(number), tenant="alice")
    await pause(store, run="0", tenant="alice")  # as a client repeats a call whose reply was lost
    with pytest.raises(Conflict, match="100 pauses already"):
        await pause(store, run="more", tenant="alice")
    assert await pause(store, run="more", tenant="bob") == 0
