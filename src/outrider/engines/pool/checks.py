"""Checks each request, and each chunk of a reply.

Chunks are checked because engines are other people's programs, and their output is stored, used for training and shown
to clients. Requests are checked because some servers, such as SGLang 0.5.17, exit on an id that their model does not
have. Invariant: no part of an impossible chunk is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.base import (
    MAX_COUNT,
    AnyRequest,
    ChatChunk,
    Chunk,
    EngineHealth,
    GenerateRequest,
    RequestImage,
    SamplingParams,
)
from outrider.errors import ContextOverflow, EngineMisbehaved, EngineRejected, InvalidField
from outrider.messages import Message, images_in
from outrider.tokens.rendering.tokenizer import ANY_IDS, Vocabulary
from outrider.trajectory import VersionSpan

ROUNDING = 1e-3
"""The largest accepted log-probability. Values slightly above 0 are rounding errors: an engine subtracts the
log-sum-exp of all logits from the token's logit, both in float32. For a nearly certain token, these two values are
equal except for rounding (2.4e-4 for logits of 2,048). An accepted value is recorded as it is."""

LOWEST = -9999.0
"""vLLM sends this number in place of -inf, NaN and missing log-probabilities. The log-probabilities of sampled tokens
must be greater."""

MAX_QUOTED = 1000
"""An error quotes at most this number of characters from an engine's own message."""

CHARACTERS_PER_TOKEN = 1024
"""Assumed maximum length of a token in characters. The longest tokens of common tokenizers have 128."""
FREE_CHARACTERS = 64 << 10
"""A reply may have this number of characters in addition to CHARACTERS_PER_TOKEN for each token."""

MAX_MODEL = 1000
"""Maximum length, in characters, of a model's name that an engine reports. The name is shown in the status."""
OVERFLOW_SLACK = 64
"""An engine may refuse a prompt that is at most this number of tokens shorter than the context, because servers reserve
a few tokens."""
LEAST_CONTEXT = 2048
"""Assumed length of a context of unknown length, in tokens. No model that agents use has a shorter context."""
MESSAGE_TOKENS = 64
"""Assumed maximum number of tokens that a chat template adds to a message or a tool."""


def check_ids(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Check that a prompt has ids, and that all token ids of a request are in the vocabulary. Raises InvalidField for a
    wrong id in `logit_bias` or `stop_token_ids`, because these fields may come from an agent. Raises EngineRejected for
    an empty prompt or a wrong id in the prompt. Such a prompt is not the agent's fault, because prompts come from the
    renderer and the engines."""
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
    """Return the maximum number of characters in the text of a reply."""
    return FREE_CHARACTERS + CHARACTERS_PER_TOKEN * sampling.max_tokens


def overflow_fault(
    engine: str, request: AnyRequest, context: int | None, error: ContextOverflow
) -> EngineMisbehaved | None:
    """Return an error if an engine has refused a prompt as too long although it fits the model's context. Returns None
    if the engine may be right. This check is needed because a prompt that is too long counts as the agent's fault, and
    ends the session with a grade.

    `context` is the model's context in tokens, from the settings or else from the engine's report, or None if unknown.
    The check assumes that a message has at most as many tokens as bytes. For images there is no such maximum, so a
    refusal of messages with images is always accepted.
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
        f"engine {engine!r} says that a prompt of at most {most} tokens {words}: {error.message}",
        hint="if it serves the model with less context than the model has, set model.context_tokens",
    )


def _bytes_of(message: Message) -> int:
    texts = (message.content, message.reasoning or "", *(f"{call.name}{call.arguments}" for call in message.tool_calls))
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


