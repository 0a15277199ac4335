"""Control routes for many runs at once: SQL queries, comparisons, pauses of the queue, and changes to all sessions that
match a filter."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from outrider.api.control_replies import long_reply
from outrider.api.control_router import Caller, ControlRouter, Created, Serving, body
from outrider.api.openapi import QUEUE_FULL
from outrider.errors import Busy, Conflict, NotFound
from outrider.schemas import ChangedSessions, QueryReply, QueuePauses, RunDiff
from outrider.spec import PauseSpec, QuerySpec, SessionsSpec

ROUTES = ControlRouter()


@ROUTES.get("/query", "read", QueryReply, errors=(Busy,))
async def query(
    service: Serving, caller: Caller, sql: Annotated[str, Query(description="one SELECT over the views")]
) -> Response:
    """Run an SQL query over the views in docs/queries.md. The rows, the time and the memory are limited."""
    return long_reply([await service.runs.query(sql, caller)])


@ROUTES.post("/query", "read", QueryReply, errors=(Busy,))
async def long_query(service: Serving, caller: Caller, spec: Annotated[QuerySpec, body(QuerySpec)]) -> Response:
    """Run an SQL query that is too long for a URL."""
    return long_reply([await service.runs.query(spec.sql, caller)])


@ROUTES.get("/diff", "read", RunDiff, errors=(Busy, NotFound))
async def diff(
    service: Serving,
    caller: Caller,
    a: Annotated[str, Query(description="labels as NAME=VALUE, or ids of groups, with commas between several")],
    b: Annotated[str, Query(description="the other run")],
    passed: Annotated[float, Query(allow_inf_nan=False, description="least reward of a solved session")] = 1.0,
) -> RunDiff:
    """Compare two runs: rewards, pass@k, turns, tokens, seconds, failures, and the sessions that only one run
    solved."""
    return await service.runs.diff(a, b, passed=passed, caller=caller)


@ROUTES.post("/sessions/cancel", "submit", ChangedSessions, errors=(Conflict, NotFound))
async def cancel(
    service: Serving, caller: Caller, spec: Annotated[SessionsSpec, body(SessionsSpec)], created: Created
) -> ChangedSessions:
    """Cancel all sessions that match the filter and are not done yet."""
    changed = await service.runs.cancel(spec, caller)
    _note(changed, created)
    return changed


@ROUTES.post("/sessions/retry", "submit", ChangedSessions, errors=(Conflict, NotFound), also=QUEUE_FULL)
async def retry(
    service: Serving, caller: Caller, spec: Annotated[SessionsSpec, body(SessionsSpec)], created: Created
) -> ChangedSessions:
    """Submit again all done sessions that match the filter, as new groups of the same tasks. The old results are
    kept."""
    changed = await service.runs.retry(spec, caller)
    _note(changed, created)
    return changed


@ROUTES.get("/queue", "read", QueuePauses)
async def pauses(service: Serving, caller: Caller) -> QueuePauses:
    """List the pauses of the queue, and count the sessions that they hold."""
    return await service.runs.pauses(caller)


@ROUTES.post("/queue/pause", "submit", QueuePauses, errors=(Conflict, NotFound))
async def pause(
    service: Serving, caller: Caller, spec: Annotated[PauseSpec, body(PauseSpec, empty=b"{}")], created: Created
) -> QueuePauses:
    """Start no more sessions of matching groups until the pause ends. Sessions in progress continue. Repeating the call
    changes nothing."""
    paused = await service.runs.pause(spec, caller)
    created(sessions=str(paused.changed))
    return paused


@ROUTES.post("/queue/resume", "submit", QueuePauses, errors=(NotFound,))
async def resume(
    service: Serving, caller: Caller, spec: Annotated[PauseSpec, body(PauseSpec, empty=b"{}")], created: Created
) -> QueuePauses:
    """End the pause that has the same labels, harness and tenant."""
    resumed = await service.runs.resume(spec, caller)
    created(sessions=str(resumed.changed))
    return resumed


def _note(changed: ChangedSessions, created: Created) -> None:
    """Record in the audit log how many sessions were changed."""
    created(sessions=str(changed.changed), matched=str(changed.matched))
    if changed.dry_run:
        created(dry_run="true")
