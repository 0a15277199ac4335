"""Serves Harbor's run API. A run executes an uploaded task folder; it is a group of one session.

A run's id is its group's id, so clients find their runs again after a disconnect or a restart. A run may send its
model calls to a session that a client created through verl's session proxy (`verl.py`). The run's turns then belong to
that session (`verl_runs.py`). Invariants: a run is stored before its id is returned; a run without a verdict has no
rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from outrider.api.access import CREATED
from outrider.api.compat.endings import ending_of, why_ungraded
from outrider.api.compat.harbor_archive import ARCHIVE, METADATA, parts_of, unpack_task
from outrider.api.compat.harbor_request import SYSTEM, UNGRADED_LABEL, HarborRunRequest, harbor_fields, run_group
from outrider.api.compat.routes import CompatRoute, large_reply
from outrider.api.compat.verl_runs import SESSION_ID, BoundRuns
from outrider.api.compat.waiting import done_group
from outrider.api.control_bodies import release_body, whole_body
from outrider.errors import Conflict, NotFound, RequestError, renamed_field
from outrider.lifecycle import SessionState, StopReason
from outrider.service.principals import Principal
from outrider.spec import StoredGroupSpec
from outrider.store.rows import SessionRow
from outrider.tokens.branches.classify import used_turns
from outrider.trajectory import (
    LogprobKind,
    SessionResult,
    TokenMode,
    Turn,
    path_to,
    prompt_of,
    unpack_ids,
    unpack_logprobs,
)

if TYPE_CHECKING:
    from outrider.service.service import Service

RUNS = "/api/v1/runs"
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Optional header of a submission. A repeated request with the same key starts no second run."""
MOST_UNPACKED = 2
"""Maximum number of archives that are unpacked at the same time."""
STEP_METRIC = "step"
"""Prefix of the names of metrics that describe one step of a task (`sessions/step_verdicts.py`)."""

RunObject = dict[str, Any]
"""A JSON object in Harbor's format. It may contain numpy arrays, which orjson encodes as lists."""


