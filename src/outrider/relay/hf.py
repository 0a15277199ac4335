"""Samples from a Hugging Face model while it is being trained, in the trainer's process.

    with ModelSampler(model, tokenizer=FOLDER) as sampler, Worker(URL, sampler.engine).in_thread() as worker:
        for step, batch in enumerate(batches, start=1):
            with sampler.weights():
                train(model, batch)
                worker.set_version(step)

Invariant: a token's log-probability is conditioned on all tokens before it, and is computed with the weights of the
token's policy version.
"""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.engines.embedded.function_engine import FunctionEngine
from outrider.errors import InvalidField
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import LogprobKind

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.embedded.batch import Cache


class ModelSampler:
    """Samples from `model`, a causal language model of transformers (or one with the same interface) on any device. Use
    the sampler as a context manager. Inside the block, a thread samples up to `rows` generations at once, with
    continuous batching.

    - `tokenizer`: the folder with the model's tokenizer.json. It is needed for stop strings, and for the service's
      check of the tokenizer.
    - `name`: the model's name, by default the name in its config.
    - `context_tokens`: the context length, by default the config's `max_position_embeddings`. Raises InvalidField if
      both are missing.
    - `version`: the policy version of the initial weights.

    Log-probabilities are RAW: log-softmax of the logits, before temperature and truncation. Structured output is not
    supported.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: str | Path | None = None,
        name: str | None = None,
        context_tokens: int | None = None,
        rows: int = 32,
        version: int = 0,
    ) -> None:
        from outrider.engines.embedded.batch import RowBatch
        from outrider.engines.embedded.sampler_thread import QueuedRow, SamplerThread
        from outrider.engines.embedded.sequence import RequestChecker

        # The config of a multimodal model has a separate config for its text model.
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        context = context_tokens or getattr(config, "max_position_embeddings", None)
        if context is None:
            raise InvalidField("the model's config has no max_position_embeddings", field="context_tokens")
        text = None if tokenizer is None else Tokenizer.load(tokenizer)
        self.engine = FunctionEngine(
            lambda request: self._thread.generate(request),
            name="model sampler",
            model=name or getattr(model.config, "name_or_path", None) or None,
            context_tokens=context,
            logprob_kind=LogprobKind.RAW,
            version=version,
            tokenize=None if text is None else text.encode,
            healthy=self._trouble,
            changed=lambda: self._thread.weights_changed(),
        )
        checker = RequestChecker(vocab=config.vocab_size, context=context, tokenizer=text)
        self._batch: RowBatch[QueuedRow] = RowBatch(_HuggingFaceForward(model))
        self._thread = SamplerThread(self.engine, self._batch, checker, rows=rows)

    def __enter__(self) -> Self:
        self._thread.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.__exit__(kind, error, trace)

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that stops sampling inside its block. A block that changes the weights must also set
        the new version (`Worker.set_version`). Running generations then continue with the new weights. Between two
        blocks, the sampler runs at least one step if it has work."""
        return self._thread.weights()

    async def _trouble(self) -> str:
        return self._thread.end or ""


class _HuggingFaceForward:
    """Implements `Forward` for a model of transformers. Each call runs the model in evaluation mode, and then restores
    training mode if it was on."""

    def __init__(self, model: Any) -> None:
        self._model = model
        named = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
        # transformers 5.24 renamed `past_key_values` to `cache`, and warns about the old name.
        self._cache_parameter = "cache" if "cache" in named else "past_key_values"

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        device = next(self._model.parameters()).device
        training = self._model.training
        if training:
            self._model.eval()
        try:
            output = self._model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                use_cache=True,
                **{self._cache_parameter: past},
                **self._last_only,
            )
        finally:
            if training:
                self._model.train()
        # The model has added the keys and values of the new tokens to `past`.
        layers = [(layer.keys, layer.values) for layer in past.layers]
        return output.logits[:, -1].float().cpu(), layers
