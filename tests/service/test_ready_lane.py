"""Sandboxes are prepared before their runs, up to the size of the ready lane, and no clock runs while they wait."""

from __future__ import annotations

from outrider.config import LanesConfig
from outrider.lifecycle import SessionState, StopReason
from support.clock import pass_time

from .conftest import MakeWorld
from .world import result_of

LANES = LanesConfig(init=1, ready=3, run=1, eval=1)


async def test_prepared_sandboxes_wait_without_holding_up_others(world: MakeWorld) -> None:
    async with world(lanes=LANES) as w:
        first = await w.submit("wait door", "ask")
        await w.stage.arrived["door"].wait()
        limits = {"session_seconds": 20, "agent_seconds": 20}
        view = await w.submit("ask", n=4, limits=limits)
        for session in view.sessions[:3]:
            await w.state(session.id, SessionState.READY)
        init, ready, run, _, _ = w.lanes()
        while (ready.waiting, run.waiting) < (1, 3):
            await w.service.status()
            init, ready, run, _, _ = w.lanes()
        assert [(lane.name, lane.in_use, lane.waiting) for lane in (init, ready, run)] == [
            ("init", 0, 0),
            ("ready", 3, 1),
            ("run", 1, 3),
        ]
        assert (await w.service.reader.session(view.sessions[3].id)).state is SessionState.INITIALIZING
        assert len(w.stage.ledger.started) == 4
        await pass_time(30)
        w.stage.open["door"].set()
        done = await w.done(view.id)
        assert {result_of(session).stop_reason for session in done.sessions} == {StopReason.COMPLETED}
        assert result_of(done.sessions[0]).seconds.ready > 0
        await w.done(first.id)
        w.assert_quiet()


async def test_who_waits_for_a_run_can_be_cancelled_and_leaves_its_place(world: MakeWorld) -> None:
    async with world(lanes=LANES) as w:
        await w.submit("wait door", "ask")
        await w.stage.arrived["door"].wait()
        waiting = await w.submit("ask", n=3)
        for session in waiting.sessions:
            await w.state(session.id, SessionState.READY)
        next_one = await w.submit("ask")
        await w.service.cancel(waiting.id)
        await w.state(next_one.sessions[0].id, SessionState.READY)
        w.stage.open["door"].set()
        await w.done(next_one.id)
