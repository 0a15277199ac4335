"""Decides the purpose of each turn of a session: the turn's kind, parent and label.

A segment is a request with the turns that continue it (`segments.py`). If the client declares a kind, the segment has
this kind (`declared`). Without a declaration, the first rule that applies to the segment decides (`RULES`):

1. `main`: the segment starts the main conversation of a step of the task. This rule is first because the other rules
   compare segments with the main conversation.
2. `continued`: the segment continues an earlier history that was replaced by a summary or cut to its end. This rule is
   before `forked` because such a request also looks like a rewritten history, and before `spawned` because a summary
   may quote a tool's argument. The rule does not apply if the text of a tool call is most of the segment's opening,
   which is stronger evidence for `spawned`.
3. `forked`: a later segment of a conversation, or a handover to another agent, has the kind of its origin.
4. `purpose`: the client names the call's purpose. This rule is before the rules that only infer the kind.
5. `no tools`: the segment is one question to a model without tools, has the words of a side call and no follow-up, and
   nothing quotes the answer. This rule is before `own agent` and `spawned` because sub-agents also make side calls,
   under the sub-agents' names.
6. `own agent`: the client names a parent of the agent, or the segment is the work of an agent other than the main one.
7. `spawned`: the beginning of the segment has a text from an earlier tool call.
8. `other tools`: as `no tools`, but the segment has other tools than the main conversation. This rule is after
   `spawned` because a sub-agent that replies at once looks the same.
9. `unused`: the segment is one question without tools, or with other tools than the main conversation, has no
   follow-up, and nothing quotes the answer. It may be a side call or work.
10. `other`: any other segment is a separate conversation of a sub-agent.

A single turn can then have another kind than its segment (`TURN_RULES`):

- `cut off`: the agent never received the reply.
- `asked again`: the agent used another reply to the same request.
- `declared otherwise`: the client declares another kind than for the segment's first turn.
- `summary`: a later history begins with the reply.

A reply that the agent used must not be left out of the training. So the rules infer a side call (`auxiliary`) only from
two signs: the words of a side call, and an answer that nothing uses.

The evidence is the content of the requests, and the later course of the conversations. The client's names for itself
(`Turn.agent_id`, `purpose`) are only hints. docs/branches.md prints the two tables of rules. The module is pure and
deterministic, and independent of rewards and policy. Invariant: the parent of a segment is a turn before the segment's
first turn.
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
"""The label of turns whose reply is a summary with which a later history begins."""

UNUSED_KINDS = (BranchKind.RETRY, BranchKind.ABORTED)
"""The kinds of replies that the agent did not use. Such a turn has the depth of its segment."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The purpose of a turn.

    parent: the origin of the turn's segment: the turn that it forked from, that wrote its summary, or that called it.
        For a turn with another kind than its segment: the parent turn, or the turn whose reply was used instead.
    depth: 0 in the main conversation.
    rule: the name of the rule that decided.
    main_line: True in the main conversation and in the segments that continue it from a summary or from its cut
        history."""

    kind: BranchKind
    parent: int | None
    depth: int
    label: str
    rule: str
    main_line: bool


class Decision(msgspec.Struct, frozen=True):
    """The result of the rules for a segment or a turn. `rule` is the name of the rule that applied; the other fields
    are those of `Lineage`."""

    rule: str
    kind: BranchKind
    parent: int | None = None
    label: str = ""


class Signals:
    """The evidence on which the rules decide. `lineages` are the lineages of the segments decided so far, by segment
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
        # is the agent's own work in the step; its other conversations are side calls.
        self._work_of: dict[tuple[int, str | None], Segment] = {}
        for segment in ranked:
            step = segment.first.step
            self._mains.setdefault(step, segment)
            self._work_of.setdefault((step, segment.first.agent_id), segment)
        self.lineages: dict[int, Lineage] = {}
        self._main_line: list[Segment] = []

    def _answers_to_search(self) -> set[int]:
        """Return the turns whose replies are searched for in later requests: the last turn of each conversation, all
        turns of a conversation without a follow-up, and all turns of a request that got several replies."""
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
        """Return True if a later request quotes a reply of the segment and does not have the words of a side call."""
        quoting = (self._quoted_in.get(turn.index) for turn in segment.turns)
        return any(at is not None and not self.label(self.session.segment_of(at)) for at in quoting)

    def _joins_answers(self, segment: Segment) -> bool:
        """Return True if the segment is the session's last call, and its request quotes the last replies of several
        conversations. Returns False if the request has the words of a side call that is not a summary."""
        if self.label(segment) not in ("", SUMMARY):
            return False
        last = self.session.turns[-1]
        joined = (at for at, quoting in self._quoted_in.items() if quoting == last.index)
        conversations = {self.session.turns[at].conversation for at in joined}
        return segment.first is last and segment.starts_conversation and len(conversations) > 1

    def _is_called(self, segment: Segment) -> bool:
        """Return True if another conversation called the segment's conversation, as an agent calls a sub-agent. The
        caller began earlier, and one of its requests quotes the last reply of the called conversation."""
        conversation = self.session.segments_in(segment.first.conversation)
        quoting = self._quoted_in.get(max(one.last.index for one in conversation))
        if quoting is None:
            return False
        caller = self.session.turns[quoting].conversation
        began = self.session.segments_in(caller)[0].first.index
        return caller != segment.first.conversation and began < segment.first.index

    def _main_rank(self, segment: Segment) -> tuple[int, ...]:
        """Return the sort key that puts the most likely main conversation first. These segments come later, the
        strongest criterion first:

        - segments that the client declares to be of another kind
        - segments that the client does not declare to be main
        - continuations of a summary or a cut history
        - all segments except a last call that joins the answers of several conversations
        - single questions without tools
        - segments of an agent that the client names
        - segments that a tool call started
        - segments whose last reply is later quoted in an earlier conversation
        - segments without a follow-up
        - segments without tools
        - segments with the words of a side call
        - single questions whose answer is quoted
        - single questions with a shorter answer
        - later segments; last, because a session often begins with a request for a quota, a topic or a title"""
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
        """Return the first segment of the main conversation in the step in which `segment` began. A step in which the
        agent continued an earlier conversation has no such segment. For such a step, returns the segment of the last
        earlier step that has one."""
        return next(self._mains[step] for step in range(segment.first.step, -1, -1) if step in self._mains)

    def label(self, segment: Segment) -> str:
        """Return the label of a side call, from the words of its prompt; "" if no word matches."""
        found = self._labels.get(segment.number)
        if found is None:
            found = self._labels[segment.number] = find_label(segment)
        return found

    def is_side_question(self, segment: Segment) -> bool:
        """Return True if the segment has no follow-up, and its tools or its system prompt differ from the main
        conversation's."""
        main = self.main(segment)
        unlike_main = (segment.first.tools, segment.system) != (main.first.tools, main.system)
        return unlike_main and not self.session.is_followed_up(segment.first.conversation)

    def may_be_outcome(self, segment: Segment) -> bool:
        """Return True if the segment may be the last step of the task although its prompt has the words of a side call.
        The segment must be the session's last call. In addition, its prompt must ask for a summary, or the main
        conversation must be a single question without tools."""
        main = self.main(segment).first
        bare = not main.tools and not self.session.is_followed_up(main.conversation)
        return segment.last is self.session.turns[-1] and (bare or self.label(segment) == SUMMARY)

    def is_own_agents_work(self, segment: Segment) -> bool:
        """Return True if the client names an agent other than the main one, and the segment is this agent's work."""
        agent, step = segment.first.agent_id, segment.first.step
        return agent not in (None, self.main(segment).first.agent_id) and segment is self._work_of.get((step, agent))

    def starter(self, segment: Segment) -> int | None:
        """Return the turn whose tool call started the segment; without such a turn, the segment's `caller`."""
        spawned = self.spawned.get(segment.number)
        return spawned.turn if spawned else self.caller(segment)

    def caller(self, segment: Segment) -> int | None:
        """Return the likely caller of the segment: the newest earlier turn of the segment's agent in another
        conversation. If there is none, returns such a turn of the agent's parent, else of the main line (`Lineage`),
        else None."""
        first = segment.first
        for agent in (first.agent_id, first.parent_agent_id):
            if agent is not None:
                turn = self._agents.newest_outside(first.conversation, agent, first.index)
                if turn is not None:
                    return turn.index
        newest = (other.last_before(first.index) for other in reversed(self._main_line))
        return next((turn.index for turn in newest if turn is not None), None)

    def agent_name(self, segment: Segment) -> str:
        """Return the type of agent named in the tool call that started the segment. Without one, returns the client's
        name for the agent, else the name of the tool, else ""."""
        spawned = self.spawned.get(segment.number)
        agent_type, tool = (spawned.agent_type, spawned.tool) if spawned else ("", "")
        return agent_type or segment.first.agent_id or tool

    def origin(self, segment: Segment) -> int | None:
        """Return the turn from which the segment forked; None for a segment that starts a conversation, unless it is a
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
        # Here, the turn of the fork is not recorded, or the segment is a side call about a history. The origin is then
        # the first turn of the conversation's previous segment.
        earlier = self.session.segments_in(first.conversation)
        return earlier[bisect_left(earlier, segment.number, key=lambda other: other.number) - 1].first.index

    def decide(self, segment: Segment, decision: Decision) -> None:
        """Record the decision about a segment as the segment's lineage."""
        # The depth is counted from the segment that was forked or replaced. For any other segment, the depth is counted
        # from the segment of the decision's parent.
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
        """Return the turn whose reply the agent used in place of this turn's reply. Both turns answer the same
        request. Returns None if the agent used this turn's reply."""
        used = self._used_answers.get(request_key(turn), turn.index)
        is_used = used == turn.index or turn.index in self.session.continued or turn.index in self._quoted_in
        return None if is_used else used


