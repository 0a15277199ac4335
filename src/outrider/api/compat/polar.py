"""The HTTP interface of Polar: the routes of its rollout server, and of its gateway below `/gateway` and at the root.

A task of Polar is a group of ours, which the idempotency key and labels name (`polar_request.py`); `polar_results.py`
makes the replies, and `polar_events.py` the events. The service runs its sessions itself, so gateways of Polar cannot
register. Invariant: a task is stored before the reply to its submission, and a cancellation of a task that is not
submitted yet is stored before the reply, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.api.access import CREATED
from outrider.api.compat.gateway_call import GatewayCall
from outrider.api.compat.polar_events import last_event_of, polar_events
from outrider.api.compat.polar_request import (
    ALONE_LABEL,
    HARNESS_LABEL,
    MODEL_LABEL,
    SYSTEM,
    PolarDispatchRequest,
    PolarSessionRequest,
    PolarTaskRequest,
    TaskId,
    dispatched_group,
    group_of,
    key_of,
    manual_group,
    polar_fields,
    session_key_of,
)
from outrider.api.compat.polar_results import (
    ENDINGS,
    STATES,
    PolarObject,
    PolarReader,
    completion_of,
    encoded,
    session_summary,
    status_of_session,
    status_of_task,
    task_id_of,
)
from outrider.api.compat.routes import CompatRoute, compat_reply, detail
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import long_reply
from outrider.api.gateway import Gateway
from outrider.errors import Conflict, InvalidField, NotFound, RequestError, renamed_field
from outrider.lifecycle import SessionState
from outrider.schemas import LaneStats, NodeStats
from outrider.service.principals import Principal
from outrider.service.service import Service
from outrider.sessions.external import EXTERNAL
from outrider.spec import Spec, StoredGroupSpec
from outrider.store.rows import GroupRow, SessionRow

REFUSED_SECONDS = 300.0
"""Seconds for which a task that was cancelled before its submission cannot be submitted."""
SUBMIT_STATUSES = {400: 422, 413: 422, 429: 503, 501: 503}
"""Statuses of a refused submission, by the status of the error's class: Polar's clients know 409, 422 and 503."""
SESSION_STATUSES = {422: 400, 413: 400, 429: 503, 501: 503}
"""Statuses of a session that is not made, by the status of the error's class: Polar's clients know 400 and 409."""
OPEN_SECONDS = 5.0
"""Maximum seconds that making a session waits until the session takes model calls."""
PROXY_SESSION = "_proxy_session_id"
"""The field of a model call's body that names the session."""
TASK_STATUSES = ("running", "completed", "failed", "cancelling", "cancelled")
KNOWN_SESSION_STATUSES = (*STATES.values(), *ENDINGS.values())
MOST_LISTED = 1000
"""Maximum number of tasks or sessions in a list."""
MOST_SEARCHED = 10_000
"""Maximum number of tasks, the newest, among which a filter searches."""
TASK_ID = TypeAdapter(TaskId)
SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
PAUSE_SECONDS = 300.0
"""Default seconds that a pause waits for the generations in flight."""
MOST_PAUSE_SECONDS = 3600.0
TOO_LATE = 504
"""The status of a pause whose generations did not end in time."""


class _TokenizeRequest(Spec):
    """The body of `POST /v1/tokenize`. Further fields have no effect."""

    model_config = ConfigDict(**{**Spec.model_config, "extra": "ignore"})

    text: str | None = None
    prompt: str | None = None


