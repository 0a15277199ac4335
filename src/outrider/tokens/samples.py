"""Turns, verdict and stop reason become training samples: the one place that decides what trains.

Pure. One sample per leaf branch that has something to train, or is masked; a turn's tokens train in the first row of
its own kind that has them, where the policy for that kind says so, and are context in others. Invariant: sampled =
trained + masked + dropped, over the session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from outrider.messages import images_in
from outrider.spec import Branches
from outrider.tokens.branches.classify import Lineage, lineages
from outrider.tokens.branches.segments import reached_agent
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    LogprobKind,
    Sample,
    SampleImage,
    SessionResult,
    TokenCounts,
    TokenMode,
    Turn,
    unpack_ids,
    unpack_logprobs,
)

MAX_IGNORED = 64
"""So many names of what had no effect are counted for a session; the others are counted together."""
OTHERS = "others"

Policy = Mapping[BranchKind, BranchPolicy]


def policy_of(branches: Branches) -> dict[BranchKind, BranchPolicy]:
    """The task's choice, as a table of every kind."""
    return {kind: BranchPolicy(getattr(branches, kind.value)) for kind in BranchKind}


POLICY: Policy = policy_of(Branches())
"""What is done with each kind of branch unless the task says otherwise. Side calls are dropped, as the task's reward
says nothing about a title; and so are answers that were cut off, or asked for again and not gone on with, as no reward
can be due to tokens that nobody used."""


class Branch(msgspec.Struct, frozen=True):
    """One root-to-leaf path of turn indexes, and what its leaf was for."""

    kind: BranchKind
    turns: tuple[int, ...]
    lineage: Lineage


def branches(turns: Sequence[Turn]) -> list[Branch]:
    """The session's branches, the main ones first, each in turn order; `turns[i].index` must be `i`.

    A turn ends a branch unless one that was for the same went on from it: what only a summary, or a call that was cut
    off, or one that sampled nothing followed keeps a branch of its own.
    """
    lines = lineages(turns)
    return [
        Branch(lines[leaf.index].kind, tuple(turn.index for turn in _path(leaf, turns)), lines[leaf.index])
        for leaf in _leaves(turns, lines)
    ]


def _leaves(turns: Sequence[Turn], lines: Sequence[Lineage]) -> list[Turn]:
    """The turns that end a branch, in the order of their branches."""
    gone_on = _gone_on(turns, lines)
    first = list(range(len(turns)))
    for turn in turns:
        if turn.parent is not None:
            first[turn.index] = first[turn.parent]
    order = {kind: place for place, kind in enumerate(BranchKind)}
    found = [turn for turn in turns if turn.index not in gone_on and turn.output_ids]
    return sorted(found, key=lambda leaf: (order[lines[leaf.index].kind], first[leaf.index], -leaf.index))


def _gone_on(turns: Sequence[Turn], lines: Sequence[Lineage]) -> set[int]:
    """The turns with a continuation that was for the same, and sampled something the agent saw or has such a
    continuation itself."""
    found: set[int] = set()
    for turn in reversed(turns):
        if turn.parent is not None and (reached_agent(turn) or turn.index in found):
            own, before = lines[turn.index], lines[turn.parent]
            if (own.kind, own.label) == (before.kind, before.label):
                found.add(turn.parent)
    return found


class Counts(msgspec.Struct, frozen=True):
    """What a session's turns come to: its tokens, its rows, its forks by cause, and what had no effect by name."""

    tokens: TokenCounts
    samples: int
    forks: dict[str, int]
    ignored: dict[str, int]


def count(turns: Sequence[Turn], policy: Policy = POLICY) -> Counts:
    """All of it at once, without making the rows."""
    lines = lineages(turns)
    kept = _kept(turns, lines, policy)
    forks = Counter(turn.cause.value for turn in turns if turn.cause is not None)
    return Counts(_count_tokens(turns, lines, kept, policy), len(kept), dict(forks), _ignored(turns))


def _ignored(turns: Sequence[Turn]) -> dict[str, int]:
    """In how many turns each thing had no effect. Names are partly the client's: the rarest of too many are one."""
    counted = Counter(name for turn in turns for name in turn.ignored)
    shown = dict(counted.most_common(MAX_IGNORED))
    rest = counted.total() - sum(shown.values())
    return shown | ({OTHERS: rest} if rest else {})


def count_tokens(turns: Sequence[Turn], policy: Policy = POLICY) -> TokenCounts:
    """Where every sampled token went."""
    return count(turns, policy).tokens


def count_samples(turns: Sequence[Turn], policy: Policy = POLICY) -> int:
    """How many rows `build_samples` makes."""
    return count(turns, policy).samples


