"""Decides what each turn of a session was for: its kind, its parent and its label.

A segment (`segments.py`) gets the kind of the first of these rules that applies to it (`RULES`):

1. `main`: it starts the main conversation. First, because the other rules compare with it.
2. `continued`: it goes on from an earlier history that it replaces by a summary, or of which it kept only the end.
   Before `forked` and `spawned`, because such a request also looks like a rewritten history, and a summary may quote
   what a tool was given. Only a tool call whose text is most of the opening is stronger evidence.
3. `forked`: a later segment of a conversation, or a handover, is what it forked from.
4. `purpose`: the client names the call's purpose. Before all that is only inferred.
5. `no tools`: one question to a model without tools that nobody followed up. Before `own agent` and `spawned`, because
   sub-agents ask side calls, too, under their own names.
6. `own agent`: the client names another agent than the main one.
7. `spawned`: it begins with a text that an earlier tool call was given.
8. `other tools`: one question with tools of its own. After `spawned`, because a sub-agent that answers at once looks
   the same.
9. `other`: what is left is a conversation that works by itself.

Then a single turn can be something else than its segment (`TURN_RULES`): `cut off` before the agent saw it; `asked
again`, if the agent used another answer to the same request; a `summary` that a later history begins with.

Everything is decided from what clients sent and how they went on; what they say about themselves (`Turn.agent_id`,
`purpose`) is a hint. docs/branches.md prints both tables. It is pure and deterministic, and knows no rewards and no
policy. Invariant: the parent of a segment is a turn before its first one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from outrider.tokens.branches.branch_signals import (
    PURPOSES,
    AgentTurns,
    find_continuation,
    find_handovers,
    find_label,
    find_spawns,
)
from outrider.tokens.branches.segments import Segment, SegmentedSession, history_source, request_key, used_answers
from outrider.trajectory import BranchKind, FinishReason, Turn

SUMMARY = "summary"
"""The label of a turn that a later history goes on from."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn was for. `parent` is the turn that its segment forked from or was started by; `depth` is 0 in the
    main conversation; `rule` names the rule that decided; `main_line` is whether it is in the main conversation, or in
    what goes on from a summary of it."""

    kind: BranchKind
    parent: int | None
    depth: int
    label: str
    rule: str
    main_line: bool


class Decision(msgspec.Struct, frozen=True):
    """What a rule says about a segment or a turn."""

    kind: BranchKind
    parent: int | None = None
    label: str = ""


class Signals:
    """All that the rules ask about. `lineages` are those of the segments decided so far, by their numbers."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.session = SegmentedSession(turns)
        self.spawned = find_spawns(self.session)
        self.continued = {segment.number: find_continuation(self.session, segment) for segment in self.session.segments}
        self.summaries = {found.source.index for found in self.continued.values() if found and found.source}
        self._labels: dict[int, str] = {}
        self._agents = AgentTurns(turns)
        self._used_answers = used_answers(self.session)
        self._handovers = find_handovers(self.session, self.summaries, self.label)
        ranked = sorted(
            (one for one in self.session.segments if one.starts_conversation and one.number not in self._handovers),
            key=self._main_rank,
        )
        self.main = ranked[0] if ranked else None
        # An agent's first rank is its own work; its other conversations are side calls.
        self._work_of: dict[str | None, Segment] = {}
        for segment in ranked:
            self._work_of.setdefault(segment.first.agent_id, segment)
        self.lineages: dict[int, Lineage] = {}
        self._main_line: list[Segment] = []

    def _main_rank(self, segment: Segment) -> tuple[int, ...]:
        """Sorts first what is most likely the main conversation. It is often not the first: clients ask for a quota, a
        topic or a title before. In the order of their weight, these come last: what goes on from a summary; what only
        answers and has no tools; what its client names as an agent; what a tool call started; what nobody followed up;
        what has no tools; what has the words of a side call; what came later."""
        first = segment.first
        followed_up = self.session.is_followed_up(first.conversation)
        return (
            self.continued[segment.number] is not None,
            not (followed_up or first.tools),
            first.agent_id is not None or first.parent_agent_id is not None,
            segment.number in self.spawned,
            not followed_up,
            not first.tools,
            bool(self.label(segment)),
            first.index,
        )

    def label(self, segment: Segment) -> str:
        """What a side call is for, by its words; "" where they say nothing."""
        found = self._labels.get(segment.number)
        if found is None:
            found = self._labels[segment.number] = find_label(segment)
        return found

    def is_side_question(self, segment: Segment) -> bool:
        """Whether nobody followed it up, and its tools or its system prompt are not the main conversation's."""
        assert self.main is not None
        unlike_main = (segment.first.tools, segment.system) != (self.main.first.tools, self.main.system)
        return unlike_main and not self.session.is_followed_up(segment.first.conversation)

    def is_own_agents_work(self, segment: Segment) -> bool:
        """Whether its client names an agent other than the main one, and it is this agent's work."""
        assert self.main is not None
        agent = segment.first.agent_id
        return agent not in (None, self.main.first.agent_id) and segment is self._work_of.get(agent)

    def starter(self, segment: Segment) -> int | None:
        """The turn whose tool call started it, else its caller."""
        spawned = self.spawned.get(segment.number)
        return spawned.turn if spawned else self.caller(segment)

    def caller(self, segment: Segment) -> int | None:
        """The newest turn before it of the agent that its client names, else of that agent's parent, else of the main
        line."""
        first = segment.first
        for agent in (first.agent_id, first.parent_agent_id):
            if agent is not None:
                turn = self._agents.newest_outside(first.conversation, agent, first.index)
                if turn is not None:
                    return turn.index
        newest = (other.last_before(first.index) for other in reversed(self._main_line))
        return next((turn.index for turn in newest if turn is not None), None)

    def agent_name(self, segment: Segment) -> str:
        """The type of agent that the tool call which started it asked for, else its client's name for it, else the
        tool."""
        spawned = self.spawned.get(segment.number)
        agent_type, tool = (spawned.agent_type, spawned.tool) if spawned else ("", "")
        return agent_type or segment.first.agent_id or tool

    def origin(self, segment: Segment) -> int | None:
        """The turn that it forked from; None for one that starts a conversation."""
        first, source = segment.first, history_source(segment.first)
        if segment.number in self._handovers:
            return source
        if segment.starts_conversation:
            return None
        if source is None and first.parent is not None:
            return first.parent
        if source is None and first.forked_from is not None and first.forked_from < first.index:
            return first.forked_from
        # A fork for which no turn is known, or a side call about a history: the segment before it in its conversation.
        earlier = self.session.segments_in(first.conversation)
        return earlier[bisect_left(earlier, segment.number, key=lambda other: other.number) - 1].first.index

    def decide(self, segment: Segment, lineage: Lineage) -> None:
        self.lineages[segment.number] = lineage
        if lineage.main_line:
            self._main_line.append(segment)

    def used_instead(self, turn: Turn) -> int | None:
        """The answer to the turn's request that the agent used, if that is another turn."""
        used = self._used_answers.get(request_key(turn), turn.index)
        return None if used == turn.index or turn.index in self.session.continued else used


