"""Control routes for groups, sessions, results and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from outrider.api.access import caller_in, made, sees
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply, long_reply
from outrider.api.openapi import QUEUE_FULL, answers, refusals, takes
from outrider.errors import Conflict, Forbidden, InvalidField, RuntimeUnavailable
from outrider.lifecycle import GroupState
from outrider.schemas import ChatList, GroupList, GroupView, ResultsPage, SampleList, SessionView, TurnList
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.service.views import group_summary
from outrider.spec import CONSUMER_NAME, MAX_CURSOR, GroupSpec, RegradeSpec

MAX_WAIT = 60.0
"""Maximum seconds that a request may wait, below the usual timeouts of clients and proxies."""
EVENTS_AT_ONCE = 500
EVENT_PAUSE = 0.25
"""Seconds between two reads of the event log."""
EVENT_PING_SECONDS = 15.0
"""A client of events gets a comment after this many seconds without an event, so that proxies keep the connection."""

RETRY_MS = 1000
"""Milliseconds after which a client of events that has lost its connection reconnects."""

After = Annotated[int, Query(ge=0, le=MAX_CURSOR)]
LAST_EVENT_ID = "Last-Event-ID"
Samples = Annotated[bool, Query(description="include the training rows")]


def group_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post(
        "/groups",
        status_code=201,
        **takes(GroupSpec),
        **answers(GroupView, Conflict, RuntimeUnavailable, status=201, also=QUEUE_FULL),
    )
    async def submit(request: Request) -> Response:
        """Submit a group of sessions of one task. The group is stored before the reply is sent."""
        caller = caller_in(request.scope)
        spec = await service.parse(GroupSpec, await whole_body(request), caller)
        group = await service.submit(spec, caller)
        made(request, group_id=group.id)
        return json_reply(group, status=201)

    @routes.get("/groups", **answers(GroupList))
    async def groups(
        request: Request, state: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 20
    ) -> Response:
        """List groups, newest first, without their sessions."""
        try:
            wanted = None if state is None else GroupState(state)
        except ValueError as error:
            known = ", ".join(state.value for state in GroupState)
            raise InvalidField(f"{state!r} is not a group state", field="state", hint=f"known: {known}") from error
        rows = await service.store.groups(state=wanted, limit=limit, tenant=sees(request))
        return json_reply(GroupList(groups=tuple(map(group_summary, rows))))

    @routes.get("/groups/{group_id}", **answers(GroupView))
    async def group(
        request: Request,
        group_id: str,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT, description="seconds to wait until it is done")] = 0.0,
        samples: Samples = False,
    ) -> Response:
        """Get one group with its sessions."""
        view = await service.group(group_id, wait=wait, samples=samples, caller=caller_in(request.scope))
        return long_reply(await service.reader.encoded(view))

    @routes.delete("/groups/{group_id}", **answers(GroupView))
    async def cancel(request: Request, group_id: str) -> Response:
        """Cancel a group in any state of its sessions. Cancelling the group again changes nothing."""
        return json_reply(await service.cancel(group_id, caller_in(request.scope)))

    @routes.post(
        "/groups/{group_id}/regrade",
        status_code=201,
        **takes(RegradeSpec),
        **answers(GroupView, Conflict, RuntimeUnavailable, status=201, also=QUEUE_FULL),
    )
    async def regrade(request: Request, group_id: str) -> Response:
        """Grade the sessions of a group again, as a new group that runs no agent. The old verdicts stay."""
        caller = caller_in(request.scope)
        asked = await service.parse(RegradeSpec, await whole_body(request), caller)
        group = await service.regrade_group(group_id, asked, caller)
        made(request, group_id=group.id)
        return json_reply(group, status=201)

    @routes.get("/results", **answers(ResultsPage, Conflict))
    async def results(
        request: Request,
        after: Annotated[
            int | None, Query(ge=0, le=MAX_CURSOR, description="default: 0, or the position of the `consumer`")
        ] = None,
        consumer: Annotated[str | None, Query(pattern=CONSUMER_NAME, description="who reads: see docs/api.md")] = None,
        wait: Annotated[float, Query(ge=0, le=MAX_WAIT, description="seconds to wait for the first")] = 0.0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        samples: Samples = False,
    ) -> Response:
        """List done groups after a cursor, in the order they finished: up to `limit` groups and up to 8 MiB, but at
        least one. Repeat the request with `after` set to the reply's `cursor` until a reply has no groups.

        A `consumer` reads on from the position that it has acknowledged. A new consumer begins at `after`. Groups that
        a consumer has not acknowledged are kept, so reading as a consumer requires a token that may submit.
        """
        caller = caller_in(request.scope)
        start = after or 0
        if consumer is not None:
            if not caller.may("submit"):
                raise Forbidden(
                    f"{caller.name!r} has a token that changes nothing, and to read as a consumer keeps results stored",
                    hint="read with `after`, and keep the last cursor yourself; or take a token with the role 'submit'",
                    field="consumer",
                )
            position = await service.store.consumers.enter(consumer, at=start, tenant=caller.sees)
            start = position if after is None else after
        page = await service.results(after=start, wait=wait, limit=limit, samples=samples, caller=caller)
        return long_reply(page.json())

    @routes.get("/events", response_class=StreamingResponse, responses=refusals(Conflict))
    async def events(
        request: Request,
        after: After = 0,
        last_id: Annotated[
            int | None, Header(alias=LAST_EVENT_ID, ge=0, le=MAX_CURSOR, description="wins over `after`")
        ] = None,
    ) -> StreamingResponse:
        """Stream every change after a cursor, as server-sent events without end. The id of an event is its cursor."""
        caller = caller_in(request.scope)
        start = after if last_id is None else last_id
        if start > (newest := await service.store.last_event(tenant=caller.sees)):
            raise Conflict(
                f"no event has the id {start}: the newest is {newest}",
                field="after" if last_id is None else LAST_EVENT_ID,
                hint="the service has begun anew, without its data: read its events from 0",
            )
        return StreamingResponse(_events(service, start, caller), media_type="text/event-stream")

    @routes.get("/sessions/{session_id}", **answers(SessionView))
    async def session(request: Request, session_id: str) -> Response:
        """Get one session."""
        return json_reply(await service.reader.session(session_id, tenant=sees(request)))

    @routes.delete("/sessions/{session_id}", **answers(SessionView))
    async def cancel_session(request: Request, session_id: str) -> Response:
        """Cancel one session in any state; the other sessions of its group go on. Repeating the call changes
        nothing."""
        return json_reply(await service.cancel_session(session_id, caller_in(request.scope)))

    @routes.post(
        "/sessions/{session_id}/regrade",
        status_code=201,
        **takes(RegradeSpec),
        **answers(GroupView, Conflict, RuntimeUnavailable, status=201, also=QUEUE_FULL),
    )
    async def regrade_session(request: Request, session_id: str) -> Response:
        """Grade one session again, as a new group of one. The old verdict stays."""
        caller = caller_in(request.scope)
        asked = await service.parse(RegradeSpec, await whole_body(request), caller)
        group = await service.regrade_session(session_id, asked, caller)
        made(request, group_id=group.id)
        return json_reply(group, status=201)

    @routes.get("/sessions/{session_id}/turns", **answers(TurnList))
    async def turns(request: Request, session_id: str) -> Response:
        """List the model calls of the session's newest attempt, as text."""
        view = TurnList(turns=await service.reader.turns(session_id, tenant=sees(request)))
        return long_reply(await service.reader.encoded(view))

    @routes.get("/sessions/{session_id}/samples", **answers(SampleList))
    async def samples(request: Request, session_id: str) -> Response:
        """List the session's training rows, once the session is done."""
        view = SampleList(samples=await service.reader.samples(session_id, tenant=sees(request)))
        return long_reply(await service.reader.encoded(view))

    @routes.get("/sessions/{session_id}/chat", **answers(ChatList))
    async def chat_rows(request: Request, session_id: str) -> Response:
        """List the session's training rows as conversations, once the session is done."""
        view = ChatList(rows=await service.reader.chat_rows(session_id, tenant=sees(request)))
        return long_reply(await service.reader.encoded(view))

    return routes


async def _events(service: Service, after: int, caller: Principal) -> AsyncIterator[bytes]:
    # The log is polled, because polling costs little: each read is one indexed query. A client gets an event after at
    # most EVENT_PAUSE.
    quiet = 0.0
    yield b"retry: %d\n\n" % RETRY_MS
    while True:
        found = await service.events(after=after, limit=EVENTS_AT_ONCE, caller=caller)
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
