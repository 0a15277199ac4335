"""Decides the purpose of each turn of a session: the turn's kind, parent and label.

A segment is a request together with the turns that continue it (`segments.py`). A side call is a request apart from the
agent's task, such as for a title. If the client declares a kind, the segment has that kind (`declared`). Otherwise the
first of these rules that applies decides (`RULES`):

1. `main`: the segment starts the main conversation of a step of the task. This rule is first because other rules
   compare segments with the main conversation.
2. `continued`: the segment continues an earlier history that was replaced by a summary or cut to its end. This rule is
   before `forked` because such a request also looks like a rewritten history, and before `spawned` because a summary
   may quote a tool's argument. The rule is skipped if a tool's argument makes up most of the segment's opening.
3. `forked`: a later segment of a conversation, or a handover to another agent, has the kind of the segment that it
   continues.
4. `purpose`: the client names the call's purpose. This rule is before the rules that only infer the kind.
5. `no tools`: the segment is one question to a model without tools. It has the words of a side call and no follow-up,
   and nothing quotes the answer. This rule is before `own agent` and `spawned` because sub-agents also make side calls.
6. `own agent`: the client names a parent of the segment's agent, or the segment is the work of an agent other than the
   main agent.
7. `spawned`: the beginning of the segment contains a text from an earlier tool call.
8. `other tools`: like `no tools`, but the segment has different tools from the main conversation. This rule is after
   `spawned` because a sub-agent that replies at once looks the same.
9. `unused`: the segment is one question without tools, or with different tools from the main conversation. It has no
   follow-up, and nothing quotes the answer. The question may be a side call or part of the agent's work.
10. `other`: any other segment is a separate conversation of a sub-agent.

These rules can give a single turn a different kind from its segment (`TURN_RULES`):

- `cut off`: the agent never received the reply.
- `asked again`: the agent sent the request again and used another reply.
- `declared otherwise`: the client declares a kind for the turn that differs from the segment's kind.
- `summary`: a later history begins with the reply.

Replies that the agent used must stay in the training data. So a side call (`auxiliary`) is inferred only from two signs
together: its prompt has the words of a side call, and nothing uses its answer.

The evidence is the content of the requests and the later course of the conversations. The names that the client sends
(`Turn.agent_id`, `purpose`) are only hints. docs/branches.md shows both tables of rules. The module is pure and
deterministic, and does not depend on rewards or on the policy for each kind. Invariant: the parent of a segment is a
turn before the segment's first turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from outrider.messages import Role
from outrider.tokens.branches.branch_signals import (
    PURPOSES,
    AgentTurns,
    find_continuation,
    find_handovers,
    find_label,
    find_spawns,
)
from outrider.tokens.branches.quotations import quoting_turns
from outrider.tokens.branches.segments import Segment, SegmentedSession, request_key, used_answers
from outrider.trajectory import BranchKind, FinishReason, Turn, TurnOutline

SUMMARY = "summary"
"""The label of turns that write a summary with which a later history begins."""

UNUSED_KINDS = (BranchKind.RETRY, BranchKind.ABORTED)
"""The kinds of turns whose replies the agent did not use."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The purpose of a turn.

    parent: the earlier turn from which the turn's segment comes. This is one of: the turn from which the segment
        forked; the turn that wrote the summary with which the segment begins; the turn that started the segment. If the
        turn has a different kind from its segment, `parent` is the previous turn. For a reply that the agent did not
        use, `parent` is the turn whose reply the agent used instead.
    depth: 0 in the main conversation.
    rule: the name of the rule that decided.
    main_line: True in the main conversation, and in segments that continue the main conversation from a summary or from
        the end of its history."""

    kind: BranchKind
    parent: int | None
    depth: int
    label: str
    rule: str
    main_line: bool


class Decision(msgspec.Struct, frozen=True):
    """The result of the rules for a segment or a turn. `rule` is the name of the rule that applied. `Lineage` explains
    the other fields."""

    rule: str
    kind: BranchKind
    parent: int | None = None
    label: str = ""


class Signals:
    """The evidence for the rules. `lineages` contains the results for the segments decided so far, by segment
    number."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.session = SegmentedSession(turns)
        self.spawned = find_spawns(self.session)
        self.continued = {segment.number: find_continuation(self.session, segment) for segment in self.session.segments}
        self.summaries = {found.source.index for found in self.continued.values() if found and found.source}
        self._labels: dict[int, str] = {}
        self._agents = AgentTurns(turns)
        self._used_answers = used_answers(self.session)
        self._quoted_in = quoting_turns(self.session, self._answers_to_search())
        self._handovers = find_handovers(self.session, self.summaries, self.label)
        ranked = sorted(
            (one for one in self.session.segments if one.starts_conversation and one.number not in self._handovers),
            key=self._main_rank,
        )
        self._mains: dict[int, Segment] = {}
        """For each step of the task, the first segment of the main conversation."""
        # For each step and agent, the first segment of the agent's highest-ranked conversation. Only this conversation
        # is the agent's own work in the step. The agent's other conversations in the step are side calls.
        self._work_of: dict[tuple[int, str | None], Segment] = {}
        for segment in ranked:
            step = segment.first.step
            self._mains.setdefault(step, segment)
            self._work_of.setdefault((step, segment.first.agent_id), segment)
        self.lineages: dict[int, Lineage] = {}
        self._main_line: list[Segment] = []

    def _answers_to_search(self) -> set[int]:
        """Return the turns whose replies must be looked up in later requests. For a conversation that is followed up,
        this is its last turn. For any other conversation, these are all of its turns. All turns of a repeated request
        are added."""
        found = set()
        for segment in self.session.segments:
            if segment.starts_conversation:
                conversation = self.session.segments_in(segment.first.conversation)
                if self.session.is_followed_up(segment.first.conversation):
                    found.add(max(one.last.index for one in conversation))
                else:
                    found |= {turn.index for one in conversation for turn in one.turns}
        several = set(self._used_answers)
        return found | {turn.index for turn in self.session.turns if request_key(turn) in several}

    def is_quoted(self, segment: Segment) -> bool:
        """Return True if a later request quotes a reply of the segment."""
        return any(turn.index in self._quoted_in for turn in segment.turns)

    def _is_passed_on(self, segment: Segment) -> bool:
        """Return True if a request without the words of a side call quotes a reply of the segment. For each reply, only
        the first request that quotes the reply is considered."""
        quoting = (self._quoted_in.get(turn.index) for turn in segment.turns)
        return any(at is not None and not self.label(self.session.segment_of(at)) for at in quoting)

    def _joins_answers(self, segment: Segment) -> bool:
        """Return True if the segment is the session's last call and its request quotes the last replies of several
        conversations. A request with the words of a side call never qualifies, unless these words ask for a summary."""
        if self.label(segment) not in ("", SUMMARY):
            return False
        last = self.session.turns[-1]
        joined = (at for at, quoting in self._quoted_in.items() if quoting == last.index)
        conversations = {self.session.turns[at].conversation for at in joined}
        return segment.first is last and segment.starts_conversation and len(conversations) > 1

    def _is_called(self, segment: Segment) -> bool:
        """Return True if another conversation called this segment's conversation, as an agent calls a sub-agent. The
        caller must have begun earlier, and one of its requests must quote the last reply of the called conversation."""
        conversation = self.session.segments_in(segment.first.conversation)
        quoting = self._quoted_in.get(max(one.last.index for one in conversation))
        if quoting is None:
            return False
        caller = self.session.turns[quoting].conversation
        began = self.session.segments_in(caller)[0].first.index
        return caller != segment.first.conversation and began < segment.first.index

    def _main_rank(self, segment: Segment) -> tuple[int, ...]:
        """Return a sort key that puts the most likely main conversation first. Each criterion below moves a segment
        towards the end. Earlier criteria outweigh later ones:

        - the client declares a kind other than main
        - the client does not declare it to be main
        - it continues from a summary or from the end of a history
        - it is not a last call that joins the answers of several conversations
        - it is a single question without tools
        - the client names its agent
        - a tool call started it
        - a conversation that began earlier quotes its last reply
        - it has no follow-up
        - it has no tools
        - its prompt has the words of a side call
        - it is a single question whose answer is quoted
        - it is a single question with a shorter answer
        - it began later; this is the weakest criterion, because a session often begins with a side call, such as for a
          title"""
        first = segment.first
        followed_up = self.session.is_followed_up(first.conversation)
        can_work = followed_up or bool(first.tools)
        return (
            first.declared not in (None, BranchKind.MAIN),
            first.declared is None,
            self.continued[segment.number] is not None,
            not self._joins_answers(segment),
            not can_work,
            first.agent_id is not None or first.parent_agent_id is not None,
            segment.number in self.spawned,
            self._is_called(segment),
            not followed_up,
            not first.tools,
            bool(self.label(segment)),
            not can_work and self._is_passed_on(segment),
            0 if can_work else -len(segment.last.output_ids),
            first.index,
        )

    def main(self, segment: Segment) -> Segment:
        """Return the first segment of the main conversation in the step in which `segment` began. A step has no main
        conversation of its own if the agent only continued an earlier conversation. In this case, the last earlier step
        with a main conversation is used."""
        return next(self._mains[step] for step in range(segment.first.step, -1, -1) if step in self._mains)

    def label(self, segment: Segment) -> str:
        """Like `find_label`, but cached."""
        found = self._labels.get(segment.number)
        if found is None:
            found = self._labels[segment.number] = find_label(segment)
        return found

    def is_side_question(self, segment: Segment) -> bool:
        """Return True if the segment has no follow-up, and has different tools or a different system prompt from the
        main conversation."""
        main = self.main(segment)
        unlike_main = (segment.first.tools, segment.system) != (main.first.tools, main.system)
        return unlike_main and not self.session.is_followed_up(segment.first.conversation)

    def may_be_outcome(self, segment: Segment) -> bool:
        """Return True if the segment may be the last step of the task although its prompt has the words of a side call.
        It must be the session's last call. In addition, its prompt must ask for a summary, or the main conversation
        must be a single question without tools."""
        main = self.main(segment).first
        bare = not main.tools and not self.session.is_followed_up(main.conversation)
        return segment.last is self.session.turns[-1] and (bare or self.label(segment) == SUMMARY)

    def is_own_agents_work(self, segment: Segment) -> bool:
        """Return True if the client names an agent other than the main one, and the segment is that agent's own work
        and not a side call."""
        agent, step = segment.first.agent_id, segment.first.step
        return agent not in (None, self.main(segment).first.agent_id) and segment is self._work_of.get((step, agent))

    def starter(self, segment: Segment) -> int | None:
        """Return the turn whose tool call started the segment. If no tool call did, returns the segment's `caller`."""
        spawned = self.spawned.get(segment.number)
        return spawned.turn if spawned else self.caller(segment)

    def caller(self, segment: Segment) -> int | None:
        """Return the likely caller of the segment. It is the first of these turns that exists, or None:

        1. the newest earlier turn of the segment's own agent in another conversation
        2. the newest earlier turn of the agent's parent in another conversation
        3. the last earlier turn of the newest segment in the main line (`Lineage.main_line`)"""
        first = segment.first
        for agent in (first.agent_id, first.parent_agent_id):
            if agent is not None:
                turn = self._agents.newest_outside(first.conversation, agent, first.index)
                if turn is not None:
                    return turn.index
        newest = (other.last_before(first.index) for other in reversed(self._main_line))
        return next((turn.index for turn in newest if turn is not None), None)

    def agent_name(self, segment: Segment) -> str:
        """Return a name for the agent. The name is the first of these that is known: the agent type that the starting
        tool call asks for, the client's name for the agent, and the name of the tool. If none is known, the name is
        ""."""
        spawned = self.spawned.get(segment.number)
        agent_type, tool = (spawned.agent_type, spawned.tool) if spawned else ("", "")
        return agent_type or segment.first.agent_id or tool

    def origin(self, segment: Segment) -> int | None:
        """Return the turn from which the segment forked. Returns None if the segment starts a conversation and is not a
        handover."""
        first, source = segment.first, self.session.source(segment.first)
        if segment.number in self._handovers:
            return source
        if segment.starts_conversation:
            return None
        if source is None and first.parent is not None:
            return first.parent
        if source is None and first.forked_from is not None and first.forked_from < first.index:
            return first.forked_from
        # The turn that the segment forked from is unknown: it was not recorded, or the segment is a side call about a
        # history. Return the first turn of the conversation's previous segment instead.
        earlier = self.session.segments_in(first.conversation)
        return earlier[bisect_left(earlier, segment.number, key=lambda other: other.number) - 1].first.index

    def decide(self, segment: Segment, decision: Decision) -> None:
        """Store the decision for a segment as its lineage."""
        # The depth is counted from the segment that this segment forked from or replaces. If there is no such segment,
        # the depth is counted from the parent's segment.
        before_at = decision.parent
        continued = self.continued[segment.number]
        if decision.rule == "forked":
            before_at = self.origin(segment)
        elif decision.rule == "continued" and continued is not None:
            before_at = continued.old.index
        before = None if before_at is None else self.lineages[self.session.segment_of(before_at).number]
        deeper = 0 if decision.rule == "forked" else 1
        replaces = decision.rule in ("continued", "forked")
        main_line = (
            segment is self.main(segment)
            or decision.kind is BranchKind.MAIN
            or (replaces and before is not None and before.main_line)
        )
        self.lineages[segment.number] = Lineage(
            kind=decision.kind,
            parent=decision.parent,
            depth=0 if decision.kind is BranchKind.MAIN else (before.depth if before else 0) + deeper,
            label=decision.label,
            rule=decision.rule,
            main_line=main_line,
        )
        if main_line:
            self._main_line.append(segment)

    def used_instead(self, turn: Turn) -> int | None:
        """Return the turn whose reply the agent used instead of this turn's reply to the same request. Returns None if
        the agent used this turn's reply."""
        used = self._used_answers.get(request_key(turn), turn.index)
        is_used = used == turn.index or turn.index in self.session.continued or turn.index in self._quoted_in
        return None if is_used else used


