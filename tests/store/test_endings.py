"""The end of sessions and groups in the store: finished, cancelled, and stopped early."""

from __future__ import annotations

import math

import msgspec
import pytest

from outrider.errors import Conflict
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.store.rows import Delivery, EventKind
from outrider.store.store import MoreTurns, Store
from outrider.trajectory import FrozenUse, TokenCounts

from .conftest import NOW
from .world import FAILURE, STARTED, advance, group_row, kinds, result, start, submit, turn


async def test_the_last_session_ends_its_group(store: Store) -> None:
    await submit(store, group_row(callback_url="http://c/"))
    await start(store, "g.0")
    first = result("g.0", 1, reward=0.5)
    assert await store.finish("g.0", 1, first) is False
    assert (await store.group("g")).state is GroupState.ACTIVE
    assert await store.results(after=0, limit=10) == []
    assert await store.deliveries(now=math.inf, limit=10) == []

    await start(store, "g.1")
    assert await store.finish("g.1", 1, result("g.1", 1)) is True
    done = await store.group("g")
    assert (done.state, done.finished, done.cursor, done.cancelled) == (GroupState.DONE, NOW, 1, False)
    assert await store.results(after=0, limit=10) == [done]
    assert (await store.session("g.0")).result == first
    assert await store.deliveries(now=NOW, limit=10) == [
        Delivery(group_id="g", url="http://c/", receiver="c", tries=0, next_try=NOW, since=NOW)
    ]
    assert (await kinds(store))[-2:] == [EventKind.SESSION_DONE, EventKind.GROUP_DONE]


async def test_a_result_of_all_turns_is_refused_when_one_has_come_since(store: Store) -> None:
    await submit(store, group_row(n=1))
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(0))
    before, counted = msgspec.structs.replace(result("g.0", 1), turns=1), await store.count_turns("g.0", 1)
    await store.add_turn("g.0", 1, turn(0), model="judge")
    with pytest.raises(MoreTurns):
        await store.finish("g.0", 1, before, of_turns=counted)
    assert (await store.session("g.0")).result is None
    after = msgspec.structs.replace(before, frozen={"judge": FrozenUse(turns=1, tokens=2)})
    assert await store.finish("g.0", 1, after, of_turns=await store.count_turns("g.0", 1))


async def test_a_result_is_read_back_whole_and_ends_the_lease(store: Store) -> None:
    await submit(store, group_row(n=1))
    await start(store, "g.0")
    ended = msgspec.structs.replace(
        result("g.0", 1, reason=StopReason.ERROR, reward=None), error=FAILURE, turns=4, samples=2
    )
    await store.finish("g.0", 1, ended)
    row = await store.session("g.0")
    assert (row.state, row.lease_until, row.result) == (SessionState.DONE, None, ended)
    assert await store.recover(now=math.inf) == []


@pytest.mark.parametrize("reached", range(len(STARTED)))
async def test_a_session_can_end_in_every_started_state(store: Store, reached: int) -> None:
    await submit(store, group_row(n=1))
    await start(store, "g.0")
    await advance(store, "g.0", 1, STARTED[1 : reached + 1])
    assert await store.finish("g.0", 1, result("g.0", 1))


async def test_a_queued_session_can_be_finished_and_is_not_queued_then(store: Store) -> None:
    await submit(store, group_row(n=2))
    await start(store, "g.0")
    await store.requeue("g.0", 1, FAILURE)
    with pytest.raises(Conflict):
        await store.finish("g.0", 0, result("g.0", 0))
    await store.finish("g.0", 1, result("g.0", 1, reason=StopReason.CANCELLED, reward=None))
    assert [row.id for row in await store.queued(10)] == ["g.1"]
    assert await store.finish("g.1", 0, result("g.1", 0))
    assert await store.queued(10) == []


async def test_cursors_order_groups_by_their_end(store: Store) -> None:
    for name in "abc":
        await submit(store, group_row(name, n=1))
    for name in "bca":
        await store.finish(f"{name}.0", 0, result(f"{name}.0", 0))
    ended = await store.results(after=0, limit=10)
    assert [(group.id, group.cursor) for group in ended] == [("b", 1), ("c", 2), ("a", 3)]
    assert await store.results(after=1, limit=1) == ended[1:2]
    assert await store.results(after=3, limit=10) == []


async def test_a_cancelled_group_leaves_the_queue_at_once(store: Store) -> None:
    await submit(store, group_row(n=3))
    await start(store, "g.0")
    await store.finish("g.1", 0, result("g.1", 0))
    left = await store.cancel_group("g")
    assert [(row.id, row.state) for row in left] == [
        ("g.0", SessionState.INITIALIZING),
        ("g.2", SessionState.QUEUED),
    ]
    assert (await store.group("g")).cancelled
    assert await store.queued(10) == []
    with pytest.raises(Conflict, match="cancelled"):
        await start(store, "g.2")


async def test_a_cancelled_group_ends_when_its_sessions_are_finished(store: Store) -> None:
    await submit(store, group_row(n=2))
    await start(store, "g.0")
    left = await store.cancel_group("g")
    ends = [
        await store.finish(row.id, row.attempt, result(row.id, row.attempt, reason=StopReason.CANCELLED))
        for row in left
    ]
    assert ends == [False, True]
    group = await store.group("g")
    assert (group.state, group.cancelled, group.cursor) == (GroupState.DONE, True, 1)
    assert (await store.events(after=0, limit=100))[-1].data == {"cursor": 1, "cancelled": True}


