"""Control routes for sessions whose agents run outside Outrider, and for the list of all sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request

from outrider.api.control_router import Caller, ControlRouter, Created, Serving, body
from outrider.api.session_filter import Wanted
from outrider.errors import Conflict, NotFound, RuntimeUnavailable
from outrider.harnesses.base import ModelEndpoint, SessionIds
from outrider.harnesses.endpoint_variables import endpoint_environment
from outrider.schemas import SessionEndpoint, SessionList, SessionView
from outrider.spec import ReportSpec, SessionSpec

ROUTES = ControlRouter("/sessions")


@ROUTES.post("", "submit", SessionEndpoint, status=201, errors=(Conflict, NotFound, RuntimeUnavailable))
async def open_session(
    service: Serving,
    caller: Caller,
    spec: Annotated[SessionSpec, body(SessionSpec, empty=b"{}")],
    created: Created,
    request: Request,
) -> SessionEndpoint:
    """Open a session for an agent that runs elsewhere, and get its credential and addresses. Opening the session again
    gives the same credential. The session is recognised by its idempotency key, or by its group and its index in the
    group."""
    session, credential, running, instruction = await service.session_control.open(spec, caller)
    created(group_id=session.group_id, session_id=session.id)
    urls = service.config.advertised_urls or {"default": f"{request.url.scheme}://{request.url.netloc}"}
    bases = {network: f"{url}/s/{credential}" for network, url in urls.items()}
    base = next(iter(bases.values()))
    endpoint = ModelEndpoint(base_url=base, api_key=credential, model=service.model)
    ids = SessionIds(
        group_id=session.group_id,
        session_id=session.id,
        sample_index=session.sample_index,
        attempt=max(1, session.attempt),
    )
    variables = endpoint_environment(endpoint, instruction, ids)
    return SessionEndpoint(
        session=session,
        running=running,
        key=credential,
        model=service.model,
        base_url=base,
        base_urls=bases,
        instruction=instruction,
        variables={name: value for name, value in variables.items() if value},
    )


@ROUTES.get("", "read", SessionList, errors=(NotFound,))
async def sessions(
    service: Serving,
    caller: Caller,
    wanted: Wanted,
    after: Annotated[str | None, Query(description="the `after` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> SessionList:
    """List sessions: the newest group first, and the sessions of a group in sample order. `state` is `queued`,
    `initializing`, `ready`, `running`, `evaluating` or `done`."""
    return await service.runs.sessions(wanted, after=after, limit=limit, caller=caller)


@ROUTES.post("/{session_id}/complete", "submit", SessionView, errors=(Conflict,))
async def complete(
    service: Serving, caller: Caller, session_id: str, spec: Annotated[ReportSpec, body(ReportSpec)]
) -> SessionView:
    """Complete a session whose agent runs elsewhere: end its run, and grade it. The report is stored before the reply
    is sent. The request may be repeated with the same report."""
    return await service.session_control.complete(session_id, spec, caller)


@ROUTES.post("/{session_id}/reset", "submit", SessionView, errors=(Conflict,))
async def reset(service: Serving, caller: Caller, session_id: str) -> SessionView:
    """Delete the turns of a session whose agent runs elsewhere, so that its agent can start over."""
    return await service.session_control.reset(session_id, caller)
