"""Finds how the segments of a session are related. A segment is a request with the turns that continue it
(`segments.py`). The module finds the tool call that started a segment, the earlier history that a segment replaces by a
summary, and the segment that continues another agent's work.

`classify.py` decides the kinds of the segments from these relations. The words in `LABELS`, `PURPOSES` and
`TYPE_ARGUMENTS` come from real clients' prompts, headers and tools. Invariant: a segment is related only to turns
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
    quotes,
    reached_agent,
)
from outrider.trajectory import BranchKind, ForkCause, Turn

MIN_TOOL_TEXT = 8
"""Minimum length, in characters, of a tool's argument that can be the prompt of a sub-agent."""
OPENING_SHARE = 0.5
"""If a tool's argument is at least this fraction of a conversation's opening, the tool call is certain to have started
the conversation."""

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
"""Labels of side calls: requests beside the agent's work, for example for a title. Each pair is the beginning of a
word, and the label of a side call whose prompt has the word. Words are searched for in the system prompt; if none is
found, in the question. The first word in the text decides, because prompts for titles mention topics and vice versa.
Words such as "router" or "loop" are left out, because the prompts of many agents have them."""

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
"""The kind of a model call, by the purpose that the client names. Other purposes have no effect."""

TYPE_ARGUMENTS = ("subagent_type", "agent_type", "agent_name", "agent", "role")
"""Names of arguments that hold the type of agent, in calls of tools that start sub-agents."""

MAX_TOOL_TEXTS = 1000
"""Maximum number of texts from tool arguments, the newest ones, that are compared with the opening of a conversation
(its first user messages)."""

LOOK_BACK = 100
"""Maximum number of earlier turns, and of earlier segments, among which the history that a segment shortens is searched
for. This number is enough, because clients continue from a summary at once."""


class Continuation(msgspec.Struct, frozen=True):
    """The earlier history that a segment shortens. `old` is the last turn of this history. `source` is the turn that
    wrote the summary; None if the segment keeps the end of the history."""

    old: Turn
    source: Turn | None


class Spawn(msgspec.Struct, frozen=True):
    """The tool call that started a conversation. `turn` is the index of the turn that made the call. `agent_type` is
    the requested type of agent, "" if the call names none. `is_most_of_opening` is True if the call's text is at least
    OPENING_SHARE of the conversation's opening."""

    turn: int
    agent_type: str
    tool: str
    is_most_of_opening: bool


class AgentTurns:
    """Finds the turns of an agent by the client's name for the agent."""

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
        """Return the agent's last turn before the turn `index` that is not in the conversation; None if there is
        none."""
        turns = self._turns.get(agent, [])
        at = bisect_left(turns, index, key=lambda turn: turn.index)
        return self._outside(turns[at - 1], conversation) if at else None

    def _outside(self, last: Turn, conversation: int) -> Turn | None:
        return last if last.conversation != conversation else self._other_conversation[last.index]


def find_continuation(session: SegmentedSession, segment: Segment) -> Continuation | None:
    """Find the earlier history that the first request of `segment` has shortened to a summary or to its end. Summaries
    are tried first, newest first. Returns None if there is no such history."""
    first = segment.first
    recent = session.segments[max(0, segment.number - LOOK_BACK) : segment.number]
    kin = []
    for other in recent:
        # Kin are segments of the same conversation or of the same agent. Equal tools or an equal system prompt indicate
        # the same agent.
        same_tools, same_system = other.first.tools == first.tools, other.system == segment.system
        if (
            other.first.conversation == first.conversation
            or (same_tools and (same_system or first.tools))
            or (same_system and segment.system)
        ):
            kin.append(other)
    candidates = [other for other in kin if other.first.tools == first.tools] or kin
    if not candidates:
        return None
    begins_anew = segment.starts_conversation and history_source(first) is None
    # A message must be long enough to contain QUOTE_SHARE of the shortest summary. Tool results are left out, because
    # they may repeat any text from a file.
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
            continue  # the replies come from another conversation, whose history the request takes over
        if old is not None and old.reply is not None and session.request_shows(first, session.body(old.reply)):
            return Continuation(old, None) if session.lacks_beginning(first, old) else None
    return None


