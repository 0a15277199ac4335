"""What each turn of a session was for: rules, as a table, over the strands of the whole session.

Pure and deterministic: decided from what clients sent, with what they say about themselves (`Turn.agent_id`) as a hint.
docs/branches.md shows both tables. Invariant: the parent of a strand is a turn before its head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from outrider.tokens.branches.branch_signals import PURPOSES, Agents, continuation, label_of, spawns
from outrider.tokens.branches.handovers import goings_on
from outrider.tokens.branches.segments import Session, Strand, history_of, request_key, used_answers
from outrider.trajectory import BranchKind, FinishReason, Turn

SUMMARY = "summary"
"""The label of a turn that a later history goes on from."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn was for. `parent` is the turn that its strand forked from or was started by; `rule` names the rule
    that decided; `main_line` is whether it is the main conversation, or goes on from its summary."""

    kind: BranchKind
    parent: int | None
    depth: int
    label: str
    rule: str
    main_line: bool


class Found(msgspec.Struct, frozen=True):
    """What a rule says of a strand."""

    kind: BranchKind
    parent: int | None = None
    label: str = ""


class Reading:
    """What the rules ask about: the strands, which of them spawned or shortened which, which went on as another agent,
    and the main conversation."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.session = Session(turns)
        self.spawned = spawns(self.session)
        self.continued = {strand.number: continuation(self.session, strand) for strand in self.session.strands}
        self.summaries = {found.source.index for found in self.continued.values() if found and found.source}
        self._labels: dict[int, str] = {}
        self._agents = Agents(turns)
        self._going_on = goings_on(self.session, self.summaries, self.label)
        openers = [strand for strand in self.session.strands if strand.opener and strand.number not in self._going_on]
        ranked = sorted(openers, key=self._rank)
        self.main = ranked[0] if ranked else None
        self._workers: dict[str | None, Strand] = {}
        for strand in ranked:
            self._workers.setdefault(strand.head.agent_id, strand)
        self.lineages: dict[int, Lineage] = {}
        self.main_line: list[Strand] = []

    def label(self, strand: Strand) -> str:
        found = self._labels.get(strand.number)
        if found is None:
            found = self._labels[strand.number] = label_of(strand)
        return found

    def _rank(self, strand: Strand) -> tuple[int, ...]:
        """The least is the main conversation: what works goes before what only answers, what nobody started before
        what another conversation did, and what came first before the rest."""
        head = strand.head
        works = self.session.carried_on(head.conversation)
        return (
            self.continued[strand.number] is not None,
            not (works or head.tools),
            head.agent_id is not None or head.parent_agent_id is not None,
            strand.number in self.spawned,
            not works,
            not head.tools,
            bool(self.label(strand)),
            head.index,
        )

    def is_side_call(self, strand: Strand) -> bool:
        """Whether it is of a sort that the main conversation is not, and nobody went on with an answer."""
        assert self.main is not None
        unlike = (strand.head.tools, strand.system) != (self.main.head.tools, self.main.system)
        return unlike and not self.session.carried_on(strand.head.conversation)

    def has_own_agent(self, strand: Strand) -> bool:
        """Whether its client names an agent other than the main one, and it is this agent's work."""
        agent = strand.head.agent_id
        assert self.main is not None
        return agent not in (None, self.main.head.agent_id) and strand is self._workers.get(agent)

    def starter(self, strand: Strand) -> int | None:
        """The turn whose tool call began it, else its caller."""
        spawned = self.spawned.get(strand.number)
        return spawned.turn if spawned else self.caller(strand)

    def agent_name(self, strand: Strand) -> str:
        """The sort of agent that the tool call which began it asked for, else what its client calls it, else the
        tool."""
        spawned = self.spawned.get(strand.number)
        sort, tool = (spawned.agent_type, spawned.tool) if spawned else ("", "")
        return sort or strand.head.agent_id or tool

    def caller(self, strand: Strand) -> int | None:
        """The newest turn before it of the agent that its client names, else of the main line."""
        head = strand.head
        for agent in (head.agent_id, head.parent_agent_id):
            turn = self._agents.newest(agent, head.index, head.conversation) if agent is not None else None
            if turn is not None:
                return turn.index
        newest = (other.before(head.index) for other in reversed(self.main_line))
        return next((turn.index for turn in newest if turn is not None), None)

    def decide(self, strand: Strand, lineage: Lineage) -> None:
        self.lineages[strand.number] = lineage
        if lineage.main_line:
            self.main_line.append(strand)

    def origin(self, strand: Strand) -> int | None:
        """The turn that a strand forked from; None for one that began by itself."""
        head, before = strand.head, history_of(strand.head)
        if strand.number in self._going_on:
            return before
        if strand.opener:
            return None
        if before is None and head.parent is not None:
            return head.parent
        if before is None and head.forked_from is not None and head.forked_from < head.index:
            return head.forked_from
        earlier = self.session.conversation(head.conversation)
        return earlier[bisect_left(earlier, strand.number, key=lambda other: other.number) - 1].head.index


