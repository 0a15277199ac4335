"""The result of a session that was ended from outside: no verdict, but every token it sampled is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.lifecycle import StopReason
from outrider.store.base import SessionRow
from outrider.tokens.samples import count_samples, count_tokens
from outrider.trajectory import SessionResult, Turn


def interrupted_result(
    session: SessionRow, reason: StopReason, turns: Sequence[Turn], *, labels: Mapping[str, str] | None = None
) -> SessionResult:
    """`session.attempt` names the attempt that `turns` belong to."""
    return SessionResult(
        session_id=session.id,
        group_id=session.group_id,
        sample_index=session.sample_index,
        attempt=session.attempt,
        stop_reason=reason,
        turns=len(turns),
        tokens=count_tokens(turns),
        samples=count_samples(turns),
        labels=dict(labels or {}),
    )
