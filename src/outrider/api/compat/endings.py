"""Describes to other systems how a session ended: whether it timed out, and why it has no verdict.

Pure functions. Invariant: a session without a verdict is never `completed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from outrider.errors import error_text
from outrider.lifecycle import StopReason
from outrider.redaction import redacted
from outrider.trajectory import SessionResult

TIMEOUTS = frozenset({StopReason.AGENT_TIMEOUT, StopReason.SESSION_TIMEOUT})
"""Stop reasons of sessions that reached a time limit while they ran."""
UNGRADED_TIMEOUTS = frozenset({StopReason.SESSION_TIMEOUT, StopReason.EXPIRED})
"""Stop reasons of sessions that reached a time limit before they were graded."""
UNGRADED: Mapping[StopReason, str] = {
    StopReason.CANCELLED: "cancelled: the {run} was cancelled",
    StopReason.EARLY_STOP: "early_stop: enough other sessions of the task are usable",
    StopReason.EXPIRED: "expired: the {run} waited too long for its start",
    StopReason.SESSION_TIMEOUT: "session_timeout: the time of the {run} was over before the grading",
}
"""Texts that say why a session without an error has no verdict, by stop reason. `{run}` stands for the other system's
word for a session."""

Ending = Literal["completed", "failed", "timeout"]


def ending_of(result: SessionResult) -> Ending:
    if result.stop_reason in TIMEOUTS:
        return "timeout"
    return "failed" if result.verdict is None else "completed"


def why_ungraded(result: SessionResult, *, run: str) -> str | None:
    """Return why a session has no verdict, or None if it has one. `run` is the other system's word for a session."""
    if result.verdict is not None:
        return None
    if (error := result.error) is not None:
        return redacted(f"{error.boundary.value}/{error.code}: {error_text(error)}")
    return UNGRADED.get(result.stop_reason, f"{result.stop_reason.value}: no verdict").format(run=run)
