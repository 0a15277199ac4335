"""Defines the rows of the store as structs, the names of their columns, and the encoding of structured columns.

Results, errors and turns are stored as MessagePack. The data of events is JSON, so that people can read it. Invariant:
a struct that is read equals the struct that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState, StopReason
from outrider.schemas import EventView
from outrider.spec import OPERATOR_TENANT, Role
from outrider.store.database import Row
from outrider.trajectory import SessionResult, Turn, TurnOutline, without_gaps

R = TypeVar("R", bound=msgspec.Struct)


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A group without its spec. The spec may be large, so `Store.spec` reads it. Times are seconds since the epoch.

    cursor: a done group's position in the order of results.
    done, errors, rewarded: numbers of sessions that are done, have an error, and have a reward.
    reward_total: sum of the rewards.
    min_usable: the group's other sessions are ended once this many sessions have a reward.
    usable_trains: if True, `min_usable` counts only sessions with tokens to train on.
    submitted_by: name of the token that submitted the group.
    tenant: owner of the group.
    idempotency_key: unique among the tenant's groups.
    translator: the rollout system whose format the callback uses; None for Outrider's own format.
    traceparent: W3C trace context of the submission.
    """

    id: str
    n: int
    priority: int
    idempotency_key: str | None = None
    callback_url: str | None = None
    state: GroupState = GroupState.ACTIVE
    cancelled: bool = False
    created: float
    finished: float | None = None
    cursor: int | None = None
    labels: dict[str, str] = {}
    done: int = 0
    errors: int = 0
    rewarded: int = 0
    reward_total: float = 0.0
    min_usable: int | None = None
    submitted_by: str | None = None
    tenant: str = OPERATOR_TENANT
    harness: str = ""
    translator: str | None = None
    usable_trains: bool = False
    traceparent: str | None = None


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session. Times are seconds since the epoch.

    attempt: number of the newest attempt, from 1; 0 before the first attempt.
    recovered: number of attempts that were lost with their node. They do not count as failures of the session.
    due: earliest start of a queued session.
    last_error: error of the last failed attempt.
    ending: why the session is to be ended. Set once this is decided.
    bucket: the session's bucket in the queue (see `queue.py`).
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

    @property
    def over(self) -> bool:
        """True if the session is done or has `ending` set."""
        return self.state is SessionState.DONE or self.ending is not None


class QueueLength(msgspec.Struct, frozen=True):
    """The length of the queue. `sessions` includes sessions that a pause holds. `buckets` and `tenants` count only
    buckets and tenants with waiting sessions."""

    sessions: int
    buckets: int
    tenants: int


class Backlog(msgspec.Struct, frozen=True):
    """Measures of unfinished work and storage.

    oldest_waiting: creation time of the oldest waiting session, or None.
    pending_callbacks: number of callbacks that are still to be sent.
    given_up_callbacks: number of callbacks that are no longer retried.
    stored_bytes: size of all finished groups, without images.
    """

    oldest_waiting: float | None
    pending_callbacks: int
    given_up_callbacks: int
    stored_bytes: int


class PolicyRow(msgspec.Struct, frozen=True):
    """The policy version that a trainer set last. `weights` says where the weights of this version are stored, or is
    None if the engines loaded no weights."""

    version: int
    weights: str | None = None


class PackedResult(NamedTuple):
    """A session's encoded result, and the id of its group. `result_from` decodes `packed`."""

    group_id: str
    packed: bytes


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
    SESSION_RESET = "session.reset"
    SESSION_DONE = "session.done"
    CALLBACK_DEAD = "callback.dead"


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the outbox: a finished group whose result must still be sent to its callback URL.

    next_try: time of the next try.
    since: when the group was done. If the service gave up and was requested to try again, the time of the last request.
    tries: number of failed tries.
    fault: why the last try failed.
    given_up: when the service gave up. The delivery is then retried only on request.
    receiver: host and port of the callback URL.
    tenant: owner of the group.
    url: empty if the store lacks the key that encrypted the URL.
    """

    group_id: str
    url: str
    receiver: str
    tries: int
    next_try: float
    since: float = 0.0
    given_up: float | None = None
    fault: str | None = None
    tenant: str = OPERATOR_TENANT


pack = msgspec.msgpack.encode


def receiver_of(url: str) -> str:
    """Return the host and port of a callback URL."""
    return urlsplit(url).netloc.rpartition("@")[2]


def stored_key(tenant: str, idempotency_key: str) -> str:
    """Return TENANT/KEY, the value of the column `idempotency_key`. Two tenants never get the same value, because their
    names contain no slash."""
    return f"{tenant}/{idempotency_key}"


def pack_data(data: Mapping[str, Any]) -> str:
    return msgspec.json.encode(data).decode()


_TURN = msgspec.msgpack.Decoder(Turn)
_OUTLINE = msgspec.msgpack.Decoder(TurnOutline)


def turn_from(packed: bytes) -> Turn:
    return _TURN.decode(packed)


class StoredTurns(msgspec.Struct, frozen=True):
    """An attempt's turns, encoded, in order of index. Their images have no bytes. The turns of a failed attempt may
    have gaps, for example where a turn could not be stored. The methods close the gaps (`without_gaps`)."""

    packed: Sequence[bytes]

    def turns(self) -> list[Turn]:
        return without_gaps([_TURN.decode(packed) for packed in self.packed])

    def outlines(self) -> list[TurnOutline]:
        return without_gaps([_OUTLINE.decode(packed) for packed in self.packed])


result_from = msgspec.msgpack.Decoder(SessionResult).decode


def columns_of(row: type[msgspec.Struct]) -> str:
    """Return the columns for a SELECT of this struct. Each column has the name of a field."""
    return ", ".join(row.__struct_fields__)


GROUP_COLUMNS = columns_of(GroupRow).replace("done", "n - open_sessions")
SESSION_COLUMNS, EVENT_COLUMNS = columns_of(SessionRow), columns_of(EventView)
DELIVERY_COLUMNS, TOKEN_COLUMNS = columns_of(Delivery), columns_of(TokenRow)

UNPACKED: Mapping[str, Callable[[Any], Any]] = {
    "idempotency_key": lambda stored: stored.partition("/")[2],
    "cancelled": bool,
    "usable_trains": bool,
    "labels": msgspec.json.decode,
    "data": msgspec.json.decode,
    "last_error": msgspec.msgpack.Decoder(ErrorRecord).decode,
    "result": result_from,
}
"""Decoders for columns that are stored in an encoded form, by column name. Other columns need no decoding."""


def row_from(kind: type[R], row: Row) -> R:
    """Build a struct from a row that was selected with `columns_of`."""
    fields = dict(zip(kind.__struct_fields__, row, strict=True))
    for name in UNPACKED.keys() & fields.keys():
        if fields[name] is not None:
            fields[name] = UNPACKED[name](fields[name])
    return msgspec.convert(fields, kind)
