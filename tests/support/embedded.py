"""An embedded engine with the shipped policy, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from outrider.engines.base import Chunk, EngineOptions, GenerateRequest, SamplingParams
from outrider.engines.embedded import EmbeddedEngine
from outrider.lab.demo.dialogue import POLICY, Script, encode
from outrider.lab.demo.task import Episode
from outrider.tokens.rendering.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(POLICY)
EPISODE = Episode("maple", "jade", "Where is maple?")
DIALOGUE = encode(TOKENIZER, Script.load().read(EPISODE, "maple", "jade"))[0]
"""The token ids of a whole dialogue of the demo task."""
PROMPT = TOKENIZER.encode(Script.load().prompt(EPISODE.question))


@asynccontextmanager
async def running(**options: Any) -> AsyncGenerator[EmbeddedEngine, None]:
    engine = EmbeddedEngine(EngineOptions(name="embedded", model=str(POLICY), options=options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(prompt: Sequence[int] = PROMPT, **sampling: Any) -> GenerateRequest:
    """Return a request, by default with greedy sampling and at most 16 tokens."""
    return GenerateRequest(
        request_id="request",
        session_key="session",
        input_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**({"max_tokens": 16, "temperature": 0.0} | sampling)),
    )


async def everything(chunks: AsyncIterable[Chunk]) -> Chunk:
    """Join the chunks of a stream."""
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in chunks:
        ids += chunk.ids
        logprobs += chunk.logprobs
    return Chunk(
        ids=ids,
        logprobs=logprobs,
        finish=chunk.finish,
        stop_match=chunk.stop_match,
        versions=chunk.versions,
        cached_tokens=chunk.cached_tokens,
    )


async def together(engine: EmbeddedEngine, requests: Sequence[GenerateRequest]) -> list[Chunk]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(everything(engine.generate(one))) for one in requests]
    return [task.result() for task in tasks]
