"""The time that the gateway adds to a model call, compared with two simpler hops and with the same call made
directly.

Processes: this client, the service, the engine, and the two floors (`floors.py`). A gateway request is a fresh 2 KB
prompt, here in Chat Completions; the other requests post the ids of the same rendered prompt. Blocks of all kinds of
request alternate, so that the machine's other load affects them alike. Durations are milliseconds, rates are per
second.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.corpus import Corpus
from bench.http import Client
from bench.processes import Floors, Process, World, floors, world
from bench.speakers import CHAT, Speaker
from outrider.messages import Message, Role
from outrider.tokens.rendering.renderer import Renderer, make_renderer

PROMPT_CHARACTERS = 2048
REPLY_TOKENS = 16
CONCURRENCY = 32
PERCENTILES = (50, 95, 99)


class Plan(msgspec.Struct, frozen=True):
    """The amount of measurement: the numbers of rounds and of requests in each block. In blocks for latency, requests
    are made one after another; in blocks for rates, `CONCURRENCY` at once."""

    latency_rounds: int
    latency_block: int
    rate_rounds: int
    rate_block: int
    warm_requests: int = 100


FULL = Plan(latency_rounds=24, latency_block=25, rate_rounds=6, rate_block=400)
QUICK = Plan(latency_rounds=6, latency_block=25, rate_rounds=2, rate_block=200)


class Request(msgspec.Struct, frozen=True):
    """One HTTP call, ready to be sent. `last` is a byte string that only the last event of a complete stream
    contains."""

    url: str
    body: bytes
    streamed: bool
    last: bytes = CHAT.last


class Spent(msgspec.Struct, frozen=True):
    """Milliseconds from sending a request to the first and to the last byte of its reply."""

    first: float
    last: float


class Through(StrEnum):
    """The hop that a request passes on its way to the engine."""

    NOTHING = "direct"
    RELAY = "relay"
    PROXY = "proxy"
    GATEWAY = "gateway"


class Way(msgspec.Struct, frozen=True):
    """One kind of request. The engine's work does not depend on the client's dialect."""

    through: Through
    streamed: bool
    speaker: Speaker = CHAT


WAYS = tuple(Way(through, streamed) for streamed in (True, False) for through in Through)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        async with (
            world(corpus, reply_tokens=REPLY_TOKENS, sessions=CONCURRENCY) as processes,
            floors(processes.upstream.urls[0]) as below,
            Client() as client,
        ):
            load = Load(client, Requests(corpus, processes, below))
            for way in WAYS:
                await load.one_by_one(way, plan.warm_requests)
                await load.at_once(way, plan.warm_requests)
            return {
                "prompt_characters": PROMPT_CHARACTERS,
                "reply_tokens": REPLY_TOKENS,
                "latency": await _latency(load, plan),
                "rate": await _rate(load, plan, processes, below),
            }


class Requests:
    """Makes requests, each with a fresh prompt."""

    def __init__(self, corpus: Corpus, processes: World, below: Floors | None = None) -> None:
        self._corpus = corpus
        self._renderer: Renderer = make_renderer(corpus.tokenizer, "qwen3")
        self._engines = {Through.NOTHING: processes.upstream.urls[0]}
        if below is not None:
            self._engines |= {Through.RELAY: below.relay.urls[0], Through.PROXY: below.proxy.urls[0]}
        self._gateways = itertools.cycle(processes.gateway.urls)
        self._ids = itertools.count()

    def make(self, way: Way, count: int) -> list[Request]:
        texts = [self._corpus.text(characters=PROMPT_CHARACTERS) for _ in range(count)]
        make = self._to_gateway if way.through is Through.GATEWAY else self._to_engine
        return [make(text, way) for text in texts]

    def _to_gateway(self, text: str, way: Way) -> Request:
        speaker = way.speaker
        body = speaker.talk(max_tokens=REPLY_TOKENS, stream=way.streamed).ask(text)
        return Request(next(self._gateways) + speaker.target(way.streamed), body, way.streamed, speaker.last)

    def _to_engine(self, text: str, way: Way) -> Request:
        body = {
            "request_id": f"direct-{next(self._ids):026}",
            "token_ids": self._renderer.render([Message(role=Role.USER, content=text)], ()),
            "sampling_params": {
                "max_tokens": REPLY_TOKENS,
                "temperature": 1.0,
                "stop_token_ids": list(self._renderer.stop_ids),
                "logprobs": 0,
            },
            "stream": way.streamed,
            "stream_options": {"include_usage": True},
        }
        return Request(self._engines[way.through] + "/inference/v1/generate", orjson.dumps(body), way.streamed)


class Load:
    """Sends requests and measures their durations."""

    def __init__(self, client: Client, requests: Requests) -> None:
        self._client = client
        self._requests = requests

    async def one_by_one(self, way: Way, count: int) -> list[Spent]:
        return [await self._send(request) for request in self._requests.make(way, count)]

    async def at_once(self, way: Way, count: int) -> float:
        """Send `count` requests, at any time `CONCURRENCY` of them in flight. Returns the duration in seconds."""
        waiting = iter(self._requests.make(way, count))
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._send_all(waiting))
        return time.perf_counter() - begun

    async def _send_all(self, waiting: Iterator[Request]) -> None:
        for request in waiting:
            await self._send(request)

    async def _send(self, request: Request) -> Spent:
        first = 0.0
        parts: list[bytes] = []
        begun = time.perf_counter()
        async with self._client.post(request.url, request.body) as response:
            while part := await response.arrived():
                first = first or time.perf_counter()
                parts.append(part)
            last = time.perf_counter()
            status = response.status
        if status != 200 or not _is_whole(request, b"".join(parts)):
            raise RuntimeError(f"{request.url} answered {status}: {b''.join(parts)[-500:]!r}")
        return Spent((first - begun) * 1000, (last - begun) * 1000)


def _is_whole(request: Request, answer: bytes) -> bool:
    if request.streamed:
        return answer.endswith(b"\n\n") and request.last in answer[answer.rfind(b"\n\n", 0, -2) + 1 :]
    return answer.startswith(b"{") and answer.endswith(b"}")


async def _latency(load: Load, plan: Plan) -> dict[str, Any]:
    """Measure requests one at a time. Returns the figures of `compared` for streamed and whole replies, for the first
    and the last byte, and for each hop."""
    spent: dict[Way, list[Spent]] = {way: [] for way in WAYS}
    for number in range(plan.latency_rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            spent[way] += await load.one_by_one(way, plan.latency_block)
    return {
        _name(streamed): {
            byte: {
                through: compared(spent[Way(Through.NOTHING, streamed)], spent[Way(through, streamed)], byte)
                for through in Through
            }
            for byte in ("first", "last")
        }
        for streamed in (True, False)
    }


def compared(direct: Sequence[Spent], through: Sequence[Spent], byte: str) -> dict[str, dict[str, float]]:
    """Return percentiles of the time until the "first" or the "last" byte, in milliseconds, and the excess over direct
    calls."""
    without, within = _cuts(direct, byte), _cuts(through, byte)
    return {"spent_ms": within, "added_ms": {name: within[name] - without[name] for name in within}}


def _cuts(spent: Sequence[Spent], byte: str) -> dict[str, float]:
    cuts = statistics.quantiles([getattr(one, byte) for one in spent], n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}


async def _rate(load: Load, plan: Plan, processes: World, below: Floors) -> dict[str, Any]:
    """Measure the requests per second at `CONCURRENCY`, and the processor time of each process per request."""
    between = {Through.RELAY: below.relay, Through.PROXY: below.proxy, Through.GATEWAY: processes.gateway}
    rates: dict[Way, list[float]] = {way: [] for way in WAYS}
    used: dict[Way, dict[str, float]] = {way: dict.fromkeys(("client", "between", "engine"), 0.0) for way in WAYS}
    for number in range(plan.rate_rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            before = _cpu(processes.upstream, between.get(way.through))
            seconds = await load.at_once(way, plan.rate_block)
            after = _cpu(processes.upstream, between.get(way.through))
            rates[way].append(plan.rate_block / seconds)
            for name, late in after.items():
                used[way][name] += late - before[name]
    requests = plan.rate_rounds * plan.rate_block
    return {"concurrency": CONCURRENCY} | {
        _name(streamed): {
            through: {
                "per_second": statistics.median(rates[Way(through, streamed)]),
                "cpu_ms": {name: 1000 * seconds / requests for name, seconds in used[Way(through, streamed)].items()},
            }
            for through in Through
        }
        for streamed in (True, False)
    }


def _cpu(engine: Process, between: Process | None) -> dict[str, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "client": own.ru_utime + own.ru_stime,
        "between": 0.0 if between is None else between.cpu_seconds(),
        "engine": engine.cpu_seconds(),
    }


def _name(streamed: bool) -> str:
    return "streamed" if streamed else "whole"
