"""Tokens per second through a service of several processes, compared with direct calls to the same engine.

Processes: this client, the service's, and a scripted engine with the pace of a batch engine (`batch_engine.py`). A call
through the service is a Chat Completions request with a fresh prompt; a direct call posts the same ids to the engine's
own route. All replies are streamed. Each block of one kind is next to a block of the other kind. In a block a number of
clients each make one call after another. The calls have different lengths, so that they do not end together. Tokens are
counted after about the first call of each client, while all clients are at work. On few cores the processes of all
sides share them, and the rate is bound by the machine. An engine that puts several tokens into an event, or a slower
engine, leaves cores free.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.batch_engine import LEAST_STEP
from bench.corpus import Corpus
from bench.http import Client
from bench.processes import Process, batch_engine, service_of
from bench.speakers import CHAT
from outrider.lab.fakes.engine_servers.app import EngineProtocol
from outrider.messages import Message, Role
from outrider.tokens.rendering.renderer import Renderer, make_renderer

PROCESSES = 4
PROMPT_CHARACTERS = 2048
REPLY_TOKENS = range(50, 151)
SHORT_REPLY = 10
"""Number of tokens in a second, shorter kind of reply. The difference between the two kinds separates the cost of a
call from the cost of a token."""
ROUTES: dict[EngineProtocol, str] = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


class Engine(msgspec.Struct, frozen=True):
    """A scripted engine: its protocol, its tokens per second for all requests together, and its tokens per event."""

    protocol: EngineProtocol
    tokens_per_second: int
    event_tokens: int = 1


class Plan(msgspec.Struct, frozen=True):
    """Engines, the numbers of concurrent clients for each, and the seconds of each block."""

    engines: dict[Engine, tuple[int, ...]]
    seconds: float


ONE_BY_ONE = Engine("vllm", 10_000)
EIGHT_TOGETHER = Engine("vllm", 10_000, event_tokens=8)
SLOWER = Engine("vllm", 4_000)
FULL = Plan(
    engines={
        ONE_BY_ONE: (1, 64, 256),
        EIGHT_TOGETHER: (1, 64, 256),
        SLOWER: (64,),
        Engine("sglang", 10_000): (64,),
    },
    seconds=1.0,
)
QUICK = Plan(engines={ONE_BY_ONE: (1, 64), EIGHT_TOGETHER: (64,)}, seconds=0.7)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        for engine, levels in plan.engines.items():
            async with _load(corpus, engine, max(levels)) as load:
                for direct in (True, False):
                    # This block only warms up the connections and caches.
                    await load.block(max(levels), 0.1, direct=direct, tokens=(SHORT_REPLY,))
                for level in levels:
                    points.append(msgspec.to_builtins(engine) | await _point(load, level, plan.seconds))
                if not parts:
                    parts = _parts(
                        points[-1], await load.block(levels[-1], plan.seconds, direct=False, tokens=(SHORT_REPLY,))
                    )
    return {
        "processes": PROCESSES,
        "prompt_characters": PROMPT_CHARACTERS,
        "reply_tokens": [REPLY_TOKENS[0], REPLY_TOKENS[-1]],
        "service_us": parts,
        "points": points,
    }


@asynccontextmanager
async def _load(corpus: Corpus, engine: Engine, sessions: int) -> AsyncIterator[Load]:
    async with (
        batch_engine(
            corpus,
            engine.protocol,
            tokens_per_second=engine.tokens_per_second,
            event_tokens=engine.event_tokens,
            reply_tokens=REPLY_TOKENS.stop,
        ) as upstream,
        service_of(
            corpus, upstream.urls[0], sessions=sessions, protocol=engine.protocol, processes=PROCESSES
        ) as service,
        Client() as client,
    ):
        yield Load(client, Requests(corpus, engine.protocol, upstream.urls[0], service.urls), upstream, service, engine)


class Request(msgspec.Struct, frozen=True):
    url: str
    body: bytes
    tokens: int


class Requests:
    """Makes requests, each with a fresh prompt, for the sessions in turn."""

    def __init__(self, corpus: Corpus, protocol: EngineProtocol, engine_url: str, sessions: Sequence[str]) -> None:
        self._corpus = corpus
        self._protocol = protocol
        self._engine_url = engine_url
        self._renderer: Renderer = make_renderer(corpus.tokenizer, "qwen3")
        self._sessions = itertools.cycle(sessions)
        self._ids = itertools.count()
        self._random = random.Random(1)

    def make(self, count: int, *, direct: bool, tokens: Sequence[int]) -> Iterator[Request]:
        make = self._direct if direct else self._through
        return iter(
            [make(self._corpus.text(characters=PROMPT_CHARACTERS), self._random.choice(tokens)) for _ in range(count)]
        )

    def _through(self, text: str, tokens: int) -> Request:
        body = CHAT.talk(max_tokens=tokens, stream=True).ask(text)
        return Request(next(self._sessions) + CHAT.target(True), body, tokens)

    def _direct(self, text: str, tokens: int) -> Request:
        ids = self._renderer.render([Message(role=Role.USER, content=text)], ())
        name = f"direct-{next(self._ids):026}"
        stop_ids = list(self._renderer.stop_ids)
        body: dict[str, Any]
        if self._protocol == "vllm":
            params = {"max_tokens": tokens, "temperature": 1.0, "stop_token_ids": stop_ids, "logprobs": 0}
            body = {"request_id": name, "token_ids": ids, "sampling_params": params, "stream": True}
        else:
            params = {"max_new_tokens": tokens, "temperature": 1.0, "stop_token_ids": stop_ids}
            body = {"rid": name, "input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": True}
        return Request(self._engine_url + ROUTES[self._protocol], orjson.dumps(body), tokens)


class Mark(msgspec.Struct, frozen=True):
    """Totals at one time: bytes received, calls ended, processor seconds of each side."""

    at: float
    arrived: int
    calls: int
    cpu: dict[str, float]


class Found(msgspec.Struct, frozen=True):
    """The figures of one block: tokens and calls per second, and the processor seconds of each side per second."""

    tokens_per_second: float
    calls_per_second: float
    cores: dict[str, float]


class Load:
    """Clients of one engine and of the service in front of it."""

    def __init__(self, client: Client, requests: Requests, upstream: Process, service: Process, engine: Engine) -> None:
        self._client = client
        self._requests = requests
        self._upstream = upstream
        self._service = service
        self._engine = engine
        self._arrived = 0
        self._calls = self._call_bytes = self._call_tokens = 0

    async def block(self, level: int, seconds: float, *, direct: bool, tokens: Sequence[int] = REPLY_TOKENS) -> Found:
        """Run `level` clients at once. Their calls and tokens are counted for `seconds`. The count begins after the
        minimum duration of one call."""
        step = max(LEAST_STEP, level / self._engine.tokens_per_second)
        warm = step * statistics.mean(tokens)
        count = level + int(1.5 * level * (warm + seconds) / warm)
        requests = self._requests.make(count, direct=direct, tokens=tokens)
        self._calls = self._call_bytes = self._call_tokens = 0
        async with asyncio.TaskGroup() as group:
            until = time.perf_counter() + warm + seconds
            for _ in range(level):
                group.create_task(self._send_until(until, requests))
            await asyncio.sleep(warm)
            begun = self._mark()
            await asyncio.sleep(max(0.0, until - time.perf_counter()))
            ended = self._mark()
        return self._found(begun, ended)

    async def _send_until(self, until: float, requests: Iterator[Request]) -> None:
        for request in requests:
            if time.perf_counter() > until:
                break
            await self._send(request)

    async def _send(self, request: Request) -> None:
        size = 0
        part = last = b""
        async with self._client.post(request.url, request.body) as response:
            while part := await response.arrived():
                size += len(part)
                self._arrived += len(part)
                last = part
            status = response.status
        if status != 200 or not last.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{request.url} answered {status}: {last[-500:]!r}")
        self._calls += 1
        self._call_bytes += size
        self._call_tokens += request.tokens

    def _mark(self) -> Mark:
        own = resource.getrusage(resource.RUSAGE_SELF)
        cpu = {
            "client": own.ru_utime + own.ru_stime,
            "service": self._service.cpu_seconds_of_all(),
            "engine": self._upstream.cpu_seconds(),
        }
        return Mark(time.perf_counter(), self._arrived, self._calls, cpu)

    def _found(self, begun: Mark, ended: Mark) -> Found:
        seconds = ended.at - begun.at
        # Bytes are converted to tokens, because all replies have the same number of bytes per token at every mark.
        tokens = (ended.arrived - begun.arrived) * self._call_tokens / self._call_bytes
        return Found(
            tokens_per_second=tokens / seconds,
            calls_per_second=(ended.calls - begun.calls) / seconds,
            cores={side: (late - begun.cpu[side]) / seconds for side, late in ended.cpu.items()},
        )


async def _point(load: Load, level: int, seconds: float) -> dict[str, Any]:
    through = await load.block(level, seconds, direct=False)
    direct = await load.block(level, seconds, direct=True)
    return {
        "at_once": level,
        "ratio": through.tokens_per_second / direct.tokens_per_second,
        "direct": _summary(direct),
        "through": _summary(through),
    }


def _summary(block: Found) -> dict[str, Any]:
    return {
        "tokens_per_second": block.tokens_per_second,
        "cores": block.cores,
        "us_per_token": {side: 1e6 * used / block.tokens_per_second for side, used in block.cores.items()},
    }


def _parts(point: dict[str, Any], short: Found) -> dict[str, float]:
    """Return the service's processor time for a call and for each of its tokens, in microseconds, from replies of two
    lengths."""
    length = statistics.mean(REPLY_TOKENS)
    whole = length * point["through"]["us_per_token"]["service"]
    whole_short = 1e6 * SHORT_REPLY * short.cores["service"] / short.tokens_per_second
    token = (whole - whole_short) / (length - SHORT_REPLY)
    return {"token": token, "call": whole_short - SHORT_REPLY * token}
