"""An engine that falls silent is detected, its requests move on, and no session's clock runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.silence import too_long
from outrider.engines.pool.waits import KNOWN_CALLS, LIMITS, Overdue, SessionWait
from outrider.errors import EngineSilent, EngineUnavailable
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from support.clock import pass_time

IDS = [1, 2, 3, 4]
SOON = RetryPolicy(first=0.05, longest=0.1)


class Losing(ScriptedEngine):
    """Loses the first call of the session "lost", like a connection whose other end is gone; serves all others."""

    lost = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.session_key == "lost" and not self.lost:
            self.lost += 1
            await asyncio.Event().wait()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class Dripping(ScriptedEngine):
    """Waits `seconds` before each chunk."""

    seconds = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(self.seconds)
                yield chunk


class Generous(ScriptedEngine):
    """Sends its whole reply, each chunk's tokens twice, however few tokens are requested."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        asked = msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=9))
        async with aclosing(super().generate(asked)) as chunks:
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, ids=chunk.ids * 2, logprobs=chunk.logprobs * 2)


def engine_of(name: str, kind: type[ScriptedEngine] = ScriptedEngine, **reply: Any) -> Any:
    return kind(EngineOptions(name=name, options={"replies": [{"ids": IDS} | reply]}))


def request(session: str) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        session_key=session,
        input_ids=np.zeros(4, dtype=np.int32),
        sampling=SamplingParams(max_tokens=9),
    )


class Call:
    """One generation, its result, and the state of its session's clocks."""

    def __init__(self, pool: EnginePool, session: str, overdue: Overdue | None = None) -> None:
        self.overdue = overdue or Overdue()
        self.chunks: list[Chunk] = []
        self.generation = pool.calls.generate(request(session), self.overdue)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> list[int]:
        async with aclosing(self.generation) as chunks:
            async for chunk in chunks:
                self.chunks.append(chunk)
        return [token for chunk in self.chunks for token in chunk.ids]


async def until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Advance the loop's time until the condition holds."""
    while not condition():
        assert seconds > 0
        seconds -= 0.5
        await pass_time(0.5)


async def known(pool: EnginePool, sessions: str = "warm") -> None:
    for number in range(KNOWN_CALLS):
        await Call(pool, f"{sessions}{number}").task
        pool.placement.release(f"{sessions}{number}")


async def known_slowly(pool: EnginePool) -> None:
    """Like `known`, for an engine whose calls take some of the loop's time."""
    for number in range(KNOWN_CALLS):
        call = Call(pool, f"s{number}")
        await until(call.task.done)


async def test_before_the_first_token_the_call_goes_elsewhere() -> None:
    a, b = engine_of("a"), engine_of("b")
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        await pool.add_engine(b)
        a.hang()
        call = Call(pool, "s")
        await until(call.task.done)
        assert (await call.task, call.generation.served.engine) == (IDS, "b")
        status = {engine.name: engine for engine in pool.status()}
        assert (status["a"].ok, status["a"].failures, status["b"].failures) == (False, 1, 0)
        assert "silent" in status["a"].detail
        a.revive()
        await until(lambda: all(engine.ok for engine in pool.status()))


async def test_an_engine_that_gives_more_than_it_was_asked_for_is_not_silent() -> None:
    a = engine_of("a", Generous)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        a.hang()
        call = Call(pool, "s")
        await until(lambda: not pool.status()[0].ok)
        a.revive()
        await until(lambda: pool.status()[0].ok)
        call.task.cancel()


async def test_in_the_middle_of_a_reply_it_goes_on_elsewhere_with_the_ids_that_were_given() -> None:
    a, b = engine_of("a", stall=2), engine_of("b")
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(b)
        await known(pool)
        await pool.add_engine(a)
        pool.drain("b")
        call = Call(pool, "s")
        await a.stalled.wait()
        a.hang()
        await pool.add_engine(engine_of("c"))
        pool.drain("a")
        await until(call.task.done)
        assert await call.task == IDS[:2] + IDS
        assert call.generation.served.engine == "c"
        [last] = [chunk for chunk in call.chunks if chunk.finish is not None]
        assert [(span.start, span.end) for span in last.versions][-1][1] == 6


async def test_the_only_engine_is_waited_for_and_the_wait_is_overdue() -> None:
    a = engine_of("a")
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        began = asyncio.get_running_loop().time()
        call = Call(pool, "s")
        await until(lambda: not pool.status()[0].ok)
        await pass_time(10)
        a.revive()
        await until(call.task.done)
        assert await call.task == IDS
        waited = asyncio.get_running_loop().time() - began
        charged = waited - call.overdue.seconds()
        assert charged <= LIMITS.least + 1.5, f"{charged} of {waited} s"