class Rule(msgspec.Struct, frozen=True):
    """`find` says what a strand is, or None where the rule does not apply to it."""

    name: str
    kind: str
    reason: str
    find: Callable[[Reading, Strand], Found | None]


def _is_main(reading: Reading, strand: Strand) -> Found | None:
    return Found(BranchKind.MAIN) if strand is reading.main else None


def _is_continued(reading: Reading, strand: Strand) -> Found | None:
    continued, spawned = reading.continued[strand.number], reading.spawned.get(strand.number)
    if continued is None or (spawned is not None and spawned.is_the_opening):
        return None
    if continued.source is None:
        return Found(BranchKind.COMPACTION, continued.old.index, "trimmed")
    return Found(BranchKind.COMPACTION, continued.source.index, "continued")


def _is_forked(reading: Reading, strand: Strand) -> Found | None:
    """As what it forked from; a side call's parent is still who asks."""
    origin = reading.origin(strand)
    if origin is None:
        return None
    before = reading.lineages[reading.session.strand_of(origin).number]
    if before.kind is BranchKind.AUXILIARY:
        return Found(before.kind, reading.caller(strand), reading.label(strand) or before.label)
    return Found(before.kind, origin, before.label)


def _has_purpose(reading: Reading, strand: Strand) -> Found | None:
    purpose = (strand.head.purpose or "").lower()
    kind = PURPOSES.get(purpose)
    label = SUMMARY if kind is BranchKind.COMPACTION else purpose
    return Found(kind, reading.caller(strand), label) if kind else None


def _asks_without_tools(reading: Reading, strand: Strand) -> Found | None:
    aside = not strand.head.tools and reading.is_side_call(strand) and not reading.has_own_agent(strand)
    return _side_call(reading, strand) if aside else None


def _names_its_agent(reading: Reading, strand: Strand) -> Found | None:
    head = strand.head
    if head.parent_agent_id is None and not reading.has_own_agent(strand):
        return None
    return Found(BranchKind.SUBAGENT, reading.starter(strand), reading.agent_name(strand))


def _was_spawned(reading: Reading, strand: Strand) -> Found | None:
    started = strand.number in reading.spawned
    return Found(BranchKind.SUBAGENT, reading.starter(strand), reading.agent_name(strand)) if started else None


def _asks_with_other_tools(reading: Reading, strand: Strand) -> Found | None:
    assert reading.main is not None
    aside = strand.head.tools != reading.main.head.tools and reading.is_side_call(strand)
    return _side_call(reading, strand) if aside else None


def _is_other(reading: Reading, strand: Strand) -> Found | None:
    return Found(BranchKind.SUBAGENT, reading.caller(strand), strand.head.agent_id or "")


def _side_call(reading: Reading, strand: Strand) -> Found:
    return Found(BranchKind.AUXILIARY, reading.starter(strand), reading.label(strand) or strand.head.purpose or "")


