"""The embedded engine: a small model served inside this process, for demos, tests and laptops.

The module implements `Engine` over a `ModelThread`, and imports torch only when the engine starts. Invariant: an
accepted request has one entry in `_outputs` until its last chunk, its error, or the close of its generator.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from outrider.engines.adapters.options import read_options
from outrider.engines.base import Capability, Chunk, EngineHealth, EngineOptions, GenerateRequest, PauseMode
from outrider.errors import EngineUnavailable, InvalidField, OutriderError
from outrider.trajectory import LogprobKind, TokenMode

if TYPE_CHECKING:
    from outrider.engines.embedded.batch import BatchOutput, SequenceBatch
    from outrider.engines.embedded.model_thread import ModelThread
    from outrider.engines.embedded.sequence import TokenSequence

MAX_REQUESTS = 4096
"""Maximum requests running or waiting. Further requests are refused with EngineUnavailable, which callers retry."""


class EmbeddedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded engine's options. `slots` sequences run at once. The cache holds slots x context_tokens positions;
    `context_tokens` defaults to the context that the model was made for. `threads` is the number of torch's threads;
    more than one rarely helps a model of this size."""

    slots: Annotated[int, msgspec.Meta(ge=1)] = 32
    context_tokens: Annotated[int, msgspec.Meta(ge=2)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Number of sequences running and waiting, and of free slots, between two steps."""

    running: int
    waiting: int
    free_slots: int


class EmbeddedEngine:
    """Serves the model in the folder `options.model` (Hugging Face layout: config.json, *.safetensors, tokenizer.json).

    Raises EngineUnavailable if torch is not installed, InvalidField for wrong options. `start` raises ModelMismatch or
    EngineRejected for a folder that it cannot serve.
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.RAW
    capabilities = frozenset({Capability.VERSIONED_CACHE})

    def __init__(self, options: EngineOptions) -> None:
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            raise EngineUnavailable(
                f"the embedded engine needs {' and '.join(missing)}", hint="pip install 'outrider[embedded]'"
            )
        if options.model is None:
            raise InvalidField("the embedded engine needs the model's folder", field="model")
        self.name = options.name
        self._folder = Path(options.model)
        self._tokenizer = Path(options.tokenizer or options.model)
        self._options = read_options(EmbeddedOptions, options.options)
        self._thread: ModelThread | None = None
        self._version = 0
        self._end: str | None = None  # why the thread has ended
        self._outputs: dict[TokenSequence, asyncio.Queue[Chunk | EngineUnavailable]] = {}

    async def start(self) -> None:
        if not (self._folder / "config.json").is_file():
            raise EngineUnavailable(
                f"no model in {self._folder}", hint="give a folder that holds config.json and *.safetensors"
            )
        module = await asyncio.to_thread(importlib.import_module, "outrider.engines.embedded.model_thread")
        thread: ModelThread = module.ModelThread(
            self._load, threads=self._options.threads, name=self.name, sink=self._deliver, ended=self._ended
        )
        try:
            await thread.start()
        except BaseException:  # cancellation included: the thread must not outlive a failed start
            await thread.close()
            raise
        self._thread = thread

    async def close(self) -> None:
        if self._thread is not None:
            await self._thread.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        thread = self._running()
        if len(self._outputs) >= MAX_REQUESTS:
            raise EngineUnavailable(f"engine {self.name} has {MAX_REQUESTS} requests already")
        sequence = thread.checker.check(request)
        output: asyncio.Queue[Chunk | EngineUnavailable] = asyncio.Queue()  # max_tokens bounds the queue
        self._outputs[sequence] = output
        thread.post(lambda batch: batch.add(sequence))
        try:
            while True:
                item = await output.get()
                if isinstance(item, EngineUnavailable):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            del self._outputs[sequence]
            thread.post(lambda batch: batch.remove(sequence))

    async def health(self) -> EngineHealth:
        if self._thread is None or self._end is not None:
            return EngineHealth(ok=False, detail=self._end or "not started", model=str(self._folder))
        return EngineHealth(
            ok=True,
            detail=f"{len(self._outputs)} requests",
            model=str(self._folder),
            context_tokens=self._thread.checker.context,
            version=self._version,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. "finish" returns when all running requests have ended, "abort" when they were ended with
        their tokens so far, "keep" when they are frozen. Requests that wait for a slot keep waiting in all three
        modes."""
        await self._running().pause(mode)

    async def resume(self) -> None:
        await self._running().call(lambda batch: batch.resume())

    async def update_weights(self, weights: str | Path | Mapping[str, Any], version: int) -> None:
        """Serve other weights, and mark every token from the next one on with policy `version`.

        `weights` is a safetensors file, a folder of such files, or a mapping of published (Hugging Face) names to
        tensors, and must have every tensor of the model. Running requests continue with their present keys and values,
        which no other request reuses. Raises EngineRejected, with nothing changed.
        """
        thread = self._running()
        if isinstance(weights, Mapping):
            state = weights
        else:
            from outrider.engines.embedded.weights import read_weights

            state = await asyncio.to_thread(read_weights, Path(weights))
        await thread.call(lambda batch: batch.update(state, version))
        self._version = version

    async def set_version(self, version: int) -> None:
        """Mark tokens with policy `version` from the next one on, for weights changed by other means than
        `update_weights`."""
        thread = self._running()
        if version != self._version:
            await thread.call(lambda batch: batch.update(None, version))
            self._version = version

    async def token_check(self, text: str) -> list[int] | None:
        return self._running().checker.encode(text)

    async def stats(self) -> EngineStats:
        def read(batch: SequenceBatch) -> EngineStats:
            return EngineStats(running=len(batch.running), waiting=len(batch.waiting), free_slots=batch.free_slots)

        return await self._running().call(read)

    def _load(self) -> SequenceBatch:
        """Load the model. Runs in the model's thread."""
        from outrider.engines.embedded.batch import SequenceBatch
        from outrider.engines.embedded.weights import load_model
        from outrider.tokens.rendering.tokenizer import Tokenizer

        model = load_model(self._folder)
        context = self._options.context_tokens or model.shape.context
        if context > model.shape.context:
            raise InvalidField(
                f"context_tokens {context} exceeds the model's own {model.shape.context}", field="options"
            )
        has_tokenizer = (self._tokenizer / "tokenizer.json").is_file()
        tokenizer = Tokenizer.load(self._tokenizer) if has_tokenizer else None
        return SequenceBatch(model, slots=self._options.slots, context=context, tokenizer=tokenizer)

    def _running(self) -> ModelThread:
        if self._end is not None:
            raise EngineUnavailable(self._end)
        if self._thread is None:
            raise EngineUnavailable(f"engine {self.name} is not started")
        return self._thread

    def _deliver(self, outputs: list[BatchOutput]) -> None:
        for output in outputs:
            # A request that was closed stays in the batch until the thread has run `remove`.
            if (queue := self._outputs.get(output.sequence)) is not None:
                queue.put_nowait(output.chunk)

    def _ended(self, reason: OutriderError) -> None:
        self._end = reason.message
        for queue in self._outputs.values():
            queue.put_nowait(EngineUnavailable(reason.message))
