"""Checks each request and each chunk of a reply, and continues replies that were cut off.

Chunks are checked because engines are other people's programs, and their output is stored, trained on and shown to
clients. Requests are checked because some servers, such as SGLang 0.5.17, exit on an id that their model does not have.
Invariants: no part of an impossible chunk is passed on. A continued reply has exactly the ids, log-probabilities and
version spans from the engines, each at its position in the whole reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from outrider.engines.base import AnyRequest, ChatChunk, Chunk, EngineHealth, GenerateRequest, SamplingParams
from outrider.errors import ContextOverflow, EngineMisbehaved, EngineRejected, InvalidField
from outrider.messages import Message, images_in
from outrider.tokens.rendering.tokenizer import ANY_IDS, TextStream, Vocabulary
from outrider.trajectory import FinishReason, VersionSpan

ROUNDING = 1e-3
"""The largest value that is accepted as a log-probability. Values slightly above 0 are rounding errors: engines
subtract two float32 numbers, a token's logit and the log of the sum over all tokens. For a nearly certain token the two
numbers differ only by their rounding, which is 2.4e-4 at 2,048. An accepted value is recorded as received."""

LOWEST = -9999.0
"""The number that vLLM sends in place of a missing log-probability, -inf and NaN. Log-probabilities of sampled tokens
must be greater."""

MAX_COUNT = (1 << 31) - 1
"""The largest accepted count or version, because sample files store versions as int32."""

MAX_QUOTED = 1000
"""The maximum number of characters that an error quotes from an engine's own message."""

CHARACTERS_PER_TOKEN = 1024
"""An upper bound of a token's length in characters. The longest tokens of common tokenizers have 128 characters."""
FREE_CHARACTERS = 64 << 10
"""The number of characters that a reply may have in addition to `CHARACTERS_PER_TOKEN` for each token."""

MAX_MODEL = 1000
"""Maximum length in characters of a model's name, which is shown in the status."""
OVERFLOW_SLACK = 64
"""An engine may refuse prompts that are up to this number of tokens shorter than the context, because servers reserve a
few tokens."""
LEAST_CONTEXT = 2048
"""The assumed length in tokens of an unknown context. No model that agents use has a shorter context."""
MESSAGE_TOKENS = 64
"""An upper bound of the number of tokens that a chat template adds to a message or to a tool."""
MAX_SEED = (1 << 31) - 1
"""The largest seed of a continued request. Every engine accepts seeds of 31 bits."""


