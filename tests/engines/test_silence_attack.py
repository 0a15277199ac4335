"""False silences, attempts of an agent to exploit the rules of silence, and cancellations that coincide with a cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from outrider.engines.base import Chunk, EngineHealth, GenerateRequest
from outrider.engines.pool.flights import Flight, Flights
from outrider.engines.pool.leader import pool_state
from outrider.engines.pool.placement import EngineRecord
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.waits import KNOWN_CALLS, LIMITS, Overdue
from outrider.errors import EngineSilent, EngineUnavailable
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.nodes.service_proxy import ForwardedEngine
from outrider.trajectory import FinishReason
from support.clock import pass_time

from .test_silence import IDS, SOON, Call, Dripping, Losing, engine_of, known, known_slowly, request, until


class OneSlot(ScriptedEngine):
    """Serves its requests one after another, `seconds` each."""

    seconds = 0.0
    asked = 0
    _slot: asyncio.Lock

    async def start(self) -> None:
        self._slot = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked += 1
        async with self._slot, aclosing(super().generate(request)) as chunks:
            await asyncio.sleep(self.seconds)
            async for chunk in chunks:
                yield chunk


class Slow(OneSlot):
    """Needs a second for 200 tokens of prompt, and `seconds` more for its first reply."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with self._slot:
            self.asked += 1
            await asyncio.sleep(len(request.input_ids) / 200 + (self.seconds if self.asked == 1 else 0))
        async with aclosing(ScriptedEngine.generate(self, request)) as chunks:
            async for chunk in chunks:
                yield chunk


class Relay(ScriptedEngine):
    """An engine whose workers connect to it and need `seconds` to begin with a request."""

    awaits_workers = True
    seconds = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            await asyncio.sleep(self.seconds)
            async for chunk in chunks:
                yield chunk