async def test_a_call_that_fails_for_it_names_its_silence() -> None:
    a = engine_of("a")
    async with EnginePool(probing=SOON, patience=5.0) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.hang()
        call = Call(pool, "s")
        await until(call.task.done)
        with pytest.raises(EngineUnavailable, match="silent for"):
            await call.task


async def test_an_engine_that_hangs_from_the_start_is_found_out_later() -> None:
    a = engine_of("a", stall=0)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        a.hang()
        call = Call(pool, "s")
        await pass_time(LIMITS.unknown - 5)
        assert pool.status()[0].ok
        await until(lambda: not pool.status()[0].ok)
        call.task.cancel()
        await asyncio.wait([call.task])


async def test_a_lost_call_is_made_again_and_its_engine_keeps_serving() -> None:
    a = engine_of("a", Losing)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        call = Call(pool, "lost")
        while not call.task.done():
            await pass_time(0.5)
            assert await Call(pool, "other").task == IDS
        assert await call.task == IDS
        assert (a.lost, pool.status()[0].ok, pool.status()[0].failures) == (1, True, 0)
        assert call.overdue.seconds() > LIMITS.lost - 1


async def test_a_reply_that_drips_is_overdue_and_ends_elsewhere() -> None:
    a = engine_of("a", Dripping)
    async with EnginePool(probing=SOON, silence=msgspec.structs.replace(LIMITS, slow=20.0)) as pool:
        await pool.add_engine(a)
        await known(pool)
        a.seconds = 10.0
        call = Call(pool, "s")
        await pass_time(18)
        assert 12 < call.overdue.seconds() < 18
        assert pool.status()[0].ok
        await pool.add_engine(engine_of("b"))
        await until(call.task.done)
        ids = await call.task
        assert ids[-len(IDS) :] == IDS
        assert 1 <= len(ids) - len(IDS) < len(IDS)
        assert call.generation.served.engine == "b"


async def test_what_is_slow_as_usual_is_neither_overdue_nor_doubted() -> None:
    a = engine_of("a", Dripping)
    a.seconds = 1.0
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        for _ in range(2):
            for number in range(KNOWN_CALLS):
                call = Call(pool, f"s{number}")
                await until(call.task.done)
                assert call.overdue.seconds() == 0
        asked = len(a.requests)
        a.seconds = 4.0
        call = Call(pool, "s")
        await until(call.task.done)
        assert (call.overdue.seconds(), len(a.requests) - asked) == (0, 1)


async def test_a_pause_and_a_loop_that_stands_still_are_no_silence() -> None:
    a = engine_of("a", stall=2)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(engine_of("warm"))
        await known(pool)
        await pool.add_engine(a)
        pool.drain("warm")
        call = Call(pool, "s")
        await a.stalled.wait()
        await pass_time(60, step=60)
        asked = len(a.requests)
        pausing = asyncio.create_task(pool.policy.pause("finish"))
        await pass_time(60)
        assert len(a.requests) == asked
        assert pool.status()[1].ok
        a.release()
        await pausing
        await pool.policy.resume()
        await until(call.task.done)
        assert await call.task == IDS


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_call_that_was_given_up_is_doubted_until_its_engine_answers(hangs: bool) -> None:
    a = engine_of("a", Dripping)
    a.seconds = 1.0
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known_slowly(pool)
        if hangs:
            a.hang()
        else:
            a.seconds = 2.5
        call = Call(pool, "s")
        await pass_time(2.0)  # less than eight times its usual time
        call.task.cancel()
        await asyncio.wait([call.task])
        [check_engine] = call.overdue.pending_checks
        settled = asyncio.ensure_future(check_engine())
        await until(settled.done)
        if hangs:
            with pytest.raises(EngineUnavailable, match="one token"):
                await settled
        else:
            await settled


@pytest.mark.parametrize(
    ("silent", "usual", "before", "fault"),
    [
        (1.5, 0.05, 0.0, True),  # 30 times as long as usual
        (1.5, 0.5, 0.0, False),
        (6.0, 0.5, 0.0, True),  # twelve times as long as usual
        (3.0, 0.5, 0.0, False),
        (20.0, None, 0.0, True),  # the usual time is not known yet
        (2.0, None, 0.0, False),
        (2.0, None, 4.0, True),
        (2.0, 0.4, 4.0, True),  # the third call in a row that waits five times as long as usual
        (2.0, 0.4, 0.0, False),
        (0.7, 0.4, 60.0, False),  # an agent that gives up before twice the usual time is not excused
    ],
)
def test_who_is_to_blame_for_a_call_that_was_given_up(
    silent: float, usual: float | None, before: float, fault: bool
) -> None:
    assert too_long(silent, usual, before) is fault


