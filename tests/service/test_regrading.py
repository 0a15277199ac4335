"""Regrading of sessions: the outcome that the evaluator receives, the new rewards, and the refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import Boundary, Conflict, InvalidField, NotFound
from outrider.evaluators.base import Outcome
from outrider.lifecycle import SessionState, StopReason
from outrider.schemas import GroupView
from outrider.sessions.artifacts import ArtifactLimits
from outrider.spec import EvaluatorSpec, GcSpec, RegradeSpec
from outrider.store.artifacts import CARRIED
from outrider.trajectory import Verdict
from support.postgresql import PostgresqlServer

from .conftest import MakeWorld
from .program import program
from .stage import GRADER, _stage
from .world import World, result_of

WRITE = "run echo theirs > answer; mkdir -p deep; echo below > deep/file"
PEEK = {"kind": "callable", "path": "service.test_regrading:peek"}
WAIT = {"kind": "callable", "path": GRADER, "options": {"verdicts": ["wait x"]}}
KEPT = {"carry": ["answer", "deep"], "keep": True}


async def peek(outcome: Outcome) -> Verdict:
    """Record the outcome that the evaluator receives, and return the reward of the options."""
    options = outcome.task.evaluator.options
    _stage.get().order.append(f"{outcome.stop_reason} {outcome.turns} {len(outcome.calls)} {len(outcome.transcript)}")
    if options.get("files"):
        listed = await outcome.runtime.exec("ls answer deep; cat answer deep/file", seconds=5)
        _stage.get().order.append(listed.stdout.decode())
    if options.get("beside"):
        async with outcome.beside() as runtime:
            await runtime.write("x", b"")
    return Verdict(reward=options.get("reward", 0.25))


def asked(reward: float = 0.75, **options: Any) -> RegradeSpec:
    evaluator = EvaluatorSpec.model_validate({**PEEK, "options": {"reward": reward, **options}})
    return RegradeSpec(evaluator=evaluator)


async def rewards(w: World, group: GroupView) -> list[float | None]:
    done = await w.done(group.id)
    results = [result_of(session) for session in done.sessions]
    assert [result.error for result in results] == [None] * done.n
    return [result.verdict.reward if result.verdict else None for result in results]


async def test_a_group_is_graded_again_without_its_agents(world: MakeWorld) -> None:
    async with world() as w:
        old = await w.done((await w.submit("ask", "ask", n=3, labels={"run": "a"}, verdicts=[0.0])).id, samples=True)
        calls = len(w.stage.ledger.started)
        group = await w.service.regrade_group(old.id, asked())
        assert (group.n, group.labels, group.id != old.id) == (3, {"run": "a"}, True)
        assert await rewards(w, group) == [0.75] * 3
        assert w.stage.order == ["completed 2 2 4"] * 3  # two prompts and two replies
        assert len(w.stage.ledger.started) == calls  # nothing needed a sandbox
        new = await w.done(group.id, samples=True)
        for session, before in zip(new.sessions, old.sessions, strict=True):
            result, first = result_of(session), result_of(before)
            assert (result.regrades, result.stop_reason) == (before.id, StopReason.COMPLETED)
            assert (result.turns, result.tokens, result.samples) == (first.turns, first.tokens, first.samples)
        assert new.samples is not None
        assert old.samples is not None
        for sample, before_it in zip(new.samples, old.samples, strict=True):
            assert (sample.reward, before_it.reward) == (0.75, 0.0)
            ids = {"group_id": sample.group_id, "session_id": sample.session_id, "reward": 0.75}
            assert msgspec.structs.replace(before_it, **ids) == sample
        assert await w.done(old.id, samples=True) == old
        w.assert_quiet()


async def test_the_files_that_were_kept_are_there_as_they_were(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", WRITE, evaluator={**PEEK, **KEPT, "options": {"files": True}})
        first = w.stage.order[1]
        assert first.endswith("theirs\nbelow\n")
        assert result_of(session).carried
        kept = w.service.artifacts.listed(session.id)
        assert [artifact.path for artifact in kept.artifacts] == [CARRIED]
        assert result_of(session).artifact_bytes == kept.artifacts[0].size > 0
        for id in (session.id, session.group_id):
            submit = w.service.regrade_session if id == session.id else w.service.regrade_group
            assert await rewards(w, await submit(id, asked(files=True))) == [0.75]
            assert w.stage.order[-1] == first
        w.assert_quiet()


async def test_what_was_graded_again_can_be_graded_again(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", WRITE, evaluator={**PEEK, **KEPT})
        second = await w.service.regrade_session(session.id, asked(0.5))
        assert await rewards(w, second) == [0.5]
        third = await w.service.regrade_group(second.id, asked(0.6, files=True))
        assert await rewards(w, third) == [0.6]
        fourth = await w.service.regrade_session(third.sessions[0].id, RegradeSpec())  # with the evaluator of the third
        assert await rewards(w, fourth) == [0.6]
        assert result_of((await w.done(fourth.id)).sessions[0]).regrades == session.id
        assert sum("theirs" in line for line in w.stage.order) == 2


async def test_everything_that_was_written_is_carried_again(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", WRITE, evaluator={**PEEK, "carry": "all", "keep": True})
        assert await rewards(w, await w.service.regrade_session(session.id, asked(files=True))) == [0.75]
        assert w.stage.order[-1].endswith("theirs\nbelow\n")
        w.assert_quiet()


async def test_a_session_whose_grading_failed_is_graded_at_last(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", verdicts=["fail"], max_attempts=2)
        first = result_of(session)
        assert first.error is not None
        assert first.error.boundary is Boundary.EVALUATOR
        assert (first.stop_reason, first.run_reason) == (StopReason.ERROR, StopReason.COMPLETED)
        group = await w.service.regrade_session(session.id, asked())
        assert await rewards(w, group) == [0.75]
        assert result_of((await w.done(group.id)).sessions[0]).stop_reason is StopReason.COMPLETED


async def test_an_evaluator_that_asks_for_files_that_were_not_kept_fails(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", WRITE)
        group = await w.service.regrade_session(session.id, asked(files=True))
        result = result_of((await w.done(group.id)).sessions[0])
        assert result.verdict is None
        assert result.error is not None
        assert (result.error.boundary, result.error.retryable) == (Boundary.EVALUATOR, True)
        assert "no files of this session were kept" in result.error.message
        assert await rewards(w, await w.service.regrade_session(session.id, asked(beside=True))) == [0.75]
        w.assert_quiet()


async def test_what_is_too_large_is_not_kept_and_said(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        monkeypatch.setattr(w.node._services.artifacts, "_limits", ArtifactLimits(file_bytes=100))
        session = await w.run("ask", WRITE, evaluator={**PEEK, **KEPT})
        assert not result_of(session).carried
        [left] = w.service.artifacts.listed(session.id).left_out
        assert left.path == CARRIED
        assert "at most 100 are kept" in left.reason
        group = await w.service.regrade_session(session.id, asked(files=True))
        result = result_of((await w.done(group.id)).sessions[0])
        assert result.error is not None
        assert "were kept" in result.error.message


async def test_an_agent_that_broke_its_sandbox_stays_so(world: MakeWorld) -> None:
    async with world() as w:
        runtime = {"kind": "service.test_excess:Breakable", "env": {"FAILS": "inside"}}
        grader = {"kind": "callable", "path": "service.test_excess:graded_by_hand"}
        session = await w.run("ask", "run fail", "run true", runtime=runtime, evaluator=grader)
        first = result_of(session)
        assert first.stop_reason is StopReason.AGENT_EXCESS
        group = await w.service.regrade_session(session.id, asked(1.0))
        result = result_of((await w.done(group.id)).sessions[0])
        assert (result.stop_reason, result.verdict) == (StopReason.AGENT_EXCESS, first.verdict)
        assert w.stage.order == []


async def test_sessions_without_an_outcome_are_left_out(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", "crash at 2", n=4, max_attempts=1)
        done = await w.done(view.id)
        failed = [session.id for session in done.sessions if result_of(session).error]
        assert len(failed) == 2
        group = await w.service.regrade_group(view.id, asked())
        assert await rewards(w, group) == [0.75, 0.75]
        graded = [result_of(session).regrades for session in (await w.done(group.id)).sessions]
        assert graded == [session.id for session in done.sessions if session.id not in failed]
        with pytest.raises(Conflict, match="did not end by itself"):
            await w.service.regrade_session(failed[0], asked())


async def test_what_cannot_be_graded_again_is_refused(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", "wait here")
        await w.stage.arrived["here"].wait()
        with pytest.raises(Conflict, match="not done"):
            await w.service.regrade_group(view.id, asked())
        with pytest.raises(Conflict, match="not done"):
            await w.service.regrade_session(view.sessions[0].id, asked())
        await w.service.cancel(view.id)
        await w.done(view.id)
        with pytest.raises(Conflict, match="nothing to grade"):
            await w.service.regrade_group(view.id, asked())
        for method in (w.service.regrade_group, w.service.regrade_session):
            with pytest.raises(NotFound):
                await method("g-unknown", asked())
        session = await w.run("ask")
        for evaluator, field in (
            ({"run": "true"}, "evaluator.kind"),
            ({"kind": "all", "options": {"parts": {"x": {"run": "true"}}}}, "evaluator.options.parts.x.kind"),
            ({**PEEK, "carry": ["more"]}, "evaluator.carry"),
            ({"kind": "nothing"}, "evaluator.kind"),
        ):
            with pytest.raises(InvalidField) as refused:
                await w.service.regrade_session(
                    session.id, RegradeSpec(evaluator=EvaluatorSpec.model_validate(evaluator))
                )
            assert refused.value.field == field


@pytest.mark.deep
@pytest.mark.timeout(120)
async def test_a_command_grades_the_files_of_a_program_in_a_real_sandbox(world: MakeWorld, temporary: Path) -> None:
    """The carried files come back with their modes, links and names, and without any other file of the agent's
    sandbox."""
    make = "printf '#!/bin/sh\\necho ran' > 'a b'; chmod 755 'a b'; mkdir out; ln -s '../a b' out/link; touch /tmp/left"
    look = 'test "$(out/link)" = ran && test "$(readlink out/link)" = "../a b" && test ! -e /tmp/left'
    async with world(http=True) as w:
        session = await w.run(
            harness=program(make),
            runtime={"kind": "namespace"},
            evaluator={"run": "false", "carry": ["a b", "out"], "keep": True},
        )
        assert result_of(session).verdict == Verdict(reward=0.0)
        group = await w.service.regrade_session(session.id, RegradeSpec(evaluator=EvaluatorSpec(run=look)))
        assert await rewards(w, group) == [1.0]


def test_keep_without_carry_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 'carry'"):
        EvaluatorSpec(run="true", keep=True)


async def test_a_run_that_was_removed_meanwhile_is_an_error_and_no_reward(world: MakeWorld) -> None:
    async with world() as w:
        old = await w.done((await w.submit("ask")).id)
        await w.service.drain_node(w.node.name)
        group = await w.service.regrade_group(old.id, asked())
        await w.service.retention.collect(GcSpec(days=0))
        await w.service.drain_node(w.node.name, False)
        result = result_of((await w.done(group.id)).sessions[0])
        assert result.error is not None
        assert result.verdict is None
        assert result.error.code == "not_found"
        for regrade, id in ((w.service.regrade_group, group.id), (w.service.regrade_session, group.sessions[0].id)):
            with pytest.raises(NotFound) as caught:
                await regrade(id, asked())
            assert caught.value.record().message == result.error.message
        assert result.error.message == f"the agent's run in session {old.sessions[0].id} was removed with its group"
        assert "retention" in (result.error.hint or "")


async def test_a_new_policy_does_not_cancel_it(world: MakeWorld) -> None:
    async with world() as w:
        old = await w.done((await w.submit("ask")).id)
        evaluator = EvaluatorSpec.model_validate(
            {"kind": "callable", "path": GRADER, "options": {"verdicts": ["wait x"]}}
        )
        group = await w.service.regrade_group(old.id, RegradeSpec(evaluator=evaluator))
        await w.stage.arrived["x"].wait()
        assert await w.service.store.began_before(1 << 30) == []
        w.stage.open["x"].set()
        assert await rewards(w, group) == [1.0]


async def test_it_can_be_cancelled(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", WRITE, evaluator={**PEEK, **KEPT})
        evaluator = EvaluatorSpec.model_validate(
            {"kind": "callable", "path": GRADER, "options": {"verdicts": ["wait x"]}}
        )
        group = await w.service.regrade_session(session.id, RegradeSpec(evaluator=evaluator))
        await w.stage.arrived["x"].wait()
        assert (await w.service.reader.session(group.sessions[0].id)).state is SessionState.EVALUATING
        await w.service.cancel(group.id)
        assert result_of((await w.done(group.id)).sessions[0]).stop_reason is StopReason.CANCELLED
        w.assert_quiet()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_the_service_dies_while_it_is_graded(world: MakeWorld, kind: str, request: pytest.FixtureRequest) -> None:
    """The next service grades the session in a second attempt. The session's turns are stored once."""
    settings: dict[str, Any] = {}
    if kind == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        settings["store"] = await server.new_database()
    evaluator = EvaluatorSpec.model_validate(WAIT)
    async with world(**settings) as w:
        session = await w.run("ask", "ask", WRITE, evaluator={**PEEK, **KEPT})
        group = await w.service.regrade_session(session.id, RegradeSpec(evaluator=evaluator))
        await w.stage.arrived["x"].wait()
    async with world(**settings) as w:
        w.stage.open["x"].set()
        async with asyncio.timeout(60):
            assert await rewards(w, group) == [1.0]
        result = result_of((await w.done(group.id)).sessions[0])
        assert (result.attempt, result.turns, result.regrades) == (2, 2, session.id)
        w.assert_quiet()
