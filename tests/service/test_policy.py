"""Weight updates while sessions run: no session is lost, every token has the version that sampled it, and no agent's
time passes while the policy is paused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.config import LanesConfig
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView
from outrider.service.assembly import open_service
from outrider.service.service import Service
from outrider.spec import PolicyUpdateSpec
from outrider.trajectory import Sample
from support.clock import pass_time
from support.stamping import StampingEngine

from .stage import Stage, a_stage
from .world import HASTY, config, group, result_of

TESTS = Path(__file__).parent.parent
SESSIONS = 64
TURNS = 3
LENGTH = 24


class Running:
    """A service on stamping engines."""

    def __init__(self, service: Service, stage: Stage, engines: list[StampingEngine]) -> None:
        self.service = service
        self.stage = stage
        self.engines = engines

    async def done(self, group_id: str) -> GroupView:
        while (view := await self.service.group(group_id, wait=30, samples=True)).finished is None:
            pass
        return view


@asynccontextmanager
async def running(folder: Path, tokenizer: Path, *, engines: int = 1, length: int = LENGTH) -> AsyncIterator[Running]:
    made = [StampingEngine(tokenizer, name=f"engine-{n}", length=length) for n in range(engines)]
    lanes = LanesConfig(init=SESSIONS, run=SESSIONS, eval=SESSIONS)
    with a_stage() as stage:
        async with open_service(config(folder, tokenizer, lanes=lanes), pauses=HASTY) as (service, _):
            for engine in made:
                await service.pool.add_engine(engine)
            async with service.running():
                yield Running(service, stage, made)


def check_stamps(sample: Sample, engine: StampingEngine) -> list[list[int]]:
    """Return the versions of each reply in a row, token by token. Checks that each letter belongs to its version in the
    row, and each log-probability to its position."""
    replies: list[list[int]] = []
    before = False
    for place, (token, trains, logprob, version) in enumerate(
        zip(sample.ids, sample.loss_mask, sample.logprobs, sample.versions, strict=True)
    ):
        if trains:
            if not before:
                replies.append([])
            replies[-1].append(version)
            assert logprob == scripted_logprob(place, token)
            assert token == engine.end or engine.letters.index(token) == version
        else:
            assert version == -1
        before = bool(trains)
    return replies


@pytest.mark.deep
@pytest.mark.parametrize("weights", [None, "weights"], ids=["trainer loads", "engines load"])
@pytest.mark.parametrize("mode", ["finish", "abort"])
async def test_updates_in_the_middle_of_64_sessions(
    tmp_path: Path, tokenizer: Path, mode: Any, weights: str | None
) -> None:
    async with running(tmp_path, tokenizer, engines=2) as world:
        submitted = await world.service.submit(group(*["ask"] * TURNS, n=SESSIONS, limits={"agent_seconds": 300}))
        for version in (1, 2, 3):
            for engine in world.engines:
                engine.hold(12 * SESSIONS // 2)
            for engine in world.engines:
                await engine.held.wait()
            update = asyncio.ensure_future(
                world.service.update_policy(PolicyUpdateSpec(version=version, mode=mode, weights=weights))
            )
            if mode == "finish":
                for engine in world.engines:
                    engine.release()
            status = await update
            assert [each.version for each in status.engines] == [version, version]
        for engine in world.engines:
            engine.release()
        view = await world.done(submitted.id)
        ends = [result_of(session).stop_reason for session in view.sessions]
        assert ends == [StopReason.COMPLETED] * SESSIONS
        assert [session.attempt for session in view.sessions] == [1] * SESSIONS
        assert view.samples is not None
        replies = [reply for sample in view.samples for reply in check_stamps(sample, world.engines[0])]
        assert [len(reply) for reply in replies] == [LENGTH + 1] * SESSIONS * TURNS
        assert {version for reply in replies for version in reply} >= {0, 1, 2, 3}
        assert all(reply == sorted(reply) for reply in replies)
        over_a_cut = [reply for reply in replies if len(set(reply)) > 1]
        assert bool(over_a_cut) == (mode == "abort")
        assert sum(result_of(session).tokens.drift for session in view.sessions) == 0
        assert [(each.in_flight, each.sessions) for each in world.service.pool.status()] == [(0, 0)] * 2


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["finish", "abort"])
async def test_no_agent_runs_out_of_time_while_paused(tmp_path: Path, tokenizer: Path, mode: Any) -> None:
    """The pause is longer than the time limits of the agent and of the session together."""
    async with running(tmp_path, tokenizer) as world:
        engine = world.engines[0]
        engine.hold(8)
        limits = {"agent_seconds": 20, "session_seconds": 40}
        submitted = await world.service.submit(group("ask", "ask", n=4, limits=limits))
        await engine.held.wait()
        paused = asyncio.ensure_future(world.service.pool.policy.pause(mode))
        await asyncio.sleep(0)
        await pass_time(200)
        engine.release()
        await paused
        await pass_time(200)
        await world.service.pool.policy.resume(1)
        view = await world.done(submitted.id)
        assert [result_of(session).stop_reason for session in view.sessions] == [StopReason.COMPLETED] * 4


async def test_time_before_and_after_a_pause_counts(tmp_path: Path, tokenizer: Path) -> None:
    async with running(tmp_path, tokenizer) as world:
        limits = {"agent_seconds": 20, "session_seconds": 400}
        submitted = await world.service.submit(group("ask", "wait door", limits=limits))
        await world.stage.arrived["door"].wait()
        await pass_time(12)
        await world.service.pool.policy.pause("finish")
        await pass_time(100)
        await world.service.pool.policy.resume()
        await pass_time(12)
        view = await world.done(submitted.id)
        assert result_of(view.sessions[0]).stop_reason is StopReason.AGENT_TIMEOUT


async def test_old_groups_are_cancelled_and_others_go_on(tmp_path: Path, tokenizer: Path) -> None:
    async with running(tmp_path, tokenizer) as world:
        engine = world.engines[0]
        groups = []
        for version in (0, 1, 2):
            engine.hold(4)
            groups.append(await world.service.submit(group("ask", n=2)))
            await engine.held.wait()
            bound = 1 if version == 1 else None
            update = PolicyUpdateSpec(version=version + 1, mode="abort", cancel_older_than=bound)
            status = await world.service.update_policy(update)
            assert status.cancelled == ((groups[0].id,) if version == 1 else ())
        engine.release()
        views = [await world.done(each.id) for each in groups]
        ends = [{result_of(session).stop_reason for session in view.sessions} for view in views]
        assert ends == [{StopReason.CANCELLED}, {StopReason.COMPLETED}, {StopReason.COMPLETED}]


@pytest.mark.deep
async def test_a_killed_service_goes_on_with_its_version_and_the_ages_of_its_groups(
    tmp_path: Path, tokenizer: Path
) -> None:
    command = [sys.executable, "-m", "service.crash_update", str(tmp_path), str(tokenizer)]
    process = await asyncio.create_subprocess_exec(*command, cwd=TESTS, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        old, young = (await process.stdout.readline()).decode().split()
    finally:
        process.kill()
        await process.wait()
    async with running(tmp_path, tokenizer) as world:
        service, engine = world.service, world.engines[0]
        assert service.pool.policy.version == 3
        assert (await service.status()).policy.version == 3
        engine.hold(1)
        while len(engine.requests) < 4:  # noqa: ASYNC110  # until all four sessions run again
            await asyncio.sleep(0)
        engine.hold(16)
        await engine.held.wait()
        assert (engine.loaded, engine.version) == (["weights-3"], 3)
        update = PolicyUpdateSpec(version=4, mode="abort", cancel_older_than=3)
        assert (await service.update_policy(update)).cancelled == (old,)
        engine.release()
        ends = {id: await world.done(id) for id in (old, young)}
        assert {result_of(session).stop_reason for session in ends[old].sessions} == {StopReason.CANCELLED}
        assert {result_of(session).stop_reason for session in ends[young].sessions} == {StopReason.COMPLETED}
        versions = [check_stamps(sample, engine) for sample in ends[young].samples or ()]
        assert {version for replies in versions for reply in replies for version in reply} == {3, 4}


async def test_a_refused_update_cancels_nobody(tmp_path: Path, tokenizer: Path) -> None:
    async with running(tmp_path, tokenizer) as world:
        engine = world.engines[0]
        engine.hold(4)
        submitted = await world.service.submit(group("ask"))
        await engine.held.wait()
        update = PolicyUpdateSpec(version=1, mode="abort", weights="nowhere", cancel_older_than=1)
        with pytest.raises(Exception, match="no weights in nowhere"):
            await world.service.update_policy(update)
        engine.release()
        view = await world.done(submitted.id)
        assert result_of(view.sessions[0]).stop_reason is StopReason.COMPLETED


async def test_a_service_that_stops_while_paused_leaves_sessions_for_the_next(tmp_path: Path, tokenizer: Path) -> None:
    async with running(tmp_path, tokenizer) as world:
        engine = world.engines[0]
        engine.hold(8)
        submitted = await world.service.submit(group("ask", n=4))
        await engine.held.wait()
        await world.service.pool.policy.pause("abort")
    assert engine.told[-1] == "resume"
    async with running(tmp_path, tokenizer) as world:
        assert world.service.pool.policy.status().paused is None
        view = await world.done(submitted.id)
        assert [result_of(session).stop_reason for session in view.sessions] == [StopReason.COMPLETED] * 4
