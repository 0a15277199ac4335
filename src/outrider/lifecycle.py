"""The states of sessions and groups, the legal moves between them, and the reasons why a session ended, as data.

The reason why a session ended is a `StopReason`, never a state. The module does not use the store. Invariant: no move
leads out of `DONE`.
"""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """The state of a session. `READY`: the sandbox is prepared, and the session waits for a run slot."""

    QUEUED = "queued"
    INITIALIZING = "initializing"
    READY = "ready"
    RUNNING = "running"
    EVALUATING = "evaluating"
    DONE = "done"


class GroupState(StrEnum):
    """The state of a group: `ACTIVE` until every session of the group is done."""

    ACTIVE = "active"
    DONE = "done"


class StopReason(StrEnum):
    """The reason why a session ended. All but CANCELLED, EARLY_STOP, EXPIRED, SESSION_TIMEOUT and ERROR come with a
    verdict. EARLY_STOP: enough other sessions of the group had a verdict. EXPIRED: the session waited too long to be
    started."""

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
    # A move back to QUEUED is a retry as a new attempt. A move to DONE that skips EVALUATING is a cancellation, an
    # early stop, an expiry, a timeout, or the error of the last attempt. Two moves of this kind have a verdict: a task
    # of several steps may end before its last step, and a verdict that blames the agent is kept if the run is graded
    # again. A session that only grades an earlier run again has no agent, and goes from INITIALIZING to EVALUATING.
    SessionState.QUEUED: frozenset({SessionState.INITIALIZING, SessionState.DONE}),
    SessionState.INITIALIZING: frozenset(
        {SessionState.READY, SessionState.EVALUATING, SessionState.QUEUED, SessionState.DONE}
    ),
    SessionState.READY: frozenset({SessionState.RUNNING, SessionState.QUEUED, SessionState.DONE}),
    SessionState.RUNNING: frozenset({SessionState.EVALUATING, SessionState.QUEUED, SessionState.DONE}),
    SessionState.EVALUATING: frozenset({SessionState.DONE, SessionState.QUEUED}),
    SessionState.DONE: frozenset(),
}