def _newest_answered(segment: Segment, first: Turn) -> Turn | None:
    """Return the last turn of a segment before `first` whose reply the client received; None if there is none."""
    turn = segment.last_before(first.index)
    while turn is not None and turn.reply is None:
        turn = segment.last_before(turn.index)
    return turn


def _is_quoted(
    session: SegmentedSession, source: Turn, first: Turn, fresh: Sequence[Message], candidates: Sequence[Segment]
) -> bool:
    """Return True if a message in `fresh` quotes the reply of `source`, and so may be a summary. Always False for a
    reply with a tool call. An assistant message counts only if the reply was given in another conversation, or if the
    message replaces the history before the reply. In other cases the message may be the reply itself, which clients
    send back."""
    lines = session.answer_lines(source)
    for message in fresh if lines else ():
        if not quotes(lines, message.content, SUMMARY_LENGTH) or _repeats_earlier(session, source, message.content):
            continue
        if message.role is not Role.ASSISTANT or _is_elsewhere(source, candidates):
            return True
        # The message replaces the history if three conditions hold: no turn continues the reply; the question that the
        # reply answers is not directly before the message; no earlier reply is before the message. If the client only
        # sent the reply back, the question or an earlier reply would be there.
        was_shown_replies = source.parent is not None or session.replies_added(source)
        if not was_shown_replies or source.index in session.continued or first.parent is not None:
            continue
        above = first.messages[: next(at for at, other in enumerate(first.messages) if other is message)]
        replies = (session.body(other) for other in above if other.role is Role.ASSISTANT)
        asked_above = above[-1:] == source.messages[-1:]
        if not asked_above and not any(session.request_shows(source, body) for body in replies):
            return True
    return False


def _repeats_earlier(session: SegmentedSession, source: Turn, text: str) -> bool:
    """Return True if the text repeats a part of the reply before `source` that is not in the reply of `source`. Such a
    text is a written-out history, and not a summary."""
    if source.parent is None or source.reply is None:
        return False
    before = session.turns[source.parent].reply
    own = source.reply.content
    return before is not None and any(part in text and part not in own for part in parts_of_reply(before))


def _summarised(session: SegmentedSession, source: Turn, first: Turn, candidates: Sequence[Segment]) -> Segment | None:
    """Return the segment among `candidates` that the reply of `source` summarises. The request of `source` must have
    the segment's history, as messages or as text. Of several such segments, the one with the most replies in this
    request is returned. Returns None if there is no such segment, for example if another agent has only quoted the
    newest reply.

    A single question directly before the request `first` needs no history, because some programs give the summariser
    only the kinds of the events. Its reply counts as a summary of the history of which `first` keeps only the end."""
    own = session.segment_of(source.index)
    if own in candidates and source.parent is not None:
        return own
    begin = session.segments_in(source.conversation)[0].first
    asked = opening_text(begin.messages)
    read = session.replies_read(source)
    ranked = []
    for segment in candidates:
        replies = sum(session.reply_given_by(segment.last, body) for body in read)
        is_written_out = _is_written_out(segment, begin, asked)
        if segment is not own and (replies or is_written_out):
            ranked.append((replies, is_written_out, segment.number))
    if ranked:
        return session.segments[max(ranked)[2]]
    if source.parent is None and source.index == first.index - 1:
        same = [segment for segment in candidates if segment.first.conversation == first.conversation]
        return next((segment for segment in reversed(same) if session.lacks_beginning(first, segment.last)), None)
    return None


def _is_written_out(segment: Segment, source: Turn, asked: str) -> bool:
    """Return True if `asked`, the text of the request of `source`, has the segment's history: its opening, or a part of
    one of its newest LOOK_BACK replies before `source`. A client may leave the opening out."""
    opening = opening_text(segment.first.messages) if segment.starts_conversation else ""
    if opening and opening in asked:
        return True
    end = bisect_left(segment.turns, source.index, key=lambda turn: turn.index)
    return any(
        part in asked
        for turn in segment.turns[max(0, end - LOOK_BACK) : end]
        if turn.reply is not None
        for part in parts_of_reply(turn.reply)
    )


