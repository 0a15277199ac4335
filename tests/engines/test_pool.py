"""The engine pool: placement of sessions, draining and removal of engines, failover, overflows, and failed calls."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.upstream import Answer, upstream
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import (
    ChatEngine,
    ChatRequest,
    Chunk,
    Engine,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    SamplingParams,
)
from outrider.engines.pool.call import FAILOVERS
from outrider.engines.pool.checks import overflow_fault
from outrider.engines.pool.placement import TOKENS_PER_REQUEST
from outrider.engines.pool.pool import EnginePool
from outrider.errors import (
    Conflict,
    ContextOverflow,
    EngineError,
    EngineMisbehaved,
    EngineSilent,
    EngineUnavailable,
    InvalidField,
    ModelMismatch,
    NotFound,
    OutriderError,
)
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.messages import Image, Message, Role
from outrider.schemas import EngineStatus
from outrider.spec import EngineSpec
from outrider.trajectory import LogprobKind, TokenMode

AT_ONCE = RetryPolicy(first=0.0, longest=0.0)
NEVER = RetryPolicy(first=1e9, longest=1e9)
IDS = [1, 2, 3, 4]


def engine_of(name: str, **reply: Any) -> ScriptedEngine:
    return ScriptedEngine(EngineOptions(name=name, options={"replies": [{"ids": IDS} | reply]}))


def request(session: str, prompt_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        session_key=session,
        input_ids=np.zeros(prompt_tokens, dtype=np.int32),
        sampling=SamplingParams(max_tokens=10),
    )


def chat_request(session: str) -> ChatRequest:
    message = Message(role=Role.USER, content="hi")
    sampling = SamplingParams(max_tokens=10)
    return ChatRequest(request_id="r", session_key=session, messages=(message,), tools=(), sampling=sampling)


def pool_of(*, patience: float = 5.0, probing: RetryPolicy = NEVER, **options: Any) -> EnginePool:
    return EnginePool(patience=patience, probing=probing, **options)


async def turn(pool: EnginePool, session: str, prompt_tokens: int = 4) -> str:
    """Run one whole generation. Returns the name of the engine that served it."""
    generation = pool.calls.generate(request(session, prompt_tokens))
    async with aclosing(generation) as chunks:
        ids = [token for chunk in [chunk async for chunk in chunks] for token in chunk.ids]
    assert ids == IDS
    return generation.served.engine


async def chunks_of(pool: EnginePool, session: str) -> list[Chunk]:
    return [chunk async for chunk in pool.calls.generate(request(session))]


def named(pool: EnginePool, name: str) -> EngineStatus:
    return next(status for status in pool.status() if status.name == name)


async def test_new_sessions_go_to_the_least_loaded_engine() -> None:
    async with pool_of() as pool:
        for name in "abc":
            await pool.add_engine(engine_of(name))
        served = Counter([await turn(pool, f"s{n}") for n in range(30)])
        assert served == {"a": 10, "b": 10, "c": 10}
        assert [status.sessions for status in pool.status()] == [10, 10, 10]
        assert [status.assigned_tokens for status in pool.status()] == [80, 80, 80]
        assert [status.generated_tokens for status in pool.status()] == [40, 40, 40]


async def test_assigned_tokens_weigh() -> None:
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a"))
        await pool.add_engine(engine_of("b"))
        assert await turn(pool, "long", prompt_tokens=20_000) == "a"
        assert [await turn(pool, f"short{n}") for n in range(5)] == ["b"] * 5
        pool.placement.release("long")
        pool.placement.release("long")
        assert await turn(pool, "next") == "a"


async def test_requests_in_flight_weigh() -> None:
    busy = engine_of("busy", stall=1)
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        await pool.add_engine(busy)
        await pool.add_engine(engine_of("free"))
        waiting = group.create_task(chunks_of(pool, "s"))
        await busy.stalled.wait()
        assert named(pool, "busy").in_flight == 1
        assert [await turn(pool, f"s{n}") for n in range(4)] == ["free"] * 4
        busy.release()
        await waiting
        assert named(pool, "busy").in_flight == 0


async def test_a_session_keeps_its_engine_until_it_is_released() -> None:
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a"))
        first = await turn(pool, "s", prompt_tokens=20_000)
        await pool.add_engine(engine_of("b"))
        assert [await turn(pool, "s", prompt_tokens=20_000) for _ in range(5)] == [first] * 5
        pool.placement.release("s")
        assert [(status.sessions, status.assigned_tokens) for status in pool.status()] == [(0, 0), (0, 0)]


async def test_a_session_leaves_an_engine_that_is_overloaded_and_does_not_come_back() -> None:
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a"))
        sessions = [f"s{number}" for number in range(200)]
        for session in sessions:
            await pool.calls.select(session)
            await turn(pool, session, prompt_tokens=8000)
        await pool.add_engine(engine_of("b"))
        where = dict.fromkeys(sessions, "a")
        moves = 0
        for _ in range(5):
            for session in sessions:
                await pool.calls.select(session)
                engine = await turn(pool, session, prompt_tokens=8000)
                moves += engine != where[session]
                where[session] = engine
        counts = Counter(where.values())
        assert moves == counts["b"], "none moved twice"
        assert 32 <= (counts["a"] - counts["b"]) * 8000 / TOKENS_PER_REQUEST <= 36


async def test_sessions_get_a_near_engine_first_but_not_an_overloaded_one() -> None:
    async with pool_of(near=("rack1-*", "missing")) as pool:
        for name in ("far", "rack1-a", "rack1-b"):
            await pool.add_engine(engine_of(name))
        served = Counter([await turn(pool, f"s{n}") for n in range(20)])
        assert served == {"rack1-a": 10, "rack1-b": 10}
        long = [await turn(pool, f"long{n}", prompt_tokens=8000) for n in range(200)]
        loads = {status.name: status.assigned_tokens / TOKENS_PER_REQUEST for status in pool.status()}
        assert set(long[:100]) == {"rack1-a", "rack1-b"}
        assert "far" in long[100:]
        assert 30 <= loads["rack1-a"] - loads["far"] <= 34
        assert abs(loads["rack1-a"] - loads["rack1-b"]) < 1
        where = dict(zip([f"long{n}" for n in range(200)], long, strict=True))
        for session, engine in where.items():  # no session moves back and forth
            assert (await pool.calls.select(session)).engine == engine


async def test_without_its_near_engine_a_session_gets_another() -> None:
    async with pool_of(near=("near",)) as pool:
        await pool.add_engine(engine_of("far"))
        assert await turn(pool, "early") == "far"
        await pool.add_engine(engine_of("near"))
        assert await turn(pool, "early") == "far"
        assert await turn(pool, "s") == "near"
        pool.drain("near")
        assert await turn(pool, "next") == "far"
        assert (await pool.calls.engine_for("failed", (True,), None, avoid="near")).name == "far"


async def test_a_few_more_requests_in_flight_move_no_session() -> None:
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        busy = engine_of("busy", stall=1)
        await pool.add_engine(busy)
        for number in range(20):
            group.create_task(chunks_of(pool, f"s{number}"))
        await busy.stalled.wait()
        await pool.calls.select("s")
        await pool.add_engine(engine_of("free"))
        assert (await pool.calls.select("s")).engine == "busy"
        busy.release()


async def test_draining_takes_no_new_session_and_keeps_the_old() -> None:
    draining = engine_of("a", stall=1)
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        await pool.add_engine(draining)
        old = group.create_task(chunks_of(pool, "old"))
        await draining.stalled.wait()
        await pool.add_engine(engine_of("b"))
        assert pool.drain("a").draining
        assert [await turn(pool, f"new{n}") for n in range(3)] == ["b"] * 3
        draining.release()
        assert (await old)[-1].finish is not None
        assert await turn(pool, "old") == "a"


async def test_removing_waits_for_generations_and_moves_their_sessions() -> None:
    leaving = engine_of("a", stall=1)
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        await pool.add_engine(leaving)
        old = group.create_task(chunks_of(pool, "s"))
        await leaving.stalled.wait()
        await pool.add_engine(engine_of("b"))
        removal = group.create_task(pool.remove("a"))
        assert await turn(pool, "other") == "b"
        assert not removal.done()
        leaving.release()
        await removal
        assert (await old)[-1].finish is not None
        assert await turn(pool, "s") == "b"
        assert [status.name for status in pool.status()] == ["b"]
        await pool.add_engine(engine_of("a"))
        pool.placement.release("s")
        assert {await turn(pool, f"again{n}") for n in range(4)} == {"a", "b"}


async def test_removing_cuts_what_does_not_end_in_time() -> None:
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        spec = EngineSpec(kind="scripted", name="a", options={"replies": [{"ids": IDS, "stall": 1}]})
        await pool.add(spec)
        generation = pool.calls.generate(request("s"))
        assert (await anext(generation)).ids == [1]
        rest = group.create_task(anext_failure(generation))
        await pool.remove("a", seconds=0)
        assert isinstance(await rest, EngineUnavailable)
        assert pool.status() == []


async def anext_failure(generation: Any) -> BaseException | None:
    try:
        await anext(generation)
    except EngineUnavailable as error:
        return error
    return None


async def test_an_engine_that_dies_before_the_first_token_is_replaced() -> None:
    dead = engine_of("a", fail="unavailable", after=0)
    spare = engine_of("b")
    async with pool_of() as pool:
        await pool.add_engine(dead)
        await pool.add_engine(spare)
        asked = request("s")
        generation = pool.calls.generate(asked)
        assert [token for chunk in [chunk async for chunk in generation] for token in chunk.ids] == IDS
        assert generation.served.engine == "b"
        assert list(spare.requests) == [asked]
        assert not named(pool, "a").ok
        assert named(pool, "a").failures == 1
        assert named(pool, "a").sessions == 0
        assert await turn(pool, "s") == "b"


async def test_an_engine_that_dies_after_a_token_is_not() -> None:
    spare = engine_of("b")
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a", fail="unavailable", after=2))
        await pool.add_engine(spare)
        with pytest.raises(EngineUnavailable):
            await chunks_of(pool, "s")
        assert not spare.requests
        assert not named(pool, "a").ok
        assert named(pool, "a").generated_tokens == 2
        assert await turn(pool, "s") == "b"


async def test_an_overflow_is_nobodys_failure() -> None:
    async with pool_of(context_tokens=64) as pool:
        await pool.add_engine(engine_of("a", fail="overflow"))
        await pool.add_engine(engine_of("b"))
        with pytest.raises(ContextOverflow):
            await chunks_of(pool, "s")
        assert all(status.ok and status.failures == 0 for status in pool.status())


async def test_an_overflow_that_cannot_be_is_the_engines_fault() -> None:
    """A session whose prompt is too long is graded. So a report of an overflow that contradicts the sizes counts as the
    engine's failure."""
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a", fail="overflow"))
        with pytest.raises(EngineMisbehaved, match=r"a prompt of at most 4 tokens does not fit a context of"):
            await chunks_of(pool, "s")
        assert named(pool, "a").misbehaved == 1
        await pool.add_engine(engine_of("b"))
        assert await turn(pool, "t") == "b"


