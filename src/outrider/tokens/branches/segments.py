"""Cuts a session's turns into segments, and answers what the turns of a session have in common.

A segment is a request and all that was appended to it. A new one begins with a conversation, and where a request
repeats a recorded conversation and then has assistant messages that were not sampled there.

This module is used after the session, on its stored turns, and does not decide what a segment is for (`classify.py`
does). Invariants: every turn is in exactly one segment, and a segment's turns are in the order of their indexes; to ask
about all turns costs time in proportion to their number (tests/tokens/test_long_sessions.py), for sessions may have
thousands.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.tree.canonical import PrintedFields, message_key
from outrider.trajectory import HEAD_CHANGES, FinishReason, Turn

RequestKey = tuple[int, int | None, bytes]
"""Tells the requests of a session apart: the step of the task, the turn that a request continues, and the packed ids
that it added."""

QUOTE_LENGTH = 12
"""Characters that a text needs for its reappearance to mean anything: any conversation may repeat "Done."."""
QUOTE_SHARE = 0.8
"""How much of a summary has to reappear, by the characters of its lines: clients wrap summaries and leave parts out."""

STEPS_PER_TURN = 100
"""Turns that are visited at most for one question about what was said, and on average for each turn of a session in
all such questions: without a bound a session of many long histories would take time quadratic in its length."""

_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
_WITHOUT_IDS_AND_NAMES = PrintedFields(call_ids=False, names=False)


class Segment(msgspec.Struct, frozen=True):
    """`number` counts the segments in the order of their first turns; `starts_conversation` is whether the conversation
    begins with it; `system` are the system messages at the beginning of its first request."""

    number: int
    first: Turn
    starts_conversation: bool
    turns: list[Turn]
    system: tuple[str, ...]

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def last_before(self, index: int) -> Turn | None:
        """Its last turn with a smaller index."""
        at = bisect_left(self.turns, index, key=lambda turn: turn.index)
        return self.turns[at - 1] if at else None


class SegmentedSession:
    """A session's segments; `turns[i].index` must be `i`.

    continued: the turns that anything went on from (`continued_turns`).
    taken_over: by turn index, the segments that go on from the turn's history with other tools or another system
        prompt.

    A reply's *body* is the digest by which replies are compared, without call ids and reasoning.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.segments: list[Segment] = []
        self.continued = continued_turns(turns)
        self.taken_over: dict[int, list[Segment]] = {}
        self._segment_of: list[Segment] = []
        self._conversations: dict[int, list[Segment]] = {}
        self._bodies: dict[Message, bytes] = {}
        self._first_seen: dict[Message, int] = {}
        self._answers: dict[int, list[str]] = {}
        self._replies_added: dict[int, set[bytes]] = {}
        self._followed_up: dict[int, bool] = {}
        requests: dict[RequestKey, Segment] = {}
        for turn in turns:
            for message in turn.messages:
                self._first_seen.setdefault(message, turn.index)
            segment = requests.get(request_key(turn))
            if (
                segment is None
                and turn.parent is not None
                and all(message.role is not Role.ASSISTANT for message in turn.messages)
            ):
                segment = self._segment_of[turn.parent]
            if segment is None:
                conversation = self._conversations.setdefault(turn.conversation, [])
                others = (at for at, message in enumerate(turn.messages) if message.role is not Role.SYSTEM)
                system = turn.messages[: next(others, None)]
                segment = Segment(
                    number=len(self.segments),
                    first=turn,
                    starts_conversation=not conversation,
                    turns=[],
                    system=tuple(message.content for message in system),
                )
                self.segments.append(segment)
                conversation.append(segment)
                if (source := history_source(turn)) is not None:
                    self.taken_over.setdefault(source, []).append(segment)
            requests[request_key(turn)] = segment
            segment.turns.append(turn)
            self._segment_of.append(segment)
        self._said = [
            self.replies_among([*turn.messages, turn.reply] if turn.reply is not None else turn.messages)
            for turn in turns
        ]
        self._ancestry = _Ancestry(turns, self._said)
        self._steps_left = STEPS_PER_TURN * len(turns)

    def segment_of(self, index: int) -> Segment:
        """The segment of the turn with this index."""
        return self._segment_of[index]

    def segments_in(self, conversation: int) -> list[Segment]:
        return self._conversations[conversation]

    def body(self, message: Message) -> bytes:
        found = self._bodies.get(message)
        if found is None:
            found = self._bodies[message] = message_key(message, _WITHOUT_IDS_AND_NAMES).body
        return found

    def replies_among(self, messages: Sequence[Message]) -> set[bytes]:
        """The bodies of the assistant messages that say something: any conversation may have an empty one."""
        return {
            self.body(message)
            for message in messages
            if message.role is Role.ASSISTANT and (message.content or message.tool_calls)
        }

    def replies_added(self, turn: Turn) -> set[bytes]:
        """The replies in the messages that the turn's request added."""
        found = self._replies_added.get(turn.index)
        if found is None:
            found = self._replies_added[turn.index] = self.replies_among(turn.messages)
        return found

    def request_shows(self, turn: Turn, body: bytes) -> bool:
        """Whether a reply is in the turn's request."""
        return body in self.replies_added(turn) or (
            turn.parent is not None and self._ancestry.was_said_by(turn.parent, body)
        )

    def was_said_by(self, turn: Turn, body: bytes) -> bool:
        """Whether a reply was given by the end of the turn: in its request, or as its own."""
        return self._ancestry.was_said_by(turn.index, body)

    def lacks_replies(self, turn: Turn, old: Turn) -> bool:
        """Whether the turn's request is without a reply that was given by the end of `old`. False when the steps of the
        session are used up (STEPS_PER_TURN)."""
        at: int | None = old.index
        while at is not None and not (turn.parent is not None and self._ancestry.leads_to(at, turn.parent)):
            self._steps_left -= 1
            if self._steps_left < 0:
                return False
            if any(not self.request_shows(turn, body) for body in self._said[at]):
                return True
            at = self.turns[at].parent
        return False

    def history_has(self, turn: Turn, earlier: Turn) -> bool:
        """Whether the turn goes on, with other tools or another system prompt, from a history that has the earlier
        turn."""
        at = history_source(turn)
        while at is not None and not self._ancestry.leads_to(earlier.index, at):
            at = history_source(self.segment_of(at).first)
        return at is not None

    def replies_read(self, turn: Turn) -> set[bytes]:
        """The replies in the turn's request, or in the end of it that STEPS_PER_TURN turns added."""
        found, parent = set(self.replies_added(turn)), turn.parent
        for _ in range(STEPS_PER_TURN):
            if parent is None:
                break
            found |= self._said[parent]
            parent = self.turns[parent].parent
        return found

    def answer_lines(self, turn: Turn) -> list[str]:
        """The lines of a reply that calls no tool, or of the <summary> in it, that say something, stripped; none where
        there is no such reply."""
        lines = self._answers.get(turn.index)
        if lines is None:
            lines = []
            if turn.reply is not None and not turn.reply.tool_calls:
                wrapped = _SUMMARY.search(turn.reply.content)
                text = wrapped[1] if wrapped else turn.reply.content
                lines = [line for line in map(str.strip, text.splitlines()) if line]
            self._answers[turn.index] = lines
        return lines

    def new_messages(self, turn: Turn) -> list[Message]:
        """The messages of a turn that no earlier request had."""
        return [message for message in turn.messages if self._first_seen[message] == turn.index]

    def is_followed_up(self, conversation: int) -> bool:
        """Whether the conversation went on from any of its replies, as recorded or as the client quoted it."""
        found = self._followed_up.get(conversation)
        if found is None:
            segments = self.segments_in(conversation)
            turns = [turn for segment in segments for turn in segment.turns]
            found = any(turn.parent is not None or turn.index in self.taken_over for turn in turns)
            if not found:
                replies = self.replies_among([turn.reply for turn in turns if turn.reply is not None])
                found = any(replies & self.replies_added(segment.first) for segment in segments)
            self._followed_up[conversation] = found
        return found


