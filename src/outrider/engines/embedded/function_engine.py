"""Turns a generate function into an `Engine`, with pausing, aborting and policy versions.

Invariant: a token has the policy version that its chunk names. If the chunk names no version, the token has the version
that was set when the chunk arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from outrider.concurrency.events import Broadcast
from outrider.constraint import ConstraintKind
from outrider.engines.base import Chunk, EngineHealth, GenerateRequest, PauseMode
from outrider.engines.gates import PauseGate
from outrider.errors import EngineMisbehaved, EngineUnavailable
from outrider.trajectory import FinishReason, LogprobKind, TokenMode, VersionSpan

Generate = Callable[[GenerateRequest], AsyncIterator[Chunk] | Awaitable[Chunk]]
"""The function called for each generation. It is either an async generator function that yields chunks, or a coroutine
function that returns the whole output as one chunk."""


class FunctionEngine:
    """Implements `Engine`, `SetsVersion`, `TakesConstraints` and `TokenizesText` with the function `generate`.

    The policy version of a token comes from the first of these sources that exists:

    1. `versions` of the last chunk, which cover the whole output.
    2. `versions` of the token's chunk. Positions in these spans count from the start of the whole output. A chunk that
       may wait in a queue needs these spans: if the version changed during the wait, rule 3 would give the tokens a
       wrong version.
    3. The version that was set (`set_version`, or the attribute `version`) when the chunk arrived.

    `tokenize`: without it, `token_check` returns None.
    `healthy`: returns what is wrong, or "" if nothing is.
    `changed`: called after each new version.
    """

    mode = TokenMode.TOKENS

    def __init__(
        self,
        generate: Generate,
        *,
        name: str = "function",
        model: str | None = None,
        context_tokens: int | None = None,
        logprob_kind: LogprobKind = LogprobKind.SAMPLING,
        version: int = 0,
        constraints: Iterable[ConstraintKind] = (),
        tokenize: Callable[[str], list[int] | None] | None = None,
        healthy: Callable[[], Awaitable[str]] | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.logprob_kind = logprob_kind
        self.constraints = frozenset(constraints)
        self._version = version
        self._changed_version = changed
        self._generate = generate
        self._model = model
        self._context_tokens = context_tokens
        self._tokenize = tokenize
        self._healthy = healthy
        self._gate = PauseGate()
        self._frozen = False
        self._aborts = 0
        self._changed = Broadcast()
        self._steps: set[asyncio.Timeout] = set()
        """The timeouts that abort generations, one for each generate function that is running."""

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self._changed_version()

    async def start(self) -> None:
        """Do nothing, because a function has nothing to open."""

    async def close(self) -> None:
        """Do nothing, because a function has nothing to close."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        spans: list[VersionSpan] = []
        length = 0
        async with self._gate.passage():
            aborts = self._aborts
            async with aclosing(self._chunks(request)) as chunks:
                while True:
                    chunk = await self._next(chunks, aborts)
                    start, length = length, length + len(chunk.ids)
                    if chunk.finish is None or not chunk.versions:
                        for span in chunk.versions or (VersionSpan(self.version, start, length),):
                            if spans and spans[-1].version == span.version:
                                spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
                            elif span.end > span.start:
                                spans.append(span)
                    if chunk.finish is None:
                        chunk = msgspec.structs.replace(chunk, versions=()) if chunk.versions else chunk
                    elif not chunk.versions:
                        chunk = msgspec.structs.replace(chunk, versions=tuple(spans))
                    await self._thawed(aborts)
                    yield chunk
                    if chunk.finish is not None:
                        return
                    await self._thawed(aborts)

    async def health(self) -> EngineHealth:
        try:
            trouble = "" if self._healthy is None else await self._healthy()
        except Exception as error:  # `healthy` may raise any error, but `health` must not raise
            trouble = f"{type(error).__name__}: {error}"
        return EngineHealth(
            ok=not trouble,
            detail=trouble,
            model=self._model,
            context_tokens=self._context_tokens,
            version=self.version,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Pause generations. With "finish" and "abort", no generate function is running any more when this method
        returns. With "keep", each generation finishes its current step, but yields the chunk of this step only after
        `resume`."""
        self._gate.close()
        if mode == "finish":
            await self._gate.drained()
        elif mode == "keep":
            self._frozen = True
        else:
            self._aborts += 1
            self._changed.send()
            for step in self._steps:
                if not step.expired():  # an expired step is being aborted already
                    step.reschedule(0)
            changed = self._changed.next()
            while self._steps:
                await changed.wait()
                changed = self._changed.next()

    async def resume(self) -> None:
        self._frozen = False
        self._changed.send()
        self._gate.open()

    async def set_version(self, version: int) -> None:
        if version != self._version:
            self.version = version

    async def token_check(self, text: str) -> list[int] | None:
        return None if self._tokenize is None else self._tokenize(text)

    async def _thawed(self, aborts: int) -> None:
        """Wait while generations are frozen, unless this generation is aborted."""
        changed = self._changed.next()
        while self._frozen and self._aborts == aborts:
            await changed.wait()
            changed = self._changed.next()

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        made = self._generate(request)
        if not hasattr(made, "__aiter__"):
            yield await made
            return
        stream: Any = made
        try:
            async for chunk in stream:
                yield chunk
        finally:
            if hasattr(stream, "aclose"):
                await stream.aclose()

    async def _next(self, chunks: AsyncGenerator[Chunk, None], aborts: int) -> Chunk:
        """Return the next chunk. If the generation is aborted first, return an empty last chunk with finish ABORT.
        Raises EngineUnavailable if the function ends early, and EngineMisbehaved if it yields anything but a
        `Chunk`."""
        aborted = Chunk(ids=[], logprobs=[], finish=FinishReason.ABORT)
        if self._aborts != aborts:
            return aborted
        try:
            async with asyncio.timeout(None) as step:
                self._steps.add(step)
                try:
                    chunk = await anext(chunks)
                finally:
                    self._steps.discard(step)
                    self._changed.send()
        except TimeoutError:
            if not step.expired():
                raise
            return aborted
        except StopAsyncIteration:
            raise EngineUnavailable("the generate function ended before its generation did") from None
        if not isinstance(chunk, Chunk):
            raise EngineMisbehaved(f"the generate function gave a {type(chunk).__name__}, not a Chunk")
        return chunk
