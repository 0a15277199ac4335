"""Samples for the tests of the bridges."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import GroupView, SessionView
from outrider.trajectory import BranchKind, LogprobKind, Sample, SessionResult, StageSeconds, TokenMode, Verdict
from support.samples import changed_sample, make_sample

ROW = make_sample(
    group_id="g-1",
    session_id="s-1",
    attempt=1,
    sample_index=0,
    row=0,
    rows=1,
    kind=BranchKind.MAIN,
    turns=(0, 1),
    ids=[10, 11, 12, 20, 21, 13, 14, 22, 23, 24],
    loss_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1, 1],
    logprobs=[0.0, 0.0, 0.0, -0.5, -1.25, 0.0, 0.0, -2.5, -0.125, -3.0],
    versions=[-1, -1, -1, 4, 4, -1, -1, 4, 5, 6],
    prompt_length=3,
    reward=0.75,
    metrics={"tests": 3.0},
    mode=TokenMode.TOKENS,
    logprob_kind=LogprobKind.SAMPLING,
    stop_reason=StopReason.COMPLETED,
    min_version=4,
    max_version=6,
)
"""A row of two turns: three ids of the prompt, two sampled ids, two ids between the turns, three sampled ids."""


def row(**changes: Any) -> Sample:
    return changed_sample(ROW, **changes)


def group(*samples: Sample, **changes: Any) -> GroupView:
    """Return a group of one session with `samples`. `changes` are fields of the session's result."""
    result = SessionResult(
        session_id="s-1",
        group_id="g-1",
        sample_index=0,
        attempt=1,
        stop_reason=StopReason.COMPLETED,
        verdict=Verdict(reward=0.75, metrics={"tests": 3.0}),
        seconds=StageSeconds(run=2.0, eval=0.5),
    )
    session = SessionView(
        id="s-1",
        group_id="g-1",
        sample_index=0,
        state=SessionState.DONE,
        attempt=1,
        node="local",
        created=0.0,
        updated=1.0,
        last_error=None,
        result=msgspec.structs.replace(result, **changes),
    )
    return GroupView(
        id="g-1",
        state=GroupState.DONE,
        cancelled=False,
        n=1,
        priority=0,
        created=0.0,
        finished=1.0,
        cursor=1,
        labels={},
        sessions=(session,),
        samples=samples,
    )