def _is_elsewhere(source: Turn, candidates: Sequence[Segment]) -> bool:
    """Return True if the turn is in none of the candidates' conversations."""
    return all(other.first.conversation != source.conversation for other in candidates)


def find_spawns(session: SegmentedSession) -> dict[int, Spawn]:
    """Return the earlier tool call that started each segment, by segment number. Only segments that start a
    conversation are examined. If the conversation's opening has texts of several tool calls, the longest text
    decides."""
    found: dict[int, Spawn] = {}
    given: dict[str, _ToolText] = {}
    starters = {segment.first.index: segment for segment in session.segments if segment.starts_conversation}
    for turn in session.turns:
        if (segment := starters.get(turn.index)) is not None:
            opening = opening_text(turn.messages)
            fitting = [one for text, one in given.items() if text in opening]
            if fitting:
                best = max(fitting, key=lambda one: (len(one.text), one.turn))
                is_most = len(best.text) / len(opening) >= OPENING_SHARE
                found[segment.number] = Spawn(best.turn, best.agent_type, best.tool, is_most)
        for call in turn.reply.tool_calls if turn.reply else ():
            for one in _texts_given(turn.index, call):
                given.pop(one.text, None)  # as the newest text, it moves to the end of the dictionary
                given[one.text] = one
                if len(given) > MAX_TOOL_TEXTS:
                    del given[next(iter(given))]
    return found


class _ToolText(msgspec.Struct, frozen=True):
    """A text in the arguments of a tool call. `turn`, `agent_type` and `tool` describe the call, as in `Spawn`."""

    text: str
    turn: int
    agent_type: str
    tool: str


def _texts_given(turn: int, call: ToolCall) -> Iterator[_ToolText]:
    """Yield the arguments of a tool call that may be the prompt of a sub-agent: texts of at least two words and
    MIN_TOOL_TEXT characters. An argument may be a text or a list of texts."""
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
    """Return the label of a side call, from the words in its prompt; "" if no word matches."""
    asked = [message.content for message in segment.first.messages if message.role is Role.USER][-1:]
    for text in ("\n".join(segment.system).lower(), "\n".join(asked).lower()):
        if (word := _LABEL_WORD.search(text)) is not None:
            return _LABEL_OF[word[1]]
    return ""


def find_handovers(session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> set[int]:
    """Return the numbers of the segments that continue an earlier conversation with other tools or another system
    prompt. Examples: an agent is resumed with one tool fewer, hands over to another agent, or must give its last reply
    without tools. A side call about the history has the same form, and only the later turns distinguish a side call
    from a handover.

    `summaries` are the turns that wrote a summary; `label` returns the label of a side call.
    """
    handovers = _Handovers(session, summaries, label)
    found = (handovers.next_segment(source) for source in session.taken_over)
    return {segment.number for segment in found if segment is not None}


class _Handovers:
    def __init__(self, session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> None:
        self._session = session
        self._summaries = summaries
        self._label = label
        # For each turn index, the index of the turn's last descendant. Turns that continue the history with other tools
        # or another system prompt are also descendants.
        self._until = [turn.index for turn in session.turns]
        # For each turn index, the turn's continuations with the same tools and system prompt, except unused replies and
        # summaries.
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
        history of this turn are considered. Returns None if the conversation continues in none of them.

        If some of these segments have a continuation, the result is the last of them. All other continuations of the
        turn must have ended before it began: an agent that calls a sub-agent continues only after the sub-agent has
        ended. If no segment has a continuation, the result is the last segment, provided that nothing else continues
        the turn.
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
        """Return True if the segment can continue the conversation of `source`: if another conversation passed its work
        on to the segment, or if the client names the same agent for both and the segment is not a side call about the
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
        # A question with the words of a side call is a side call if the model has no tools, or if both the tools and
        # the system prompt differ from the agent's: then the model is not the agent, or cannot act as the agent.
        can_act = first.tools and first.cause is not ForkCause.TOOLS_AND_SYSTEM_CHANGED
        if first.messages[-1].role is not Role.TOOL and not can_act and self._label(segment):
            return False
        return all(turn.index not in self._summaries for turn in segment.turns)

    def _is_replied_to(self, segment: Segment) -> bool:
        return any(turn.index in self._session.continued for turn in segment.turns)