class HarborRunApi:
    """Handlers of the run API. A caller sees only runs of its own tenant. `find` looks up a session of verl's session
    proxy (`verl.py`) by the id that a client chose. `find` raises NotFound if no session has this id."""

    def __init__(
        self, service: Service, bound: BoundRuns, find: Callable[[str, Principal], Awaitable[SessionRow]]
    ) -> None:
        self._service = service
        self._bound = bound
        self._find = find
        self._unpacking = asyncio.Semaphore(MOST_UNPACKED)

    def routes(self) -> list[CompatRoute]:
        one = f"{RUNS}/async/{{run_id}}"
        return [
            CompatRoute("POST", RUNS, "submit", self.run),
            CompatRoute("POST", f"{RUNS}/async", "submit", self.begin),
            CompatRoute("GET", f"{one}/status", "read", self.status),
            CompatRoute("GET", f"{one}/result", "read", self.result),
        ]

    async def run(self, request: Request, caller: Principal) -> Response:
        """Run a task, and reply with the result. The run continues if the caller disconnects."""
        group_id = await self._submitted(request, caller)
        release_body(request)
        await done_group(self._service, request, group_id, caller)
        return await self._response(group_id, caller)

    async def begin(self, request: Request, caller: Principal) -> RunObject:
        """Submit a run, and reply with its id."""
        return {"run_id": await self._submitted(request, caller)}

    async def status(self, request: Request, caller: Principal) -> RunObject:
        session, graded = await self._run(request.path_params["run_id"], caller)
        return status_of(session, graded=graded)

    async def result(self, request: Request, caller: Principal) -> Response:
        return await self._response(request.path_params["run_id"], caller)

    async def _response(self, run_id: str, caller: Principal) -> Response:
        session, graded = await self._run(run_id, caller)
        if session.result is None:
            raise NotFound(f"run {run_id} has not ended", hint=f"ask for its status: GET {RUNS}/async/{run_id}/status")
        turns = await self._service.store.turns(session.id, session.result.attempt)

        return await large_reply(self._service, lambda: run_response(run_id, session, turns, graded=graded))

    async def _run(self, run_id: str, caller: Principal) -> tuple[SessionRow, bool]:
        """Return a run's session, and whether it is graded. Raises NotFound."""
        try:
            row = await self._service.store.group(run_id, tenant=caller.sees)
        except NotFound as error:
            raise NotFound(f"no run {run_id!r}") from error
        if row.translator != SYSTEM:
            raise NotFound(f"no run {run_id!r}", hint="see the group at /v1/groups")
        [session] = await self._service.store.sessions(row.id)
        return session, UNGRADED_LABEL not in row.labels

    async def _submitted(self, request: Request, caller: Principal) -> str:
        """Store the run that is described by a request. Returns the run's id."""
        body = await whole_body(request)
        parts = await asyncio.to_thread(parts_of, request.headers.get("content-type", ""), body)
        del body
        asked = await self._service.parse(HarborRunRequest, parts[METADATA], caller)
        idempotency_key = request.headers.get(IDEMPOTENCY_HEADER)
        idempotency_key = None if idempotency_key is None else f"{SYSTEM}-key:{idempotency_key}"
        sid = None
        if (proxy := asked.proxy) is not None:
            sid = _session_in(proxy)
            session = await self._bindable(sid, caller)
            idempotency_key = await self._bound.next_idempotency_key(session, caller)

        def translated() -> StoredGroupSpec:
            with TemporaryDirectory(prefix="outrider-run-") as place:
                into = Path(place).resolve() / "task"
                into.mkdir()
                return run_group(asked, unpack_task(parts[ARCHIVE], into), session=sid, idempotency_key=idempotency_key)

        field = "llm_proxy_url" if sid is not None else IDEMPOTENCY_HEADER
        try:
            with renamed_field("idempotency_key", field), harbor_fields():
                async with self._unpacking:
                    spec = await asyncio.to_thread(translated)
                group = await self._service.submit(spec, caller)
        except Conflict as error:
            if error.field != field:
                raise
            raise Conflict(
                f"the session {sid!r} has another run" if sid else "the key was used for another run",
                field=field,
                hint="reset the session before its next run" if sid else "use a new key for a new run",
            ) from error
        request.scope[CREATED].update(group_id=group.id)
        # Cancel the run if the session was closed after `_bindable` checked it.
        if sid is not None and (await self._service.store.session(session.id)).over:
            await self._service.cancel(group.id, caller)
        return group.id

    async def _bindable(self, sid: str, caller: Principal) -> SessionRow:
        """Return the session of verl's session proxy to which the new run will belong. Raises RequestError if this
        service does not have the session, and Conflict if the session is closed or already has turns."""
        try:
            session = await self._find(sid, caller)
        except NotFound as error:
            raise RequestError(
                f"names no session of this service: {error.message}",
                field="llm_proxy_url",
                hint="a run's model calls are served and recorded by this service: create the session here first"
                " (POST /sessions/{session_id}), or leave the field out",
            ) from error
        if session.over:
            raise Conflict(f"session {sid!r} was closed", field="llm_proxy_url", hint="use another session")
        if await self._service.store.turns(session.id):
            raise Conflict(f"session {sid!r} has turns", field="llm_proxy_url", hint="reset the session first")
        return session