def routes(service: Service) -> list[CompatRoute]:
    """Return Polar's routes, and have the service send the callbacks of Polar's tasks in Polar's form."""
    polar = PolarApi(service)
    service.translate_callbacks(SYSTEM, polar.reader.callback)
    server = [
        CompatRoute("GET", "/health", "read", polar.health),
        CompatRoute("POST", "/rollout/task/submit", "submit", polar.submit, SUBMIT_STATUSES),
        CompatRoute("GET", "/rollout/task/{task_id}", "read", polar.task),
        CompatRoute("DELETE", "/rollout/task/{task_id}", "submit", polar.cancel),
        CompatRoute("GET", "/rollout/status", "read", polar.status),
        CompatRoute("GET", "/tasks", "read", polar.tasks),
        CompatRoute("GET", "/tasks/{task_id}/sessions", "read", polar.sessions_of_task),
        CompatRoute("GET", "/nodes", "read", polar.nodes),
        CompatRoute("GET", "/nodes/{node_id}", "read", polar.node),
        CompatRoute("DELETE", "/nodes/{node_id}", "admin", polar.drain_node),
        CompatRoute("GET", "/events", "read", polar.events),
    ]
    gateway = [
        CompatRoute("GET", "/", "read", polar.alive),
        CompatRoute("GET", "/v1/models", "read", polar.models),
        CompatRoute("POST", "/v1/tokenize", "read", polar.tokenize),
        CompatRoute("GET", "/admin/inference/status", "read", polar.inference),
        CompatRoute("POST", "/admin/inference/pause", "admin", polar.pause),
        CompatRoute("POST", "/admin/inference/resume", "admin", polar.resume),
        CompatRoute("GET", "/sessions", "read", polar.sessions),
        CompatRoute("POST", "/sessions", "submit", polar.make_session, SESSION_STATUSES),
        CompatRoute("GET", "/sessions/{session_id}", "read", polar.session),
        CompatRoute("GET", "/sessions/{session_id}/completions", "read", polar.completions),
        CompatRoute("DELETE", "/sessions/{session_id}", "submit", polar.cancel_session),
    ]
    gateway += [CompatRoute("POST", path, "submit", polar.model_call) for path in VENDOR_PATHS]
    refused = [CompatRoute("POST", path, "submit", polar.refuse) for path in REFUSED_PATHS]
    below = [
        *gateway,
        CompatRoute("GET", "/health", "read", polar.gateway_health),
        CompatRoute("GET", "/events", "read", polar.session_events),
    ]
    return [*server, *gateway, *refused, *(route._replace(path=f"/gateway{route.path}") for route in below)]


VENDOR_PATHS = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models/{call}",
    "/v1beta/models/{call}",
)
REFUSED_PATHS = ("/nodes/register", "/nodes/{node_id}/heartbeat", "/callbacks/session_result")


