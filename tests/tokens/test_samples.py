"""The branches of a session, their kinds, the tokens that train, and the counts."""

from __future__ import annotations

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.samples import POLICY, build_samples, count_session
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    FinishReason,
    LogprobKind,
    Sample,
    TokenMode,
    Verdict,
    VersionSpan,
    pack_ids,
)

from .renderers import family_renderer, small_tokenizer
from .rollout import RESULT, Rollout

IM_END = 2
FIRST = Message(role=Role.USER, content="Hello?")
NEXT = Message(role=Role.USER, content="And?")
OTHER = Message(role=Role.USER, content="Or?")


def ids(text: str) -> list[int]:
    return [*small_tokenizer().encode(text), IM_END]


def begin() -> Rollout:
    return Rollout(family_renderer("qwen3"))


def kinds(rollout: Rollout) -> list[tuple[BranchKind, tuple[int, ...]]]:
    """Kind and turns of every branch: with this policy each branch is a row."""
    rollout.check_samples()
    samples = rollout.check_samples(dict.fromkeys(BranchKind, BranchPolicy.MASK))
    return [(sample.kind, sample.turns) for sample in samples]


def test_nothing_makes_no_samples() -> None:
    assert build_samples([], RESULT) == []
    assert count_session([]).tokens.sampled == 0


def test_an_aborted_last_turn_does_not_take_its_history_with_it() -> None:
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    rollout.answer(rollout.join([FIRST, reply, NEXT]), ids("cut"), finish=FinishReason.ABORT)
    assert kinds(rollout) == [(BranchKind.MAIN, (0,)), (BranchKind.ABORTED, (0, 1))]
    counts = count_session(rollout.turns).tokens
    assert (counts.trained, counts.dropped) == (len(rollout.gave[0]), len(rollout.gave[1]))


def test_a_turn_that_sampled_nothing_does_not_either() -> None:
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    empty = rollout.answer(rollout.join([FIRST, reply, NEXT]), [])
    assert kinds(rollout) == [(BranchKind.MAIN, (0,))]
    rollout.answer(rollout.join([FIRST, reply, NEXT, empty, OTHER]), ids("No."))
    assert kinds(rollout) == [(BranchKind.MAIN, (0, 1, 2))]


def test_an_aborted_turn_alone_makes_no_sample() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), ids("cut"), finish=FinishReason.ABORT)
    assert rollout.check_samples() == []


def test_shared_turns_train_once() -> None:
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    for question in (NEXT, OTHER):
        rollout.answer(rollout.join([FIRST, reply, question]), ids("No."))
    assert kinds(rollout) == [(BranchKind.MAIN, (0, 2)), (BranchKind.MAIN, (0, 1))]
    first, second = rollout.check_samples()
    assert sum(first.loss_mask) == len(rollout.gave[0]) + len(rollout.gave[2])
    assert sum(second.loss_mask) == len(rollout.gave[1])


def test_a_row_may_have_a_reward_of_its_own() -> None:
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    for question in (NEXT, OTHER):
        rollout.answer(rollout.join([FIRST, reply, question]), ids("No."))
    verdict = Verdict(reward=1.0, turns={0: 0.25, 1: -2.0}, rows={1: 0.5})
    first, second = build_samples(rollout.turns, msgspec.structs.replace(RESULT, verdict=verdict))
    assert (first.turns, first.reward, first.turn_rewards) == ((0, 2), 1.0, (0.25, None))
    assert (second.turns, second.reward, second.turn_rewards) == ((0, 1), 0.5, (None, -2.0))
    placed = first.token_rewards()
    assert (placed[first.turn_spans[0][1] - 1], placed[-1], sum(placed)) == (0.25, 1.0, 1.25)
    # A cut in the middle of a turn removes the turn's reward. The row's reward moves to the last token that still
    # trains.
    cut = first.turn_spans[0][1] - 1
    assert first.token_rewards(cut) == [0.0] * (cut - 1) + [1.0]
    assert second.token_rewards()[-1] == -1.5
    masked = msgspec.structs.replace(RESULT, verdict=verdict, policy={BranchKind.MAIN: BranchPolicy.MASK})
    for sample in build_samples(rollout.turns, masked):
        assert sample.reward is None
        assert not any(sample.token_rewards())
        assert set(sample.turn_rewards) == {None}


def test_the_answer_that_was_not_used_is_a_retry() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), ids("No."))
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    assert kinds(rollout) == [(BranchKind.MAIN, (1,)), (BranchKind.RETRY, (0,))]
    rollout.answer(rollout.join([FIRST, reply, NEXT]), ids("Done."))
    assert kinds(rollout) == [(BranchKind.MAIN, (1, 2)), (BranchKind.RETRY, (0,))]


