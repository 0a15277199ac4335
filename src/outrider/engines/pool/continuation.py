"""Continues a generation that was cut off, by a new request: the ids are kept, and the parts become one reply.

The new request has the number of tokens that are left, and a seed of its own, so that the engine does not draw the
random numbers of the first part again. Stop strings that began before the cut are searched for here. Invariant: the
output has exactly the ids, log-probabilities and version spans from the engines, each at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.tokens.rendering.tokenizer import TextStream
from outrider.trajectory import FinishReason, VersionSpan

MAX_SEED = (1 << 31) - 1
"""Every engine takes a seed of 31 bits."""


def continuable(sampling: SamplingParams) -> bool:
    """Return True if an engine can continue a reply from its ids alone, and draws each token from the same distribution
    as without the cut.

    An engine applies a constraint from its start, and would do so in the middle of the constrained text. The engine
    computes presence and frequency penalties only from the tokens that the new request samples.
    """
    return sampling.constraint is None and sampling.presence_penalty == 0 and sampling.frequency_penalty == 0


class ContinuedGeneration:
    """One generation over several requests. `versions` holds the spans of the tokens sampled before the newest request.

    `text` makes a decoder, for stop strings. Without a decoder, a stop string that spans a cut is not found.
    """

    def __init__(self, request: GenerateRequest, text: Callable[[], TextStream] | None) -> None:
        self.versions: tuple[VersionSpan, ...] = ()
        self._request = request
        self._text = text
        self._sampled: list[int] = []
        self._cuts = 0
        self._given = 0  # tokens of the newest request
        self._cached: int | None = None
        self._watch: StopWatch | None = None

    def cut(self, ids: Sequence[int], last: Chunk | None, version: int) -> None:
        """Record that the newest request has sampled `ids` and was cut off, with the engine's `last` chunk if there was
        one. Without spans in `last`, the tokens have the version `version`."""
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
        """Return the last chunk of a reply that was complete when it was cut; None for a reply that has to continue.
        The engine may have been stopped after the last token, before recognising the end."""
        sampling, count = self._request.sampling, len(self._sampled)
        last = self._sampled[-1] if self._sampled else None
        if last in sampling.stop_token_ids and count > sampling.min_tokens:
            finish, match = FinishReason.STOP, last
        elif count >= sampling.max_tokens:
            finish, match = FinishReason.LENGTH, None
        else:
            return None
        return Chunk(
            ids=[], logprobs=[], finish=finish, stop_match=match, versions=self.versions, cached_tokens=self._cached
        )

    def request(self) -> GenerateRequest:
        """Return the request that continues the reply. Its `request_id` has 32 characters, as in every request."""
        first, sampling, count = self._request, self._request.sampling, len(self._sampled)
        name = f"{first.request_id}/{self._cuts}".encode()
        seed = sampling.seed
        if seed is not None and count:  # with the same seed the engine would draw the same numbers again
            digest = blake2b(f"{seed}/{count}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") & MAX_SEED
        return GenerateRequest(
            request_id=blake2b(name, digest_size=16).hexdigest(),
            session_key=first.session_key,
            input_ids=np.concatenate((first.input_ids, np.asarray(self._sampled, dtype=np.int32))),
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - count,
                min_tokens=max(0, sampling.min_tokens - count),
                seed=seed,
            ),
        )

    def take(self, chunk: Chunk, version: int) -> Chunk:
        """Convert a chunk of the newest request to a chunk of the whole reply. `version` is the version of the
        request's tokens if the engine sends no spans."""
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
        """Return the chunk. If one of its tokens completes a stop string that began before the cut, the chunk is ended
        after this token."""
        for number, token_id in enumerate(chunk.ids, start=1):
            if (match := watch.push(token_id)) is not None:
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
        """Return the engine's echo of its prompt, without the ids that were sampled before the cut. A wrong or missing
        id among the latter is drift, too, and is shown by an additional id in the returned echo, which is then longer
        than the prompt."""
        length = len(self._request.input_ids)
        behind = reported[length:]
        wrong = sum(map(int.__ne__, behind, self._sampled)) + abs(len(behind) - len(self._sampled))
        return reported[:length] + [0] * wrong

    def _joined(self, versions: tuple[VersionSpan, ...], version: int) -> tuple[VersionSpan, ...]:
        """Return all spans, with the newest request's spans at the end."""
        start, count = len(self._sampled), self._given
        spans = list(self.versions)
        for span in versions or (VersionSpan(version, 0, count),):
            end = min(span.end, count)  # a stop string that spans a cut ends the reply before the engine does
            if end <= span.start:
                continue
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, start + end)
            else:
                spans.append(VersionSpan(span.version, start + span.start, start + end))
        return tuple(spans)


class StopWatch:
    """Looks for a stop string that began before a cut. The engine itself finds stop strings that begin behind the cut.

    The first character behind the cut counts as a character before the cut, because its first bytes may belong to a
    token before the cut. `over` is True once no stop string that spans the cut is possible any more.
    """

    def __init__(self, stops: Sequence[str], text: TextStream, sampled: Sequence[int]) -> None:
        self._stops = stops
        self._text = text
        self._longest = max(map(len, stops))
        before = text.push(sampled)
        self._before = min(len(before), self._longest - 1)
        self._seen = before[len(before) - self._before :]

    @property
    def over(self) -> bool:
        return len(self._seen) >= self._before + self._longest

    def push(self, token_id: int) -> str | None:
        """Take the next token, and return the stop string that it completes, if that string began before the cut."""
        self._seen += self._text.push((token_id,))
        for stop in self._stops:
            # Search from the first position at which a match ends behind the cut: the engine has searched the text
            # before the cut.
            if 0 <= self._seen.find(stop, max(0, self._before - len(stop) + 1)) <= self._before:
                return stop
        return None
