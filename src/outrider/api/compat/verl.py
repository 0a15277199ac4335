"""Serves the session proxy of verl's RemoteAgentLoop recipe. Clients choose the ids of sessions, and send chat calls to
them.

The agent of such a session runs outside Outrider (docs/external.md). The session is found by an idempotency key that
contains the session's id. The recipe's trainer reads the session's record and computes the reward itself. Outrider
never gets the reward, so a completed session ends as cancelled, with its turns but without a verdict. Invariant: only
`create` creates a session, never a model call with an unknown id.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.api.access import CREATED
from outrider.api.compat.gateway_call import GatewayCall
from outrider.api.compat.harbor_runs import HarborRunApi
from outrider.api.compat.routes import CompatRoute, CompatSocket, large_reply
from outrider.api.compat.verl_runs import SESSION_ID, BoundRuns
from outrider.api.compat.verl_timings import timing_routes
from outrider.api.compat.verl_workers import ENGINE, serve_worker
from outrider.api.gateway import PREFIX, Gateway
from outrider.dialects.chat.reply import message_object, tool_call_object
from outrider.engines.adapters.verl_workers import VerlWorkersEngine
from outrider.errors import Conflict, EngineUnavailable, InvalidField, NotFound, renamed_field
from outrider.messages import Message, Role
from outrider.service.principals import Principal
from outrider.spec import Limits, SessionSpec
from outrider.store.rows import GroupRow, SessionRow
from outrider.tokens.branches.classify import used_turns
from outrider.trajectory import Turn, WorkerReport, unpack_ids, unpack_logprobs

if TYPE_CHECKING:
    from outrider.service.service import Service

LABEL = "verl.session"
"""Label of a session's group that holds the id chosen by the client."""
DELETED_LABEL = "verl.deleted"
"""Label that marks the group of a session that the client has deleted."""
TAKEN = {PREFIX.strip("/"): "the model gateway"}
"""Ids that clients must not choose, because `/ID/v1/chat/completions` already belongs to another part of the service.
The value names this part."""
SESSION_SECONDS = 86_400.0
"""Maximum duration of a session in seconds. Clients normally close their sessions, but a client that crashes must not
leave its session open forever."""
LIMITS = Limits(session_seconds=SESSION_SECONDS, turns=100_000, response_tokens=1 << 30)
MOST_LISTED = 100
MOST_PAGES = 100
"""Maximum number of pages that are searched for a list of sessions, newest first. A page has MOST_LISTED groups."""
SOCKETS = (CompatSocket("/ws/worker", "admin", serve_worker),)


def routes(service: Service) -> list[CompatRoute]:
    verl = VerlProxy(service)
    return [
        CompatRoute("GET", "/health", "read", verl.health),
        CompatRoute("GET", "/sessions", "read", verl.sessions),
        CompatRoute("POST", "/sessions/{sid}", "submit", verl.create),
        CompatRoute("GET", "/sessions/{sid}", "submit", verl.record),
        CompatRoute("DELETE", "/sessions/{sid}", "submit", verl.delete),
        CompatRoute("POST", "/sessions/{sid}/complete", "submit", verl.complete),
        CompatRoute("POST", "/sessions/{sid}/reset", "submit", verl.reset),
        CompatRoute("POST", "/{sid}/v1/chat/completions", "submit", verl.chat),
        CompatRoute("POST", "/v1/chat/completions/{sid}", "submit", verl.chat),
        *HarborRunApi(service, verl.bound, verl.session).routes(),
        *timing_routes(service),
    ]


