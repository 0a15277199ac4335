"""Serves the HTTP interface of NVIDIA's ProRL Agent server.

A job is a group of one session. So a job is queued, stored, retried and cancelled like any group. Jobs are found by
their ids, so a client that has lost its connection can repeat the call. `prorl_request.py` translates requests, and
`prorl_results.py` results. Invariant: the reply to a job is made only from stored data.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from outrider.api.access import CREATED
from outrider.api.compat.prorl_request import (
    IDEMPOTENCY_PREFIX,
    JOB_LABEL,
    REQUEST_LABEL,
    AddressSpec,
    Asked,
    Backends,
    CancelSpec,
    Handlers,
    ProcessSpec,
    asked_of,
    group_of,
)
from outrider.api.compat.prorl_results import result_record, unreadable_record
from outrider.api.compat.routes import CompatRoute, detail, large_reply
from outrider.api.compat.waiting import done_group
from outrider.api.control_bodies import release_body, whole_body
from outrider.engines.adapters.prorl import kind_of_server
from outrider.errors import (
    Conflict,
    EngineUnavailable,
    InvalidField,
    NotFound,
    OutriderError,
    RequestError,
    ServiceError,
    ServiceStopping,
    renamed_field,
)
from outrider.lifecycle import GroupState, SessionState
from outrider.schemas import EngineStatus, GroupView
from outrider.service.principals import Principal
from outrider.spec import EngineSpec, PolicyUpdateSpec, Spec
from outrider.store.artifacts import PATCH
from outrider.store.rows import GroupRow
from outrider.trajectory import SessionResult, TokenMode

if TYPE_CHECKING:
    from outrider.service.service import Service

S = TypeVar("S", bound=Spec)

ENGINE_PREFIX = "prorl-"
"""Prefix of the names of the engines that `/add_llm_server` attaches."""
MOST_JOBS = 100_000
"""Maximum number of unfinished groups that are searched for jobs."""
STATUSES = {501: 503, 502: 503}
"""Maps the HTTP status of an error of Outrider to the status that is sent instead. ProRL's clients expect 503 if an
engine, a sandbox or a program is not available."""


def routes(service: Service) -> list[CompatRoute]:
    """Return ProRL's routes. Raises InvalidField if a handler in the settings is wrong."""
    server = ProrlServer(service)
    return [
        CompatRoute("POST", "/start", "submit", server.start, STATUSES),
        CompatRoute("POST", "/stop", "submit", server.stop, STATUSES),
        CompatRoute("POST", "/process", "submit", server.process, STATUSES),
        CompatRoute("POST", "/cancel", "submit", server.cancel, STATUSES),
        CompatRoute("GET", "/status", "read", server.status, STATUSES),
        CompatRoute("POST", "/add_llm_server", "admin", server.add_llm_server, STATUSES),
        CompatRoute("POST", "/clear_llm_server", "admin", server.clear_llm_server, STATUSES),
    ]


