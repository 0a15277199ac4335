"""The relay between a worker and the service: cut connections, slow readers, several workers, and hostile ones."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from starlette.websockets import WebSocket

from engines.contract import chunks_of, collect
from outrider.constraint import Constraint, ConstraintKind
from outrider.engines.base import Chunk, EngineHealth, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.pool.pool import EnginePool
from outrider.engines.relay.attached_worker import AttachedWorker
from outrider.engines.relay.engine import RelayEngine
from outrider.engines.relay.messages import (
    PROTOCOL,
    TO_SERVICE,
    TO_WORKER,
    Failed,
    StartGeneration,
    Version,
    WorkerHello,
    WorkerReply,
    WorkerTokens,
    WorkerWelcome,
)
from outrider.errors import (
    Conflict,
    ContextOverflow,
    EngineMisbehaved,
    EngineRejected,
    EngineUnavailable,
    InvalidField,
    OutriderError,
    ServiceError,
)
from outrider.lab.fakes.engine_servers.app import serving
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.relay import FunctionEngine, Worker
from outrider.trajectory import FinishReason, LogprobKind, VersionSpan
from outrider.wire import link
from outrider.wire.asgi_socket import AsgiSocket
from outrider.wire.http_server import Receive, Scope, Send
from outrider.wire.link_protocol import Beat, Close
from outrider.wire.link_protocol import encode as encoded
from support.relay import AT_ONCE, CuttingProxy, relay_served
from support.waiting import until

_numbers = itertools.count()


def relay(**options: Any) -> RelayEngine:
    return RelayEngine(EngineOptions(name="trainer", options=options))


def request(*, tokens: int = 100, first: int = 3, session: str | None = None) -> GenerateRequest:
    number = next(_numbers)
    return GenerateRequest(
        request_id=f"request-{number:08}",
        session_key=session or f"session-{number:08}",
        input_ids=np.array([first, 5, 7], dtype=np.int32),
        sampling=SamplingParams(max_tokens=tokens),
    )


def expected(asked: GenerateRequest) -> tuple[list[int], list[float]]:
    """The ids and log-probabilities that `Counter` generates for a request. They identify prompt and position."""
    first = int(asked.input_ids[0])
    ids = [(first * 7919 + position * 31) % 50_000 for position in range(asked.sampling.max_tokens)]
    return ids, [scripted_logprob(position + first, token) for position, token in enumerate(ids)]


class Counter:
    """A generate function with predictable tokens. It waits at token `stall`, if given, until `go` is set."""

    def __init__(self, *, stall: int | None = None, most: int = 3) -> None:
        self.stall = stall
        self.most = most
        self.go = asyncio.Event()
        self.stalled = asyncio.Event()
        self.started = 0
        self.given = 0
        self.left = 0
        """Number of generations that were closed before their end."""

    async def __call__(self, asked: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.started += 1
        ids, logprobs = expected(asked)
        sizes = random.Random(asked.request_id)
        at = 0
        try:
            while at < len(ids):
                if self.stall is not None and at >= self.stall and not self.go.is_set():
                    self.stalled.set()
                    await self.go.wait()
                end = min(at + sizes.randint(1, self.most), len(ids))
                if self.stall is not None and at < self.stall:
                    end = min(end, self.stall)
                await asyncio.sleep(0)
                self.given += end - at
                chunk = Chunk(
                    ids=ids[at:end],
                    logprobs=logprobs[at:end],
                    finish=FinishReason.LENGTH if end == len(ids) else None,
                )
                at = end
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            self.left += 1
            raise


async def gathered(engine: RelayEngine, asked: GenerateRequest, *, slowness: int = 0) -> None:
    """Read a whole generation, and check that it has each token once and in order. Between two chunks the reader yields
    to the event loop `slowness` times."""
    ids, logprobs = expected(asked)

    async def read() -> AsyncGenerator[Chunk, None]:
        async with aclosing(engine.generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk
                for _ in range(slowness):
                    await asyncio.sleep(0)

    whole = await collect(read())
    assert whole.ids == ids
    assert whole.logprobs == logprobs


@asynccontextmanager
async def attached(url: str, generate: Any, **fields: Any) -> AsyncGenerator[Worker, None]:
    async with Worker(url, generate, reconnecting=AT_ONCE, **fields) as worker:
        await worker.attached()
        yield worker


@pytest.mark.deep
async def test_a_hundred_cut_connections_lose_double_and_mix_up_nothing() -> None:
    await cut_a_hundred_times(seed=11, most=6000, window=8)


@pytest.mark.nightly
@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("most", [2000, 6000, 100_000])
async def test_connections_cut_in_many_ways_lose_double_and_mix_up_nothing(most: int, window: int) -> None:
    await cut_a_hundred_times(seed=0, most=most, window=window)


async def cut_a_hundred_times(*, seed: int, most: int, window: int) -> None:
    """Run 32 streams at once over a connection that is cut at random bytes, until it was cut 100 times."""
    engine = relay(window=window, total_window=20 * window)
    counter = Counter()
    lengths = random.Random(seed)
    done = 0
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=100, most=most, seed=seed)
        async with proxy.open() as through, attached(through, counter) as worker:

            async def stream(number: int) -> None:
                nonlocal done
                while proxy.made < 100 or done < 64:
                    await gathered(engine, request(tokens=lengths.randint(1, 200), first=number), slowness=number)
                    done += 1

            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                for number in range(32):
                    group.create_task(stream(number))
            assert proxy.made >= 100
            assert worker.connections > 10  # other connections are cut in the greeting
            await until(lambda: not worker._generations.held)  # the last acknowledgements are in transit
    assert counter.started == done, "a generation began twice, or was thrown away"


async def test_a_short_loss_of_the_connection_is_not_noticed() -> None:
    engine = relay()
    counter = Counter(stall=10)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        async with proxy.open() as through, attached(through, counter) as worker:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(gathered(engine, request()))
                await counter.stalled.wait()
                await proxy.cut()
                counter.go.set()
                await reading
            assert (worker.connections, counter.started) == (2, 1)


async def test_long_prompts_that_begin_at_once_do_not_cut_the_worker_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of the policy, when all sessions go on at once; and again after a lost connection."""
    monkeypatch.setattr(link, "CROWDED", 100_000)
    monkeypatch.setattr(link, "MAX_WAITING", 400_000)
    engine, counter = relay(), Counter()
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, counter) as worker:
            long = [replace(asked := request(), input_ids=np.resize(asked.input_ids, 20_000)) for _ in range(20)]
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for each in long:
                    group.create_task(gathered(engine, each))
            assert worker.connections == 1
            proxy.closed = True
            await proxy.cut()
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for each in long:
                    group.create_task(gathered(engine, each))
                await asyncio.sleep(0.05)
                proxy.closed = False
            assert worker.connections == 2


