"""One model call on an engine that takes messages. Token ids are captured from the response if the engine reports them.

The turns of such calls are less exact than turns on an engine that takes token ids. Unless the engine has the
capability KEEPS_IDS, it renders the whole history anew for each call, so the ids of a prompt may differ from those of
the previous turn. The `mode` of a turn tells the two kinds apart.

Invariant: the ids of a prompt are recorded as reported. If a prompt does not begin with all ids of an earlier turn, the
new turn has no parent, and the ids that differ are counted as drift.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from outrider.dialects.base import Completion, ModelRequest, Opening
from outrider.engines.base import ChatChunk, ChatRequest, SamplingParams
from outrider.engines.pool.waits import Overdue
from outrider.errors import EngineUnavailable
from outrider.messages import Delta, Message, Role, images_in
from outrider.sessions.calls.call import ModelBackend, Step, count_differences
from outrider.sessions.calls.limits import TokenShare
from outrider.sessions.calls.request_settings import check_choice_kept, clamped, described_notes, recorded
from outrider.tokens.tree.canonical import digest, extend, message_key
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

if TYPE_CHECKING:
    from outrider.engines.pool.call import PoolReply


class MessageCall:
    """A call on an engine that takes messages. The engine may report the token ids of the prompt and the reply. The
    prompt's ids decide which earlier turn the call continues (see `CapturedTurns`).
    """

    def __init__(
        self,
        backend: ModelBackend,
        record: CapturedTurns,
        request: ModelRequest,
        messages: tuple[Message, ...],
        sampling: SamplingParams,
        *,
        described: Mapping[int, Sequence[str]],
        dialect: str,
        session_key: str,
        thinking: bool | None,
        received: float,
        overdue: Overdue,
        keeps_ids: bool,
    ) -> None:
        self.id = os.urandom(16).hex()
        # Promise all requested tokens to the call, because the client gets text before the tokens of this text are
        # counted, and text cannot be taken back.
        self.promised_tokens = sampling.max_tokens
        self.ended = False
        self._backend = backend
        self._record = record
        self._request = request
        self._messages = messages
        self._sampling = sampling
        self._thinking = thinking
        self._described = described
        self._dialect = dialect
        self._session_key = session_key
        self._overdue = overdue
        self._received = received
        self._joined_at = time.time()
        self._first_token: float | None = None
        self._known_ids = record.known_ids(messages, _tools_digest(request)) if keeps_ids else None
        self._share: TokenShare
        self._generation: PoolReply[ChatChunk]
        self._last: ChatChunk | None = None

    def start(self, share: TokenShare) -> PoolReply[ChatChunk]:
        self._share = share
        self._sampling = clamped(self._sampling, share)
        self._generation = self._backend.pool.calls.chat(
            ChatRequest(
                request_id=self.id,
                session_key=self._session_key,
                messages=self._messages,
                tools=self._request.tools,
                sampling=self._sampling,
                thinking=self._thinking,
                known_ids=self._known_ids,
            ),
            self._overdue,
        )
        return self._generation

    def take(self, chunk: ChatChunk) -> list[Step]:
        steps: list[Step] = []
        if self._last is None:
            steps.append(Opening(id=self.id, created=int(self._received), model=self._request.model))
        self._last = chunk
        if chunk.text or chunk.reasoning:
            self._first_token = self._first_token or time.time()
            steps.append(Delta(text=chunk.text, reasoning=chunk.reasoning))
        return steps

    def finish(self) -> list[Step]:
        last = self._last
        if last is None or last.finish is None or last.reply is None:
            raise EngineUnavailable("the engine ended a stream without finishing it")
        check_choice_kept(self._request.tool_choice, last.reply, last.finish, None)
        # If the response has no ids, use the number of tokens that the engine reported.
        reported = (last.usage or {}).get("completion_tokens", 0)
        self._share.take(len(last.output_ids) if last.output_ids is not None else reported)
        return []

    def commit(self) -> Turn:
        last, served = self._last, self._generation.served
        assert last is not None
        assert last.reply is not None
        captured = last.output_ids is not None and last.prompt_ids is not None
        output = last.output_ids or [] if captured else []
        prompt = last.prompt_ids or [] if captured else []
        tools = _tools_digest(self._request)
        placed = self._record.place(
            prompt,
            output,
            shown=_image_paths(self._messages),
            opening=_opening(self._messages, tools),
            messages=self._messages,
            reply=last.reply,
        )
        versions = last.versions or ((VersionSpan(served.version, 0, len(output)),) if output else ())
        return Turn(
            index=placed.index,
            parent=placed.parent,
            join=placed.join,
            cause=placed.cause,
            forked_from=placed.forked_from,
            conversation=placed.conversation,
            tools=tools,
            agent_id=self._request.caller.agent_id,
            parent_agent_id=self._request.caller.parent_id,
            purpose=self._request.caller.purpose,
            declared=self._request.caller.declared,
            declared_label=self._request.caller.declared_label,
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
            ignored=self._request.ignored + described_notes(self._described, first=placed.known_messages),
            drift_tokens=placed.drift,
            messages=self._messages[placed.known_messages :],
            reply=last.reply,
            tool_specs=self._request.tools if placed.parent is None else (),
            timings=TurnTimings(
                received=self._received,
                joined=self._joined_at,
                first_token=self._first_token,
                finished=time.time(),
            ),
            report=last.report,
        )

    def abort(self) -> Turn | None:
        """Return None, because there is nothing to record: an engine that takes messages reports no ids for a
        generation that was cut off."""
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


class TurnPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a captured turn among the turns of its session."""

    index: int
    parent: int | None
    join: JoinKind
    delta: bytes
    drift: int
    known_messages: int
    conversation: int
    cause: ForkCause | None = None
    forked_from: int | None = None


