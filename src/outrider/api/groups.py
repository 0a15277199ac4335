"""Control routes for groups, sessions, results and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Header, Query, Response
from fastapi.responses import StreamingResponse

from outrider.api.control_replies import long_reply
from outrider.api.control_router import Caller, ControlRouter, Created, Serving, body
from outrider.api.openapi import QUEUE_FULL
from outrider.api.session_filter import Wanted
from outrider.errors import Conflict, Forbidden, NotFound, RuntimeUnavailable
from outrider.sample_columns import MEDIA_TYPE
from outrider.schemas import (
    ChatList,
    GroupList,
    GroupView,
    ResultsPage,
    SampleList,
    SessionView,
    TimelineView,
    TurnList,
)
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.spec import CONSUMER_NAME, MAX_CURSOR, GroupSpec, RegradeSpec

MAX_WAIT = 60.0
"""Maximum seconds that a request may wait. Most clients and proxies have longer timeouts."""
EVENTS_AT_ONCE = 500
EVENT_PAUSE = 0.25
"""Seconds between two reads of the event log."""
EVENT_PING_SECONDS = 15.0
"""After this many seconds without an event, the stream sends a comment line. The comment line keeps proxies from
closing the connection."""

RETRY_MS = 1000
"""A client that loses its connection to the stream of events reconnects after this many milliseconds."""

After = Annotated[int, Query(ge=0, le=MAX_CURSOR)]
LAST_EVENT_ID = "Last-Event-ID"
Samples = Annotated[bool, Query(description="include the training rows")]


async def wants_columns(
    accept: Annotated[list[str] | None, Header(description=f"{MEDIA_TYPE}: samples as an Arrow stream")] = None,
) -> bool:
    """Return True if the client accepts an Arrow stream and does not prefer JSON."""
    qualities = dict(_quality(each) for line in accept or () for each in line.split(","))
    stream = qualities.get(MEDIA_TYPE, 0.0)
    in_json = next((qualities[name] for name in JSON_NAMES if name in qualities), 0.0)
    return stream > 0 and stream >= in_json


def _quality(accepted: str) -> tuple[str, float]:
    """Return a media type of an Accept header, and its quality (`q`). A malformed quality counts as 0."""
    media_type, *parameters = (part.strip().lower() for part in accepted.split(";"))
    given = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return media_type, float(given)
    except ValueError:
        return media_type, 0.0


JSON_NAMES = ("application/json", "application/*", "*/*")
"""The names that match JSON in an Accept header, most specific first. If a header has several of these names, the
quality (`q=`) of the most specific name applies to JSON (RFC 9110)."""
Columns = Annotated[bool, Depends(wants_columns)]
"""True if the client accepts samples as an Arrow stream and does not prefer JSON."""
ARROW_REPLY = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


ROUTES = ControlRouter()
SUBMISSION: dict[str, Any] = {"status": 201, "errors": (Conflict, RuntimeUnavailable), "also": QUEUE_FULL}


@ROUTES.post("/groups", "submit", GroupView, **SUBMISSION)
async def submit(
    service: Serving,
    caller: Caller,
    spec: Annotated[GroupSpec, body(GroupSpec)],
    created: Created,
    traceparent: Annotated[str | None, Header(description="W3C trace context, to which traces link")] = None,
) -> GroupView:
    """Submit a group of sessions that run the same task. The group is stored before the reply is sent."""
    group = await service.submit(spec, caller, traceparent=traceparent)
    created(group_id=group.id)
    return group


@ROUTES.get("/groups", "read", GroupList, errors=(NotFound,))
async def groups(
    service: Serving,
    caller: Caller,
    wanted: Wanted,
    after: Annotated[str | None, Query(description="the `after` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> GroupList:
    """List groups, newest first, without their sessions. `state` is `active` or `done`. The reward bounds apply to a
    group's mean reward. `stop_reason`, `error` and `text` must all match the same session of the group."""
    return await service.runs.groups(wanted, after=after, limit=limit, caller=caller)