class TokenCheck:
    """Checks a reply of token ids, chunk by chunk. `ids` has the ids received so far."""

    def __init__(
        self, engine: str, sampling: SamplingParams, vocabulary: Vocabulary, images: Sequence[RequestImage] = ()
    ) -> None:
        self._engine = engine
        self._unread = [(image.span.start, image.span.start + image.span.length) for image in images]
        self._sampling = sampling
        self._max_tokens = sampling.max_tokens
        self._vocabulary = vocabulary
        self.ids: list[int] = []
        self._finished = False

    def take(self, chunk: Chunk) -> int:
        """Check the next chunk and return its number of tokens. Raises EngineMisbehaved if the chunk is impossible."""
        if self._finished:
            raise EngineMisbehaved(f"engine {self._engine!r} went on after the end of its reply")
        new, ids = chunk.ids, self.ids
        if self._unread and new:
            if chunk.prompt_images != self._unread:
                raise EngineMisbehaved(
                    f"engine {self._engine!r} does not report that it has read the {len(self._unread)} images of the"
                    f" prompt where they are: {str(chunk.prompt_images)[:MAX_QUOTED]}"
                )
            self._unread = []
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
            # If the logits are NaN, SGLang sends "NaN happened" as the stop string, and the last id was not sampled.
            if chunk.stop_match not in self._sampling.stop:
                raise EngineMisbehaved(
                    f"engine {self._engine!r} stopped at {chunk.stop_match[:100]!r}, which is no requested stop string"
                )
        else:
            _check_count(self._engine, "the id it stopped at", chunk.stop_match)


class ChatCheck:
    """Checks a reply of text, chunk by chunk. If the last chunk has ids, they are checked, too."""

    def __init__(self, engine: str, sampling: SamplingParams, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._characters = 0
        self._finished = False

    def take(self, chunk: ChatChunk) -> int:
        """Check the next chunk. For the last chunk, returns the number of tokens of the whole reply if the engine
        reports it; otherwise 0. Raises EngineMisbehaved if the chunk is impossible."""
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
    """Return a new check for the reply to a request."""
    if isinstance(request, GenerateRequest):
        return TokenCheck(engine, request.sampling, vocabulary, request.images)
    return ChatCheck(engine, request.sampling, vocabulary)


def check_health(engine: str, health: EngineHealth) -> None:
    """Check an engine's health report. Raises EngineMisbehaved if the version or the context is impossible, or if the
    model's name is too long."""
    _check_count(engine, "its version", health.version)
    if len(health.model or "") > MAX_MODEL:
        raise EngineMisbehaved(f"engine {engine!r} names a model with {len(health.model or '')} characters")
    if health.context_tokens is not None and not 0 < health.context_tokens <= MAX_COUNT:
        raise EngineMisbehaved(f"engine {engine!r} says that its model's context is {health.context_tokens} tokens")


def mistake_of(engine: str, error: Exception) -> EngineMisbehaved:
    """Return the EngineMisbehaved for an unexpected exception in an engine's code."""
    return EngineMisbehaved(f"engine {engine!r} raised {type(error).__name__}: {str(error)[:MAX_QUOTED]}")


def too_long(engine: str, sampling: SamplingParams) -> EngineMisbehaved:
    """Return the error for a reply whose text is longer than `max_characters`."""
    return EngineMisbehaved(f"engine {engine!r} sent more text than {sampling.max_tokens} tokens can have")


def _too_many(engine: str, tokens: int, sampling: SamplingParams) -> EngineMisbehaved:
    return EngineMisbehaved(
        f"engine {engine!r} gave {tokens} tokens where at most {sampling.max_tokens} were asked for"
    )


def _check_tokens(engine: str, ids: list[int], logprobs: list[float], vocabulary: Vocabulary) -> None:
    alone = len(ids) == len(logprobs) == 1  # fast path for the usual chunk, which has one token
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
    # `max` and `sum` are faster than the loop, which runs only if one of the two comparisons is False. If no value is
    # above ROUNDING, one value that is too low makes the sum too low. Comparisons with NaN are False.
    if not (max(logprobs) <= ROUNDING and sum(logprobs) > LOWEST + ROUNDING * len(logprobs)):
        for value in logprobs:
            if not LOWEST < value <= ROUNDING:
                raise EngineMisbehaved(f"engine {engine!r} gave the log-probability {value} for a sampled token")


def _check_prompt(engine: str, ids: list[int]) -> None:
    if not ANY_IDS.contains_all(ids):
        raise EngineMisbehaved(f"engine {engine!r} says that its prompt had ids that cannot be")


def _check_versions(engine: str, versions: Sequence[VersionSpan], tokens: int) -> None:
    """Check that the spans cover `tokens` tokens without gap or overlap, and that each version is from 0 to MAX_COUNT.
    A reply may have no spans. Raises EngineMisbehaved."""
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
        raise EngineMisbehaved(f"engine {engine!r} reports {what} = {str(count)[:100]}, which is impossible")
