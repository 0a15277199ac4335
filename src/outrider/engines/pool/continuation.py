"""Continues replies that were cut off.

Invariant: a continued reply has exactly the ids, log-probabilities and version spans that the engines sent, each at its
position in the whole reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from outrider.engines.base import Chunk, GenerateRequest
from outrider.tokens.rendering.tokenizer import TextStream
from outrider.trajectory import FinishReason, VersionSpan

MAX_SEED = (1 << 31) - 1
"""The largest seed of a request that continues a reply. Every engine accepts seeds of 31 bits."""


class ContinuedGeneration:
    """One generation that takes several requests, because it was cut off. At each cut, one request ends and the next
    begins. `versions` has the spans of the tokens sampled before the newest request.

    Each new request asks only for the remaining tokens. It has its own seed, so that the engine does not repeat the
    random numbers of an earlier request. Engines do not find stop strings that began before their request, so this
    class searches for them with the decoder that `text` creates. If `text` is None, there is no search.
    """

    def __init__(self, request: GenerateRequest, text: Callable[[], TextStream] | None) -> None:
        self.versions: tuple[VersionSpan, ...] = ()
        self._request = request
        self._text = text
        self._sampled: list[int] = []
        self._cuts = 0
        self._given = 0  # number of tokens that the newest request has sampled
        self._cached: int | None = None
        self._watch: StopWatch | None = None

    def cut(self, ids: Sequence[int], last: Chunk | None, version: int) -> None:
        """Record that the newest request was cut off after it had sampled `ids`. `last` is the engine's last chunk, or
        None if it sent none. If `last` has no version spans, the tokens have the version `version`."""
        self._given = len(ids)
        self.versions = self._joined(last.versions if last else (), version)
        if last is not None:
            self._note_cached(last)
        self._sampled += ids
        self._given = 0
        self._cuts += 1
        stops = self._request.sampling.stop
        if stops and self._text is not None:
            self._watch = StopWatch(stops, self._text(), self._sampled)

    def ended(self) -> Chunk | None:
        """Return the last chunk if the reply was already complete when it was cut off, otherwise None. The reply is
        complete if the engine had sampled its last token but had not yet checked whether the reply ends there."""
        sampling, count = self._request.sampling, len(self._sampled)
        last = self._sampled[-1] if self._sampled else None
        string = self._watch.completed if self._watch is not None else None
        finish: FinishReason
        match: int | str | None
        if last in sampling.stop_token_ids and count > sampling.min_tokens:
            finish, match = FinishReason.STOP, last
        elif string is not None and count > sampling.min_tokens:
            finish, match = FinishReason.STOP, string
        elif count >= sampling.max_tokens:
            finish, match = FinishReason.LENGTH, None
        else:
            return None
        return Chunk(
            ids=[], logprobs=[], finish=finish, stop_match=match, versions=self.versions, cached_tokens=self._cached
        )

    def request(self) -> GenerateRequest:
        """Return the request that continues the reply. Its `request_id` has 32 characters, like any other."""
        first, sampling, count = self._request, self._request.sampling, len(self._sampled)
        name = f"{first.request_id}/{self._cuts}".encode()
        seed = sampling.seed
        if seed is not None and count:  # the same seed would repeat the same random numbers
            digest = blake2b(f"{seed}/{count}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") & MAX_SEED
        return GenerateRequest(
            request_id=blake2b(name, digest_size=16).hexdigest(),
            session_key=first.session_key,
            images=first.images,
            input_ids=np.concatenate((first.input_ids, np.asarray(self._sampled, dtype=np.int32))),
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - count,
                min_tokens=max(0, sampling.min_tokens - count),
                seed=seed,
            ),
        )

    def take(self, chunk: Chunk, version: int) -> Chunk:
        """Convert a chunk of the newest request to a chunk of the whole reply. If the engine sends no version spans,
        the tokens have the version `version`."""
        if self._watch is not None and chunk.ids:
            chunk = self._stopped(chunk, self._watch)
        self._given += len(chunk.ids)
        if chunk.prompt_ids is not None:
            chunk = msgspec.structs.replace(chunk, prompt_ids=self._echo(chunk.prompt_ids))
        if chunk.prompt_tokens is not None:
            chunk = msgspec.structs.replace(chunk, prompt_tokens=chunk.prompt_tokens - len(self._sampled))
        if chunk.finish is None:
            return chunk
        self._note_cached(chunk)
        return msgspec.structs.replace(
            chunk, versions=self._joined(chunk.versions, version), cached_tokens=self._cached
        )

    def _note_cached(self, last: Chunk) -> None:
        if self._cached is None and last.cached_tokens is not None:
            self._cached = min(last.cached_tokens, len(self._request.input_ids))

    def _stopped(self, chunk: Chunk, watch: StopWatch) -> Chunk:
        """Return the chunk. If one of its tokens completes a stop string that began in an earlier request, the chunk is
        cut after this token and becomes the last chunk of the reply."""
        before = len(self._sampled) + self._given
        for number, token_id in enumerate(chunk.ids, start=1):
            match = watch.push(token_id)
            if match is not None and before + number > self._request.sampling.min_tokens:
                return msgspec.structs.replace(
                    chunk,
                    ids=chunk.ids[:number],
                    logprobs=chunk.logprobs[:number],
                    finish=FinishReason.STOP,
                    stop_match=match,
                )
        if watch.over:
            self._watch = None
        return chunk

    def _echo(self, reported: list[int]) -> list[int]:
        """Return the part of `reported` that belongs to the original prompt. `reported` is the newest request's prompt,
        as the engine has reported it. The part after the original prompt should be the ids of the reply so far. For
        each wrong, missing or surplus id in this second part, an id 0 is appended to the result. The result then
        differs from the original prompt, so that a deviation (drift) is recorded."""
        length = len(self._request.input_ids)
        behind = reported[length:]
        wrong = sum(map(int.__ne__, behind, self._sampled)) + abs(len(behind) - len(self._sampled))
        return reported[:length] + [0] * wrong

    def _joined(self, versions: tuple[VersionSpan, ...], version: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the reply so far. `versions` are the spans of the newest request. If there are
        none, the tokens of the newest request have the version `version`."""
        start, count = len(self._sampled), self._given
        spans = list(self.versions)
        for span in versions or (VersionSpan(version, 0, count),):
            # a stop string that began in an earlier request may end the reply earlier than the engine does
            end = min(span.end, count)
            if end <= span.start:
                continue
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, start + end)
            else:
                spans.append(VersionSpan(span.version, start + span.start, start + end))
        return tuple(spans)


