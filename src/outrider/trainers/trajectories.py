"""Selects the rows of a finished group that a trainer may train on, and cuts them to `max_row_tokens`.

Nothing here awaits or depends on a trainer. Invariant: the `Trajectory` of a session without a verdict, or without a
token to train on, has an error and no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from outrider.errors import EngineError, EvaluatorError, HarnessError, OutriderError, ServiceError
from outrider.errors import error_from as raised_by
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView, SessionView
from outrider.trainers.shared_settings import BridgeSettings, refuse_images
from outrider.trajectory import BranchKind, LogprobKind, Sample, SessionResult

ENDED_BY_A_LIMIT = frozenset(
    {StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW, StopReason.AGENT_TIMEOUT}
)
"""Stop reasons of sessions that were ended by a limit. Trainers call such trajectories truncated."""


@dataclass(frozen=True)
class TrainingRow:
    """A training row with a reward, cut to `max_row_tokens`. `ids`, `mask`, `logprobs` and `versions` have equal
    length, and at least one token has mask 1.

    start: the number of ids before the first sampled id.
    cut: the number of trained tokens that were cut off.
    sample: the whole row.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    start: int
    cut: int
    sample: Sample

    @property
    def reward(self) -> float:
        assert self.sample.reward is not None
        return self.sample.reward

    def trained_versions(self) -> list[int]:
        """Return the distinct policy versions of the trained tokens, in the order in which they first occur."""
        pairs = zip(self.versions, self.mask, strict=True)
        return list(dict.fromkeys(version for version, trains in pairs if trains))


@dataclass(frozen=True)
class Trajectory:
    """A finished session. It has `rows` to train on, with the main conversation's row first, or an `error` if there are
    no such rows."""

    session: SessionView
    rows: list[TrainingRow]
    error: OutriderError | None

    @property
    def result(self) -> SessionResult:
        assert self.session.result is not None
        return self.session.result

    @property
    def reward(self) -> float:
        assert self.result.verdict is not None
        return self.result.verdict.reward

    @property
    def truncated(self) -> bool:
        return self.result.stop_reason in ENDED_BY_A_LIMIT or any(row.cut for row in self.rows)

    @property
    def seconds(self) -> float:
        """The time that the agent ran, in seconds."""
        return self.result.seconds.run


def trajectories_of(
    group: GroupView, settings: BridgeSettings, *, logprobs: bool, images: bool = False
) -> list[Trajectory]:
    """Return the sessions of a group in order. The group must have been requested with its samples. With `logprobs`, a
    session gets an error if one of its rows has no log-probabilities. Without `images`, a session gets an error if one
    of its rows has images."""
    found = []
    for session in group.sessions:
        samples = [sample for sample in group.samples or () if sample.session_id == session.id]
        try:
            found.append(Trajectory(session, _rows_of(session, samples, settings, logprobs, images), None))
        except OutriderError as error:
            found.append(Trajectory(session, [], error))
    return found


def left_out_of(group: GroupView, trajectory: Trajectory) -> list[Sample]:
    """Return those rows of a session that have trained tokens but are not in `trajectory.rows`. The settings or the
    trainer exclude them."""
    kept = {row.sample.row for row in trajectory.rows}
    return [
        sample
        for sample in group.samples or ()
        if sample.session_id == trajectory.session.id
        and sample.row not in kept
        and sample.reward is not None
        and sample.trained
    ]


def chosen_metrics(trajectory: Trajectory, settings: BridgeSettings) -> dict[str, float]:
    """Return those of the verdict's metrics that the setting `metrics` names. Raises EvaluatorError if the verdict
    lacks a named metric. Trainers put metrics in columns, so every row must have all named metrics."""
    verdict = trajectory.result.verdict
    assert verdict is not None
    for name in settings.metrics:
        if name not in verdict.metrics:
            raise EvaluatorError(
                f"the verdict of session {trajectory.session.id} has no metric {name!r}, only"
                f" {', '.join(sorted(verdict.metrics)) or 'the reward'}",
                hint="make the evaluator report this metric, or take it out of the bridge's setting `metrics`",
            )
    return {name: float(verdict.metrics[name]) for name in settings.metrics}


def _rows_of(
    session: SessionView, samples: Sequence[Sample], settings: BridgeSettings, logprobs: bool, images: bool
) -> list[TrainingRow]:
    result = session.result
    if result is None:
        raise ServiceError(f"session {session.id} is {session.state}, not done")
    if result.error is not None:
        raise raised_by(msgspec.structs.replace(result.error, message=f"session {session.id}: {result.error.message}"))
    if result.verdict is None:
        kind = ServiceError if result.stop_reason is StopReason.CANCELLED else HarnessError
        raise kind(f"session {session.id} ended with {result.stop_reason} and was not graded")
    train = [sample for sample in samples if sample.reward is not None]
    if settings.rows == "main":
        train = [sample for sample in train if sample.kind is BranchKind.MAIN][:1]
    rows = [_row(sample, settings.max_row_tokens, logprobs, images) for sample in train]
    rows = [row for row in rows if any(row.mask)]
    if not rows:
        raise EngineError(
            f"session {session.id} ({result.stop_reason}) has no token to train on in {len(samples)} rows",
            hint=f"see `outrider show {session.id}`; the engine must report token ids, and the session's prompt must be"
            " shorter than max_row_tokens",
        )
    return rows


def _row(sample: Sample, longest: int | None, logprobs: bool, images: bool) -> TrainingRow:
    if not images:
        refuse_images(sample.images, f"session {sample.session_id}", field="task")
    if logprobs and sample.logprob_kind is LogprobKind.NONE:
        raise EngineError(
            f"session {sample.session_id} has no log-probabilities, and the trainer asks for them",
            hint="use an engine that reports them, or turn off the trainer's off-policy correction",
        )
    return TrainingRow(
        ids=sample.ids[:longest].tolist(),
        mask=sample.loss_mask[:longest].tolist(),
        logprobs=sample.logprobs[:longest].tolist(),
        versions=sample.versions[:longest].tolist(),
        start=sample.prompt_length,
        cut=int(sample.loss_mask[longest:].sum()) if longest is not None else 0,
        sample=sample,
    )
