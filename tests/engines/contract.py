"""The contract of `Engine`, as plain async functions over a rig. The tests of any engine run `CHECKS` on it.

A rig is one started engine in a world of its own, made by a factory: `factory(slow=True)` gives an engine whose
generations do not end before `finish` is called, unless they are aborted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

from outrider.engines.base import Chunk, Engine, GenerateRequest, SamplingParams, SetsVersion, TokenizesText
from outrider.errors import ContextOverflow, EngineUnavailable
from outrider.trajectory import FinishReason, Ids, TokenMode, VersionSpan

_numbers = itertools.count()


@dataclass
class Generation:
    """A whole generation, joined from its chunks."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    stop_match: int | str | None
    versions: tuple[VersionSpan, ...]
    chunks: int


@dataclass
class Rig:
    """An engine under test, with the values and functions that the checks need.

    With `max_tokens`, the deterministic generation for `prompt` has at least 8 tokens. `oracle` gives the exact ids and
    log-probabilities of a generation if they can be computed in advance. `aborted` returns when the engine itself has
    noticed that a consumer left. `kill` makes the engine unavailable. `logprob_tolerance` is 0 if the same prompt gives
    exactly the same numbers in any batch.
    """

    engine: Engine
    prompt: Ids
    max_tokens: int
    context_tokens: int
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    aborted: Callable[[], Awaitable[None]]
    kill: Callable[[], None]
    finish: Callable[[], None]
    oracle: Callable[[GenerateRequest], tuple[list[int], list[float]]] | None = None
    logprob_tolerance: float = 0.0

    def request(self, prompt: Ids | None = None, **sampling: Any) -> GenerateRequest:
        number = next(_numbers)
        return GenerateRequest(
            request_id=f"request-{number:08}",
            session_key=f"session-{number:08}",
            input_ids=self.prompt if prompt is None else prompt,
            sampling=SamplingParams(**({"max_tokens": self.max_tokens, "temperature": 0.0} | sampling)),
        )


class Factory(Protocol):
    def __call__(self, *, slow: bool = False) -> AbstractAsyncContextManager[Rig]: ...


async def collect(chunks: AsyncGenerator[Chunk, None]) -> Generation:
    """Read a stream to its end, and check the rules that hold for every stream."""
    ids: list[int] = []
    logprobs: list[float] = []
    last: Chunk | None = None
    count = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            assert last is None or last.finish is None, "a chunk after the finish"
            assert len(chunk.ids) == len(chunk.logprobs)
            ids += chunk.ids
            logprobs += chunk.logprobs
            last = chunk
            count += 1
    assert last is not None
    assert last.finish is not None, "the last chunk has no finish"
    edges = [0, *(span.end for span in last.versions)]
    assert [span.start for span in last.versions] == edges[:-1], "version spans leave a gap or overlap"
    assert edges[-1] == len(ids), "version spans do not cover the output"
    return Generation(ids, logprobs, last.finish, last.stop_match, last.versions, count)


async def streams_equal_lengths_and_one_finish(factory: Factory) -> None:
    async with factory() as rig:
        whole = await collect(rig.engine.generate(rig.request()))
        assert len(whole.ids) >= 8
        assert whole.chunks > 1
        assert all(isinstance(value, float) and value <= 0 for value in whole.logprobs)
        assert rig.engine.mode is TokenMode.TOKENS


async def gives_exact_values(factory: Factory) -> None:
    """The same request gives the same values twice, and the oracle's values if there is an oracle."""
    async with factory() as rig:
        request = rig.request()
        whole = await collect(rig.engine.generate(request))
        again = await collect(rig.engine.generate(rig.request()))
        assert whole.ids == again.ids
        assert whole.logprobs == pytest.approx(again.logprobs, abs=rig.logprob_tolerance, rel=0)
        if rig.oracle is not None:
            ids, logprobs = rig.oracle(request)
            assert whole.ids == ids
            assert whole.logprobs == pytest.approx(logprobs, abs=rig.logprob_tolerance, rel=0)


async def stops_at_a_stop_id(factory: Factory) -> None:
    async with factory() as rig:
        whole = await collect(rig.engine.generate(rig.request()))
        stop = whole.ids[4]
        end = whole.ids.index(stop) + 1
        cut = await collect(rig.engine.generate(rig.request(stop_token_ids=(stop,))))
        assert cut.ids == whole.ids[:end]
        assert (cut.finish, cut.stop_match) == (FinishReason.STOP, stop)


async def stops_at_a_stop_string(factory: Factory) -> None:
    """The token that completes the match is the last of the output."""
    async with factory() as rig:
        whole = await collect(rig.engine.generate(rig.request()))
        stop = rig.decode(whole.ids[3:6])[1:]
        end = next(n for n in range(1, len(whole.ids) + 1) if stop in rig.decode(whole.ids[:n]))
        cut = await collect(rig.engine.generate(rig.request(stop=("never said", stop))))
        assert cut.ids == whole.ids[:end]
        assert (cut.finish, cut.stop_match) == (FinishReason.STOP, stop)


async def respects_max_tokens(factory: Factory) -> None:
    async with factory() as rig:
        whole = await collect(rig.engine.generate(rig.request()))
        for limit in (1, 5):
            cut = await collect(rig.engine.generate(rig.request(max_tokens=limit)))
            assert cut.ids == whole.ids[:limit]
            assert (cut.finish, cut.stop_match) == (FinishReason.LENGTH, None)