@pytest.mark.parametrize(
    ("prompt", "context", "believed"),
    [(20, None, False), (2047, None, True), (20, 4096, False), (4031, 4096, False), (4032, 4096, True), (9, 40, True)],
)
def test_which_overflows_are_believed(prompt: int, context: int | None, believed: bool) -> None:
    fault = overflow_fault("e", request("s", prompt), context, ContextOverflow("too long"))
    assert (fault is None) == believed


@pytest.mark.parametrize(
    ("message", "believed"),
    [
        (Message(role=Role.USER, content="x" * 100), False),
        (Message(role=Role.USER, content="x" * 5000), True),
        (Message(role=Role.USER, content="\u4e00" * 1500), True),
        (Message(role=Role.USER, parts=(Image(media_type="image/png", digest="0"),)), True),
    ],
)
def test_of_messages_the_bytes_bound_the_tokens(message: Message, believed: bool) -> None:
    asked = msgspec.structs.replace(chat_request("s"), messages=(message,))
    fault = overflow_fault("e", asked, 4096, ContextOverflow("too long"))
    assert (fault is None) == believed


async def test_without_an_engine_a_request_waits_for_one() -> None:
    async with pool_of() as pool, asyncio.TaskGroup() as group:
        waiting = [group.create_task(turn(pool, f"s{n}")) for n in range(3)]
        choice = group.create_task(pool.calls.select("t"))
        await asyncio.sleep(0)
        await pool.add_engine(engine_of("late"))
        assert [await task for task in waiting] == ["late"] * 3
        assert (await choice).engine == "late"


