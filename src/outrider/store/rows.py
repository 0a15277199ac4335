"""Between table rows and the store's structs: column lists, and the codecs of what is kept packed.

It runs no statement. Results, errors and turns are msgpack; event data is JSON, so that people can read it.
Invariant: every struct read here equals the one that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.errors import ErrorRecord
from outrider.lifecycle import GroupState, SessionState
from outrider.store.base import Delivery, Event, EventKind, GroupRow, SessionRow
from outrider.store.database import Row
from outrider.trajectory import SessionResult, Turn

GROUP_COLUMNS = (
    "id, n, priority, idempotency_key, callback_url, state, cancelled, created, finished, cursor, labels, "
    "n - open_sessions, errors, rewarded, reward_total"
)
SESSION_COLUMNS = (
    "id, group_id, sample_index, state, attempt, node, lease_until, priority, created, updated, last_error, result, "
    "due, recovered"
)
EVENT_COLUMNS = "cursor, at, kind, group_id, session_id, data"
DELIVERY_COLUMNS = "group_id, url, tries, next_try"

pack = msgspec.msgpack.encode


def pack_data(data: Mapping[str, Any]) -> str:
    return msgspec.json.encode(data).decode()


def turn_from(packed: bytes) -> Turn:
    return msgspec.msgpack.decode(packed, type=Turn)


def group_from(row: Row) -> GroupRow:
    return GroupRow(
        id=row[0],
        n=row[1],
        priority=row[2],
        idempotency_key=row[3],
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
    )


def session_from(row: Row) -> SessionRow:
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
    )


def event_from(row: Row) -> Event:
    return Event(
        cursor=row[0],
        at=row[1],
        kind=EventKind(row[2]),
        group_id=row[3],
        session_id=row[4],
        data=msgspec.json.decode(row[5]),
    )


def delivery_from(row: Row) -> Delivery:
    return Delivery(group_id=row[0], url=row[1], tries=row[2], next_try=row[3])
