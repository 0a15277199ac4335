"""Turns, verdict and stop reason become training samples: the one place that decides what trains.

Pure. One sample per leaf branch; a token that several branches share is trained on in the first of them and is
context in the others. Invariant: sampled = trained + masked + dropped, counted over the session.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec
import numpy as np

from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    FinishReason,
    LogprobKind,
    Sample,
    SessionResult,
    TokenCounts,
    TokenMode,
    Turn,
    unpack_ids,
    unpack_logprobs,
)

Request = tuple[int | None, bytes]
"""What tells a session's requests apart: the turn gone on from, and the ids added to it."""

POLICY: Mapping[BranchKind, BranchPolicy] = {
    BranchKind.MAIN: BranchPolicy.TRAIN,
    BranchKind.SUBAGENT: BranchPolicy.TRAIN,
    BranchKind.COMPACTION: BranchPolicy.TRAIN,
    BranchKind.AUXILIARY: BranchPolicy.TRAIN,
    BranchKind.RETRY: BranchPolicy.TRAIN,
    BranchKind.ABORTED: BranchPolicy.DROP,
}
"""What is done with each kind of branch. ABORTED is dropped: no reward can be due to tokens nobody saw."""


class Branch(msgspec.Struct, frozen=True):
    """One root-to-leaf path of turn indexes."""

    kind: BranchKind
    turns: tuple[int, ...]


def branches(turns: Sequence[Turn]) -> list[Branch]:
    """The session's branches, the main ones first, each in turn order; `turns[i].index` must be `i`.

    A turn that was cut off, or sampled nothing, and was not gone on with ends no branch of what came before it:
    those turns keep a branch of their own, and it gets one of kind ABORTED.
    """
    gone_on = _gone_on(turns)
    used = _used(turns, gone_on)
    found = [
        Branch(_kind(turn, used), _path(turn, turns)) for turn in turns if turn.index not in gone_on and turn.output_ids
    ]
    order = list(BranchKind)
    return sorted(found, key=lambda branch: (order.index(branch.kind), branch.turns[0], -branch.turns[-1]))


def _gone_on(turns: Sequence[Turn]) -> set[int]:
    """The turns with a continuation that sampled something the agent saw, or that has such a continuation."""
    found: set[int] = set()
    for turn in reversed(turns):
        seen = bool(turn.output_ids) and turn.finish is not FinishReason.ABORT
        if turn.parent is not None and (seen or turn.index in found):
            found.add(turn.parent)
    return found


def count_tokens(turns: Sequence[Turn]) -> TokenCounts:
    """Where every sampled token went: trained if any branch trains it, else masked if any keeps it."""
    where: dict[int, BranchPolicy] = {}
    order = list(BranchPolicy)
    for branch in sorted(branches(turns), key=lambda branch: order.index(POLICY[branch.kind])):
        for index in branch.turns:
            where.setdefault(index, POLICY[branch.kind])
    totals = dict.fromkeys(BranchPolicy, 0)
    for turn in turns:
        totals[where.get(turn.index, BranchPolicy.DROP)] += len(turn.output_ids) // 4
    return TokenCounts(
        sampled=sum(totals.values()),
        trained=totals[BranchPolicy.TRAIN],
        masked=totals[BranchPolicy.MASK],
        dropped=totals[BranchPolicy.DROP],
        drift=sum(turn.drift_tokens for turn in turns),
    )


def count_samples(turns: Sequence[Turn]) -> int:
    """How many rows `build_samples` makes, without making them."""
    return len(_kept(turns))


def build_samples(turns: Sequence[Turn], result: SessionResult) -> list[Sample]:
    """The session's training rows. Empty when no turn has ids (a text-only engine)."""
    kept = _kept(turns)
    trained: set[int] = set()
    samples = []
    for row, branch in enumerate(kept):
        fresh = frozenset(branch.turns) - trained if POLICY[branch.kind] is BranchPolicy.TRAIN else frozenset()
        samples.append(_sample(branch, [turns[index] for index in branch.turns], fresh, row, len(kept), result))
        trained |= fresh
    return samples


def _kept(turns: Sequence[Turn]) -> list[Branch]:
    return [branch for branch in branches(turns) if POLICY[branch.kind] is not BranchPolicy.DROP]


def _sample(
    branch: Branch, path: Sequence[Turn], fresh: frozenset[int], row: int, rows: int, result: SessionResult
) -> Sample:
    columns = _Columns()
    for turn in path:
        columns.context(unpack_ids(turn.prompt_delta).tolist())
        if turn.index in fresh:
            columns.sampled(turn)
        else:
            columns.context(unpack_ids(turn.output_ids).tolist())
    versions = [version for version, mask in zip(columns.versions, columns.mask, strict=True) if mask]
    return Sample(
        group_id=result.group_id,
        session_id=result.session_id,
        attempt=result.attempt,
        sample_index=result.sample_index,
        row=row,
        rows=rows,
        kind=branch.kind,
        turns=branch.turns,
        ids=columns.ids,
        loss_mask=columns.mask,
        logprobs=columns.logprobs,
        versions=columns.versions,
        prompt_length=path[0].prompt_length,
        reward=result.verdict.reward if result.verdict else None,
        metrics=result.verdict.metrics if result.verdict else {},
        mode=TokenMode.TOKENS if all(turn.mode is TokenMode.TOKENS for turn in path) else TokenMode.CAPTURE,
        logprob_kind=path[-1].logprob_kind if len({t.logprob_kind for t in path}) == 1 else LogprobKind.NONE,
        stop_reason=result.stop_reason,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        labels=result.labels,
    )


class _Columns:
    """The four equally long columns of a sample while it grows. An engine that tells no log-probabilities
    (LogprobKind.NONE) leaves zeros."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def context(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(self, turn: Turn) -> None:
        ids = unpack_ids(turn.output_ids).tolist()
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += unpack_logprobs(turn.logprobs).tolist() or [0.0] * len(ids)
        versions = np.zeros(len(ids), dtype=np.int64)
        for span in turn.versions:
            versions[span.start : span.end] = span.version
        self.versions += versions.tolist()


def _path(leaf: Turn, turns: Sequence[Turn]) -> tuple[int, ...]:
    path = [leaf.index]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return tuple(reversed(path))


def _kind(leaf: Turn, used: Mapping[Request, int]) -> BranchKind:
    """ABORTED and RETRY describe the leaf; a branch of a conversation that began independently of the session's
    first is a SUBAGENT; everything else is MAIN."""
    if leaf.finish is FinishReason.ABORT:
        return BranchKind.ABORTED
    if used.get(_request(leaf), leaf.index) != leaf.index:
        return BranchKind.RETRY
    return BranchKind.MAIN if leaf.conversation == 0 else BranchKind.SUBAGENT


def _used(turns: Sequence[Turn], gone_on: Container[int]) -> dict[Request, int]:
    """Per request, of the answers that were not cut off, the one that was gone on with, else the last one."""
    used: dict[Request, int] = {}
    for turn in turns:
        request = _request(turn)
        if turn.finish is not FinishReason.ABORT and used.get(request, -1) not in gone_on:
            used[request] = turn.index
    return used


def _request(turn: Turn) -> Request:
    return turn.parent, turn.prompt_delta