class BranchRule(msgspec.Struct, frozen=True):
    """The description of a rule, which docs/branches.md prints. `kind` is the kind of a segment or turn to which the
    rule applies."""

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
"""Rules for segments, in the order of `_decide_segment`. The first rule that applies decides."""

TURN_RULES = (
    BranchRule("cut off", "aborted", "the agent never saw the answer"),
    BranchRule("asked again", "retry", "the agent used another answer to the same request, and not this one"),
    BranchRule(
        "declared otherwise", "as declared", "the client declares another kind than for the segment's first turn"
    ),
    BranchRule("summary", "compaction", "a later history begins with this answer, and nobody replied to it"),
)
"""Rules for single turns, in the order of `lineages`. The first rule that applies decides. If no rule applies, a turn
has the lineage of its segment."""


MAIN = Lineage(kind=BranchKind.MAIN, parent=None, depth=0, label="", rule="main", main_line=True)


def lineages(turns: Sequence[Turn]) -> list[Lineage]:
    """Return a lineage for each turn; `turns[i].index` must be `i`."""
    if is_one_conversation(turns):
        return [MAIN] * len(turns)
    return lineages_by_rules(turns)


def used_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose reply the agent used or a later turn continues. `turns[i].index` must be `i`."""
    continued = {turn.parent for turn in turns}
    return [
        turn
        for turn, lineage in zip(turns, lineages(turns), strict=True)
        if lineage.kind not in UNUSED_KINDS or turn.index in continued
    ]


def is_one_conversation(turns: Sequence[Turn | TurnOutline]) -> bool:
    """Return True if the session is a single segment without a declaration, and the agent received all replies. Then
    the rules would give each turn the lineage `MAIN`. Most sessions are like this. The rules compare all texts, and
    take fifty times as long as this function."""
    return all(
        turn.parent == (turn.index - 1 if turn.index else None)
        and turn.declared is None
        and turn.finish is not FinishReason.ABORT
        and (turn.index == 0 or all(message.role is not Role.ASSISTANT for message in turn.messages))
        for turn in turns
    )


def lineages_by_rules(turns: Sequence[Turn]) -> list[Lineage]:
    """Return a lineage for each turn by the rules; `turns[i].index` must be `i`."""
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
            turn.parent is not None  # a summary without a parent has the lineage of its segment
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
    """Decide the kind of a segment: the client's declaration, else the first other rule of RULES that applies. With a
    declaration, these rules still decide the parent, and also the label if the client declares none."""
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
        # If a later request quotes the segment, the agent may have repeated its question and used the new answer. The
        # other rules then decide.
        if not signals.is_quoted(segment):
            # the parent of a side call is its caller, even if the call is a repetition
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
    """Set the kind COMPACTION for each segment that is a separate call for a summary. Such a segment differs from other
    side calls only by the later history that continues from its reply. So this function runs after all segments are
    decided."""
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
