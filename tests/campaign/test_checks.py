"""Each check of the campaign finds the harm that it is made for, and finds nothing in sound data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from campaign.checks import (
    Finding,
    Harm,
    Ledger,
    Told,
    judge_acceptance,
    judge_delivery,
    judge_events,
    judge_pushes,
    judge_reward,
    judge_session,
)
from campaign.engine import LETTERS, Call, digest_of
from campaign.service import TOKENIZER

from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import GroupState, StopReason
from outrider.schemas import EventView, GroupView
from outrider.store.rows import EventKind
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.samples import build_samples, count_session
from outrider.trajectory import (
    FinishReason,
    JoinKind,
    LogprobKind,
    Sample,
    SessionResult,
    Turn,
    TurnTimings,
    Verdict,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from support.samples import changed_sample

PROMPT = [1, 2, 3]
NEXT = [4, 5]
WORDS = ("abc", "def")
_TOKENIZER = Tokenizer.load(TOKENIZER)


def harms(findings: list[Finding]) -> set[Harm]:
    return {finding.harm for finding in findings}


def view(id: str, cursor: int) -> GroupView:
    return GroupView(
        id=id,
        state=GroupState.DONE,
        cancelled=False,
        n=0,
        priority=0,
        created=0.0,
        finished=1.0,
        cursor=cursor,
        labels={},
        sessions=(),
    )


def event(cursor: int, kind: EventKind, attempt: int, **data: Any) -> EventView:
    return EventView(cursor=cursor, at=0.0, kind=kind, group_id="g", session_id="s", data={"attempt": attempt, **data})


def turn(index: int, **changes: Any) -> Turn:
    """Return a turn of a conversation whose replies are WORDS."""
    ids = [_TOKENIZER.encode(letter)[0] for letter in WORDS[index]]
    before = len(PROMPT) + index * (len(ids) + len(NEXT))
    made = Turn(
        index=index,
        parent=index - 1 if index else None,
        join=JoinKind.APPEND if index else JoinKind.ROOT,
        prompt_length=before,
        prompt_delta=pack_ids(NEXT if index else PROMPT),
        output_ids=pack_ids(ids),
        logprobs=pack_logprobs(scripted_logprob(before + at, token) for at, token in enumerate(ids)),
        logprob_kind=LogprobKind.SAMPLING,
        versions=(VersionSpan(0, 0, len(ids)),),
        finish=FinishReason.STOP,
        dialect="chat",
        engine="campaign",
        sampling={},
        timings=TurnTimings(received=0.0, first_token=0.0, finished=0.0),
    )
    return msgspec.structs.replace(made, **changes)


TURNS = [turn(0), turn(1)]


def result(turns: list[Turn], told: str = " ".join(WORDS)) -> SessionResult:
    counts = count_session(turns)
    return SessionResult(
        session_id="s",
        group_id="g",
        sample_index=0,
        attempt=1,
        stop_reason=StopReason.COMPLETED,
        verdict=Verdict(reward=1.0, reason=told),
        turns=len(turns),
        tokens=counts.tokens,
        samples=counts.samples,
    )


def rows(turns: list[Turn]) -> list[Sample]:
    return build_samples(turns, result(turns))


def test_a_key_is_one_group() -> None:
    told = Told(accepted={"a": ["g1", "g1"]}, readers={}, with_callback=frozenset(), pushes={}, taken=frozenset())
    assert judge_acceptance(told) == []
    assert harms(judge_acceptance(msgspec.structs.replace(told, accepted={"a": ["g1", "g2"]}))) == {Harm.DOUBLED}
    assert harms(judge_acceptance(msgspec.structs.replace(told, accepted={"a": []}))) == {Harm.LOST}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([("g1", 1), ("g2", 2)], set()),
        ([("g1", 1)], {Harm.LOST}),
        ([("g1", 1), ("g2", 2), ("g1", 3)], {Harm.DOUBLED}),
        ([("g1", 1), ("g2", 3)], {Harm.LOST}),
        ([("g2", 2), ("g1", 1)], {Harm.LOST}),
    ],
)
def test_a_reader_is_given_each_group_once(given: list[tuple[str, int]], found: set[Harm]) -> None:
    assert harms(judge_delivery("reader", [view(*one) for one in given], {"g1", "g2"})) == found


def test_a_push_is_taken_and_says_what_the_results_say() -> None:
    told = Told(
        accepted={},
        readers={},
        with_callback=frozenset({"g1"}),
        pushes={"g1": [view("g1", 1), view("g1", 1)]},
        taken=frozenset({"g1"}),
    )
    stored = {"g1": view("g1", 1), "g2": view("g2", 2)}
    assert judge_pushes(told, stored) == []
    assert harms(judge_pushes(msgspec.structs.replace(told, taken=frozenset()), stored)) == {Harm.LOST}
    changed = {"g1": [view("g1", 2)]}
    assert harms(judge_pushes(msgspec.structs.replace(told, pushes=changed), stored)) == {Harm.LOST}
    unasked = {**told.pushes, "g2": [view("g2", 2)]}
    assert harms(judge_pushes(msgspec.structs.replace(told, pushes=unasked), stored)) == {Harm.DOUBLED}


DONE = {"stop_reason": "completed", "error": None}
START, RETRY, END = EventKind.SESSION_STATE, EventKind.SESSION_RETRY, EventKind.SESSION_DONE


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([event(1, START, 1), event(2, RETRY, 1), event(3, START, 2), event(4, END, 2, **DONE)], set()),
        ([event(1, START, 1), event(2, START, 2), event(3, START, 1)], {Harm.STALE_WRITE}),
        ([event(1, START, 1), event(2, RETRY, 1), event(3, END, 1, **DONE)], {Harm.STALE_WRITE}),
        ([event(1, RETRY, 1), event(2, END, 1, stop_reason="cancelled", error=None)], set()),
        ([event(1, RETRY, 1), event(2, END, 1, stop_reason="error", error="lease_expired")], set()),
        ([event(1, END, 1, **DONE), event(2, END, 1, **DONE)], {Harm.DOUBLED}),
        ([event(1, EventKind.GROUP_CREATED, 0)], {Harm.DOUBLED}),
    ],
)
def test_the_log_of_events_has_one_end_and_no_late_attempt(events: list[EventView], found: set[Harm]) -> None:
    assert harms(judge_events(events, set())) == found


def test_what_was_sampled_is_in_one_row() -> None:
    (row,) = rows(TURNS)
    assert judge_session(result(TURNS), TURNS, [row]) == []
    assert harms(judge_session(result(TURNS), TURNS, [])) == {Harm.LOST}
    assert harms(judge_session(result(TURNS), TURNS[:1], [row])) == {Harm.LOST}
    assert Harm.DOUBLED in harms(judge_session(result(TURNS), TURNS, [row, msgspec.structs.replace(row, row=1)]))
    other = changed_sample(row, ids=[*row.ids[:-1], row.ids[-1] + 1])
    assert harms(judge_session(result(TURNS), TURNS, [other])) >= {Harm.LOST}
    numbers = changed_sample(row, logprobs=[*row.logprobs[:-1], -9.0])
    assert harms(judge_session(result(TURNS), TURNS, [numbers])) == {Harm.LOST}
    late = msgspec.structs.replace(row, attempt=2)
    assert harms(judge_session(result(TURNS), TURNS, [late])) == {Harm.STALE_WRITE}
    assert harms(judge_session(result(TURNS, told="abc def ghi"), TURNS, [row])) == {Harm.LOST}


def test_the_policy_may_drop_what_the_agent_did_not_use() -> None:
    again = msgspec.structs.replace(TURNS[1], index=2, join=JoinKind.RETRY)
    turns = [*TURNS, again]
    assert judge_session(result(turns), turns, rows(turns)) == []
    cut = [TURNS[0], turn(1, finish=FinishReason.ABORT)]
    assert judge_session(result(cut, told="abc"), cut, rows(cut)) == []


def test_each_turn_has_a_call_of_its_own() -> None:
    first = unpack_ids(TURNS[0].output_ids).tolist()
    prompts = [pack_ids(PROMPT), pack_ids([*PROMPT, *first, *NEXT])]
    calls = [
        Call(session="s-1", prompt=digest_of(unpack_ids(prompt)), ids=unpack_ids(one.output_ids).tolist())
        for prompt, one in zip(prompts, TURNS, strict=True)
    ]
    ledger = Ledger(calls)
    assert [finding for one in TURNS for finding in ledger.match("s-1", one, TURNS)] == []
    assert harms(ledger.match("s-1", TURNS[0], TURNS)) == {Harm.DOUBLED}
    ledger = Ledger(calls)
    assert harms(ledger.match("s-2", TURNS[0], TURNS)) == {Harm.LOST}
    assert harms(ledger.match("s-1", turn(0, output_ids=pack_ids(first[:-1])), TURNS)) == {Harm.LOST}
    part = turn(0, output_ids=pack_ids(first[:-1]), logprobs=TURNS[0].logprobs[:-8], finish=FinishReason.ABORT)
    assert Ledger(calls).match("s-1", part, TURNS) == []
    assert harms(Ledger(calls).match("s-1", turn(0, logprobs=pack_logprobs([-1.0] * 3)), TURNS)) == {Harm.LOST}


def test_a_reply_that_went_on_after_a_cut_is_made_of_several_calls() -> None:
    ids = unpack_ids(TURNS[0].output_ids).tolist()

    def call(prompt: list[int], sampled: list[int]) -> Call:
        return Call(session="s-1", prompt=digest_of(unpack_ids(pack_ids(prompt))), ids=sampled)

    begun, rest = call(PROMPT, [*ids[:1], 9, 9]), call([*PROMPT, *ids[:1]], ids[1:])
    assert Ledger([begun, rest]).match("s-1", TURNS[0], TURNS) == []
    assert harms(Ledger([begun]).match("s-1", TURNS[0], TURNS)) == {Harm.LOST}
    longer = call([*PROMPT, *ids[:1]], [*ids[1:], 9])
    assert harms(Ledger([begun, longer]).match("s-1", TURNS[0], TURNS)) == {Harm.LOST}


def test_an_honest_agent_that_is_graded_has_earned_its_reward() -> None:
    def rewarded(reward: float | None) -> SessionResult:
        verdict = None if reward is None else Verdict(reward=reward)
        return msgspec.structs.replace(result(TURNS), verdict=verdict)

    name = f"{rewarded(0.0).session_id}-{rewarded(0.0).attempt}"
    assert judge_reward(rewarded(1.0), set()) == judge_reward(rewarded(None), set()) == []
    assert harms(judge_reward(rewarded(0.0), {f"{name}1", "other"})) == {Harm.WRONG_ZERO}
    assert judge_reward(rewarded(0.0), {name}) == judge_reward(rewarded(0.0), {f"{name}-graded"}) == []


def test_a_letter_is_a_token() -> None:
    """The campaign's engine and its checks require this."""
    assert all(len(_TOKENIZER.encode(letter)) == 1 for letter in LETTERS)