@ROUTES.get("/groups/{group_id}", "read", GroupView, forms=ARROW_REPLY)
async def group(
    service: Serving,
    caller: Caller,
    group_id: str,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT, description="seconds to wait until it is done")] = 0.0,
    samples: Samples = False,
    columns: Columns = False,
) -> Response:
    """Get one group with its sessions."""
    view = await service.group(group_id, wait=wait, samples=samples, caller=caller)
    return await _reply(service, view, columns=columns and samples)


@ROUTES.delete("/groups/{group_id}", "submit", GroupView)
async def cancel(service: Serving, caller: Caller, group_id: str) -> GroupView:
    """Cancel a group with all its unfinished sessions. Cancelling the group again changes nothing."""
    return await service.cancel(group_id, caller)


@ROUTES.post("/groups/{group_id}/regrade", "submit", GroupView, **SUBMISSION)
async def regrade(
    service: Serving,
    caller: Caller,
    group_id: str,
    spec: Annotated[RegradeSpec, body(RegradeSpec)],
    created: Created,
) -> GroupView:
    """Grade the sessions of a group again, as a new group that runs no agent. The old verdicts are kept."""
    group = await service.regrade_group(group_id, spec, caller)
    created(group_id=group.id)
    return group


@ROUTES.get("/results", "read", ResultsPage, errors=(Conflict,), forms=ARROW_REPLY)
async def results(
    service: Serving,
    caller: Caller,
    created: Created,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_CURSOR, description="default: 0, or the position of the `consumer`")
    ] = None,
    consumer: Annotated[str | None, Query(pattern=CONSUMER_NAME, description="who reads: see docs/api.md")] = None,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT, description="seconds to wait for the first")] = 0.0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    samples: Samples = False,
    columns: Columns = False,
) -> Response:
    """List done groups after a cursor, in the order they finished. A reply has up to `limit` groups, or fewer once it
    has 8 MiB. To read on, repeat the request with `after` set to the reply's `cursor`, until a reply has no groups.

    A `consumer` continues from the position that it has acknowledged. A new consumer begins at `after`. The service
    keeps a group until all consumers have acknowledged it. A consumer can therefore make the service keep data, so
    reading as a consumer needs a token that may submit.
    """
    start = after or 0
    if consumer is not None:
        if not caller.may("submit"):
            raise Forbidden(
                f"{caller.name!r} has a read-only token, and reading as a consumer keeps results stored",
                hint="read with `after`, and keep the last cursor yourself; or take a token with the role 'submit'",
                field="consumer",
            )
        position, new = await service.store.consumers.enter(consumer, at=start, tenant=caller.sees)
        start = position if after is None else after
        if new:
            created(consumer=consumer)
    columns = columns and samples
    page = await service.results(after=start, wait=wait, limit=limit, samples=samples, columns=columns, caller=caller)
    return _in_form(page.pieces(), columns=columns)


@ROUTES.get("/events", "read", errors=(Conflict,), response_class=StreamingResponse)
async def events(
    service: Serving,
    caller: Caller,
    after: After = 0,
    last_id: Annotated[
        int | None, Header(alias=LAST_EVENT_ID, ge=0, le=MAX_CURSOR, description="wins over `after`")
    ] = None,
    new: Annotated[bool, Query(description="only changes after this request; wins over `after`")] = False,
) -> StreamingResponse:
    """Stream every change after a cursor, as server-sent events without end. The id of an event is its cursor."""
    newest = await service.store.last_event(tenant=caller.sees)
    start = last_id if last_id is not None else newest if new else after
    if start > newest:
        raise Conflict(
            f"no event has the id {start}: the newest is {newest}",
            field="after" if last_id is None else LAST_EVENT_ID,
            hint="the service was started without its old data: read its events from 0",
        )
    return StreamingResponse(_events(service, start, caller), media_type="text/event-stream")


@ROUTES.get("/sessions/{session_id}", "read", SessionView)
async def session(service: Serving, caller: Caller, session_id: str) -> SessionView:
    """Get the state of one session. Once the session is done, the reply includes its result."""
    return await service.reader.session(session_id, tenant=caller.sees)


@ROUTES.delete("/sessions/{session_id}", "submit", SessionView)
async def cancel_session(service: Serving, caller: Caller, session_id: str) -> SessionView:
    """Cancel one session in any state. The other sessions of its group continue. Repeating the call changes nothing."""
    return await service.cancel_session(session_id, caller)


