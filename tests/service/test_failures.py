"""A failure is an error of the boundary at which it occurs. The attempt is retried if a retry may help, and there is
never a reward."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import Boundary
from outrider.lifecycle import StopReason
from outrider.schemas import SessionView
from outrider.trajectory import SessionResult

from .conftest import MakeWorld
from .stage import RAW_GRADER
from .world import SAY, result_of

REJECTING = {"reply": SAY, "fail": "rejected"}
BREAKING_OFF = {"reply": SAY, "fail": "unavailable", "after": 1}


def failed(session: SessionView, boundary: Boundary, code: str) -> SessionResult:
    """Check that the session ended with this error and without a verdict, and return its result."""
    result = result_of(session)
    assert (result.stop_reason, result.verdict) == (StopReason.ERROR, None)
    assert result.error is not None
    assert (result.error.boundary, result.error.code) == (boundary, code), result.error
    return result


async def test_a_harness_that_exits_non_zero(world: MakeWorld) -> None:
    async with world() as w:
        command = {"command": ["bash", "-c", "echo started; echo went wrong >&2; exit 3"]}
        session = await w.run(harness=command, max_attempts=3)
        error = failed(session, Boundary.HARNESS, "harness_error").error
        assert error is not None
        assert error.message == "command exited with code 3"
        assert error.log_tail == "started\nwent wrong"
        assert (session.attempt, result_of(session).attempt) == (3, 3)
        assert session.last_error == error
        retries = await w.events("session.retry")
        assert [(retry["attempt"], retry["error"]["log_tail"]) for retry in retries] == [
            (1, "started\nwent wrong"),
            (2, "started\nwent wrong"),
        ]
        assert set(w.stage.ledger.stopped) == {(session.id, attempt) for attempt in (1, 2, 3)}
        assert w.stage.count["graded"] == 0
        w.assert_quiet()


@pytest.mark.parametrize("harness", [{"command": ["true"]}, None], ids=["command", "agent"])
async def test_a_harness_that_never_calls_the_model(world: MakeWorld, harness: Any) -> None:
    async with world() as w:
        given = {} if harness is None else {"harness": harness}
        result = failed(await w.run("note gone", max_attempts=1, **given), Boundary.HARNESS, "harness_error")
        assert result.error is not None
        assert "without a single model call" in result.error.message
        assert result.error.log_tail == ("left in good order" if harness is None else "")
        assert w.stage.count["graded"] == 0


async def test_an_agent_whose_time_runs_out_before_any_reply(world: MakeWorld) -> None:
    """Without a reply there is nothing to train on, so the session gets no reward."""
    async with world([{"reply": SAY, "stall": 0}]) as w:
        session = await w.run("ask", max_attempts=2, limits={"agent_seconds": 0.1})
        failed(session, Boundary.HARNESS, "harness_error")
        assert (session.attempt, w.stage.count["graded"]) == (2, 0)
        w.assert_quiet()


async def test_an_agent_that_raises(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", "crash", max_attempts=2)
        error = failed(session, Boundary.HARNESS, "harness_error").error
        assert error is not None
        assert error.message == "Actor.run raised ValueError: the agent crashed, as it was told to"
        assert "in _step" in (error.log_tail or "")
        samples = await w.service.reader.samples(session.id)
        assert [(sample.attempt, sample.reward) for sample in samples] == [(2, None)]


async def test_a_retry_that_succeeds_leaves_only_the_last_attempt(world: MakeWorld) -> None:
    async with world(["first<|im_end|>", "second<|im_end|>"]) as w:
        session = await w.run("ask", "crash at 2", "ask")
        result = result_of(session)
        assert (result.stop_reason, result.attempt, result.turns, session.attempt) == (StopReason.COMPLETED, 3, 2, 3)
        assert session.last_error is not None
        assert result.error is None
        assert [turn.sampled for turn in await w.service.reader.turns(session.id)] == [
            "first<|im_end|>",
            "second<|im_end|>",
        ]
        (sample,) = await w.service.reader.samples(session.id)
        assert (sample.attempt, sample.reward, sum(sample.loss_mask)) == (3, 1.0, result.tokens.sampled)
        w.assert_quiet()


@pytest.mark.parametrize("do", [("ask", "crash"), ("ask quietly", "crash"), ("ask quietly",), ("ask",)], ids="-".join)
async def test_the_failed_call_is_the_cause_whatever_the_harness_makes_of_it(
    world: MakeWorld, do: tuple[str, ...]
) -> None:
    async with world([REJECTING]) as w:
        session = await w.run(*do)
        failed(session, Boundary.ENGINE, "engine_rejected")
        assert (session.attempt, w.stage.count["graded"]) == (1, 0)  # a retry would not help
        w.assert_quiet()


async def test_a_failed_call_that_the_harness_got_over_is_no_failure(world: MakeWorld) -> None:
    async with world([REJECTING, SAY]) as w:
        result = result_of(await w.run("ask quietly", "ask"))
        assert (result.stop_reason, result.turns, result.error) == (StopReason.COMPLETED, 1, None)


@pytest.mark.parametrize("limits", [{"turns": 1}, {"response_tokens": 1}], ids="-".join)
@pytest.mark.parametrize("do", [("ask quietly", "ask"), ("ask quietly", "ask quietly")], ids="-".join)
async def test_a_broken_reply_that_used_up_a_limit(
    world: MakeWorld, limits: dict[str, int], do: tuple[str, ...]
) -> None:
    """The next call is refused by the limit, but the agent lacks the broken reply, which is the engine's failure."""
    async with world([BREAKING_OFF]) as w:
        session = await w.run(*do, limits=limits, max_attempts=1)
        result = failed(session, Boundary.ENGINE, "engine_unavailable")
        assert (result.turns, result.tokens.sampled, w.stage.count["graded"]) == (1, 1, 0)
        w.assert_quiet()


async def test_an_agent_that_spends_its_time_on_a_failed_call(world: MakeWorld) -> None:
    async with world([SAY, REJECTING]) as w:
        session = await w.run("ask", "ask quietly", "pass 30", limits={"agent_seconds": 20})
        failed(session, Boundary.ENGINE, "engine_rejected")
        assert w.stage.count["graded"] == 0


async def test_an_engine_that_breaks_off_is_tried_again(world: MakeWorld) -> None:
    async with world([BREAKING_OFF]) as w:
        session = await w.run("ask quietly", max_attempts=2)
        result = failed(session, Boundary.ENGINE, "engine_unavailable")
        assert session.attempt == 2
        assert (result.tokens.sampled, result.tokens.dropped, result.samples) == (1, 1, 0)
        w.assert_quiet()


@pytest.mark.parametrize("operation", ["start", "exec", "write"])
async def test_a_sandbox_that_fails(world: MakeWorld, operation: str) -> None:
    async with world() as w:
        prepare = [{"run": "true"}, {"write": "x", "to": "y"}]
        runtime = {"env": {"OUTRIDER_FAKE_FAIL": operation}, "prepare": prepare}
        session = await w.run("ask", runtime=runtime, max_attempts=2)
        failed(session, Boundary.RUNTIME, "runtime_failure")
        assert session.attempt == 2
        w.assert_quiet()


async def test_a_prepare_step_may_succeed_at_its_second_attempt(world: MakeWorld) -> None:
    async with world() as w:
        flaky = {"run": "test -f $MARK && exit 0; echo x > $MARK; exit 7", "env": {"MARK": "seen"}, "attempts": 2}
        session = await w.run("ask", runtime={"prepare": [flaky]}, max_attempts=1)
        assert result_of(session).stop_reason is StopReason.COMPLETED


async def test_a_prepare_step_that_fails_says_which_and_why(world: MakeWorld) -> None:
    async with world() as w:
        prepare = [{"run": "true"}, {"run": "echo no such luck; exit 4"}]
        error = failed(
            await w.run("ask", runtime={"prepare": prepare}, max_attempts=1), Boundary.RUNTIME, "runtime_failure"
        ).error
        assert error is not None
        assert (error.field, error.log_tail) == ("task.runtime.prepare.1", "no such luck")


async def test_a_sandbox_that_breaks_under_the_agent(world: MakeWorld) -> None:
    async with world() as w:
        failed(await w.run("ask", "break", max_attempts=2), Boundary.RUNTIME, "runtime_failure")
        w.assert_quiet()


async def test_an_evaluator_is_tried_again_on_the_same_outcome(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", verdicts=["fail", "fail", 0.25])
        result = result_of(session)
        assert result.verdict is not None
        assert (result.verdict.reward, session.attempt, w.stage.count["graded"]) == (0.25, 1, 3)


async def test_an_evaluator_that_keeps_failing(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", verdicts=["fail"])
        error = failed(session, Boundary.EVALUATOR, "evaluator_error").error
        assert error is not None
        assert "the grader failed" in (error.log_tail or "")
        assert (session.attempt, w.stage.count["graded"]) == (1, 3)  # the agent does not run again
        samples = await w.service.reader.samples(session.id)
        assert [(sample.reward, sum(sample.loss_mask) > 0) for sample in samples] == [(None, True)]
        w.assert_quiet()


async def test_an_evaluator_that_hangs(world: MakeWorld) -> None:
    async with world() as w:
        grader = {"kind": "command", "run": "sleep 60", "seconds": 0.1}
        error = failed(
            await w.run("ask", evaluator=grader, max_attempts=2), Boundary.EVALUATOR, "evaluator_error"
        ).error
        assert error is not None
        assert "0.1 s" in error.message
        w.assert_quiet()


async def test_an_evaluator_of_ones_own_may_raise_anything(world: MakeWorld) -> None:
    async with world() as w:
        for name, times_out in (("LookupError", False), ("TimeoutError", True)):
            grader = {"kind": RAW_GRADER, "options": {"fails": 9, "times_out": times_out}}
            broken = await w.run("ask", evaluator=grader, max_attempts=2)
            error = failed(broken, Boundary.EVALUATOR, "evaluator_error").error
            assert error is not None
            assert error.message == f"the evaluator raised {name}: nothing here to grade"
            assert "in evaluate" in (error.log_tail or "")
        w.stage.count.clear()
        assert result_of(await w.run("ask", evaluator={"kind": RAW_GRADER, "options": {"fails": 2}})).verdict


async def test_a_runtime_of_ones_own_may_raise_anything(world: MakeWorld) -> None:
    """The error ends its own session, and the service goes on."""
    async with world() as w:
        kind = {"kind": "service.stage:BrokenRuntime"}
        error = failed(await w.run("ask", runtime=kind, max_attempts=2), Boundary.SERVICE, "service_error").error
        assert error is not None
        assert error.message == "OSError: not a failure of ours"
        w.assert_quiet()
        assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED


async def test_an_agent_that_cannot_be_made_any_more(world: MakeWorld) -> None:
    """The agent can be made at submission, but not when its session starts."""
    async with world() as w:
        harness = {"agent": "service.stage:OnceOnly"}
        session = await w.run(harness=harness, max_attempts=3)
        failed(session, Boundary.REQUEST, "invalid_field")
        assert session.attempt == 1
        w.assert_quiet()
        assert result_of(await w.run("ask")).stop_reason is StopReason.COMPLETED


async def test_samples_of_a_seed_are_no_copies_and_another_attempt_repeats_them(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", "ask", "crash at 1", n=2, sampling={"seed": 7})
        done = await w.done(view.id)
        assert sorted(session.attempt for session in done.sessions) == [1, 2]
        seeds: dict[str, list[int | None]] = {}
        for request in w.engine.requests:
            seeds.setdefault(request.session_key, []).append(request.sampling.seed)
        by_session = {(key.rpartition("-")[0], tuple(given)) for key, given in seeds.items()}
        assert len(seeds) == 3
        assert len(by_session) == 2
        assert len({seed for _, given in by_session for seed in given}) == 4


async def test_an_engine_that_sends_ids_that_no_tokenizer_has(world: MakeWorld) -> None:
    """The engine is at fault: such an id must not overflow an integer and end as a failure of the service."""
    async with world([{"ids": [1 << 40]}]) as w:
        session = await w.run("ask", max_attempts=1)
        error = failed(session, Boundary.ENGINE, "engine_misbehaved").error
        assert error is not None
        assert "1099511627776" in error.message
        (engine,) = w.service.pool.status()
        assert (engine.ok, engine.suspect) == (True, error.message)