async def test_the_wait_is_bounded_and_says_why() -> None:
    dead = engine_of("a")
    async with pool_of(patience=0.01) as pool:
        with pytest.raises(EngineUnavailable, match="no engine"):
            await turn(pool, "s")
        await pool.add_engine(dead)
        dead.kill()
        with pytest.raises(EngineUnavailable, match="is down"):
            await turn(pool, "s")


async def test_an_engine_that_restarts_fails_no_session() -> None:
    replies = [{"fail": "unavailable"}, {"fail": "unavailable"}, {"ids": IDS}]
    engine = ScriptedEngine(EngineOptions(name="a", options={"replies": replies}))
    async with pool_of(probing=AT_ONCE) as pool:
        await pool.add_engine(engine)
        assert await turn(pool, "s") == "a"
        assert len(engine.requests) == 3
        assert named(pool, "a").failures == 2
        assert named(pool, "a").ok
        assert named(pool, "a").detail == ""


async def test_a_request_that_no_engine_survives_is_given_up() -> None:
    """Otherwise the request would make healthy engines unavailable to other requests again and again."""
    engines = [engine_of(name, fail="unavailable") for name in "ab"]
    async with pool_of(probing=AT_ONCE, patience=1e9) as pool:
        for engine in engines:
            await pool.add_engine(engine)
        with pytest.raises(EngineUnavailable, match="by its script"):
            await turn(pool, "s")
        assert sum(len(engine.requests) for engine in engines) == FAILOVERS + 1


