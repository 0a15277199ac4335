"""One model call on an engine that takes token ids, from the prompt to the recorded turn.

Invariant: the turn contains every token that the engine reported, up to the session's limit, whether the call
succeeded, failed halfway or was given up by the client.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.engines.base import Chunk, GenerateRequest, RequestImage, SamplingParams
from outrider.engines.pool.waits import Overdue
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message, Role
from outrider.sessions.calls.call import ModelBackend, Step, count_differences
from outrider.sessions.calls.limits import TokenShare
from outrider.sessions.calls.request_settings import check_choice_kept, clamped, recorded
from outrider.tokens.rendering.reply_stream import ReplyStream
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import FinishReason, Ids, Turn, TurnTimings, pack_logprobs

if TYPE_CHECKING:
    from outrider.engines.pool.call import PoolReply

PROMISED_TOKENS = 2048
"""Maximum number of the session's tokens that are promised to a call before it begins. Agents request far more tokens,
but nearly all replies are shorter than this number. If all requested tokens were promised, calls would wait for one
another."""


class TokenCall:
    """A call on an engine that takes token ids. The engine receives exactly the ids that are recorded."""

    def __init__(
        self,
        backend: ModelBackend,
        tree: TokenTree,
        joined: Joined,
        request: ModelRequest,
        sampling: SamplingParams,
        *,
        dialect: str,
        session_key: str,
        thinking: bool | None,
        received: float,
        overdue: Overdue,
        images: tuple[RequestImage, ...] = (),
    ) -> None:
        self.id = os.urandom(16).hex()
        self.promised_tokens = min(sampling.max_tokens, PROMISED_TOKENS)
        self.ended = False
        self._backend = backend
        self._tree = tree
        self._joined = joined
        self._request = request
        self._sampling = sampling
        self._thinking = thinking
        self._dialect = dialect
        self._session_key = session_key
        self._overdue = overdue
        self._images = images
        self._received = received
        self._joined_at = time.time()
        self._first_token: float | None = None
        self._prompt: Ids = joined.prompt.ids()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._last: Chunk | None = None
        self._drift = 0
        self._share: TokenShare
        self._generation: PoolReply[Chunk]
        self._stream: ReplyStream
        self._reply = Message(role=Role.ASSISTANT)
        self._malformed = 0

    def start(self, share: TokenShare) -> PoolReply[Chunk]:
        self._share = share
        self._sampling = clamped(self._sampling, share)
        renderer = self._backend.renderer
        self._stream = ReplyStream(
            renderer,
            prompt_tail=self._joined.prompt.tail(renderer.tail_start),
            tools=self._request.tools,
            stop=self._sampling.stop,
            stop_ids=self._sampling.stop_token_ids,
            call_id=self.id[:12],
            held_to_calls=self._request.tool_choice is not None,
        )
        self._generation = self._backend.pool.calls.generate(
            GenerateRequest(
                request_id=self.id,
                session_key=self._session_key,
                input_ids=self._prompt,
                sampling=self._sampling,
                images=self._images,
            ),
            self._overdue,
        )
        return self._generation

    def take(self, chunk: Chunk) -> list[Step]:
        steps: list[Step] = []
        if self._last is None:
            steps.append(
                Opening(
                    id=self.id,
                    created=int(self._received),
                    model=self._request.model,
                    prompt_tokens=len(self._prompt),
                    prompt_ids=self._prompt if self._request.return_token_ids else None,
                )
            )
        counted = self._share.take(len(chunk.ids))
        if counted < len(chunk.ids):  # the session has too few tokens left for the whole chunk, so the reply ends here
            self.ended = True
            chunk = msgspec.structs.replace(
                chunk,
                ids=chunk.ids[:counted],
                logprobs=chunk.logprobs[:counted],
                finish=FinishReason.LENGTH,
                stop_match=None,
                versions=(),
            )
        self._last = chunk
        # one generation may take several requests to the engine, and each reports its prompt
        if chunk.prompt_ids is not None:
            self._drift = max(self._drift, count_differences(self._prompt, chunk.prompt_ids))
        elif chunk.prompt_tokens is not None:
            self._drift = max(self._drift, abs(chunk.prompt_tokens - len(self._prompt)))
        if chunk.ids:
            if self._first_token is None:
                self._first_token = time.time()
            self._ids += chunk.ids
            self._logprobs += chunk.logprobs
            part = self._stream.push(chunk.ids)
            steps.append(Delta(text=part.text, reasoning=part.reasoning, ids=chunk.ids, logprobs=chunk.logprobs))
        return steps

    def finish(self) -> list[Step]:
        if self._last is None or self._last.finish is None:
            raise EngineUnavailable("the engine ended a stream without finishing it")
        reply = self._stream.finish()
        self._reply, self._malformed = reply.message, reply.malformed
        check_choice_kept(self._request.tool_choice, self._reply, self._last.finish, self._last.stop_match)
        if reply.rest.text or reply.rest.reasoning:
            return [Delta(text=reply.rest.text, reasoning=reply.rest.reasoning)]
        return []

    def commit(self) -> Turn:
        assert self._last is not None
        assert self._last.finish is not None
        return self._turn(self._last.finish, self._reply)

    def abort(self) -> Turn | None:
        return self._turn(FinishReason.ABORT, None) if self._ids else None

    def completion(self) -> Completion:
        assert self._last is not None
        wants_ids = self._request.return_token_ids
        token_bytes = self._backend.renderer.tokenizer.token_bytes
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

    def _turn(self, finish: FinishReason, reply: Message | None) -> Turn:
        prompt, served = self._joined.prompt, self._generation.served
        node = self._tree.commit(prompt, self._ids, reply)
        versions = self._last.versions if self._last else ()
        if self._ids and not versions:
            versions = self._generation.versions(len(self._ids))
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
            declared=self._request.caller.declared,
            declared_label=self._request.caller.declared_label,
            prompt_length=prompt.length,
            prompt_delta=prompt.delta,
            output_ids=node.output,
            logprobs=pack_logprobs(self._logprobs),
            logprob_kind=served.logprob_kind,
            versions=versions,
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
            images=prompt.images,
            reply=reply,
            tool_specs=() if prompt.parent else self._request.tools,
            malformed_calls=self._malformed,
            timings=TurnTimings(
                received=self._received,
                joined=self._joined_at,
                first_token=self._first_token,
                finished=time.time(),
            ),
        )