class StopWatch:
    """Searches for a stop string that spans a cut: it begins before a request was cut off, and ends in the next
    request. `completed` is the stop string that ends with the last token before the cut, or None. `over` is True once
    no stop string can span the cut any more.

    The first character after the cut counts as a character before the cut, because the first bytes of this character
    may belong to a token before the cut.
    """

    def __init__(self, stops: Sequence[str], text: TextStream, sampled: Sequence[int]) -> None:
        self._stops = stops
        self._text = text
        self._longest = max(map(len, stops))
        before = text.push(sampled[:-1])
        searched = len(before)
        before += text.push(sampled[-1:])
        self.completed = next(
            (stop for stop in stops if before.find(stop, max(0, searched - len(stop) + 1)) >= 0), None
        )
        self._before = min(len(before), self._longest - 1)
        self._seen = before[len(before) - self._before :]

    @property
    def over(self) -> bool:
        return len(self._seen) >= self._before + self._longest

    def push(self, token_id: int) -> str | None:
        """Add the next token. If it completes a stop string that began before the cut, return this string, otherwise
        None."""
        searched = len(self._seen)
        self._seen += self._text.push((token_id,))
        for stop in self._stops:
            # A match must end in the text of the new token. So the search starts at the first position where such a
            # match can begin. The text before this position was already searched, by the engine or by an earlier call.
            if 0 <= self._seen.find(stop, max(0, searched - len(stop) + 1)) <= self._before:
                return stop
        return None
