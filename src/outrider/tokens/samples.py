"""Builds training samples from a session's turns. Only this module decides which tokens are trained.

The samples are a pure function of the stored turns and the session's result, so every call returns the same samples.
The rules, in order:

1. Each turn has a kind, such as main or sub-agent (`branches/classify.py`). Each kind has a policy: train, mask or
   drop.
2. A branch is a path of turns from a root to a leaf. A leaf is a turn that has sampled tokens and is not continued by a
   turn of the same kind and label. For example, if only a call for a summary follows a history, the last turn of the
   history is a leaf. A turn that was cut off or sampled nothing does not count as a continuation, unless a later turn
   continues it.
3. Branches are sorted by kind (main first), then by their first turn, then by their leaf (newest first). So if several
   branches share tokens, the shared tokens are trained in the branch in which the session continued.
4. Each branch becomes a row unless its kind is dropped. A branch of a trained kind is also left out if it is the
   beginning of an earlier row of this kind, because such a branch adds no tokens to train.
5. In a row of a trained kind, the sampled tokens of a turn have mask 1 if the turn is of this kind and no earlier row
   has trained it. All other tokens are context (mask 0). So each trained token has mask 1 in exactly one row.
6. Only rows of a trained kind have a reward, because the reward does not measure the other kinds. A row's reward is
   the verdict's reward for this row, or else for the session. A turn's own reward is in the row that trains the turn's
   tokens.

Invariant: for a session, sampled = trained + masked + dropped tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from outrider.messages import Message, MessageOutline, images_in
from outrider.spec import Branches
from outrider.tokens.branches.classify import MAIN, Lineage, lineages
from outrider.tokens.branches.segments import reached_agent
from outrider.trajectory import (
    BranchKind,
    BranchPolicy,
    GradedTurn,
    LogprobKind,
    Sample,
    SampleImage,
    SessionResult,
    TokenCounts,
    TokenMode,
    Turn,
    TurnOutline,
    VersionSpan,
    path_to,
)

MAX_IGNORED_NAMES = 64
"""Maximum number of ignored request fields that a session counts by name. A limit is needed, because clients choose
some of the names."""
OTHER_IGNORED = "others"
"""The name for the count of all other ignored fields, beyond the MAX_IGNORED_NAMES most frequent."""

Policy = Mapping[BranchKind, BranchPolicy]
AnyTurn = Turn | TurnOutline


def policy_of(branches: Branches) -> dict[BranchKind, BranchPolicy]:
    """Return the policy for each kind of turn, from the task's settings."""
    return {kind: BranchPolicy(getattr(branches, kind.value)) for kind in BranchKind}


POLICY: Policy = policy_of(Branches())
"""The default policy for each kind of turn. Side calls, for example for a title, are dropped, because the task's reward
does not measure them. Calls that may be either work or side calls are trained. Replies that the agent did not use are
dropped, because they cannot have caused a reward: the agent never received them, or used another reply to the same
request."""


class SessionCounts(msgspec.Struct, frozen=True):
    """Counts for one session: its tokens, training rows (`samples`), forks by cause, and turns with each ignored
    request field."""

    tokens: TokenCounts
    samples: int
    forks: dict[str, int]
    ignored: dict[str, int]


