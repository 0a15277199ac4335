"""The embedded engine: a small model served inside this process, for demos, tests and laptops.

It knows the Engine protocol and the event loop; torch is first imported when it starts. Invariant: a request
that is accepted holds one entry of `_live` until its last chunk, its error, or the close of its generator.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.constraint import ConstraintKind
from outrider.engines.adapters.options import read_options
from outrider.engines.base import Chunk, EngineHealth, EngineOptions, GenerateRequest, PauseMode
from outrider.errors import EngineUnavailable, InvalidField, OutriderError
from outrider.trajectory import LogprobKind, TokenMode

if TYPE_CHECKING:
    from outrider.engines.embedded.batch import Batch, Event
    from outrider.engines.embedded.generation import Generation
    from outrider.engines.embedded.worker import Worker

MAX_REQUESTS = 4096
"""Requests running or waiting at once; one more is refused as EngineUnavailable, which callers retry."""


class EmbeddedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slots` generations run at once; the cache holds slots x context_tokens positions (default: the context
    the model was made for). `threads` are torch's; more than one rarely helps a model this engine is for."""

    slots: int = 32
    context_tokens: int | None = None
    threads: int = 1


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Generations running and waiting, and slots free, between two steps."""

    running: int
    waiting: int
    free_slots: int


class EmbeddedEngine:
    """Serves the model in folder `model` (Hugging Face layout: config.json, *.safetensors, tokenizer.json).

    Raises EngineUnavailable when torch is not installed, InvalidField for wrong options; `start` raises
    ModelMismatch or EngineRejected for a folder it cannot serve.
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.RAW
    constraints = frozenset(ConstraintKind)

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
        self._options = _checked(read_options(EmbeddedOptions, options.options))
        self._worker: Worker | None = None
        self._version = 0
        self._end: str | None = None
        self._live: dict[Generation, asyncio.Queue[Chunk | EngineUnavailable]] = {}

    async def start(self) -> None:
        if not (self._folder / "config.json").is_file():
            raise EngineUnavailable(
                f"no model in {self._folder}", hint="give a folder that holds config.json and *.safetensors"
            )
        worker_module = await asyncio.to_thread(importlib.import_module, "outrider.engines.embedded.worker")
        worker: Worker = worker_module.Worker(
            self._load, threads=self._options.threads, name=self.name, sink=self._deliver, lost=self._lost
        )
        try:
            await worker.start()
        except BaseException:  # cancelled, too: its thread ends
            await worker.close()
            raise
        self._worker = worker

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        worker = self._running()
        if len(self._live) >= MAX_REQUESTS:
            raise EngineUnavailable(f"engine {self.name} has {MAX_REQUESTS} requests already")
        if request.sampling.constraint is None:
            generation = worker.admission.check(request)
        else:  # compiling a schema may take long
            generation = await asyncio.to_thread(worker.admission.check, request)
            worker = self._running()  # it may have ended meanwhile
        output: asyncio.Queue[Chunk | EngineUnavailable] = asyncio.Queue()  # bounded by max_tokens
        self._live[generation] = output
        worker.post(lambda batch: batch.add(generation))
        try:
            while True:
                item = await output.get()
                if isinstance(item, EngineUnavailable):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            del self._live[generation]
            worker.post(lambda batch: batch.remove(generation))

    async def health(self) -> EngineHealth:
        if self._worker is None or self._end is not None:
            return EngineHealth(ok=False, detail=self._end or "not started", model=str(self._folder))
        return EngineHealth(
            ok=True,
            detail=f"{len(self._live)} requests",
            model=str(self._folder),
            context_tokens=self._worker.admission.context,
            version=self._version,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. "finish" returns when what was running has ended, "abort" when it has been ended
        with what it had, "keep" when it is frozen. Requests still waiting for a slot wait on in all three."""
        await self._running().pause(mode)

    async def resume(self) -> None:
        await self._running().call(lambda batch: batch.resume())

    async def update_weights(self, weights: str | Path | Mapping[str, Any], version: int) -> None:
        """Serve other weights, and stamp every token from the next one on with `version`.

        `weights` is a safetensors file, a folder of them, or a mapping of published (Hugging Face) names to
        tensors; all tensors of the model must be there. What is being generated goes on over the keys and
        values it has; no other generation reuses those. Raises EngineRejected, with nothing changed.
        """
        worker = self._running()
        state: Mapping[str, Any]
        if isinstance(weights, Mapping):
            state = weights
        else:
            state = await asyncio.to_thread(_read_weights, Path(weights))
        await worker.call(lambda batch: batch.update(state, version))
        self._version = version

    async def set_version(self, version: int) -> None:
        """Stamp tokens with `version` from the next one on; for weights that `update_weights` did not bring."""
        worker = self._running()
        if version != self._version:
            await worker.call(lambda batch: batch.update(None, version))
            self._version = version

    async def token_check(self, text: str) -> list[int] | None:
        return self._running().admission.encode(text)

    async def stats(self) -> EngineStats:
        def read(batch: Batch) -> EngineStats:
            return EngineStats(running=len(batch.running), waiting=len(batch.waiting), free_slots=batch.free_slots)

        return await self._running().call(read)

    def _load(self) -> Batch:
        from outrider.engines.embedded.batch import Batch
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
        return Batch(model, slots=self._options.slots, context=context, tokenizer=tokenizer)

    def _running(self) -> Worker:
        if self._end is not None:
            raise EngineUnavailable(self._end)
        if self._worker is None:
            raise EngineUnavailable(f"engine {self.name} is not started")
        return self._worker

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if (output := self._live.get(event.generation)) is not None:
                output.put_nowait(event.chunk)

    def _lost(self, end: OutriderError) -> None:
        self._end = end.message
        for output in self._live.values():
            output.put_nowait(EngineUnavailable(end.message))


def _read_weights(path: Path) -> Mapping[str, Any]:
    from outrider.engines.embedded.weights import read_weights

    return read_weights(path)


def _checked(options: EmbeddedOptions) -> EmbeddedOptions:
    least = {"slots": 1, "context_tokens": 2, "threads": 1}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise InvalidField(f"embedded engine: {name} must be at least {bound}", field="options")
    return options
