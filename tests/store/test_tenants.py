"""Tenants in the store: each tenant reads, counts and retains only its own rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import GroupState, SessionState
from outrider.store.consumers import MAX_CONSUMERS
from outrider.store.rows import TokenRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store

from .test_images import CAT, showing
from .world import group_row, result, start, submit, turn


async def put(store: Store, id: str, tenant: str, *, key: str | None = None, n: int = 1, spec: bytes = b"{}") -> None:
    group = group_row(id, n, key=key, callback_url="http://c/")
    await submit(store, msgspec.structs.replace(group, tenant=tenant), spec)


async def finish(store: Store, id: str, tenant: str) -> None:
    """Store a done group with turns, an image and a dead letter."""
    await put(store, id, tenant)
    await start(store, f"{id}.0")
    await store.add_turn(f"{id}.0", 1, showing(0, CAT))
    await store.add_turn(f"{id}.0", 1, turn(0), model="judge")
    await store.finish(f"{id}.0", 1, result(f"{id}.0", 1))
    await store.give_up_delivery(id, fault="gone")


async def remove(store: Store, id: str) -> bool:
    hidden = await store.removals.hide([id], force=False)
    while await store.removals.erase(100):
        pass
    return bool(hidden)


async def test_another_tenants_things_are_not_found(store: Store) -> None:
    await finish(store, "g", "a")
    asks: tuple[Callable[[str | None], Awaitable[object]], ...] = (
        lambda tenant: store.group("g", tenant=tenant),
        lambda tenant: store.session("g.0", tenant=tenant),
        lambda tenant: store.turns("g.0", tenant=tenant),
        lambda tenant: store.frozen_turns("g.0", tenant=tenant),
        lambda tenant: store.image(CAT.digest, tenant=tenant),
        lambda tenant: store.cancel_group("g", tenant=tenant),
        lambda tenant: store.cancel_session("g.0", tenant=tenant),
    )
    for ask in asks:
        with pytest.raises(NotFound):
            await ask("b")
        for tenant in ("a", None):
            await ask(tenant)


async def test_lists_and_counts_are_those_of_the_tenant(store: Store) -> None:
    await finish(store, "first", "a")
    await finish(store, "other", "b")
    await finish(store, "second", "a")
    await put(store, "active", "a", n=3)
    everybody = {"a": ["first", "second"], "b": ["other"], "nobody": [], None: ["first", "other", "second"]}
    for tenant, ids in everybody.items():
        assert [group.id for group in await store.results(after=0, limit=9, tenant=tenant)] == ids
        assert [one.group_id for one in await store.dead_deliveries(limit=9, tenant=tenant)] == ids[::-1]
        assert {event.group_id for event in await store.events(after=0, limit=99, tenant=tenant)} - {"active"} == set(
            ids
        )
        done = await store.groups(state=GroupState.DONE, tenant=tenant)
        assert {group.id for group in done} == set(ids)
        assert {group.id for group in await store.groups(tenant=tenant)} - {"active"} == set(ids)
        counts = await store.counts(tenant=tenant)
        assert counts[SessionState.DONE] == len(ids)
        assert counts[SessionState.QUEUED] == (3 if tenant in ("a", None) else 0)
    assert [await store.last_cursor(tenant=tenant) for tenant in ("a", "b", "nobody", None)] == [3, 2, 0, 3]
    assert [group.id for group in await store.results(after=1, limit=1, tenant="a")] == ["second"]


async def test_a_key_is_a_tenants(store: Store) -> None:
    for id, tenant, spec in (("g1", "a", b"{}"), ("g2", "b", b'{"other": 1}'), ("g3", "a.b", b"{}")):
        await put(store, id, tenant, key="k", spec=spec)
    assert {(group.id, group.idempotency_key) for group in await store.groups()} == {(f"g{n}", "k") for n in (1, 2, 3)}
    with pytest.raises(Conflict, match="group g1"):
        await put(store, "g4", "a", key="k", spec=b'{"other": 1}')
    assert [await store.has_key(tenant, "k") for tenant in ("a", "b", "c")] == [True, True, False]
    await put(store, "g5", "a", key="b/k")
    assert (await store.group("g5")).idempotency_key == "b/k"


async def test_an_image_of_two_tenants_is_that_of_both_until_one_removes_it(store: Store) -> None:
    for id, tenant in (("a", "a"), ("b", "b")):
        await finish(store, id, tenant)
        await store.discard_delivery(id)
    assert await remove(store, "a")
    assert (await store.image(CAT.digest, tenant="b")).data == CAT.data
    with pytest.raises(NotFound):
        await store.image(CAT.digest, tenant="a")


async def test_adopted_turns_show_their_images_to_the_tenant_that_adopts(store: Store) -> None:
    await finish(store, "g", "a")
    await put(store, "again", "operator")
    await store.adopt_turns("again.0", await start(store, "again.0"), "g.0")
    assert (await store.image(CAT.digest, tenant="operator")).data == CAT.data
    with pytest.raises(NotFound):
        await store.image(CAT.digest, tenant="b")


async def test_a_consumer_keeps_what_it_sees_and_no_more(store: Store) -> None:
    for id, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        await finish(store, id, tenant)
        await store.discard_delivery(id)
    assert (await store.consumers.enter("trainer", tenant="a")).position == 0
    assert (await store.consumers.enter("trainer", at=2, tenant="b")).position == 2
    assert [(each.tenant, each.cursor, each.lag) for each in await store.consumers.listed()] == [
        ("a", 0, 2),
        ("b", 2, 0),
    ]
    assert (await store.removals.held(force=False)).unacknowledged == 2
    assert [one.id for one in await store.removals.candidates(force=False, limit=9)] == ["b1"]
    assert [one.id for one in await store.removals.candidates(force=True, limit=9)] == ["a1", "b1", "a2"]
    assert not await remove(store, "a1")
    await store.consumers.enter("logger")  # an admin's consumer, which gets all results
    assert not await remove(store, "b1")
    await store.consumers.acknowledge("logger", 3)
    assert (await store.consumers.acknowledge("trainer", 1, tenant="a")).lag == 1
    assert [await remove(store, id) for id in ("a1", "b1", "a2")] == [True, True, False]
    await store.consumers.remove("trainer", tenant="a")
    assert await remove(store, "a2")


async def test_consumers_of_one_name_do_not_meet(store: Store) -> None:
    await finish(store, "a1", "a")
    await finish(store, "b1", "b")
    for tenant in (None, "a", "b"):
        await store.consumers.enter("x", tenant=tenant)
    await store.consumers.acknowledge("x", 1, tenant="a")
    with pytest.raises(Conflict, match="the newest is 1"):
        await store.consumers.acknowledge("x", 2, tenant="a")  # the message does not reveal b's group
    assert [(each.tenant, each.cursor) for each in await store.consumers.listed()] == [(None, 0), ("a", 1), ("b", 0)]
    assert [each.tenant for each in await store.consumers.listed("a")] == ["a"]
    await store.consumers.remove("x", tenant="b")
    for ask in (store.consumers.remove("x", tenant="b"), store.consumers.acknowledge("x", 0, tenant="b")):
        with pytest.raises(NotFound, match="no consumer 'x'"):
            await ask


async def test_the_bound_on_consumers_is_each_tenants() -> None:
    async with sqlite_store(None) as store:
        for number in range(MAX_CONSUMERS):
            await store.consumers.enter(f"c{number}", tenant="a")
        with pytest.raises(Conflict, match="consumers already"):
            await store.consumers.enter("more", tenant="a")
        assert (await store.consumers.enter("more", tenant="b")).position == 0
        assert (await store.consumers.enter("more")).position == 0


async def test_totals_and_cursors_stay_when_groups_are_removed(store: Store) -> None:
    for id, tenant in (("a1", "a"), ("b1", "b")):
        await finish(store, id, tenant)
        await store.discard_delivery(id)
    newest = {tenant: await store.last_event(tenant=tenant) for tenant in ("a", "b", None)}
    assert await remove(store, "a1")
    assert (await store.counts(tenant="a"))[SessionState.DONE] == 0
    assert (await store.counts(tenant="b"))[SessionState.DONE] == 1
    assert await store.last_cursor(tenant="a") == 1
    assert {tenant: await store.last_event(tenant=tenant) for tenant in newest} == newest
    assert newest["a"] < newest["b"]


async def test_a_new_tenant_is_no_earlier_one(store: Store) -> None:
    def token(name: str, tenant: str) -> TokenRow:
        return TokenRow(name=name, digest=name, role="read", max_queued=None, created=1.0, expires=None, tenant=tenant)

    await store.add_token(token("alice", "team"), joins=True)
    with pytest.raises(Conflict, match="there is a tenant 'team'"):
        await store.add_token(token("team", "team"), joins=False)
    await store.add_token(token("team", "team"), joins=True)
    with pytest.raises(Conflict, match="there is, or was, a token 'team'"):
        await store.add_token(token("team", "x"), joins=False)
    assert [(each.name, each.tenant) for each in await store.tokens()] == [("alice", "team"), ("team", "team")]


@pytest.mark.deep
async def test_what_a_tenant_reads_costs_nothing_for_what_others_have() -> None:
    """The cost is counted in steps of SQLite's virtual machine, which do not depend on time."""
    steps: dict[int, dict[str, int]] = {}
    for others in (10, 300):
        async with sqlite_store(None) as store:
            for number in range(others):
                await finish(store, f"x{number}", "others")
                await put(store, f"y{number}", "others")
            await finish(store, "own", "own")
            counted = Counter[str]()

            async def count(tx: Any, counted: Counter[str] = counted) -> None:
                def step() -> int:
                    counted["steps"] += 1
                    return 0

                tx._raw.set_progress_handler(step, 1)

            await store._db.read(count)
            steps[others] = {}
            reads: dict[str, Callable[[], Awaitable[object]]] = {
                "groups": partial(store.groups, tenant="own"),
                "done": partial(store.groups, state=GroupState.DONE, tenant="own"),
                "results": partial(store.results, after=0, limit=9, tenant="own"),
                "events": partial(store.events, after=0, limit=9, tenant="own"),
                "dead letters": partial(store.dead_deliveries, limit=9, tenant="own"),
                "image": partial(store.image, CAT.digest, tenant="own"),
                "counts": partial(store.counts, tenant="own"),
                "last event": partial(store.last_event, tenant="own"),
                "last cursor": partial(store.last_cursor, tenant="own"),
                "consumers": partial(store.consumers.listed, "own"),
            }
            for name, read in reads.items():
                counted.clear()
                await read()
                steps[others][name] = counted["steps"]
    for name, few in steps[10].items():
        assert steps[300][name] <= 1.5 * few + 10, name