async def test_a_slow_reader_holds_its_generation_back_and_no_other() -> None:
    engine = relay(window=8)
    counter = Counter(most=1)
    async with relay_served(engine) as url, attached(url, counter):
        slow = request(tokens=1000)
        async with aclosing(engine.generate(slow)) as chunks:
            first = await anext(chunks)
            await gathered(engine, request(tokens=500))
            before = counter.given
            for _ in range(20):
                await engine.health()  # messages travel to the worker and back, so the worker had time for more
            assert counter.given == before <= 500 + 1 + 8 + 1
            rest = [token for chunk in [chunk async for chunk in chunks] for token in chunk.ids]
        assert first.ids + rest == expected(slow)[0]


async def test_all_unread_generations_together_are_bounded() -> None:
    engine = relay(window=8, total_window=20)
    counter = Counter(most=1)
    async with relay_served(engine) as url, attached(url, counter):
        asked = [request(tokens=50, first=number) for number in range(10)]
        streams = [engine.generate(each) for each in asked]
        firsts = [await anext(stream) for stream in streams]
        for _ in range(20):
            await engine.health()
        assert counter.given <= len(firsts) + 20 + len(streams), "and one of each may always come"
        async with asyncio.TaskGroup() as group:
            rests = [group.create_task(chunks_of(stream)) for stream in streams]
        for each, first, rest in zip(asked, firsts, rests, strict=True):
            later = [token for chunk in rest.result() for token in chunk.ids]
            assert first.ids + later == expected(each)[0]


async def test_a_reader_that_leaves_ends_the_generation_at_the_worker() -> None:
    engine = relay()
    counter = Counter(stall=5)
    async with relay_served(engine) as url, attached(url, counter) as worker:
        chunks = engine.generate(request())
        await anext(chunks)
        await chunks.aclose()
        await until(lambda: counter.left == 1)
        assert worker._generations.held == ()


async def test_a_reader_that_leaves_while_the_worker_is_away_ends_it_too() -> None:
    engine = relay()
    counter = Counter(stall=5)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        async with proxy.open() as through, attached(through, counter) as worker:
            chunks = engine.generate(request())
            await anext(chunks)
            proxy.closed = True
            await proxy.cut()
            await chunks.aclose()
            assert counter.left == 0
            proxy.closed = False
            await until(lambda: counter.left == 1)
            assert worker.connections == 2
            await until(lambda: worker._generations.held == ())


async def test_work_goes_to_the_worker_with_the_least() -> None:
    engine = relay()
    one, other = Counter(stall=1), Counter(stall=1)
    async with relay_served(engine) as url, attached(url, one), attached(url, other), asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(gathered(engine, request(first=number)))
        await until(lambda: one.started + other.started == 40)
        assert abs(one.started - other.started) <= 6
        one.go.set()
        other.go.set()


async def test_the_turns_of_a_session_stay_with_one_worker() -> None:
    engine = relay()
    counters = [Counter(), Counter(), Counter()]
    async with (
        relay_served(engine) as url,
        attached(url, counters[0]),
        attached(url, counters[1]),
        attached(url, counters[2]),
    ):
        for _ in range(12):
            await gathered(engine, request(tokens=5, session="the same"))
    assert sorted(counter.started for counter in counters) == [0, 0, 12]


async def test_a_worker_that_leaves_hands_over_what_has_no_token_yet() -> None:
    engine = relay()
    one, other = Counter(stall=0), Counter()
    async with relay_served(engine) as url, asyncio.TaskGroup() as group:
        async with attached(url, one):
            reading = group.create_task(gathered(engine, request()))
            await one.stalled.wait()
            async with attached(url, other):
                pass  # this worker leaves at once: attaching changes nothing for others
            assert other.started == 0
            later = Worker(url, other, reconnecting=AT_ONCE)
            serving = group.create_task(later.run())
            await later.attached()
        await reading
        assert other.started == 1
        serving.cancel()


async def test_a_worker_killed_in_the_middle_fails_what_has_tokens() -> None:
    engine = relay(resume_seconds=0.05)
    counter = Counter(stall=5)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        async with proxy.open() as through, attached(through, counter):
            asked = request()
            chunks = engine.generate(asked)
            ids = (await anext(chunks)).ids
            proxy.closed = True
            await proxy.cut()
            try:
                async for chunk in chunks:
                    ids += chunk.ids
            except EngineUnavailable as error:
                assert "did not come back within" in error.message  # noqa: PT017  # the tokens so far count, too
            assert ids == expected(asked)[0][:5], "what came before the failure is passed on"
            with pytest.raises(EngineUnavailable, match="no worker is attached"):
                await collect(engine.generate(request()))


async def test_a_worker_that_was_given_up_starts_afresh() -> None:
    engine = relay(resume_seconds=0.05)
    counter = Counter(stall=5)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        async with proxy.open() as through, attached(through, counter) as worker:
            chunks = engine.generate(request())
            await anext(chunks)
            proxy.closed = True
            await proxy.cut()
            with pytest.raises(EngineUnavailable):
                await chunks_of(chunks)
            proxy.closed = False
            await until(lambda: worker.connections >= 2)
            await until(lambda: counter.left == 1)
            counter.go.set()
            await gathered(engine, request())


async def test_a_restarted_service_is_found_again() -> None:
    """Generations for the old service are ended; the same worker serves the new service."""
    counter = Counter(stall=5)
    before, after = relay(), relay()
    async with AsyncExitStack() as held:
        url = await held.enter_async_context(relay_served(before))
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        through = await held.enter_async_context(proxy.open())
        worker = await held.enter_async_context(attached(through, counter))
        chunks = before.generate(request())
        await anext(chunks)
        proxy.target = await held.enter_async_context(relay_served(after))
        await proxy.cut()
        await until(lambda: worker.connections >= 2)
        await until(lambda: counter.left == 1)
        counter.go.set()
        await gathered(after, request())
        await chunks.aclose()


