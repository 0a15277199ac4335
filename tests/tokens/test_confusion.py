"""Compares the kinds that Outrider decides with the true uses of the answers in a corpus of sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from outrider.sessions.transcript import transcript
from outrider.tokens.branches.classify import lineages
from outrider.tokens.samples import POLICY
from outrider.trajectory import BranchKind, BranchPolicy, Turn

from .conversations import CORPUS, Session, Use, played

PAGE = Path(__file__).parents[2] / "docs" / "branches.md"
BEGIN, END = "<!-- Made by tests/tokens/test_confusion.py. -->", "<!-- The end of what the test makes. -->"
WORK = (Use.MAIN, Use.HELPER, Use.SUMMARY)
"""Uses whose tokens must train."""


def kinds(session: Session) -> list[BranchKind]:
    return [line.kind for line in lineages(session.turns)]


def mistakes(session: Session, name: str) -> Iterator[str]:
    """Yield the turns whose kind contradicts their use, and the turns that continue from a summary but have another
    parent."""
    conversation = CORPUS[name]
    policy = {**POLICY, **conversation.policy}
    lines = lineages(session.turns)
    for turn, use, line in zip(session.turns, session.uses, lines, strict=True):
        shown = f"turn {turn.index}: {use}, but {line.kind} by the rule '{line.rule}' {line.label}"
        if use in WORK and policy[line.kind] is not BranchPolicy.TRAIN:
            yield f"{shown}: {tokens(turn)} tokens do not train"
        if use is Use.SIDE and line.kind is BranchKind.MAIN:
            yield f"{shown}: it is no work"
        if use in (Use.UNUSED, Use.CUT) and policy[line.kind] is BranchPolicy.TRAIN:
            yield f"{shown}: the program never used it"
        if use is Use.MAIN and conversation.one_history and line.kind is not BranchKind.MAIN:
            yield f"{shown}: it is in the same history as the others"
        if line.kind is BranchKind.COMPACTION and Use.SUMMARY not in session.uses and not conversation.replaces:
            yield f"{shown}: nothing was summed up or cut"
    for index, summaries in session.continues.items():
        if summaries and lines[index].parent not in summaries:
            yield f"turn {index} continues from the summary of turn {summaries[-1]}, not from {lines[index].parent}"


def tokens(turn: Turn) -> int:
    return len(turn.output_ids) // 4


def path(session: Session, index: int | None) -> Iterator[str]:
    """Yield the texts of the messages on the path to a turn, the newest first."""
    while index is not None:
        turn = session.turns[index]
        assert turn.reply is not None
        yield turn.reply.content
        yield from (message.content for message in reversed(turn.messages))
        index = turn.parent


@pytest.mark.parametrize("name", CORPUS)
def test_what_was_used_trains(name: str) -> None:
    session = played(name)
    session.rollout.check_samples()
    if found := list(mistakes(session, name)):
        pytest.fail("\n".join(found))


@pytest.mark.parametrize("name", [name for name in CORPUS if CORPUS[name].has_transcript])
def test_an_evaluator_reads_the_conversation_that_does_the_work(name: str) -> None:
    session = played(name)
    read = [message.content for message in transcript(session.turns)]
    assert read == [*path(session, session.transcript_turn)][::-1]


DECLARED = {
    Use.MAIN: BranchKind.MAIN,
    Use.HELPER: BranchKind.SUBAGENT,
    Use.SUMMARY: BranchKind.COMPACTION,
    Use.SIDE: BranchKind.AUXILIARY,
}


@pytest.mark.parametrize("name", CORPUS)
def test_declarations_settle_what_the_rules_can_only_guess(name: str) -> None:
    session = played(name)
    turns = [
        msgspec.structs.replace(turn, declared=DECLARED.get(use), declared_label="")
        for turn, use in zip(session.turns, session.uses, strict=True)
    ]
    lines = lineages(turns)
    unlike = [
        f"turn {turn.index}: {line.kind} by the rule '{line.rule}'"
        for turn, line in zip(turns, lines, strict=True)
        if turn.declared not in (None, line.kind) and line.kind is not BranchKind.RETRY
    ]
    assert not unlike
    newest = turns[session.transcript_turn]
    assert lines[newest.index].main_line or lines[newest.index].kind is BranchKind.RETRY
    read = [message.content for message in transcript(turns)]
    assert read == [*path(session, session.transcript_turn)][::-1]


def test_the_page_has_the_confusion_matrix() -> None:
    text = PAGE.read_text("utf-8")
    made = "\n".join(matrix())
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == made, f"{PAGE.name} must have:\n\n{BEGIN}\n\n{made}\n\n{END}\n"


def matrix() -> Iterator[str]:
    """Yield the lines of the confusion matrix over all conversations: turns, and their sampled tokens in brackets."""
    turns: Counter[tuple[Use, BranchKind]] = Counter()
    sampled: Counter[tuple[Use, BranchKind]] = Counter()
    trained: Counter[Use] = Counter()
    for name in CORPUS:
        session, policy = played(name), {**POLICY, **CORPUS[name].policy}
        for turn, use, kind in zip(session.turns, session.uses, kinds(session), strict=True):
            turns[use, kind] += 1
            sampled[use, kind] += tokens(turn)
            if policy[kind] is BranchPolicy.TRAIN:
                trained[use] += tokens(turn)
    yield f"| True use | {' | '.join(f'`{kind.value}`' for kind in BranchKind)} | Trained |"
    yield f"|---|{'---|' * (len(BranchKind) + 1)}"
    for use in Use:
        cells = [f"{turns[use, kind]} ({sampled[use, kind]:,})" if turns[use, kind] else "" for kind in BranchKind]
        total = sum(sampled[use, kind] for kind in BranchKind)
        yield f"| {use.value} | {' | '.join(cells)} | {trained[use]:,} of {total:,} |"
