"""Serves the HTTP interface of Polar's rollout server. (`polar_gateway.py` serves that of Polar's gateway.)

A Polar task is a group of Outrider. The group is found by its idempotency key and its labels (`polar_request.py`).
`polar_results.py` creates the replies, and `polar_events.py` the events. The service runs the sessions itself, so
Polar's gateways cannot register here.

Invariant: a submitted task is stored before the reply is sent. The cancellation of a task that is not submitted yet is
also stored before the reply is sent.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.api.access import CREATED
from outrider.api.compat.polar_events import event_stream
from outrider.api.compat.polar_gateway import PolarGateway, nodes_of
from outrider.api.compat.polar_query import boolean_of, choice_of, limit_of, number_of
from outrider.api.compat.polar_request import (
    ALONE_LABEL,
    HARNESS_LABEL,
    SYSTEM,
    PolarTaskRequest,
    TaskId,
    group_of,
    polar_fields,
    task_idempotency_key,
)
from outrider.api.compat.polar_results import (
    MOST_LISTED,
    PolarObject,
    PolarReader,
    session_summary,
    status_of_task,
    task_id_of,
)
from outrider.api.compat.routes import CompatRoute, compat_reply, large_reply
from outrider.api.control_bodies import whole_body
from outrider.errors import Conflict, NotFound, RequestError, renamed_field
from outrider.lifecycle import SessionState
from outrider.service.principals import Principal
from outrider.store.rows import GroupRow

if TYPE_CHECKING:
    from outrider.service.service import Service

REFUSED_SECONDS = 300.0
"""A task that is cancelled before it is submitted cannot be submitted for this many seconds."""
SUBMIT_STATUSES = {400: 422, 413: 422, 429: 503, 501: 503}
"""For refused submissions: maps the HTTP status of Outrider's error to the status that is sent instead. Polar's clients
handle 409, 422 and 503."""
TASK_STATUSES = ("running", "completed", "failed", "cancelling", "cancelled")
TASK_ID = TypeAdapter(TaskId)
REFUSED_PATHS = ("/nodes/register", "/nodes/{node_id}/heartbeat", "/callbacks/session_result")


def routes(service: Service) -> list[CompatRoute]:
    """Return Polar's routes. Also make the service send the callbacks for Polar's tasks in Polar's format."""
    reader = PolarReader(service)
    service.translate_callbacks(SYSTEM, reader.callback)
    return [*PolarServer(service, reader).routes(), *PolarGateway(service, reader).routes()]


