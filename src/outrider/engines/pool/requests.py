"""One request to an engine, of either kind: how its reply is begun, how it is checked, and what a small one like it is.

It knows no pool.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, TypeVar, cast
from uuid import uuid4

import msgspec

from outrider.engines.base import (
    ChatChunk,
    ChatEngine,
    ChatRequest,
    Chunk,
    Engine,
    GenerateRequest,
    SamplingParams,
)
from outrider.engines.pool.reply_checks import ChatCheck, TokenCheck
from outrider.errors import EngineUnavailable
from outrider.tokens.rendering.vocabulary import Vocabulary

T = TypeVar("T", bound=Chunk | ChatChunk)
T_contra = TypeVar("T_contra", bound=Chunk | ChatChunk, contravariant=True)

AnyEngine = Engine | ChatEngine

CHARACTERS_PER_TOKEN = 4
"""A rough measure of a chat request's size, for balance only."""

TRIAL_TOKENS = 16
"""How long the reply of a trial may get."""


class Check(Protocol[T_contra]):
    """The check of one reply; see `engines.checks`."""

    def take(self, chunk: T_contra) -> int: ...


class Ask(Protocol[T]):
    """`tokens` is about how long its prompt is. `trial` is the same request, with another name and few tokens."""

    takes_tokens: bool
    session_key: str
    tokens: int

    def begin(self, engine: AnyEngine) -> AsyncGenerator[T, None]: ...
    def check(self, engine: str) -> Check[T]: ...
    def trial(self) -> Ask[T]: ...


class TokenAsk:
    """Of an engine that takes token ids."""

    takes_tokens = True

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary) -> None:
        self.session_key = request.session_key
        self.tokens = len(request.input_ids)
        self._request = request
        self._vocabulary = vocabulary

    def begin(self, engine: AnyEngine) -> AsyncGenerator[Chunk, None]:
        return cast(Engine, engine).generate(self._request)

    def check(self, engine: str) -> TokenCheck:
        return TokenCheck(engine, self._request.sampling, self._vocabulary)

    def trial(self) -> TokenAsk:
        name = uuid4().hex
        request = msgspec.structs.replace(
            self._request, request_id=name, session_key=name, sampling=_few_tokens(self._request.sampling)
        )
        return TokenAsk(request, self._vocabulary)


class ChatAsk:
    """Of an engine that takes messages."""

    takes_tokens = False

    def __init__(self, request: ChatRequest, vocabulary: Vocabulary) -> None:
        self.session_key = request.session_key
        self.tokens = sum(len(message.content) for message in request.messages) // CHARACTERS_PER_TOKEN
        self._request = request
        self._vocabulary = vocabulary

    def begin(self, engine: AnyEngine) -> AsyncGenerator[ChatChunk, None]:
        return cast(ChatEngine, engine).chat(self._request)

    def check(self, engine: str) -> ChatCheck:
        return ChatCheck(engine, self._request.sampling, self._vocabulary)

    def trial(self) -> ChatAsk:
        name = uuid4().hex
        request = msgspec.structs.replace(
            self._request, request_id=name, session_key=name, sampling=_few_tokens(self._request.sampling)
        )
        return ChatAsk(request, self._vocabulary)


async def try_out(engine: AnyEngine, ask: Ask[T]) -> None:
    """One small reply, read to its end. Raises what the engine and the check do."""
    trial = ask.trial()
    check, finished = trial.check(engine.name), False
    async with aclosing(trial.begin(engine)) as chunks:
        async for chunk in chunks:
            check.take(chunk)
            finished = chunk.finish is not None
    if not finished:
        raise EngineUnavailable(f"engine {engine.name!r} ended its stream before the reply's end")


def _few_tokens(sampling: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, TRIAL_TOKENS))