async def test_a_worker_keeps_its_generations_while_it_waits_for_the_welcome() -> None:
    """A service that is busy welcomes the worker only when the time to come back is over. It has read that the worker
    still holds the generation, so the worker must go on with it."""
    counter = Counter(stall=1, most=1)
    asked = request(tokens=5)
    start = StartGeneration(
        generation=7, request_id="r", session_key="s", input_ids=asked.input_ids.tobytes(), sampling=asked.sampling
    )
    resumed: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        greeting = TO_SERVICE.decode(await websocket.receive_bytes())
        assert isinstance(greeting, WorkerHello)
        if greeting.holds:
            await asyncio.sleep(0.5)
        welcome = WorkerWelcome(
            protocol=PROTOCOL,
            resumed=dict.fromkeys(greeting.holds, 1),
            heartbeat=5,
            silence=20,
            resume=0.2,
            window=8,
            total_window=8,
        )
        await websocket.send_bytes(encoded(welcome))
        if not greeting.holds:
            await websocket.send_bytes(encoded(start))
            await websocket.receive_bytes()  # the first token
            return  # the connection breaks
        counter.go.set()
        resumed.append(TO_SERVICE.decode(await websocket.receive_bytes()))
        await websocket.receive()

    async with serving(app, websockets=1000) as url, attached(url, counter):
        await until(lambda: bool(resumed))
    assert isinstance(resumed[0], WorkerTokens)
    assert (resumed[0].generation, resumed[0].number) == (7, 2)
    assert counter.started == 1


@pytest.mark.parametrize("status", [403, 404])
async def test_a_proxy_that_knows_no_service_for_a_while_ends_no_worker(status: int) -> None:
    """A reverse proxy replies for the service while the service restarts. The worker was accepted before, so it tries
    again."""
    engine, refused = relay(), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal refused
        websocket = WebSocket(scope, receive, send)
        if closed and refused < 3:
            refused += 1
            await receive()
            await send({"type": "websocket.http.response.start", "status": status, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        await websocket.accept()
        await engine.serve(AsgiSocket(websocket))

    closed = False
    async with serving(app, websockets=1000) as url:
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, Counter()) as worker:
            closed = True
            await proxy.cut()
            await until(lambda: worker.connections == 2)
            assert refused == 3
            await gathered(engine, request())


ERRORS: list[tuple[Exception, type[OutriderError], str]] = [
    (ContextOverflow("too long"), ContextOverflow, "too long"),
    (EngineRejected("no such thing"), EngineRejected, "no such thing"),
    (EngineUnavailable("busy"), EngineUnavailable, "busy"),
    (ServiceError("not an engine's error"), EngineMisbehaved, "not an engine's error"),
    (ValueError("a mistake"), EngineMisbehaved, "ValueError: a mistake"),
    (SystemExit("I am a program"), EngineMisbehaved, "tried to exit"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("raised", "kind", "text"), ERRORS, ids=lambda value: getattr(value, "__name__", None))
async def test_what_a_generate_function_raises_arrives_as_an_engines_error(
    raised: BaseException, kind: type[OutriderError], text: str
) -> None:
    async def generate(asked: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(ids=[1], logprobs=[-0.5])
        raise raised

    engine = relay()
    async with relay_served(engine) as url, attached(url, generate):
        with pytest.raises(kind, match=text):
            await chunks_of(engine.generate(request()))


@pytest.mark.parametrize(
    "bad",
    [
        Chunk(ids=[1, 2], logprobs=[-1.0]),
        Chunk(ids=[1 << 40], logprobs=[-1.0]),
        Chunk(ids=["x"], logprobs=[-1.0]),  # type: ignore[list-item]
        "no chunk",
    ],
    ids=["lengths", "id", "type", "no chunk"],
)
async def test_a_generate_function_that_gives_no_tokens_fails_its_generation_only(bad: Any) -> None:
    async def generate(asked: GenerateRequest) -> AsyncGenerator[Any, None]:
        yield bad

    engine = relay()
    async with relay_served(engine) as url, attached(url, generate) as worker:
        with pytest.raises(EngineMisbehaved):
            await collect(engine.generate(request()))
        assert worker.connections == 1
        assert (await engine.health()).ok


async def test_a_coroutine_that_returns_the_whole_reply_will_do() -> None:
    async def generate(asked: GenerateRequest) -> Chunk:
        ids, logprobs = expected(asked)
        return Chunk(ids=ids, logprobs=logprobs, finish=FinishReason.LENGTH)

    engine = relay()
    async with relay_served(engine) as url, attached(url, generate):
        await gathered(engine, request())


async def test_tokens_keep_the_version_that_the_trainer_had_set() -> None:
    engine = relay()
    counter = Counter(stall=4, most=1)
    async with relay_served(engine) as url, attached(url, FunctionEngine(counter, version=3)) as worker:
        asked = request(tokens=10)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(collect(engine.generate(asked)))
            await counter.stalled.wait()
            worker.set_version(4)
            counter.go.set()
        assert reading.result().versions == (VersionSpan(3, 0, 4), VersionSpan(4, 4, 10))
        assert (await engine.health()).version == 4


async def test_a_chunk_may_say_the_versions_of_its_own_tokens() -> None:
    """The chunk has waited in a queue while the version changed."""

    async def generate(asked: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(ids=[1, 2], logprobs=[-0.5, -0.5], versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)))
        yield Chunk(ids=[3], logprobs=[-0.5])
        yield Chunk(ids=[4], logprobs=[-0.5], finish=FinishReason.LENGTH)

    engine = relay()
    async with relay_served(engine) as url, attached(url, FunctionEngine(generate, version=5)):
        whole = await collect(engine.generate(request()))
        assert whole.versions == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2), VersionSpan(5, 2, 4))


async def test_a_generation_at_a_closed_gate_stays_there_if_the_gate_closes_again() -> None:
    counter = Counter()
    engine = FunctionEngine(counter)
    await engine.pause("finish")
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(chunks_of(engine.generate(request())))
        await asyncio.sleep(0)
        await engine.resume()
        await engine.pause("finish")
        for _ in range(5):
            await asyncio.sleep(0)
        assert (reading.done(), counter.started) == (False, 0)
        await engine.resume()
    assert counter.started == 1


