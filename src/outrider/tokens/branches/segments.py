"""Divides a session's turns into segments, and compares the turns with each other.

A segment is a request together with all turns that continue it. A request begins a new segment if it has no parent
turn, or if it adds assistant messages to its parent's conversation. A repeated request belongs to the segment of the
original request.

The code runs after the session, on the stored turns. `classify.py` then decides the kind of each segment. Invariants:
every turn is in exactly one segment, and a segment's turns are sorted by index. A query about all turns takes linear
time, because sessions may have thousands of turns (tests/tokens/test_long_sessions.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.tree.canonical import PrintedFields, message_key
from outrider.trajectory import HEAD_CHANGES, FinishReason, Turn, TurnOutline

RequestKey = tuple[int, int | None, bytes]
"""Identifies a request within a session: the step of the task, the parent turn, and the packed token ids that the
request adds to the parent's ids."""

QUOTE_LENGTH = 12
"""Minimum length of a quoted text, in characters. Shorter texts, such as "Done.", appear in many conversations."""
SUMMARY_LENGTH = 16
"""Minimum length of a summary, in characters. A shorter answer that appears again is a handover, such as "Over to QA.",
and not a summary."""
QUOTE_SHARE = 0.8
"""A text quotes a summary if it contains lines with at least this fraction of the summary's characters. The fraction is
below 1 because clients wrap summaries in other text and leave parts out."""

STEPS_PER_TURN = 100
"""Limits the work of searches. One call of `replies_read` visits at most this many turns. In the whole session,
`lacks_replies` and `lacks_beginning` visit at most this many turns for each turn of the session. Without these limits,
a session with many long histories would take quadratic time."""

MAX_ENDS = 20
"""Maximum number of earlier conversations that are compared with the opening of a new conversation. The earlier
conversations with the newest last replies are chosen."""

MAX_SEARCHED = 4 * 10**9
"""Maximum number of characters that are read in a session to find texts of earlier turns in later requests
(`SegmentedSession.contains`), about two seconds of work. After that, no text is found. Without this limit, requests
that quote many replies could take minutes, during which no other session's requests are read."""

_SUMMARY = ("<summary>", "</summary>")
_WITHOUT_IDS_AND_NAMES = PrintedFields(call_ids=False, names=False)


class Segment(msgspec.Struct, frozen=True):
    """A turn `first` and all turns that continue from it. `number` counts the segments in the order of their first
    turns. `starts_conversation` is True for the first segment of a conversation. `system` contains the texts of the
    system messages at the beginning of the first request."""

    number: int
    first: Turn
    starts_conversation: bool
    turns: list[Turn]
    system: tuple[str, ...]

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def last_before(self, index: int) -> Turn | None:
        """Return the segment's last turn before turn `index`, or None."""
        at = bisect_left(self.turns, index, key=lambda turn: turn.index)
        return self.turns[at - 1] if at else None