def test_an_answer_that_was_not_used_is_dropped_unless_the_task_says_otherwise() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), ids("No, never."))
    rollout.answer(rollout.join([FIRST]), ids("Yes."))
    assert [sample.turns for sample in rollout.check_samples()] == [(1,)]
    counts, unused = count_session(rollout.turns).tokens, len(rollout.gave[0])
    assert (counts.trained, counts.masked, counts.dropped) == (len(rollout.gave[1]), 0, unused)
    voting = dict(POLICY) | {BranchKind.RETRY: BranchPolicy.TRAIN}
    assert [sum(sample.loss_mask) for sample in rollout.check_samples(voting)] == [counts.trained, unused]


def test_an_earlier_answer_that_was_gone_on_with_is_main() -> None:
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("Yes."))
    retry = rollout.join([FIRST])
    rollout.answer(rollout.join([FIRST, reply, NEXT]), ids("Done."))
    rollout.answer(retry, ids("Late."))
    assert kinds(rollout) == [(BranchKind.MAIN, (0, 1)), (BranchKind.RETRY, (2,))]


def test_a_retry_counts_as_used_only_by_what_was_seen() -> None:
    """Only an aborted call continued turn 0, so the conversation goes on from the retry."""
    rollout = begin()
    reply = rollout.answer(rollout.join([FIRST]), ids("No."))
    rollout.answer(rollout.join([FIRST, reply, NEXT]), ids("cut"), finish=FinishReason.ABORT)
    rollout.answer(rollout.join([FIRST]), ids("Yes."))
    assert kinds(rollout)[:2] == [(BranchKind.MAIN, (2,)), (BranchKind.RETRY, (0,))]


def test_other_conversations_are_subagents_even_after_a_failed_first_call() -> None:
    rollout = begin()
    system = Message(role=Role.SYSTEM, content="You are a helper.")
    for messages in ([FIRST], [system, FIRST]):
        rollout.join(messages)
        reply = rollout.answer(rollout.join(messages), ids("Yes."))
        rollout.answer(rollout.join([*messages, reply, NEXT]), ids("Done."))
    assert kinds(rollout) == [(BranchKind.MAIN, (0, 1)), (BranchKind.SUBAGENT, (2, 3))]


def sample_of(rollout: Rollout, **changes: object) -> Sample:
    turns = [msgspec.structs.replace(turn, **changes) for turn in rollout.turns]
    (sample,) = build_samples(turns, RESULT)
    return sample


def test_a_sample_says_where_it_comes_from() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), ids("Yes."))
    sample = sample_of(rollout)
    assert (sample.reward, sample.min_version, sample.max_version) == (1.0, 3, 4)
    assert (sample.mode, sample.logprob_kind) == (TokenMode.TOKENS, LogprobKind.RAW)
    assert sample_of(rollout, mode=TokenMode.CAPTURE).mode is TokenMode.CAPTURE
    unjudged = build_samples(rollout.turns, msgspec.structs.replace(RESULT, verdict=None))
    assert unjudged[0].reward is None


def test_columns_stay_equally_long_without_logprobs() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), ids("Yes."))
    sample = sample_of(rollout, logprobs=b"", logprob_kind=LogprobKind.NONE)
    assert len(sample.logprobs) == len(sample.ids)
    assert sample.logprob_kind is LogprobKind.NONE


def test_turns_without_ids_make_no_sample() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), [])
    turns = [msgspec.structs.replace(turn, mode=TokenMode.TEXT, prompt_delta=b"") for turn in rollout.turns]
    assert build_samples(turns, RESULT) == []


def test_every_token_keeps_the_version_that_sampled_it() -> None:
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), [300, 301, 302, 303])
    spans = (VersionSpan(7, 0, 1), VersionSpan(9, 1, 4))
    sample = sample_of(rollout, versions=spans, output_ids=pack_ids([300, 301, 302, 303]))
    assert sample.versions[-4:].tolist() == [7, 9, 9, 9]
    assert (sample.min_version, sample.max_version) == (7, 9)


def test_a_version_that_sampled_nothing_is_not_a_rows_oldest() -> None:
    """A server whose weights were replaced before it sampled reports an empty span of the old version. If the span
    counted, samplers would treat the row as too old."""
    rollout = begin()
    rollout.answer(rollout.join([FIRST]), [300, 301])
    spans = (VersionSpan(3, 0, 0), VersionSpan(9, 0, 2), VersionSpan(11, 2, 2))
    sample = sample_of(rollout, versions=spans, output_ids=pack_ids([300, 301]))
    assert [span.version for span in sample.version_spans] == [9]
    assert (sample.min_version, sample.max_version) == (9, 9)
