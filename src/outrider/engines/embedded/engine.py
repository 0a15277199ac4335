"""The embedded engine: a small model served inside this process, for demos, tests and laptops.

`EmbeddedEngine` is a `FunctionEngine` whose generate function uses a `SamplerThread`. torch is imported only when the
engine starts.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from outrider.engines.adapters.options import read_options
from outrider.engines.base import Capability, EngineOptions, PauseMode
from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.environment import install_command
from outrider.errors import EngineUnavailable, InvalidField
from outrider.trajectory import LogprobKind

if TYPE_CHECKING:
    from outrider.engines.embedded.model import Llama
    from outrider.engines.embedded.sampler_thread import SamplerThread


class EmbeddedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the embedded engine.

    `slots`: maximum number of sequences that run at once.
    `context_tokens`: by default the model's maximum context.
    `threads`: the number of torch's threads. More than one rarely helps a model of this size."""

    slots: Annotated[int, msgspec.Meta(ge=1)] = 32
    context_tokens: Annotated[int, msgspec.Meta(ge=2)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class EmbeddedEngine(FunctionEngine):
    """Serves the model in the folder `options.model` (Hugging Face layout: config.json, *.safetensors, tokenizer.json).

    Raises EngineUnavailable if torch or safetensors is not installed, and InvalidField for wrong options. `start`
    raises EngineUnavailable if there is no config.json in the folder, and ModelMismatch or EngineRejected if the model
    cannot be served.
    """

    capabilities = frozenset({Capability.VERSIONED_CACHE})

    def __init__(self, options: EngineOptions) -> None:
        missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            raise EngineUnavailable(
                f"the embedded engine needs {' and '.join(missing)}", hint=install_command("embedded")
            )
        if options.model is None:
            raise InvalidField("the embedded engine needs the model's folder", field="model")
        super().__init__(
            lambda request: self._running().generate(request),
            name=options.name,
            model=options.model,
            logprob_kind=LogprobKind.RAW,
            tokenize=lambda text: self._running().checker.encode(text),
            healthy=self._trouble,
            changed=lambda: self._running().weights_changed(),
        )
        self._folder = Path(options.model)
        self._tokenizer = Path(options.tokenizer or options.model)
        self._options = read_options(EmbeddedOptions, options.options)
        self._thread: SamplerThread | None = None
        self._llama: Llama | None = None

    async def start(self) -> None:
        if not (self._folder / "config.json").is_file():
            raise EngineUnavailable(
                f"no model in {self._folder}", hint="give a folder that holds config.json and *.safetensors"
            )
        thread = await asyncio.to_thread(self._load)
        self._context_tokens = thread.checker.context
        self._thread = thread.__enter__()

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.__exit__, None, None, None)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. With "finish", the method returns when all generations have ended. "abort" ends them with
        the tokens sampled so far, and "keep" freezes them until `resume`."""
        self._running().freeze(mode == "keep")
        await super().pause(mode)

    async def resume(self) -> None:
        self._running().freeze(False)
        await super().resume()

    async def update_weights(self, weights: str | Path | Mapping[str, Any], version: int) -> None:
        """Replace the weights. Tokens sampled from now on have the policy version `version`.

        `weights` is a safetensors file, a folder of such files, or a mapping of Hugging Face names to tensors. Every
        tensor of the model must be there. The keys and values of running generations are computed again. Raises
        EngineRejected if the weights are refused; the old weights then stay in use.
        """
        thread = self._running()

        def update() -> None:
            from outrider.engines.embedded.weights import apply_weights, read_weights

            state = weights if isinstance(weights, Mapping) else read_weights(Path(weights))
            with thread.weights():
                assert self._llama is not None
                apply_weights(self._llama, state)
                self.version = version

        await asyncio.to_thread(update)

    def _load(self) -> SamplerThread:
        """Load the model, and create its sampler thread without starting it. Blocks, so call this in a thread. Raises
        InvalidField if `context_tokens` is more than the model's context."""
        from outrider.engines.embedded.batch import RowBatch
        from outrider.engines.embedded.sampler_thread import QueuedRow, SamplerThread
        from outrider.engines.embedded.sequence import RequestChecker
        from outrider.engines.embedded.weights import load_model
        from outrider.tokens.rendering.tokenizer import Tokenizer

        self._llama = load_model(self._folder)
        shape, slots = self._llama.shape, self._options.slots
        context = self._options.context_tokens or shape.context
        if context > shape.context:
            raise InvalidField(f"context_tokens {context} exceeds the model's own {shape.context}", field="options")
        has_tokenizer = (self._tokenizer / "tokenizer.json").is_file()
        tokenizer = Tokenizer.load(self._tokenizer) if has_tokenizer else None
        checker = RequestChecker(vocab=shape.vocab, context=context, tokenizer=tokenizer)
        batch: RowBatch[QueuedRow] = RowBatch(self._llama.extend, kept=slots)
        return SamplerThread(self, batch, checker, rows=slots, threads=self._options.threads)

    async def _trouble(self) -> str:
        return "not started" if self._thread is None else self._thread.end or ""

    def _running(self) -> SamplerThread:
        if self._thread is None:
            raise EngineUnavailable(f"engine {self.name} is not started")
        if self._thread.end is not None:
            raise EngineUnavailable(self._thread.end)
        return self._thread