Subject = TypeVar("Subject", Segment, Turn)


class Rule(msgspec.Struct, Generic[Subject], frozen=True):
    """`find` says what a segment or a turn is, or None if the rule does not apply to it."""

    name: str
    kind: str
    reason: str
    find: Callable[[Signals, Subject], Decision | None]


def _is_main(signals: Signals, segment: Segment) -> Decision | None:
    return Decision(BranchKind.MAIN) if segment is signals.main else None


def _is_continued(signals: Signals, segment: Segment) -> Decision | None:
    continued, spawned = signals.continued[segment.number], signals.spawned.get(segment.number)
    if continued is None or (spawned is not None and spawned.is_most_of_opening):
        return None
    if continued.source is None:
        return Decision(BranchKind.COMPACTION, continued.old.index, "trimmed")
    return Decision(BranchKind.COMPACTION, continued.source.index, "continued")


def _is_forked(signals: Signals, segment: Segment) -> Decision | None:
    origin = signals.origin(segment)
    if origin is None:
        return None
    before = signals.lineages[signals.session.segment_of(origin).number]
    if before.kind is BranchKind.AUXILIARY:  # the parent of a side call is who asks, also when it asks again
        return Decision(before.kind, signals.caller(segment), signals.label(segment) or before.label)
    return Decision(before.kind, origin, before.label)


def _has_purpose(signals: Signals, segment: Segment) -> Decision | None:
    purpose = (segment.first.purpose or "").lower()
    kind = PURPOSES.get(purpose)
    label = SUMMARY if kind is BranchKind.COMPACTION else purpose
    return Decision(kind, signals.caller(segment), label) if kind else None


def _asks_without_tools(signals: Signals, segment: Segment) -> Decision | None:
    if segment.first.tools or signals.is_own_agents_work(segment):
        return None
    return _side_call(signals, segment)


def _names_its_agent(signals: Signals, segment: Segment) -> Decision | None:
    if segment.first.parent_agent_id is None and not signals.is_own_agents_work(segment):
        return None
    return Decision(BranchKind.SUBAGENT, signals.starter(segment), signals.agent_name(segment))


def _was_spawned(signals: Signals, segment: Segment) -> Decision | None:
    if segment.number not in signals.spawned:
        return None
    return Decision(BranchKind.SUBAGENT, signals.starter(segment), signals.agent_name(segment))


def _asks_with_other_tools(signals: Signals, segment: Segment) -> Decision | None:
    assert signals.main is not None
    if segment.first.tools == signals.main.first.tools:
        return None
    return _side_call(signals, segment)


def _side_call(signals: Signals, segment: Segment) -> Decision | None:
    if not signals.is_side_question(segment):
        return None
    label = signals.label(segment) or segment.first.purpose or ""
    return Decision(BranchKind.AUXILIARY, signals.starter(segment), label)


