"""The scripted engine with a record of its prompts and outputs.

Invariant: the engine records a chunk before any reader receives the chunk.
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
    """The engine's own record of one generation. `prompt` and `sampled` are token ids."""

    prompt: Ids
    version: int
    sampled: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish: FinishReason | None = None

    def packed(self) -> tuple[bytes, bytes, bytes]:
        """Return the prompt, the output and the log-probabilities, packed as in turns."""
        return pack_ids(self.prompt), pack_ids(self.sampled), pack_logprobs(self.logprobs)

    def leads_to(self, other: Given) -> bool:
        """Return True if the prompt of `other` begins with all ids of this generation, prompt and output."""
        whole = [*self.prompt.tolist(), *self.sampled]
        return bool(other.prompt[: len(whole)].tolist() == whole)


class RecordingEngine(ScriptedEngine):
    """The scripted engine, with a record of each generation in `given`, in the order of their starts."""

    constraints = frozenset(ConstraintKind) - {ConstraintKind.TOOL_CALLS}  # random replies do not obey a tool choice

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