async def test_a_second_abort_waits_for_a_step_that_is_ending() -> None:
    begun, ending, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(asked: GenerateRequest) -> Chunk:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await go.wait()
        raise AssertionError

    engine = FunctionEngine(generate)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(chunks_of(engine.generate(request())))
        await begun.wait()
        group.create_task(engine.pause("abort"))
        await ending.wait()
        again = group.create_task(engine.pause("abort"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not again.done()
        go.set()
    assert reading.result()[-1].finish is FinishReason.ABORT


async def test_a_thread_serves_code_that_blocks() -> None:
    """The service uses the test's event loop. The worker has its own loop, in a thread that the trainer's thread
    starts."""
    engine = relay()

    async def generate(asked: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids, logprobs = expected(asked)
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
            yield Chunk(ids=[token], logprobs=[logprob], finish=FinishReason.LENGTH if place == len(ids) else None)

    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def trainer(url: str) -> int:
        with Worker(url, generate).in_thread() as worker:
            worker.set_version(2)
            loop.call_soon_threadsafe(entered.set)
            leave.wait()
            return worker.connections

    async with relay_served(engine) as url:
        training = asyncio.create_task(asyncio.to_thread(trainer, url))
        await entered.wait()
        await gathered(engine, request())
        assert (await engine.health()).version == 2
        leave.set()
        assert await training == 1
        assert not (await engine.health()).ok


async def test_a_thread_whose_service_is_not_there_says_so() -> None:
    def trainer() -> None:
        with Worker("http://127.0.0.1:9", Counter(), reconnecting=AT_ONCE).in_thread(seconds=0.05):
            raise AssertionError

    with pytest.raises(ServiceError, match="has not taken up the worker"):
        await asyncio.to_thread(trainer)


async def test_a_paused_engine_pauses_workers_that_come_later() -> None:
    engine = relay()
    counter = Counter()
    async with relay_served(engine) as url:
        await engine.pause("finish")
        async with attached(url, counter), asyncio.TaskGroup() as group:
            await until(lambda: bool(engine._workers))
            reading = group.create_task(gathered(engine, request()))
            for _ in range(5):
                await engine.health()
            assert (reading.done(), counter.started) == (False, 0)
            await engine.resume()
        assert counter.started == 1


async def test_a_pause_outlives_the_connection_it_was_asked_on() -> None:
    engine = relay()
    counter = Counter(stall=5)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url, cuts=0, most=1, seed=0)
        async with proxy.open() as through, attached(through, counter) as worker, asyncio.TaskGroup() as group:
            reading = group.create_task(gathered(engine, request()))
            await counter.stalled.wait()
            pausing = group.create_task(engine.pause("finish"))
            await engine.health()
            await proxy.cut()
            await until(lambda: worker.connections >= 2)
            await engine.health()
            assert not pausing.done()
            counter.go.set()
            await reading
            await pausing


async def test_a_worker_that_attaches_while_the_engine_is_resumed_goes_on() -> None:
    """On attaching, the worker is ordered to pause. The resume comes before the worker's reply."""
    engine = relay()
    async with relay_served(engine) as url:
        await engine.pause("finish")
        async with raw_worker(url) as raw:
            paused = await raw.receive()
            await engine.resume()
            await raw.send(WorkerReply(call=paused.call))
            resumed = await raw.receive()
            assert (paused.action, resumed.action) == ("pause", "resume")
            await raw.send(WorkerReply(call=resumed.call))
            await until(lambda: bool(engine._workers))


async def test_a_worker_that_was_cut_off_while_it_was_checked_stays_when_it_is_back() -> None:
    engine = relay(resume_seconds=0.2)
    asked, checks = asyncio.Event(), 0

    async def check(worker: AttachedWorker) -> None:
        nonlocal checks
        checks += 1
        if checks == 1:
            asked.set()
            await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await engine.serve(AsgiSocket(websocket), check=check)

    async with serving(app, websockets=1000) as url:
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, Counter()) as worker:
            await asked.wait()
            await proxy.cut()
            await until(lambda: bool(engine._workers))
            await asyncio.sleep(0.5)
            assert (worker.connections, checks) == (2, 2)
            await gathered(engine, request())


async def test_a_worker_that_a_killed_service_has_paused_goes_on_for_the_next() -> None:
    counter = Counter()
    before, after = relay(), relay()
    async with AsyncExitStack() as held:
        url = await held.enter_async_context(relay_served(before))
        proxy = CuttingProxy(url)
        through = await held.enter_async_context(proxy.open())
        await held.enter_async_context(attached(through, counter))
        await until(lambda: bool(before._workers))
        await before.pause("finish")
        proxy.target = await held.enter_async_context(relay_served(after))
        await proxy.cut()
        await until(lambda: bool(after._workers))
        async with asyncio.timeout(10):
            await gathered(after, request())


class Weights:
    """An `update_weights` function. It waits for `go`, and raises while `fails`."""

    def __init__(self, *, goes: bool = True, fails: bool = False) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.fails = fails
        self.asked = 0
        self.go = asyncio.Event()
        if goes:
            self.go.set()

    async def __call__(self, weights: str, version: int) -> None:
        self.asked += 1
        await self.go.wait()
        if self.fails:
            raise OSError(f"no disk with {weights}")
        self.loaded.append((weights, version))


async def test_every_worker_loads_new_weights() -> None:
    engine = relay()
    one, other = Weights(), Weights()
    async with (
        relay_served(engine) as url,
        attached(url, Counter(), update_weights=one),
        attached(url, Counter(), update_weights=other),
    ):
        await until(lambda: len(engine._workers) == 2)
        assert engine.loads_weights
        await engine.update_weights("weights", 3)
        assert one.loaded == other.loaded == [("weights", 3)]
        asked = request()
        assert (await collect(engine.generate(asked))).versions == (VersionSpan(3, 0, 100),)
        assert (await engine.health()).version == 3


async def test_a_worker_that_cannot_load_is_named_and_asked_for_nothing() -> None:
    engine = relay()
    weights = Weights()
    async with (
        relay_served(engine) as url,
        attached(url, Counter(), update_weights=weights),
        attached(url, Counter(), name="sampler") as other,
    ):
        await until(lambda: len(engine._workers) == 2)
        assert not engine.loads_weights
        with pytest.raises(EngineRejected, match="sampler cannot load weights"):
            await engine.update_weights("weights", 3)
        assert weights.asked == 0
        other.set_version(3)
        await engine.set_version(3)
        assert (await engine.health()).version == 3


async def test_weights_that_no_worker_can_load_change_nothing() -> None:
    engine = relay()
    weights = Weights(fails=True)
    async with relay_served(engine) as url, attached(url, Counter(), update_weights=weights) as worker:
        await until(lambda: bool(engine._workers))
        with pytest.raises(EngineMisbehaved, match="no disk with weights"):
            await engine.update_weights("weights", 3)
        assert (await collect(engine.generate(request()))).versions == (VersionSpan(0, 0, 100),)
        assert worker.connections == 1


async def test_a_worker_that_fails_to_load_serves_when_it_has_caught_up() -> None:
    engine = relay()
    bad = Weights(fails=True)
    good, late = Counter(), Counter()
    async with (
        relay_served(engine) as url,
        attached(url, good, update_weights=Weights()),
        attached(url, late, update_weights=bad) as worker,
    ):
        await until(lambda: len(engine._workers) == 2)
        await engine.update_weights("weights", 3)
        await until(lambda: bad.asked >= 3)
        for _ in range(6):
            await gathered(engine, request())
        assert (late.started, (await engine.health()).version) == (0, 3)
        bad.fails = False
        await until(lambda: len(engine._workers) == 2)
        assert bad.loaded == [("weights", 3)]
        assert worker.connections >= 3
        for _ in range(20):
            await gathered(engine, request())
        assert late.started > 0


async def test_a_connection_cut_in_the_middle_of_an_update_loads_once() -> None:
    engine = relay()
    weights = Weights(goes=False)
    async with relay_served(engine) as url:
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, Counter(), update_weights=weights) as worker:
            await until(lambda: bool(engine._workers))
            async with asyncio.TaskGroup() as group:
                updating = group.create_task(engine.update_weights("weights", 3))
                await until(lambda: weights.asked == 1)
                for connections in (2, 3):
                    await proxy.cut()
                    await until(lambda connections=connections: worker.connections == connections)  # type: ignore[misc]
                assert not updating.done()
                weights.go.set()
            assert (weights.asked, weights.loaded) == (1, [("weights", 3)])
            assert (await collect(engine.generate(request()))).versions == (VersionSpan(3, 0, 100),)


