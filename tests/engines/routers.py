"""Routers in front of scripted engines: checks that hold behind any router, and a fake router.

`CHECKS` are plain async functions over a world: workers, each with a URL, and a router in front of them. tests/real
runs them with the real programs. The fake has the observed behaviour of vllm-router 0.1.17 and sglang-router 0.3.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import numpy as np
import orjson
import pytest

from engines.contract import collect
from engines.worlds import ADAPTERS, CONTEXT_TOKENS, REPLY, scripted
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.base import Engine, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineRejected, EngineUnavailable, InvalidField
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine, scripted_logprob
from outrider.spec import EngineSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason
from outrider.wire.http_server import Application, Receive, Scope, Send, disconnect_of

Kind = Literal["vllm", "sglang"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
SESSION_HEADERS: dict[Kind, str] = {"vllm": "x-session-id", "sglang": "x-smg-routing-key"}
MANY = 8000
"""Number of tokens of a reply that is still running when the departure of its consumer is noticed."""

SESSIONS = 50
"""Enough sessions that a router which places sessions by hashes uses both of two workers."""

SOON = 0.05
GENERATE = ("/inference/v1/generate", "/generate")


@dataclass
class RunningRouter:
    """A router that runs. `add` and `remove` change its list of workers, by URL."""

    url: str
    add: Callable[[str], Awaitable[None]]
    remove: Callable[[str], Awaitable[None]]


class Router(Protocol):
    """Starts a router. With `apart`, the first worker is for prefill and the others are for decode."""

    def __call__(
        self, kind: Kind, urls: Sequence[str], *, apart: bool
    ) -> AbstractAsyncContextManager[RunningRouter]: ...


@dataclass
class Seen:
    """A request as a worker received it."""

    worker: int
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class World:
    kind: Kind
    router: RunningRouter
    workers: list[ScriptedEngine]
    urls: list[str]
    seen: list[Seen]
    kill: Callable[[int], Awaitable[None]]
    tokenizer: Tokenizer
    weights: str

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[Any, None]:
        """The router as an engine, started and healthy."""
        engine = ADAPTERS[self.kind](EngineOptions(name="behind", url=self.router.url))
        await engine.start()
        try:
            health = await engine.health()
            assert health.ok, health.detail
            yield engine
        finally:
            await engine.close()

    def request(self, session: str = "session-1", prompt: str = "Where is it?", **sampling: Any) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"request-{session}",
            session_key=session,
            input_ids=np.array(self.tokenizer.encode(prompt), dtype=np.int32),
            sampling=SamplingParams(**({"max_tokens": 200} | sampling)),
        )

    def generated(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.path in GENERATE]

    async def check_exact(self, engine: Engine, request: GenerateRequest) -> None:
        """Check that the ids and log-probabilities equal the script's."""
        whole = await collect(engine.generate(request))
        ids, start = self.tokenizer.encode(REPLY), len(request.input_ids)
        assert whole.ids == ids
        assert whole.logprobs == [scripted_logprob(start + offset, token) for offset, token in enumerate(ids)]


class Worlds(Protocol):
    """Makes a world of `workers` workers with these replies. `apart` is as for `Router`."""

    def __call__(
        self, *, workers: int = 2, apart: bool = False, replies: Sequence[Any] = (REPLY,)
    ) -> AbstractAsyncContextManager[World]: ...


def worlds_of(kind: Kind, router: Router, folder: Path) -> Worlds:
    """Return a factory of worlds whose router is started by `router`. `folder` holds a tokenizer.json."""

    @asynccontextmanager
    async def worlds(
        *, workers: int = 2, apart: bool = False, replies: Sequence[Any] = (REPLY,)
    ) -> AsyncGenerator[World, None]:
        seen: list[Seen] = []
        tokenizer = Tokenizer.load(folder)
        fakes = [
            scripted(folder, name=f"worker-{number}", replies=list(replies), context_tokens=MANY + CONTEXT_TOKENS)
            for number in range(workers)
        ]
        servers = [AsyncExitStack() for _ in fakes]
        async with AsyncExitStack() as stack:
            urls = []
            for number, (fake, server) in enumerate(zip(fakes, servers, strict=True)):
                await stack.enter_async_context(server)
                app = engine_app(fake, kind, ServeSettings(tokenizer=tokenizer, incremental=True))
                if apart and number == 0 and kind == "sglang":
                    app = _prefill(app)
                urls.append(await server.enter_async_context(serving(_recorded(app, number, seen))))
            running = await stack.enter_async_context(router(kind, urls, apart=apart))
            weights = folder / "weights"
            weights.mkdir(exist_ok=True)
            (weights / "model.safetensors").touch()
            yield World(
                kind, running, fakes, urls, seen, lambda number: servers[number].aclose(), tokenizer, str(weights)
            )

    return worlds