@ROUTES.post("/sessions/{session_id}/regrade", "submit", GroupView, **SUBMISSION)
async def regrade_session(
    service: Serving,
    caller: Caller,
    session_id: str,
    spec: Annotated[RegradeSpec, body(RegradeSpec)],
    created: Created,
) -> GroupView:
    """Grade one session again, as a new group with one session. The old verdict is kept."""
    group = await service.regrade_session(session_id, spec, caller)
    created(group_id=group.id)
    return group


@ROUTES.get("/sessions/{session_id}/turns", "read", TurnList)
async def turns(
    service: Serving,
    caller: Caller,
    session_id: str,
    tokens: Annotated[bool, Query(description="include ids, log-probabilities and messages")] = False,
    pieces: Annotated[bool, Query(description="with `tokens`: include the text of each token")] = False,
) -> Response:
    """List the model calls of the session's newest attempt, as text. With `tokens`, the caller needs a token that may
    submit, because the reply may contain the credential of a running session."""
    if tokens and not caller.may("submit"):
        raise Forbidden(f"{caller.name!r} has a read-only token, and prompts may contain credentials", field="tokens")
    view = TurnList(turns=await service.reader.turns(session_id, tokens=tokens, pieces=pieces, tenant=caller.sees))
    return long_reply([await service.reader.encoded(view)])


@ROUTES.get("/sessions/{session_id}/timeline", "read", TimelineView)
async def timeline(
    service: Serving,
    caller: Caller,
    session_id: str,
    attempt: Annotated[int | None, Query(ge=1, le=MAX_CURSOR, description="default: the newest")] = None,
) -> TimelineView:
    """Get the timeline of an attempt of the session: stages, sandboxes, model calls, commands, processes and errors.
    While the session runs, entries appear after about a second, and processes after at most ten seconds. A read-only
    token gets only the first word of each command, because a task's commands may contain secrets."""
    return await service.reader.timeline(session_id, attempt, whole_commands=caller.may("submit"), tenant=caller.sees)


@ROUTES.get("/sessions/{session_id}/samples", "read", SampleList, forms=ARROW_REPLY)
async def samples(service: Serving, caller: Caller, session_id: str, columns: Columns = False) -> Response:
    """List the session's training rows, once the session is done."""
    view = SampleList(samples=await service.reader.samples(session_id, tenant=caller.sees))
    return await _reply(service, view, columns=columns)


@ROUTES.get("/sessions/{session_id}/chat", "read", ChatList)
async def chat_rows(service: Serving, caller: Caller, session_id: str) -> Response:
    """List the session's training rows as conversations, once the session is done."""
    view = ChatList(rows=await service.reader.chat_rows(session_id, tenant=caller.sees))
    return long_reply([await service.reader.encoded(view)])


async def _reply(service: Service, view: GroupView | SampleList, *, columns: bool) -> Response:
    pieces = await service.reader.columns(view) if columns else [await service.reader.encoded(view)]
    return _in_form(pieces, columns=columns)


def _in_form(pieces: Sequence[bytes], *, columns: bool) -> Response:
    reply = long_reply(pieces, MEDIA_TYPE) if columns else long_reply(pieces)
    reply.headers["Vary"] = "Accept"  # so that a cache does not send the wrong format to a client
    return reply


async def _events(service: Service, after: int, caller: Principal) -> AsyncIterator[bytes]:
    # Polling is cheap, because each read of the store is one indexed query. An event is sent after at most EVENT_PAUSE.
    quiet = 0.0
    yield b"retry: %d\n\n" % RETRY_MS
    while True:
        found = await service.store.events(after=after, limit=EVENTS_AT_ONCE, tenant=caller.sees)
        for event in found:
            after = event.cursor
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (after, event.kind.encode(), msgspec.json.encode(event))
        if len(found) == EVENTS_AT_ONCE:
            continue
        await asyncio.sleep(EVENT_PAUSE)
        quiet = 0.0 if found else quiet + EVENT_PAUSE
        if quiet >= EVENT_PING_SECONDS:
            quiet = 0.0
            yield b": ping\n\n"