def _session_in(proxy: str) -> str:
    """Return the session id at the end of a model proxy's URL, such as `…/SID` or `…/SID/v1`. Raises RequestError."""
    try:
        parts = urlsplit(proxy)
    except ValueError as error:
        raise RequestError(f"is no URL: {error}", field="llm_proxy_url") from error
    names = [name for name in parts.path.split("/") if name]
    if names[-1:] == ["v1"]:
        names.pop()
    if len(names) == 2 and names[0] == "verl":
        names.pop(0)
    if parts.scheme not in ("http", "https") or len(names) != 1 or not SESSION_ID.fullmatch(names[0]):
        raise RequestError(
            "names another model proxy: a run's model calls are served and recorded by this service",
            field="llm_proxy_url",
            hint="give http://HOST:PORT/SESSION_ID/v1 with a session of this service, or leave the field out",
        )
    return names[0]


def status_of(session: SessionRow, *, graded: bool) -> RunObject:
    """Return a run's status: `pending`, `running`, or how the run ended."""
    result = session.result
    if result is None:
        return {"status": "pending" if session.state is SessionState.QUEUED else "running"}
    return {"status": ending_of(result), "rewards": rewards_of(result, graded=graded), "error": error_of_run(result)}


def rewards_of(result: SessionResult, *, graded: bool) -> dict[str, float] | None:
    """Return the rewards that test.sh wrote, by name. Return None without a verdict, or if the run is not graded."""
    verdict = result.verdict
    if verdict is None or not graded:
        return None
    own = {name: value for name, value in verdict.metrics.items() if not _of_step(name)}
    return own or {"reward": verdict.reward}


def _of_step(name: str) -> bool:
    step, dot, _ = name.partition(".")
    return bool(dot) and step.startswith(STEP_METRIC) and step.removeprefix(STEP_METRIC).isdigit()


def error_of_run(result: SessionResult) -> str | None:
    """Return why a run has no verdict, or None if it has one. If the agent ran out of time and its work was graded,
    return a note that says so."""
    if result.stop_reason is StopReason.AGENT_TIMEOUT:
        return "agent_timeout: the agent's time was over; its work was graded"
    return why_ungraded(result, run="run")


def run_response(run_id: str, session: SessionRow, turns: Sequence[Turn], *, graded: bool) -> RunObject:
    """Return the AgentRunResponse of a finished run. `turns[i].index` must be `i`."""
    result = session.result
    assert result is not None
    cached = [turn.cached_tokens for turn in turns]
    return {
        "run_id": run_id,
        **status_of(session, graded=graded),
        "rollout_details": rollout_details(turns) or None,
        "token_usage": {
            "n_input_tokens": sum(turn.prompt_length for turn in turns),
            "n_output_tokens": sum(len(turn.output_ids) // 4 for turn in turns),
            "n_cache_tokens": None if None in cached else sum(each or 0 for each in cached),
            "cost_usd": None,
        },
        "metadata": {
            "group_id": result.group_id,
            "session_id": result.session_id,
            "stop_reason": result.stop_reason.value,
            "turns": result.turns,
        },
        "result_uri": None,
        "retry_count": max(0, session.attempt - session.recovered - 1),
    }


def rollout_details(turns: Sequence[Turn]) -> list[RunObject]:
    """Return the token ids of the turns: one object per conversation, in the order in which the conversations began.

    A turn belongs to the conversation whose last turn it continues. If two turns continue the same turn, the second one
    starts a new conversation that repeats the whole prompt. Replies that the agent did not use are left out, because
    trainers that read this format train on every reply. If the ids of any turn are unknown, the returned list is
    empty."""
    if any(turn.mode is TokenMode.TEXT for turn in turns):
        return []
    details: list[RunObject] = []
    ends: dict[int, RunObject] = {}
    for turn in used_turns(turns):
        detail = ends.pop(turn.parent, None) if turn.parent is not None else None
        if detail is None:
            detail = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
            details.append(detail)
        none = turn.logprob_kind is LogprobKind.NONE
        detail["prompt_token_ids"].append(unpack_ids(prompt_of(path_to(turn, turns))))
        detail["completion_token_ids"].append(unpack_ids(turn.output_ids))
        detail["logprobs"].append([] if none else unpack_logprobs(turn.logprobs))
        ends[turn.index] = detail
    return details