def _is_other(signals: Signals, segment: Segment) -> Decision | None:
    return Decision(BranchKind.SUBAGENT, signals.caller(segment), segment.first.agent_id or "")


RULES: tuple[Rule[Segment], ...] = (
    Rule("main", "main", "of the conversations, the one that does the task's work", _is_main),
    Rule("continued", "compaction", "a request quotes a summary, or keeps only the history's end", _is_continued),
    Rule("forked", "as its origin", "a history that is changed, or goes on otherwise, stays what it was", _is_forked),
    Rule("purpose", "as it says", "the client names the call's purpose, with a word that is known", _has_purpose),
    Rule(
        "no tools", "auxiliary", "one question to a model that can do nothing, and nobody replies", _asks_without_tools
    ),
    Rule("own agent", "subagent", "the client names another agent than for its other calls", _names_its_agent),
    Rule("spawned", "subagent", "it begins with what an earlier tool call was given", _was_spawned),
    Rule("other tools", "auxiliary", "one question with tools of its own, and nobody replies", _asks_with_other_tools),
    Rule("other", "subagent", "a conversation of its own that is none of these works by itself", _is_other),
)
"""For segments; the first that applies decides."""


def _was_cut_off(signals: Signals, turn: Turn) -> Decision | None:
    return Decision(BranchKind.ABORTED, turn.parent) if turn.finish is FinishReason.ABORT else None


def _was_asked_again(signals: Signals, turn: Turn) -> Decision | None:
    instead = signals.used_instead(turn)
    return None if instead is None else Decision(BranchKind.RETRY, instead)


def _summarises(signals: Signals, turn: Turn) -> Decision | None:
    # A summary that was asked for by a call of its own is a segment, and decided as such.
    within = turn.parent is not None and turn.index in signals.summaries and turn.index not in signals.session.continued
    return Decision(BranchKind.COMPACTION, turn.parent, SUMMARY) if within else None


TURN_RULES: tuple[Rule[Turn], ...] = (
    Rule("cut off", "aborted", "the agent never saw the answer", _was_cut_off),
    Rule("asked again", "retry", "the agent went on with another answer to the same request", _was_asked_again),
    Rule("summary", "compaction", "a later history begins with this answer, and nobody replied to it", _summarises),
)
"""For single turns, before the rules for their segments; the first that applies decides."""


def lineages(turns: Sequence[Turn]) -> list[Lineage]:
    """One for each turn; `turns[i].index` must be `i`."""
    signals = Signals(turns)
    for segment in signals.session.segments:
        signals.decide(segment, _segment_lineage(signals, segment))
    _mark_summaries(signals)
    found = []
    for turn in turns:
        lineage = signals.lineages[signals.session.segment_of(turn.index).number]
        for rule in TURN_RULES:
            decision = rule.find(signals, turn)
            if decision is not None:
                lineage = Lineage(
                    kind=decision.kind,
                    parent=decision.parent,
                    depth=lineage.depth + (1 if decision.kind is BranchKind.COMPACTION else 0),
                    label=decision.label or lineage.label,
                    rule=rule.name,
                    main_line=False,
                )
                break
        found.append(lineage)
    return found


def _segment_lineage(signals: Signals, segment: Segment) -> Lineage:
    rule, decision = next((rule, found) for rule in RULES if (found := rule.find(signals, segment)) is not None)
    continued = signals.continued[segment.number]
    # Depth counts from the segment whose place it takes, or from who called it.
    origin = decision.parent
    if rule.name == "forked":
        origin = signals.origin(segment)
    elif rule.name == "continued" and continued is not None:
        origin = continued.old.index
    before = None if origin is None else signals.lineages[signals.session.segment_of(origin).number]
    stays = rule.name in ("main", "forked")
    replaces = rule.name in ("continued", "forked")
    return Lineage(
        kind=decision.kind,
        parent=decision.parent,
        depth=(before.depth if before else 0) + (0 if stays else 1),
        label=decision.label,
        rule=rule.name,
        main_line=rule.name == "main" or (replaces and before is not None and before.main_line),
    )


def _mark_summaries(signals: Signals) -> None:
    """Change the segments that were a call of their own for a summary to compactions. Only now can they be told from
    other side calls: a later history goes on from the answer."""
    for continued in signals.continued.values():
        if continued is None or continued.source is None:
            continue
        segment = signals.session.segment_of(continued.source.index)
        lineage = signals.lineages[segment.number]
        old = signals.session.segment_of(continued.old.index)
        summarised = old.last_before(segment.first.index)
        asked_for = (lineage.rule, lineage.kind) == ("purpose", BranchKind.COMPACTION)
        alone = segment.turns == [continued.source] and lineage.rule in ("continued", "forked")
        side_call = lineage.kind is BranchKind.AUXILIARY or lineage.rule == "other"
        if summarised is not None and (asked_for or alone or side_call):
            signals.lineages[segment.number] = Lineage(
                kind=BranchKind.COMPACTION,
                parent=summarised.index,
                depth=signals.lineages[old.number].depth + 1,
                label=SUMMARY,
                rule="summary",
                main_line=False,
            )