def count_session(turns: Sequence[Turn], policy: Policy = POLICY) -> SessionCounts:
    """Return the counts for a session without building its rows. `turns[i].index` must be `i`."""
    lines = lineages(turns)
    rows = _row_leaves(turns, lines, policy)
    in_rows: set[int] = set()
    for leaf in rows:
        _add_path(in_rows, leaf, turns)
    tokens = dict.fromkeys(BranchPolicy, 0)
    for turn in turns:
        trains = policy[lines[turn.index].kind] is BranchPolicy.TRAIN
        untrained = BranchPolicy.MASK if turn.index in in_rows else BranchPolicy.DROP
        tokens[BranchPolicy.TRAIN if trains else untrained] += len(turn.output_ids) // 4
    ignored = Counter(name for turn in turns for name in turn.ignored)
    named = dict(ignored.most_common(MAX_IGNORED_NAMES))
    unnamed = ignored.total() - sum(named.values())
    return SessionCounts(
        tokens=TokenCounts(
            sampled=sum(tokens.values()),
            trained=tokens[BranchPolicy.TRAIN],
            masked=tokens[BranchPolicy.MASK],
            dropped=tokens[BranchPolicy.DROP],
            unsure=sum(len(turn.output_ids) // 4 for turn in turns if lines[turn.index].kind is BranchKind.UNSURE),
            drift=sum(turn.drift_tokens for turn in turns),
        ),
        samples=len(rows),
        forks=dict(Counter(turn.cause.value for turn in turns if turn.cause is not None)),
        ignored=named | ({OTHER_IGNORED: unnamed} if unnamed else {}),
    )


def build_samples(turns: Sequence[Turn], result: SessionResult) -> list[Sample]:
    """Build the training rows of a session. The policy in `result` overrides the defaults (POLICY). If the engine
    returned only text, the turns have no ids, and there are no rows. `turns[i].index` must be `i`."""
    return _samples(turns, lineages(turns), result)


def build_samples_of_conversation(turns: Sequence[TurnOutline], result: SessionResult) -> list[Sample]:
    """Like `build_samples`, but only for sessions for which `is_one_conversation` is True. All turns of such a session
    have the same lineage, so the turns' texts are not needed."""
    return _samples(turns, [MAIN] * len(turns), result)


def _samples(turns: Sequence[AnyTurn], lines: Sequence[Lineage], result: SessionResult) -> list[Sample]:
    policy = {**POLICY, **result.policy}
    rows = _row_leaves(turns, lines, policy)
    trained_in = _trained_in(turns, lines, policy, rows)
    samples = []
    for row, leaf in enumerate(rows):
        path = path_to(leaf, turns)
        trains = frozenset(turn.index for turn in path if trained_in.get(turn.index) == row)
        samples.append(_sample(lines[leaf.index], path, trains, row, len(rows), policy, result))
    return samples


def model_calls(turns: Sequence[Turn], policy: Policy = POLICY) -> tuple[GradedTurn, ...]:
    """Return the turns in the form that evaluators receive. `turns[i].index` must be `i`."""
    lines = lineages(turns)
    trained_in = _trained_in(turns, lines, policy, _row_leaves(turns, lines, policy))
    return tuple(
        GradedTurn(
            index=turn.index,
            parent=turn.parent,
            kind=line.kind,
            label=line.label,
            depth=line.depth,
            row=trained_in.get(turn.index),
            messages=turn.messages,
            reply=turn.reply,
        )
        for turn, line in zip(turns, lines, strict=True)
    )


def _trained_in(
    turns: Sequence[AnyTurn], lines: Sequence[Lineage], policy: Policy, leaves: Sequence[AnyTurn]
) -> dict[int, int]:
    """Return a dictionary from the index of each trained turn to the number of the row that trains its tokens (rule 5
    of the module's docstring)."""
    seen: dict[BranchKind, set[int]] = {kind: set() for kind in BranchKind}
    found = {}
    for row, leaf in enumerate(leaves):
        kind = lines[leaf.index].kind
        if policy[kind] is BranchPolicy.TRAIN:
            for index in _add_path(seen[kind], leaf, turns):
                if lines[index].kind is kind:
                    found[index] = row
    return found


def _row_leaves(turns: Sequence[AnyTurn], lines: Sequence[Lineage], policy: Policy) -> list[AnyTurn]:
    """Return the last turn of each row, in the order of the rows (rules 2 to 4 of the module's docstring)."""
    continued: set[int] = set()
    first_turn = list(range(len(turns)))
    for turn in turns:
        if turn.parent is not None:
            first_turn[turn.index] = first_turn[turn.parent]
    for turn in reversed(turns):
        if turn.parent is not None and (reached_agent(turn) or turn.index in continued):
            own, before = lines[turn.index], lines[turn.parent]
            if own is before or (own.kind, own.label) == (before.kind, before.label):
                continued.add(turn.parent)
    order = {kind: place for place, kind in enumerate(BranchKind)}
    leaves = [turn for turn in turns if turn.output_ids and turn.index not in continued]
    leaves.sort(key=lambda leaf: (order[lines[leaf.index].kind], first_turn[leaf.index], -leaf.index))
    in_rows: dict[BranchKind, set[int]] = {kind: set() for kind in BranchKind}
    rows = []
    for leaf in leaves:
        kind = lines[leaf.index].kind
        is_beginning = policy[kind] is BranchPolicy.TRAIN and leaf.index in in_rows[kind]
        if policy[kind] is not BranchPolicy.DROP and not is_beginning:
            rows.append(leaf)
            _add_path(in_rows[kind], leaf, turns)
    return rows


def _add_path(indexes: set[int], leaf: AnyTurn, turns: Sequence[AnyTurn]) -> list[int]:
    """Add the indexes of the turns on the path to `leaf` to `indexes`, and return those that are new. The walk starts
    at the leaf and stops at the first index that is already in `indexes`, so the time for many branches with a common
    beginning is linear."""
    added = []
    index: int | None = leaf.index
    while index is not None and index not in indexes:
        indexes.add(index)
        added.append(index)
        index = turns[index].parent
    return added


def _sample(
    lineage: Lineage,
    path: Sequence[AnyTurn],
    trains: frozenset[int],
    row: int,
    rows: int,
    policy: Policy,
    result: SessionResult,
) -> Sample:
    columns = _Columns()
    spans = [columns.add(turn, trains=turn.index in trains) for turn in path]
    verdict = result.verdict
    versions = [span.version for span in columns.versions]
    logprob_kinds = {turn.logprob_kind for turn in path}
    due = verdict.turns if verdict else {}
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
        turns=tuple([turn.index for turn in path]),
        packed_ids=b"".join(columns.ids),
        trained=tuple(columns.trained),
        packed_logprobs=b"".join(columns.logprobs),
        version_spans=tuple(columns.versions),
        prompt_length=path[0].prompt_length,
        reward=(
            verdict.rows.get(row, verdict.reward) if verdict and policy[lineage.kind] is BranchPolicy.TRAIN else None
        ),
        metrics=verdict.metrics if verdict else {},
        mode=TokenMode.TOKENS if {turn.mode for turn in path} == {TokenMode.TOKENS} else TokenMode.CAPTURE,
        # A row can name only one kind of log-probability, so a row with several kinds is marked NONE.
        logprob_kind=path[-1].logprob_kind if len(logprob_kinds) == 1 else LogprobKind.NONE,
        stop_reason=result.stop_reason,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        labels=result.labels,
        images=_images(path),
        altered=tuple([turn.index for turn in path if turn.altered]),
        turn_spans=tuple(spans),
        turn_rewards=tuple(
            [due.get(turn.index) if turn.index in trains and turn.output_ids else None for turn in path]
            if due
            else [None] * len(path)
        ),
    )