class ProrlServer:
    """Handlers of ProRL's routes. Each tenant has its own "server", which can be started and stopped. While a tenant's
    server is stopped, the tenant's new jobs and calls of `/stop`, `/cancel` and `/status` are refused. Engines are
    shared by all tenants."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._handlers = Handlers(service.config)
        self._wait_seconds = service.config.prorl.wait_seconds
        self._started: dict[str, bool] = {}
        """True if the tenant's last request was to start the server, False if it was to stop it; by tenant."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by engine name, so that concurrent calls attach an address only once."""
        self._clearing = asyncio.Lock()
        self._next_version: int | None = None
        """The version that the policy gets when the next engine is attached, while `/clear_llm_server` has paused the
        policy. Otherwise None."""

    async def start(self, request: Request, caller: Principal) -> dict[str, str]:
        """Begin to accept jobs. Raises RequestError if the server is already running."""
        if await self._is_running(caller):
            raise RequestError("the server is already running", hint="go on: nothing was changed")
        self._started[caller.tenant] = True
        return {"status": "started"}

    async def stop(self, request: Request, caller: Principal) -> dict[str, str]:
        """Accept no new jobs, and cancel the unfinished ones. The callers of the cancelled jobs get results."""
        await self._check_running(caller)
        self._started[caller.tenant] = False
        jobs = await self._jobs(caller)
        for job in jobs:
            with suppress(NotFound):  # the group was just removed
                await self._service.cancel(job.id, caller)
        return {"status": f"stopped; {len(jobs)} jobs were cancelled"}

    async def process(self, request: Request, caller: Principal) -> Response:
        """Run a job, and reply with its result. The job continues if the caller disconnects. If the caller then repeats
        the call with the job's id, it gets the result of the same job, even while the server is stopped."""
        group, asked = await self._submitted(request, caller)
        release_body(request)
        done = await done_group(self._service, request, group.id, caller, seconds=self._wait_seconds)
        if done is None:
            return detail(
                ServiceError(
                    f"job {asked.job_id} is still under way",
                    hint=f"send the same call again, with job_id {asked.job_id}",
                ),
                status=504,
            )
        record = await self._record(asked, done)
        return await large_reply(self._service, lambda: record)

    async def cancel(self, request: Request, caller: Principal) -> dict[str, str]:
        """Cancel a job in any stage. The client that waits for the job gets a result. Raises NotFound for an unknown
        job."""
        await self._check_running(caller)
        job_id = (await self._body(CancelSpec, request, caller)).job_id
        group = await self._service.store.keyed_group(caller.tenant, f"{IDEMPOTENCY_PREFIX}{job_id}")
        if group is None or JOB_LABEL not in group.labels:
            raise NotFound(f"there is no job {job_id!r}", field="job_id")
        if group.state is GroupState.DONE:
            return {"status": f"job {job_id} had already ended"}
        await self._service.cancel(group.id, caller)
        return {"status": f"job {job_id} is cancelled"}

    async def status(self, request: Request, caller: Principal) -> dict[str, Any]:
        """Count the tenant's unfinished jobs by stage."""
        await self._check_running(caller)
        jobs = await self._jobs(caller)
        states = Counter(await self._service.store.states_of([job.id for job in jobs]))
        return {
            "status": "running",
            "pending_jobs": len(jobs),
            "running": True,
            "jobs": len(jobs),
            "init": states[SessionState.INITIALIZING],
            "run": states[SessionState.READY] + states[SessionState.RUNNING],
            "eval": states[SessionState.EVALUATING],
        }

    async def add_llm_server(self, request: Request, caller: Principal) -> dict[str, str]:
        """Attach an inference server as an engine of the policy. This works even while ProRL's server is stopped. If
        the address is already attached, nothing changes. Raises EngineUnavailable if the inference server does not
        reply."""
        address = (await self._body(AddressSpec, request, caller)).address
        name = engine_name(address)
        async with self._locks[name]:
            if name in self._service.pool:
                return {"status": f"{address} is already attached"}
            with renamed_field("url", "address"):
                kind = await kind_of_server(address)
            url = address.rstrip("/").removesuffix("/v1")
            options = {} if kind != "prorl" else {"context_tokens": self._known_context(address)}
            spec = EngineSpec(kind=kind, name=name, url=url, options=options)
            engine = await self._service.attach_engine(spec)
            request.scope[CREATED].update(name=engine.name)
        async with self._clearing:
            if self._next_version is not None:
                await self._service.pool.policy.resume(max(self._next_version, self._service.pool.policy.version))
                self._next_version = None
        return {"status": f"{address} is attached as engine {engine.name} of kind {kind}"}

    async def clear_llm_server(self, request: Request, caller: Principal) -> dict[str, str]:
        """Detach the engines that `/add_llm_server` attached, after their generations have ended. Clients call this
        before they change the weights, so tokens that are sampled later get the policy's next version. If no other
        engine is left, the policy is paused until `/add_llm_server` attaches one."""
        async with self._clearing:
            policy = self._service.pool.policy
            names = [engine.name for engine in self._engines() if engine.name.startswith(ENGINE_PREFIX)]
            if not names:
                return {"status": "no engine was attached"}
            version = policy.version + 1
            if len(names) == len(self._engines()):
                await policy.pause("finish")
                # before the removal, which may fail halfway: the next call of `/add_llm_server` must end the pause
                self._next_version = version
                await asyncio.gather(*map(self._remove, names))
            else:
                await asyncio.gather(*map(self._remove, names))
                await self._service.update_policy(PolicyUpdateSpec(version=version))
        return {"status": f"{len(names)} engines are detached; the policy's next version is {version}"}

    def _known_context(self, address: str) -> int:
        """Return the model's context length from the settings. It limits the length of replies. The settings are needed
        for a server that has only ProRL's token route, because such a server does not report the context length. Raises
        InvalidField if the setting is missing."""
        context = self._service.config.model.context_tokens
        if context is None:
            raise InvalidField(
                f"the server at {address} has only ProRL's token route, which does not report the model's context",
                field="address",
                hint="serve with the model's context: --context TOKENS",
            )
        return context

    async def _remove(self, name: str) -> None:
        with suppress(NotFound):  # the engine was just removed
            await self._service.pool.remove(name)

    def _engines(self) -> list[EngineStatus]:
        return [engine for engine in self._service.engines() if engine.serves is None]

    async def _submitted(self, request: Request, caller: Principal) -> tuple[GroupRow | GroupView, Asked]:
        """Return the group of a job, stored now or earlier. Raises Conflict if the job's id was used for a different
        request. Raises ServiceStopping for a new job if the tenant's server is stopped."""
        spec = await self._body(ProcessSpec, request, caller)
        asked = await asyncio.to_thread(asked_of, spec, spec.job_id or str(uuid.uuid4()))
        if spec.job_id is not None and (stored := await self._stored(asked, caller)) is not None:
            return stored, asked
        await self._check_running(caller)
        handler = self._handlers.find(spec.instance.data_source)
        group = await asyncio.to_thread(group_of, spec, asked, handler, self._backends())
        view = await self._service.submit(group, caller)
        request.scope[CREATED].update(group_id=view.id)
        if not await self._is_running(caller):  # the server was stopped while the job was submitted
            await self._service.cancel(view.id, caller)
        return view, asked

    async def _stored(self, asked: Asked, caller: Principal) -> GroupRow | None:
        stored = await self._service.store.keyed_group(caller.tenant, f"{IDEMPOTENCY_PREFIX}{asked.job_id}")
        if stored is not None and stored.labels.get(REQUEST_LABEL) != asked.digest:
            raise Conflict(
                f"job {asked.job_id!r} was another request, group {stored.id}",
                field="job_id",
                hint="give each job an id of its own; only a repeated call has the same id",
            )
        return stored

    async def _record(self, asked: Asked, group: GroupView) -> dict[str, Any]:
        result = group.sessions[0].result
        assert result is not None  # not None, because the group is done
        try:
            turns = await self._service.store.turns(result.session_id, result.attempt)
            samples = await self._service.reader.samples(result.session_id)
            patch = await asyncio.to_thread(self._patch, result)
            return await asyncio.to_thread(result_record, asked, result, turns, samples, patch)
        except OutriderError as error:
            return unreadable_record(asked, f"{error.code}: {error.message}")
        except OSError as error:  # raised if the artifact with the diff cannot be read
            return unreadable_record(asked, f"the agent's diff cannot be read: {error.strerror or error}")

    def _patch(self, result: SessionResult) -> str:
        """Return the agent's diff that was graded, or "" if there is none."""
        try:
            file = self._service.artifacts.file(result.session_id, PATCH, result.attempt)
        except NotFound:
            return ""
        return file.read_bytes().decode("utf-8", "replace")

    async def _jobs(self, caller: Principal) -> list[GroupRow]:
        """Return the tenant's unfinished jobs."""
        groups = await self._service.store.groups(state=GroupState.ACTIVE, limit=MOST_JOBS, tenant=caller.tenant)
        return [group for group in groups if JOB_LABEL in group.labels]

    async def _is_running(self, caller: Principal) -> bool:
        """Return True if the tenant's server is started. After a restart of the service, the tenant's server counts as
        started if the tenant has unfinished jobs, because the callers of these jobs will ask for the results."""
        if (started := self._started.get(caller.tenant)) is not None:
            return started
        return bool(await self._jobs(caller))

    async def _check_running(self, caller: Principal) -> None:
        if not await self._is_running(caller):
            raise ServiceStopping("the server is not running", hint="POST /start")

    def _backends(self) -> Backends:
        """Return what the attached engines can do. Raises EngineUnavailable if none is attached."""
        engines = [engine for engine in self._engines() if not engine.draining]
        if not engines:
            raise EngineUnavailable(
                "no inference server is attached", hint="POST /add_llm_server, or `outrider engines add`"
            )
        lengths = [self._service.config.model.context_tokens, *(engine.context_tokens for engine in engines)]
        return Backends(
            context_tokens=min((each for each in lengths if each is not None), default=None),
            reports_ids=any(engine.mode is not TokenMode.TEXT for engine in engines),
        )

    async def _body(self, kind: type[S], request: Request, caller: Principal) -> S:
        """Parse the body of a request. Every malformed body raises InvalidField, because ProRL replies 422 to it."""
        try:
            return await self._service.parse(kind, await whole_body(request), caller)
        except RequestError as error:
            if type(error) is RequestError:
                raise InvalidField(error.message, hint=error.hint, field="body") from error
            raise


def engine_name(address: str) -> str:
    """Return the name of the engine at an address. `/v1` at the end of the address makes no difference."""
    return ENGINE_PREFIX + hashlib.sha256(address.rstrip("/").removesuffix("/v1").encode()).hexdigest()[:12]