def _count_tokens(turns: Sequence[Turn], lines: Sequence[Lineage], kept: Sequence[Turn], policy: Policy) -> TokenCounts:
    """Trained or not, by its turn's kind; what does not train is masked if any row has it, else dropped."""
    held: set[int] = set()
    for leaf in kept:
        _add_path(held, leaf, turns)
    totals = dict.fromkeys(BranchPolicy, 0)
    for turn in turns:
        trains = policy[lines[turn.index].kind] is BranchPolicy.TRAIN
        where = BranchPolicy.MASK if turn.index in held else BranchPolicy.DROP
        totals[BranchPolicy.TRAIN if trains else where] += len(turn.output_ids) // 4
    return TokenCounts(
        sampled=sum(totals.values()),
        trained=totals[BranchPolicy.TRAIN],
        masked=totals[BranchPolicy.MASK],
        dropped=totals[BranchPolicy.DROP],
        drift=sum(turn.drift_tokens for turn in turns),
    )


def build_samples(turns: Sequence[Turn], result: SessionResult) -> list[Sample]:
    """The session's training rows, by the result's policy. Empty when no turn has ids (a text-only engine)."""
    lines = lineages(turns)
    policy = {**POLICY, **result.policy}
    kept = _kept(turns, lines, policy)
    trained: set[int] = set()
    samples = []
    for row, leaf in enumerate(kept):
        path, kind = _path(leaf, turns), lines[leaf.index].kind
        same = (turn.index for turn in path if lines[turn.index].kind is kind)
        fresh = frozenset(same) - trained if policy[kind] is BranchPolicy.TRAIN else frozenset()
        samples.append(_sample(lines[leaf.index], path, fresh, row, len(kept), result))
        trained |= fresh
    return samples


def _kept(turns: Sequence[Turn], lines: Sequence[Lineage], policy: Policy) -> list[Turn]:
    """The leaves of the branches that are rows. A branch of a kind that trains is none if it is the beginning of a
    longer one of its kind: nothing in it would train."""
    seen: dict[BranchKind, set[int]] = {kind: set() for kind in BranchKind}
    kept = []
    for leaf in _leaves(turns, lines):
        kind = lines[leaf.index].kind
        repeats = policy[kind] is BranchPolicy.TRAIN and leaf.index in seen[kind]
        if policy[kind] is not BranchPolicy.DROP and not repeats:
            kept.append(leaf)
            _add_path(seen[kind], leaf, turns)
    return kept


def _add_path(seen: set[int], leaf: Turn, turns: Sequence[Turn]) -> None:
    """Add the turns from the beginning to the leaf to those of other paths."""
    index: int | None = leaf.index
    while index is not None and index not in seen:
        seen.add(index)
        index = turns[index].parent


def _sample(
    lineage: Lineage, path: Sequence[Turn], fresh: frozenset[int], row: int, rows: int, result: SessionResult
) -> Sample:
    columns = _Columns()
    for turn in path:
        columns.context(unpack_ids(turn.prompt_delta).tolist())
        if turn.index in fresh:
            columns.sampled(turn)
        else:
            columns.context(unpack_ids(turn.output_ids).tolist())
    policy = {**POLICY, **result.policy}[lineage.kind]
    versions = [version for version, mask in zip(columns.versions, columns.mask, strict=True) if mask]
    return Sample(
        group_id=result.group_id,
        session_id=result.session_id,
        attempt=result.attempt,
        sample_index=result.sample_index,
        row=row,
        rows=rows,
        kind=lineage.kind,
        parent=lineage.parent,
        depth=lineage.depth,
        label=lineage.label,
        turns=tuple(turn.index for turn in path),
        ids=columns.ids,
        loss_mask=columns.mask,
        logprobs=columns.logprobs,
        versions=columns.versions,
        prompt_length=path[0].prompt_length,
        reward=result.verdict.reward if result.verdict and policy is BranchPolicy.TRAIN else None,
        metrics=result.verdict.metrics if result.verdict else {},
        mode=TokenMode.TOKENS if all(turn.mode is TokenMode.TOKENS for turn in path) else TokenMode.CAPTURE,
        logprob_kind=path[-1].logprob_kind if len({t.logprob_kind for t in path}) == 1 else LogprobKind.NONE,
        stop_reason=result.stop_reason,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        labels=result.labels,
        images=_images(path),
        altered=tuple([turn.index for turn in path if turn.altered]),
    )


def _images(path: Sequence[Turn]) -> tuple[SampleImage, ...]:
    """Those that the turns' messages show."""
    found = []
    position = 0
    for turn in path:
        for at, message in enumerate(turn.messages, position):
            found += [
                SampleImage(
                    turn=turn.index,
                    message=at,
                    digest=image.digest,
                    media_type=image.media_type,
                    size=image.size,
                    url=image.url,
                )
                for image in images_in(message)
            ]
        position += len(turn.messages) + 1
    return tuple(found)


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


def _path(leaf: Turn, turns: Sequence[Turn]) -> list[Turn]:
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    return path[::-1]
