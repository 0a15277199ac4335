"""Compares the four dialects: the time that the gateway adds to a call, the cost of one more turn on a long history,
and the cost of a streamed token.

The added time is measured as in `gateway`, with streamed calls one at a time. The cost of a turn is `own_ms` of the
benchmark `turns`, in conversations that grow as with each dialect's clients. The cost of a streamed token is measured
by `streams`. In all three the dialects alternate, in an order that rotates with every round, so that the machine's
other load affects them alike. The wire formats are in `speakers`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from yarl import URL

from bench import gateway, streams
from bench.corpus import Corpus
from bench.gateway import Load, Requests, Spent, Through, Way, compared
from bench.http import Client
from bench.parked import Parking, parked
from bench.processes import upstream, world
from bench.speakers import DIALECTS, STORED_RESPONSES, Speaker
from bench.turns import NEW_TOKENS, REPLY_TOKENS, WARM, Point, asgi_turn
from outrider.api.gateway import Gateway
from outrider.spec import EngineSpec

CONVERSING = (*DIALECTS, STORED_RESPONSES)
DIRECT = Way(Through.NOTHING, streamed=True)
WAYS = (DIRECT, *(Way(Through.GATEWAY, streamed=True, speaker=speaker) for speaker in DIALECTS))

T = TypeVar("T")


class Plan(msgspec.Struct, frozen=True):
    """The amount of measurement: `latency_rounds` rounds of `latency_block` calls, turns at each length of history in
    `points`, and `reply_rounds` rounds of one reply of `reply_tokens` tokens."""

    latency_rounds: int
    latency_block: int
    points: tuple[Point, ...]
    reply_tokens: int
    reply_rounds: int
    warm_requests: int = 50


FULL = Plan(
    latency_rounds=20,
    latency_block=25,
    points=(Point(1_000, 24, 1), Point(100_000, 1, 24)),
    reply_tokens=4_000,
    reply_rounds=20,
)
QUICK = Plan(
    latency_rounds=5,
    latency_block=20,
    points=(Point(1_000, 8, 1), Point(100_000, 1, 8)),
    reply_tokens=2_000,
    reply_rounds=10,
    warm_requests=20,
)


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        return {
            "calls": await _calls(corpus, plan),
            "turns": await _turns(corpus, plan.points),
            "streams": streams.measure(corpus, tokens=plan.reply_tokens, rounds=plan.reply_rounds),
        }


async def _calls(corpus: Corpus, plan: Plan) -> dict[str, Any]:
    """Measure for each dialect the percentiles of the time until the first and the last byte, and the time that the
    gateway adds to each."""
    spent: dict[Way, list[Spent]] = {way: [] for way in WAYS}
    sessions = gateway.CONCURRENCY
    async with (
        world(corpus, reply_tokens=gateway.REPLY_TOKENS, sessions=sessions) as processes,
        Client() as client,
    ):
        load = Load(client, Requests(corpus, processes))
        for way in WAYS:
            await load.one_by_one(way, plan.warm_requests)
        for ways in _rotated(WAYS, plan.latency_rounds):
            for way in ways:
                spent[way] += await load.one_by_one(way, plan.latency_block)
    return {
        "prompt_characters": gateway.PROMPT_CHARACTERS,
        "reply_tokens": gateway.REPLY_TOKENS,
        "latency": {
            name: {byte: compared(spent[DIRECT], spent[way], byte) for byte in ("first", "last")}
            for name, way in zip(("direct", *(speaker.name for speaker in DIALECTS)), WAYS, strict=True)
        },
    }


async def _turns(corpus: Corpus, points: Sequence[Point]) -> dict[str, Any]:
    """Measure the processor time of a turn and the size of its request, for each length of history and kind of
    conversation."""
    found = []
    async with _service(corpus, points) as parking:
        entrance = Gateway(parking.opened.own_node)
        prefixes = iter([URL(url).path for url in parking.base_urls])
        for point in (WARM, *points):
            took: dict[str, list[Took]] = {speaker.name: [] for speaker in CONVERSING}
            for speakers in _rotated(CONVERSING, point.conversations):
                exchanges = [Exchange(corpus, speaker, entrance, next(prefixes)) for speaker in speakers]
                for exchange in exchanges:
                    await exchange.grow(point.history)
                for order in _rotated(exchanges, point.turns):
                    for exchange in order:
                        took[exchange.name].append(await exchange.turn())
            found.append({"history_tokens": point.history} | _medians(took))
    return {"new_tokens": NEW_TOKENS, "reply_tokens": REPLY_TOKENS, "points": found[1:]}


class Took(msgspec.Struct, frozen=True):
    """Processor time of a turn in milliseconds, and the bytes of its request."""

    own_ms: float
    request_bytes: int


class Exchange:
    """One conversation with the gateway in this process. `prefix` is the part of the URL's path that names the
    session."""

    def __init__(self, corpus: Corpus, speaker: Speaker, entrance: Gateway, prefix: str) -> None:
        self.name = speaker.name
        self._corpus = corpus
        self._talk = speaker.talk(max_tokens=REPLY_TOKENS)
        self._send = asgi_turn(entrance, prefix, speaker.whole)
        self._history = 0

    async def grow(self, tokens: int) -> None:
        """Add turns until the history has the wanted number of tokens."""
        while self._history < tokens:
            await self.turn()

    async def turn(self) -> Took:
        body = self._talk.ask(self._corpus.tokens(NEW_TOKENS))
        begun = time.process_time()
        answer = await self._send(body)
        own = time.process_time() - begun
        self._history = self._talk.answer(answer)
        return Took(1000 * own, len(body))


@asynccontextmanager
async def _service(corpus: Corpus, points: Sequence[Point]) -> AsyncIterator[Parking]:
    """Run a service in this process, with a session for each conversation. The service's engine is in another
    process."""
    sessions = len(CONVERSING) * sum(point.conversations for point in (WARM, *points))
    async with upstream(corpus, reply_tokens=REPLY_TOKENS) as process:
        engine = EngineSpec(kind="vllm", url=process.urls[0])
        async with parked(corpus.folder, engine, sessions=sessions) as parking:
            yield parking


def _medians(took: dict[str, list[Took]]) -> dict[str, Any]:
    return {
        "own_ms": {name: statistics.median(one.own_ms for one in all) for name, all in took.items()},
        "request_bytes": {name: statistics.median(one.request_bytes for one in all) for name, all in took.items()},
    }


def _rotated(items: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """Yield a list of the items per round. The lists are rotated: `abc`, `bca`, `cab`, `abc`, and so on."""
    for number in range(rounds):
        at = number % len(items)
        yield [*items[at:], *items[:at]]
