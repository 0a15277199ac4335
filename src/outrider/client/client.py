"""The Python client of the control API: `AsyncClient`, and `Client` with the same methods without `await`.

    with Client("http://127.0.0.1:8700") as client:
        group = client.submit({"task": {...}, "n": 8})
        for done in client.follow():
            ...

Replies are the structs of schemas.py. Every method raises the error in the service's reply, such as InvalidField or
NotFound. It raises ServiceError if the service cannot be reached or the client is not open.

After the service has replied once, a client repeats safe calls while the service is busy or cannot be reached, for
example during a restart. Safe calls are:

- all methods that read;
- `cancel`, `cancel_session`, `ack` without `rewind`, `pause_queue`, `drain_node`, `resume_node`, `drain_engine` and
  `complete_session`, because a second call changes nothing;
- `submit`, `regrade` and `open_session` with an idempotency key.

All other calls are sent once. But a submission that a busy service has refused is always repeated. If a stream of
events is lost, the client connects again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import os
import random
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit
from weakref import WeakKeyDictionary

import msgspec

from outrider.concurrency.loop_thread import LoopThread
from outrider.concurrency.retries import RetryPolicy
from outrider.environment import DEFAULT_URL
from outrider.errors import (
    MAX_TEXT,
    UNREADABLE,
    Busy,
    ErrorRecord,
    InvalidField,
    NotFound,
    OutriderError,
    ServiceError,
    ServiceUnusable,
    error_from,
    storable,
)
from outrider.lifecycle import GroupState
from outrider.messages import Image, image_from_bytes
from outrider.sample_columns import MEDIA_TYPE, decode
from outrider.schemas import (
    EVALUATION_LABEL,
    ArtifactList,
    CallbackList,
    CallbackView,
    ChangedSessions,
    ChatList,
    ConsumerList,
    ConsumerView,
    EngineList,
    EngineStatus,
    EventView,
    GcReport,
    GroupList,
    GroupSummary,
    GroupView,
    NewToken,
    NodeList,
    NodeStats,
    PolicyPause,
    PolicyStatus,
    PulledImages,
    QueryReply,
    QueuePauses,
    RateList,
    Redelivered,
    ResultsPage,
    Role,
    RunDiagnosis,
    RunDiff,
    SampleList,
    ServiceStatus,
    SessionEndpoint,
    SessionList,
    SessionView,
    TimelineView,
    TokenList,
    TokenView,
    TurnList,
    TurnView,
)
from outrider.trajectory import ChatRow, Sample
from outrider.wire.http_connections import Connections, Response
from outrider.wire.tls import trusting

if TYPE_CHECKING:
    from outrider.spec import EngineSpec, GroupSpec, RegradeSpec, ReportSpec, SessionSpec, SessionsSpec, Spec

log = logging.getLogger("outrider.client")

T = TypeVar("T")
P = ParamSpec("P")
Watch = Callable[[Sequence[GroupView]], None]
Query = Mapping[str, str | float | bool | list[str] | None]
"""The parameters of a request's URL. A parameter that is None is not sent. A list is sent as one parameter for each
item."""

TOTAL_SECONDS = 300.0
"""Maximum seconds from sending a request to the end of its reply."""
CONNECT_SECONDS = 60.0
"""Maximum seconds to connect to the service, including TLS."""
MAX_CONNECTIONS = 100
"""Maximum number of concurrent requests of a client. Further requests wait."""
PULL_SECONDS = 3600.0
"""Maximum seconds for a request to pull an image to all machines."""
LONG_POLL = 30.0
"""Seconds that one request waits for a group to be done. The service allows at most 60."""
WATCH_PAUSE = 0.2
WATCH_PAUSE_EACH = 0.02
"""Seconds between two polls of the groups that `wait` watches: WATCH_PAUSE or, if longer, WATCH_PAUSE_EACH for each
group. So the service gets at most about 50 requests a second."""


SILENCE = 60.0
"""After this many seconds without a byte, a stream of events is considered lost. The service sends a byte at least
every 15 seconds."""

RETRIES = RetryPolicy(first=0.25, longest=10.0)
RESTART_SECONDS = 30.0
"""How long a client repeats a safe call by default, in seconds."""
PATIENCE = 300.0
"""Seconds for which `patiently` and `submit` retry while the service is busy or cannot be reached, for example during a
restart. Without an idempotency key, `submit` retries only while the service is busy."""
LATER = frozenset({408, 425, 429})
"""HTTP statuses below 500 after which a retry may help, whether from the service or a proxy."""
UNAVAILABLE = frozenset({502, 503, 504})
"""HTTP statuses that a proxy sends while the service behind it restarts."""
EVENT_STREAM = "text/event-stream"
GZIP = 31
"""The value of `wbits` with which zlib reads gzip."""
SPREAD = 1.25
"""A client multiplies the wait that a busy service requests by a random factor from 1 to SPREAD. So refused clients do
not all retry at the same time."""


class RetryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How `patiently` retries a call, and reports it.

    - `waits`: the waits between the tries.
    - `report_after`: after this many seconds of retries, a warning with the reason is logged.
    - `report_every`: minimum seconds between two warnings about retries in one event loop, no matter how many calls are
      retried.
    """

    waits: RetryPolicy = RETRIES
    report_after: float = 5.0
    report_every: float = 30.0


LIMITS = RetryLimits()


class _Reply(NamedTuple):
    data: bytes
    media_type: str