class Deaf(ScriptedEngine):
    """Hangs, while its health route still replies."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, detail="", model="scripted", context_tokens=32768, version=0)


async def answered(*calls: Call, seconds: float = 300.0) -> None:
    await until(lambda: all(call.task.done() for call in calls), seconds)
    for call in calls:
        assert await call.task == IDS


@pytest.mark.parametrize("order", [("cancel", "cut"), ("cut", "cancel"), ("cut",)])
async def test_a_cut_swallows_no_cancellation(order: tuple[str, ...]) -> None:
    async def nothing() -> AsyncGenerator[Chunk, None]:
        await asyncio.Event().wait()
        yield Chunk(ids=[], logprobs=[])

    a = engine_of("a")
    member = EngineRecord(a, await a.health(), kind="scripted", url=None, owned=False)
    chunks = nothing()
    flight = Flight(Flights(LIMITS, lambda _: None), member, request("s"), 4, 4, chunks, Overdue())

    async def consume() -> int:
        task = asyncio.current_task()
        assert task is not None
        try:
            await anext(flight)
        except EngineSilent:
            return task.cancelling()
        return -1

    consumer = asyncio.create_task(consume())
    await pass_time(0.1)
    for what in order:
        if what == "cut":
            flight.cut(EngineSilent("silent"))
        else:
            consumer.cancel()
    await asyncio.wait([consumer])
    await chunks.aclose()
    assert consumer.cancelled() is ("cancel" in order)
    if order == ("cut",):
        assert consumer.result() == 0


@pytest.mark.deep
async def test_calls_that_queue_for_minutes_keep_their_place() -> None:
    a = engine_of("a", OneSlot)
    await a.start()
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        asked = a.asked
        a.seconds = 2.5
        calls = [Call(pool, f"s{number}") for number in range(60)]
        await answered(*calls)
        # Each health check adds one request; only one check runs at a time.
        assert a.asked - asked < 60 + 150 / LIMITS.check + 1
        assert pool.status()[0].failures == 0


@pytest.mark.deep
async def test_a_relay_whose_workers_take_minutes_to_begin_keeps_its_calls() -> None:
    a = engine_of("a", Relay)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        a.seconds = 240.0
        call = Call(pool, "s")
        await answered(call, seconds=400)
        assert (len(a.requests), pool.status()[0].failures) == (1, 0)


@pytest.mark.deep
async def test_such_a_relay_keeps_the_calls_of_other_processes_too() -> None:
    class Service:
        calls = 0

        async def stream(self, request: object) -> AsyncGenerator[Chunk, None]:
            self.calls += 1
            await asyncio.sleep(240)
            yield Chunk(ids=IDS, logprobs=[-1.0] * 4, finish=FinishReason.STOP)

    service = Service()
    async with EnginePool() as leader, EnginePool(probing=SOON) as pool:
        await leader.add_engine(engine_of("a", Relay))
        [state] = pool_state(leader).engines
        await pool.adopt(state, ForwardedEngine(cast(Any, service), None, state))
        call = Call(pool, "s")
        await answered(call, seconds=400)
        assert (service.calls, pool.status()[0].failures) == (1, 0)


async def test_a_call_given_up_on_a_relay_that_hangs_is_doubted_though_its_worker_is_connected() -> None:
    a = engine_of("a", Relay)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        a.seconds = 1.0
        for number in range(KNOWN_CALLS):
            await answered(Call(pool, f"s{number}"))
        a.seconds = 1000.0
        call = Call(pool, "s")
        await pass_time(4.0)
        call.task.cancel()
        await asyncio.wait([call.task])
        [check_engine] = call.overdue.pending_checks
        settled = asyncio.ensure_future(check_engine())
        await until(settled.done)
        with pytest.raises(EngineUnavailable, match="one token"):
            await settled


@pytest.mark.deep
async def test_an_engine_that_compiles_for_minutes_at_first_keeps_its_call() -> None:
    a = engine_of("a", Slow)
    await a.start()
    a.seconds = 180.0
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        call = Call(pool, "s")
        await answered(call)
        assert pool.status()[0].failures == 0


async def test_an_engine_that_reads_a_long_prompt_slowly_keeps_its_call() -> None:
    a = engine_of("a", Slow)
    await a.start()
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        for number in range(KNOWN_CALLS):
            await answered(Call(pool, f"s{number}"))
        long = msgspec.structs.replace(request("s"), input_ids=np.zeros(15_000, dtype=np.int32))

        async def ask() -> list[int]:
            async with aclosing(pool.calls.generate(long, Overdue())) as chunks:
                return [token async for chunk in chunks for token in chunk.ids]

        asking = asyncio.create_task(ask())
        await until(asking.done)
        assert await asking == IDS
        assert pool.status()[0].failures == 0


async def test_the_only_engine_keeps_a_reply_that_is_far_slower_than_usual() -> None:
    a = engine_of("a", Dripping)
    async with EnginePool(probing=SOON, silence=msgspec.structs.replace(LIMITS, slow=20.0)) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.seconds = 12.0
        call = Call(pool, "s")
        await answered(call)
        assert call.overdue.seconds() > 30
        assert [one.session_key for one in a.requests].count("s") == 1


async def test_a_session_that_starves_itself_is_not_overdue() -> None:
    a = engine_of("a", OneSlot)
    await a.start()
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        a.seconds = 2.5
        await known_slowly(pool)
        overdue = Overdue()
        calls = [Call(pool, "s", overdue) for _ in range(30)]
        await pass_time(40)
        calls[-1].task.cancel()
        await answered(*calls[:-1])
        assert overdue.seconds() == 0
        for check_engine in overdue.pending_checks:
            await check_engine()


async def test_a_session_behind_calls_of_others_is_overdue() -> None:
    a = engine_of("a", OneSlot)
    await a.start()
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.seconds = 2.5
        calls = [Call(pool, f"s{number}") for number in range(10)]
        await answered(*calls)
        assert calls[-1].overdue.seconds() > 15


async def test_time_after_a_call_was_given_up_is_no_silence() -> None:
    a = engine_of("a", Dripping)
    a.seconds = 1.5
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        for number in range(KNOWN_CALLS):
            usual = Call(pool, f"s{number}")
            await until(usual.task.done)
        call = Call(pool, "s")
        await pass_time(1.2)
        call.task.cancel()
        await asyncio.wait([call.task])
        await pass_time(120)  # the agent works, and the engine gets no request
        [check_engine] = call.overdue.pending_checks
        settled = asyncio.ensure_future(check_engine())
        await until(settled.done)
        await settled


async def test_an_engine_that_hung_for_a_while_is_known_for_it_later() -> None:
    a = engine_of("a", Dripping)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        call = Call(pool, "s")
        await pass_time(1.5)
        call.task.cancel()
        await asyncio.wait([call.task])
        await pass_time(8)
        a.revive()
        await pass_time(60)
        [check_engine] = call.overdue.pending_checks
        with pytest.raises(EngineSilent, match="given up"):
            await check_engine()


@pytest.mark.parametrize("mode", ["abort", "finish"])
async def test_a_pause_does_not_wait_for_the_probe_of_a_silent_engine(mode: str) -> None:
    a = engine_of("a", Deaf)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        call = Call(pool, "s")
        await until(lambda: not pool.status()[0].ok)
        call.task.cancel()
        await asyncio.wait([call.task])
        await pass_time(1.0)
        pausing = asyncio.create_task(pool.policy.pause("abort" if mode == "abort" else "finish"))
        await until(pausing.done, 10)
        await pool.policy.resume()
        await pass_time(5)
        assert not pool.status()[0].ok  # the engine has given no token yet
        a.revive()
        await until(lambda: pool.status()[0].ok)


async def test_a_pause_does_not_wait_for_ever_for_a_call_on_an_engine_that_hangs() -> None:
    a = engine_of("a", stall=2)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        call = Call(pool, "s")
        await a.stalled.wait()
        a.hang()
        pausing = asyncio.create_task(pool.policy.pause("finish"))
        await until(pausing.done, LIMITS.slow + 30)
        await pool.policy.resume()
        a.release()
        a.revive()
        await until(call.task.done)
        assert (await call.task)[:2] == IDS[:2]


@pytest.mark.parametrize("leave", ["close", "remove"])
async def test_nothing_waits_for_the_answer_of_an_engine_that_is_removed(leave: str) -> None:
    a = engine_of("a")
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        call = Call(pool, "s")
        await pass_time(1.5)
        call.task.cancel()
        await asyncio.wait([call.task])
        await pass_time(1.0)
        began = asyncio.get_running_loop().time()
        if leave == "remove":
            await pool.remove("a")
            [check_engine] = call.overdue.pending_checks
            with pytest.raises(EngineUnavailable):
                await check_engine()
    assert asyncio.get_running_loop().time() - began < 5


async def test_a_lost_call_is_made_again_though_nobody_else_asks() -> None:
    a = engine_of("a", Losing)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        call = Call(pool, "lost")
        await answered(call, seconds=60)
        assert (a.lost, pool.status()[0].failures) == (1, 0)


async def test_a_follower_that_doubts_a_frozen_engine_does_not_keep_others_from_looking() -> None:
    a, b = engine_of("a"), engine_of("b")
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        pool.health.look("a")
        await pool.add_engine(b)
        call = Call(pool, "s")
        await until(lambda: not pool.status()[0].ok, 60 + LIMITS.least + LIMITS.check + 10)
        await answered(call)
        a.revive()
        await until(lambda: pool.status()[0].ok)
