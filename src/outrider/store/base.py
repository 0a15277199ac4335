"""The store seam: groups, sessions, attempts, turns, results and events, with the few moves they allow.

It knows no engine and no sandbox. Writes of a session name the attempt they belong to and are refused (Conflict)
once a newer attempt exists or the session is done: that is the fence between an attempt and its retry.
Invariant: a session's result, its group's state and the group's place in the results are one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import Any, Protocol

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState
from outrider.messages import Image
from outrider.trajectory import SessionResult, Turn


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds since the epoch; `cursor` is the group's place in the results once it is done. Of its `n`
    sessions so many are `done`, with so many `errors`, and `rewarded` with `reward_total` in all: the store counts
    them. Its spec, which may be large, is read by itself (`Store.spec`)."""

    id: str
    n: int
    priority: int
    idempotency_key: str | None
    callback_url: str | None
    state: GroupState
    cancelled: bool
    created: float
    finished: float | None
    cursor: int | None
    labels: dict[str, str] = {}
    done: int = 0
    errors: int = 0
    rewarded: int = 0
    reward_total: float = 0.0


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt` counts from 1 once it has started (0 before); so many of the attempts were `recovered`: they ended
    with their node, by no fault of the session that is known. A queued session is not to be started before `due`.
    `last_error` is why the last attempt failed."""

    id: str
    group_id: str
    sample_index: int
    state: SessionState
    attempt: int
    node: str | None
    lease_until: float | None
    priority: int
    created: float
    updated: float
    last_error: ErrorRecord | None
    result: SessionResult | None
    due: float = 0.0
    recovered: int = 0


class EventKind(StrEnum):
    GROUP_CREATED = "group.created"
    GROUP_CANCELLED = "group.cancelled"
    GROUP_DONE = "group.done"
    SESSION_STATE = "session.state"
    SESSION_RETRY = "session.retry"
    SESSION_DONE = "session.done"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One append-only event; `cursor` grows without bound and never repeats."""

    cursor: int
    at: float
    kind: EventKind
    group_id: str
    session_id: str | None
    data: dict[str, Any]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A group result still to be pushed to its callback URL."""

    group_id: str
    url: str
    tries: int
    next_try: float


class Store(Protocol):
    """Durable state. Every method may raise ServiceError when the database fails; NotFound for unknown ids."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def create_group(self, group: GroupRow, spec: bytes, session_ids: Sequence[str]) -> GroupRow:
        """Store a group with its spec, the JSON of a GroupSpec, and its queued sessions, with the event. When its
        idempotency key exists: the existing group if the spec is byte-equal, else Conflict."""
        ...

    async def group(self, group_id: str) -> GroupRow: ...
    async def spec(self, group_id: str) -> bytes: ...
    async def groups(self, *, state: GroupState | None = None, limit: int = 100) -> list[GroupRow]:
        """Newest first."""
        ...

    async def cancelled(self) -> list[str]:
        """Ids of the groups that are cancelled and have sessions that are not done, oldest first."""
        ...

    async def session(self, session_id: str) -> SessionRow: ...
    async def sessions(self, group_id: str) -> list[SessionRow]:
        """In sample order."""
        ...

    async def queued(self, limit: int, *, now: float = inf) -> list[SessionRow]:
        """Queued sessions that are due: higher priority first, then older group, then sample order."""
        ...

    async def next_due(self, *, after: float) -> float | None:
        """When the first of the queued sessions that are not yet due is."""
        ...

    async def counts(self) -> dict[SessionState, int]:
        """Sessions per state, over all groups."""
        ...

    async def start_attempt(self, session_id: str, *, node: str, lease_until: float) -> int:
        """Move a queued session to INITIALIZING under a lease; the new attempt's number. Conflict if the
        session is not queued or its group is cancelled."""
        ...

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        """A legal move of lifecycle.MOVES, else Conflict."""
        ...

    async def renew_leases(self, node: str, lease_until: float) -> None: ...

    async def add_turn(self, session_id: str, attempt: int, turn: Turn) -> None:
        """Store a turn. The bytes of its images are kept apart, once for each digest, whoever sent them before."""
        ...

    async def turns(self, session_id: str, attempt: int | None = None, *, images: bool = False) -> list[Turn]:
        """Of one attempt (default: the newest), by index. Their images have no bytes unless `images` asks for them."""
        ...

    async def image(self, digest: str) -> Image:
        """An image that a stored turn shows, with its bytes. Of several media types that were given for the same
        bytes, the first."""
        ...

    async def requeue(self, session_id: str, attempt: int, error: ErrorRecord, *, due: float = 0.0) -> None:
        """End an attempt that failed and put the session back in the queue, to be started at `due` or later."""
        ...

    async def finish(self, session_id: str, attempt: int, result: SessionResult) -> bool:
        """End a session for good; when it was the group's last, the group too: it gets its cursor, an event,
        and an outbox row if it has a callback. True when the group is now done. Finishing a session that is
        queued (attempt equal to its last one) is allowed: that is a cancel."""
        ...

    async def cancel_group(self, group_id: str) -> list[SessionRow]:
        """Mark the group cancelled; its sessions that are not done, which the caller must now end."""
        ...

    async def recover(self, *, now: float) -> list[SessionRow]:
        """Requeue every started, unfinished session whose lease ended before `now` (their nodes died), counting the
        attempt as recovered."""
        ...

    async def results(self, *, after: int, limit: int) -> list[GroupRow]:
        """Done groups with cursor > after, in cursor order."""
        ...

    async def events(self, *, after: int, limit: int) -> list[Event]: ...

    async def deliveries(self, *, now: float, limit: int) -> list[Delivery]:
        """Outbox rows due for a try."""
        ...

    async def delivered(self, group_id: str) -> None: ...
    async def delivery_failed(self, group_id: str, *, next_try: float) -> None: ...
