"""The service behind the HTTP layer. It accepts groups, schedules their sessions, delivers the results, and reads
stored data.

Nodes are used only through the protocol `sessions.attempt.Node`. Invariant: a group is stored before `submit` returns
it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from outrider.concurrency.cancellation import Steps
from outrider.concurrency.chores import Chores, Failures
from outrider.concurrency.events import Broadcast, wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.config import WILDCARDS, Config
from outrider.counts import CallFailures
from outrider.dialects import DIALECTS
from outrider.environment import installed_version
from outrider.errors import (
    Conflict,
    ContextOverflow,
    FailingChore,
    InvalidField,
    NotFound,
    OutriderError,
    TooLarge,
    record_of,
    renamed_field,
)
from outrider.evaluators.base import Evaluator
from outrider.evaluators.endpoints import Endpoints
from outrider.lifecycle import GroupState
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.store import checked_name
from outrider.sandbox.runtimes.node_host import Host
from outrider.schemas import (
    EngineStatus,
    GroupView,
    NodeList,
    PolicyStatus,
    PulledImage,
    PulledImages,
    Role,
    ServiceStatus,
    SessionView,
)
from outrider.service.admission import (
    SubmissionChecks,
    check_bounds,
    check_group,
    check_resources,
    is_same_request,
    parse_body,
)
from outrider.service.allow_lists import AllowLists
from outrider.service.audit import AuditLog
from outrider.service.back_pressure import BackPressure
from outrider.service.delivery import Deliverer, Translate
from outrider.service.diagnosis.doctor_of_runs import DoctorOfRuns
from outrider.service.metrics import MetricSources, ServiceMetrics
from outrider.service.metrics_counts import ServiceCounts
from outrider.service.metrics_rates import RateHistory
from outrider.service.principals import LOCAL, Principal
from outrider.service.regrading import regraded_group, regraded_session
from outrider.service.retention import Retention
from outrider.service.runs import Runs
from outrider.service.scheduler import PAUSES, Scheduler
from outrider.service.session_control import SessionControl
from outrider.service.tokens import TokenRegistry
from outrider.service.trace_export import TraceExport
from outrider.service.trace_spans import TRACEPARENT
from outrider.service.views import PAGE_BYTES, Page, ViewReader
from outrider.sessions.agent_services import AgentServices
from outrider.sessions.attempt import Node
from outrider.sessions.calls.call import FrozenModel, ModelBackend
from outrider.sessions.calls.limits import LARGE, MAX_VALUES, BodyCapacity
from outrider.sessions.external import ExternalSessions
from outrider.sessions.models import INPROCESS
from outrider.sessions.resources import session_needs
from outrider.sessions.timelines import STORE_EVERY_SECONDS
from outrider.spec import (
    EngineSpec,
    GroupSpec,
    PolicyUpdateSpec,
    PullSpec,
    RegradeSpec,
    Spec,
    StoredGroupSpec,
    with_default_runtime,
)
from outrider.store.artifacts import ArtifactStore
from outrider.store.rows import GroupRow
from outrider.store.run_index.index import CHORE_SECONDS, RunIndex
from outrider.store.store import Store

if TYPE_CHECKING:
    from outrider.engines.pool.pool import EnginePool
    from outrider.nodes.joined import JoinedNodes

log = logging.getLogger("outrider.service")

T = TypeVar("T")
S = TypeVar("S", bound=Spec)

REDELIVERED_AT_ONCE = 500
"""Maximum number of callbacks changed in one transaction, so that other writers of the store wait only briefly."""


class Service:
    """Accepts groups, and runs their sessions within `async with service.running()`.

    For a `caller` who is not an admin, objects of other tenants do not exist: their ids raise NotFound, and lists leave
    them out (see docs/security.md).

    `service/assembly.py` opens and closes the components that are passed to the service. `pauses` determines how long a
    failed session waits before it is tried again. Failures of background work are recorded in `failures`.
    """

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        index: RunIndex,
        artifacts: ArtifactStore,
        backend: ModelBackend,
        frozen: Sequence[FrozenModel] = (),
        nodes: Sequence[Node],
        joined: JoinedNodes,
        host: Host,
        paths: HostPaths,
        pauses: RetryPolicy = PAUSES,
        failures: Failures | None = None,
    ) -> None:
        self.config = config
        self._paths = paths
        # read at the start, because later the process may have no free descriptor for the file
        self.version = installed_version("outrider")
        self.failures = failures = failures or Failures()
        self._checks = SubmissionChecks(host)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock for each tenant. Only one request of a tenant is parsed or checked at a time, because all tenants
        share the threads for this work, and a large request occupies a thread for a while."""
        self.store = store
        self.artifacts = artifacts
        self.tokens = TokenRegistry(store, config.token)
        self.audit = AuditLog(config.data, failures)
        self._allow_lists = AllowLists(config)
        self._endpoints = Endpoints(config.graders, [model.name for model in config.frozen])
        self.pool = pool = backend.pool
        """The policy's engines."""
        self._frozen = {model.backend.model: model.backend.pool for model in frozen}
        tokenizers = {model.backend.model: model.backend.renderer.tokenizer for model in frozen}
        self.reader = ViewReader(store, backend.renderer.tokenizer, backend.offload, frozen=tokenizers)
        self._offload = backend.offload
        self.doctor = DoctorOfRuns(store, backend.offload)
        self._ids = Ids()
        secret = config.callbacks.secret
        self._deliverer = Deliverer(
            store,
            self.reader,
            allow_lists=self._allow_lists,
            secret=secret.get_secret_value() if secret else None,
            failures=failures,
        )
        self._index = index
        self.retention = Retention(store, artifacts, config.retention, failures=failures, on_hidden=index.forget)
        self._traces: TraceExport | None = None
        if config.traces_to is not None:
            self._traces = TraceExport(store, self.reader, config.traces_to, model=backend.model, failures=failures)
        self._back_pressure = BackPressure(store, config.queue.sessions)
        self._agent_services = AgentServices(config.agents)
        self._url = ""
        self.external = ExternalSessions(
            store,
            backend,
            frozen,
            grader=lambda task: self.scheduler.grader(task),
            services=self._agent_services,
            paths=paths,
            address=self._address,
        )
        self.session_control = SessionControl(store, self.external, self.submit)
        self.model = backend.model
        """The name of the policy's model."""
        self.scheduler = Scheduler(
            store,
            nodes,
            on_done=self._on_group_done,
            policy_version=lambda: pool.policy.version,
            pauses=pauses,
            evaluation_share=config.lanes.evaluation_share,
            external=self.external,
            failures=failures,
        )
        self.runs = Runs(store, index, submit=self.submit, end=self.scheduler.end, wake=self.scheduler.wake)
        self.scheduler.sessions_done.subscribe(lambda _: self._back_pressure.note_done())
        self.call_failures = CallFailures()
        """The failed model calls of the gateways in this process. Calls from the sandboxes of this process's node are
        left out, because the node counts them itself."""
        self.counts = ServiceCounts(
            (*(dialect.name for dialect in DIALECTS), INPROCESS),
            has_engine=lambda name: name in pool or any(name in other for other in self._frozen.values()),
            policy_version=lambda: pool.policy.version,
        )
        store.turns_added.subscribe(self.counts.note_turn)
        self.scheduler.sessions_done.subscribe(self.counts.note_session)
        self.scheduler.attempts_failed.subscribe(self.counts.note_failed_attempt)
        self.metrics = ServiceMetrics(
            MetricSources(
                store=store,
                counts=self.counts,
                places=self.scheduler.places,
                call_failures=self.call_failures,
                engines=self.engines,
                policy=pool.policy.status,
                failing=self.failing,
                queue_limit=config.queue.sessions,
                version=self.version,
            )
        )
        self.rates = RateHistory(self.metrics.totals, store.counts, failures)
        joined.removed.subscribe(self.metrics.note_departure)
        self.joined = joined
        joined.added.subscribe(self.scheduler.add_node)
        joined.removed.subscribe(self.scheduler.places.remove)
        joined.room.subscribe(lambda _: self.scheduler.wake())
        self._group_done = Broadcast()

    @asynccontextmanager
    async def running(self, url: str = "") -> AsyncIterator[None]:
        """Run sessions and deliver results while the block runs. The block can be entered only once. `url` is the base
        URL of the service.

        Enter the block after the model gateway has started, and leave it before the gateway stops, because sessions
        fail without a gateway. Sessions that still run at the end are interrupted, and the next service with the same
        data starts them again.
        """
        self._url = url
        tasks = asyncio.TaskGroup()
        async with AsyncExitStack() as stack:
            await tasks.__aenter__()
            # An exception of the block is not passed to the task group, which would wrap it in an ExceptionGroup.
            stack.push_async_callback(tasks.__aexit__, None, None, None)
            await stack.enter_async_context(self.external)
            stack.callback(tasks.create_task(self.scheduler.run(), name="scheduler").cancel)
            stack.callback(tasks.create_task(self._deliverer.run(), name="deliverer").cancel)
            stack.callback(tasks.create_task(self.retention.run(), name="retention").cancel)
            if self._traces is not None:
                stack.callback(tasks.create_task(self._traces.run(), name="traces").cancel)
            chores = await stack.enter_async_context(Chores(self.failures))
            chores.begin("external timelines", self.external.timelines.store, every=STORE_EVERY_SECONDS)
            chores.begin("index of runs", self._index.chore, every=CHORE_SECONDS, at_once=False)
            stack.callback(tasks.create_task(self.rates.run(), name="rates").cancel)
            yield

    def _address(self, network: str | None) -> str:
        """Return the URL at which agents in a network reach the service."""
        urls = self.config.advertised_urls
        return urls[network] if network is not None else next(iter(urls.values()), self._url)

    async def run_dry(self, seconds: float) -> bool:
        """Start no more sessions, and wait up to `seconds` for the running ones. Returns True if all have ended. Groups
        are still accepted, and results can be read. The next service with the same data starts the queued sessions."""
        try:
            async with asyncio.timeout(seconds):
                await self.scheduler.run_dry()
        except TimeoutError:
            return False
        return True

    async def parse(self, kind: type[S], body: bytes, caller: Principal = LOCAL) -> S:
        """Parse a request body into a spec. Raises RequestError, or InvalidField with the field's name."""

        def steps() -> Steps[S]:
            if len(body) > LARGE:
                try:
                    yield from BodyCapacity(None, takes_messages=True).checking(body)
                # No context length is given here, so ContextOverflow means that the body has too many JSON values.
                except ContextOverflow as error:
                    raise TooLarge(f"the request has more than {MAX_VALUES} JSON values") from error
            yield len(body)
            return parse_body(kind, body)

        async with self._turns[caller.tenant]:
            return await self._offload.run_steps(steps())

    async def regrade_group(self, group_id: str, asked: RegradeSpec, caller: Principal = LOCAL) -> GroupView:
        """Submit a group that grades the runs of another group again, and return the new group. The other group does
        not change. Raises NotFound, Conflict if there is nothing to grade, and the errors of `submit`."""
        return await self._submit_again(await regraded_group(self.store, group_id, asked, tenant=caller.sees), caller)

    async def regrade_session(self, session_id: str, asked: RegradeSpec, caller: Principal = LOCAL) -> GroupView:
        """Submit a group with one session, which grades the run of another session again. Raises the errors of
        `regrade_group`."""
        return await self._submit_again(
            await regraded_session(self.store, session_id, asked, tenant=caller.sees), caller
        )

    async def _submit_again(self, spec: StoredGroupSpec, caller: Principal) -> GroupView:
        with renamed_field("task.evaluator", "evaluator"):
            return await self.submit(spec, caller)

    async def submit(self, spec: GroupSpec, caller: Principal = LOCAL, *, traceparent: str | None = None) -> GroupView:
        """Check and store a group, and wake the scheduler. `traceparent` is the W3C trace context of the client's
        request.

        Raises the errors of the checks in `admission.py`, QueueFull while too many sessions wait, QuotaExceeded, and
        Conflict if the idempotency key was used before with another body."""
        quota = caller.max_queued
        if quota is not None and spec.n > quota:
            raise InvalidField(
                f"{spec.n} sessions are more than token {caller.name!r} may ever have queued and running: {quota}",
                field="n",
                hint="submit smaller groups, or ask the operator for a token with a higher --max-queued",
            )
        if not caller.may("admin"):
            check_bounds(spec.task)
        if (remote := spec.task.harness.remote) is not None:
            self._agent_services.check(spec.task, remote)
            if self.config.host in WILDCARDS and not self.config.advertise:
                raise InvalidField(
                    f"the service listens on {self.config.host}, and no remote agent knows its address",
                    field="task.harness.remote",
                    hint="the operator names the address: --advertise URL, or the setting advertise",
                )
        external = spec.task.harness.elsewhere is not None and not getattr(spec, "regrades", [])
        # If the setting `processes` is 0, all sessions run on nodes that join the service. Soon after the start, no
        # session is refused as too large, because a node of any size may still join.
        if not self.scheduler.places.may_fit(session_needs(spec.task), others=self.config.processes == 0):
            check_resources(spec.task, self.scheduler.places.stats())

        def check() -> list[Evaluator]:
            task = with_default_runtime(spec.task, self.config.sandboxes.default_kind)
            checked = spec.model_copy(update={"task": task})
            self._allow_lists.check(checked, caller)
            return check_group(
                checked,
                paths=self._paths,
                endpoints=self._endpoints,
                here=self.config.processes > 0,
                pull=self.config.sandboxes.pull,
            )

        async with self._turns[caller.tenant]:
            evaluators = await asyncio.to_thread(check)
        translated = spec.translated if isinstance(spec, StoredGroupSpec) else None
        group_id = f"g-{self._ids.next()}"
        row = GroupRow(
            id=group_id,
            n=spec.n,
            priority=spec.priority,
            idempotency_key=spec.idempotency_key,
            callback_url=str(spec.callback_url) if spec.callback_url else None,
            created=time.time(),
            labels=spec.task.labels,
            min_usable=spec.min_usable,
            submitted_by=caller.name,
            tenant=caller.tenant,
            harness=spec.task.harness.name,
            translator=translated.system if translated else None,
            usable_trains=translated is not None and translated.usable_trains,
            traceparent=traceparent if TRACEPARENT.fullmatch(traceparent or "") else None,
        )
        if not external:  # external sessions do not wait for slots
            await self._back_pressure.check(row)
        # This check is last, because it takes more processor time than all others.
        await self._checks.check(evaluators, caller.tenant)
        seconds = spec.expires_seconds or self.config.queue.expires_seconds
        session_ids = [f"s-{group_id[2:]}-{index}" for index in range(spec.n)]
        body = await self._offload.run(lambda: spec.model_dump_json().encode())
        expires = None if seconds is None else row.created + seconds
        try:
            stored = await self.store.create_group(
                row, body, session_ids, expires=expires, quota=quota, external=external
            )
        except Conflict:
            if (known := await self._same_request(row, spec, body)) is None:
                raise
            stored = known
        self.scheduler.wake()
        return await self.reader.view(stored)

    async def _same_request(self, group: GroupRow, spec: GroupSpec, body: bytes) -> GroupRow | None:
        """Return the stored group with the idempotency key of `group` if it was made from the same request. `body` is
        the JSON of `spec`. Another version of Outrider may have written the stored request in another form, for example
        without a field that is new in this version."""
        if group.idempotency_key is None:
            return None
        known = await self.store.keyed_group(group.tenant, group.idempotency_key)
        if known is None:
            return None
        stored = await self.store.spec(known.id)
        async with self._turns[group.tenant]:
            return known if await asyncio.to_thread(is_same_request, stored, spec, body) else None

    def translate_callbacks(self, system: str, translate: Translate) -> None:
        """Use the function `translate` for the callback bodies of groups that were submitted through the API of
        `system`. Call this before `running`: without the function, these callbacks stay in the outbox."""
        self._deliverer.translate(system, translate)

    async def cancel(self, group_id: str, caller: Principal = LOCAL) -> GroupView:
        """Cancel a group with all its unfinished sessions. Nothing changes if the group is already cancelled or
        done."""
        await self.scheduler.end(await self.store.cancel_group(group_id, tenant=caller.sees))
        return await self.reader.group(group_id, tenant=caller.sees)

    async def cancel_session(self, session_id: str, caller: Principal = LOCAL) -> SessionView:
        """Cancel one session. The group's other sessions continue. Nothing changes if the session is already cancelled
        or done."""
        await self.scheduler.end([await self.store.cancel_session(session_id, tenant=caller.sees)])
        return await self.reader.session(session_id, tenant=caller.sees)

    async def group(self, group_id: str, *, wait: float, samples: bool, caller: Principal = LOCAL) -> GroupView:
        """Wait up to `wait` seconds for a group to be done. Then return the group in its current state."""

        async def is_done() -> bool:
            return (await self.store.group(group_id, tenant=caller.sees)).state is GroupState.DONE

        await self._wait_until(wait, is_done)
        return await self.reader.group(group_id, samples=samples, tenant=caller.sees)

    async def results(
        self,
        *,
        after: int,
        wait: float,
        limit: int,
        samples: bool,
        columns: bool = False,
        page_bytes: int = PAGE_BYTES,
        caller: Principal = LOCAL,
    ) -> Page:
        """Return a page of finished groups whose cursor is greater than `after`. Waits up to `wait` seconds for the
        first group. A page ends after `limit` groups, or with the group that reaches `page_bytes`. `columns` is True
        if the page is sent as an Arrow stream."""
        page = Page(after, columns=columns, page_bytes=page_bytes)
        if columns:
            await self.reader.prepare_columns()
        # Clients take an empty page as the end of the results. So if all groups of a page were removed after they were
        # listed, the next groups are read.
        while not page.groups and (
            rows := await self._wait_until(
                wait, lambda: self.store.results(after=after, limit=limit, tenant=caller.sees)
            )
        ):
            for row in rows:
                with suppress(NotFound):
                    await page.add(await self.reader.view(row, samples=samples), self.reader)
                if page.full:
                    break
        return page

    async def _wait_until(self, seconds: float, look: Callable[[], Awaitable[T]]) -> T:
        """Call `look` now, and again whenever a group is done. Stops when the result is true or after `seconds`, and
        returns the last result."""
        deadline = time.monotonic() + seconds
        while True:
            done = self._group_done.next()
            seen = await look()
            left = deadline - time.monotonic()
            if seen or left <= 0:
                return seen
            await wait_for_event(done, left)

    async def redeliver(self, group_id: str | None = None) -> int:
        """Retry a callback that was given up, or all such callbacks if `group_id` is None. Returns their number. Raises
        NotFound if the callback was not given up."""
        if group_id is not None:
            await self.store.redeliver(group_id)
            count = 1
        else:
            count = 0
            while some := await self.store.redeliver_some(REDELIVERED_AT_ONCE):
                count += some
        self._deliverer.wake()
        return count

    async def update_policy(self, update: PolicyUpdateSpec) -> PolicyStatus:
        """Switch to another policy version, beginning with the next token (see `Policy.update`). Groups that began at a
        version below `cancel_older_than` are cancelled before generation resumes."""
        cancelled: list[str] = []

        async def cancel_old() -> None:
            if update.cancel_older_than is not None:
                for group_id in await self.store.began_before(update.cancel_older_than):
                    await self.scheduler.end(await self.store.cancel_group(group_id))
                    cancelled.append(group_id)

        await self.pool.policy.update(
            update.version, mode=update.mode, weights=update.weights, meanwhile=cancel_old, go_back=update.go_back
        )
        return msgspec.structs.replace(self.pool.policy.status(), cancelled=tuple(cancelled))

    async def attach_engine(self, spec: EngineSpec) -> EngineStatus:
        """Attach an engine that is not in the settings. Raises the errors of `add_engine`, and InvalidField if the
        engine's kind names Python code that is not allowed."""
        self._allow_lists.check_python(spec.kind, field="kind")
        return await self.add_engine(spec)

    async def add_engine(self, spec: EngineSpec) -> EngineStatus:
        """Attach an engine to the pool of the model in `spec.serves`. Raises the errors of `EnginePool.add`, and
        InvalidField for an unknown model."""
        if spec.serves is None:
            return await self.pool.add(spec)
        if spec.serves not in self._frozen:
            raise InvalidField(
                f"there is no frozen model {spec.serves!r}",
                field="serves",
                hint=f"the settings name {', '.join(map(repr, self._frozen)) or 'none'}: see docs/frozen-models.md",
            )
        return await self._frozen[spec.serves].add(spec)

    def pool_of(self, engine: str) -> EnginePool:
        """Return the pool of the frozen model that has an engine, or a list of engines, with this name. If there is
        none, return the policy's pool."""
        return next((pool for pool in self._frozen.values() if engine in pool), self.pool)

    def engines(self) -> tuple[EngineStatus, ...]:
        """Return the engines of the policy, then the engines of each frozen model."""
        return tuple(engine for pool in (self.pool, *self._frozen.values()) for engine in pool.status())

    async def status(self, caller: Principal = LOCAL) -> ServiceStatus:
        """Return the status of the service. Sessions and results are counted for the caller's tenant, or for all
        tenants if the caller is an admin. Nodes, engines and the policy belong to all tenants."""
        counts = await self.store.counts(tenant=caller.sees)
        return ServiceStatus(
            version=self.version,
            model=self.config.model.name,
            frozen=tuple(self._frozen),
            sessions={state.value: number for state, number in counts.items()},
            cursor=await self.store.last_cursor(tenant=caller.sees),
            nodes=tuple(self.scheduler.places.stats()),
            engines=self.engines(),
            policy=self.pool.policy.status(),
            failing=self.failing(),
            may=tuple(role for role in get_args(Role) if caller.may(role)),
        )

    def failing(self) -> tuple[FailingChore, ...]:
        """Return the background work that fails now, in the service and on its nodes. The work that has failed for the
        longest time comes first."""
        failing = chain(
            self.failures.failing(),
            *(node.failing for node in self.scheduler.places.stats()),
        )
        return tuple(sorted(failing, key=lambda each: each.since))

    def nodes(self) -> NodeList:
        return NodeList(nodes=tuple(self.scheduler.places.stats()), refused=tuple(self.joined.refused))

    async def drain_node(self, name: str, drained: bool = True) -> NodeList:
        """Stop placing sessions on a node, or start again if `drained` is False. The choice survives a restart. Raises
        NotFound for an unknown node."""
        await self.scheduler.drain(name, drained)
        return self.nodes()

    async def pull_image(self, asked: PullSpec) -> PulledImages:
        """Have every machine that runs sessions pull an image from a registry. Returns the image, or the error, of each
        machine. Raises InvalidField for an invalid image name."""
        checked_name(asked.name)

        async def pull(node: Node) -> PulledImage:
            try:
                image = await node.pull_image(asked.reference, asked.name)
            except Exception as error:  # the reply must also list the machines that succeeded
                if not isinstance(error, OutriderError):
                    log.exception("node %s cannot get image %s", node.name, asked.name)
                return PulledImage(node=node.name, error=record_of(error))
            return PulledImage(node=node.name, digest=image.digest, bytes=image.bytes)

        pulled = await asyncio.gather(*map(pull, self.scheduler.places.machines()))
        self.scheduler.wake()  # placement prefers a node that has a session's image
        return PulledImages(machines=tuple(pulled))

    def _on_group_done(self) -> None:
        self._group_done.send()
        self._deliverer.wake()


class Ids:
    """Generates ids that sort by time. An id has 16 hexadecimal digits: 13 digits of microseconds, then 3 random
    digits.

    Ids of one process never repeat. If the clock is set back before a restart, the random digits make a repeated id
    unlikely.
    """

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> str:
        self._last = max(self._last + 1, time.time_ns() // 1000)
        return f"{self._last:013x}{secrets.token_hex(2)[:3]}"
