"""The worker's side of the generations of a relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.engines.relay.messages import StartGeneration, pack_ids
from outrider.relay.generations import Generations
from outrider.trajectory import FinishReason


async def fails(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Turn the cancellation into another error, as some clients of servers do."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ConnectionError("aborted") from None
    yield Chunk(ids=[1], logprobs=[-1.0])


async def goes_on(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Suppress the cancellation."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    while True:
        yield Chunk(ids=[1], logprobs=[-1.0])


async def fails_at_the_end(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Fail after the last chunk, as a client does whose connection cannot be closed properly."""
    try:
        yield Chunk(ids=[1], logprobs=[-1.0], finish=FinishReason.STOP)
    finally:
        raise ConnectionError("not closed")


def start(generations: Generations, tasks: asyncio.TaskGroup) -> None:
    message = StartGeneration(
        generation=1, request_id="1", session_key="1", input_ids=pack_ids([1]), sampling=SamplingParams(max_tokens=9)
    )
    generations.start(message, tasks)


@pytest.mark.parametrize("generate", [fails, goes_on])
async def test_an_aborted_generation_leaves_nothing_behind(generate: Any) -> None:
    """Whatever the engine's code makes of the cancellation, the window of all generations stays free."""
    generations = Generations(FunctionEngine(generate))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        start(generations, tasks)
        await asyncio.sleep(0.01)
        generations.abort(1)
    assert generations.held == ()
    assert generations._unacknowledged == 0


async def test_an_error_after_the_last_chunk_is_not_sent() -> None:
    """The service would cut the worker off for a message after the last one of a generation."""
    generations = Generations(FunctionEngine(fails_at_the_end))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        start(generations, tasks)
    generations.acknowledge(1, 1)
    assert generations.held == ()
    assert generations._unacknowledged == 0