class SegmentedSession:
    """The segments of a session, with methods that compare its turns. `turns[i].index` must be `i`.

    continued: the turns that a later turn continues (`_continued_turns`).
    taken_over: for each turn index, the segments that take over the turn's history (`source`).
    handed_over: the numbers of the segments to which another conversation passed its work on (`_find_handed_over`).

    Replies are compared by a digest (`reply_digest`). It does not depend on call ids and reasoning.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.segments: list[Segment] = []
        self.handed_over: set[int] = set()
        self._sources: dict[int, int] = {}
        self.taken_over: dict[int, list[Segment]] = {}
        self._segment_of: list[Segment] = []
        self._conversations: dict[int, list[Segment]] = {}
        self._reply_digests: dict[Message, bytes] = {}
        self._first_seen: dict[Message, int] = {}
        self._answers: dict[int, list[str]] = {}
        self._replies_added: dict[int, set[bytes]] = {}
        self._followed_up: dict[int, bool] = {}
        requests: dict[RequestKey, Segment] = {}
        sampled: dict[bytes, int] = {}
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
                if (source := self._find_source(segment, sampled)) is not None:
                    self._sources[turn.index] = source
                    self.taken_over.setdefault(source, []).append(segment)
            if turn.reply is not None and (turn.reply.content or turn.reply.tool_calls):
                sampled[self.reply_digest(turn.reply)] = turn.index
            requests[request_key(turn)] = segment
            segment.turns.append(turn)
            self._segment_of.append(segment)
        self._sampled = sampled
        self._find_handed_over()
        self.continued = self._continued_turns()
        self._replies = [
            self.replies_among([*turn.messages, turn.reply] if turn.reply is not None else turn.messages)
            for turn in turns
        ]
        self._ancestry = _Ancestry(turns, self._replies)
        self._steps_left = STEPS_PER_TURN * len(turns)
        self._characters_left = MAX_SEARCHED

    def _find_source(self, segment: Segment, sampled: Mapping[bytes, int]) -> int | None:
        """Return the turn whose history the segment takes over, or None.

        `sampled` maps the digests of earlier replies to their turns. If the segment continues a history with other
        tools or another system prompt, the result is the segment's `history_source`. If the segment starts a
        conversation for another reason, the client may have rewritten the beginning of a history. In this case, find
        the last reply in the segment's first request that is also in `sampled`. The result is the turn that sampled
        this reply."""
        if (source := history_source(segment.first)) is not None or not segment.starts_conversation:
            return source
        shown = (message for message in reversed(segment.first.messages) if message.role is Role.ASSISTANT)
        return next((sampled[digest] for digest in map(self.reply_digest, shown) if digest in sampled), None)

    def _find_handed_over(self) -> None:
        """Find the conversations to which an earlier conversation passes its work on without repeating its replies as
        messages (`handed_over`). No turn continues the last reply of the earlier conversation, and one of these
        conditions holds:

        - The last reply calls a tool, and the new conversation's first request contains the opening of the earlier
          conversation.
        - Both conversations have the same tools and system prompt, and the new conversation's first request contains
          the last two replies of the earlier conversation."""
        continued = self._continued_turns()
        openings: dict[int, str] = {}
        ends: dict[int, Turn] = {}
        for turn in self.turns:
            segment = self._segment_of[turn.index]
            if turn is segment.first and segment.starts_conversation:
                openings[turn.conversation] = opening_text(turn.messages)
                if turn.index not in self._sources:
                    asked = "\n".join(message.content for message in turn.messages if message.role is not Role.SYSTEM)
                    newest = islice(reversed(ends.values()), MAX_ENDS)
                    fitting = (
                        end for end in newest if self._passes_on(end, segment, openings[end.conversation], asked)
                    )
                    if (source := next(fitting, None)) is not None:
                        openings[turn.conversation] = openings[source.conversation]
                        self.handed_over.add(segment.number)
                        self._sources[turn.index] = source.index
                        self.taken_over.setdefault(source.index, []).append(segment)
                        continued.add(source.index)
            ends.pop(turn.conversation, None)
            if turn.reply is not None and turn.index not in continued:
                ends[turn.conversation] = turn

    def _passes_on(self, end: Turn, segment: Segment, opening: str, asked: str) -> bool:
        """Return True if an earlier conversation passes its work on to the segment. The earlier conversation began with
        `opening` and ends with the turn `end`. `asked` is the text of the segment's first request."""
        assert end.reply is not None
        if end.step != segment.first.step:
            return False
        if end.reply.tool_calls:
            return bool(opening) and opening in asked
        before = None if end.parent is None else self.turns[end.parent].reply
        same_head = end.tools == segment.first.tools and self._segment_of[end.index].system == segment.system
        return (
            before is not None
            and same_head
            and len(end.reply.content) >= QUOTE_LENGTH
            and len(before.content) >= QUOTE_LENGTH
            and end.reply.content in asked
            and before.content in asked
        )

    def source(self, turn: Turn) -> int | None:
        """Return the turn whose history this turn takes over, or None."""
        return self._sources.get(turn.index, history_source(turn))

    def _continued_turns(self) -> set[int]:
        """Return the turns that have a descendant whose reply reached the agent. A descendant may have other tools,
        another system prompt or a rewritten beginning."""
        found: set[int] = set()
        for turn in reversed(self.turns):
            if reached_agent(turn) or turn.index in found:
                found |= {before for before in (turn.parent, self.source(turn)) if before is not None}
        return found

    def segment_of(self, index: int) -> Segment:
        return self._segment_of[index]

    def segments_in(self, conversation: int) -> list[Segment]:
        return self._conversations[conversation]

    def reply_digest(self, message: Message) -> bytes:
        found = self._reply_digests.get(message)
        if found is None:
            found = self._reply_digests[message] = message_key(message, _WITHOUT_IDS_AND_NAMES).body
        return found

    def replies_among(self, messages: Sequence[Message]) -> set[bytes]:
        """Return the digests (`reply_digest`) of the assistant messages. Empty messages are left out, because they
        appear in any conversation."""
        return {
            self.reply_digest(message)
            for message in messages
            if message.role is Role.ASSISTANT and (message.content or message.tool_calls)
        }

    def replies_added(self, turn: Turn) -> set[bytes]:
        """Return the digests (`reply_digest`) of the assistant messages that the turn's request added."""
        found = self._replies_added.get(turn.index)
        if found is None:
            found = self._replies_added[turn.index] = self.replies_among(turn.messages)
        return found

    def request_shows(self, turn: Turn, digest: bytes) -> bool:
        """Return True if the turn's request contains the reply with the digest `digest`."""
        return digest in self.replies_added(turn) or (
            turn.parent is not None and self._ancestry.reply_given_by(turn.parent, digest)
        )

    def reply_given_by(self, turn: Turn, digest: bytes) -> bool:
        """Return True if the turn's request contains the reply with the digest `digest`, or if the turn itself sampled
        this reply."""
        return self._ancestry.reply_given_by(turn.index, digest)

    def lacks_replies(self, turn: Turn, old: Turn) -> bool:
        """Return True if the turn's request lacks a reply of the history that ends with turn `old`. Returns False if
        the session's limit of visited turns is reached (STEPS_PER_TURN)."""
        at: int | None = old.index
        while at is not None and not (turn.parent is not None and self._ancestry.leads_to(at, turn.parent)):
            self._steps_left -= 1
            if self._steps_left < 0:
                return False
            if any(not self.request_shows(turn, digest) for digest in self._replies[at]):
                return True
            at = self.turns[at].parent
        return False

    def lacks_beginning(self, turn: Turn, old: Turn) -> bool:
        """Return True if the turn's request contains only the end of the history that ends with turn `old`. The request
        must lack the first reply of that history, and also the history's second reply or first message. If only later
        replies or a single reply are missing, the history was edited and not cut. Returns False if the session's limit
        of visited turns is reached (STEPS_PER_TURN)."""
        path = [old]
        while path[-1].parent is not None:
            self._steps_left -= 1
            if self._steps_left < 0:
                return False
            # at the end, `path` contains the first three turns of the history
            path = [*path[-2:], self.turns[path[-1].parent]]
        messages = [
            message
            for each in reversed(path)
            for message in (*each.messages, each.reply)
            if message is not None and message.role is not Role.SYSTEM
        ]
        replies = [message for message in messages if self.replies_among([message])][:2]
        lacking = [reply for reply in replies if not self.request_shows(turn, self.reply_digest(reply))]
        if replies[:1] != lacking[:1] or not lacking:
            return False
        return len(lacking) > 1 or (turn.parent is None and messages[0] not in turn.messages)

    def history_has(self, turn: Turn, earlier: Turn) -> bool:
        """Return True if the turn continues a history that contains the turn `earlier`, but with other tools or another
        system prompt."""
        at = history_source(turn)
        while at is not None and not self._ancestry.leads_to(earlier.index, at):
            at = history_source(self.segment_of(at).first)
        return at is not None

    def replies_read(self, turn: Turn) -> set[bytes]:
        """Return the digests (`reply_digest`) of the replies in the turn's request. At most STEPS_PER_TURN earlier
        turns are searched."""
        found, parent = set(self.replies_added(turn)), turn.parent
        for _ in range(STEPS_PER_TURN):
            if parent is None:
                break
            found |= self._replies[parent]
            parent = self.turns[parent].parent
        return found

    def answer_lines(self, turn: Turn) -> list[str]:
        """Return the stripped, non-empty lines of the turn's reply, or of the part inside its <summary> tag. Returns an
        empty list if there is no reply or the reply calls a tool."""
        lines = self._answers.get(turn.index)
        if lines is None:
            lines = []
            if turn.reply is not None and not turn.reply.tool_calls:
                # No regular expression is used, because it would take quadratic time in the number of opening tags.
                _, _, wrapped = turn.reply.content.partition(_SUMMARY[0])
                inner, end, _ = wrapped.partition(_SUMMARY[1])
                text = inner if end else turn.reply.content
                lines = [line for line in map(str.strip, text.splitlines()) if line]
            self._answers[turn.index] = lines
        return lines

    def contains(self, text: str, part: str) -> bool:
        """Return True if `text` contains `part`. Returns False if the session's limit of characters is reached
        (MAX_SEARCHED)."""
        if self.searches_ended:
            return False
        at = text.find(part)
        self._characters_left -= len(text) if at < 0 else at + len(part)
        return at >= 0

    def contained(self, text: str, parts: Collection[str]) -> list[str]:
        """Return those of the parts that `text` contains. This takes less time than `contains` for each part."""
        if self.searches_ended:
            return []
        self._characters_left -= len(text) * len(parts)
        return [part for part in parts if part in text]

    @property
    def searches_ended(self) -> bool:
        """True if the session's limit of characters is reached, so that `contains` finds nothing any more."""
        return self._characters_left < 0

    def quotes(self, lines: Sequence[str], within: str, shortest: int) -> bool:
        """Return True if `within` contains lines that make up at least QUOTE_SHARE of all characters in `lines`.
        Returns False if all lines together are shorter than `shortest` characters."""
        length = sum(map(len, lines))
        if length < shortest:
            return False
        missing, allowed = 0, (1 - QUOTE_SHARE) * length
        for line in lines:
            if not self.contains(within, line):
                missing += len(line)
                if missing > allowed:
                    return False
        return True

    def new_messages(self, turn: Turn) -> list[Message]:
        """Return the messages that this turn was the first to add."""
        return [message for message in turn.messages if self._first_seen[message] == turn.index]

    def was_sampled(self, message: Message) -> bool:
        """Return True if the message is a reply that the model sampled in this session."""
        return message.role is Role.ASSISTANT and self.reply_digest(message) in self._sampled

    def is_followed_up(self, conversation: int) -> bool:
        """Return True if the conversation continued after any of its replies, in one of these ways:

        - A turn continues the reply.
        - A segment with other tools or another system prompt takes over the history that includes the reply.
        - Another segment of the conversation begins with a request that contains the reply."""
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
    """Return the text of the user messages before the first assistant message."""
    texts = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            break
        if message.role is Role.USER:
            texts.append(message.content)
    return "\n".join(texts)


