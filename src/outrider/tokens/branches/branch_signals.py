"""Finds relations between the segments of a session. A segment is a request together with the turns that continue it
(`segments.py`). The module can find:

- the tool call that started a segment
- the earlier history that a segment replaces with a summary
- whether a segment continues the work of another agent

`classify.py` uses these relations to decide the kind of each segment. The words in `LABELS`, `PURPOSES` and
`TYPE_ARGUMENTS` come from the prompts, headers and tools of real clients. Invariant: a segment is related only to turns
before its first turn.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from outrider.messages import Message, Role, ToolCall
from outrider.tokens.branches.quotations import parts_of_reply
from outrider.tokens.branches.segments import (
    QUOTE_SHARE,
    SUMMARY_LENGTH,
    Segment,
    SegmentedSession,
    history_source,
    opening_text,
    reached_agent,
)
from outrider.trajectory import BranchKind, ForkCause, Turn

MIN_TOOL_TEXT = 8
"""Minimum length, in characters, of a tool argument that can be the prompt of a sub-agent."""
OPENING_SHARE = 0.5
"""A tool call certainly started a conversation if one of its arguments makes up at least this fraction of the
conversation's first user messages."""

LABELS: tuple[tuple[str, str], ...] = (
    ("quota", "quota"),
    ("topic", "topic"),
    ("title", "title"),
    ("commit message", "commit"),
    ("speak next", "next-speaker"),
    ("task routing", "router"),
    ("stuck in a", "loop-check"),
    ("command prefix", "command-prefix"),
    ("file path", "file-paths"),
    ("web page", "web-page"),
    ("summar", "summary"),
)
"""Words that mark side calls: requests apart from the agent's task, such as for a title. Each pair consists of the
beginning of one or more words, and the label of the prompts that contain this beginning. The system prompt is searched
first, then the last user message. If a text contains several of the words, the first one in the text decides. For
example, prompts for titles mention topics, and prompts for topics mention titles. Words such as "router" or "loop" are
left out, because many agents' own prompts contain them."""

_LABEL_OF = dict(LABELS)
_LABEL_WORD = re.compile(rf"\b({'|'.join(re.escape(word) for word, _ in LABELS)})")

PURPOSES: dict[str, BranchKind] = {
    "compact": BranchKind.COMPACTION,
    "compaction": BranchKind.COMPACTION,
    "subagent": BranchKind.SUBAGENT,
    "title": BranchKind.AUXILIARY,
    "topic": BranchKind.AUXILIARY,
    "router": BranchKind.AUXILIARY,
    "summary": BranchKind.AUXILIARY,
    "quota": BranchKind.AUXILIARY,
}
"""The kind of a model call, by the purpose that the client declares. Other purposes are ignored."""

TYPE_ARGUMENTS = ("subagent_type", "agent_type", "agent_name", "agent", "role")
"""Names of the tool arguments whose value is the type of the sub-agent that the tool starts."""

MAX_TOOL_TEXTS = 1000
"""Maximum number of tool arguments (the newest ones) that are compared with the first user messages of a
conversation."""

LOOK_BACK = 100
"""Maximum number of turns before a segment, and of segments before it, that are searched for the history that the
segment shortens. A client that asks for a summary continues from the summary immediately, so older turns need not be
searched."""


class Continuation(msgspec.Struct, frozen=True):
    """The earlier history that a segment (a request and its continuations) shortens. `old` is the last turn of that
    history. `source` is the turn that wrote the history's summary, or None if the segment keeps the end of the history
    instead of a summary."""

    old: Turn
    source: Turn | None


class Spawn(msgspec.Struct, frozen=True):
    """The tool call that started a conversation. `turn` is the index of the turn that made the call. `agent_type` is
    the type of agent that the call asks for, or "". `is_most_of_opening` is True if an argument of the call makes up
    most of the first user messages (OPENING_SHARE)."""

    turn: int
    agent_type: str
    tool: str
    is_most_of_opening: bool