class VerlProxy:
    """Handlers of the routes for verl's recipe. A caller sees only sessions of its own tenant."""

    def __init__(self, service: Service) -> None:
        self.bound = BoundRuns(service)
        self._service = service
        self._gateway = Gateway(service.external, failures=service.call_failures)
        self._taken = TAKEN | {name: f"the interface of {name}" for name in service.config.compat if name != "verl"}

    async def health(self, request: Request, caller: Principal) -> Any:
        if not any(engine.ok for engine in self._service.pool.status()):
            raise EngineUnavailable("no engine answers", hint="attach one: outrider engines add")
        engine = self._service.pool.engine(ENGINE)
        if isinstance(engine, VerlWorkersEngine):
            return {"status": "ok", "mode": "relay", "connected_workers": engine.connected}
        return {"status": "ok", "mode": "local"}

    async def create(self, request: Request, caller: Principal) -> Any:
        """Open a session. While the session has no turns, the request may be repeated."""
        sid = _sid(request)
        if (owner := self._taken.get(sid)) is not None:
            raise InvalidField(
                f"{sid!r} cannot be a session's id: /{sid}/ belongs to {owner}",
                field="session_id",
                hint="choose another id",
            )
        if (group := await self._group(sid, caller)) is not None:
            [known] = await self._service.store.sessions(group.id)
            if known.over:
                raise Conflict(f"session {sid!r} was closed", hint="use another id for another trajectory")
            if await self.bound.turns(known, caller):
                raise Conflict(f"session {sid!r} exists, and has turns", hint="reset it, or use another id")
            return {"session_id": sid, "status": "created"}
        spec = SessionSpec(
            labels={LABEL: sid}, idempotency_key=_idempotency_key(sid), limits=LIMITS, idle_seconds=SESSION_SECONDS
        )
        with renamed_field("idempotency_key", "session_id"):
            session = (await self._service.session_control.open(spec, caller)).session
        request.scope[CREATED].update(group_id=session.group_id, session_id=session.id)
        return {"session_id": sid, "status": "created"}

    async def record(self, request: Request, caller: Principal) -> Any:
        """Return a session's record. Replies that the agent did not use, such as interrupted ones, are left out,
        because verl's trainer trains on every reply in the record."""
        sid = _sid(request)
        session = await self.session(sid, caller)
        turns = await self.bound.turns(session, caller)
        common = {"created_at": session.created, "completed": session.over}

        def record() -> dict[str, Any]:
            return {"session_id": sid, "turns": [*map(_turn, used_turns(turns))], **common}

        return await large_reply(self._service, record)

    async def complete(self, request: Request, caller: Principal) -> Any:
        """Close the session, so that its record does not change any more. The request may be repeated."""
        sid = _sid(request)
        session = await self.session(sid, caller)
        await self._service.cancel_session(session.id, caller)
        await self.bound.end(session, caller)
        return {"session_id": sid, "status": "completed"}

    async def reset(self, request: Request, caller: Principal) -> Any:
        sid = _sid(request)
        session = await self.session(sid, caller)
        if session.over:
            raise NotFound(f"session {sid!r} was closed")
        await self.bound.drop(session, caller)
        await self._service.session_control.reset(session.id, caller)
        return {"session_id": sid, "status": "reset"}

    async def delete(self, request: Request, caller: Principal) -> Any:
        sid = _sid(request)
        session = await self.session(sid, caller)
        await self._service.cancel_session(session.id, caller)
        await self.bound.end(session, caller)
        await self._service.store.add_label(session.group_id, DELETED_LABEL, "true")
        return {"session_id": sid, "status": "deleted"}

    async def sessions(self, request: Request, caller: Principal) -> Any:
        """List the newest sessions."""
        store, found = self._service.store, list[dict[str, Any]]()
        before: str | None = None
        for _ in range(MOST_PAGES):
            try:
                page = await store.groups_before(before, limit=MOST_LISTED, harness="external", tenant=caller.tenant)
            except NotFound:  # the last group of the previous page was just removed, so end the list here
                break
            for group in page:
                if DELETED_LABEL in group.labels or len(found) == MOST_LISTED:
                    continue
                if (sid := group.labels.get(LABEL)) is not None:
                    found += await self._listed(sid, group, caller)
            if len(found) == MOST_LISTED or len(page) < MOST_LISTED:
                break
            before = page[-1].id
        return {"count": len(found), "sessions": found}

    async def _listed(self, sid: str, group: GroupRow, caller: Principal) -> list[dict[str, Any]]:
        """Return the session's entry in the list of sessions. If the session was removed, the result is empty."""
        with suppress(NotFound):  # the group was just removed
            [session] = await self._service.store.sessions(group.id)
            turns = await self.bound.turns(session, caller)
            used = await self._service.reader.offload(partial(used_turns, turns))
            return [{"session_id": sid, "turns": len(used), "completed": session.over}]
        return []

    async def chat(self, request: Request, caller: Principal) -> Response:
        """Forward a chat call to the model gateway."""
        session = await self.session(_sid(request), caller)
        await self.bound.check_free(session, caller)
        credential = self._service.store.credential_of(session.id)
        return GatewayCall(self._gateway, f"/s/{credential}/v1/chat/completions", None)

    async def _group(self, sid: str, caller: Principal) -> GroupRow | None:
        """Return the group of the session with this id, or None. A group of another kind may have the same idempotency
        key. Such a group does not have the label LABEL, and is ignored."""
        group = await self._service.store.keyed_group(caller.tenant, _idempotency_key(sid))
        return None if group is None or group.labels.get(LABEL) != sid else group

    async def session(self, sid: str, caller: Principal) -> SessionRow:
        """Return the session with this id. Raises NotFound if it is unknown or was deleted."""
        group = await self._group(sid, caller)
        if group is None or DELETED_LABEL in group.labels:
            raise NotFound(f"no session {sid!r}", hint="create it first: POST /sessions/{session_id}")
        return (await self._service.store.sessions(group.id))[0]


def _sid(request: Request) -> str:
    sid: str = request.path_params["sid"]
    if not SESSION_ID.fullmatch(sid):
        raise InvalidField(
            "a session's id has up to 200 letters, digits and characters of . _ : @ -", field="session_id"
        )
    return sid


def _idempotency_key(sid: str) -> str:
    return f"verl:{sid}"


def _turn(turn: Turn) -> dict[str, Any]:
    """Convert a turn to the format of verl's recipe. `request_messages` are the messages that the turn's request added.
    If the worker sent only the ids of the reply, and not those of the prompt, the turn stores no ids. In this case the
    reply's ids and log-probabilities are taken from the worker's report."""
    reply = turn.reply or Message(role=Role.ASSISTANT)
    calls = [*map(tool_call_object, reply.tool_calls)]
    report = turn.report or WorkerReport()
    return {
        "request_messages": [*map(message_object, turn.messages)],
        "completion_text": reply.content,
        "completion_token_ids": unpack_ids(turn.output_ids or report.output_ids).tolist(),
        "completion_logprobs": unpack_logprobs(turn.logprobs or report.logprobs).tolist(),
        "finish_reason": "tool_calls" if calls and turn.finish.value == "stop" else turn.finish.value,
        "tool_calls": calls or None,
        "timing": report.timing or None,
        "node_id": report.node_id,
        "gpu_id": report.gpu_id,
        "worker_id": report.worker_id,
        "rank_info": report.rank_info,
    }
