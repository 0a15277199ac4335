"""A fuzzer of the relay: no message of one worker affects another worker's generation or reveals a bug."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engines.contract import chunks_of
from outrider.engines.base import EngineHealth, GenerateRequest
from outrider.engines.pool.checks import LOWEST, ROUNDING
from outrider.engines.relay.engine import RelayEngine
from outrider.engines.relay.messages import (
    TO_WORKER,
    Failed,
    StartGeneration,
    Version,
    WorkerCall,
    WorkerReply,
    WorkerWelcome,
)
from outrider.errors import Boundary, Conflict, EngineError, ErrorRecord
from outrider.wire.link_protocol import Beat, encode
from support.odd_values import ODD, mutated
from support.relay import relay_served
from support.waiting import until

from .test_relay import Counter, attached, end_of, gathered, hello, relay, request, tokens


def honest_words(generation: int, call: int, number: int) -> list[dict[str, Any]]:
    """Messages that a worker may send, in their encoded form."""
    record = ErrorRecord(boundary=Boundary.ENGINE, code="engine_unavailable", message="")
    words = [
        tokens(generation, number),
        tokens(generation, number, ids=[1, 2], **end_of(number + 1), prompt_ids=b"1234", cached_tokens=1),
        tokens(generation, number, stop_match=7, prompt_tokens=3),
        Failed(generation=generation, number=number, error=record),
        Failed(generation=generation, number=number, error=Conflict("x").record()),
        WorkerReply(call=call, health=EngineHealth(ok=True, context_tokens=100)),
        WorkerReply(call=call, error=record),
        WorkerReply(call=call, error=Conflict("x").record()),
        WorkerReply(call=call, ids=b"1234"),
        Version(number),
        Beat(),
        hello(),
    ]
    return [msgspec.msgpack.decode(encode(word), strict=False) for word in words]


WORDS = st.tuples(st.integers(0, 11), st.integers(0, 12), st.integers(0, len(ODD) - 1), st.booleans())
DEEP = st.integers(1, 60_000).map(lambda depth: b"\x82\xa4type\xa4beat\xa1x" + b"\x91" * depth + b"\xc0")
SAID = WORDS | st.binary(max_size=40) | DEEP


async def misbehave(url: str, words: list[Any], *, greets: bool) -> None:
    """Send these messages in reply to requests, or in place of the greeting, until the service hangs up."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/x", max_msg_size=0) as websocket:
        if greets:
            await websocket.send_bytes(encode(hello(name="bad")))
        generation = call = 0
        for number, word in enumerate(words, 1):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    while not generation and (message := await websocket.receive()).type is aiohttp.WSMsgType.BINARY:
                        match TO_WORKER.decode(message.data):
                            case StartGeneration(generation=asked):
                                generation = asked
                            case WorkerCall(call=asked):
                                call = asked
                            case WorkerWelcome() | _:
                                pass
            said: Any = word
            if not isinstance(word, bytes):
                which, place, odd, changed = word
                said = honest_words(generation, call, number)[which]
                said = msgspec.msgpack.encode(mutated(said, place, ODD[odd]) if changed else said)
            with suppress(ConnectionError):  # it was cut off
                await websocket.send_bytes(said)
        await websocket.close()


def arrived(engine: RelayEngine, saying: asyncio.Task[None]) -> bool:
    """Whether the misbehaving worker is attached beside the good one, or has been cut off."""
    return len(engine._workers) > 1 or saying.done()


async def read(engine: RelayEngine, asked: GenerateRequest) -> None:
    """Read a generation of any worker: its chunks are valid, and it ends well or with an EngineError."""
    with suppress(EngineError):
        for chunk in await chunks_of(engine.generate(asked)):
            assert len(chunk.ids) == len(chunk.logprobs)
            assert all(LOWEST < value <= ROUNDING for value in chunk.logprobs)
            assert all(0 <= token < 1 << 31 for token in chunk.ids)


@pytest.mark.deep
@settings(
    deadline=None,
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(workers=st.lists(st.tuples(st.booleans(), st.lists(SAID, max_size=8)), min_size=2, max_size=8))
def test_whatever_workers_say_the_others_go_on(
    caplog: pytest.LogCaptureFixture, workers: list[tuple[bool, list[Any]]]
) -> None:
    """The workers send messages that are almost valid, and some that are invalid. A good worker serves all the time."""
    caplog.clear()

    async def run() -> None:
        engine = relay(resume_seconds=0.2)
        async with relay_served(engine) as url, attached(url, Counter()), asyncio.TaskGroup() as group:
            await until(lambda: bool(engine._workers))
            for greets, words in workers:
                saying = group.create_task(misbehave(url, words, greets=greets))
                await until(partial(arrived, engine, saying))
                async with asyncio.timeout(30):
                    await asyncio.gather(*(read(engine, request(tokens=8)) for _ in range(4)), engine.health())
                    await saying
            await until(lambda: len(engine._workers) == 1)
            async with asyncio.timeout(30):
                assert (await engine.health()).ok
                await gathered(engine, request())

    asyncio.run(run())
    bugs = [record.exc_info[1] for record in caplog.records if record.exc_info]
    # The server of the test is cancelled while the last connections end.
    assert [bug for bug in bugs if not isinstance(bug, asyncio.CancelledError)] == []
