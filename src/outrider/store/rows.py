"""The rows of the store: their structs, the columns they are read from, and how packed columns are encoded.

It runs no statement. Results, errors and turns are stored as msgpack; event data is JSON, so that people can read it.
Invariant: every struct read here equals the one that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.spec import OPERATOR_TENANT, Role
from outrider.store.database import Row
from outrider.trajectory import SessionResult, Turn

GROUP_COLUMNS = (
    "id, n, priority, idempotency_key, callback_url, state, cancelled, created, finished, cursor, labels, "
    "n - open_sessions, errors, rewarded, reward_total, min_usable, submitted_by, tenant"
)
SESSION_COLUMNS = (
    "id, group_id, sample_index, state, attempt, node, lease_until, priority, created, updated, last_error, result, "
    "due, recovered, ending, bucket"
)
EVENT_COLUMNS = "cursor, at, kind, group_id, session_id, data"
DELIVERY_COLUMNS = "group_id, url, tries, next_try, since, given_up, fault"
TOKEN_COLUMNS = "name, digest, role, max_queued, created, expires, revoked, tenant"


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group, without its spec, which may be large (`Store.spec`). Times are seconds since the epoch.

    `cursor` is the group's place in the results once it is done. The store counts the outcomes of its `n` sessions:
    `done`, those with an error (`errors`), those with a reward (`rewarded`), and the sum of the rewards. Once
    `min_usable` have a reward, the others are ended. `submitted_by` names the token that it was submitted with,
    `tenant` whose it is. No other group of the tenant has its `idempotency_key`.
    """

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
    min_usable: int | None = None
    submitted_by: str | None = None
    tenant: str = OPERATOR_TENANT


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session. Times are seconds since the epoch.

    `attempt` counts from 1; it is 0 before the first attempt. `recovered` is how many attempts ended because their node
    died, which is not a failure of the session. A queued session is not started before `due`. `last_error` is why the
    last attempt failed. `ending` is why the session is to end, if that is decided. `bucket` is what the queue is shared
    between (see `queue.py`).
    """

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
    ending: StopReason | None = None
    bucket: str = ""


class QueueLength(msgspec.Struct, frozen=True):
    """How many sessions wait, in how many buckets, and of how many tenants."""

    sessions: int
    buckets: int
    tenants: int


class PolicyRow(msgspec.Struct, frozen=True):
    """The version that a trainer has set last, and where its weights are, if the engines were told."""

    version: int
    weights: str | None = None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the control API. Times are seconds since the epoch; `digest` is the SHA-256 of its text (hex); what is
    submitted with it is its `tenant`'s."""

    name: str
    digest: str
    role: Role
    max_queued: int | None
    created: float
    expires: float | None
    revoked: float | None = None
    tenant: str


class EventKind(StrEnum):
    GROUP_CREATED = "group.created"
    GROUP_CANCELLED = "group.cancelled"
    GROUP_ENOUGH = "group.enough"
    GROUP_DONE = "group.done"
    SESSION_STATE = "session.state"
    SESSION_CANCELLED = "session.cancelled"
    SESSION_RETRY = "session.retry"
    SESSION_DONE = "session.done"
    CALLBACK_DEAD = "callback.dead"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the append-only log; `cursor` grows and never repeats."""

    cursor: int
    at: float
    kind: EventKind
    group_id: str
    session_id: str | None
    data: dict[str, Any]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the outbox: a finished group that must still be pushed to its callback URL, next at `next_try`.

    It has been due since `since`, and failed `tries` times, at last for the reason `fault`. Once it is `given_up` it is
    not tried again by itself.
    """

    group_id: str
    url: str
    tries: int
    next_try: float
    since: float = 0.0
    given_up: float | None = None
    fault: str | None = None

    @property
    def receiver(self) -> str:
        return receiver_of(self.url)


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader of a tenant's results, or of everybody's (None). It has processed the groups up to `cursor`, and
    was last heard of at `seen`; up to `lag` groups are left for it."""

    tenant: str | None
    name: str
    cursor: int
    created: float
    seen: float
    lag: int


pack = msgspec.msgpack.encode


def receiver_of(url: str) -> str:
    """The host and port of a callback URL."""
    return urlsplit(url).netloc.rpartition("@")[2]


def stored_key(tenant: str, idempotency_key: str) -> str:
    """As the column has it, which is unique: the names of tenants have no slash."""
    return f"{tenant}/{idempotency_key}"


def pack_data(data: Mapping[str, Any]) -> str:
    return msgspec.json.encode(data).decode()


def turn_from(packed: bytes) -> Turn:
    return msgspec.msgpack.decode(packed, type=Turn)


def group_from(row: Row) -> GroupRow:
    """From GROUP_COLUMNS."""
    return GroupRow(
        id=row[0],
        n=row[1],
        priority=row[2],
        idempotency_key=None if row[3] is None else row[3].partition("/")[2],
        callback_url=row[4],
        state=GroupState(row[5]),
        cancelled=bool(row[6]),
        created=row[7],
        finished=row[8],
        cursor=row[9],
        labels=msgspec.json.decode(row[10]),
        done=row[11],
        errors=row[12],
        rewarded=row[13],
        reward_total=row[14],
        min_usable=row[15],
        submitted_by=row[16],
        tenant=row[17],
    )


def session_from(row: Row) -> SessionRow:
    """From SESSION_COLUMNS."""
    return SessionRow(
        id=row[0],
        group_id=row[1],
        sample_index=row[2],
        state=SessionState(row[3]),
        attempt=row[4],
        node=row[5],
        lease_until=row[6],
        priority=row[7],
        created=row[8],
        updated=row[9],
        last_error=None if row[10] is None else msgspec.msgpack.decode(row[10], type=ErrorRecord),
        result=None if row[11] is None else msgspec.msgpack.decode(row[11], type=SessionResult),
        due=row[12],
        recovered=row[13],
        ending=None if row[14] is None else StopReason(row[14]),
        bucket=row[15],
    )


def event_from(row: Row) -> Event:
    """From EVENT_COLUMNS."""
    return Event(
        cursor=row[0],
        at=row[1],
        kind=EventKind(row[2]),
        group_id=row[3],
        session_id=row[4],
        data=msgspec.json.decode(row[5]),
    )


def token_from(row: Row) -> TokenRow:
    """From TOKEN_COLUMNS."""
    return TokenRow(
        name=row[0],
        digest=row[1],
        role=row[2],
        max_queued=row[3],
        created=row[4],
        expires=row[5],
        revoked=row[6],
        tenant=row[7],
    )


def delivery_from(row: Row) -> Delivery:
    """From DELIVERY_COLUMNS."""
    return Delivery(
        group_id=row[0], url=row[1], tries=row[2], next_try=row[3], since=row[4], given_up=row[5], fault=row[6]
    )
