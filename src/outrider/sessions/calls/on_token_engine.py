"""One model call in flight, from joined prompt to turn, on an engine that is given ids.

A call knows neither limits nor the store. Invariant: the turn it makes holds every token the engine reported,
whether the call ended well, failed half way or was given up.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import numpy as np

from outrider.concurrency.offload import OffloadThread
from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.engines.base import Chunk, GenerateRequest, SamplingParams
from outrider.engines.pool.member import ServingEngine
from outrider.engines.pool.pool import EnginePool
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message, Role
from outrider.sessions.calls.body_limits import Intake
from outrider.sessions.calls.token_allowance import Allowance
from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.rendering.reply_stream import ReplyStream
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import (
    FinishReason,
    Ids,
    Turn,
    TurnTimings,
    VersionSpan,
    pack_logprobs,
)

Step = Opening | Delta | Completion

PROMISED_TOKENS = 2048
"""How many tokens of its session's a call can count on, if it asks for as many. Nearly all replies are shorter, and
programs ask for far more: were all of it kept for them, their calls would wait for one another."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversations of a node share: the policy, how it is rendered, where it is served, the room for requests
    that arrive, and the thread for long work on them."""

    renderer: Renderer
    pool: EnginePool
    model: str
    context_tokens: int | None = None
    intake: Intake = msgspec.field(default_factory=Intake)
    offload: OffloadThread = msgspec.field(default_factory=OffloadThread)


class Call(Protocol):
    """`steps` yields an Opening and Deltas; then either `commit` (it ran to its end) or `abort` once."""

    def steps(self) -> AsyncGenerator[Opening | Delta, None]: ...
    def commit(self) -> Turn: ...
    def abort(self) -> Turn | None: ...
    def completion(self) -> Completion: ...


class TokenCall:
    """A call on an engine that is given exactly the recorded ids."""

    def __init__(
        self,
        endpoint: Endpoint,
        tree: TokenTree,
        joined: Joined,
        request: ModelRequest,
        sampling: SamplingParams,
        allowance: Allowance,
        *,
        dialect: str,
        session_key: str,
        thinking: bool | None,
    ) -> None:
        self.id = uuid4().hex
        self._endpoint = endpoint
        self._tree = tree
        self._joined = joined
        self._request = request
        self._sampling = sampling
        self._allowance = allowance
        self._thinking = thinking
        self._dialect = dialect
        self._session_key = session_key
        self._received = time.time()
        self._first_token: float | None = None
        self._prompt: Ids = joined.prompt.ids()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: Chunk | None = None
        self._drift = 0
        self._served: ServingEngine | None = None
        self._reply = Message(role=Role.ASSISTANT)
        self._malformed = 0

    async def steps(self) -> AsyncGenerator[Opening | Delta, None]:
        async with self._allowance.share(min(self._sampling.max_tokens, PROMISED_TOKENS)) as share:
            self._sampling = clamped(self._sampling, self._allowance)
            stream = ReplyStream(
                self._endpoint.renderer,
                prompt_tail=self._joined.prompt.tail(self._endpoint.renderer.tail_start),
                tools=self._request.tools,
                stop=self._sampling.stop,
                stop_ids=self._sampling.stop_token_ids,
                call_id=self.id[:12],
            )
            generation = self._endpoint.pool.generate(
                GenerateRequest(
                    request_id=self.id,
                    session_key=self._session_key,
                    input_ids=self._prompt,
                    sampling=self._sampling,
                )
            )
            async with aclosing(generation):
                async for chunk in generation:
                    first = self._last is None
                    counted = share.take(len(chunk.ids))
                    ended = counted < len(chunk.ids)
                    if ended:
                        chunk = _cut(chunk, counted)
                    self._take(chunk)
                    if first:
                        self._served = generation.served
                        yield self._opening()
                    part = stream.push(chunk.ids)
                    if chunk.ids:
                        yield Delta(text=part.text, reasoning=part.reasoning, ids=chunk.ids, logprobs=chunk.logprobs)
                    if ended:
                        break
        if self._last is None or self._last.finish is None:
            raise EngineUnavailable("the engine ended a stream without finishing it")
        reply = stream.finish()
        self._reply, self._malformed = reply.message, reply.malformed
        if reply.rest.text or reply.rest.reasoning:
            yield Delta(text=reply.rest.text, reasoning=reply.rest.reasoning)

    def commit(self) -> Turn:
        assert self._last is not None
        assert self._last.finish is not None
        return self._turn(self._last.finish, self._reply)

    def abort(self) -> Turn | None:
        """The turn of a call that was cut off; None when nothing had been sampled."""
        return self._turn(FinishReason.ABORT, None) if self._ids else None

    def completion(self) -> Completion:
        assert self._last is not None
        wants_ids = self._request.return_token_ids
        token_bytes = self._endpoint.renderer.tokenizer.token_bytes
        return Completion(
            id=self.id,
            created=int(self._received),
            model=self._request.model,
            reply=self._reply,
            finish=self._last.finish or FinishReason.ABORT,
            stop_match=self._last.stop_match,
            prompt_tokens=self._joined.prompt.length,
            completion_tokens=len(self._ids),
            cached_tokens=self._last.cached_tokens or 0,
            prompt_ids=self._prompt if wants_ids else None,
            output_ids=np.asarray(self._ids, dtype=np.int32) if wants_ids else None,
            logprobs=np.asarray(self._logprobs) if self._request.logprobs else None,
            pieces=tuple(map(token_bytes, self._ids)) if self._request.logprobs else (),
        )

    def _opening(self) -> Opening:
        return Opening(
            id=self.id,
            created=int(self._received),
            model=self._request.model,
            prompt_tokens=len(self._prompt),
            prompt_ids=self._prompt if self._request.return_token_ids else None,
        )

    def _take(self, chunk: Chunk) -> None:
        if chunk.ids and self._first_token is None:
            self._first_token = time.time()
        self._ids += chunk.ids
        self._logprobs += chunk.logprobs
        self._last = chunk
        if chunk.prompt_ids is not None:
            self._drift = count_differences(self._prompt, chunk.prompt_ids)
        elif chunk.prompt_tokens is not None:
            self._drift = max(self._drift, abs(chunk.prompt_tokens - len(self._prompt)))

    def _turn(self, finish: FinishReason, reply: Message | None) -> Turn:
        prompt, served = self._joined.prompt, self._served
        assert served is not None
        node = self._tree.commit(prompt, self._ids, reply)
        versions = self._last.versions if self._last else ()
        return Turn(
            index=node.index,
            parent=prompt.parent.index if prompt.parent else None,
            join=self._joined.kind,
            cause=self._joined.cause,
            forked_from=self._joined.forked_from,
            conversation=prompt.conversation,
            tools=prompt.tools_digest,
            agent_id=self._request.caller.agent_id,
            parent_agent_id=self._request.caller.parent_id,
            purpose=self._request.caller.purpose,
            prompt_length=prompt.length,
            prompt_delta=prompt.delta,
            output_ids=node.output,
            logprobs=pack_logprobs(self._logprobs),
            logprob_kind=served.logprob_kind,
            versions=versions or ((VersionSpan(served.version, 0, len(self._ids)),) if self._ids else ()),
            finish=finish,
            stop_match=self._last.stop_match if self._last else None,
            dialect=self._dialect,
            engine=served.engine,
            sampling=recorded(self._sampling, self._thinking),
            altered=self._sampling.altered,
            ignored=self._request.ignored,
            cached_tokens=self._last.cached_tokens if self._last else None,
            drift_tokens=self._drift,
            messages=self._joined.added,
            reply=reply,
            malformed_calls=self._malformed,
            timings=TurnTimings(received=self._received, first_token=self._first_token, finished=time.time()),
        )


def clamped(sampling: SamplingParams, allowance: Allowance) -> SamplingParams:
    """The sampling of a call that begins now, after it may have waited for its share."""
    if sampling.max_tokens <= allowance.unsampled:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=allowance.unsampled)


def _cut(chunk: Chunk, tokens: int) -> Chunk:
    """The chunk up to where its session's tokens are used up, which ends the reply."""
    return msgspec.structs.replace(
        chunk,
        ids=chunk.ids[:tokens],
        logprobs=chunk.logprobs[:tokens],
        finish=FinishReason.LENGTH,
        stop_match=None,
        versions=(),
    )


def recorded(sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """What a turn keeps of how it was sampled."""
    told: dict[str, Any] = msgspec.to_builtins(sampling, str_keys=True)
    return told | {"thinking": thinking}


def count_differences(sent: Ids, reported: list[int]) -> int:
    """Positions at which two id sequences differ, the difference of their lengths included."""
    other = np.asarray(reported, dtype=np.int32)
    shared = min(len(sent), len(other))
    return int(np.count_nonzero(sent[:shared] != other[:shared])) + abs(len(sent) - len(other))
