"""A policy's gate with followers in other processes, and the pool of a follower."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from outrider.concurrency.chores import Failures
from outrider.config import Config, ModelConfig
from outrider.engines.base import EngineHealth, EngineOptions, GenerateRequest, KnownVersions, SamplingParams
from outrider.engines.gates import GateReport, PolicyGate
from outrider.engines.pool.follower import FollowedPolicy, PoolFollower
from outrider.engines.pool.placement import EngineState, PoolState
from outrider.engines.pool.pool import EnginePool
from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lab.fakes.engine_servers.prefix_cache import PrefixCache
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.service.model_backends import open_models
from outrider.spec import EngineSpec
from outrider.trajectory import LogprobKind, TokenMode
from support.stamping import StampingEngine


async def settles(gate: PolicyGate) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await gate.settled()
    except TimeoutError:
        return False
    return True


def report(gate: PolicyGate, *, behind: int = 0, in_flight: int = 0, whole: int = 0) -> GateReport:
    return GateReport(mode_changes=gate.mode_changes - behind, in_flight=in_flight, whole=whole)


@pytest.mark.parametrize(("mode", "field"), [("finish", "in_flight"), ("abort", "whole")])
async def test_a_gate_has_settled_when_all_followers_have(
    mode: Literal["finish", "abort"], field: Literal["in_flight", "whole"]
) -> None:
    gate = PolicyGate()
    for name in ("a", "b"):
        gate.expect(name)
        gate.report(name, report(gate))
    gate.close(mode)
    assert not await settles(gate)  # neither has received the order
    gate.report("a", report(gate))
    assert not await settles(gate)
    gate.report("b", report(gate, in_flight=1, whole=field == "whole"))
    assert not await settles(gate)
    gate.report("b", report(gate, in_flight=mode == "abort"))  # generations that can be cut off need not end
    assert await settles(gate)


async def test_a_stricter_closing_is_waited_for_anew() -> None:
    gate = PolicyGate()
    gate.close("finish")
    gate.expect("a")
    gate.report("a", report(gate))
    assert await settles(gate)
    gate.close("abort")
    assert not await settles(gate)
    gate.report("a", report(gate))
    assert await settles(gate)
    gate.close("finish")  # a milder mode changes nothing
    assert gate.mode == "abort"
    assert await settles(gate)


async def test_a_follower_that_is_gone_has_nothing_in_flight() -> None:
    gate = PolicyGate()
    gate.close("finish")
    gate.expect("a")
    gate.report("a", report(gate, in_flight=3))
    assert not await settles(gate)
    gate.forget("a")
    assert await settles(gate)
    gate.forget("a")


@pytest.mark.parametrize("answers", [True, False])
async def test_a_follower_that_takes_too_long_is_lost(answers: bool) -> None:
    """The slow follower acknowledges the pause (`answers`) but reports generations in flight for ever, or it never
    acknowledges the pause."""
    gate, lost = PolicyGate(), list[str]()
    gate.answer_seconds, gate.settle_seconds = (60.0, 0.05) if answers else (0.05, 60.0)
    gate.expect("slow", lost.append)
    gate.expect("other", lost.append)
    gate.close("finish")
    if answers:
        gate.report("slow", report(gate, in_flight=10**9))
    gate.report("other", report(gate))
    async with asyncio.timeout(20):
        await gate.settled()
    assert len(lost) == 1
    assert ("generations have not ended" if answers else "not answered") in lost[0]
    gate.report("slow", report(gate, in_flight=10**9))  # a lost follower does not count
    assert await settles(gate)


async def test_what_cannot_be_of_a_gate_is_refused() -> None:
    gate = PolicyGate()
    gate.report("unknown", report(gate, in_flight=5))
    gate.close("finish")
    assert await settles(gate), "nobody has expected it"
    gate.expect("a")
    for wrong in (report(gate, behind=-1), GateReport(mode_changes=1, in_flight=1, whole=2)):
        with pytest.raises(ValueError, match="a gate after"):
            gate.report("a", wrong)
    gate.report("a", report(gate, in_flight=3))
    with pytest.raises(ValueError, match="behind a closed gate"):
        gate.report("a", report(gate, in_flight=4))
    gate.report("a", report(gate, in_flight=2))


async def test_changes_are_told_and_counted() -> None:
    seen: list[tuple[str | None, int]] = []
    gate = PolicyGate(lambda: seen.append((gate.mode, gate.mode_changes)))
    gate.close("finish")
    gate.close("finish")
    gate.open()
    gate.open()
    assert seen == [("finish", 1), ("finish", 1), (None, 2)]


class SilentLeader:
    def settled(self, report: GateReport) -> None: ...
    def engine_failed(self, engine: str) -> None: ...


async def test_failures_of_following_pools_are_recorded_with_those_of_the_process(tokenizer_folder: Path) -> None:
    async def work() -> None:
        raise TypeError("a bug in an engine")

    config, failures = Config(model=ModelConfig(tokenizer=str(tokenizer_folder), renderer="qwen3")), Failures()
    async with open_models(config, leader=lambda _: SilentLeader(), failures=failures) as models:
        pool = models.policy.pool
        await pool.add_engine(ScriptedEngine(EngineOptions(name="a")))
        await pool.health.run(pool.members["a"], "check", work())
        assert [each.name for each in failures.failing()] == ["check a"]


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_a_request_that_the_server_keeps_through_a_pause_is_given_up(
    tokenizer_folder: Path, protocol: Literal["vllm", "sglang"]
) -> None:
    """The follower receives the new version only after the server has resumed."""
    engine, cache, length = StampingEngine(tokenizer_folder), PrefixCache(), 20
    settings = ServeSettings(prefix_cache=cache)
    async with (
        serving(engine_app(engine, protocol, settings)) as url,
        EnginePool(follows=partial(FollowedPolicy, leader=SilentLeader())) as pool,
        PoolFollower(pool, lambda state: pytest.fail(state.name)) as follower,
    ):
        old = KnownVersions(run="run")
        state = EngineState(
            name="engine",
            kind=protocol,
            url=url,
            spec=EngineSpec(kind=protocol, name="engine", url=url).model_dump_json().encode(),
            mode=TokenMode.TOKENS,
            logprob_kind=LogprobKind.SAMPLING,
            constraints=frozenset(),
            health=EngineHealth(ok=True, model="policy", version=0),
            ok=True,
            detail="",
            draining=False,
            version=0,
            versions=old,
        )

        def say(mode_changes: int, paused: Literal["abort"] | None, version: int) -> None:
            known = msgspec.structs.replace(state, version=version, versions=old.with_version(version))
            follower.follow(
                PoolState(mode_changes=mode_changes, paused=paused, policy_version=version, engines=(known,))
            )

        async def asked() -> Any:
            request = GenerateRequest(
                request_id="r",
                session_key="s",
                input_ids=np.full(8, engine.end, dtype=np.int32),
                sampling=SamplingParams(max_tokens=100),
            )
            return [chunk async for chunk in pool.calls.generate(request)]

        async with asyncio.timeout(20):
            say(0, None, 0)
            assert len(await asked()) > 1
            await engine.pause("finish")  # the server holds requests that arrive now
            kept = asyncio.create_task(asked())
            while len(engine.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            say(1, "abort", 0)
            await asyncio.sleep(0.1)
            await engine.set_version(1)
            await engine.resume()
            await asyncio.sleep(0.1)
            say(2, None, 1)
            chunks = await kept
        assert [span.version for span in chunks[-1].versions] == [1]
        assert sum(len(chunk.ids) for chunk in chunks) == length + 1
        assert (cache.stale, cache.salts[-1]) == (0, "run-1")
        assert len(await asked()) > 1, "the engine is used again"
        member = pool.members["engine"]
        member.version = 2  # read from a reply before the leader's state has this version
        say(2, None, 1)
        await asyncio.sleep(0.05)
        assert member.version == 2
        await engine.set_version(0)
        say(4, None, 0)
        async with asyncio.timeout(5):
            while member.version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_an_engine_that_is_removed_fails_no_longer() -> None:
    """The status lists an engine that the process cannot use, but only while the service has the engine."""
    failures = Failures()
    state = EngineState(
        name="odd",
        kind="no such kind",
        url="http://127.0.0.1:9",
        spec=EngineSpec(kind="no such kind", name="odd", url="http://127.0.0.1:9").model_dump_json().encode(),
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.SAMPLING,
        constraints=frozenset(),
        health=EngineHealth(ok=True),
        ok=True,
        detail="",
        draining=False,
        version=0,
        versions=None,
    )

    def say(*engines: EngineState) -> None:
        follower.follow(PoolState(mode_changes=0, paused=None, policy_version=None, engines=engines))

    async with (
        asyncio.timeout(60),
        EnginePool(follows=partial(FollowedPolicy, leader=SilentLeader())) as pool,
        PoolFollower(pool, lambda state: pytest.fail(state.name), failures) as follower,
    ):
        say(state)
        while not failures.failing():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert [each.name for each in failures.failing()] == ["use engine odd"]
        say()
        await asyncio.sleep(0.1)
        assert failures.failing() == ()