def _recorded(app: Application, worker: int, seen: list[Seen]) -> Application:
    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body, receive = await _body(receive)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            seen.append(Seen(worker, scope["path"], headers, body))
        await app(scope, receive, send)

    return recorded


def _prefill(app: Application) -> Application:
    """SGLang's prefill worker: it gets the same request as its decode worker, and stops after one token."""

    async def prefill(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate":
            body, _ = await _body(receive)
            asked = orjson.loads(body)
            receive = _again(orjson.dumps(asked | {"sampling_params": {"max_new_tokens": 1}}))
        await app(scope, receive, send)

    return prefill


async def _body(receive: Receive) -> tuple[bytes, Receive]:
    """Return the body, and a `receive` that returns the same body again."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body, _again(body)


def _again(body: bytes) -> Receive:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


# The checks.


async def is_one_exact_engine(worlds: Worlds) -> None:
    async with worlds() as world, world.engine() as engine:
        health = await engine.health()
        assert (health.model, health.context_tokens, health.version) == ("policy", MANY + CONTEXT_TOKENS, 0)
        assert await engine.token_check("maple") == world.tokenizer.encode("maple")
        await world.check_exact(engine, world.request(temperature=0.7, seed=3, stop=("never said",)))
        sent = orjson.loads(world.generated()[-1].body)
        ids = sent["token_ids" if world.kind == "vllm" else "input_ids"]
        assert ids == world.tokenizer.encode("Where is it?")


async def streams_while_the_worker_generates(worlds: Worlds) -> None:
    async with worlds(replies=[{"reply": REPLY, "stall": 3}]) as world, world.engine() as engine:
        async with aclosing(engine.generate(world.request())) as chunks:
            given = 0
            async with asyncio.timeout(10):
                while given < 3:  # the worker continues only after these tokens were read
                    given += len((await anext(chunks)).ids)
            for worker in world.workers:
                worker.release()
            rest = [chunk async for chunk in chunks]
        assert rest[-1].finish is FinishReason.STOP


async def sends_a_session_to_one_worker(worlds: Worlds) -> None:
    """A router distinguishes sessions by a header of its own. The prompts have nothing in common."""
    async with worlds() as world, world.engine() as engine:
        for session in range(SESSIONS):
            for turn in range(2):
                await collect(engine.generate(world.request(f"session-{session}", prompt=f"{session * 7 + turn}")))
        used: dict[str, set[int]] = {}
        for seen in world.generated():
            used.setdefault(seen.headers[SESSION_HEADERS[world.kind]], set()).add(seen.worker)
        assert set(used) == {f"session-{session}" for session in range(SESSIONS)}
        assert all(len(workers) == 1 for workers in used.values())
        assert len(set().union(*used.values())) == 2


async def aborts_at_the_worker(worlds: Worlds) -> None:
    async with worlds(workers=1, replies=[{"ids": [5] * MANY}]) as world, world.engine() as engine:
        chunks = engine.generate(world.request(max_tokens=MANY))
        assert (await anext(chunks)).finish is None
        await chunks.aclose()
        async with asyncio.timeout(10):
            await world.workers[0].abort_seen.wait()


async def survives_a_worker(worlds: Worlds) -> None:
    """The router, or the next attempt, takes another worker."""
    async with worlds() as world, world.engine() as engine:
        await world.check_exact(engine, world.request())
        await world.kill(world.generated()[0].worker)
        await world.check_exact(engine, world.request())


async def breaks_off_with_its_worker(worlds: Worlds) -> None:
    async with worlds(replies=[{"reply": REPLY, "stall": 3}]) as world, world.engine() as engine:
        chunks = engine.generate(world.request())
        assert (await anext(chunks)).finish is None
        await world.kill(world.generated()[0].worker)
        with pytest.raises(EngineUnavailable):
            async for _ in chunks:
                pass


async def fails_over_without_workers(worlds: Worlds) -> None:
    """A router without living workers is unavailable before the first chunk, whatever its health route returns."""
    async with worlds() as world, EnginePool(probing=RetryPolicy(first=1e9, longest=1e9)) as pool:
        await pool.add(EngineSpec(kind=world.kind, name="behind", url=world.router.url))
        await pool.add_engine(ScriptedEngine(EngineOptions(name="other", options={"replies": [{"ids": [1, 2, 3]}]})))
        for number in range(2):
            await world.kill(number)
        async with aclosing(pool.calls.generate(world.request())) as reply:
            assert [token for chunk in [chunk async for chunk in reply] for token in chunk.ids] == [1, 2, 3]
            assert reply.served.engine == "other"
        behind = pool.status()[0]
        assert (behind.ok, behind.suspect) == (False, None)
        assert not (await pool.engine("behind").health()).ok


async def tells_every_worker(worlds: Worlds) -> None:
    for apart in (False, True):
        async with (
            worlds(workers=3, apart=apart, replies=[{"reply": REPLY, "stall": 3}]) as world,
            world.engine() as engine,
        ):
            chunks = engine.generate(world.request())
            await anext(chunks)
            await engine.pause("abort")
            rest = [chunk async for chunk in chunks]
            assert rest[-1].finish is FinishReason.ABORT
            await engine.update_weights(world.weights, 7)
            await engine.resume()
            assert [worker.weights for worker in world.workers] == [world.weights] * 3
            assert [worker.version for worker in world.workers] == [7] * 3
            whole = await collect(engine.generate(world.request(max_tokens=2)))
            assert [span.version for span in whole.versions] == [7]
            await engine.set_version(8)
            assert [worker.version for worker in world.workers] == [8] * 3
            world.workers[2].version = 5
            assert (await engine.health()).version == 5  # the oldest, so the pool waits until all workers agree
            await world.kill(1)
            await engine.set_version(9)
            assert [worker.version for worker in world.workers] == [9, 8, 9]


async def generates_in_pairs(worlds: Worlds) -> None:
    async with worlds(workers=3, apart=True) as world:
        async with world.engine() as engine:
            await world.check_exact(engine, world.request())
            assert {seen.worker for seen in world.generated()} in ({0, 1}, {0, 2})
        async with EnginePool() as pool:
            with pytest.raises(InvalidField, match="in pairs only") as refused:
                await pool.add(EngineSpec(kind=f"{world.kind}-router", url=world.router.url))
            assert f"{world.kind}={world.router.url}" in (refused.value.hint or "")


async def gives_each_worker_as_an_engine(worlds: Worlds) -> None:
    async with worlds(workers=3) as world:
        await world.router.remove(world.urls[2])
        async with EnginePool(probing=RetryPolicy(first=SOON, longest=SOON), look_seconds=SOON) as pool:
            status = await pool.add(EngineSpec(kind=f"{world.kind}-router", name="fleet", url=world.router.url))
            assert status.ok, status.detail
            assert _urls(pool) == set(world.urls[:2])
            for session in range(4):
                async with aclosing(pool.calls.generate(world.request(f"session-{session}"))) as chunks:
                    assert [chunk async for chunk in chunks][-1].finish is FinishReason.STOP
            assert {seen.worker for seen in world.generated()} == {0, 1}

            await pool.policy.update(4, mode="abort", weights=world.weights)
            assert [worker.version for worker in world.workers] == [4, 4, 0]

            await world.router.add(world.urls[2])
            await _until(lambda: [status.ok for status in pool.status()] == [True] * 4)
            assert world.workers[2].version == 4  # it got the weights of the last update before any session

            await world.router.remove(world.urls[0])
            await _until(lambda: _urls(pool) == set(world.urls[1:]))
            await pool.remove("fleet")
            assert pool.status() == []


def _urls(pool: EnginePool) -> set[str | None]:
    return {status.url for status in pool.status() if not status.kind.endswith("-router")}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the pool looks at the list periodically
            await asyncio.sleep(SOON)


CHECKS = (
    is_one_exact_engine,
    streams_while_the_worker_generates,
    sends_a_session_to_one_worker,
    aborts_at_the_worker,
    survives_a_worker,
    breaks_off_with_its_worker,
    fails_over_without_workers,
    tells_every_worker,
    generates_in_pairs,
    gives_each_worker_as_an_engine,
)


async def refuses_what_it_would_drop(worlds: Worlds) -> None:
    """A check for sglang-router alone, which forwards only the fields of its own schema."""
    async with worlds() as world, world.engine() as engine:
        with pytest.raises(EngineRejected, match="drops a request's logit_bias"):
            await collect(engine.generate(world.request(logit_bias={5: 1.0})))


# The fake.

KNOWN_TO_SGLANG = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "rid", "stream"}
DROPPED_SAMPLING = {"logit_bias", "spaces_between_special_tokens"}


@asynccontextmanager
async def fake_router(
    kind: Kind, urls: Sequence[str], *, apart: bool, hidden: bool = False
) -> AsyncGenerator[RunningRouter, None]:
    """Run a fake router. With `hidden`, it lists one address, to which only the router could connect."""
    workers = dict.fromkeys(urls, "regular")
    if apart:
        workers = {url: "decode" if number else "prefill" for number, url in enumerate(urls)}
    async with aiohttp.ClientSession() as session, serving(_FakeRouter(kind, workers, session, hidden)) as url:

        async def add(worker: str) -> None:
            workers[worker] = "regular"

        async def remove(worker: str) -> None:
            del workers[worker]

        yield RunningRouter(url, add, remove)


class _FakeRouter:
    """A router that finds a session's worker by the header.

    vllm-router forwards unknown routes to one worker. If prefill and decode are apart, it sends a POST to one worker of
    each and refuses GETs. sglang-router forwards `/generate` without the fields outside its schema, and returns 404 for
    most other routes. A request to a dead worker gets a 500, and the worker gets no more requests; `/health` is good
    all the time. sglang-router notices only at the next chunk that a client has left.
    """

    def __init__(self, kind: Kind, workers: dict[str, str], session: aiohttp.ClientSession, hidden: bool) -> None:
        self._kind = kind
        self._workers = workers
        self._session = session
        self._hidden = hidden
        self._gone: set[str] = set()
        self._sessions: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body, _ = await _body(receive)
        answer = partial(_answer, send)
        if path == "/health":
            await answer(200, b"OK")
        elif path == "/workers":
            shown = {"http://127.0.0.1:9": "regular"} if self._hidden else self._workers
            rows = [{"url": url, "worker_type": role, "is_healthy": True} for url, role in shown.items()]
            await answer(200, orjson.dumps({"workers": rows, "total": len(rows)}))
        elif self._kind == "sglang" and path != "/generate":
            known = orjson.dumps({"object": "list", "data": [{"id": "unknown"}]})
            await answer(200 if path == "/v1/models" else 404, known if path == "/v1/models" else b"")
        elif "prefill" in self._workers.values():
            if method == "GET":
                await answer(405, b"Only POST requests are supported for transparent proxy")
            else:
                await self._forward_pair(scope, send, path, headers, orjson.loads(body))
        else:
            if self._kind == "sglang":
                body = orjson.dumps(_known(orjson.loads(body)))
            await self._forward(scope, send, self._pick("regular", headers), path, headers, body)

    def _pick(self, role: str, headers: dict[str, str]) -> str | None:
        there = [url for url, known in self._workers.items() if known == role and url not in self._gone]
        number = self._sessions.setdefault(headers.get(SESSION_HEADERS[self._kind], ""), len(self._sessions))
        return there[number % len(there)] if there else None

    async def _forward_pair(
        self, scope: Scope, send: Send, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        prefill, decode = self._pick("prefill", headers), self._pick("decode", headers)
        assert prefill is not None
        if self._kind == "vllm":
            first = body | {"stream": False, "kv_transfer_params": {"do_remote_decode": True}}
            if "sampling_params" in body:
                first["sampling_params"] = body["sampling_params"] | {"max_tokens": 1, "min_tokens": 1}
        else:
            body = _known(body) | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9001, "bootstrap_room": 1}
            first = body
        kept = headers if self._kind == "sglang" else {}  # vllm-router forwards neither session nor key
        async with self._session.post(prefill + path, data=orjson.dumps(first)) as response:
            await response.read()
        await self._forward(scope, send, decode, path, kept, orjson.dumps(body))

    async def _forward(
        self, scope: Scope, send: Send, worker: str | None, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        if worker is None:
            await _answer(send, 503, b"no worker")
            return
        kept = {name: value for name, value in headers.items() if name.startswith("x-")}
        query = scope["query_string"].decode()
        url = f"{worker}{path}?{query}" if query else worker + path
        left = disconnect_of(scope)
        started = False
        try:
            async with self._session.request(scope["method"], url, data=body, headers=kept) as response:
                if self._kind == "vllm":
                    left.notify(response.close)
                await send({"type": "http.response.start", "status": response.status, "headers": []})
                started = True
                async for chunk in response.content.iter_any():
                    if left.gone:
                        return
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientError:
            self._gone.add(worker)
            if not started:
                await _answer(send, 500, b"Request failed: error sending request")
            # Otherwise the server cuts the unfinished response.
        finally:
            left.notify(None)


def _known(body: dict[str, Any]) -> dict[str, Any]:
    sampling = {key: value for key, value in body["sampling_params"].items() if key not in DROPPED_SAMPLING}
    return {key: value for key, value in body.items() if key in KNOWN_TO_SGLANG} | {"sampling_params": sampling}


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