class Careless(ScriptedEngine):
    """A third party's engine with bugs. Its health check fails `unwell` times."""

    unwell = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(ids=[1], logprobs=[-1.0])
        if request.session_key == "mistaken":
            raise KeyError("oops")
        raise EngineUnavailable("gone")

    async def health(self) -> EngineHealth:
        if self.unwell:
            self.unwell -= 1
            raise TypeError("not to be asked")
        return await super().health()


async def test_a_mistake_in_an_engine_is_the_engines_failure() -> None:
    engine = Careless(EngineOptions(name="a", options={"replies": [{"ids": IDS}]}))
    async with pool_of(probing=AT_ONCE) as pool:
        await pool.add_engine(engine)
        with pytest.raises(EngineError, match="'a' raised KeyError: 'oops'"):
            await turn(pool, "mistaken")
        engine.unwell = 2
        with pytest.raises(EngineUnavailable, match="gone"):
            await turn(pool, "s")
        assert (await pool.calls.select("t")).engine == "a"
        assert engine.unwell == 0


class Failing(ScriptedEngine):
    """Raises `error`, after one chunk if `begins` is True."""

    error: type[Exception]
    begins = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self.begins:
            yield Chunk(ids=[1], logprobs=[-1.0])
        raise self.error("no")


class Sleeping(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(60)
        yield Chunk(ids=[1], logprobs=[-1.0])


class Body:
    """A large object of the caller, such as the body of a request."""


async def call_with_a_body(pool: EnginePool, bodies: list[weakref.ref[Body]], **sampling: Any) -> None:
    body = Body()
    bodies.append(weakref.ref(body))
    asked = msgspec.structs.replace(request("s"), sampling=SamplingParams(max_tokens=10, **sampling))
    async with aclosing(pool.calls.generate(asked)) as chunks:
        async for _ in chunks:
            pass


async def test_a_call_that_is_cut_off_leaves_no_cycle() -> None:
    bodies: list[weakref.ref[Body]] = []

    async def cut() -> None:
        await pool.calls.flights.some.wait()
        await asyncio.sleep(0.05)  # the call waits for the engine
        [flight] = pool.calls.flights.all
        flight.cut(EngineSilent("silent"))

    async with pool_of(patience=0.0) as pool:
        await pool.add_engine(Sleeping(EngineOptions(name="a")))
        gc.disable()
        try:
            cutting = asyncio.create_task(cut())
            with suppress(EngineSilent):
                await call_with_a_body(pool, bodies, presence_penalty=0.5)  # no reply can be continued with it
                raise AssertionError("the call has not failed")
            await cutting
            assert bodies[0]() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("error", [EngineUnavailable, EngineMisbehaved, ContextOverflow, KeyError])
async def test_a_call_that_fails_leaves_no_cycle(error: type[Exception], begins: bool) -> None:
    """A cycle through the error would keep the caller's objects, such as a request's body, until a garbage
    collection."""
    engine = Failing(EngineOptions(name="a", options={"replies": [{"ids": IDS}]}))
    engine.error, engine.begins = error, begins
    bodies: list[weakref.ref[Body]] = []
    async with pool_of(patience=0.0) as pool:
        await pool.add_engine(engine)
        gc.disable()
        try:
            with suppress(OutriderError):
                await call_with_a_body(pool, bodies)
            assert bodies[0]() is None
        finally:
            gc.enable()


async def test_an_engine_that_comes_back_as_another_is_not_taken() -> None:
    engine = engine_of("a")
    refusing = asyncio.Event()
    checked = asyncio.Event()

    async def check(_: Engine | ChatEngine) -> None:
        if refusing.is_set():
            checked.set()
            raise ModelMismatch("another family")

    async with pool_of(probing=AT_ONCE, patience=0.05, check=check) as pool:
        await pool.add_engine(engine)
        refusing.set()
        engine.kill()
        with pytest.raises(EngineUnavailable):
            await turn(pool, "s")
        engine.revive()
        await checked.wait()
        assert not named(pool, "a").ok
        refusing.clear()
        assert await turn(pool, "s") == "a"


async def test_closing_a_generation_aborts_it_and_frees_its_place() -> None:
    engine = engine_of("a", stall=1)
    async with pool_of() as pool:
        await pool.add_engine(engine)
        generation = pool.calls.generate(request("s"))
        await anext(generation)
        assert named(pool, "a").in_flight == 1
        await generation.aclose()
        assert engine.abort_seen.is_set()
        assert named(pool, "a").in_flight == 0
        assert named(pool, "a").ok


async def test_what_served_is_known_with_the_first_chunk() -> None:
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a"))
        generation = pool.calls.generate(request("s"))
        with pytest.raises(EngineUnavailable):
            _ = generation.served
        await anext(generation)
        served = generation.served
        await generation.aclose()
        assert (served.engine, served.mode, served.logprob_kind) == ("a", TokenMode.TOKENS, LogprobKind.SAMPLING)


async def test_token_engines_are_preferred_and_chat_engines_serve_chat() -> None:
    delta = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
    events = [{"choices": [delta]}, {"choices": [], "usage": {"completion_tokens": 7}}]
    pages = {"/v1/models": {"data": [{"id": "m"}]}}
    async with upstream(Answer(events=events), pages=pages) as (url, _), pool_of(patience=0.01) as pool:
        await pool.add(EngineSpec(kind="openai", name="chat", url=url))
        assert (await pool.calls.select("s")).mode is TokenMode.CAPTURE
        with pytest.raises(EngineUnavailable):
            await turn(pool, "s")
        generation = pool.calls.chat(chat_request("s"))
        chunks = [chunk async for chunk in generation]
        assert chunks[-1].reply is not None
        assert chunks[-1].reply.content == "yes"
        assert (generation.served.mode, generation.served.logprob_kind) == (TokenMode.TEXT, LogprobKind.NONE)
        assert named(pool, "chat").generated_tokens == 7
        await pool.add_engine(engine_of("tokens"))
        assert (await pool.calls.select("s")).engine == "chat"
        assert (await pool.calls.select("t")).engine == "tokens"


async def test_specs_become_engines() -> None:
    async with pool_of() as pool:
        spec = EngineSpec(kind="scripted", options={"replies": [{"ids": IDS}], "version": 3}, model="m")
        first = await pool.add(spec)
        second = await pool.add(spec)
        assert (first.name, second.name) == ("scripted-0", "scripted-1")
        assert (first.kind, first.model, first.version, first.context_tokens) == ("scripted", "m", 3, 32768)
        assert first.ok
        assert await turn(pool, "s") == "scripted-0"


async def test_bad_engines_are_refused_and_leave_nothing() -> None:
    async def mismatch(_: Engine | ChatEngine) -> None:
        raise ModelMismatch("another family")

    async with upstream(Answer()) as (gone, _):
        pass
    async with pool_of(check=mismatch) as pool:
        for spec, expected in (
            (EngineSpec(kind="scripted", name="a"), ModelMismatch),
            (EngineSpec(kind="vllm", name="a", url=gone), EngineUnavailable),
            (EngineSpec(kind="vllm", name="a"), InvalidField),
            (EngineSpec(kind="nothing", name="a"), InvalidField),
            (EngineSpec(kind="scripted", name="a", options={"x": 1}), InvalidField),
        ):
            with pytest.raises(expected):
                await pool.add(spec)
        assert pool.status() == []


async def test_names_are_unique_and_known() -> None:
    async with pool_of() as pool:
        await pool.add_engine(engine_of("a"))
        with pytest.raises(Conflict):
            await pool.add_engine(engine_of("a"))
        with pytest.raises(NotFound):
            pool.drain("b")
        with pytest.raises(NotFound):
            await pool.remove("b")


async def test_leaving_the_pool_closes_its_own_engines_only() -> None:
    mine = engine_of("mine")
    async with pool_of(patience=0.01) as pool:
        await pool.add(EngineSpec(kind="scripted", name="its", options={"replies": [{"ids": IDS, "stall": 1}]}))
        its = pool.calls.generate(request("s"))
        await anext(its)
        await pool.add_engine(mine)
    with pytest.raises(EngineUnavailable, match="went down"):
        await anext(its)
    assert (await mine.health()).ok
    with pytest.raises(EngineUnavailable):
        await turn(pool, "t")


async def test_leaving_the_pool_ends_its_probes_and_keeps_the_callers_error() -> None:
    engine = engine_of("a", fail="unavailable")

    async def broken() -> None:
        async with pool_of(patience=0.01) as pool:
            await pool.add_engine(engine)
            with pytest.raises(EngineUnavailable):
                await turn(pool, "s")
            raise KeyError("the caller's")

    async with asyncio.timeout(30):
        with pytest.raises(KeyError):
            await broken()
