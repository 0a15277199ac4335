"""What a session's strands show about each other: which tool call began one, which history another goes on from.

It knows the strands and decides nothing (`branches.py` does). The words in `LABELS` and `TYPE_ARGUMENTS` are those of
real clients' prompts and tools; they name branches, and decide about a kind only where nothing else tells.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from outrider.messages import Message, Role, ToolCall
from outrider.tokens.branches.segments import QUOTE_LENGTH, QUOTE_SHARE, Session, Strand, history_of, opening_of, quotes
from outrider.trajectory import BranchKind, Turn

PROMPT_LENGTH = 8
"""Characters that a tool's argument needs to be known again as what a sub-agent was told."""
OPENING_SHARE = 0.5
"""How much of a conversation's opening an argument has to be to leave no doubt that it is what began it."""

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
"""How words of a side call's system prompt, else of what it asks, begin, and the label they give it. What stands first
in the text decides: prompts for titles speak of topics too, and the other way round."""

_LABEL_OF = dict(LABELS)
_LABELLED = re.compile(rf"\b({'|'.join(re.escape(word) for word, _ in LABELS)})")

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
"""What a client's own word for a call says about its kind; any other word says nothing."""

TYPE_ARGUMENTS = ("subagent_type", "agent_type", "agent_name", "agent", "role")
"""Arguments of a tool that starts sub-agents which name the sort of agent."""

GIVEN = 1000
"""How many texts that tools were given last are compared with what a conversation begins with."""

LOOK_BACK = 100
"""How many turns and strands before it a shorter history is compared with: clients go on from a summary at once."""


class Continued(msgspec.Struct, frozen=True):
    """A strand goes on from an earlier one with a shorter history: `source` wrote the summary, if any did."""

    old: Turn
    source: Turn | None


class _Given(msgspec.Struct, frozen=True):
    """A text that a tool call was given."""

    text: str
    turn: int
    agent_type: str
    tool: str


class Spawn(msgspec.Struct, frozen=True):
    """`turn` called the `tool` that began a conversation; `agent_type` is the sort of agent it asked for, "" where it
    named none."""

    turn: int
    agent_type: str
    tool: str
    is_the_opening: bool


class Agents:
    """The turns of each agent that clients name."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: dict[str, list[Turn]] = {}
        self._of_another: dict[int, Turn | None] = {}
        for turn in turns:
            if turn.agent_id is not None:
                earlier = self._turns.setdefault(turn.agent_id, [])
                self._of_another[turn.index] = self._other(earlier[-1], turn.conversation) if earlier else None
                earlier.append(turn)

    def newest(self, agent: str, index: int, conversation: int) -> Turn | None:
        """The agent's last turn before one that is of another conversation."""
        turns = self._turns.get(agent, [])
        at = bisect_left(turns, index, key=lambda turn: turn.index)
        return self._other(turns[at - 1], conversation) if at else None

    def _other(self, last: Turn, conversation: int) -> Turn | None:
        return last if last.conversation != conversation else self._of_another[last.index]


def continuation(session: Session, strand: Strand) -> Continued | None:
    """Whether the strand's head has, in place of the history of an earlier one, a summary of it or only its end."""
    head = strand.head
    recent = session.strands[max(0, strand.number - LOOK_BACK) : strand.number]
    kin = [other for other in recent if _is_kin(other, strand)]
    before = [other for other in kin if other.head.tools == head.tools] or kin
    if not before:
        return None
    anew = strand.opener and history_of(head) is None
    long = QUOTE_SHARE * QUOTE_LENGTH
    fresh = [one for one in session.fresh(head) if one.role is not Role.TOOL and len(one.content) >= long]
    for source in reversed(session.turns[max(0, head.index - LOOK_BACK) : head.index]):
        quoted = _is_quoted(session, source, head, fresh, before) and not session.begins_with(head, source)
        if quoted and _has_read(source, before):
            old = _newest(_summarised(session, source, before), head)
            if old is not None and (anew or session.lacks(head, old)):
                return Continued(old, source)
    for other in reversed(before):
        old = _newest(other, head)
        if old is not None and old.reply is not None and session.shows(head, session.body(old.reply)):
            return Continued(old, None) if session.lacks(head, old) else None
    return None


def _newest(strand: Strand, head: Turn) -> Turn | None:
    """The last turn of a strand before `head` that was answered."""
    turn = strand.before(head.index)
    while turn is not None and turn.reply is None:
        turn = strand.before(turn.index)
    return turn


