"""The gateway with odd, broken and ordinary requests in a few sessions of each dialect; `make test-nightly` and `make
fuzz` send many more.

`python scripts/fuzz_gateway.py --dialect chat --seed 1 --session 7` repeats one session of a failing run. The other
tests here check that the fuzzer finds errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.trajectory import Turn, pack_logprobs, unpack_logprobs
from support.fuzz.audit import audited
from support.fuzz.campaign import Campaign
from support.fuzz.chat import Chat
from support.fuzz.command import SPEAKERS
from support.fuzz.player import Player, Tally
from support.fuzz.shrink import smaller
from support.fuzz.speaker import Manner, Request, Violation
from support.fuzz.stage import Ground, Stage, a_stage
from support.fuzz.verdict import as_json, as_table
from support.fuzz.wire import exchange

SEED = 2
REQUEST = Request(method="POST", path="/v1/chat/completions")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("requests", [250, pytest.param(3_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dialect", SPEAKERS)
async def test_no_request_breaks_the_gateway_or_loses_a_token(tmp_path: Path, dialect: str, requests: int) -> None:
    tally = await Campaign(SPEAKERS[dialect](), Ground(tmp_path), SEED).run(requests)
    assert not tally.failures, as_table(dialect, SEED, tally, 0.0)
    assert tally.requests == requests
    assert tally.statuses[200] > requests * 0.4
    assert tally.statuses[400] > requests * 0.1
    assert tally.sampled == tally.trained + tally.masked + tally.dropped
    assert tally.trained > 0
    # Tokens are dropped only after certain sequences of requests. Whether 250 requests have one depends on the speed of
    # the machine, because requests that come too fast get 429.
    assert tally.dropped > 0 or requests < 1000
    assert set(tally.joins) == {"root", "append", "fork", "retry"}


async def played(stage: Stage, dice: random.Random) -> None:
    player = Player(Chat(), stage, dice, Tally())
    for _ in range(30):
        await player.play(1)


def shortened(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, output_ids=turn.output_ids[:-4], logprobs=turn.logprobs[:-8])


def other_logprobs(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, logprobs=pack_logprobs(unpack_logprobs(turn.logprobs)[::-1] - 1))


def other_version(turn: Turn) -> Turn:
    return msgspec.structs.replace(
        turn, versions=tuple([msgspec.structs.replace(span, version=99) for span in turn.versions])
    )


def drifting(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, drift_tokens=1)


def unevenly(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, logprobs=turn.logprobs[:-8])


@pytest.mark.parametrize("spoil", [shortened, other_logprobs, other_version, drifting, unevenly])
async def test_a_record_that_is_not_the_engines_is_seen(tmp_path: Path, spoil: Callable[[Turn], Turn]) -> None:
    async with a_stage(Ground(tmp_path), random.Random(3)) as stage:
        await played(stage, random.Random(4))
        audited(stage.turns, stage.engine.given, random.Random(5))
        at = next(turn.index for turn in reversed(stage.turns) if turn.output_ids and turn.reply is not None)
        turns = [*stage.turns[:at], spoil(stage.turns[at]), *stage.turns[at + 1 :]]
        with pytest.raises(Violation):
            audited(turns, stage.engine.given, random.Random(5))


async def test_a_turn_that_was_not_stored_is_seen(tmp_path: Path) -> None:
    async with a_stage(Ground(tmp_path), random.Random(3)) as stage:
        await played(stage, random.Random(4))
        with pytest.raises(Violation, match="in no turn"):
            audited(stage.turns[:-1], stage.engine.given, random.Random(5))


def start(status: int = 200, **headers: str) -> dict[str, Any]:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": fields}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "no end"),
        ([start()], "no end"),
        ([start(), body(b"x", more=True)], "no end"),
        ([body(b"x")], "before its response"),
        ([start(), start()], "second response"),
        ([start(), body(b"x"), body(b"y")], "after its end"),
        ([start(content_length="3"), body(b"x")], "content-length"),
    ],
)
async def test_a_reply_against_the_protocol_is_seen(messages: list[dict[str, Any]], problem: str) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    with pytest.raises(Violation, match=problem):
        await exchange(application, REQUEST)


async def test_an_application_that_raises_is_seen() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("oh")

    with pytest.raises(Violation, match="ValueError: oh"):
        await exchange(application, REQUEST)


@pytest.mark.parametrize("dialect", SPEAKERS)
@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"error": {}}', b'{"error": {"message": ""}}', b"\xff", b"x"])
def test_an_error_of_another_shape_is_seen(dialect: str, payload: bytes) -> None:
    with pytest.raises(Violation):
        SPEAKERS[dialect]().read_error(400, payload)


@pytest.mark.parametrize(
    "stream", [b"data: {}", b"data: {}\n\n", b"nonsense\n\n", b'data: "\xe2\x80\xa8"\n\n', b"data: [DONE]\n\n"]
)
def test_a_stream_of_another_shape_is_seen(stream: bytes) -> None:
    with pytest.raises((Violation, KeyError)):
        Chat().read(stream, Manner(stream=True))


async def test_a_failing_body_is_made_small() -> None:
    async def fails(body: bytes) -> bool:
        return b"boom" in body

    whole = b'{"a": [1, {"b": "boom", "c": [2]}, 3], "d": {}}'
    assert await smaller(whole, fails) == b'{"a": [{"b": "boom"}]}'
    assert await smaller(b"boom {", fails) == b"boom {"


async def test_a_failing_request_is_told_small_and_with_its_session(tmp_path: Path) -> None:
    class Picky(Chat):
        """Reports every refusal as a violation."""

        def read_error(self, status: int, payload: bytes) -> None:
            raise Violation("refused")

    tally = await Campaign(Picky(), Ground(tmp_path), SEED).run(50, first=3)
    table = as_table("chat", SEED, tally, 1.0)
    assert f"--dialect chat --seed {SEED} --session 3" in table
    assert as_json("chat", SEED, tally, 1.0)["violations"][0]["problem"] == "refused"
