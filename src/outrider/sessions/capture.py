"""One model call on an engine that takes messages: its ids are captured from the reply, where it tells any.

The second-best way, and marked so in every turn: the engine renders the history anew each time, so a prompt may not
extend the previous turn's ids. Invariant: nothing is spliced; such a turn stands alone and its drift is counted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import uuid4

import msgspec

from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.engines.base import ChatChunk, ChatRequest, SamplingParams
from outrider.engines.member import Assignment
from outrider.errors import EngineUnavailable
from outrider.messages import Delta
from outrider.sessions.calls import Endpoint, count_differences, parsed
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    Turn,
    TurnTimings,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)


class CaptureCall:
    """A call on an engine that is given messages and reports the ids it used, or none at all.

    The prompt joins the session's record by its ids: where it does not extend the previous turn's, the turn
    stands alone and the difference is counted as drift.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        record: CaptureRecord,
        request: ModelRequest,
        sampling: SamplingParams,
        *,
        dialect: str,
        session_key: str,
    ) -> None:
        self.id = uuid4().hex
        self._endpoint = endpoint
        self._record = record
        self._request = request
        self._sampling = sampling
        self._dialect = dialect
        self._session_key = session_key
        self._received = time.time()
        self._first_token: float | None = None
        self._served: Assignment | None = None
        self._last: ChatChunk | None = None

    async def steps(self) -> AsyncGenerator[Opening | Delta, None]:
        generation = self._endpoint.pool.chat(
            ChatRequest(
                request_id=self.id,
                session_key=self._session_key,
                messages=parsed(self._request.messages, 0),
                tools=self._request.tools,
                sampling=self._sampling,
            )
        )
        async with aclosing(generation):
            async for chunk in generation:
                self._served = generation.served
                if self._last is None:
                    yield Opening(id=self.id, created=int(self._received), model=self._request.model)
                self._last = chunk
                if chunk.text or chunk.reasoning:
                    self._first_token = self._first_token or time.time()
                    yield Delta(text=chunk.text, reasoning=chunk.reasoning)
        if self._last is None or self._last.finish is None or self._last.reply is None:
            raise EngineUnavailable("the engine ended a stream without finishing it")

    def commit(self) -> Turn:
        last, served = self._last, self._served
        assert last is not None
        assert last.reply is not None
        assert served is not None
        captured = last.output_ids is not None and last.prompt_ids is not None
        output = last.output_ids or [] if captured else []
        request = self._request.messages
        placed = self._record.place(last.prompt_ids or [] if captured else [], output, messages=len(request))
        versions = last.versions or ((VersionSpan(served.version, 0, len(output)),) if output else ())
        return Turn(
            index=placed.index,
            parent=placed.parent,
            join=placed.join,
            cause=ForkCause.CAPTURE_DRIFT if placed.join is JoinKind.FORK else None,
            prompt_length=len(last.prompt_ids or []) if captured else 0,
            prompt_delta=placed.delta,
            output_ids=pack_ids(output),
            logprobs=pack_logprobs(last.logprobs or [] if captured else []),
            logprob_kind=served.logprob_kind,
            versions=versions,
            finish=last.finish or FinishReason.ABORT,
            mode=served.mode,
            dialect=self._dialect,
            engine=served.engine,
            sampling=msgspec.to_builtins(self._sampling),
            drift_tokens=placed.drift,
            messages=parsed(request, placed.known_messages),
            reply=last.reply,
            timings=TurnTimings(received=self._received, first_token=self._first_token, finished=time.time()),
        )

    def abort(self) -> Turn | None:
        """A generation that was cut off has reported no ids: there is nothing to record."""
        return None

    def completion(self) -> Completion:
        last = self._last
        assert last is not None
        assert last.reply is not None
        usage = last.usage or {}
        return Completion(
            id=self.id,
            created=int(self._received),
            model=self._request.model,
            reply=last.reply,
            finish=last.finish or FinishReason.ABORT,
            prompt_tokens=usage.get("prompt_tokens", len(last.prompt_ids or [])),
            completion_tokens=usage.get("completion_tokens", len(last.output_ids or [])),
        )


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a captured turn stands in its session's record."""

    index: int
    parent: int | None
    join: JoinKind
    delta: bytes
    drift: int
    known_messages: int


class CaptureRecord:
    """The ids of a session's captured turns: a prompt that begins with all of an earlier turn's extends it."""

    def __init__(self) -> None:
        self._ends: list[bytes] = []
        self._messages: list[int] = []

    def place(self, prompt: list[int], output: list[int], *, messages: int) -> Placed:
        """`messages` is how many the request had; its reply makes one more."""
        index = len(self._ends)
        packed = pack_ids(prompt)
        parent = self._longest_prefix(packed)
        self._ends.append(packed + pack_ids(output))
        self._messages.append(messages + 1)
        if parent is not None:
            delta = packed[len(self._ends[parent]) :]
            known = self._messages[parent]
            return Placed(index=index, parent=parent, join=JoinKind.APPEND, delta=delta, drift=0, known_messages=known)
        before = unpack_ids(self._ends[index - 1] if index else b"")
        drift = count_differences(before, prompt[: len(before)]) if prompt else 0
        join = JoinKind.FORK if index and prompt else JoinKind.ROOT
        return Placed(index=index, parent=None, join=join, delta=packed, drift=drift, known_messages=0)

    def _longest_prefix(self, prompt: bytes) -> int | None:
        """Of the turns whose ids the prompt goes on from, the longest; the first among equals."""
        fitting = [
            index for index, ids in enumerate(self._ends) if ids and len(ids) < len(prompt) and prompt.startswith(ids)
        ]
        return max(fitting, key=lambda index: len(self._ends[index]), default=None)