class AgentTurns:
    """Finds the turns of an agent by the name that the client gives it (`Turn.agent_id`)."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: dict[str, list[Turn]] = {}
        # For each turn index, the newest earlier turn of the same agent in another conversation.
        self._other_conversation: dict[int, Turn | None] = {}
        for turn in turns:
            if turn.agent_id is not None:
                earlier = self._turns.setdefault(turn.agent_id, [])
                self._other_conversation[turn.index] = (
                    self._outside(earlier[-1], turn.conversation) if earlier else None
                )
                earlier.append(turn)

    def newest_outside(self, conversation: int, agent: str, index: int) -> Turn | None:
        """Return the agent's newest turn that comes before turn `index` and belongs to a conversation other than
        `conversation`. Returns None if there is no such turn."""
        turns = self._turns.get(agent, [])
        at = bisect_left(turns, index, key=lambda turn: turn.index)
        return self._outside(turns[at - 1], conversation) if at else None

    def _outside(self, last: Turn, conversation: int) -> Turn | None:
        return last if last.conversation != conversation else self._other_conversation[last.index]


def find_continuation(session: SegmentedSession, segment: Segment) -> Continuation | None:
    """Find the earlier history that the first request of `segment` shortens. The request replaces the history with a
    summary, or keeps only the history's last part. Summaries are searched first, from the newest to the oldest. Returns
    None if there is no such history."""
    first = segment.first
    recent = session.segments[max(0, segment.number - LOOK_BACK) : segment.number]
    related = []
    for other in recent:
        # Segments of the same conversation or agent are related. Equal tools or an equal system prompt indicate the
        # same agent.
        same_tools, same_system = other.first.tools == first.tools, other.system == segment.system
        if (
            other.first.conversation == first.conversation
            or (same_tools and (same_system or first.tools))
            or (same_system and segment.system)
        ):
            related.append(other)
    candidates = [other for other in related if other.first.tools == first.tools] or related
    if not candidates:
        return None
    begins_anew = segment.starts_conversation and history_source(first) is None
    # Collect the messages that may quote a summary. Messages shorter than `long_enough` cannot contain QUOTE_SHARE of
    # the shortest summary. Tool results are left out, because they may repeat the text of any file.
    long_enough = QUOTE_SHARE * SUMMARY_LENGTH
    fresh = [
        one for one in session.new_messages(first) if one.role is not Role.TOOL and len(one.content) >= long_enough
    ]
    for source in reversed(session.turns[max(0, first.index - LOOK_BACK) : first.index]):
        quoted = _is_quoted(session, source, first, fresh, candidates) and not session.history_has(first, source)
        summarised = _summarised(session, source, first, candidates) if quoted else None
        if summarised is not None:
            old = _newest_answered(summarised, first)
            if old is not None and (begins_anew or session.lacks_replies(first, old)):
                return Continuation(old, source)
    for other in reversed(candidates):
        old = _newest_answered(other, first)
        taken_over = session.source(first)
        if taken_over is not None and session.turns[taken_over].conversation != other.first.conversation:
            continue  # the request takes over the history of another conversation
        if old is not None and old.reply is not None and session.request_shows(first, session.reply_digest(old.reply)):
            return Continuation(old, None) if session.lacks_beginning(first, old) else None
    return None


def _newest_answered(segment: Segment, first: Turn) -> Turn | None:
    """Return the newest of the segment's turns that come before `first` and whose reply the client received. Returns
    None if there is no such turn."""
    turn = segment.last_before(first.index)
    while turn is not None and turn.reply is None:
        turn = segment.last_before(turn.index)
    return turn


def _is_quoted(
    session: SegmentedSession, source: Turn, first: Turn, fresh: Sequence[Message], candidates: Sequence[Segment]
) -> bool:
    """Return True if a message in `fresh` quotes the reply of `source`. The reply may then be a summary. A reply with a
    tool call is never a summary.

    Clients also send replies back unchanged, as assistant messages. So an assistant message counts only if the reply
    belongs to another conversation, or if the message replaces the history before it."""
    lines = session.answer_lines(source)
    for message in fresh if lines else ():
        text = message.content
        quoted = session.quotes(lines, text, SUMMARY_LENGTH) and not _repeats_earlier(session, source, text)
        if not quoted or session.searches_ended:
            continue
        if message.role is not Role.ASSISTANT or _is_elsewhere(source, candidates):
            return True
        # Test whether this assistant message replaces the history. A client that only sends the reply back puts the
        # message directly after the question that the reply answers, or after an earlier reply. A client that replaces
        # the history does neither, and no turn continues the reply.
        was_shown_replies = source.parent is not None or session.replies_added(source)
        if not was_shown_replies or source.index in session.continued or first.parent is not None:
            continue
        above = first.messages[: next(at for at, other in enumerate(first.messages) if other is message)]
        replies = (session.reply_digest(other) for other in above if other.role is Role.ASSISTANT)
        asked_above = above[-1:] == source.messages[-1:]
        if not asked_above and not any(session.request_shows(source, digest) for digest in replies):
            return True
    return False


def _repeats_earlier(session: SegmentedSession, source: Turn, text: str) -> bool:
    """Return True if the text repeats a part of the parent turn's reply that is not in the reply of `source`. Such a
    text is a copy of the history, not a summary."""
    if source.parent is None or source.reply is None:
        return False
    before = session.turns[source.parent].reply
    own = source.reply.content
    if before is None:
        return False
    return any(session.contains(text, part) and not session.contains(own, part) for part in parts_of_reply(before))


def _summarised(session: SegmentedSession, source: Turn, first: Turn, candidates: Sequence[Segment]) -> Segment | None:
    """Return the segment among `candidates` that the reply of `source` summarises, or None. The request of `source`
    must contain the segment's history, as messages or as text. If several segments qualify, the one with the most
    replies in the request wins.

    Some programs ask for a summary in a request that lists only the kinds of the history's events. Such a request does
    not contain the history itself, so no segment qualifies. In that case, if `source` is a single question directly
    before the request `first`, the reply of `source` counts as a summary of the history that `first` has cut off."""
    own = session.segment_of(source.index)
    if own in candidates and source.parent is not None:
        return own
    begin = session.segments_in(source.conversation)[0].first
    asked = opening_text(begin.messages)
    read = session.replies_read(source)
    ranked = []
    for segment in candidates:
        replies = sum(session.reply_given_by(segment.last, digest) for digest in read)
        is_written_out = _is_written_out(session, segment, begin, asked)
        if segment is not own and (replies or is_written_out):
            ranked.append((replies, is_written_out, segment.number))
    if ranked:
        return session.segments[max(ranked)[2]]
    if source.parent is None and source.index == first.index - 1:
        same = [segment for segment in candidates if segment.first.conversation == first.conversation]
        return next((segment for segment in reversed(same) if session.lacks_beginning(first, segment.last)), None)
    return None


def _is_written_out(session: SegmentedSession, segment: Segment, source: Turn, asked: str) -> bool:
    """Return True if the request text `asked` contains the segment's history. It is enough if `asked` contains the
    segment's first user messages. Clients may leave these messages out. So it is also enough if `asked` contains a part
    of one of the segment's newest LOOK_BACK replies before `source`."""
    opening = opening_text(segment.first.messages) if segment.starts_conversation else ""
    if opening and session.contains(asked, opening):
        return True
    end = bisect_left(segment.turns, source.index, key=lambda turn: turn.index)
    return any(
        session.contains(asked, part)
        for turn in segment.turns[max(0, end - LOOK_BACK) : end]
        if turn.reply is not None
        for part in parts_of_reply(turn.reply)
    )


