"""Continuous batching: admits waiting sequences to slots, prefills prompts in pieces, decodes all sequences together.

The module is independent of event loops, threads and protocols: the owner of the batch calls `step` repeatedly. Eight
concurrent sequences take a quarter of the time of the same sequences in turn, and 32 about a seventh (one core, the
demo's policy). Invariant: when the weights change, a sequence with output keeps its keys and values, and a sequence
without output is computed again. No other sequence ever reads values computed by older weights.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch
from torch import Tensor

from outrider.engines.base import Chunk, PauseMode
from outrider.engines.embedded.kv_cache import KeyValueCache, SlotTable
from outrider.engines.embedded.model import Llama
from outrider.engines.embedded.sampler import SampledToken, sample
from outrider.engines.embedded.sequence import NONE, RequestChecker, SequenceStop, TokenSequence
from outrider.engines.embedded.weights import StateDict, apply_weights
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason

PREFILL_TOKENS = 256
"""Maximum prompt tokens computed in a step, so that a long prompt does not delay the sequences that decode."""


class BatchOutput(msgspec.Struct, frozen=True):
    """New output of one sequence."""

    sequence: TokenSequence
    chunk: Chunk


class SequenceBatch:
    """Sequences over one model. Not thread-safe: one thread makes every call, under `torch.inference_mode`.

    `slots` sequences of at most `context` tokens run at once. The others wait, first come, first served.
    """

    def __init__(self, model: Llama, *, slots: int, context: int, tokenizer: Tokenizer | None = None) -> None:
        self.model = model
        self.checker = RequestChecker(vocab=model.shape.vocab, context=context, tokenizer=tokenizer)
        self.version = 0
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []
        self.paused: PauseMode | None = None
        self._slots = SlotTable(slots, context)
        self._cache = KeyValueCache(model.shape, slots, context)

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def has_work(self) -> bool:
        """True if `step` would compute anything now."""
        if self.paused == "keep":
            return False
        return bool(self.running or (self.waiting and self.paused is None))

    def add(self, sequence: TokenSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence, running or waiting, and free its slot at once. Does nothing for a sequence that has
        ended."""
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def pause(self, mode: PauseMode) -> list[BatchOutput]:
        """Stop admitting. Running sequences continue ("finish"), end now ("abort") or freeze ("keep"). Waiting
        sequences keep waiting. Returns the last output of every sequence that was aborted."""
        self.paused = mode
        if mode != "abort":
            return []
        return [self._end(sequence, SequenceStop(FinishReason.ABORT), []) for sequence in list(self.running)]

    def resume(self) -> None:
        self.paused = None

    def update(self, state: StateDict | None, version: int) -> None:
        """Serve policy `version` from the next token on, with the weights of `state`. `state` is None if the model's
        owner has already written the weights into the model. Raises EngineRejected, with nothing changed."""
        if state is not None:
            apply_weights(self.model, state)
        self.version = version
        self._slots.weights_changed()
        for sequence in self.running:
            if sequence.last == NONE:  # nothing sampled yet: computing the prompt again costs only time
                self._slots.clear(sequence.slot)
                sequence.cached = 0

    def step(self) -> list[BatchOutput]:
        """Prefill up to PREFILL_TOKENS tokens, then compute one token for every sequence whose prompt is complete."""
        self._admit()
        decoding = [sequence for sequence in self.running if sequence.last != NONE]
        ready, states = self._prefill()
        if decoding:  # compute the newest token of each
            slots = [sequence.slot for sequence in decoding]
            last = [sequence.last for sequence in decoding]
            positions = [self._slots.length(slot) for slot in slots]
            hidden = self.model.hidden(
                torch.tensor(last)[:, None], torch.tensor(positions)[:, None], self._cache.decode(slots, positions)
            )
            for slot, token_id in zip(slots, last, strict=True):
                self._slots.extend(slot, token_id)
            ready = decoding + ready
            states.insert(0, hidden[:, 0])
        if not ready:
            return []
        outputs = []
        sampled = sample(self.model.logits(torch.cat(states)), [sequence.sampling for sequence in ready])
        for sequence, token in zip(ready, sampled, strict=True):
            stop = sequence.accept(token, self.version)
            if stop is not None:
                outputs.append(self._end(sequence, stop, [token]))
            else:
                outputs.append(BatchOutput(sequence, Chunk(ids=[token.token], logprobs=[token.logprob])))
        return outputs

    def _admit(self) -> None:
        """Move waiting sequences to slots while there are free slots."""
        while self.paused is None and self.waiting:
            sequence = self.waiting[0]
            lease = self._slots.take(sequence.prompt)
            if lease is None:
                return
            if lease.donor is not None:
                self._cache.copy(lease.donor, lease.slot, lease.cached)
            sequence.slot, sequence.cached = lease.slot, lease.cached
            self.running.append(self.waiting.popleft())

    def _prefill(self) -> tuple[list[TokenSequence], list[Tensor]]:
        """Compute prompt tokens, oldest sequence first. Returns the sequences whose prompt is now complete, and their
        final states (1, hidden)."""
        budget = PREFILL_TOKENS
        ready: list[TokenSequence] = []
        states: list[Tensor] = []
        for sequence in self.running:
            if sequence.last != NONE:
                continue
            start = self._slots.length(sequence.slot)
            end = min(len(sequence.prompt), start + budget)
            if end == start:
                break
            budget -= end - start
            ids = sequence.prompt[start:end]
            hidden = self.model.hidden(
                torch.from_numpy(ids.astype(np.int64))[None],
                torch.arange(start, end)[None],
                self._cache.prefill(sequence.slot, start, end),
            )
            self._slots.extend(sequence.slot, ids)
            if end == len(sequence.prompt):
                ready.append(sequence)
                states.append(hidden[:, -1])
        return ready, states

    def _end(self, sequence: TokenSequence, stop: SequenceStop, sampled: list[SampledToken]) -> BatchOutput:
        self._leave(sequence)
        chunk = Chunk(
            ids=[each.token for each in sampled],
            logprobs=[each.logprob for each in sampled],
            finish=stop.reason,
            stop_match=stop.match,
            versions=sequence.version_spans(),
            cached_tokens=sequence.cached,
        )
        return BatchOutput(sequence, chunk)

    def _leave(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self._slots.release(sequence.slot)
        sequence.slot = NONE