class PolarServer:
    """Handlers of Polar's rollout server. A caller sees only tasks of its own tenant."""

    def __init__(self, service: Service, reader: PolarReader) -> None:
        self._service = service
        self._reader = reader

    def routes(self) -> list[CompatRoute]:
        return [
            CompatRoute("GET", "/health", "read", self.health),
            CompatRoute("POST", "/rollout/task/submit", "submit", self.submit, SUBMIT_STATUSES),
            CompatRoute("GET", "/rollout/task/{task_id}", "read", self.task),
            CompatRoute("DELETE", "/rollout/task/{task_id}", "submit", self.cancel),
            CompatRoute("GET", "/rollout/status", "read", self.status),
            CompatRoute("GET", "/tasks", "read", self.tasks),
            CompatRoute("GET", "/tasks/{task_id}/sessions", "read", self.sessions_of_task),
            CompatRoute("GET", "/nodes", "read", self.nodes),
            CompatRoute("GET", "/nodes/{node_id}", "read", self.node),
            CompatRoute("DELETE", "/nodes/{node_id}", "admin", self.drain_node),
            CompatRoute("GET", "/events", "read", self.events),
            *(CompatRoute("POST", path, "submit", self.refuse) for path in REFUSED_PATHS),
        ]

    async def health(self, request: Request, caller: Principal) -> PolarObject:
        return {"status": "ok", "nodes": len(self._service.nodes().nodes)}

    async def submit(self, request: Request, caller: Principal) -> PolarObject:
        """Store a task as a group. A repeated request returns the same task."""
        asked = await self._service.parse(PolarTaskRequest, await whole_body(request), caller)
        spec = await asyncio.to_thread(group_of, asked, files=self._service.config.files)
        try:
            with polar_fields():
                group = await self._service.submit(spec, caller)
        except Conflict as error:
            if error.field != "task_id":
                raise
            raise error.replace(
                message=error.message.replace(task_idempotency_key(asked.task_id), asked.task_id)
            ) from error
        request.scope[CREATED].update(group_id=group.id)
        row = await self._service.store.group(group.id)
        return {"task_id": asked.task_id, "status": status_of_task(row)}

    async def task(self, request: Request, caller: Principal) -> Response:
        task_id = _named(request)
        row = await self._row(task_id, caller)
        if row is None and await self._service.store.is_refused(caller.tenant, task_idempotency_key(task_id)):
            return compat_reply(_never_submitted(task_id))
        return await self._task_status(_found(row, task_id))

    async def cancel(self, request: Request, caller: Principal) -> Response:
        """Cancel a task. With `register_if_missing`, a task that is not submitted yet can also be cancelled: its
        submission is refused for REFUSED_SECONDS."""
        task_id, store = _named(request), self._service.store
        if boolean_of(request, "register_if_missing"):
            with renamed_field("idempotency_key", "task_id"):
                until = time.time() + REFUSED_SECONDS
                row = await store.refuse_key(caller.tenant, task_idempotency_key(task_id), until=until)
            if row is None:
                return compat_reply(_never_submitted(task_id))
            if row.translator != SYSTEM:
                raise Conflict(f"the idempotency key of this task belongs to group {row.id}", field="task_id")
        else:
            row = _found(await self._row(task_id, caller), task_id)
        await self._service.cancel(row.id, caller)
        return await self._task_status(await store.group(row.id))

    async def _row(self, task_id: str, caller: Principal) -> GroupRow | None:
        row = await self._service.store.keyed_group(caller.tenant, task_idempotency_key(task_id))
        return row if row is not None and row.translator == SYSTEM else None

    async def _task_status(self, row: GroupRow) -> Response:
        status = await self._reader.task_status(row)
        return await large_reply(self._service, lambda: status)

    async def status(self, request: Request, caller: Principal) -> PolarObject:
        rows = await self._service.store.translated_groups(caller.tenant, SYSTEM, limit=MOST_LISTED)
        counts = await self._service.store.counts(tenant=caller.tenant)
        return {
            "tasks": {task_id_of(row): status_of_task(row) for row in rows if ALONE_LABEL not in row.labels},
            "pipeline": {"pending_sessions": counts.get(SessionState.QUEUED, 0)},
            "nodes": {"nodes": nodes_of(self._service, request)},
        }

    async def tasks(self, request: Request, caller: Principal) -> PolarObject:
        wanted, harness = choice_of(request, "status", TASK_STATUSES), request.query_params.get("harness")
        rows = await self._reader.newest(
            caller,
            lambda row: (
                ALONE_LABEL not in row.labels
                and (wanted is None or status_of_task(row) == wanted)
                and (harness is None or row.labels.get(HARNESS_LABEL) == harness)
            ),
            since=number_of(request, "since", -1e15, least=-1e15, most=1e15),
            limit=limit_of(request),
        )
        summaries = []
        for row in rows:
            with suppress(NotFound):  # the group was just removed
                summaries.append(await self._reader.summary(row))
        return {"tasks": summaries}

    async def sessions_of_task(self, request: Request, caller: Principal) -> PolarObject:
        task_id = _named(request)
        row = _found(await self._row(task_id, caller), task_id)
        sessions = await self._service.store.sessions(row.id)
        return {"task_id": task_id, "sessions": [session_summary(row, each) for each in sessions]}

    async def nodes(self, request: Request, caller: Principal) -> list[PolarObject]:
        return nodes_of(self._service, request)

    async def node(self, request: Request, caller: Principal) -> PolarObject:
        return self._node(request)

    async def drain_node(self, request: Request, caller: Principal) -> PolarObject:
        """Start no more sessions on a node, even after a restart of the service."""
        await self._service.drain_node(request.path_params["node_id"])
        return self._node(request)

    def _node(self, request: Request) -> PolarObject:
        name = request.path_params["node_id"]
        for node in nodes_of(self._service, request):
            if node["node_id"] == name:
                return node
        raise NotFound(f"no node {name!r}", hint="GET /nodes lists the nodes")

    async def events(self, request: Request, caller: Principal) -> Response:
        return await event_stream(self._service, request, caller)

    async def refuse(self, request: Request, caller: Principal) -> PolarObject:
        raise RequestError(
            "this service runs its sessions itself: gateways of Polar cannot register here or report results",
            hint="start the service with more lanes and processes, or add machines by `outrider nodes join`",
        )


def _never_submitted(task_id: str) -> PolarObject:
    """Return the TaskStatus of a task that was cancelled before it was submitted."""
    result = {"task_id": task_id, "status": "cancelled", "results": [], "result_paths": []}
    return {**result, "total_sessions": 0, "completed_sessions": 0}


def _named(request: Request) -> str:
    """Return the task id in the path. Raises NotFound if it is not a possible task id."""
    task_id: str = request.path_params["task_id"]
    try:
        return TASK_ID.validate_python(task_id)
    except ValidationError as error:
        raise _no_task(task_id) from error


def _no_task(task_id: str) -> NotFound:
    return NotFound(f"no task {task_id!r}", hint="GET /tasks lists the tasks")


def _found(row: GroupRow | None, task_id: str) -> GroupRow:
    if row is None:
        raise _no_task(task_id)
    return row