async def test_a_worker_that_is_away_during_an_update_loads_before_it_serves() -> None:
    engine = relay(resume_seconds=0.1)
    weights, loading = Weights(), Weights(goes=False)
    counter = Counter()
    async with relay_served(engine) as url, attached(url, Counter(), update_weights=weights):
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, counter, update_weights=loading):
            await until(lambda: len(engine._workers) == 2)
            proxy.closed = True
            await proxy.cut()
            await engine.update_weights("weights", 3)
            assert (weights.loaded, loading.asked) == ([("weights", 3)], 0)
            proxy.closed = False
            await until(lambda: loading.asked == 1)
            for _ in range(6):
                await gathered(engine, request())
            assert counter.started == 0
            loading.go.set()
            await until(lambda: len(engine._workers) == 2)
            assert loading.loaded == [("weights", 3)]


async def test_a_worker_that_is_away_while_a_version_is_undone_loads_before_it_serves() -> None:
    """Version 5 is undone while the worker is away. Its weights of version 5 are not those of the policy, although 5 is
    more than 3."""
    engine = relay(resume_seconds=0.1)
    weights, loading = Weights(), Weights()
    counter = Counter()
    async with relay_served(engine) as url, attached(url, Counter(), update_weights=weights):
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, counter, update_weights=loading):
            await until(lambda: len(engine._workers) == 2)
            await engine.update_weights("weights-5", 5)
            assert loading.loaded == [("weights-5", 5)]
            proxy.closed = True
            await proxy.cut()
            await engine.update_weights("weights-3", 3)
            await until(lambda: len(engine._workers) == 1)
            loading.go.clear()
            proxy.closed = False
            await until(lambda: loading.asked == 2 or len(engine._workers) == 2)
            for _ in range(20):
                await gathered(engine, request())
            assert counter.started == 0
            loading.go.set()
            await until(lambda: len(engine._workers) == 2)
            assert loading.loaded[-1] == ("weights-3", 3)


async def test_a_worker_that_is_away_until_an_undone_version_is_set_again_loads_before_it_serves() -> None:
    """The worker has version 5, and so has the policy again, but not with the weights of the worker."""
    engine = relay(resume_seconds=0.1)
    loading = Weights()
    async with relay_served(engine) as url, attached(url, Counter(), update_weights=Weights()):
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, Counter(), update_weights=loading):
            await until(lambda: len(engine._workers) == 2)
            await engine.update_weights("undone", 5)
            proxy.closed = True
            await proxy.cut()
            await engine.update_weights("weights-3", 3)
            await engine.update_weights("weights-5", 5)
            await until(lambda: len(engine._workers) == 1)
            proxy.closed = False
            await until(lambda: len(engine._workers) == 2)
            assert loading.loaded == [("undone", 5), ("weights-5", 5)]


async def test_a_worker_with_an_undone_version_gets_no_work() -> None:
    """The service cannot have the worker load the policy's weights. The worker gets work again when it reports a change
    of its weights."""
    engine = relay(resume_seconds=0.05)
    counter = Counter()
    async with relay_served(engine) as url, attached(url, Counter()):
        proxy = CuttingProxy(url)
        async with proxy.open() as through, attached(through, counter) as worker:
            await until(lambda: len(engine._workers) == 2)
            await engine.set_version(5)
            proxy.closed = True
            await proxy.cut()
            await until(lambda: len(engine._workers) == 1)
            await engine.set_version(3)
            proxy.closed = False
            await until(lambda: len(engine._workers) == 2)
            for _ in range(20):
                await gathered(engine, request())
            assert counter.started == 0
            assert (await engine.health()).version == 3
            worker.set_version(5)  # new weights under the old number
            await until(lambda: not engine._undone)
            for _ in range(20):
                await gathered(engine, request())
            assert counter.started > 0


async def test_a_worker_that_loads_its_first_weights_during_an_update_loads_the_next_too() -> None:
    """The worker attaches after an update. Another update follows while it loads the weights of the first."""
    engine = relay()
    first, second = Weights(goes=False), Weights(goes=False)
    async with relay_served(engine) as url, attached(url, Counter(), update_weights=first):
        await until(lambda: bool(engine._workers))
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.update_weights("weights-3", 3))
            await until(lambda: first.asked == 1)
            first.go.set()
        async with attached(url, Counter(), update_weights=second):
            await until(lambda: second.asked == 1)
            await engine.update_weights("weights-4", 4)
            second.go.set()
            await until(lambda: len(engine._workers) == 2)
            assert second.loaded == [("weights-3", 3), ("weights-4", 4)]


async def test_a_worker_that_comes_in_the_middle_of_an_update_loads_the_weights_too() -> None:
    engine = relay()
    first, second = Weights(goes=False), Weights()
    counter = Counter()
    async with (
        relay_served(engine) as url,
        attached(url, Counter(), update_weights=first),
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: bool(engine._workers))
        updating = group.create_task(engine.update_weights("weights", 3))
        await until(lambda: first.asked == 1)
        async with attached(url, counter, update_weights=second):
            await until(lambda: len(engine._workers) == 2)
            assert second.asked == 0
            first.go.set()
            await updating
            await until(lambda: len(engine._workers) == 2 and second.loaded == [("weights", 3)])
            for _ in range(20):
                await gathered(engine, request())
            assert counter.started > 0


