"""A session's turns as strands: each one request and all that was added to it, with what tells strands apart.

Pure, and read after the session: nothing here decides what a strand is for (`branches.py` does). Invariant: every turn
is in exactly one strand, and a strand's head is the first of its turns.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.tree.canonical import PrintedFields, message_key
from outrider.trajectory import HEAD_CHANGES, FinishReason, Turn

Request = tuple[int | None, bytes]
"""What tells a session's requests apart: the turn gone on from, and the ids added to it."""

QUOTE_LENGTH = 12
"""Characters that a text needs for its reappearance to mean anything."""
QUOTE_SHARE = 0.8
"""How much of a summary, by its lines, has to reappear: clients wrap summaries, and leave parts out."""

STEPS = 100
"""Turns that are gone back at once, or for each turn of a session, where histories are compared."""

_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
_PLAIN = PrintedFields(call_ids=False, names=False)


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

    def before(self, index: int) -> Turn | None:
        """The last of its turns before one."""
        at = bisect_left(self.turns, index, key=lambda turn: turn.index)
        return self.turns[at - 1] if at else None


class Session:
    """The strands of a session; `turns[i].index` must be `i`. `elsewhere` are, by turns, the strands that go on from
    its history with other tools or another system prompt; `gone_on` are the turns that anything went on from."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.strands: list[Strand] = []
        self._strand_of: list[Strand] = []
        self._bodies: dict[Message, bytes] = {}
        self._first_seen: dict[Message, int] = {}
        self._answers: dict[int, list[str]] = {}
        self._carried_on: dict[int, bool] = {}
        self._conversations: dict[int, list[Strand]] = {}
        self.gone_on = gone_on(turns)
        self.elsewhere: dict[int, list[Strand]] = {}
        requests: dict[Request, Strand] = {}
        for turn in turns:
            for message in turn.messages:
                self._first_seen.setdefault(message, turn.index)
            strand = requests.get(request_key(turn))
            if strand is None:
                strand = requests[request_key(turn)] = self._place(turn)
            strand.turns.append(turn)
            self._strand_of.append(strand)
        self._sayings = [self._said_in(turn) for turn in turns]
        self._lines = _Lines(turns, self._sayings)
        self._quoted: dict[int, set[bytes]] = {}
        self._steps = STEPS * len(turns)

    def _place(self, turn: Turn) -> Strand:
        if turn.parent is not None and all(message.role is not Role.ASSISTANT for message in turn.messages):
            return self._strand_of[turn.parent]
        conversation = self._conversations.setdefault(turn.conversation, [])
        strand = Strand(len(self.strands), turn, not conversation, [], _system_of(turn))
        self.strands.append(strand)
        conversation.append(strand)
        if (before := history_of(turn)) is not None:
            self.elsewhere.setdefault(before, []).append(strand)
        return strand

    def strand_of(self, index: int) -> Strand:
        return self._strand_of[index]

    def conversation(self, number: int) -> list[Strand]:
        """Its strands, in order."""
        return self._conversations[number]

    def quoted(self, turn: Turn) -> set[bytes]:
        """What the assistant says in the messages that the turn added."""
        found = self._quoted.get(turn.index)
        if found is None:
            found = self._quoted[turn.index] = self.said(turn.messages)
        return found

    def shows(self, head: Turn, body: bytes) -> bool:
        """Whether the assistant says that in the turn's request."""
        return body in self.quoted(head) or (head.parent is not None and self._lines.had(head.parent, body))

    def had(self, turn: Turn, body: bytes) -> bool:
        """Whether the assistant had said that by the end of the turn."""
        return self._lines.had(turn.index, body)

    def lacks(self, head: Turn, old: Turn) -> bool:
        """Whether the head's request is without something that the assistant had said by the end of `old`. Only
        STEPS steps a turn are taken for all of a session's answers, so that it is read in good time."""
        at: int | None = old.index
        while at is not None and not (head.parent is not None and self._lines.leads_to(at, head.parent)):
            self._steps -= 1
            if self._steps < 0 or any(not self.shows(head, body) for body in self._sayings[at]):
                return self._steps >= 0
            at = self.turns[at].parent
        return False

    def begins_with(self, head: Turn, turn: Turn) -> bool:
        """Whether the head goes on, with other tools or another system prompt, from a history that has the turn."""
        at = history_of(head)
        while at is not None and not self._lines.leads_to(turn.index, at):
            at = history_of(self.strand_of(at).head)
        return at is not None

    def read(self, turn: Turn) -> set[bytes]:
        """What the assistant says in the turn's request, or in the end of it that STEPS turns added."""
        found, parent = set(self.quoted(turn)), turn.parent
        for _ in range(STEPS):
            if parent is None:
                break
            found |= self._sayings[parent]
            parent = self.turns[parent].parent
        return found

    def _said_in(self, turn: Turn) -> set[bytes]:
        return self.said([*turn.messages, turn.reply] if turn.reply is not None else turn.messages)

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
        if any(turn.parent is not None or turn.index in self.elsewhere for turn in turns):
            return True
        replies = self.said([turn.reply for turn in turns if turn.reply is not None])
        return any(replies & self.quoted(strand.head) for strand in strands)


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


