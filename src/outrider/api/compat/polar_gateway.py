"""Serves the HTTP interface of Polar's gateway. Its routes are at `/gateway`, and at the root beside those of Polar's
rollout server.

A client can create a session without a task. Such a session is the only one of its group, which is found by the group's
idempotency key.

Invariant: an id belongs to one session; model calls reach only sessions whose agents run outside Outrider.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from outrider.api.access import CREATED
from outrider.api.compat.gateway_call import GatewayCall
from outrider.api.compat.polar_events import event_stream
from outrider.api.compat.polar_query import choice_of, limit_of, number_of
from outrider.api.compat.polar_request import (
    ALONE_LABEL,
    MODEL_LABEL,
    SESSION_PATTERN,
    SYSTEM,
    PolarDispatchRequest,
    PolarSessionRequest,
    dispatched_group,
    manual_group,
    polar_fields,
    session_idempotency_key,
)
from outrider.api.compat.polar_results import (
    ENDINGS,
    MOST_LISTED,
    STATES,
    PolarObject,
    PolarReader,
    completion_of,
    status_of_session,
    task_id_of,
)
from outrider.api.compat.routes import CompatRoute, compat_reply, detail, large_reply
from outrider.api.control_bodies import whole_body
from outrider.api.gateway import Gateway
from outrider.errors import Conflict, InvalidField, NotFound, RequestError, renamed_field
from outrider.schemas import LaneStats, NodeStats
from outrider.service.principals import Principal
from outrider.sessions.external import EXTERNAL
from outrider.spec import Spec, StoredGroupSpec
from outrider.store.rows import GroupRow, SessionRow
from outrider.trajectory import Turn

if TYPE_CHECKING:
    from outrider.service.service import Service

SESSION_STATUSES = {422: 400, 413: 400, 429: 503, 501: 503}
"""For refused sessions: maps the HTTP status of Outrider's error to the status that is sent instead. Polar's clients
handle 400 and 503, for example."""
OPEN_SECONDS = 5.0
"""Maximum time that `POST /sessions` waits until the new session accepts model calls, in seconds."""
PROXY_SESSION = "_proxy_session_id"
"""Field in the body of a model call that names the session."""
KNOWN_SESSION_STATUSES = (*STATES.values(), *ENDINGS.values())
SESSION_ID = re.compile(SESSION_PATTERN)
PAUSE_SECONDS = 300.0
"""How many seconds a pause waits by default for running generations to end."""
MOST_PAUSE_SECONDS = 3600.0
TOO_LATE = 504
"""HTTP status if running generations have not ended in time for a pause."""
METRICS = (
    "init_queue_depth",
    "init_inflight",
    "ready_depth",
    "run_inflight",
    "postrun_queue_depth",
    "postrun_inflight",
)
"""Polar's names for a node's session counts: `depth` for sessions that wait for a lane (the slots for one stage),
`inflight` for sessions in the lane."""
VENDOR_PATHS = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models/{call}",
    "/v1beta/models/{call}",
)


class _TokenizeRequest(Spec):
    """Body of `POST /v1/tokenize`. Unknown fields are ignored."""

    model_config = ConfigDict(**{**Spec.model_config, "extra": "ignore"})

    text: str | None = None
    prompt: str | None = None


class PolarGateway:
    """Handlers of the gateway's routes. A caller sees only sessions of its own tenant."""

    def __init__(self, service: Service, reader: PolarReader) -> None:
        self._service = service
        self._reader = reader
        self._gateway = Gateway(service.external, failures=service.call_failures)
        self._making: set[tuple[str, str]] = set()
        """Tenants and ids of the sessions that are being made. Of concurrent requests with the same id, only one makes
        a session."""

    def routes(self) -> list[CompatRoute]:
        both = [
            CompatRoute("GET", "/", "read", self.alive),
            CompatRoute("GET", "/v1/models", "read", self.models),
            CompatRoute("POST", "/v1/tokenize", "read", self.tokenize),
            CompatRoute("GET", "/admin/inference/status", "read", self.inference),
            CompatRoute("POST", "/admin/inference/pause", "admin", self.pause),
            CompatRoute("POST", "/admin/inference/resume", "admin", self.resume),
            CompatRoute("GET", "/sessions", "read", self.sessions),
            CompatRoute("POST", "/sessions", "submit", self.make_session, SESSION_STATUSES),
            CompatRoute("GET", "/sessions/{session_id}", "read", self.session),
            CompatRoute("GET", "/sessions/{session_id}/completions", "read", self.completions),
            CompatRoute("DELETE", "/sessions/{session_id}", "submit", self.cancel_session),
            *(CompatRoute("POST", path, "submit", self.model_call) for path in VENDOR_PATHS),
        ]
        below = [
            *both,
            CompatRoute("GET", "/health", "read", self.health),
            CompatRoute("GET", "/events", "read", self.events),
        ]
        return [*both, *(route._replace(path=f"/gateway{route.path}") for route in below)]

    async def alive(self, request: Request, caller: Principal) -> PolarObject:
        return {"status": "ok", "service": "outrider"}

    async def health(self, request: Request, caller: Principal) -> Response:
        counts = await self._service.store.counts(tenant=caller.sees)
        nodes = nodes_of(self._service, request)
        active = {STATES[state]: count for state, count in counts.items() if state in STATES}
        able = any(engine.ok for engine in self._service.pool.status())

        def free(work: str, used: str) -> int:
            return sum(max(0, node[work] - node["metrics"][used]) for node in nodes if not node["draining"])

        body = {
            "status": "ok" if able else "no_engine",
            "node_id": SYSTEM,
            "gateway_url": _url_of(request),
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

    async def events(self, request: Request, caller: Principal) -> Response:
        return await event_stream(self._service, request, caller, sessions_only=True)

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
        """Pause the policy after running generations have ended. If they do not end in time, do not pause."""
        seconds = number_of(request, "timeout_seconds", PAUSE_SECONDS, least=0.001, most=MOST_PAUSE_SECONDS)
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
        wanted, task_id = choice_of(request, "status", KNOWN_SESSION_STATUSES), request.query_params.get("task_id")
        limit = limit_of(request)
        rows = await self._reader.newest(
            caller, lambda row: task_id is None or task_id_of(row) == task_id, limit=MOST_LISTED
        )
        found: list[PolarObject] = []
        for row in rows:
            with suppress(NotFound):  # the group was just removed
                for session in await self._service.store.sessions(row.id):
                    if len(found) < limit and wanted in (None, status_of_session(session)):
                        found.append(await self._listed(row, session))
            if len(found) == limit:
                break
        return {"sessions": found, "node_id": SYSTEM}

    async def _listed(self, row: GroupRow, session: SessionRow) -> PolarObject:
        now = time.time()
        turns = await self._turns(session)
        return {
            **_session_object(row, session, turns),
            "age_seconds": max(0.0, now - session.created),
            "idle_seconds": max(0.0, now - max([session.updated, *(turn.timings.finished for turn in turns[-1:])])),
            "model_requested": row.labels.get(MODEL_LABEL) or None,
            "model_used": self._service.config.model.name,
            "api_type": turns[-1].dialect if turns else None,
            "node_id": session.node,
        }

    async def _turns(self, session: SessionRow) -> list[Turn]:
        return await self._service.store.turns(session.id) if session.attempt else []

    async def session(self, request: Request, caller: Principal) -> Response:
        row, session = await self._session(request, caller)
        shown = _session_object(row, session, await self._turns(session))
        if session.result is not None:
            shown["result"] = await self._reader.session_result(row, session)
        return await large_reply(self._service, lambda: shown)

    async def completions(self, request: Request, caller: Principal) -> Response:
        row, session = await self._session(request, caller)
        turns = await self._turns(session)
        model = self._service.config.model.name

        def shown() -> PolarObject:
            records = [completion_of(turn, turns, model) for turn in turns]
            return {"session_id": _id_of(row, session), "completions": records, "node_id": session.node or SYSTEM}

        return await large_reply(self._service, shown)

    async def cancel_session(self, request: Request, caller: Principal) -> PolarObject:
        """Cancel one session. The model calls stay stored until the session's task is removed."""
        row, session = await self._session(request, caller)
        await self._service.cancel_session(session.id, caller)
        return {"session_id": _id_of(row, session), "deleted": True, "messages_deleted": 0}

    async def _session(self, request: Request, caller: Principal) -> tuple[GroupRow, SessionRow]:
        """Return the session that the path names, and its group."""
        session_id = request.path_params["session_id"]
        if not SESSION_ID.fullmatch(session_id):
            raise RequestError("a session's id has at most 128 letters, digits, '.', '_' and '-'", field="session_id")
        return await self._found_session(session_id, caller)

    async def _found_session(self, session_id: str, caller: Principal) -> tuple[GroupRow, SessionRow]:
        """Find a session by the client's id or by Outrider's id. Returns the group and the session. Raises NotFound."""
        store = self._service.store
        row = await store.keyed_group(caller.tenant, session_idempotency_key(session_id))
        if row is not None and row.translator == SYSTEM:
            return row, (await store.sessions(row.id))[0]
        session = await store.session(session_id, tenant=caller.sees)
        row = await store.group(session.group_id)
        if row.translator != SYSTEM:
            raise NotFound(f"session {session_id!r} is of no task of Polar", hint="see it at /v1/sessions")
        return row, session

    async def make_session(self, request: Request, caller: Principal) -> PolarObject:
        """Create a session without a task. If the request describes an agent, the service runs it. Otherwise the client
        runs the agent."""
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
        return _session_object(row, await self._service.store.session(session.id), ())

    async def _made(
        self, request: Request, caller: Principal, spec: StoredGroupSpec, session_id: str
    ) -> tuple[GroupRow, SessionRow]:
        store, named = self._service.store, (caller.tenant, session_id)
        used = Conflict(f"there is, or was, a session {session_id!r}: an id is used once", field="session_id")
        if named in self._making:
            raise used
        self._making.add(named)
        try:
            if await store.has_key(caller.tenant, session_idempotency_key(session_id)):
                raise used
            with renamed_field("idempotency_key", "session_id"), polar_fields():
                group = await self._service.submit(spec, caller)
        finally:
            self._making.discard(named)
        request.scope[CREATED].update(group_id=group.id, session_id=group.sessions[0].id)
        return await store.group(group.id), await store.session(group.sessions[0].id)

    async def model_call(self, request: Request, caller: Principal) -> Response:
        """Forward a vendor's model call to the model gateway, which replies in the vendor's format.

        The session's id is in the header X-Session-Id, in the query (`session_id` or `key`), in the API key, or in the
        field PROXY_SESSION of the body. The status is 401 if the session is unknown, or if the session's agent runs in
        this service."""
        path: str = request.scope["path"]
        body: bytes | None = None
        headers, query = request.headers, request.query_params
        named = [headers.get("x-session-id"), query.get("session_id"), query.get("key")]
        named += [headers.get("x-api-key"), headers.get("x-goog-api-key")]
        named.append(headers.get("authorization", "").removeprefix("Bearer ").strip())
        credential = await self._credential_of([each for each in named if each], caller)
        if credential is None and named[0] is None:
            body = await whole_body(request)
            in_body, body = await self._service.reader.offload(partial(_without_field, body, PROXY_SESSION))
            credential = await self._credential_of([in_body] if isinstance(in_body, str) else [], caller)
        return GatewayCall(self._gateway, f"/s/{credential or 'unknown'}{path[path.index('/v1') :]}", body)

    async def _credential_of(self, names: Sequence[str], caller: Principal) -> str | None:
        """Return the credential of the first session in `names` whose agent runs outside Outrider, or None."""
        for name in names:
            if SESSION_ID.fullmatch(name):
                with suppress(NotFound):
                    row, session = await self._found_session(name, caller)
                    if row.harness == EXTERNAL:
                        return self._service.store.credential_of(session.id)
        return None


def nodes_of(service: Service, request: Request) -> list[PolarObject]:
    """Return the nodes in Polar's format. All have the URL that this request was sent to."""
    return [_node(node, _url_of(request)) for node in service.nodes().nodes]


def _url_of(request: Request) -> str:
    """Return the base URL to which the request was sent."""
    return f"{request.url.scheme}://{request.url.netloc}"


def _node(node: NodeStats, url: str) -> PolarObject:
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


def _id_of(row: GroupRow, session: SessionRow) -> str:
    """Return the id by which clients know a session."""
    return row.labels.get(ALONE_LABEL, session.id)


def _session_object(row: GroupRow, session: SessionRow, turns: Sequence[Turn]) -> PolarObject:
    return {
        "session_id": _id_of(row, session),
        "task_id": task_id_of(row),
        "created_at": session.created,
        "completion_count": len(turns),
        "status": status_of_session(session),
    }


def _field_of(body: bytes, name: str) -> Any:
    """Return a field of a JSON object. If the body has no such field, return None."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value.get(name) if isinstance(value, dict) else None


def _without_field(body: bytes, name: str) -> tuple[Any, bytes]:
    """Remove a field from a JSON object. Returns its value and the new body. The other values keep their bytes. If the
    field is missing, returns None and the same body."""
    if name.encode() not in body or (found := _field_of(body, name)) is None:
        return None, body
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, body
    del values[name]
    return found, msgspec.json.encode(values)