async def test_a_worker_of_an_older_version_gets_no_work_until_it_says_that_it_has_the_newer() -> None:
    engine = relay()
    counter, changes = Counter(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await engine.serve(AsgiSocket(websocket), attached=lambda: changes.append(len(engine._workers)))

    async with serving(app, websockets=1000) as url:
        async with attached(url, Counter()):
            await until(lambda: bool(engine._workers))
            await engine.set_version(3)
        await until(lambda: not engine._workers)
        async with attached(url, counter) as worker:
            await until(lambda: bool(engine._workers))
            with pytest.raises(EngineUnavailable, match="no worker has policy version 3 yet"):
                await collect(engine.generate(request()))
            assert (await engine.health()).version == 0
            worker.set_version(3)
            await until(lambda: changes == [1, 1, 1])
            await gathered(engine, request())


# ---- workers that implement the protocol by hand


class RawWorker:
    """A worker that sends and receives the protocol's messages by hand."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket

    async def send(self, message: msgspec.Struct | bytes) -> None:
        await self._websocket.send_bytes(message if isinstance(message, bytes) else encoded(message))

    async def receive(self) -> Any:
        return TO_WORKER.decode((await self._websocket.receive()).data)

    async def text(self, text: str) -> None:
        await self._websocket.send_str(text)

    async def closed(self) -> tuple[int, str]:
        """Wait until the service closes the connection. Returns code and reason."""
        while (message := await self._websocket.receive()).type is not aiohttp.WSMsgType.CLOSE:
            assert message.type is aiohttp.WSMsgType.BINARY
        return message.data, message.extra or ""


def hello(**fields: Any) -> WorkerHello:
    known: dict[str, Any] = {
        "protocol": PROTOCOL,
        "instance": f"instance-{next(_numbers):020}",
        "name": "raw",
        "model": None,
        "context_tokens": None,
        "logprob_kind": LogprobKind.SAMPLING,
        "version": 0,
    }
    return WorkerHello(**known | fields)


@asynccontextmanager
async def raw_worker(url: str, **fields: Any) -> AsyncGenerator[RawWorker, None]:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/x") as websocket:
        worker = RawWorker(websocket)
        await worker.send(hello(**fields))
        assert isinstance(await worker.receive(), WorkerWelcome)
        yield worker


def tokens(generation: int, number: int = 1, *, ids: list[int] | None = None, **fields: Any) -> WorkerTokens:
    given = [1] if ids is None else ids
    packed: dict[str, Any] = {
        "ids": np.array(given, dtype="<i4").tobytes(),
        "logprobs": np.full(len(given), -1.0, dtype="<f8").tobytes(),
    }
    return WorkerTokens(generation=generation, number=number, **packed | fields)


def end_of(length: int) -> dict[str, Any]:
    """The fields of the last chunk of an output of that length, besides its tokens."""
    return {"finish": FinishReason.LENGTH, "versions": (VersionSpan(0, 0, length),)}


NONSENSE: dict[str, tuple[Callable[[int], Any], str]] = {
    "bytes": (lambda _: b"\xff\x00what", "no message of this protocol"),
    "empty": (lambda _: b"", "no message of this protocol"),
    "unknown": (lambda _: msgspec.msgpack.encode({"type": "sing"}), "no message of this protocol"),
    "second hello": (lambda _: hello(), "a second hello"),
    "gap": (lambda n: tokens(n, 2), "message 2 of a generation came after 0"),
    "half an id": (lambda n: tokens(n, ids=[], logprobs=b"12", finish=FinishReason.STOP), "2 bytes of log-prob"),
    "lengths": (lambda n: tokens(n, logprobs=b"12345678" * 3), "24 bytes of log-probabilities for 4 bytes of ids"),
    "nothing": (lambda n: tokens(n, ids=[]), "a chunk without tokens"),
    "too many": (lambda n: tokens(n, ids=[1] * 101), "gave 101 tokens where at most 100"),
    "not a number": (lambda n: tokens(n, logprobs=np.array([np.nan]).tobytes()), "gave the log-probability nan"),
    "above zero": (lambda n: tokens(n, logprobs=np.array([0.5]).tobytes()), "gave the log-probability 0.5"),
    "versions": (
        lambda n: tokens(n, finish=FinishReason.STOP, versions=(VersionSpan(1, 0, 9),)),
        "policy versions that do not cover",
    ),
    "no versions": (lambda n: tokens(n, finish=FinishReason.STOP), "without the policy versions"),
    "version": (lambda _: encoded(Version(-1)), "no message of this protocol"),
    "deep": (lambda _: b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * 30_000 + b"\xc0", "no message of this protocol"),
}


@pytest.mark.parametrize("case", NONSENSE)
async def test_a_worker_that_speaks_nonsense_is_cut_off_with_the_reason(case: str) -> None:
    """The worker's generations move to another worker."""
    make, reason = NONSENSE[case]
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))
        reading = group.create_task(gathered(engine, request()))
        asked = await raw.receive()
        assert isinstance(asked, StartGeneration)
        async with attached(url, Counter()):
            await until(lambda: len(engine._workers) == 2)
            await raw.send(make(asked.generation))
            code, said = await raw.closed()
            assert code == Close.NONSENSE
            assert reason in said
            await reading


async def test_a_worker_that_ignores_the_window_is_cut_off() -> None:
    engine = relay(window=4)
    async with relay_served(engine) as url, raw_worker(url) as raw:
        await until(lambda: bool(engine._workers))
        chunks = engine.generate(request())
        async with asyncio.TaskGroup() as group:
            first = group.create_task(anext(chunks))
            asked = await raw.receive()
            await raw.send(tokens(asked.generation))
        assert first.result().ids == [1]
        for number in range(2, 8):
            await raw.send(tokens(asked.generation, number))
        assert await raw.closed() == (Close.NONSENSE, "more than 4 unacknowledged chunks of one generation")
        with pytest.raises(EngineUnavailable, match="more than 4 unack"):
            await chunks_of(chunks)


async def test_the_workers_own_code_is_told_why_it_was_cut_off() -> None:
    async def generate(asked: GenerateRequest) -> Chunk:
        return Chunk(ids=[1], logprobs=[0.5], finish=FinishReason.STOP)

    engine = relay()
    async with relay_served(engine) as url:
        running = asyncio.create_task(Worker(url, generate).run())
        await until(lambda: bool(engine._workers))
        with pytest.raises(EngineUnavailable, match="gave the log-probability"):
            await collect(engine.generate(request()))
        with pytest.raises(EngineMisbehaved, match="gave the log-probability"):
            await running