def history_of(turn: Turn) -> int | None:
    """The turn whose history it goes on from with other tools or another system prompt."""
    return turn.forked_from if turn.cause in HEAD_CHANGES else None


def gone_on(turns: Sequence[Turn]) -> set[int]:
    """The turns with a continuation that sampled something the agent saw, or that has such a continuation; be it with
    other tools or another system prompt."""
    found: set[int] = set()
    for turn in reversed(turns):
        if was_seen(turn) or turn.index in found:
            found |= {before for before in (turn.parent, history_of(turn)) if before is not None}
    return found


def was_seen(turn: Turn) -> bool:
    return bool(turn.output_ids) and turn.finish is not FinishReason.ABORT


def used_answers(session: Session) -> dict[Request, int]:
    """Per request that was answered more than once, of the answers that were not cut off, the one that was gone on
    with, else one that a later request quotes, else the last one."""
    answers: dict[Request, list[Turn]] = {}
    for turn in session.turns:
        if turn.finish is not FinishReason.ABORT:
            answers.setdefault(request_key(turn), []).append(turn)
    several = {request: turns for request, turns in answers.items() if len(turns) > 1}
    quoted = set().union(*(session.quoted(strand.head) for strand in session.strands)) if several else set()
    return {request: _used(session, turns, quoted) for request, turns in several.items()}


def _used(session: Session, answers: Sequence[Turn], quoted: set[bytes]) -> int:
    for turn in answers:
        if turn.index in session.gone_on:
            return turn.index
    for turn in reversed(answers):
        if turn.reply is not None and session.body(turn.reply) in quoted:
            return turn.index
    return answers[-1].index


class _Lines:
    """Which turns lead to which, and what was said on the way to each; asking takes no longer in a long session. A turn
    leads to all that `entered` from it on until it `left`."""

    def __init__(self, turns: Sequence[Turn], said: Sequence[set[bytes]]) -> None:
        self._entered = [0] * len(turns)
        self._left = [0] * len(turns)
        self._first: dict[bytes, tuple[list[int], list[int]]] = {}
        children: list[list[int]] = [[] for _ in turns]
        roots: list[int] = []
        for turn in turns:
            (roots if turn.parent is None else children[turn.parent]).append(turn.index)
        order: list[int] = []
        waiting = roots[::-1]
        while waiting:
            index = waiting.pop()
            self._entered[index] = len(order)
            order.append(index)
            waiting += reversed(children[index])
        for index in reversed(order):
            last = children[index][-1] if children[index] else None
            self._left[index] = self._entered[index] + 1 if last is None else self._left[last]
        for index in order:
            for body in said[index]:
                if not self.had(index, body):
                    entered, left = self._first.setdefault(body, ([], []))
                    entered.append(self._entered[index])
                    left.append(self._left[index])

    def leads_to(self, one: int, other: int) -> bool:
        return self._entered[one] <= self._entered[other] < self._left[one]

    def had(self, index: int, body: bytes) -> bool:
        """Whether it was said by the end of a turn. No turn that first said it leads to another such turn."""
        entered, left = self._first.get(body, ((), ()))
        at = bisect_right(entered, self._entered[index]) - 1
        return at >= 0 and self._entered[index] < left[at]