def request_key(turn: Turn) -> RequestKey:
    """Return the key that identifies the turn's request. A turn without recorded ids has a unique key."""
    return turn.step, turn.parent, turn.prompt_delta or b"%d" % turn.index


def history_source(turn: Turn) -> int | None:
    """Return the turn whose history this turn continues with other tools or another system prompt, or None."""
    return turn.forked_from if turn.cause in HEAD_CHANGES else None


def reached_agent(turn: Turn | TurnOutline) -> bool:
    """Return True if the turn sampled tokens and the agent received them."""
    return bool(turn.output_ids) and turn.finish is not FinishReason.ABORT


def used_answers(session: SegmentedSession) -> dict[RequestKey, int]:
    """For each request with several replies, return the index of the turn whose reply the agent used. This is the first
    of these turns that exists:

    1. the first reply that a later turn continues
    2. the last reply that another request contains
    3. the last reply

    Replies that were cut off are ignored. If the agent sent the request again before it had received any reply, it may
    have used all replies. Such a request is left out if neither case 1 nor case 2 applies to it."""
    answers: dict[RequestKey, list[Turn]] = {}
    for turn in session.turns:
        if turn.finish is not FinishReason.ABORT:
            answers.setdefault(request_key(turn), []).append(turn)
    several = {request: turns for request, turns in answers.items() if len(turns) > 1}
    quoted = set().union(*(session.replies_added(segment.first) for segment in session.segments)) if several else set()
    used: dict[RequestKey, int] = {}
    for request, turns in several.items():
        continued = [turn for turn in turns if turn.index in session.continued][:1]
        echoed = [turn for turn in turns if turn.reply is not None and session.reply_digest(turn.reply) in quoted][-1:]
        last_sent = max(turn.timings.received for turn in turns)
        side_by_side = all(turn.timings.finished > last_sent for turn in turns)
        if continued or echoed or not side_by_side:
            used[request] = (continued or echoed or turns[-1:])[0].index
    return used


