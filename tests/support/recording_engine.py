"""The scripted engine with a record of what it was given and gave.

Invariant: the record is the engine's, made before anybody reads what it gave.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.testing.scripted_engine import ScriptedEngine
from outrider.trajectory import FinishReason, Ids, pack_ids, pack_logprobs


class Given(msgspec.Struct):
    """One generation by the engine's own account. `prompt` and `sampled` are ids."""

    prompt: Ids
    version: int
    sampled: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish: FinishReason | None = None

    def packed(self) -> tuple[bytes, bytes, bytes]:
        """Prompt, output and log-probabilities, as turns have them."""
        return pack_ids(self.prompt), pack_ids(self.sampled), pack_logprobs(self.logprobs)

    def leads_to(self, other: Given) -> bool:
        """Whether the other's prompt begins with all of this one's ids."""
        whole = [*self.prompt.tolist(), *self.sampled]
        return bool(other.prompt[: len(whole)].tolist() == whole)


class RecordingEngine(ScriptedEngine):
    """The scripted engine, with a record of every generation in the order in which they began."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.given: list[Given] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        given = Given(request.input_ids.copy(), self.version)
        self.given.append(given)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                given.sampled += chunk.ids
                given.logprobs += chunk.logprobs
                given.finish = chunk.finish
                yield chunk