def opening_text(messages: Sequence[Message]) -> str:
    """What users say before the assistant first speaks."""
    texts = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            break
        if message.role is Role.USER:
            texts.append(message.content)
    return "\n".join(texts)


def quotes(lines: Sequence[str], within: str) -> bool:
    """Whether `within` has QUOTE_SHARE of the lines, by their characters."""
    length = sum(map(len, lines))
    if length < QUOTE_LENGTH:
        return False
    missing, allowed = 0, (1 - QUOTE_SHARE) * length
    for line in lines:
        if line not in within:
            missing += len(line)
            if missing > allowed:
                return False
    return True


def request_key(turn: Turn) -> RequestKey:
    """Turns without ids are all requests of their own."""
    return turn.step, turn.parent, turn.prompt_delta or b"%d" % turn.index


def history_source(turn: Turn) -> int | None:
    """The turn whose history this one goes on from with other tools or another system prompt."""
    return turn.forked_from if turn.cause in HEAD_CHANGES else None


def reached_agent(turn: Turn) -> bool:
    """Whether the turn sampled something, and the agent was given it."""
    return bool(turn.output_ids) and turn.finish is not FinishReason.ABORT


def continued_turns(turns: Sequence[Turn]) -> set[int]:
    """The turns with a continuation that reached the agent, or that has such a continuation itself; also one with other
    tools or another system prompt."""
    found: set[int] = set()
    for turn in reversed(turns):
        if reached_agent(turn) or turn.index in found:
            found |= {before for before in (turn.parent, history_source(turn)) if before is not None}
    return found