class _Ancestry:
    """Answers queries about the ancestors of turns, and about the replies on the path to a turn, in logarithmic time.

    A depth-first walk numbers the turns. `_entered` has the turn's own number. The turn and its descendants have the
    numbers from `_entered` to `_left` (exclusive).
    """

    def __init__(self, turns: Sequence[Turn], replies: Sequence[set[bytes]]) -> None:
        self._entered = [0] * len(turns)
        self._left = [0] * len(turns)
        self._first_replies: dict[bytes, tuple[list[int], list[int]]] = {}
        children: list[list[int]] = [[] for _ in turns]
        roots: list[int] = []
        for turn in turns:
            (roots if turn.parent is None else children[turn.parent]).append(turn.index)
        # The walk uses a stack, because a chain of turns may be longer than Python's recursion limit.
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
            for digest in replies[index]:
                if not self.reply_given_by(index, digest):
                    entered, left = self._first_replies.setdefault(digest, ([], []))
                    entered.append(self._entered[index])
                    left.append(self._left[index])

    def leads_to(self, one: int, other: int) -> bool:
        """Return True if `one` is on the path from the root to `other`, or is `other` itself."""
        return self._entered[one] <= self._entered[other] < self._left[one]

    def reply_given_by(self, index: int, digest: bytes) -> bool:
        """Return True if the turn `index`, or a turn on the path to this turn, sampled the reply with the digest
        `digest` or has the reply among its messages.

        For each reply, `_first_replies` lists the largest subtrees whose turns all have the reply on their paths. Each
        subtree is a range of turn numbers. The subtrees do not overlap, so only the last one that begins at or before
        the turn is tested."""
        entered, left = self._first_replies.get(digest, ((), ()))
        at = bisect_right(entered, self._entered[index]) - 1
        return at >= 0 and self._entered[index] < left[at]
