"""The rows of the store: structs, columns, and the encoding of packed columns.

Results, errors and turns are stored as msgpack; event data is JSON, for people to read. Invariant: every struct read
here equals the struct that was written.
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
DELIVERY_COLUMNS = "group_id, url, receiver, tries, next_try, since, given_up, fault"
TOKEN_COLUMNS = "name, digest, role, max_queued, created, expires, revoked, tenant"


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group, without its spec, which may be large (`Store.spec`). Times are seconds since the epoch.

    `cursor` is the position of a done group in the results. The store counts the outcomes of the `n` sessions: `done`,
    with an error (`errors`), with a reward (`rewarded`), and the sum of the rewards. Once `min_usable` sessions have a
    reward, the rest are ended. `submitted_by` is the name of the submitting token, `tenant` the owner. The
    `idempotency_key` is unique among the tenant's groups.
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

    `attempt` counts from 1; 0 before the first attempt. `recovered` is the number of attempts that lost their node,
    which is not a failure of the session. A queued session is not started before `due`. `last_error` is the error of
    the last failed attempt. `ending` is the reason to end the session, once decided. `bucket` is the session's bucket
    in the queue (see `queue.py`).
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
    """The numbers of waiting sessions, of buckets and of tenants with waiting sessions."""

    sessions: int
    buckets: int
    tenants: int


class PolicyRow(msgspec.Struct, frozen=True):
    """The version that a trainer has set last, and the location of its weights, if the engines loaded any."""

    version: int
    weights: str | None = None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the control API. Times are seconds since the epoch. `digest` is the SHA-256 of the token's text (hex).
    Groups submitted with the token belong to its `tenant`."""

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

    The push has been due since `since`, and failed `tries` times, the last time for the reason `fault`. A push with
    `given_up` set is retried only on request. `receiver` is the host and port of the callback URL. `url` is empty if
    the store lacks the key that encrypted it.
    """

    group_id: str
    url: str
    receiver: str
    tries: int
    next_try: float
    since: float = 0.0
    given_up: float | None = None
    fault: str | None = None


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader of a tenant's results, or of all results (tenant None). The consumer has processed the groups up
    to `cursor`, and made its last request at `seen`; up to `lag` groups are left to read."""

    tenant: str | None
    name: str
    cursor: int
    created: float
    seen: float
    lag: int


pack = msgspec.msgpack.encode


def receiver_of(url: str) -> str:
    """Return the host and port of a callback URL."""
    return urlsplit(url).netloc.rpartition("@")[2]


def stored_key(tenant: str, idempotency_key: str) -> str:
    """Return the value of the unique key column. Names of tenants contain no slash, so the two parts stay distinct."""
    return f"{tenant}/{idempotency_key}"


def pack_data(data: Mapping[str, Any]) -> str:
    return msgspec.json.encode(data).decode()


def turn_from(packed: bytes) -> Turn:
    return msgspec.msgpack.decode(packed, type=Turn)


def group_from(row: Row) -> GroupRow:
    """Build the struct from GROUP_COLUMNS."""
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
    """Build the struct from SESSION_COLUMNS."""
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
    """Build the struct from EVENT_COLUMNS."""
    return Event(
        cursor=row[0],
        at=row[1],
        kind=EventKind(row[2]),
        group_id=row[3],
        session_id=row[4],
        data=msgspec.json.decode(row[5]),
    )


def token_from(row: Row) -> TokenRow:
    """Build the struct from TOKEN_COLUMNS."""
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
    """Build the struct from DELIVERY_COLUMNS."""
    return Delivery(
        group_id=row[0],
        url=row[1],
        receiver=row[2],
        tries=row[3],
        next_try=row[4],
        since=row[5],
        given_up=row[6],
        fault=row[7],
    )