async def test_sessions_of_a_cancelled_group_never_come_back_to_the_queue(store: Store) -> None:
    await submit(store, group_row(n=2))
    await start(store, "g.0")
    await start(store, "g.1", lease_until=5.0)
    await store.cancel_group("g")
    await store.requeue("g.0", 1, FAILURE)
    assert [row.id for row in await store.recover(now=6.0)] == ["g.1"]
    assert await store.queued(10) == []
    for index in (0, 1):
        with pytest.raises(Conflict, match="cancelled"):
            await start(store, f"g.{index}")
    again = await store.cancel_group("g")
    assert [(row.id, row.state, row.attempt) for row in again] == [
        ("g.0", SessionState.QUEUED, 1),
        ("g.1", SessionState.QUEUED, 1),
    ]
    assert (await kinds(store)).count(EventKind.GROUP_CANCELLED) == 1


async def test_an_attempt_of_a_cancelled_group_may_still_finish_its_turn(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    await store.cancel_group("g")
    await store.add_turn("g.0", 1, turn())
    assert await store.turns("g.0") == [turn()]


async def test_one_session_is_cancelled_and_the_others_go_on(store: Store) -> None:
    await submit(store, group_row(n=3))
    await start(store, "g.0")
    cancelled = [await store.cancel_session(id) for id in ("g.0", "g.1", "g.1")]
    assert [(row.id, row.state, row.ending) for row in cancelled[:2]] == [
        ("g.0", SessionState.INITIALIZING, StopReason.CANCELLED),
        ("g.1", SessionState.QUEUED, StopReason.CANCELLED),
    ]
    assert [row.id for row in await store.to_end()] == ["g.0", "g.1"]
    await store.requeue("g.0", 1, FAILURE)
    assert [row.id for row in await store.queued(10)] == ["g.2"]
    assert not (await store.group("g")).cancelled
    for row in await store.to_end("g"):
        await store.finish(row.id, row.attempt, result(row.id, row.attempt, reason=StopReason.CANCELLED, reward=None))
    assert await store.to_end() == []
    assert (await store.cancel_session("g.0")).state is SessionState.DONE
    assert (await kinds(store)).count(EventKind.SESSION_CANCELLED) == 2


async def test_a_group_with_enough_verdicts_ends_its_other_sessions(store: Store) -> None:
    await submit(store, group_row(n=5, min_usable=2))
    await start(store, "g.0")
    await store.finish("g.1", 0, result("g.1", 0))
    await store.finish("g.2", 0, result("g.2", 0, reason=StopReason.ERROR, reward=None))
    assert await store.to_end("g") == []
    await store.cancel_session("g.4")
    await store.finish("g.3", 0, result("g.3", 0))
    assert [(row.id, row.ending) for row in await store.to_end("g")] == [
        ("g.0", StopReason.EARLY_STOP),
        ("g.4", StopReason.CANCELLED),
    ]
    assert (await store.group("g")).state is GroupState.ACTIVE
    assert await store.finish("g.0", 1, result("g.0", 1)) is False  # the session completed before it was stopped
    assert await store.finish("g.4", 0, result("g.4", 0, reason=StopReason.CANCELLED, reward=None))
    assert (await kinds(store)).count(EventKind.GROUP_ENOUGH) == 1


async def test_only_sessions_with_tokens_to_train_on_are_enough_if_the_group_says_so(store: Store) -> None:
    await submit(store, msgspec.structs.replace(group_row(n=5, min_usable=2), translator="polar", usable_trains=True))
    trained = TokenCounts(sampled=3, trained=3)
    await store.finish("g.0", 0, msgspec.structs.replace(result("g.0", 0), tokens=trained))
    await store.finish("g.1", 0, result("g.1", 0))  # a verdict, but no tokens to train on
    ungraded = result("g.2", 0, reason=StopReason.ERROR, reward=None)
    await store.finish("g.2", 0, msgspec.structs.replace(ungraded, tokens=trained))
    assert await store.to_end("g") == []
    await store.finish("g.3", 0, msgspec.structs.replace(result("g.3", 0), tokens=trained))
    assert [(row.id, row.ending) for row in await store.to_end("g")] == [("g.4", StopReason.EARLY_STOP)]
    [enough] = [event for event in await store.events(after=0, limit=99) if event.kind == EventKind.GROUP_ENOUGH]
    assert enough.data == {"usable": 2}


async def test_a_group_whose_last_verdict_is_enough_is_done(store: Store) -> None:
    await submit(store, group_row(n=2, min_usable=2))
    await store.finish("g.0", 0, result("g.0", 0))
    assert await store.finish("g.1", 0, result("g.1", 0))
    assert EventKind.GROUP_ENOUGH not in await kinds(store)


async def test_cancelling_a_done_group_changes_nothing(store: Store) -> None:
    await submit(store, group_row(n=1))
    await store.finish("g.0", 0, result("g.0", 0))
    done, before = await store.group("g"), await kinds(store)
    assert await store.cancel_group("g") == []
    assert await store.group("g") == done
    assert await kinds(store) == before
