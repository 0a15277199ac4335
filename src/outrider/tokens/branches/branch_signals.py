"""Finds what the segments of a session show about each other: which tool call started one, which history another
replaces by a summary, and which goes on as another agent.

It decides no kinds (`classify.py` does). The words in `LABELS`, `PURPOSES` and `TYPE_ARGUMENTS` are those of real
clients' prompts, headers and tools. Invariant: what a segment is said to come from is a turn before its first one.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from outrider.messages import Message, Role, ToolCall
from outrider.tokens.branches.segments import (
    QUOTE_LENGTH,
    QUOTE_SHARE,
    Segment,
    SegmentedSession,
    history_source,
    opening_text,
    quotes,
    reached_agent,
)
from outrider.trajectory import BranchKind, ForkCause, Turn

MIN_TOOL_TEXT = 8
"""Characters that a tool's argument needs to be recognised as the prompt of a sub-agent."""
OPENING_SHARE = 0.5
"""How much of a conversation's opening a tool's argument has to be to leave no doubt that it started the
conversation."""

LABELS: tuple[tuple[str, str], ...] = (
    ("quota", "quota"),
    ("topic", "topic"),
    ("title", "title"),
    ("commit message", "commit"),
    ("speak next", "next-speaker"),
    ("routing", "router"),
    ("router", "router"),
    ("classif", "router"),
    ("loop", "loop-check"),
    ("command prefix", "command-prefix"),
    ("file path", "file-paths"),
    ("web page", "web-page"),
    ("summar", "summary"),
)
"""How words of a side call's system prompt, else of its question, begin, and the label that they give it. The word that
comes first in the text decides: prompts for titles speak of topics, too, and the other way round."""

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
"""The kind that a client's own word for a call gives it; any other word says nothing."""

TYPE_ARGUMENTS = ("subagent_type", "agent_type", "agent_name", "agent", "role")
"""Arguments with which a tool that starts sub-agents is told the type of agent."""

MAX_TOOL_TEXTS = 1000
"""How many of the texts that tools were given last are compared with a conversation's opening."""

LOOK_BACK = 100
"""How many turns and segments before it a shorter history is compared with: clients go on from a summary at once."""


class Continuation(msgspec.Struct, frozen=True):
    """A segment goes on from an earlier one with a shorter history. `old` is the last turn of that history; `source` is
    the turn that wrote the summary, None where the history was only cut."""

    old: Turn
    source: Turn | None


class Spawn(msgspec.Struct, frozen=True):
    """The tool call of `turn` that started a conversation. `agent_type` is the type of agent that it asked for, "" if
    it named none; `is_most_of_opening` is whether its text is OPENING_SHARE of the conversation's opening."""

    turn: int
    agent_type: str
    tool: str
    is_most_of_opening: bool


class AgentTurns:
    """The turns of each agent that clients name."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: dict[str, list[Turn]] = {}
        # By index of a turn, its agent's newest earlier turn of another conversation.
        self._other_conversation: dict[int, Turn | None] = {}
        for turn in turns:
            if turn.agent_id is not None:
                earlier = self._turns.setdefault(turn.agent_id, [])
                self._other_conversation[turn.index] = (
                    self._outside(earlier[-1], turn.conversation) if earlier else None
                )
                earlier.append(turn)

    def newest_outside(self, conversation: int, agent: str, index: int) -> Turn | None:
        """The agent's last turn before `index` that is not of this conversation."""
        turns = self._turns.get(agent, [])
        at = bisect_left(turns, index, key=lambda turn: turn.index)
        return self._outside(turns[at - 1], conversation) if at else None

    def _outside(self, last: Turn, conversation: int) -> Turn | None:
        return last if last.conversation != conversation else self._other_conversation[last.index]


def find_continuation(session: SegmentedSession, segment: Segment) -> Continuation | None:
    """Whether the segment's first request has, in place of an earlier segment's history, a summary of it or only its
    end. Summaries are looked for first, newest first."""
    first = segment.first
    recent = session.segments[max(0, segment.number - LOOK_BACK) : segment.number]
    kin = []
    for other in recent:
        # The same conversation, or the same agent by its tools or its system prompt.
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
    # A message must be long enough to hold QUOTE_SHARE of the shortest summary. Tool results only repeat files.
    long_enough = QUOTE_SHARE * QUOTE_LENGTH
    fresh = [
        one for one in session.new_messages(first) if one.role is not Role.TOOL and len(one.content) >= long_enough
    ]
    for source in reversed(session.turns[max(0, first.index - LOOK_BACK) : first.index]):
        quoted = _is_quoted(session, source, first, fresh, candidates) and not session.history_has(first, source)
        summarised = _summarised(session, source, candidates) if quoted else None
        if summarised is not None:
            old = _newest_answered(summarised, first)
            if old is not None and (begins_anew or session.lacks_replies(first, old)):
                return Continuation(old, source)
    for other in reversed(candidates):
        old = _newest_answered(other, first)
        if old is not None and old.reply is not None and session.request_shows(first, session.body(old.reply)):
            return Continuation(old, None) if session.lacks_replies(first, old) else None
    return None


def _newest_answered(segment: Segment, first: Turn) -> Turn | None:
    """The last turn of a segment before `first` whose client got the reply."""
    turn = segment.last_before(first.index)
    while turn is not None and turn.reply is None:
        turn = segment.last_before(turn.index)
    return turn