async def types_overflow(factory: Factory) -> None:
    async with factory() as rig:
        long = np.resize(rig.prompt, rig.context_tokens + 5).astype(np.int32)
        with pytest.raises(ContextOverflow):
            await collect(rig.engine.generate(rig.request(long, max_tokens=1)))
        await collect(rig.engine.generate(rig.request()))


async def types_unavailability(factory: Factory) -> None:
    async with factory() as rig:
        assert (await rig.engine.health()).ok
        rig.kill()
        with pytest.raises(EngineUnavailable):
            await collect(rig.engine.generate(rig.request()))
        health = await rig.engine.health()
        assert not health.ok
        assert health.detail


async def tells_its_context(factory: Factory) -> None:
    async with factory() as rig:
        health = await rig.engine.health()
        assert health.context_tokens == rig.context_tokens
        assert health.model


async def aborts_when_closed(factory: Factory) -> None:
    async with factory(slow=True) as rig:
        chunks = rig.engine.generate(rig.request())
        first = await anext(chunks)
        assert first.ids
        assert first.finish is None
        await chunks.aclose()
        async with asyncio.timeout(10):
            await rig.aborted()


async def serves_many_at_once(factory: Factory) -> None:
    """Each of many concurrent generations equals the same generation alone."""
    async with factory() as rig:
        prompts = [np.concatenate([rig.prompt, rig.prompt[: n % 5]]) for n in range(16)]
        alone = [await collect(rig.engine.generate(rig.request(prompt))) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(rig.engine.generate(rig.request(prompt)))) for prompt in prompts]
        for single, task in zip(alone, tasks, strict=True):
            together = task.result()
            assert together.ids == single.ids
            assert together.logprobs == pytest.approx(single.logprobs, abs=rig.logprob_tolerance, rel=0)


async def pausing_keeps(factory: Factory) -> None:
    """`keep` freezes a generation; `resume` continues it with the same tokens."""
    async with factory(slow=True) as rig, asyncio.TaskGroup() as group:
        chunks = rig.engine.generate(rig.request())
        first = await anext(chunks)
        await rig.engine.pause("keep")
        rig.finish()
        rest = group.create_task(chunks_of(chunks))
        new = group.create_task(collect(rig.engine.generate(rig.request())))
        await rig.engine.health()
        assert not rest.done()
        assert not new.done()
        await rig.engine.resume()
        later = [token for chunk in await rest for token in chunk.ids]
        assert first.ids + later == (await new).ids


async def pausing_aborts(factory: Factory) -> None:
    """`abort` ends the generations in flight, which keep their tokens. After `resume` new generations run."""
    async with factory(slow=True) as rig:
        async with asyncio.TaskGroup() as group:
            chunks = rig.engine.generate(rig.request())
            first = await anext(chunks)
            rest = group.create_task(chunks_of(chunks))
            await rig.engine.pause("abort")
        assert rest.result()[-1].finish is FinishReason.ABORT
        assert len(first.ids) + sum(len(chunk.ids) for chunk in rest.result()) < rig.max_tokens
        rig.finish()
        await rig.engine.resume()
        assert len((await collect(rig.engine.generate(rig.request()))).ids) >= 8


async def pausing_finishes(factory: Factory) -> None:
    """`finish` holds new generations back, and returns when the generations in flight have ended."""
    async with factory(slow=True) as rig, asyncio.TaskGroup() as group:
        chunks = rig.engine.generate(rig.request())
        await anext(chunks)
        rest = group.create_task(chunks_of(chunks))
        paused = group.create_task(rig.engine.pause("finish"))
        await rig.engine.health()
        assert not paused.done()
        rig.finish()
        await paused
        assert (await rest)[-1].finish in (FinishReason.STOP, FinishReason.LENGTH)
        new = group.create_task(collect(rig.engine.generate(rig.request())))
        await rig.engine.health()
        assert not new.done()
        await rig.engine.resume()
        assert len((await new).ids) >= 8


async def stamps_versions(factory: Factory) -> None:
    async with factory() as rig:
        assert isinstance(rig.engine, SetsVersion)
        before = await collect(rig.engine.generate(rig.request()))
        await rig.engine.set_version(7)
        after = await collect(rig.engine.generate(rig.request()))
        assert before.versions == (VersionSpan(0, 0, len(before.ids)),)
        assert after.versions == (VersionSpan(7, 0, len(after.ids)),)
        assert (await rig.engine.health()).version == 7


async def tokenizes(factory: Factory) -> None:
    async with factory() as rig:
        assert isinstance(rig.engine, TokenizesText)
        text = 'Where is <|im_start|> "maple"?'
        assert await rig.engine.token_check(text) == rig.encode(text)


async def chunks_of(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


CHECKS = (
    streams_equal_lengths_and_one_finish,
    gives_exact_values,
    stops_at_a_stop_id,
    stops_at_a_stop_string,
    respects_max_tokens,
    types_overflow,
    types_unavailability,
    tells_its_context,
    aborts_when_closed,
    serves_many_at_once,
    pausing_keeps,
    pausing_aborts,
    pausing_finishes,
    stamps_versions,
)
"""Checks that every engine passes. `tokenizes` is for engines that are `TokenizesText`."""
