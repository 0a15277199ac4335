"""The cost of one more turn in a long conversation: 500 new tokens on a history of 1k, 10k and 100k.

There are two figures. `own_ms` is the service's work alone, in this process: the processor time, over all threads, from
the request's bytes to the reply's (parsing, joining, rendering, calling the engine over HTTP, reading the reply,
storing the turn); waiting for the engine costs no processor time. `added_ms` is the client's view: the time of a turn
through a service in another process, minus the time of posting as many ids to the engine. All figures are medians, in
milliseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from yarl import URL

from bench.corpus import VOCABULARY, Corpus
from bench.dialogue import Dialogue
from bench.http import Client
from bench.parked import parked
from bench.processes import World, a_round_trip, world
from outrider.api.gateway import Gateway
from outrider.dialects.base import WireCall
from outrider.dialects.chat import CHAT_DIALECT
from outrider.engines.adapters.ids_json import body_with_ids, ids_json
from outrider.spec import EngineSpec
from outrider.wire.http_server import DISCONNECT, Disconnect

NEW_TOKENS = 500
REPLY_TOKENS = 20
ROUND_TRIPS = 300

Turn = Callable[[bytes], Awaitable[bytes]]
"""Sends the body of one request and returns the body of the reply."""
Timed = Callable[[Turn, bytes, str], Awaitable["Cost"]]
"""Times a turn. The arguments are the turn, the request's body, and the text with which the body ends."""


CALL = WireCall("POST", "/v1/chat/completions")


class Cost(msgspec.Struct, frozen=True):
    """The reply of a turn, and its duration in ms."""

    answer: bytes
    spent: dict[str, float]


class Point(msgspec.Struct, frozen=True):
    """A length of history in tokens, the number of turns measured, and the number of conversations."""

    history: int
    conversations: int
    turns: int


WARM = Point(1_000, 1, 8)
FULL = (Point(1_000, 24, 1), Point(10_000, 6, 4), Point(100_000, 1, 24))
QUICK = (Point(1_000, 12, 1), Point(10_000, 3, 4), Point(100_000, 1, 12))


async def run(quick: bool) -> dict[str, Any]:
    return await measure(QUICK if quick else FULL)


async def measure(points: Sequence[Point]) -> dict[str, Any]:
    sessions = sum(point.conversations for point in (WARM, *points))
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        corpus = await asyncio.to_thread(Corpus.make, Path(folder))
        async with (
            world(corpus, reply_tokens=REPLY_TOKENS, sessions=sessions) as processes,
            a_round_trip() as round_trip,
        ):
            await round_trip.take(ROUND_TRIPS)
            own = await _own_work(corpus, processes, points, sessions)
            await round_trip.take(ROUND_TRIPS)
            added = await _added_latency(corpus, processes, points)
    merged = [
        {"history_tokens": point.history} | work | extra for point, work, extra in zip(points, own, added, strict=True)
    ]
    return {
        "new_tokens": NEW_TOKENS,
        "reply_tokens": REPLY_TOKENS,
        "points": merged,
        "round_trip_ms": round_trip.median_ms(),
        "growth": merged[-1]["own_ms"] / merged[0]["own_ms"],
    }


async def _own_work(corpus: Corpus, processes: World, points: Sequence[Point], sessions: int) -> list[dict[str, float]]:
    """Measure for each point the processor time of a turn, and of three of its parts separately."""

    async def timed(turn: Turn, body: bytes, text: str) -> Cost:
        begun = time.process_time()
        answer = await turn(body)
        return Cost(answer, {"own_ms": 1000 * (time.process_time() - begun)} | _parts(corpus, body, text))

    engine = EngineSpec(kind="vllm", url=processes.upstream.urls[0])
    async with parked(corpus.folder, engine, sessions=sessions) as parking:
        gateway = Gateway(parking.opened.own_node)
        turns = iter([asgi_turn(gateway, URL(url).path, CALL) for url in parking.base_urls])
        return await _in_turn(corpus, points, turns, timed)