@pytest.mark.parametrize(
    ("first", "code", "reason"),
    [
        (hello(protocol=PROTOCOL + 1), Close.PROTOCOL, f"this service speaks protocol {PROTOCOL}, not {PROTOCOL + 1}"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": 99}), Close.PROTOCOL, "not 99"),
        (Version(3), Close.NONSENSE, "no hello"),
        (b"?", Close.NONSENSE, "no hello"),
        (b"\x81\xa1x" + b"\x91" * 30_000 + b"\xc0", Close.NONSENSE, "no hello"),
        (hello(version=-1), Close.NONSENSE, "no hello"),
        (hello(instance="short"), Close.NONSENSE, "no hello"),
        (hello(model="other"), Close.CONFLICT, "the model here is one, not other"),
        (hello(logprob_kind=LogprobKind.RAW), Close.CONFLICT, "log-probabilities are sampling here, not raw"),
        (hello(holds=tuple(range(20_000))), Close.NONSENSE, "no hello"),
        (hello(context_tokens=10), Close.CONFLICT, "the model's context here is 4096 tokens, not 10"),
        (msgspec.msgpack.encode({"type": "hello", "protocol": 1, "x": [0] * 500_000}), Close.NONSENSE, "500"),
    ],
)
async def test_a_greeting_that_does_not_fit_is_refused(first: Any, code: int, reason: str) -> None:
    engine = relay()
    async with relay_served(engine) as url, attached(url, FunctionEngine(Counter(), model="one", context_tokens=4096)):
        await until(lambda: bool(engine._workers))
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/x") as websocket:
            raw = RawWorker(websocket)
            await raw.send(first)
            given, said = await raw.closed()
        assert given == code
        assert reason in said


async def test_a_worker_does_not_shorten_the_context_for_others() -> None:
    """The worker's greeting had no context length. Its health report has a shorter one than the other worker's."""
    engine = relay()
    async with (
        relay_served(engine) as url,
        attached(url, FunctionEngine(Counter(), context_tokens=4096)),
        raw_worker(url) as raw,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: len(engine._workers) == 2)
        asking = group.create_task(engine.health())
        asked = await raw.receive()
        await raw.send(WorkerReply(call=asked.call, health=EngineHealth(ok=True, context_tokens=10)))
        assert (await raw.closed())[0] == Close.CONFLICT
        assert (await asking).context_tokens == 4096
        await until(lambda: len(engine._workers) == 1)


async def test_a_long_error_of_a_worker_is_cut() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))

        async def read() -> str:
            with pytest.raises(EngineRejected) as raised:
                await chunks_of(engine.generate(request()))
            return raised.value.message

        reading = group.create_task(read())
        asked = await raw.receive()
        record = msgspec.structs.replace(EngineRejected("x").record(), message="Bearer " * 700_000)
        await raw.send(Failed(generation=asked.generation, number=1, error=record))
        assert len(await reading) == 8192


async def test_a_worker_that_lies_about_its_health_is_cut_off() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))
        asking = group.create_task(engine.health())
        asked = await raw.receive()
        await raw.send(WorkerReply(call=asked.call, health=EngineHealth(ok=True, context_tokens=-5)))
        code, reason = await raw.closed()
        assert code == Close.NONSENSE
        assert "context is -5 tokens" in reason
        assert not (await asking).ok


async def test_a_worker_that_names_a_model_without_end_is_cut_off() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))
        asking = group.create_task(engine.health())
        asked = await raw.receive()
        await raw.send(WorkerReply(call=asked.call, health=EngineHealth(ok=True, model="x" * (5 << 20))))
        assert (await raw.closed())[0] == Close.NONSENSE
        assert not (await asking).ok


async def test_an_answer_with_an_error_of_the_services_own_is_the_workers_fault() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))
        said = Conflict("there is one already").record()
        asking = group.create_task(engine.health())
        await raw.send(WorkerReply(call=(await raw.receive()).call, error=said))
        assert (await asking).detail == "worker 'trainer/raw' failed: there is one already"

        async def pause() -> None:
            with pytest.raises(EngineMisbehaved, match="there is one already"):
                await engine.pause("finish")

        pausing = group.create_task(pause())
        await raw.send(WorkerReply(call=(await raw.receive()).call, error=said))
        await pausing


async def test_a_worker_that_was_too_slow_to_be_checked_comes_back() -> None:
    engine = relay()
    checks = 0

    async def check(worker: AttachedWorker) -> None:
        nonlocal checks
        checks += 1
        if checks < 3:
            raise EngineUnavailable("too slow")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await engine.serve(AsgiSocket(websocket), check=check)

    async with serving(app, websockets=1000) as url, attached(url, Counter()) as worker:
        await until(lambda: bool(engine._workers))
        assert (checks, worker.connections) == (3, 1)
        await gathered(engine, request())


async def test_a_health_function_that_raises_is_not_well() -> None:
    async def broken() -> str:
        raise OSError("no device")

    engine = relay()
    async with relay_served(engine) as url, attached(url, FunctionEngine(Counter(), healthy=broken)):
        await until(lambda: bool(engine._workers))
        assert "OSError: no device" in (await engine.health()).detail


async def test_text_is_no_message() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw:
        await raw.text("hello")
        assert (await raw.closed())[0] == Close.NONSENSE


async def test_text_that_is_no_text_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    engine = relay()
    async with (
        relay_served(engine) as url,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}/x") as websocket,
    ):
        await websocket.send_frame(b"\xff\xfe", aiohttp.WSMsgType.TEXT)
        assert (await websocket.receive()).type is not aiohttp.WSMsgType.BINARY
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_message_that_breaks_websockets_rules_leaves_the_worker_time_to_come_back() -> None:
    """uvicorn closes the connection while the service still sends to it."""
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url) as raw:
        await until(lambda: bool(engine._workers))
        [worker] = engine._workers.values()
        connection = raw._websocket._response.connection
        assert connection is not None
        assert connection.transport is not None
        connection.transport.write(b"\xff" * 10)  # no frame
        while worker.connected:
            worker._send(Version(0))
            await asyncio.sleep(0)
        assert worker.gone is None


async def test_a_newer_connection_of_a_worker_replaces_the_older() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url, instance="i" * 32) as old:
        await until(lambda: bool(engine._workers))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(collect(engine.generate(request(tokens=2))))
            asked = await old.receive()
            await old.send(tokens(asked.generation))
            await until(
                lambda: all(each.received for w in engine._workers.values() for each in w._generations.values())
            )
            async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/x") as websocket:
                new = RawWorker(websocket)
                await new.send(hello(instance="i" * 32, holds=(asked.generation, 12345)))
                welcome = await new.receive()
                assert welcome.resumed == {asked.generation: 1}
                assert await old.closed() == (Close.REPLACED, "this worker has connected again")
                await new.send(tokens(asked.generation, 2, ids=[9], **end_of(2)))
                await reading
        assert reading.result().ids == [1, 9]