class ConversationStart(msgspec.Struct, frozen=True):
    """Digests of the parts of a request that are the same in all calls of a conversation: the tools, the system
    messages at the beginning, and the first message after them."""

    tools: bytes = b""
    system: bytes = b""
    first: bytes = b""


NOTHING = ConversationStart()


class CapturedTurns:
    """The token ids of a session's captured turns.

    A prompt extends an earlier turn if it begins with all ids of the turn, and if this part of the prompt has the same
    images as the turn. The images must be compared, because different images of the same size have the same ids."""

    def __init__(self) -> None:
        self._ends: list[bytes] = []
        self._messages: list[int] = []
        self._images: list[bytes] = []
        self._conversations: dict[ConversationStart, int] = {}
        self._newest: dict[int, int] = {}
        self._openings: list[ConversationStart] = []
        self._replies: dict[tuple[bytes, bytes], dict[ConversationStart, int]] = {}
        self._paths: dict[tuple[bytes, bytes], int] | None = None
        """The indexes of turns, by the digest of the tools and the digest of the messages with the reply. The value is
        None until `known_ids` is first called, because only engines that keep ids need the indexes, and digesting a
        long conversation takes milliseconds."""

    def restore(self, turns: Sequence[Turn]) -> None:
        """Take over the stored turns of an earlier attempt, in the order of their index. An index may be missing,
        because the turn with this index was not stored."""
        conversations: dict[int, tuple[Message, ...]] = {}
        for turn in turns:
            for _ in range(len(self._ends), turn.index):
                self._ends.append(b"")
                self._messages.append(1)
                self._images.append(b"")
                self._openings.append(NOTHING)
            before = b"" if turn.parent is None else self._ends[turn.parent]
            messages = turn.messages if turn.parent is None else (*conversations[turn.parent], *turn.messages)
            self.place(
                unpack_ids(before + turn.prompt_delta).tolist(),
                unpack_ids(turn.output_ids).tolist(),
                shown=_image_paths(messages),
                opening=_opening(messages, turn.tools),
                messages=messages,
                reply=turn.reply,
            )
            conversations[turn.index] = messages if turn.reply is None else (*messages, turn.reply)

    def known_ids(self, messages: Sequence[Message], tools: bytes) -> list[int] | None:
        """Return the ids of the recorded turn that `messages` continues, or None if there is no such turn. The turn
        must have the same `tools`, and `messages` up to their last reply must equal the turn's messages and reply."""
        self._paths = self._paths or {}
        last = max((at for at, message in enumerate(messages) if message.role is Role.ASSISTANT), default=-1)
        index = self._paths.get((tools, _path(messages[: last + 1]))) if self._paths and last >= 0 else None
        return None if index is None else unpack_ids(self._ends[index]).tolist()

    def place(
        self,
        prompt: list[int],
        output: list[int],
        *,
        shown: Sequence[bytes],
        opening: ConversationStart = NOTHING,
        messages: Sequence[Message] = (),
        reply: Message | None = None,
    ) -> TurnPosition:
        """Record a turn and return its position. `shown[n]` is a digest of the images in the request's first `n`
        messages.

        Requests with the same `opening` belong to one conversation. If the tools or the system prompt change, another
        conversation begins. The new conversation is a fork of an earlier conversation if both have the same first
        message, and if the new conversation quotes a reply of the earlier conversation."""
        index = len(self._ends)
        packed = pack_ids(prompt)
        conversation = self._conversations.setdefault(opening, len(self._conversations))
        before = self._newest.get(conversation)
        self._newest[conversation] = index
        # `fitting` has the turns whose ids are the beginning of the prompt. `same` has the turns of `fitting` whose
        # images match, too.
        fitting = [at for at, ids in enumerate(self._ends) if ids and len(ids) < len(packed) and packed.startswith(ids)]
        same = [at for at in fitting if shown[min(self._messages[at], len(shown) - 1)] == self._images[at]]
        parent = max(same, key=lambda earlier: len(self._ends[earlier]), default=None)
        self._ends.append(packed + pack_ids(output))
        self._messages.append(len(shown))
        self._images.append(shown[-1])
        known_messages = 0 if parent is None else self._messages[parent]
        self._openings.append(opening)
        elsewhere = self._quoted(messages[known_messages:], opening)
        if reply is not None and (reply.content or reply.tool_calls):
            self._replies.setdefault((opening.first, message_key(reply).body), {})[opening] = index
            if output and self._paths is not None:
                self._paths[opening.tools, _path([*messages, reply])] = index
        if elsewhere is not None:
            old = self._openings[elsewhere]
            cause = ForkCause.SYSTEM_CHANGED if old.tools == opening.tools else ForkCause.TOOLS_AND_SYSTEM_CHANGED
            if old.system == opening.system:
                cause = ForkCause.TOOLS_CHANGED
            return TurnPosition(
                index=index,
                parent=parent,
                join=JoinKind.FORK,
                cause=cause,
                delta=packed[len(self._ends[parent]) :] if parent is not None else packed,
                drift=0,
                known_messages=known_messages,
                conversation=conversation,
                forked_from=elsewhere,
            )
        if parent is not None:
            return TurnPosition(
                index=index,
                parent=parent,
                join=JoinKind.APPEND,
                delta=packed[len(self._ends[parent]) :],
                drift=0,
                known_messages=known_messages,
                conversation=conversation,
            )
        known = unpack_ids(b"" if before is None else self._ends[before])
        forked = before is not None and bool(prompt)
        cause = ForkCause.HISTORY_REWRITTEN if fitting else ForkCause.CAPTURE_DRIFT
        return TurnPosition(
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

    def _quoted(self, messages: Sequence[Message], opening: ConversationStart) -> int | None:
        """Return the index of the newest turn whose reply is the last known reply in `messages`. A reply is known if it
        occurred in a recorded conversation that has the same first message as `opening`. Returns None if no reply is
        known, or if the last known reply occurred in the conversation of `opening` itself."""
        for message in reversed(messages):
            if message.role is Role.ASSISTANT:
                givers = self._replies.get((opening.first, message_key(message).body))
                if givers is not None:
                    return None if opening in givers else max(givers.values())
        return None


def _tools_digest(request: ModelRequest) -> bytes:
    return digest(request.tools_raw) if request.tools else b""


def _path(messages: Sequence[Message]) -> bytes:
    """Return the digest of a conversation and its images. The reasoning in replies is ignored, because agents do not
    send it back."""
    path = b""
    for message in messages:
        path = extend(path, message_key(message).body)
    return path


def _image_paths(messages: Sequence[Message]) -> list[bytes]:
    """Return a list whose item `n` is a digest of the images in the first `n` messages. Item 0 stands for no
    messages."""
    paths = [b""]
    for message in messages:
        path = paths[-1]
        for image in images_in(message):
            path = extend(path, image.digest.encode())
        paths.append(path)
    return paths


def _opening(messages: Sequence[Message], tools: bytes) -> ConversationStart:
    system, first = b"", b""
    for message in messages:
        body = message_key(message).body
        if message.role is not Role.SYSTEM:
            first = body
            break
        system = extend(system, body)
    return ConversationStart(tools, system, first)
