"""Streams events about Polar's tasks in Polar's format, as server-sent events. They are translated from the service's
event log.

Invariant: an event has the id of its log entry, so a client that reconnects with `Last-Event-ID` misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse

from outrider.api.compat.polar_request import ALONE_LABEL, SYSTEM
from outrider.api.compat.polar_results import STATES, PolarObject, status_of_session, status_of_task, task_id_of
from outrider.errors import InvalidField, NotFound
from outrider.lifecycle import SessionState
from outrider.schemas import EventView
from outrider.service.principals import Principal
from outrider.spec import MAX_CURSOR
from outrider.store.rows import EventKind

if TYPE_CHECKING:
    from outrider.service.service import Service

AT_ONCE = 500
PAUSE = 0.25
"""Seconds between two reads of the event log."""
PING_SECONDS = 15.0
REMEMBERED = 4096
"""The number of groups whose task id a stream remembers."""
LAST_EVENT_ID = "Last-Event-ID"
OF_TASK = {
    EventKind.GROUP_CREATED: "task.created",
    EventKind.GROUP_CANCELLED: "task.updated",
    EventKind.GROUP_ENOUGH: "task.updated",
    EventKind.GROUP_DONE: "task.completed",
}
OF_SESSION = frozenset({EventKind.SESSION_STATE, EventKind.SESSION_RETRY, EventKind.SESSION_DONE})


async def event_stream(
    service: Service, request: Request, caller: Principal, *, sessions_only: bool = False
) -> StreamingResponse:
    """Return the stream of events for a client. Raises InvalidField if the header Last-Event-ID is malformed."""
    after = await _last_event_of(service, request, caller)
    events = _events(service, after, caller, sessions_only=sessions_only)
    return StreamingResponse(events, media_type="text/event-stream")


async def _last_event_of(service: Service, request: Request, caller: Principal) -> int:
    """Return the cursor after which a client's stream starts: the cursor in its header Last-Event-ID or, without this
    header, the newest cursor."""
    given = request.headers.get(LAST_EVENT_ID)
    if given is None:
        return await service.store.last_event(tenant=caller.tenant)
    if not (given.isascii() and given.isdigit() and len(given) <= 20 and int(given) <= MAX_CURSOR):
        raise InvalidField("must be the id of an event", field=LAST_EVENT_ID)
    return int(given)


async def _events(
    service: Service, after: int, caller: Principal, *, sessions_only: bool = False
) -> AsyncIterator[bytes]:
    """Yield the events after a cursor, without end. With `sessions_only`, leave out events about tasks. Task ids are
    unique only within a tenant, so even an admin gets only the events of its own tenant."""
    tasks = _TaskNames(service, caller)
    quiet = 0.0
    yield _event("hello", {"type": "hello", "after": after})
    while True:
        found = await service.store.events(after=after, limit=AT_ONCE, tenant=caller.tenant)
        for entry in found:
            after = entry.cursor
            for name, data in await _translated(service, entry, tasks):
                if not sessions_only or name == "session.state_changed":
                    yield _event(name, data, after)
        if len(found) == AT_ONCE:
            continue
        await asyncio.sleep(PAUSE)
        quiet = 0.0 if found else quiet + PAUSE
        if quiet >= PING_SECONDS:
            quiet = 0.0
            yield _event("ping", {"type": "ping"})


def _event(name: str, data: PolarObject, cursor: int | None = None) -> bytes:
    number = b"" if cursor is None else b"id: %d\n" % cursor
    return number + b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


class _Named(NamedTuple):
    """The task id of a group. If the group is a session that was created without a task, `session_id` is set, too."""

    task_id: str
    session_id: str | None


class _TaskNames:
    """Finds the `_Named` of a group. Remembers the last REMEMBERED groups that it read from the store."""

    def __init__(self, service: Service, caller: Principal) -> None:
        self._service = service
        self._caller = caller
        self._known: OrderedDict[str, _Named | None] = OrderedDict()

    async def of(self, group_id: str) -> _Named | None:
        """Return the ids of a group, or None if the group was removed, or was not submitted by a client of Polar."""
        if group_id not in self._known:
            try:
                row = await self._service.store.group(group_id, tenant=self._caller.tenant)
            except NotFound:
                return None
            own = row.translator == SYSTEM
            self._known[group_id] = _Named(task_id_of(row), row.labels.get(ALONE_LABEL)) if own else None
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[group_id]


async def _translated(service: Service, entry: EventView, tasks: _TaskNames) -> list[tuple[str, PolarObject]]:
    """Translate a log entry to Polar's events, as pairs of name and data. Events about tasks and about the end of a
    session show the current status. Other events show the status at the time of the log entry."""
    named = await tasks.of(entry.group_id)
    if named is None:
        return []
    alone = named.session_id is not None
    common = {"task_id": named.task_id, "timestamp": entry.at}
    kind = EventKind(entry.kind)
    if (name := OF_TASK.get(kind)) is not None and not alone:
        try:
            status = status_of_task(await service.store.group(entry.group_id))
        except NotFound:  # the group was just removed
            return []
        return [(name, {"type": name, **common, "status": status})]
    if kind not in OF_SESSION or entry.session_id is None:
        return []
    if kind is EventKind.SESSION_DONE:
        try:
            status = status_of_session(await service.store.session(entry.session_id))
        except NotFound:
            return []
    else:
        state = SessionState.QUEUED if kind is EventKind.SESSION_RETRY else SessionState(entry.data["state"])
        status = STATES[state]
    session_id = named.session_id or entry.session_id
    changed: PolarObject = {**common, "session_id": session_id, "status": status}
    events = [("session.state_changed", {"type": "session.state_changed", **changed})]
    if kind is EventKind.SESSION_DONE and not alone:
        events.append(("task.updated", {"type": "task.updated", **common, "session_id": session_id}))
    return events
