"""Groups in the store: submitting, reading and listing them, their idempotency keys, and the stored policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from outrider.errors import Conflict, NotFound, QuotaExceeded
from outrider.lifecycle import GroupState, SessionState
from outrider.messages import Image, Message, Role
from outrider.store.rows import EventKind, PolicyRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import MOST_REFUSED, MOST_VALUES, Store

from .conftest import NOW
from .world import FAILURE, LEASE, group_row, kinds, result, start, submit, turn


async def test_a_group_and_its_sessions_come_back_as_stored(store: Store) -> None:
    group = group_row(n=3, priority=5, key="k", callback_url="http://c/")
    group = msgspec.structs.replace(group, labels={"set": "\xe9"})
    spec = b'{"n":3,"x":"\xc3\xa9"}'
    assert await submit(store, group, spec) == group
    assert await store.spec("g") == spec
    assert await store.group("g") == group
    sessions = await store.sessions("g")
    assert [row.id for row in sessions] == ["g.0", "g.1", "g.2"]
    assert [row.sample_index for row in sessions] == [0, 1, 2]
    first = await store.session("g.0")
    assert first == sessions[0]
    assert (first.state, first.attempt, first.priority, first.created) == (SessionState.QUEUED, 0, 5, 100.0)
    assert (first.node, first.lease_until, first.last_error, first.result) == (None, None, None, None)


async def test_a_new_group_is_active_whatever_its_row_says(store: Store) -> None:
    row = msgspec.structs.replace(group_row(), state=GroupState.DONE, cancelled=True, finished=1.0, cursor=9)
    assert await submit(store, row) == group_row()


async def test_the_same_key_and_spec_return_the_first_group(store: Store) -> None:
    first = await submit(store, group_row("a", key="k"), b"s")
    assert await submit(store, group_row("b", key="k", created=200.0), b"s") == first
    assert [group.id for group in await store.groups()] == ["a"]
    assert await kinds(store) == [EventKind.GROUP_CREATED]
    with pytest.raises(NotFound):
        await store.session("b.0")


async def test_the_same_key_with_another_spec_is_a_conflict(store: Store) -> None:
    await submit(store, group_row("a", key="k"), b"s")
    with pytest.raises(Conflict, match="group a") as caught:
        await submit(store, group_row("b", key="k"), b"s ")
    assert caught.value.field == "idempotency_key"


async def test_groups_without_a_key_never_meet(store: Store) -> None:
    await submit(store, group_row("a"))
    await submit(store, group_row("b"))
    assert len(await store.groups()) == 2


async def test_simultaneous_submits_of_one_key_make_one_group(store: Store) -> None:
    rows = await asyncio.gather(*(submit(store, group_row(f"g{n}", key="k")) for n in range(20)))
    assert len({row.id for row in rows}) == 1
    assert len(await store.groups()) == 1


async def test_ids_are_used_once_and_a_refused_group_leaves_nothing(store: Store) -> None:
    await submit(store, group_row("a"))
    with pytest.raises(Conflict, match="'a'"):
        await submit(store, group_row("a", n=1))
    with pytest.raises(Conflict, match="session ids"):
        await store.create_group(group_row("b"), b"{}", ["b.0", "a.0"])
    with pytest.raises(NotFound):
        await store.group("b")
    assert await kinds(store) == [EventKind.GROUP_CREATED]


@pytest.mark.parametrize(("n", "ids"), [(2, ["x"]), (0, [])])
async def test_a_group_has_as_many_sessions_as_it_says(store: Store, n: int, ids: list[str]) -> None:
    with pytest.raises(ValueError, match="sessions"):
        await store.create_group(group_row("g", n), b"{}", ids)


async def test_groups_are_listed_newest_first_and_by_state(store: Store) -> None:
    for number in range(4):
        await submit(store, group_row(f"g{number}", n=1, created=100.0 + number))
    await store.finish("g1.0", 0, result("g1.0", 0))
    assert [group.id for group in await store.groups()] == ["g3", "g2", "g1", "g0"]
    assert [group.id for group in await store.groups(limit=2)] == ["g3", "g2"]
    assert [group.id for group in await store.groups(state=GroupState.ACTIVE)] == ["g3", "g2", "g0"]
    assert [group.id for group in await store.groups(state=GroupState.DONE)] == ["g1"]


async def test_unknown_ids_are_not_found(store: Store) -> None:
    for call in (
        store.group("?"),
        store.session("?"),
        store.sessions("?"),
        start(store, "?"),
        store.set_state("?", 1, SessionState.READY),
        store.add_turn("?", 1, turn()),
        store.turns("?"),
        store.requeue("?", 1, FAILURE),
        store.finish("?", 1, result("?.0", 1)),
        store.cancel_group("?"),
        store.delivered("?"),
        store.delivery_failed("?", next_try=1.0),
    ):
        with pytest.raises(NotFound, match="'\\?'"):
            await call


async def test_the_policy_is_kept_as_it_was_said_last(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        assert await store.policy() is None
        await store.keep_policy(3, "weights-3")
        await store.keep_policy(2147483647, None)
    async with sqlite_store(path) as store:
        assert await store.policy() == PolicyRow(2147483647, None)


async def test_a_group_is_as_old_as_its_first_session(store: Store) -> None:
    async def begin(session_id: str, version: int) -> int:
        return await store.start_attempt(session_id, node="node", lease_until=LEASE, policy_version=version)

    for number, group in enumerate("abcd"):
        await submit(store, group_row(group, created=float(number)))
    for group, version in (("a", 1), ("b", 2), ("c", 1)):
        await begin(f"{group}.0", version)
    assert await store.began_before(1) == []
    assert await store.began_before(2) == ["a", "c"]
    await store.requeue("a.0", 1, FAILURE)  # later attempts and other sessions do not change its age
    assert await begin("a.0", 5) == 2
    await begin("a.1", 6)
    await store.cancel_group("c")
    assert await store.began_before(7) == ["a", "b"]
    for session_id, attempt in (("a.0", 2), ("a.1", 1)):
        await store.finish(session_id, attempt, result(session_id, attempt))
    assert await store.began_before(7) == ["b"]


async def test_an_attempt_takes_over_the_turns_of_a_session_that_is_done(store: Store) -> None:
    image = Image("image/png", "d" * 64, b"png", size=3)
    shown = msgspec.structs.replace(turn(), messages=(Message(role=Role.USER, content="", parts=(image,)),))
    await submit(store, group_row("a"))
    await submit(store, group_row("b"))
    for session_id in ("a.0", "b.0"):
        await start(store, session_id)
    await store.add_turn("a.0", 1, shown)
    await store.add_turn("a.0", 1, turn(1))
    await store.add_turn("a.0", 1, turn(0), model="judge")
    with pytest.raises(Conflict, match="not done"):
        await store.adopt_turns("b.0", 1, "a.0")
    await store.finish("a.0", 1, result("a.0", 1))
    for _ in range(2):
        assert (await store.adopt_turns("b.0", 1, "a.0")).id == "a.0"
    assert await store.turns("b.0", images=True) == [shown, turn(1)]
    assert await store.frozen_turns("b.0") == {"judge": [turn(0)]}
    with pytest.raises(Conflict):
        await store.adopt_turns("b.0", 2, "a.0")
    with pytest.raises(NotFound):
        await store.adopt_turns("b.0", 1, "c.0")
    await store.finish("a.1", 0, result("a.1", 0))
    assert await store.removals.hide(["a"], force=True) == ["a"]
    while await store.removals.erase(100):
        pass
    assert await store.turns("b.0", images=True) == [shown, turn(1)]  # the image is still used by the new session


async def test_a_key_is_refused_until_its_time(store: Store) -> None:
    assert await store.refuse_key("operator", "k", until=NOW + 10) is None
    assert await store.refuse_key("operator", "old", until=NOW) is None
    for tenant, key, refused in (("operator", "k", True), ("operator", "old", False), ("other", "k", False)):
        assert await store.is_refused(tenant, key) is refused
    with pytest.raises(Conflict, match="'k' was cancelled before it was submitted"):
        await submit(store, group_row(key="k"))
    await submit(store, group_row("a", key="old"))
    other = msgspec.structs.replace(group_row("b", key="k"), tenant="other")
    await submit(store, other)
    assert await store.keyed_group("other", "k") == other
    assert await store.keyed_group("operator", "k") is None
    assert (await store.refuse_key("other", "k", until=NOW + 10)) == other  # the group exists: no refusal
    assert not await store.is_refused("other", "k")
    assert await store.refuse_key("operator", "k", until=NOW) is None  # the latest call counts
    await submit(store, group_row("c", key="k"))


async def test_a_tenant_has_a_maximum_of_refused_keys(store: Store) -> None:
    await store._db.write(
        lambda tx: tx.execute_many(
            "INSERT INTO refused_keys VALUES (?, ?, ?)",
            [(f"operator/{number}", "operator", NOW + 10) for number in range(MOST_REFUSED)],
        )
    )
    with pytest.raises(QuotaExceeded, match="cancelled before they were submitted"):
        await store.refuse_key("operator", "one more", until=NOW + 10)
    assert await store.refuse_key("other", "k", until=NOW + 10) is None
    await store._db.write(lambda tx: tx.execute("UPDATE refused_keys SET until = ?", (NOW,)))
    assert await store.refuse_key("operator", "one more", until=NOW + 10) is None  # expired keys do not count


async def test_groups_of_a_translator_are_listed_in_pages(store: Store) -> None:
    for number in range(5):
        group = group_row(f"g{number}", created=100.0 + number // 2)
        await submit(store, msgspec.structs.replace(group, translator="polar"))
    await submit(store, group_row("native", created=200.0))
    await submit(store, msgspec.structs.replace(group_row("theirs", created=200.0), translator="polar", tenant="other"))
    pages, before = [], None
    while page := await store.translated_groups("operator", "polar", before=before, limit=2):
        pages.append([row.id for row in page])
        before = page[-1].created, page[-1].id
    assert pages == [["g4", "g3"], ["g2", "g1"], ["g0"]]
    assert [row.id for row in await store.translated_groups("operator", "polar", since=102.0, limit=9)] == ["g4"]
    assert await store.translated_groups("operator", "prorl", limit=9) == []


async def test_sessions_of_many_groups_are_counted_by_state(store: Store) -> None:
    """The number of ids exceeds the limit of one SQL statement."""
    for name in ("a", "b", "c", "d"):
        await submit(store, group_row(name))
    await start(store, "a.0")
    await start(store, "c.1")
    assert await store.states_of(["a", "b", *(f"none-{number}" for number in range(MOST_VALUES)), "c"]) == {
        SessionState.QUEUED: 4,
        SessionState.INITIALIZING: 2,
    }
    assert await store.states_of([]) == {}


async def test_a_label_is_added_to_a_stored_group(store: Store) -> None:
    await submit(store, group_row("a"))
    await submit(store, group_row("b"))
    await store.add_label("a", "x", "1")
    await store.add_label("a", "y", "2")
    await store.add_label("a", "x", "3")
    assert (await store.group("a")).labels == {"x": "3", "y": "2"}
    assert (await store.group("b")).labels == {}
    with pytest.raises(NotFound):
        await store.add_label("none", "x", "1")
