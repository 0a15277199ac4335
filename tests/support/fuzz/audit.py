"""Compares a session's turns and rows with the engine's own record: no token is missing, added, or labelled with a
wrong version.

Independent of the dialect. Invariant: only the engine's record, the stored turns, and the rows made of the turns are
compared. The token tree is not used.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import StopReason
from outrider.tokens.samples import POLICY, build_samples, count_session
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    FinishReason,
    JoinKind,
    Sample,
    SessionResult,
    TokenCounts,
    Turn,
    Verdict,
    unpack_ids,
)
from support.fuzz.speaker import check
from support.recording_engine import Given


class Audit(msgspec.Struct, frozen=True):
    """The result of a session: its counts of tokens and samples, how its requests were joined, and the kinds of its
    samples."""

    tokens: TokenCounts
    samples: int
    joins: Counter[str]
    kinds: Counter[str]


def audited(turns: Sequence[Turn], given: Sequence[Given], dice: random.Random) -> Audit:
    """Check a session and return its result. Raises Violation."""
    contexts = _contexts(turns)
    _check_turns(turns, contexts)
    _check_generations(turns, contexts, given)
    result = _result(dice)
    policy = {**POLICY, **result.policy}
    counts = count_session(turns, policy)
    samples = build_samples(turns, result)
    check(len(samples) == counts.samples, "there are not as many samples as counted")
    _check_samples(samples, turns, contexts, counts.tokens, policy)
    return Audit(
        counts.tokens,
        len(samples),
        Counter(turn.join.value for turn in turns),
        Counter(sample.kind.value for sample in samples),
    )


def _contexts(turns: Sequence[Turn]) -> list[bytes]:
    """Return the whole prompt of each turn, packed."""
    contexts: list[bytes] = []
    for turn in turns:
        before = b"" if turn.parent is None else contexts[turn.parent] + turns[turn.parent].output_ids
        contexts.append(before + turn.prompt_delta)
    return contexts


def _check_turns(turns: Sequence[Turn], contexts: Sequence[bytes]) -> None:
    for index, (turn, context) in enumerate(zip(turns, contexts, strict=True)):
        sampled = len(turn.output_ids) // 4
        check(turn.index == index, f"turn {index} has the index {turn.index}")
        check(len(context) // 4 == turn.prompt_length, f"turn {index}: prompt_length is not the prompt's")
        check(len(turn.logprobs) // 8 == sampled, f"turn {index}: not as many log-probabilities as tokens")
        check(turn.drift_tokens == 0, f"turn {index} drifts by {turn.drift_tokens}")
        check(turn.join is not JoinKind.APPEND or turn.parent is not None, f"turn {index} appends to nothing")
        check((turn.cause is not None) == (turn.join is JoinKind.FORK), f"turn {index}: {turn.join} for {turn.cause}")
        spans = [(span.start, span.end) for span in turn.versions]
        check(not sampled or spans == [(0, sampled)], f"turn {index}: versions span {spans}")


def _check_generations(turns: Sequence[Turn], contexts: Sequence[bytes], given: Sequence[Given]) -> None:
    """Check that each generation is one turn, to the last token. The version is checked only for generations that were
    not cut, because an engine sends the version with the last chunk."""
    recorded = Counter((context, turn.output_ids, turn.logprobs) for turn, context in zip(turns, contexts, strict=True))
    sampled = [one for one in given if one.sampled or one.finish is not None]
    gave = Counter(one.packed() for one in sampled)
    check(not recorded - gave, f"{(recorded - gave).total()} turns are not what the engine gave")
    check(not gave - recorded, f"{(gave - recorded).total()} generations are in no turn")
    versions = {(*one.packed(), one.version) for one in sampled}
    for turn, context in zip(turns, contexts, strict=True):
        if turn.finish is not FinishReason.ABORT and turn.versions:
            told = (context, turn.output_ids, turn.logprobs, turn.versions[0].version)
            check(told in versions, f"turn {turn.index}: a version that did not sample it")


def _result(dice: random.Random) -> SessionResult:
    policy = dice.choice(({}, {}, dict.fromkeys(BranchKind, BranchPolicy.TRAIN), None))
    if policy is None:
        policy = {kind: dice.choice(tuple(BranchPolicy)) for kind in BranchKind}
    return SessionResult(
        session_id="s",
        group_id="g",
        sample_index=0,
        attempt=1,
        stop_reason=StopReason.COMPLETED,
        verdict=Verdict(reward=1.0),
        policy=policy,
    )


def _check_samples(
    samples: Sequence[Sample],
    turns: Sequence[Turn],
    contexts: Sequence[bytes],
    tokens: TokenCounts,
    policy: dict[BranchKind, BranchPolicy],
) -> None:
    trained: Counter[int] = Counter()
    held: set[int] = set()
    for sample in samples:
        check(policy[sample.kind] is not BranchPolicy.DROP, f"row {sample.row} is of a kind that is dropped")
        check((sample.reward is not None) == (policy[sample.kind] is BranchPolicy.TRAIN), "a reward where none is due")
        held |= set(sample.turns)
        trained.update(_trained_turns(sample, turns, contexts))
    sizes = [len(turn.output_ids) // 4 for turn in turns]
    check(all(times == 1 for times in trained.values()), "tokens are trained on twice")
    check(tokens.drift == 0, "tokens drift")
    check(tokens.sampled == sum(sizes), "sampled is not the sum of the turns")
    check(tokens.trained == sum(sizes[index] for index in trained), "trained is not what the rows train on")
    masked = sum(sizes[index] for index in held - trained.keys())
    check(tokens.masked == masked, f"masked is {tokens.masked}, the rows mask {masked}")
    check(tokens.sampled == tokens.trained + tokens.masked + tokens.dropped, "the counts do not add up")


def _trained_turns(sample: Sample, turns: Sequence[Turn], contexts: Sequence[bytes]) -> list[int]:
    """Return the turns that a row trains on. Checks that the row trains on whole turns only, and on no other tokens."""
    last = turns[sample.turns[-1]]
    ids = unpack_ids(contexts[last.index] + last.output_ids).tolist()
    check(sample.ids.tolist() == ids, f"row {sample.row} has other ids than its turns")
    columns = (sample.loss_mask, sample.logprobs, sample.versions)
    check(all(len(column) == len(ids) for column in columns), f"row {sample.row}: columns of unequal length")
    expected = [0] * len(ids)
    found = []
    for index in sample.turns:
        start = turns[index].prompt_length
        stop = start + len(turns[index].output_ids) // 4
        if start < stop and sample.loss_mask[start]:
            found.append(index)
            expected[start:stop] = [1] * (stop - start)
            version = turns[index].versions[0].version
            check(set(sample.versions[start:stop]) == {version}, f"row {sample.row}: a wrong version")
    check(sample.loss_mask.tolist() == expected, f"row {sample.row} trains on parts of turns, or on context")
    for position, masked in enumerate(sample.loss_mask):
        told = scripted_logprob(position, ids[position]) if masked else 0.0
        check(sample.logprobs[position] == told, f"row {sample.row}: another token's log-probability at {position}")
    return found
