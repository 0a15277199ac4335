"""One model call on an engine that takes messages: its ids are captured from the reply, where it tells any.

The second-best way, and marked so in every turn: the engine renders the history anew each time, so a prompt may not
extend the previous turn's ids. Invariant: nothing is spliced; such a turn stands alone and its drift is counted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from uuid import uuid4

import msgspec

from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.engines.base import ChatChunk, ChatRequest, SamplingParams
from outrider.engines.member import Assignment
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message, Role, images_in
from outrider.sessions.calls import Endpoint, count_differences, parsed, recorded
from outrider.tokens.canonical import digest, extend, message_key
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
        thinking: bool | None,
    ) -> None:
        self.id = uuid4().hex
        self._endpoint = endpoint
        self._record = record
        self._request = request
        self._messages = parsed(request.messages, 0)
        self._sampling = sampling
        self._thinking = thinking
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
                messages=self._messages,
                tools=self._request.tools,
                sampling=self._sampling,
                thinking=self._thinking,
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
        prompt = last.prompt_ids or [] if captured else []
        opening = _opening(self._messages, self._request.tools_raw)
        placed = self._record.place(prompt, output, shown=_image_paths(self._messages), opening=opening)
        versions = last.versions or ((VersionSpan(served.version, 0, len(output)),) if output else ())
        return Turn(
            index=placed.index,
            parent=placed.parent,
            join=placed.join,
            cause=placed.cause,
            forked_from=placed.forked_from,
            conversation=placed.conversation,
            tools=digest(self._request.tools_raw) if self._request.tools else b"",
            agent_id=self._request.caller.agent_id,
            parent_agent_id=self._request.caller.parent_id,
            purpose=self._request.caller.purpose,
            prompt_length=len(prompt),
            prompt_delta=placed.delta,
            output_ids=pack_ids(output),
            logprobs=pack_logprobs(last.logprobs or [] if captured else []),
            logprob_kind=served.logprob_kind,
            versions=versions,
            finish=last.finish or FinishReason.ABORT,
            mode=served.mode,
            dialect=self._dialect,
            engine=served.engine,
            sampling=recorded(self._sampling, self._thinking),
            altered=self._sampling.altered,
            ignored=self._request.ignored,
            drift_tokens=placed.drift,
            messages=self._messages[placed.known_messages :],
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
    conversation: int
    cause: ForkCause | None = None
    forked_from: int | None = None


class CaptureRecord:
    """The ids of a session's captured turns: a prompt that begins with all of an earlier turn's extends it, if it also
    shows the same images up to there. Ids alone do not tell: those of two images of one size are the same."""

    def __init__(self) -> None:
        self._ends: list[bytes] = []
        self._messages: list[int] = []
        self._images: list[bytes] = []
        self._conversations: dict[bytes, int] = {}
        self._newest: dict[int, int] = {}

    def place(self, prompt: list[int], output: list[int], *, shown: Sequence[bytes], opening: bytes = b"") -> Placed:
        """`shown[n]` tells the images in the request's first `n` messages apart from others. Requests with the same
        `opening` belong to one conversation."""
        index = len(self._ends)
        packed = pack_ids(prompt)
        conversation = self._conversations.setdefault(opening, len(self._conversations))
        before = self._newest.get(conversation)
        self._newest[conversation] = index
        fitting = self._prefixes(packed)
        same = [earlier for earlier in fitting if self._shows_the_same(earlier, shown)]
        parent = max(same, key=lambda earlier: len(self._ends[earlier]), default=None)
        self._ends.append(packed + pack_ids(output))
        self._messages.append(len(shown))
        self._images.append(shown[-1])
        if parent is not None:
            return Placed(
                index=index,
                parent=parent,
                join=JoinKind.APPEND,
                delta=packed[len(self._ends[parent]) :],
                drift=0,
                known_messages=self._messages[parent],
                conversation=conversation,
            )
        known = unpack_ids(b"" if before is None else self._ends[before])
        forked = before is not None and bool(prompt)
        cause = ForkCause.HISTORY_REWRITTEN if fitting else ForkCause.CAPTURE_DRIFT
        return Placed(
            index=index,
            parent=None,
            join=JoinKind.FORK if forked else JoinKind.ROOT,
            cause=cause if forked else None,
            delta=packed,
            drift=count_differences(known, prompt[: len(known)]) if prompt else 0,
            known_messages=0,
            conversation=conversation,
            forked_from=before,
        )

    def _prefixes(self, prompt: bytes) -> list[int]:
        """The turns whose ids the prompt goes on from."""
        return [
            index for index, ids in enumerate(self._ends) if ids and len(ids) < len(prompt) and prompt.startswith(ids)
        ]

    def _shows_the_same(self, earlier: int, shown: Sequence[bytes]) -> bool:
        """Whether a request has the images of an earlier one, in the messages that both have."""
        return shown[min(self._messages[earlier], len(shown) - 1)] == self._images[earlier]


def _image_paths(messages: Sequence[Message]) -> list[bytes]:
    """For every number of messages, from none to all, what stands for the images in so many."""
    paths = [b""]
    for message in messages:
        path = paths[-1]
        for image in images_in(message):
            path = extend(path, image.digest.encode())
        paths.append(path)
    return paths


def _opening(messages: Sequence[Message], tools_raw: bytes) -> bytes:
    """The digest of what a conversation keeps while it grows: its tools, and its messages up to the first that is not
    the system's."""
    path = digest(tools_raw)
    for message in messages:
        path = extend(path, message_key(message).body)
        if message.role is not Role.SYSTEM:
            break
    return path
