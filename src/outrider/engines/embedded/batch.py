"""Continuous batching: admits waiting generations to slots, prefills in chunks, decodes all of them together.

It knows no event loop, thread or wire: `step` is called again and again by whoever owns the batch. Invariant:
a generation that has output keeps its keys and values across a weight update; one that has none yet is
computed again, and no other generation ever reads what older weights computed.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch
from torch import Tensor

from outrider.engines.base import Chunk, PauseMode
from outrider.engines.embedded.cache import Cache
from outrider.engines.embedded.generation import NONE, Admission, Generation
from outrider.engines.embedded.model import Llama
from outrider.engines.embedded.sampler import Draw, sample
from outrider.engines.embedded.slots import Slots
from outrider.engines.embedded.stops import Stop
from outrider.engines.embedded.weights import StateDict, apply_weights
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason

PREFILL_TOKENS = 256
"""Prompt tokens computed per step, so that a long prompt does not hold up those who decode."""


class Event(msgspec.Struct, frozen=True):
    """New output of one generation."""

    generation: Generation
    chunk: Chunk


class Batch:
    """Generations over one model. Not thread-safe: one thread calls everything, under `torch.inference_mode`.

    `slots` generations run at once, in sequences of at most `context` tokens; the others wait in order.
    """

    def __init__(self, model: Llama, *, slots: int, context: int, tokenizer: Tokenizer | None = None) -> None:
        self.model = model
        self.admission = Admission(vocab=model.shape.vocab, context=context, tokenizer=tokenizer)
        self.version = 0
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.paused: PauseMode | None = None
        self._slots = Slots(slots, context)
        self._cache = Cache(model.shape, slots, context)

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def has_work(self) -> bool:
        """Whether `step` would get anywhere now."""
        if self.paused == "keep":
            return False
        return bool(self.running or (self.waiting and self.paused is None))

    def add(self, generation: Generation) -> None:
        self.waiting.append(generation)

    def remove(self, generation: Generation) -> None:
        """Forget a generation, wherever it is; its slot is free at once. Nothing when it has ended already."""
        if generation in self.running:
            self._leave(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)

    def pause(self, mode: PauseMode) -> list[Event]:
        """Stop admitting; what is running goes on (finish), ends now (abort) or freezes (keep). What waits,
        waits on. Returns the last events of what was aborted."""
        self.paused = mode
        if mode != "abort":
            return []
        return [self._end(generation, Stop(FinishReason.ABORT), []) for generation in list(self.running)]

    def resume(self) -> None:
        self.paused = None

    def update(self, state: StateDict | None, version: int) -> None:
        """Serve `version` from the next token on, with the weights of `state`, or, where it is None, with what
        the owner of the model has written into it. Raises EngineRejected, with nothing changed."""
        if state is not None:
            apply_weights(self.model, state)
        self.version = version
        self._slots.weights_changed()
        for generation in self.running:
            if generation.last == NONE:
                self._slots.clear(generation.slot)
                generation.cached = 0

    def step(self) -> list[Event]:
        """Compute one token for every generation whose prompt is complete, after a share of prefilling."""
        self._admit()
        decoding = [generation for generation in self.running if generation.last != NONE]
        ready, states = self._prefill()
        if decoding:
            ready = decoding + ready
            states.insert(0, self._decode(decoding))
        if not ready:
            return []
        draws = sample(self.model.logits(torch.cat(states)), [generation.stream for generation in ready])
        return [self._advance(generation, draw) for generation, draw in zip(ready, draws, strict=True)]

    def _admit(self) -> None:
        while self.paused is None and self.waiting:
            generation = self.waiting[0]
            lease = self._slots.take(generation.prompt)
            if lease is None:
                return
            if lease.donor is not None:
                self._cache.copy(lease.donor, lease.slot, lease.cached)
            generation.slot, generation.cached = lease.slot, lease.cached
            self.running.append(self.waiting.popleft())

    def _prefill(self) -> tuple[list[Generation], list[Tensor]]:
        """Spend the step's share of prompt tokens, oldest generation first. Gives those whose prompt is now
        complete, and the final state (1, hidden) of each."""
        budget = PREFILL_TOKENS
        ready: list[Generation] = []
        states: list[Tensor] = []
        for generation in self.running:
            if generation.last != NONE:
                continue
            start = self._slots.length(generation.slot)
            end = min(len(generation.prompt), start + budget)
            if end == start:
                break
            budget -= end - start
            ids = generation.prompt[start:end]
            hidden = self.model.hidden(
                torch.from_numpy(ids.astype(np.int64))[None],
                torch.arange(start, end)[None],
                self._cache.prefill(generation.slot, start, end),
            )
            self._slots.extend(generation.slot, ids)
            if end == len(generation.prompt):
                ready.append(generation)
                states.append(hidden[:, -1])
        return ready, states

    def _decode(self, generations: list[Generation]) -> Tensor:
        """Final states (generations, hidden) of each one's last token."""
        slots = [generation.slot for generation in generations]
        last = [generation.last for generation in generations]
        positions = [self._slots.length(slot) for slot in slots]
        hidden = self.model.hidden(
            torch.tensor(last)[:, None], torch.tensor(positions)[:, None], self._cache.decode(slots, positions)
        )
        for slot, token in zip(slots, last, strict=True):
            self._slots.extend(slot, token)
        return hidden[:, 0]

    def _advance(self, generation: Generation, draw: Draw) -> Event:
        stop = generation.accept(draw, self.version)
        if stop is not None:
            return self._end(generation, stop, [draw])
        return Event(generation, Chunk(ids=[draw.token], logprobs=[draw.logprob]))

    def _end(self, generation: Generation, stop: Stop, draws: list[Draw]) -> Event:
        self._leave(generation)
        chunk = Chunk(
            ids=[draw.token for draw in draws],
            logprobs=[draw.logprob for draw in draws],
            finish=stop.reason,
            stop_match=stop.match,
            versions=generation.spans(),
            cached_tokens=generation.cached,
        )
        return Event(generation, chunk)

    def _leave(self, generation: Generation) -> None:
        self.running.remove(generation)
        self._slots.release(generation.slot)
        generation.slot = NONE
