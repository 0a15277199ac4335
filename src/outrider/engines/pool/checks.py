"""Checks each request and each chunk of a reply.

Chunks are checked because engines are other people's programs, and their output is stored, trained on and shown to
clients. Requests are checked because some servers, such as SGLang 0.5.17, exit on an id that their model does not have.
Invariant: no part of an impossible chunk is passed on.
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
"""The largest value that is accepted as a log-probability. Values slightly above 0 are rounding errors: engines
subtract two float32 numbers, a token's logit and the log of the sum over all tokens. For a nearly certain token the two
numbers are equal except for their rounding, which is 2.4e-4 at 2,048. An accepted value is recorded as received."""

LOWEST = -9999.0
"""The number that vLLM sends in place of a missing log-probability, -inf and NaN. The log-probabilities of sampled
tokens must be greater."""

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


def check_ids(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Check that a prompt has ids, and that all token ids of a request are in the vocabulary. Raises InvalidField for
    an id of `logit_bias` or `stop_token_ids`, because the id may come from an agent. Raises EngineRejected for an id of
    the prompt, because it comes from the renderer or an engine."""
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

    `context` is the model's context in tokens, from the settings or else from the engine's report, None if unknown. A
    message has at most as many tokens as bytes. There is no such limit for images, so a refusal of a request with
    images is always accepted.
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
    """Checks one reply of token ids, chunk by chunk. `ids` holds the ids of the chunks so far."""

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
        """Check the next chunk and return its number of tokens. Raises EngineMisbehaved for an impossible chunk."""
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
            # If its logits are NaN, SGLang sends the stop string "NaN happened", and the last id was not sampled.
            if chunk.stop_match not in self._sampling.stop:
                raise EngineMisbehaved(
                    f"engine {self._engine!r} stopped at {chunk.stop_match[:100]!r}, which is no requested stop string"
                )
        else:
            _check_count(self._engine, "the id it stopped at", chunk.stop_match)


class ChatCheck:
    """Checks one reply of text, chunk by chunk. If the last chunk has ids, they are checked, too."""

    def __init__(self, engine: str, sampling: SamplingParams, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._characters = 0
        self._finished = False

    def take(self, chunk: ChatChunk) -> int:
        """Check the next chunk. Returns the number of tokens of the whole reply if this is the last chunk and the
        engine reports the number, otherwise 0. Raises EngineMisbehaved for an impossible chunk."""
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
    if isinstance(request, GenerateRequest):
        return TokenCheck(engine, request.sampling, vocabulary, request.images)
    return ChatCheck(engine, request.sampling, vocabulary)


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
    alone = len(ids) == len(logprobs) == 1  # shortcut for a chunk of one token, the usual case
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
    # `max` and `sum` are faster than a loop, which runs only if one of these two checks fails. No value is above
    # `ROUNDING`, so a value that is too low makes the sum too low. Every comparison with NaN is false.
    if not (max(logprobs) <= ROUNDING and sum(logprobs) > LOWEST):
        for value in logprobs:
            if not LOWEST < value <= ROUNDING:
                raise EngineMisbehaved(f"engine {engine!r} gave the log-probability {value} for a sampled token")


def _check_prompt(engine: str, ids: list[int]) -> None:
    if not ANY_IDS.contains_all(ids):
        raise EngineMisbehaved(f"engine {engine!r} says that its prompt had ids that cannot be")


def _check_versions(engine: str, versions: Sequence[VersionSpan], tokens: int) -> None:
    """Check that the spans cover the output of `tokens` tokens without gap or overlap, and that the versions are from 0
    to `MAX_COUNT`. Accepts a reply without spans. Raises EngineMisbehaved."""
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
