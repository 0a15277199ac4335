"""One request on its way through the batch, and the check that lets it in.

It knows no slot's content and no model. Invariant: a Generation exists only for a request that fits: its ids
are of the vocabulary, its prompt leaves room for a token, its sampling parameters are in range.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outrider.engines.base import GenerateRequest, SamplingParams
from outrider.engines.embedded.sampler import Draw, Stream, check_sampling
from outrider.engines.embedded.stops import Stop, StopWatch
from outrider.engines.embedded.structured_output import Form, Forms
from outrider.errors import ContextOverflow, EngineRejected
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import FinishReason, Ids, VersionSpan

NONE = -1


class Generation:
    """`slot` is NONE while it waits, `last` (its newest token) while it has no output. `cached` counts the
    prompt's tokens that needed no computing."""

    def __init__(self, prompt: Ids, stream: Stream, watch: StopWatch) -> None:
        self.prompt = prompt
        self.stream = stream
        self.watch = watch
        self.slot = NONE
        self.last = NONE
        self.cached = 0
        self._versions: list[int] = []

    def accept(self, draw: Draw, version: int) -> Stop | None:
        """Take the next token, sampled by `version`; how the generation ends, if this ends it."""
        self.last = draw.token
        self._versions.append(version)
        self.stream.accept(draw.token)
        stop = self.watch.push(draw.token)
        if stop is None and self.stream.form_finished:
            return Stop(FinishReason.ABORT if self.stream.form_failed else FinishReason.STOP)
        return stop

    def spans(self) -> tuple[VersionSpan, ...]:
        """The versions of the output's tokens, as half-open spans over it."""
        spans: list[VersionSpan] = []
        for index, version in enumerate(self._versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
            else:
                spans.append(VersionSpan(version, index, index + 1))
        return tuple(spans)


class Admission:
    """What a request must fit: the size of the vocabulary, the context in tokens, and, for stop strings and forms, a
    tokenizer."""

    def __init__(self, *, vocab: int, context: int, tokenizer: Tokenizer | None) -> None:
        self.context = context
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._forms = Forms(Path(tokenizer.name_or_path), vocab) if tokenizer else None

    def encode(self, text: str) -> list[int] | None:
        """The model's ids of a text, special tokens included; None without a tokenizer."""
        return self._tokenizer.encode(text) if self._tokenizer else None

    def check(self, request: GenerateRequest) -> Generation:
        """A generation for the request; its output ends where the context does. With a constraint it may take a second.
        Raises ContextOverflow or EngineRejected."""
        sampling = request.sampling
        check_sampling(sampling)
        prompt: Ids = np.ascontiguousarray(request.input_ids, dtype=np.int32)
        if len(prompt) == 0:
            raise EngineRejected("the prompt is empty", field="input_ids")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab:
            raise EngineRejected("the prompt has ids outside the model's vocabulary", field="input_ids")
        room = self.context - len(prompt)
        if room < 1:
            raise ContextOverflow(f"the prompt of {len(prompt)} tokens leaves no room in the context of {self.context}")
        if sampling.stop and self._tokenizer is None:
            raise EngineRejected("stop strings need a tokenizer.json in the model's folder", field="stop")
        if any(not 0 <= token < self._vocab for token in sampling.logit_bias):
            raise EngineRejected("logit_bias has ids outside the model's vocabulary", field="logit_bias")
        text = self._tokenizer.stream() if sampling.stop and self._tokenizer else None
        limit = min(sampling.max_tokens, room)
        stream = Stream(sampling, prompt=prompt, form=self._form(sampling))
        return Generation(prompt, stream, StopWatch(sampling, limit=limit, text=text))

    def _form(self, sampling: SamplingParams) -> Form | None:
        if sampling.constraint is None:
            return None
        if self._forms is None:
            raise EngineRejected("structured output needs a tokenizer.json in the model's folder")
        return self._forms.compile(sampling.constraint, sampling.stop_token_ids)
