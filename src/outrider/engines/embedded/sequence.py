"""One sequence of the batch: the check of its request, its sampling state, and its stop conditions.

Invariant: a TokenSequence exists only for a valid request. All its ids are in the vocabulary, the prompt is shorter
than the context, and the sampling parameters are in range.
"""

from __future__ import annotations

import msgspec
import numpy as np

from outrider.engines.base import GenerateRequest, SamplingParams
from outrider.engines.embedded.sampler import SampledToken, SamplingState, check_sampling
from outrider.errors import ContextOverflow, EngineRejected, Overflow
from outrider.tokens.rendering.tokenizer import TextStream, Tokenizer
from outrider.trajectory import FinishReason, Ids, VersionSpan


class SequenceStop(msgspec.Struct, frozen=True):
    """Why a sequence has ended. `match` is the stop token id or the stop string at which the sequence ended. It is None
    if the sequence has reached the maximum number of tokens."""

    reason: FinishReason
    match: int | str | None = None


class StopChecker:
    """Checks after each token whether the output ends: at a stop id, at a stop string, or at the maximum number of
    tokens.

    `limit` is this maximum. `text` decodes the output; it is None if there are no stop strings. The token that
    completes a stop string is part of the output.
    """

    def __init__(self, params: SamplingParams, *, limit: int, text: TextStream | None) -> None:
        self._ids = frozenset(params.stop_token_ids)
        self._strings = params.stop
        self._left = limit
        self._text = text
        self._tail = ""
        self._keep = max((len(string) for string in params.stop), default=1) - 1

    def push(self, token: int) -> SequenceStop | None:
        """Check the next token. Returns the reason if the output ends with it, otherwise None."""
        self._left -= 1
        if token in self._ids:
            return SequenceStop(FinishReason.STOP, token)
        if self._text is not None:
            seen = self._tail + self._text.push([token])
            found = [(at, string) for string in self._strings if (at := seen.find(string)) >= 0]
            if found:
                return SequenceStop(FinishReason.STOP, min(found, key=lambda match: match[0])[1])
            # A stop string may span several tokens. So keep the end of the text: one character less than the longest
            # stop string.
            self._tail = seen[-self._keep :] if self._keep else ""
        return SequenceStop(FinishReason.LENGTH) if self._left == 0 else None


class TokenSequence:
    """A prompt, with the sampling state and the stop conditions of its output."""

    def __init__(self, prompt: Ids, sampling: SamplingState, stops: StopChecker) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self._stops = stops
        self._versions: list[int] = []

    def accept(self, sampled: SampledToken, version: int) -> SequenceStop | None:
        """Add a token that was sampled with policy version `version`. Returns the reason if the sequence ends with it,
        otherwise None."""
        self._versions.append(version)
        self.sampling.accept(sampled.token)
        return self._stops.push(sampled.token)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Return the policy versions of the output's tokens, as half-open spans."""
        spans: list[VersionSpan] = []
        for index, version in enumerate(self._versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
            else:
                spans.append(VersionSpan(version, index, index + 1))
        return tuple(spans)


class RequestChecker:
    """Turns requests into sequences, and refuses requests that the model cannot serve.

    `vocab` is the number of logits, `context` the maximum length of a sequence in tokens. If `tokenizer` is None,
    requests with stop strings are refused.
    """

    def __init__(self, *, vocab: int, context: int, tokenizer: Tokenizer | None) -> None:
        self.context = context
        self._vocab = vocab
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int] | None:
        """Return the token ids of a text, or None without a tokenizer. Special tokens in the text are recognised."""
        return self._tokenizer.encode(text) if self._tokenizer else None

    def check(self, request: GenerateRequest) -> TokenSequence:
        """Create the sequence for a request. The output ends at the latest when the context is full. Raises
        ContextOverflow if the prompt alone fills the context, and EngineRejected for any other invalid request."""
        sampling = request.sampling
        check_sampling(sampling)
        if sampling.constraint is not None:
            raise EngineRejected(
                "this engine cannot constrain a reply to a form",
                field="constraint",
                hint="engines that can: docs/engines.md, structured output",
            )
        prompt: Ids = np.ascontiguousarray(request.input_ids, dtype=np.int32)
        if len(prompt) == 0:
            raise EngineRejected("the prompt is empty", field="input_ids")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab:
            raise EngineRejected("the prompt has ids outside the model's vocabulary", field="input_ids")
        room = self.context - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt of {len(prompt)} tokens leaves no room in the context of {self.context}",
                overflow=Overflow(len(prompt), self.context),
            )
        if sampling.stop and self._tokenizer is None:
            raise EngineRejected("stop strings need a tokenizer.json in the model's folder", field="stop")
        if any(not 0 <= token < self._vocab for token in sampling.logit_bias):
            raise EngineRejected("logit_bias has ids outside the model's vocabulary", field="logit_bias")
        text = self._tokenizer.stream() if sampling.stop and self._tokenizer else None
        stops = StopChecker(sampling, limit=min(sampling.max_tokens, room), text=text)
        return TokenSequence(prompt, SamplingState(sampling, prompt=prompt), stops)
