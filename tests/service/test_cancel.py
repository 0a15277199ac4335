"""A group that is cancelled at any stage ends at once: it is CANCELLED without a verdict, its sandboxes are stopped
once, and its slots are free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from outrider.config import LanesConfig
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import GroupView

from .conftest import MakeWorld
from .world import SAY, World, result_of

NARROW = LanesConfig(init=1, ready=1, run=1, eval=1)
STALLING = {"reply": SAY, "stall": 1}


async def in_the_queue(w: World) -> GroupView:
    await w.submit("wait door", "ask", n=3)
    await w.stage.arrived["door"].wait()
    return await w.submit("ask", n=2)


async def waiting_for_init(w: World) -> GroupView:
    await w.submit("ask", init=["wait door"])
    await w.stage.arrived["door"].wait()
    view = await w.submit("ask", n=2)
    for session in view.sessions:
        await w.state(session.id, SessionState.INITIALIZING)
    return view


async def starting(w: World) -> GroupView:
    view = await w.submit("ask", n=2, runtime={"env": {"HANG": "start"}})
    await w.stage.arrived["start"].wait()
    return view


async def preparing(w: World) -> GroupView:
    view = await w.submit("ask", runtime={"env": {"HANG": "exec"}, "prepare": [{"run": "true"}]})
    await w.stage.arrived["exec"].wait()
    return view


async def ready(w: World) -> GroupView:
    await w.submit("wait door", "ask")
    await w.stage.arrived["door"].wait()
    view = await w.submit("ask")
    await w.state(view.sessions[0].id, SessionState.READY)
    return view


async def running(w: World) -> GroupView:
    view = await w.submit("ask", n=2)
    await w.engine.stalled.wait()
    return view


async def between_calls(w: World) -> GroupView:
    w.engine.release()
    view = await w.submit("ask", "wait forever")
    await w.stage.arrived["forever"].wait()
    return view


async def waiting_for_eval(w: World) -> GroupView:
    w.engine.release()
    await w.submit("ask", verdicts=["wait door"], max_attempts=1)
    await w.stage.arrived["door"].wait()
    view = await w.submit("ask", "note asked")
    while not (w.stage.order and w.lanes()[3].waiting):
        await w.service.status()
    return view


async def evaluating(w: World) -> GroupView:
    w.engine.release()
    view = await w.submit("ask", verdicts=["wait forever"])
    await w.stage.arrived["forever"].wait()
    return view


STAGES = (
    in_the_queue,
    waiting_for_init,
    starting,
    preparing,
    ready,
    running,
    between_calls,
    waiting_for_eval,
    evaluating,
)


@pytest.mark.parametrize("reach", STAGES, ids=lambda stage: stage.__name__)
async def test_cancelled_at(world: MakeWorld, reach: Callable[[World], Awaitable[GroupView]]) -> None:
    async with world([STALLING], lanes=NARROW) as w:
        view = await reach(w)
        await w.service.cancel(view.id)
        async with asyncio.timeout(10):
            done = await w.done(view.id, samples=True)
        assert (done.state, done.cancelled) == (GroupState.DONE, True)
        for session in done.sessions:
            result = result_of(session)
            assert (result.stop_reason, result.verdict, result.error) == (StopReason.CANCELLED, None, None)
            assert result.tokens.sampled == result.tokens.trained + result.tokens.masked + result.tokens.dropped
        assert all(sample.reward is None for sample in done.samples or ())
        w.stage.open["door"].set()  # for the groups that held the slots
        w.engine.release()
        for other in await w.service.store.groups():
            await w.done(other.id)
        w.assert_quiet()


async def test_what_was_sampled_is_counted_and_the_generation_aborted(world: MakeWorld) -> None:
    async with world([STALLING]) as w:
        view = await running(w)
        await w.service.cancel(view.id)
        await w.engine.abort_seen.wait()
        done = await w.done(view.id)
        tokens = [result_of(session).tokens for session in done.sessions]
        assert {(count.sampled, count.dropped) for count in tokens} <= {(1, 1), (0, 0)}
        assert sum(count.sampled for count in tokens) > 0


async def test_a_cancel_that_repeats_or_comes_late_changes_nothing(world: MakeWorld) -> None:
    async with world([STALLING]) as w:
        view = await running(w)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(w.service.cancel(view.id))
        first = await w.done(view.id)
        assert await w.service.cancel(view.id) == first
        w.engine.release()
        graded = await w.submit("ask")
        before = await w.done(graded.id)
        assert await w.service.cancel(graded.id) == before
        assert result_of(before.sessions[0]).stop_reason is StopReason.COMPLETED
        assert not before.cancelled
        w.assert_quiet()


async def test_labels_are_kept_whenever_it_is_cancelled(world: MakeWorld) -> None:
    async with world(lanes=NARROW) as w:
        await w.submit("wait door", "ask", n=3)
        views = [await w.submit("wait forever", labels={"a": "b"}, priority=priority) for priority in (1, 0)]
        for view in views:
            await w.service.cancel(view.id)
            assert result_of((await w.done(view.id)).sessions[0]).labels == {"a": "b"}
        w.stage.open["door"].set()


@pytest.mark.parametrize("reach", [in_the_queue, running, evaluating], ids=lambda stage: stage.__name__)
async def test_one_session_is_cancelled(world: MakeWorld, reach: Callable[[World], Awaitable[GroupView]]) -> None:
    async with world([STALLING], lanes=NARROW) as w:
        view = await reach(w)
        one, *others = view.sessions
        await w.service.cancel_session(one.id)
        w.stage.open["door"].set()
        w.engine.release()
        async with asyncio.timeout(10):
            done = await w.done(view.id)
        assert not done.cancelled
        reasons = [result_of(session).stop_reason for session in done.sessions]
        assert reasons == [StopReason.CANCELLED, *[StopReason.COMPLETED] * len(others)]
        assert await w.service.cancel_session(one.id) == done.sessions[0]
        for other in await w.service.store.groups():
            await w.done(other.id)
        w.assert_quiet()


@pytest.mark.parametrize("lanes", [NARROW, LanesConfig()], ids=["waiting", "running"])
async def test_a_group_with_enough_rewards_waits_for_nobody(world: MakeWorld, lanes: LanesConfig) -> None:
    async with world(lanes=lanes) as w:
        view = await w.submit("ask", "admit 2", n=4, min_usable=2)
        async with asyncio.timeout(10):
            done = await w.done(view.id, samples=True)
        reasons = [result_of(session).stop_reason for session in done.sessions]
        assert sorted(reasons) == [*[StopReason.COMPLETED] * 2, *[StopReason.EARLY_STOP] * 2]
        assert not done.cancelled
        rewards = [sample.reward for sample in done.samples or ()]
        assert (rewards.count(1.0), rewards.count(None)) == (2, len(rewards) - 2)
        w.assert_quiet()


@pytest.mark.deep
async def test_cancelled_at_any_step_of_its_start(world: MakeWorld) -> None:
    """A cancel takes effect after any number of turns of the event loop, also between the lease and the first step."""
    async with world() as w, asyncio.timeout(30):
        for steps in range(60):
            view = await w.submit("ask", n=2)
            for _ in range(steps):
                await asyncio.sleep(0)
            await w.service.cancel(view.id)
            done = await w.done(view.id)
            assert {result_of(session).stop_reason for session in done.sessions} <= {
                StopReason.CANCELLED,
                StopReason.COMPLETED,
            }
        w.assert_quiet()
        assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED
