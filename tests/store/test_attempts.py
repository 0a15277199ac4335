"""Attempts in the store: their start from the queue, their moves between states, their fence and their leases."""

from __future__ import annotations

import asyncio
import math

import pytest

from outrider.errors import Conflict
from outrider.lifecycle import MOVES, SessionState
from outrider.store.store import Store

from .conftest import NOW
from .world import AFTER_START, FAILURE, STARTED, advance, group_row, result, start, submit, turn


async def test_the_queue_is_ordered_by_priority_age_and_sample(store: Store) -> None:
    await submit(store, group_row("young", created=300.0))
    await submit(store, group_row("old", created=200.0))
    await submit(store, group_row("urgent", created=400.0, priority=1))
    await submit(store, group_row("later", created=100.0, priority=-1))
    order = [row.id for row in await store.queued(100)]
    assert order == [f"{group}.{n}" for group in ("urgent", "old", "young", "later") for n in (0, 1)]
    assert [row.id for row in await store.queued(3)] == order[:3]
    await start(store, "urgent.0")
    assert [row.id for row in await store.queued(1)] == ["urgent.1"]


async def test_an_attempt_starts_under_a_lease(store: Store) -> None:
    await submit(store, group_row())
    assert await store.start_attempt("g.0", node="n1", lease_until=50.0) == 1
    row = await store.session("g.0")
    assert (row.state, row.attempt, row.node, row.lease_until) == (SessionState.INITIALIZING, 1, "n1", 50.0)
    assert row.updated == NOW


async def test_a_session_is_started_once(store: Store) -> None:
    await submit(store, group_row(n=1))
    outcomes = await asyncio.gather(*(start(store, "g.0") for _ in range(10)), return_exceptions=True)
    assert [outcome for outcome in outcomes if outcome == 1] == [1]
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 9


@pytest.mark.parametrize("reached", range(len(STARTED)))
@pytest.mark.parametrize("target", SessionState)
async def test_only_legal_moves_without_their_own_method_are_made(
    store: Store, reached: int, target: SessionState
) -> None:
    await submit(store, group_row())
    attempt = await start(store, "g.0")
    await advance(store, "g.0", attempt, STARTED[1 : reached + 1])
    before = await store.session("g.0")
    if target in AFTER_START and target in MOVES[before.state]:
        await store.set_state("g.0", attempt, target)
        assert (await store.session("g.0")).state is target
    else:
        with pytest.raises(Conflict):
            await store.set_state("g.0", attempt, target)
        assert await store.session("g.0") == before


async def test_a_queued_session_is_only_moved_by_starting_it(store: Store) -> None:
    await submit(store, group_row())
    for target in SessionState:
        with pytest.raises(Conflict):
            await store.set_state("g.0", 0, target)


async def test_a_requeued_session_waits_again_with_its_error(store: Store) -> None:
    await submit(store, group_row(n=1))
    attempt = await start(store, "g.0")
    assert await store.queued(10) == []
    await store.requeue("g.0", attempt, FAILURE)
    row = await store.session("g.0")
    assert (row.state, row.attempt, row.lease_until) == (SessionState.QUEUED, 1, None)
    assert row.last_error == FAILURE
    assert await store.queued(10) == [row]
    assert await start(store, "g.0") == 2
    assert (await store.session("g.0")).last_error == FAILURE


async def test_an_ended_attempt_can_write_nothing(store: Store) -> None:
    await submit(store, group_row())
    old = await start(store, "g.0")
    await store.add_turn("g.0", old, turn())
    await store.requeue("g.0", old, FAILURE)

    async def refused() -> None:
        for call in (
            store.set_state("g.0", old, SessionState.READY),
            store.add_turn("g.0", old, turn(1)),
            store.requeue("g.0", old, FAILURE),
            store.finish("g.0", old, result("g.0", old), under_way=True),
        ):
            with pytest.raises(Conflict):
                await call

    await refused()
    new = await start(store, "g.0")
    await refused()
    with pytest.raises(Conflict):
        await store.finish("g.0", old, result("g.0", old))
    await store.finish("g.0", new, result("g.0", new))
    old = new
    await refused()
    with pytest.raises(Conflict, match="done"):
        await store.finish("g.0", new, result("g.0", new))
    assert len(await store.turns("g.0", 1)) == 1


async def test_an_attempt_that_never_was_can_write_nothing(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    with pytest.raises(Conflict, match="attempt 1, not 2"):
        await store.add_turn("g.0", 2, turn())


async def test_leases_of_attempts_under_way_are_renewed(store: Store) -> None:
    await submit(store, group_row(n=5))
    for index in range(4):
        await start(store, f"g.{index}", lease_until=10.0)
    await store.finish("g.1", 1, result("g.1", 1))
    await store.requeue("g.3", 1, FAILURE)
    await start(store, "g.3", lease_until=10.0)
    await store.renew_leases({"g.0": 1, "g.1": 1, "g.3": 1, "g.4": 0, "unknown": 1}, 99.0)
    assert [row.lease_until for row in await store.sessions("g")] == [99.0, None, 10.0, 10.0, None]


async def test_sessions_of_dead_nodes_are_queued_again(store: Store) -> None:
    await submit(store, group_row(n=4))
    for index, lease in enumerate((10.0, 30.0, 20.0)):
        await start(store, f"g.{index}", node=f"n{index}", lease_until=lease)
    await advance(store, "g.0", 1)
    recovered = await store.recover(now=20.0)
    assert [row.id for row in recovered] == ["g.0"]
    assert recovered == [await store.session("g.0")]
    assert recovered[0].state is SessionState.QUEUED
    error = recovered[0].last_error
    assert error is not None
    assert (error.code, error.retryable) == ("lease_expired", True)
    assert "n0" in error.message
    assert await store.recover(now=20.0) == []
    assert await store.recover(now=math.inf, held={"g.1", "g.2"}) == []
    assert [row.id for row in await store.recover(now=math.inf)] == ["g.2", "g.1"]
    assert [row.id for row in await store.queued(10)] == ["g.0", "g.1", "g.2", "g.3"]


async def test_counts_name_every_state(store: Store) -> None:
    assert await store.counts() == dict.fromkeys(SessionState, 0)
    await submit(store, group_row(n=4))
    await start(store, "g.0")
    await start(store, "g.1")
    await store.set_state("g.1", 1, SessionState.READY)
    await store.finish("g.2", 0, result("g.2", 0))
    expected = dict.fromkeys(SessionState, 1)
    expected |= {SessionState.RUNNING: 0, SessionState.EVALUATING: 0}
    assert await store.counts() == expected