class BranchRule(msgspec.Struct, frozen=True):
    """The description of a rule, shown in docs/branches.md. `kind` is the kind that the rule gives to a segment or
    turn."""

    name: str
    kind: str
    reason: str


RULES = (
    BranchRule("declared", "as declared", "the client declares the kind, and the other rules would give another kind"),
    BranchRule("main", "main", "the conversation that does the work of a step"),
    BranchRule("continued", "compaction", "a request quotes a summary, or keeps only the history's end"),
    BranchRule("forked", "as its origin", "a history that is changed, or continues in another way, keeps its kind"),
    BranchRule("purpose", "as named", "the client names the call's purpose by a known word"),
    BranchRule("no tools", "auxiliary", "a side call's words, no tools, and nothing uses the answer"),
    BranchRule("own agent", "subagent", "the client names another agent than for its other calls"),
    BranchRule("spawned", "subagent", "it begins with a text from an earlier tool call"),
    BranchRule("other tools", "auxiliary", "a side call's words, tools of its own, and nothing uses the answer"),
    BranchRule("unused", "unsure", "one separate question, and no later call shows the answer"),
    BranchRule("other", "subagent", "any other separate conversation is the work of a sub-agent"),
)
"""Rules for segments, in the order in which `_decide_segment` applies them. The first rule that applies decides."""