def _is_quoted(
    session: SegmentedSession, source: Turn, first: Turn, fresh: Sequence[Message], candidates: Sequence[Segment]
) -> bool:
    """Whether a fresh message has the text of an answer that calls no tool. An assistant message counts only if the
    answer was given elsewhere, or it stands in the place of what the answer was about: clients send every reply back
    once, which is no quote."""
    lines = session.answer_lines(source)
    for message in fresh if lines else ():
        if not quotes(lines, message.content):
            continue
        if message.role is not Role.ASSISTANT or _is_elsewhere(source, candidates):
            return True
        # It stands where the history was if nobody went on from the answer, and neither the replies that its author was
        # shown nor its question stand before the quote. Before a reply that is only sent back they do.
        was_shown_replies = source.parent is not None or session.replies_added(source)
        if not was_shown_replies or source.index in session.continued or first.parent is not None:
            continue
        above = first.messages[: next(at for at, other in enumerate(first.messages) if other is message)]
        replies = (session.body(other) for other in above if other.role is Role.ASSISTANT)
        asked_above = above[-1:] == source.messages[-1:]
        if not asked_above and not any(session.request_shows(source, body) for body in replies):
            return True
    return False


def _summarised(session: SegmentedSession, source: Turn, candidates: Sequence[Segment]) -> Segment | None:
    """The segment whose history the author of a summary was shown the most of; None if it was shown no history of
    theirs, neither as messages nor written out."""
    asked = opening_text(source.messages)
    if source.parent is None and all(message.role is not Role.ASSISTANT for message in source.messages):
        openings = (opening_text(other.first.messages) for other in candidates if other.starts_conversation)
        if not _is_elsewhere(source, candidates) or not any(opening and opening in asked for opening in openings):
            return None
    own = session.segment_of(source.index)
    if own in candidates and source.parent is not None:
        return own
    read = session.replies_read(source)

    def shown(segment: Segment) -> tuple[int, bool, int]:
        replies = sum(session.was_said_by(segment.last, body) for body in read)
        return replies, opening_text(segment.first.messages) in asked, segment.number

    return max([segment for segment in candidates if segment is not own] or candidates, key=shown)


def _is_elsewhere(source: Turn, candidates: Sequence[Segment]) -> bool:
    """Whether a turn is of another conversation than all of these."""
    return all(other.first.conversation != source.conversation for other in candidates)


def find_spawns(session: SegmentedSession) -> dict[int, Spawn]:
    """For segments that start a conversation, by their numbers: the earlier tool call whose text is the largest part of
    the conversation's opening."""
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
                given.pop(one.text, None)  # so that it becomes the newest
                given[one.text] = one
                if len(given) > MAX_TOOL_TEXTS:
                    del given[next(iter(given))]
    return found


class _ToolText(msgspec.Struct, frozen=True):
    """A text that a tool call was given."""

    text: str
    turn: int
    agent_type: str
    tool: str


def _texts_given(turn: int, call: ToolCall) -> Iterator[_ToolText]:
    """The arguments that may be a sub-agent's prompt: texts of several words, also in lists."""
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
    """What a side call is for, by its words; "" where they say nothing."""
    asked = [message.content for message in segment.first.messages if message.role is Role.USER][-1:]
    for text in ("\n".join(segment.system).lower(), "\n".join(asked).lower()):
        if (word := _LABEL_WORD.search(text)) is not None:
            return _LABEL_OF[word[1]]
    return ""


def find_handovers(session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> set[int]:
    """The numbers of the segments that go on as the conversation whose history they have, though with other tools or
    another system prompt: an agent is resumed with one tool fewer, hands over to another, or is asked for its last
    answer without tools. A side call about the history looks alike; what happened afterwards tells them apart.

    `summaries` are the turns that wrote a summary, `label` gives the label of a side call.
    """
    handovers = _Handovers(session, summaries, label)
    found = (handovers.next_segment(source) for source in session.taken_over)
    return {segment.number for segment in found if segment is not None}


class _Handovers:
    def __init__(self, session: SegmentedSession, summaries: set[int], label: Callable[[Segment], str]) -> None:
        self._session = session
        self._summaries = summaries
        self._label = label
        # By turn index, the last turn that what follows goes on to.
        self._until = [turn.index for turn in session.turns]
        # By turn index, the turns that go on from it with its own tools and system prompt, and were used.
        self._own_next: dict[int, list[Turn]] = {}
        for turn in reversed(session.turns):
            source = history_source(turn)
            before = turn.parent if source is None else source
            if before is not None:
                self._until[before] = max(self._until[before], self._until[turn.index])
            used = turn.index in session.continued or (reached_agent(turn) and turn.index not in summaries)
            if source is None and turn.parent is not None and used:
                self._own_next.setdefault(turn.parent, []).append(turn)

    def next_segment(self, source: int) -> Segment | None:
        """Of the segments that have the history of the turn `source`, the one in which its conversation goes on; None
        where it ends, or goes on without them.

        That is the last one that somebody replied to, if everything else that goes on from the turn ended before it: a
        sub-agent's caller goes on later. Without any reply, it is the last one if nothing else goes on from the turn.
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
        """Whether the segment is the work of the same agent, as far as its client says, and not a question about the
        history."""
        first = segment.first
        if (first.agent_id, first.parent_agent_id) != (source.agent_id, source.parent_agent_id):
            return False
        if first.purpose != source.purpose and (first.purpose or "").lower() in PURPOSES:
            return False
        if self._is_replied_to(segment):
            return True
        # A question in the words of a side call, to a model that is not the agent (by its system prompt) or cannot do
        # what the agent can (by its tools).
        can_act = first.tools and first.cause is not ForkCause.TOOLS_AND_SYSTEM_CHANGED
        if first.messages[-1].role is not Role.TOOL and not can_act and self._label(segment):
            return False
        return all(turn.index not in self._summaries for turn in segment.turns)

    def _is_replied_to(self, segment: Segment) -> bool:
        return any(turn.index in self._session.continued for turn in segment.turns)