class PolarApi:
    """The handlers of Polar's routes. Tasks are those of the caller's tenant."""

    def __init__(self, service: Service) -> None:
        self.reader = PolarReader(service)
        self._service = service
        self._gateway = Gateway(service.external)
        self._making: set[tuple[str, str]] = set()
        """Tenants and ids of the sessions that are being made, so that only one of several requests at once makes a
        session."""

    async def health(self, request: Request, caller: Principal) -> PolarObject:
        return {"status": "ok", "nodes": len(self._service.nodes().nodes)}

    async def submit(self, request: Request, caller: Principal) -> PolarObject:
        """Store a task's group. The same request again gives the same task."""
        asked = await self._service.parse(PolarTaskRequest, await whole_body(request), caller)
        spec = await asyncio.to_thread(group_of, asked, files=self._service.config.files)
        try:
            with polar_fields():
                group = await self._service.submit(spec, caller)
        except Conflict as error:
            if error.field != "task_id":
                raise
            raise error.replace(message=error.message.replace(key_of(asked.task_id), asked.task_id)) from error
        request.scope[CREATED].update(group_id=group.id)
        row = await self._service.store.group(group.id)
        return {"task_id": asked.task_id, "status": status_of_task(row)}

    async def task(self, request: Request, caller: Principal) -> Response:
        task_id = _named(request)
        row = await self._row(task_id, caller)
        if row is None and await self._service.store.is_refused(caller.tenant, key_of(task_id)):
            return compat_reply(_never_submitted(task_id))
        return await self._task_status(_found(row, task_id))

    async def cancel(self, request: Request, caller: Principal) -> Response:
        """Cancel a task. With `register_if_missing`, a task that is not submitted yet cannot be submitted for
        REFUSED_SECONDS."""
        task_id, store = _named(request), self._service.store
        if _boolean(request, "register_if_missing"):
            with renamed_field("idempotency_key", "task_id"):
                until = time.time() + REFUSED_SECONDS
                row = await store.refuse_key(caller.tenant, key_of(task_id), until=until)
            if row is None:
                return compat_reply(_never_submitted(task_id))
            if row.translator != SYSTEM:
                raise Conflict(f"the key of this task belongs to group {row.id}", field="task_id")
        else:
            row = _found(await self._row(task_id, caller), task_id)
        await self._service.cancel(row.id, caller)
        return await self._task_status(await store.group(row.id))

    async def _row(self, task_id: str, caller: Principal) -> GroupRow | None:
        row = await self._service.store.keyed_group(caller.tenant, key_of(task_id))
        return row if row is not None and row.translator == SYSTEM else None

    async def _task_status(self, row: GroupRow) -> Response:
        return await self._reply(await self.reader.task_status(row))

    async def _reply(self, value: Any) -> Response:
        """Return the reply with a value that may be large and may have numpy arrays."""
        return long_reply([await self._service.reader.offload(partial(encoded, value))])

    async def status(self, request: Request, caller: Principal) -> PolarObject:
        rows = await self._service.store.translated_groups(caller.tenant, SYSTEM, limit=MOST_LISTED)
        counts = await self._service.store.counts(tenant=caller.tenant)
        return {
            "tasks": {task_id_of(row): status_of_task(row) for row in rows if ALONE_LABEL not in row.labels},
            "pipeline": {"pending_sessions": counts.get(SessionState.QUEUED, 0)},
            "nodes": {"nodes": self._nodes(request)},
        }

    async def tasks(self, request: Request, caller: Principal) -> PolarObject:
        wanted, harness = _choice(request, "status", TASK_STATUSES), request.query_params.get("harness")
        rows = await self._rows(
            caller,
            lambda row: (
                ALONE_LABEL not in row.labels
                and (wanted is None or status_of_task(row) == wanted)
                and (harness is None or row.labels.get(HARNESS_LABEL) == harness)
            ),
            since=_number(request, "since", -1e15, least=-1e15, most=1e15),
            limit=_limit(request),
        )
        summaries = []
        for row in rows:
            with suppress(NotFound):  # the group was removed meanwhile
                summaries.append(await self.reader.summary(row))
        return {"tasks": summaries}

    async def _rows(
        self, caller: Principal, wanted: Callable[[GroupRow], bool], *, limit: int, since: float = -1e15
    ) -> list[GroupRow]:
        """Return the newest tasks of the caller that are `wanted`."""
        found: list[GroupRow] = []
        before: tuple[float, str] | None = None
        for _ in range(MOST_SEARCHED // MOST_LISTED):
            page = await self._service.store.translated_groups(
                caller.tenant, SYSTEM, since=since, before=before, limit=MOST_LISTED
            )
            found += filter(wanted, page)
            if len(found) >= limit or len(page) < MOST_LISTED:
                break
            before = page[-1].created, page[-1].id
        return found[:limit]

    async def sessions_of_task(self, request: Request, caller: Principal) -> PolarObject:
        task_id = _named(request)
        row = _found(await self._row(task_id, caller), task_id)
        sessions = await self._service.store.sessions(row.id)
        return {"task_id": task_id, "sessions": [session_summary(row, each) for each in sessions]}

    async def nodes(self, request: Request, caller: Principal) -> list[PolarObject]:
        return self._nodes(request)

    async def node(self, request: Request, caller: Principal) -> PolarObject:
        return self._node(request)

    async def drain_node(self, request: Request, caller: Principal) -> PolarObject:
        """Place no more sessions on a node. The setting survives a restart."""
        await self._service.drain_node(request.path_params["node_id"])
        return self._node(request)

    def _nodes(self, request: Request) -> list[PolarObject]:
        return [_node_info(node, _base(request)) for node in self._service.nodes().nodes]

    def _node(self, request: Request) -> PolarObject:
        name = request.path_params["node_id"]
        for node in self._nodes(request):
            if node["node_id"] == name:
                return node
        raise NotFound(f"no node {name!r}", hint="GET /nodes lists the nodes")

    async def events(self, request: Request, caller: Principal) -> Response:
        after = await last_event_of(self._service, request, caller)
        return StreamingResponse(polar_events(self._service, after, caller), media_type="text/event-stream")

    async def session_events(self, request: Request, caller: Principal) -> Response:
        after = await last_event_of(self._service, request, caller)
        events = polar_events(self._service, after, caller, sessions_only=True)
        return StreamingResponse(events, media_type="text/event-stream")

    # The gateway.

    async def alive(self, request: Request, caller: Principal) -> PolarObject:
        return {"status": "ok", "service": "outrider"}

    async def gateway_health(self, request: Request, caller: Principal) -> Response:
        counts = await self._service.store.counts(tenant=caller.sees)
        nodes = [_node_info(node, _base(request)) for node in self._service.nodes().nodes]
        active = {STATES[state]: count for state, count in counts.items() if state in STATES}
        able = any(engine.ok for engine in self._service.pool.status())

        def free(work: str, used: str) -> int:
            return sum(max(0, node[work] - node["metrics"][used]) for node in nodes if not node["draining"])

        body = {
            "status": "ok" if able else "no_engine",
            "node_id": SYSTEM,
            "gateway_url": _base(request),
            "inference": self._inference(),
            "metrics": {name: sum(node["metrics"][name] for node in nodes) for name in METRICS},
            "active_status_counts": active,
            "active_sessions": sum(active.values()),
            "available_init": free("max_init_workers", "init_inflight"),
            "available_run": free("max_run_workers", "run_inflight"),
            "available_postrun": free("max_postrun_workers", "postrun_inflight"),
            "completion_persistence": None,
        }
        return compat_reply(body, status=200 if able else 503)

    async def models(self, request: Request, caller: Principal) -> PolarObject:
        model = {"id": self._service.config.model.name, "object": "model", "owned_by": "outrider"}
        return {"object": "list", "data": [model]}

    async def tokenize(self, request: Request, caller: Principal) -> PolarObject:
        asked = await self._service.parse(_TokenizeRequest, await whole_body(request), caller)
        text = asked.text if asked.text is not None else asked.prompt
        if text is None:
            raise InvalidField("is missing", field="text")
        contexts = [engine.context_tokens for engine in self._service.pool.status() if engine.context_tokens]
        own = self._service.config.model.context_tokens
        return {
            "count": await self._service.reader.count_tokens(text),
            "max_model_len": min([*contexts, own] if own else contexts, default=None),
        }

    def _inference(self) -> PolarObject:
        engines = self._service.pool.status()
        return {
            "paused": self._service.pool.policy.status().paused is not None,
            "inflight": sum(engine.in_flight for engine in engines),
            "base_url": next((engine.url for engine in engines if engine.url), None),
            "engine": engines[0].kind if engines else None,
        }

    async def inference(self, request: Request, caller: Principal) -> PolarObject:
        return self._inference()

    async def pause(self, request: Request, caller: Principal) -> Any:
        """Pause the policy once the generations in flight have ended. If they do not end in time, the policy generates
        again."""
        seconds = _number(request, "timeout_seconds", PAUSE_SECONDS, least=0.001, most=MOST_PAUSE_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await self._service.pool.policy.pause("finish")
        except TimeoutError:
            inflight = self._inference()["inflight"]
            error = RequestError(
                f"{inflight} generations were in flight after {seconds:g} s, so the policy is not paused",
                hint="try again with a longer timeout_seconds, or POST /v1/policy/pause with the mode 'abort'",
            )
            return detail(error, status=TOO_LATE)
        return self._inference()

    async def resume(self, request: Request, caller: Principal) -> PolarObject:
        await self._service.pool.policy.resume()
        return self._inference()

    async def sessions(self, request: Request, caller: Principal) -> PolarObject:
        wanted, task_id = _choice(request, "status", KNOWN_SESSION_STATUSES), request.query_params.get("task_id")
        limit = _limit(request)
        rows = await self._rows(caller, lambda row: task_id is None or task_id_of(row) == task_id, limit=MOST_LISTED)
        found: list[PolarObject] = []
        for row in rows:
            with suppress(NotFound):  # the group was removed meanwhile
                for session in await self._service.store.sessions(row.id):
                    if len(found) < limit and wanted in (None, status_of_session(session)):
                        found.append(await self._listed(row, session))
            if len(found) == limit:
                break
        return {"sessions": found, "node_id": SYSTEM}

    async def _listed(self, row: GroupRow, session: SessionRow) -> PolarObject:
        now = time.time()
        turns = await self._service.store.turns(session.id) if session.attempt else []
        return {
            "session_id": _id_of(row, session),
            "task_id": task_id_of(row),
            "status": status_of_session(session),
            "age_seconds": max(0.0, now - session.created),
            "idle_seconds": max(0.0, now - max([session.updated, *(turn.timings.finished for turn in turns[-1:])])),
            "completion_count": len(turns),
            "model_requested": row.labels.get(MODEL_LABEL) or None,
            "model_used": self._service.config.model.name,
            "api_type": turns[-1].dialect if turns else None,
            "created_at": session.created,
            "node_id": session.node,
        }

    async def session(self, request: Request, caller: Principal) -> Response:
        row, session = await self._session(request, caller)
        turns = await self._service.store.turns(session.id) if session.attempt else []
        shown: PolarObject = {
            "session_id": _id_of(row, session),
            "task_id": task_id_of(row),
            "created_at": session.created,
            "completion_count": len(turns),
            "status": status_of_session(session),
        }
        if session.result is not None:
            shown["result"] = await self.reader.session_result(row, session)
        return await self._reply(shown)

    async def completions(self, request: Request, caller: Principal) -> Response:
        row, session = await self._session(request, caller)
        turns = await self._service.store.turns(session.id) if session.attempt else []
        model = self._service.config.model.name

        def made() -> bytes:
            records = [completion_of(turn, turns, model) for turn in turns]
            return encoded(
                {"session_id": _id_of(row, session), "completions": records, "node_id": session.node or SYSTEM}
            )

        return long_reply([await self._service.reader.offload(made)])

    async def cancel_session(self, request: Request, caller: Principal) -> PolarObject:
        """Cancel one session. Its model calls are kept until the task is removed."""
        row, session = await self._session(request, caller)
        await self._service.cancel_session(session.id, caller)
        return {"session_id": _id_of(row, session), "deleted": True, "messages_deleted": 0}

    async def _session(self, request: Request, caller: Principal) -> tuple[GroupRow, SessionRow]:
        """Return the session in the path, and its task's group."""
        session_id = request.path_params["session_id"]
        if not SESSION_ID.fullmatch(session_id):
            raise RequestError("a session's id has at most 128 letters, digits, '.', '_' and '-'", field="session_id")
        return await self._found_session(session_id, caller)

    async def _found_session(self, session_id: str, caller: Principal) -> tuple[GroupRow, SessionRow]:
        """Return a session by the id that its client gave, or by its own, and its group. Raises NotFound."""
        store = self._service.store
        row = await store.keyed_group(caller.tenant, session_key_of(session_id))
        if row is not None and row.translator == SYSTEM:
            return row, (await store.sessions(row.id))[0]
        session = await store.session(session_id, tenant=caller.sees)
        row = await store.group(session.group_id)
        if row.translator != SYSTEM:
            raise NotFound(f"session {session_id!r} is of no task of Polar", hint="see it at /v1/sessions")
        return row, session

    async def make_session(self, request: Request, caller: Principal) -> PolarObject:
        """Make a session alone: one that this service runs if the request has an agent, else one whose agent the client
        starts itself."""
        body = await whole_body(request)
        if await self._service.reader.offload(partial(_field_of, body, "agent")) is not None:
            asked = await self._service.parse(PolarDispatchRequest, body, caller)
            spec = await asyncio.to_thread(dispatched_group, asked, files=self._service.config.files)
            row, session = await self._made(request, caller, spec, asked.session_id)
            common = {"session_id": asked.session_id, "task_id": asked.task_id}
            return {**common, "status": "REGISTERED", "node_id": session.node or SYSTEM}
        manual = await self._service.parse(PolarSessionRequest, body or b"{}", caller)
        session_id = manual.session_id or f"sk-polar-{uuid4()}"
        spec = manual_group(session_id, manual.task_id or session_id)
        row, session = await self._made(request, caller, spec, session_id)
        await self._service.external.running(session.id, OPEN_SECONDS)
        session = await self._service.store.session(session.id)
        return {
            "session_id": session_id,
            "task_id": task_id_of(row),
            "created_at": session.created,
            "completion_count": 0,
            "status": status_of_session(session),
        }

    async def _made(
        self, request: Request, caller: Principal, spec: StoredGroupSpec, session_id: str
    ) -> tuple[GroupRow, SessionRow]:
        store, named = self._service.store, (caller.tenant, session_id)
        used = Conflict(f"there is, or was, a session {session_id!r}: an id is used once", field="session_id")
        if named in self._making:
            raise used
        self._making.add(named)
        try:
            if await store.has_key(caller.tenant, session_key_of(session_id)):
                raise used
            with renamed_field("idempotency_key", "session_id"), polar_fields():
                group = await self._service.submit(spec, caller)
        finally:
            self._making.discard(named)
        request.scope[CREATED].update(group_id=group.id, session_id=group.sessions[0].id)
        return await store.group(group.id), await store.session(group.sessions[0].id)

    async def model_call(self, request: Request, caller: Principal) -> Response:
        """Pass a vendor's model call to the model gateway. The session is named by the header X-Session-Id, by the
        query (`session_id` or `key`), by the API key, or by the body's field PROXY_SESSION. The reply has the vendor's
        form. Its status is 401 for a session that is unknown or whose agent this service has started."""
        path: str = request.scope["path"]
        body: bytes | None = None
        headers, query = request.headers, request.query_params
        named = [headers.get("x-session-id"), query.get("session_id"), query.get("key")]
        named += [headers.get("x-api-key"), headers.get("x-goog-api-key")]
        named.append(headers.get("authorization", "").removeprefix("Bearer ").strip())
        key = await self._key_of([each for each in named if each], caller)
        if key is None and named[0] is None:
            body = await whole_body(request)
            in_body, body = await self._service.reader.offload(partial(_without_field, body, PROXY_SESSION))
            key = await self._key_of([in_body] if isinstance(in_body, str) else [], caller)
        return GatewayCall(self._gateway, f"/s/{key or 'unknown'}{path[path.index('/v1') :]}", body)

    async def _key_of(self, names: Sequence[str], caller: Principal) -> str | None:
        """Return the credential of the first session among `names` whose agent runs elsewhere."""
        for name in names:
            if SESSION_ID.fullmatch(name):
                with suppress(NotFound):
                    row, session = await self._found_session(name, caller)
                    if row.harness == EXTERNAL:
                        return self._service.store.credential_of(session.id)
        return None

    async def refuse(self, request: Request, caller: Principal) -> PolarObject:
        raise RequestError(
            "this service runs its sessions itself: gateways of Polar cannot register here or report results",
            hint="start the service with more lanes and processes, or add machines by `outrider nodes join`",
        )


METRICS = (
    "init_queue_depth",
    "init_inflight",
    "ready_depth",
    "run_inflight",
    "postrun_queue_depth",
    "postrun_inflight",
)


def _node_info(node: NodeStats, url: str) -> PolarObject:
    """Return a node of the service in the form of a gateway of Polar."""
    none = LaneStats(name="", size=0, in_use=0, waiting=0, served=0, waited_seconds=0.0)
    lanes = {lane.name: lane for lane in node.lanes}
    init, ready, run, grading = (lanes.get(name, none) for name in ("init", "ready", "run", "eval"))
    depths = (init.waiting + ready.waiting, init.in_use, run.waiting, run.in_use, grading.waiting, grading.in_use)
    return {
        "node_id": node.name,
        "gateway_url": url,
        "max_init_workers": max(1, init.size),
        "max_run_workers": max(1, run.size),
        "max_postrun_workers": max(1, grading.size),
        "heartbeat_interval_seconds": 30,
        "metrics": dict(zip(METRICS, depths, strict=True)),
        "dispatch_reservations": 0,
        "healthy": True,
        "draining": node.drained,
        "last_heartbeat": time.time(),
    }


def _never_submitted(task_id: str) -> PolarObject:
    """Return the TaskStatus of a task that was cancelled before its submission."""
    result = {"task_id": task_id, "status": "cancelled", "results": [], "result_paths": []}
    return {**result, "total_sessions": 0, "completed_sessions": 0}


def _named(request: Request) -> str:
    """Return the task id in the path. Raises NotFound for a text that no task can have as its id."""
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


def _id_of(row: GroupRow, session: SessionRow) -> str:
    """Return the id under which a client sees a session."""
    return row.labels.get(ALONE_LABEL, session.id)


def _field_of(body: bytes, name: str) -> Any:
    """Return a field of a JSON object, None for anything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value.get(name) if isinstance(value, dict) else None


def _without_field(body: bytes, name: str) -> tuple[Any, bytes]:
    """Return a field of a JSON object, and the object without the field, whose other values are unchanged to the byte.
    A body without the field is returned as given."""
    if name.encode() not in body or (found := _field_of(body, name)) is None:
        return None, body
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, body
    del values[name]
    return found, msgspec.json.encode(values)


def _base(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc}"


def _boolean(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidField(f"must be true or false, not {given!r}", field=name)
    return given in ("true", "1")


def _number(request: Request, name: str, usual: float, *, least: float, most: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return usual
    with suppress(ValueError):
        if least <= (value := float(given)) <= most:
            return value
    raise InvalidField(f"must be a number from {least:g} to {most:g}", field=name)


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", "200")
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= MOST_LISTED:
        raise InvalidField(f"must be a whole number from 1 to {MOST_LISTED}", field="limit")
    return int(given)


def _choice(request: Request, name: str, known: tuple[str, ...]) -> str | None:
    given = request.query_params.get(name)
    if given is not None and given not in known:
        raise InvalidField(f"{given!r} is not one of {', '.join(known)}", field=name)
    return given
