"""Samples from a Hugging Face model that is being trained, in the trainer's own process.

    with ModelSampler(model, tokenizer=FOLDER) as sampler, Worker(URL, sampler.engine).in_thread() as worker:
        for step, batch in enumerate(batches, start=1):
            with sampler.weights():
                train(model, batch)
                worker.set_version(step)

Invariants: the model computes either for the trainer or for the sampler, never for both at once; a token's
log-probability is computed with the weights of its version, over all tokens before it. So when the weights change, the
keys and values of running generations are computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.engines.base import Chunk, GenerateRequest
from outrider.errors import EngineUnavailable, InvalidField
from outrider.relay.function_engine import FunctionEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import LogprobKind, VersionSpan

if TYPE_CHECKING:
    import torch

    from outrider.engines.embedded.sequence import RequestChecker, TokenSequence

MAX_WAITING = 4096
"""Maximum generations running or waiting. Further generations are refused with EngineUnavailable."""


class _Row:
    """One generation: its sequence, the ids so far, and the queue of chunks on the event loop."""

    def __init__(self, sequence: TokenSequence) -> None:
        self.sequence = sequence
        self.ids: list[int] = sequence.prompt.tolist()
        self.gone = False
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Chunk | EngineUnavailable] = asyncio.Queue()  # bounded by max_tokens

    def give(self, item: Chunk | EngineUnavailable) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no consumer is left
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class ModelSampler:
    """A sampler for `model`, a causal language model of transformers (or with the same interface), on any device.
    Enter it with `with`: while it is open, a thread samples up to `rows` generations at once, continuously batched.

    `tokenizer` is the folder of the model's tokenizer.json, needed for stop strings and for the service's check of the
    tokenizer. Log-probabilities are RAW: log-softmax of the logits, before temperature and truncation. Structured
    output is not offered.
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
        from outrider.engines.embedded.sequence import RequestChecker

        # Multimodal models keep the settings of their text model separately.
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        context = context_tokens or getattr(config, "max_position_embeddings", None)
        if context is None:
            raise InvalidField("the model's config has no max_position_embeddings", field="context_tokens")
        text = None if tokenizer is None else Tokenizer.load(tokenizer)
        self.engine = FunctionEngine(
            self._generate,
            name="model sampler",
            model=name or getattr(model.config, "name_or_path", None) or None,
            context_tokens=context,
            logprob_kind=LogprobKind.RAW,
            version=version,
            tokenize=None if text is None else text.encode,
            healthy=self._trouble,
            changed=self._version_changed,
        )
        self._checker: RequestChecker = RequestChecker(vocab=config.vocab_size, context=context, tokenizer=text)
        self._batch = _Batch(model, rows)
        self._waiting: deque[_Row] = deque()
        self._new: list[_Row] = []
        """The generations that the current step adds to the batch."""
        self._rows = 0
        self._state = threading.Condition()
        """Guards `_waiting`, `_new`, `_rows` and the attributes below, except `_thread`."""
        self._stepping = False
        self._wanted = 0
        self._owed = False
        """True if the sampler gets the model next, if it has work. A trainer that enters one `weights` block after
        another must not starve the sampler."""
        self._holder: int | None = None
        self._stale = False
        self._stepped = version
        self._closed = False
        self._end: str | None = None
        self._thread = threading.Thread(target=self._run, name="model sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join()

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Hold the model exclusively inside the block, which begins between two steps of sampling. A block that
        changes the weights must set the version (`Worker.set_version`): running generations then continue with the new
        weights. Between two blocks the sampler gets at least one step, if it has work."""
        with self._state:
            if self._holder == threading.get_ident():
                raise RuntimeError("this thread has the weights already")
            self._wanted += 1
            self._state.wait_for(self._may_hold)
            self._wanted -= 1
            self._holder = threading.get_ident()
        try:
            yield
        finally:
            with self._state:
                self._holder = None
                self._owed = True
                self._state.notify_all()

    async def _trouble(self) -> str:
        return self._end or ""

    def _version_changed(self) -> None:
        with self._state:
            self._stale = True

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        row = _Row(self._checker.check(request))
        with self._state:
            if self._end is not None:
                raise EngineUnavailable(self._end)
            if self._rows >= MAX_WAITING:
                raise EngineUnavailable(f"the model has {MAX_WAITING} generations already")
            self._rows += 1
            self._waiting.append(row)
            self._state.notify_all()
        try:
            while True:
                item = await row.queue.get()
                if isinstance(item, EngineUnavailable):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            with self._state:
                row.gone = True
                self._rows -= 1

    def _run(self) -> None:
        end = "the model's sampler is closed"
        try:
            while self._step():
                """Each step samples one token for each running generation."""
        except Exception as error:  # waiting generations must receive any error of the model
            end = f"the model failed: {type(error).__name__}: {error}"
        with self._state:
            self._end = end
            left = {*self._waiting, *self._new, *self._batch.rows}
            self._waiting.clear()
            self._state.notify_all()
        for row in left:
            row.give(EngineUnavailable(end))

    def _step(self) -> bool:
        """Wait for work, and run one step of sampling. Returns False, without a step, once the sampler is closed."""
        with self._state:
            self._state.wait_for(self._may_step)
            if self._closed:
                return False
            self._stepping, self._owed = True, False
            version = self.engine.version
            stale = self._stale or version != self._stepped
            self._stale, self._stepped = False, version
            new: list[_Row] = []
            self._new = new
            while self._waiting and self._batch.running + len(new) < self._batch.slots:
                row = self._waiting.popleft()
                if not row.gone:
                    new.append(row)
        try:
            self._batch.step(new, version, stale=stale)
        finally:
            with self._state:
                self._stepping = False
                self._state.notify_all()
        return True

    def _may_step(self) -> bool:
        free = self._holder is None and (self._owed or not self._wanted)
        return self._closed or (free and self._has_work)

    def _may_hold(self) -> bool:
        owed = self._owed and self._has_work and not self._closed
        return self._holder is None and not self._stepping and not owed

    @property
    def _has_work(self) -> bool:
        return self._end is None and bool(self._waiting or self._batch.rows)


class _Batch:
    """The running generations with their keys and values, padded on the left, so that all rows end in the same
    column."""

    def __init__(self, model: Any, slots: int) -> None:
        self.slots = slots
        self.rows: list[_Row] = []
        self._model = model
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mask: torch.Tensor | None = None
        named = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
        # The parameter's name since transformers 5.24, which warns of the older name.
        self._cache_parameter = "cache" if "cache" in named else "past_key_values"

    @property
    def running(self) -> int:
        return len(self.rows)

    def step(self, new: list[_Row], version: int, *, stale: bool) -> None:
        """Sample one token for each row, new rows included, with the weights of `version`. If `stale`, all keys and
        values are computed again."""
        import torch

        from outrider.engines.embedded.sampler import sample

        training = self._model.training
        if training:
            self._model.eval()
        try:
            # no_grad and not inference_mode: a model may keep buffers computed here, and training cannot use inference
            # tensors.
            with torch.no_grad():
                self._keep([place for place, row in enumerate(self.rows) if not row.gone])
                if stale:
                    new, self.rows, self._cache, self._mask = [*self.rows, *new], [], [], None
                logits = []
                if self.rows:
                    assert self._mask is not None
                    self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
                    last = torch.tensor([[row.ids[-1]] for row in self.rows], device=self._mask.device)
                    decoded, self._cache = self._forward(last, self._mask, self._cache)
                    logits.append(decoded)
                if new:
                    logits.append(self._prefill(new))
                if not logits:
                    return
                sampled = sample(torch.cat(logits), [row.sequence.sampling for row in self.rows])
        finally:
            if training:
                self._model.train()
        left = []
        for place, (row, token) in enumerate(zip(self.rows, sampled, strict=True)):
            row.ids.append(token.token)
            stop = row.sequence.accept(token, version)
            if stop is None:
                left.append(place)
                count = len(row.ids) - len(row.sequence.prompt)
                # The span is set now, because the trainer may change the version before the chunk is read.
                span = VersionSpan(version, count - 1, count)
                row.give(Chunk(ids=[token.token], logprobs=[token.logprob], versions=(span,)))
            else:
                row.give(
                    Chunk(
                        ids=[token.token],
                        logprobs=[token.logprob],
                        finish=stop.reason,
                        stop_match=stop.match,
                        versions=row.sequence.version_spans(),
                    )
                )
        self._keep(left)

    def _prefill(self, new: list[_Row]) -> torch.Tensor:
        """Add rows to the batch. Returns the logits after the last token of each new row."""
        import torch

        device = next(self._model.parameters()).device
        width = max(len(row.ids) for row in new)
        ids = torch.zeros((len(new), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(new):
            ids[place, width - len(row.ids) :] = torch.tensor(row.ids)
            mask[place, width - len(row.ids) :] = 1
        mask = mask.to(device)
        logits, cache = self._forward(ids.to(device), mask, [])
        if self._mask is None:
            self._mask, self._cache = mask, cache
        else:
            total = max(width, self._mask.shape[1])
            self._cache = [
                (_stacked(keys, more_keys, total), _stacked(values, more_values, total))
                for (keys, values), (more_keys, more_values) in zip(self._cache, cache, strict=True)
            ]
            pad = torch.nn.functional.pad
            self._mask = torch.cat([pad(each, (total - each.shape[1], 0)) for each in (self._mask, mask)])
        self.rows += new
        return logits

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the logits of the last column, and the cache with the new columns."""
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_parameter: past},
            **self._last_only,
        )
        layers = [(layer.keys, layer.values) for layer in past.layers]  # the model has added the new columns
        return output.logits[:, -1].float().cpu(), layers

    def _keep(self, places: list[int]) -> None:
        """Drop all rows except `places`, and the columns that are padding in every remaining row."""
        import torch

        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if not places or self._mask is None:
            self._cache, self._mask = [], None
            return
        chosen = torch.tensor(places, device=self._mask.device)
        mask = self._mask[chosen]
        first = int(mask.any(dim=0).long().argmax())
        self._mask = mask[:, first:]
        self._cache = [(keys[chosen, :, first:], values[chosen, :, first:]) for keys, values in self._cache]


def _stacked(rows: torch.Tensor, more: torch.Tensor, width: int) -> torch.Tensor:
    """Stack keys or values (rows, heads, columns, size) of all rows, padded on the left to `width` columns."""
    import torch

    pad = torch.nn.functional.pad
    return torch.cat([pad(each, (0, 0, width - each.shape[2], 0)) for each in (rows, more)])