def _is_elsewhere(source: Turn, candidates: Sequence[Segment]) -> bool:
    """Return True if none of the candidates belongs to the conversation of the turn."""
    return all(other.first.conversation != source.conversation for other in candidates)


def find_spawns(session: SegmentedSession) -> dict[int, Spawn]:
    """Return the earlier tool call that started each segment (a request and its continuations), by segment number. Only
    segments that start a conversation are examined. If the first user messages of a segment contain arguments of
    several tool calls, the longest argument decides."""
    found: dict[int, Spawn] = {}
    given: dict[str, _ToolText] = {}
    starters = {segment.first.index: segment for segment in session.segments if segment.starts_conversation}
    for turn in session.turns:
        if (segment := starters.get(turn.index)) is not None:
            opening = opening_text(turn.messages)
            fitting = [given[text] for text in session.contained(opening, given)]
            if fitting:
                best = max(fitting, key=lambda one: (len(one.text), one.turn))
                is_most = len(best.text) / len(opening) >= OPENING_SHARE
                found[segment.number] = Spawn(best.turn, best.agent_type, best.tool, is_most)
        for call in turn.reply.tool_calls if turn.reply else ():
            for one in _texts_given(turn.index, call):
                given.pop(one.text, None)  # the text, which is now the newest, must move to the end of the dictionary
                given[one.text] = one
                if len(given) > MAX_TOOL_TEXTS:
                    del given[next(iter(given))]
    return found


class _ToolText(msgspec.Struct, frozen=True):
    """A text in the arguments of a tool call. The other fields describe the call, as in `Spawn`."""

    text: str
    turn: int
    agent_type: str
    tool: str