def _parts(corpus: Corpus, body: bytes, text: str) -> dict[str, float]:
    ids = np.arange(len(body) * NEW_TOKENS // len(text), dtype=np.int32) % VOCABULARY
    return {
        "parse_ms": _cpu_ms(lambda: CHAT_DIALECT.parse(CALL, body, {})),
        "tokenizer_ms": _cpu_ms(lambda: corpus.tokenizer.encode(text)),
        "engine_body_ms": _cpu_ms(lambda: ids_json(ids)),
    }


def _cpu_ms(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return 1000 * (time.process_time() - begun)


async def _added_latency(corpus: Corpus, processes: World, points: Sequence[Point]) -> list[dict[str, float]]:
    """Measure for each point the time of a turn, the time of posting the same number of ids directly, and the
    difference."""
    engine = processes.upstream.urls[0] + "/inference/v1/generate"
    async with Client() as client:

        async def timed(turn: Turn, body: bytes, text: str) -> Cost:
            ids = _direct_body(len(body) * NEW_TOKENS // len(text))
            begun = time.perf_counter()
            await _post(client, engine, ids)
            middle = time.perf_counter()
            answer = await turn(body)
            through = 1000 * (time.perf_counter() - middle)
            return Cost(answer, {"direct_ms": 1000 * (middle - begun), "through_ms": through})

        turns = iter([_http_turn(client, url) for url in processes.gateway.urls])
        found = await _in_turn(corpus, points, turns, timed)
    return [medians | {"added_ms": medians["through_ms"] - medians["direct_ms"]} for medians in found]


async def _in_turn(
    corpus: Corpus, points: Sequence[Point], turns: Iterator[Turn], timed: Timed
) -> list[dict[str, float]]:
    """Return the medians of each point. The conversations are grown first. Then one turn of every point is timed after
    the other, so that the machine's other load affects all points alike."""
    await _grown(corpus, WARM.history, next(turns))
    grown = [[await _grown(corpus, point.history, next(turns)) for _ in range(point.conversations)] for point in points]
    spent: list[list[dict[str, float]]] = [[] for _ in points]
    for number in range(max(point.conversations * point.turns for point in points)):
        for point, talks, found in zip(points, grown, spent, strict=True):
            if number < point.conversations * point.turns:
                talk = talks[number % point.conversations]
                text = corpus.tokens(NEW_TOKENS)
                cost = await timed(talk.turn, talk.dialogue.ask(text), text)
                talk.dialogue.answer(cost.answer)
                found.append(cost.spent)
    return [{name: statistics.median(one[name] for one in found) for name in found[0]} for found in spent]


class Talk(msgspec.Struct, frozen=True):
    """A conversation, and the function that makes its turns."""

    dialogue: Dialogue
    turn: Turn


async def _grown(corpus: Corpus, history: int, turn: Turn) -> Talk:
    """Make a conversation of at least `history` tokens."""
    dialogue = Dialogue(max_tokens=REPLY_TOKENS)
    while dialogue.answer(await turn(dialogue.ask(corpus.tokens(NEW_TOKENS)))) < history:
        """It grows."""
    return Talk(dialogue, turn)


def _direct_body(tokens: int) -> bytes:
    sampling = {"max_tokens": REPLY_TOKENS, "temperature": 1.0, "logprobs": 0}
    ids = np.arange(tokens, dtype=np.int32) % VOCABULARY
    return b"".join(body_with_ids({"sampling_params": sampling, "stream": True}, "token_ids", ids))


def _http_turn(client: Client, base_url: str) -> Turn:
    async def turn(body: bytes) -> bytes:
        return await _post(client, base_url + CALL.path, body)

    return turn


async def _post(client: Client, url: str, body: bytes) -> bytes:
    async with client.post(url, body) as response:
        answer, status = await response.whole(), response.status
    if status != 200:
        raise RuntimeError(f"{url} answered {status}: {answer[-500:]!r}")
    return answer


def asgi_turn(gateway: Gateway, prefix: str, call: WireCall) -> Turn:
    """Return a turn that calls the gateway in this process, as its server would. `prefix` is the part of the URL's path
    that names the session."""
    head = {
        "type": "http",
        "method": call.method,
        "path": prefix + call.path,
        "query_string": call.query,
        "headers": call.headers,
    }

    async def turn(body: bytes) -> bytes:
        scope = {**head, "extensions": {DISCONNECT: Disconnect()}}
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[bytes] = []

        async def receive() -> MutableMapping[str, Any]:
            if waiting:
                return waiting.pop()
            hung_up: asyncio.Future[MutableMapping[str, Any]] = asyncio.get_running_loop().create_future()
            return await hung_up  # this client never hangs up

        async def send(message: MutableMapping[str, Any]) -> None:
            if message.get("status", 200) != 200:
                raise RuntimeError(f"the gateway answered {message['status']}")
            sent.append(message.get("body", b""))

        await gateway(scope, receive, send)
        return b"".join(sent)

    return turn
