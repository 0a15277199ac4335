"""The states of sessions and groups, the allowed transitions between states, and the reasons why a session ended.

The reason why a session ended is a `StopReason`, never a state. Invariant: no transition leaves `DONE`.
"""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """The state of a session. In `READY`, the session's sandbox is prepared, and the session waits for a run slot."""

    QUEUED = "queued"
    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    EVALUATING = "evaluating"
    DONE = "done"


class GroupState(StrEnum):
    """The state of a group, which is `ACTIVE` until all of its sessions are done."""

    ACTIVE = "active"
    DONE = "done"


class StopReason(StrEnum):
    """The reason why a session ended. With the reasons CANCELLED, EARLY_STOP, EXPIRED, SESSION_TIMEOUT and ERROR, a
    session has no verdict. With any other reason, it has one. EARLY_STOP means that enough other sessions of the group
    already had a verdict. EXPIRED means that the session waited too long to be started."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    AGENT_TIMEOUT = "agent_timeout"
    NONZERO_EXIT = "nonzero_exit"
    AGENT_EXCESS = "agent_excess"
    SESSION_TIMEOUT = "session_timeout"
    CANCELLED = "cancelled"
    EARLY_STOP = "early_stop"
    EXPIRED = "expired"
    ERROR = "error"


MOVES: dict[SessionState, frozenset[SessionState]] = {
    # - A move back to QUEUED is a retry as a new attempt.
    # - A move to DONE that skips EVALUATING usually ends a session without a verdict: it was cancelled, stopped early,
    #   expired or timed out, or its last attempt failed. In two cases the session has a verdict. A task of several
    #   steps may end before its last step. If the stored verdict of an earlier run blames the agent, a regrading of
    #   this run keeps that verdict and grades nothing.
    # - A session that only grades an earlier run again has no agent, so it goes from INITIALIZING to EVALUATING.
    SessionState.QUEUED: frozenset({SessionState.INITIALIZING, SessionState.DONE}),
    SessionState.INITIALIZING: frozenset(
        {SessionState.READY, SessionState.EVALUATING, SessionState.QUEUED, SessionState.DONE}
    ),
    SessionState.READY: frozenset({SessionState.RUNNING, SessionState.QUEUED, SessionState.DONE}),
    SessionState.RUNNING: frozenset({SessionState.EVALUATING, SessionState.QUEUED, SessionState.DONE}),
    SessionState.EVALUATING: frozenset({SessionState.DONE, SessionState.QUEUED}),
    SessionState.DONE: frozenset(),
}
