"""Each limit ends a session in its own way. The outcome is graded, except if the session's time is over."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import LanesConfig
from outrider.lifecycle import SessionState, StopReason
from outrider.sessions.blame import HARMFUL_SECONDS
from support.clock import pass_time

from .conftest import MakeWorld
from .world import SAY, result_of

LONG = "maple jade zone " * 8 + SAY


async def test_agent_timeout_is_graded(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", "pass 30", limits={"agent_seconds": 20, "session_seconds": 60})
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.AGENT_TIMEOUT, None)
        assert result.verdict is not None
        assert (result.verdict.reward, result.turns, session.attempt) == (1.0, 1, 1)
        assert w.stage.count["graded agent_timeout"] == 1
        w.assert_quiet()


async def test_agent_timeout_in_the_middle_of_a_reply(world: MakeWorld) -> None:
    """The sampled token is recorded and dropped, because the agent has not received it."""
    async with world([{"reply": SAY, "stall": 1}]) as w:
        view = await w.submit("ask", limits={"agent_seconds": 2})  # so short that no token is overdue yet
        await w.engine.stalled.wait()
        await pass_time(3)
        result = result_of((await w.done(view.id)).sessions[0])
        assert result.stop_reason is StopReason.AGENT_TIMEOUT
        assert (result.tokens.sampled, result.tokens.dropped, result.samples) == (1, 1, 0)
        w.assert_quiet()


async def test_session_timeout_has_no_verdict(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", "pass 30", limits={"session_seconds": 20, "agent_seconds": 60})
        result = result_of(session)
        assert (result.stop_reason, result.verdict, result.error) == (StopReason.SESSION_TIMEOUT, None, None)
        assert (result.turns, session.attempt, w.stage.count["graded"]) == (1, 1, 0)
        samples = await w.service.reader.samples(session.id)
        assert [sample.reward for sample in samples] == [None]
        w.assert_quiet()


@pytest.mark.parametrize(
    "fields",
    [
        {"init": ["wait forever"]},
        {"runtime": {"env": {"HANG": "start"}}},
        {"runtime": {"env": {"HANG": "exec"}, "prepare": [{"run": "true"}]}},
    ],
    ids=["init", "start", "prepare"],
)
async def test_session_timeout_before_the_run(world: MakeWorld, fields: dict[str, Any]) -> None:
    async with world() as w:
        result = result_of(await w.run("ask", limits={"session_seconds": 0.1}, **fields))
        assert (result.stop_reason, result.verdict, result.error) == (StopReason.SESSION_TIMEOUT, None, None)
        w.assert_quiet()


async def test_preparing_has_a_limit_of_its_own(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", init=["wait forever"], limits={"prepare_seconds": 0.1, "session_seconds": 3600})
        result = result_of(session)
        assert (result.stop_reason, result.verdict, result.error) == (StopReason.SESSION_TIMEOUT, None, None)
        assert (await w.run("pass 30", "ask", limits={"prepare_seconds": 20})).result is not None
        w.assert_quiet()


async def test_waiting_for_a_lane_is_charged_to_nobody(world: MakeWorld) -> None:
    """The second session's sandbox is ready for longer than the session's time limit."""
    async with world(lanes=LanesConfig(init=5, run=1, eval=1)) as w:
        first = await w.submit("wait door", "ask")
        await w.stage.arrived["door"].wait()
        view = await w.submit("ask", limits={"session_seconds": 20, "agent_seconds": 20})
        await w.state(view.sessions[0].id, SessionState.READY)
        await pass_time(30)
        w.stage.open["door"].set()
        for each in (first, view):
            result = result_of((await w.done(each.id)).sessions[0])
            assert result.stop_reason is StopReason.COMPLETED
        assert result.seconds.ready > 0
        w.assert_quiet()


@pytest.mark.parametrize("last", ["ask", "ask quietly"])
async def test_turns(world: MakeWorld, last: str) -> None:
    """The session ends even if the agent ignores the error."""
    async with world() as w:
        session = await w.run("ask", "ask", last, limits={"turns": 2})
        result = result_of(session)
        assert (result.stop_reason, result.turns, result.error) == (StopReason.MAX_TURNS, 2, None)
        assert result.verdict is not None
        assert result.samples == 1


async def test_one_call_too_many_does_not_cut_off_another(world: MakeWorld) -> None:
    async with world([{"reply": SAY, "stall": 1}]) as w:
        view = await w.submit("leave", "ask quietly", "wait here", limits={"turns": 1})
        await w.stage.arrived["here"].wait()
        w.engine.release()
        (session,) = (await w.done(view.id)).sessions
        result = result_of(session)
        assert (result.stop_reason, result.turns, result.error) == (StopReason.MAX_TURNS, 1, None)
        assert (result.tokens.dropped, result.samples) == (0, 1)
        w.assert_quiet()


async def test_response_tokens(world: MakeWorld) -> None:
    async with world([LONG]) as w:
        result = result_of(await w.run("ask", "ask", "ask", limits={"response_tokens": 45}))
        assert result.stop_reason is StopReason.MAX_TOKENS
        assert (result.tokens.sampled, result.tokens.trained) == (45, 45)
        assert result.verdict is not None


@pytest.mark.parametrize("last", ["ask", "ask quietly"])
async def test_context_overflow(world: MakeWorld, last: str) -> None:
    async with world([LONG], script={"context_tokens": 200}) as w:
        result = result_of(await w.run(*["ask"] * 10, last, sampling={"max_tokens": 60}))
        assert (result.stop_reason, result.error) == (StopReason.CONTEXT_OVERFLOW, None)
        assert result.verdict is not None
        assert result.turns >= 1


async def test_no_clock_runs_while_the_service_stands_still(world: MakeWorld) -> None:
    async with world() as w:
        result = result_of(await w.run("ask", "freeze 1", limits={"agent_seconds": 0.8, "session_seconds": 0.8}))
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
        stalls = w.node.stats().stalls
        assert stalls.count >= 1
        assert stalls.longest >= 0.9
        assert stalls.held < stalls.longest  # `freeze` sleeps and computes nothing


@pytest.mark.deep
async def test_a_run_that_ended_badly_after_a_stall_is_no_outcome(world: MakeWorld) -> None:
    async with world() as w:
        freeze = f"freeze {HARMFUL_SECONDS + 0.1}"
        fields = {"limits": {"agent_seconds": 0.3, "session_seconds": 30}, "max_attempts": 1}
        result = result_of(await w.run("ask", freeze, "wait forever", **fields))
        assert result.error is not None
        assert (result.error.code, result.error.retryable, result.verdict) == ("service_error", True, None)
        assert "stood still" in result.error.message
        result = result_of(await w.run("ask", freeze, **fields))
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
        assert result.verdict is not None