@pytest.mark.parametrize("stops", [False, True])
async def test_a_reply_that_drips_is_given_up_between_two_chunks(stops: bool) -> None:
    """The last wait of such a call is short. If a call is given up right after a chunk, the chunk's content is the
    reason."""
    a = engine_of("a", Dripping)
    a.seconds = 0.05
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known_slowly(pool)
        a.seconds = 3.0
        call = Call(pool, "s")
        await pass_time(3.05 if stops else 3.9)
        assert len(call.chunks) == 1
        call.task.cancel()
        await asyncio.wait([call.task])
        if stops:
            assert call.overdue.pending_checks == []
            return
        [check_engine] = call.overdue.pending_checks
        with pytest.raises(EngineSilent, match="given up"):
            await check_engine()


@pytest.mark.parametrize("given", [False, True])
async def test_calls_given_up_in_a_row_are_one_wait_until_something_is_given(given: bool) -> None:
    """Each call is given up before the engine could be blamed for it, and none gets a reply."""
    a = engine_of("a", Dripping)
    a.seconds = 0.5
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known_slowly(pool)
        calls = [Call(pool, "s")]
        overdue = calls[0].overdue
        for number in range(3):
            a.seconds = 30.0
            call = Call(pool, "s", overdue=overdue) if number else calls[0]
            await pass_time(2.0)
            a.seconds = 0.5
            call.task.cancel()
            await asyncio.wait([call.task])
            if given:
                answered = Call(pool, "s", overdue=overdue)
                await until(answered.task.done)
        at_fault = 0
        for check_engine in overdue.pending_checks:
            settled = asyncio.ensure_future(check_engine())
            await until(settled.done)
            at_fault += settled.exception() is not None
        assert (at_fault > 0) is not given


async def test_a_call_given_up_when_it_was_overdue_is_the_engines_fault() -> None:
    a = engine_of("a", Losing)
    async with EnginePool(probing=SOON) as pool:
        await pool.add_engine(a)
        await known(pool)
        call = Call(pool, "lost")
        await pass_time(LIMITS.least + 3)
        call.task.cancel()
        await asyncio.wait([call.task])
        [check_engine] = call.overdue.pending_checks
        with pytest.raises(EngineSilent, match="given up"):
            await check_engine()


def test_a_session_is_not_overdue_behind_its_own_earlier_requests() -> None:
    now = 0.0
    overdue = Overdue(lambda: now)
    waits = [SessionWait("a", 4.0, queued=True) for _ in range(3)]
    for wait in waits:
        wait.begin(now)
        overdue.add(wait)
    for number, wait in enumerate(waits):
        now = 3.0 + 3.0 * number
        wait.end(now)
        wait.last = now
        overdue.remove(wait)
    assert overdue.seconds() == 0
    lost, later = SessionWait("a", 4.0, queued=True), SessionWait("a", 4.0, queued=True)
    for wait in (lost, later):
        wait.begin(now)
        overdue.add(wait)
    now += 3.0
    later.last = now  # a later call received something: the other one waits in vain
    now += 3.0
    assert overdue.seconds() == 2.0


def test_waits_that_are_overdue_at_the_same_time_count_once() -> None:
    now = 0.0
    overdue = Overdue(lambda: now)
    long, short = SessionWait("a", 1.0), SessionWait("b", 4.0)
    for wait in (long, short):
        wait.begin(0.0)
        overdue.add(wait)
    now = 6.0
    assert overdue.seconds() == 5.0
    overdue.remove(short)
    now = 10.0
    overdue.remove(long)
    now = 20.0
    assert (overdue.seconds(), overdue.what) == (9.0, "a")
    overdue.begin_run()
    assert (overdue.in_run(), overdue.what) == (0.0, "")


async def test_the_patience_with_failures_begins_anew_once_an_engine_has_gone_on_with_the_reply() -> None:
    """The first failure was long ago, so it does not shorten the time allowed for the next one."""
    async with EnginePool(probing=SOON, patience=5.0) as pool:
        await pool.add_engine(engine_of("a", stall=1))
        call = Call(pool, "s")
        await until(lambda: call.chunks)
        slow = engine_of("b", Dripping, stall=3)
        slow.seconds = 3.0
        await pool.add_engine(slow)
        await until(lambda: sum(len(chunk.ids) for chunk in call.chunks) == 3)
        await pool.remove("a")
        await pool.add_engine(engine_of("d"))
        await Call(pool, "other").task  # a session on d, so that c comes first
        await pool.add_engine(engine_of("c", fail="unavailable"))
        await until(call.task.done)
        assert call.task.result() == IDS[:1] + IDS[:3] + IDS  # each engine begins its script anew
        assert {name: member.failures for name, member in pool.calls.members.items()} == {"b": 0, "c": 1, "d": 0}