TURN_RULES = (
    BranchRule("cut off", "aborted", "the agent never saw the answer"),
    BranchRule("asked again", "retry", "the agent used another answer to the same request, and not this one"),
    BranchRule(
        "declared otherwise", "as declared", "the client declares a kind for the turn that is not the segment's kind"
    ),
    BranchRule("summary", "compaction", "a later history begins with this answer, and nobody replied to it"),
)
"""Rules for single turns, in the order in which `lineages_by_rules` applies them. The first rule that applies decides.
If none applies, the turn has the lineage of its segment."""


MAIN = Lineage(kind=BranchKind.MAIN, parent=None, depth=0, label="", rule="main", main_line=True)


def lineages(turns: Sequence[Turn]) -> list[Lineage]:
    """Return the lineage (the purpose) of each turn. `turns[i].index` must be `i`."""
    if is_one_conversation(turns):
        return [MAIN] * len(turns)
    return lineages_by_rules(turns)


def used_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose replies the agent used, and the turns that a later turn continues. `turns[i].index` must
    be `i`."""
    continued = {turn.parent for turn in turns}
    return [
        turn
        for turn, lineage in zip(turns, lineages(turns), strict=True)
        if lineage.kind not in UNUSED_KINDS or turn.index in continued
    ]


def is_one_conversation(turns: Sequence[Turn | TurnOutline]) -> bool:
    """Return True if every turn continues the previous turn, no later request adds assistant messages, the client
    declares no kinds, and the agent received all replies. The rules would then give each turn the lineage `MAIN`. Most
    sessions are like this. This check is fifty times faster than the rules, which compare all texts."""
    return all(
        turn.parent == (turn.index - 1 if turn.index else None)
        and turn.declared is None
        and turn.finish is not FinishReason.ABORT
        and (turn.index == 0 or all(message.role is not Role.ASSISTANT for message in turn.messages))
        for turn in turns
    )


def lineages_by_rules(turns: Sequence[Turn]) -> list[Lineage]:
    """Apply the rules, and return the lineage of each turn. `turns[i].index` must be `i`."""
    signals = Signals(turns)
    for segment in signals.session.segments:
        signals.decide(segment, _decide_segment(signals, segment))
    _mark_summaries(signals)
    found = []
    for turn in turns:
        lineage = signals.lineages[signals.session.segment_of(turn.index).number]
        if turn.finish is FinishReason.ABORT:
            decision = Decision("cut off", BranchKind.ABORTED, turn.parent)
        elif (instead := signals.used_instead(turn)) is not None:
            decision = Decision("asked again", BranchKind.RETRY, instead)
        elif turn.declared is not None and turn.declared is not lineage.kind:
            before = lineage.parent if turn.parent is None else turn.parent
            decision = Decision("declared otherwise", turn.declared, before, turn.declared_label)
        elif (
            turn.parent is not None  # a summary without a parent turn keeps the lineage of its segment
            and turn.index in signals.summaries
            and turn.index not in signals.session.continued
            and turn.declared is None
        ):
            decision = Decision("summary", BranchKind.COMPACTION, turn.parent, SUMMARY)
        else:
            found.append(lineage)
            continue
        found.append(
            Lineage(
                kind=decision.kind,
                parent=decision.parent,
                depth=0 if decision.kind is BranchKind.MAIN else lineage.depth + (decision.kind not in UNUSED_KINDS),
                label=decision.label or lineage.label,
                rule=decision.rule,
                main_line=decision.kind is BranchKind.MAIN,
            )
        )
    return found


def _decide_segment(signals: Signals, segment: Segment) -> Decision:
    """Decide the kind of a segment: the kind that the client declares or, if the client declares none, the kind of the
    first rule of RULES that applies. The rules also decide the parent, and the label if the client declares no
    label."""
    guess = _guess(signals, segment)
    declared = segment.first.declared
    if declared is None:
        return guess
    label = segment.first.declared_label or guess.label
    if guess.kind is declared:
        return Decision(guess.rule, declared, guess.parent, label)
    return Decision("declared", declared, guess.parent, label)


def _guess(signals: Signals, segment: Segment) -> Decision:
    """Decide the kind of a segment without the client's declaration. The module's docstring explains the order of the
    rules."""
    main = signals.main(segment)
    if segment is main:
        return Decision("main", BranchKind.MAIN)

    first = segment.first
    continued, spawned = signals.continued[segment.number], signals.spawned.get(segment.number)
    if continued is not None and not (spawned is not None and spawned.is_most_of_opening):
        if continued.source is None:
            return Decision("continued", BranchKind.COMPACTION, continued.old.index, "trimmed")
        return Decision("continued", BranchKind.COMPACTION, continued.source.index, "continued")

    origin = signals.origin(segment)
    if origin is not None:
        before = signals.lineages[signals.session.segment_of(origin).number]
        may_be_side_call = before.kind in (BranchKind.AUXILIARY, BranchKind.UNSURE)
        if not may_be_side_call:
            return Decision("forked", before.kind, origin, before.label)
        # A fork of a side call is usually the same side call, repeated, and is then a side call too. It may instead be
        # work of the task: the agent asked its question again and used the new answer. This is possible if a later
        # request quotes a reply of the fork. Then the rules below decide.
        if not signals.is_quoted(segment):
            # the parent of a side call is its caller, even if the call is repeated
            label = signals.label(segment) or before.label
            return Decision("forked", before.kind, signals.caller(segment), label)

    purpose = (first.purpose or "").lower()
    kind = PURPOSES.get(purpose)
    if kind is not None:
        label = SUMMARY if kind is BranchKind.COMPACTION else purpose
        return Decision("purpose", kind, signals.caller(segment), label)

    is_unused = signals.is_side_question(segment) and not signals.is_quoted(segment)
    side_label = "" if signals.may_be_outcome(segment) else signals.label(segment)
    own_work = signals.is_own_agents_work(segment)
    if is_unused and side_label and not first.tools and not own_work:
        return Decision("no tools", BranchKind.AUXILIARY, signals.starter(segment), side_label)
    if first.parent_agent_id is not None or own_work:
        return Decision("own agent", BranchKind.SUBAGENT, signals.starter(segment), signals.agent_name(segment))
    if spawned is not None:
        return Decision("spawned", BranchKind.SUBAGENT, signals.starter(segment), signals.agent_name(segment))
    if is_unused and (not first.tools or first.tools != main.first.tools):
        if side_label:
            return Decision("other tools", BranchKind.AUXILIARY, signals.starter(segment), side_label)
        return Decision("unused", BranchKind.UNSURE, signals.starter(segment), first.purpose or "")
    return Decision("other", BranchKind.SUBAGENT, signals.caller(segment), first.agent_id or "")


def _mark_summaries(signals: Signals) -> None:
    """Set the kind COMPACTION for separate calls that ask for a summary. A call of this kind is recognised by the later
    history that continues from its summary, so this function runs after all segments are decided."""
    for continued in signals.continued.values():
        if continued is None or continued.source is None:
            continue
        segment = signals.session.segment_of(continued.source.index)
        lineage = signals.lineages[segment.number]
        old = signals.session.segment_of(continued.old.index)
        summarised = old.last_before(segment.first.index)
        asked_for = (lineage.rule, lineage.kind) == ("purpose", BranchKind.COMPACTION)
        alone = segment.turns == [continued.source] and lineage.rule in ("continued", "forked")
        side_call = lineage.kind in (BranchKind.AUXILIARY, BranchKind.UNSURE) or lineage.rule == "other"
        spawned = signals.spawned.get(segment.number)
        side_call |= lineage.rule == "spawned" and spawned is not None and not spawned.is_most_of_opening
        guessed = segment.first.declared is None
        if guessed and summarised is not None and (asked_for or alone or side_call):
            signals.lineages[segment.number] = Lineage(
                kind=BranchKind.COMPACTION,
                parent=summarised.index,
                depth=signals.lineages[old.number].depth + 1,
                label=SUMMARY,
                rule="summary",
                main_line=False,
            )