def _summarised(session: Session, source: Turn, before: Sequence[Strand]) -> Strand:
    """The strand whose history a summary's author was shown the most of."""
    own = session.strand_of(source.index)
    if own in before and source.parent is not None:
        return own
    read, asked = session.read(source), opening_of(source.messages)

    def known(strand: Strand) -> tuple[int, bool, int]:
        heard = sum(session.had(strand.last, body) for body in read)
        return heard, opening_of(strand.head.messages) in asked, strand.number

    return max([strand for strand in before if strand is not own] or before, key=known)


def _is_kin(one: Strand, other: Strand) -> bool:
    """Whether one may go on from the other: the same conversation, or the same agent by its tools or its system
    prompt."""
    same_tools, same_system = one.head.tools == other.head.tools, one.system == other.system
    return (
        one.head.conversation == other.head.conversation
        or (same_tools and (same_system or bool(one.head.tools)))
        or (same_system and bool(one.system))
    )


def _has_read(source: Turn, before: Sequence[Strand]) -> bool:
    """Whether a turn was shown a history of theirs, as messages or written out."""
    if source.parent is not None or any(message.role is Role.ASSISTANT for message in source.messages):
        return True
    asked = opening_of(source.messages)
    openings = (opening_of(other.head.messages) for other in before if other.opener)
    return _is_elsewhere(source, before) and any(opening and opening in asked for opening in openings)


def _is_quoted(session: Session, source: Turn, head: Turn, fresh: Sequence[Message], before: Sequence[Strand]) -> bool:
    """Whether a new message has the text of an answer that calls no tool. As an assistant's it counts only when it was
    given elsewhere, or stands in the place of what it was about: clients send each reply back once."""
    lines = session.answer(source)
    quoting = (message for message in fresh if quotes(lines, message.content)) if lines else ()
    return any(
        message.role is not Role.ASSISTANT
        or _is_elsewhere(source, before)
        or _replaces_history(session, source, head, message)
        for message in quoting
    )


def _replaces_history(session: Session, source: Turn, head: Turn, quote: Message) -> bool:
    """Whether nobody went on from the source, and neither the replies that it was shown nor what it was asked stand
    before its own: a reply that is only sent back stands behind them."""
    shown = source.parent is not None or session.quoted(source)
    if not shown or source.index in session.gone_on or head.parent is not None:
        return False
    above = list(takewhile(lambda message: message is not quote, head.messages))
    spoken = (session.body(message) for message in above if message.role is Role.ASSISTANT)
    return above[-1:] != list(source.messages[-1:]) and not any(session.shows(source, body) for body in spoken)


def _is_elsewhere(source: Turn, before: Sequence[Strand]) -> bool:
    """Whether a turn is of another conversation than these."""
    return all(other.head.conversation != source.conversation for other in before)


def spawns(session: Session) -> dict[int, Spawn]:
    """By the numbers of strands that begin a conversation: the tool call before it that was given most of what the
    conversation begins with."""
    found: dict[int, Spawn] = {}
    given: dict[str, _Given] = {}
    openers = {strand.head.index: strand for strand in session.strands if strand.opener}
    for turn in session.turns:
        if (strand := openers.get(turn.index)) is not None:
            opening = opening_of(turn.messages)
            fitting = [one for text, one in given.items() if text in opening]
            if fitting:
                best = max(fitting, key=lambda one: (len(one.text), one.turn))
                share = len(best.text) / len(opening)
                found[strand.number] = Spawn(best.turn, best.agent_type, best.tool, share >= OPENING_SHARE)
        for call in turn.reply.tool_calls if turn.reply else ():
            for one in _given(turn.index, call):
                given.pop(one.text, None)
                given[one.text] = one
                if len(given) > GIVEN:
                    del given[next(iter(given))]
    return found


def _given(turn: int, call: ToolCall) -> Iterator[_Given]:
    """The arguments that may be what a sub-agent is told: texts of several words, in lists too."""
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
            if len(text) >= PROMPT_LENGTH and len(text.split(None, 1)) == 2:
                yield _Given(text, turn, agent_type, call.name)


def label_of(strand: Strand) -> str:
    """What a side call is for, by its words; "" where they say nothing."""
    asked = [message.content for message in strand.head.messages if message.role is Role.USER][-1:]
    for text in ("\n".join(strand.system).lower(), "\n".join(asked).lower()):
        if (word := _LABELLED.search(text)) is not None:
            return _LABEL_OF[word[1]]
    return ""