async def test_a_generation_that_a_worker_never_got_is_sent_again_and_one_it_forgot_fails() -> None:
    engine = relay()
    async with relay_served(engine) as url, raw_worker(url, instance="i" * 32) as old, asyncio.TaskGroup() as group:
        await until(lambda: bool(engine._workers))
        lost = group.create_task(collect(engine.generate(request(tokens=1))))
        never = await old.receive()
        forgotten = engine.generate(request(tokens=2))
        first = group.create_task(anext(forgotten))
        begun = await old.receive()
        await old.send(tokens(begun.generation))
        await first
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/x") as websocket:
            new = RawWorker(websocket)
            await new.send(hello(instance="i" * 32))
            assert (await new.receive()).resumed == {}
            again = await new.receive()
            assert again == never
            with pytest.raises(EngineUnavailable, match="has forgotten a generation"):
                await anext(forgotten)
            await new.send(tokens(again.generation, ids=[4], **end_of(1)))
            assert (await lost).ids == [4]


async def test_silence_is_noticed_by_the_service() -> None:
    engine = relay(heartbeat_seconds=0.4, silence_seconds=0.8)
    async with relay_served(engine) as url, raw_worker(url) as raw:
        code, reason = await raw.closed()
        assert code == Close.SILENT
        assert "nothing came for 0.8 s" in reason


async def test_silence_is_noticed_by_the_worker() -> None:
    """The worker closes the connection with the reason, and connects again. The times are long enough for a busy
    machine: a worker that was not scheduled for a quarter of `silence` restarts its count."""
    closed: list[int] = []
    silent = WorkerWelcome(
        protocol=PROTOCOL, resumed={}, heartbeat=0.8, silence=0.8, resume=1, window=8, total_window=8
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await websocket.receive_bytes()
        await websocket.send_bytes(encoded(silent))
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            assert message["bytes"] == encoded(Beat())
        closed.append(message["code"])

    async with serving(app, websockets=1000) as url, attached(url, Counter()) as worker:
        await until(lambda: worker.connections == 2)
    assert closed[:1] == [Close.SILENT]


async def test_a_worker_that_reads_nothing_is_cut_off_although_it_speaks() -> None:
    engine = relay(heartbeat_seconds=0.02, silence_seconds=0.2, resume_seconds=0.01)
    impatient = aiohttp.ClientWSTimeout(ws_close=0.01)
    async with (
        relay_served(engine) as url,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}/x", timeout=impatient) as websocket,
    ):
        raw = RawWorker(websocket)
        await raw.send(hello())
        await until(lambda: bool(engine._workers))
        assert websocket._response.connection is not None
        websocket._response.connection.transport.pause_reading()
        long = msgspec.structs.replace(request(), input_ids=np.zeros(8 << 20, dtype=np.int32))
        reading = asyncio.create_task(collect(engine.generate(long)))
        while not reading.done():
            with suppress(aiohttp.ClientError, OSError):
                await raw.send(Beat())
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="did not come back"):
            await reading


async def test_heartbeats_keep_a_quiet_connection() -> None:
    engine = relay(heartbeat_seconds=0.02, silence_seconds=0.5)
    counter = Counter(stall=1)
    async with (
        relay_served(engine) as url,
        attached(url, counter) as worker,
        aclosing(engine.generate(request())) as chunks,
    ):
        await anext(chunks)
        await counter.stalled.wait()
        await asyncio.sleep(1.2)  # more than two periods of silence
        assert worker.connections == 1


async def test_a_removed_engine_tells_its_workers_so() -> None:
    engine = relay()
    async with relay_served(engine) as url:
        worker = Worker(url, Counter())
        running = asyncio.create_task(worker.run())
        await until(lambda: bool(engine._workers))
        await engine.close()
        with pytest.raises(Conflict, match="was removed"):
            await running


async def test_constraints_are_those_of_the_workers_that_are_attached() -> None:
    engine = relay()
    regex = FunctionEngine(Counter(), constraints=[ConstraintKind.REGEX])
    none = FunctionEngine(Counter())
    assert engine.constraints == frozenset()
    async with relay_served(engine) as url:
        async with attached(url, none):
            await until(lambda: len(engine._workers) == 1)
            assert engine.constraints == frozenset()
            async with attached(url, regex):
                await until(lambda: len(engine._workers) == 2)
                assert engine.constraints == {ConstraintKind.REGEX}
            await until(lambda: len(engine._workers) == 1)
            assert engine.constraints == frozenset()
        async with attached(url, regex):
            await until(lambda: engine.constraints == {ConstraintKind.REGEX})
        await until(lambda: not engine._workers)
        # a call fails because no worker is attached; it is not refused as wrong
        assert engine.constraints == {ConstraintKind.REGEX}


async def test_a_pool_knows_the_constraints_of_a_worker_that_has_replaced_another() -> None:
    engine = relay()
    regex = FunctionEngine(Counter(), constraints=[ConstraintKind.REGEX])
    async with EnginePool() as pool, relay_served(engine) as url, attached(url, FunctionEngine(Counter())):
        await until(lambda: bool(engine._workers))
        await pool.add_engine(engine)
        assert not pool.members[engine.name].constraints
        async with attached(url, regex):
            await until(lambda: len(engine._workers) == 2)
            assert pool.members[engine.name].constraints == {ConstraintKind.REGEX}


async def test_a_request_goes_to_no_worker_without_its_constraint() -> None:
    engine = relay()
    able, unable = Counter(), Counter()
    constrained = request()
    constrained = replace(
        constrained, sampling=replace(constrained.sampling, constraint=Constraint(ConstraintKind.REGEX, "a+"))
    )
    async with relay_served(engine) as url, attached(url, unable):
        await until(lambda: len(engine._workers) == 1)
        with pytest.raises(EngineUnavailable, match="no worker that is left supports regex"):
            await collect(engine.generate(constrained))
        async with attached(url, FunctionEngine(able, constraints=[ConstraintKind.REGEX])):
            await until(lambda: len(engine._workers) == 2)
            for number in range(20):
                await gathered(engine, replace(constrained, request_id=f"r{number}", session_key=f"s{number}"))
            assert (able.started, unable.started) == (20, 0)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"resume_seconds": -1}, {"silence_seconds": 1.0}, {"windows": 3}], ids=str
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        relay(**options)