def check_ids(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Check that a prompt has ids, and that all token ids of a request are in the vocabulary. Raises InvalidField for
    an id of `logit_bias` or `stop_token_ids`, because an agent may have sent the id. Raises EngineRejected for the
    prompt, because the renderer and the engines have produced its ids."""
    sampling, end = request.sampling, vocabulary.end
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < end:
                raise InvalidField(
                    f"{field} names token {token}, which the model does not have",
                    field=field,
                    hint=f"ids: 0 to {end - 1}",
                )
    prompt = request.input_ids
    if not len(prompt) or prompt.min() < 0 or prompt.max() >= end:
        raise EngineRejected(
            "the prompt is empty, or holds a token id that the model does not have: it is sent to no engine",
            hint="please report it: Outrider makes every prompt itself",
        )


def max_characters(sampling: SamplingParams) -> int:
    """Return the maximum length of a reply's text in characters."""
    return FREE_CHARACTERS + CHARACTERS_PER_TOKEN * sampling.max_tokens


def overflow_fault(
    engine: str, request: AnyRequest, context: int | None, error: ContextOverflow
) -> EngineMisbehaved | None:
    """Return an error if an engine has refused a prompt as too long although the prompt fits the model's context.
    Returns None if the refusal may be right. The check is needed because a prompt that is too long counts as the
    agent's fault, and ends the session with a grade.

    `context` is the model's context in tokens, from the settings or else from the engine's report, None if unknown. The
    number of bytes of a message is an upper bound of its tokens. Images have no such bound, so a refusal of a request
    with images is always accepted.
    """
    if isinstance(request, GenerateRequest):
        most = len(request.input_ids)
    elif any(images_in(message) for message in request.messages):
        return None
    else:
        most = sum(map(_bytes_of, request.messages)) + MESSAGE_TOKENS * len(request.messages)
        most += sum(len(str(tool).encode("utf-8", "replace")) + MESSAGE_TOKENS for tool in request.tools)
    known = LEAST_CONTEXT if context is None else context
    if most + OVERFLOW_SLACK >= known:
        return None
    words = "does not fit the model" if context is None else f"does not fit a context of {context}"
    return EngineMisbehaved(
        f"engine {engine!r} says that a prompt of {most} tokens {words}: {error.message}",
        hint="if it serves the model with less context than the model has, say so: model.context_tokens",
    )


def _bytes_of(message: Message) -> int:
    texts = (message.content, message.reasoning or "", *(f"{call.name}{call.arguments}" for call in message.tool_calls))
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


class TokenCheck:
    """Checks one reply of token ids, chunk by chunk. `ids` holds the ids of the chunks so far."""

    def __init__(self, engine: str, sampling: SamplingParams, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = sampling.max_tokens
        self._vocabulary = vocabulary
        self.ids: list[int] = []
        self._finished = False

    def take(self, chunk: Chunk) -> int:
        """Check the next chunk and return its number of tokens. Raises EngineMisbehaved for an impossible chunk."""
        if self._finished:
            raise EngineMisbehaved(f"engine {self._engine!r} went on after the end of its reply")
        new, ids = chunk.ids, self.ids
        if new or chunk.logprobs:
            ids.extend(new)
            if len(ids) > self._max_tokens:
                raise _too_many(self._engine, len(ids), self._sampling)
            _check_tokens(self._engine, new, chunk.logprobs, self._vocabulary)
        if chunk.prompt_ids:
            _check_prompt(self._engine, chunk.prompt_ids)
        if chunk.finish is not None:
            self._finished = True
            self._check_end(chunk)
        return len(new)

    def _check_end(self, chunk: Chunk) -> None:
        _check_versions(self._engine, chunk.versions, len(self.ids))
        _check_count(self._engine, "prompt tokens", chunk.prompt_tokens)
        _check_count(self._engine, "cached tokens", chunk.cached_tokens)
        if isinstance(chunk.stop_match, str):
            # SGLang reports "NaN happened" here, and the last id is then not the sampled id.
            if chunk.stop_match not in self._sampling.stop:
                raise EngineMisbehaved(
                    f"engine {self._engine!r} stopped at {chunk.stop_match[:100]!r}, which nobody asked for"
                )
        else:
            _check_count(self._engine, "the id it stopped at", chunk.stop_match)


class ChatCheck:
    """Checks one reply of text, chunk by chunk, and any ids in its last chunk."""

    def __init__(self, engine: str, sampling: SamplingParams, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._characters = 0
        self._finished = False

    def take(self, chunk: ChatChunk) -> int:
        """Check the next chunk. For the last chunk, returns the number of tokens of the whole reply, or 0 if the engine
        does not report this number. For any other chunk, returns 0. Raises EngineMisbehaved for an impossible chunk."""
        if self._finished:
            raise EngineMisbehaved(f"engine {self._engine!r} went on after the end of its reply")
        self._characters += len(chunk.text) + len(chunk.reasoning)
        if chunk.reply is not None:
            written = sum(len(call.name) + len(call.arguments) for call in chunk.reply.tool_calls)
            self._characters = written + max(
                self._characters, len(chunk.reply.content) + len(chunk.reply.reasoning or "")
            )
        if self._characters > max_characters(self._sampling):
            raise too_long(self._engine, self._sampling)
        if chunk.finish is None:
            return 0
        self._finished = True
        for name in ("prompt_tokens", "completion_tokens"):
            _check_count(self._engine, name, (chunk.usage or {}).get(name))
        if chunk.output_ids is None:
            return (chunk.usage or {}).get("completion_tokens", 0)
        return self._check_ids(chunk, chunk.output_ids)

    def _check_ids(self, chunk: ChatChunk, ids: list[int]) -> int:
        if not chunk.prompt_ids:
            raise EngineMisbehaved(f"engine {self._engine!r} reported the ids of its reply without those of its prompt")
        if len(ids) > self._sampling.max_tokens:
            raise _too_many(self._engine, len(ids), self._sampling)
        _check_tokens(self._engine, ids, chunk.logprobs or [], self._vocabulary)
        _check_prompt(self._engine, chunk.prompt_ids)
        _check_versions(self._engine, chunk.versions, len(ids))
        return len(ids)


def check_of(request: AnyRequest, engine: str, vocabulary: Vocabulary) -> TokenCheck | ChatCheck:
    """Make the check for the reply to a request."""
    kind = TokenCheck if isinstance(request, GenerateRequest) else ChatCheck
    return kind(engine, request.sampling, vocabulary)


def check_health(engine: str, health: EngineHealth) -> None:
    """Check an engine's health report. Raises EngineMisbehaved for an impossible version or context, or for too long a
    model name."""
    _check_count(engine, "its version", health.version)
    if len(health.model or "") > MAX_MODEL:
        raise EngineMisbehaved(f"engine {engine!r} names a model with {len(health.model or '')} characters")
    if health.context_tokens is not None and not 0 < health.context_tokens <= MAX_COUNT:
        raise EngineMisbehaved(f"engine {engine!r} says that its model's context is {health.context_tokens} tokens")


def mistake_of(engine: str, error: Exception) -> EngineMisbehaved:
    """Return the error for an exception of the engine's code that is not an OutriderError."""
    return EngineMisbehaved(f"engine {engine!r} raised {type(error).__name__}: {str(error)[:MAX_QUOTED]}")


def too_long(engine: str, sampling: SamplingParams) -> EngineMisbehaved:
    """Return the error for a reply with more text than `max_characters`."""
    return EngineMisbehaved(f"engine {engine!r} sent more text than {sampling.max_tokens} tokens can have")


def _too_many(engine: str, tokens: int, sampling: SamplingParams) -> EngineMisbehaved:
    return EngineMisbehaved(
        f"engine {engine!r} gave {tokens} tokens where at most {sampling.max_tokens} were asked for"
    )


def _check_tokens(engine: str, ids: list[int], logprobs: list[float], vocabulary: Vocabulary) -> None:
    alone = len(ids) == len(logprobs) == 1  # a shortcut, because most chunks have one token
    if alone and vocabulary.contains(ids[0]) and LOWEST < logprobs[0] <= ROUNDING:
        return
    if len(ids) != len(logprobs):
        raise EngineMisbehaved(
            f"engine {engine!r} gave {len(logprobs)} log-probabilities for {len(ids)} sampled tokens"
        )
    if not ids:
        return
    if not vocabulary.contains_all(ids):
        wrong = next(token_id for token_id in ids if not vocabulary.contains_all([token_id]))
        raise EngineMisbehaved(
            f"engine {engine!r} sampled the id {wrong}, for which the tokenizer has no token",
            hint="if its model is larger than its vocabulary, have it mask the padding; else it serves another model",
        )
    # `max` and `sum` are faster than a loop. If no value is too high and the sum is not too low, no value is too low.
    # Every comparison with NaN is false.
    if not (max(logprobs) <= ROUNDING and sum(logprobs) > LOWEST):
        for value in logprobs:
            if not LOWEST < value <= ROUNDING:
                raise EngineMisbehaved(f"engine {engine!r} gave the log-probability {value} for a sampled token")


def _check_prompt(engine: str, ids: list[int]) -> None:
    if not ANY_IDS.contains_all(ids):
        raise EngineMisbehaved(f"engine {engine!r} says that its prompt had ids that cannot be")


def _check_versions(engine: str, versions: Sequence[VersionSpan], tokens: int) -> None:
    """Check that the spans tile the output of `tokens` tokens, and that the versions are from 0 to `MAX_COUNT`. Accepts
    a reply without spans. Raises EngineMisbehaved."""
    if not versions:
        return
    edge = 0
    for span in versions:
        if span.start != edge or span.end < edge or not 0 <= span.version <= MAX_COUNT:
            break
        edge = span.end
    else:
        if edge == tokens:
            return
    raise EngineMisbehaved(
        f"engine {engine!r} gave policy versions that do not cover its {tokens} tokens, or are no versions"
    )


def _check_count(engine: str, what: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_COUNT:
        raise EngineMisbehaved(f"engine {engine!r} says {what} = {str(count)[:100]}, which cannot be")


def continuable(sampling: SamplingParams) -> bool:
    """Return True if a new request that ends with the reply's ids can continue the reply, with the same distribution of
    each token as without the cut.

    Constraints and penalties prevent a continuation: an engine applies a constraint from the start of the new output,
    and computes presence and frequency penalties only from the tokens of the new output.
    """
    return sampling.constraint is None and sampling.presence_penalty == 0 and sampling.frequency_penalty == 0


class ContinuedGeneration:
    """One generation over several requests. `versions` holds the spans of the tokens sampled before the newest request.

    Each new request is for the remaining tokens only, and has its own seed, so that the engine does not repeat the
    random numbers of the first part. This class searches for stop strings that began before a cut. `text` makes the
    decoder for this search. If `text` is None, such stop strings are not found.
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
        """Record that the newest request has sampled `ids` and was cut off. `last` is the engine's last chunk, None if
        the engine sent none. If `last` has no spans, the tokens have the version `version`."""
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
        """Return the last chunk if the reply was already complete when it was cut off: the engine may have sampled the
        last token without checking whether the reply ends there. Returns None if the reply has to continue."""
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
        """Return the request that continues the reply. Its `request_id` has 32 characters, like every `request_id`."""
        first, sampling, count = self._request, self._request.sampling, len(self._sampled)
        name = f"{first.request_id}/{self._cuts}".encode()
        seed = sampling.seed
        if seed is not None and count:  # with the same seed the engine would repeat its random numbers
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
        """Convert a chunk of the newest request to a chunk of the whole reply. If the engine sends no spans, the
        request's tokens have the version `version`."""
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
        """Return the chunk or, if one of its tokens completes a stop string that began before the cut, a last chunk
        that ends after this token."""
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
        """Return the prompt as reported by the engine, without the ids that were sampled before the cut. For each of
        these ids that the engine reports wrongly or not at all, an additional id 0 is appended: the result is then
        longer than the prompt, and counts as drift."""
        length = len(self._request.input_ids)
        behind = reported[length:]
        wrong = sum(map(int.__ne__, behind, self._sampled)) + abs(len(behind) - len(self._sampled))
        return reported[:length] + [0] * wrong

    def _joined(self, versions: tuple[VersionSpan, ...], version: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of the reply so far. `versions` are the spans of the newest request. Without spans,
        its tokens have the version `version`."""
        start, count = len(self._sampled), self._given
        spans = list(self.versions)
        for span in versions or (VersionSpan(version, 0, count),):
            end = min(span.end, count)  # a stop string that spans the cut ends the reply earlier than the engine does
            if end <= span.start:
                continue
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, start + end)
            else:
                spans.append(VersionSpan(span.version, start + span.start, start + end))
        return tuple(spans)


class StopWatch:
    """Searches for a stop string that began before a cut. The engine itself finds stop strings that begin after the
    cut.

    The first character after the cut counts as a character before the cut, because its first bytes may belong to a
    token before the cut. `over` is True once a stop string that spans the cut is no longer possible.
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
        """Add the next token. Returns the stop string that this token completes if the stop string began before the
        cut, otherwise None."""
        self._seen += self._text.push((token_id,))
        for stop in self._stops:
            # The search starts at the first position at which a match ends after the cut, because the engine has
            # already searched the text before the cut.
            if 0 <= self._seen.find(stop, max(0, self._before - len(stop) + 1)) <= self._before:
                return stop
        return None