def _texts_given(turn: int, call: ToolCall) -> Iterator[_ToolText]:
    """Yield the arguments of a tool call that may be the prompt of a sub-agent: texts of at least two words and
    MIN_TOOL_TEXT characters, and such texts in lists."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return
    if not isinstance(arguments, dict):
        return
    named = (arguments.get(name) for name in TYPE_ARGUMENTS)
    agent_type = next((name for name in named if isinstance(name, str) and name), "")
    for value in arguments.values():
        for inner in value if isinstance(value, list) else [value]:
            text = inner.strip() if isinstance(inner, str) else ""
            if len(text) >= MIN_TOOL_TEXT and len(text.split(None, 1)) == 2:
                yield _ToolText(text, turn, agent_type, call.name)


def find_label(segment: Segment) -> str:
    """Return the label of a side call (a request apart from the task, such as for a title), or "". The words in its
    prompt decide (LABELS)."""
    asked = [message.content for message in segment.first.messages if message.role is Role.USER][-1:]
    for text in ("\n".join(segment.system).lower(), "\n".join(asked).lower()):
        if (word := _LABEL_WORD.search(text)) is not None:
            return _LABEL_OF[word[1]]
    return ""


def find_handovers(session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> set[int]:
    """Return the numbers of the segments that continue an earlier conversation with other tools or another system
    prompt. For example, the agent is resumed with one tool fewer, or hands over to another agent. A side call about the
    history may have a request that looks the same. Later turns then show whether the request was a side call.

    `summaries` are the turns that wrote a summary. `label` returns the label of a side call.
    """
    handovers = _Handovers(session, summaries, label)
    found = (handovers.next_segment(source) for source in session.taken_over)
    return {segment.number for segment in found if segment is not None}


class _Handovers:
    def __init__(self, session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> None:
        self._session = session
        self._summaries = summaries
        self._label = label
        # For each turn index, the index of the turn's last descendant. Descendants may have other tools or another
        # system prompt.
        self._until = [turn.index for turn in session.turns]
        # For each turn index, the turns that directly continue it with the same tools and system prompt. Summaries, and
        # turns whose replies did not reach the agent, are left out unless later turns continue them.
        self._own_next: dict[int, list[Turn]] = {}
        for turn in reversed(session.turns):
            source = session.source(turn)
            before = turn.parent if source is None else source
            if before is not None:
                self._until[before] = max(self._until[before], self._until[turn.index])
            used = turn.index in session.continued or (reached_agent(turn) and turn.index not in summaries)
            if source is None and turn.parent is not None and used:
                self._own_next.setdefault(turn.parent, []).append(turn)

    def next_segment(self, source: int) -> Segment | None:
        """Return the segment that continues the conversation of the turn `source`. Only segments that take over the
        history of `source` are candidates. Returns None if no candidate continues the conversation.

        If later turns continue some of the candidates, the last candidate with later turns is chosen. All other turns
        and segments that continue `source` must have ended before the chosen segment began. They may be sub-agents, and
        an agent that calls a sub-agent waits until the sub-agent ends.

        If later turns continue none of the candidates, the last candidate is chosen, but only if no turn continues
        `source` with the same tools and system prompt as `source`.
        """
        turn = self._session.turns[source]
        candidates = [segment for segment in self._session.taken_over[source] if self._may_go_on(segment, turn)]
        if not candidates:
            return None
        replied = [segment for segment in candidates if self._is_replied_to(segment)]
        *others, last = replied or candidates
        rivals = [*self._own_next.get(source, []), *(other.first for other in others if replied)]
        ended = all(self._until[rival.index] < last.first.index for rival in rivals)
        return last if ended and (replied or not rivals) else None

    def _may_go_on(self, segment: Segment, source: Turn) -> bool:
        """Return True if the segment may continue the conversation of `source`. One of these conditions must hold:

        - Another conversation passed its work on to the segment (`handed_over`).
        - The client names the same agent for the segment and for `source`, and the segment is not a side call about the
          history."""
        first = segment.first
        if segment.number in self._session.handed_over:
            return True
        if (first.agent_id, first.parent_agent_id) != (source.agent_id, source.parent_agent_id):
            return False
        if first.purpose != source.purpose and (first.purpose or "").lower() in PURPOSES:
            return False
        if self._is_replied_to(segment):
            return True
        # A request with the words of a side call counts as a side call only if the model cannot do the agent's work in
        # this request: the request has no tools, or both its tools and its system prompt differ from the agent's.
        can_act = first.tools and first.cause is not ForkCause.TOOLS_AND_SYSTEM_CHANGED
        if first.messages[-1].role is not Role.TOOL and not can_act and self._label(segment):
            return False
        return all(turn.index not in self._summaries for turn in segment.turns)

    def _is_replied_to(self, segment: Segment) -> bool:
        return any(turn.index in self._session.continued for turn in segment.turns)
