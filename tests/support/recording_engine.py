"""The scripted engine with a record of its prompts and outputs.

Invariant: each record is made by the engine before any reader receives the chunk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from outrider.constraint import ConstraintKind
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.trajectory import FinishReason, Ids, pack_ids, pack_logprobs


class Given(msgspec.Struct):
    """One generation by the engine's own record. `prompt` and `sampled` are ids."""

    prompt: Ids
    version: int
    sampled: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish: FinishReason | None = None

    def packed(self) -> tuple[bytes, bytes, bytes]:
        """Prompt, output and log-probabilities, packed as in turns."""
        return pack_ids(self.prompt), pack_ids(self.sampled), pack_logprobs(self.logprobs)

    def leads_to(self, other: Given) -> bool:
        """Whether the other prompt begins with all ids of this generation."""
        whole = [*self.prompt.tolist(), *self.sampled]
        return bool(other.prompt[: len(whole)].tolist() == whole)


class RecordingEngine(ScriptedEngine):
    """The scripted engine, with a record of every generation in the order of their starts."""

    constraints = frozenset(ConstraintKind) - {ConstraintKind.TOOL_CALLS}  # drawn replies keep no choice of tools

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