def used_answers(session: SegmentedSession) -> dict[RequestKey, int]:
    """For each request that was answered more than once, the answer that the agent used: of those that were not cut
    off, the one that was continued, else the last one that a later request quotes, else the last one."""
    answers: dict[RequestKey, list[Turn]] = {}
    for turn in session.turns:
        if turn.finish is not FinishReason.ABORT:
            answers.setdefault(request_key(turn), []).append(turn)
    several = {request: turns for request, turns in answers.items() if len(turns) > 1}
    quoted = set().union(*(session.replies_added(segment.first) for segment in session.segments)) if several else set()
    used: dict[RequestKey, int] = {}
    for request, turns in several.items():
        continued = [turn for turn in turns if turn.index in session.continued][:1]
        echoed = [turn for turn in turns if turn.reply is not None and session.body(turn.reply) in quoted][-1:]
        used[request] = (continued or echoed or turns[-1:])[0].index
    return used


class _Ancestry:
    """Which turns lead to which, and which replies were given on the way to each, in logarithmic time.

    The turns are numbered depth first: a turn leads to those that were entered from its own entry until it was left.
    """

    def __init__(self, turns: Sequence[Turn], said: Sequence[set[bytes]]) -> None:
        self._entered = [0] * len(turns)
        self._left = [0] * len(turns)
        self._first_said: dict[bytes, tuple[list[int], list[int]]] = {}
        children: list[list[int]] = [[] for _ in turns]
        roots: list[int] = []
        for turn in turns:
            (roots if turn.parent is None else children[turn.parent]).append(turn.index)
        # With a stack, because a chain of turns may be longer than Python's recursion limit.
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
                if not self.was_said_by(index, body):
                    entered, left = self._first_said.setdefault(body, ([], []))
                    entered.append(self._entered[index])
                    left.append(self._left[index])

    def leads_to(self, one: int, other: int) -> bool:
        """Whether `one` is `other`, or a turn on the path to it."""
        return self._entered[one] <= self._entered[other] < self._left[one]

    def was_said_by(self, index: int, body: bytes) -> bool:
        """Whether a reply was given on the path to a turn, or by it. The turns that first gave it are never on each
        other's paths, so only the last one that was entered before can lead to this turn."""
        entered, left = self._first_said.get(body, ((), ()))
        at = bisect_right(entered, self._entered[index]) - 1
        return at >= 0 and self._entered[index] < left[at]
