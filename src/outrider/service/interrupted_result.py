"""The result of a session that was ended from outside: no verdict, but every token it sampled is counted."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import ErrorRecord
from outrider.lifecycle import StopReason
from outrider.spec import TaskSpec
from outrider.store.base import SessionRow
from outrider.tokens.samples import count, policy_of
from outrider.trajectory import SessionResult, Turn


def interrupted_result(
    session: SessionRow,
    reason: StopReason,
    turns: Sequence[Turn],
    *,
    task: TaskSpec | None,
    error: ErrorRecord | None = None,
) -> SessionResult:
    """`session.attempt` names the attempt that `turns` belong to. A `task` that cannot be read has no branches of its
    own, and no labels."""
    policy = {} if task is None else policy_of(task.branches)
    counts = count(turns, policy)
    return SessionResult(
        session_id=session.id,
        group_id=session.group_id,
        sample_index=session.sample_index,
        attempt=session.attempt,
        stop_reason=reason,
        turns=len(turns),
        forks=counts.forks,
        tokens=counts.tokens,
        samples=counts.samples,
        policy=policy,
        ignored=counts.ignored,
        labels={} if task is None else task.labels,
        error=error,
    )