RULES: tuple[Rule, ...] = (
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
"""The first that applies to a strand decides. A conversation's first strand is told from its later ones by `forked`."""


class TurnRule(msgspec.Struct, frozen=True):
    """What one turn is, other than its strand. `find` gives that, or None where the rule does not apply to it."""

    name: str
    kind: str
    reason: str
    find: Callable[[Answers, Turn], Found | None]


class Answers:
    """What the rules about single turns ask about."""

    def __init__(self, reading: Reading) -> None:
        self._gone_on = reading.session.gone_on
        self._used = used_answers(reading.session)
        self._summaries = reading.summaries

    def used_instead(self, turn: Turn) -> int | None:
        """The answer to the same request that was used, where that is not this one."""
        answer = self._used.get(request_key(turn), turn.index)
        return None if answer == turn.index or turn.index in self._gone_on else answer

    def is_summary(self, turn: Turn) -> bool:
        return turn.index in self._summaries and turn.index not in self._gone_on


def _was_cut_off(answers: Answers, turn: Turn) -> Found | None:
    return Found(BranchKind.ABORTED, turn.parent) if turn.finish is FinishReason.ABORT else None


def _was_asked_again(answers: Answers, turn: Turn) -> Found | None:
    instead = answers.used_instead(turn)
    return None if instead is None else Found(BranchKind.RETRY, instead)


def _summarises(answers: Answers, turn: Turn) -> Found | None:
    within = turn.parent is not None and answers.is_summary(turn)
    return Found(BranchKind.COMPACTION, turn.parent, SUMMARY) if within else None


TURN_RULES: tuple[TurnRule, ...] = (
    TurnRule("cut off", "aborted", "the agent never saw the answer", _was_cut_off),
    TurnRule("asked again", "retry", "the agent went on with another answer to the same request", _was_asked_again),
    TurnRule("summary", "compaction", "a later history begins with this answer, and nobody replied to it", _summarises),
)
"""The first that applies to a turn decides, before its strand does."""


def lineages(turns: Sequence[Turn]) -> list[Lineage]:
    """One for each turn; `turns[i].index` must be `i`."""
    reading = Reading(turns)
    for strand in reading.session.strands:
        reading.decide(strand, _decided(reading, strand))
    _mark_summaries(reading)
    answers = Answers(reading)
    return [_of_turn(answers, turn, reading.lineages[reading.session.strand_of(turn.index).number]) for turn in turns]


def _decided(reading: Reading, strand: Strand) -> Lineage:
    rule, found = next((rule, found) for rule in RULES if (found := rule.find(reading, strand)) is not None)
    continued = reading.continued[strand.number]
    origin = found.parent
    if rule.name == "forked":
        origin = reading.origin(strand)
    elif rule.name == "continued" and continued is not None:
        origin = continued.old.index
    before = None if origin is None else reading.lineages[reading.session.strand_of(origin).number]
    stays = rule.name in ("main", "forked")
    return Lineage(
        kind=found.kind,
        parent=found.parent,
        depth=(before.depth if before else 0) + (0 if stays else 1),
        label=found.label,
        rule=rule.name,
        main_line=rule.name == "main"
        or (rule.name in ("continued", "forked") and before is not None and before.main_line),
    )


def _mark_summaries(reading: Reading) -> None:
    """A call of its own whose answer a history goes on from was for a summary of the history before."""
    for continued in reading.continued.values():
        if continued is None or continued.source is None:
            continue
        strand = reading.session.strand_of(continued.source.index)
        lineage = reading.lineages[strand.number]
        old = reading.session.strand_of(continued.old.index)
        known = old.before(strand.head.index)
        asked_for = (lineage.rule, lineage.kind) == ("purpose", BranchKind.COMPACTION)
        alone = strand.turns == [continued.source] and lineage.rule in ("continued", "forked")
        if known is not None and (
            asked_for or alone or lineage.kind is BranchKind.AUXILIARY or lineage.rule == "other"
        ):
            reading.lineages[strand.number] = Lineage(
                kind=BranchKind.COMPACTION,
                parent=known.index,
                depth=reading.lineages[old.number].depth + 1,
                label=SUMMARY,
                rule="summary",
                main_line=False,
            )


def _of_turn(answers: Answers, turn: Turn, strand: Lineage) -> Lineage:
    for rule in TURN_RULES:
        found = rule.find(answers, turn)
        if found is not None:
            return Lineage(
                kind=found.kind,
                parent=found.parent,
                depth=strand.depth + (1 if found.kind is BranchKind.COMPACTION else 0),
                label=found.label or strand.label,
                rule=rule.name,
                main_line=False,
            )
    return strand
