"""A session's turns as strands: each one request and all that was added to it, with what tells strands apart.

Pure, and read after the session: nothing here decides what a strand is for (`branches.py` does). Invariant: every turn
is in exactly one strand, and a strand's head is the first of its turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.canonical import Shown, message_key
from outrider.trajectory import FinishReason, Turn

Request = tuple[int | None, bytes]
"""What tells a session's requests apart: the turn gone on from, and the ids added to it."""

QUOTE_LENGTH = 12
"""Characters that a text needs for its reappearance to mean anything."""
QUOTE_SHARE = 0.8
"""How much of a summary, by its lines, has to reappear: clients wrap summaries, and leave parts out."""

_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
_PLAIN = Shown(call_ids=False, names=False)


class Strand(msgspec.Struct, frozen=True):
    """`opener` is whether its conversation begins with it; `number` counts the strands by their heads; `system` are the
    system messages at its beginning."""

    number: int
    head: Turn
    opener: bool
    turns: list[Turn]
    system: tuple[str, ...]

    @property
    def last(self) -> Turn:
        return self.turns[-1]


class Session:
    """The strands of a session; `turns[i].index` must be `i`."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.strands: list[Strand] = []
        self._strand_of: list[Strand] = []
        self._bodies: dict[Message, bytes] = {}
        self._first_seen: dict[Message, int] = {}
        self._answers: dict[int, list[str]] = {}
        self._carried_on: dict[int, bool] = {}
        self._conversations: dict[int, list[Strand]] = {}
        requests: dict[Request, Strand] = {}
        for turn in turns:
            for message in turn.messages:
                self._first_seen.setdefault(message, turn.index)
            strand = requests.get(request_key(turn))
            if strand is None:
                strand = requests[request_key(turn)] = self._place(turn)
            strand.turns.append(turn)
            self._strand_of.append(strand)

    def _place(self, turn: Turn) -> Strand:
        if turn.parent is not None and all(message.role is not Role.ASSISTANT for message in turn.messages):
            return self._strand_of[turn.parent]
        conversation = self._conversations.setdefault(turn.conversation, [])
        strand = Strand(len(self.strands), turn, not conversation, [], _system_of(turn))
        self.strands.append(strand)
        conversation.append(strand)
        return strand

    def strand_of(self, index: int) -> Strand:
        return self._strand_of[index]

    def conversation(self, number: int) -> list[Strand]:
        """Its strands, in order."""
        return self._conversations[number]

    def request(self, turn: Turn) -> list[Message]:
        """All messages that the turn answered."""
        parts = [turn.messages]
        while turn.parent is not None:
            turn = self.turns[turn.parent]
            parts += [(turn.reply,) if turn.reply is not None else (), turn.messages]
        return [message for part in reversed(parts) for message in part]

    def answer(self, turn: Turn) -> list[str]:
        """The lines of a reply that calls no tool; none where there is no such reply."""
        lines = self._answers.get(turn.index)
        if lines is None:
            reply = turn.reply
            lines = lines_of(reply.content) if reply is not None and not reply.tool_calls else []
            self._answers[turn.index] = lines
        return lines

    def fresh(self, turn: Turn) -> list[Message]:
        """The messages of a turn that no earlier request had."""
        return [message for message in turn.messages if self._first_seen[message] == turn.index]

    def body(self, message: Message) -> bytes:
        """What tells messages apart, call ids and reasoning aside."""
        found = self._bodies.get(message)
        if found is None:
            found = self._bodies[message] = message_key(message, _PLAIN).body
        return found

    def said(self, messages: Sequence[Message]) -> set[bytes]:
        """The bodies of the assistant's messages that say something: any conversation may have an empty one."""
        spoken = (message for message in messages if message.role is Role.ASSISTANT)
        return {self.body(message) for message in spoken if message.content or message.tool_calls}

    def carried_on(self, conversation: int) -> bool:
        """Whether any reply of the conversation was gone on with in it, as recorded or as the client quoted it."""
        found = self._carried_on.get(conversation)
        if found is None:
            found = self._carried_on[conversation] = self._is_carried_on(self.conversation(conversation))
        return found

    def _is_carried_on(self, strands: Sequence[Strand]) -> bool:
        turns = [turn for strand in strands for turn in strand.turns]
        if any(turn.parent is not None for turn in turns):
            return True
        replies = self.said([turn.reply for turn in turns if turn.reply is not None])
        return any(replies & self.said(strand.head.messages) for strand in strands)


def _system_of(turn: Turn) -> tuple[str, ...]:
    texts = []
    for message in turn.messages:
        if message.role is not Role.SYSTEM:
            break
        texts.append(message.content)
    return tuple(texts)


def opening_of(messages: Sequence[Message]) -> str:
    """What users say before the assistant first speaks."""
    texts = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            break
        if message.role is Role.USER:
            texts.append(message.content)
    return "\n".join(texts)


def lines_of(text: str) -> list[str]:
    """The lines of a text, or of the <summary> in it, that say something, without their outer white space."""
    wrapped = _SUMMARY.search(text)
    lines = (line.strip() for line in (wrapped[1] if wrapped else text).splitlines())
    return [line for line in lines if line]


def quotes(lines: Sequence[str], within: str) -> bool:
    """Whether `within` has most of the lines."""
    length = sum(map(len, lines))
    missing, allowed = 0, (1 - QUOTE_SHARE) * length
    for line in lines if length >= QUOTE_LENGTH else ():
        missing += 0 if line in within else len(line)
        if missing > allowed:
            return False
    return length >= QUOTE_LENGTH


def request_key(turn: Turn) -> Request:
    """Turns without ids are all requests of their own."""
    return turn.parent, turn.prompt_delta or b"%d" % turn.index


def gone_on(turns: Sequence[Turn]) -> set[int]:
    """The turns with a continuation that sampled something the agent saw, or that has such a continuation."""
    found: set[int] = set()
    for turn in reversed(turns):
        if turn.parent is not None and (was_seen(turn) or turn.index in found):
            found.add(turn.parent)
    return found


def was_seen(turn: Turn) -> bool:
    return bool(turn.output_ids) and turn.finish is not FinishReason.ABORT


def used_answers(turns: Sequence[Turn], continued: set[int]) -> dict[Request, int]:
    """Per request, of the answers that were not cut off, the one that was gone on with, else the last one."""
    used: dict[Request, int] = {}
    for turn in turns:
        request = request_key(turn)
        if turn.finish is not FinishReason.ABORT and used.get(request, -1) not in continued:
            used[request] = turn.index
    return used