def _images(path: Sequence[AnyTurn]) -> tuple[SampleImage, ...]:
    found = []
    position = 0
    for turn in path:
        messages: Sequence[Message | MessageOutline] = turn.messages
        places = iter(turn.images)
        for at, message in enumerate(messages, position):
            if message.parts:  # most messages have no images
                for image in images_in(message):
                    place = next(places, None)
                    found.append(
                        SampleImage(
                            turn=turn.index,
                            message=at,
                            digest=image.digest,
                            media_type=image.media_type,
                            size=image.size,
                            url=image.url,
                            span=(place.start, place.start + place.length) if place is not None else None,
                            grid=place.grid if place is not None else None,
                        )
                    )
        position += len(turn.messages) + 1  # one more position for the turn's reply
    return tuple(found)


class _Columns:
    """Collects the tokens of a sample, in the packed form of `Sample`. Ids are never unpacked, because a row may have a
    hundred thousand of them, most of them context."""

    def __init__(self) -> None:
        self.length = 0
        self.ids: list[bytes] = []
        self.trained: list[tuple[int, int]] = []
        self.logprobs: list[bytes] = []
        self.versions: list[VersionSpan] = []

    def add(self, turn: AnyTurn, *, trains: bool) -> tuple[int, int]:
        """Add a turn, and return the start and end of its sampled tokens. If a trained turn has no log-probabilities
        (LogprobKind.NONE) or no versions, they are recorded as 0."""
        output = turn.output_ids
        self.ids += (turn.prompt_delta, output)
        count = len(output) // 4
        start = self.length + len(turn.prompt_delta) // 4
        end = self.length = start + count
        if trains and count:
            trained, versions = self.trained, self.versions
            if trained and trained[-1][1] == start:
                trained[-1] = trained[-1][0], end
            else:
                trained.append((start, end))
            self.logprobs.append(turn.logprobs or bytes(8 * count))
            for span in turn.versions or (VersionSpan(0, 0, count),):
                if span.end <= span.start:
                    continue  # an engine may report a version for an empty span
                begin = start + span.start
                if versions and versions[-1].end == begin and versions[-1].version == span.version:
                    begin = versions.pop().start
                versions.append(VersionSpan(span.version, begin, start + span.end))
        return start, end