def _trace_context() -> dict[str, str]:
    """Return the header with the calling program's trace context, if the program uses OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {name: value for name, value in carrier.items() if name == "traceparent"}


class AsyncClient:
    """The client of the service for asynchronous code: `async with AsyncClient(url, token=None) as client`.

    The certificate of an https service is verified. `ca` is a PEM file with the certificate of the authority that
    signed the service's certificate. `ca` is needed if this machine does not trust the authority. `patience` is the
    number of seconds for which safe calls are repeated (see the module). With 0, safe calls are sent once.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        ca: str | None = None,
        patience: float = RESTART_SECONDS,
    ) -> None:
        if token and not token.isprintable():
            raise InvalidField(
                "the token has a line break or another control character",
                field="token",
                hint="a token read from a file may end with a line break: strip it",
            )
        if not url.startswith(("http://", "https://")):
            named = f"127.0.0.1:{url}" if url.isdigit() else url
            raise InvalidField(
                f"the address of the service, {url!r}, has no scheme",
                field="url",
                hint=f"write http://{named}" if "://" not in url else "use http:// or https://",
            )
        try:
            address = urlsplit(url)
            _ = address.port
        except ValueError as error:
            raise InvalidField(f"the address of the service, {url!r}, is not valid: {error}", field="url") from error
        self.url = url.rstrip("/")
        self._shown = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl().rstrip("/")
        """The address without a user's name and password, for messages."""
        self._headers = {"User-Agent": "outrider"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif address.username is not None:  # a user and password for a proxy in front of the service
            user = f"{unquote(address.username)}:{unquote(address.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        self._trusted = trusting(ca)
        self._patience = patience
        self._reached = False
        """True once the service has replied. Until then, no safe call is repeated, because an error most likely means a
        wrong address."""
        self._connections: Connections | None = None

    async def __aenter__(self) -> Self:
        self._connections = Connections(self.url, self._headers, tls=self._trusted, connect_seconds=CONNECT_SECONDS)
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    async def submit(self, group: GroupSpec | Mapping[str, Any], *, patience: float = PATIENCE) -> GroupView:
        """Submit a group. When this method returns, the service has stored the group.

        The service is busy if its queue is full or the token has too many sessions. The submission is then repeated
        after the wait that the service requests. After `patience` seconds, raises Busy (QueueFull for a full queue).

        With an `idempotency_key`, the submission is also repeated while the service cannot be reached. If the service
        has already stored the group, that group is returned. Without a key, the submission is not repeated while the
        service cannot be reached: the service may have stored the group although no reply arrived, and would then run
        the group twice.
        """
        return await self._submit("/v1/groups", group, patience)

    async def regrade(
        self, id: str, asked: RegradeSpec | Mapping[str, Any] | None = None, *, patience: float = PATIENCE
    ) -> GroupView:
        """Grade a group or a session again; `id` is the id of either. Returns the new group, which runs no agent.
        `asked` may name another evaluator. For `patience`, see `submit`."""
        kind = "sessions" if id.startswith("s-") else "groups"
        return await self._submit(_path(kind, id, "regrade"), asked or {}, patience)

    async def _submit(self, path: str, spec: GroupSpec | RegradeSpec | Mapping[str, Any], patience: float) -> GroupView:
        return await self._submission(path, GroupView, spec, patience)

    async def _submission(self, path: str, shape: type[T], spec: Spec | Mapping[str, Any], patience: float) -> T:
        """Send a submission, and repeat it while the service is busy. With an idempotency key, it is also repeated
        while the service cannot be reached."""
        body = _encoded(spec)
        key = spec.get("idempotency_key") if isinstance(spec, Mapping) else getattr(spec, "idempotency_key", None)
        submission = partial(self._call, "POST", path, shape, body=body)
        return await patiently(submission, patience, unreachable=key is not None and self._reached)

    async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
        """Return a group. Waits up to `wait` seconds (at most 60) until the group is done."""
        query = {"wait": wait, "samples": samples}
        if not samples:
            return await self._call("GET", _path("groups", group_id), GroupView, query=query)
        view, rows = await self._with_samples(_path("groups", group_id), GroupView, query)
        return msgspec.structs.replace(view, samples=tuple(rows))

    async def groups(self, *, state: str | None = None, limit: int = 20) -> tuple[GroupSummary, ...]:
        """Return groups, newest first, without their sessions."""
        return (await self._call("GET", "/v1/groups", GroupList, query={"limit": limit, "state": state or None})).groups

    async def group_page(
        self, wanted: Mapping[str, Any] = {}, *, after: str | None = None, limit: int = 20
    ) -> GroupList:
        """Return one page of the groups that match the filters in `wanted`, newest first. The filters are named like
        the arguments of `sessions`. `min_reward` and `max_reward` apply to a group's mean reward."""
        return await self._call("GET", "/v1/groups", GroupList, query=_filter(wanted, after, limit))

    async def cancel(self, group_id: str) -> GroupView:
        """Cancel a group. A group that is done is not changed."""
        return await self._call("DELETE", _path("groups", group_id), GroupView, safe=True)

    async def cancel_session(self, session_id: str) -> SessionView:
        """Cancel one session. The other sessions of its group continue."""
        return await self._call("DELETE", _path("sessions", session_id), SessionView, safe=True)

    async def results(
        self,
        *,
        after: int | None = None,
        consumer: str | None = None,
        wait: float = 0.0,
        limit: int = 100,
        samples: bool = False,
    ) -> ResultsPage:
        """Return the finished groups after the cursor `after`. If there are none, wait up to `wait` seconds (at most
        60) for the first. A page has at most `limit` groups: call again with the page's cursor until a page is empty.

        Without `after`, the results begin with the first group or, for a named `consumer`, after the groups that it has
        acknowledged (`ack`). For a new consumer, `after` also sets its first position. Raises Forbidden if a `consumer`
        is given and the token is read-only.
        """
        query = {"wait": wait, "limit": limit, "samples": samples, "after": after, "consumer": consumer}
        if not samples:
            return await self._call("GET", "/v1/results", ResultsPage, query=query)
        page, rows = await self._with_samples("/v1/results", ResultsPage, query)
        of_group: dict[str, list[Sample]] = {group.id: [] for group in page.groups}
        for row in rows:
            of_group[row.group_id].append(row)
        groups = (msgspec.structs.replace(group, samples=tuple(of_group[group.id])) for group in page.groups)
        return msgspec.structs.replace(page, groups=tuple(groups))

    async def follow(
        self,
        *,
        after: int | None = None,
        consumer: str | None = None,
        samples: bool = False,
        evaluations: bool = False,
    ) -> AsyncIterator[GroupView]:
        """Yield groups as they finish, without end. Groups that finished before the call come first, unless `after` or
        `consumer` excludes them. To wait for your own groups, use `wait`. Groups of evaluations are left out unless
        `evaluations` is True, so that a trainer does not train on held-out tasks. For the other arguments, see
        `results`.

        With a `consumer`, a group is acknowledged when the next group is requested. If the caller's loop ends without
        requesting the next group, the next call of `follow` yields the last group again.

        Raises ServiceError if the service has lost data, so that its newest cursor is below the cursor that was
        reached. Otherwise, the next groups would be skipped until they reach this cursor.
        """
        while True:
            page = await self.results(after=after, consumer=consumer, wait=LONG_POLL, samples=samples)
            if not page.groups and page.cursor > (newest := (await self.status()).cursor):
                raise ServiceError(
                    f"no group has the cursor {page.cursor}: the newest is {newest}",
                    hint="the service was started without its old data: restore its data folder, or begin again at 0"
                    f" (at {newest} if an older copy of the data was restored)",
                )
            for group in page.groups:
                if evaluations or EVALUATION_LABEL not in group.labels:
                    yield group
                if consumer is not None and group.cursor is not None:
                    await self.ack(consumer, group.cursor)
            after = page.cursor

    async def ack(self, consumer: str, cursor: int, *, rewind: bool = False, tenant: str | None = None) -> ConsumerView:
        """Acknowledge the groups up to `cursor`. Call this method once the data made from these groups is stored. If
        the consumer's position is after `cursor`, the position does not change. With `rewind`, the position moves back
        to `cursor`, and the consumer gets the later groups again. An admin may name the consumer's `tenant`."""
        body = _encoded({"cursor": cursor, "rewind": rewind})
        path = _path("consumers", consumer, "ack")
        # A rewind is not repeated, because it could undo an acknowledgement that another process has made since.
        return await self._call("POST", path, ConsumerView, body=body, query={"tenant": tenant}, safe=not rewind)

    async def consumers(self) -> tuple[ConsumerView, ...]:
        """Return the consumers of the token's tenant, or all consumers for an admin."""
        return (await self._call("GET", "/v1/consumers", ConsumerList)).consumers

    async def remove_consumer(self, name: str, *, tenant: str | None = None) -> tuple[ConsumerView, ...]:
        """Remove a consumer, so that the service no longer keeps groups for it. Returns the remaining consumers. An
        admin may name the consumer's `tenant`."""
        path = _path("consumers", name)
        return (await self._call("DELETE", path, ConsumerList, query={"tenant": tenant})).consumers

    async def dead_callbacks(self, *, limit: int = 100) -> tuple[CallbackView, ...]:
        """Return the callbacks that the service has given up, newest first."""
        return (await self._call("GET", "/v1/callbacks/dead", CallbackList, query={"limit": limit})).callbacks

    async def redeliver(self, group_id: str | None = None) -> int:
        """Retry the given-up callback of a group or, without `group_id`, all given-up callbacks. Returns their
        number."""
        which = () if group_id is None else (group_id,)
        return (await self._call("POST", _path("callbacks", "dead", *which, "redeliver"), Redelivered)).callbacks

    async def discard_callback(self, group_id: str) -> tuple[CallbackView, ...]:
        """Discard a callback that was given up. Returns the callbacks that are still given up, at most the newest
        100."""
        return (await self._call("DELETE", _path("callbacks", "dead", group_id), CallbackList)).callbacks

    async def gc(
        self, *, days: float | None = None, size_mb: int | None = None, force: bool = False, dry_run: bool = False
    ) -> GcReport:
        """Remove the finished groups that ended more than `days` ago. Then remove the oldest remaining groups until at
        most `size_mb` MiB are stored. If both are None, the service's settings apply.

        Groups that a consumer has not acknowledged are kept unless `force` is True. Groups whose callback is not
        delivered are always kept. With `dry_run`, nothing is removed. One call removes groups for about 20 seconds.
        Call again while `more` is true in the report."""
        body = {"days": days, "size_mb": size_mb, "force": force, "dry_run": dry_run}
        return await self._call("POST", "/v1/gc", GcReport, body=_encoded(body))

    async def wait(self, group_ids: Iterable[str], watch: Watch | None = None) -> list[GroupView]:
        """Wait until all groups are done, and return them in the order of `group_ids`.

        `watch` is called with all groups at the beginning, at the end, and about every 0.2 seconds in between (less
        often for more than ten groups). Once each group has been fetched for the first time, the wait survives a
        restart of the service (see `patiently`)."""
        groups = {group_id: await self.group(group_id) for group_id in group_ids}
        while True:
            if watch is not None:
                watch(list(groups.values()))
            active = [group.id for group in groups.values() if group.state is not GroupState.DONE]
            if not active:
                return list(groups.values())
            patience = LONG_POLL if watch is None else max(WATCH_PAUSE, WATCH_PAUSE_EACH * len(active))
            groups[active[0]] = await patiently(partial(self.group, active[0], wait=patience))
            for group_id in active[1:] if watch is not None else ():
                groups[group_id] = await patiently(partial(self.group, group_id))

    async def events(self, *, after: int = 0) -> AsyncIterator[EventView]:
        """Yield every event after the cursor `after`, without end. The client connects again if the connection is lost,
        or if a proxy replies with a status in UNAVAILABLE. Raises ServiceError if the first connection fails, or if no
        connection succeeds for PATIENCE seconds. Any other error in a reply is raised at once, and ServiceUnusable if
        a reply is not a stream of events."""
        clock = asyncio.get_running_loop().time
        give_up_at, tries = clock(), 0
        while True:
            try:
                target = _with_query("/v1/events", {"after": after})
                async with self._place(), self._reply("GET", target, seconds=SILENCE) as reply:
                    if reply.status >= 300:
                        async with asyncio.timeout(SILENCE):
                            refusal = _refusal(await reply.whole(), reply)
                        if reply.status not in UNAVAILABLE or clock() >= give_up_at:
                            raise refusal
                    elif (kind := _media_type(reply)) != EVENT_STREAM:
                        raise ServiceUnusable(
                            f"the reply from {self._shown} is no stream of events, but {kind or 'of no type'}",
                            hint="another program may listen at this address, or a proxy in front of the service",
                        )
                    async for line in _lines(reply):  # the body of an error was read above, so no line is left
                        give_up_at, tries = clock() + PATIENCE, 0
                        if line.startswith(b"data: "):
                            event = msgspec.json.decode(line[6:], type=EventView)
                            after = event.cursor
                            yield event
            except OSError as error:
                if clock() >= give_up_at:
                    raise self._unreachable(error) from error
            await asyncio.sleep(RETRIES.wait(tries))
            tries += 1

    async def session(self, session_id: str) -> SessionView:
        return await self._call("GET", _path("sessions", session_id), SessionView)

    async def turns(self, session_id: str, *, tokens: bool = False) -> tuple[TurnView, ...]:
        """Return a session's model calls. With `tokens`, the turns have their ids, log-probabilities and messages."""
        query = {"tokens": tokens or None}
        return (await self._call("GET", _path("sessions", session_id, "turns"), TurnList, query=query)).turns

    async def timeline(self, session_id: str, attempt: int | None = None) -> TimelineView:
        """Return the timeline of one attempt of a session, by default of the newest attempt."""
        query = {"attempt": attempt}
        return await self._call("GET", _path("sessions", session_id, "timeline"), TimelineView, query=query)

    async def open_session(
        self, session: SessionSpec | Mapping[str, Any] | None = None, *, patience: float = PATIENCE
    ) -> SessionEndpoint:
        """Open a session for an agent that runs elsewhere. Returns the session with its credential and addresses. For
        `patience`, see `submit`."""
        return await self._submission("/v1/sessions", SessionEndpoint, session or {}, patience)

    async def complete_session(self, session_id: str, report: ReportSpec | Mapping[str, Any]) -> SessionView:
        """Complete a session whose agent runs elsewhere. When this method returns, the service has stored the report.
        Repeating the call with the same report changes nothing."""
        path = _path("sessions", session_id, "complete")
        return await self._call("POST", path, SessionView, body=_encoded(report), safe=True)

    async def reset_session(self, session_id: str) -> SessionView:
        """Drop the turns of a session whose agent runs elsewhere, so that the agent can start over."""
        return await self._call("POST", _path("sessions", session_id, "reset"), SessionView, body=b"{}")

    async def sessions(
        self,
        *,
        state: str | Sequence[str] | None = None,
        labels: Mapping[str, str] = {},
        groups: Sequence[str] = (),
        harness: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        stop_reason: str | None = None,
        error: str | None = None,
        since: float = 0.0,
        until: float | None = None,
        text: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> SessionList:
        """Return one page of the sessions that match every given filter, newest group first.

        error: the code of a session's error.
        since, until: times of submission, in seconds since the epoch.
        text: is searched for in the error, the end of the agent's output and the answer.
        after: the `after` of the previous page."""
        wanted = {
            "state": state,
            "labels": labels,
            "groups": groups,
            "harness": harness,
            "min_reward": min_reward,
            "max_reward": max_reward,
            "stop_reason": stop_reason,
            "error": error,
            "since": since or None,
            "until": until,
            "text": text,
        }
        return await self._call("GET", "/v1/sessions", SessionList, query=_filter(wanted, after, limit))

    async def query(self, sql: str) -> QueryReply:
        """Return the rows of an SQL query over the views of docs/queries.md. Raises InvalidField for a query that is
        refused or too costly."""
        return await self._call("POST", "/v1/query", QueryReply, body=_encoded({"sql": sql}), safe=True)

    async def diff(self, a: str, b: str, *, passed: float = 1.0) -> RunDiff:
        """Compare the runs `a` and `b`. Each run is given by labels (NAME=VALUE) or ids of groups, separated by commas.
        A session counts as solved if its reward is at least `passed`."""
        return await self._call("GET", "/v1/diff", RunDiff, query={"a": a, "b": b, "passed": passed})

    async def cancel_sessions(self, wanted: SessionsSpec | Mapping[str, Any]) -> ChangedSessions:
        """Cancel all sessions that match the filter `wanted` and are not done."""
        return await self._call("POST", "/v1/sessions/cancel", ChangedSessions, body=_encoded(wanted))

    async def retry_sessions(self, wanted: SessionsSpec | Mapping[str, Any]) -> ChangedSessions:
        """Submit all finished sessions that match the filter `wanted` again, in new groups of the same tasks."""
        return await self._call("POST", "/v1/sessions/retry", ChangedSessions, body=_encoded(wanted))

    async def pauses(self) -> QueuePauses:
        """Return the pauses of the queue, and the number of sessions that wait because of them."""
        return await self._call("GET", "/v1/queue", QueuePauses)

    async def pause_queue(
        self, *, labels: Mapping[str, str] = {}, harness: str | None = None, tenant: str | None = None
    ) -> QueuePauses:
        """Start no more sessions of groups that have all `labels` and the `harness`, until `resume_queue` is called
        with the same arguments. Running sessions continue. An admin may name a `tenant`."""
        body = _encoded({"labels": dict(labels), "harness": harness, "tenant": tenant})
        return await self._call("POST", "/v1/queue/pause", QueuePauses, body=body, safe=True)

    async def resume_queue(
        self, *, labels: Mapping[str, str] = {}, harness: str | None = None, tenant: str | None = None
    ) -> QueuePauses:
        """End the pause that `pause_queue` began with the same arguments."""
        body = _encoded({"labels": dict(labels), "harness": harness, "tenant": tenant})
        return await self._call("POST", "/v1/queue/resume", QueuePauses, body=body)

    async def diagnosis(
        self, *, labels: Mapping[str, str] = {}, groups: Sequence[str] = (), since: float = 0.0
    ) -> RunDiagnosis:
        """Return the faults of the groups named in `groups`, or of all groups if none is named (docs/diagnosis.md).
        Only groups that have all `labels`, and were created at `since` (seconds since the epoch) or later, are
        examined."""
        query: Query = {
            "label": [f"{name}={value}" for name, value in labels.items()],
            "group": list(groups),
            "since": since or None,
        }
        return await self._call("GET", "/v1/diagnosis", RunDiagnosis, query=query)

    @asynccontextmanager
    async def external_session(
        self, session: SessionSpec | Mapping[str, Any] | None = None
    ) -> AsyncIterator[ExternalSession]:
        """Open a session for an agent that the block runs: `async with client.external_session() as session`. The block
        must call `session.complete`. If the block raises an error, or ends without this call, the session ends with an
        error."""
        opened = ExternalSession(self, await self.open_session(session))
        try:
            yield opened
        except BaseException as error:
            await opened.fail(error)
            raise
        if not opened.completed and not opened.failed:
            await opened.complete(error="the block ended without a completion")

    async def samples(self, session_id: str) -> tuple[Sample, ...]:
        _, rows = await self._with_samples(_path("sessions", session_id, "samples"), SampleList, {})
        return tuple(rows)

    async def chat_rows(self, session_id: str) -> tuple[ChatRow, ...]:
        """Return a session's samples as conversations."""
        return (await self._call("GET", _path("sessions", session_id, "chat"), ChatList)).rows

    async def artifacts(self, session_id: str, *, attempt: int | None = None) -> ArtifactList:
        """Return the artifacts of an attempt, by default of the newest attempt that has stored its artifacts."""
        path = _path("sessions", session_id, "artifacts")
        return await self._call("GET", path, ArtifactList, query={"attempt": attempt})

    async def artifact(self, session_id: str, path: str, *, attempt: int | None = None) -> bytes:
        """Return the bytes of the artifact at `path` in the sandbox."""
        place = f"{_path('sessions', session_id, 'artifacts')}/{quote(path.removeprefix('/'))}"
        return (await self._fetch("GET", place, query={"attempt": attempt})).data

    async def image(self, digest: str) -> Image:
        """Return an image that occurs in a sample, with its bytes. Raises NotFound for an image that was sent as a URL,
        because the service does not store its bytes."""
        answer = await self._fetch("GET", _path("images", digest))
        return image_from_bytes(answer.media_type, answer.data)

    async def reply_body(self, path: str, query: Query | None = None) -> bytes:
        """Return the undecoded body of the reply to a GET of `path`, such as `/v1/status`. Raises NotFound for an
        unknown path."""
        return (await self._fetch("GET", path, query=query)).data

    async def status(self) -> ServiceStatus:
        return await self._call("GET", "/v1/status", ServiceStatus)

    async def rates(self) -> RateList:
        """Return the numbers of sessions, model calls and tokens in the last hour, as a series over time. Raises
        Forbidden unless the token is an admin's, or belongs to the tenant `operator`."""
        return await self._call("GET", "/v1/rates", RateList)

    async def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus. Raises Forbidden unless the token is an admin's, or
        belongs to the tenant `operator`."""
        return (await self._fetch("GET", "/metrics")).data.decode()

    async def engines(self) -> tuple[EngineStatus, ...]:
        return (await self._call("GET", "/v1/engines", EngineList)).engines

    async def nodes(self) -> tuple[NodeStats, ...]:
        return (await self._call("GET", "/v1/nodes", NodeList)).nodes

    async def pull_image(self, reference: str, name: str, *, seconds: float = PULL_SECONDS) -> PulledImages:
        """Pull an image from a container registry to every machine that runs sessions. Returns the result of each
        machine."""
        body = _encoded({"reference": reference, "name": name})
        return await self._call("POST", "/v1/nodes/pull", PulledImages, body=body, seconds=seconds)

    async def drain_node(self, name: str) -> tuple[NodeStats, ...]:
        """Start no new sessions on a node, until `resume_node` is called. Returns all nodes."""
        return (await self._call("POST", _path("nodes", name, "drain"), NodeList, safe=True)).nodes

    async def resume_node(self, name: str) -> tuple[NodeStats, ...]:
        return (await self._call("POST", _path("nodes", name, "resume"), NodeList, safe=True)).nodes

    async def add_engine(self, engine: EngineSpec | Mapping[str, Any]) -> EngineStatus:
        return await self._call("POST", "/v1/engines", EngineStatus, body=_encoded(engine))

    async def drain_engine(self, name: str) -> tuple[EngineStatus, ...]:
        return (await self._call("POST", _path("engines", name, "drain"), EngineList, safe=True)).engines

    async def remove_engine(self, name: str) -> tuple[EngineStatus, ...]:
        return (await self._call("DELETE", _path("engines", name), EngineList)).engines

    async def tokens(self) -> tuple[TokenView, ...]:
        return (await self._call("GET", "/v1/tokens", TokenList)).tokens

    async def create_token(
        self,
        name: str,
        role: Role,
        *,
        tenant: str | None = None,
        max_queued: int | None = None,
        expires_days: float | None = None,
    ) -> NewToken:
        """Create a token. Its text is only in this reply. Tokens of the same `tenant` see each other's groups. By
        default, the tenant has the token's name."""
        body = {"name": name, "role": role, "tenant": tenant, "max_queued": max_queued, "expires_days": expires_days}
        return await self._call("POST", "/v1/tokens", NewToken, body=_encoded(body))

    async def revoke_token(self, name: str) -> TokenView:
        return await self._call("DELETE", _path("tokens", name), TokenView)

    async def policy(self) -> PolicyStatus:
        return await self._call("GET", "/v1/policy", PolicyStatus)

    async def pause_policy(self, mode: PolicyPause = "finish") -> PolicyStatus:
        """Pause the policy. Returns once all engines have stopped generating. This call has no time limit."""
        return await self._call("POST", "/v1/policy/pause", PolicyStatus, body=_encoded({"mode": mode}), seconds=None)

    async def resume_policy(self, version: int | None = None, *, go_back: bool = False) -> PolicyStatus:
        """Resume generation. If the engines' weights have changed, `version` is the new version. `go_back` allows a
        version lower than the policy's, to undo a wrong version."""
        body = _encoded({"version": version, "go_back": go_back})
        return await self._call("POST", "/v1/policy/resume", PolicyStatus, body=body, seconds=None)

    async def update_policy(
        self,
        version: int,
        *,
        mode: PolicyPause = "finish",
        weights: str | None = None,
        cancel_older_than: int | None = None,
        go_back: bool = False,
    ) -> PolicyStatus:
        """Pause the policy, make the engines load `weights` (a file or folder) if given, set the version, and resume
        the policy. Returns once the engines generate again. This call has no time limit. For `go_back`, see
        `resume_policy`."""
        asked = {"mode": mode, "weights": weights, "cancel_older_than": cancel_older_than, "go_back": go_back}
        body = _encoded({"version": version, **asked})
        return await self._call("POST", "/v1/policy", PolicyStatus, body=body, seconds=None)

    async def _with_samples(self, path: str, shape: type[T], query: Query) -> tuple[T, list[Sample]]:
        """Fetch a reply with samples. Returns two values: the reply without samples, and the samples."""
        reply = await self._fetch("GET", path, query=query, accept=MEDIA_TYPE)
        if reply.media_type != MEDIA_TYPE:
            raise ServiceUnusable(
                f"the service at {self._shown} sent samples as {reply.media_type}, not as {MEDIA_TYPE}",
                hint="the service may be older than this client: compare `outrider --version` on both machines",
            )
        decoded = decode(reply.data)
        return self._read(decoded.reply, shape), decoded.samples

    async def _call(
        self,
        method: str,
        path: str,
        shape: type[T],
        *,
        query: Query | None = None,
        body: bytes | None = None,
        seconds: float | None = TOTAL_SECONDS,
        safe: bool = False,
    ) -> T:
        """Send a request, and decode its reply. `safe` is True if the request may be repeated. A GET may always be
        repeated."""
        reply = await self._fetch(method, path, query=query, body=body, seconds=seconds, safe=safe)
        return self._read(reply.data, shape)

    def _read(self, data: bytes, shape: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=shape)
        except UNREADABLE as error:
            raise ServiceUnusable(
                f"the reply from {self._shown} cannot be read: {error}",
                hint="another program may listen at this address, or the service is of another version",
            ) from error

    async def _fetch(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        seconds: float | None = TOTAL_SECONDS,
        accept: str | None = None,
        safe: bool = False,
    ) -> _Reply:
        once = partial(self._fetch_once, method, path, query=query, body=body, seconds=seconds, accept=accept)
        if self._patience and self._reached and (safe or method == "GET"):
            return await patiently(once, self._patience)
        return await once()

    async def _fetch_once(
        self,
        method: str,
        path: str,
        *,
        query: Query | None,
        body: bytes | None,
        seconds: float | None,
        accept: str | None,
    ) -> _Reply:
        async with self._place():  # the wait for the place of another request is not part of `seconds`
            limit = asyncio.timeout(seconds)
            try:
                target = _with_query(path, query or {})
                async with limit, self._reply(method, target, body, accept=accept) as reply:
                    data = _unpacked(await reply.whole(), reply)
                    if reply.status >= 300:
                        raise _refusal(data, reply)
                    self._reached = True
                    return _Reply(data, _media_type(reply))
            except OSError as error:  # TimeoutError is an OSError
                if limit.expired():
                    raise ServiceError(
                        f"no complete reply from the service at {self._shown} within {seconds:g} s",
                        hint="the service or the network is very busy, or the service stands still",
                    ) from error
                raise self._unreachable(error) from error

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait until fewer than MAX_CONNECTIONS requests are under way, and count as one of them during the block."""
        if self._connections is None:
            raise _not_open()
        async with self._places:
            yield

    @asynccontextmanager
    async def _reply(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        seconds: float | None = None,
        accept: str | None = None,
    ) -> AsyncIterator[Response]:
        """Send a request, and yield the reply once its status and headers have arrived. The caller holds a `_place`.
        Raises OSError if the service cannot be reached. Raises TimeoutError, which is an OSError, if the headers do not
        arrive within `seconds`."""
        if self._connections is None:
            raise _not_open()
        sent = () if body is None else (body,)
        headers = {} if body is None else {"Content-Type": "application/json", **_trace_context()}
        if accept is not None:
            # The service does not compress its replies, but a proxy in front of the service may.
            headers |= {"Accept": accept, "Accept-Encoding": "gzip"}
        async with asyncio.timeout(seconds):
            reply = await self._connections.request(method, target, sent, headers, repeatable=method != "POST")
        try:
            yield reply
        finally:
            reply.close()

    def _unreachable(self, error: OSError) -> ServiceError:
        if self.url.startswith("https:"):
            import ssl  # imported here, because some programs that import this module cannot load OpenSSL

            if isinstance(error, ssl.SSLCertVerificationError):
                return ServiceUnusable(
                    f"the service at {self._shown} cannot be trusted: {error}",
                    hint="name the certificate's authority with --ca or OUTRIDER_CA; "
                    "use a host name in the certificate",
                )
            if isinstance(error, ssl.SSLError):
                return ServiceError(
                    f"no TLS connection to the service at {self._shown}: {error}",
                    hint="a service without a certificate has an address that begins with http://",
                )
        # The error for an unknown host name has a negative number, for which `os.strerror` has no text.
        number = error.errno or 0
        known = os.strerror(number) if number > 0 else error.strerror
        reason = known or str(error) or type(error).__name__
        address = urlsplit(self.url)
        if address.port is None and number >= 0:  # for an unknown host name, no port was tried
            tried, usual = 443 if address.scheme == "https" else 80, urlsplit(DEFAULT_URL).port
            return ServiceError(
                f"cannot reach the service at {self._shown}: {reason}; the address has no port, so port {tried} was"
                " tried",
                hint=f"a service listens on port {usual} unless its settings name another: name the port with --url or"
                f" OUTRIDER_URL, such as {address.scheme}://{address.netloc.rpartition('@')[2]}:{usual}",
            )
        return ServiceError(
            f"cannot reach the service at {self._shown}: {reason}",
            hint="start one with `outrider serve`, or name its address with --url",
        )


def _media_type(reply: Response) -> str:
    """Return the media type of a reply without its parameters, or an empty text if the reply names none."""
    return (reply.header(b"content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()


async def _lines(reply: Response) -> AsyncIterator[bytes]:
    """Yield the complete lines of a stream of events. Raises TimeoutError after SILENCE seconds without a byte."""
    rest = b""
    while True:
        async with asyncio.timeout(SILENCE):
            chunk = await reply.arrived()
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def patiently(
    call: Callable[[], Awaitable[T]],
    patience: float = PATIENCE,
    *,
    unreachable: bool = True,
    limits: RetryLimits = LIMITS,
) -> T:
    """Call the service, and retry for up to `patience` seconds while the service is busy or cannot be reached. If
    `unreachable` is False, retry only while the service is busy. If `unreachable` is True, `call` must be safe to
    repeat: a read, or a submission with an idempotency key.

    The duration of the calls counts, too: if a submission itself takes `patience` seconds, it is not repeated. Errors
    that a retry cannot change, such as ServiceUnusable, are raised at once. A warning with the reason is logged if the
    retries take long (`RetryLimits`).
    """
    clock = asyncio.get_running_loop().time
    started = clock()
    give_up_at = started + patience
    tries = 0
    reported = False
    while True:
        try:
            result = await call()
        except ServiceError as error:
            failed = error
        else:
            if reported:
                log.warning("the service replies again, after %.0f s", clock() - started)
            return result
        now = clock()
        if isinstance(failed, Busy):
            wait = failed.retry_after * random.uniform(1.0, SPREAD)
            if now + wait > give_up_at:
                raise failed
        else:
            wait = limits.waits.wait(tries)
            tries += 1
            if not unreachable or not failed.retryable or now >= give_up_at:
                raise failed
        if isinstance(failed, Busy) and patience == math.inf:
            # no warning, because a caller with infinite patience expects to wait
            log.info("the service is asked again in %.0f s: %s", wait, failed.message)
        elif now + wait - started >= limits.report_after and _Reports.due(limits.report_every):
            reported = True
            log.warning(
                "retrying for %.0f s now, and for up to %.0f s more: %s",
                now - started,
                give_up_at - now,
                failed.message,
            )
        await asyncio.sleep(wait)


class _Reports:
    """Limits the warnings about retries in each event loop, even if hundreds of calls are retried at once."""

    _newest: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, float]] = WeakKeyDictionary()

    @classmethod
    def due(cls, every: float) -> bool:
        """Return True if a warning may be logged now, because the previous warning is at least `every` seconds old. The
        caller must then log a warning."""
        loop = asyncio.get_running_loop()
        newest = cls._newest.get(loop)
        if newest is not None and loop.time() - newest < every:
            return False
        cls._newest[loop] = loop.time()
        return True


async def check_known(group: Callable[[str], Awaitable[GroupView]], group_id: str) -> GroupView:
    """Return a group that the service has accepted. Raises ServiceError if the service has lost the group.

    Call this function if a group's result does not arrive: the service may have lost the group, and then no result will
    come. `group` is the method `AsyncClient.group`."""
    try:
        return await patiently(lambda: group(group_id))
    except NotFound as error:
        raise ServiceError(
            f"the service does not know group {group_id} any more",
            hint="the service was started without its old data: restore its data folder, or submit the group again",
        ) from error


class ExternalSession:
    """A session whose agent runs outside the service. The program that runs the agent uses this object.

    base_url, key: the agent's base URL (without `/v1`) and API key.
    model: the name of the agent's model.
    instruction: the task's instruction.
    variables: environment variables with these values, for the agent programs of all vendors.
    """

    def __init__(self, client: AsyncClient, opened: SessionEndpoint) -> None:
        self._client = client
        self.opened = opened
        self.id, self.group_id = opened.session.id, opened.session.group_id
        self.base_url, self.key, self.model = opened.base_url, opened.key, opened.model
        self.instruction, self.variables = opened.instruction, opened.variables
        self.completed = False
        """True once a report was accepted."""
        self.failed = False
        """True once `fail` was called."""

    async def complete(self, **report: Any) -> SessionView:
        """Complete the session. `report` has the fields of a `ReportSpec`, such as `reward`, `answer` or `error`.
        Retries while the service cannot be reached, because a report may be repeated."""
        done = await patiently(lambda: self._client.complete_session(self.id, report))
        self.completed = True
        return done

    async def fail(self, error: BaseException) -> None:
        """Report an error, unless the session is completed. If the report cannot be sent, the failure is ignored,
        because the caller is about to raise `error`. A session without a report ends with an error after its
        `idle_seconds`."""
        self.failed = True
        if not self.completed:
            with suppress(OutriderError):
                await self.complete(error=storable(f"{type(error).__name__}: {error}")[:MAX_TEXT])

    async def reset(self) -> None:
        """Drop the turns of the session, so that the agent can start over."""
        await self._client.reset_session(self.id)


class BlockingExternalSession:
    """An `ExternalSession` for code that does not await."""

    def __init__(self, client: Client, session: ExternalSession) -> None:
        self._client = client
        self._session = session
        self.opened = session.opened
        self.id, self.group_id = session.id, session.group_id
        self.base_url, self.key, self.model = session.base_url, session.key, session.model
        self.instruction, self.variables = session.instruction, session.variables

    def complete(self, **report: Any) -> SessionView:
        """See `ExternalSession.complete`."""
        return self._client.run(self._session.complete(**report))

    def reset(self) -> None:
        """See `ExternalSession.reset`."""
        self._client.run(self._session.reset())


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a method of `Client` that calls a method of `AsyncClient` and waits for the result. Type checkers and
    `help()` show the same signature and docstring for both."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **named: P.kwargs) -> T:
        return self.run(method(self.asynchronous, *args, **named))

    return call


def _blocking_iterator(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        items = method(self.asynchronous, *args, **named)

        async def next_item() -> T:
            return await anext(items)

        while True:
            try:
                item = self.run(next_item())
            except StopAsyncIteration:
                return
            yield item

    return call


class Client:
    """`AsyncClient` for code that does not await: the same methods with the same arguments and replies.

    An open client (`with Client(url) as client`) runs an AsyncClient, `asynchronous`, on an event loop in a separate
    thread. So a Client also works in a notebook, whose own thread already runs an event loop. With `run` and `open`,
    other asynchronous code, such as a `DynamicSampler`, can use the same connections.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str | None = None,
        ca: str | None = None,
        patience: float = RESTART_SECONDS,
    ) -> None:
        self.asynchronous = AsyncClient(url, token=token, ca=ca, patience=patience)
        self._arguments: Mapping[str, Any] = {"url": url, "token": token, "ca": ca}
        self._loop: LoopThread | None = None

    def __enter__(self) -> Self:
        self._loop = LoopThread("outrider client").__enter__()
        self.run(self.asynchronous.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.asynchronous.__aexit__(None, None, None))
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(None, None, None)

    def impatient(self) -> Client:
        """Return a new client of the same service that sends each call once. The caller must open it."""
        return Client(**self._arguments, patience=0)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's event loop, and wait for its result."""
        if self._loop is None:
            work.close()
            raise _not_open()
        return self._loop.run(work)

    def open(self, manager: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
        """Enter an asynchronous context manager on the client's event loop: `with client.open(sampler) as sampler`."""
        if self._loop is None:
            raise _not_open()
        return self._loop.open(manager)

    @contextmanager
    def external_session(
        self, session: SessionSpec | Mapping[str, Any] | None = None
    ) -> Iterator[BlockingExternalSession]:
        """See `AsyncClient.external_session`."""
        with self.open(self.asynchronous.external_session(session)) as opened:
            try:
                yield BlockingExternalSession(self, opened)
            except BaseException as error:  # `open` does not pass the block's error to the session
                self.run(opened.fail(error))
                raise

    submit = _blocking(AsyncClient.submit)
    regrade = _blocking(AsyncClient.regrade)
    group = _blocking(AsyncClient.group)
    groups = _blocking(AsyncClient.groups)
    group_page = _blocking(AsyncClient.group_page)
    cancel = _blocking(AsyncClient.cancel)
    cancel_session = _blocking(AsyncClient.cancel_session)
    results = _blocking(AsyncClient.results)
    follow = _blocking_iterator(AsyncClient.follow)
    ack = _blocking(AsyncClient.ack)
    consumers = _blocking(AsyncClient.consumers)
    remove_consumer = _blocking(AsyncClient.remove_consumer)
    dead_callbacks = _blocking(AsyncClient.dead_callbacks)
    redeliver = _blocking(AsyncClient.redeliver)
    discard_callback = _blocking(AsyncClient.discard_callback)
    gc = _blocking(AsyncClient.gc)
    wait = _blocking(AsyncClient.wait)
    events = _blocking_iterator(AsyncClient.events)
    session = _blocking(AsyncClient.session)
    turns = _blocking(AsyncClient.turns)
    open_session = _blocking(AsyncClient.open_session)
    complete_session = _blocking(AsyncClient.complete_session)
    reset_session = _blocking(AsyncClient.reset_session)
    sessions = _blocking(AsyncClient.sessions)
    diagnosis = _blocking(AsyncClient.diagnosis)
    query = _blocking(AsyncClient.query)
    diff = _blocking(AsyncClient.diff)
    cancel_sessions = _blocking(AsyncClient.cancel_sessions)
    retry_sessions = _blocking(AsyncClient.retry_sessions)
    pauses = _blocking(AsyncClient.pauses)
    pause_queue = _blocking(AsyncClient.pause_queue)
    resume_queue = _blocking(AsyncClient.resume_queue)
    samples = _blocking(AsyncClient.samples)
    chat_rows = _blocking(AsyncClient.chat_rows)
    timeline = _blocking(AsyncClient.timeline)
    artifacts = _blocking(AsyncClient.artifacts)
    artifact = _blocking(AsyncClient.artifact)
    reply_body = _blocking(AsyncClient.reply_body)
    image = _blocking(AsyncClient.image)
    status = _blocking(AsyncClient.status)
    rates = _blocking(AsyncClient.rates)
    metrics = _blocking(AsyncClient.metrics)
    engines = _blocking(AsyncClient.engines)
    nodes = _blocking(AsyncClient.nodes)
    pull_image = _blocking(AsyncClient.pull_image)
    drain_node = _blocking(AsyncClient.drain_node)
    resume_node = _blocking(AsyncClient.resume_node)
    add_engine = _blocking(AsyncClient.add_engine)
    drain_engine = _blocking(AsyncClient.drain_engine)
    remove_engine = _blocking(AsyncClient.remove_engine)
    tokens = _blocking(AsyncClient.tokens)
    create_token = _blocking(AsyncClient.create_token)
    revoke_token = _blocking(AsyncClient.revoke_token)
    policy = _blocking(AsyncClient.policy)
    pause_policy = _blocking(AsyncClient.pause_policy)
    resume_policy = _blocking(AsyncClient.resume_policy)
    update_policy = _blocking(AsyncClient.update_policy)


def _not_open() -> ServiceError:
    hint = "open it first: `with Client(url) as client:` or `async with AsyncClient(url) as client:`"
    return ServiceUnusable("the client is not open", hint=hint)


def _path(*segments: str) -> str:
    """Return a path of the control API. Names and ids are quoted, because they may contain any text. Raises
    InvalidField for an empty name, because without the name, the path would be that of the whole list."""
    if not all(segments):
        raise InvalidField("a name or an id in the request is empty", hint="give the name or the id")
    return "/v1/" + "/".join(quote(segment, safe="") for segment in segments)


def _with_query(path: str, query: Query) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    sent = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
    pairs = urlencode(sent, doseq=True)
    return f"{path}?{pairs}" if pairs else path


def _filter(wanted: Mapping[str, Any], after: str | None, limit: int) -> Query:
    """Return the query parameters for a filtered list of groups or sessions."""
    others = {name: value for name, value in wanted.items() if name not in ("labels", "groups")}
    labels = [f"{name}={value}" for name, value in wanted.get("labels", {}).items()]
    return {**others, "label": labels, "group": list(wanted.get("groups", ())), "after": after, "limit": limit}


def _encoded(body: Spec | Mapping[str, Any]) -> bytes:
    """Encode a request body. Raises InvalidField for values that JSON cannot represent."""
    if not isinstance(body, Mapping):
        return body.model_dump_json().encode()
    try:  # json refuses NaN, where msgspec would write null, which the service reads as a missing value
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(f"the body cannot be written as JSON: {error}") from error


def _unpacked(body: bytes, reply: Response) -> bytes:
    """Return the body of a reply. A body that a proxy has compressed with gzip is decompressed. Raises ServiceUnusable
    for any other compression."""
    coding = (reply.header(b"content-encoding") or b"identity").decode("latin-1").strip().lower()
    if coding == "identity":
        return body
    if coding != "gzip":
        raise ServiceUnusable(f"the reply is compressed with {coding}, but the client accepts only gzip")
    try:
        return zlib.decompress(body, wbits=GZIP)
    except zlib.error as error:
        raise ServiceError(f"the compressed reply cannot be read: {error}") from error


def _refusal(body: bytes, reply: Response) -> OutriderError:
    """Return the error for a reply with a status of 300 or more."""
    if reply.status < 400:
        place = (reply.header(b"location") or b"another address").decode("latin-1")
        return ServiceUnusable(f"the service answered {reply.status}, and refers to {place}", hint="use that address")
    lasting = reply.status < 500 and reply.status not in LATER
    try:
        record = msgspec.json.decode(body, type=ErrorRecord)
    except msgspec.DecodeError:
        shown = body[:200].decode(errors="replace")
        text = f"the service answered {reply.status}: {shown}"
        if not lasting:
            return ServiceError(text)
        hint = "the reply is not from Outrider: see whether the address is right, and what a proxy in front refuses"
        return ServiceUnusable(text, hint=hint)
    error = error_from(record)
    # This client does not know the error's code, so the service has another version. Retry only if the record says that
    # the error is retryable.
    if lasting and type(error) is ServiceError and not record.retryable:
        error = ServiceUnusable(error.message, hint=error.hint, field=error.field, log_tail=error.log_tail)
    if isinstance(error, Busy):
        with suppress(ValueError):  # a proxy may send a date instead of a number
            seconds = float(reply.header(b"retry-after") or b"")
            error = error.replace(retry_after=max(error.retry_after, seconds))
    for name, value in (("field", error.field), ("hint", error.hint)):
        if value is not None:
            # Tracebacks show notes, but not an error's field and hint.
            error.add_note(f"{name}: {value}")
    return error
