"""A scripted engine with the pace of a batch engine: each step gives every request in flight its next tokens.

The engine samples nothing and is independent of the protocol. Invariant: all requests together get at most
`tokens_per_second`; a step takes at least LEAST_STEP, however few requests share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.engines.base import Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.lab.fakes.scripted_engine import ScriptedEngine

LEAST_STEP = 0.0025
"""Seconds that a small model on a large GPU takes for one token of one request."""


class BatchEngine:
    """An `Engine` that gives each request one chunk per step. The chunks come from a ScriptedEngine, which puts
    `event_tokens` tokens into a chunk."""

    def __init__(self, scripted: ScriptedEngine, *, tokens_per_second: float, event_tokens: int = 1) -> None:
        self.name = scripted.name
        self.mode = scripted.mode
        self.logprob_kind = scripted.logprob_kind
        self._scripted = scripted
        self._seconds_each = event_tokens / tokens_per_second
        self._least = event_tokens * LEAST_STEP
        self._running = 0
        self._step = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self._scripted.start()

    async def close(self) -> None:
        await self._scripted.close()

    async def health(self) -> EngineHealth:
        return await self._scripted.health()

    async def pause(self, mode: PauseMode) -> None:
        await self._scripted.pause(mode)

    async def resume(self) -> None:
        await self._scripted.resume()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self._running += 1
        if self._timer is None:
            self._set_timer(asyncio.get_running_loop().time())
        try:
            async with aclosing(self._scripted.generate(request)) as chunks:
                async for chunk in chunks:
                    await self._step.wait()
                    yield chunk
        finally:
            self._running -= 1

    def _set_timer(self, begun: float) -> None:
        """Set the timer to the end of a step. The next step is shortened by the lateness of this one, because timers
        have whole milliseconds; a step that takes longer than its limit does not shorten the next."""
        loop = asyncio.get_running_loop()
        due = max(begun + max(self._least, self._running * self._seconds_each), loop.time())
        self._timer = loop.call_at(due, self._end_step, due)

    def _end_step(self, due: float) -> None:
        ended, self._step = self._step, asyncio.Event()
        ended.set()
        self._timer = None
        if self._running:
            self._set_timer(due)
