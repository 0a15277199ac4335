"""Request bodies are checked while they arrive: by size, by number of JSON values, and by the bytes already held."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from outrider.errors import ContextOverflow, EngineUnavailable, RequestError, TooLarge
from outrider.sessions.calls import limits
from outrider.sessions.calls.limits import (
    BYTES_PER_TOKEN,
    FREE_SIZE,
    LARGE,
    MAX_BODY,
    MAX_ESCAPES,
    MAX_IN_ALL,
    MAX_IN_SESSION,
    MAX_TEXT_BODY,
    MAX_TOOLS,
    MAX_VALUES,
    Bodies,
    Body,
    BodyCapacity,
    FileBytes,
    Intake,
    TooMuchAtOnce,
    TooSlow,
    count_values,
)
from support.steps import run_inline


async def sent(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def small() -> BodyCapacity:
    return BodyCapacity(4096, takes_messages=False)


async def pictures() -> BodyCapacity:
    return BodyCapacity(None, takes_messages=True)


def values_in(value: Any) -> int:
    """Return the number of objects, lists and commas of `value` in JSON."""
    if not isinstance(value, list | dict):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(values_in, inner))


def nested(rng: random.Random, depth: int = 0) -> Any:
    text = "".join(rng.choices('{[,"\\ \u00e9x', k=rng.randrange(8)))
    made = [text, 7, None, [], {}]
    if depth < 4:
        made += [[nested(rng, depth + 1) for _ in range(4)], {text: nested(rng, depth + 1), "b": 1}]
    return rng.choice(made)


@pytest.mark.parametrize("seed", range(50))
def test_values_are_counted_outside_of_strings(seed: int) -> None:
    rng = random.Random(seed)
    value = [nested(rng) for _ in range(10)]
    body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    assert run_inline(count_values(body, rng.choice([1, 2, 3, 7, 1 << 20]))) == values_in(value)


def test_a_size_that_cannot_fit_is_an_overflow_and_one_that_is_not_read_is_too_large() -> None:
    small = BodyCapacity(4096, takes_messages=False)
    small.check_size(FREE_SIZE + BYTES_PER_TOKEN * 4096)
    with pytest.raises(ContextOverflow, match="context is 4096"):
        small.check_size(FREE_SIZE + BYTES_PER_TOKEN * 4096 + 1)
    with pytest.raises(TooLarge):
        BodyCapacity(1 << 20, takes_messages=False).check_size(MAX_TEXT_BODY + 1)
    BodyCapacity(4096, takes_messages=True).check_size(MAX_BODY)
    with pytest.raises(TooLarge):
        BodyCapacity(None, takes_messages=True).check_size(MAX_BODY + 1)


def counted(body: bytes, piece: int) -> int:
    files = FileBytes()
    for start in range(0, len(body), piece):
        files.add(body[start : start + piece])
    return files.size


@pytest.mark.parametrize("piece", [100, 1000, 4096, 1 << 20])
def test_a_file_in_base64_is_found_however_its_bytes_arrive(piece: int) -> None:
    file = base64.b64encode(random.Random(1).randbytes(100_000))
    text = b"some words, and no file. " * 4000
    assert counted(text, piece) == 0
    assert len(file) - 2048 <= counted(text + file + text, piece) <= len(file)


async def test_files_do_not_count_as_text_and_have_the_bound_of_all_bodies() -> None:
    bodies, file = Bodies(Intake()), b"A" * (1 << 20)
    with Body(bodies) as body:
        assert len(await body.received(sent([b"{}", *[file] * 30]), small)) == 30 * len(file) + 2
    with Body(bodies) as body, pytest.raises(TooLarge, match="larger than"):
        await body.received(sent([file] * 33), small)
    with Body(bodies) as body, pytest.raises(ContextOverflow):
        await body.received(sent([file] * 8 + [b"words and " * (1 << 18)]), small)
    small_one = BodyCapacity(4096, takes_messages=False)
    run_inline(small_one.checking(file * 30))
    with pytest.raises(ContextOverflow):
        run_inline(small_one.checking(file * 3 + b"words and " * (1 << 18)))


def test_more_values_than_the_context_has_room_for_are_refused() -> None:
    body = b"[" + b"{}," * 30_000 + b"{}]"
    with pytest.raises(ContextOverflow, match="at least 15000 tokens"):
        run_inline(BodyCapacity(4096, takes_messages=False).checking(body))
    run_inline(BodyCapacity(1 << 14, takes_messages=False).checking(body))
    with pytest.raises(ContextOverflow):
        run_inline(BodyCapacity(None, takes_messages=True).checking(b"{" * (MAX_VALUES + 1)))
    run_inline(BodyCapacity(4096, takes_messages=False).checking(json.dumps("{}," * 30_000).encode()))


def test_more_escapes_than_can_be_decoded_at_once_are_refused() -> None:
    with pytest.raises(TooLarge, match="escaped"):
        run_inline(BodyCapacity(None, takes_messages=True).checking(b"\\" * (MAX_ESCAPES + 1)))


async def test_a_body_beyond_its_capacity_is_refused_while_it_arrives() -> None:
    bodies = Bodies(Intake())
    came = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal came
        while True:
            came += 1
            yield bytes(1 << 16)

    with Body(bodies) as body, pytest.raises(ContextOverflow):
        await body.received(endless(), small)
    assert came == (FREE_SIZE + BYTES_PER_TOKEN * 4096) // (1 << 16) + 1
    assert (bodies.size, bodies.intake.size) == (0, 0)


async def test_a_session_holds_no_more_than_its_share_until_its_calls_end() -> None:
    bodies = Bodies(Intake())
    half = bytes(MAX_IN_SESSION // 2 - (1 << 16))
    with Body(bodies) as first, Body(bodies) as second:
        assert await first.received(sent([half]), pictures) == half
        await second.received(sent([half]), pictures)
        with Body(bodies) as third, pytest.raises(TooMuchAtOnce, match="this session"):
            await third.received(sent([bytes(1 << 18)]), pictures)
    with Body(bodies) as third:
        await third.received(sent([bytes(1 << 18)]), pictures)
    assert bodies.size == 0


@pytest.mark.deep
async def test_the_room_of_a_body_that_arrives_slowly_goes_to_others() -> None:
    shared = Intake()
    never, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def unfinished() -> AsyncIterator[bytes]:
        yield part
        begun.release()
        await never.wait()

    part = bytes(MAX_BODY)

    async def hog() -> None:
        with Body(Bodies(shared)) as body:
            await body.received(unfinished(), pictures)

    hogs = [asyncio.ensure_future(hog()) for _ in range(MAX_IN_ALL // MAX_BODY)]
    for _ in hogs:
        await begun.acquire()
    assert shared.size == MAX_IN_ALL
    with Body(Bodies(shared)) as body:
        assert await body.received(sent([part]), pictures) is part
        with pytest.raises(TooMuchAtOnce, match="slowly"):
            await hogs[0]
        assert not any(one.done() for one in hogs[1:])
        for one in hogs[1:]:
            one.cancel()
        await asyncio.wait(hogs)
    assert shared.size == 0


async def test_a_body_that_does_not_arrive_in_time_is_refused() -> None:

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with Body(Bodies(Intake(seconds=0))) as body, pytest.raises(TooSlow):
        await body.received(never(), pictures)


async def test_a_wait_for_an_engine_does_not_count_as_slow_arrival() -> None:
    """The size of a large body is checked against its engine's context, and there may be no engine for minutes, for
    example while the policy is paused. The client is not to blame for that."""
    part = bytes(LARGE + 1)

    async def no_engine_yet() -> BodyCapacity:
        await asyncio.sleep(0.2)
        return await pictures()

    with Body(Bodies(Intake(seconds=0.1))) as body:
        assert await body.received(sent([part, b"x"]), no_engine_yet) == part + b"x"

    async def stuck() -> AsyncIterator[bytes]:
        yield part
        await asyncio.Event().wait()

    with Body(Bodies(Intake(seconds=0.1))) as body, pytest.raises(TooSlow):
        await body.received(stuck(), no_engine_yet)


async def test_a_body_may_be_given_up_while_it_waits_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_IN_ALL", 2 * LARGE)
    shared, asked = Intake(), asyncio.Event()

    async def no_engine() -> BodyCapacity:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def first() -> None:
        with Body(Bodies(shared)) as body:
            await body.received(sent([bytes(LARGE + 1)]), no_engine)

    waiting = asyncio.ensure_future(first())
    await asked.wait()
    with Body(Bodies(shared)) as body:
        await body.received(sent([bytes(LARGE + 1)]), pictures)
        with pytest.raises(TooMuchAtOnce):
            await waiting
    assert shared.size == 0


async def test_a_refused_body_does_not_harm_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal may take a while, because a failed call is stored first."""
    monkeypatch.setattr(limits, "MAX_IN_ALL", 2 * LARGE)
    shared = Intake()

    async def no_engine() -> BodyCapacity:
        raise EngineUnavailable("no engine")

    with Body(Bodies(shared)) as refused:
        with pytest.raises(EngineUnavailable):
            await refused.received(sent([bytes(LARGE + 1)]), no_engine)
        with Body(Bodies(shared)) as other, pytest.raises(TooMuchAtOnce):
            await other.received(sent([bytes(LARGE + 1)]), pictures)
    assert shared.size == 0


def test_no_client_offers_so_many_tools() -> None:
    capacity = BodyCapacity(1 << 20, takes_messages=False)
    capacity.check_numbers(1 << 20, MAX_TOOLS)
    with pytest.raises(RequestError, match="too many"):
        capacity.check_numbers(1, MAX_TOOLS + 1)
    with pytest.raises(ContextOverflow):
        capacity.check_numbers((1 << 20) + 1, 0)
